"""The engine: makes an optimizer's step a pass over buckets, and knows what each bucket holds.

What a visit does: check what was read, decode the planes, point the optimizer's tensors at them,
let the optimizer's own class step the bucket, copy the new mains into the model's parameters,
encode, and write the footer. No framework is known here; a front end binds shards to parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from gds_optimizer.codecs import get_codec
from gds_optimizer.errors import GdsOptimizerError, StepFailedError
from gds_optimizer.evicted import EvictedTensor, release_, restore_
from gds_optimizer.footer import BucketRecord
from gds_optimizer.merging import Merger
from gds_optimizer.passes import Passes
from gds_optimizer.pipeline import Ranges
from gds_optimizer.plan import MAIN_PLANE, EnginePlan
from gds_optimizer.scalars import Scalars
from gds_optimizer.slots import Slot, SlotPool
from gds_optimizer.step_pass import StepPass, active_buckets, late_parameters
from gds_optimizer.stepper import Stepper
from gds_optimizer.store import Store
from gds_optimizer.telemetry import PassStats


class Engine(Passes):
    """Streams one optimizer's state.

    Args:
        plan: from `plan_engine`.
        pool: slots at least `plan.layout.max_file_bytes` large, and a scratch of at least
            `max_scratch_bytes`; may be shared with other engines.
        store: bucket files for `plan.layout`.
        timeout_s: limit for a single transfer.

    Attributes:
        last_stats: times and bytes of the last pass.
        steps: completed steps.
        handed_out: what `mapped_state` has made tensors of, None where nothing is.
        before_step: called once each, in turn, when the next step begins; threads may append.
    """

    def __init__(self, plan: EnginePlan, pool: SlotPool, store: Store, *, timeout_s: float) -> None:
        super().__init__(plan, pool, store, timeout_s=timeout_s)
        self._stepper = Stepper(plan.optimizer)
        self._merger = Merger(plan, self._buckets.pieces)
        # An optimizer counts steps of an empty parameter too; it just has nothing to stream.
        self._streamed = {piece.binding for pieces in self._buckets.pieces for piece in pieces}
        self._scalars = Scalars(plan, self._streamed)
        # Steps behind the state, for the seeds of rounding; None until the next step counts them.
        self._rounded_steps: int | None = None
        self._index_of = {id(b.main): i for i, b in enumerate(plan.bindings)}
        for binding in plan.bindings:
            if isinstance(binding.main, EvictedTensor):
                binding.main.streaming_engine = weakref.ref(self)
        self.before_step: list[Callable[[], None]] = []

    def adopt_scalars(self) -> None:
        """Take the per-parameter scalars from the optimizer's state, and leave only them there.

        To be called after others have replaced that state (`load_state_dict` does).
        """
        self._scalars.adopt()
        self._rounded_steps = None

    # ------------------------------------------------------------------ the step

    def step(self) -> None:
        """One optimizer step; replaces the optimizer's own `step`.

        Parameters without gradient are left alone, as the optimizer does. Buckets without any
        gradient are not touched.

        Raises:
            StepFailedError: it could not be completed; the cause says where and why.
            ModelChangedError: the model holds halves of mains and was changed without a reload.
        """
        self._begin_step()
        if self._rounded_steps is None:
            # A resumed run must repeat the seeds, and our own count starts anew where a framework
            # resumes from a checkpoint of its own.
            counted = self._scalars.steps_behind()
            self._rounded_steps = self.steps if counted is None else counted
        step_pass = StepPass(
            self._buckets,
            self._scalars,
            self._stepper,
            self.pool,
            self._merger,
            self.steps + 1,
            rounding_step=self._rounded_steps + 1,
        )
        self._check_models(step_pass.active, f"optimizer step {self.steps + 1}")
        with self._pass(f"optimizer step {self.steps + 1}") as clock:
            self._stepper.begin()
            self.pipeline.run(
                self._ordered(step_pass.active),
                reads=lambda index: self._buckets.ranges(index, self._buckets.needed(index)),
                visit=step_pass.visit,
                clock=clock,
                visit_resident=step_pass.visit_resident,
            )
            step_pass.finish()
            # Within the pass: an interrupt behind it must not find a step that was not counted.
            self.steps += 1
            self._rounded_steps += 1

    def _begin_step(self) -> None:
        while self.before_step:
            self.before_step.pop(0)()
        self.check_usable()
        self.check_not_materialized("an optimizer step")

    def prepare_step(self) -> None:
        """Raise what the next step would raise before it changes anything.

        Where several engines are stepped in turn, one that refuses must do so before another has
        stepped: else the step could not be taken again. The step itself looks once more.

        Raises:
            GdsOptimizerError: as `step`; nothing was done.
        """
        self._begin_step()
        self._check_not_loading()
        self._check_slots()
        _, unknown = self._merger.groups()
        if unknown:
            raise late_parameters(unknown)
        self._scalars.check_planes_streamed()
        if not self.halves.buckets:
            return
        with_gradient = {
            index
            for index, binding in enumerate(self.plan.bindings)
            if binding.main.grad is not None
        }
        buckets = active_buckets(self._buckets, with_gradient)
        self._check_models(buckets, f"optimizer step {self.steps + 1}")

    # ------------------------------------------------------------------ writing without a step

    def initialize(self) -> PassStats:
        """Write the first mains (and any state that came along) into the files, pipelined.

        Mains come from the bindings' `initial`, else from the model's parameters, bucket by
        bucket: they never exist as a whole.
        """
        with self._pass("initialisation") as clock:
            self.pipeline.run(
                self._ordered(range(len(self.layout.buckets))),
                reads=lambda index: (),
                visit=self._visit_initial,
                clock=clock,
            )
        for binding in self.plan.bindings:
            binding.initial = None
        return self.last_stats

    def _visit_initial(self, index: int, slot: Slot, from_disk: bool) -> Ranges:
        buckets, record = self._buckets, self._buckets.records[index]
        with self.pool.trace.visit_span("compute", index):
            planes = buckets.planes(self.layout.buckets[index], slot)
            for number, (name, values) in enumerate(planes.items()):
                if name == MAIN_PLANE:
                    buckets.fill_main_from_model(index, values)
                    record.written[number] = True
                for piece in buckets.pieces[index]:
                    source = (self.plan.bindings[piece.binding].initial or {}).get(name)
                    if source is None:
                        continue
                    if not record.written[number]:
                        values.zero_()
                        record.written[number] = True
                    values[piece.bucket_slice].copy_(source[piece.shard_slice])
            record.step = self.steps
            if record.is_blank:
                return ()
        with self.pool.trace.visit_span("write back", index):
            buckets.encode_initial(index, slot, planes)
            if index in buckets.halves.buckets:
                buckets.halves.keep(index, planes[MAIN_PLANE])
            buckets.seal(index, slot, record)
        self.pool.synchronize_compute()
        return buckets.written_ranges(index)

    def take_mains_from_model(self) -> None:
        """From now on the mains are what the model's parameters say: nothing is written now."""
        self.check_usable()
        self.take_files_back()  # tensors handed out before show mains that count no longer
        for index in self._buckets.with_main():
            self._buckets.main_from_model[index] = True
            self._buckets.halves.apart.pop(index, None)

    def write_mains(self, sources: dict[int, torch.Tensor]) -> PassStats:
        """Rewrite the main planes, bucket by bucket, in place.

        Args:
            sources: id(main) -> 1-D tensor of the new values, any dtype and device. Bindings
                that are not named take the model's parameters.
        """

        def fill(index: int, main: torch.Tensor) -> bool:
            self._buckets.fill_main_from_model(index, main)
            for piece in self._buckets.pieces[index]:
                source = sources.get(id(self.plan.bindings[piece.binding].main))
                if source is not None:
                    main[piece.bucket_slice].copy_(source[piece.shard_slice])
                    self._buckets.model_is_behind.add(index)
            return True

        self._rewrite(range(len(self.layout.buckets)), fill, read_main=False)
        return self.last_stats

    def settle(self) -> None:
        """Bring everything into the files, mains that the model still holds too, and wait for it.

        Raises:
            StepFailedError: writing failed, now or behind the last step.
            ModelChangedError: the model holds halves of mains and was changed without a reload.
        """
        self.check_not_materialized("reading or saving the whole state")
        state = self._buckets
        self._check_models(range(len(self.layout.buckets)), "reading or saving the whole state")
        stale = [index for index in state.with_main() if 0 not in state.needed(index)]
        if stale:

            def fill(index: int, main: torch.Tensor) -> bool:
                state.fill_main_from_model(index, main)
                return True

            self._rewrite(stale, fill, read_main=False)
        self.drain()

    def adopt_files(self) -> None:
        """Take what is in the files (all planes, with footers of this step) for the state."""
        self._buckets.adopt(
            [
                BucketRecord(self.steps, [True] * len(bucket.planes))
                for bucket in self.layout.buckets
            ]
        )
        self._scalars.start()
        self._rounded_steps = None
        self.handed_out = None

    # ------------------------------------------------------------------ reading

    def read_state(self) -> dict[str, dict[str, Any]]:
        """Everything this engine keeps, in host memory: for tests and small models.

        Returns:
            Shard name -> {"main": 1-D CPU tensor, plane name: 1-D CPU tensor, scalar name: value}.
            Planes and scalars are missing where the optimizer has none yet.
        """
        state: dict[str, dict[str, Any]] = {}
        for index, binding in enumerate(self.plan.bindings):
            entry: dict[str, Any] = {}
            numel = binding.main.numel()
            if binding.keeps_main:
                entry[MAIN_PLANE] = torch.empty(numel, dtype=binding.main.dtype)
            else:
                entry[MAIN_PLANE] = binding.main.detach().cpu().clone()
            if self._scalars.has_state[index] and index in self._streamed:
                for plane in self.plan.schemas[index].planes:
                    entry[plane.name] = torch.empty(numel, dtype=get_codec(plane.codec).dtype)
            entry.update(self._scalars.of(index))
            state[binding.name] = entry

        def collect(index: int, planes: dict[str, torch.Tensor]) -> None:
            for piece in self._buckets.pieces[index]:
                entry = state[self.plan.bindings[piece.binding].name]
                for name, values in planes.items():
                    if name in entry:
                        entry[name][piece.shard_slice].copy_(values[piece.bucket_slice])

        self.read_planes(collect, range(len(self.layout.buckets)))
        return state

    # ------------------------------------------------------------------ snapshots

    def name_of(self, main: torch.Tensor) -> str:
        """Name of the shard whose main a group holds.

        Raises:
            UnsupportedError: it joined the optimizer after setup.
        """
        index = self._index_of.get(id(main))
        if index is None:
            raise late_parameters(1)
        return self.plan.bindings[index].name

    def is_streamed(self, index: int) -> bool:
        """Whether a binding has elements in buckets."""
        return index in self._streamed

    def is_blank(self, index: int) -> bool:
        """Whether nothing was ever written to a bucket."""
        return self._buckets.records[index].is_blank

    def shard_scalars(self) -> Iterator[tuple[str, bool, dict[str, Any]]]:
        """Name, whether it has state, and the state's scalars, of every shard."""
        for index, binding in enumerate(self.plan.bindings):
            scalars = {
                key: value
                for key, value in self._scalars.of(index).items()
                if not isinstance(value, torch.Tensor) or value.numel() == 1
            }
            yield binding.name, self._scalars.has_state[index], scalars

    def resident_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Values that are in no bucket: shard's name, name of the value, the tensor itself.

        These are mains that stay in the model, and state of parameters that are not streamed.
        """
        for index, binding in enumerate(self.plan.bindings):
            if not binding.keeps_main and binding.main.numel():
                yield binding.name, MAIN_PLANE, binding.main.detach()
            if index in self._streamed:
                continue
            for key, value in self.plan.optimizer.state.get(binding.main, {}).items():
                if isinstance(value, torch.Tensor) and value.numel() != 1:
                    yield binding.name, key, value

    def set_resident(self, shard: str, key: str, values: torch.Tensor) -> None:
        """Set a value that is in no bucket: a main that stays in the model, or unstreamed state."""
        binding = next(each for each in self.plan.bindings if each.name == shard)
        if key == MAIN_PLANE:
            binding.main.detach().copy_(values)
        else:
            self.plan.optimizer.state[binding.main][key] = values.to(binding.main.device)

    def check_restorable(self) -> None:
        """Whether its state may be replaced now, be it torn or not.

        Raises:
            ClosedError, ForkedError, UnsupportedError: it may not.
        """
        self.store.check_owner()
        self._check_slots()
        self.check_not_materialized("restoring")

    def abandon_state(self, why: str) -> None:
        """Give up what is kept: from now on nothing but `restore` and `close` is accepted.

        Args:
            why: what everything else raises, as a StepFailedError.

        Raises:
            ClosedError, ForkedError, UnsupportedError: it cannot be restored now; nothing changed.
        """
        self.check_restorable()
        if self.handed_out is not None:
            self.handed_out.leave()
            self.handed_out = None
        with suppress(GdsOptimizerError):  # a write that failed matters no more
            self.pipeline.forget()
        self.pipeline.unfinished_writes.clear()
        self._buckets.halves.apart.clear()
        self._failure = StepFailedError(why)

    def restore(
        self,
        step: int,
        records: Sequence[BucketRecord],
        shards: dict[str, tuple[bool, dict[str, Any]]],
    ) -> None:
        """Take what is in the files now for the state, as described.

        Args:
            step: completed steps.
            records: for each bucket, what its file holds.
            shards: name -> whether it has state, and its scalars.
        """
        self.steps = step
        self._failure = None
        self.handed_out = None
        self._buckets.model_is_behind.clear()
        self._buckets.adopt(records)
        self._scalars.restore(shards)
        self._rounded_steps = None

    def update_model(self) -> None:
        """Copy every main into the model's parameter, checking every bucket on the way.

        Raises:
            CorruptBucketError: a bucket is not what its footer says.
        """

        def copy(index: int, planes: dict[str, torch.Tensor]) -> None:
            if MAIN_PLANE in planes:
                self._buckets.copy_main_to_model(index, planes[MAIN_PLANE])

        self.pipeline.forget()
        not_blank = [i for i, record in enumerate(self._buckets.records) if not record.is_blank]
        self.read_planes(copy, not_blank, main_only=True)

    @contextmanager
    def materialized(self, mains: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside, the named mains hold real values on their device; changes are written back.

        Takes 4 bytes an element of the named shards, and a slot. Mains that are not ours or that
        stay on the device anyway are left as they are.
        """
        chosen = {
            index: main
            for main in mains
            if (index := self._index_of.get(id(main))) is not None
            and isinstance(main, EvictedTensor)
            and not main._is_present
        }
        buckets = [
            index
            for index, pieces in enumerate(self._buckets.pieces)
            if any(piece.binding in chosen for piece in pieces)
        ]
        values = {
            index: torch.empty(main.numel(), dtype=main.dtype, device=main.device)
            for index, main in chosen.items()
        }

        def collect(index: int, planes: dict[str, torch.Tensor]) -> None:
            for piece in self._buckets.pieces[index]:
                if piece.binding in values:
                    values[piece.binding][piece.shard_slice].copy_(
                        planes[MAIN_PLANE][piece.bucket_slice]
                    )

        def put_back(index: int, main: torch.Tensor) -> bool:
            changed = False
            for piece in self._buckets.pieces[index]:
                if piece.binding not in values:
                    continue
                old = main[piece.bucket_slice]
                new = values[piece.binding][piece.shard_slice]
                if not torch.equal(old.view(torch.int32), new.view(torch.int32)):
                    old.copy_(new)
                    changed = True
                    self._buckets.model_is_behind.add(index)
            return changed

        self.read_planes(collect, buckets, main_only=True)
        halves = self._buckets.halves
        others = halves.sums_of_others(buckets, chosen)
        for index, main in chosen.items():
            restore_(main, values[index])
        self._materialized += 1
        try:
            yield
        finally:
            self._materialized -= 1
            for index, main in chosen.items():
                # Code may have put another tensor in the place of ours.
                values[index] = main.detach().as_subclass(torch.Tensor)
                release_(main)
            # The halves of what is named are replaced as a whole; those of its neighbours are not.
            halves.check_others(others, chosen)
            # What was changed before an exception stays changed, as it would on the device.
            self._rewrite(buckets, put_back, read_main=True)

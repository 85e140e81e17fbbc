"""The engine: makes an optimizer's step a pass over buckets, and knows what each bucket holds.

What a visit does: check what was read, decode the planes, point the optimizer's tensors at them,
let the optimizer's own class step the bucket, copy the new mains into the model's parameters,
encode, and write the footer. No framework is known here; a front end binds shards to parameters.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from gds_optimizer.codecs import get_codec
from gds_optimizer.errors import (
    ClosedError,
    CorruptBucketError,
    GdsOptimizerError,
    StepFailedError,
    UnsupportedError,
)
from gds_optimizer.evicted import EvictedState, EvictedTensor, release_, restore_
from gds_optimizer.footer import (
    BucketRecord,
    build_footer,
    describe_difference,
    expected_words,
    footer_words,
    replace_plane_checksum,
)
from gds_optimizer.layout import (
    PAGE_BYTES,
    Bucket,
    Layout,
    PlaneSpec,
    Shard,
    SpaceSpec,
    bucket_numel_for,
    plan_layout,
)
from gds_optimizer.pipeline import Pipeline, Ranges
from gds_optimizer.schema import StateSchema, discover_schema
from gds_optimizer.slots import Slot, SlotPool
from gds_optimizer.stepper import Stepper, copy_value
from gds_optimizer.store import Store
from gds_optimizer.telemetry import PassClock, PassStats

logger = logging.getLogger(__name__)

MAIN_PLANE = "main"


@dataclass(slots=True, eq=False)
class Binding:
    """One shard and the tensors that go with it.

    Attributes:
        name: global name of the shard, unique within an engine.
        main: what the optimizer's groups hold: an `EvictedTensor` whose values are kept in a main
            plane, or a 1-D tensor that stays where it is and is stepped in place.
        model: 1-D half-precision part of the model's parameter: the main's first value comes from
            it and every new one goes into it. None for a main that stays.
        initial: state to start from instead of `model` and nothing: plane name -> 1-D tensor.
    """

    name: str
    main: torch.Tensor
    model: torch.Tensor | None = None
    initial: dict[str, torch.Tensor] | None = None

    @property
    def keeps_main(self) -> bool:
        return isinstance(self.main, EvictedTensor)


@dataclass(slots=True, eq=False)
class EnginePlan:
    """What an engine will keep, before anything is allocated."""

    optimizer: torch.optim.Optimizer
    bindings: list[Binding]
    schemas: list[StateSchema]
    layout: Layout
    shard_bindings: list[list[int]]
    """Binding index by space and shard; bindings without planes are in no space."""


@torch.no_grad()
def plan_engine(
    optimizer: torch.optim.Optimizer, bindings: Sequence[Binding], bucket_size_bytes: int
) -> EnginePlan:
    """Ask the optimizer what it keeps and lay it out.

    Raises:
        UnsupportedError: the optimizer cannot be streamed, or holds a parameter without binding.
        ConfigError: the bucket size is too small.
    """
    group_of = {
        id(main): index
        for index, group in enumerate(optimizer.param_groups)
        for main in group["params"]
    }
    known: dict[tuple[int, torch.dtype, torch.device], StateSchema] = {}
    schemas = []
    for binding in bindings:
        key = (group_of[id(binding.main)], binding.main.dtype, binding.main.device)
        if key not in known:
            known[key] = discover_schema(optimizer, *key)
        schemas.append(known[key])

    members: dict[tuple[PlaneSpec, ...], list[int]] = {}
    for index, (binding, schema) in enumerate(zip(bindings, schemas, strict=True)):
        planes = schema.planes
        if binding.keeps_main:
            planes = (PlaneSpec(name=MAIN_PLANE), *planes)
        if planes:
            members.setdefault(planes, []).append(index)
    specs = [
        SpaceSpec(
            planes=planes,
            shards=tuple(Shard(name=bindings[i].name, numel=bindings[i].main.numel()) for i in own),
        )
        for planes, own in members.items()
    ]
    layout = plan_layout(specs, bucket_numel=bucket_numel_for(bucket_size_bytes, specs))
    return EnginePlan(optimizer, list(bindings), schemas, layout, list(members.values()))


@dataclass(slots=True, eq=False)
class _BoundPiece:
    """A piece, its binding, and the tensor that the optimizer steps for it.

    The tensor lives as long as the engine: optimizers may key their own caches by it.
    """

    binding: int
    shard_slice: slice
    bucket_slice: slice
    tensor: torch.Tensor


class HandedOutState(Protocol):
    """State that somebody outside holds as tensors over the files (see `mapped_state`)."""

    writable: bool

    def leave(self) -> None:
        """Make the files fit for direct I/O again."""


class Engine:
    """Streams one optimizer's state.

    Args:
        plan: from `plan_engine`.
        pool: slots at least `plan.layout.max_file_bytes` large; may be shared with other engines.
        store: bucket files for `plan.layout`.
        timeout_s: limit for a single transfer.

    Attributes:
        last_stats: times and bytes of the last pass.
        steps: completed steps.
    """

    def __init__(self, plan: EnginePlan, pool: SlotPool, store: Store, *, timeout_s: float) -> None:
        self.plan = plan
        self.layout = plan.layout
        self.pool = pool
        self.store = store
        self.pipeline = Pipeline(pool, store, timeout_s=timeout_s)
        self.steps = 0
        self.last_stats = PassStats(str(pool.backend.io_path))
        self._stepper = Stepper(plan.optimizer)
        self._failure: StepFailedError | None = None
        self._forward = True
        self._records = [
            BucketRecord(0, [False] * len(bucket.planes)) for bucket in self.layout.buckets
        ]
        # Buckets whose main plane is out of date: the model's parameters hold the values.
        self._main_from_model = [False] * len(self.layout.buckets)
        # Buckets whose mains were changed between steps: the next step gives them to the model.
        self._model_is_behind: set[int] = set()
        self._has_state = [False] * len(plan.bindings)
        self._materialized = 0  # blocks of `materialized` that are open
        self._pieces = [self._bind(bucket) for bucket in self.layout.buckets]
        # An optimizer counts steps of an empty parameter too; it just has nothing to stream.
        self._streamed = {piece.binding for pieces in self._pieces for piece in pieces}
        self._index_of = {id(b.main): i for i, b in enumerate(plan.bindings)}
        for binding in plan.bindings:
            if isinstance(binding.main, EvictedTensor):
                binding.main.streaming_engine = weakref.ref(self)
        self.adopt_scalars()
        self.handed_out: HandedOutState | None = None
        self._finalizer = weakref.finalize(self, _close, self.pipeline, store)

    def _bind(self, bucket: Bucket) -> list[_BoundPiece]:
        members = self.plan.shard_bindings[bucket.space]
        bound = []
        for piece in bucket.pieces:
            index = members[piece.shard]
            main = self.plan.bindings[index].main
            bound.append(
                _BoundPiece(
                    index,
                    slice(piece.shard_offset, piece.shard_offset + piece.numel),
                    slice(piece.bucket_offset, piece.bucket_offset + piece.numel),
                    torch.empty(0, dtype=main.dtype, device=main.device),
                )
            )
        return bound

    # ------------------------------------------------------------------ scalars

    def adopt_scalars(self) -> None:
        """Take the per-parameter scalars from the optimizer's state, and leave only them there.

        To be called after others have replaced that state (`load_state_dict` does).
        """
        state = self.plan.optimizer.state
        for index, (binding, schema) in enumerate(
            zip(self.plan.bindings, self.plan.schemas, strict=True)
        ):
            if index not in self._streamed:
                continue
            planes = tuple(plane.name for plane in schema.planes)
            held = state.get(binding.main)
            if held is not None:
                self._has_state[index] = self._has_state[index] or bool(held)
                scalars = {key: value for key, value in held.items() if key not in planes}
                state[binding.main] = EvictedState(scalars, binding.name, planes)

    def _scalars(self, index: int) -> dict[str, Any]:
        held = self.plan.optimizer.state.get(self.plan.bindings[index].main, {})
        return {key: copy_value(value) for key, value in held.items()}

    def _commit_scalars(self, scalars: dict[int, dict[str, Any]]) -> None:
        state = self.plan.optimizer.state
        for index, values in scalars.items():
            binding, schema = self.plan.bindings[index], self.plan.schemas[index]
            self._has_state[index] = True
            if index in self._streamed:
                planes = tuple(plane.name for plane in schema.planes)
                state[binding.main] = EvictedState(values, binding.name, planes)

    # ------------------------------------------------------------------ use and failure

    def check_usable(self) -> None:
        """Refuse use when closed, forked or failed.

        Raises:
            ClosedError, ForkedError, StepFailedError
        """
        self.store.check_owner()
        if self._failure is not None:
            raise self._failure

    def _check_slots(self) -> None:
        if self.layout.buckets and not self.pool.slots:
            raise ClosedError(
                f"the slots of the optimizer state in {self.store.directories[0]} were given back "
                "to the device: take them again (`restore_from_cpu`) before its next use"
            )

    def _fail(self, what: str, error: BaseException) -> NoReturn:
        """Mark the store as torn and raise what callers get to see."""
        torn = sorted(self.pipeline.unfinished_writes)
        done = [
            index
            for index, record in enumerate(self._records)
            if record.step > self.steps and index not in torn
        ]
        held = f"{len(done)} of {len(self._records)} buckets hold step {self.steps + 1}"
        if torn:
            held += f", the last write of {_numbered(torn)} did not complete"
        self._failure = StepFailedError(
            f"{what} failed: {error}. {held}, the others step {self.steps} or earlier. The state "
            f"in {', '.join(map(str, self.store.directories))} is not usable: close the optimizer "
            "and resume from the last checkpoint"
        )
        if not isinstance(error, Exception):
            raise error  # KeyboardInterrupt and the like stay what they are
        raise self._failure from error

    @contextmanager
    def _pass(self, what: str) -> Iterator[PassClock]:
        """A pass over buckets that writes: statistics, the compute stream, failure."""
        self.check_usable()
        self.take_files_back()
        self._check_slots()
        clock = PassClock(str(self.pool.backend.io_path))
        try:
            with torch.no_grad(), self.pool.computing():
                yield clock
        except BaseException as error:  # noqa: BLE001 - `_fail` raises it, or what it caused
            self._fail(what, error)
        self.last_stats = clock.finish()

    def take_files_back(self) -> None:
        """End what `mapped_state` handed out; direct I/O and mapped pages must not meet.

        Raises:
            StepFailedError: it was handed out for writing and never committed.
        """
        if self.handed_out is None:
            return
        if self.handed_out.writable:
            raise StepFailedError(
                "a checkpoint was being loaded into the optimizer's state and did not finish: "
                "load it again, or close the optimizer"
            )
        self.handed_out.leave()
        self.handed_out = None

    def _ordered(self, buckets: Iterable[int]) -> list[int]:
        """Forwards and backwards in turn: a pass starts with what the last one left in slots."""
        ordered = sorted(buckets, reverse=not self._forward)
        self._forward = not self._forward
        return ordered

    # ------------------------------------------------------------------ planes

    def _planes(self, bucket: Bucket, slot: Slot) -> dict[str, torch.Tensor]:
        return {
            plane.name: get_codec(plane.codec).decode(
                slot.buffer[plane.offset : plane.offset + plane.nbytes], bucket.numel
            )
            for plane in bucket.planes
        }

    def _needed(self, index: int) -> list[int]:
        """Planes of a bucket that a step must read."""
        record, bucket = self._records[index], self.layout.buckets[index]
        return [
            number
            for number, plane in enumerate(bucket.planes)
            if record.written[number]
            and not (plane.name == MAIN_PLANE and self._main_from_model[index])
        ]

    def _ranges(self, index: int, planes: Sequence[int]) -> Ranges:
        """Planes and the footer as byte ranges, neighbours merged; nothing for a blank bucket."""
        bucket = self.layout.buckets[index]
        if self._records[index].is_blank:
            return ()
        spans = [(bucket.planes[n].offset, bucket.planes[n].nbytes) for n in planes]
        spans.append((bucket.footer_offset, PAGE_BYTES))
        merged: list[tuple[int, int]] = []
        for offset, nbytes in spans:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
            else:
                merged.append((offset, nbytes))
        return merged

    def _expect(self, index: int, slot: Slot, planes: Sequence[int]) -> Callable[[], None]:
        """Start comparing a bucket that was read with its footer; call the result to know.

        The comparison is queued on the device. Its outcome is asked for when the visit waits for
        the device anyway.
        """
        record, bucket = self._records[index], self.layout.buckets[index]
        if record.is_blank:
            return lambda: None
        expected = expected_words(slot.buffer, bucket, self.layout, record, planes)
        found = footer_words(slot.buffer, bucket).clone()
        differs = (expected != found).any()

        def check() -> None:
            if differs.item():
                raise CorruptBucketError(
                    f"bucket {index} in {self.store.paths[index]} is not what was written: "
                    f"{describe_difference(expected, found, bucket)}"
                )

        return check

    def _fill_main_from_model(self, index: int, main: torch.Tensor) -> None:
        main.zero_()
        for piece in self._pieces[index]:
            model = self.plan.bindings[piece.binding].model
            if model is not None:
                main[piece.bucket_slice].copy_(model[piece.shard_slice])

    # ------------------------------------------------------------------ the step

    def step(self) -> None:
        """One optimizer step; replaces the optimizer's own `step`.

        Parameters without gradient are left alone, as the optimizer does. Buckets without any
        gradient are not touched.

        Raises:
            StepFailedError: it could not be completed; the cause says where and why.
        """
        self.check_usable()
        groups = {
            id(main): index
            for index, group in enumerate(self.plan.optimizer.param_groups)
            for main in group["params"]
        }
        unknown = groups.keys() - self._index_of.keys()
        if unknown:
            raise UnsupportedError(
                f"{len(unknown)} parameters were added to the optimizer after its state was "
                "set up for streaming: build the optimizer anew with all parameters"
            )
        if self._materialized:
            raise UnsupportedError(
                "an optimizer step inside `materialized` would be undone when the block writes its "
                "values back: step outside of it"
            )
        grads = {
            index: grad
            for index, binding in enumerate(self.plan.bindings)
            if id(binding.main) in groups and (grad := binding.main.grad) is not None
        }
        active = [
            index
            for index, pieces in enumerate(self._pieces)
            if index in self._model_is_behind or any(piece.binding in grads for piece in pieces)
        ]
        scalars: dict[int, dict[str, Any]] = {}
        with self._pass(f"optimizer step {self.steps + 1}") as clock:
            self._stepper.begin()
            self.pipeline.run(
                self._ordered(active),
                reads=lambda index: self._ranges(index, self._needed(index)),
                visit=lambda index, slot, from_disk: self._visit(
                    index, slot, from_disk, groups, grads, scalars
                ),
                clock=clock,
            )
            self._step_rest(groups, grads, scalars)
            self._stepper.commit()
            self._commit_scalars(scalars)
        self.steps += 1

    def _visit(
        self,
        index: int,
        slot: Slot,
        from_disk: bool,
        groups: dict[int, int],
        grads: dict[int, torch.Tensor],
        scalars: dict[int, dict[str, Any]],
    ) -> Ranges:
        bucket, record = self.layout.buckets[index], self._records[index]
        needed = self._needed(index)
        check = self._expect(index, slot, needed) if from_disk else None
        if check is not None and not slot.buffer.is_cuda:
            check()  # nothing to overlap with: refuse bad bytes before anything is computed
        planes = self._planes(bucket, slot)
        for number, (name, values) in enumerate(planes.items()):
            if number in needed:
                continue
            if name == MAIN_PLANE:
                self._fill_main_from_model(index, values)
            else:
                values.zero_()

        active = [piece for piece in self._pieces[index] if piece.binding in grads]
        steps = []
        for piece in active:
            binding = self.plan.bindings[piece.binding]
            main = planes[MAIN_PLANE] if binding.keeps_main else binding.main.detach()
            where = piece.bucket_slice if binding.keeps_main else piece.shard_slice
            piece.tensor.data = main[where]
            piece.tensor.grad = grads[piece.binding][piece.shard_slice]
            state = self._state_for(piece, planes)
            steps.append((groups[id(binding.main)], piece.tensor, state))
        results = self._stepper.run(steps) if steps else []
        for piece, state in zip(active, results, strict=True):
            piece.tensor.grad = None
            self._store_state(piece, state, planes, scalars)
        for piece in self._pieces[index]:
            model = self.plan.bindings[piece.binding].model
            if model is not None:
                model[piece.shard_slice].copy_(planes[MAIN_PLANE][piece.bucket_slice])

        written = BucketRecord(self.steps + 1, [True] * len(bucket.planes))
        footer_words(slot.buffer, bucket).copy_(
            build_footer(slot.buffer, bucket, self.layout, written)
        )
        self.pool.synchronize_compute()
        if check is not None:
            check()
        record.step, record.written = written.step, written.written
        self._main_from_model[index] = False
        self._model_is_behind.discard(index)
        return [(0, bucket.file_bytes)]

    def _state_for(self, piece: _BoundPiece, planes: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The optimizer's state for a piece: views of the planes, and the parameter's scalars."""
        schema = self.plan.schemas[piece.binding]
        if self._has_state[piece.binding]:
            scalars = self._scalars(piece.binding)
        elif schema.initial is not None:
            scalars = {key: copy_value(value) for key, value in schema.initial.items()}
        else:
            return {}
        return {
            **scalars,
            **{plane.name: planes[plane.name][piece.bucket_slice] for plane in schema.planes},
        }

    def _store_state(
        self,
        piece: _BoundPiece,
        state: dict[str, Any],
        planes: dict[str, torch.Tensor],
        scalars: dict[int, dict[str, Any]],
    ) -> None:
        """Put what the optimizer left where it belongs: planes into the slot, scalars aside."""
        names = {plane.name for plane in self.plan.schemas[piece.binding].planes}
        kept: dict[str, Any] = {}
        for key, value in state.items():
            if key in names:
                view = planes[key][piece.bucket_slice]
                if value.data_ptr() != view.data_ptr():  # created or replaced, not updated
                    view.copy_(value)
            elif isinstance(value, torch.Tensor) and value.numel() > 1:
                raise UnsupportedError(
                    f"{type(self.plan.optimizer).__name__} began to keep {key!r} for "
                    f"{self.plan.bindings[piece.binding].name} after its state was laid out: set "
                    "the option that turns it on before the optimizer is set up for streaming"
                )
            else:
                kept[key] = value
        if state:
            scalars.setdefault(piece.binding, kept)

    def _step_rest(
        self,
        groups: dict[int, int],
        grads: dict[int, torch.Tensor],
        scalars: dict[int, dict[str, Any]],
    ) -> None:
        """What no bucket covers: parameters that keep no planes, and groups without a gradient.

        Some optimizers count a step for every group that has parameters, with gradients or not.
        """
        visited = {
            groups[id(binding.main)]
            for index, binding in enumerate(self.plan.bindings)
            if index in grads and index in self._streamed
        }
        rest = []
        for index, binding in enumerate(self.plan.bindings):
            group = groups.get(id(binding.main))
            if group is None:
                continue
            if index not in self._streamed:
                tensor = _in_place(binding.main)
                tensor.grad = None if index not in grads else grads[index][:]
                state = self.plan.optimizer.state.get(binding.main, {})
                rest.append((index, (group, tensor, dict(state))))
            elif group not in visited:
                idle = torch.empty(0, dtype=binding.main.dtype, device=binding.main.device)
                rest.append((index, (group, idle, {})))
                visited.add(group)
        if not rest:
            return
        results = self._stepper.run([piece for _, piece in rest])
        for (index, _), state in zip(rest, results, strict=True):
            if index not in self._streamed and state:
                self.plan.optimizer.state[self.plan.bindings[index].main] = state

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
        bucket, record = self.layout.buckets[index], self._records[index]
        planes = self._planes(bucket, slot)
        for number, (name, values) in enumerate(planes.items()):
            if name == MAIN_PLANE:
                self._fill_main_from_model(index, values)
                record.written[number] = True
            for piece in self._pieces[index]:
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
        footer_words(slot.buffer, bucket).copy_(
            build_footer(slot.buffer, bucket, self.layout, record)
        )
        self.pool.synchronize_compute()
        written = [number for number, is_written in enumerate(record.written) if is_written]
        return self._ranges(index, written)

    def take_mains_from_model(self) -> None:
        """From now on the mains are what the model's parameters say: nothing is written now."""
        self.check_usable()
        self.take_files_back()  # tensors handed out before show mains that count no longer
        for index, bucket in enumerate(self.layout.buckets):
            if any(plane.name == MAIN_PLANE for plane in bucket.planes):
                self._main_from_model[index] = True

    def write_mains(self, sources: dict[int, torch.Tensor]) -> PassStats:
        """Rewrite the main planes, bucket by bucket, in place.

        Args:
            sources: id(main) -> 1-D tensor of the new values, any dtype and device. Bindings
                that are not named take the model's parameters.
        """

        def fill(index: int, main: torch.Tensor) -> bool:
            self._fill_main_from_model(index, main)
            for piece in self._pieces[index]:
                source = sources.get(id(self.plan.bindings[piece.binding].main))
                if source is not None:
                    main[piece.bucket_slice].copy_(source[piece.shard_slice])
                    self._model_is_behind.add(index)
            return True

        self._rewrite(range(len(self.layout.buckets)), fill, read_main=False)
        return self.last_stats

    def _rewrite(
        self,
        buckets: Iterable[int],
        fill: Callable[[int, torch.Tensor], bool],
        *,
        read_main: bool,
    ) -> None:
        """Change main planes and nothing else; `fill` says whether it changed anything.

        A bucket whose file must stay as it is (a snapshot's) is copied as a whole to its next one.
        """

        def planes_to_read(index: int) -> list[int]:
            frozen = self.store.is_frozen(index)
            return [n for n in self._needed(index) if frozen or (read_main and n == 0)]

        def visit(index: int, slot: Slot, from_disk: bool) -> Ranges:
            bucket, record = self.layout.buckets[index], self._records[index]
            needed = self._needed(index)
            if from_disk:
                self._expect(index, slot, planes_to_read(index))()
            main = self._planes(bucket, slot)[MAIN_PLANE]
            if read_main and 0 not in needed:
                self._fill_main_from_model(index, main)
            if not fill(index, main):
                return ()
            blank = record.is_blank
            record.written[0] = True
            self._main_from_model[index] = False
            if blank:
                footer_words(slot.buffer, bucket).copy_(
                    build_footer(slot.buffer, bucket, self.layout, record)
                )
            else:
                replace_plane_checksum(slot.buffer, bucket, 0)
            self.pool.synchronize_compute()
            written = [n for n, is_written in enumerate(record.written) if is_written]
            return self._ranges(index, written if self.store.is_frozen(index) else [0])

        wanted = [i for i in buckets if self.layout.buckets[i].planes[0].name == MAIN_PLANE]
        with self._pass("rewriting the main parameters") as clock:
            self.pipeline.run(
                self._ordered(wanted),
                reads=lambda index: self._ranges(index, planes_to_read(index)),
                visit=visit,
                clock=clock,
            )
            # The slots hold parts of buckets, which is no good to the next step.
            self.pipeline.forget()

    def settle(self) -> None:
        """Bring everything into the files, mains that the model still holds too, and wait for it.

        Raises:
            StepFailedError: writing failed, now or behind the last step.
        """
        stale = [
            index
            for index, bucket in enumerate(self.layout.buckets)
            if bucket.planes[0].name == MAIN_PLANE and 0 not in self._needed(index)
        ]
        if stale:

            def fill(index: int, main: torch.Tensor) -> bool:
                self._fill_main_from_model(index, main)
                return True

            self._rewrite(stale, fill, read_main=False)
        self.drain()

    def forget_slots(self) -> None:
        """Drop what slots still hold: the files are about to be written by other means."""
        self.pipeline.forget()

    def adopt_files(self) -> None:
        """Take what is in the files (all planes, with footers of this step) for the state."""
        for record in self._records:
            record.step, record.written = self.steps, [True] * len(record.written)
        self._main_from_model = [False] * len(self.layout.buckets)
        for index in self._streamed:
            self._has_state[index] = True
        self.adopt_scalars()
        self.handed_out = None

    # ------------------------------------------------------------------ reading

    def read_planes(
        self, visit: Callable[[int, dict[str, torch.Tensor]], None], buckets: Iterable[int]
    ) -> None:
        """Call `visit(bucket index, planes)` with the current values of each bucket.

        Planes that were never written are zero. The tensors are good during the call only.
        """
        self.check_usable()
        self.take_files_back()
        self._check_slots()

        def read(index: int, slot: Slot, from_disk: bool) -> Ranges:
            needed = self._needed(index)
            if from_disk:
                self._expect(index, slot, needed)()
            planes = self._planes(self.layout.buckets[index], slot)
            for number, (name, values) in enumerate(planes.items()):
                if number not in needed and name == MAIN_PLANE:
                    self._fill_main_from_model(index, values)
                elif number not in needed:
                    values.zero_()
            visit(index, planes)
            self.pool.synchronize_compute()
            return ()

        clock = PassClock(str(self.pool.backend.io_path))
        with torch.no_grad(), self.pool.computing():
            self.pipeline.run(
                self._ordered(buckets),
                reads=lambda index: self._ranges(index, self._needed(index)),
                visit=read,
                clock=clock,
            )

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
            if self._has_state[index] and index in self._streamed:
                for plane in self.plan.schemas[index].planes:
                    entry[plane.name] = torch.empty(numel, dtype=get_codec(plane.codec).dtype)
            entry.update(self._scalars(index))
            state[binding.name] = entry

        def collect(index: int, planes: dict[str, torch.Tensor]) -> None:
            for piece in self._pieces[index]:
                entry = state[self.plan.bindings[piece.binding].name]
                for name, values in planes.items():
                    if name in entry:
                        entry[name][piece.shard_slice].copy_(values[piece.bucket_slice])

        self.read_planes(collect, range(len(self.layout.buckets)))
        return state

    # ------------------------------------------------------------------ snapshots

    def name_of(self, main: torch.Tensor) -> str:
        """Name of the shard whose main a group holds."""
        return self.plan.bindings[self._index_of[id(main)]].name

    def is_streamed(self, index: int) -> bool:
        """Whether a binding has elements in buckets."""
        return index in self._streamed

    @property
    def records(self) -> list[BucketRecord]:
        """What each bucket's file holds."""
        return self._records

    def is_blank(self, index: int) -> bool:
        """Whether nothing was ever written to a bucket."""
        return self._records[index].is_blank

    def is_written(self, index: int, plane: int) -> bool:
        """Whether a bucket's file holds a plane; one that was never written counts as zeros."""
        return self._records[index].written[plane]

    def shard_scalars(self) -> Iterator[tuple[str, bool, dict[str, Any]]]:
        """Name, whether it has state, and the state's scalars, of every shard."""
        for index, binding in enumerate(self.plan.bindings):
            scalars = {
                key: value
                for key, value in self._scalars(index).items()
                if not isinstance(value, torch.Tensor) or value.numel() == 1
            }
            yield binding.name, self._has_state[index], scalars

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
        for own, other in zip(self._records, records, strict=True):
            own.step, own.written = other.step, list(other.written)
        self._main_from_model = [False] * len(self.layout.buckets)
        state = self.plan.optimizer.state
        for index, (binding, schema) in enumerate(
            zip(self.plan.bindings, self.plan.schemas, strict=True)
        ):
            self._has_state[index], scalars = shards[binding.name]
            state.pop(binding.main, None)
            if self._has_state[index] and index in self._streamed:
                planes = tuple(plane.name for plane in schema.planes)
                state[binding.main] = EvictedState(scalars, binding.name, planes)
            elif scalars:
                state[binding.main] = dict(scalars)

    def update_model(self) -> None:
        """Copy every main into the model's parameter, checking every bucket on the way.

        Raises:
            CorruptBucketError: a bucket is not what its footer says.
        """

        def copy(index: int, planes: dict[str, torch.Tensor]) -> None:
            for piece in self._pieces[index]:
                model = self.plan.bindings[piece.binding].model
                if model is not None:
                    model[piece.shard_slice].copy_(planes[MAIN_PLANE][piece.bucket_slice])

        self.pipeline.forget()
        self.read_planes(copy, [i for i, record in enumerate(self._records) if not record.is_blank])

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
            for index, pieces in enumerate(self._pieces)
            if any(piece.binding in chosen for piece in pieces)
        ]
        values = {
            index: torch.empty(main.numel(), dtype=main.dtype, device=main.device)
            for index, main in chosen.items()
        }

        def collect(index: int, planes: dict[str, torch.Tensor]) -> None:
            for piece in self._pieces[index]:
                if piece.binding in values:
                    values[piece.binding][piece.shard_slice].copy_(
                        planes[MAIN_PLANE][piece.bucket_slice]
                    )

        def put_back(index: int, main: torch.Tensor) -> bool:
            changed = False
            for piece in self._pieces[index]:
                if piece.binding not in values:
                    continue
                old = main[piece.bucket_slice]
                new = values[piece.binding][piece.shard_slice]
                if not torch.equal(old.view(torch.int32), new.view(torch.int32)):
                    old.copy_(new)
                    changed = True
                    self._model_is_behind.add(index)
            return changed

        self.read_planes(collect, buckets)
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
            # What was changed before an exception stays changed, as it would on the device.
            self._rewrite(buckets, put_back, read_main=True)

    # ------------------------------------------------------------------ the end

    def drain(self) -> None:
        """Wait until everything is on disk.

        Raises:
            StepFailedError: a write that went on behind the last step has failed.
        """
        self.check_usable()
        try:
            self.pipeline.drain()
        except GdsOptimizerError as error:
            self._fail("writing behind the last step", error)

    def close(self) -> None:
        """Wait for what is in flight and remove the files. May be called again.

        Raises:
            IoError: a write that went on behind the last step has failed; the files are removed
                all the same.
        """
        if self._finalizer.detach() is not None:
            _close(self.pipeline, self.store)


def _numbered(buckets: Sequence[int]) -> str:
    """ "bucket 3" or "buckets 1, 2, 3, 4, ..."."""
    shown = ", ".join(map(str, buckets[:4])) + (", ..." if len(buckets) > 4 else "")
    return f"bucket{'s' if len(buckets) > 1 else ''} {shown}"


def _in_place(main: torch.Tensor) -> torch.Tensor:
    """A plain tensor over the values of a main that stays on the device, or over no values."""
    if main.numel() == 0:
        return torch.empty(0, dtype=main.dtype, device=main.device)
    return main.detach()


def _close(pipeline: Pipeline, store: Store) -> None:
    try:
        if not store.is_foreign:  # a forked child has no part in its parent's transfers
            pipeline.forget()
    finally:
        store.close()

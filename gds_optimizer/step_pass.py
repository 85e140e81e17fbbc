"""One optimizer step as visits of buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
import torch

from gds_optimizer.bucket_state import BucketState
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.footer import BucketRecord
from gds_optimizer.merging import BucketRuns, Gradients, Merger
from gds_optimizer.pipeline import Ranges
from gds_optimizer.plan import MAIN_PLANE, BoundPiece
from gds_optimizer.scalars import Scalars
from gds_optimizer.slots import Slot, SlotPool
from gds_optimizer.stepper import Stepper

_RESIDENT_BATCHES = (4, 64)
"""Buckets that the first call of the optimizer steps, and the most that a later one does.

The first is small, so that the device begins early. Each takes a quarter more than the one before:
the device must still be at work on that one when a slow host has prepared it.
"""
_FUSED_LIBRARIES = ("transformer_engine", "apex")
"""Whose optimizers step in place without an option that says so."""


class StepPass:
    """What one step knows; create it when the gradients are there, then visit `active` buckets.

    Args:
        buckets: what the files hold; updated by every visit.
        scalars: the optimizer's counters; updated by `finish`.
        stepper: runs the optimizer's arithmetic.
        pool: the slots, for their compute stream.
        merger: says which pieces are stepped as one.
        step: number that this step gets, from 1.
        rounding_step: number that the seeds of stochastic rounding are made of.

    Attributes:
        active: buckets to visit: those with a gradient, or with mains the model does not know.

    Raises:
        UnsupportedError: the optimizer holds parameters or state that it did not hold at setup.
    """

    def __init__(
        self,
        buckets: BucketState,
        scalars: Scalars,
        stepper: Stepper,
        pool: SlotPool,
        merger: Merger,
        step: int,
        *,
        rounding_step: int,
    ) -> None:
        self.plan = buckets.plan
        self.buckets = buckets
        self.scalars = scalars
        self.stepper = stepper
        self.pool = pool
        self.merger = merger
        self.step = step
        self.rounding_step = rounding_step
        self._group, unknown = merger.groups()
        if unknown:
            raise late_parameters(unknown)
        scalars.check_planes_streamed()
        self._gradients = Gradients(merger.mains, self._group)
        self._grads = self._gradients.held
        self._classes = scalars.classes() if merger.is_allowed else None
        merger.begin(self._gradients, self._classes)
        self._runs: dict[int, BucketRuns] = {}
        self.active = active_buckets(buckets, self._grads.keys())
        self._new_scalars: list[tuple[list[int], dict[str, Any]]] = []

    def visit(self, index: int, slot: Slot, from_disk: bool) -> Ranges:
        """Step what is in a slot, give the model its new values and seal the bucket."""
        buckets, bucket = self.buckets, self.plan.layout.buckets[index]
        trace = self.pool.trace
        with trace.visit_span("decode", index):
            check = buckets.expect(index, slot, buckets.needed(index)) if from_disk else None
            if check is not None and not slot.buffer.is_cuda:
                check()  # nothing to overlap with: refuse bad bytes before anything is computed
            planes = buckets.current_planes(index, slot)

        (active,) = self._step_pieces([(index, planes)])
        written = BucketRecord(self.step, [True] * len(bucket.planes))
        with trace.visit_span("write back", index):
            if MAIN_PLANE in planes:
                buckets.copy_main_to_model(index, planes[MAIN_PLANE])
            buckets.encode(index, slot, planes, active, step=self.rounding_step)
            buckets.seal(index, slot, written)
        if index not in buckets.store.in_memory:
            self.pool.synchronize_compute()  # copies to host memory wait for kernels themselves
        if check is not None:
            check()
        self._count_as_stepped(index)
        return [(0, bucket.file_bytes)]

    def visit_resident(self, indices: Sequence[int], slot_of: Callable[[int], Slot]) -> None:
        """Step buckets where they live, several in one call of the optimizer.

        A call for each would take the host longer than the step takes a GPU.
        """
        count, limit = _RESIDENT_BATCHES if self._steps_without_temporaries() else (1, 1)
        position = 0
        while position < len(indices):
            batch: list[int] = []
            for index in indices[position : position + count]:
                # There is one scratch for decoded moments, and gradients are put together for one.
                is_alone = self.buckets.needs_scratch[index] or self._runs_of(index).has_gathered
                if not is_alone or not batch:
                    batch.append(index)
                if is_alone:
                    break
            self._visit_batch([(index, slot_of(index)) for index in batch])
            position += len(batch)
            count = min(count + max(1, count // 4), limit)

    def _runs_of(self, index: int) -> BucketRuns:
        """How a bucket is stepped in this step; found out once."""
        if index not in self._runs:
            self._runs[index] = self.merger.runs(index, self._gradients, self._classes)
        return self._runs[index]

    def _visit_batch(self, batch: Sequence[tuple[int, Slot]]) -> None:
        buckets = self.buckets
        held = [(index, buckets.current_planes(index, slot)) for index, slot in batch]
        stepped = self._step_pieces(held)
        buckets.copy_mains_to_model(
            [(index, planes[MAIN_PLANE]) for index, planes in held if MAIN_PLANE in planes]
        )
        for (index, slot), (_, planes), active in zip(batch, held, stepped, strict=True):
            buckets.encode(index, slot, planes, active, step=self.rounding_step)
            self._count_as_stepped(index)

    def _steps_without_temporaries(self) -> bool:
        """Whether one call for several buckets takes no more memory than one for a single one.

        torch's foreach implementations allocate what they step once more, and gradients that are
        kept in half precision are converted when they are used. Fused kernels work in place.
        """
        optimizer = self.plan.optimizer
        library = type(optimizer).__module__.partition(".")[0]
        is_fused = library in _FUSED_LIBRARIES or all(
            group.get("fused") for group in optimizer.param_groups
        )
        return is_fused and self._gradients.are_plain

    def _step_pieces(
        self, held: Sequence[tuple[int, dict[str, torch.Tensor]]]
    ) -> list[list[BoundPiece]]:
        """Let the optimizer step the pieces of some buckets that have a gradient, in one call.

        Args:
            held: buckets with their planes, as (index, planes by name).

        Returns:
            For each bucket its pieces that were stepped.
        """
        places, steps = [], []
        stepped = [self._runs_of(index) for index, _ in held]
        copies = iter(
            self.scalars.copies([run.pieces[0].binding for each in stepped for run in each.runs])
        )
        for (index, planes), active in zip(held, stepped, strict=True):
            for run in active.runs:
                first = run.pieces[0]
                binding = self.plan.bindings[first.binding]
                cut = self.buckets.device_cuts.cut(index, planes, run.bucket_slice)
                if binding.keeps_main:
                    run.tensor.data = cut.parts[MAIN_PLANE]
                else:
                    run.tensor.data = binding.main.detach()[first.shard_slice]
                run.tensor.grad = self._gradients.of(run)
                state = self.scalars.state_for(first.binding, cut, next(copies))
                steps.append((int(self._group[first.binding]), run.tensor, state))
                places.append((run, cut))
        with self.pool.trace.visit_span("compute", held[0][0]):
            results = self.stepper.run(steps) if steps else []
        for (run, cut), state in zip(places, results, strict=True):
            run.tensor.grad = None
            kept = self.scalars.take_state(run.pieces[0].binding, state, cut)
            if state:
                self._new_scalars.append((run.owners, kept))
        for (_, planes), active in zip(held, stepped, strict=True):
            if active.gaps is not None:
                for values in planes.values():
                    values.index_fill_(0, active.gaps, 0)
        return [active.pieces for active in stepped]

    def _count_as_stepped(self, index: int) -> None:
        record = self.buckets.records[index]
        record.step = self.step
        record.written = [True] * len(record.written)
        self.buckets.main_from_model[index] = False
        self.buckets.model_is_behind.discard(index)

    def finish(self) -> None:
        """Step what no bucket covers, and let the counters of the whole step count."""
        self._step_rest()
        self.stepper.commit()
        self.scalars.commit(self._new_scalars)
        self.scalars.foresee_classes(self._classes, self._gradients.is_there, self._group)

    def _step_rest(self) -> None:
        """Parameters that keep no planes, and groups without a gradient.

        Some optimizers count a step for every group that has parameters, with gradients or not.
        """
        bindings, grads, group = self.plan.bindings, self._grads, self._group
        is_streamed = self.scalars.is_streamed
        visited = set(group[self._gradients.is_there & is_streamed].tolist())
        rest = []
        for index in np.flatnonzero(~is_streamed & (group >= 0)).tolist():
            binding = bindings[index]
            tensor = _in_place(binding.main)
            tensor.grad = None if index not in grads else grads[index][:]
            state = self.plan.optimizer.state.get(binding.main, {})
            rest.append((index, (int(group[index]), tensor, dict(state))))
        numbers, first = np.unique(np.where(is_streamed, group, -1), return_index=True)
        for number, index in zip(numbers.tolist(), first.tolist(), strict=True):
            if number >= 0 and number not in visited:
                main = bindings[index].main
                idle = torch.empty(0, dtype=main.dtype, device=main.device)
                rest.append((index, (number, idle, {})))
        rest.sort(key=lambda each: each[0])
        if not rest:
            return
        results = self.stepper.run([piece for _, piece in rest])
        for (index, _), state in zip(rest, results, strict=True):
            if not is_streamed[index] and state:
                self.plan.optimizer.state[self.plan.bindings[index].main] = state


def active_buckets(buckets: BucketState, with_gradient: Set[int]) -> list[int]:
    """Buckets that a step visits: those with a gradient, or with mains the model does not know.

    Args:
        buckets: of an engine.
        with_gradient: its bindings that have one.
    """
    return [
        index
        for index, bindings in enumerate(buckets.bindings)
        if index in buckets.model_is_behind or not with_gradient.isdisjoint(bindings)
    ]


def late_parameters(count: int) -> UnsupportedError:
    """What to raise for parameters that joined the optimizer after setup."""
    return UnsupportedError(
        f"{count} parameters were added to the optimizer after its state was set up for "
        "streaming: build the optimizer anew with all parameters"
    )


def _in_place(main: torch.Tensor) -> torch.Tensor:
    """A plain tensor over the values of a main that stays on the device, or over no values."""
    if main.numel() == 0:
        return torch.empty(0, dtype=main.dtype, device=main.device)
    return main.detach()

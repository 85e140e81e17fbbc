"""One optimizer step as visits of buckets."""

from __future__ import annotations

from typing import Any

import torch

from gds_optimizer.bucket_state import BucketState
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.footer import BucketRecord
from gds_optimizer.pipeline import Ranges
from gds_optimizer.plan import MAIN_PLANE
from gds_optimizer.scalars import Scalars
from gds_optimizer.slots import Slot, SlotPool
from gds_optimizer.stepper import Stepper


class StepPass:
    """What one step knows; create it when the gradients are there, then visit `active` buckets.

    Args:
        buckets: what the files hold; updated by every visit.
        scalars: the optimizer's counters; updated by `finish`.
        stepper: runs the optimizer's arithmetic.
        pool: the slots, for their compute stream.
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
        step: int,
        *,
        rounding_step: int,
    ) -> None:
        self.plan = buckets.plan
        self.buckets = buckets
        self.scalars = scalars
        self.stepper = stepper
        self.pool = pool
        self.step = step
        self.rounding_step = rounding_step
        self._groups = {
            id(main): index
            for index, group in enumerate(self.plan.optimizer.param_groups)
            for main in group["params"]
        }
        bindings = self.plan.bindings
        unknown = self._groups.keys() - {id(binding.main) for binding in bindings}
        if unknown:
            raise late_parameters(len(unknown))
        scalars.check_planes_streamed()
        self._grads: dict[int, torch.Tensor] = {
            index: grad
            for index, binding in enumerate(bindings)
            if id(binding.main) in self._groups and (grad := binding.main.grad) is not None
        }
        self.active = [
            index
            for index, pieces in enumerate(buckets.pieces)
            if index in buckets.model_is_behind
            or any(piece.binding in self._grads for piece in pieces)
        ]
        self._new_scalars: dict[int, dict[str, Any]] = {}

    def visit(self, index: int, slot: Slot, from_disk: bool) -> Ranges:
        """Step what is in a slot, give the model its new values and seal the bucket."""
        buckets, bucket = self.buckets, self.plan.layout.buckets[index]
        trace = self.pool.trace
        with trace.visit_span("decode", index):
            check = buckets.expect(index, slot, buckets.needed(index)) if from_disk else None
            if check is not None and not slot.buffer.is_cuda:
                check()  # nothing to overlap with: refuse bad bytes before anything is computed
            planes = buckets.current_planes(index, slot)

        active = [piece for piece in buckets.pieces[index] if piece.binding in self._grads]
        steps = []
        for piece in active:
            binding = self.plan.bindings[piece.binding]
            main = planes[MAIN_PLANE] if binding.keeps_main else binding.main.detach()
            where = piece.bucket_slice if binding.keeps_main else piece.shard_slice
            piece.tensor.data = main[where]
            piece.tensor.grad = self._grads[piece.binding][piece.shard_slice]
            state = self.scalars.state_for(piece, planes)
            steps.append((self._groups[id(binding.main)], piece.tensor, state))
        with trace.visit_span("compute", index):
            results = self.stepper.run(steps) if steps else []
        for piece, state in zip(active, results, strict=True):
            piece.tensor.grad = None
            kept = self.scalars.take_state(piece, state, planes)
            if state:
                self._new_scalars.setdefault(piece.binding, kept)
        written = BucketRecord(self.step, [True] * len(bucket.planes))
        with trace.visit_span("write back", index):
            if MAIN_PLANE in planes:
                buckets.copy_main_to_model(index, planes[MAIN_PLANE])
            buckets.encode(index, slot, planes, active, step=self.rounding_step)
            buckets.seal(index, slot, written)
        self.pool.synchronize_compute()
        if check is not None:
            check()
        record = buckets.records[index]
        record.step, record.written = written.step, written.written
        buckets.main_from_model[index] = False
        buckets.model_is_behind.discard(index)
        return [(0, bucket.file_bytes)]

    def finish(self) -> None:
        """Step what no bucket covers, and let the counters of the whole step count."""
        self._step_rest()
        self.stepper.commit()
        self.scalars.commit(self._new_scalars)

    def _step_rest(self) -> None:
        """Parameters that keep no planes, and groups without a gradient.

        Some optimizers count a step for every group that has parameters, with gradients or not.
        """
        streamed, groups, grads = self.scalars.streamed, self._groups, self._grads
        visited = {
            groups[id(binding.main)]
            for index, binding in enumerate(self.plan.bindings)
            if index in grads and index in streamed
        }
        rest = []
        for index, binding in enumerate(self.plan.bindings):
            group = groups.get(id(binding.main))
            if group is None:
                continue
            if index not in streamed:
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
        results = self.stepper.run([piece for _, piece in rest])
        for (index, _), state in zip(rest, results, strict=True):
            if index not in streamed and state:
                self.plan.optimizer.state[self.plan.bindings[index].main] = state


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

"""The part of an optimizer's state that is not streamed: counters and the like, per parameter.

It stays in `optimizer.state`, where schedulers and checkpoints look for it; the planes do not.
"""

from __future__ import annotations

from typing import Any

import torch

from gds_optimizer.errors import UnsupportedError
from gds_optimizer.evicted import EvictedState
from gds_optimizer.plan import BoundPiece, EnginePlan
from gds_optimizer.stepper import copy_value


class Scalars:
    """Scalars of every binding of an engine, and whether it has state at all.

    Args:
        plan: optimizer, bindings and schemas.
        streamed: indices of bindings that have elements in buckets.
    """

    def __init__(self, plan: EnginePlan, streamed: set[int]) -> None:
        self.plan = plan
        self.streamed = streamed
        self.has_state = [False] * len(plan.bindings)
        self.adopt()

    def plane_names(self, index: int) -> tuple[str, ...]:
        """Names of the state planes of a binding."""
        return tuple(plane.name for plane in self.plan.schemas[index].planes)

    def adopt(self) -> None:
        """Take the scalars from the optimizer's state, and leave only them there.

        To be called after others have replaced that state (`load_state_dict` does).
        """
        state = self.plan.optimizer.state
        for index in self.streamed:
            held = state.get(self.plan.bindings[index].main)
            if held is not None:
                self.has_state[index] = self.has_state[index] or bool(held)
                names = self.plane_names(index)
                self._set(index, {key: value for key, value in held.items() if key not in names})

    def check_planes_streamed(self) -> None:
        """Refuse state tensors that somebody put into the optimizer behind our back.

        Raises:
            UnsupportedError: names the tensor. They would not be stepped.
        """
        for index in self.streamed:
            held = self.plan.optimizer.state.get(self.plan.bindings[index].main)
            if held is None or isinstance(held, EvictedState):
                continue
            for name in self.plane_names(index):
                if name in held:
                    raise UnsupportedError(
                        f"{name} of {self.plan.bindings[index].name} was put into the optimizer "
                        "itself (by its `load_state_dict`?), but its state is streamed: load it "
                        "through the framework, a snapshot, or gds_optimizer.checkpoint"
                    )

    def start(self) -> None:
        """Every binding has state now; those whose counters nobody has set start at the start.

        Moments without counters are no state.
        """
        state = self.plan.optimizer.state
        for index in self.streamed:
            self.has_state[index] = True
            initial = self.plan.schemas[index].initial or {}
            state.setdefault(self.plan.bindings[index].main, dict(initial))
        self.adopt()

    def steps_behind(self) -> int | None:
        """How many steps the state has behind it by the optimizer's own counters; None without any.

        They are in every kind of checkpoint. The largest one counts, since parameters that were
        frozen for a while have smaller ones. Some optimizers count in their groups; in those of
        others a framework may have left a counter that nobody keeps.
        """
        optimizer = self.plan.optimizer
        held = [optimizer.state.get(binding.main, {}) for binding in self.plan.bindings]
        for entries in (held, optimizer.param_groups):
            counters = [
                float(counter)
                for counter in (entry.get("step") for entry in entries)
                if isinstance(counter, int | float)
                or (isinstance(counter, torch.Tensor) and counter.numel() == 1)
            ]
            if counters:
                return int(max(counters))
        return None

    def of(self, index: int) -> dict[str, Any]:
        """A copy of a binding's scalars."""
        held = self.plan.optimizer.state.get(self.plan.bindings[index].main, {})
        return {key: copy_value(value) for key, value in held.items()}

    def commit(self, scalars: dict[int, dict[str, Any]]) -> None:
        """Take what a step has left, by binding."""
        for index, values in scalars.items():
            self.has_state[index] = True
            if index in self.streamed:
                self._set(index, values)

    def restore(self, shards: dict[str, tuple[bool, dict[str, Any]]]) -> None:
        """Replace everything: shard name -> whether it has state, and its scalars."""
        state = self.plan.optimizer.state
        for index, binding in enumerate(self.plan.bindings):
            self.has_state[index], scalars = shards[binding.name]
            state.pop(binding.main, None)
            if self.has_state[index] and index in self.streamed:
                self._set(index, scalars)
            elif scalars:
                state[binding.main] = dict(scalars)

    def _set(self, index: int, scalars: dict[str, Any]) -> None:
        binding = self.plan.bindings[index]
        self.plan.optimizer.state[binding.main] = EvictedState(
            scalars, binding.name, self.plane_names(index)
        )

    # ------------------------------------------------------------------ around one piece's step

    def state_for(self, piece: BoundPiece, planes: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The optimizer's state for a piece: views of the planes, and the parameter's scalars."""
        schema = self.plan.schemas[piece.binding]
        if self.has_state[piece.binding]:
            scalars = self.of(piece.binding)
        elif schema.initial is not None:
            scalars = {key: copy_value(value) for key, value in schema.initial.items()}
        else:
            return {}
        return {
            **scalars,
            **{plane.name: planes[plane.name][piece.bucket_slice] for plane in schema.planes},
        }

    def take_state(
        self, piece: BoundPiece, state: dict[str, Any], planes: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Put the planes that the optimizer left for a piece into the slot; return the rest.

        Raises:
            UnsupportedError: there is a tensor that no plane was laid out for.
        """
        names = self.plane_names(piece.binding)
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
        return kept

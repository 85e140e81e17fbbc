"""The part of an optimizer's state that is not streamed: counters and the like, per parameter.

It stays in `optimizer.state`, where schedulers and checkpoints look for it; the planes do not.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gds_optimizer.errors import UnsupportedError
from gds_optimizer.evicted import EvictedState
from gds_optimizer.plan import EnginePlan
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
        # Classes of the next step, and the marks of the scalars that they hold for.
        self._foreseen: tuple[np.ndarray[Any, np.dtype[np.int64]], list[Any]] | None = None
        self._plane_names = {
            id(schema): tuple(plane.name for plane in schema.planes) for schema in plan.schemas
        }
        self.adopt()

    def plane_names(self, index: int) -> tuple[str, ...]:
        """Names of the state planes of a binding."""
        return self._plane_names[id(self.plan.schemas[index])]

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
        """Take what a step has left, by binding; bindings stepped as one share a dictionary."""
        sharing: dict[int, list[int]] = {}
        for index, values in scalars.items():
            self.has_state[index] = True
            if index in self.streamed:
                sharing.setdefault(id(values), []).append(index)
        for members in sharing.values():
            values = scalars[members[0]]
            if not values:
                for index in members:
                    self._set(index, {})
                continue
            copies = [_copies(value, len(members)) for value in values.values()]
            for index, own in zip(members, zip(*copies, strict=True), strict=True):
                self._set(index, dict(zip(values, own, strict=True)))

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

    # ------------------------------------------------------------------ around one run's step

    def classes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """For each binding a number: pieces of those that share one may be stepped as one tensor.

        They have the same planes and, to the bit, the same scalars. As long as nobody has touched
        the scalars since the last step, that follows from what was equal before it (see
        `foresee_classes`). Otherwise they are compared, with a wait for a device that keeps them.
        """
        if self._foreseen is not None:
            classes, marks = self._foreseen
            if _are_same(marks, self._marks()):
                return classes
        bindings, state = self.plan.bindings, self.plan.optimizer.state
        keys: list[Any] = [("alone", index) for index in range(len(bindings))]
        tensors: dict[Any, tuple[list[int], list[torch.Tensor]]] = {}
        for index in self.streamed:
            has_state = self.has_state[index]
            key: Any = (id(self.plan.schemas[index]), has_state)
            held = state.get(bindings[index].main) if has_state else None
            for name, value in () if held is None else held.items():
                if isinstance(value, torch.Tensor) and value.numel() == 1:
                    value = value.reshape(()) if value.dim() else value
                    form = (name, value.dtype, value.device)
                    if form not in tensors:
                        tensors[form] = ([], [])
                    tensors[form][0].append(index)
                    tensors[form][1].append(value)
                elif value is None or type(value) in (bool, int, float):
                    key = (key, name, type(value), repr(value))
                else:
                    key = (key, name, index)  # whatever it is, it is its own
            keys[index] = key
        for form, (members, values) in tensors.items():
            # To the bit: -0.0 is not 0.0, and NaN is itself.
            bits = torch.stack(values).view(torch.uint8).cpu().numpy().reshape(len(values), -1)
            raw, size = bits.tobytes(), bits.shape[1]
            for at, index in enumerate(members):
                keys[index] = (keys[index], form, raw[at * size : at * size + size])
        numbers: dict[Any, int] = {}
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)

    def foresee_classes(
        self,
        classes: np.ndarray[Any, np.dtype[np.int64]] | None,
        stepped: Container[int],
        groups: Mapping[int, int],
    ) -> None:
        """Note what will be equal in the next step, once this one's scalars are committed.

        Scalars that were equal, and that the same group of the optimizer has stepped or has left
        alone, are equal again.

        Args:
            classes: of this step, from `classes`; None where nothing may be merged.
            stepped: bindings that had a gradient.
            groups: id(main) -> index of its group.
        """
        self._foreseen = None
        if classes is None:
            return
        marks = self._marks()
        if _are_on_cpu(marks):
            return
        numbers: dict[Any, int] = {}
        keys = (
            (number, index in stepped, groups.get(id(binding.main)))
            for index, (number, binding) in enumerate(
                zip(classes.tolist(), self.plan.bindings, strict=True)
            )
        )
        again = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
        self._foreseen = (again, marks)

    def _marks(self) -> list[Any]:
        """What tells whether scalars were touched: the objects, and versions of tensors."""
        bindings, state = self.plan.bindings, self.plan.optimizer.state
        marks: list[Any] = []
        for index in self.streamed:
            held = state.get(bindings[index].main) if self.has_state[index] else None
            if held is None:
                marks.append((index, None, 0))
                continue
            for name, value in held.items():
                is_tensor = isinstance(value, torch.Tensor)
                marks.append((name, value, value._version if is_tensor else 0))
        return marks

    def state_for(
        self, index: int, where: slice, planes: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        """The optimizer's state for a run: views of the planes, and the parameter's scalars.

        Args:
            index: of the run's first binding; the others' scalars are the same.
            where: the run's elements in the bucket.
            planes: of the bucket.
        """
        schema = self.plan.schemas[index]
        if self.has_state[index]:
            scalars = self.of(index)
        elif schema.initial is not None:
            scalars = {key: copy_value(value) for key, value in schema.initial.items()}
        else:
            return {}
        for plane in schema.planes:
            scalars[plane.name] = planes[plane.name][where]
        return scalars

    def take_state(
        self,
        index: int,
        where: slice,
        state: dict[str, Any],
        planes: dict[str, torch.Tensor],
    ) -> dict[str, Any]:
        """Put the planes that the optimizer left for a run into the slot; return the rest.

        Raises:
            UnsupportedError: there is a tensor that no plane was laid out for.
        """
        names = self.plane_names(index)
        kept: dict[str, Any] = {}
        for key, value in state.items():
            if key in names:
                view = planes[key][where]
                if value.data_ptr() != view.data_ptr():  # created or replaced, not updated
                    view.copy_(value)
            elif isinstance(value, torch.Tensor) and value.numel() > 1:
                raise UnsupportedError(
                    f"{type(self.plan.optimizer).__name__} began to keep {key!r} for "
                    f"{self.plan.bindings[index].name} after its state was laid out: set "
                    "the option that turns it on before the optimizer is set up for streaming"
                )
            else:
                kept[key] = value
        return kept


def _are_on_cpu(marks: list[Any]) -> bool:
    """Comparing scalars waits for nothing then, and sees what `.data` has changed too."""
    return any(isinstance(v, torch.Tensor) and v.device.type == "cpu" for _, v, _ in marks)


def _are_same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        a[1] is b[1] and a[2] == b[2] and a[0] == b[0] for a, b in zip(first, second, strict=True)
    )


def _copies(value: Any, count: int) -> Sequence[Any]:
    """A value for each of several bindings; tensors of their own, that nobody else changes."""
    if count == 1:
        return (value,)
    if isinstance(value, torch.Tensor):
        return value.detach().expand(count, *value.shape).contiguous().unbind()
    return [copy_value(value) for _ in range(count)]

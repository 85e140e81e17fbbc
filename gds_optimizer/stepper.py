"""Run the resident optimizer's own `step` over a few pieces at a time, as if it were one step.

The arithmetic is the optimizer class's. Each call gets a throw-away copy of the optimizer whose
groups hold only the pieces at hand. Every call of one step starts from the same hyper-parameters
and counters, and what a call changed in them is taken over once, at the end.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gds_optimizer.errors import UnsupportedError

_NOT_ATTRIBUTES = ("state", "param_groups")


def undecorated_step(optimizer_class: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The class's `step` without the wrapper that fires optimizer hooks on every call.

    torch puts that wrapper around the `step` of every optimizer class
    (`torch.optim.Optimizer._patch_step_function`).
    """
    step = optimizer_class.step
    if getattr(step, "hooked", False):
        return step.__wrapped__  # type: ignore[attr-defined, no-any-return]
    return step


def install_step(optimizer: torch.optim.Optimizer, run: Callable[[], None]) -> Callable[[], None]:
    """Make `optimizer.step(closure=None)` call `run`, with hooks fired once around it.

    It is a bound method on the instance, so a learning-rate scheduler can wrap it.

    Returns:
        A function that puts things back.
    """

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        run()
        return loss

    hooked = torch.optim.Optimizer.profile_hook_step(step)
    had_own = "step" in optimizer.__dict__
    before = optimizer.__dict__.get("step")
    optimizer.step = types.MethodType(hooked, optimizer)  # type: ignore[method-assign]

    def uninstall() -> None:
        if had_own:
            optimizer.step = before  # type: ignore[method-assign, assignment]
        else:
            optimizer.__dict__.pop("step", None)

    return uninstall


def copy_value(value: Any) -> Any:
    """A copy that in-place arithmetic on tensors cannot reach back through."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list | tuple):
        return type(value)(copy_value(item) for item in value)
    return value


def _same(a: Any, b: Any) -> bool:
    """Whether two counters agree, without waiting for a device."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a group's option; a tensor gets the value and stays the same object.

    Schedulers and CUDA graphs may hold the tensor itself.
    """
    old = group.get(key)
    if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
        old.copy_(value)
    else:
        group[key] = value


class Stepper:
    """One optimizer's step in parts: `begin`, any number of `run`, `commit`.

    Args:
        optimizer: the resident optimizer object. It is read in `begin` and written in `commit`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._function = undecorated_step(type(optimizer))
        self._groups: list[dict[str, Any]] = []
        self._attributes: dict[str, Any] = {}
        self._new_groups: dict[int, dict[str, Any]] = {}
        self._new_attributes: dict[str, Any] = {}

    def begin(self) -> None:
        """Note hyper-parameters and counters as they are now."""
        self._groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        self._attributes = {
            key: value
            for key, value in self.optimizer.__dict__.items()
            if key not in _NOT_ATTRIBUTES
        }
        self._new_groups, self._new_attributes = {}, {}

    def run(
        self, pieces: Sequence[tuple[int, torch.Tensor, dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """Step some pieces.

        Args:
            pieces: (index of the group, tensor with its `.grad` set, its state; {} lets the
                optimizer create it). Tensors and the state's tensors are updated in place.

        Returns:
            The state of each piece afterwards, in order.

        Raises:
            UnsupportedError: the optimizer counts differently in different parts of one step, so
                it is not elementwise.
        """
        params: dict[int, list[torch.Tensor]] = {}
        for group, tensor, _ in pieces:
            params.setdefault(group, []).append(tensor)
        narrowed = object.__new__(type(self.optimizer))
        narrowed.__dict__.update(self._attributes)
        narrowed.param_groups = [
            {**{key: copy_value(v) for key, v in self._groups[group].items()}, "params": tensors}
            for group, tensors in params.items()
        ]
        narrowed.state = defaultdict(dict)
        for _, tensor, state in pieces:
            if state:
                narrowed.state[tensor] = state
        self._function(narrowed)
        for group, changed in zip(params, narrowed.param_groups, strict=True):
            self._note_group(group, changed)
        for key, value in narrowed.__dict__.items():
            if key not in _NOT_ATTRIBUTES and value is not self._attributes.get(key):
                self._new_attributes[key] = value
        return [narrowed.state.get(tensor, {}) for _, tensor, _ in pieces]

    def _note_group(self, group: int, changed: dict[str, Any]) -> None:
        values = {key: value for key, value in changed.items() if key != "params"}
        known = self._new_groups.setdefault(group, values)
        for key, value in values.items():
            if not _same(known.get(key), value):
                raise UnsupportedError(
                    f"{type(self.optimizer).__name__} set {key!r} of group {group} to {value!r} "
                    f"in one part of a step and to {known.get(key)!r} in another: it is not an "
                    "elementwise optimizer and cannot be streamed"
                )

    def commit(self) -> None:
        """Take over what the calls changed in groups and attributes."""
        for index, values in self._new_groups.items():
            group = self.optimizer.param_groups[index]
            for key, value in values.items():
                # Two tensors count as the same for `_same`, whatever is in them.
                is_tensor = isinstance(value, torch.Tensor)
                if is_tensor or key not in group or not _same(group[key], value):
                    set_option(group, key, value)
        self.optimizer.__dict__.update(self._new_attributes)

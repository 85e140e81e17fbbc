"""The part of an optimizer's state that is not streamed: counters and the like, per parameter.

It stays in `optimizer.state`, where schedulers and checkpoints look for it; the planes do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch

from gds_optimizer.device_cuts import Cut
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.evicted import EvictedState
from gds_optimizer.plan import EnginePlan
from gds_optimizer.stepper import copy_value

_VERSION = torch.Tensor._version.__get__  # type: ignore[attr-defined]

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True, eq=False)
class _Marks:
    """What tells whether scalars were touched: the objects themselves, and versions of tensors."""

    keys: list[torch.Tensor]
    states: list[Any]
    names: list[str]
    values: list[Any]
    versions: list[int]

    def are(self, other: _Marks) -> bool:
        return (
            self.keys is other.keys  # else states may have changed places
            and _are_the_same(self.states, other.states)
            and self.names == other.names
            and _are_the_same(self.values, other.values)
            and self.versions == other.versions
        )


@dataclass(slots=True, eq=False)
class _Cohort:
    """Bindings whose scalars one step has left alike: for each name one tensor, and its views.

    Attributes:
        members: indices of the bindings.
        states: theirs, in the optimizer.
        bases: by name, for each member an element along the first dimension.
        views: by name, what is in the members' states.
        addresses: of the views' memory, by name.
    """

    members: list[int]
    states: list[EvictedState]
    bases: dict[str, torch.Tensor]
    views: dict[str, Sequence[torch.Tensor]]
    addresses: dict[str, list[int]]

    def targets(
        self, members: list[int], values: dict[str, Any]
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Where new values for all members go, and the values; None where that may not be.

        The states must hold what was left in them: the very tensors, over the very memory.
        """
        if members != self.members or values.keys() != self.bases.keys():
            return None
        held = self.states
        if set(map(len, held)) != {len(values)}:
            return None
        for name, value in values.items():
            base = self.bases[name]
            if (
                not isinstance(value, torch.Tensor)
                or (value.dtype, value.device) != (base.dtype, base.device)
                or value.shape != base.shape[1:]
                or not all(map(dict.__contains__, held, repeat(name)))
                or not _are_the_same(list(map(itemgetter(name), held)), self.views[name])
                or list(map(torch.Tensor.data_ptr, self.views[name])) != self.addresses[name]
            ):
                return None
        whole = self.bases if len(members) > 1 else {name: v[0] for name, v in self.views.items()}
        return [(whole[name], value) for name, value in values.items()]


class Scalars:
    """Scalars of every binding of an engine, and whether it has state at all.

    Args:
        plan: optimizer, bindings and schemas.
        streamed: indices of bindings that have elements in buckets.

    Attributes:
        is_streamed: for each binding, whether it is one of those.
    """

    def __init__(self, plan: EnginePlan, streamed: set[int]) -> None:
        self.plan = plan
        self.streamed = streamed
        self.is_streamed = np.zeros(len(plan.bindings), dtype=bool)
        self.is_streamed[list(streamed)] = True
        self.has_state = [False] * len(plan.bindings)
        # Classes of the next step, and the marks of the scalars that they hold for.
        self._foreseen: tuple[Numbers, _Marks] | None = None
        self._mains = [plan.bindings[index].main for index in sorted(streamed)]
        self._keys: list[torch.Tensor] = []  # mains, in the order of the optimizer's state
        self._checked: list[Any] = []  # states without planes
        self._cohort_of: dict[int, _Cohort] = {}  # by member
        self._left: list[Any] = []  # states, as the last commit has left them
        self._left_keys: list[torch.Tensor] | None = None  # and where
        self._has_others = True  # whether the optimizer has state of other parameters, or not all
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
        self._forget_cohorts()
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
        states = self._states()
        if _are_the_same(states, self._checked):
            return
        self._checked = []
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
        if all(isinstance(held, EvictedState) for held in states):
            self._checked = states

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

    def copies(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Copies of the scalars of several bindings, made by as few kernels as possible."""
        state, bindings = self.plan.optimizer.state, self.plan.bindings
        found: list[dict[str, Any]] = []
        alike: dict[Any, list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
        for index in indices:
            own: dict[str, Any] = {}
            for key, value in state.get(bindings[index].main, {}).items():
                own[key] = value
                if type(value) is torch.Tensor and value.dim() == 0:
                    alike.setdefault((value.dtype, value.device), []).append((own, key, value))
                else:
                    own[key] = copy_value(value)
            found.append(own)
        for places in alike.values():
            values = torch.stack([value for _, _, value in places]).unbind()
            for (own, key, _), value in zip(places, values, strict=True):
                own[key] = value
        return found

    def commit(self, scalars: Sequence[tuple[list[int], dict[str, Any]]]) -> None:
        """Take what a step has left: bindings, each of them once, and the scalars they share.

        As long as the same bindings share theirs and nobody has replaced one, the tensors stay the
        same and get new values, as an optimizer with resident state does it.
        """
        states = self._states()
        if self._left_keys is not self._keys or not _are_the_same(states, self._left):
            self._forget_cohorts()  # somebody has put other states in their place
        alike: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for members, values in scalars:
            if not members:
                continue
            known = self._cohort_of.get(members[0])
            targets = None if known is None else known.targets(members, values)
            if targets is None:
                self._start_cohort(members, values)
            for target, value in targets or ():
                if target.shape == value.shape:
                    alike[0].append(target)
                    alike[1].append(value)
                else:
                    target.copy_(value)
        if alike[0]:
            torch._foreach_copy_(*alike)  # one kernel, not one for each bucket
        self._left = self._states()
        self._left_keys = self._keys

    def _forget_cohorts(self) -> None:
        self._cohort_of.clear()
        self._left, self._left_keys = [], None

    def _start_cohort(self, members: list[int], values: dict[str, Any]) -> None:
        """Give bindings states of their own with the same values."""
        copies = {name: _copies(value, len(members)) for name, value in values.items()}
        for at, index in enumerate(members):
            self.has_state[index] = True
            self._set(index, {name: own[at] for name, (_, own) in copies.items()})
        for index in members:
            for other in self._cohort_of[index].members if index in self._cohort_of else ():
                del self._cohort_of[other]
        bases = {name: base for name, (base, _) in copies.items() if base is not None}
        if len(bases) == len(values):
            views = {name: own for name, (_, own) in copies.items()}
            state = self.plan.optimizer.state
            cohort = _Cohort(
                list(members),
                [state[self.plan.bindings[index].main] for index in members],
                bases,
                views,
                {name: [view.data_ptr() for view in own] for name, own in views.items()},
            )
            self._cohort_of.update(dict.fromkeys(members, cohort))

    def restore(self, shards: dict[str, tuple[bool, dict[str, Any]]]) -> None:
        """Replace everything: shard name -> whether it has state, and its scalars."""
        state = self.plan.optimizer.state
        self._forget_cohorts()
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

    def classes(self) -> Numbers:
        """For each binding a number: pieces of those that share one may be stepped as one tensor.

        They have the same planes and, to the bit, the same scalars. As long as nobody has touched
        the scalars since the last step, that follows from what was equal before it (see
        `foresee_classes`); in host memory the values are looked at too, since `.data` leaves no
        trace. Otherwise they are compared, with a wait for a device that keeps them.
        """
        if self._foreseen is not None:
            classes, marks = self._foreseen
            if marks.are(self._marks()) and (
                not _are_on_cpu(marks) or self._are_alike(classes, marks)
            ):
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
        self, classes: Numbers | None, stepped: np.ndarray[Any, np.dtype[np.bool_]], group: Numbers
    ) -> None:
        """Note what will be equal in the next step, once this one's scalars are committed.

        Scalars that were equal, and that the same group of the optimizer has stepped or has left
        alone, are equal again.

        Args:
            classes: of this step, from `classes`; None where nothing may be merged.
            stepped: for each binding, whether it had a gradient.
            group: for each binding, the index of its group; -1 without one.
        """
        self._foreseen = None
        if classes is None or not classes.size:
            return
        keys = (classes * 2 + stepped) * (int(group.max()) + 2) + group + 1
        again = np.unique(keys, return_inverse=True)[1].reshape(-1).astype(np.int64)
        self._foreseen = (again, self._marks())

    def _are_alike(self, classes: Numbers, marks: _Marks) -> bool:
        """Whether all scalars are those of cohorts, and members of a class have the same bits."""
        cohorts = list({id(each): each for each in self._cohort_of.values()}.values())
        if not cohorts or any(cohort.bases.keys() != cohorts[0].bases.keys() for cohort in cohorts):
            return False
        names = list(cohorts[0].bases)
        ours = chain.from_iterable(chain.from_iterable(c.views.values()) for c in cohorts)
        if set(map(id, ours)) != set(map(id, marks.values)):
            return False
        members = np.concatenate([np.array(cohort.members) for cohort in cohorts])
        own = classes[members]
        _, first, inverse = np.unique(own, return_index=True, return_inverse=True)
        for name in names:
            bases = [cohort.bases[name] for cohort in cohorts]
            if len({(base.dtype, base.device, base.shape[1:]) for base in bases}) > 1:
                return False
            for cohort in cohorts:
                if list(map(torch.Tensor.data_ptr, cohort.views[name])) != cohort.addresses[name]:
                    return False
            bits = torch.cat(bases).view(torch.uint8).cpu().numpy().reshape(len(members), -1)
            if not np.array_equal(bits, bits[first[inverse.reshape(-1)]]):
                return False
        return True

    def _marks(self) -> _Marks:
        states = [each for each in self._states() if each is not None]
        keys = self._keys
        values = list(chain.from_iterable(map(dict.values, states)))
        if set(map(type, values)) == {torch.Tensor}:
            versions = list(map(_VERSION, values))
        else:
            versions = [v._version if isinstance(v, torch.Tensor) else 0 for v in values]
        return _Marks(keys, states, list(chain.from_iterable(states)), values, versions)

    def _states(self) -> list[Any]:
        """The optimizer's states of the streamed bindings, in any order; None for missing ones."""
        state = self.plan.optimizer.state
        # Where it has these and no others: looking up 20,000 tensors takes longer.
        keys = list(state)
        if not _are_the_same(keys, self._keys):
            self._keys = keys
            self._has_others = set(map(id, keys)) != set(map(id, self._mains))
        return list(map(state.get, self._mains)) if self._has_others else list(state.values())

    def state_for(self, index: int, cut: Cut, copies: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state for a run: views of the planes, and the parameter's scalars.

        Args:
            index: of the run's first binding; the others' scalars are the same.
            cut: the run's elements in the planes of its bucket.
            copies: of the binding's scalars, from `copies`; it becomes the state.
        """
        schema = self.plan.schemas[index]
        if self.has_state[index]:
            scalars = copies
        elif schema.initial is not None:
            scalars = {key: copy_value(value) for key, value in schema.initial.items()}
        else:
            return {}
        for plane in schema.planes:
            scalars[plane.name] = cut.parts[plane.name]
        return scalars

    def take_state(self, index: int, state: dict[str, Any], cut: Cut) -> dict[str, Any]:
        """Put the planes that the optimizer left for a run into the slot; return the rest.

        Raises:
            UnsupportedError: there is a tensor that no plane was laid out for.
        """
        names = self.plane_names(index)
        kept: dict[str, Any] = {}
        for key, value in state.items():
            if key in names:
                if value.data_ptr() != cut.addresses[key]:  # created or replaced, not updated
                    cut.put(key, value)
            elif isinstance(value, torch.Tensor) and value.numel() > 1:
                raise UnsupportedError(
                    f"{type(self.plan.optimizer).__name__} began to keep {key!r} for "
                    f"{self.plan.bindings[index].name} after its state was laid out: set "
                    "the option that turns it on before the optimizer is set up for streaming"
                )
            else:
                kept[key] = value
        return kept


def _are_on_cpu(marks: _Marks) -> bool:
    """Comparing scalars waits for nothing then, and sees what `.data` has changed too."""
    return any(isinstance(v, torch.Tensor) and v.device.type == "cpu" for v in marks.values)


def _are_the_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))


def _copies(value: Any, count: int) -> tuple[torch.Tensor | None, Sequence[Any]]:
    """A value for each of several bindings, and where tensors are a tensor over all of them.

    They are tensors of their own, that nobody else changes.
    """
    if isinstance(value, torch.Tensor):
        base = (
            value.detach().expand(count, *value.shape).clone(memory_format=torch.contiguous_format)
        )
        return base, base.unbind()
    return None, [copy_value(value) for _ in range(count)]

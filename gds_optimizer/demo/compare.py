"""Where two trainings first differ, by bits: NaNs are equal to themselves, 0.0 is not -0.0."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from gds_optimizer.demo.report import Difference
from gds_optimizer.megatron.tiny_gpt import StepRecord


class Snapshot(NamedTuple):
    """What one rank keeps of one training for the comparison, in host memory.

    Attributes:
        steps: losses, gradient norms, loss scales and so on, step by step.
        parameters: the model's, by name, after the last step.
        state: mains, moments and counters after the last step, by shard and name.
    """

    steps: Sequence[StepRecord]
    parameters: Mapping[str, torch.Tensor]
    state: Mapping[str, Mapping[str, torch.Tensor | float]]


Found = tuple[int, Difference]
"""A difference, and when it showed: the step, or later for what is compared at the end."""


def first_difference(resident: Snapshot, streamed: Snapshot, rank: int) -> Found | None:
    """The first difference of one rank, None if there is none.

    Steps come first, then the model's parameters, then the optimizer's state.
    """
    for a, b in zip(resident.steps, streamed.steps, strict=True):
        for name in (field.name for field in fields(StepRecord)):
            wanted, got = getattr(a, name), getattr(b, name)
            if _bits(wanted) != _bits(got):
                return a.step, Difference(name, f"rank {rank}, step {a.step}", wanted, got)
    step_count = len(resident.steps)
    found = _first_in_tensors("parameter", resident.parameters, streamed.parameters, rank)
    if found is not None:
        return step_count, found
    missing = _first_missing("shard", resident.state, streamed.state, f"rank {rank}")
    if missing is not None:
        return step_count + 1, missing
    for shard, values in resident.state.items():
        found = _first_in_state(shard, values, streamed.state[shard], rank)
        if found is not None:
            return step_count + 1, found
    return None


def earliest(found: Iterable[Found | None]) -> Difference | None:
    """The one of several ranks that showed first; of several at once, the lowest rank's."""
    return min((f for f in found if f is not None), key=lambda f: f[0], default=(0, None))[1]


def _bits(value: Any) -> Any:
    return struct.pack(">d", value) if isinstance(value, float) else value


def _first_missing(
    what: str, resident: Mapping[str, Any], streamed: Mapping[str, Any], where: str
) -> Difference | None:
    for name in (*resident, *streamed):
        if name not in resident or name not in streamed:
            there = [name if name in each else None for each in (resident, streamed)]
            return Difference(what, where, *there)
    return None


def _first_in_tensors(
    what: str,
    resident: Mapping[str, torch.Tensor],
    streamed: Mapping[str, torch.Tensor],
    rank: int,
) -> Difference | None:
    missing = _first_missing(what, resident, streamed, f"rank {rank}")
    if missing is not None:
        return missing
    for name, wanted in resident.items():
        found = compare_tensors(what, f"rank {rank}, {name}", wanted, streamed[name])
        if found is not None:
            return found
    return None


def _first_in_state(
    shard: str,
    resident: Mapping[str, torch.Tensor | float],
    streamed: Mapping[str, torch.Tensor | float],
    rank: int,
) -> Difference | None:
    where = f"rank {rank}, {shard}"
    missing = _first_missing("state", resident, streamed, where)
    if missing is not None:
        return missing
    for name, wanted in resident.items():
        got = streamed[name]
        if isinstance(wanted, torch.Tensor) and isinstance(got, torch.Tensor):
            found = compare_tensors(name, where, wanted, got)
            if found is not None:
                return found
        elif type(wanted) is not type(got) or _bits(wanted) != _bits(got):
            return Difference(name, where, _plain(wanted), _plain(got))
    return None


def _plain(value: Any) -> Any:
    return f"tensor of {value.numel()}" if isinstance(value, torch.Tensor) else value


def compare_tensors(
    what: str, where: str, resident: torch.Tensor, streamed: torch.Tensor
) -> Difference | None:
    """The first element whose bits differ, with how many do."""
    kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (resident, streamed)]
    if kinds[0] != kinds[1]:
        return Difference(what, where, *kinds)
    flat = [t.contiguous().view(-1) for t in (resident, streamed)]
    a, b = (t.view(-1, 1).view(torch.uint8) for t in flat)
    differing = (a != b).any(dim=1).nonzero().flatten()
    if not differing.numel():
        return None
    index = int(differing[0])
    where = f"{where}, element {index}; {differing.numel()} of {flat[0].numel()} differ"
    return Difference(what, where, flat[0][index].item(), flat[1][index].item())

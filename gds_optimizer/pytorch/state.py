"""State of a streamed optimizer in torch's own format, without holding it in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from gds_optimizer import checkpoint
from gds_optimizer.codecs import get_codec
from gds_optimizer.engine import Engine
from gds_optimizer.errors import SnapshotError
from gds_optimizer.plan import MAIN_PLANE
from gds_optimizer.pytorch.memory_order import row_like, shaped_like
from gds_optimizer.pytorch.parameters import Parameters


def torch_state(engine: Engine, params: Parameters) -> dict[torch.Tensor, dict[str, Any]]:
    """What `optimizer.state` would be: by parameter, counters, and tensors of its shape.

    The tensors are mappings of the files, on the CPU (see `mapped_state`). A half-precision
    parameter has its main, too.
    """
    shards = checkpoint.state_dict(engine)["shards"]
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for index, (param, binding) in enumerate(zip(params.params, params.bindings, strict=True)):
        shard, is_streamed = shards[binding.name], engine.is_streamed(index)
        entry = dict(shard["scalars"])
        for name, plane in shard["planes"].items():
            if name != MAIN_PLANE and (shard["has_state"] or not is_streamed):
                entry[name] = shaped_like(plane, param)
        if binding.keeps_main:
            main = shard["planes"][MAIN_PLANE] if is_streamed else torch.empty(0)
            entry[MAIN_PLANE] = shaped_like(main, param)
        if entry:
            state[param] = entry
    return state


def load_torch_state(engine: Engine, params: Parameters, state_dict: Mapping[str, Any]) -> None:
    """Make a state dictionary in torch's format the engine's state, shard by shard.

    Raises:
        SnapshotError: it does not fit; the state is what it was.
    """
    saved_groups, saved = _parts(state_dict)
    own_groups = engine.plan.optimizer.param_groups
    found = [len(group["params"]) for group in saved_groups]
    wanted = [len(group["params"]) for group in own_groups]
    if found != wanted:
        raise SnapshotError(
            f"the state dictionary has groups of {_numbers(found)} parameters, wanted "
            f"{_numbers(wanted)}: it is of another optimizer"
        )
    ids = list(chain.from_iterable(group["params"] for group in saved_groups))
    entries = [saved.get(each, {}) for each in ids]
    names = [binding.name for binding in params.bindings]
    shards = {
        name: _shard(engine, params, index, entries[index]) for index, name in enumerate(names)
    }
    checkpoint.load_state_dict(
        engine,
        {
            "format": checkpoint.FORMAT,
            "version": checkpoint.VERSION,
            "step": _step(engine, entries),
            "groups": [
                {
                    "options": {
                        key: value
                        for key, value in group.items()
                        if key not in ("params", "param_names")
                    },
                    "shards": [engine.name_of(main) for main in own["params"]],
                }
                for group, own in zip(saved_groups, own_groups, strict=True)
            ],
            "shards": shards,
        },
    )


def _parts(state_dict: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise SnapshotError(
            "this is no state dictionary of a torch optimizer: wanted the keys 'state' and "
            "'param_groups'"
        )
    return state_dict["param_groups"], state_dict["state"]


def _shard(
    engine: Engine, params: Parameters, index: int, entry: Mapping[str, Any]
) -> dict[str, Any]:
    """The saved state of one parameter as `gds_optimizer.checkpoint` has it."""
    binding, param = params.bindings[index], params.params[index]
    schema = engine.plan.schemas[index]
    names = {MAIN_PLANE, *(plane.name for plane in schema.planes)}
    planes: dict[str, torch.Tensor] = {}
    for name in names & entry.keys():
        value = entry[name]
        if not isinstance(value, torch.Tensor):
            continue  # a momentum that does not exist yet is None
        if value.shape != param.shape:
            raise SnapshotError(
                f"{name} of {binding.name} has the shape {tuple(value.shape)} in the state "
                f"dictionary, wanted {tuple(param.shape)}: it is of another model"
            )
        planes[name] = row_like(value, param)
    is_streamed = engine.is_streamed(index)
    if binding.keeps_main and is_streamed and MAIN_PLANE not in planes:
        raise SnapshotError(
            f"the state dictionary has no main parameter ({MAIN_PLANE!r}) of {binding.name}, which "
            f"is {param.dtype}: it is of an optimizer without fp32 main parameters"
        )
    scalars = {key: value for key, value in entry.items() if key not in names}
    has_state = bool(scalars or planes.keys() - {MAIN_PLANE})
    if is_streamed and not has_state:
        for plane in schema.planes:
            dtype = get_codec(plane.codec).dtype
            planes[plane.name] = torch.zeros((), dtype=dtype).expand(binding.main.numel())
    if not (binding.keeps_main and is_streamed):
        planes.pop(MAIN_PLANE, None)  # there is none, or nothing in it
    if not binding.keeps_main and binding.main.numel():
        planes[MAIN_PLANE] = binding.main.detach()
    return {"has_state": has_state and is_streamed, "scalars": scalars, "planes": planes}


def _step(engine: Engine, entries: Iterable[Mapping[str, Any]]) -> int:
    """Completed steps: by the counters, where there are any."""
    counted = _count(entries)
    now = _count(engine.plan.optimizer.state.values())
    return engine.steps if counted is None or counted == now else counted


def _count(entries: Iterable[Mapping[str, Any]]) -> int | None:
    counters = [
        float(entry["step"])
        for entry in entries
        if isinstance(entry.get("step"), int | float | torch.Tensor)
    ]
    return int(max(counters)) if counters else None


def _numbers(counts: list[int]) -> str:
    return ", ".join(map(str, counts)) or "no"

"""State of an engine as a plain dictionary, without any framework.

    torch.save(state_dict(engine), path)
    load_state_dict(engine, torch.load(path, mmap=True, weights_only=True))

The tensors are mappings of the bucket files, so that neither direction holds the state in memory.
The dictionary has numbers, texts, lists and tensors only: nothing in it needs unpickling code.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from gds_optimizer.codecs import get_codec
from gds_optimizer.engine import Engine
from gds_optimizer.errors import SnapshotError
from gds_optimizer.mapped_state import map_state
from gds_optimizer.mapping import files_behind
from gds_optimizer.plan import MAIN_PLANE
from gds_optimizer.stepper import copy_value, set_option

FORMAT = "gds-optimizer state"
VERSION = 1


def state_dict(engine: Engine) -> dict[str, Any]:
    """Everything an engine keeps, and its optimizer's options.

    Returns:
        "format", "version", "step" (completed steps), "groups" (options and shard names of each
        parameter group), and "shards": by shard name "has_state", "scalars" and "planes", 1-D
        tensors by name. Planes of a shard without state are zeros. The tensors are good until
        the engine's next step, which changes what they show.

    Raises:
        StepFailedError: the state is torn.
    """
    mapped = map_state(engine)
    shards: dict[str, Any] = {}
    for index, (name, has_state, scalars) in enumerate(engine.shard_scalars()):
        planes = mapped.tensors(index) if engine.is_streamed(index) else {}
        shards[name] = {
            "has_state": has_state,
            "scalars": {key: copy_value(value) for key, value in scalars.items()},
            "planes": planes,
        }
    for name, key, tensor in engine.resident_tensors():
        shards[name]["planes"][key] = tensor
    groups = [
        {
            "options": {k: copy_value(v) for k, v in group.items() if k != "params"},
            "shards": [engine.name_of(main) for main in group["params"]],
        }
        for group in engine.plan.optimizer.param_groups
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": engine.steps,
        "groups": groups,
        "shards": shards,
    }


@torch.no_grad()
def load_state_dict(engine: Engine, state: dict[str, Any]) -> None:
    """Make what `state_dict` gave the engine's state; the model's parameters follow the mains.

    Bucket size, slots and directories may differ from when it was made.

    Raises:
        SnapshotError: it is no such dictionary, or of other shards, groups or options. The
            engine's state is what it was.
        StepFailedError: the state that is to be replaced is torn.
    """
    if (
        not isinstance(state, dict)
        or state.get("format") != FORMAT
        or state.get("version") != VERSION
    ):
        found = state if isinstance(state, dict) else {}
        raise SnapshotError(
            f"this is no state of an engine: wanted format {FORMAT!r} version {VERSION}, got "
            f"{found.get('format')!r} version {found.get('version')!r}"
        )
    shards = state["shards"]
    _check_names(engine, state)
    _check_not_stale(engine, state)
    for index in range(len(engine.plan.bindings)):
        _check_planes(engine, index, shards[engine.plan.bindings[index].name])
    mapped = map_state(engine, writable=True)
    engine.steps = state["step"]
    for index, binding in enumerate(engine.plan.bindings):
        if engine.is_streamed(index):
            for key, target in mapped.tensors(index).items():
                target.copy_(shards[binding.name]["planes"][key])
    mapped.commit()
    engine.restore(
        state["step"],
        engine.records,
        {
            binding.name: (shards[binding.name]["has_state"], _scalars(engine, index, shards))
            for index, binding in enumerate(engine.plan.bindings)
        },
    )
    resident = {(name, key) for name, key, _ in engine.resident_tensors()}
    for index, binding in enumerate(engine.plan.bindings):
        for key, tensor in shards[binding.name]["planes"].items():
            if (binding.name, key) in resident or not engine.is_streamed(index):
                engine.set_resident(binding.name, key, tensor)
    for group, saved in zip(engine.plan.optimizer.param_groups, state["groups"], strict=True):
        for key, value in saved["options"].items():
            set_option(group, key, copy_value(value))
    engine.update_model()


def _check_not_stale(engine: Engine, state: dict[str, Any]) -> None:
    """A dictionary that was never saved shows the engine's files, which steps have changed."""
    if state["step"] == engine.steps:
        return
    # What lives in memory is written to new files each time, which no step changes.
    in_files = [p for i, p in enumerate(engine.store.paths) if i not in engine.store.in_memory]
    own = {(status.st_dev, status.st_ino) for status in map(os.stat, in_files)}
    planes = (tensor for shard in state["shards"].values() for tensor in shard["planes"].values())
    if not own.isdisjoint(files_behind(planes)):
        raise SnapshotError(
            f"the state of step {state['step']} shows the engine's own files, which hold step "
            f"{engine.steps} by now: save the dictionary, or clone its tensors, before the next "
            "step"
        )


def _scalars(engine: Engine, index: int, shards: dict[str, Any]) -> dict[str, Any]:
    """Counters of a shard, on the device where the optimizer keeps them."""
    initial = engine.plan.schemas[index].initial or {}
    scalars = {}
    for key, value in shards[engine.plan.bindings[index].name]["scalars"].items():
        value, like = copy_value(value), initial.get(key)
        if isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor):
            value = value.to(like.device)  # `torch.load` may have been told to use another one
        scalars[key] = value
    return scalars


def _check_names(engine: Engine, state: dict[str, Any]) -> None:
    groups = engine.plan.optimizer.param_groups
    names = {binding.name for binding in engine.plan.bindings}
    differing = sorted(names ^ set(state["shards"]))
    if differing or len(groups) != len(state["groups"]):
        raise SnapshotError(
            f"the state is of other parameters: {len(state['groups'])} groups (wanted "
            f"{len(groups)}), and {len(differing)} shards are in one of the two only"
            f"{': ' + differing[0] if differing else ''}"
        )
    for number, (group, saved) in enumerate(zip(groups, state["groups"], strict=True)):
        own = {engine.name_of(main) for main in group["params"]}
        if own != set(saved["shards"]):
            other = min(own ^ set(saved["shards"]))
            raise SnapshotError(
                f"{other} is in parameter group {number} of the state or of the optimizer, not of "
                "both: build the optimizer with the same groups"
            )


def _check_planes(engine: Engine, index: int, entry: dict[str, Any]) -> None:
    binding, planes = engine.plan.bindings[index], entry["planes"]
    dtypes = {
        plane.name: get_codec(plane.codec).dtype for plane in engine.plan.schemas[index].planes
    }
    dtypes[MAIN_PLANE] = binding.main.dtype
    wanted = set(dtypes)
    if not engine.is_streamed(index):
        # What it has beside its main depends on whether it was stepped.
        is_resident = not binding.keeps_main and binding.main.numel()
        wanted = set(planes) & wanted | ({MAIN_PLANE} if is_resident else set())
    if set(planes) != wanted:
        raise SnapshotError(
            f"the state has {', '.join(sorted(planes)) or 'nothing'} of {binding.name}, wanted "
            f"{', '.join(sorted(wanted))}: it is of another optimizer or other options"
        )
    for key, tensor in planes.items():
        if (tensor.numel(), tensor.dtype) != (binding.main.numel(), dtypes[key]):
            raise SnapshotError(
                f"{key} of {binding.name} has {tensor.numel()} elements of {tensor.dtype} in the "
                f"state, wanted {binding.main.numel()} of {dtypes[key]}"
            )

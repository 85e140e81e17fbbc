"""State of an engine as a plain dictionary, without any framework.

    torch.save(state_dict(engine), path)
    load_state_dict(engine, torch.load(path, mmap=True, weights_only=True))

The tensors are mappings of the bucket files, so that neither direction holds the state in memory.
The dictionary has numbers, texts, lists and tensors only: nothing in it needs unpickling code.
"""

from __future__ import annotations

from typing import Any

import torch

from gds_optimizer.engine import Engine
from gds_optimizer.errors import SnapshotError
from gds_optimizer.mapped_state import map_state
from gds_optimizer.stepper import copy_value

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
        SnapshotError: it is no such dictionary, or of other shards or groups.
    """
    if state.get("format") != FORMAT or state.get("version") != VERSION:
        raise SnapshotError(
            f"this is no state of an engine: wanted format {FORMAT!r} version {VERSION}, got "
            f"{state.get('format')!r} version {state.get('version')!r}"
        )
    shards = state["shards"]
    groups = engine.plan.optimizer.param_groups
    names = [binding.name for binding in engine.plan.bindings]
    if set(names) != set(shards) or len(groups) != len(state["groups"]):
        differing = sorted(set(names) ^ set(shards))
        raise SnapshotError(
            f"the state is of other parameters: {len(state['groups'])} groups (wanted "
            f"{len(groups)}), and {len(differing)} shards are in one of the two only"
            f"{': ' + differing[0] if differing else ''}"
        )
    for index, name in enumerate(names):
        planes, numel = shards[name]["planes"], engine.plan.bindings[index].main.numel()
        for key, tensor in planes.items():
            if tensor.numel() != numel:
                raise SnapshotError(f"{key} of {name} has {tensor.numel()} elements, not {numel}")
    engine.steps = state["step"]
    mapped = map_state(engine, writable=True)
    for index, name in enumerate(names):
        if engine.is_streamed(index):
            for key, target in mapped.tensors(index).items():
                target.copy_(shards[name]["planes"][key])
    mapped.commit()
    engine.restore(
        state["step"],
        engine.records,
        {name: (shards[name]["has_state"], dict(shards[name]["scalars"])) for name in names},
    )
    resident = {(name, key) for name, key, _ in engine.resident_tensors()}
    for index, name in enumerate(names):
        for key, tensor in shards[name]["planes"].items():
            if (name, key) in resident or not engine.is_streamed(index):
                engine.set_resident(name, key, tensor)
    for group, saved in zip(groups, state["groups"], strict=True):
        group.update({key: copy_value(value) for key, value in saved["options"].items()})
    engine.update_model()

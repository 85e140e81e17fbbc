"""Whether a snapshot is of an engine's optimizer, and what goes by name whatever the layout."""

from __future__ import annotations

import re
from typing import Any

from gds_optimizer.engine import Engine
from gds_optimizer.errors import SnapshotError
from gds_optimizer.jsonvalues import from_json
from gds_optimizer.snapshot_read import Part
from gds_optimizer.stepper import set_option

_RANGE = re.compile(r"(?P<base>.*)\[(?P<start>\d+):(?P<end>\d+)\]")

Scalars = dict[str, tuple[bool, dict[str, Any]]]
"""By shard: whether it has state, and its counters."""


def split_name(shard: str) -> tuple[str, int, int | None]:
    """Name of a shard's parameter, and which elements of it the shard has (from, to if known)."""
    match = _RANGE.fullmatch(shard)
    if match is None:
        return shard, 0, None
    return match["base"], int(match["start"]), int(match["end"])


def check_optimizer(engine: Engine, part: Part) -> None:
    """Two classes may keep the same planes and count steps in different places."""
    saved = part.manifest["optimizer"].rpartition(".")[2]
    own = type(engine.plan.optimizer).__name__
    if saved != own:
        raise SnapshotError(
            f"the snapshot {part.directory} is of the optimizer {saved}, not {own}: build the same "
            "one, or use a checkpoint in Megatron's own format"
        )


def check_groups(engine: Engine, parts: list[Part]) -> None:
    """Options go by the number of a group, so its parameters must be the ones that it had."""
    groups = engine.plan.optimizer.param_groups
    group_of: dict[str, int] = {}
    for part in parts:
        saved = part.manifest["groups"]
        if len(groups) != len(saved):
            raise SnapshotError(
                f"the snapshot {part.directory} has {len(saved)} parameter groups, the optimizer "
                f"{len(groups)}: build it with the same groups"
            )
        for number, group in enumerate(saved):
            group_of |= {split_name(shard)[0]: number for shard in group["shards"]}
    for number, group in enumerate(groups):
        for main in group["params"]:
            base = split_name(engine.name_of(main))[0]
            if group_of.get(base, number) != number:
                raise SnapshotError(
                    f"{base} is in parameter group {group_of[base]} of the snapshot "
                    f"{parts[0].directory}, and in group {number} of the optimizer: build it with "
                    "the same groups"
                )


def take_groups(engine: Engine, part: Part) -> None:
    """Give the optimizer the options of every group."""
    groups = engine.plan.optimizer.param_groups
    for group, saved in zip(groups, part.manifest["groups"], strict=True):
        for key, data in saved["options"].items():
            set_option(group, key, from_json(data, engine.pool.device))


def saved_scalars(engine: Engine, part: Part, shard: str) -> tuple[bool, dict[str, Any]]:
    """Whether a saved shard has state, and its counters."""
    entry = part.manifest["shards"][shard]
    values = {k: from_json(v, engine.pool.device) for k, v in entry["scalars"].items()}
    return entry["has_state"], values

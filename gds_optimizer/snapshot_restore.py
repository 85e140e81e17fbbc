"""Taking up a snapshot, in two phases: finding out that it fits, and making it the state.

Between the two all ranks agree, so that what does not fit on one of them changes nothing anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.direct_file import copy_file
from gds_optimizer.engine import Engine
from gds_optimizer.errors import (
    ConfigError,
    CorruptBucketError,
    IoError,
    SnapshotError,
)
from gds_optimizer.snapshot import Placement
from gds_optimizer.snapshot_match import (
    check_groups,
    check_optimizer,
    saved_scalars,
    take_groups,
)
from gds_optimizer.snapshot_read import check_footer, open_part, own_part_key
from gds_optimizer.snapshot_reshard import other_layout
from gds_optimizer.written_out import load_bucket


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (CorruptBucketError, IoError, ConfigError) as error:
        raise SnapshotError(f"the snapshot in {path} is damaged: {error}") from error


def prepare_part(
    engine: Engine, path: Path, whole: dict[str, Any], name: str, placement: Placement
) -> Callable[[], None]:
    """Find out whether a snapshot can become the state of an engine; nothing is changed.

    With the layout that the snapshot was taken from, the files will be linked (or, from another
    file system, copied). With another number of data-parallel ranks, other bucket sizes or moments
    kept in another form, elements are found by shard name and range.

    Args:
        engine: is to get the state, also after a failed step.
        path: a complete snapshot.
        whole: what `describe` says of it.
        name: the engine's own part, as it was taken.
        placement: this process.

    Returns:
        What makes it the state, for an engine whose state was given up (`Engine.abandon_state`);
        the model's parameters follow. It raises SnapshotError where the data turns out damaged:
        give the state up again, then.

    Raises:
        SnapshotError: it is damaged (names the bucket) or does not fit.
        ClosedError, ForkedError, UnsupportedError: the engine cannot be restored now.
    """
    engine.check_restorable()
    with _damage_named(path):
        take = _same_layout(engine, path, whole, name, placement)
        if take is None:
            take = other_layout(engine, path, whole, name, placement)
    chosen = take

    def take_over() -> None:
        with _damage_named(path):
            chosen()
            engine.update_model()

    return take_over


def _same_layout(
    engine: Engine, path: Path, whole: dict[str, Any], name: str, placement: Placement
) -> Callable[[], None] | None:
    """What takes the files as they are; None where they do not fit."""
    key = own_part_key(whole, placement.rank, name)
    if key is None:
        return None
    part = open_part(path, whole, key)
    if (
        part.manifest["layout_id"] != engine.layout.layout_id.hex()
        or part.manifest["coordinates"] != placement.of(name)
        or set(part.manifest["shards"]) != {binding.name for binding in engine.plan.bindings}
    ):
        return None
    check_optimizer(engine, part)
    check_groups(engine, [part])
    for bucket in engine.layout.buckets:
        check_footer(part, bucket.index)
    for index in part.upper:
        part.upper.checked(index)

    @torch.no_grad()
    def take() -> None:
        for bucket in engine.layout.buckets:
            if bucket.index in engine.store.in_memory:
                if not part.record(bucket.index).is_blank:
                    load_bucket(engine, bucket.index, part.file(bucket.index))
            elif not engine.store.adopt_frozen(bucket.index, part.file(bucket.index)):
                engine.store.file_for_write(bucket.index)
                copy_file(part.file(bucket.index), engine.store.paths[bucket.index])
        records = [part.record(bucket.index) for bucket in engine.layout.buckets]
        shards = {shard: saved_scalars(engine, part, shard) for shard in part.manifest["shards"]}
        engine.restore(part.manifest["step"], records, shards)
        for index in part.upper:
            engine.halves.give(index, part.upper.checked(index))
        for entry, values in part.resident():
            engine.set_resident(entry["shard"], entry["key"], values)
        take_groups(engine, part)

    return take

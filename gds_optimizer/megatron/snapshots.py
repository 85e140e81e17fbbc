"""Snapshots of a streamed Megatron optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from gds_optimizer.engine import Engine
from gds_optimizer.megatron.shards import distributed_optimizers
from gds_optimizer.snapshot import Placement
from gds_optimizer.snapshots import SnapshotCopy, restore_snapshot, take_snapshot


def _gather(value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _parallel_sizes() -> dict[str, int]:
    """Sizes that decide which part of a parameter a rank has, apart from data parallelism."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return {}
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _engines(optimizer: Any) -> tuple[dict[str, Engine], Placement]:
    """This rank's engines by name, and where this rank is.

    Ranks with the same index of the data-parallel group hold parts of the same parameters;
    experts have groups of their own.
    """
    initialized = dist.is_initialized()
    placement = Placement(
        rank=dist.get_rank() if initialized else 0,
        world_size=dist.get_world_size() if initialized else 1,
        gather=_gather,
    )
    engines = {}
    for index, part in enumerate(distributed_optimizers(optimizer)):
        engine = getattr(part, "engine", None)
        if engine is not None:
            engines[f"opt{index}"] = engine
            placement.coordinates[f"opt{index}"] = {
                **_parallel_sizes(),
                "model": part.data_parallel_group_idx,
                "dp": part.data_parallel_group.rank(),
            }
    return engines, placement


def snapshot(optimizer: Any, path: str | Path, *, keep_last: int | None = None) -> None:
    """Take a snapshot of the optimizer's state; every rank calls it between two steps.

    The model's parameters are not in it (they follow from the mains), nor are the scheduler and
    the loss scaler.

    Args:
        optimizer: a streamed `ChainedOptimizer` or `DistributedOptimizer`.
        path: directory for the snapshot, visible to all ranks, on the file system of the state.
        keep_last: remove older snapshots beside it until so many are left, and what killed runs
            left there.

    Raises:
        SnapshotError, NoSpaceError, StepFailedError: see `take_snapshot`.
    """
    engines, placement = _engines(optimizer)
    take_snapshot(engines, Path(path), placement=placement, keep_last=keep_last)


def restore(optimizer: Any, path: str | Path) -> int:
    """Make a snapshot the state of the optimizer, and the model's parameters follow it.

    Every rank calls it. The number of data-parallel ranks and the size of buckets may differ from
    when it was taken; tensor, pipeline and expert parallelism may not.

    Returns:
        The step that it was taken after.

    Raises:
        SnapshotError: it is incomplete or damaged (names the bucket), or does not fit.
    """
    engines, placement = _engines(optimizer)
    step = restore_snapshot(engines, Path(path), placement=placement)
    for chunk in getattr(optimizer, "model_chunks", []):
        chunk.start_param_sync(force_sync=True)
    return step


def copy_snapshot(
    optimizer: Any,
    source: str | Path,
    target: str | Path,
    *,
    bytes_per_s: float | None = None,
    keep_last: int | None = None,
) -> SnapshotCopy:
    """Copy a snapshot to other storage in the background while training goes on.

    Every rank calls it. The copy is a snapshot like any other once `snapshot.json` is in it, which
    comes last. A failure is logged, again when the optimizer's next step begins, and raised by
    `wait` of what is returned; earlier copies stay as they are.

    Args:
        optimizer: says which part is this rank's.
        source: a complete snapshot; it cannot be removed before the copy has ended.
        target: directory for the copy, visible to all ranks.
        bytes_per_s: limit of each rank; None for none.
        keep_last: once the copy is complete, remove older complete snapshots beside it until so
            many are left, and what killed runs left there.

    Returns:
        A handle: progress, waiting, giving up.

    Raises:
        SnapshotError: the source is incomplete or damaged, or the target is taken.
        OSError: the target cannot be made.
    """
    engines, placement = _engines(optimizer)
    return SnapshotCopy(
        Path(source),
        Path(target),
        engines=engines,
        placement=placement,
        bytes_per_s=bytes_per_s,
        keep_last=keep_last,
    )

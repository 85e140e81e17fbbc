"""Snapshots of a streamed Megatron optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from gds_optimizer.engine import Engine
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.megatron.shards import distributed_optimizers, named_shards
from gds_optimizer.snapshot import Placement, gather_by_rank
from gds_optimizer.snapshots import SnapshotCopy, restore_snapshot, take_snapshot


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


def _why_not(optimizer: Any) -> str:
    """Why there would be nothing of this rank in a snapshot though it has parameters, or ""."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parts = [p for p in distributed_optimizers(optimizer) if isinstance(p, DistributedOptimizer)]
    if not parts:
        return f"{type(optimizer).__name__} has no DistributedOptimizer"
    for part in parts:
        if getattr(part, "engine", None) is None and any(True for _ in named_shards(part)):
            return f"the state of {type(part).__name__} is not streamed"
    return ""


def _engines(optimizer: Any) -> tuple[dict[str, Engine], Placement]:
    """This rank's engines by name, and where this rank is. Every rank calls it.

    Ranks with the same index of the data-parallel group hold parts of the same parameters;
    experts have groups of their own.

    Raises:
        UnsupportedError: on all ranks, if the optimizer is not streamed on one of them, or no rank
            has anything that is. A rank that owns no parameter needs no engine.
    """
    initialized = dist.is_initialized()
    placement = Placement(
        rank=dist.get_rank() if initialized else 0,
        world_size=dist.get_world_size() if initialized else 1,
        gather=gather_by_rank,
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
    found = placement.together(
        "looking for streamed state", lambda: (_why_not(optimizer), len(engines))
    )
    problems = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(found) if why]
    if not problems and not any(count for _, count in found):
        problems = ["no rank has parameters whose state is streamed"]
    if problems:
        raise UnsupportedError(
            f"snapshots are of streamed state ({problems[0]}): build the optimizer inside "
            "`streamed_optimizer`, give it to `attach`, or save a checkpoint of Megatron's instead"
        )
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
        UnsupportedError: the optimizer is not streamed.
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
        UnsupportedError: the optimizer is not streamed.
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
    comes last. A failure on one rank is one on all: it is logged, again when the optimizer's next
    step begins, and raised by `wait` of what is returned; earlier copies stay as they are.

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
        UnsupportedError: the optimizer is not streamed.
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

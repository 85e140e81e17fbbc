"""The benchmark in processes of its own: one for each rank, or one for each I/O path.

Settings of KvikIO and cuFile belong to a process, and cuFile reads its configuration once: paths
that are compared must not share one.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.bench.steps import BenchResult, Team, device_named, run_bench
from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import ConfigError, GdsOptimizerError, IoPathError, NoSpaceError
from gds_optimizer.telemetry import show_log

_RAISED_AS_THEY_ARE = {kind.__name__: kind for kind in (ConfigError, IoPathError, NoSpaceError)}
_BARRIER_LIMIT = timedelta(hours=4)
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every rank is told.

    Attributes:
        numel: parameters of each rank.
        device: "cpu", "cuda:1", or None or "cuda" for a GPU each, in turn.
        options: further keyword arguments of `run_bench`.
    """

    config: StreamConfig
    numel: int
    steps: int
    device: str | None
    ranks: int
    options: dict[str, Any]


class ProcessTeam(Team):
    """Ranks that talk through gloo."""

    def __init__(self, rank: int, size: int, meeting_point: Path) -> None:
        self.rank, self.size = rank, size
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{meeting_point}",
            rank=rank,
            world_size=size,
            timeout=_BARRIER_LIMIT,
        )

    def barrier(self) -> None:
        torch.distributed.barrier()

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value)
        return found


def run_in_processes(settings: Settings) -> BenchResult:
    """Run the benchmark on all ranks and put their results together.

    Raises:
        ConfigError, IoPathError, NoSpaceError: as a rank raised it.
        GdsOptimizerError: a rank failed; the message says which, and why.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="gds-optimizer-bench-") as name:
        meeting = Path(name)
        processes: list[BaseProcess] = [
            context.Process(target=_rank_main, args=(rank, settings, meeting))
            for rank in range(settings.ranks)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, meeting)
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
                process.join()
        result: BenchResult = pickle.loads((meeting / "result").read_bytes())
    return result


def _wait(processes: list[BaseProcess], meeting: Path) -> None:
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            break  # the others wait for it
        time.sleep(_LOOK_S)
    for rank, process in enumerate(processes):
        if not process.exitcode:
            continue
        reported = meeting / f"error{rank}"
        if reported.exists():
            kind, message = pickle.loads(reported.read_bytes())
            raise _RAISED_AS_THEY_ARE.get(kind, GdsOptimizerError)(message)
        raise GdsOptimizerError(
            f"rank {rank} of the benchmark ended with status {process.exitcode}: see its messages "
            "above"
        )


def _rank_main(rank: int, settings: Settings, meeting: Path) -> None:
    show_log()
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(settings.ranks))  # ranks share host memory
    try:
        team = (
            Team() if settings.ranks == 1 else ProcessTeam(rank, settings.ranks, meeting / "gloo")
        )
        result = run_bench(
            settings.config,
            numel=settings.numel,
            steps=settings.steps,
            device=_device_of(rank, settings.device),
            progress=_show if rank == 0 else lambda line: None,
            team=team,
            **settings.options,
        )
    except GdsOptimizerError as error:
        report = pickle.dumps((type(error).__name__, str(error)))
        (meeting / f"error{rank}").write_bytes(report)
        sys.exit(1)
    if rank == 0:
        (meeting / "result").write_bytes(pickle.dumps(result))


def _device_of(rank: int, name: str | None) -> torch.device:
    if name in (None, "cuda") and torch.cuda.is_available():
        name = f"cuda:{rank % torch.cuda.device_count()}"
    return device_named(name)


def _show(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def run_paths(settings: Settings, paths: list[str]) -> dict[str, BenchResult | str]:
    """Run the benchmark by one I/O path after the other, each in processes of its own.

    Returns:
        For each path its result, or why it is not available here.

    Raises:
        GdsOptimizerError: anything but a path that is not to be had.
    """
    found: dict[str, BenchResult | str] = {}
    for path in paths:
        _show(f"--- {path}")
        config = replace(settings.config, io=path)
        try:
            found[path] = run_in_processes(replace(settings, config=config))
        except (IoPathError, ConfigError) as error:
            # A ConfigError here: the path does not go with the kind of device.
            found[path] = str(error)
    return found


def paths_to_text(found: dict[str, BenchResult | str]) -> str:
    """The paths side by side, for people."""
    head = ("", *found)
    rows: list[tuple[str, ...]] = [head]
    results = [each if isinstance(each, BenchResult) else None for each in found.values()]
    for label, take in (
        ("step, s (median)", lambda r: f"{r.median_s:.3f}"),
        ("GB/s", lambda r: f"{r.moved_bytes / r.median_s / 1e9:.2f}"),
        ("times the limit", lambda r: f"{r.ratio_to_limit:.2f}"),
        ("drives, mixed GB/s", lambda r: f"{r.limit.mixed:.2f}"),
        ("KvikIO, by way", lambda r: _counted(r.counters, scale=1e9, unit=" GB")),
        ("cuFile, operations", lambda r: _counted(r.cufile_operations or {})),
    ):
        rows.append((label, *("-" if r is None else take(r) for r in results)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += [
        f"{path} is not available: {why}" for path, why in found.items() if isinstance(why, str)
    ]
    return "\n".join(lines)


def _counted(counts: dict[str, int], *, scale: float = 1, unit: str = "") -> str:
    shown = [f"{key} {count / scale:.10g}{unit}" for key, count in counts.items() if count]
    return ", ".join(shown) or "nothing counted"

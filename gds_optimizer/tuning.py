"""What is chosen by measuring at setup: path, threads and size of tasks.

Scope: which of these is anybody's choice and which is measured, on which drives, once for all ranks
of a machine. `tuning_measure` measures, `tuning_cache` remembers, `tuning_result` says what was
chosen, and `tuning_shape` makes slots and bucket size of it. Anti-scope: nothing that is chosen
here changes a result or takes more memory than the defaults.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from gds_optimizer.config import StreamConfig, parse_size
from gds_optimizer.drive_speeds import MIN_STATE_BYTES, several_drives
from gds_optimizer.errors import ConfigError, GdsOptimizerError
from gds_optimizer.io import PAGE_BYTES, IoBackend, IoPath, make_backend
from gds_optimizer.probing.report import ProbeReport
from gds_optimizer.tuning_cache import TuningCache, drive_key
from gds_optimizer.tuning_measure import (
    LIMIT_S,
    MEASURING_FAILED,
    NOTICEABLE,
    TRANSFER_BYTES,
    TRANSFERS,
    Measurement,
    Point,
    TuningError,
    measure_path,
)
from gds_optimizer.tuning_result import DriveTiming, Tuning, path_rates

logger = logging.getLogger(__name__)

MiB = 2**20
GRID = (
    Point(16, 16 * MiB),
    Point(32, 8 * MiB),
    Point(8, 16 * MiB),
    Point(16, 8 * MiB),
    Point(32, 4 * MiB),
    Point(64, 4 * MiB),
)
"""The defaults first, then what may suit drives better; none pins more host memory than they do."""

_THREADS_VARIABLES = ("KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS")
_TASK_VARIABLE = "KVIKIO_TASK_SIZE"

Make = Callable[[IoPath, Point], IoBackend]


def is_wanted(config: StreamConfig, state_bytes: int) -> bool:
    """Whether so much state on drives, of one rank, is worth measuring for."""
    return config.tune == "auto" and state_bytes >= MIN_STATE_BYTES


def grid_for(config: StreamConfig, io_path: IoPath) -> tuple[Point, ...]:
    """What may be tried by a path: what was given stays, as a setting or in the environment.

    Returns:
        The point that is taken unmeasured, and, unless both numbers were given, others.

    Raises:
        ConfigError: one of KvikIO's variables is not a number that can be used.
    """
    threads = config.io_threads if config.is_given("io_threads") else _threads_variable(io_path)
    size = config.io_task_size if config.is_given("io_task_size") else _task_variable(io_path)
    first = Point(threads or int(config.io_threads), size or int(config.io_task_size))
    others = (Point(threads or point.threads, size or point.task_bytes) for point in GRID)
    # As much host memory at most as the defaults pin, or as what was given makes them.
    most_bytes = max(first.threads * first.task_bytes, GRID[0].threads * GRID[0].task_bytes)
    fitting = (point for point in others if point.threads * point.task_bytes <= most_bytes)
    return tuple(dict.fromkeys((first, *fitting)))


def _threads_variable(io_path: IoPath) -> int | None:
    for name in () if io_path is IoPath.HOST else _THREADS_VARIABLES:
        text = os.environ.get(name)
        if text:
            if not text.isdecimal() or not 1 <= int(text) <= 256:
                raise ConfigError(
                    f"the environment variable {name} is {text!r}, wanted a whole number from 1 "
                    "to 256: correct or unset it, or give --stream-optimizer-state-io-threads"
                )
            return int(text)
    return None


def _task_variable(io_path: IoPath) -> int | None:
    text = "" if io_path is IoPath.HOST else os.environ.get(_TASK_VARIABLE)
    if not text:
        return None
    size = parse_size(text) if text.isdecimal() else 0
    if not PAGE_BYTES <= size <= 2**30 or size % PAGE_BYTES:
        raise ConfigError(
            f"the environment variable {_TASK_VARIABLE} is {text!r}, wanted bytes from "
            f"{PAGE_BYTES} to {2**30}, a multiple of {PAGE_BYTES}: correct or unset it, or give "
            "--stream-optimizer-state-io-task-size"
        )
    return size


def tune(
    config: StreamConfig,
    report: ProbeReport,
    device: torch.device,
    state_bytes: int,
    *,
    make: Make | None = None,
    cache: TuningCache | None = None,
) -> Tuning:
    """Choose what nobody has chosen, by measuring or from what was measured lately.

    Ranks of a machine that call this at the same time measure one after the other, or rather one
    of them measures and the others find its result. Nothing waits for a rank that does not come.

    Args:
        config: what was given.
        report: which paths were proven; without `io`, all that were are timed.
        device: where buffers live.
        state_bytes: that this rank keeps on drives.
        make: makes the backends; for tests.
        cache: where results are kept, by default the user's.

    Returns:
        What was chosen. A measurement that fails is no failure: a warning says why, and the
        defaults are taken; a path that alone could not be measured is not taken.

    Raises:
        ConfigError: one of KvikIO's variables is not a number that can be used.
        IoPathError: no path was proven.
    """
    began = time.perf_counter()
    candidates = report.candidates
    grids = {io_path: grid_for(config, io_path) for io_path in candidates}
    unmeasured = report.io_path
    why_not = ""
    if config.tune == "never":
        why_not = "tuning is switched off"
    elif state_bytes < MIN_STATE_BYTES:
        why_not = f"{state_bytes / 2**30:.2f} GiB of state on drives are not worth it"
    elif len(candidates) == 1 and len(grids[unmeasured]) == 1:
        why_not = "path, threads and size of tasks are given"
    if why_not:
        return Tuning(unmeasured, grids[unmeasured][0], why_not=why_not)
    try:
        cache = cache or TuningCache()
        timings = time_paths(
            config.directories,
            grids,
            make or _maker(config.directories, device),
            memory_bytes=config.slots * config.bucket_size,
            key=_key(report, device),
            cache=cache,
        )
    except (OSError, GdsOptimizerError) as error:
        logger.warning(
            "the drives behind %s could not be measured (%s): the defaults are taken; "
            "--stream-optimizer-state-tune never does so without trying",
            ", ".join(map(str, config.directories)),
            error,
        )
        return Tuning(unmeasured, grids[unmeasured][0], why_not="the measurement failed")
    io_path, point = choose(timings, grids)
    return Tuning(io_path, point, timings, seconds=time.perf_counter() - began)


def choose(
    timings: Sequence[DriveTiming], grids: Mapping[IoPath, Sequence[Point]]
) -> tuple[IoPath, Point]:
    """The path with the best rate over all drives, and the point that suits them all.

    Args:
        timings: at least one of each path, for every drive.
        grids: paths, the one to be preferred if the rates are equal first.
    """
    rates = path_rates(timings)
    io_path = max((path for path in grids if path in rates), key=lambda path: rates[path])
    own = [each.measurement for each in timings if each.io_path is io_path]
    first = grids[io_path][0]
    shared = [point for point in grids[io_path] if all(point in m.points for m in own)]
    if not shared:
        return io_path, first
    sums = {point: sum(m.points[point] for m in own) for point in shared}
    best = max(shared, key=lambda point: sums[point])
    is_better = first not in sums or sums[best] > NOTICEABLE * sums[first]
    return io_path, best if is_better else first


def time_paths(
    directories: Sequence[Path],
    grids: Mapping[IoPath, Sequence[Point]],
    make: Make,
    *,
    key: str,
    cache: TuningCache,
    memory_bytes: int = TRANSFERS * TRANSFER_BYTES,
    limit_s: float = LIMIT_S,
    fresh: bool = False,
) -> tuple[DriveTiming, ...]:
    """Time every path on the drive of every directory, or remember it.

    Args:
        directories: several on one file system count once.
        grids: what is tried by each path.
        make: makes the backends.
        key: what the results depend on beside drive, path and grid.
        cache: where they are kept; its lock is what processes of a machine wait for.
        memory_bytes, limit_s: see `measure_path`; the limit is for each drive and path.
        fresh: measure what is remembered as well.

    Returns:
        For every drive the same paths: one that fails on a drive is left out, with a warning,
        where another one does not.

    Raises:
        TurnError: another process has measured for too long.
        OSError, GdsOptimizerError: no path could be measured on some drive.
    """
    drives: dict[int, Path] = {}
    for directory in directories:
        drives.setdefault(os.stat(directory).st_dev, directory)
    failed: dict[IoPath, Exception] = {}
    timings = []
    for directory in drives.values():
        drive = drive_key(directory)
        # One drive at a time, and its lock for all paths: nobody holds one and wants another.
        with cache.turn(drive):
            for io_path, grid in grids.items():
                if io_path in failed:
                    continue
                points = ",".join(f"{threads}x{size}" for threads, size in grid)
                name = f"{drive}:{io_path}:{points}:{memory_bytes}:{key}"
                found = None if fresh else Measurement.from_dict(cache.get(name) or {})
                is_cached = found is not None
                try:
                    found = found or measure_path(
                        directory,
                        _for_path(make, io_path),
                        grid,
                        memory_bytes=memory_bytes,
                        limit_s=limit_s,
                    )
                except MEASURING_FAILED as error:
                    failed[io_path] = error
                    if len(failed) < len(grids):
                        continue
                    if isinstance(error, OSError | GdsOptimizerError):
                        raise
                    raise TuningError(f"{type(error).__name__}: {error}") from error
                if not is_cached:
                    cache.put(name, found.to_dict())
                timings.append(DriveTiming(directory, io_path, found, is_cached))
    for io_path, why in failed.items():
        logger.warning("the path %s could not be measured and is not taken: %s", io_path, why)
    return tuple(each for each in timings if each.io_path not in failed)


def _for_path(make: Make, io_path: IoPath) -> Callable[[Point], IoBackend]:
    return lambda point: make(io_path, point)


def _maker(directories: Sequence[Path], device: torch.device) -> Make:
    queue_per_drive = several_drives(directories)

    def make(io_path: IoPath, point: Point) -> IoBackend:
        return make_backend(
            io_path,
            device=device,
            threads=point.threads,
            task_size_bytes=point.task_bytes,
            queue_per_drive=queue_per_drive,
        )

    return make


def _key(report: ProbeReport, device: torch.device) -> str:
    """What a rate depends on beside the drive: who moves the bytes, and from where."""
    if device.type != "cuda":
        return device.type
    return (
        f"kvikio {report.machine.kvikio_version}, cuFile {report.machine.libcufile_version}, "
        f"{torch.cuda.get_device_name(device)}"
    )


def time_report(report: ProbeReport, *, device: torch.device) -> tuple[ProbeReport, Tuning]:
    """Time what a probe has proven, whether it is remembered or not; for people who ask.

    Args:
        report: of a probe that has proven a path.
        device: where buffers live.

    Returns:
        The report with what was timed, and the path that is faster as its verdict.

    Raises:
        OSError, GdsOptimizerError: nothing could be measured.
    """
    began = time.perf_counter()
    config = StreamConfig(directories=tuple(each.path for each in report.directories))
    grids = {io_path: grid_for(config, io_path) for io_path in report.candidates}
    timings = time_paths(
        config.directories,
        grids,
        _maker(config.directories, device),
        memory_bytes=config.slots * config.bucket_size,
        key=_key(report, device),
        cache=TuningCache(),
        fresh=True,
    )
    io_path, point = choose(timings, grids)
    tuning = Tuning(io_path, point, timings, seconds=time.perf_counter() - began)
    return report.with_timings(io_path, tuning.path_timings()), tuning

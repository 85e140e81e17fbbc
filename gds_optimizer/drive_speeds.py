"""How fast the drives behind several directories are, measured the way their bytes will go.

A short measurement at setup: as many bytes read as written at the same time, which is what a step
does. Only the ratio of the rates matters, which decides how many buckets a directory gets. Where
tuning has measured the drives, its rates are taken; what it has not measured is kept in its cache.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gds_optimizer.config import StreamConfig
from gds_optimizer.io import IoBackend
from gds_optimizer.slots import SlotPool
from gds_optimizer.spread import equal_speeds
from gds_optimizer.tuning_cache import TuningCache, drive_key
from gds_optimizer.tuning_measure import MEASURING_FAILED, MOST_RATE, opened, scratch_file

logger = logging.getLogger(__name__)

MIN_STATE_BYTES = 2 * 2**30
"""State of a directory below which measuring would take longer than it saves in many steps."""

_HALF_BYTES = 64 * 2**20
_MEASURED_BYTES = 256 * 2**20
_LIMIT_S = 5.0
_TIMEOUT_S = 60.0


def measure_mixed_rate(directory: Path, backend: IoBackend) -> float:
    """Bytes a second that a directory's drive moves when it reads and writes at the same time.

    It writes a scratch file of 128 MiB, and then reads one half while it overwrites the other, in
    turn, until 256 MiB have moved or 5 seconds are over.

    Args:
        directory: an existing one; nothing stays in it.
        backend: moves the bytes.

    Raises:
        OSError: the file cannot be made (too little room).
        GdsOptimizerError: a transfer failed.
    """
    with (
        scratch_file(directory, 2 * _HALF_BYTES) as path,
        contextlib.closing(SlotPool(2, _HALF_BYTES, backend)) as pool,
        opened(backend, path) as file,
    ):
        written, read = (slot.buffer for slot in pool.slots)
        for half in (0, 1):  # the first write of fresh blocks is slower, and happens once
            file.write(written, half * _HALF_BYTES).wait(_TIMEOUT_S)
        moved, turn, began = 0, 0, time.perf_counter()
        while moved < _MEASURED_BYTES and time.perf_counter() - began < _LIMIT_S:
            transfers = (
                file.read(read, turn * _HALF_BYTES),
                file.write(written, (1 - turn) * _HALF_BYTES),
            )
            for transfer in transfers:
                transfer.wait(_TIMEOUT_S)
            moved += 2 * _HALF_BYTES
            turn = 1 - turn
        return moved / (time.perf_counter() - began)


def directory_speeds(
    config: StreamConfig,
    backend: IoBackend,
    state_bytes: int,
    *,
    measured: Mapping[int, float] | None = None,
) -> tuple[float, ...]:
    """The speeds by which the buckets of a rank are spread over its directories.

    Args:
        config: its `directory_weights` are taken where there are any.
        backend: moves the bytes.
        state_bytes: of all optimizers of this rank.
        measured: rates that are known already, by the number of the drive.

    Returns:
        One number for each directory; equal ones where there is one drive, or little state.
    """
    directories = config.directories
    if config.directory_weights:
        return config.directory_weights
    devices = [os.stat(directory).st_dev for directory in directories]
    if len(set(devices)) == 1 or state_bytes < MIN_STATE_BYTES * len(directories):
        return equal_speeds(len(directories))
    rates: dict[int, float] = dict(measured or {})
    for directory, device in zip(directories, devices, strict=True):
        if device in rates:
            continue
        try:
            rates[device] = _remembered_rate(directory, backend)
        except MEASURING_FAILED as error:
            logger.warning(
                "the speed of %s could not be measured (%s): every directory gets the same "
                "share; --stream-optimizer-state-dir-weights says otherwise",
                directory,
                error,
            )
            return equal_speeds(len(directories))
    # Directories of one drive share what it gives.
    speeds = tuple(rates[device] / devices.count(device) for device in devices)
    logger.info(
        "buckets are spread by what the drives give, reading and writing at once: %s",
        ", ".join(
            f"{directory} {speed / 1e9:.2f} GB/s"
            for directory, speed in zip(directories, speeds, strict=True)
        ),
    )
    return speeds


def _remembered_rate(directory: Path, backend: IoBackend) -> float:
    """What `measure_mixed_rate` gives, now or in the last days."""
    cache = TuningCache()
    key = f"{drive_key(directory)}:{backend.io_path}:mixed rate"
    known = (cache.get(key) or {}).get("mixed")
    if isinstance(known, int | float) and 0 < known <= MOST_RATE:
        return float(known)
    rate = measure_mixed_rate(directory, backend)
    cache.put(key, {"mixed": rate})
    return rate


def each_drive(directories: Sequence[Path]) -> list[Path]:
    """The first directory on each file system."""
    return list({os.stat(each).st_dev: each for each in reversed(directories)}.values())[::-1]


def several_drives(directories: Sequence[Path]) -> bool:
    """Whether these directories are on several file systems: each wants a queue of its own."""
    return len({os.stat(directory).st_dev for directory in directories}) > 1

"""How fast the drives behind several directories are, measured the way their bytes will go.

A short measurement at setup: as many bytes read as written at the same time, which is what a step
does. Only the ratio of the rates matters, which decides how many buckets a directory gets. What
was found is kept for a while in a file of the user's cache directory, which may be deleted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import GdsOptimizerError
from gds_optimizer.io import IoBackend
from gds_optimizer.slots import SlotPool
from gds_optimizer.spread import equal_speeds

logger = logging.getLogger(__name__)

CACHE_VERSION = 1
CACHE_DAYS = 30
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
    path = directory / f"gds-optimizer-speed-{os.getpid()}-{uuid.uuid4().hex[:8]}.bin"
    with contextlib.ExitStack() as undo:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        undo.callback(path.unlink)
        try:
            os.posix_fallocate(fd, 0, 2 * _HALF_BYTES)
        finally:
            os.close(fd)
        pool = SlotPool(2, _HALF_BYTES, backend)
        undo.callback(pool.close)
        written, read = (slot.buffer for slot in pool.slots)
        file = backend.open(path)
        undo.callback(file.close)
        undo.callback(file.quiesce, _TIMEOUT_S)
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
    cache = SpeedCache()
    rates: dict[int, float] = dict(measured or {})
    for directory, device in zip(directories, devices, strict=True):
        if device in rates:
            continue
        key = f"{backend.io_path}:{drive_identity(device)}"
        known = cache.get(key)
        if known is None:
            try:
                known = measure_mixed_rate(directory, backend)
            except (OSError, GdsOptimizerError) as error:
                logger.warning(
                    "the speed of %s could not be measured (%s): every directory gets the same "
                    "share; --stream-optimizer-state-dir-weights says otherwise",
                    directory,
                    error,
                )
                return equal_speeds(len(directories))
            cache.put(key, known)
        rates[device] = known
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


def drive_identity(device: int) -> str:
    """A file system's device number, and the model of its drive where the kernel tells it."""
    numbers = f"{os.major(device)}:{os.minor(device)}"
    place = Path("/sys/dev/block", numbers)
    for name in ("device/model", "../device/model"):  # of a whole disk, or of a partition's
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return f"{numbers}:{(place.resolve() / name).read_text().strip()}"
    return numbers


class SpeedCache:
    """What was measured lately, in `$XDG_CACHE_HOME/gds-optimizer/drives.json`.

    A file that cannot be read, is damaged or of another version counts as empty; one that cannot
    be written is left alone. Whoever writes last wins.

    Args:
        path: of the file, by default in the user's cache directory.
    """

    def __init__(self, path: Path | None = None) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        self.path = path or Path(base, "gds-optimizer", "drives.json")

    def get(self, key: str) -> float | None:
        """Bytes a second, if they were measured in the last days."""
        entry = self._entries().get(key)
        if not isinstance(entry, dict):
            return None
        rate, at_s = entry.get("mixed"), entry.get("at")
        if not isinstance(rate, int | float) or not isinstance(at_s, int | float):
            return None
        is_fresh = 0 <= time.time() - at_s < CACHE_DAYS * 86_400
        return float(rate) if is_fresh and 0 < rate < math.inf else None

    def put(self, key: str, bytes_per_s: float) -> None:
        entries = self._entries()
        entries[key] = {"mixed": bytes_per_s, "at": time.time()}
        text = json.dumps({"version": CACHE_VERSION, "drives": entries}, indent=1)
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=self.path.parent, prefix="drives-")
            try:
                with open(fd, "w") as file:
                    file.write(text)
                os.replace(name, self.path)
            except OSError:
                os.unlink(name)
                raise

    def _entries(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        if not isinstance(data, dict) or data.get("version") != CACHE_VERSION:
            return {}
        entries = data.get("drives")
        return entries if isinstance(entries, dict) else {}


def each_drive(directories: Sequence[Path]) -> list[Path]:
    """The first directory on each file system."""
    return list({os.stat(each).st_dev: each for each in reversed(directories)}.values())[::-1]


def several_drives(directories: Sequence[Path]) -> bool:
    """Whether these directories are on several file systems: each wants a queue of its own."""
    return len({os.stat(directory).st_dev for directory in directories}) > 1

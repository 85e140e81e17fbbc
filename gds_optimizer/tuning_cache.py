"""What was measured of a drive, kept for a while, and whose turn it is to measure one.

One file for each thing measured, in the directory `tuning` of the user's cache directory. Ranks of
a machine take turns by a lock that the kernel lets go of when its holder dies, so that one of them
measures a drive alone, the others find its result, and none waits for a process that is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gds_optimizer.errors import GdsOptimizerError
from gds_optimizer.probing.child import fs_magic

CACHE_VERSION = 2
CACHE_DAYS = 30
WAIT_S = 120.0
"""How long another process may take to measure a drive before its turn is given up."""

_POLL_S = 0.05
_MOST_BYTES = 2**20


class TurnError(GdsOptimizerError):
    """Another process has measured a drive for too long."""


def drive_key(directory: Path) -> str:
    """What a directory's drive is known by: file system, numbers, model and serial.

    A drive that does not tell its serial is known by the machine's name as well: the cache may be
    in a home directory that many machines share.
    """
    device = os.stat(directory).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    serial = ""
    place = Path("/sys/dev/block", numbers)
    for name in ("wwid", "device/wwid", "device/serial", "../wwid", "../device/serial"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            serial = (place.resolve() / name).read_text().strip()
        if serial:
            break
    return f"{_drive_identity(device)}:{serial or platform.node()}:{fs_magic(str(directory))}"


def _drive_identity(device: int) -> str:
    """A file system's device number, and the model of its drive where the kernel tells it."""
    numbers = f"{os.major(device)}:{os.minor(device)}"
    place = Path("/sys/dev/block", numbers)
    for name in ("device/model", "../device/model"):  # of a whole disk, or of a partition's
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return f"{numbers}:{(place.resolve() / name).read_text().strip()}"
    return numbers


class TuningCache:
    """What was measured in the last 30 days.

    A file that cannot be read, is damaged, of another version or of something else counts as not
    there; one that cannot be written is left alone.

    Args:
        directory: of the files, by default in the user's cache directory, or, where that cannot be
            written, one of this user's below the temporary directory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or _own_directory()

    def get(self, key: str) -> dict[str, Any] | None:
        try:
            data = json.loads(_read(self._path(key, "json")))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(data, dict) or data.get("version") != CACHE_VERSION:
            return None
        at_s, value = data.get("at"), data.get("value")
        if data.get("key") != key or not isinstance(at_s, int | float):
            return None
        now_s = time.time()
        is_fresh = now_s - CACHE_DAYS * 86_400 < at_s <= now_s
        return value if is_fresh and isinstance(value, dict) else None

    def put(self, key: str, value: dict[str, Any]) -> None:
        document = {"version": CACHE_VERSION, "key": key, "at": time.time(), "value": value}
        with contextlib.suppress(OSError):
            fd, name = tempfile.mkstemp(dir=self.directory, prefix="new-")
            try:
                with open(fd, "w") as file:
                    json.dump(document, file, indent=1)
                os.replace(name, self._path(key, "json"))
            except BaseException:
                os.unlink(name)
                raise

    @contextlib.contextmanager
    def turn(self, key: str, limit_s: float = WAIT_S) -> Iterator[None]:
        """Have a drive to oneself among the processes that ask for it here.

        Raises:
            TurnError: another process has had it for `limit_s` seconds.
            OSError: there is no lock to be had in the cache directory.
        """
        fd = os.open(self._path(key, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            deadline_s = time.monotonic() + limit_s
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline_s:
                        raise TurnError(
                            f"another process has been measuring this drive for {limit_s:g} s"
                        ) from None
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(fd)  # and with it the lock

    def _path(self, key: str, ending: str) -> Path:
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.{ending}"


def _read(path: Path) -> bytes:
    """A small file; what else there may be, a pipe or gigabytes, is neither waited for nor read."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(_MOST_BYTES)


def _own_directory() -> Path:
    usual = None
    # Containers run under numbers that no list of users has: they have no home.
    with contextlib.suppress(OSError, RuntimeError):
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        usual = Path(base, "gds-optimizer", "tuning")
        usual.mkdir(parents=True, exist_ok=True)
        if os.access(usual, os.W_OK | os.X_OK):
            return usual
    other = Path(tempfile.gettempdir(), f"gds-optimizer-{os.getuid()}")
    other.mkdir(mode=0o700, exist_ok=True)
    # Anybody may make things there.
    if other.is_symlink() or other.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{other} is somebody else's, and {usual or 'a home directory'} cannot be written"
        )
    return other

"""A scratch directory that one living process owns.

The lock is a POSIX record lock on a file inside: the kernel drops it when the owner dies, however
it dies, and a forked child does not inherit it (a `flock` would live on in a data loader's worker
and lock a restarted run out). What a dead owner left behind is removed by the next one; only files
that match our own scratch names are, never a snapshot.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import logging
import os
import re
import socket
import struct
import sys
import time
from pathlib import Path

from gds_optimizer.errors import ConfigError, StoreLockedError

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
_SCRATCH = re.compile(r"bucket\d{5,}(\.[a-z]+)?\.bin|layout\.json")
_RECLAIM_WAIT_S = 30.0
_NAME_WAIT_S = 2.0

# A record lock is no obstacle to the process that holds it, so a second store of this process is
# kept out by this set of (device, inode) pairs.
# Look a lock file up here before opening it: closing any descriptor of it drops the lock.
_held: set[tuple[int, int]] = set()
os.register_at_fork(after_in_child=_held.clear)  # the locks stay with the parent


def _is_held_here(lock_path: Path) -> bool:
    try:
        state = os.stat(lock_path)
    except FileNotFoundError:
        return False
    return (state.st_dev, state.st_ino) in _held


def _boot_id() -> str:
    """The running kernel, whose locks are all visible here; empty where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _describe_owner(fd: int) -> dict[str, object]:
    try:
        owner = json.loads(os.pread(fd, 4096, 0) or b"{}")
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _holder_pid(fd: int) -> int:
    """The process that holds the lock, as the kernel says.

    0 if nobody does any more, or nobody who has a number here (another host's, a container's).
    """
    # struct flock of 64-bit Linux: type, whence, start, length, pid
    request = struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack("@hhqqi0q", fcntl.fcntl(fd, fcntl.F_GETLK, request))
    return 0 if kind == fcntl.F_UNLCK else int(pid)


class _UnnamedOwnerError(StoreLockedError):
    """The directory is locked, but by another process than the one it names: by a newcomer that
    has not yet written its own name.
    """


class OwnedDirectory:
    """A directory held by this process until `close`; create it with `acquire`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._pid = os.getpid()
        state = os.stat(path)
        self._identity = (state.st_dev, state.st_ino)

    @classmethod
    def acquire(cls, path: Path, *, purpose: str = "train") -> OwnedDirectory:
        """Own `path`, creating it and its parent (mode 0700) where needed, and remove a dead
        owner's scratch. What is above the parent has to exist.

        Raises:
            StoreLockedError: a living process owns it; the message names that process.
            ConfigError: its lock is a symbolic link.
            OSError: the directory cannot be created or the file system has no locks.
        """
        start = time.monotonic()
        while True:
            try:
                for each in (path.parent, path):  # `parents=True` would not give the mode
                    each.mkdir(mode=0o700, exist_ok=True)
                owned = cls._try_acquire(path, purpose)
            except (FileNotFoundError, FileExistsError):
                # A neighbour that reclaimed the directory removed it just now (between mkdir's
                # finding that it exists and looking at it, in the second case). Or the drive is
                # gone, and then nothing is to be created where it was mounted.
                is_tried = time.monotonic() - start > _NAME_WAIT_S
                if is_tried or not path.parent.parent.is_dir():
                    raise
                time.sleep(0.01)
                continue
            except StoreLockedError as error:
                # Another rank that is starting may be clearing what a dead run left here.
                limit_s = _RECLAIM_WAIT_S if error.owner.get("purpose") == "reclaim" else 0.0
                if isinstance(error, _UnnamedOwnerError):
                    limit_s = max(limit_s, _NAME_WAIT_S)
                if time.monotonic() - start < limit_s:
                    time.sleep(0.05)
                    continue
                raise
            if owned is not None:
                owned._remove_scratch(report=True)
                return owned

    @classmethod
    def _try_acquire(cls, path: Path, purpose: str) -> OwnedDirectory | None:
        """None when the lock file was replaced between opening and locking it: try again."""
        lock_path = path / LOCK_NAME
        if _is_held_here(lock_path):
            raise StoreLockedError(
                f"{path} is in use by this very process (pid {os.getpid()}): "
                "close the other optimizer or give each a directory of its own"
            )
        try:
            # Following a link, we would overwrite what somebody else's file says.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(lock_path, flags, 0o600)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ConfigError(
                f"directories: {lock_path} is a symbolic link, wanted a file of our own: remove it"
            ) from error
        try:
            opened = os.fstat(fd)
            key = (opened.st_dev, opened.st_ino)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise OSError(
                        error.errno, f"cannot lock {lock_path}: {error.strerror}"
                    ) from error
                raise cls._locked_error(path, fd) from None
            try:
                current = os.stat(lock_path)
            except FileNotFoundError:
                current = None
            if current is None or (current.st_dev, current.st_ino) != key:
                os.close(fd)
                return None
            owner = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "boot": _boot_id(),
                "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "command": " ".join(sys.argv)[:512],
                "purpose": purpose,
            }
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(owner).encode(), 0)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise
        _held.add(key)
        return cls(path, fd)

    @staticmethod
    def _locked_error(path: Path, fd: int) -> StoreLockedError:
        owner = _describe_owner(fd)
        who = (
            f"process {owner['pid']} on {owner.get('host')}, started {owner.get('started')} "
            f"({owner.get('command')})"
            if "pid" in owner
            else "another process"
        )
        kind = StoreLockedError if owner.get("pid") == _holder_pid(fd) else _UnnamedOwnerError
        return kind(f"{path} is in use by {who}: stop it or choose another directory", owner)

    def _remove_scratch(self, *, report: bool) -> None:
        removed_bytes = 0
        for file in sorted(self.path.iterdir()):
            if _SCRATCH.fullmatch(file.name):
                with contextlib.suppress(FileNotFoundError):
                    removed_bytes += file.lstat().st_blocks * 512
                    file.unlink()
        if report and removed_bytes:
            logger.warning(
                "reclaimed %.2f GiB that a dead run left in %s", removed_bytes / 2**30, self.path
            )

    def _is_still_there(self) -> bool:
        """Whether the path still leads to the directory that was locked, not to somebody else's."""
        try:
            state = os.stat(self.path)
        except OSError:
            return False
        return (state.st_dev, state.st_ino) == self._identity

    def close(self) -> None:
        """Remove the scratch files and the directory (if nothing else is in it), then let go.

        In a forked child it only closes the inherited descriptor.
        """
        if self._lock_fd < 0:
            return
        fd, self._lock_fd = self._lock_fd, -1
        if os.getpid() != self._pid:
            os.close(fd)
            return
        state = os.fstat(fd)
        try:
            if self._is_still_there():
                self._remove_scratch(report=False)
                with contextlib.suppress(FileNotFoundError):
                    current = os.stat(self.path / LOCK_NAME)
                    if (current.st_dev, current.st_ino) == (state.st_dev, state.st_ino):
                        (self.path / LOCK_NAME).unlink()
                with contextlib.suppress(OSError):
                    self.path.rmdir()  # stays while somebody keeps other files there
                    self.path.parent.rmdir()
        finally:
            _held.discard((state.st_dev, state.st_ino))
            os.close(fd)


def reclaim_dead(root: Path, *, keep: Path) -> None:
    """Remove scratch that dead runs of this host left below `root`, in directories not `keep`.

    A run with fewer ranks than the one that died would otherwise never look at the rest.
    """
    # Unlike `Path.glob`, this bears with directories that others remove meanwhile.
    for name in sorted(glob.glob(f"{glob.escape(str(root))}/rank*/*/{LOCK_NAME}")):
        lock = Path(name)
        if lock.parent == keep or _is_held_here(lock):
            continue
        try:
            with open(lock, "rb") as file:
                owner = _describe_owner(file.fileno())
        except OSError:
            continue
        # On a shared file system other hosts' locks may be invisible here: leave theirs alone.
        # A container may have another host name after every start, on the same kernel.
        is_ours = owner.get("host") == socket.gethostname() or (
            owner.get("boot") == _boot_id() != ""
        )
        if not is_ours:
            continue
        with contextlib.suppress(StoreLockedError, OSError):
            owned = OwnedDirectory._try_acquire(lock.parent, "reclaim")
            if owned is not None:
                owned._remove_scratch(report=True)
                owned.close()

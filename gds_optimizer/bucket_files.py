"""Bucket files on the drives: space, descriptors, identity.

Scope: create the files with all their space reserved, keep them open, notice when somebody else
changes them, and remove them in the end. What a file is replaced by, and when: see `store`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from gds_optimizer.errors import (
    ClosedError,
    ConfigError,
    ForkedError,
    NoSpaceError,
    StoreChangedError,
)
from gds_optimizer.io.base import BucketFile, IoBackend
from gds_optimizer.io.memory import MemoryFile
from gds_optimizer.layout import Bucket, Layout
from gds_optimizer.lock import OwnedDirectory, reclaim_dead
from gds_optimizer.room import free_bytes
from gds_optimizer.spread import DriveOrder, equal_speeds, spread

logger = logging.getLogger(__name__)

SNAPSHOT_NAME = "snapshot.json"
MANIFEST_NAME = "manifest.json"
"""What a snapshot and a part of one have, and a directory of state has not."""

# Descriptors that a training process needs besides ours.
_SPARE_DESCRIPTORS = 512
_DESCRIPTORS_PER_FILE = 2


class BucketFiles:
    """Open bucket files, bucket `i` at `files[i]`, spread over the directories by their speeds.

    Args:
        layout: which files, how large.
        roots: the user's directories; each gets `<root>/<name>` with our files in it.
        name: the rank's own part of the path, e.g. "rank00003/dense".
        backend: opens the files.
        in_memory: buckets that live in memory, by index; they are closed with the files.
        speeds: of the directories, in any unit; equal ones by default. One with too little room
            gets less than its share.

    Raises:
        StoreLockedError: another living process owns one of the directories.
        NoSpaceError: the files do not fit; nothing is left behind.
        IoError: a file cannot be opened for direct I/O.
        ConfigError: a directory is missing, or is a snapshot, whose files look like leftovers.
    """

    def __init__(
        self,
        layout: Layout,
        roots: Sequence[Path],
        name: str,
        backend: IoBackend,
        *,
        in_memory: Mapping[int, MemoryFile] | None = None,
        speeds: Sequence[float] | None = None,
    ) -> None:
        self.layout = layout
        self._speeds = tuple(speeds or equal_speeds(len(roots)))
        self.backend = backend
        self.files: list[BucketFile] = []
        self.paths: list[Path] = []
        self._identities: list[tuple[int, int]] = []
        self.in_memory = dict(in_memory or {})
        self._pid = os.getpid()
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._owned: list[OwnedDirectory] = []
            for root in roots:
                _check_root(root, root / name)
                owned = OwnedDirectory.acquire(root / name)
                undo.callback(owned.close)
                self._owned.append(owned)
                reclaim_dead(root, keep=owned.path)
            _allow_descriptors(len(self._with_file()) * _DESCRIPTORS_PER_FILE)
            self._reserve()
            self._write_description()
            undo.callback(self._close_files)
            for index, path in enumerate(self.paths):
                if index in self.in_memory:
                    self.in_memory[index].path = path
                    self.files.append(self.in_memory[index])
                else:
                    self.files.append(backend.open(path))
            undo.pop_all()

    @property
    def directories(self) -> list[Path]:
        """Where the files of this optimizer are, one directory for each root."""
        return [owned.path for owned in self._owned]

    @property
    def is_foreign(self) -> bool:
        """Whether this is the copy that a forked child inherited."""
        return os.getpid() != self._pid

    def _with_file(self) -> list[Bucket]:
        """Buckets that live in a file."""
        return [bucket for bucket in self.layout.buckets if bucket.index not in self.in_memory]

    def _has_file(self, index: int) -> bool:
        """Whether a bucket is in a file now."""
        return index not in self.in_memory

    def _reserve(self) -> None:
        """Create every file with its blocks allocated, so that a full disk is met here."""
        devices = [self._device_of(directory) for directory in self.directories]
        full: set[int] = set()
        places = self._spread(devices, full)
        for bucket in self.layout.buckets:
            if bucket.index in self.in_memory:
                directory = self.directories[bucket.index % len(devices)]
                self.paths.append(directory / f"bucket{bucket.index:05d}.bin")
                self._identities.append((0, 0))
                continue
            while True:
                number = places[bucket.index]
                path = self.directories[number] / f"bucket{bucket.index:05d}.bin"
                try:
                    self._identities.append(self._create(path, bucket.file_bytes))
                except NoSpaceError:
                    # Others fill it too. What is left of the state goes elsewhere, if it fits.
                    full.add(devices[number])
                    if full.issuperset(devices):
                        raise
                    places |= self._spread(devices, full)
                    continue
                self.paths.append(path)
                break

    def _spread(self, devices: Sequence[int], full: set[int]) -> dict[int, int]:
        """Directories of the buckets that are to have a file and have none yet, by index."""
        left = [bucket for bucket in self._with_file() if bucket.index >= len(self.paths)]
        # With one directory, and where all are full, the system's own answer says more.
        if len(devices) == 1:
            return {bucket.index: 0 for bucket in left}
        room: dict[Hashable, int] = {
            d: free_bytes(p) for d, p in zip(devices, self.directories, strict=True)
        }
        room |= dict.fromkeys(full, 0)
        sizes = [bucket.file_bytes for bucket in left]
        places = spread(sizes, self._speeds, devices=devices, room_bytes=room)
        return {bucket.index: place for bucket, place in zip(left, places, strict=True)}

    def _device_of(self, directory: Path) -> int:
        return os.stat(directory).st_dev

    @property
    def drive_order(self) -> DriveOrder | None:
        """Chooses what to read next where there are several directories."""
        if len(self._owned) == 1:
            return None
        numbers = {directory: number for number, directory in enumerate(self.directories)}
        return DriveOrder([numbers[path.parent] for path in self.paths], self._speeds)

    def _create(self, path: Path, nbytes: int) -> tuple[int, int]:
        """A new file with `nbytes` allocated; nothing stays when that fails.

        Returns:
            Its device and inode.

        Raises:
            NoSpaceError: it does not fit.
        """
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            state = os.fstat(fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._no_space(path, error) from error
            raise
        finally:
            os.close(fd)
        return state.st_dev, state.st_ino

    def _no_space(self, path: Path, error: OSError) -> NoSpaceError:
        return NoSpaceError(
            f"{path.parent} has too little room ({os.strerror(error.errno or 0)}): "
            f"{self._what_takes_room(path)} and {free_bytes(path.parent)} are free now: free "
            "space, name a larger or another directory, or raise the limit on file size"
        )

    def _what_takes_room(self, path: Path) -> str:
        """What a file that does not fit was to be made for, with bytes."""
        on_disk = self._with_file()
        needed = sum(bucket.file_bytes for bucket in on_disk)
        created = sum(b.file_bytes for b in on_disk if b.index < len(self.paths))
        return (
            f"the state of this optimizer needs {needed} bytes over "
            f"{len(self._owned)} directories, {created} were reserved"
        )

    def _write_description(self) -> None:
        """Leave the layout beside the files, for people and tools that look at them."""
        text = json.dumps(self.layout.describe(), indent=1)
        for directory in self.directories:
            fd = os.open(directory / "layout.json", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as file:
                file.write(text)

    def check_owner(self) -> None:
        """Refuse use after `close` and in a forked child."""
        if self.is_foreign:
            raise ForkedError(
                f"the store in {self.directories[0]} belongs to process {self._pid}; this is its "
                f"forked child {os.getpid()}, which must not use it: use it in the parent"
            )
        if self._closed:
            raise ClosedError(f"the store in {self.directories[0]} is closed")

    def check_unchanged(self, index: int) -> None:
        """Compare path, inode and size of a bucket file with what was created.

        An open descriptor does not notice that its file was unlinked, or that its directory was
        replaced, and bytes written to it would be lost.

        Raises:
            StoreChangedError: it is gone, another file, or of another size.
        """
        if not self._has_file(index):
            return
        path = self.paths[index]
        wanted_bytes = self.layout.buckets[index].file_bytes
        try:
            state = os.stat(path)
        except OSError as error:
            raise StoreChangedError(
                f"bucket file {path} cannot be found any more ({error.strerror}): wanted a file "
                f"of {wanted_bytes} bytes; somebody removed it while it was in use"
            ) from error
        if (state.st_dev, state.st_ino) != self._identities[index]:
            raise StoreChangedError(
                f"bucket file {path} was replaced: wanted inode {self._identities[index][1]}, "
                f"got inode {state.st_ino}; somebody wrote another file in its place"
            )
        if state.st_size != wanted_bytes:
            raise StoreChangedError(
                f"bucket file {path} was resized: wanted {wanted_bytes} bytes, got "
                f"{state.st_size}; somebody truncated or extended it while it was in use"
            )

    def _close_files(self) -> None:
        """Close every file, also when one of them reports a failure; then raise the first."""
        with contextlib.ExitStack() as stack:
            for file in [*self.files, *self.in_memory.values()]:
                stack.callback(file.close)
        self.files.clear()

    def close(self) -> None:
        """Close and remove the files. No transfer may be in flight. May be called again.

        In a forked child only the child's descriptors are closed.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:
            for owned in self._owned:
                stack.callback(owned.close)
            if not self.is_foreign:
                stack.callback(self._close_files)


def _check_root(root: Path, directory: Path) -> None:
    if not root.is_dir():
        raise ConfigError(f"directories: {root} is not an existing directory: create it")
    for path in (root / SNAPSHOT_NAME, directory / MANIFEST_NAME):
        if path.exists():
            raise ConfigError(
                f"directories: {root} holds a snapshot ({path}), whose files would be taken for "
                "leftovers: name another directory"
            )


def _allow_descriptors(count: int) -> None:
    """Raise the soft limit on open files where `count` more would not fit.

    Raises:
        NoSpaceError: the hard limit is too low.
    """
    wanted = count + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise NoSpaceError(
            f"{count} descriptors are needed for the bucket files, but the hard limit on open "
            f"files is {hard}: raise it to {wanted} (ulimit -Hn) or use larger buckets"
        )
    # Chained optimizers and other libraries add to it, so leave room above what we count.
    limit = 2 * wanted if hard == resource.RLIM_INFINITY else min(hard, 2 * wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    logger.info("raised the soft limit on open files from %d to %d", soft, limit)

"""The bucket files of one optimizer on one rank: space, descriptors, identity.

Scope: create the files with all their space reserved, keep them open, notice when somebody else
changes them, and remove them in the end. It knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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
from gds_optimizer.room import check_room, free_bytes
from gds_optimizer.spread import DriveOrder, equal_speeds, spread

logger = logging.getLogger(__name__)

SNAPSHOT_NAME = "snapshot.json"
MANIFEST_NAME = "manifest.json"
"""What a snapshot and a part of one have, and a directory of state has not."""

NO_LINK_ERRORS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES)
"""Why a file gets no second name in a place where copying it may work."""

# Descriptors that a training process needs besides ours.
_SPARE_DESCRIPTORS = 512
_DESCRIPTORS_PER_FILE = 2


class Store:
    """Open bucket files, bucket `i` at `files[i]`, spread over the directories by their speeds.

    Args:
        layout: which files, how large.
        roots: the user's directories; each gets `<root>/<name>` with our files in it.
        name: the rank's own part of the path, e.g. "rank00003/dense".
        backend: opens the files.
        in_memory: buckets that live in memory, by index; the store closes them. They have a file
            only while they are written out (see `reserve_written_out`).
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
        self._written_out: set[int] = set()
        self._frozen: set[int] = set()
        self._spares: dict[int, Path] = {}
        self._read_elsewhere: set[tuple[int, int]] = set()
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
        identity = state.st_dev, state.st_ino
        self._read_elsewhere.discard(identity)  # what had this number before is gone
        return identity

    def _no_space(self, path: Path, error: OSError) -> NoSpaceError:
        on_disk = self._with_file()
        needed = sum(bucket.file_bytes for bucket in on_disk)
        created = sum(b.file_bytes for b in on_disk if b.index < len(self.paths))
        free = free_bytes(path.parent)
        if created < needed:
            what = (
                f"the state of this optimizer needs {needed} bytes over "
                f"{len(self._owned)} directories, {created} were reserved"
            )
        elif path in [self.paths[index] for index in self._written_out]:
            in_memory = sum(self.layout.buckets[index].file_bytes for index in self.in_memory)
            what = f"the buckets that live in memory, to be written out, need {in_memory} bytes"
        else:
            missing = sum(b.file_bytes for b in on_disk if b.index not in self._spares)
            what = (
                f"keeping the present files needs {missing} bytes more, for the files that the "
                "next step writes instead"
            )
        return NoSpaceError(
            f"{path.parent} has too little room ({os.strerror(error.errno or 0)}): {what} and "
            f"{free} are free now: free space, name a larger or another directory, or raise the "
            "limit on file size"
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
        if index in self.in_memory and index not in self._written_out:
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

    # ------------------------------------------------------------------ frozen files

    def is_frozen(self, index: int) -> bool:
        """Whether a bucket's present file must not be written: its next write goes elsewhere."""
        return index in self._frozen

    def link_all(self, link: Callable[[int, Path], Path]) -> set[int]:
        """Give every bucket's file a second name, which freezes it; nothing may be in flight.

        Follow it with `reserve_spares`, or the next write may meet a full disk.

        Args:
            link: makes the link for a bucket's index and file, and returns where it is.

        Returns:
            The buckets that were not frozen before: to be given to `unfreeze` if their links are
            removed again before anything is written.

        Raises:
            OSError: a link could not be made; none is left, and what is frozen was before.
        """
        fresh: set[int] = set()
        with contextlib.ExitStack() as undo:
            undo.callback(self.unfreeze, fresh)
            for bucket in self.layout.buckets:
                self.check_unchanged(bucket.index)
                if bucket.index not in self._frozen and bucket.index not in self.in_memory:
                    # Before the link: it must never exist while its file may be written.
                    fresh.add(bucket.index)
                    self._frozen.add(bucket.index)
                undo.callback(link(bucket.index, self.paths[bucket.index]).unlink)
            undo.pop_all()
        return fresh

    def unfreeze(self, indices: Iterable[int]) -> None:
        """Nobody but the store needs the files of these buckets any more."""
        self._frozen.difference_update(indices)

    def reserve_spares(self, promised: Iterable[tuple[int, int]] = ()) -> set[int]:
        """See to it that every bucket has a spare, so that a full disk is met here.

        Args:
            promised: files that `adopt_spare` will be given, as (device, bytes): no spare is made
                for a bucket that can have one of them.

        Returns:
            The buckets that got one.

        Raises:
            NoSpaceError: there is no room; names bytes needed and free. No spare was added.
        """
        coming = Counter(promised)
        devices = {directory: self._device_of(directory) for directory in self.directories}
        missing = []
        for bucket in self._with_file():
            key = (devices[self.paths[bucket.index].parent], bucket.file_bytes)
            if bucket.index in self._spares:
                continue
            if coming[key]:
                coming[key] -= 1
            else:
                missing.append(bucket)
        self._check_room(missing)
        made: set[int] = set()
        with contextlib.ExitStack() as undo:
            undo.callback(self.drop_spares, made)
            for bucket in missing:
                self._make_spare(bucket.index)
                made.add(bucket.index)
            undo.pop_all()
        return made

    def drop_spares(self, indices: Iterable[int]) -> None:
        """Remove spares that turn out not to be needed."""
        for index in indices:
            with contextlib.suppress(FileNotFoundError):
                self._spares.pop(index).unlink()

    def _check_room(self, buckets: Sequence[Bucket]) -> None:
        """Refuse at once what cannot fit, with numbers, instead of filling the disk first."""
        needed_bytes: Counter[int] = Counter()
        directory_of: dict[int, Path] = {}
        for bucket in buckets:
            directory = self.paths[bucket.index].parent
            device = os.stat(directory).st_dev
            directory_of.setdefault(device, directory)
            needed_bytes[device] += bucket.file_bytes
        for device, nbytes in needed_bytes.items():
            check_room(
                [directory_of[device]],
                nbytes,
                "the files that the next step writes, where the present ones are kept,",
                "keep fewer snapshots, or name a larger directory",
            )

    def _make_spare(self, index: int) -> None:
        spare = self.paths[index].with_suffix(".spare.bin")
        spare.unlink(missing_ok=True)  # an interrupt may have left it
        self._create(spare, self.layout.buckets[index].file_bytes)
        self._spares[index] = spare

    def freeze_read_elsewhere(self) -> None:
        """Never write the present files again, nor ever use them for anything else.

        For files that others go on reading without a name for them: mapped, in another process.

        Raises:
            NoSpaceError: there is no room for a second set of files; nothing is frozen.
        """
        self.reserve_spares()
        self._read_elsewhere.update(self._identities)
        self._frozen.update(bucket.index for bucket in self._with_file())

    def file_for_write(self, index: int) -> BucketFile:
        """The file that a bucket's next write goes to; the whole bucket must be written.

        For a frozen bucket that is its spare, which takes the bucket's name. No transfer of the
        bucket may be in flight.

        Raises:
            NoSpaceError: it has no spare, which could not be reserved, and there is no room now.
        """
        if index in self._frozen:
            if index not in self._spares:
                self._make_spare(index)
            self._replace(index, self._spares.pop(index))
            self._frozen.discard(index)
        return self.files[index]

    def _replace(self, index: int, path: Path) -> None:
        """Give a frozen bucket another file, which loses its own name.

        An interrupt on the way leaves it frozen and without a file that it is known by, so that
        `adopt_frozen` and `file_for_write` begin anew.
        """
        state = os.stat(path)
        self._identities[index] = (0, 0)
        os.replace(path, self.paths[index])
        self.files[index].close()
        self.files[index] = self.backend.open(self.paths[index])
        self._identities[index] = (state.st_dev, state.st_ino)

    def thaw(self) -> None:
        """Give every frozen bucket its spare now, with whatever is in it."""
        for index in sorted(self._frozen):
            self.file_for_write(index)

    def adopt_frozen(self, index: int, source: Path) -> bool:
        """Make a file that must not be written (of a snapshot) a bucket's present one.

        The bucket's former file becomes its spare.

        Returns:
            False if it cannot be: it is on another file system, or not ours to link or open. Copy
            it instead.
        """
        incoming = self.paths[index].with_suffix(".incoming.bin")
        incoming.unlink(missing_ok=True)
        if not os.access(source, os.R_OK | os.W_OK):
            return False
        state = os.stat(source)
        if (state.st_dev, state.st_ino) == self._identities[index]:
            self._frozen.add(index)  # it is the present one already
            return True
        try:
            os.link(source, incoming)
        except OSError as error:
            if error.errno in NO_LINK_ERRORS:
                return False
            raise
        was_frozen = index in self._frozen
        self._frozen.add(index)  # first: after an interrupt it must not be taken for a spare
        if not was_frozen:
            spare = self.paths[index].with_suffix(".spare.bin")
            os.replace(self.paths[index], spare)
            self._spares[index] = spare
        self._replace(index, incoming)
        return True

    def adopt_spare(self, source: Path) -> bool:
        """Take over a file that nobody needs any more, so that its extents are used again.

        Returns:
            False if no bucket on its file system wants a spare of its size, or others may still
            be reading it; it is left alone.
        """
        state = os.stat(source)
        if state.st_nlink != 1 or (state.st_dev, state.st_ino) in self._read_elsewhere:
            return False
        for bucket in self._with_file():
            path = self.paths[bucket.index]
            if (
                bucket.index not in self._spares
                and bucket.file_bytes == state.st_size
                and os.stat(path.parent).st_dev == state.st_dev
            ):
                spare = path.with_suffix(".spare.bin")
                os.replace(source, spare)
                self._spares[bucket.index] = spare
                return True
        return False

    # ------------------------------------------------------------------ buckets in memory

    def reserve_written_out(self, indices: Iterable[int] | None = None) -> None:
        """Make files for buckets that live in memory, so that checkpoints find all of them.

        They are at `paths`, with their space allocated; what is in them is the caller's business.
        They go with `drop_written_out`, or with the store.

        Args:
            indices: which buckets; by default all that live in memory.

        Raises:
            NoSpaceError: there is no room; names bytes needed and free. No file was added.
        """
        wanted = sorted(self.in_memory if indices is None else indices)
        missing = [i for i in wanted if i not in self._written_out]
        rooms: dict[int, tuple[Path, int]] = {}
        for index in missing:
            directory = self.paths[index].parent
            device = os.stat(directory).st_dev
            _, nbytes = rooms.get(device, (directory, 0))
            rooms[device] = (directory, nbytes + self.layout.buckets[index].file_bytes)
        for directory, nbytes in rooms.values():
            check_room(
                [directory],
                nbytes,
                "the buckets that live in memory, which are to be written out,",
                "name a larger directory",
            )
        with contextlib.ExitStack() as undo:
            undo.callback(self.drop_written_out, missing)
            for index in missing:
                nbytes = self.layout.buckets[index].file_bytes
                self._written_out.add(index)  # first: an interrupt must leave no file behind
                self._identities[index] = self._create(self.paths[index], nbytes)
            undo.pop_all()

    def drop_written_out(self, indices: Iterable[int] | None = None) -> None:
        """Remove the names of those files; whoever has one open or linked keeps what is in it."""
        for index in sorted(self._written_out if indices is None else indices):
            if index in self._written_out:
                self.paths[index].unlink(missing_ok=True)
                self._written_out.discard(index)  # last: what is interrupted is done again

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

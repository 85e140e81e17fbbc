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
from collections.abc import Callable, Sequence
from pathlib import Path

from gds_optimizer.errors import ClosedError, ForkedError, NoSpaceError, StoreChangedError
from gds_optimizer.io.base import BucketFile, IoBackend
from gds_optimizer.layout import Layout
from gds_optimizer.lock import OwnedDirectory, reclaim_dead

logger = logging.getLogger(__name__)

# Descriptors that a training process needs besides ours.
_SPARE_DESCRIPTORS = 512
_DESCRIPTORS_PER_FILE = 2


class Store:
    """Open bucket files, bucket `i` at `files[i]`, spread over the directories in turn.

    Args:
        layout: which files, how large.
        roots: the user's directories; each gets `<root>/<name>` with our files in it.
        name: the rank's own part of the path, e.g. "rank00003/dense".
        backend: opens the files.

    Raises:
        StoreLockedError: another living process owns one of the directories.
        NoSpaceError: the files do not fit; nothing is left behind.
        IoError: a file cannot be opened for direct I/O.
    """

    def __init__(
        self, layout: Layout, roots: Sequence[Path], name: str, backend: IoBackend
    ) -> None:
        self.layout = layout
        self.backend = backend
        self.files: list[BucketFile] = []
        self.paths: list[Path] = []
        self._identities: list[tuple[int, int]] = []
        self._frozen: set[int] = set()
        self._spares: dict[int, Path] = {}
        self._pid = os.getpid()
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._owned: list[OwnedDirectory] = []
            for root in roots:
                owned = OwnedDirectory.acquire(root / name)
                undo.callback(owned.close)
                self._owned.append(owned)
                reclaim_dead(root, keep=owned.path)
            _allow_descriptors(len(layout.buckets) * _DESCRIPTORS_PER_FILE)
            self._reserve()
            self._write_description()
            undo.callback(self._close_files)
            for path in self.paths:
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

    def _reserve(self) -> None:
        """Create every file with its blocks allocated, so that a full disk is met here."""
        for bucket in self.layout.buckets:
            directory = self._owned[bucket.index % len(self._owned)].path
            path = directory / f"bucket{bucket.index:05d}.bin"
            self._identities.append(self._create(path, bucket.file_bytes))
            self.paths.append(path)

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
        created = sum(self.layout.buckets[i].file_bytes for i in range(len(self.paths)))
        status = os.statvfs(path.parent)
        free = status.f_bavail * status.f_frsize
        if created < self.layout.total_bytes:
            what = (
                f"the state of this optimizer needs {self.layout.total_bytes} bytes over "
                f"{len(self._owned)} directories, {created} were reserved"
            )
        else:
            what = (
                f"keeping the present files needs {self.missing_spare_bytes} bytes more, for the "
                "files that the next step writes instead"
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

    @property
    def missing_spare_bytes(self) -> int:
        """Bytes that `freeze` would have to reserve now."""
        return sum(b.file_bytes for b in self.layout.buckets if b.index not in self._spares)

    def link_all(self, link: Callable[[int], Path]) -> None:
        """Give every bucket's file a second name on its file system; nothing may be in flight.

        Follow it with `freeze`, or remove the links.

        Raises:
            OSError: a link could not be made; none is left.
        """
        with contextlib.ExitStack() as undo:
            for bucket in self.layout.buckets:
                self.check_unchanged(bucket.index)
                target = link(bucket.index)
                os.link(self.paths[bucket.index], target)
                undo.callback(target.unlink)
            undo.pop_all()

    def freeze(self) -> None:
        """Never write the present files again: the next write of each bucket goes elsewhere.

        The files that are written instead are reserved here, so that a full disk is met here.

        Raises:
            NoSpaceError: there is no room for a second set of files; nothing is frozen.
        """
        for bucket in self.layout.buckets:
            if bucket.index not in self._spares:
                spare = self.paths[bucket.index].with_suffix(".spare.bin")
                self._create(spare, bucket.file_bytes)
                self._spares[bucket.index] = spare
        self._frozen.update(range(len(self.layout.buckets)))

    def file_for_write(self, index: int) -> BucketFile:
        """The file that a bucket's next write goes to; the whole bucket must be written.

        For a frozen bucket that is its spare, which takes the bucket's name. No transfer of the
        bucket may be in flight.
        """
        if index in self._frozen:
            self._replace(index, self._spares.pop(index))
        return self.files[index]

    def _replace(self, index: int, path: Path) -> None:
        """Give a bucket another file, which loses its own name."""
        state = os.stat(path)
        os.replace(path, self.paths[index])
        self.files[index].close()
        self.files[index] = self.backend.open(self.paths[index])
        self._identities[index] = (state.st_dev, state.st_ino)
        self._frozen.discard(index)

    def thaw(self) -> None:
        """Give every frozen bucket its spare now, with whatever is in it."""
        for index in sorted(self._frozen):
            self.file_for_write(index)

    def adopt_frozen(self, index: int, source: Path) -> bool:
        """Make a file that must not be written (of a snapshot) a bucket's present one.

        The bucket's former file becomes its spare.

        Returns:
            False if the file is on another file system: copy it instead.
        """
        here = self.paths[index].parent
        if os.stat(source).st_dev != os.stat(here).st_dev:
            return False
        incoming = self.paths[index].with_suffix(".incoming.bin")
        os.link(source, incoming)
        spare = self.paths[index].with_suffix(".spare.bin")
        if index not in self._frozen:
            os.replace(self.paths[index], spare)
            self._spares[index] = spare
        self._replace(index, incoming)
        self._frozen.add(index)
        return True

    def adopt_spare(self, source: Path) -> bool:
        """Take over a file that nobody needs any more, so that its extents are used again.

        Returns:
            False if no bucket on its file system wants a spare of its size; it is left alone.
        """
        state = os.stat(source)
        if state.st_nlink != 1:
            return False
        for bucket in self.layout.buckets:
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

    def _close_files(self) -> None:
        """Close every file, also when one of them reports a failure; then raise the first."""
        with contextlib.ExitStack() as stack:
            for file in self.files:
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

"""The bucket files of one optimizer on one rank, and what takes their place for a while.

Scope: files that must not be written any more (a snapshot has them, or somebody reads them), the
spares that are written instead, and files of buckets that live in memory. It knows nothing of what
is in them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from gds_optimizer.bucket_files import BucketFiles
from gds_optimizer.io.base import BucketFile, IoBackend
from gds_optimizer.io.memory import MemoryFile
from gds_optimizer.layout import Bucket, Layout
from gds_optimizer.room import check_room

NO_LINK_ERRORS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES)
"""Why a file gets no second name in a place where copying it may work."""


class Store(BucketFiles):
    """The files of `BucketFiles`, which says what the arguments are.

    Buckets that live in memory have a file only while they are written out (see
    `reserve_written_out`).
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
        self._written_out: set[int] = set()
        self._frozen: set[int] = set()
        self._spares: dict[int, Path] = {}
        self._read_elsewhere: set[tuple[int, int]] = set()
        super().__init__(layout, roots, name, backend, in_memory=in_memory, speeds=speeds)

    def _create(self, path: Path, nbytes: int) -> tuple[int, int]:
        identity = super()._create(path, nbytes)
        self._read_elsewhere.discard(identity)  # what had this number before is gone
        return identity

    def _what_takes_room(self, path: Path) -> str:
        on_disk = self._with_file()
        if any(bucket.index >= len(self.paths) for bucket in on_disk):
            return super()._what_takes_room(path)
        if path in [self.paths[index] for index in self._written_out]:
            in_memory = sum(self.layout.buckets[index].file_bytes for index in self.in_memory)
            return f"the buckets that live in memory, to be written out, need {in_memory} bytes"
        missing = sum(b.file_bytes for b in on_disk if b.index not in self._spares)
        return (
            f"keeping the present files needs {missing} bytes more, for the files that the next "
            "step writes instead"
        )

    def _has_file(self, index: int) -> bool:
        return super()._has_file(index) or index in self._written_out

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

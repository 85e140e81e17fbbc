"""The halves of mains in a snapshot that the model holds: it must be whole without the model.

    <path>/rank00000/opt0/upper.bin

Two bytes a parameter (bf16, the main rounded) of every bucket whose mains are stored as remainders,
bucket by bucket, each padded to whole pages. The manifest says where each begins, and its checksum.
Unlike bucket files, which are linked, it has to be written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from gds_optimizer.checksum import checksum
from gds_optimizer.direct_file import Progress, open_direct, read_chunks, read_exactly
from gds_optimizer.engine import Engine
from gds_optimizer.errors import CorruptBucketError, GdsOptimizerError, NoSpaceError
from gds_optimizer.io import allocate_host_buffer
from gds_optimizer.layout import PAGE_BYTES, Layout, align_up
from gds_optimizer.plan import keeps_remainder
from gds_optimizer.room import free_bytes

UPPER_NAME = "upper.bin"


def upper_bytes(layout: Layout) -> int:
    """Size of the file that goes with a layout; 0 where there is none."""
    return sum(_padded_bytes(b.numel) for b in layout.buckets if keeps_remainder(b))


def _padded_bytes(numel: int) -> int:
    return align_up(2 * numel, PAGE_BYTES)


@torch.no_grad()
def write_upper(engine: Engine, path: Path) -> list[dict[str, int]]:
    """Write the halves of all mains that the model holds, and sync them; nothing without any.

    Args:
        engine: quiet, with everything on disk (`Engine.settle`).
        path: of the new file.

    Returns:
        For each bucket that has some "bucket", "offset" (bytes) and "checksum".

    Raises:
        NoSpaceError: it does not fit; names bytes needed and free.
        OSError: it could not be written.
    """
    with UpperWriter(path, engine.layout) as writer:
        for index in sorted(engine.halves.buckets):
            writer.add(index, partial(engine.halves.gather, index))
    return writer.entries


class UpperWriter:
    """Makes the file, bucket by bucket; a context manager, which syncs it where all went well.

    For a layout without mains as remainders there is no file.

    Args:
        path: of the new file.
        layout: says how large it is.

    Attributes:
        entries: for the manifest, see `write_upper`.

    Raises:
        NoSpaceError: on entering: it does not fit; names bytes needed and free.
        OSError: it could not be written.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.entries: list[dict[str, int]] = []
        self._path, self._layout = path, layout
        self._offset = 0
        self._fd: int | None = None

    def __enter__(self) -> UpperWriter:
        needed_bytes = upper_bytes(self._layout)
        if needed_bytes:
            self._fd = open_direct(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                _reserve(self._fd, self._path, needed_bytes)
            except BaseException:
                os.close(self._fd)
                raise
            largest = max(b.numel for b in self._layout.buckets if keeps_remainder(b))
            self._buffer = allocate_host_buffer(_padded_bytes(largest))
        return self

    def add(self, index: int, fill: Callable[[torch.Tensor], object]) -> None:
        """Write the halves of a bucket that has some, the one after the bucket added last.

        Args:
            index: of the bucket.
            fill: called with a 1-D bf16 tensor on the CPU, for its halves.
        """
        assert self._fd is not None
        numel = self._layout.buckets[index].numel
        data = self._buffer[: _padded_bytes(numel)]
        fill(data[: 2 * numel].view(torch.bfloat16))
        data[2 * numel :].zero_()
        entry = {"bucket": index, "offset": self._offset, "checksum": int(checksum(data))}
        view, done = memoryview(data.numpy().data), 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], self._offset + done)
        self._offset += len(view)
        self.entries.append(entry)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._fd is None:
            return
        try:
            if error is None:
                os.fsync(self._fd)
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(self._fd)


def _reserve(fd: int, path: Path, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise NoSpaceError(
            f"{path.parent} has too little room for the upper halves of the main parameters, "
            f"which the model holds: they need {nbytes} bytes, and {free_bytes(path.parent)} are "
            "free: free space, or choose another path for the snapshot"
        ) from error


class UpperFile:
    """The halves in one part of a snapshot.

    Args:
        directory: of the part.
        manifest: the part's.
        layout: of its buckets.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any], layout: Layout) -> None:
        self.path = directory / UPPER_NAME
        self._layout = layout
        self._entries = {entry["bucket"]: entry for entry in manifest.get("upper", [])}

    def __iter__(self) -> Iterator[int]:
        """Indices of the buckets that have some."""
        return iter(sorted(self._entries))

    def read(self, index: int, start: int, halves: torch.Tensor) -> None:
        """Fill a 1-D bf16 tensor on the CPU from an element of a bucket on; nothing is checked.

        Raises:
            IoError: the file is too short.
            OSError: it cannot be read.
        """
        with open(self.path, "rb", buffering=0) as file:
            view = memoryview(halves.view(torch.uint8).numpy().data)
            offset = self._entries[index]["offset"] + 2 * start
            read_exactly(self.path, file.fileno(), view, offset)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def checked(self, index: int, progress: Progress | None = None) -> torch.Tensor:
        """The halves of a bucket, 1-D bf16 on the CPU, after comparing them with their checksum.

        Raises:
            CorruptBucketError: they differ, or cannot be read; names file and bucket.
        """
        numel, entry = self._layout.buckets[index].numel, self._entries[index]
        data = torch.empty(_padded_bytes(numel), dtype=torch.uint8)
        done = 0
        try:
            start, end = entry["offset"], entry["offset"] + data.numel()
            for chunk in read_chunks(self.path, start, end):
                data[done : done + chunk.numel()].copy_(chunk)
                done += chunk.numel()
                if progress:
                    progress(chunk.numel())
        except (GdsOptimizerError, OSError) as error:
            raise CorruptBucketError(
                f"the upper halves of bucket {index} in {self.path} cannot be read: {error}"
            ) from error
        found = int(checksum(data))
        if found != entry["checksum"]:
            raise CorruptBucketError(
                f"the upper halves of bucket {index} in {self.path} are damaged: checksum: wanted "
                f"{entry['checksum']}, got {found}"
            )
        return data[: 2 * numel].view(torch.bfloat16)

"""Whole files through a small buffer, past the page cache: for checking and copying snapshots."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from gds_optimizer.checksum import partial_checksum
from gds_optimizer.errors import IoError
from gds_optimizer.io.direct import allocate_host_buffer
from gds_optimizer.layout import Bucket

CHUNK_BYTES = 16 * 2**20

Progress = Callable[[int], object]
"""Called with the number of bytes that were dealt with since the last call."""


def open_direct(path: Path, flags: int) -> int:
    """A descriptor, with O_DIRECT where the file system knows it; new files get mode 0600."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o600)


def read_exactly(path: Path, fd: int, into: memoryview, offset: int) -> None:
    """Fill `into` from a file, however few bytes a call brings.

    Args:
        path: for messages.
        fd: the open file.
        into: writable bytes.
        offset: where to start, in bytes.

    Raises:
        IoError: the file ends before.
        OSError: reading failed.
    """
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if count == 0:
            raise IoError(path, "read", file_offset=offset, wanted_bytes=len(into), got=done)
        done += count


def read_chunks(path: Path, start: int, end: int) -> Iterator[torch.Tensor]:
    """Bytes `start` to `end` of a file in chunks; each is good until the next is asked for.

    Args:
        path: the file.
        start, end: bytes, multiples of 4096.

    Raises:
        IoError: the file is shorter, or reading failed.
        OSError: it cannot be opened.
    """
    buffer = allocate_host_buffer(min(CHUNK_BYTES, max(end - start, 4096)))
    view = memoryview(buffer.numpy().data)
    fd = open_direct(path, os.O_RDONLY)
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes < end:
            raise IoError(
                path,
                "read",
                file_offset=start,
                wanted_bytes=end - start,
                got=max(0, nbytes - start),
            )
        for position in range(start, end, buffer.numel()):
            nbytes = min(buffer.numel(), end - position)
            read_exactly(path, fd, view[:nbytes], position)
            yield buffer[:nbytes]
        # Where there is no direct I/O the pages came through the cache.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        if isinstance(error, IoError):
            raise
        raise IoError(
            path, "read", file_offset=start, wanted_bytes=end - start, got=str(error)
        ) from error
    finally:
        os.close(fd)


class PlaneChecksums:
    """Checksums of a bucket's planes, from the bytes of its file in any pieces.

    Args:
        bucket: what the file holds.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._sums = [0] * len(bucket.planes)

    def add(self, chunk: torch.Tensor, position: int) -> None:
        """Take bytes into account.

        Args:
            chunk: 1-D uint8 tensor on the CPU, a multiple of 4096 bytes long.
            position: where it starts in the file, a multiple of 4096.
        """
        for number, plane in enumerate(self._bucket.planes):
            low = max(position, plane.offset)
            high = min(position + chunk.numel(), plane.offset + plane.nbytes)
            if low < high:
                part = chunk[low - position : high - position]
                self._sums[number] += int(partial_checksum(part, low - plane.offset))

    @property
    def values(self) -> list[int]:
        """For each plane its checksum, as a footer states it."""
        return [(total + 2**63) % 2**64 - 2**63 for total in self._sums]


def plane_checksums(path: Path, bucket: Bucket, progress: Progress | None = None) -> list[int]:
    """Checksums of all planes in a bucket's file.

    Raises:
        IoError: the file is too short or cannot be read.
    """
    sums = PlaneChecksums(bucket)
    position = 0
    for chunk in read_chunks(path, 0, bucket.footer_offset):
        sums.add(chunk, position)
        position += chunk.numel()
        if progress:
            progress(chunk.numel())
    return sums.values


def write_file(path: Path, data: torch.Tensor) -> None:
    """Write a new file of whole pages, and sync it.

    Args:
        path: created with mode 0600.
        data: 1-D uint8 tensor on the CPU, 4 KiB-aligned, a multiple of 4096 bytes long.

    Raises:
        IoError: writing failed.
        OSError: it exists already, or cannot be created.
    """
    fd = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    view, done = memoryview(data.numpy().data), 0
    try:
        if len(view):
            os.posix_fallocate(fd, 0, len(view))
        while done < len(view):
            done += os.pwrite(fd, view[done : done + CHUNK_BYTES], done)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise IoError(
            path, "write", file_offset=done, wanted_bytes=len(view) - done, got=str(error)
        ) from error
    finally:
        os.close(fd)


def copy_file(
    source: Path,
    target: Path,
    *,
    bytes_per_s: float | None = None,
    stop: threading.Event | None = None,
    progress: Progress | None = None,
    sums: PlaneChecksums | None = None,
) -> None:
    """Copy a file of whole pages to a new or existing one, and sync it.

    Args:
        source, target: files; `target` is created with mode 0600, or overwritten in place.
        bytes_per_s: go no faster.
        stop: the copy ends with an InterruptedError when it is set.
        progress: see `Progress`.
        sums: gets what is copied.

    Raises:
        IoError, OSError: reading or writing failed.
        InterruptedError: it was stopped.
    """
    nbytes = os.stat(source).st_size
    stop = stop or threading.Event()
    fd = open_direct(target, os.O_WRONLY | os.O_CREAT)
    began, copied = time.monotonic(), 0
    try:
        for chunk in read_chunks(source, 0, nbytes):
            if sums is not None:
                sums.add(chunk, copied)
            view, done = memoryview(chunk.numpy().data), 0
            while done < chunk.numel():
                done += os.pwrite(fd, view[done:], copied + done)
            copied += chunk.numel()
            if progress:
                progress(chunk.numel())
            early_s = began + copied / bytes_per_s - time.monotonic() if bytes_per_s else 0.0
            if stop.wait(max(0.0, early_s)):
                raise InterruptedError(f"copying to {target} was stopped")
        os.ftruncate(fd, nbytes)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)

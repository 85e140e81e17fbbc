"""Whole files through a small buffer, past the page cache: for checking and copying snapshots."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from gds_optimizer.checksum import partial_checksum
from gds_optimizer.errors import IoError
from gds_optimizer.io.direct import allocate_host_buffer
from gds_optimizer.layout import Bucket

CHUNK_BYTES = 16 * 2**20

Progress = Callable[[int], None]
"""Called with the number of bytes that were dealt with since the last call."""


def _open(path: Path, flags: int) -> int:
    """With O_DIRECT where the file system knows it."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o600)


def read_chunks(path: Path, start: int, end: int) -> Iterator[torch.Tensor]:
    """Bytes `start` to `end` of a file in chunks; each is good until the next is asked for.

    Args:
        path: the file.
        start, end: bytes, multiples of 4096.

    Raises:
        IoError: the file is shorter, or reading failed.
    """
    buffer = allocate_host_buffer(min(CHUNK_BYTES, max(end - start, 4096)))
    view = memoryview(buffer.numpy().data)
    fd = _open(path, os.O_RDONLY)
    try:
        for position in range(start, end, buffer.numel()):
            nbytes = min(buffer.numel(), end - position)
            done = 0
            while done < nbytes:
                count = os.preadv(fd, [view[done:nbytes]], position + done)
                if count == 0:
                    raise IoError(path, "read", file_offset=position, wanted_bytes=nbytes, got=done)
                done += count
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


def plane_checksums(path: Path, bucket: Bucket, progress: Progress | None = None) -> list[int]:
    """Checksums of all planes in a bucket's file.

    Raises:
        IoError: the file is too short or cannot be read.
    """
    checksums = []
    for plane in bucket.planes:
        total = 0
        position = 0
        for chunk in read_chunks(path, plane.offset, plane.offset + plane.nbytes):
            total += int(partial_checksum(chunk, position))
            position += chunk.numel()
            if progress:
                progress(chunk.numel())
        total &= 2**64 - 1
        checksums.append(total - 2**64 if total >= 2**63 else total)
    return checksums


def copy_file(
    source: Path,
    target: Path,
    *,
    bytes_per_s: float | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> None:
    """Copy a file of whole pages to a new or existing one, and sync it.

    Args:
        source, target: files; `target` is created with mode 0600, or overwritten in place.
        bytes_per_s: go no faster.
        stop: asked between chunks; the copy ends with an InterruptedError when it says so.
        progress: see `Progress`.

    Raises:
        IoError, OSError: reading or writing failed.
        InterruptedError: it was stopped.
    """
    nbytes = os.stat(source).st_size
    fd = _open(target, os.O_WRONLY | os.O_CREAT)
    began, copied = time.monotonic(), 0
    try:
        for chunk in read_chunks(source, 0, nbytes):
            if stop():
                raise InterruptedError(f"copying to {target} was stopped")
            view, done = memoryview(chunk.numpy().data), 0
            while done < chunk.numel():
                done += os.pwrite(fd, view[done:], copied + done)
            copied += chunk.numel()
            if progress:
                progress(chunk.numel())
            if bytes_per_s:
                time.sleep(max(0.0, began + copied / bytes_per_s - time.monotonic()))
        os.ftruncate(fd, nbytes)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)

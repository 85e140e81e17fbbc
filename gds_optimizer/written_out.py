"""Buckets that live in memory as bucket files, for whatever wants files: checkpoints, snapshots.

In a step such a bucket has neither file nor footer. Here it gets both for a while: the planes as
they are (encoded ones stay encoded), and a footer with checksums that are computed on the way. On
the way back the checksums are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gds_optimizer.direct_file import CHUNK_BYTES, PlaneChecksums, open_direct, read_chunks
from gds_optimizer.engine import Engine
from gds_optimizer.errors import CorruptBucketError, IoError
from gds_optimizer.footer import host_footer, read_footer
from gds_optimizer.io import PAGE_BYTES, allocate_host_buffer
from gds_optimizer.layout import Bucket

# Enough to compute checksums as fast as a drive takes the bytes; each has a buffer of 16 MiB.
_THREADS = 4


def _in_threads(action: Callable[[int], None], indices: Iterable[int]) -> None:
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(action, indices))


def write_out(engine: Engine, indices: Iterable[int] | None = None) -> None:
    """Write buckets that live in memory to their files, which `reserve_written_out` has made.

    Args:
        engine: quiet: nothing in flight.
        indices: which buckets; by default all that live in memory.

    Raises:
        IoError, OSError: a file could not be written.
    """
    engine.pool.synchronize_compute()
    chosen = engine.store.in_memory if indices is None else indices
    _in_threads(lambda index: _write_bucket(engine, index), list(chosen))


def _write_bucket(engine: Engine, index: int) -> None:
    bucket, record = engine.layout.buckets[index], engine.records[index]
    if record.is_blank:
        return
    path = engine.store.paths[index]
    buffer = allocate_host_buffer(min(CHUNK_BYTES, bucket.footer_offset))
    sums = PlaneChecksums(bucket)
    fd = open_direct(path, os.O_WRONLY)
    try:
        for start, part in engine.store.in_memory[index].chunks(buffer, bucket.footer_offset):
            sums.add(part, start)
            _write(path, fd, part, start)
        page = host_footer(bucket, engine.layout.layout_id, record, sums.values)
        footer = buffer[:PAGE_BYTES]
        footer.copy_(torch.frombuffer(bytearray(page), dtype=torch.uint8))
        _write(path, fd, footer, bucket.footer_offset)
        # Where there is no direct I/O the pages came through the cache.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _write(path: Path, fd: int, data: torch.Tensor, offset: int) -> None:
    view, done = memoryview(data.numpy().data), 0
    while done < len(view):
        count = os.pwrite(fd, view[done:], offset + done)
        if count == 0:
            raise IoError(path, "write", file_offset=offset, wanted_bytes=len(view), got=done)
        done += count


def read_back(engine: Engine, indices: Iterable[int] | None = None) -> None:
    """Take what is in those files for what the buckets hold; the files stay.

    Args:
        engine: quiet, and no slot holds anything of it.
        indices: which buckets; by default all that live in memory. Those that `records` calls
            blank have nothing in their files and are left as they are.

    Raises:
        CorruptBucketError: a file is not what was written; says which plane.
        IoError, OSError: a file cannot be read.
    """
    chosen = engine.store.in_memory if indices is None else indices
    _in_threads(lambda index: load_bucket(engine, index, engine.store.paths[index]), list(chosen))


def load_bucket(engine: Engine, index: int, path: Path) -> None:
    """Copy a bucket file, which must not be blank, into a bucket that lives in memory.

    Raises:
        CorruptBucketError: it is not of this bucket, or not what was written.
        IoError, OSError: it cannot be read.
    """
    bucket = engine.layout.buckets[index]
    footer = read_footer(path, bucket, engine.layout.layout_id)
    memory, sums, position = engine.store.in_memory[index].memory, PlaneChecksums(bucket), 0
    for chunk in read_chunks(path, 0, bucket.footer_offset):
        sums.add(chunk, position)
        memory[position : position + chunk.numel()].copy_(chunk)
        position += chunk.numel()
    _compare(bucket, path, footer.written, footer.checksums, sums.values)


def _compare(
    bucket: Bucket, path: Path, written: list[bool], wanted: list[int], found: list[int]
) -> None:
    for plane, is_written, a, b in zip(bucket.planes, written, wanted, found, strict=True):
        if is_written and a != b:
            raise CorruptBucketError(
                f"bucket {bucket.index} in {path} is not what was written: checksum of plane "
                f"{plane.name!r}: wanted {a}, got {b}"
            )


# ---------------------------------------------------------------------- lending the device's memory


def _on_device(engine: Engine) -> list[int]:
    files = engine.store.in_memory
    return [index for index, file in files.items() if file.stays_on_device]


def lend_device_memory(engines: Iterable[Engine]) -> None:
    """Write what lives on the device to files, and let go of its memory.

    The files keep it until `take_device_memory`: host memory of that size may not be there, and
    reading and writing cost what they cost a step whose state is all on the drives.

    Args:
        engines: with nothing in flight. One without such buckets is left alone.

    Raises:
        NoSpaceError: there is no room for the files; everything is as it was.
        StepFailedError: tensors were handed out for loading and never committed.
        IoError, OSError: writing failed; everything is as it was.
    """
    chosen = [(engine, indices) for engine in engines if (indices := _on_device(engine))]
    try:
        for engine, indices in chosen:
            engine.take_files_back()
            engine.store.reserve_written_out(indices)
            write_out(engine, indices)
    except BaseException:
        for engine, indices in chosen:
            engine.store.drop_written_out(indices)
        raise
    for engine, indices in chosen:
        for index in indices:
            engine.store.in_memory[index].memory = torch.empty(0, dtype=torch.uint8)


def take_device_memory(engines: Iterable[Engine]) -> None:
    """Undo `lend_device_memory`; nothing where it was not called.

    Raises:
        ConfigError: the memory has gone to somebody else meanwhile. The files still have it all.
        CorruptBucketError, IoError, OSError: a file is not what was written, or cannot be read.
    """
    taken, returned = [], []
    try:
        for engine in engines:
            files = engine.store.in_memory
            lent = [index for index in _on_device(engine) if not files[index].memory.numel()]
            for index in lent:
                files[index].memory = engine.pool.allocate_home(files[index].nbytes)
                taken.append(files[index])
            written = [index for index in lent if not engine.records[index].is_blank]
            read_back(engine, written)
            returned.append((engine, lent))
    except BaseException:
        for file in taken:
            file.memory = torch.empty(0, dtype=torch.uint8)
        raise
    for engine, lent in returned:
        # Only these: others may be handed out, and whoever takes them back needs their names.
        engine.store.drop_written_out(lent)

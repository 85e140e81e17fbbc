"""Moving byte ranges between buffers and files, one way for each `IoPath`."""

from __future__ import annotations

import torch

from gds_optimizer.errors import IoPathError
from gds_optimizer.io.base import (
    PAGE_BYTES,
    BucketFile,
    IoBackend,
    IoPath,
    Transfer,
    check_transfer,
)
from gds_optimizer.io.cufile import CuFileBackend
from gds_optimizer.io.direct import DirectBackend, allocate_host_buffer
from gds_optimizer.io.memory import (
    CopyStreams,
    MemoryFile,
    MemoryTransfer,
    reaches_host_memory,
)

__all__ = [
    "PAGE_BYTES",
    "BucketFile",
    "CopyStreams",
    "CuFileBackend",
    "DirectBackend",
    "IoBackend",
    "IoPath",
    "MemoryFile",
    "MemoryTransfer",
    "Transfer",
    "allocate_host_buffer",
    "check_transfer",
    "make_backend",
    "reaches_host_memory",
]


def make_backend(
    io_path: IoPath,
    *,
    device: str | torch.device,
    threads: int,
    task_size_bytes: int,
    queue_per_drive: bool = False,
) -> IoBackend:
    """The backend of an I/O path.

    Args:
        io_path: which way bytes take. It is taken or refused, never replaced.
        device: where buffers live: the CPU for `host`, CUDA for `gds` and `gds-compat`, either
            for `posix`.
        threads: requests in flight at a time, at least 1.
        task_size_bytes: most bytes of one request, a positive multiple of 4096.
        queue_per_drive: have `threads` requests in flight on each drive, so that a slow one does
            not hold up the others. `host` does so anyway.

    Raises:
        IoPathError: the path cannot serve that device, or KvikIO or the NVIDIA driver is missing.
        ForkedError: KvikIO was used by the process that forked this one.
        ValueError: a size or number outside its range.
    """
    if io_path is not IoPath.HOST:
        return CuFileBackend(
            io_path,
            device,
            threads=threads,
            task_size_bytes=task_size_bytes,
            queue_per_drive=queue_per_drive,
        )
    if torch.device(device).type != "cpu":
        raise IoPathError(f"the I/O path host moves host memory, got buffers on {device}")
    return DirectBackend(threads, task_size_bytes)

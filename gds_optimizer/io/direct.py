"""Direct I/O between host memory and files: O_DIRECT, preadv and pwritev, a pool of threads.

For machines without a GPU, and for state that is stepped on the CPU. It needs nothing but the
kernel.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.io.base import PAGE_BYTES, IoPath
from gds_optimizer.io.tasks import Outcome, Task, TaskBackend, TaskFile, open_direct
from gds_optimizer.io.threads import ThreadPools, ThreadTask


def allocate_host_buffer(nbytes: int) -> torch.Tensor:
    """Zeroed, page-aligned, pageable host memory that lives as long as a tensor refers to it.

    Of huge pages where the kernel has them for whoever asks.

    Args:
        nbytes: its size in bytes, at least 1.

    Returns:
        1-D uint8 tensor on the CPU, of shape (nbytes,), whose address is a multiple of 4096.

    Raises:
        ValueError: `nbytes` is not positive.
        OSError: the system has not that much memory.
    """
    if nbytes <= 0:
        raise ValueError(f"wanted a buffer of at least 1 byte, got {nbytes}")
    return torch.frombuffer(anonymous_memory(nbytes), dtype=torch.uint8)


def anonymous_memory(nbytes: int) -> mmap.mmap:
    """Private memory of `nbytes`, of huge pages where they are to be had; untouched.

    Raises:
        OSError: the system has not that much memory.
    """
    # Private: in a forked child, writing to it must not change the parent's bytes.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Of small pages a direct request takes hundreds of segments: drives, virtual ones most of all,
    # then move it in parts. And a page that is touched first is a fault.
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _move(fd: int, operation: str, view: memoryview, file_offset: int) -> Outcome:
    """Move the bytes of `view`; fewer only at the end of the file or with a failure."""
    call = os.preadv if operation == "read" else os.pwritev
    moved = 0
    while moved < len(view):
        try:
            count = call(fd, [view[moved:]], file_offset + moved)
        except OSError as error:
            return Outcome(moved, f"{error.strerror} (errno {error.errno})")
        moved += count
        # What follows a part of a page cannot be asked for directly, and need not be: only the
        # end of the file cuts a page.
        if count == 0 or moved % PAGE_BYTES:
            break
    return Outcome(moved)


class DirectFile(TaskFile):
    """A file open with O_DIRECT; made by `DirectBackend.open`."""

    def __init__(self, path: Path, backend: DirectBackend, fd: int) -> None:
        super().__init__(path, backend)
        self._fd = fd
        self._executor = backend.pools.of(backend.queue_of(path, fd))

    def start_task(self, operation: str, buffer: torch.Tensor, file_offset: int) -> Task:
        array: Any = buffer.numpy()  # NumPy's stubs do not say that it is a buffer
        view = memoryview(array)
        return ThreadTask(self._executor.submit(_move, self._fd, operation, view, file_offset))

    def fileno(self) -> int:
        """The O_DIRECT descriptor; -1 once the file is closed."""
        return self._fd

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def __del__(self) -> None:
        # Nothing is in flight here, since a transfer in flight holds its file.
        if not self.is_closed and os.getpid() == self.pid:
            os.close(self._fd)


class DirectBackend(TaskBackend):
    """`IoPath.HOST`: direct I/O on buffers in host memory.

    Every file system has threads of its own, so that a slow one does not hold up another.

    Args:
        threads: requests in flight at a time, on each file system.
        task_size_bytes: most bytes of one request, a positive multiple of 4096.

    Raises:
        ValueError: a size or number outside its range.
    """

    def __init__(self, threads: int, task_size_bytes: int) -> None:
        super().__init__(
            IoPath.HOST, torch.device("cpu"), threads=threads, task_size_bytes=task_size_bytes
        )
        self.pools = ThreadPools(threads)

    def queue_of(self, path: Path, fd: int) -> object:
        """What a file shares its threads with: files of which this is equal."""
        return os.fstat(fd).st_dev

    def open_file(self, path: Path) -> DirectFile:
        return DirectFile(path, self, open_direct(path))

    def counters(self) -> dict[str, int]:
        """Bytes that completed transfers moved: "host.read" and "host.write"."""
        return {f"host.{operation}": count for operation, count in self.moved_bytes.items()}

    def release(self) -> None:
        self.pools.shutdown()

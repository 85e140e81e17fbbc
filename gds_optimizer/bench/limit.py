"""What the drives give: a plain loop of direct reads and writes that knows nothing of the engine.

Host memory, O_DIRECT, a few threads; the best of a small grid of request sizes and thread counts.
It shares no code with what is measured against it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

PAGE_BYTES = 4096
TASK_BYTES = (4 * 2**20, 16 * 2**20)
THREADS = (8, 16)
HALF_DUPLEX_FACTOR = 1.15
_FILE_BYTES = 64 * 2**20


@dataclass(slots=True)
class Limit:
    """Best rates so far, in 10⁹ bytes a second; 0 where nothing was measured.

    Attributes:
        first_write: first write of freshly allocated files.
        read, write: one kind alone.
        mixed: as many bytes read as written at the same time, both counted.
        best: the request size and the number of threads that gave `mixed`.
    """

    first_write: float = 0.0
    read: float = 0.0
    write: float = 0.0
    mixed: float = 0.0
    best: dict[str, int] = field(default_factory=dict)

    @property
    def is_half_duplex(self) -> bool:
        """Whether reading and writing at once moves hardly more than the better of the two alone.

        The drives then take turns, so that a step gains nothing from reading and writing at the
        same time: only compute hides behind them, and fewer bytes are what helps.
        """
        return self.mixed <= HALF_DUPLEX_FACTOR * max(self.read, self.write)


class LimitFiles:
    """Scratch files over which rates are measured; a context manager that removes them.

    Args:
        directories: files are spread over them in turn.
        nbytes: of all files together; rounded up to whole files of 64 MiB.
    """

    def __init__(self, directories: Sequence[Path], nbytes: int) -> None:
        count = max(len(directories), -(-nbytes // _FILE_BYTES))
        self.paths = [
            directories[i % len(directories)] / f"gds-optimizer-limit-{os.getpid()}-{i:05d}.bin"
            for i in range(count)
        ]
        self.nbytes = count * _FILE_BYTES
        self.limit = Limit()
        self._local = threading.local()

    def __enter__(self) -> LimitFiles:
        for directory in {path.parent for path in self.paths}:
            _remove_those_of_the_dead(directory)
        try:
            self._allocate()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        self._remove()

    def _allocate(self) -> None:
        for path in self.paths:
            fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(fd, 0, _FILE_BYTES)
            finally:
                os.close(fd)

    def _remove(self) -> None:
        for path in self.paths:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def measure_first_write(self, *, fresh: bool = True) -> None:
        """Write every file once; `fresh` gives them new blocks first."""
        if fresh:
            self._remove()
            self._allocate()
        rate = self._rate("write", TASK_BYTES[-1], THREADS[-1])
        self.limit.first_write = max(self.limit.first_write, rate)

    def measure(self) -> Limit:
        """One round over the grid; keeps the best of all rounds."""
        for task_bytes in TASK_BYTES:
            for threads in THREADS:
                for kind in ("read", "write", "mixed"):
                    rate = self._rate(kind, task_bytes, threads)
                    if rate > getattr(self.limit, kind):
                        setattr(self.limit, kind, rate)
                        if kind == "mixed":
                            self.limit.best = {"task_bytes": task_bytes, "threads": threads}
        return self.limit

    def _buffer(self, task_bytes: int) -> memoryview:
        """A page-aligned buffer of this thread, full of something that does not compress."""
        held = getattr(self._local, "buffer", None)
        if held is None or len(held) < task_bytes:
            held = mmap.mmap(-1, task_bytes)
            block = os.urandom(2**20)
            for start in range(0, task_bytes, len(block)):
                held[start : start + len(block)] = block[: task_bytes - start]
            self._local.buffer = held
        return memoryview(held)[:task_bytes]

    def _rate(self, kind: str, task_bytes: int, threads: int) -> float:
        """Bytes a second, / 10⁹, of going over all files once."""
        with _opened(self.paths) as fds, ThreadPoolExecutor(threads) as pool:
            tasks = [
                (fd, start, (number + start // task_bytes) % 2 == 0)
                for number, fd in enumerate(fds)
                for start in range(0, _FILE_BYTES, task_bytes)
            ]

            def move(task: tuple[int, int, bool]) -> None:
                fd, start, even = task
                buffer = self._buffer(task_bytes)
                if kind == "read" or (kind == "mixed" and even):
                    moved = os.preadv(fd, [buffer], start)
                else:
                    moved = os.pwritev(fd, [buffer], start)
                if moved != task_bytes:
                    raise OSError(f"a {kind} of {task_bytes} bytes moved {moved}")

            barrier = threading.Barrier(threads)
            list(pool.map(lambda _: (self._buffer(task_bytes), barrier.wait()), range(threads)))
            began = time.perf_counter()
            list(pool.map(move, tasks))
            return self.nbytes / (time.perf_counter() - began) / 1e9


@contextlib.contextmanager
def _opened(paths: Sequence[Path]) -> Iterator[list[int]]:
    with contextlib.ExitStack() as stack:
        fds = []
        for path in paths:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            fds.append(fd)
        yield fds


def _remove_those_of_the_dead(directory: Path) -> None:
    """Remove the files that a killed process of this machine left."""
    for path in directory.glob("gds-optimizer-limit-*.bin"):
        pid = path.name.split("-")[3]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                path.unlink()

"""What the drives give: a plain loop of direct reads and writes that knows nothing of the engine.

Host memory, O_DIRECT, a few threads; the best of a small grid of request sizes and thread counts,
over files as large as the state where there is room. Nothing that moves bytes is shared with what
is measured against it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gds_optimizer.duplex import is_half_duplex

PAGE_BYTES = 4096
TASK_BYTES = (4 * 2**20, 16 * 2**20)
THREADS = (8, 16, 32)
FIRST_WRITE = (TASK_BYTES[-1], THREADS[1])
"""Request size and number of threads of what is written first."""
_FILE_BYTES = 64 * 2**20
_KEPT_POINTS = 2
_SAME_SHARE = 0.02


@dataclass(slots=True)
class Limit:
    """Rates of the drives, in 10⁹ bytes a second; 0 where nothing was measured.

    A drive's pace moves by a fifth from minute to minute, and a step is as long as the drive makes
    it then. So a rate is the median over rounds, and where steps are held against it these took
    turns with the steps; in each round it is that of the better of the grid's two best points.

    Attributes:
        rounds: by kind ("first_write", "read", "write", "mixed"), the best rate of each round.
        read_share: which part of the mixed bytes was read; the rest was written.
        best: the request size and the number of threads of the best mixed rate of all.
        file_bytes, point_bytes: of all files, and of those that one measurement goes over.
        sustained_bytes: written in one go before anything was measured.
        task_bytes, threads: the grid.
    """

    rounds: dict[str, list[float]] = field(default_factory=dict)
    read_share: float = 0.5
    best: dict[str, int] = field(default_factory=dict)
    file_bytes: int = 0
    point_bytes: int = 0
    sustained_bytes: int = 0
    task_bytes: tuple[int, ...] = TASK_BYTES
    threads: tuple[int, ...] = THREADS

    def _median(self, kind: str) -> float:
        return statistics.median(self.rounds.get(kind) or [0.0])

    @property
    def first_write(self) -> float:
        """First write of freshly allocated files."""
        return self._median("first_write")

    @property
    def read(self) -> float:
        """Reading alone."""
        return self._median("read")

    @property
    def write(self) -> float:
        """Writing alone."""
        return self._median("write")

    @property
    def mixed(self) -> float:
        """Reads and writes at the same time, both counted."""
        return self._median("mixed")

    @property
    def best_mixed(self) -> float:
        """The same in the best of all rounds."""
        return max(self.rounds.get("mixed") or [0.0])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "first_write_gbps": self.first_write,
            "read_gbps": self.read,
            "write_gbps": self.write,
            "mixed_gbps": self.mixed,
            "best_mixed_gbps": self.best_mixed,
            "rounds_gbps": self.rounds,
            "best": self.best,
            "read_share": self.read_share,
            "grid": {"task_bytes": list(self.task_bytes), "threads": list(self.threads)},
            "file_bytes": self.file_bytes,
            "point_bytes": self.point_bytes,
            "sustained_bytes": self.sustained_bytes,
        }

    @property
    def is_half_duplex(self) -> bool:
        """Whether both at once are hardly faster than one after the other: see `duplex`.

        The drives then take turns, so that a step gains nothing from reading and writing at the
        same time: only compute hides behind them, and fewer bytes are what helps.
        """
        if not self.mixed:
            return True
        return is_half_duplex(self.read, self.write, self.mixed, self.read_share)


class LimitFiles:
    """Scratch files over which rates are measured; a context manager that removes them.

    A measurement goes on where the last one stopped, so that one kind meets no byte twice in a
    round, if there are files enough. What a drive or a hypervisor remembers of the last minute
    would otherwise answer for it, as it cannot for a step, which goes over its state once.

    A file system stands for a drive. Where two are on one drive, the sum of their rates may be a
    little too high, since one of them ends before the other.

    Args:
        directories: files are spread over them in turn.
        nbytes: of all files together; rounded up to whole files of 64 MiB.
        point_bytes: the most that one measurement moves.
        threads: numbers of threads to try.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        nbytes: int,
        *,
        point_bytes: int | None = None,
        threads: Sequence[int] = THREADS,
    ) -> None:
        count = max(len(directories), -(-nbytes // _FILE_BYTES))
        self.paths = [
            directories[i % len(directories)] / f"gds-optimizer-limit-{os.getpid()}-{i:05d}.bin"
            for i in range(count)
        ]
        self.nbytes = count * _FILE_BYTES
        most = -(-(point_bytes or nbytes) // _FILE_BYTES)
        self._fewest = len(directories)
        self._window = max(self._fewest, min(most, count // _KEPT_POINTS))
        self._next = 0
        self._grid = [(task, count) for task in TASK_BYTES for count in threads]
        self._points: dict[str, list[tuple[int, int]]] = {}
        self.limit = Limit(
            file_bytes=self.nbytes, point_bytes=self._window * _FILE_BYTES, threads=tuple(threads)
        )
        self._local = threading.local()

    def __enter__(self) -> LimitFiles:
        for directory in {path.parent for path in self.paths}:
            _remove_those_of_the_dead(directory)
        try:
            self._allocate(self.paths)
        except BaseException:
            self._remove(self.paths)
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        self._remove(self.paths)

    def _allocate(self, paths: Sequence[Path]) -> None:
        for path in paths:
            fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(fd, 0, _FILE_BYTES)
            finally:
                os.close(fd)

    def _remove(self, paths: Sequence[Path]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def measure_first_write(self, *, fresh: bool = True) -> None:
        """Write every file once, or, `fresh`, one measurement's files, which get new blocks."""
        if fresh:
            paths = self._take()
            self._remove(paths)
            self._allocate(paths)
            rate = self._rate("write", *FIRST_WRITE, paths)
        else:  # not all at once: there may be more than a process may open
            cuts = range(0, len(self.paths), self._window)
            parts = [self.paths[start : start + self._window] for start in cuts]
            rates = [self._rate("write", *FIRST_WRITE, part) for part in parts]
            rate = statistics.harmonic_mean(rates, weights=list(map(len, parts)))
        self.limit.rounds.setdefault("first_write", []).append(rate)

    def write_first(self, nbytes: int) -> None:
        """Write at least so many bytes, so that a drive's fast cache is full."""
        written_bytes = 0
        while written_bytes < nbytes:
            paths = self._take()
            self._rate("write", *FIRST_WRITE, paths)
            written_bytes += len(paths) * _FILE_BYTES
        self.limit.sustained_bytes += written_bytes

    def choose_points(self, kinds: Sequence[str] = ("read", "write", "mixed")) -> None:
        """Go over the grid of request sizes and numbers of threads once, and keep what did best."""
        window = max(self._fewest, min(self._window, len(self.paths) // len(self._grid)))
        own_bytes = window // self._fewest * _FILE_BYTES
        # Threads that get no task make no difference, and would be kept or not by chance.
        points = {
            (task, min(count, own_bytes // task)): (task, count) for task, count in self._grid
        }
        for kind in kinds:
            found = [
                (self._rate(kind, *point, self._take(window)), point) for point in points.values()
            ]
            self._points[kind] = [point for _, point in sorted(found, reverse=True)[:_KEPT_POINTS]]

    def measure(
        self, read_share: float | None = None, kinds: Sequence[str] = ("read", "write", "mixed")
    ) -> Limit:
        """One round.

        Args:
            read_share: which part of the mixed bytes is to be read; as before by default. Another
                one than before starts the mixed rate anew.
            kinds: what to measure.
        """
        if read_share is not None and abs(read_share - self.limit.read_share) > _SAME_SHARE:
            self.limit.read_share = read_share
            self.limit.rounds.pop("mixed", None)
            self._points.pop("mixed", None)
        self.choose_points([kind for kind in kinds if kind not in self._points])
        for kind in kinds:
            found = [
                (self._rate(kind, *point, self._take()), point) for point in self._points[kind]
            ]
            rate, (task_bytes, threads) = max(found)
            if kind == "mixed" and rate > self.limit.best_mixed:
                self.limit.best = {"task_bytes": task_bytes, "threads": threads}
            self.limit.rounds.setdefault(kind, []).append(rate)
        return self.limit

    def _take(self, count: int | None = None) -> list[Path]:
        """The files of the next measurement."""
        count = count or self._window
        chosen = [self.paths[(self._next + i) % len(self.paths)] for i in range(count)]
        self._next = (self._next + count) % len(self.paths)
        return chosen

    def _buffer(self, task_bytes: int) -> memoryview:
        """A page-aligned buffer of this thread, full of something that does not compress.

        Of huge pages where they are to be had, of which some drives move more at a time.
        """
        held = getattr(self._local, "buffer", None)
        if held is None or len(held) < task_bytes:
            held = mmap.mmap(-1, task_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                held.madvise(mmap.MADV_HUGEPAGE)
            block = os.urandom(2**20)
            for start in range(0, task_bytes, len(block)):
                held[start : start + len(block)] = block[: task_bytes - start]
            self._local.buffer = held
        return memoryview(held)[:task_bytes]

    def _rate(self, kind: str, task_bytes: int, threads: int, paths: Sequence[Path]) -> float:
        """Bytes a second, / 10⁹, of going over these files once: the sum over the drives.

        Drives are busy at the same time, each with threads of its own and until its own files are
        done, so that a slow one makes no other one wait.
        """
        share = {"read": 1.0, "write": 0.0}.get(kind, self.limit.read_share)

        def move(task: tuple[int, int, bool]) -> None:
            fd, start, is_read = task
            buffer = self._buffer(task_bytes)
            if is_read:
                moved = os.preadv(fd, [buffer], start)
            else:
                moved = os.pwritev(fd, [buffer], start)
            if moved != task_bytes:
                raise OSError(f"a {kind} of {task_bytes} bytes moved {moved}")

        by_drive = _by_drive(paths)
        with contextlib.ExitStack() as stack:
            # Left last: after a failure or an interrupt, when what has not begun is given up.
            together = stack.enter_context(ThreadPoolExecutor(len(by_drive)))
            drives = []
            for own in by_drive:
                places = [
                    (fd, start)
                    for fd in stack.enter_context(_opened(own))
                    for start in range(0, _FILE_BYTES, task_bytes)
                ]
                tasks = [
                    (*place, int((number + 1) * share) > int(number * share))
                    for number, place in enumerate(places)
                ]
                # More threads than tasks would only fill their buffers.
                count = min(threads, len(tasks))
                pool = ThreadPoolExecutor(count)
                stack.callback(pool.shutdown, cancel_futures=True)
                drives.append((pool, tasks))
                self._start_threads(pool, count, task_bytes)
            began = time.perf_counter()

            def rate(drive: tuple[ThreadPoolExecutor, list[tuple[int, int, bool]]]) -> float:
                pool, tasks = drive
                list(pool.map(move, tasks))
                return len(tasks) * task_bytes / (time.perf_counter() - began) / 1e9

            return sum(together.map(rate, drives))

    def _start_threads(self, pool: ThreadPoolExecutor, threads: int, task_bytes: int) -> None:
        """Return when all threads are there, each with its buffer, or what keeps one from it.

        Whatever goes wrong meanwhile, an interrupt too, no thread is left waiting for the others:
        the pool could not be shut down.
        """
        barrier = threading.Barrier(threads)

        def start() -> None:
            try:
                self._buffer(task_bytes)
            except BaseException:
                barrier.abort()
                raise
            barrier.wait()

        try:
            started = [pool.submit(start) for _ in range(threads)]
            failures = [each.exception() for each in started]
        except BaseException:
            barrier.abort()
            raise
        for failure in failures:
            if failure is not None and not isinstance(failure, threading.BrokenBarrierError):
                raise failure


def _by_drive(paths: Sequence[Path]) -> list[list[Path]]:
    """Files of one drive together."""
    drives: dict[int, list[Path]] = {}
    for path in paths:
        drives.setdefault(_drive_of(path), []).append(path)
    return list(drives.values())


def _drive_of(path: Path) -> int:
    return os.stat(path).st_dev


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

"""Direct I/O in which each directory is a drive of its own, as slow as the test wants it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gds_optimizer.io.direct import DirectBackend, DirectFile
from gds_optimizer.io.tasks import Task, open_direct


class Throttle:
    """A drive of a given rate: requests take their turn, and their bytes take their time."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self.moved_bytes = 0

    def take(self, nbytes: int) -> None:
        """Return when the drive would have moved them."""
        with self._lock:
            self.moved_bytes += nbytes
            self._free_at_s = max(self._free_at_s, time.monotonic()) + nbytes / self.bytes_per_s
            until_s = self._free_at_s
        time.sleep(max(until_s - time.monotonic(), 0.0))


class ThrottledFile(DirectFile):
    """A file on a throttled drive."""

    throttle: Throttle

    def start_task(self, operation: str, buffer: torch.Tensor, file_offset: int) -> Task:
        # The drive's only thread waits before it moves anything, which holds up nobody else.
        self._executor.submit(self.throttle.take, buffer.numel())
        return super().start_task(operation, buffer, file_offset)


class ThrottledBackend(DirectBackend):
    """Args: rates: directory -> bytes a second, reads and writes together."""

    def __init__(self, rates: Mapping[Path, float], *, task_size_bytes: int = 2**20) -> None:
        super().__init__(1, task_size_bytes)
        self.throttles = {root: Throttle(rate) for root, rate in rates.items()}

    def queue_of(self, path: Path, fd: int) -> object:
        return next(root for root in self.throttles if root in path.parents)

    def open_file(self, path: Path) -> DirectFile:
        file = ThrottledFile(path, self, open_direct(path))
        file.throttle = next(t for root, t in self.throttles.items() if root in path.parents)
        return file


class DuplexFile(DirectFile):
    """A file on a drive with a throttle for each direction."""

    throttles: Mapping[str, Throttle]
    executors: Mapping[str, ThreadPoolExecutor]

    def start_task(self, operation: str, buffer: torch.Tensor, file_offset: int) -> Task:
        self._executor = self.executors[operation]
        self._executor.submit(self.throttles[operation].take, buffer.numel())
        return super().start_task(operation, buffer, file_offset)


class DuplexBackend(DirectBackend):
    """One drive that reads and writes at the same time, or takes turns, each at its rate.

    Args: read, write: bytes a second. takes_turns: a single thread serves both.
    """

    def __init__(self, *, read: float, write: float, takes_turns: bool = False) -> None:
        super().__init__(1, 2**20)
        self.throttles = {"read": Throttle(read), "write": Throttle(write)}
        reading = ThreadPoolExecutor(1)
        writing = reading if takes_turns else ThreadPoolExecutor(1)
        self.executors = {"read": reading, "write": writing}

    def open_file(self, path: Path) -> DirectFile:
        file = DuplexFile(path, self, open_direct(path))
        file.throttles, file.executors = self.throttles, self.executors
        return file

    def release(self) -> None:
        super().release()
        for executor in self.executors.values():
            executor.shutdown()

"""What the backends share: a transfer is cut into tasks, and every task is awaited and counted.

Scope: the life of a transfer - what it keeps alive, when its error is raised, when files and
backends may be closed, what a forked child may do. Anti-scope: how bytes move; a backend only
starts tasks.

A transfer whose tasks have not all ended is held by this module, so dropping it, its buffer, its
file or its backend never frees memory that an I/O thread still uses. An interpreter that exits
normally first waits for such transfers and prints a failure to stderr (the exit status stays
what it was). `os._exit`, a fatal signal or `exec` lose what is in flight, so close the backend
where the outcome matters.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from gds_optimizer.errors import ClosedError, ForkedError, IoError, IoTimeoutError
from gds_optimizer.io.base import (
    PAGE_BYTES,
    BucketFile,
    IoBackend,
    IoPath,
    Transfer,
    check_transfer,
)


class Outcome(NamedTuple):
    """What became of a task: the bytes it moved and, if it failed, why in the system's words."""

    moved_bytes: int
    failure: str | None = None


class Task(Protocol):
    """One request of a transfer, started when it was made."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    def sleep(self, limit_s: float | None) -> None:
        """Return when it has ended or sooner, but not after more than `limit_s` seconds."""

    def outcome(self) -> Outcome:
        """Of a task that has ended; asked for once."""


_DRAIN_LIMIT_S = 60.0
"""How long closing, or the interpreter at its end, waits for what is in flight."""

_IN_FLIGHT: set[TaskTransfer] = set()
"""Every transfer with tasks that have not ended: what must outlive its last other reference."""


def check_process(pid: int, what: str) -> None:
    """Refuse use of `what`, which belongs to process `pid`, in another process.

    Raises:
        ForkedError: this is a forked child of `pid`.
    """
    if os.getpid() != pid:
        raise ForkedError(
            f"{what} belongs to process {pid} and this is its forked child {os.getpid()}, whose "
            "copy has no I/O threads: use it in the parent, or start the child with spawn"
        )


def open_error(path: Path, why: str) -> IoError:
    """The error of a file that cannot be opened for direct I/O."""
    error = IoError(path, "open", file_offset=0, wanted_bytes=0, got=why)
    # "wanted 0 bytes at offset 0" would help nobody.
    error.args = (f"{path} cannot be opened for direct I/O: {why}",)
    return error


def open_direct(path: Path) -> int:
    """Open an existing file for reading and writing past the page cache; its descriptor.

    Raises:
        IoError: in the system's words; nothing is tried instead.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        why = f"{error.strerror} (errno {error.errno})"
        if error.errno == errno.EINVAL:
            why += "; its file system refuses O_DIRECT: use a directory on a local disk"
        raise open_error(path, why) from error


class TaskTransfer(Transfer):
    """A read or write whose tasks have all been started (or the first of which failed to).

    Threads may share it.
    """

    def __init__(
        self, file: TaskFile, operation: str, buffer: torch.Tensor, file_offset: int
    ) -> None:
        self.path = file.path
        self.operation = operation
        self.file_offset = file_offset
        self.nbytes = buffer.numel()
        self.pid = os.getpid()
        self._file = file
        self._buffer: torch.Tensor | None = buffer
        self._lock = threading.Lock()
        self._pending: deque[Task] = deque()
        self._moved_bytes = 0
        self._failure: str | None = None
        self._is_settled = False
        self._got: str | int | None = None
        # Before anything starts: an interrupt may come at any line.
        file.transfers.add(self)
        _IN_FLIGHT.add(self)
        for start in range(0, self.nbytes, file.task_size_bytes):
            part = buffer[start : start + file.task_size_bytes]
            try:
                self._pending.append(file.start_task(operation, part, file_offset + start))
            except (OSError, RuntimeError) as error:
                # What has started still uses the buffer, so this is for `wait` to raise.
                self._failure = str(error)
                break

    def done(self) -> bool:
        check_process(self.pid, f"the {self.operation} of {self.path}")
        return self._first_pending() is None

    def wait(self, timeout_s: float | None = None) -> None:
        check_process(self.pid, f"the {self.operation} of {self.path}")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (task := self._first_pending()) is not None:
            remaining_s = None if deadline is None else deadline - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                raise IoTimeoutError(
                    self.path,
                    self.operation,
                    file_offset=self.file_offset,
                    wanted_bytes=self.nbytes,
                    got=f"{self._moved_bytes} bytes in {timeout_s:g} s so far (it goes on, and "
                    "its buffer is still in use)",
                )
            task.sleep(remaining_s)
        self._file.transfers.discard(self)
        if self._got is not None:
            raise IoError(
                self.path,
                self.operation,
                file_offset=self.file_offset,
                wanted_bytes=self.nbytes,
                got=self._got,
            )

    def _first_pending(self) -> Task | None:
        """Take in what has ended; the first task that has not, None once all have."""
        with self._lock:
            while self._pending and self._pending[0].done():
                outcome = self._pending.popleft().outcome()
                self._moved_bytes += outcome.moved_bytes
                self._failure = self._failure or outcome.failure
            if self._pending:
                return self._pending[0]
            if not self._is_settled:
                self._is_settled = True
                self._got = self._what_came()
                self._file.backend.count(self.operation, self._moved_bytes)
                self._buffer = None
                _IN_FLIGHT.discard(self)
            return None

    def _what_came(self) -> str | int | None:
        """What is reported instead of `nbytes` bytes; None if they have moved."""
        if self._failure is None and self._moved_bytes == self.nbytes:
            return None
        if self.operation == "read":
            size = os.fstat(self._file.fileno()).st_size
            if size < self.file_offset + self.nbytes:
                there = max(size - self.file_offset, 0)
                return f"{there} bytes, since the file ends at byte {size}"
        if self._failure is None:
            return self._moved_bytes
        return f"{self._failure} ({self._moved_bytes} bytes were moved)"


class TaskFile(BucketFile):
    """An open file whose transfers are cut into tasks of the backend's size.

    Threads may share it, except for `close`.
    """

    def __init__(self, path: Path, backend: TaskBackend) -> None:
        self.path = path
        self.pid = os.getpid()
        self.task_size_bytes = backend.task_size_bytes
        self.transfers: set[TaskTransfer] = set()
        """Those that nobody has waited for."""
        self.is_closed = False
        self.backend = backend

    @abstractmethod
    def start_task(self, operation: str, buffer: torch.Tensor, file_offset: int) -> Task:
        """Start one request; `buffer` is part of what the transfer keeps alive.

        Raises:
            OSError, RuntimeError: it could not be started.
        """

    @abstractmethod
    def release(self) -> None:
        """Close the descriptors. Called once, with nothing in flight."""

    def read(self, buffer: torch.Tensor, file_offset: int) -> Transfer:
        return self._start("read", buffer, file_offset)

    def write(self, buffer: torch.Tensor, file_offset: int) -> Transfer:
        return self._start("write", buffer, file_offset)

    def _start(self, operation: str, buffer: torch.Tensor, file_offset: int) -> Transfer:
        check_process(self.pid, str(self.path))
        if self.is_closed:
            raise ClosedError(f"{operation} of {self.path}: the file is closed")
        check_transfer(buffer, file_offset, self.backend.device)
        return TaskTransfer(self, operation, buffer, file_offset)

    def quiesce(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for transfer in list(self.transfers):
            with contextlib.suppress(IoError):
                transfer.wait(max(deadline_s - time.monotonic(), 0.0))

    def close(self) -> None:
        """Close the descriptors. May be called again.

        Raises:
            RuntimeError: a transfer is in flight; the file stays open. Wait for it first.
            IoError: a transfer that nobody has waited for had failed; the file is closed.
            ForkedError: in a forked child.
        """
        check_process(self.pid, str(self.path))
        in_flight = sum(not transfer.done() for transfer in list(self.transfers))
        if in_flight:
            raise RuntimeError(
                f"{self.path} cannot be closed with {in_flight} transfers in flight: "
                "wait for them first"
            )
        self.drain_and_close()

    def drain_and_close(self, deadline_s: float | None = None) -> None:
        """Wait for what is in flight, then close; raises `IoError` as `close` does.

        Args:
            deadline_s: when to give up, by `time.monotonic`; by default in a minute.

        Raises:
            IoTimeoutError: something has not ended by then; its descriptors stay open.
        """
        if self.is_closed:
            return
        if deadline_s is None:
            deadline_s = time.monotonic() + _DRAIN_LIMIT_S
        failure: IoError | None = None
        stuck: IoTimeoutError | None = None
        for transfer in list(self.transfers):
            try:
                transfer.wait(max(deadline_s - time.monotonic(), 0.0))
            except IoTimeoutError as error:
                stuck = stuck or error
            except IoError as error:
                failure = failure or error
        if stuck is not None:
            raise stuck
        self.is_closed = True
        self.release()
        if failure is not None:
            raise failure


class TaskBackend(IoBackend):
    """A backend whose files are `TaskFile`s.

    Args:
        io_path: which way bytes take.
        device: where buffers must live.
        task_size_bytes: most bytes of one request, a positive multiple of 4096.
        threads: requests that are served at a time, at least 1.

    Raises:
        ValueError: a size or number outside its range.
    """

    def __init__(
        self, io_path: IoPath, device: torch.device, *, threads: int, task_size_bytes: int
    ) -> None:
        if task_size_bytes <= 0 or task_size_bytes % PAGE_BYTES:
            raise ValueError(
                f"task_size_bytes is {task_size_bytes}, wanted a positive multiple of {PAGE_BYTES}"
            )
        if threads < 1:
            raise ValueError(f"threads is {threads}, wanted at least 1")
        self.io_path = io_path
        self.device = device
        self.task_size_bytes = task_size_bytes
        self.threads = threads
        self.pid = os.getpid()
        self.files: weakref.WeakSet[TaskFile] = weakref.WeakSet()
        self.moved_bytes = {"read": 0, "write": 0}
        self.is_closed = False
        self._lock = threading.Lock()

    @abstractmethod
    def open_file(self, path: Path) -> TaskFile:
        """Open an existing file.

        Raises:
            IoError: it cannot be opened for direct I/O.
            IoPathError: the host memory that the path takes for files there is not to be had.
        """

    @abstractmethod
    def release(self) -> None:
        """Release threads and monitors. Called once, with every file closed."""

    def open(self, path: str | os.PathLike[str]) -> BucketFile:
        self.check_usable()
        file = self.open_file(Path(path))
        self.files.add(file)
        return file

    def check_usable(self) -> None:
        """Refuse use after `close` and in a forked child."""
        check_process(self.pid, f"the {self.io_path} I/O backend")
        if self.is_closed:
            raise ClosedError(f"the {self.io_path} I/O backend is closed")

    def count(self, operation: str, moved_bytes: int) -> None:
        """Add what a transfer moved."""
        with self._lock:
            self.moved_bytes[operation] += moved_bytes

    def close(self) -> None:
        """Wait for what is in flight, close the files that are open, release threads.

        May be called again.

        Raises:
            IoError: a transfer that nobody has waited for had failed; the backend is closed.
            IoTimeoutError: a transfer has not ended within a minute; its file and the threads
                stay as they are.
            ForkedError: in a forked child.
        """
        check_process(self.pid, f"the {self.io_path} I/O backend")
        if self.is_closed:
            return
        self.is_closed = True
        deadline_s = time.monotonic() + _DRAIN_LIMIT_S
        failure: IoError | None = None
        stuck: IoTimeoutError | None = None
        for file in list(self.files):
            try:
                file.drain_and_close(deadline_s)
            except IoTimeoutError as error:
                stuck = stuck or error
            except IoError as error:
                failure = failure or error
        if stuck is not None:
            raise stuck
        self.release()
        if failure is not None:
            raise failure


@atexit.register
def _drain_at_exit() -> None:
    failure: IoError | None = None
    deadline_s = time.monotonic() + _DRAIN_LIMIT_S
    for transfer in list(_IN_FLIGHT):
        if transfer.pid == os.getpid():  # a forked child has copies of its parent's
            try:
                transfer.wait(max(deadline_s - time.monotonic(), 0.0))
            except IoError as error:
                failure = failure or error
    if failure is not None:
        raise failure

"""Direct I/O in which each directory is a drive of its own, as slow as the test wants it.

Time is what the engine itself sees of it: a drive gets on with its work when it is asked whether
something is done, or waited for. How busy the machine is changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.io.direct import DirectBackend, DirectFile, _move
from gds_optimizer.io.tasks import Outcome, Task, open_direct


class _Request:
    """One of a drive's requests, which are served in turn."""

    def __init__(self, drive: Drive, move: Callable[[], Outcome]) -> None:
        self._drive, self._move = drive, move
        self._outcome: Outcome | None = None

    def serve(self) -> None:
        self._outcome = self._move()

    @property
    def is_served(self) -> bool:
        return self._outcome is not None

    def done(self) -> bool:
        self._drive.get_on()
        return self.is_served

    def sleep(self, limit_s: float | None) -> None:
        self._drive.get_on_until(self)

    def outcome(self) -> Outcome:
        assert self._outcome is not None
        return self._outcome


class Drive:
    """Serves a request each time that it was asked `questions` times; at once for 0."""

    def __init__(self, questions: int) -> None:
        self._questions = questions
        self._asked = 0
        self._requests: deque[_Request] = deque()

    def take(self, request: _Request) -> _Request:
        self._requests.append(request)
        if not self._questions:
            self._serve_next()
        return request

    def get_on(self) -> None:
        self._asked += 1
        if self._requests and self._asked >= self._questions:
            self._serve_next()

    def get_on_until(self, request: _Request) -> None:
        while not request.is_served:
            self._serve_next()

    def _serve_next(self) -> None:
        self._asked = 0
        self._requests.popleft().serve()


class _UnevenFile(DirectFile):
    drive: Drive

    def start_task(self, operation: str, buffer: torch.Tensor, file_offset: int) -> Task:
        array: Any = buffer.numpy()
        move = partial(_move, self.fileno(), operation, memoryview(array), file_offset)
        return self.drive.take(_Request(self.drive, move))


class UnevenBackend(DirectBackend):
    """Args: questions: directory -> how often to ask its drive until a request is done."""

    def __init__(self, questions: Mapping[Path, int]) -> None:
        super().__init__(1, 2**20)
        self._drives = {root: Drive(count) for root, count in questions.items()}

    def queue_of(self, path: Path, fd: int) -> object:
        return next(root for root in self._drives if root in path.parents)

    def open_file(self, path: Path) -> DirectFile:
        file = _UnevenFile(path, self, open_direct(path))
        file.drive = next(drive for root, drive in self._drives.items() if root in path.parents)
        return file

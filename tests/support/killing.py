"""Processes that kill themselves, as `kill -9` does, at a chosen system call.

What is chosen is counted in the child alone, which is forked for it: no code of the package knows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

CHANGING_CALLS = (
    "link",
    "replace",
    "rename",
    "mkdir",
    "unlink",
    "rmdir",
    "open",
    "pwrite",
    "ftruncate",
    "posix_fallocate",
    "fsync",
    "fdatasync",
)
"""Functions of `os` behind each of which the file system may look different."""

_FINISHED = 7


class Countdown:
    """Kills this process when the `at`-th of the counted calls has been made.

    A process that it forks counts on for itself, and kills this one, too.

    Args:
        at: number of calls, from `arm` on; before the first of them for 0.
        calls: names of functions in `os`.
    """

    def __init__(self, at: int, calls: Sequence[str] = CHANGING_CALLS) -> None:
        self._at, self.seen = at, 0
        self._victim = os.getpid()
        self._lock = threading.Lock()
        self._armed = False
        for name in calls:
            self.count(os, name)

    def count(self, module: Any, name: str) -> None:
        """Count the calls of a function."""
        original = getattr(module, name)

        def counted(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            with self._lock:
                if self._armed:
                    self.seen += 1
                    if self.seen == self._at:
                        os.kill(self._victim, signal.SIGKILL)
            return result

        setattr(module, name, counted)

    def arm(self) -> None:
        if self._at == 0:
            os.kill(self._victim, signal.SIGKILL)
        self._armed = True

    def disarm(self) -> None:
        self._armed = False


def killed_at(at: int, work: Callable[[Countdown], None]) -> int | None:
    """Do `work` in a forked child that is to die at the `at`-th call, with all that it started.

    Returns:
        None if it died; if it came to its end before, how many calls it has made.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(reading)
        status = 1
        try:
            countdown = Countdown(at)
            work(countdown)
            countdown.disarm()
            os.write(writing, str(countdown.seen).encode())
            status = _FINISHED
        except BaseException:  # noqa: BLE001 - the parent raises it
            os.write(writing, traceback.format_exc().encode()[-60000:])
        os._exit(status)
    os.close(writing)
    _, status = os.waitpid(child, 0)  # what it says fits the pipe
    # Processes that it forked hold the pipe open, and may wait for it for ever.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    assert os.waitstatus_to_exitcode(status) == _FINISHED, said
    return int(said)

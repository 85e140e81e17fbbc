"""The file that a round trip writes, and the name of what is being done to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stage(answer: dict[str, Any], name: str) -> Iterator[None]:
    """Leave `name` in the answer's `stage` if the block fails, and nothing if it does not."""
    answer["stage"] = name
    yield
    answer["stage"] = ""


@contextmanager
def scratch(file: str, nbytes: int, answer: dict[str, Any]) -> Iterator[None]:
    """A new preallocated file that only its owner may read, removed again in any case."""
    with stage(answer, "create"):
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        answer["removed"] = False
    try:
        try:
            with stage(answer, "allocate"):
                os.posix_fallocate(fd, 0, nbytes)
        finally:
            os.close(fd)
        yield
    finally:
        os.unlink(file)
        answer["removed"] = True

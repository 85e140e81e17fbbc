"""Every way this package says no: one class per cause.

A message is one or two sentences: what failed, where, what was wanted, what was found, what to do.
Mistakes that the user can mend before anything runs are `ValueError`s as well.
"""

from __future__ import annotations

from os import PathLike
from typing import Any


class GdsOptimizerError(Exception):
    """Base class of every error this package raises on purpose."""


class ConfigError(GdsOptimizerError, ValueError):
    """A setting has a value that cannot work; the message names setting, value and range."""


class UnsupportedError(GdsOptimizerError, ValueError):
    """A combination of features that would give wrong results; the message names the flag."""


class IoPathError(GdsOptimizerError, ValueError):
    """The I/O path that was asked for cannot be had in this directory on this machine."""


class StoreLockedError(GdsOptimizerError, ValueError):
    """Another living process owns the directory.

    Attributes:
        owner: what the owner wrote about itself (pid, host, started, command, purpose); may be {}.
    """

    def __init__(self, message: str, owner: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.owner = owner or {}


class NoSpaceError(GdsOptimizerError, OSError):
    """A file system has too little room for the state; the message says needed and free."""


class IoError(GdsOptimizerError, OSError):
    """A read or write of a bucket file failed or was short.

    Attributes:
        path: the file.
        operation: "read" or "write".
        file_offset: where the transfer started, in bytes.
        wanted_bytes: how many bytes it had to move.
        got: what came instead (a byte count or the system's words).
    """

    def __init__(
        self,
        path: str | PathLike[str],
        operation: str,
        *,
        file_offset: int,
        wanted_bytes: int,
        got: str | int,
    ) -> None:
        self.path = str(path)
        self.operation = operation
        self.file_offset = file_offset
        self.wanted_bytes = wanted_bytes
        self.got = got
        got_words = f"{got} bytes" if isinstance(got, int) else got
        super().__init__(
            f"{operation} of {self.path} failed at offset {file_offset}: "
            f"wanted {wanted_bytes} bytes, got {got_words}"
        )

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only arguments are beyond what exceptions pickle by themselves.
        return (
            _make_io_error,
            (type(self), self.path, self.operation, self.file_offset, self.wanted_bytes, self.got),
        )


def _make_io_error(
    kind: type[IoError], path: str, operation: str, offset: int, wanted_bytes: int, got: str | int
) -> IoError:
    return kind(path, operation, file_offset=offset, wanted_bytes=wanted_bytes, got=got)


class IoTimeoutError(IoError):
    """A transfer did not finish within the configured time; its buffer may still be in use."""


class StoreChangedError(GdsOptimizerError, RuntimeError):
    """A bucket file was removed, replaced or resized by somebody else."""


class CorruptBucketError(GdsOptimizerError, RuntimeError):
    """What was read is not what was written: wrong identity, step or checksum."""


class StepFailedError(GdsOptimizerError, RuntimeError):
    """An optimizer step did not complete; says which buckets hold which step.

    The original error is `__cause__`. The store accepts no further step.
    """


class ModelChangedError(GdsOptimizerError, ValueError):
    """Model parameters that hold a half of the mains were changed from outside, without a reload.

    Nothing was computed or written: once the mains are reloaded, everything goes on.
    """


class SnapshotError(GdsOptimizerError, ValueError):
    """A snapshot cannot be taken, is incomplete, does not fit, or is damaged."""


class EvictedReadError(GdsOptimizerError, RuntimeError):
    """Code touched the values of a main parameter or moment while they are on disk."""


class ForkedError(GdsOptimizerError, RuntimeError):
    """A forked child used a store that belongs to its parent."""


class ClosedError(GdsOptimizerError, RuntimeError):
    """The store or optimizer was used after `close()`."""

"""The I/O interface: submit an exact byte range, wait for it, have its byte count checked.

Scope: whole-page transfers between one buffer and one preallocated file. Anti-scope: no caching,
no retries, no knowledge of buckets or optimizers. Three implementations obey the same contract:
KvikIO with GPUDirect Storage, KvikIO in POSIX mode, and direct I/O on host memory.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from enum import Enum
from pathlib import Path

import torch

PAGE_BYTES = 4096


class IoPath(str, Enum):
    """Which way bytes travel between a buffer and a file."""

    GDS = "gds"
    """cuFile moves them between device memory and the drive by DMA; proven by the probe."""
    GDS_COMPAT = "gds-compat"
    """The same cuFile calls in cuFile's own compatibility mode, through host memory."""
    POSIX = "posix"
    """KvikIO reads and writes pinned host memory with O_DIRECT; copies to and from the device."""
    HOST = "host"
    """Direct I/O between host memory and the drive; for machines without a GPU."""

    def __str__(self) -> str:
        return self.value


class Transfer(ABC):
    """One read or write in flight. It keeps its buffer and its file alive until it is done."""

    path: Path
    operation: str
    file_offset: int
    nbytes: int

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Block until exactly `nbytes` bytes have moved. May be called again: same outcome.

        After a read the bytes are visible to every stream of the device.

        Raises:
            IoError: the transfer failed or was short.
            IoTimeoutError: it is still in flight after `timeout_s`; it goes on, and the buffer
                must stay alive.
        """


class BucketFile(ABC):
    """An open bucket file of fixed size. The file exists and its space is allocated.

    Attributes:
        path: of the file, or what takes its place in messages.
        is_stepped_in_place: whether the bucket is in memory that a step works on itself, so that
            nothing is read or written.
    """

    path: Path
    is_stepped_in_place = False

    @abstractmethod
    def read(self, buffer: torch.Tensor, file_offset: int) -> Transfer:
        """Start reading `buffer.numel()` bytes at `file_offset` into `buffer`.

        Args:
            buffer: contiguous 1-D uint8 tensor on the backend's device; address and length are
                multiples of 4096 bytes.
            file_offset: bytes, a multiple of 4096.
        """

    @abstractmethod
    def write(self, buffer: torch.Tensor, file_offset: int) -> Transfer:
        """Start writing `buffer` at `file_offset`; same requirements as `read`.

        The bytes are taken from `buffer` while the transfer is in flight: every kernel that
        writes it must have completed before the call, and none may start until `wait` returned.
        """

    def quiesce(self, timeout_s: float) -> None:  # noqa: B027 - optional by design
        """Wait for transfers that were started, also one whose `Transfer` nobody was given.

        That one is what an interrupt inside of `read` or `write` leaves. Failures are not raised.
        """

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor of the file, for fstat and fsync."""

    @abstractmethod
    def close(self) -> None:
        """Close the descriptors. May be called again.

        Raises:
            RuntimeError: a transfer is in flight; the file stays open. Wait for it first.
            IoError: a transfer that nobody has waited for had failed; the file is closed.
        """


class IoBackend(ABC):
    """Opens files and registers buffers for one I/O path.

    Attributes:
        io_path: which way bytes take.
        device: where buffers must live.
    """

    io_path: IoPath
    device: torch.device

    @abstractmethod
    def open(self, path: str | os.PathLike[str]) -> BucketFile:
        """Open an existing file for reading and writing.

        Raises:
            IoError: the file cannot be opened for direct I/O.
            IoPathError: the host memory that the path takes for files there is not to be had.
        """

    def register(self, buffer: torch.Tensor) -> None:  # noqa: B027 - optional by design
        """Prepare a long-lived buffer for repeated transfers (GDS pins it); else nothing."""

    def deregister(self, buffer: torch.Tensor) -> None:  # noqa: B027 - optional by design
        """Undo `register`; call it before the buffer is freed."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Bytes moved so far, keyed "<real path>.read" and "<real path>.write".

        Named after where the bytes went, not where they were sent: a fallback inside a library
        shows here. Where bytes went more than one way and directions cannot be told apart, the
        keys are "<real path>.total". A path that moved nothing is left out or 0.
        """

    def close(self) -> None:  # noqa: B027 - optional by design
        """Wait for what is in flight, close files that are open, release threads.

        May be called again.

        Raises:
            IoError: a transfer that nobody has waited for had failed; the backend is closed.
        """


def check_transfer(buffer: torch.Tensor, file_offset: int, device: torch.device) -> None:
    """Refuse a buffer or offset that would silently leave the direct path.

    Raises:
        ValueError: wrong dtype, shape, device or alignment; always a mistake of the caller.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"wanted a contiguous 1-D uint8 buffer, got {buffer.dtype} {buffer.shape}")
    if buffer.device != device:
        raise ValueError(f"wanted a buffer on {device}, got one on {buffer.device}")
    misaligned = [
        f"{what} is {value}"
        for what, value in (
            ("address", buffer.data_ptr()),
            ("length", buffer.numel()),
            ("file offset", file_offset),
        )
        if value % PAGE_BYTES
    ]
    if misaligned:
        raise ValueError(f"wanted multiples of {PAGE_BYTES} bytes: {', '.join(misaligned)}")

"""Buckets in memory with the interface of bucket files: copies on streams of their own.

A bucket that lives in host memory is copied into a slot and back, on one CUDA stream for each
direction, ordered against the step's kernels by events: the host does not wait. A bucket that lives
on the device, or in host memory where there is no GPU, is stepped where it is and never copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.errors import ClosedError, IoTimeoutError
from gds_optimizer.io.base import BucketFile, Transfer, check_transfer
from gds_optimizer.io.direct import anonymous_memory

_POLL_S = 20e-6
_REACHING_HOST_MEMORY = ("cpu",)
"""Types of device whose optimizers step what is in host memory as it is."""


_living: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
_of_parent: list[Any] = []


def _keep_in_child() -> None:
    """Never unmap, in a forked child, what it did not get: its own mappings may be there by now."""
    for buffer in list(_living):
        _of_parent.append(buffer.tensor)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer.tensor))  # past the interpreter's end


os.register_at_fork(after_in_child=_keep_in_child)


class HostBuffer:
    """Page-aligned host memory that is really there; pinned where the device is a GPU.

    Not torch's pinned allocator, which rounds sizes up to powers of two. A forked child does not
    get the pages: it has no use for them, and a copy of every page that a step changes meanwhile
    would double the memory.

    Args:
        nbytes: a positive multiple of 4096.
        device: pins the memory for it if it is a GPU.

    Attributes:
        tensor: 1-D uint8 tensor on the CPU.

    Raises:
        MemoryError: it is not to be had, or cannot be pinned; says why. Nothing is kept.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._unpin: weakref.finalize[[], HostBuffer] | None = None
        try:
            memory = anonymous_memory(nbytes)
            memory.madvise(mmap.MADV_DONTFORK)
        except OSError as error:
            raise MemoryError(f"{nbytes} bytes of host memory: {error.strerror}") from error
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        _living.add(self)
        if device.type == "cuda":
            # Also where nobody closes it: pages that are unmapped while they are pinned keep
            # whatever is mapped there next from being pinned.
            self._unpin = weakref.finalize(self, _pin(self.tensor, device))
            self._unpin.atexit = False  # copies may be in flight, and the process ends anyway
        else:
            self.tensor.zero_()  # a page that was never touched is not there yet

    @property
    def is_pinned(self) -> bool:
        return self._unpin is not None and self._unpin.alive

    def close(self) -> None:
        """Give the memory back; no copy may be in flight. May be called again."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if self._unpin is not None:
            self._unpin()


def _pin(tensor: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Lock the pages of a tensor in memory; what undoes it, and keeps the memory until then."""
    # CuPy's call, not torch's: it clears the error of a failed call, which torch's next kernel
    # launch would take for its own.
    try:
        import cupy
    except ImportError as error:
        raise MemoryError(f"pinning host memory needs cupy ({error})") from error
    runtime, pointer, owner = cupy.cuda.runtime, tensor.data_ptr(), os.getpid()
    try:
        with cupy.cuda.Device(device.index):
            runtime.hostRegister(pointer, tensor.numel(), 0)
    except runtime.CUDARuntimeError as error:
        raise MemoryError(f"{tensor.numel()} bytes cannot be pinned: {error}") from error

    def unpin(kept: torch.Tensor = tensor) -> None:
        if os.getpid() != owner:
            return  # a forked child has neither the pages nor a right to its parent's device
        with cupy.cuda.Device(device.index), contextlib.suppress(runtime.CUDARuntimeError):
            runtime.hostUnregister(kept.data_ptr())

    return unpin


def reaches_host_memory(device: torch.device) -> bool:
    """Whether a step on this device needs no copy of what is in host memory."""
    return device.type in _REACHING_HOST_MEMORY


class CopyStreams:
    """A stream for each direction between host memory and a device; none on a CPU.

    Args:
        device: where the slots are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self.to_device = torch.cuda.Stream(device) if is_cuda else None
        self.to_host = torch.cuda.Stream(device) if is_cuda else None
        self._computed = self.new_event()

    def new_event(self) -> Any:
        return torch.cuda.Event() if self.device.type == "cuda" else None

    def follow_compute(self) -> None:
        """Let copies to the host wait for what is queued on the current stream by now."""
        if self.to_host is not None:
            self._computed.record(torch.cuda.current_stream(self.device))
            self.to_host.wait_event(self._computed)


class MemoryTransfer(Transfer):
    """A copy that was queued on a stream, or was made at once (`event` is None)."""

    def __init__(
        self, file: MemoryFile, operation: str, file_offset: int, nbytes: int, event: Any
    ) -> None:
        self.path = file.path
        self.operation = operation
        self.file_offset = file_offset
        self.nbytes = nbytes
        self._device = file.device
        self._event = event

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self, timeout_s: float | None = None) -> None:
        if self._event is None:
            return
        if timeout_s is None:
            self._event.synchronize()
            return
        deadline_s = time.monotonic() + timeout_s
        while not self._event.query():
            if time.monotonic() >= deadline_s:
                raise IoTimeoutError(
                    self.path,
                    self.operation,
                    file_offset=self.file_offset,
                    wanted_bytes=self.nbytes,
                    got=f"a copy that has not ended in {timeout_s:g} s (it goes on, and its "
                    "buffer is still in use)",
                )
            time.sleep(_POLL_S)

    def follow(self) -> None:
        """Let the current stream wait for the copy; the host does not."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class MemoryFile(BucketFile):
    """A bucket in memory.

    Args:
        memory: 1-D uint8 tensor, a multiple of 4096 bytes long, on the CPU or the device.
        streams: for the copies.
        host_buffer: what `memory` belongs to; None where the bucket stays on the device.

    Attributes:
        path: what it would be called as a file, for messages.
        memory: 1-D uint8 tensor of `nbytes` on the CPU or the device; empty once it is closed and
            while the device's memory is lent to others.
        stays_on_device: whether `memory` is the device's, and so among what it lends to others.
    """

    def __init__(
        self, memory: torch.Tensor, streams: CopyStreams, host_buffer: HostBuffer | None = None
    ) -> None:
        self.path = Path("memory")
        self.memory = memory
        self.nbytes = memory.numel()
        self.device = streams.device
        self.stays_on_device = host_buffer is None
        self.is_stepped_in_place = self.stays_on_device or reaches_host_memory(self.device)
        self._host_buffer = host_buffer
        self._streams = streams
        self._read_done = streams.new_event()
        self._write_done = streams.new_event()

    @classmethod
    def in_host_memory(cls, nbytes: int, streams: CopyStreams) -> MemoryFile:
        """A bucket in new host memory.

        Raises:
            MemoryError: it is not to be had.
        """
        buffer = HostBuffer(nbytes, streams.device)
        return cls(buffer.tensor, streams, buffer)

    def read(self, buffer: torch.Tensor, file_offset: int) -> MemoryTransfer:
        """Start copying into `buffer`, in which nothing may be going on."""
        part = self._part(buffer, file_offset)
        stream = self._streams.to_device
        if stream is None:
            buffer.copy_(part)
            return MemoryTransfer(self, "read", file_offset, buffer.numel(), None)
        with torch.cuda.stream(stream):
            buffer.copy_(part, non_blocking=True)
        self._read_done.record(stream)
        return MemoryTransfer(self, "read", file_offset, buffer.numel(), self._read_done)

    def write(self, buffer: torch.Tensor, file_offset: int) -> MemoryTransfer:
        """Start copying from `buffer`, behind what is queued on the current stream by now."""
        part = self._part(buffer, file_offset)
        stream = self._streams.to_host
        if stream is None:
            part.copy_(buffer)
            return MemoryTransfer(self, "write", file_offset, buffer.numel(), None)
        self._streams.follow_compute()
        with torch.cuda.stream(stream):
            part.copy_(buffer, non_blocking=True)
        self._write_done.record(stream)
        return MemoryTransfer(self, "write", file_offset, buffer.numel(), self._write_done)

    def _part(self, buffer: torch.Tensor, file_offset: int) -> torch.Tensor:
        if not self.memory.numel():
            raise ClosedError(f"bucket {self.path} is in memory that was given back")
        check_transfer(buffer, file_offset, self._streams.device)
        part = self.memory[file_offset : file_offset + buffer.numel()]
        if part.numel() != buffer.numel():
            raise ValueError(
                f"wanted bytes {file_offset} to {file_offset + buffer.numel()} of a bucket of "
                f"{self.nbytes} bytes"
            )
        return part

    def chunks(self, buffer: torch.Tensor, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The first `nbytes` in parts of `buffer`'s size, as (offset, bytes in `buffer`).

        Args:
            buffer: 1-D uint8 tensor on the CPU. It is overwritten by the next part.
            nbytes: how many, of `nbytes` at most.
        """
        for start in range(0, nbytes, buffer.numel()):
            part = buffer[: min(buffer.numel(), nbytes - start)]
            part.copy_(self.memory[start : start + part.numel()])
            yield start, part

    def quiesce(self, timeout_s: float) -> None:
        for stream in (self._streams.to_device, self._streams.to_host):
            if stream is not None:
                stream.synchronize()

    def fileno(self) -> int:
        """There is none.

        Raises:
            OSError
        """
        raise OSError(f"bucket {self.path} is in memory and has no descriptor")

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        buffer, self._host_buffer = self._host_buffer, None
        if buffer is not None:
            buffer.close()

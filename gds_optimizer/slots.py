"""The slot pool: the only device memory that streaming takes.

A slot is a buffer for one bucket's planes and footer. It is allocated once, outside torch's
caching allocator (plain cudaMalloc through CuPy: GDS registers whole allocations, and the caching
allocator's may be pieced together), registered once where the I/O path wants that, and shared by
all engines of a process. Where state is stored in another form than the optimizer steps, one more
buffer, the scratch, holds the decoded values of the bucket that is being visited: visits come one
after the other, so one is enough for all slots.

    FREE -> READING -> COMPUTING -> WRITING -> CACHED (-> FREE)

A slot whose write has finished still holds its bucket. It stays CACHED until somebody needs the
slot; an engine that comes back to that bucket first need not read it: it is READY. A slot whose
transfer did not end in time is STUCK: nobody's, until the transfer has ended after all.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any, Protocol

import torch

from gds_optimizer.errors import ConfigError
from gds_optimizer.io import IoBackend, Transfer, allocate_host_buffer
from gds_optimizer.layout import PAGE_BYTES, align_up
from gds_optimizer.tracing import NO_TRACE, NoTrace


class SlotState(Enum):
    FREE = "free"
    READING = "reading"
    READY = "ready"
    COMPUTING = "computing"
    WRITING = "writing"
    CACHED = "cached"
    STUCK = "stuck"


class Slot:
    """One buffer and what it holds.

    Attributes:
        buffer: 1-D uint8 tensor, 4 KiB-aligned, as long as the largest bucket file.
        state: see the module's diagram.
        owner: the pipeline whose bucket it holds; None while FREE or STUCK.
        bucket: index of that bucket in the owner's layout.
        transfers: reads or writes in flight.
        write_number: orders writes by when they were started.
    """

    def __init__(self, index: int, buffer: torch.Tensor) -> None:
        self.index = index
        self.buffer = buffer
        self.state = SlotState.FREE
        self.owner: object | None = None
        self.bucket = -1
        self.transfers: list[Transfer] = []
        self.write_number = 0

    def assign(self, owner: object, bucket: int, state: SlotState) -> None:
        self.owner, self.bucket, self.state = owner, bucket, state

    @property
    def is_idle(self) -> bool:
        """Whether no transfer uses the buffer any more."""
        return all(transfer.done() for transfer in self.transfers)

    def release(self) -> None:
        """Hand the slot back; one that a transfer still uses is set aside instead."""
        self.owner, self.bucket = None, -1
        if self.is_idle:
            self.state, self.transfers = SlotState.FREE, []
        else:
            self.state = SlotState.STUCK


class SlotViewer(Protocol):
    """Keeps tensors over slots, or over buffers from `allocate_home`, between passes."""

    def let_go_of_slots(self) -> None:
        """Drop them: a view keeps the memory that it shows."""


class Usage:
    """Who uses the slots and files: one thread at a time, and nothing else during a pass.

    A signal handler runs in the thread that it interrupts, so a lock that a thread may take twice
    would let it into the middle of a step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._in_pass = False

    @contextmanager
    def hold(self, *, is_pass: bool) -> Iterator[bool]:
        """Use the slots inside, if the value is True; it never waits.

        Args:
            is_pass: nothing else may begin inside, not even in the same thread.
        """
        me = threading.get_ident()
        is_outermost = self._lock.acquire(blocking=False)
        if not is_outermost and (self._owner != me or self._in_pass):
            yield False
            return
        try:
            self._owner, self._in_pass = me, is_pass
            yield True
        finally:
            self._in_pass = False
            if is_outermost:
                self._owner = 0
                self._lock.release()


class SlotPool:
    """A fixed number of equal slots on one device.

    Args:
        count: number of slots; 0 where every bucket is stepped where it lives.
        slot_bytes: bytes of each; rounded up to 4 KiB.
        backend: registers the buffers; decides the device.
        scratch_bytes: bytes of the scratch; none where they are 0.

    Attributes:
        is_suspended: whether the buffers were given back for now.
        scratch: 1-D uint8 tensor on the device, 4 KiB-aligned, to be used on the compute stream
            only; empty while the slots are suspended. It belongs to the visit at hand.

    Raises:
        ConfigError: the device has too little free memory; names bytes wanted and free.
    """

    def __init__(
        self, count: int, slot_bytes: int, backend: IoBackend, *, scratch_bytes: int = 0
    ) -> None:
        self.backend = backend
        self.device = backend.device
        self.scratch_bytes = scratch_bytes
        self.scratch = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.slot_bytes = align_up(max(slot_bytes, PAGE_BYTES), PAGE_BYTES)
        self.slots: list[Slot] = []
        self._closed = False
        self.is_suspended = False
        self.trace: NoTrace = NO_TRACE  # of what all pipelines do with these slots
        self.usage = Usage()
        self.write_numbers = itertools.count(1)
        self.compute_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._compute_done = torch.cuda.Event() if self.compute_stream is not None else None
        # Who keeps views of slots between passes; asked to drop them before buffers are freed.
        self.viewers: weakref.WeakSet[SlotViewer] = weakref.WeakSet()
        self._count = count
        self._allocations: list[Any] = []
        self._fill()

    def _fill(self) -> None:
        self.is_suspended = False
        try:
            for index in range(self._count):
                buffer = self._allocate(self.slot_bytes, f"slot {index}")
                self.backend.register(buffer)
                self.slots.append(Slot(index, buffer))
            if self.scratch_bytes:
                # No file is read into it or written from it, so nothing registers it.
                self.scratch = self._allocate(self.scratch_bytes, "the decoded values")
        except BaseException:
            self.suspend()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and of the scratch."""
        return self.slot_bytes * len(self.slots) + self.scratch.numel()

    def allocate_home(self, nbytes: int) -> torch.Tensor:
        """A buffer on the device for a bucket that stays there, freed with its last reference.

        Returns:
            1-D uint8 tensor of `nbytes`, 4 KiB-aligned; no I/O path knows of it.

        Raises:
            ConfigError: the device has too little free memory.
        """
        return self._allocate(nbytes, "a bucket that stays on the device (hbm_budget)", keep=False)

    def _allocate(self, nbytes: int, what: str, *, keep: bool = True) -> torch.Tensor:
        if self.device.type != "cuda":
            # Touched here: the first pass need not wait for its pages, or find that there are none.
            return allocate_host_buffer(nbytes).zero_()
        try:
            import cupy
        except ImportError as error:
            raise ConfigError(
                f"slots on {self.device} need cupy, which cannot be imported ({error}): install "
                "gds-optimizer[cu12] or [cu13], whichever torch is built for"
            ) from error

        # cudaMalloc promises 256-byte alignment only; O_DIRECT and GDS want whole pages.
        room = nbytes + PAGE_BYTES
        with cupy.cuda.Device(self.device.index):
            try:
                memory = cupy.cuda.Memory(room)
            except cupy.cuda.memory.OutOfMemoryError:
                memory = None
            if memory is None:
                # The caching allocator may sit on memory that nobody uses.
                torch.cuda.empty_cache()
                try:
                    memory = cupy.cuda.Memory(room)
                except cupy.cuda.memory.OutOfMemoryError:
                    free, total = torch.cuda.mem_get_info(self.device)
                    raise ConfigError(
                        f"slots: {nbytes} bytes for {what} are not to be had on {self.device} "
                        f"({free} of {total} bytes free): use fewer slots, a smaller bucket size, "
                        "or a smaller budget for buckets that stay there"
                    ) from None
            shift = -memory.ptr % PAGE_BYTES
            pointer = cupy.cuda.MemoryPointer(memory, shift)
            array = cupy.ndarray((nbytes,), dtype=cupy.uint8, memptr=pointer)
            buffer = torch.as_tensor(array, device=self.device)
        if keep:
            self._allocations.append(array)
        return buffer

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Kernels launched inside run on the pool's own stream, after what is queued outside.

        On leaving, the surrounding stream waits for them, so that what reads the parameters (the
        all-gather, the next forward) and what frees borrowed gradients comes after.
        """
        if self.compute_stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self.device)
        self.compute_stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.compute_stream):
                yield
        finally:
            outside.wait_stream(self.compute_stream)

    def synchronize_compute(self) -> None:
        """Wait on the host until every kernel that was launched inside `computing` is done."""
        if self._compute_done is not None:
            self._compute_done.record(self.compute_stream)
            self._compute_done.synchronize()

    def forget(self, owner: object) -> None:
        """Drop what finished slots hold for `owner`: its files or its plans have changed."""
        for slot in self.slots:
            if slot.owner is owner and slot.state in (SlotState.CACHED, SlotState.READY):
                slot.release()

    def suspend(self) -> None:
        """Free the buffers, so that others can use the memory; `resume` takes them again.

        No transfer may be in flight. What slots held is read again when it is needed.
        """
        self.is_suspended = True
        device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        for viewer in list(self.viewers):
            viewer.let_go_of_slots()
        with device:
            for slot in self.slots:
                self.backend.deregister(slot.buffer)
                slot.release()
        self.slots.clear()
        self.scratch = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._allocations.clear()

    def resume(self) -> None:
        """Undo `suspend`; nothing if it was not called.

        Raises:
            ConfigError: the memory has gone to somebody else meanwhile.
        """
        if self.is_suspended and not self._closed:
            self._fill()

    def close(self) -> None:
        """Free the buffers for good. No transfer may be in flight. May be called again."""
        self._closed = True
        self.trace.close()
        self.suspend()

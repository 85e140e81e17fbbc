"""read | visit | write over a list of buckets, with a bounded number of slots.

One control loop in the caller's thread: the I/O backend's own threads move the bytes, the loop
submits and waits. It knows buckets, slots and byte ranges; what a visit does is not its business.

Writes that are still in flight when a pass ends drain behind whatever the caller does next. They
are waited for when their slot is needed, by `drain`, and before anything is closed.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from gds_optimizer.errors import GdsOptimizerError, IoTimeoutError, StepFailedError
from gds_optimizer.io import BucketFile, MemoryFile, MemoryTransfer
from gds_optimizer.slots import Slot, SlotPool, SlotState
from gds_optimizer.spread import DriveOrder
from gds_optimizer.store import Store
from gds_optimizer.telemetry import PassClock

Ranges = Sequence[tuple[int, int]]
"""Byte ranges of a bucket file as (offset, length), page multiples; the slot has the same ones."""

VisitResident = Callable[[Sequence[int], Callable[[int], Slot]], None]

_HOLDING = (SlotState.CACHED, SlotState.WRITING)
_POLL_S = 0.0002
"""Seconds between two looks at several reads, of which the first to end is wanted."""
_STUCK_WAIT_S = 5.0
"""How long the rest is waited for, in all, once a transfer has not ended in time."""


class _Queues:
    """Buckets that a pass has still to read, those on drives and those in host memory apart.

    Attributes:
        on_drives, in_memory: indices, in the pass's order.
        wanted: both.
        are_two: whether the pass has buckets of both kinds.
    """

    def __init__(self, files: Sequence[BucketFile], order: Sequence[int]) -> None:
        copied = {index for index in order if isinstance(files[index], MemoryFile)}
        self.in_memory = deque(index for index in order if index in copied)
        self.on_drives = deque(index for index in order if index not in copied)
        self.wanted = set(order)
        self.are_two = 0 < len(copied) < len(order)


def _only_copies(slot: Slot) -> bool:
    """Whether nothing but copies of host memory is in flight on a slot."""
    return all(isinstance(transfer, MemoryTransfer) for transfer in slot.transfers)


def _has_arrived(slot: Slot) -> bool:
    """Whether a slot can be visited without waiting on the host: streams wait for copies."""
    return _only_copies(slot) or slot.is_idle


class Pipeline:
    """Moves one store's buckets through a slot pool that other pipelines may share.

    Args:
        pool: the slots.
        store: the files.
        timeout_s: limit for a single transfer.
        order: where buckets are on several drives, chooses which is read next; a bucket is then
            visited as soon as it has been read, so that no drive waits for a slower one.

    Attributes:
        unfinished_writes: buckets whose last write is not known to have ended well.
    """

    def __init__(
        self, pool: SlotPool, store: Store, *, timeout_s: float, order: DriveOrder | None = None
    ) -> None:
        self.pool = pool
        self.order = order
        self.store = store
        self.timeout_s = timeout_s
        self.unfinished_writes: set[int] = set()
        # Of a write that another pipeline waited for, because it needed the slot.
        self._tail_failure: GdsOptimizerError | None = None

    def run(
        self,
        order: Sequence[int],
        *,
        reads: Callable[[int], Ranges],
        visit: Callable[[int, Slot, bool], Ranges],
        clock: PassClock,
        visit_resident: VisitResident | None = None,
    ) -> None:
        """Visit the buckets in `order`, reading ahead and writing behind.

        Buckets that are stepped where they live have a slot that is their home. On a GPU they come
        first, all at once, while the first of the others are being read: the host only queues
        kernels for them. On a CPU they fill the time in which none of the others has arrived.
        Where some of the others live in host memory and some on drives, drives get one slot (all
        but two of more than three), and whatever has arrived is visited: copies are much faster,
        and go on beside the I/O.

        Args:
            order: bucket indices, each once. Buckets of one kind are visited in this order.
            reads: which ranges of a bucket's file its visit needs in the slot.
            visit: called with bucket, slot and whether the bytes come from the disk (False: they
                are what the last visit left in the slot). It returns when no kernel touches the
                slot any more, and says which ranges of the slot must be written. Kernels may
                still be at work where the bucket lives in memory: copies wait for them.
            clock: gets times and byte counts.
            visit_resident: visits buckets that are stepped where they live; gets them, and what
                gives the slot of one. By default `visit` is called for each.

        Raises:
            GdsOptimizerError: the first failure, after every transfer in flight has ended. The
                buckets whose visit has returned are on disk unless the failure was their write.
        """
        files = self.store.files
        resident = [index for index in order if files[index].is_stepped_in_place]
        moving = [index for index in order if not files[index].is_stepped_in_place]
        queues = _Queues(files, moving)
        reading: deque[Slot] = deque()
        is_cuda = self.pool.device.type == "cuda"
        try:
            self._raise_tail_failure()
            while queues.wanted or reading or resident:
                self.pool.trace.poll()
                self._read_ahead(queues, reading, reads, clock, may_wait=not resident)
                if resident and (is_cuda or not self._is_next_here(reading, queues)):
                    is_all = is_cuda or not (queues.wanted or reading)
                    count = len(resident) if is_all else 1
                    self._visit_resident(resident[:count], visit, visit_resident, clock)
                    del resident[:count]
                    continue
                with clock.phase("read_wait"):
                    slot = self._next_read(reading, queues)
                    if slot is None:
                        continue
                    self._follow_or_finish(slot)
                from_disk = slot.state is SlotState.READING
                slot.state = SlotState.COMPUTING
                with clock.phase("compute"):
                    ranges = visit(slot.bucket, slot, from_disk)
                clock.stats.buckets += 1
                clock.stats.cached_buckets += not from_disk
                self._write(slot, ranges, clock)
        except BaseException as error:
            self._abandon(error)
            raise

    def _visit_resident(
        self,
        buckets: Sequence[int],
        visit: Callable[[int, Slot, bool], Ranges],
        visit_all: VisitResident | None,
        clock: PassClock,
    ) -> None:
        """Visit buckets where they live; there is nothing to read and nothing to write."""

        def slot_of(bucket: int) -> Slot:
            slot = Slot(bucket, cast(MemoryFile, self.store.files[bucket]).memory)
            slot.assign(self, bucket, SlotState.COMPUTING)
            return slot

        with clock.phase("compute"):
            if visit_all is not None:
                visit_all(buckets, slot_of)
            else:
                for bucket in buckets:
                    visit(bucket, slot_of(bucket), False)
        clock.stats.buckets += len(buckets)
        clock.stats.in_place_buckets += len(buckets)

    def _follow_or_finish(self, slot: Slot) -> None:
        """See to it that what comes next on the current stream finds the bytes in the slot."""
        transfers = [each for each in slot.transfers if isinstance(each, MemoryTransfer)]
        if slot.state is not SlotState.READING or len(transfers) != len(slot.transfers):
            self._finish(slot)
            return
        for transfer in transfers:
            transfer.follow()
        slot.transfers = []

    def _read_ahead(
        self,
        queues: _Queues,
        reading: deque[Slot],
        reads: Callable[[int], Ranges],
        clock: PassClock,
        *,
        may_wait: bool = True,
    ) -> None:
        """Start reads while slots are to be had; wait for a write only if nothing is being read.

        Args:
            may_wait: whether it may wait at all: there is nothing else to do meanwhile.
        """
        while queues.wanted:
            queue = self._queue_to_serve(queues)
            if queue is queues.on_drives:
                self._put_first(queue)
            bucket = queue[0]
            must = may_wait and (not reading or self._is_copy_awaited(queues, reading))
            slot = self._take_slot(bucket, queues.wanted, must=must, may_wait=may_wait, clock=clock)
            if slot is None:
                return
            queue.popleft()
            queues.wanted.discard(bucket)
            reading.append(slot)
            if slot.owner is self and slot.bucket == bucket:
                slot.state = SlotState.READY
                continue
            slot.assign(self, bucket, SlotState.READING)
            ranges = reads(bucket)
            if ranges:
                self.store.check_unchanged(bucket)
            start_s = time.perf_counter()
            for offset, nbytes in ranges:
                slot.transfers.append(
                    self.store.files[bucket].read(slot.buffer[offset : offset + nbytes], offset)
                )
                if isinstance(self.store.files[bucket], MemoryFile):
                    clock.stats.host_read_bytes += nbytes
                else:
                    clock.stats.read_bytes += nbytes
            self._trace_start("read", slot, ranges, start_s)

    def _queue_to_serve(self, queues: _Queues) -> deque[int]:
        """The queue whose first bucket gets the next slot; one of them has some."""
        if not (queues.on_drives and queues.in_memory):
            return queues.on_drives or queues.in_memory
        slots, first = self.pool.slots, queues.on_drives[0]
        is_held = any(
            slot.owner is self and slot.bucket == first and slot.state in _HOLDING for slot in slots
        )
        busy = sum(
            not _only_copies(slot) and (slot.state is SlotState.READING or not slot.is_idle)
            for slot in slots
        )
        has_room = busy < max(1, len(slots) - 2)
        return queues.on_drives if is_held or has_room else queues.in_memory

    def _is_copy_awaited(self, queues: _Queues, reading: Sequence[Slot]) -> bool:
        """Whether a copy that is about to end gives a slot before a drive has anything to visit."""
        return (
            queues.are_two
            and bool(queues.in_memory)
            and not any(_has_arrived(slot) for slot in reading)
            and any(
                slot.state is SlotState.WRITING and _only_copies(slot) for slot in self.pool.slots
            )
        )

    def _put_first(self, queue: deque[int]) -> None:
        """Bring the bucket that is to be read next to the front of the queue."""
        if self.order is None:
            return
        own = [slot for slot in self.pool.slots if slot.owner is self]
        if any(slot.bucket == queue[0] and slot.state in _HOLDING for slot in own):
            return  # it need not be read
        moving = (SlotState.READING, SlotState.WRITING)
        # A write that has ended occupies no drive, though nobody has waited for it yet.
        busy = [
            slot.bucket
            for slot in own
            if slot.state in moving and not slot.is_idle and not _only_copies(slot)
        ]
        position = self.order.pick(queue, busy)
        if position:
            bucket = queue[position]
            del queue[position]
            queue.appendleft(bucket)

    def _is_next_here(self, reading: Sequence[Slot], queues: _Queues) -> bool:
        """Whether `_next_read` has a slot that can be visited without waiting."""
        is_any_taken = self.order is not None or queues.are_two
        return any(map(_has_arrived, reading if is_any_taken else [*reading][:1]))

    def _next_read(self, reading: deque[Slot], queues: _Queues) -> Slot | None:
        """Take the slot to visit next: the first in order, or what arrives first.

        What has arrived is taken where buckets are on several drives, or on drives and in host
        memory; with several drives, it is waited for.

        Args:
            reading: slots that are being read, at least one.
            queues: what is to be read as soon as a slot is free.

        Returns:
            None if a slot has become free, so that a drive may get work first. A slot whose read
            has not ended once `timeout_s` is over: waiting for it tells.
        """
        is_more = bool(queues.wanted)
        if self.order is None:
            if queues.are_two:
                for slot in reading:
                    if _has_arrived(slot):
                        reading.remove(slot)
                        return slot
        elif len(reading) > 1 or is_more:
            deadline_s = time.monotonic() + self.timeout_s
            while time.monotonic() < deadline_s:
                for slot in reading:
                    if _has_arrived(slot):
                        reading.remove(slot)
                        return slot
                if is_more and any(
                    slot.state is SlotState.WRITING
                    and slot.is_idle
                    and not self._is_held(slot, queues.wanted)
                    for slot in self.pool.slots
                ):
                    return None
                time.sleep(_POLL_S)
        return reading.popleft()

    def _take_slot(
        self, bucket: int, wanted: set[int], *, must: bool, may_wait: bool, clock: PassClock
    ) -> Slot | None:
        """A slot without transfers in flight: the one that still holds `bucket`, else an idle one.

        Args:
            wanted: buckets this pass will still visit; slots that hold one are spared.
            must: wait for a write to end rather than return None.
            may_wait: wait for the write of `bucket` itself, though `must` is False.
        """
        slots = self.pool.slots
        for slot in slots:
            if slot.owner is self and slot.bucket == bucket and slot.state in _HOLDING:
                if not (may_wait or slot.is_idle):
                    return None
                # Its bytes are good, but nothing may change them before its write has ended.
                with clock.phase("write_wait"):
                    self._finish(slot)
                return slot
        for state in (SlotState.FREE, SlotState.CACHED):
            for slot in slots:
                if slot.state is state and not self._is_held(slot, wanted):
                    return slot
        # What is wanted later is given up last: it would have to be read again.
        writing = sorted(
            (slot for slot in slots if slot.state is SlotState.WRITING),
            key=lambda slot: (
                self._is_held(slot, wanted),
                not _only_copies(slot),
                slot.write_number,
            ),
        )
        for slot in writing:
            is_spared = self._is_held(slot, wanted)
            if not is_spared and slot.is_idle and self._finish_write(slot):
                return slot
        for slot in slots:
            if slot.state is SlotState.STUCK and slot.is_idle:
                slot.release()
                return slot
        if not must:
            return None
        for slot in writing:
            with clock.phase("write_wait"):
                if self._finish_write(slot):
                    return slot
        for slot in slots:
            if slot.state is SlotState.CACHED:
                return slot  # all cache buckets that are wanted later: give one up
        raise StepFailedError(
            f"none of the {len(slots)} slots can be used: their transfers are stuck in "
            f"{', '.join(sorted({str(t.path) for slot in slots for t in slot.transfers}))}"
        )

    def _is_held(self, slot: Slot, wanted: set[int]) -> bool:
        """Whether a slot has a bucket that this pass will still visit."""
        return slot.owner is self and slot.bucket in wanted

    def _write(self, slot: Slot, ranges: Ranges, clock: PassClock) -> None:
        if not ranges:
            slot.state = SlotState.CACHED
            return
        self.unfinished_writes.add(slot.bucket)
        self.store.check_unchanged(slot.bucket)
        file = self.store.file_for_write(slot.bucket)
        start_s = time.perf_counter()
        for offset, nbytes in ranges:
            slot.transfers.append(file.write(slot.buffer[offset : offset + nbytes], offset))
            if isinstance(file, MemoryFile):
                clock.stats.host_written_bytes += nbytes
            else:
                clock.stats.written_bytes += nbytes
        self._trace_start("write", slot, ranges, start_s)
        # Only now: a write of which a part was never started must not count as ended.
        slot.write_number = next(self.pool.write_numbers)
        slot.state = SlotState.WRITING

    def _trace_start(self, lane: str, slot: Slot, ranges: Ranges, start_s: float) -> None:
        nbytes = sum(nbytes for _, nbytes in ranges)
        self.pool.trace.started(lane, slot.bucket, slot.transfers, nbytes, start_s)

    def _finish(self, slot: Slot, deadline_s: float | None = None) -> None:
        """Wait for everything in flight on `slot`; the first failure is raised when all ended.

        Args:
            deadline_s: when to give up, by `time.monotonic`; by default in `timeout_s` seconds.
        """
        start_s = time.monotonic()
        limit_s = self.timeout_s if deadline_s is None else max(deadline_s - start_s, 0.0)
        left_s = limit_s
        failure: GdsOptimizerError | None = None
        for transfer in slot.transfers:
            left_s = self.pool.trace.wait(transfer, left_s)
            try:
                transfer.wait(left_s)
            except GdsOptimizerError as error:
                failure = failure or error
            left_s = max(start_s + limit_s - time.monotonic(), 0.0)
        if failure is not None:
            raise failure
        slot.transfers = []
        if slot.state is SlotState.WRITING:
            self.unfinished_writes.discard(slot.bucket)

    def _finish_write(self, slot: Slot) -> bool:
        """Wait for a write, ours or another pipeline's; whether the slot can be used then.

        A failure of another pipeline's write is that one's to raise.
        """
        owner = slot.owner
        if owner is self or not isinstance(owner, Pipeline):
            self._finish(slot)
            return True
        try:
            owner._finish(slot)
        except GdsOptimizerError as error:
            owner._tail_failure = owner._tail_failure or error
            slot.release()
        return slot.state is not SlotState.STUCK

    def _raise_tail_failure(self) -> None:
        failure, self._tail_failure = self._tail_failure, None
        if failure is not None:
            raise failure

    def _abandon(self, error: BaseException) -> None:
        """After a failure: wait for what is in flight and give this pipeline's slots back.

        A slot whose transfer is stuck is not reused: its threads may still touch the buffer.
        """
        # A visit that raised has left kernels behind, and reads do not wait for those.
        with contextlib.suppress(RuntimeError):
            self.pool.synchronize_compute()
        # After a timeout, waiting as long again for each of the rest would help nobody.
        is_stuck = isinstance(error, IoTimeoutError)
        deadline_s = time.monotonic() + (_STUCK_WAIT_S if is_stuck else self.timeout_s)
        if not isinstance(error, GdsOptimizerError):
            for file in self.store.files:
                file.quiesce(max(deadline_s - time.monotonic(), 0.0))
        for slot in self.pool.slots:
            if slot.owner is self:
                # The first failure is on its way up already.
                with contextlib.suppress(GdsOptimizerError):
                    self._finish(slot, deadline_s)
                slot.release()

    def drain(self) -> None:
        """Wait until every write has ended.

        Raises:
            IoError: a write that went on behind the last pass has failed.
        """
        try:
            for slot in self.pool.slots:
                if slot.owner is self and slot.state is SlotState.WRITING:
                    self._finish(slot)
                    slot.state = SlotState.CACHED
            self._raise_tail_failure()
        except GdsOptimizerError as error:
            self._abandon(error)
            raise

    def forget(self) -> None:
        """Drop what slots still hold of this store, after its writes have ended."""
        self.drain()
        self.pool.forget(self)

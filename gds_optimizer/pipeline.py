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

from gds_optimizer.errors import GdsOptimizerError, IoTimeoutError, StepFailedError
from gds_optimizer.slots import Slot, SlotPool, SlotState
from gds_optimizer.store import Store
from gds_optimizer.telemetry import PassClock

Ranges = Sequence[tuple[int, int]]
"""Byte ranges of a bucket file as (offset, length), page multiples; the slot has the same ones."""

_HOLDING = (SlotState.CACHED, SlotState.WRITING)
_STUCK_WAIT_S = 5.0
"""How long the rest is waited for, in all, once a transfer has not ended in time."""


class Pipeline:
    """Moves one store's buckets through a slot pool that other pipelines may share.

    Args:
        pool: the slots.
        store: the files.
        timeout_s: limit for a single transfer.

    Attributes:
        unfinished_writes: buckets whose last write is not known to have ended well.
    """

    def __init__(self, pool: SlotPool, store: Store, *, timeout_s: float) -> None:
        self.pool = pool
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
    ) -> None:
        """Visit the buckets in `order`, reading ahead and writing behind.

        Args:
            order: bucket indices, each once.
            reads: which ranges of a bucket's file its visit needs in the slot.
            visit: called with bucket, slot and whether the bytes come from the disk (False: they
                are what the last visit left in the slot). It returns when no kernel touches the
                slot any more, and says which ranges of the slot must be written.
            clock: gets times and byte counts.

        Raises:
            GdsOptimizerError: the first failure, after every transfer in flight has ended. The
                buckets whose visit has returned are on disk unless the failure was their write.
        """
        queue = deque(order)
        wanted = set(order)
        reading: deque[Slot] = deque()
        try:
            self._raise_tail_failure()
            while queue or reading:
                self.pool.trace.poll()
                self._read_ahead(queue, wanted, reading, reads, clock)
                slot = reading.popleft()
                from_disk = slot.state is SlotState.READING
                with clock.phase("read_wait"):
                    self._finish(slot)
                slot.state = SlotState.COMPUTING
                with clock.phase("compute"):
                    ranges = visit(slot.bucket, slot, from_disk)
                clock.stats.buckets += 1
                clock.stats.cached_buckets += not from_disk
                self._write(slot, ranges, clock)
        except BaseException as error:
            self._abandon(error)
            raise

    def _read_ahead(
        self,
        queue: deque[int],
        wanted: set[int],
        reading: deque[Slot],
        reads: Callable[[int], Ranges],
        clock: PassClock,
    ) -> None:
        """Start reads while slots are to be had; wait for a write only if nothing is being read."""
        while queue:
            bucket = queue[0]
            slot = self._take_slot(bucket, wanted, must=not reading, clock=clock)
            if slot is None:
                return
            queue.popleft()
            wanted.discard(bucket)
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
                clock.stats.read_bytes += nbytes
            self._trace_start("read", slot, ranges, start_s)

    def _take_slot(
        self, bucket: int, wanted: set[int], *, must: bool, clock: PassClock
    ) -> Slot | None:
        """A slot without transfers in flight: the one that still holds `bucket`, else an idle one.

        Args:
            wanted: buckets this pass will still visit; slots that hold one are spared.
            must: wait for a write to end rather than return None.
        """
        slots = self.pool.slots
        for slot in slots:
            if slot.owner is self and slot.bucket == bucket and slot.state in _HOLDING:
                # Its bytes are good, but nothing may change them before its write has ended.
                with clock.phase("write_wait"):
                    self._finish(slot)
                return slot
        for state in (SlotState.FREE, SlotState.CACHED):
            for slot in slots:
                if slot.state is state and not (slot.owner is self and slot.bucket in wanted):
                    return slot
        writing = sorted(
            (slot for slot in slots if slot.state is SlotState.WRITING),
            key=lambda slot: slot.write_number,
        )
        for slot in writing:
            if slot.is_idle and self._finish_write(slot):
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

"""read | visit | write: order, bounds and failures, with a scripted backend in memory.

The backend moves bytes as late as it may: when a transfer is waited for. Whoever reads a slot too
early, or writes it too early, gets wrong bytes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gds_optimizer import pipeline as module
from gds_optimizer.errors import (
    CorruptBucketError,
    GdsOptimizerError,
    IoError,
    IoTimeoutError,
    StepFailedError,
    StoreChangedError,
)
from gds_optimizer.io.base import BucketFile, IoBackend, IoPath, Transfer
from gds_optimizer.pipeline import Pipeline
from gds_optimizer.slots import Slot, SlotPool, SlotState
from gds_optimizer.telemetry import PassClock

PAGE = 4096
FILE_BYTES = 3 * PAGE
WHOLE = [(0, FILE_BYTES)]


class Script:
    """What happens when: an event for everything, and what goes wrong."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.fails: set[tuple[str, int]] = set()
        self.refuses: set[tuple[str, int]] = set()
        self.stuck: set[tuple[str, int]] = set()
        self.is_done: Callable[[ScriptedTransfer], bool] = lambda transfer: False
        self.in_flight: list[ScriptedTransfer] = []

    def note(self, event: str, bucket: int) -> None:
        self.events.append((event, bucket))

    def of(self, *kinds: str) -> list[tuple[str, int]]:
        return [event for event in self.events if event[0] in kinds]


class ScriptedTransfer(Transfer):
    def __init__(
        self, file: ScriptedFile, operation: str, buffer: torch.Tensor, offset: int
    ) -> None:
        self.path, self.operation, self.file_offset = file.path, operation, offset
        self.nbytes = buffer.numel()
        self.file, self.buffer = file, buffer
        self.has_ended = False
        file.script.in_flight.append(self)

    @property
    def key(self) -> tuple[str, int]:
        return self.operation, self.file.number

    def done(self) -> bool:
        script = self.file.script
        if not self.has_ended and self.key not in script.stuck and script.is_done(self):
            self.end()
        return self.has_ended

    def wait(self, timeout_s: float | None = None) -> None:
        script = self.file.script
        if self.key in script.stuck:
            raise IoTimeoutError(
                self.path,
                self.operation,
                file_offset=self.file_offset,
                wanted_bytes=self.nbytes,
                got=f"0 bytes in {timeout_s} s",
            )
        if not self.has_ended:
            self.end()
        if self.key in script.fails:
            raise IoError(
                self.path,
                self.operation,
                file_offset=self.file_offset,
                wanted_bytes=self.nbytes,
                got="an error",
            )

    def end(self) -> None:
        script = self.file.script
        self.has_ended = True
        script.in_flight.remove(self)
        script.note(f"{self.operation} ended", self.file.number)
        if self.key in script.fails:
            return
        stored = self.file.content[self.file_offset : self.file_offset + self.nbytes]
        if self.operation == "read":
            self.buffer.copy_(stored)
        else:
            stored.copy_(self.buffer)


class ScriptedFile(BucketFile):
    def __init__(self, script: Script, number: int) -> None:
        self.script, self.number = script, number
        self.path = Path(f"bucket{number:05d}.bin")
        self.content = torch.full((FILE_BYTES,), number, dtype=torch.uint8)

    def _start(self, operation: str, buffer: torch.Tensor, offset: int) -> Transfer:
        if (operation, self.number) in self.script.refuses:
            raise IoError(self.path, operation, file_offset=0, wanted_bytes=0, got="a refusal")
        self.script.note(operation, self.number)
        return ScriptedTransfer(self, operation, buffer, offset)

    def read(self, buffer: torch.Tensor, file_offset: int) -> Transfer:
        return self._start("read", buffer, file_offset)

    def write(self, buffer: torch.Tensor, file_offset: int) -> Transfer:
        return self._start("write", buffer, file_offset)

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


class ScriptedBackend(IoBackend):
    io_path = IoPath.HOST
    device = torch.device("cpu")

    def open(self, path: str | os.PathLike[str]) -> BucketFile:
        raise NotImplementedError

    def counters(self) -> dict[str, int]:
        return {}


class ScriptedStore:
    """Files without a directory."""

    def __init__(self, script: Script, count: int, first: int = 0) -> None:
        self.script = script
        self.files = [ScriptedFile(script, first + i) for i in range(count)]
        self.changed: set[int] = set()

    def check_unchanged(self, index: int) -> None:
        if index in self.changed:
            raise StoreChangedError(f"bucket {index} was replaced")

    def file_for_write(self, index: int) -> ScriptedFile:
        return self.files[index]


class Rig:
    """A pipeline over scripted files; a visit adds 10 to every byte of its bucket."""

    def __init__(
        self,
        slots: int = 3,
        buckets: int = 8,
        *,
        script: Script | None = None,
        pool: SlotPool | None = None,
        first: int = 0,
    ) -> None:
        self.script = script or Script()
        self.store: Any = ScriptedStore(self.script, buckets, first)
        self.pool = pool or SlotPool(slots, FILE_BYTES, ScriptedBackend())
        self.pipeline = Pipeline(self.pool, self.store, timeout_s=1.0)
        self.first = first
        self.visits = [0] * buckets
        self.from_disk: list[bool] = []
        self.visit_fails: dict[int, BaseException] = {}
        self.clock = PassClock("host")

    def visit(self, bucket: int, slot: Slot, from_disk: bool) -> list[tuple[int, int]]:
        assert (slot.owner, slot.bucket) == (self.pipeline, bucket)
        assert slot.state is SlotState.COMPUTING
        assert slot.is_idle
        others = {transfer.file.number for transfer in self.script.in_flight}
        assert len(others) < len({*self.pool.slots, slot})
        self.script.note("visit", self.first + bucket)
        self.from_disk.append(from_disk)
        if bucket in self.visit_fails:
            raise self.visit_fails[bucket]
        assert slot.buffer.tolist() == [self.expected(bucket)] * FILE_BYTES
        slot.buffer.add_(10)
        self.visits[bucket] += 1
        return WHOLE

    def expected(self, bucket: int) -> int:
        return (self.first + bucket + 10 * self.visits[bucket]) % 256

    def run(self, order: Sequence[int] | None = None) -> PassClock:
        self.clock = PassClock("host")
        self.from_disk = []
        self.pipeline.run(
            range(len(self.visits)) if order is None else order,
            reads=lambda bucket: WHOLE,
            visit=self.visit,
            clock=self.clock,
        )
        return self.clock

    def run_and_drain(self, *orders: Sequence[int]) -> None:
        for order in orders or [range(len(self.visits))]:
            self.run(order)
        self.pipeline.drain()

    def check_files(self) -> None:
        """After a drain every file holds what the visits made of it."""
        for bucket, file in enumerate(self.store.files):
            assert file.content.tolist() == [self.expected(bucket)] * FILE_BYTES, bucket

    def states(self) -> list[SlotState]:
        return [slot.state for slot in self.pool.slots]


# Order and bounds


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 11])
def test_every_bucket_is_read_visited_and_written_once(slots):
    rig = Rig(slots)
    clock = rig.run()
    assert rig.script.of("visit") == [("visit", i) for i in range(8)]
    assert rig.script.of("read") == [("read", i) for i in range(8)]
    assert rig.script.of("write") == [("write", i) for i in range(8)]
    rig.pipeline.drain()
    rig.check_files()
    assert not rig.script.in_flight
    stats = clock.finish()
    assert (stats.buckets, stats.cached_buckets) == (8, 0)
    assert stats.read_bytes == stats.written_bytes == 8 * FILE_BYTES


def test_one_slot_does_one_thing_at_a_time():
    rig = Rig(1, buckets=2)
    rig.run()
    rig.pipeline.drain()
    assert rig.script.events == [
        ("read", 0),
        ("read ended", 0),
        ("visit", 0),
        ("write", 0),
        ("write ended", 0),
        ("read", 1),
        ("read ended", 1),
        ("visit", 1),
        ("write", 1),
        ("write ended", 1),
    ]


def test_two_slots_read_ahead_while_one_is_visited():
    rig = Rig(2, buckets=3)
    rig.run()
    assert rig.script.events == [
        ("read", 0),
        ("read", 1),
        ("read ended", 0),
        ("visit", 0),
        ("write", 0),
        # Bucket 2 has to wait for a slot, but bucket 1 is being read: no need to wait for bucket 0.
        ("read ended", 1),
        ("visit", 1),
        ("write", 1),
        ("write ended", 0),
        ("read", 2),
        ("read ended", 2),
        ("visit", 2),
        ("write", 2),
    ]
    rig.pipeline.drain()
    rig.check_files()


def test_three_slots_write_behind_and_read_ahead():
    rig = Rig(3, buckets=4)
    # Writes end at once: their slots are taken for reading before the next visit.
    rig.script.is_done = lambda transfer: transfer.operation == "write"
    rig.run()
    order = rig.script.of("read", "visit", "write")
    assert order == [
        ("read", 0),
        ("read", 1),
        ("read", 2),
        ("visit", 0),
        ("write", 0),
        ("read", 3),
        ("visit", 1),
        ("write", 1),
        ("visit", 2),
        ("write", 2),
        ("visit", 3),
        ("write", 3),
    ]


def test_the_oldest_write_is_waited_for():
    rig = Rig(3, buckets=5)
    rig.run()
    assert rig.script.of("write ended") == [("write ended", 0), ("write ended", 1)]
    rig.pipeline.drain()
    rig.check_files()


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_what_a_slot_still_holds_is_not_read_again(slots):
    rig = Rig(slots)
    rig.run()
    for order in (range(7, -1, -1), range(8)):
        clock = rig.run(order)
        assert clock.finish().cached_buckets == slots
        assert rig.from_disk.count(False) == slots
        assert rig.from_disk[:slots] == [False] * slots
        assert clock.stats.read_bytes == (8 - slots) * FILE_BYTES
    rig.pipeline.drain()
    rig.check_files()


def test_a_cached_slot_that_is_wanted_later_is_spared():
    rig = Rig(3, buckets=5)
    rig.run()
    rig.pipeline.drain()
    assert [slot.bucket for slot in rig.pool.slots] == [3, 4, 2]
    # Bucket 2 is visited last and kept; the others go.
    rig.run([0, 1, 2])
    assert rig.from_disk == [True, True, False]
    # All three are wanted, but not first: one has to be given up, and is read again.
    rig.pipeline.drain()
    rig.run([3, 0, 1, 2])
    assert rig.from_disk.count(True) == 2
    rig.pipeline.drain()
    rig.check_files()


@pytest.mark.parametrize("overtaking", range(1, 5))
def test_an_ended_write_of_a_bucket_that_is_wanted_later_is_spared(overtaking):
    """Whichever write ends first at the end of a pass, the next one reads what no slot holds."""
    rig = Rig(3, buckets=6)
    ends_first = ("write", overtaking)
    rig.script.is_done = lambda transfer: transfer.key == ends_first
    rig.run()
    rig.script.is_done = lambda transfer: transfer.operation == "write"
    assert rig.run(range(5, -1, -1)).finish().cached_buckets == 3
    rig.pipeline.drain()
    rig.check_files()


def test_a_bucket_whose_write_is_in_flight_is_not_changed_before_it_has_ended():
    rig = Rig(2, buckets=2)
    rig.run()
    rig.run([1, 0])
    events = rig.script.events
    second_visit = len(events) - 1 - events[::-1].index(("visit", 1))
    assert ("write ended", 1) in events[:second_visit]
    rig.pipeline.drain()
    rig.check_files()


def test_a_visit_that_changes_nothing_writes_nothing():
    rig = Rig(2, buckets=3)
    rig.pipeline.run(
        range(3), reads=lambda bucket: WHOLE, visit=lambda *a: (), clock=PassClock("host")
    )
    assert not rig.script.of("write")
    assert rig.states() == [SlotState.CACHED, SlotState.CACHED]
    rig.run([2, 1, 0])
    assert rig.from_disk == [False, False, True]
    rig.pipeline.drain()
    rig.check_files()


def test_a_write_that_a_later_pass_waited_for_is_finished():
    rig = Rig(2, buckets=2)
    rig.run()
    assert rig.pipeline.unfinished_writes == {0, 1}
    rig.pipeline.run(
        [1, 0], reads=lambda bucket: WHOLE, visit=lambda *a: (), clock=PassClock("host")
    )
    assert not rig.pipeline.unfinished_writes


def test_only_the_ranges_that_are_asked_for_move():
    rig = Rig(1, buckets=1)
    rig.pool.slots[0].buffer.fill_(77)

    def visit(bucket: int, slot: Slot, from_disk: bool) -> list[tuple[int, int]]:
        pages = slot.buffer.view(3, PAGE)
        assert [int(page.min()) for page in pages] == [0, 77, 0]
        assert [int(page.max()) for page in pages] == [0, 77, 0]
        slot.buffer.fill_(5)
        return [(PAGE, PAGE)]

    clock = PassClock("host")
    rig.pipeline.run(
        [0], reads=lambda bucket: [(0, PAGE), (2 * PAGE, PAGE)], visit=visit, clock=clock
    )
    rig.pipeline.drain()
    assert [int(p.sum()) for p in rig.store.files[0].content.view(3, PAGE)] == [0, 5 * PAGE, 0]
    assert (clock.stats.read_bytes, clock.stats.written_bytes) == (2 * PAGE, PAGE)


def test_nothing_to_do_is_nothing():
    rig = Rig(1)
    rig.run([])
    rig.pipeline.drain()
    rig.pipeline.forget()
    assert rig.script.events == []


def test_forgotten_buckets_are_read_again():
    rig = Rig(3, buckets=3)
    rig.run()
    rig.pipeline.forget()
    assert rig.states() == [SlotState.FREE] * 3
    rig.check_files()
    rig.run([2, 1, 0])
    assert rig.from_disk == [True] * 3


@settings(max_examples=150)
@given(
    slots=st.integers(1, 6),
    buckets=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    passes=st.lists(st.tuples(st.integers(0, 1), st.randoms(use_true_random=False)), max_size=8),
    timing=st.randoms(use_true_random=False),
)
def test_any_order_any_timing_two_pipelines(slots, buckets, passes, timing):
    script = Script()
    script.is_done = lambda transfer: timing.random() < 0.4
    pool = SlotPool(slots, FILE_BYTES, ScriptedBackend())
    rigs = [
        Rig(buckets=count, script=script, pool=pool, first=100 * i)
        for i, count in enumerate(buckets)
    ]
    for which, shuffler in passes:
        rig = rigs[which]
        order = list(range(len(rig.visits)))
        shuffler.shuffle(order)
        rig.run(order[: shuffler.randint(0, len(order))])
        if shuffler.random() < 0.2:
            rigs[shuffler.randint(0, 1)].pipeline.drain()
    for rig in rigs:
        rig.pipeline.drain()
        assert not rig.pipeline.unfinished_writes
    assert not script.in_flight
    for rig in rigs:
        rig.check_files()


# A pool that two pipelines share


def two(slots: int = 3) -> tuple[Rig, Rig]:
    first = Rig(slots, buckets=4)
    second = Rig(buckets=4, script=first.script, pool=first.pool, first=100)
    return first, second


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_pipelines_take_turns_with_the_slots(slots):
    first, second = two(slots)
    for order in (range(4), range(3, -1, -1), range(4)):
        first.run(order)
        second.run(order)
    for rig in (first, second):
        rig.pipeline.drain()
        rig.check_files()


def test_draining_and_forgetting_leave_the_other_pipeline_alone():
    first, second = two(4)
    first.run([0, 1])
    second.run([0, 1])
    first.pipeline.forget()
    assert first.script.of("write ended") == [("write ended", 0), ("write ended", 1)]
    second.pipeline.drain()
    first.pipeline.forget()
    assert [slot.owner for slot in second.pool.slots].count(second.pipeline) == 2
    second.run([1, 0])
    assert second.from_disk == [False, False]


# Failures


def assert_drained(rig: Rig) -> None:
    """Nothing in flight, every slot free again, and the pipeline works."""
    script = rig.script
    assert not script.in_flight
    assert rig.states() == [SlotState.FREE] * len(rig.pool.slots)
    script.fails.clear()
    script.refuses.clear()
    rig.store.changed.clear()
    rig.visit_fails.clear()
    other = Rig(buckets=4, script=script, pool=rig.pool, first=100)
    other.run()
    other.pipeline.drain()
    other.check_files()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("bucket", [0, 3, 7])
@pytest.mark.parametrize("how", ["fails", "refuses"])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_transfer_that_fails_is_raised_when_all_have_ended(slots, bucket, how, operation):
    rig = Rig(slots)
    getattr(rig.script, how).add((operation, bucket))
    with pytest.raises(IoError, match=rf"{operation} of bucket0000{bucket}\.bin") as caught:
        rig.run_and_drain()
    assert caught.value.operation == operation
    visited = [number for _, number in rig.script.of("visit")]
    assert visited == list(range(len(visited)))
    if operation == "read":
        assert visited == list(range(bucket))
        assert not rig.pipeline.unfinished_writes
    else:
        assert bucket in visited
        assert rig.pipeline.unfinished_writes == {bucket}
    # What was visited before is on disk.
    for done in visited:
        if done not in rig.pipeline.unfinished_writes:
            assert rig.store.files[done].content.tolist() == [rig.expected(done)] * FILE_BYTES
    assert_drained(rig)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_the_other_transfers_of_a_bucket_are_waited_for_too(operation):
    rig = Rig(2, buckets=3)
    rig.script.fails.add((operation, 1))
    pages = [(0, PAGE), (PAGE, PAGE), (2 * PAGE, PAGE)]
    original = rig.visit

    def visit(*arguments: Any) -> list[tuple[int, int]]:
        original(*arguments)
        return pages

    with pytest.raises(IoError, match=rf"{operation} of bucket00001\.bin.* at offset 0: "):
        rig.pipeline.run([1, 0, 2], reads=lambda bucket: pages, visit=visit, clock=rig.clock)
    assert rig.script.of(f"{operation} ended").count((f"{operation} ended", 1)) == 3
    assert_drained(rig)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("bucket", [0, 3, 7])
@pytest.mark.parametrize(
    "error", [CorruptBucketError("bad"), ValueError("odd"), KeyboardInterrupt()], ids=repr
)
def test_a_visit_that_fails_is_raised_when_all_have_ended(slots, bucket, error):
    rig = Rig(slots)
    rig.visit_fails[bucket] = error
    with pytest.raises(type(error)) as caught:
        rig.run()
    assert caught.value is error
    assert not rig.pipeline.unfinished_writes
    for index, file in enumerate(rig.store.files):
        assert rig.visits[index] == int(index < bucket)
        assert file.content.tolist() == [rig.expected(index)] * FILE_BYTES
    assert_drained(rig)


@pytest.mark.parametrize("bucket", [0, 5])
def test_a_file_that_changed_is_noticed_before_it_is_read(bucket):
    rig = Rig(3)
    rig.store.changed.add(bucket)
    with pytest.raises(StoreChangedError, match=f"bucket {bucket} was replaced"):
        rig.run()
    assert ("read", bucket) not in rig.script.events
    assert_drained(rig)


def test_a_file_that_changed_is_noticed_before_it_is_written():
    rig = Rig(2)
    original = rig.visit

    def visit(bucket: int, slot: Slot, from_disk: bool) -> list[tuple[int, int]]:
        if bucket == 1:
            rig.store.changed.add(1)
        return original(bucket, slot, from_disk)

    with pytest.raises(StoreChangedError, match="bucket 1 was replaced"):
        rig.pipeline.run(range(3), reads=lambda bucket: WHOLE, visit=visit, clock=rig.clock)
    assert ("write", 1) not in rig.script.events
    assert rig.pipeline.unfinished_writes == {1}
    assert_drained(rig)


def test_the_first_of_several_failures_is_raised():
    rig = Rig(3)
    rig.script.fails |= {("write", 0), ("read", 1), ("write", 1)}
    with pytest.raises(IoError, match=r"read of bucket00001\.bin"):
        rig.run()
    assert rig.pipeline.unfinished_writes == {0}
    assert_drained(rig)


def test_a_write_behind_the_pass_fails_at_the_drain_and_once():
    rig = Rig(3)
    rig.script.fails.add(("write", 7))
    rig.run()
    with pytest.raises(IoError, match=r"write of bucket00007\.bin"):
        rig.pipeline.drain()
    assert rig.pipeline.unfinished_writes == {7}
    rig.pipeline.drain()
    rig.pipeline.forget()
    assert_drained(rig)


def test_a_write_behind_the_pass_fails_at_the_next_pass():
    rig = Rig(3)
    rig.script.fails.add(("write", 7))
    rig.run()
    with pytest.raises(IoError, match=r"write of bucket00007\.bin"):
        rig.run([7, 6])
    assert_drained(rig)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("through", ["run", "drain", "forget"])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_failed_write_is_raised_by_its_own_pipeline_only(slots, through, at_once):
    first, second = two(slots)
    first.script.fails.add(("write", 3))
    first.script.is_done = lambda transfer: at_once
    first.run()
    second.run()  # takes the slot
    second.run(range(3, -1, -1))
    second.pipeline.drain()
    second.check_files()
    with pytest.raises(IoError, match=r"write of bucket00003\.bin"):
        first.run([0]) if through == "run" else getattr(first.pipeline, through)()
    assert first.pipeline.unfinished_writes == {3}
    first.pipeline.drain()  # said once
    second.run()
    second.pipeline.drain()
    second.check_files()


def test_a_failing_pipeline_leaves_the_other_ones_writes_in_flight():
    first, second = two(6)
    second.run([0, 1])
    first.visit_fails[1] = ValueError("odd")
    with pytest.raises(ValueError, match="odd"):
        first.run()
    assert second.script.of("write ended") == [("write ended", 0)]
    assert len(second.script.in_flight) == 2
    second.pipeline.drain()
    second.check_files()


# Transfers that never end


@pytest.mark.parametrize("operation", ["read", "write"])
def test_the_slot_of_a_stuck_transfer_is_not_used_until_it_has_ended(operation):
    rig = Rig(3)
    rig.script.stuck.add((operation, 2))
    with pytest.raises(IoTimeoutError, match=rf"{operation} of bucket00002\.bin.*in 1\.0 s"):
        rig.run()
    assert sorted(state.value for state in rig.states()) == ["free", "free", "stuck"]
    (stuck,) = (slot for slot in rig.pool.slots if slot.state is SlotState.STUCK)
    assert stuck.owner is None
    before = stuck.buffer.clone()

    # Others work with what is left, as often as they like.
    other = Rig(buckets=4, script=rig.script, pool=rig.pool, first=100)
    for _ in range(3):
        other.run()
    other.pipeline.drain()
    other.check_files()
    assert stuck.state is SlotState.STUCK
    assert torch.equal(stuck.buffer, before)
    assert len(rig.script.in_flight) == 1

    # Once it has ended after all, it can be used again.
    rig.script.stuck.clear()
    rig.script.is_done = lambda transfer: transfer.file.number < 100
    for _ in range(2):
        other.run()
        assert SlotState.STUCK not in rig.states()
    other.pipeline.drain()
    other.check_files()


def test_a_stuck_write_of_another_pipeline_costs_its_slot_only():
    first, second = two(2)
    first.script.stuck.add(("write", 3))
    first.run()
    for _ in range(3):
        second.run()
        second.pipeline.drain()
    second.check_files()
    assert sorted(second.states(), key=str) == [SlotState.CACHED, SlotState.STUCK]
    with pytest.raises(IoTimeoutError, match=r"bucket00003\.bin"):
        first.pipeline.drain()
    assert first.pipeline.unfinished_writes == {3}


def test_stuck_transfers_are_not_waited_for_one_after_the_other(monkeypatch):
    """All three slots are stuck: the limit is waited for once, and a little for the rest."""
    rig = Rig(3)
    rig.pipeline.timeout_s = 100.0
    rig.script.stuck |= {("read", bucket) for bucket in range(3)}
    now_s, limits_s = [0.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    wait = ScriptedTransfer.wait

    def waits(self: ScriptedTransfer, timeout_s: float | None = None) -> None:
        limits_s.append(timeout_s)
        now_s[0] += timeout_s if self.key in rig.script.stuck else 0.0
        wait(self, timeout_s)

    monkeypatch.setattr(ScriptedTransfer, "wait", waits)
    with pytest.raises(IoTimeoutError, match=r"bucket00000\.bin.*in 100\.0 s"):
        rig.run()
    assert limits_s[0] == 100.0
    assert len(limits_s) > 2
    assert now_s[0] == 100.0 + module._STUCK_WAIT_S


def test_slots_are_given_back_when_the_kernels_of_a_failed_visit_have_ended(monkeypatch):
    rig = Rig(2)
    rig.visit_fails[1] = ValueError("odd")
    seen = []
    monkeypatch.setattr(rig.pool, "synchronize_compute", lambda: seen.append(rig.states()))
    with pytest.raises(ValueError, match="odd"):
        rig.run()
    assert any(SlotState.COMPUTING in states for states in seen)
    assert set(rig.states()) == {SlotState.FREE}


class StuckTransfer(ScriptedTransfer):
    def wait(self, timeout_s: float | None = None) -> None:
        raise IoTimeoutError(self.path, "read", file_offset=0, wanted_bytes=1, got=0)


def test_a_failed_and_a_stuck_transfer_on_one_slot(monkeypatch):
    """The failure is raised, but the slot stays out of use: something still writes into it."""
    rig = Rig(1, buckets=1)
    file = rig.store.files[0]

    def start(operation: str, buffer: torch.Tensor, offset: int) -> Transfer:
        kind = StuckTransfer if offset else ScriptedTransfer
        return kind(file, operation, buffer, offset)

    monkeypatch.setattr(file, "_start", start)
    rig.script.fails.add(("read", 0))
    with pytest.raises(IoError) as caught:
        rig.pipeline.run(
            [0],
            reads=lambda bucket: [(0, PAGE), (PAGE, PAGE)],
            visit=rig.visit,
            clock=rig.clock,
        )
    assert type(caught.value) is IoError
    assert rig.states() == [SlotState.STUCK]


def test_without_a_usable_slot_the_stuck_file_is_named():
    rig = Rig(1)
    rig.script.stuck.add(("read", 0))
    with pytest.raises(IoTimeoutError):
        rig.run()
    with pytest.raises(StepFailedError, match=r"none of the 1 slots can be used.*bucket00000\.bin"):
        rig.run([1])


# Bookkeeping


def test_times_are_attributed_and_sum_to_the_wall():
    rig = Rig(2)
    stats = rig.run().finish()
    assert stats.wall_s == pytest.approx(sum(stats.phases_s.values()), rel=1e-9)
    assert all(seconds >= 0 for seconds in stats.phases_s.values())
    assert stats.phases_s["compute"] > 0


def test_random_failures_never_leave_anything_in_flight():
    chooser = random.Random(5)
    for _ in range(200):
        slots, buckets = chooser.randint(1, 4), chooser.randint(1, 7)
        rig = Rig(slots, buckets=buckets)
        rig.script.is_done = lambda transfer: chooser.random() < 0.3
        other = Rig(buckets=2, script=rig.script, pool=rig.pool, first=100)
        other.run()
        rig.script.fails.add((chooser.choice(["read", "write"]), chooser.randrange(buckets)))
        orders = [chooser.sample(range(buckets), buckets) for _ in range(3)]
        with pytest.raises(GdsOptimizerError):
            rig.run_and_drain(*orders)
        assert all(transfer.file.number >= 100 for transfer in rig.script.in_flight)
        other.run()
        other.pipeline.drain()
        other.check_files()
        assert not rig.script.in_flight

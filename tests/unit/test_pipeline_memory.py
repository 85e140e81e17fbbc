"""Buckets on the device, in host memory and on drives in one pass: who waits for whom.

Host memory is copied from and to here, as where there is a GPU, unless a test is about the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from gds_optimizer.io import CopyStreams, MemoryFile
from gds_optimizer.slots import Slot, SlotState
from tests.unit.test_pipeline import FILE_BYTES, WHOLE, Rig

CPU = CopyStreams(torch.device("cpu"))

copied = pytest.mark.usefixtures("host_homes_are_copied")


class MixedRig(Rig):
    """A rig of eight buckets, some of which live in memory."""

    def __init__(self, slots: int, *, device: Sequence[int] = (), host: Sequence[int] = ()) -> None:
        super().__init__(slots)
        self.device = set(device)
        self.in_memory = {*device, *host}
        for index in self.in_memory:
            if index in self.device:
                memory = torch.zeros(FILE_BYTES, dtype=torch.uint8)
                file = MemoryFile(memory, CPU)
            else:
                file = MemoryFile.in_host_memory(FILE_BYTES, CPU)
            file.memory.fill_(index)
            self.store.files[index] = file

    def visit(self, bucket: int, slot: Slot, from_disk: bool) -> list[tuple[int, int]]:
        if bucket in self.device:
            assert slot.buffer is self.store.files[bucket].memory
            assert not from_disk
        return super().visit(bucket, slot, from_disk)

    @property
    def visited(self) -> list[int]:
        return [bucket for _, bucket in self.script.of("visit")]

    def check_files(self) -> None:
        for bucket, file in enumerate(self.store.files):
            content = file.memory if bucket in self.in_memory else file.content
            assert content.tolist() == [self.expected(bucket)] * FILE_BYTES, bucket


@copied
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("device", "host"),
    [
        ((), range(8)),
        (range(8), ()),
        ((0, 1), (2, 3, 4)),
        ((), (0, 1, 2, 3, 4)),
        ((), (7,)),
        ((3, 6), (0, 5)),
    ],
)
def test_every_bucket_is_visited_once_in_every_pass(
    slots: int, device: Sequence[int], host: Sequence[int]
) -> None:
    rig = MixedRig(slots, device=device, host=host)
    for order in (range(8), range(7, -1, -1), (5, 0, 7, 2), range(8)):
        rig.script.events.clear()
        clock = rig.run(order)
        assert sorted(rig.visited) == sorted(order)
        stats = clock.finish()
        kinds = [sum(i in each for i in order) for each in (set(device), set(host))]
        assert stats.in_place_buckets == kinds[0]
        assert stats.host_written_bytes == kinds[1] * FILE_BYTES
        assert stats.written_bytes == (len(order) - sum(kinds)) * FILE_BYTES
    rig.pipeline.drain()
    rig.check_files()
    assert not rig.pipeline.unfinished_writes


def test_what_is_on_the_device_is_visited_while_the_drives_read() -> None:
    rig = MixedRig(3, device=(0, 1))
    rig.run()
    events = rig.script.of("read", "visit")
    assert events[:5] == [("read", 2), ("read", 3), ("read", 4), ("visit", 0), ("visit", 1)]


class Calls:
    """Stands for what visits several buckets at once."""

    def __init__(self, rig: MixedRig) -> None:
        self.rig = rig
        self.made: list[list[int]] = []

    def __call__(self, indices: Sequence[int], slot_of: Callable[[int], Slot]) -> None:
        self.made.append(list(indices))
        for index in indices:
            slot = slot_of(index)
            assert (slot.bucket, slot.state) == (index, SlotState.COMPUTING)
            assert slot.buffer is self.rig.store.files[index].memory
            self.rig.script.note("visit", index)

    def run(self, order: Sequence[int] = range(8)) -> None:
        self.rig.pipeline.run(
            order,
            reads=lambda bucket: WHOLE,
            visit=self.rig.visit,
            clock=self.rig.clock,
            visit_resident=self,
        )


@pytest.mark.parametrize("homes", [{"device": range(8)}, {"host": range(8)}])
def test_all_in_memory_are_visited_in_one_call(homes: dict[str, Sequence[int]]) -> None:
    rig = MixedRig(2, **homes)
    calls = Calls(rig)
    calls.run()
    assert calls.made == [list(range(8))]
    assert rig.clock.finish().in_place_buckets == 8


def test_a_cpu_steps_what_is_in_memory_while_it_would_wait_for_a_drive() -> None:
    rig = MixedRig(2, device=(0, 1), host=(4,))
    calls = Calls(rig)
    arrived: set[int] = set()
    rig.script.is_done = lambda transfer: transfer.file.number in arrived
    original = calls.__call__

    def note(indices: Sequence[int], slot_of: Callable[[int], Slot]) -> None:
        original(indices, slot_of)
        arrived.update({2} if indices == [0] else ())

    rig.pipeline.run(
        range(8),
        reads=lambda bucket: WHOLE,
        visit=rig.visit,
        clock=rig.clock,
        visit_resident=note,
    )
    # Bucket 2 has been read while 0 was visited; 3 has not while 1 and 4 were.
    assert rig.visited == [0, 2, 1, 4, 3, 5, 6, 7]
    assert calls.made == [[0], [1], [4]]
    stats = rig.clock.finish()
    assert (stats.in_place_buckets, stats.host_read_bytes, stats.host_written_bytes) == (3, 0, 0)


def test_a_cpu_does_not_wait_for_the_first_read_because_another_has_ended() -> None:
    rig = MixedRig(2, device=(0, 1))
    rig.script.is_done = lambda transfer: transfer.file.number == 3
    rig.run()
    assert rig.visited[:3] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_is_in_memory_does_not_wait_for_the_last_pass_s_writes(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rig = MixedRig(2, device=(0, 1))
    monkeypatch.setattr(rig.pipeline.pool, "device", torch.device(kind))
    rig.run()
    rig.script.events.clear()
    rig.run(range(7, -1, -1))
    events = rig.script.of("visit", "write ended")
    assert events[:3] == [("visit", 1), ("visit", 0), ("write ended", 7)]
    rig.pipeline.drain()
    rig.check_files()


def test_a_gpu_is_given_all_that_it_holds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are only queued then: nothing that a drive brings would come sooner."""
    rig = MixedRig(2, device=(0, 1, 4))
    monkeypatch.setattr(rig.pipeline.pool, "device", torch.device("cuda"))
    calls = Calls(rig)
    calls.run()
    assert calls.made == [[0, 1, 4]]
    assert rig.visited == [0, 1, 4, 2, 3, 5, 6, 7]


@copied
def test_copies_go_on_while_a_drive_reads() -> None:
    """A drive that answers only when it is waited for holds nothing else up."""
    rig = MixedRig(3, host=(0, 1, 2, 3, 4, 5))
    rig.run()
    assert rig.visited[:6] == [0, 1, 2, 3, 4, 5]
    assert rig.script.events[0] == ("read", 6)
    assert rig.script.of("read ended", "visit").index(("read ended", 6)) == 6


@copied
def test_what_a_drive_has_read_is_visited_first() -> None:
    rig = MixedRig(3, host=(0, 1, 2, 3))
    rig.script.is_done = lambda transfer: True
    rig.run()
    assert rig.visited[0] == 4


@copied
def test_a_copy_that_cannot_be_made_ends_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = MixedRig(3, host=(0, 1, 2, 3))

    def refuse(self: MemoryFile, buffer: torch.Tensor, file_offset: int) -> None:
        raise RuntimeError("no copy")

    monkeypatch.setattr(MemoryFile, "read", refuse)
    with pytest.raises(RuntimeError, match="no copy"):
        rig.run()
    assert rig.states() == [SlotState.FREE] * 3
    assert not rig.script.in_flight

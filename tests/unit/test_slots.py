"""The slot pool: aligned, bounded, registered once, given back and taken again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.io.base import BucketFile, IoBackend, IoPath
from gds_optimizer.slots import SlotPool, SlotState, Usage


class RecordingBackend(IoBackend):
    io_path = IoPath.HOST
    device = torch.device("cpu")

    def __init__(self, fails_at: int = -1) -> None:
        self.registered: list[int] = []
        self.fails_at = fails_at
        self.calls = 0

    def open(self, path: str | os.PathLike[str]) -> BucketFile:
        raise NotImplementedError

    def register(self, buffer: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("no pinning today")
        self.registered.append(buffer.data_ptr())

    def deregister(self, buffer: torch.Tensor) -> None:
        self.registered.remove(buffer.data_ptr())

    def counters(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(
    ("asked", "given"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (5 * 4096, 5 * 4096)]
)
def test_slots_are_whole_pages_and_aligned(asked, given):
    pool = SlotPool(3, asked, RecordingBackend())
    assert pool.slot_bytes == given
    assert pool.nbytes == 3 * given
    pointers = set()
    for index, slot in enumerate(pool.slots):
        assert slot.index == index
        assert (slot.buffer.dtype, slot.buffer.shape) == (torch.uint8, (given,))
        assert slot.buffer.data_ptr() % 4096 == 0
        assert (slot.state, slot.owner, slot.bucket) == (SlotState.FREE, None, -1)
        pointers.add(slot.buffer.data_ptr())
    assert len(pointers) == 3
    pool.close()


def test_every_buffer_is_registered_once_and_deregistered():
    backend = RecordingBackend()
    pool = SlotPool(3, 4096, backend)
    assert backend.registered == [slot.buffer.data_ptr() for slot in pool.slots]
    pool.close()
    pool.close()
    assert backend.registered == []
    assert pool.slots == []


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_registration_that_fails_leaves_none(fails_at):
    backend = RecordingBackend(fails_at)
    with pytest.raises(RuntimeError, match="no pinning today"):
        SlotPool(3, 4096, backend)
    assert backend.registered == []


def test_suspending_gives_the_memory_back_and_resuming_takes_it_again():
    backend = RecordingBackend()
    pool = SlotPool(2, 4096, backend)
    pool.slots[0].assign("somebody", 5, SlotState.CACHED)
    pool.suspend()
    pool.suspend()
    assert (pool.slots, pool.nbytes, backend.registered) == ([], 0, [])
    pool.resume()
    slots = list(pool.slots)
    pool.resume()
    assert pool.slots == slots
    assert len(backend.registered) == 2
    assert [(slot.state, slot.owner) for slot in slots] == [(SlotState.FREE, None)] * 2
    pool.close()
    pool.resume()  # closed for good
    assert pool.slots == []


def test_the_scratch_comes_and_goes_with_the_slots():
    backend = RecordingBackend()
    pool = SlotPool(2, 4096, backend, scratch_bytes=5000)
    assert (pool.scratch.dtype, pool.scratch.shape) == (torch.uint8, (5000,))
    assert pool.scratch.data_ptr() % 4096 == 0
    assert pool.nbytes == 2 * 4096 + 5000
    assert len(backend.registered) == 2  # no transfer touches it
    pool.suspend()
    assert (pool.nbytes, pool.scratch.numel()) == (0, 0)
    pool.resume()
    assert pool.nbytes == 2 * 4096 + 5000
    pool.close()
    assert pool.nbytes == 0
    assert SlotPool(1, 4096, RecordingBackend()).scratch.numel() == 0


def test_suspended_memory_is_really_free():
    """In a process of its own, since other tests' memory would blur the figure."""
    program = """
import torch
from tests.unit.test_slots import RecordingBackend
from gds_optimizer.slots import SlotPool
from pathlib import Path

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20

pool = SlotPool(3, 64 * 2**20, RecordingBackend())
for slot in pool.slots:
    slot.buffer.fill_(1)
full = resident_mib()
pool.suspend()
del slot
print(full - resident_mib())
"""
    done = subprocess.run(
        (sys.executable, "-c", program),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) > 180


def test_only_what_is_finished_is_forgotten():
    pool = SlotPool(5, 4096, RecordingBackend())
    owner: Any = object()
    for slot, state in zip(
        pool.slots,
        (SlotState.CACHED, SlotState.READY, SlotState.WRITING, SlotState.READING),
        strict=False,
    ):
        slot.assign(owner, 1, state)
    pool.slots[4].assign("another", 1, SlotState.CACHED)
    pool.forget(owner)
    assert [slot.state for slot in pool.slots] == [
        SlotState.FREE,
        SlotState.FREE,
        SlotState.WRITING,
        SlotState.READING,
        SlotState.CACHED,
    ]
    pool.close()


def test_the_streams_of_a_gpu_are_nothing_on_a_cpu():
    pool = SlotPool(1, 4096, RecordingBackend())
    assert pool.compute_stream is None
    with pool.computing():
        pool.slots[0].buffer.fill_(3)
    pool.synchronize_compute()
    assert int(pool.slots[0].buffer.sum()) == 3 * 4096
    pool.close()


# Who uses it


def test_one_user_at_a_time():
    usage = Usage()
    seen = []

    def other() -> None:
        with usage.hold(is_pass=False) as is_held:
            seen.append(is_held)

    def ask_another_thread() -> bool:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return seen.pop()

    assert ask_another_thread()
    with usage.hold(is_pass=False) as is_held:
        assert is_held
        assert not ask_another_thread()
        with usage.hold(is_pass=True) as is_held_again:
            assert is_held_again
            # A signal handler would run here, in the same thread.
            with usage.hold(is_pass=False) as in_the_middle:
                assert not in_the_middle
        with usage.hold(is_pass=True) as afterwards:
            assert afterwards
        assert not ask_another_thread()
    assert ask_another_thread()

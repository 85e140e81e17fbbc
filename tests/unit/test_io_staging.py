"""Requests that go through host memory of the thread that serves them, without a GPU: as on one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gds_optimizer.io.memory import HostBuffer
from gds_optimizer.io.staging import Staging

PIECE_BYTES = 8192


@pytest.fixture
def staging():
    made = Staging(torch.device("cpu"), threads=2, piece_bytes=PIECE_BYTES)
    for queue in ("drive", "slow", "fast"):
        made.prepare(queue)
    yield made
    made.close()


def buffer_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8).repeat(PIECE_BYTES // len(values))


def ended(task):
    while not task.done():
        task.sleep(1.0)
    return task.outcome()


def test_bytes_go_both_ways(staging):
    held = {}

    def write(part: torch.Tensor) -> int:
        held["file"] = part.clone()
        return part.numel()

    def read(part: torch.Tensor) -> int:
        part.copy_(held["file"][: part.numel()])
        return part.numel()

    source, target = buffer_of(1, 2, 3, 4), buffer_of(0)
    assert ended(staging.start("drive", "write", source, write)) == (PIECE_BYTES, None)
    assert ended(staging.start("drive", "read", target[:4096], read)) == (4096, None)
    assert torch.equal(target[:4096], source[:4096])
    assert not target[4096:].any()


def test_what_a_request_gets_is_not_the_buffer(staging):
    """It is page-aligned host memory, as much as there are threads."""
    seen = set()

    def move(part: torch.Tensor) -> int:
        seen.add(part.data_ptr())
        part.fill_(9)
        return part.numel()

    buffer = buffer_of(5)
    for _ in range(20):
        ended(staging.start("drive", "write", buffer, move))
    assert buffer.eq(5).all()
    assert 1 <= len(seen) <= 2
    assert all(address % 4096 == 0 for address in seen)


def test_a_short_read_leaves_the_rest_as_it_was(staging):
    def move(part: torch.Tensor) -> int:
        part.fill_(3)
        return 4096

    target = buffer_of(7)
    assert ended(staging.start("drive", "read", target, move)) == (4096, None)
    assert target[:4096].eq(3).all()
    assert target[4096:].eq(7).all()


def test_buffers_of_inference_mode(staging):
    with torch.inference_mode():
        buffer = buffer_of(1, 2)

    def read(part: torch.Tensor) -> int:
        part.fill_(8)
        return part.numel()

    assert ended(staging.start("drive", "write", buffer, torch.Tensor.numel)) == (PIECE_BYTES, None)
    assert ended(staging.start("drive", "read", buffer, read)) == (PIECE_BYTES, None)
    assert buffer.eq(8).all()


@pytest.mark.parametrize("error", [OSError("no disk"), RuntimeError("no disk")])
def test_a_failure_is_told(staging, error):
    def move(part: torch.Tensor) -> int:
        raise error

    assert ended(staging.start("drive", "read", buffer_of(0), move)) == (0, "no disk")


def test_memory_that_is_not_to_be_had_is_refused_at_once():
    staging = Staging(torch.device("cpu"), threads=1, piece_bytes=2**56)
    with pytest.raises(MemoryError, match=f"{2**56} bytes of host memory"):
        staging.prepare("drive")
    staging.close()


def test_memory_is_taken_once(monkeypatch):
    taken = []

    class Counted(HostBuffer):
        def __init__(self, nbytes: int, device: torch.device) -> None:
            super().__init__(nbytes, device)
            taken.append(nbytes)

    monkeypatch.setattr("gds_optimizer.io.staging.HostBuffer", Counted)
    staging = Staging(torch.device("cpu"), threads=3, piece_bytes=PIECE_BYTES)
    for queue in ("a", "b", "a"):
        staging.prepare(queue)
    assert taken == [PIECE_BYTES] * 6
    staging.close()


def test_a_slow_queue_holds_up_no_other(staging):
    is_free = threading.Event()

    def wait(part: torch.Tensor) -> int:
        assert is_free.wait(60)
        return part.numel()

    slow = [staging.start("slow", "write", buffer_of(1), wait) for _ in range(5)]
    fast = staging.start("fast", "write", buffer_of(1), torch.Tensor.numel)
    assert ended(fast) == (PIECE_BYTES, None)
    assert not any(task.done() for task in slow)
    is_free.set()
    assert [ended(task) for task in slow] == [(PIECE_BYTES, None)] * 5


def test_requests_of_several_threads(staging):
    """Each sees its own bytes, however they share the memory."""

    def check(value: int) -> bool:
        seen = []

        def move(part: torch.Tensor) -> int:
            seen.append(bool(part.eq(value).all()))
            return part.numel()

        ended(staging.start("drive", "write", buffer_of(value), move))
        return seen == [True]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(200)))


def test_it_ends_with_its_threads():
    staging = Staging(torch.device("cpu"), threads=3, piece_bytes=PIECE_BYTES)
    before = threading.active_count()
    staging.prepare("drive")
    assert threading.active_count() == before + 3
    for task in [
        staging.start("drive", "write", buffer_of(1), torch.Tensor.numel) for _ in range(9)
    ]:
        ended(task)
    assert threading.active_count() == before + 3
    staging.close()
    assert threading.active_count() == before
    staging.close()

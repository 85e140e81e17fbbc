"""Buckets in memory behave like bucket files, and their memory is what it is said to be."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from gds_optimizer.errors import ClosedError
from gds_optimizer.io import CopyStreams, MemoryFile, allocate_host_buffer
from gds_optimizer.io.memory import HostBuffer
from tests.support.engines import in_child

CPU = torch.device("cpu")
PAGE = 4096


@pytest.fixture
def file() -> MemoryFile:
    made = MemoryFile.in_host_memory(4 * PAGE, CopyStreams(CPU))
    made.path = Path("bucket00003.bin")
    made.memory.copy_(torch.arange(4 * PAGE) % 251)
    return made


def test_ranges_are_copied_there_and_back(file: MemoryFile) -> None:
    buffer = allocate_host_buffer(2 * PAGE)
    read = file.read(buffer, PAGE)
    assert read.done()
    read.wait(0.0)
    read.wait()
    read.follow()
    assert torch.equal(buffer, file.memory[PAGE : 3 * PAGE])
    assert (read.operation, read.file_offset, read.nbytes) == ("read", PAGE, 2 * PAGE)
    before = file.memory.clone()
    buffer.fill_(7)
    write = file.write(buffer, 2 * PAGE)
    assert write.done()
    buffer.fill_(8)
    assert torch.equal(file.memory[: 2 * PAGE], before[: 2 * PAGE])
    assert file.memory[2 * PAGE :].tolist() == [7] * (2 * PAGE)
    assert (write.operation, write.path) == ("write", file.path)


@pytest.mark.parametrize("offset", [1, PAGE - 512])
def test_misaligned_ranges_are_refused_as_of_a_file(file: MemoryFile, offset: int) -> None:
    with pytest.raises(ValueError, match="multiples of 4096"):
        file.read(allocate_host_buffer(PAGE), offset)


def test_ranges_beyond_the_end_are_refused(file: MemoryFile) -> None:
    for move in (file.read, file.write):
        with pytest.raises(ValueError, match="of a bucket of 16384 bytes"):
            move(allocate_host_buffer(2 * PAGE), 3 * PAGE)


def test_a_closed_bucket_is_refused(file: MemoryFile) -> None:
    file.close()
    file.close()
    assert file.memory.numel() == 0
    for move in (file.read, file.write):
        with pytest.raises(ClosedError, match="was given back"):
            move(allocate_host_buffer(PAGE), 0)
    with pytest.raises(OSError, match="no descriptor"):
        file.fileno()


def test_chunks_cover_what_is_asked_for(file: MemoryFile) -> None:
    buffer = allocate_host_buffer(2 * PAGE)
    found = [(start, part.clone()) for start, part in file.chunks(buffer, 3 * PAGE)]
    assert [start for start, _ in found] == [0, 2 * PAGE]
    assert torch.equal(torch.cat([part for _, part in found]), file.memory[: 3 * PAGE])


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def test_host_memory_is_there_before_it_is_used_and_gone_when_it_is_closed() -> None:
    nbytes = 64 * 2**20
    before = resident_bytes()
    buffer = HostBuffer(nbytes, CPU)
    assert resident_bytes() - before > nbytes * 0.9
    assert buffer.tensor.data_ptr() % PAGE == 0
    assert not buffer.is_pinned
    buffer.close()
    gc.collect()
    assert resident_bytes() - before < nbytes * 0.1


def test_a_forked_child_does_not_inherit_the_pages() -> None:
    nbytes = 64 * 2**20
    buffer = HostBuffer(nbytes, CPU)
    buffer.tensor.fill_(5)
    address = f"{buffer.tensor.data_ptr():x}-"

    def check() -> None:
        assert address not in Path("/proc/self/maps").read_text()
        buffer.close()

    assert address in Path("/proc/self/maps").read_text()
    in_child(check)
    assert int(buffer.tensor.sum()) == 5 * nbytes
    buffer.close()


def test_memory_that_the_system_does_not_have() -> None:
    with pytest.raises(MemoryError, match="bytes of host memory"):
        HostBuffer(2**62, CPU)

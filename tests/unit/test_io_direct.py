"""Direct I/O on host memory, and the buffers for it."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
import torch

from gds_optimizer.errors import IoPathError
from gds_optimizer.io import (
    PAGE_BYTES,
    DirectBackend,
    IoPath,
    allocate_host_buffer,
    make_backend,
)
from tests.support.io_conformance import IoConformance


class TestDirect(IoConformance):
    kind = "host"
    way = "host"


def test_make_backend():
    backend = make_backend(IoPath.HOST, device="cpu", threads=2, task_size_bytes=PAGE_BYTES)
    assert isinstance(backend, DirectBackend)
    assert (backend.io_path, backend.device) == (IoPath.HOST, torch.device("cpu"))
    backend.close()
    with pytest.raises(IoPathError, match=r"host.* buffers on cuda:1"):
        make_backend(IoPath.HOST, device="cuda:1", threads=2, task_size_bytes=PAGE_BYTES)


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES - 1, PAGE_BYTES, 3 * PAGE_BYTES + 1, 2**22])
def test_host_buffers_are_aligned_zeroed_and_writable(nbytes):
    buffer = allocate_host_buffer(nbytes)
    gc.collect()
    assert buffer.shape == (nbytes,)
    assert buffer.dtype == torch.uint8
    assert buffer.data_ptr() % PAGE_BYTES == 0
    assert not buffer.any()
    view = buffer[-1:]
    del buffer
    gc.collect()
    view.fill_(7)  # the memory lives as long as a view of it
    assert view.item() == 7


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="needs huge pages"
)
def test_host_buffers_ask_for_huge_pages():
    buffer = allocate_host_buffer(2**23)
    address, flags = buffer.data_ptr(), None
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            inside = start <= address < end
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    assert flags is not None
    assert "hg" in flags


def test_a_host_buffer_needs_a_size():
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match=f"got {nbytes}"):
            allocate_host_buffer(nbytes)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_has_a_host_buffer_of_its_own():
    buffer = allocate_host_buffer(PAGE_BYTES)
    child = os.fork()
    if child == 0:
        buffer.numpy()[:] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert not buffer.any()

"""Bucket files as one run of memory for each plane: what is read, written, kept and let go."""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from gds_optimizer import mapping as module
from gds_optimizer.bench.page_cache import resident_pages
from gds_optimizer.codecs import get_codec
from gds_optimizer.errors import NoSpaceError, UnsupportedError
from gds_optimizer.io import allocate_host_buffer
from gds_optimizer.layout import PlaneSpec, Shard, SpaceSpec, plan_layout
from gds_optimizer.mapping import PlaneMapping, ScratchMapping, flush_and_drop, plane_bytes
from tests.support.engines import open_files

BUCKET_NUMEL = 1024


def make_layout(*sizes: int, planes: tuple[PlaneSpec, ...] | None = None, spaces: int = 1):
    planes = planes or (PlaneSpec(name="main"), PlaneSpec(name="exp_avg"))
    return plan_layout(
        [
            SpaceSpec(
                planes=planes,
                shards=tuple(Shard(name=f"{s}.{i}", numel=n) for i, n in enumerate(sizes)),
            )
            for s in range(spaces)
        ],
        bucket_numel=BUCKET_NUMEL,
    )


def values_of(layout, space: int, plane: int) -> torch.Tensor:
    """What `write_files` puts into a plane: 1-D, as long as all its buckets."""
    numel = sum(bucket.numel for bucket in layout.buckets if bucket.space == space)
    dtype = get_codec(layout.spaces[space].planes[plane].codec).dtype
    return (torch.arange(numel) + 10_000 * plane + 1_000_000 * space).to(dtype)


def write_files(layout, directory: Path) -> list[Path]:
    paths = []
    for bucket in layout.buckets:
        content = np.full(bucket.file_bytes, 0xEE, dtype=np.uint8)
        for number, plane in enumerate(bucket.planes):
            values = values_of(layout, bucket.space, number)
            part = values[bucket.start : bucket.start + bucket.numel].numpy().view(np.uint8)
            content[plane.offset : plane.offset + part.size] = part
        path = directory / f"bucket{bucket.index}.bin"
        path.write_bytes(content.tobytes())
        paths.append(path)
    return paths


def mappings_of(directory: Path) -> int:
    """Mappings of files below a directory that this process has."""
    return Path("/proc/self/maps").read_text().count(str(directory))


LAYOUT = make_layout(1500, 17, 2600)  # shards across buckets, a short last bucket


@pytest.fixture
def paths(tmp_path):
    return write_files(LAYOUT, tmp_path)


@pytest.mark.parametrize("plane", [0, 1])
def test_a_plane_is_one_run_over_all_buckets(paths, plane):
    assert len(paths) == 5
    mapping = PlaneMapping(LAYOUT, paths, 0, plane, writable=False)
    expected = values_of(LAYOUT, 0, plane)
    assert torch.equal(mapping.tensor(0, expected.numel()), expected)
    for start, numel in ((1, 1), (1000, 100), (1023, 2), (7, 4000), (expected.numel() - 1, 1)):
        tensor = mapping.tensor(start, numel)
        assert torch.equal(tensor, expected[start : start + numel])


def test_each_space_has_its_own(tmp_path):
    layout = make_layout(1500, spaces=2)
    paths = write_files(layout, tmp_path)
    for space in range(2):
        mapping = PlaneMapping(layout, paths, space, 1, writable=False)
        assert torch.equal(mapping.tensor(0, 1500), values_of(layout, space, 1)[:1500])


@pytest.mark.parametrize("codec", ["fp32", "fp64", "int64"])
def test_other_types(tmp_path, codec):
    layout = make_layout(1500, planes=(PlaneSpec(name="a"), PlaneSpec(name="b", codec=codec)))
    paths = write_files(layout, tmp_path)
    tensor = PlaneMapping(layout, paths, 0, 1, writable=False).tensor(0, 1500)
    assert tensor.dtype == get_codec(codec).dtype
    assert torch.equal(tensor, values_of(layout, 0, 1)[:1500])


def test_a_plane_that_ends_within_a_page_cannot_be_mapped():
    layout = make_layout(1500, planes=(PlaneSpec(name="half", codec="bf16"),))
    paths = [Path("/not/opened")] * len(layout.buckets)
    with pytest.raises(ValueError, match=r"'half' \(bf16\) is not page-aligned"):
        PlaneMapping(layout, paths, 0, 0, writable=False)


def test_a_tensor_owns_its_storage(paths):
    """Megatron's writer copies tensors that are a part of something larger."""
    tensor = PlaneMapping(LAYOUT, paths, 0, 0, writable=False).tensor(1000, 100)
    assert tensor.untyped_storage().nbytes() == tensor.nbytes == 400
    assert tensor.storage_offset() == 0
    assert tensor.is_contiguous()


def test_an_empty_tensor(paths):
    tensor = PlaneMapping(LAYOUT, paths, 0, 0, writable=False).tensor(5, 0)
    assert (tensor.numel(), tensor.dtype) == (0, torch.float32)


def test_stores_reach_the_files(paths):
    mapping = PlaneMapping(LAYOUT, paths, 0, 1, writable=True)
    mapping.tensor(1000, 100).fill_(-5)
    flush_and_drop([mapping], paths)
    expected = values_of(LAYOUT, 0, 1)
    expected[1000:1100] = -5
    again = PlaneMapping(LAYOUT, paths, 0, 1, writable=False)
    assert torch.equal(again.tensor(0, expected.numel()), expected)
    others = PlaneMapping(LAYOUT, paths, 0, 0, writable=False)
    assert torch.equal(others.tensor(0, expected.numel()), values_of(LAYOUT, 0, 0))
    # What is not a plane stays as it is.
    bucket = LAYOUT.buckets[1]
    assert set(paths[1].read_bytes()[bucket.footer_offset :]) == {0xEE}


def test_a_store_into_what_is_only_to_be_read_kills_the_process_and_not_the_file(paths):
    tensor = PlaneMapping(LAYOUT, paths, 0, 0, writable=False).tensor(0, 10)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        tensor.fill_(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert torch.equal(tensor, values_of(LAYOUT, 0, 0)[:10])


def test_blank_buckets_read_as_zeros_whatever_the_file_holds(paths):
    mapping = PlaneMapping(LAYOUT, paths, 0, 1, writable=False, blank={1, 3})
    expected = values_of(LAYOUT, 0, 1)
    expected[1024:2048] = 0
    expected[3072:4096] = 0
    assert torch.equal(mapping.tensor(0, expected.numel()), expected)


def test_blank_buckets_are_written_like_others(paths):
    mapping = PlaneMapping(LAYOUT, paths, 0, 1, writable=True, blank={1})
    mapping.tensor(1024, 1024).fill_(3)
    flush_and_drop([mapping], paths)
    bucket = LAYOUT.buckets[1]
    at = bucket.planes[1].offset
    content = paths[1].read_bytes()[at : at + bucket.planes[1].nbytes]
    assert set(np.frombuffer(content, dtype=np.float32)) == {3.0}


def test_a_tensor_keeps_the_pages_and_the_last_one_lets_them_go(paths, tmp_path):
    mapping = PlaneMapping(LAYOUT, paths, 0, 0, writable=False)
    tensors = [mapping.tensor(start, 100) for start in (0, 1000)]
    view = tensors[1][50:].view(5, 10)
    del mapping, tensors
    gc.collect()
    assert mappings_of(tmp_path) == len(paths)
    assert torch.equal(view.flatten(), values_of(LAYOUT, 0, 0)[1050:1100])
    del view
    gc.collect()
    assert mappings_of(tmp_path) == 0


def test_a_tensor_outlives_the_files_names(paths):
    tensor = PlaneMapping(LAYOUT, paths, 0, 0, writable=False).tensor(0, 3000)
    for path in paths:
        path.unlink()
    assert torch.equal(tensor, values_of(LAYOUT, 0, 0)[:3000])


def test_no_descriptor_is_kept(paths):
    before = open_files()
    mapping = PlaneMapping(LAYOUT, paths, 0, 0, writable=True)
    flush_and_drop([mapping], paths)
    assert open_files() == before


def test_a_missing_file_leaves_no_mapping(paths, tmp_path):
    paths[3].unlink()
    before = open_files()
    with pytest.raises(FileNotFoundError, match=r"bucket3\.bin"):
        PlaneMapping(LAYOUT, paths, 0, 0, writable=False)
    assert mappings_of(tmp_path) == 0
    assert open_files() == before


def test_too_many_mappings_say_what_to_do(paths, tmp_path, monkeypatch):
    """The kernel's limit cannot be lowered for one process, so its answer is made up."""
    real = module._libc.mmap
    calls = []

    def mmap(*args):
        calls.append(args)
        if len(calls) < 4:
            return real(*args)
        module.ctypes.set_errno(12)
        return module._MAP_FAILED

    class Libc:
        munmap, madvise = module._libc.munmap, module._libc.madvise

    Libc.mmap = staticmethod(mmap)
    monkeypatch.setattr(module, "_libc", Libc)
    with pytest.raises(OSError, match=r"cannot map 4096 bytes.*max_map_count or use larger"):
        PlaneMapping(LAYOUT, paths, 0, 0, writable=False)
    assert mappings_of(tmp_path) == 0


def test_large_kernel_pages_are_refused(paths, monkeypatch):
    monkeypatch.setattr(module.mmap, "PAGESIZE", 65536)
    with pytest.raises(UnsupportedError, match=r"pages of 65536 bytes.*use snapshots"):
        PlaneMapping(LAYOUT, paths, 0, 0, writable=False)


@pytest.mark.parametrize("writable", [False, True])
def test_nothing_stays_in_the_page_cache_though_it_is_mapped(paths, writable):
    mapping = PlaneMapping(LAYOUT, paths, 0, 0, writable=writable)
    tensor = mapping.tensor(0, 4000)
    if writable:
        tensor.add_(1)
    expected = tensor.clone()
    assert all(resident_pages(path) for path in paths[:4])
    flush_and_drop([mapping], paths)
    assert [resident_pages(path) for path in paths] == [0] * len(paths)
    assert torch.equal(tensor, expected)  # read again


def test_what_is_written_otherwise_is_seen_after_dropping(paths):
    mapping = PlaneMapping(LAYOUT, paths, 0, 0, writable=False)
    tensor = mapping.tensor(0, 1024)
    assert torch.equal(tensor, values_of(LAYOUT, 0, 0)[:1024])
    flush_and_drop([mapping], paths)
    with open(paths[0], "r+b") as file:
        file.write(np.full(1024, 7, dtype=np.float32).tobytes())
    assert set(tensor.tolist()) == {7.0}


# ---------------------------------------------------------------------- decoded values


def aligned(numel: int) -> torch.Tensor:
    return allocate_host_buffer(4 * numel).view(torch.float32)


@pytest.mark.parametrize("writable", [False, True])
def test_an_unnamed_file_as_a_run_of_values(tmp_path, writable):
    files = open_files()
    mapping = ScratchMapping(3 * 1024, torch.float32, tmp_path)
    part = aligned(1024)
    mapping.write(1024, part.fill_(7))
    mapping.write(2048, part.copy_(torch.arange(1024)))
    mapping.map(writable=writable)
    assert open_files() == files
    assert list(tmp_path.iterdir()) == []
    tensor = mapping.tensor(1000, 2072)
    wanted = torch.cat([torch.zeros(24), torch.full((1024,), 7.0), torch.arange(1024.0)])
    assert torch.equal(tensor, wanted)
    if writable:
        tensor.mul_(2)
        mapping.drop()
        assert torch.equal(mapping.tensor(1000, 2072), 2 * wanted)
    del mapping
    gc.collect()
    assert mappings_of(tmp_path) == 1  # the tensor keeps it
    del tensor
    gc.collect()
    assert mappings_of(tmp_path) == 0


def test_an_unnamed_file_that_nobody_maps_is_closed(tmp_path):
    files = open_files()
    mapping = ScratchMapping(1024, torch.float32, tmp_path)
    assert len(open_files()) == len(files) + 1
    del mapping
    gc.collect()
    assert open_files() == files


@pytest.mark.parametrize("refused", [os.O_DIRECT, os.O_TMPFILE])
def test_file_systems_that_know_less(tmp_path, monkeypatch, refused):
    """There is none of either kind here, so that it is made up."""
    plain = os.open

    def choosy(path, flags, *args, **options):
        if flags & refused == refused:
            raise OSError(errno.EINVAL, "made up")
        return plain(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", choosy)
    mapping = ScratchMapping(1024, torch.float32, tmp_path)
    mapping.write(0, aligned(1024).fill_(3))
    mapping.map(writable=False)
    assert (mapping.tensor(0, 1024) == 3).all()
    assert list(tmp_path.iterdir()) == []


def test_an_unnamed_file_that_does_not_fit(tmp_path):
    files = open_files()
    with pytest.raises(NoSpaceError, match=rf"values need {2**45} bytes .*, and \d+ are free"):
        ScratchMapping(2**43, torch.float32, tmp_path)
    gc.collect()
    assert open_files() == files


def test_the_bytes_of_one_plane(paths):
    bucket = LAYOUT.buckets[1]
    plane, before = bucket.planes[1], paths[1].read_bytes()
    stored = before[plane.offset : plane.offset + plane.nbytes]
    private = plane_bytes(paths[1], plane)
    assert bytes(private.numpy()) == stored
    private.zero_()
    assert paths[1].read_bytes() == before
    shared = plane_bytes(paths[1], plane, writable=True)
    shared.zero_()
    expected = before[: plane.offset] + bytes(plane.nbytes) + before[plane.offset + plane.nbytes :]
    assert paths[1].read_bytes() == expected
    os.truncate(paths[1], plane.offset + plane.nbytes - 1)
    with pytest.raises(ValueError, match="mmap"):
        plane_bytes(paths[1], plane)

"""Whole files through a small buffer: every byte, nothing else, and none of them stays cached."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer import direct_file
from gds_optimizer.bench.page_cache import resident_pages
from gds_optimizer.checksum import checksum
from gds_optimizer.direct_file import PlaneChecksums, copy_file, plane_checksums, read_chunks
from gds_optimizer.errors import IoError
from gds_optimizer.layout import PlaneSpec, Shard, SpaceSpec, plan_layout

PAGE = 4096
CHUNK = 4 * PAGE


@pytest.fixture(params=["direct", "buffered"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With small chunks; on a file system that knows direct I/O, and as if on one that does not."""
    monkeypatch.setattr(direct_file, "CHUNK_BYTES", CHUNK)
    if request.param == "buffered":
        open_ = os.open

        def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument", str(path))
            return open_(path, flags, *args, **options)

        monkeypatch.setattr(os, "open", refuse)
    return str(request.param)


def written(path: Path, pages: int) -> bytes:
    generator = torch.Generator().manual_seed(pages)
    data = torch.randint(0, 256, (pages * PAGE,), generator=generator, dtype=torch.uint8)
    path.write_bytes(data.numpy().tobytes())
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return path.read_bytes()


def forget(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident_pages(path) == 0


# ---------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("start", "end"), [(0, 1), (0, 4), (0, 11), (3, 11), (1, 9), (10, 11), (4, 8), (5, 5)]
)
def test_every_byte_of_a_range(tmp_path, way, start, end):
    content = written(tmp_path / "file", 11)
    forget(tmp_path / "file")
    chunks = [
        bytes(chunk.numpy()) for chunk in read_chunks(tmp_path / "file", start * PAGE, end * PAGE)
    ]
    assert b"".join(chunks) == content[start * PAGE : end * PAGE]
    assert all(len(chunk) == CHUNK for chunk in chunks[:-1])
    assert resident_pages(tmp_path / "file") == 0


def test_reads_that_come_short_are_gone_on_with(tmp_path, way, monkeypatch):
    content = written(tmp_path / "file", 9)
    read = os.preadv

    def some(fd: int, buffers: list[memoryview], offset: int) -> int:
        return read(fd, [buffers[0][:PAGE]], offset)

    monkeypatch.setattr(os, "preadv", some)
    chunks = [bytes(chunk.numpy()) for chunk in read_chunks(tmp_path / "file", 0, 9 * PAGE)]
    assert b"".join(chunks) == content


def test_a_file_that_is_too_short(tmp_path, way):
    written(tmp_path / "file", 3)
    with pytest.raises(IoError, match=r"file.*16384.*12288"):
        list(read_chunks(tmp_path / "file", 0, 4 * PAGE))
    with pytest.raises(FileNotFoundError):
        list(read_chunks(tmp_path / "nothing", 0, PAGE))


def test_a_file_that_shrinks_while_it_is_read(tmp_path, way):
    written(tmp_path / "file", 12)
    chunks = read_chunks(tmp_path / "file", 0, 12 * PAGE)
    next(chunks)
    os.truncate(tmp_path / "file", 6 * PAGE)
    with pytest.raises(IoError, match="file"):
        list(chunks)


def test_a_read_that_fails_names_the_file(tmp_path, way, monkeypatch):
    written(tmp_path / "file", 3)
    before = set(os.listdir("/proc/self/fd"))

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(IoError, match=r"file.*Input/output error"):
        list(read_chunks(tmp_path / "file", 0, 3 * PAGE))
    assert set(os.listdir("/proc/self/fd")) == before


def test_another_error_of_opening_is_no_reason_to_go_through_the_cache(tmp_path):
    with pytest.raises(IsADirectoryError):
        copy_file(Path(__file__), tmp_path)


# ---------------------------------------------------------------------- checksums


def test_checksums_of_planes(tmp_path, way):
    """The same as of each plane at once, whatever the chunks; gaps and the footer are not in."""
    shards = (Shard(name="a", numel=3000), Shard(name="b", numel=700))
    planes = (
        *(PlaneSpec(name=n, codec=c) for n, c in (("a", "fp32"), ("b", "int8"), ("c", "bf16"))),
    )
    layout = plan_layout([SpaceSpec(planes=planes, shards=shards)], bucket_numel=3072)
    for bucket in layout.buckets:
        path = tmp_path / f"{bucket.index}"
        content = written(path, bucket.file_bytes // PAGE)
        whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        wanted = [int(checksum(whole[p.offset : p.offset + p.nbytes])) for p in bucket.planes]
        seen: list[int] = []
        forget(path)
        assert plane_checksums(path, bucket, seen.append) == wanted
        assert sum(seen) == bucket.footer_offset
        assert resident_pages(path) == 0
        for size in (PAGE, 3 * PAGE, len(content)):
            sums = PlaneChecksums(bucket)
            for position in reversed(range(0, len(content), size)):
                sums.add(whole[position : position + size], position)
            assert sums.values == wanted


# ---------------------------------------------------------------------- copying


@pytest.mark.parametrize("pages", [1, 4, 5, 11])
@pytest.mark.parametrize("before", [None, 2, 30])
def test_a_copy(tmp_path, way, pages, before):
    """To a new file, or in place over a shorter or longer one; links of that are the same file."""
    content = written(tmp_path / "source", pages)
    target = tmp_path / "target"
    if before is not None:
        written(target, before)
        inode = target.stat().st_ino
    forget(tmp_path / "source")
    seen: list[int] = []
    copy_file(tmp_path / "source", target, progress=seen.append)
    assert resident_pages(target) == resident_pages(tmp_path / "source") == 0
    assert target.read_bytes() == content
    assert sum(seen) == len(content)
    if before is None:
        assert target.stat().st_mode & 0o777 == 0o600
    else:
        assert target.stat().st_ino == inode


def test_writes_that_come_short_are_gone_on_with(tmp_path, way, monkeypatch):
    content = written(tmp_path / "source", 9)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:PAGE], offset))
    copy_file(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content


def test_it_is_synced_when_it_is_whole(tmp_path, way, monkeypatch):
    content = written(tmp_path / "source", 9)
    synced = []
    sync = os.fsync

    def look(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").read_bytes())
        sync(fd)

    monkeypatch.setattr(os, "fsync", look)
    copy_file(tmp_path / "source", tmp_path / "target")
    assert synced == [content]


def test_a_copy_that_is_stopped(tmp_path, way):
    written(tmp_path / "source", 20)
    stop = threading.Event()
    seen: list[int] = []

    def count(nbytes: int) -> None:
        seen.append(nbytes)
        if len(seen) == 2:
            stop.set()

    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(InterruptedError, match=r"copying to .*target was stopped"):
        copy_file(tmp_path / "source", tmp_path / "target", stop=stop, progress=count)
    assert len(seen) == 2
    assert set(os.listdir("/proc/self/fd")) == before

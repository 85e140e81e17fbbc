"""The tools of the I/O tests tell the truth."""

from __future__ import annotations

import os

import pytest

from gds_optimizer.bench.page_cache import resident_pages

PAGE_BYTES = 4096


def test_resident_pages_follow_the_cache(tmp_path):
    path = tmp_path / "cached.bin"
    path.write_bytes(b"x" * (10 * PAGE_BYTES + 1))
    assert resident_pages(path) == 11
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident_pages(path) == 0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
    os.pread(fd, 1, 3 * PAGE_BYTES)
    assert resident_pages(path) == 1
    os.close(fd)


def test_resident_pages_of_an_empty_file(tmp_path):
    path = tmp_path / "empty.bin"
    path.touch()
    assert resident_pages(path) == 0


def test_resident_pages_are_not_guessed(tmp_path):
    with pytest.raises(PermissionError, match="not writable"):
        resident_pages(tmp_path / "absent.bin")

"""Bucket files: their space, who may read them, and what somebody else does to them."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from gds_optimizer import bucket_files as module
from gds_optimizer.errors import ClosedError, ForkedError, IoError, NoSpaceError, StoreChangedError
from gds_optimizer.io import IoBackend
from gds_optimizer.layout import PlaneSpec, Shard, SpaceSpec, plan_layout
from gds_optimizer.lock import LOCK_NAME
from gds_optimizer.store import Store
from tests.support import io_backends
from tests.support.engines import in_child, leftovers, mounted_disk, open_files
from tests.support.io_conformance import file_size_limit

NAME = "rank00003/opt0"


def make_layout(buckets: int = 5, bucket_numel: int = 1024) -> Any:
    planes = tuple(PlaneSpec(name=name) for name in ("main", "exp_avg", "exp_avg_sq"))
    shard = Shard(name="a", numel=buckets * bucket_numel)
    return plan_layout([SpaceSpec(planes=planes, shards=(shard,))], bucket_numel=bucket_numel)


LAYOUT = make_layout()
FILE_BYTES = 4 * 4096


@pytest.fixture
def backend():
    made = io_backends.make("host")
    yield made
    made.close()


@pytest.fixture
def store(tmp_path, backend):
    made = Store(LAYOUT, [tmp_path], NAME, backend)
    yield made
    made.close()


@pytest.fixture
def small_disk(tmp_path):
    with mounted_disk(tmp_path, 8 * 2**20) as disk:
        yield disk


def test_files_are_private_named_by_number_and_allocated(tmp_path, store):
    directory = tmp_path / NAME
    assert store.directories == [directory]
    assert [path.name for path in store.paths] == [f"bucket{i:05d}.bin" for i in range(5)]
    assert directory.stat().st_mode & 0o777 == 0o700
    for path in directory.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path
    for path, file in zip(store.paths, store.files, strict=True):
        state = path.stat()
        assert state.st_size == FILE_BYTES
        assert state.st_blocks * 512 >= FILE_BYTES
        assert os.path.samestat(os.fstat(file.fileno()), state)


def test_the_umask_does_not_open_the_files_to_others(tmp_path, backend):
    before = os.umask(0)
    try:
        store = Store(LAYOUT, [tmp_path], NAME, backend)
    finally:
        os.umask(before)
    assert (tmp_path / NAME).stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / NAME).iterdir())
    store.close()


def test_the_layout_lies_beside_the_files(tmp_path, store):
    described = json.loads((tmp_path / NAME / "layout.json").read_text())
    assert described == LAYOUT.describe()
    assert described["spaces"][0]["shards"] == [{"name": "a", "numel": 5120}]


def test_directories_take_turns(tmp_path, backend):
    roots = [tmp_path / name for name in ("a", "b")]
    for root in roots:
        root.mkdir()
    store = Store(LAYOUT, roots, NAME, backend)
    assert [path.parents[2].name for path in store.paths] == ["a", "b", "a", "b", "a"]
    for root in roots:
        assert (root / NAME / "layout.json").exists()
        assert (root / NAME / LOCK_NAME).exists()
    store.close()
    assert leftovers(tmp_path) == ["a", "b"]


def test_close_removes_everything_and_may_be_called_again(tmp_path, backend):
    store = Store(LAYOUT, [tmp_path], NAME, backend)
    assert len(open_files() & set(map(str, store.paths))) == 5
    store.close()
    store.close()
    assert leftovers(tmp_path) == []
    assert not open_files() & {str(path) for path in store.paths}
    with pytest.raises(ClosedError, match=f"{tmp_path}/{NAME} is closed"):
        store.check_owner()


def test_no_state_needs_no_file(tmp_path, backend):
    store = Store(plan_layout([], bucket_numel=1024), [tmp_path], NAME, backend)
    assert store.files == []
    store.close()
    assert leftovers(tmp_path) == []


# No space


def test_a_limit_on_file_size_is_met_before_anything_is_written(tmp_path, backend):
    layout = make_layout(buckets=3, bucket_numel=4096)
    assert layout.max_file_bytes > 40000
    with file_size_limit(40000), pytest.raises(NoSpaceError) as caught:
        Store(layout, [tmp_path], NAME, backend)
    words = str(caught.value)
    assert f"{tmp_path}/{NAME} has too little room (File too large)" in words
    assert f"needs {layout.total_bytes} bytes over 1 directories, 0 were reserved" in words
    assert "free now" in words
    assert caught.value.__cause__ is not None
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_met_before_anything_is_written(small_disk, backend):
    free_before = os.statvfs(small_disk).f_bavail
    layout = make_layout(buckets=50, bucket_numel=16 * 1024)
    assert layout.total_bytes > 8 * 2**20
    with pytest.raises(NoSpaceError) as caught:
        Store(layout, [small_disk], NAME, backend)
    words = str(caught.value)
    assert f"{small_disk}/{NAME} has too little room (No space left on device)" in words
    reserved, free = (
        int(words.partition(start)[2].partition(" ")[0])
        for start in (" directories, ", "were reserved and ")
    )
    assert f"needs {layout.total_bytes} bytes" in words
    # Whole files were reserved, and what is free now would not take another.
    assert reserved > 0
    assert reserved % layout.max_file_bytes == 0
    assert 0 <= free < layout.max_file_bytes
    assert leftovers(small_disk) == ["lost+found"]
    assert os.statvfs(small_disk).f_bavail == free_before
    # What fits is not refused.
    fitting = Store(make_layout(buckets=4, bucket_numel=16 * 1024), [small_disk], NAME, backend)
    fitting.close()


def test_a_file_that_cannot_be_opened_leaves_nothing(tmp_path, backend, monkeypatch):
    opened: list[Any] = []
    open_file = backend.open

    def fail_at_the_third(path: Path) -> Any:
        if len(opened) == 2:
            raise IoError(path, "open", file_offset=0, wanted_bytes=0, got="no luck")
        opened.append(open_file(path))
        return opened[-1]

    before = open_files()
    monkeypatch.setattr(backend, "open", fail_at_the_third)
    with pytest.raises(IoError, match=r"bucket00002\.bin.*no luck"):
        Store(LAYOUT, [tmp_path], NAME, backend)
    assert len(opened) == 2
    assert open_files() == before
    assert leftovers(tmp_path) == []


# Descriptors


def limit_after(count: int, soft: int, hard: int) -> tuple[int, int]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    module._allow_descriptors(count)
    return resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_the_limit_on_open_files_is_raised_where_needed():
    def check() -> None:
        assert limit_after(1000, 64, 4096) == (2 * (1000 + 512), 4096)
        assert limit_after(1500, 64, 4096) == (2 * (1500 + 512), 4096)
        assert limit_after(1600, 64, 4000) == (4000, 4000)
        assert limit_after(10, 3000, 4000) == (3000, 4000)  # enough already

    in_child(check)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_hard_limit_on_open_files_that_is_too_low_is_named():
    def check() -> None:
        with pytest.raises(NoSpaceError) as caught:
            limit_after(1000, 64, 1000)
        words = str(caught.value)
        assert "1000 descriptors are needed" in words
        assert "hard limit on open files is 1000: raise it to 1512" in words
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (64, 1000)

    in_child(check)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_more_buckets_than_the_soft_limit_allows(tmp_path):
    def check() -> None:
        used = len(os.listdir("/proc/self/fd"))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
        backend = io_backends.make("host")
        store = Store(make_layout(buckets=60), [tmp_path], NAME, backend)
        assert len(store.files) == 60
        store.close()
        backend.close()

    in_child(check)
    assert leftovers(tmp_path) == []


# What somebody else does


def test_untouched_files_are_unchanged(store):
    for index in range(5):
        store.check_unchanged(index)


def test_a_removed_file_is_noticed(store):
    store.paths[2].unlink()
    with pytest.raises(StoreChangedError) as caught:
        store.check_unchanged(2)
    words = str(caught.value)
    assert f"{store.paths[2]} cannot be found any more (No such file or directory)" in words
    assert f"wanted a file of {FILE_BYTES} bytes" in words
    store.check_unchanged(1)


def test_a_replaced_file_is_noticed(store):
    inode = store.paths[2].stat().st_ino
    copy = store.paths[2].with_suffix(".copy")
    shutil.copy(store.paths[2], copy)
    copy.rename(store.paths[2])
    with pytest.raises(StoreChangedError) as caught:
        store.check_unchanged(2)
    words = str(caught.value)
    assert f"{store.paths[2]} was replaced: wanted inode {inode}, got inode" in words


@pytest.mark.parametrize("nbytes", [0, FILE_BYTES - 1, FILE_BYTES + 1])
def test_a_resized_file_is_noticed(store, nbytes):
    os.truncate(store.paths[0], nbytes)
    with pytest.raises(StoreChangedError) as caught:
        store.check_unchanged(0)
    words = str(caught.value)
    assert f"{store.paths[0]} was resized: wanted {FILE_BYTES} bytes, got {nbytes}" in words


def test_a_removed_directory_is_noticed_and_closed(tmp_path, backend):
    store = Store(LAYOUT, [tmp_path], NAME, backend)
    shutil.rmtree(tmp_path / NAME)
    with pytest.raises(StoreChangedError, match=r"bucket00000\.bin cannot be found"):
        store.check_unchanged(0)
    store.close()
    assert not open_files() & {f"{path} (deleted)" for path in store.paths}


def test_a_copy_in_the_place_of_the_directory_is_noticed_and_left(tmp_path, backend):
    store = Store(LAYOUT, [tmp_path], NAME, backend)
    (tmp_path / NAME).rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / NAME)
    with pytest.raises(StoreChangedError, match=r"bucket00004\.bin was replaced"):
        store.check_unchanged(4)
    store.close()
    assert len(list((tmp_path / NAME).glob("bucket*.bin"))) == 5


# Files that others go on reading


def identity(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_dev, state.st_ino


def write_all(store: Store) -> None:
    for index in range(len(store.paths)):
        store.file_for_write(index)


def test_a_file_that_is_read_elsewhere_becomes_no_spare(tmp_path, store):
    """Under whatever name it comes back; the files that are written instead may."""
    store.freeze_read_elsewhere()
    for path in store.paths:
        os.link(path, tmp_path / path.name)
    read = {identity(path) for path in store.paths}
    write_all(store)
    assert not read & {identity(path) for path in store.paths}
    for path in store.paths:
        kept = tmp_path / path.name
        assert (kept.stat().st_nlink, identity(kept) in read) == (1, True)
        assert not store.adopt_spare(kept)
        assert kept.exists()
    kept = tmp_path / "written"
    store.paths[0].rename(kept)
    assert store.adopt_spare(kept)


def test_a_number_that_comes_back_is_another_file(tmp_path, store):
    """Inode numbers are used again as soon as a file is gone for good."""
    store.freeze_read_elsewhere()
    read = {identity(path) for path in store.paths}
    write_all(store)
    store.reserve_spares()
    spares = [path.with_suffix(".spare.bin") for path in store.paths]
    again = [path for path in spares if identity(path) in read]
    if not again:
        pytest.skip("needs a file system that uses inode numbers again")
    for number, path in enumerate(again):
        path.rename(tmp_path / str(number))
    store.drop_spares(range(len(store.paths)))
    for number in range(len(again)):
        assert store.adopt_spare(tmp_path / str(number))


# Whose it is


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_removes_nothing(tmp_path, store):
    parent = os.getpid()

    def check() -> None:
        assert store.is_foreign
        with pytest.raises(ForkedError) as caught:
            store.check_owner()
        assert f"{tmp_path}/{NAME} belongs to process {parent}" in str(caught.value)
        assert f"forked child {os.getpid()}" in str(caught.value)
        store.close()

    in_child(check)
    assert not store.is_foreign
    store.check_owner()
    assert all(path.exists() for path in store.paths)


class _BadFile:
    """A file whose close reports a failure, as after a write that nobody waited for."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def close(self) -> None:
        self._file.close()
        raise IoError(self._file.path, "write", file_offset=0, wanted_bytes=1, got=0)


def test_a_failure_while_closing_does_not_stop_it(tmp_path, backend):
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    before = open_files()
    store = Store(LAYOUT, roots, NAME, backend)
    store.files[1] = _BadFile(store.files[1])  # type: ignore[call-overload]
    with pytest.raises(IoError, match=r"bucket00001\.bin"):
        store.close()
    assert open_files() == before
    assert leftovers(tmp_path) == ["a", "b"]
    store.close()


def test_a_store_is_made_anew_where_one_was_closed(tmp_path, backend: IoBackend):
    for _ in range(2):
        store = Store(LAYOUT, [tmp_path], NAME, backend)
        assert [path.stat().st_size for path in store.paths] == [FILE_BYTES] * 5
        store.close()

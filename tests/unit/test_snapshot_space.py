"""No room for what the next step writes: said with numbers, and nothing is lost."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gds_optimizer.errors import NoSpaceError, SnapshotError, StepFailedError
from gds_optimizer.mapped_state import freeze_mapped, map_state
from gds_optimizer.snapshot_read import verify
from gds_optimizer.snapshots import restore_snapshot, take_snapshot
from tests.support.engines import StreamedOptimizer, grads_of, leftovers, mounted_disk
from tests.support.snapshots import build, built, compare, everything, hashes, train, world


def total_bytes(tmp_path: Path) -> int:
    (tmp_path / "plan").mkdir()
    with built(tmp_path / "plan") as optimizer:
        return int(optimizer.layout.total_bytes)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A file system, and the bytes of a set of files; two and a half sets fit."""
    nbytes = total_bytes(tmp_path)
    with mounted_disk(tmp_path, 16 * 2**20) as disk:
        fill(disk, int(2.5 * nbytes))
        (disk / "state").mkdir()
        yield disk, nbytes


def free_bytes(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


def fill(disk: Path, leave_bytes: int) -> None:
    """Take what is free, but for some."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    fd = os.open(ballast, os.O_CREAT | os.O_WRONLY)
    try:
        os.posix_fallocate(fd, 0, max(1, free_bytes(disk) - leave_bytes - 2**17))
    finally:
        os.close(fd)


def wanted(tmp_path: Path, steps: int) -> dict[str, Any]:
    directory = tmp_path / "wanted"
    directory.mkdir()
    with built(directory) as optimizer:
        train(optimizer, 0, steps)
        return everything(optimizer)


def refused(optimizer: StreamedOptimizer, path: Path, **options: Any) -> tuple[int, int]:
    """Bytes needed and bytes free, as the refusal has them."""
    before = leftovers(path.parent), hashes(path.parent)
    free = free_bytes(path.parent)
    with pytest.raises(NoSpaceError) as failure:
        take_snapshot({"opt0": optimizer.engine}, path, **options)
    assert (leftovers(path.parent), hashes(path.parent)) == before
    assert free_bytes(path.parent) == pytest.approx(free, abs=65536)
    numbers = re.search(r"need (\d+) bytes, and (\d+) are free", str(failure.value))
    assert numbers, failure.value
    assert str(optimizer.store.directories[0]) in str(failure.value)
    return int(numbers[1]), int(numbers[2])


def test_no_room_for_a_second_set(tmp_path, small_disk):
    """The snapshot is gone, training goes on to the bit, older snapshots are whole."""
    disk, nbytes = small_disk
    with built(disk / "state") as optimizer:
        train(optimizer, 0, 2)
        optimizer.engine.drain()
        take_snapshot({"opt0": optimizer.engine}, disk / "snapshots" / "2")
        files = hashes(disk / "snapshots")
        train(optimizer, 2, 4)
        optimizer.engine.drain()
        needed, free = refused(optimizer, disk / "snapshots" / "4")
        # Buckets without a gradient so far are in both, and their spares are there already.
        assert nbytes / 2 < needed <= nbytes
        assert free == pytest.approx(free_bytes(disk), abs=65536)
        assert free < needed
        train(optimizer, 4, 6)
        needed_again, _ = refused(optimizer, disk / "snapshots" / "6")
        assert needed_again >= needed
        train(optimizer, 6, 8)
        compare(wanted(tmp_path, 8), everything(optimizer))
        assert hashes(disk / "snapshots") == files
        assert verify(disk / "snapshots" / "2") == []
        assert restore_snapshot({"opt0": optimizer.engine}, disk / "snapshots" / "2") == 2
        train(optimizer, 2, 8)
        compare(wanted_again(tmp_path), everything(optimizer))


def wanted_again(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "again").mkdir()
    return wanted(tmp_path / "again", 8)


def test_the_first_does_not_fit(tmp_path, small_disk):
    disk, nbytes = small_disk
    with built(disk / "state") as optimizer:
        train(optimizer, 0, 2)
        optimizer.engine.drain()
        fill(disk, nbytes // 2)
        needed, free = refused(optimizer, disk / "snapshot")
        assert needed == nbytes
        assert free < needed
        inode = optimizer.paths[0].stat().st_ino
        train(optimizer, 2, 4)
        assert optimizer.paths[0].stat().st_ino == inode  # it writes where it wrote before
        fill(disk, 2 * nbytes)
        take_snapshot({"opt0": optimizer.engine}, disk / "snapshot")
        train(optimizer, 4, 8)
        compare(wanted(tmp_path, 8), everything(optimizer))
        assert verify(disk / "snapshot") == []


def test_keep_last_makes_do_with_two_sets(tmp_path, small_disk):
    """What is pruned makes room; and a snapshot that fits only with pruning fits."""
    disk, _ = small_disk
    with built(disk / "state") as optimizer:
        for step in range(8):
            optimizer.step(grads_of([m.numel() for m in optimizer.models], step))
            optimizer.engine.drain()
            take_snapshot({"opt0": optimizer.engine}, disk / "snapshots" / str(step), keep_last=1)
            assert [p.name for p in (disk / "snapshots").iterdir()] == [str(step)]
        assert verify(disk / "snapshots" / "7") == []


def test_older_ones_are_kept_where_pruning_would_not_make_enough_room(tmp_path, small_disk):
    """Two are to be kept, which needs three sets: the older one stays where it is."""
    disk, _ = small_disk
    with built(disk / "state") as optimizer:
        train(optimizer, 0, 1)
        take_snapshot({"opt0": optimizer.engine}, disk / "snapshots" / "1", keep_last=2)
        train(optimizer, 1, 2)
        optimizer.engine.drain()
        refused(optimizer, disk / "snapshots" / "2", keep_last=2)
        assert verify(disk / "snapshots" / "1") == []
        train(optimizer, 2, 8)
        compare(wanted(tmp_path, 8), everything(optimizer))


def test_the_disk_fills_up_while_spares_are_made(tmp_path, monkeypatch):
    """Somebody else takes the room that was free a moment ago."""
    (tmp_path / "state").mkdir()
    with built(tmp_path / "state") as optimizer:
        train(optimizer, 0, 2)
        optimizer.engine.drain()
        before = leftovers(tmp_path)
        allocate, left = os.posix_fallocate, [5]

        def fail_later(fd: int, offset: int, nbytes: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            allocate(fd, offset, nbytes)

        monkeypatch.setattr(os, "posix_fallocate", fail_later)
        with pytest.raises(NoSpaceError, match="for the files that the next step writes instead"):
            take_snapshot({"opt0": optimizer.engine}, tmp_path / "snapshot")
        assert leftovers(tmp_path) == before
        train(optimizer, 2, 4)
        monkeypatch.undo()
        take_snapshot({"opt0": optimizer.engine}, tmp_path / "snapshot")
        train(optimizer, 4, 8)
        compare(wanted(tmp_path, 8), everything(optimizer))


def test_what_was_to_be_pruned_gives_nothing(tmp_path, monkeypatch):
    """The new snapshot is whole by then and stays; the next step needs the room and says so."""
    (tmp_path / "state").mkdir()
    with built(tmp_path / "state") as optimizer:
        sizes = [model.numel() for model in optimizer.models]
        for step in range(2):
            optimizer.step(grads_of(sizes, step))
            optimizer.engine.drain()
            take_snapshot({"opt0": optimizer.engine}, tmp_path / "s" / str(step), keep_last=1)
        optimizer.step(grads_of(sizes, 2))
        optimizer.engine.drain()
        taken = everything(optimizer)

        def full(fd: int, offset: int, nbytes: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(type(optimizer.store), "adopt_spare", lambda self, source: False)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(NoSpaceError, match="s/2 is complete, but the next step cannot be"):
            take_snapshot({"opt0": optimizer.engine}, tmp_path / "s" / "2", keep_last=1)
        files = hashes(tmp_path / "s")
        assert verify(tmp_path / "s" / "2") == []
        with pytest.raises(StepFailedError, match="too little room"):
            optimizer.step(grads_of(sizes, 3))
        assert hashes(tmp_path / "s") == files
        monkeypatch.undo()
        restore_snapshot({"opt0": optimizer.engine}, tmp_path / "s" / "2")
        compare(taken, everything(optimizer))


def test_room_is_made_before_the_next_step(tmp_path, monkeypatch):
    """The same, but then there is room again: nothing has happened."""
    (tmp_path / "state").mkdir()
    with built(tmp_path / "state") as optimizer:
        train(optimizer, 0, 2)
        with monkeypatch.context() as patch:
            patch.setattr(type(optimizer.store), "reserve_spares", lambda self, promised=(): set())
            take_snapshot({"opt0": optimizer.engine}, tmp_path / "snapshot")
        files = hashes(tmp_path / "snapshot")
        train(optimizer, 2, 8)
        compare(wanted(tmp_path, 8), everything(optimizer))
        assert hashes(tmp_path / "snapshot") == files


def test_no_room_for_an_asynchronous_save(tmp_path, small_disk):
    disk, nbytes = small_disk
    with built(disk / "state") as optimizer:
        train(optimizer, 0, 2)
        optimizer.engine.drain()
        fill(disk, nbytes // 2)
        map_state(optimizer.engine)
        with pytest.raises(NoSpaceError, match=rf"need {nbytes} bytes"):
            freeze_mapped(optimizer.engine)
        train(optimizer, 2, 8)
        compare(wanted(tmp_path, 8), everything(optimizer))


def test_a_rank_without_room(tmp_path, monkeypatch):
    """None of the ranks has a snapshot then, and all can go on."""
    with world(tmp_path, 3) as three:
        three.train(0, 2)
        paths = tmp_path / "snapshots"

        def take(step: int, **options: Any) -> list[Any]:
            return three.together(
                lambda e, p: take_snapshot(e, paths / str(step), placement=p, **options)
            )

        assert take(2) == [None] * 3
        files = hashes(paths)
        three.train(2, 3)
        store = three.optimizers[1]["opt0"].store

        def full(promised: Any = ()) -> set[int]:
            raise NoSpaceError("there is no room")

        monkeypatch.setattr(store, "reserve_spares", full)
        outcomes = take(3, keep_last=1)
        assert isinstance(outcomes[1], NoSpaceError)
        for rank in (0, 2):
            assert isinstance(outcomes[rank], SnapshotError)
            assert "failed on rank 1: there is no room" in str(outcomes[rank])
        assert hashes(paths) == files
        for optimizers in three.optimizers:
            assert not list(optimizers["opt0"].store.directories[0].glob("*.spare.bin"))
        three.train(3, 4)
        monkeypatch.undo()
        assert take(4, keep_last=1) == [None] * 3
        assert [p.name for p in paths.iterdir()] == ["4"]
        three.train(4, 5)
        assert verify(paths / "4") == []


def test_two_engines_of_which_the_second_has_no_room(tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    first, second = (build(tmp_path / "state", name=f"rank00000/opt{n}") for n in range(2))
    engines = {"opt0": first.engine, "opt1": second.engine}
    train(first, 0, 1)
    train(second, 0, 1)
    first.engine.drain()
    second.engine.drain()
    before = leftovers(tmp_path)

    def full(promised: Any = ()) -> set[int]:
        raise NoSpaceError("there is no room")

    with monkeypatch.context() as patch:
        patch.setattr(second.store, "reserve_spares", full)
        with pytest.raises(NoSpaceError):
            take_snapshot(engines, tmp_path / "snapshot")
    assert leftovers(tmp_path) == before
    inodes = [optimizer.paths[9].stat().st_ino for optimizer in (first, second)]
    train(first, 1, 2)
    train(second, 1, 2)
    assert [optimizer.paths[9].stat().st_ino for optimizer in (first, second)] == inodes
    first.close()
    second.close()

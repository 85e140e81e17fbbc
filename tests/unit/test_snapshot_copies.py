"""Copies of snapshots in the background: whole or not there, and never in training's way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gds_optimizer import direct_file, snapshot_copy, snapshots
from gds_optimizer.errors import SnapshotError
from gds_optimizer.snapshot_copy import being_copied
from gds_optimizer.snapshot_read import verify
from gds_optimizer.snapshots import (
    SnapshotCopy,
    clean_incomplete,
    remove_snapshot,
    restore_snapshot,
    take_snapshot,
)
from tests.support.engines import StreamedOptimizer, leftovers, mounted_disk
from tests.support.snapshots import (
    all_well,
    built,
    compare,
    everything,
    flip,
    hashes,
    train,
    wait_until,
    world,
)


@pytest.fixture
def optimizer(tmp_path: Path) -> Iterator[StreamedOptimizer]:
    (tmp_path / "state").mkdir()
    with built(tmp_path / "state") as made:
        train(made, 0, 2)
        yield made


@pytest.fixture
def snapshot(tmp_path: Path, optimizer: StreamedOptimizer) -> Path:
    path = tmp_path / "snapshots" / "2"
    take_snapshot({"opt0": optimizer.engine}, path)
    return path


class Gate:
    """Copying stops at the third file, counted from when the gate is closed, until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._left = 0

    def close(self) -> None:
        self._left = 3

    def __call__(self, *args: Any, **options: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            assert self.opened.wait(60)
        direct_file.copy_file(*args, **options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(snapshot_copy, "copy_file", gate)
    gate.close()
    yield gate
    gate.opened.set()


def test_training_goes_on_during_a_copy(tmp_path, optimizer, snapshot, gate):
    taken, files = everything(optimizer), hashes(snapshot)
    target = tmp_path / "copies" / "2"
    copy = SnapshotCopy(snapshot, target)
    gate.reached.wait(60)
    train(optimizer, 2, 5)
    later = everything(optimizer)
    assert not copy.done
    assert not (target / "snapshot.json").exists()
    with pytest.raises(SnapshotError, match="still going on"):
        copy.wait(0.01)
    gate.opened.set()
    copy.wait()
    assert copy.done
    assert copy.failure is None
    assert copy.copied_bytes == copy.total_bytes == optimizer.layout.total_bytes
    assert verify(target) == []
    copied = hashes(target)
    # Nothing in it names another place, so a copy of links inside is the same to the bit.
    assert copied == files
    assert not any(path.stat().st_nlink > 1 for path in target.rglob("*.bin"))
    compare(later, everything(optimizer))
    restore_snapshot({"opt0": optimizer.engine}, target)
    compare(taken, everything(optimizer))


@pytest.mark.parametrize("below", ["", "opt0", "opt0/copy"])
def test_a_copy_into_the_state_itself_is_refused(tmp_path, optimizer, snapshot, below):
    target = optimizer.paths[0].parent.parent / below
    before = leftovers(target.parent)
    with pytest.raises(SnapshotError, match="inside of the optimizer's state"):
        SnapshotCopy(snapshot, target, engines={"opt0": optimizer.engine})
    assert leftovers(target.parent) == before


def test_a_copy_can_be_copied_and_moved(tmp_path, optimizer, snapshot):
    SnapshotCopy(snapshot, tmp_path / "one").wait()
    remove_snapshot(snapshot)
    SnapshotCopy(tmp_path / "one", tmp_path / "two").wait()
    (tmp_path / "two").rename(tmp_path / "three")
    shutil.copytree(tmp_path / "three", tmp_path / "four")
    assert verify(tmp_path / "four") == []


def test_what_is_copied_is_neither_pruned_nor_removed(tmp_path, optimizer, snapshot, gate):
    copy = SnapshotCopy(snapshot, tmp_path / "copy")
    gate.reached.wait(60)
    assert being_copied() == {snapshot.resolve()}
    with pytest.raises(SnapshotError, match="is being copied: wait for it or stop it"):
        remove_snapshot(snapshot)
    for step in range(2, 5):
        train(optimizer, step, step + 1)
        take_snapshot({"opt0": optimizer.engine}, snapshot.parent / str(step + 1), keep_last=1)
        assert sorted(p.name for p in snapshot.parent.iterdir()) == ["2", str(step + 1)]
    gate.opened.set()
    copy.wait()
    assert verify(tmp_path / "copy") == []
    wait_until(lambda: not being_copied())
    train(optimizer, 5, 6)
    take_snapshot({"opt0": optimizer.engine}, snapshot.parent / "6", keep_last=1)
    assert [p.name for p in snapshot.parent.iterdir()] == ["6"]


def test_two_copies_at_once(tmp_path, optimizer, snapshot, gate):
    """The first to end does not give the snapshot free."""
    slow = SnapshotCopy(snapshot, tmp_path / "slow")
    gate.reached.wait(60)
    SnapshotCopy(snapshot, tmp_path / "quick").wait()
    assert being_copied() == {snapshot.resolve()}
    with pytest.raises(SnapshotError, match="is being copied"):
        remove_snapshot(snapshot)
    gate.opened.set()
    slow.wait()
    assert verify(tmp_path / "slow") == verify(tmp_path / "quick") == []


def test_it_goes_no_faster_than_it_may(tmp_path, optimizer, snapshot, monkeypatch):
    """The waits are what the rate asks for, for files smaller than a chunk too."""
    now = [0.0]
    waits: list[float] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            now[0] += timeout or 0.0
            return False

    monkeypatch.setattr(direct_file.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(direct_file, "CHUNK_BYTES", 4096)
    for number, file in enumerate(sorted(snapshot.rglob("bucket*.bin"))[:3]):
        nbytes, began = file.stat().st_size, now[0]
        direct_file.copy_file(file, tmp_path / str(number), bytes_per_s=1000.0, stop=Event())
        assert now[0] - began == pytest.approx(nbytes / 1000.0)
        assert (tmp_path / str(number)).read_bytes() == file.read_bytes()
    assert max(waits) == pytest.approx(4.096)


@pytest.mark.parametrize("bytes_per_s", [0, -1.0, float("nan")])
def test_a_rate_that_is_none(tmp_path, snapshot, bytes_per_s):
    with pytest.raises(SnapshotError, match="wanted more than 0"):
        SnapshotCopy(snapshot, tmp_path / "copy", bytes_per_s=bytes_per_s)
    assert not (tmp_path / "copy").exists()
    assert not being_copied()


def test_stop(tmp_path, optimizer, snapshot, caplog):
    """At once, however long the next wait would be; what was copied is removed."""
    target = tmp_path / "copies" / "2"
    SnapshotCopy(snapshot, tmp_path / "copies" / "earlier").wait()
    copy = SnapshotCopy(snapshot, target, bytes_per_s=1e-3)
    wait_until(lambda: copy.copied_bytes > 0)
    assert leftovers(target)
    copy.stop()
    assert copy.done
    assert copy.failure is not None
    with pytest.raises(SnapshotError, match="was stopped"):
        copy.wait()
    assert [p.name for p in (tmp_path / "copies").iterdir()] == ["earlier"]
    assert not being_copied()
    assert caplog.text == ""  # it was asked for
    SnapshotCopy(snapshot, target).wait()
    assert verify(target) == []


def test_stop_comes_too_late(tmp_path, optimizer, snapshot):
    copy = SnapshotCopy(snapshot, tmp_path / "copy")
    copy.wait()
    copy.stop()
    copy.wait()
    assert verify(tmp_path / "copy") == []


def test_a_second_snapshot_during_a_copy(tmp_path, optimizer, snapshot, gate):
    """Taken, restored and copied itself, before the first copy has ended."""
    first = SnapshotCopy(snapshot, tmp_path / "copies" / "2")
    gate.reached.wait(60)
    train(optimizer, 2, 3)
    later = everything(optimizer)
    take_snapshot({"opt0": optimizer.engine}, snapshot.parent / "3")
    SnapshotCopy(snapshot.parent / "3", tmp_path / "copies" / "3").wait()
    train(optimizer, 3, 4)
    restore_snapshot({"opt0": optimizer.engine}, tmp_path / "copies" / "3")
    compare(later, everything(optimizer))
    assert not first.done
    gate.opened.set()
    first.wait()
    for name in ("2", "3"):
        assert hashes(tmp_path / "copies" / name) == hashes(snapshot.parent / name)


def test_progress(tmp_path, optimizer, snapshot, gate, monkeypatch, caplog):
    monkeypatch.setattr(snapshot_copy, "_REPORT_INTERVAL_S", 0.0)
    caplog.set_level("INFO")
    files = [bucket.file_bytes for bucket in optimizer.layout.buckets]
    copy = SnapshotCopy(snapshot, tmp_path / "copy")
    gate.reached.wait(60)
    assert (copy.copied_bytes, copy.total_bytes) == (sum(files[:2]), sum(files))
    assert 0 < copy.left_s < float("inf")
    copy._began -= 1000 * copy.copied_bytes  # a thousand seconds for each byte
    assert copy.left_s == pytest.approx(1000 * sum(files[2:]), rel=0.01)
    gate.opened.set()
    copy.wait()
    assert copy.left_s == 0.0
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert len(lines) == len(files)
    assert all(f"copying snapshot {snapshot} to {copy.target}: 0.0 of 0.0 GB" in x for x in lines)
    assert lines[-1].endswith(", 0 s left")


@pytest.mark.parametrize("keep_last", [1, 2])
def test_copies_that_are_kept(tmp_path, optimizer, snapshot, keep_last):
    """Of all ranks, oldest first, and no leftover; a user's files beside them stay."""
    copies = tmp_path / "copies"
    (copies / "mine").mkdir(parents=True)
    (copies / "mine" / "data").write_text("mine")
    (copies / "half" / "rank00000.partial" / "opt0").mkdir(parents=True)
    for number in range(4):
        SnapshotCopy(snapshot, copies / str(number), keep_last=keep_last).wait()
        kept = [str(each) for each in range(4)][max(0, number + 1 - keep_last) : number + 1]
        assert sorted(p.name for p in copies.iterdir()) == [*kept, "mine"]
    for name in kept:
        assert verify(copies / name) == []
    assert verify(snapshot) == []
    with pytest.raises(SnapshotError, match="keep_last is 0, wanted a whole number"):
        SnapshotCopy(snapshot, copies / "5", keep_last=0)


def test_what_is_under_way_is_no_leftover(tmp_path, optimizer, snapshot, gate):
    """A copy that has begun outlives a snapshot and a copy beside it, which clean up."""
    engines, together = {"opt0": optimizer.engine}, snapshot.parent
    slow = SnapshotCopy(snapshot, together / "slow")
    gate.reached.wait(60)
    leftover = together / "killed" / "rank00000.partial" / "opt0"
    for number in range(2):
        leftover.mkdir(parents=True)
        (leftover / "bucket00000.bin").write_bytes(b"half")
        if number:
            SnapshotCopy(snapshot, together / "quick", keep_last=9).wait()
        else:
            take_snapshot(engines, together / "3", keep_last=9)
        assert not leftover.parent.parent.exists()
        assert clean_incomplete(together) == []
    gate.opened.set()
    slow.wait()
    assert verify(together / "slow") == []
    (together / "slow" / "snapshot.json").unlink()
    assert clean_incomplete(together) == [together / "slow"]


def test_a_snapshot_being_taken_is_no_leftover(tmp_path, optimizer, snapshot, monkeypatch):
    """Of a copy that ends meanwhile, in its thread."""
    declare = snapshots.complete

    def copy_and_declare(*args: Any) -> None:
        SnapshotCopy(snapshot, snapshot.parent / "copy", keep_last=9).wait()
        declare(*args)

    monkeypatch.setattr(snapshots, "complete", copy_and_declare)
    take_snapshot({"opt0": optimizer.engine}, snapshot.parent / "3")
    assert verify(snapshot.parent / "3") == verify(snapshot.parent / "copy") == []


def test_a_copy_with_something_else_in_it_is_not_pruned(tmp_path, snapshot, caplog):
    SnapshotCopy(snapshot, tmp_path / "copies" / "1").wait()
    mine = tmp_path / "copies" / "1" / "rank00000" / "opt0" / "notes.txt"
    mine.write_text("mine")
    SnapshotCopy(snapshot, tmp_path / "copies" / "2", keep_last=1).wait()
    assert f"{mine} is not of a snapshot" in caplog.text
    assert verify(tmp_path / "copies" / "1") == verify(tmp_path / "copies" / "2") == []


# ---------------------------------------------------------------------- failures


def test_a_failure_is_said_at_the_next_step(tmp_path, optimizer, snapshot, monkeypatch, caplog):
    """Once, and training goes on; the last good copy stays, whenever the new one fails."""

    def refuse(copy: SnapshotCopy) -> None:
        raise OSError("Input/output error")

    engines = {"opt0": optimizer.engine}
    good = tmp_path / "copies" / "good"
    SnapshotCopy(snapshot, good, engines=engines, keep_last=1).wait()
    train(optimizer, 2, 3)
    assert not caplog.records
    flip(snapshot / "rank00000" / "opt0" / "bucket00009.bin", 5000)
    copy = SnapshotCopy(snapshot, tmp_path / "copies" / "bad", engines=engines, keep_last=1)
    failed(copy, "bucket 9 in", caplog)
    caplog.clear()
    train(optimizer, 3, 4)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert f"the copy of snapshot {snapshot} to {copy.target} failed: bucket 9 in" in caplog.text
    train(optimizer, 4, 5)
    assert len(caplog.records) == 1
    with monkeypatch.context() as patched:
        flip(snapshot / "rank00000" / "opt0" / "bucket00009.bin", 5000)
        patched.setattr(SnapshotCopy, "_complete", refuse)
        late = SnapshotCopy(snapshot, tmp_path / "copies" / "late", engines=engines, keep_last=1)
        caplog.clear()
        failed(late, "Input/output error", caplog)
    assert [p.name for p in (tmp_path / "copies").iterdir()] == ["good"]
    assert verify(good) == []
    restore_snapshot(engines, good)


def failed(copy: SnapshotCopy, message: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SnapshotError, match=message):
        copy.wait()
    assert copy.failure is not None
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert f"the copy of snapshot {copy.source} to {copy.target} failed" in caplog.text
    assert not (copy.target / "snapshot.json").exists()
    assert not being_copied()


def test_a_full_target(tmp_path, optimizer, snapshot, caplog):
    """Earlier copies are as they were, and nothing of this one takes their room."""
    total_bytes = optimizer.layout.total_bytes
    with mounted_disk(tmp_path, 2 * total_bytes) as disk:
        SnapshotCopy(snapshot, disk / "1").wait()
        files = hashes(disk / "1")
        free = os.statvfs(disk).f_bavail
        failed(SnapshotCopy(snapshot, disk / "2"), "No space left on device", caplog)
        assert not (disk / "2").exists()
        assert hashes(disk / "1") == files
        assert os.statvfs(disk).f_bavail >= free
        train(optimizer, 2, 3)


def test_the_target_is_removed(tmp_path, optimizer, snapshot, gate, caplog):
    copy = SnapshotCopy(snapshot, tmp_path / "copy")
    gate.reached.wait(60)
    shutil.rmtree(tmp_path / "copy")
    gate.opened.set()
    failed(copy, "No such file or directory", caplog)
    assert not (tmp_path / "copy").exists()


def test_the_source_is_damaged(tmp_path, optimizer, snapshot, caplog):
    """Damage is not passed on as a good copy: a plane, a footer, a file, the rest."""
    part = snapshot / "rank00000" / "opt0"
    size = (part / "bucket00009.bin").stat().st_size
    for number, (file, offset, message) in enumerate(
        [
            ("bucket00009.bin", 5000, "bucket 9 in .* checksum of plane 'exp_avg'"),
            ("bucket00009.bin", size - 4000, "bucket 9 in .*bucket00009.bin"),
            ("resident.bin", 3, "resident.bin is damaged"),
        ]
    ):
        caplog.clear()
        flip(part / file, offset)
        failed(SnapshotCopy(snapshot, tmp_path / "copy"), message, caplog)
        flip(part / file, offset)
        SnapshotCopy(snapshot, tmp_path / f"good{number}").wait()
    caplog.clear()
    (part / "bucket00004.bin").rename(tmp_path / "away")
    failed(SnapshotCopy(snapshot, tmp_path / "copy"), "bucket 4 in .* cannot be found", caplog)
    (tmp_path / "away").rename(part / "bucket00004.bin")
    flip(snapshot / "snapshot.json", 100)
    with pytest.raises(SnapshotError, match=r"snapshot.json is damaged"):
        SnapshotCopy(snapshot, tmp_path / "copy")
    flip(snapshot / "snapshot.json", 100)
    flip(part / "manifest.json", 300)
    with pytest.raises(SnapshotError, match=r"manifest.json is damaged"):
        SnapshotCopy(snapshot, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_an_unexpected_error_is_a_failure_too(tmp_path, snapshot, monkeypatch, caplog):
    def fail(*args: Any, **options: Any) -> None:
        raise MemoryError("no room for a buffer")

    monkeypatch.setattr(snapshot_copy, "copy_file", fail)
    failed(SnapshotCopy(snapshot, tmp_path / "copy"), "no room for a buffer", caplog)


def test_a_failed_write(tmp_path, snapshot, monkeypatch, caplog):
    write = os.pwrite

    def fail(fd: int, data: Any, offset: int) -> int:
        if offset:
            raise OSError(errno.EIO, "Input/output error")
        return write(fd, data, offset)

    monkeypatch.setattr(direct_file, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(os, "pwrite", fail)
    failed(SnapshotCopy(snapshot, tmp_path / "copy"), "Input/output error", caplog)
    assert not (tmp_path / "copy").exists()


# ---------------------------------------------------------------------- what is in the way


def test_targets_that_are_taken(tmp_path, optimizer, snapshot):
    SnapshotCopy(snapshot, tmp_path / "copy").wait()
    mine = tmp_path / "mine" / "rank00000" / "opt0"
    mine.mkdir(parents=True)
    (mine / "data").write_text("mine")
    (tmp_path / "mine2" / "rank00000.partial").mkdir(parents=True)
    (tmp_path / "mine2" / "rank00000.partial" / "data").write_text("mine")
    optimizer.engine.drain()
    before = hashes(tmp_path)
    for target, message in (
        (tmp_path / "copy", "there is a snapshot in .* already"),
        (snapshot, "there is a snapshot in .* already"),
        (snapshot / "copy", "is inside of the snapshot"),
        (tmp_path / "state", "a run's optimizer state itself"),
        (tmp_path / "mine", "rank00000/opt0/data, which is not of a snapshot"),
        (tmp_path / "mine2", r"rank00000.partial/data, which is not of a snapshot"),
    ):
        with pytest.raises(SnapshotError, match=message):
            SnapshotCopy(snapshot, target)
        assert hashes(tmp_path) == before
        assert not being_copied()
    with pytest.raises(SnapshotError, match="no snapshot at"):
        SnapshotCopy(tmp_path / "nothing", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_a_killed_copy_left_is_replaced(tmp_path, optimizer, snapshot):
    target = tmp_path / "copy"
    part = target / "rank00000.partial" / "opt0"
    part.mkdir(parents=True)
    (part / "bucket00000.bin").write_bytes(b"rubbish")
    (target / "snapshot.json.partial").write_text("{")
    SnapshotCopy(snapshot, target).wait()
    assert verify(target) == []
    assert not (target / "snapshot.json.partial").exists()


# ---------------------------------------------------------------------- several ranks


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path, 3, sizes=(100, 5000)) as made:
        made.train(0, 2)
        all_well(made.together(lambda e, p: take_snapshot(e, tmp_path / "3ranks", placement=p)))
        yield made


def start(three: Any, source: Path, target: Path, **options: Any) -> list[SnapshotCopy]:
    made = three.together(lambda e, p: SnapshotCopy(source, target, placement=p, **options))
    return all_well(made)


def test_all_ranks_parts(tmp_path, three):
    for copy in start(three, tmp_path / "3ranks", tmp_path / "copy"):
        copy.wait()
    assert verify(tmp_path / "copy") == []
    assert hashes(tmp_path / "copy") == hashes(tmp_path / "3ranks")


def test_older_copies_of_all_ranks_are_pruned(tmp_path, three):
    copies = tmp_path / "copies"
    for name in ("1", "2"):
        for copy in start(three, tmp_path / "3ranks", copies / name, keep_last=1):
            copy.wait()
        assert [path.name for path in copies.iterdir()] == [name]
    assert hashes(copies / "2") == hashes(tmp_path / "3ranks")


def test_older_parts_in_the_target_do_not_count(tmp_path, three, gate):
    """A copy that died left whole ranks of an earlier snapshot under the same name."""
    target = tmp_path / "copy"
    gate.opened.set()
    for copy in start(three, tmp_path / "3ranks", target):
        copy.wait()
    (target / "snapshot.json").unlink()
    three.train(2, 3)
    all_well(three.together(lambda e, p: take_snapshot(e, tmp_path / "later", placement=p)))
    gate.opened.clear()
    gate.reached.clear()
    gate.close()
    copies = start(three, tmp_path / "later", target)
    gate.reached.wait(60)  # one rank is far behind
    assert not (target / "snapshot.json").exists()
    gate.opened.set()
    for copy in copies:
        copy.wait()
    assert hashes(target) == hashes(tmp_path / "later")


def all_failed(copies: list[SnapshotCopy], rank: int, message: str) -> None:
    """`rank` says why, rank 0 that it has given up, the others that rank 0 has; nothing is left."""
    for number, copy in enumerate(copies):
        told = f"rank {rank} has given up" if number == 0 else "rank 0 has given up"
        with pytest.raises(SnapshotError, match=message if number == rank else told):
            copy.wait()
    assert not copies[0].target.exists()
    assert not being_copied()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is nowhere to be seen is given up soon."""
    monkeypatch.setattr(snapshot_copy, "_VANISHED_S", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("rank", range(3))
def test_a_rank_s_failure(tmp_path, three, rank, caplog):
    """It is one on all ranks: nobody keeps a part, and each says so when its next step begins."""
    file = tmp_path / "3ranks" / f"rank{rank:05d}" / "opt0" / "bucket00001.bin"
    flip(file, 100)
    made = three.together(
        lambda e, p: SnapshotCopy(tmp_path / "3ranks", tmp_path / "copy", engines=e, placement=p)
    )
    all_failed(all_well(made), rank, "bucket 1 in")
    assert len(caplog.records) == 3
    caplog.clear()
    three.train(2, 3)
    assert len(caplog.records) == 3
    flip(file, 100)
    for copy in start(three, tmp_path / "3ranks", tmp_path / "copy"):
        copy.wait()
    assert hashes(tmp_path / "copy") == hashes(tmp_path / "3ranks")


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, threading.Event]]:
    """Ranks whose copying waits for an event."""
    events: dict[int, threading.Event] = {}

    def copy_file(source: Path, target: Path, **options: Any) -> None:
        rank = int(target.parts[-3].removesuffix(".partial")[4:])
        assert rank not in events or events[rank].wait(60)
        direct_file.copy_file(source, target, **options)

    monkeypatch.setattr(snapshot_copy, "copy_file", copy_file)
    yield events
    for event in events.values():
        event.set()


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_never_comes(tmp_path, three, held_back):
    # However long the others take: rank 0 begins to wait when rank 1 is there.
    held_back.update({0: threading.Event(), 2: threading.Event()})
    made = three.together(
        lambda engines, placement: SnapshotCopy(
            tmp_path / "3ranks",
            tmp_path / "copy",
            placement=placement,
            wait_for_ranks_s=60.0 if placement.rank else 0.3,
        )
    )
    copies = all_well(made)
    wait_until((tmp_path / "copy" / "rank00001").is_dir)
    held_back[0].set()
    with pytest.raises(SnapshotError, match=r"ranks \[2\] did not arrive in .* within 0.3 s"):
        copies[0].wait()
    with pytest.raises(SnapshotError, match=r"rank 0 has (given up|neither)"):
        copies[1].wait()
    held_back[2].set()
    with pytest.raises(SnapshotError, match="rank 0 has given up"):
        copies[2].wait()
    assert not (tmp_path / "copy").exists()


def test_the_others_wait_until_it_is_complete(tmp_path, three, held_back):
    """A rank whose own part is done knows nothing yet."""
    held_back[0] = threading.Event()
    copies = start(three, tmp_path / "3ranks", tmp_path / "copy")
    for rank in (1, 2):
        wait_until((tmp_path / "copy" / f"rank{rank:05d}").is_dir)
        with pytest.raises(SnapshotError, match="still going on"):
            copies[rank].wait(0.2)
    held_back[0].set()
    for copy in copies[1:]:
        copy.wait()
        assert verify(tmp_path / "copy") == []
    copies[0].wait()


@pytest.mark.usefixtures("impatient")
def test_a_rank_is_stopped_while_it_waits(tmp_path, three, held_back):
    held_back[2] = threading.Event()
    copies = start(three, tmp_path / "3ranks", tmp_path / "copy")
    wait_until((tmp_path / "copy" / "rank00001").is_dir)
    copies[1].stop()
    assert not (tmp_path / "copy" / "rank00001").exists()
    copies[1].stop()
    with pytest.raises(SnapshotError, match="rank 1 has given up"):
        copies[0].wait()
    held_back[2].set()
    all_failed(copies, 1, "was stopped")


@pytest.mark.usefixtures("impatient")
def test_a_rank_is_stopped_while_it_is_declared(tmp_path, three, monkeypatch):
    """Rank 0 looks again when it has declared the copy: none is complete without a part."""

    def declare_late(path: Path, description: Any) -> None:
        shutil.rmtree(path / "rank00001")
        declare(path, description)

    declare = snapshot_copy.declare
    monkeypatch.setattr(snapshot_copy, "declare", declare_late)
    copies = start(three, tmp_path / "3ranks", tmp_path / "copy")
    with pytest.raises(SnapshotError, match="rank 1 has given up"):
        copies[0].wait()
    assert not (tmp_path / "copy" / "snapshot.json").exists()


@pytest.mark.usefixtures("impatient")
def test_rank_0_does_not_go_on(tmp_path, three, held_back):
    """The others do not wait for ever."""
    held_back[0] = threading.Event()
    copies = start(three, tmp_path / "3ranks", tmp_path / "copy", wait_for_ranks_s=0.2)
    for copy in copies[1:]:
        with pytest.raises(SnapshotError, match="neither declared the copy complete nor given up"):
            copy.wait()
    held_back[0].set()
    with pytest.raises(SnapshotError, match=r"rank [12] has given up|ranks \[1, 2\] did not"):
        copies[0].wait()
    assert not (tmp_path / "copy").exists()


def test_every_file_of_rank_0_is_progress(tmp_path, three, gate):
    copies = start(three, tmp_path / "3ranks", tmp_path / "copy")
    gate.reached.wait(60)
    directory = tmp_path / "copy" / "rank00000.partial" / "opt0"
    wait_until(directory.is_dir)
    seen = copies[1]._progress_of(0)
    assert seen == copies[1]._progress_of(0)
    (directory / "bucket99999.bin").write_bytes(b"")
    assert copies[1]._progress_of(0) != seen
    (directory / "bucket99999.bin").unlink()
    gate.opened.set()
    for copy in copies:
        copy.wait()
    assert copies[1]._progress_of(0) != seen


def test_older_ones_cannot_be_looked_for(tmp_path, snapshot, monkeypatch, caplog):
    """The copy is complete by then, and stays."""

    def fail(*args: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    SnapshotCopy(snapshot, tmp_path / "copies" / "1").wait()
    monkeypatch.setattr(snapshot_copy, "outdated", fail)
    SnapshotCopy(snapshot, tmp_path / "copies" / "2", keep_last=1).wait()
    assert "could not be looked at: [Errno 13] Permission denied" in caplog.text
    assert verify(tmp_path / "copies" / "2") == []
    monkeypatch.undo()
    SnapshotCopy(snapshot, tmp_path / "copies" / "3", keep_last=1).wait()
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["3"]


@pytest.mark.usefixtures("impatient")
def test_the_declaration_does_not_last(tmp_path, three, monkeypatch):
    """Its name is there when the drive says that it cannot be kept: no part goes before it."""
    let_no_declaration_last(monkeypatch, tmp_path / "copy")
    copies = start(three, tmp_path / "3ranks", tmp_path / "copy")
    all_failed(copies, 0, "Input/output error")


def let_no_declaration_last(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Syncing `path` fails once it holds a declaration."""
    fsync = os.fsync

    def fail(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(path) and (path / "snapshot.json").exists():
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.usefixtures("impatient")
def test_a_part_of_another_snapshot_in_the_target(tmp_path, three, monkeypatch):
    """Rank 0 looks at what the others brought before it declares the copy whole."""
    three.train(2, 3)
    all_well(three.together(lambda e, p: take_snapshot(e, tmp_path / "later", placement=p)))

    complete = SnapshotCopy._complete

    def swap_and_complete(self: SnapshotCopy) -> None:
        wait_until(lambda: not self._missing_ranks())
        shutil.rmtree(self.target / "rank00001")
        shutil.copytree(tmp_path / "later" / "rank00001", self.target / "rank00001")
        complete(self)

    monkeypatch.setattr(SnapshotCopy, "_complete", swap_and_complete)
    copies = start(three, tmp_path / "3ranks", tmp_path / "copy")
    all_failed(copies, 0, "rank00001/opt0 is of another snapshot")


def test_one_rank_s_target_is_taken(tmp_path, three):
    """None of the ranks begins."""
    (tmp_path / "copy" / "rank00001").mkdir(parents=True)
    (tmp_path / "copy" / "rank00001" / "mine").write_text("mine")
    made = three.together(
        lambda e, p: SnapshotCopy(tmp_path / "3ranks", tmp_path / "copy", placement=p)
    )
    assert "rank00001/mine, which is not of a snapshot" in str(made[1])
    for rank in (0, 2):
        assert "failed on rank 1" in str(made[rank])
    assert not being_copied()
    assert (tmp_path / "copy" / "rank00001" / "mine").read_text() == "mine"


def test_a_process_that_ends_leaves_no_copy(tmp_path, snapshot):
    """The thread does not keep a process alive, and half a copy does not look whole."""
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from gds_optimizer.snapshots import SnapshotCopy\n"
        "copy = SnapshotCopy(Path(sys.argv[1]), Path(sys.argv[2]), bytes_per_s=1e-3)\n"
        "while not copy.copied_bytes: time.sleep(0.01)\n"
    )
    target = tmp_path / "copy"
    subprocess.run(
        [sys.executable, "-c", program, snapshot, target],
        check=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert leftovers(target)
    assert clean_incomplete(tmp_path) == [target]
    assert json.loads((snapshot / "snapshot.json").read_text())["step"] == 2

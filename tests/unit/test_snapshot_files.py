"""Which files snapshots link, keep, hand on and remove; and what they never touch."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gds_optimizer import snapshot_files
from gds_optimizer.errors import ConfigError, SnapshotError
from gds_optimizer.mapped_state import freeze_mapped, map_state
from gds_optimizer.snapshot import LINKS_DIRECTORY, Placement, declare, make_directories
from gds_optimizer.snapshot_read import verify
from gds_optimizer.snapshots import (
    SnapshotCopy,
    clean_incomplete,
    clean_links,
    remove_snapshot,
    restore_snapshot,
    take_snapshot,
)
from tests.support.engines import (
    SMALL_BUCKET_BYTES,
    StreamedOptimizer,
    grads_of,
    leftovers,
    mounted_disk,
)
from tests.support.snapshots import (
    build,
    built,
    compare,
    everything,
    hashes,
    inodes,
    root,
    take,
    train,
)


@pytest.fixture
def optimizer(tmp_path: Path) -> Iterator[StreamedOptimizer]:
    with built(root(tmp_path)) as made:
        train(made, 0, 1)
        yield made


def all_step(optimizer: StreamedOptimizer, step: int) -> None:
    """A step that writes every bucket."""
    optimizer.step(grads_of([model.numel() for model in optimizer.models], step))
    optimizer.engine.drain()


def bucket_files(path: Path) -> list[Path]:
    return sorted(path.glob("rank*/*/bucket*.bin"))


def spares(optimizer: StreamedOptimizer) -> list[Path]:
    return sorted(optimizer.store.directories[0].glob("*.spare.bin"))


# ---------------------------------------------------------------------- which ones are kept


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_keep_last(tmp_path, optimizer, keep_last):
    directory = tmp_path / "snapshots"
    for step in range(1, 6):
        all_step(optimizer, step)
        take(optimizer, directory / str(step), keep_last=keep_last)
        kept = range(max(1, step + 1 - keep_last), step + 1)
        assert names(directory) == {str(each) for each in kept}
        for each in kept:
            assert verify(directory / str(each)) == []


def test_older_means_taken_earlier(tmp_path, optimizer):
    """After going back to an earlier step, its snapshots are the last, not the highest steps."""
    directory = tmp_path / "snapshots"
    take(optimizer, directory / "early")
    train(optimizer, 1, 5)
    take(optimizer, directory / "late")
    restore_snapshot({"opt0": optimizer.engine}, directory / "early")
    train(optimizer, 1, 2)
    take(optimizer, directory / "again", keep_last=2)
    assert names(directory) == {"late", "again"}


def test_only_snapshots_beside_it_are_pruned(tmp_path, optimizer):
    """Whole ones that are too many, and what a killed run left, unless something else is in it."""
    directory = tmp_path / "snapshots"
    take(optimizer, directory / "1")
    take(optimizer, directory / "deeper" / "1")
    take(optimizer, tmp_path / "elsewhere")
    for name in ("killed", "noted"):
        (take(optimizer, directory / name) / "snapshot.json").unlink()
    (directory / "noted" / "notes.txt").write_text("mine")
    (directory / "latest").symlink_to("1")
    (directory / "outside").symlink_to(tmp_path / "elsewhere")
    (directory / "data").mkdir()
    (directory / "data" / "snapshot.json").write_text("{}")
    (directory / "notes.txt").write_text("mine")
    take(optimizer, directory / "2")
    assert {"1", "2", "killed"} <= names(directory)
    take(optimizer, directory / "3", keep_last=1)
    kept = {"3", "deeper", "noted", "latest", "outside", "data", "notes.txt"}
    assert names(directory) == kept
    for path in (directory / "3", directory / "deeper" / "1", tmp_path / "elsewhere"):
        assert verify(path) == []


def test_leftovers_that_cannot_be_removed(tmp_path, optimizer, monkeypatch, caplog):
    """Are no reason to fail what is complete."""
    (take(optimizer, tmp_path / "snapshots" / "killed") / "snapshot.json").unlink()

    def refuse(path: Path, rank: int) -> None:
        raise PermissionError("Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(snapshot_files, "remove_rank", refuse)
        path = take(optimizer, tmp_path / "snapshots" / "1", keep_last=1)
        assert "not all leftovers could be removed: Operation not permitted" in caplog.text
        SnapshotCopy(path, tmp_path / "snapshots" / "2", keep_last=2).wait()
        assert f"leftovers in {path.parent} could not be removed" in caplog.text
    assert verify(path) == verify(tmp_path / "snapshots" / "2") == []
    all_step(optimizer, 5)


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keep_last_is_checked(tmp_path, optimizer, keep_last):
    with pytest.raises(SnapshotError, match=f"keep_last is {keep_last}, wanted a whole number"):
        take(optimizer, tmp_path / "snapshot", keep_last=keep_last)
    assert not (tmp_path / "snapshot").exists()


def test_files_of_removed_snapshots_are_written_next(tmp_path, optimizer):
    """In the steady state no block is newly allocated."""
    directory = tmp_path / "snapshots"
    all_step(optimizer, 1)
    take(optimizer, directory / "1", keep_last=1)
    all_step(optimizer, 2)
    used = {}
    for step in range(2, 5):
        retired = inodes(bucket_files(directory / str(step - 1)))
        take(optimizer, directory / str(step), keep_last=1)
        assert sorted(inodes(spares(optimizer))) == sorted(retired)
        linked = inodes(bucket_files(directory / str(step)))
        assert linked == inodes(optimizer.paths)
        all_step(optimizer, step + 1)
        assert sorted(inodes(optimizer.paths)) == sorted(retired)
        assert spares(optimizer) == []
        used[step] = sum(
            path.stat().st_blocks for path in [*optimizer.paths, *bucket_files(directory)]
        )
    assert len(set(used.values())) == 1


def test_the_steady_state_allocates_nothing(tmp_path, optimizer, monkeypatch):
    allocated: list[int] = []
    allocate = os.posix_fallocate
    monkeypatch.setattr(
        os, "posix_fallocate", lambda fd, at, n: (allocated.append(n), allocate(fd, at, n))[1]
    )
    directory, total_bytes = tmp_path / "snapshots", optimizer.layout.total_bytes
    for step in range(1, 6):
        all_step(optimizer, step)
        take(optimizer, directory / str(step), keep_last=1)
        # The first snapshot needs a second set of files, the others take turns with it.
        assert sum(allocated) == total_bytes


def test_more_kept_snapshots_need_a_set_each(tmp_path, optimizer, monkeypatch):
    allocated: list[int] = []
    allocate = os.posix_fallocate
    monkeypatch.setattr(
        os, "posix_fallocate", lambda fd, at, n: (allocated.append(n), allocate(fd, at, n))[1]
    )
    directory, total_bytes = tmp_path / "snapshots", optimizer.layout.total_bytes
    for step in range(1, 7):
        all_step(optimizer, step)
        take(optimizer, directory / str(step), keep_last=3)
    assert sum(allocated) == 3 * total_bytes


def test_buckets_that_were_not_written_stay_linked(tmp_path, optimizer):
    """Their file is in both snapshots and in use; removing the older one must not hand it on."""
    directory = tmp_path / "snapshots"
    sizes = [model.numel() for model in optimizer.models]
    take(optimizer, directory / "1")
    optimizer.step(grads_of(sizes, 1, tuple(range(8))))
    optimizer.engine.drain()
    take(optimizer, directory / "2", keep_last=1)
    files = hashes(directory / "2")
    shared = [path for path in bucket_files(directory / "2") if path.stat().st_nlink > 1]
    assert len(shared) == len(optimizer.paths)
    for step in range(2, 4):
        all_step(optimizer, step)
    assert hashes(directory / "2") == files
    assert verify(directory / "2") == []


def test_a_file_that_the_user_linked_is_not_handed_on(tmp_path, optimizer):
    directory = tmp_path / "snapshots"
    take(optimizer, directory / "1")
    subprocess.run(["cp", "-al", directory / "1", tmp_path / "kept"], check=True)
    files = hashes(tmp_path / "kept")
    for step in range(1, 5):
        all_step(optimizer, step)
        take(optimizer, directory / str(step + 1), keep_last=1)
    all_step(optimizer, 5)
    assert hashes(tmp_path / "kept") == files
    assert verify(tmp_path / "kept") == []


def test_a_file_that_a_writer_still_reads_is_not_handed_on(tmp_path, optimizer):
    """An asynchronous checkpoint maps files that have lost their names."""
    directory = tmp_path / "snapshots"
    all_step(optimizer, 1)
    mapped = map_state(optimizer.engine)
    tensors = mapped.tensors(3)
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    freeze_mapped(optimizer.engine)
    for step in range(2, 6):
        take(optimizer, directory / str(step), keep_last=1)
        all_step(optimizer, step)
    for name, tensor in tensors.items():
        assert tensor.equal(wanted[name]), name


def test_remove_snapshot(tmp_path, optimizer):
    path = take(optimizer, tmp_path / "snapshot")
    all_step(optimizer, 1)
    linked = inodes(bucket_files(path))
    remove_snapshot(path, {"opt0": optimizer.engine})
    assert sorted(inodes(spares(optimizer))) == sorted(linked)
    assert not path.exists()
    path = take(optimizer, path)
    all_step(optimizer, 2)
    remove_snapshot(path)
    assert not path.exists()
    assert spares(optimizer) == []
    remove_snapshot(path)  # once more is no mistake


def test_a_damaged_snapshot_can_be_removed(tmp_path, optimizer):
    for number, damage in enumerate(("manifest.json", "resident.bin", "bucket00001.bin")):
        path = take(optimizer, tmp_path / str(number))
        all_step(optimizer, number)
        os.truncate(path / "rank00000" / "opt0" / damage, 200)
        (path / "rank00000" / "opt0" / "bucket00003.bin").unlink()
        remove_snapshot(path, {"opt0": optimizer.engine})
        assert not path.exists()
        all_step(optimizer, number)


# ---------------------------------------------------------------------- what is in the way


def refused(optimizer: StreamedOptimizer, path: Path, message: str) -> None:
    below = path if path.is_dir() else path.parent
    optimizer.engine.drain()
    before = hashes(below), leftovers(below), everything(optimizer)
    with pytest.raises(SnapshotError, match=message):
        take(optimizer, path)
    assert (hashes(below), leftovers(below)) == before[:2]
    compare(before[2], everything(optimizer))


def test_refused_where_state_is(tmp_path, optimizer):
    directory = root(tmp_path)
    for path in (
        directory,
        directory / "rank00000",
        directory / "rank00000" / "opt0",
        directory / "rank00000" / "opt0" / "snapshot",
    ):
        refused(optimizer, path, "state itself|inside of the optimizer's state")
    (tmp_path / "link").symlink_to(directory)
    for path in (tmp_path / "link", tmp_path / "link" / "rank00000" / "snapshot"):
        refused(optimizer, path, "state itself|inside of the optimizer's state")
    refused(optimizer, directory / LINKS_DIRECTORY / "snapshot", "where links of snapshots are")
    # Beside the state, and above it, there is room.
    for path in (directory / "snapshot", tmp_path):
        take(optimizer, path)
        assert verify(path) == []
    all_step(optimizer, 1)
    remove_snapshot(tmp_path)
    assert names(directory) == {"rank00000", "snapshot"}
    assert verify(directory / "snapshot") == []
    all_step(optimizer, 2)


def test_refused_in_another_run_s_state(tmp_path, optimizer):
    """Also where only other ranks of it are, and where it is dead."""
    other = build(root(tmp_path, "other"), name="rank00007/opt0")
    train(other, 0, 1)
    other.engine.drain()
    refused(optimizer, root(tmp_path, "other"), "a run's optimizer state itself")
    copy = tmp_path / "dead"
    shutil.copytree(root(tmp_path, "other"), copy)
    refused(optimizer, copy, "a run's optimizer state itself")
    other.close()


def test_refused_where_user_files_are(tmp_path, optimizer):
    def place(name: str) -> Path:
        path = tmp_path / name
        path.mkdir()
        return path

    (tmp_path / "file").write_text("mine")
    refused(optimizer, tmp_path / "file", "is no directory")
    (place("a") / "rank00000").write_text("mine")
    refused(optimizer, tmp_path / "a", "rank00000, which is not of a snapshot")
    rank = place("b") / "rank00000"
    rank.mkdir()
    (rank / "data.txt").write_text("mine")
    refused(optimizer, tmp_path / "b", r"rank00000/data.txt, which is not")
    part = place("c") / "rank00000" / "opt0"
    part.mkdir(parents=True)
    (part / "manifest.json").write_text('{"mine": 1}')
    (part / "bucket00000.bin").write_text("mine")
    refused(optimizer, tmp_path / "c", "rank00000/opt0, which is not")
    part = place("d") / "rank00000.partial" / "opt0"
    part.mkdir(parents=True)
    (part / "bucket00000.bin").symlink_to(optimizer.paths[0])
    refused(optimizer, tmp_path / "d", r"rank00000.partial/opt0/bucket00000.bin, which is not")
    (place("e") / "rank00000").symlink_to(root(tmp_path) / "rank00000")
    refused(optimizer, tmp_path / "e", "state itself|rank00000, which is not")
    (place("f") / "rank00000").symlink_to(tmp_path / "b")
    refused(optimizer, tmp_path / "f", "rank00000, which is not of a snapshot")
    # A directory with other files is a place like any other.
    (place("g") / "notes.txt").write_text("mine")
    take(optimizer, tmp_path / "g")
    remove_snapshot(tmp_path / "g")
    assert names(tmp_path / "g") == {"notes.txt"}


def test_refused_where_a_snapshot_is(tmp_path, optimizer):
    path = take(optimizer, tmp_path / "snapshot")
    refused(optimizer, path, "there is a snapshot in .* already")
    (tmp_path / "link").symlink_to(path)
    refused(optimizer, tmp_path / "link", "there is a snapshot in .* already")


def test_what_a_killed_run_left_is_replaced(tmp_path, optimizer):
    path = take(optimizer, tmp_path / "snapshot")
    (path / "snapshot.json").rename(path / "snapshot.json.partial")
    all_step(optimizer, 1)
    wanted = everything(optimizer)
    take(optimizer, path)
    assert not (path / "snapshot.json.partial").exists()
    assert verify(path) == []
    all_step(optimizer, 2)
    restore_snapshot({"opt0": optimizer.engine}, path)
    compare(wanted, everything(optimizer))


def test_removal_leaves_foreign_files(tmp_path, optimizer):
    path = take(optimizer, tmp_path / "snapshot")
    mine = path / "rank00000" / "opt0" / "notes.txt"
    mine.write_text("mine")
    with pytest.raises(SnapshotError, match=r"notes.txt is not of a snapshot: it and .* left"):
        remove_snapshot(path)
    assert verify(path) == []
    mine.unlink()
    (path / "rankings").write_text("mine")
    (path / "rank00001").mkdir()
    (path / "rank00001" / "notes.txt").write_text("mine")
    remove_snapshot(path)
    assert leftovers(path) == ["rank00001", "rank00001/notes.txt", "rankings"]


def test_a_failing_prune_is_no_failed_snapshot(tmp_path, optimizer, caplog):
    directory = tmp_path / "snapshots"
    first = take(optimizer, directory / "1")
    (first / "rank00000" / "opt0" / "notes.txt").write_text("mine")
    all_step(optimizer, 1)
    take(optimizer, directory / "2", keep_last=1)
    assert "snapshots/1 could not be removed" in caplog.text
    assert verify(directory / "1") == verify(directory / "2") == []
    all_step(optimizer, 2)


@pytest.mark.parametrize("name", ["rank00000/opt0", "rank00005/opt0"])
def test_state_is_not_kept_in_a_snapshot(tmp_path, optimizer, name):
    """The store would take the snapshot's files for a dead run's."""
    path = take(optimizer, tmp_path / "snapshot")
    files = hashes(path)
    with pytest.raises(ConfigError, match=r"snapshot holds a snapshot .*name another directory"):
        build(path, name=name)
    (path / "snapshot.json").unlink()
    if name == "rank00000/opt0":
        with pytest.raises(ConfigError, match="holds a snapshot"):
            build(path, name=name)
    del files["snapshot.json"]
    assert hashes(path) == files


# ---------------------------------------------------------------------- leftovers


def test_clean_incomplete(tmp_path, optimizer):
    directory = tmp_path / "snapshots"
    take(optimizer, directory / "whole")
    take(optimizer, directory / "no end")
    (directory / "no end" / "snapshot.json").unlink()
    take(optimizer, directory / "almost")
    (directory / "almost" / "snapshot.json").rename(directory / "almost" / "snapshot.json.partial")
    part = directory / "early" / "rank00000" / "opt0.partial"
    part.mkdir(parents=True)
    os.link(optimizer.paths[0], part / "bucket00000.bin")
    (part / "manifest.json.partial").write_text("{")
    copied = directory / "copied" / "rank00003.partial" / "opt0"
    copied.mkdir(parents=True)
    shutil.copy(optimizer.paths[0], copied / "bucket00000.bin")
    removed = clean_incomplete(directory)
    assert {path.name for path in removed} == {"no end", "almost", "early", "copied"}
    assert names(directory) == {"whole"}
    assert verify(directory / "whole") == []
    assert clean_incomplete(directory) == []
    all_step(optimizer, 1)


def test_clean_incomplete_leaves_everything_else(tmp_path, optimizer):
    """Live and dead state, user files under the same names, links to anywhere."""
    directory = tmp_path / "things"
    directory.mkdir()
    live = build(root(directory, "live"))
    shutil.copytree(root(tmp_path), directory / "dead")
    for pattern in ("rank*/*/lock", "rank*/*/layout.json"):
        for file in (directory / "dead").glob(pattern):
            file.unlink()  # nothing but bucket files is left
    (directory / "empty").mkdir()
    (directory / "beginning" / "rank00000" / "opt0").mkdir(parents=True)
    for number, inside in enumerate(
        ("rank00000/mine.txt", "rank00000/opt0/mine.txt", "rank00000.partial/opt0/mine.txt",
         "rank00000.partial/mine", "rank00000/opt0.partial/manifest.json/mine", "mine/rank00000/a")
    ):  # fmt: skip
        file = directory / f"user{number}" / inside
        file.parent.mkdir(parents=True)
        file.write_text("mine")
    theirs = directory / "manifest" / "rank00000" / "opt0"
    theirs.mkdir(parents=True)
    (theirs / "manifest.json").write_text('{"format": "mine"}')
    take(optimizer, tmp_path / "snapshot")
    (tmp_path / "snapshot" / "snapshot.json").unlink()
    (directory / "link").symlink_to(tmp_path / "snapshot")
    mixed = directory / "mixed"
    shutil.copytree(tmp_path / "snapshot", mixed)
    (mixed / "mine.txt").write_text("mine")
    linked = directory / "linked"
    shutil.copytree(tmp_path / "snapshot", linked)
    (linked / "rank00001").symlink_to(theirs.parent)
    before = leftovers(directory), hashes(directory)
    assert clean_incomplete(directory) == []
    assert (leftovers(directory), hashes(directory)) == before
    assert clean_incomplete(tmp_path) == [tmp_path / "snapshot"]
    assert (leftovers(directory), hashes(directory)) == before
    live.close()


# ---------------------------------------------------------------------- other file systems


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path, 16 * 2**20) as mounted:
        yield mounted


@pytest.fixture
def spread(tmp_path: Path, disk: Path) -> Iterator[StreamedOptimizer]:
    """An optimizer with every other bucket on another file system."""
    with built([root(tmp_path), root(disk)]) as made:
        yield made


def test_buckets_on_other_file_systems(tmp_path, disk, spread):
    """They are linked beside where they are, are never written, and go on from there."""
    optimizer = spread
    train(optimizer, 0, 2)
    path = take(optimizer, tmp_path / "snapshot")
    outside = sorted((disk / "state" / LINKS_DIRECTORY).rglob("bucket*.bin"))
    assert len(outside) == len(optimizer.paths) // 2
    assert sorted(inodes(outside)) == sorted(inodes(optimizer.paths[1::2]))
    assert len(bucket_files(path)) == len(optimizer.paths) - len(outside)
    assert verify(path) == []
    files = hashes(path), hashes(disk / "state" / LINKS_DIRECTORY)
    taken = everything(optimizer)
    train(optimizer, 2, 5)
    end = everything(optimizer)
    assert (hashes(path), hashes(disk / "state" / LINKS_DIRECTORY)) == files
    optimizer.close()
    assert names(disk / "state") == {LINKS_DIRECTORY}
    for directories, bucket_size in (
        ([tmp_path / "state", disk / "state"], SMALL_BUCKET_BYTES),
        ([disk / "state", tmp_path / "state"], SMALL_BUCKET_BYTES),  # all of them copied
        ([tmp_path / "state"], 2 * SMALL_BUCKET_BYTES),
    ):
        with built(directories, bucket_size=bucket_size) as again:
            assert restore_snapshot({"opt0": again.engine}, path) == 2
            compare(taken, everything(again))
            train(again, 2, 5)
            compare(end, everything(again))
    assert (hashes(path), hashes(disk / "state" / LINKS_DIRECTORY)) == files
    SnapshotCopy(path, tmp_path / "copy").wait()
    remove_snapshot(path)
    assert not path.exists()
    assert names(disk / "state") == set()
    assert verify(tmp_path / "copy") == []
    with built(tmp_path / "state") as again:
        restore_snapshot({"opt0": again.engine}, tmp_path / "copy")
        compare(taken, everything(again))


def test_the_steady_state_on_two_file_systems(tmp_path, disk, spread, monkeypatch):
    """Each file system's files are handed on within it."""
    optimizer = spread
    all_step(optimizer, 0)
    take(optimizer, tmp_path / "snapshots" / "0", keep_last=1)
    all_step(optimizer, 1)
    monkeypatch.setattr(os, "posix_fallocate", lambda *a: pytest.fail("allocated"))
    for step in range(1, 4):
        take(optimizer, tmp_path / "snapshots" / str(step), keep_last=1)
        all_step(optimizer, step)
        tokens = list((disk / "state" / LINKS_DIRECTORY).iterdir())
        assert len(tokens) == 1


def test_two_mounts_of_one_file_system(tmp_path):
    """As containers have it: the same device, and yet no links between them."""
    here, there = root(tmp_path), tmp_path / "mount"
    there.mkdir()
    done = subprocess.run(
        ["mount", "--bind", here, there], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"needs to mount ({done.stderr.strip()})")
    try:
        assert here.stat().st_dev == tmp_path.stat().st_dev == there.stat().st_dev
        with built(there) as optimizer:
            train(optimizer, 0, 2)
            path = take(optimizer, tmp_path / "snapshot")
            taken = everything(optimizer)
            assert bucket_files(path) == []
            assert verify(path) == []
            train(optimizer, 2, 4)
            restore_snapshot({"opt0": optimizer.engine}, path)  # links within the mount
            compare(taken, everything(optimizer))
            inside = take(optimizer, there / "snapshot")
        with built(root(tmp_path, "other")) as other:
            for each in (path, inside):  # from another mount, by copies
                restore_snapshot({"opt0": other.engine}, each)
                compare(taken, everything(other))
        remove_snapshot(path)
        assert names(there) == {"snapshot"}
    finally:
        subprocess.run(["umount", there], check=True)


def test_a_file_system_without_links(tmp_path, optimizer, monkeypatch):
    """The failure is the system's own, and leaves nothing."""

    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    before = leftovers(tmp_path)
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(PermissionError):
        take(optimizer, tmp_path / "snapshot")
    monkeypatch.undo()
    assert leftovers(tmp_path) == before
    all_step(optimizer, 1)
    take(optimizer, tmp_path / "snapshot")


def test_links_whose_snapshot_is_gone(tmp_path, disk, spread):
    optimizer = spread
    train(optimizer, 0, 1)
    paths = [take(optimizer, tmp_path / "snapshots" / str(number)) for number in range(3)]
    all_step(optimizer, 1)
    links = disk / "state" / LINKS_DIRECTORY
    assert clean_links(disk / "state") == []
    shutil.rmtree(paths[0])
    paths[1].rename(tmp_path / "snapshots" / "renamed")
    assert len(clean_links(disk / "state")) == 1
    assert len(list(links.iterdir())) == 2
    assert verify(tmp_path / "snapshots" / "renamed") == verify(paths[2]) == []
    # The directory of the snapshots may be on something that is not mounted just now.
    (tmp_path / "snapshots").rename(tmp_path / "away")
    assert clean_links(disk / "state") == []
    (tmp_path / "away").rename(tmp_path / "snapshots")
    assert verify(paths[2]) == []
    # What is not ours, and what was begun.
    (links / "mine").mkdir()
    (links / ("0" * 32)).mkdir()
    (links / ("1" * 32)).mkdir()
    (links / ("1" * 32) / "mine").write_text("mine")
    assert [path.name for path in clean_links(disk / "state")] == ["0" * 32]
    assert (links / ("1" * 32) / "mine").exists()
    assert clean_links(tmp_path / "state") == []
    assert clean_links(tmp_path) == []


def test_a_snapshot_that_was_moved_keeps_its_links(tmp_path, disk, spread):
    """Moving it out of the way of `keep_last` is how one keeps it."""
    optimizer = spread
    train(optimizer, 0, 1)
    first = take(optimizer, tmp_path / "snapshots" / "0")
    (tmp_path / "kept").mkdir()
    first.rename(tmp_path / "kept" / "0")
    for number in (1, 2):
        all_step(optimizer, number)
        take_snapshot({"opt0": optimizer.engine}, tmp_path / "snapshots" / str(number), keep_last=1)
    assert verify(tmp_path / "kept" / "0") == verify(tmp_path / "snapshots" / "2") == []
    # Removed where it is now, its links wait for whoever knows that nothing is elsewhere.
    remove_snapshot(tmp_path / "kept" / "0", {"opt0": optimizer.engine})
    assert len(list((disk / "state" / LINKS_DIRECTORY).iterdir())) == 2
    assert len(clean_links(disk / "state")) == 1
    assert verify(tmp_path / "snapshots" / "2") == []


def test_restoring_what_is_there_already_leaves_nothing(tmp_path, optimizer):
    train(optimizer, 0, 2)
    path = take(optimizer, tmp_path / "snapshot")
    wanted = everything(optimizer)
    restore_snapshot({"opt0": optimizer.engine}, path)
    assert not [name for name in leftovers(tmp_path) if "incoming" in name]
    compare(wanted, everything(optimizer))
    all_step(optimizer, 2)
    assert verify(path) == []
    restore_snapshot({"opt0": optimizer.engine}, path)
    compare(wanted, everything(optimizer))


@pytest.mark.parametrize("keep_last", [0, "2", 1.5, True])
def test_what_cannot_be_kept_is_refused(tmp_path, optimizer, keep_last):
    with pytest.raises(SnapshotError, match=r"keep_last is .*, wanted a whole number"):
        take_snapshot({"opt0": optimizer.engine}, tmp_path / "snapshot", keep_last=keep_last)
    assert not (tmp_path / "snapshot").exists()


@pytest.mark.parametrize(("field", "value"), [("host", "elsewhere"), ("pid", 1)])
def test_links_that_others_may_be_making(tmp_path, disk, spread, field, value):
    optimizer = spread
    path = take(optimizer, tmp_path / "snapshot")
    (note,) = (disk / "state" / LINKS_DIRECTORY).glob("*/snapshot.json")
    content = json.loads(note.read_text())
    note.write_text(json.dumps({**content, field: value}))
    shutil.rmtree(path)
    assert clean_links(disk / "state") == []
    note.write_text(json.dumps(content))
    assert clean_links(disk / "state") == [note.parent]


def test_a_copied_snapshot_does_not_own_links(tmp_path, disk, spread):
    """`cp -r` copies a manifest that names another snapshot's links: they outlive the copy."""
    optimizer = spread
    train(optimizer, 0, 1)
    path = take(optimizer, tmp_path / "snapshot")
    all_step(optimizer, 1)
    shutil.copytree(path, tmp_path / "copied")
    assert verify(tmp_path / "copied") == []
    with contextlib.suppress(SnapshotError):
        remove_snapshot(tmp_path / "copied", {"opt0": optimizer.engine})
    all_step(optimizer, 2)
    assert verify(path) == []


def test_a_failed_snapshot_leaves_no_links(tmp_path, disk, spread, monkeypatch):
    optimizer = spread
    train(optimizer, 0, 1)
    before = leftovers(tmp_path)

    def refuse(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        take(optimizer, tmp_path / "snapshot")
    monkeypatch.undo()
    assert leftovers(tmp_path) == before
    inode = optimizer.paths[0].stat().st_ino
    all_step(optimizer, 1)
    assert optimizer.paths[0].stat().st_ino == inode  # not frozen any more


def test_a_rank_beyond_those_of_the_snapshot_can_remove_it(tmp_path, optimizer):
    """A run with other ranks than those that took a snapshot prunes it whole."""
    path = take(optimizer, tmp_path / "snapshots" / "1", placement=Placement(rank=3, world_size=4))
    assert names(path) == {"rank00003"}  # nobody declared it whole
    (path / "snapshot.json").write_bytes(b"")
    remove_snapshot(path)
    assert not path.exists()


# ---------------------------------------------------------------------- what lasts


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was synced, by path, in order."""
    found: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        fsync(fd)
        found.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", note)
    return found


@pytest.mark.parametrize("what", ["snapshot", "copy"])
def test_every_new_directory_lasts(tmp_path, optimizer, synced, what):
    """However deep: before the snapshot is declared complete, each is synced in its parent."""
    engines = {"opt0": optimizer.engine}
    take_snapshot(engines, tmp_path / "snapshot")
    target = tmp_path / "a" / "b" / "c" / "d" / "e"
    synced.clear()
    if what == "copy":
        SnapshotCopy(tmp_path / "snapshot", target).wait()
    else:
        take_snapshot(engines, target)
    declared = synced.index(str(target / "snapshot.json.partial"))
    for directory in (target, *target.parents):
        if directory == tmp_path.parent:
            break
        assert str(directory) in synced[:declared], directory
    assert verify(target) == []


def test_a_directory_that_was_there_is_synced_too(tmp_path, synced):
    """A run that was killed may have made it, and its name may not last yet."""
    target = tmp_path / "a" / "b"
    target.mkdir(parents=True)
    make_directories(target)
    assert synced == [str(target.parent)]
    make_directories(target / "c" / "d")
    assert synced[1:] == [str(target / "c"), str(target)]


def test_a_new_directory_that_cannot_be_synced(tmp_path, monkeypatch):
    def fail(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("gds_optimizer.snapshot.fsync_directory", fail)
    with pytest.raises(PermissionError):
        make_directories(tmp_path / "a")


class Interruption(BaseException):
    """As Ctrl-C is."""


@pytest.mark.parametrize("failure", [OSError, Interruption])
def test_the_declaration_does_not_last(tmp_path, optimizer, monkeypatch, failure):
    """Its name is there when the drive says that it cannot be kept: no part goes before it."""
    path = tmp_path / "snapshot"
    sync = os.fsync

    def fail(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(path) and (path / "snapshot.json").exists():
            raise failure(errno.EIO, "Input/output error")
        sync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(failure, match="Input/output error"):
        take_snapshot({"opt0": optimizer.engine}, path)
    assert not path.exists()
    path.mkdir()
    with pytest.raises(failure, match="Input/output error"):
        declare(path, {})
    assert not (path / "snapshot.json").exists()
    monkeypatch.undo()
    take_snapshot({"opt0": optimizer.engine}, path)
    assert verify(path) == []


def test_an_older_one_that_cannot_be_looked_at_stays(tmp_path, optimizer, monkeypatch):
    engines = {"opt0": optimizer.engine}
    for name in ("1", "2"):
        take_snapshot(engines, tmp_path / "snapshots" / name)
    is_symlink = Path.is_symlink

    def look(path: Path) -> bool:
        if path.name == "1":
            raise PermissionError(errno.EACCES, "Permission denied")
        return is_symlink(path)

    monkeypatch.setattr(Path, "is_symlink", look)
    take_snapshot(engines, tmp_path / "snapshots" / "3", keep_last=1)
    assert sorted(p.name for p in (tmp_path / "snapshots").iterdir()) == ["1", "3"]

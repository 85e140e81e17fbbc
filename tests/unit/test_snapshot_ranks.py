"""Several ranks take, keep and restore together: what fails on one fails on all, and none hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gds_optimizer import direct_file, snapshot_copy
from gds_optimizer.errors import SnapshotError, StepFailedError, UnsupportedError
from gds_optimizer.snapshot import Placement
from gds_optimizer.snapshot_read import describe, verify
from gds_optimizer.snapshots import (
    SnapshotCopy,
    remove_snapshot,
    restore_snapshot,
    take_snapshot,
)
from tests.support.engines import leftovers
from tests.support.snapshots import World, all_well, compare, flip, hashes, world


@pytest.fixture
def three(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path, 3, sizes=(100, 5000, 2048)) as made:
        made.train(0, 2)
        yield made


def take(three: World, path: Path, **options: Any) -> list[Any]:
    return three.together(lambda e, p: take_snapshot(e, path, placement=p, **options))


def restore(three: World, path: Path) -> list[Any]:
    return three.together(lambda e, p: restore_snapshot(e, path, placement=p))


def check_all_refused(outcomes: list[Any], rank: int, message: str) -> None:
    """`rank` says what it is, the others say where it was."""
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, SnapshotError)
        assert message in str(outcome)
        assert (f"failed on rank {rank}:" in str(outcome)) == (number != rank)


def test_all_or_none(tmp_path, three):
    path = tmp_path / "snapshot"
    assert take(three, path) == [None] * 3
    assert describe(path)["world_size"] == 3
    assert sorted(p.name for p in path.iterdir()) == [
        "rank00000", "rank00001", "rank00002", "snapshot.json"
    ]  # fmt: skip
    assert verify(path) == []


@pytest.mark.parametrize("rank", range(3))
def test_something_is_in_one_rank_s_way(tmp_path, three, rank):
    path = tmp_path / "snapshot"
    (path / f"rank{rank:05d}").mkdir(parents=True)
    (path / f"rank{rank:05d}" / "mine").write_text("mine")
    before = leftovers(path)
    check_all_refused(take(three, path), rank, f"rank{rank:05d}/mine, which is not of a snapshot")
    assert leftovers(path) == before
    three.train(2, 3)
    assert take(three, tmp_path / "other") == [None] * 3


@pytest.mark.parametrize("rank", range(3))
def test_one_rank_s_state_is_torn(tmp_path, three, rank):
    engine = three.engines(rank)["opt0"]
    engine._failure = StepFailedError("torn")
    outcomes = take(three, tmp_path / "snapshot")
    assert isinstance(outcomes[rank], StepFailedError)
    for other in {0, 1, 2} - {rank}:
        assert f"failed on rank {rank}: torn" in str(outcomes[other])
    assert not (tmp_path / "snapshot").exists()


def test_it_cannot_be_declared_whole(tmp_path, three, monkeypatch):
    """Rank 0 fails at the very end: nobody keeps anything, and all can go on."""

    def fail(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("gds_optimizer.snapshots.complete", fail)
    outcomes = take(three, tmp_path / "snapshot")
    assert isinstance(outcomes[0], OSError)
    for other in (1, 2):
        assert "failed on rank 0: [Errno 5] Input/output error" in str(outcomes[other])
    assert not (tmp_path / "snapshot").exists()
    monkeypatch.undo()
    inode = three.optimizers[1]["opt0"].paths[0].stat().st_ino
    three.train(2, 3)
    assert three.optimizers[1]["opt0"].paths[0].stat().st_ino == inode
    assert take(three, tmp_path / "snapshot") == [None] * 3


@pytest.mark.parametrize("rank", range(3))
def test_one_rank_s_part_is_damaged(tmp_path, three, rank):
    """Which shows while data is taken over, when other ranks may hold the snapshot's state."""
    path = tmp_path / "snapshot"
    all_well(take(three, path))
    taken = three.everything()
    three.train(2, 4)
    file = path / f"rank{rank:05d}" / "opt0" / "bucket00001.bin"
    flip(file, 100)
    check_all_refused(restore(three, path), rank, "bucket 1 in")
    for each in range(3):
        with pytest.raises(StepFailedError, match="restore this or another one"):
            three.engines(each)["opt0"].check_usable()
    flip(file, 100)
    assert restore(three, path) == [2] * 3
    compare(taken, three.everything())
    three.train(2, 3)


def damaged_footer(path: Path, rank: int, part: str = "opt0") -> Path:
    file = path / f"rank{rank:05d}" / part / "bucket00001.bin"
    flip(file, file.stat().st_size - 4096 + 60)
    return file


@pytest.mark.parametrize("rank", range(3))
def test_a_refusal_on_one_rank_changes_nothing_on_any(tmp_path, three, rank):
    path = tmp_path / "snapshot"
    all_well(take(three, path))
    three.train(2, 4)
    before = three.everything()
    file = damaged_footer(path, rank)
    check_all_refused(restore(three, path), rank, "bucket 1 in")
    compare(before, three.everything())
    three.train(4, 5)
    flip(file, file.stat().st_size - 4096 + 60)
    assert restore(three, path) == [2] * 3


@pytest.mark.parametrize("bad", ["opt0", "opt1"])
def test_a_refusal_for_one_engine_changes_nothing_of_the_others(tmp_path, bad):
    path = tmp_path / "snapshot"
    with world(tmp_path, 2, sizes=(100, 5000), parts=("opt0", "opt1")) as two:
        two.train(0, 2)
        all_well(take(two, path))
        taken = two.everything()
        two.train(2, 3)
        before = two.everything()
        file = damaged_footer(path, 1, bad)
        check_all_refused(restore(two, path), 1, f"{bad}/bucket00001.bin")
        compare(before, two.everything())
        flip(file, file.stat().st_size - 4096 + 60)
        with two.engines(0)["opt1"].materialized([]):
            check_all_refused_now(restore(two, path))
        compare(before, two.everything())
        two.train(3, 4)
        flip(file, 100)  # a plane
        check_all_refused(restore(two, path), 1, f"{bad}/bucket00001.bin")
        for rank in range(2):
            for engine in two.engines(rank).values():
                with pytest.raises(StepFailedError, match="restore this or another one"):
                    engine.check_usable()
        flip(file, 100)
        assert restore(two, path) == [2, 2]
        compare(taken, two.everything())


def check_all_refused_now(outcomes: list[Any]) -> None:
    """Rank 0 has opened `materialized`."""
    assert isinstance(outcomes[0], UnsupportedError)
    assert "restoring inside `materialized` would be undone" in str(outcomes[0])
    for outcome in outcomes[1:]:
        assert "failed on rank 0: restoring inside `materialized`" in str(outcome)


def test_a_snapshot_of_which_a_rank_is_missing(tmp_path, three):
    path = tmp_path / "snapshot"
    all_well(take(three, path))
    (path / "rank00001").rename(tmp_path / "away")
    check_all_refused(restore(three, path), 1, "rank00001/opt0/manifest.json cannot be read")
    (tmp_path / "two").mkdir()
    with world(tmp_path / "two", 2, sizes=three.sizes) as two:
        for outcome in restore(two, path):
            assert "rank00001/opt0/manifest.json cannot be read" in str(outcome)


def test_only_one_rank_is_copying(tmp_path, three, monkeypatch):
    """All ranks agree on what is pruned, though one of them alone knows of the copy."""
    opened = threading.Event()

    def copy_file(*args: Any, **options: Any) -> None:
        assert opened.wait(60)
        direct_file.copy_file(*args, **options)

    directory = tmp_path / "snapshots"
    all_well(take(three, directory / "2"))
    monkeypatch.setattr(snapshot_copy, "copy_file", copy_file)
    # To the others' eyes nothing is being copied: here a thread's answer is its rank's.
    copy = SnapshotCopy(
        directory / "2", tmp_path / "copy", placement=Placement(rank=1, world_size=3)
    )
    busy = {rank: set() for rank in range(3)} | {1: {(directory / "2").resolve()}}
    ranks: dict[int, int] = {}
    monkeypatch.setattr(
        "gds_optimizer.snapshots.being_copied", lambda: busy[ranks[threading.get_ident()]]
    )

    def take_as(rank: int, step: int) -> None:
        ranks[threading.get_ident()] = rank
        take_snapshot(
            three.engines(rank),
            directory / str(step),
            placement=three.placements[rank],
            keep_last=1,
        )

    for step in (3, 4):
        three.train(step - 1, step)
        all_well(three.ranks.run(lambda rank, step=step: take_as(rank, step)))
        assert sorted(p.name for p in directory.iterdir()) == ["2", str(step)]
    opened.set()
    copy.stop()  # the other ranks are not copying, really
    busy[1] = set()
    three.train(4, 5)
    all_well(three.ranks.run(lambda rank: take_as(rank, 5)))
    assert [p.name for p in directory.iterdir()] == ["5"]


def test_fewer_ranks_prune_what_more_have_taken(tmp_path, three):
    directory = tmp_path / "snapshots"
    all_well(take(three, directory / "three"))
    three.close()
    three.optimizers.clear()
    with world(tmp_path, 1, sizes=three.sizes) as one:
        all_well(restore(one, directory / "three"))
        one.train(2, 3)
        all_well(take(one, directory / "one", keep_last=1))
        assert [p.name for p in directory.iterdir()] == ["one"]
        assert [p.name for p in (directory / "one").iterdir()] == [
            "snapshot.json",
            "rank00000",
        ] or {p.name for p in (directory / "one").iterdir()} == {"snapshot.json", "rank00000"}


def test_one_rank_cannot_remove_its_part(tmp_path, three):
    path = tmp_path / "snapshot"
    all_well(take(three, path))
    (path / "rank00002" / "opt0" / "mine").write_text("mine")
    files = hashes(path)
    outcomes = three.together(lambda e, p: remove_snapshot(path, e, placement=p))
    check_all_refused(outcomes, 2, "is not of a snapshot")
    assert hashes(path) == files
    (path / "rank00002" / "opt0" / "mine").unlink()
    all_well(three.together(lambda e, p: remove_snapshot(path, e, placement=p)))
    assert not path.exists()


# ---------------------------------------------------------------------- keeping


def fail(*args: Any, **options: Any) -> None:
    raise ValueError("unforeseen")


def test_rank_0_cannot_look_for_older_ones(tmp_path, three, monkeypatch):
    """Nobody waits for it, and nothing is left."""
    directory = tmp_path / "snapshots"
    all_well(take(three, directory / "2"))
    three.train(2, 3)
    monkeypatch.setattr("gds_optimizer.snapshots.outdated", fail)
    outcomes = take(three, directory / "3", keep_last=1)
    assert isinstance(outcomes[0], ValueError)
    for other in (1, 2):
        assert isinstance(outcomes[other], SnapshotError)
        assert "failed on rank 0: unforeseen" in str(outcomes[other])
    assert [p.name for p in directory.iterdir()] == ["2"]
    monkeypatch.undo()
    all_well(take(three, directory / "3", keep_last=1))
    assert [p.name for p in directory.iterdir()] == ["3"]


@pytest.mark.parametrize("what", ["remove_declaration", "clean_incomplete", "rank_numbers"])
def test_rank_0_fails_at_pruning_in_an_unforeseen_way(tmp_path, three, monkeypatch, caplog, what):
    """The snapshot is complete on all ranks, and they stay together."""
    directory = tmp_path / "snapshots"
    for step in (2, 3):
        all_well(take(three, directory / str(step)))
        three.train(step, step + 1)
    monkeypatch.setattr(f"gds_optimizer.snapshots.{what}", fail)
    assert take(three, directory / "4", keep_last=1) == [None] * 3
    assert "unforeseen" in caplog.text
    assert verify(directory / "4") == []
    three.train(4, 5)
    monkeypatch.undo()
    all_well(take(three, directory / "5", keep_last=1))
    assert [p.parent.name for p in directory.glob("*/snapshot.json")] == ["5"]

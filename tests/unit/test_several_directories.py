"""State on several drives of unequal speed: shares, order, and the same bits."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import pytest
import torch

from gds_optimizer.engine import Engine
from gds_optimizer.slots import Slot
from gds_optimizer.store import Store
from tests.support import engines, snapshots
from tests.support.engines import adamw, grads_of, pair, streamed
from tests.support.uneven import UnevenBackend

SIZES = (40_000, 3, 12_000)
MORE = (*SIZES, 70, 9_000, 33, 1_000)


@pytest.fixture
def roots(tmp_path):
    made = [tmp_path / name for name in "abc"]
    for root in made:
        root.mkdir()
    return made


def weighted(monkeypatch: pytest.MonkeyPatch, speeds: tuple[float, ...]) -> None:
    """Stores that engines of the tests make know these speeds."""

    def make(*args, **options):
        return Store(*args, speeds=speeds, **options)

    monkeypatch.setattr(engines, "Store", make)


def test_buckets_are_spread_by_speed(roots, monkeypatch):
    weighted(monkeypatch, (3.0, 1.0, 2.0))
    with streamed(roots, sizes=SIZES) as each:
        folders = [path.parents[2].name for path in each.paths]
        count = len(folders)
        assert count > 48
        found = Counter(folders)
        assert found["a"] == pytest.approx(count / 2, abs=2)
        assert found["b"] == pytest.approx(count / 6, abs=2)
        for start in range(count - 12):  # at any stretch
            stretch = Counter(folders[start : start + 12])
            assert 5 <= stretch["a"] <= 7
            assert 1 <= stretch["b"] <= 3


@pytest.mark.thinned
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (9.0, 1.0, 3.0)])
def test_the_bits_are_those_of_the_resident_optimizer(roots, monkeypatch, speeds, slots):
    weighted(monkeypatch, speeds)
    with pair(roots, adamw, SIZES, slots=slots) as both:
        for step in range(5):
            both.step(step, without=(1,) if step == 2 else ())
            both.check()
            assert len(list(roots[0].rglob("bucket*.bin"))) > 2


def visits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Buckets in the order in which they are visited from here on."""
    seen: list[int] = []
    run = engine.pipeline.run

    def noting(order, *, reads, visit, clock, visit_resident=None):
        def noted(index: int, slot: Slot, from_disk: bool):
            seen.append(index)
            return visit(index, slot, from_disk)

        run(order, reads=reads, visit=noted, clock=clock)

    monkeypatch.setattr(engine.pipeline, "run", noting)
    return seen


def test_a_slow_drive_is_not_waited_for_while_others_are_ready(roots, monkeypatch):
    """Its share is too large here, so everything else is done long before."""
    fast, slow = roots[:2]
    backend = UnevenBackend({fast: 0, slow: 100})
    with (
        contextlib.closing(backend),
        streamed([fast, slow], sizes=SIZES, backend=backend) as each,
    ):
        each.step(grads_of(SIZES, 0))
        seen = visits(each.engine, monkeypatch)
        each.step(grads_of(SIZES, 1))
        on_slow = [slow in each.paths[index].parents for index in seen]
        assert sorted(seen) == list(range(len(each.paths)))
        half = len(seen) // 2
        assert sum(on_slow) >= half - 1
        assert sum(on_slow[:half]) < half // 2
        assert all(on_slow[-half // 2 :])


@pytest.mark.thinned
@pytest.mark.parametrize("bucket_size", [12 * 2**10, 12 * 2**12], ids=["same", "reshard"])
@pytest.mark.parametrize("speeds", [(1.0, 5.0), (1.0,), (2.0, 1.0, 1.0)], ids=str)
def test_a_snapshot_goes_into_another_placement(tmp_path, roots, monkeypatch, speeds, bucket_size):
    """Fewer directories, more of them, or other shares, with the same buckets or other ones."""
    weighted(monkeypatch, (5.0, 1.0))
    snapshot = tmp_path / "snapshot"
    with snapshots.built(roots[:2], sizes=MORE) as first:
        snapshots.train(first, 0, 3)
        snapshots.take(first, snapshot)
        wanted = snapshots.everything(first)
        snapshots.train(first, 3, 5)
        later = snapshots.everything(first)
    others = [tmp_path / f"other{number}" for number in range(len(speeds))]
    for root in others:
        root.mkdir()
    weighted(monkeypatch, speeds)
    with snapshots.built(others, sizes=MORE, bucket_size=bucket_size) as second:
        assert snapshots.restore(second, snapshot) == 3
        snapshots.compare(wanted, snapshots.everything(second))
        snapshots.train(second, 3, 5)
        snapshots.compare(later, snapshots.everything(second))


def test_a_full_directory_takes_what_fits(tmp_path, roots):
    with engines.mounted_disk(tmp_path, 2**20 * 8) as small:
        sizes = (4_000_000,)
        with streamed([small, roots[0]], sizes=sizes, bucket_size=12 * 2**16) as each:
            found = Counter(path.parents[2] for path in each.paths)
            assert 2 < found[small] < found[roots[0]]
            each.step(grads_of(sizes, 0))


def test_a_directory_that_others_fill_meanwhile(roots, monkeypatch):
    """What was free when the files were planned is not when they are made."""
    create = Store._create

    def failing(store: Store, path: Path, nbytes: int):
        if roots[0] in path.parents and "00004" in path.name:
            raise store._no_space(path, OSError(28, "No space left on device"))
        return create(store, path, nbytes)

    monkeypatch.setattr(Store, "_create", failing)
    # Directories of one file system are full together, so they are taken for two here.
    stat = {root: number for number, root in enumerate(roots)}
    monkeypatch.setattr(Store, "_device_of", lambda store, directory: stat[directory.parents[1]])
    with streamed(roots[:2], sizes=SIZES) as each:
        found = [path.parents[2] for path in each.paths]
        assert found[:4] == [roots[0], roots[1], roots[0], roots[1]]
        assert set(found[4:]) == {roots[1]}
        each.step(grads_of(SIZES, 0))
        assert torch.isfinite(each.engine.read_state()["p0"]["main"]).all()

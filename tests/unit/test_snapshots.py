"""A run that goes on from a snapshot gives the bits of one that was never interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.checkpoint import load_state_dict, state_dict
from gds_optimizer.errors import (
    ClosedError,
    CorruptBucketError,
    SnapshotError,
    StepFailedError,
    UnsupportedError,
)
from gds_optimizer.mapped_state import map_state
from gds_optimizer.slots import SlotPool
from gds_optimizer.snapshot import Placement
from gds_optimizer.snapshot_read import verify
from gds_optimizer.snapshots import SnapshotCopy, restore_snapshot, take_snapshot
from tests.support import io_backends
from tests.support.engines import SMALL_BUCKET_BYTES, StreamedOptimizer, adamw, grads_of
from tests.support.snapshots import (
    all_well,
    build,
    built,
    compare,
    everything,
    hashes,
    restore,
    root,
    take,
    train,
    world,
)
from tests.unit.test_engine_optimizers import OPTIMIZERS

TAKEN, END = 3, 8
IN_MEMORY = Path("/dev/shm")


class Reference:
    """A run of `END` steps with a snapshot after `TAKEN`, and what it was like at both."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.path = tmp_path / "snapshots" / "taken"
        with built(root(tmp_path, "reference"), **options) as optimizer:
            train(optimizer, 0, TAKEN)
            take(optimizer, self.path)
            self.taken = everything(optimizer)
            self.files = hashes(self.path)
            train(optimizer, TAKEN, END)
            self.end = everything(optimizer)
            self.step_of_an_uninterrupted_run = optimizer.engine.steps

    def check(self, optimizer: StreamedOptimizer, path: Path | None = None) -> None:
        """Restoring and going on is the same run."""
        assert restore(optimizer, path or self.path) == TAKEN
        compare(self.taken, everything(optimizer))
        train(optimizer, TAKEN, END)
        compare(self.end, everything(optimizer))
        assert hashes(path or self.path) == self.files
        assert verify(path or self.path) == []


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"))


def test_the_snapshot_is_not_noticed(tmp_path, reference):
    """The run that it is taken of ends as one without."""
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, END)
        compare(reference.end, everything(optimizer))


def test_files_are_links(tmp_path):
    """Nothing is copied, and what is in them is the state."""
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, 2)
        path = take(optimizer, tmp_path / "snapshot")
        part = path / "rank00000" / "opt0"
        for index, file in enumerate(optimizer.paths):
            assert (part / f"bucket{index:05d}.bin").stat().st_ino == file.stat().st_ino
        assert sorted(p.name for p in path.iterdir()) == ["rank00000", "snapshot.json"]
        others = {p.name for p in part.iterdir()} - {p.name for p in optimizer.paths}
        assert others == {"manifest.json", "resident.bin"}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("kibibytes", [12, 24, 36, 2048], ids=lambda k: f"{k}KiB")
def test_another_bucket_size(tmp_path, reference, kibibytes, slots):
    with built(root(tmp_path), bucket_size=kibibytes * 1024, slots=slots) as optimizer:
        reference.check(optimizer)


def test_from_larger_to_smaller_buckets(tmp_path):
    """The other way round: elements of one saved bucket go to several."""
    reference = Reference(tmp_path, bucket_size=5 * SMALL_BUCKET_BYTES)
    with built(root(tmp_path)) as optimizer:
        reference.check(optimizer)


def test_a_run_that_has_gone_another_way(tmp_path, reference):
    """What an engine holds beforehand does not matter."""
    for kibibytes in (12, 36):
        with built(root(tmp_path), bucket_size=kibibytes * 1024) as optimizer:
            for step in range(40, 45):
                optimizer.step(grads_of([m.numel() for m in optimizer.models], step))
            reference.check(optimizer)
            reference.check(optimizer)


CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.unit.test_snapshots import restore, TAKEN, END
from tests.support.snapshots import built, everything, train
state, path, result, *bucket_sizes = sys.argv[1:]
found = []
for bucket_size in bucket_sizes:
    with built(Path(state), bucket_size=int(bucket_size)) as optimizer:
        assert restore(optimizer, Path(path)) == TAKEN
        found.append(everything(optimizer))
        train(optimizer, TAKEN, END)
        found.append(everything(optimizer))
torch.save(found, result)
"""


def test_a_new_process(tmp_path, reference):
    """With the same bucket size and another."""
    result = tmp_path / "result"
    sizes = [SMALL_BUCKET_BYTES, 2 * SMALL_BUCKET_BYTES]
    command = [sys.executable, "-c", CHILD, root(tmp_path), reference.path, result, *sizes]
    subprocess.run(list(map(str, command)), check=True, cwd=Path(__file__).parents[2])
    found = torch.load(result, weights_only=False)
    assert len(found) == 4
    for number, each in enumerate(found):
        compare(reference.end if number % 2 else reference.taken, each)


@pytest.mark.thinned
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(tmp_path, name):
    """With whatever planes and counters they keep, taken in the middle and at the start."""
    options: dict[str, Any] = {
        "make": OPTIMIZERS[name],
        "bucket_size": 16 * 1024,
        "initialize": "given" if name.startswith("adagrad") else "eager",
    }
    skip = {"sgd_fused": ()}.get(name, (3,))  # see test_engine_optimizers

    def steps(optimizer: StreamedOptimizer, start: int, stop: int) -> None:
        sizes = [model.numel() for model in optimizer.models]
        for step in range(start, stop):
            optimizer.step(grads_of(sizes, step, skip if step < 3 else ()))

    with built(root(tmp_path), **options) as optimizer:
        first = take(optimizer, tmp_path / "0")
        at_first = everything(optimizer)
        steps(optimizer, 0, 2)
        middle = take(optimizer, tmp_path / "2")
        at_middle = everything(optimizer)
        steps(optimizer, 2, 5)
        end = everything(optimizer)
    for bucket_size in (16 * 1024, 48 * 1024):
        with built(root(tmp_path), **{**options, "bucket_size": bucket_size}) as optimizer:
            assert restore(optimizer, middle) == 2
            compare(at_middle, everything(optimizer))
            steps(optimizer, 2, 5)
            compare(end, everything(optimizer))
            assert restore(optimizer, first) == 0
            compare(at_first, everything(optimizer))
            steps(optimizer, 0, 5)
            compare(end, everything(optimizer))


@pytest.mark.parametrize("bucket_size", [SMALL_BUCKET_BYTES, 2 * SMALL_BUCKET_BYTES])
@pytest.mark.parametrize("initialize", ["eager", "lazy"])
def test_before_the_first_step(tmp_path, initialize, bucket_size):
    """Moments that were never written mean zeros, whatever is in the files."""
    with built(root(tmp_path), initialize=initialize) as optimizer:
        path = take(optimizer, tmp_path / "snapshot")
        assert verify(path) == []
        taken = everything(optimizer)
        train(optimizer, 0, 4)
        end = everything(optimizer)
    with built(root(tmp_path), bucket_size=bucket_size) as optimizer:
        train(optimizer, 10, 12)
        assert restore(optimizer, path) == 0
        compare(taken, everything(optimizer))
        train(optimizer, 0, 4)
        compare(end, everything(optimizer))


def test_lazy_state_after_a_step_without_all_gradients(tmp_path):
    """Some buckets hold a main only, and those come from the model at the last moment."""
    with built(root(tmp_path), initialize="lazy") as optimizer:
        sizes = [model.numel() for model in optimizer.models]
        for step in range(2):
            optimizer.step(grads_of(sizes, step, (0, 1, 2, 3, 5, 6, 7)))
        path = take(optimizer, tmp_path / "snapshot")
        taken = everything(optimizer)
        train(optimizer, 2, END)
        end = everything(optimizer)
    for bucket_size in (SMALL_BUCKET_BYTES, 2 * SMALL_BUCKET_BYTES):
        with built(root(tmp_path), bucket_size=bucket_size) as optimizer:
            assert restore(optimizer, path) == 2
            compare(taken, everything(optimizer))
            train(optimizer, 2, END)
            compare(end, everything(optimizer))


def test_unwritten_planes_of_a_reused_file(tmp_path):
    """A file that held other moments before is no reason to take them for these."""
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, 2)
        take(optimizer, tmp_path / "with moments")
        restore(optimizer, take_before_the_first_step(tmp_path))
        train(optimizer, 0, 2)
        wanted = everything(optimizer)
        path = take(optimizer, tmp_path / "again")
    with built(root(tmp_path), bucket_size=2 * SMALL_BUCKET_BYTES) as optimizer:
        restore(optimizer, path)
        compare(wanted, everything(optimizer))


def take_before_the_first_step(tmp_path: Path) -> Path:
    with built(root(tmp_path, "fresh")) as optimizer:
        return take(optimizer, tmp_path / "fresh snapshot")


# ---------------------------------------------------------------------- several engines and ranks


def test_two_engines_share_a_snapshot_and_slots(tmp_path):
    """As the dense and the expert optimizer of a mixture of experts."""
    backend = io_backends.make("host")
    pool = SlotPool(3, 2**16, backend)

    def pair(name: str) -> dict[str, StreamedOptimizer]:
        return {
            "opt0": build(root(tmp_path, name), backend=backend, pool=pool),
            "opt1": build(
                root(tmp_path, name),
                OPTIMIZERS["sgd_momentum"],
                sizes=(700, 5000),
                native=(),
                groups=None,
                backend=backend,
                pool=pool,
                name="rank00000/opt1",
            ),
        }

    def steps(optimizers: dict[str, StreamedOptimizer], start: int, stop: int) -> None:
        train(optimizers["opt0"], start, stop)
        for step in range(start, stop):
            optimizers["opt1"].step(grads_of((700, 5000), 100 + step))

    first = pair("first")
    steps(first, 0, TAKEN)
    take_snapshot({k: v.engine for k, v in first.items()}, tmp_path / "snapshot")
    steps(first, TAKEN, END)
    second = pair("second")
    engines = {name: optimizer.engine for name, optimizer in second.items()}
    assert restore_snapshot(engines, tmp_path / "snapshot") == TAKEN
    steps(second, TAKEN, END)
    for name in first:
        compare(everything(first[name]), everything(second[name]))
    with pytest.raises(SnapshotError, match=r"has opt0, opt1, not opt2: it is of another model"):
        restore_snapshot({"opt2": second["opt0"].engine}, tmp_path / "snapshot")
    for optimizer in (*first.values(), *second.values()):
        optimizer.close()
    pool.close()
    backend.close()


@pytest.mark.thinned(first=1)
@pytest.mark.parametrize("parts", [("opt0",), ("opt0", "opt1")], ids=["one", "chain"])
def test_other_numbers_of_ranks(tmp_path, parts):
    """4 ranks save; 4, 2, 3, 1 and 5 restore, also in other bucket sizes."""
    with world(root(tmp_path, "four"), 4, parts=parts) as four:
        four.train(0, TAKEN)
        path = tmp_path / "snapshot"
        all_well(four.together(lambda e, p: take_snapshot(e, path, placement=p)))
        taken = four.everything()
        four.train(TAKEN, END)
        end = four.everything()
    assert verify(path) == []
    before = hashes(path)
    for size, bucket_size in [(4, 1), (4, 3), (2, 1), (3, 2), (1, 1), (1, 4), (5, 1)]:
        directory = root(tmp_path, f"{size} {bucket_size}")
        options = {"parts": parts, "bucket_size": bucket_size * SMALL_BUCKET_BYTES}
        with world(directory, size, **options) as other:
            steps = all_well(other.together(lambda e, p: restore_snapshot(e, path, placement=p)))
            assert steps == [TAKEN] * size
            compare(taken, other.everything())
            other.train(TAKEN, END)
            compare(end, other.everything())
    assert hashes(path) == before


def test_a_rank_without_parameters(tmp_path):
    """It takes part, has no part of its own, and may get one when there are fewer ranks."""
    sizes = (1, 0, 3000)
    with world(root(tmp_path), 2, sizes=sizes, initialize="eager") as two:
        two.train(0, 2)
        engines = [two.engines(0), {}]
        path = tmp_path / "snapshot"
        # Rank 1 acts as if it had nothing; its elements are then nobody's.
        all_well(
            two.ranks.run(lambda r: take_snapshot(engines[r], path, placement=two.placements[r]))
        )
        assert sorted(p.name for p in path.iterdir()) == ["rank00000", "snapshot.json"]
        assert verify(path) == []
        outcomes = two.together(lambda e, p: restore_snapshot(e, path, placement=p))
        assert all(isinstance(outcome, SnapshotError) for outcome in outcomes)
        assert "does not hold elements 0 to 1 of opt0/p0[0:1]" in str(outcomes[1])
        assert "failed on rank 1" in str(outcomes[0])


def test_the_step_is_that_of_ranks_with_state(tmp_path):
    with world(root(tmp_path), 2) as two:
        two.train(0, 2)
        engines = [{}, two.engines(1)]
        path = tmp_path / "snapshot"
        all_well(
            two.ranks.run(lambda r: take_snapshot(engines[r], path, placement=two.placements[r]))
        )
        assert json.loads((path / "snapshot.json").read_text())["step"] == 2
        steps = two.ranks.run(
            lambda r: restore_snapshot(engines[r], path, placement=two.placements[r])
        )
        assert steps == [2, 2]


def test_another_parallel_position(tmp_path):
    """Parts of other tensor-parallel ranks have the same names and other contents."""
    with built(root(tmp_path)) as optimizer:
        engines = {"opt0": optimizer.engine}
        take_snapshot(
            engines,
            tmp_path / "snapshot",
            placement=Placement(coordinates={"opt0": {"tensor": 2, "model": 1, "dp": 0}}),
        )
        for other in ({"tensor": 2, "model": 0, "dp": 0}, {"tensor": 4, "model": 1, "dp": 0}, {}):
            placement = Placement(coordinates={"opt0": other})
            with pytest.raises(SnapshotError, match="nothing of opt0 for the parallel position"):
                restore_snapshot(engines, tmp_path / "snapshot", placement=placement)


# ---------------------------------------------------------------------- between other things


def test_twice_without_a_step_between(tmp_path, reference):
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, TAKEN)
        one = take(optimizer, tmp_path / "one")
        two = take(optimizer, tmp_path / "two")
        before = hashes(one), hashes(two)
        train(optimizer, TAKEN, END)
        compare(reference.end, everything(optimizer))
        assert (hashes(one), hashes(two)) == before
    for path in (one, two):
        with built(root(tmp_path)) as optimizer:
            restore(optimizer, path)
            compare(reference.taken, everything(optimizer))
            train(optimizer, TAKEN, END)
            compare(reference.end, everything(optimizer))


def test_while_tensors_are_handed_out(tmp_path, reference):
    """A snapshot between a checkpoint's `state_dict` and its writing disturbs neither."""
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, TAKEN)
        handed_out = state_dict(optimizer.engine)
        path = take(optimizer, tmp_path / "snapshot")
        torch.save(handed_out, tmp_path / "saved")
        train(optimizer, TAKEN, END)
        compare(reference.end, everything(optimizer))
        load_state_dict(optimizer.engine, torch.load(tmp_path / "saved", mmap=True))
        compare(reference.taken, everything(optimizer))
        reference.check(optimizer)
        assert verify(path) == []


def test_refused_while_a_checkpoint_is_being_loaded(tmp_path):
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, 2)
        saved = take(optimizer, tmp_path / "before")
        before = everything(optimizer)
        map_state(optimizer.engine, writable=True)
        with pytest.raises(StepFailedError, match="being loaded"):
            take(optimizer, tmp_path / "snapshot")
        assert not (tmp_path / "snapshot").exists()
        restore(optimizer, saved)  # ends that too
        compare(before, everything(optimizer))


def change_mains(optimizer: StreamedOptimizer) -> None:
    with optimizer.engine.materialized(optimizer.mains[7:]):
        optimizer.mains[7].mul_(1.5)


def reload_from_model(optimizer: StreamedOptimizer) -> None:
    for model in optimizer.models:
        model.add_(1)
    optimizer.engine.take_mains_from_model()


def rewrite_mains(optimizer: StreamedOptimizer) -> None:
    optimizer.engine.write_mains({id(optimizer.mains[7]): torch.ones(4097)})


def load_own_state(optimizer: StreamedOptimizer) -> None:
    copy = {"a": state_dict(optimizer.engine)}
    file = optimizer.store.directories[0].parent.parent / "own state"
    torch.save(copy, file)
    load_state_dict(optimizer.engine, torch.load(file, mmap=True)["a"])
    file.unlink()


def commit_mapped(optimizer: StreamedOptimizer) -> None:
    """As a framework's loader does, which brings counters and the model's values itself."""
    mapped = map_state(optimizer.engine, writable=True)
    for index, main in enumerate(optimizer.mains):
        if optimizer.engine.is_streamed(index):
            optimizer.optimizer.state[main] = {"step": torch.tensor(7.0)}
            for tensor in mapped.tensors(index).values():
                tensor.fill_(index)
    mapped.commit()
    optimizer.engine.update_model()


def one_step(optimizer: StreamedOptimizer) -> None:
    train(optimizer, END, END + 1)


def step_without_most_gradients(optimizer: StreamedOptimizer) -> None:
    sizes = [model.numel() for model in optimizer.models]
    optimizer.step(grads_of(sizes, 99, (0, 1, 2, 3, 4, 5, 7, 8)))


def another_snapshot(optimizer: StreamedOptimizer) -> None:
    root = optimizer.store.directories[0].parent.parent
    take(optimizer, root / "other" / str(len(list(root.glob("other/*")))))


CHANGES: list[Callable[[StreamedOptimizer], None]] = [
    one_step,
    step_without_most_gradients,
    change_mains,
    reload_from_model,
    rewrite_mains,
    load_own_state,
    commit_mapped,
    another_snapshot,
]


@pytest.mark.thinned
@pytest.mark.parametrize("first", CHANGES)
@pytest.mark.parametrize("origin", ["taken", "restored"])
def test_linked_files_are_never_written(tmp_path, first, origin):
    """Whatever comes first after a snapshot was taken or restored, and whatever follows."""
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, 2)
        path = take(optimizer, tmp_path / "snapshot")
        files = hashes(path)
        if origin == "restored":
            train(optimizer, 2, 4)
            restore(optimizer, path)
        for change in (first, *CHANGES, *reversed(CHANGES)):
            change(optimizer)
            optimizer.engine.drain()
            assert hashes(path) == files, change.__name__
            everything(optimizer)  # which checks every bucket
    assert hashes(path) == files  # closing removes names of the store only


@pytest.mark.parametrize("change", [change_mains, reload_from_model, rewrite_mains, commit_mapped])
def test_a_snapshot_after_changes_between_steps(tmp_path, change):
    """It holds what the next step would start from."""
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, 2)
        change(optimizer)
        path = take(optimizer, tmp_path / "snapshot")
        train(optimizer, 2, 4)
        wanted = everything(optimizer)
    for bucket_size in (SMALL_BUCKET_BYTES, 3 * SMALL_BUCKET_BYTES):
        with built(root(tmp_path), bucket_size=bucket_size) as optimizer:
            restore(optimizer, path)
            train(optimizer, 2, 4)
            compare(wanted, everything(optimizer))


def test_not_inside_materialized(tmp_path, reference):
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, 1)
        with (
            optimizer.engine.materialized(optimizer.mains[3:4]),
            pytest.raises(UnsupportedError, match="outside of it"),
        ):
            restore(optimizer, reference.path)
        reference.check(optimizer)


def test_without_slots(tmp_path, reference):
    """A snapshot needs none; restoring does, and says so before anything is given up."""
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, TAKEN)
        optimizer.engine.drain()
        optimizer.pool.suspend()
        take(optimizer, tmp_path / "snapshot")
        with pytest.raises(ClosedError, match="given back"):
            restore(optimizer, reference.path)
        optimizer.pool.resume()
        compare(reference.taken, everything(optimizer))
        train(optimizer, TAKEN, END)
        compare(reference.end, everything(optimizer))


def test_after_close(tmp_path, reference):
    with built(root(tmp_path)) as optimizer:
        pass
    with pytest.raises(ClosedError):
        take(optimizer, tmp_path / "snapshot")
    with pytest.raises(ClosedError):
        restore(optimizer, reference.path)
    assert not (tmp_path / "snapshot").exists()


# ---------------------------------------------------------------------- failures of the state


def test_a_torn_state_is_not_taken_and_can_be_restored(tmp_path, reference):
    """After a failed step a snapshot in the same process brings everything back."""
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, 2)
        optimizer.engine.drain()
        optimizer.engine.forget_slots()
        os.truncate(optimizer.paths[5], 4096)
        with pytest.raises(StepFailedError, match="resized"):
            train(optimizer, 2, 3)
        with pytest.raises(StepFailedError):
            take(optimizer, tmp_path / "snapshot")
        assert not (tmp_path / "snapshot").exists()
        reference.check(optimizer)


@pytest.mark.parametrize("bucket_size", [SMALL_BUCKET_BYTES, 2 * SMALL_BUCKET_BYTES])
def test_a_restore_that_failed_halfway(tmp_path, reference, bucket_size, monkeypatch):
    """The engine accepts nothing but another restore."""
    with built(root(tmp_path), bucket_size=bucket_size) as optimizer:
        train(optimizer, 0, 1)

        def fail() -> None:
            raise CorruptBucketError("bucket 3 is not what it was")

        monkeypatch.setattr(optimizer.engine, "update_model", fail)
        with pytest.raises(SnapshotError, match="damaged: bucket 3 is not"):
            restore(optimizer, reference.path)
        monkeypatch.undo()
        for use in (
            lambda: train(optimizer, 1, 2),
            optimizer.engine.read_state,
            lambda: take(optimizer, tmp_path / "snapshot"),
            lambda: state_dict(optimizer.engine),
        ):
            with pytest.raises(StepFailedError, match="did not finish: restore this or another"):
                use()
        reference.check(optimizer)


def test_a_snapshot_that_does_not_fit_changes_nothing(tmp_path, reference):
    refusals = [
        ({"make": OPTIMIZERS["sgd_momentum"]}, "of the optimizer AdamW, not SGD"),
        (
            {"make": OPTIMIZERS["adamw_amsgrad"]},
            "keeps .*max_exp_avg_sq.*: build it with the same",
        ),
        ({"groups": None}, "has 2 parameter groups, the optimizer 1"),
        ({"groups": {6: {}}}, "p4 is in parameter group 1 of the snapshot .* group 0 of the"),
        ({"sizes": (1, 64, 100, 5000, 0, 17, 1024, 4097, 10301)}, "does not hold .* of p8"),
        ({"native": (1,)}, "p6"),
        ({"native": (1, 6, 7)}, "p7"),
    ]
    for number, (options, message) in enumerate(refusals):
        options = {"bucket_size": 16 * 1024, **options}
        with built(root(tmp_path, str(number)), **options) as optimizer:
            for step in range(2):
                optimizer.step(grads_of([m.numel() for m in optimizer.models], step))
            before = everything(optimizer)
            with pytest.raises(SnapshotError, match=message):
                restore(optimizer, reference.path)
            compare(before, everything(optimizer))
            optimizer.step(grads_of([m.numel() for m in optimizer.models], 2))


def test_tensors_in_groups_stay_the_same_objects(tmp_path):
    """Schedulers and captured graphs hold them."""

    def make(groups: Any) -> torch.optim.Optimizer:
        return adamw([{**group, "lr": torch.tensor(1e-2)} for group in groups], foreach=False)

    with built(root(tmp_path), make, groups=None) as optimizer:
        lr = optimizer.optimizer.param_groups[0]["lr"]
        path = take(optimizer, tmp_path / "snapshot")
        saved = state_dict(optimizer.engine)
        for bring_back in (
            lambda: restore(optimizer, path),
            lambda: load_state_dict(optimizer.engine, saved),
        ):
            lr.fill_(3.0)
            bring_back()
            assert optimizer.optimizer.param_groups[0]["lr"] is lr
            assert lr.item() == torch.tensor(1e-2).item()


def test_copies_on_another_file_system(tmp_path, reference):
    if not IN_MEMORY.is_dir() or IN_MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm as another file system")
    target = IN_MEMORY / f"snapshot-{os.getpid()}"
    try:
        SnapshotCopy(reference.path, target).wait()
        assert verify(target) == []
        for bucket_size in (SMALL_BUCKET_BYTES, 2 * SMALL_BUCKET_BYTES):
            with built(root(tmp_path), bucket_size=bucket_size) as optimizer:
                train(optimizer, 0, 1)
                files = hashes(target)
                assert restore(optimizer, target) == TAKEN
                compare(reference.taken, everything(optimizer))
                train(optimizer, TAKEN, END)
                compare(reference.end, everything(optimizer))
                assert hashes(target) == files
    finally:
        subprocess.run(["rm", "-r", str(target)], check=True)


def test_after_a_restore_from_a_copy_nothing_is_linked(tmp_path, reference):
    """What was copied in is the store's own: a further snapshot links it, and it is intact."""
    if not IN_MEMORY.is_dir() or IN_MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm as another file system")
    target = IN_MEMORY / f"snapshot-{os.getpid()}"
    try:
        SnapshotCopy(reference.path, target).wait()
        with built(root(tmp_path)) as optimizer:
            train(optimizer, 0, 1)
            first = take(optimizer, tmp_path / "first")
            files = hashes(first)
            restore(optimizer, target)  # onto frozen files
            assert hashes(first) == files
            again = take(optimizer, tmp_path / "again")
            train(optimizer, TAKEN, END)
            assert hashes(first) == files
            compare(reference.end, everything(optimizer))
            reference.check(optimizer)
            restore(optimizer, again)
            compare(reference.taken, everything(optimizer))
    finally:
        subprocess.run(["rm", "-r", str(target)], check=True)

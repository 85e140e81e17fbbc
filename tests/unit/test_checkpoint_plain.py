"""The state of an engine as a dictionary: saved and loaded by torch, without unpickling code."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer import mapped_state
from gds_optimizer.checkpoint import load_state_dict, state_dict
from gds_optimizer.errors import (
    CorruptBucketError,
    SnapshotError,
    StepFailedError,
    UnsupportedError,
)
from tests.support.engines import SMALL_BUCKET_BYTES, StreamedOptimizer, adamw, grads_of, same_bits
from tests.support.snapshots import FROZEN, built, compare, everything, flip, root, take, train
from tests.unit.test_engine_optimizers import OPTIMIZERS

SAVED, END = 3, 7


@pytest.mark.parametrize("use", ["save", "load", "snapshot"])
def test_the_whole_state_is_left_alone_inside_materialized(tmp_path, use):
    """What was loaded would be undone, and what is saved would miss the changes."""
    with built(root(tmp_path), native=()) as optimizer:
        train(optimizer, 0, SAVED)
        path = save(optimizer, tmp_path / "state.pt")
        train(optimizer, SAVED, END)
        wanted = everything(optimizer)
        uses = {
            "save": lambda: state_dict(optimizer.engine),
            "load": lambda: load_state_dict(optimizer.engine, torch.load(path, weights_only=True)),
            "snapshot": lambda: take(optimizer, tmp_path / "snapshot"),
        }
        with (
            optimizer.engine.materialized(optimizer.mains),
            pytest.raises(UnsupportedError, match="inside `materialized`"),
        ):
            uses[use]()
        compare(wanted, everything(optimizer))


def save(optimizer: StreamedOptimizer, path: Path) -> Path:
    torch.save(state_dict(optimizer.engine), path)
    return path


def load(optimizer: StreamedOptimizer, path: Path, **options: Any) -> None:
    load_state_dict(optimizer.engine, torch.load(path, weights_only=True, **options))


class Reference:
    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "saved.pt"
        with built(root(tmp_path)) as optimizer:
            train(optimizer, 0, SAVED)
            save(optimizer, self.path)
            self.saved = everything(optimizer)
            train(optimizer, SAVED, END)
            self.end = everything(optimizer)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"))


# ---------------------------------------------------------------------- round trips


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(("kibibytes", "slots"), [(12, 3), (36, 1), (2048, 2)])
def test_what_goes_on_is_the_same_run(tmp_path, reference, kibibytes, slots, mmap):
    """With other buckets and slots, whatever was there before."""
    options = {"bucket_size": kibibytes * 1024, "slots": slots}
    with built(root(tmp_path), **options) as optimizer:
        for steps in (2, 0):
            for step in range(steps):
                optimizer.step(grads_of([m.numel() for m in optimizer.models], 40 + step))
            load(optimizer, reference.path, mmap=mmap)
            compare(reference.saved, everything(optimizer))
            train(optimizer, SAVED, END)
            compare(reference.end, everything(optimizer))


def test_saving_is_not_noticed(tmp_path, reference):
    with built(root(tmp_path)) as optimizer:
        for step in range(END):
            save(optimizer, tmp_path / "saved.pt")
            train(optimizer, step, step + 1)
        compare(reference.end, everything(optimizer))


CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.support.snapshots import built, everything, train
from tests.unit.test_checkpoint_plain import END, SAVED, load
with built(Path(sys.argv[1])) as optimizer:
    load(optimizer, Path(sys.argv[2]), mmap=True)
    train(optimizer, SAVED, END)
    torch.save(everything(optimizer), sys.argv[3])
"""


def test_a_new_process(tmp_path, reference):
    arguments = [root(tmp_path), reference.path, tmp_path / "result"]
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    compare(reference.end, torch.load(tmp_path / "result", weights_only=False))


@pytest.mark.thinned(first=1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(tmp_path, name):
    options: dict[str, Any] = {
        "make": OPTIMIZERS[name],
        "bucket_size": 32 * 1024,
        "initialize": "given" if name.startswith("adagrad") else "eager",
    }
    skip = () if name == "sgd_fused" else (3,)  # see test_engine_optimizers

    def steps(optimizer: StreamedOptimizer, start: int, stop: int) -> None:
        sizes = [model.numel() for model in optimizer.models]
        for step in range(start, stop):
            optimizer.step(grads_of(sizes, step, skip if step < 3 else ()))

    with built(root(tmp_path), **options) as optimizer:
        steps(optimizer, 0, 2)
        path = save(optimizer, tmp_path / "saved.pt")
        saved = everything(optimizer)
        steps(optimizer, 2, 4)
        end = everything(optimizer)
    with built(root(tmp_path), **{**options, "bucket_size": 48 * 1024}) as optimizer:
        load(optimizer, path)
        compare(saved, everything(optimizer))
        steps(optimizer, 2, 4)
        compare(end, everything(optimizer))


@pytest.mark.parametrize("initialize", ["eager", "lazy"])
def test_before_the_first_step(tmp_path, initialize):
    with built(root(tmp_path), initialize=initialize) as optimizer:
        path = save(optimizer, tmp_path / "saved.pt")
        train(optimizer, 0, 3)
        end = everything(optimizer)
    with built(root(tmp_path), bucket_size=2 * SMALL_BUCKET_BYTES) as optimizer:
        train(optimizer, 10, 12)
        load(optimizer, path)
        assert optimizer.engine.steps == 0
        train(optimizer, 0, 3)
        compare(end, everything(optimizer))


# ---------------------------------------------------------------------- what it is like


def test_the_dictionary(tmp_path):
    """Plain data and 1-D tensors, which show the files."""
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, SAVED)
        found = state_dict(optimizer.engine)
        assert (found["format"], found["version"]) == ("gds-optimizer state", 1)
        assert found["step"] == SAVED
        assert list(found["shards"]) == [f"p{index}" for index in range(len(optimizer.models))]
        assert [group["shards"] for group in found["groups"]] == [
            ["p0", "p1", "p2", "p3"],
            ["p4", "p5", "p6", "p7", "p8"],
        ]
        assert found["groups"][1]["options"]["weight_decay"] == 0.1
        for index, (shard, entry) in enumerate(found["shards"].items()):
            numel = optimizer.models[index].numel()
            # One never had a gradient, one not yet, and one is empty.
            assert entry["has_state"] == (index not in (*FROZEN, 3, 4)), shard
            for tensor in entry["planes"].values():
                assert (tensor.shape, tensor.dtype) == ((numel,), torch.float32)
            if not entry["has_state"]:
                assert not any(entry["planes"][key].any() for key in ("exp_avg", "exp_avg_sq"))
        state_of = optimizer.engine.read_state()
        for key in ("main", "exp_avg", "exp_avg_sq"):
            assert same_bits(found["shards"]["p8"]["planes"][key], state_of["p8"][key])


LARGE_NUMEL = 4 * 2**20
MEMORY_CHILD = f"""
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from gds_optimizer.checkpoint import load_state_dict, state_dict
from tests.support.snapshots import build

def own_bytes():
    \"\"\"Memory that belongs to no file.\"\"\"
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

state, path = map(Path, sys.argv[1:3])
options = dict(sizes=({LARGE_NUMEL},) * 2, native=(), groups=None, bucket_size=2**20)
options["moments"] = dict(moment_dtype=sys.argv[3])
optimizer = build(state, **options)
optimizer.step([torch.ones({LARGE_NUMEL})] * 2)
optimizer.engine.drain()
before = own_bytes()
saved = state_dict(optimizer.engine)
for entry in saved["shards"].values():
    for tensor in entry["planes"].values():
        tensor.sum()
print(own_bytes() - before)
torch.save(saved, path)
del saved
before = own_bytes()
loaded = torch.load(path, mmap=True, weights_only=True)
load_state_dict(optimizer.engine, loaded)
print(own_bytes() - before)
optimizer.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("moments", "share"), [("fp32", 8), ("int8", 3)])
def test_neither_direction_holds_the_state(tmp_path, moments, share):
    """Decoding takes room for parts of a few buckets, however large the state is."""
    path = tmp_path / "saved.pt"
    command = [sys.executable, "-c", MEMORY_CHILD, str(root(tmp_path)), str(path), moments]
    printed = subprocess.run(
        command, check=True, cwd=Path(__file__).parents[2], capture_output=True, text=True
    ).stdout
    state_bytes = 2 * 12 * LARGE_NUMEL
    assert state_bytes < path.stat().st_size < 1.01 * state_bytes
    for grown_bytes in map(int, printed.split()):
        assert grown_bytes < state_bytes / share, printed


# ---------------------------------------------------------------------- refusals


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved.pop(key)


def of_other_shards(saved: dict[str, Any]) -> None:
    saved["shards"]["p9"] = saved["shards"].pop("p8")


def of_other_groups(saved: dict[str, Any]) -> None:
    saved["groups"].pop()


def with_a_shard_in_another_group(saved: dict[str, Any]) -> None:
    saved["groups"][0]["shards"].append(saved["groups"][1]["shards"].pop(0))


def of_another_length(saved: dict[str, Any]) -> None:
    planes = saved["shards"]["p8"]["planes"]
    planes["exp_avg"] = planes["exp_avg"][:-1]


def of_another_dtype(saved: dict[str, Any]) -> None:
    planes = saved["shards"]["p8"]["planes"]
    planes["exp_avg"] = planes["exp_avg"].to(torch.bfloat16)


def without_a_plane(saved: dict[str, Any]) -> None:
    del saved["shards"]["p8"]["planes"]["exp_avg_sq"]


def with_a_plane_more(saved: dict[str, Any]) -> None:
    planes = saved["shards"]["p8"]["planes"]
    planes["max_exp_avg_sq"] = planes["exp_avg_sq"]


def without_the_main_of_a_frozen_shard(saved: dict[str, Any]) -> None:
    del saved["shards"]["p1"]["planes"]["main"]


REFUSALS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (without("format"), "no state of an engine: wanted format 'gds-optimizer state'.* got None"),
    (lambda saved: saved.update(version=2), "version 1, got 'gds-optimizer state' version 2"),
    (of_other_shards, "2 shards are in one of the two only: p8"),
    (of_other_groups, r"1 groups \(wanted 2\)"),
    (with_a_shard_in_another_group, "p4 is in parameter group 0 of the state or"),
    (of_another_length, "exp_avg of p8 has 10299 elements of torch.float32 in the state, wanted"),
    (of_another_dtype, "exp_avg of p8 has 10300 elements of torch.bfloat16 in the state, wanted"),
    (without_a_plane, "the state has exp_avg, main of p8, wanted exp_avg, exp_avg_sq, main"),
    (with_a_plane_more, "the state has exp_avg, exp_avg_sq, main, max_exp_avg_sq of p8, wanted"),
    (without_the_main_of_a_frozen_shard, "of p1, wanted .*main"),
]


def test_what_does_not_fit_changes_nothing(tmp_path, reference):
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, 2)
        before = everything(optimizer)
        for change, message in REFUSALS:
            saved = torch.load(reference.path, weights_only=True)
            change(saved)
            with pytest.raises(SnapshotError, match=message):
                load_state_dict(optimizer.engine, saved)
            compare(before, everything(optimizer))
        for other in (None, [], 7):
            with pytest.raises(SnapshotError, match="no state of an engine"):
                load_state_dict(optimizer.engine, other)  # type: ignore[arg-type]
        train(optimizer, 2, 3)


def test_a_dictionary_that_steps_have_changed_is_refused(tmp_path):
    """Its tensors are the files, so what they show is no longer what they were taken for."""
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, SAVED)
        state = state_dict(optimizer.engine)
        load_state_dict(optimizer.engine, state)
        cloned = copy.deepcopy(state)
        wanted = everything(optimizer)
        train(optimizer, SAVED, END)
        later = everything(optimizer)
        with pytest.raises(SnapshotError, match=f"step {SAVED} shows .* hold step {END} by now"):
            load_state_dict(optimizer.engine, state)
        compare(later, everything(optimizer))
        load_state_dict(optimizer.engine, cloned)
        compare(wanted, everything(optimizer))


def test_a_damaged_bucket_is_not_saved(tmp_path):
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, 2)
        optimizer.engine.drain()
        flip(optimizer.paths[9], 5000)
        optimizer.engine.forget_slots()
        with pytest.raises(CorruptBucketError, match=f"bucket 9 in {optimizer.paths[9]}"):
            state_dict(optimizer.engine)
        flip(optimizer.paths[9], 5000)
        save(optimizer, tmp_path / "saved.pt")


def test_a_load_that_fails_halfway(tmp_path, reference, monkeypatch):
    """Nothing but another load is accepted: part of the state is in the files by then."""
    with built(root(tmp_path)) as optimizer:
        train(optimizer, 0, 2)

        def fail(self: mapped_state.MappedState) -> None:
            raise OSError("Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(mapped_state.MappedState, "commit", fail)
            with pytest.raises(OSError, match="Input/output error"):
                load(optimizer, reference.path)
        with pytest.raises(StepFailedError, match="being loaded"):
            train(optimizer, 2, 3)
        with pytest.raises(StepFailedError, match="being loaded"):
            state_dict(optimizer.engine)
        load(optimizer, reference.path)
        compare(reference.saved, everything(optimizer))


def test_tensors_of_a_step_counter_stay_where_they_were(tmp_path):
    """A capturable optimizer's counters and rates are tensors, and other code holds the rates."""

    def make(groups: Any) -> torch.optim.Optimizer:
        return adamw([{**group, "lr": torch.tensor(1e-2)} for group in groups], foreach=False)

    with built(root(tmp_path), make, groups=None) as optimizer:
        sizes = [model.numel() for model in optimizer.models]
        optimizer.step(grads_of(sizes, 0))
        path = save(optimizer, tmp_path / "saved.pt")
        saved = everything(optimizer)
        lr = optimizer.optimizer.param_groups[0]["lr"]
        lr.fill_(3.0)
        optimizer.step(grads_of(sizes, 1))
        load(optimizer, path, map_location="cpu")
        assert optimizer.optimizer.param_groups[0]["lr"] is lr
        compare(saved, everything(optimizer))

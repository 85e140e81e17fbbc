"""Snapshots of Megatron's optimizers: what goes on from one is the run that it was taken of.

In new processes, with other buckets and slots, and on another number of data-parallel ranks. What
goes on there is compared with a run that loads Megatron's own checkpoint of the same moment.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.errors import SnapshotError, UnsupportedError
from gds_optimizer.megatron import copy_snapshot, restore, snapshot
from gds_optimizer.megatron.tiny_gpt import TinyGptConfig
from gds_optimizer.snapshot_read import all_parts, verify
from tests.megatron import TURN, marks_of
from tests.megatron.checkpointing import (
    MODEL_SHAPED,
    Checkpoint,
    Context,
    Load,
    Look,
    Run,
    RunResult,
    Save,
    assemble,
    compare_moments,
    compare_resumed,
    perform_all,
)
from tests.megatron.forking import run_forked_ranks
from tests.megatron.harness import compare_records
from tests.megatron.streaming import SMALL_BUCKET_BYTES, Streaming
from tests.support.snapshots import hashes

pytestmark = pytest.mark.megatron

TAKEN, STEPS = 4, 7
BUCKET_BYTES = 3 * SMALL_BUCKET_BYTES
STREAMING = Streaming(bucket_size=BUCKET_BYTES)
OTHER_STREAMING = Streaming(bucket_size=2 * SMALL_BUCKET_BYTES, slots=1, init="lazy")


def gpt(**options: Any) -> TinyGptConfig:
    return TinyGptConfig(
        **{"layers": 1, "hidden": 48, "schedule": "changing", "steps": STEPS, **options}
    )


# ---------------------------------------------------------------------- actions


def path_of(context: Context, name: str) -> Path:
    return context.directory / "snapshots" / name


@dataclass(frozen=True)
class Take:
    name: str
    keep_last: int | None = None

    def __call__(self, context: Context) -> None:
        path = path_of(context, self.name)
        snapshot(context.optimizer, path, keep_last=self.keep_last)
        context.result.notes[f"files of {self.name}"] = hashes(path)


@dataclass(frozen=True)
class Copy:
    """Begin to copy; the run goes on, and the last look waits for it."""

    name: str
    to: str

    def __call__(self, context: Context) -> None:
        source, target = path_of(context, self.name), path_of(context, self.to)
        context.result.notes["copy"] = copy_snapshot(context.optimizer, source, target)


@dataclass(frozen=True)
class AwaitCopy:
    def __call__(self, context: Context) -> None:
        context.result.notes.pop("copy").wait()
        torch.distributed.barrier()


@dataclass(frozen=True)
class Restore:
    """The whole state, into whatever there is; `expected` is the step that is said."""

    name: str
    expected: int

    def __call__(self, context: Context) -> None:
        path = path_of(context, self.name)
        torch.distributed.barrier()
        before = hashes(path)
        torch.distributed.barrier()
        assert restore(context.optimizer, path) == self.expected
        assert hashes(path) == before


@dataclass(frozen=True)
class RestoreRefused:
    name: str

    def __call__(self, context: Context) -> None:
        try:
            restore(context.optimizer, path_of(context, self.name))
        except SnapshotError as error:
            context.result.notes["refusal"] = str(error)


@dataclass(frozen=True)
class NotStreamed:
    """None of the three does anything for an optimizer whose state is resident."""

    kept: str

    def __call__(self, context: Context) -> None:
        kept = path_of(context, self.kept)
        torch.distributed.barrier()
        before = hashes(kept)
        torch.distributed.barrier()
        for call in (
            lambda: snapshot(context.optimizer, kept.parent / "resident", keep_last=1),
            lambda: restore(context.optimizer, kept),
            lambda: copy_snapshot(context.optimizer, kept, kept.parent / "resident"),
        ):
            with pytest.raises(UnsupportedError, match=r"not streamed\): build .*`attach`"):
                call()
        torch.distributed.barrier()
        assert hashes(kept) == before
        assert not (kept.parent / "resident").exists()
        context.result.notes["refused"] = 3


def resumed(config: TinyGptConfig, name: str, streaming: Streaming, at: int = TAKEN) -> Run:
    return Run(
        config=replace(config, first_step=at),
        streaming=streaming,
        actions={at: (Restore(name, at), Look())},
    )


# ---------------------------------------------------------------------- runs


ONE_RANK: dict[str, TinyGptConfig] = {
    "adamw": gpt(layers=2),
    "fused_frozen": gpt(inner_optimizer="fused", swiglu=True, frozen=("embedding", "fc1")),
    "mixed_moe": gpt(mixed_dtype=True, experts=4),
    "bf16_gradients": gpt(grad_reduce_in_fp32=False, overlap=True, ddp_bucket_size=4096),
}
RESTORED = [(TAKEN, "same"), (TAKEN, "other"), (0, "other"), (TAKEN, "mixed")]
PARALLEL: dict[str, TinyGptConfig] = {
    "tp": gpt(tensor_parallel=2, swiglu=True),
    "pp": gpt(pipeline_parallel=2, tied_embeddings=True, layers=2),
    "ep": gpt(experts=4, expert_parallel=2),
    "dp_small": gpt(
        layers=2,
        frozen=("embedding", "output", "linear", "layers.0", "final", "input", "norm.bias"),
    ),
}
WIDE: dict[str, TinyGptConfig] = {
    "dp_moe": gpt(experts=4, mixed_dtype=True, overlap=True, ddp_bucket_size=4096),
    "dp_fused": gpt(inner_optimizer="fused", tied_embeddings=True),
    "tp_dp": gpt(tensor_parallel=2),
}
RESIZED = ("dp_moe", "dp_fused")
# The buckets of "same", some of them on the device and some in host memory.
MIXED_HOMES = replace(STREAMING, hbm_budget=100_001, host_budget=100_001)
STREAMINGS = {"same": STREAMING, "other": OTHER_STREAMING, "mixed": MIXED_HOMES}
PARALLEL_CASES = [
    ("tp", "same"),
    ("tp", "other"),
    ("pp", "same"),
    ("ep", "other"),
    ("ep", "mixed"),
    ("dp_small", "same"),
]
# Without --slow: with the installed version of Megatron, and with the other.
LEFT_OUT = (
    {"fused_frozen", "bf16_gradients", "dp_fused", "dp_small", "dense of moe"},
    {"mixed_moe", "mixed_homes", "lazy", "dp_moe", "pp"},
)[TURN]


def each_of(cases: Iterable[Any]) -> list[Any]:
    """Parameters of tests: names of runs, or tuples that begin with one."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=marks_of(case[0] in LEFT_OUT)) for case in tuples]


def portable(name: str) -> Checkpoint:
    return Checkpoint(name=name, format=MODEL_SHAPED)


def taking_on_one() -> dict[str, Run]:
    runs = {}
    for name, config in ONE_RANK.items():
        runs[f"{name}/plain"] = Run(config=config, actions={TAKEN: (Look(),)})
        runs[f"{name}/taken"] = Run(
            config=config,
            streaming=STREAMING,
            actions={
                0: (Take(f"{name}-0"),),
                TAKEN: (Take(f"{name}-{TAKEN}"), Look()),
                TAKEN + 1: (Take(f"{name}-{TAKEN + 1}"), Take(f"{name}-again")),
            },
        )
    runs["mixed_homes/taken"] = Run(
        config=ONE_RANK["mixed_moe"],
        streaming=MIXED_HOMES,
        actions={TAKEN: (Take("mixed_homes"), Look())},
    )
    runs["lazy/taken"] = Run(
        config=gpt(), streaming=replace(STREAMING, init="lazy"), actions={0: (Take("lazy-0"),)}
    )
    runs["kept/taken"] = Run(
        config=gpt(),
        streaming=STREAMING,
        actions={
            2: (Take("kept/2", keep_last=1), Copy("kept/2", "copied"), AwaitCopy()),
            3: (Take("kept/3", keep_last=1),),
            4: (Copy("kept/3", "copied later"), Take("kept/4", keep_last=2)),
            5: (AwaitCopy(), Take("kept/5", keep_last=2)),
        },
    )
    return runs


def restoring_on_one() -> dict[str, Run]:
    runs = {}
    for name, config in ONE_RANK.items():
        for at, streaming in RESTORED:
            run = resumed(config, f"{name}-{at}", STREAMINGS[streaming], at)
            runs[f"{name}/{at}/{streaming}"] = run
    for streaming in STREAMINGS:
        runs[f"mixed_homes/{TAKEN}/{streaming}"] = resumed(
            ONE_RANK["mixed_moe"], "mixed_homes", STREAMINGS[streaming]
        )
    runs["lazy/0/same"] = resumed(gpt(), "lazy-0", STREAMING, 0)
    runs["lazy/0/other"] = resumed(gpt(), "lazy-0", OTHER_STREAMING, 0)
    runs["adamw/resident"] = Run(config=gpt(), actions={1: (NotStreamed(f"adamw-{TAKEN}"),)})
    runs["kept/2/same"] = resumed(gpt(), "copied", STREAMING, 2)
    runs["kept/3/other"] = resumed(gpt(), "copied later", OTHER_STREAMING, 3)
    runs["kept/5/same"] = resumed(gpt(), "kept/5", STREAMING, 5)
    return runs


def taking_on_four() -> dict[str, Run]:
    runs = {
        f"{name}/taken": Run(
            config=config,
            streaming=STREAMING,
            actions={
                TAKEN: (
                    Take(name),
                    *((Save(portable(name)),) if name in RESIZED else ()),
                    Look(),
                    Copy(name, f"{name}-copy"),
                ),
                STEPS: (AwaitCopy(),),
            },
        )
        for name, config in WIDE.items()
    }
    return runs | {f"{name}/same": resumed(WIDE[name], name, STREAMING) for name in WIDE}


def restoring_on(size: int) -> dict[str, Run]:
    runs = {}
    for name in RESIZED:
        config = WIDE[name]
        source = name if size != 2 else f"{name}-copy"
        runs[f"{name}/snapshot"] = resumed(config, source, OTHER_STREAMING)
        runs[f"{name}/portable"] = Run(
            config=replace(config, first_step=TAKEN),
            streaming=STREAMING,
            actions={TAKEN: (Load(portable(name)), Look())},
        )
    if size == 2:
        runs["tp_dp/snapshot"] = resumed(WIDE["tp_dp"], "tp_dp", OTHER_STREAMING)
        runs["dp_small/resident"] = Run(
            config=PARALLEL["dp_small"], actions={1: (NotStreamed("tp_dp"),)}
        )
        refused = {
            "tp to dp": (gpt(), "tp_dp"),
            "tp to pp": (gpt(pipeline_parallel=2, layers=2), "tp_dp"),
            "dense of moe": (gpt(experts=4, mixed_dtype=True), "dp_fused"),
        }
        for what, (config, source) in refused.items():
            runs[what] = Run(
                config=config, streaming=STREAMING, actions={0: (RestoreRefused(source),)}
            )
        for name, config in PARALLEL.items():
            runs[f"{name}/taken"] = Run(
                config=config, streaming=STREAMING, actions={TAKEN: (Take(name), Look())}
            )
        for name, streaming in PARALLEL_CASES:
            runs[f"{name}/{streaming}"] = resumed(PARALLEL[name], name, STREAMINGS[streaming])
    return runs


STAGES: dict[str, tuple[int, Callable[[], dict[str, Run]], tuple[str, ...]]] = {
    "take1": (1, taking_on_one, ()),
    "restore1": (1, lambda: {**restoring_on_one(), **restoring_on(1)}, ("take1", "take4")),
    "take4": (4, taking_on_four, ()),
    "restore2": (2, lambda: restoring_on(2), ("take4",)),
    "restore3": (3, lambda: restoring_on(3), ("take4",)),
}


class Results:
    """Results by stage and run; a stage is done when it is first asked for."""

    def __init__(self, directory: Path, left_out: set[str]) -> None:
        self.directory = directory
        self.left_out = left_out
        self._done: dict[str, list[dict[str, RunResult]]] = {}
        self._failed: set[str] = set()

    def _stage(self, name: str) -> list[dict[str, RunResult]]:
        assert name not in self._failed, f"the ranks of {name} failed before, for another test"
        if name not in self._done:
            self._failed.add(name)
            size, runs, before = STAGES[name]
            for other in before:
                self._stage(other)
            wanted = {
                run: what
                for run, what in runs().items()
                if run.partition("/")[0] not in self.left_out
            }
            self._done[name] = run_forked_ranks(
                size, perform_all, wanted, str(self.directory), timeout_s=900
            )
            self._failed.remove(name)
        return self._done[name]

    def __call__(self, stage: str, run: str) -> list[RunResult]:
        """By rank."""
        results = [rank[run] for rank in self._stage(stage)]
        for result in results:
            assert not result.error, result.error
        return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Results:
    left_out = set() if pytestconfig.getoption("slow") else LEFT_OUT
    return Results(tmp_path_factory.mktemp("snapshots"), left_out)


# ---------------------------------------------------------------------- one rank


@pytest.mark.parametrize("name", each_of(ONE_RANK))
def test_snapshots_are_not_noticed(results, name):
    """Four of them, two without a step between: losses and parameters are the resident run's."""
    (plain,), (taken,) = results("take1", f"{name}/plain"), results("take1", f"{name}/taken")
    compare_records(plain.record, taken.record)
    compare_moments(plain.moments[STEPS], taken.moments[STEPS])


@pytest.mark.parametrize(
    "streaming",
    [pytest.param(name, marks=marks_of("mixed_homes" in LEFT_OUT)) for name in STREAMINGS],
)
def test_buckets_in_memory_are_in_it(results, streaming):
    """Taken with buckets of all kinds, restored whatever the budgets and sizes are then."""
    (plain,), (taken,) = results("take1", "mixed_moe/plain"), results("take1", "mixed_homes/taken")
    compare_moments(plain.moments[STEPS], taken.moments[STEPS])
    (again,) = results("restore1", f"mixed_homes/{TAKEN}/{streaming}")
    compare_moments(taken.moments[TAKEN], again.moments[TAKEN])
    compare_resumed(taken, again)


@pytest.mark.parametrize(("at", "streaming"), RESTORED)
@pytest.mark.parametrize("name", each_of(ONE_RANK))
def test_a_new_process_goes_on(results, name, at, streaming):
    (taken,) = results("take1", f"{name}/taken")
    (again,) = results("restore1", f"{name}/{at}/{streaming}")
    if at:
        compare_moments(taken.moments[at], again.moments[at])
    compare_resumed(taken, again)


@pytest.mark.parametrize(
    "streaming",
    [pytest.param(name, marks=marks_of("lazy" in LEFT_OUT)) for name in ("same", "other")],
)
def test_before_a_lazy_first_step(results, streaming):
    (taken,), (again,) = results("take1", "lazy/taken"), results("restore1", f"lazy/0/{streaming}")
    compare_resumed(taken, again)


@pytest.mark.parametrize("run", ["kept/2/same", "kept/3/other", "kept/5/same"])
def test_kept_and_copied(results, run):
    """What was pruned lives on in its copy."""
    (taken,) = results("take1", "kept/taken")
    (again,) = results("restore1", run)
    compare_resumed(taken, again)
    kept = results.directory / "snapshots" / "kept"
    assert sorted(path.name for path in kept.iterdir()) == ["4", "5"]


def test_files_are_as_they_were(results):
    """After runs went on, and after others went on from them."""
    (taken,) = results("take1", "adamw/taken")
    results("restore1", "adamw/0/other")
    for name in (f"adamw-{TAKEN}", f"adamw-{TAKEN + 1}", "adamw-again"):
        path = results.directory / "snapshots" / name
        assert hashes(path) == taken.notes[f"files of {name}"]
        assert verify(path) == []


def test_nothing_stays_in_the_state_s_directory(results):
    results("restore1", "kept/5/same")
    assert [p for p in (results.directory / "state").rglob("*") if p.is_file()] == []


# ---------------------------------------------------------------------- several ranks


def both(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    assert first.keys() == second.keys()
    for key, values in first.items():
        assert values.keys() == second[key].keys(), key
        for name, value in values.items():
            same = (
                torch.equal(value, second[key][name])
                if isinstance(value, torch.Tensor)
                else value == second[key][name]
            )
            assert same, (key, name)


@pytest.mark.parametrize("name", each_of(RESIZED))
@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_other_numbers_of_data_parallel_ranks(results, size, name):
    """Taken on four ranks; restored from the snapshot itself, or, on two, from its copy."""
    taken = results("take4", f"{name}/taken")
    restored = results(f"restore{size}", f"{name}/snapshot")
    loaded = results(f"restore{size}", f"{name}/portable")
    saved = assemble([rank.moments[TAKEN].parts for rank in taken])
    both(saved, assemble([rank.moments[TAKEN].parts for rank in restored]))
    for one, other in zip(restored, loaded, strict=True):
        compare_moments(one.moments[TAKEN], other.moments[TAKEN])
        compare_resumed(other, one)


@pytest.mark.parametrize("name", each_of(WIDE))
def test_the_same_four_ranks(results, name):
    for one, other in zip(
        results("take4", f"{name}/taken"), results("take4", f"{name}/same"), strict=True
    ):
        compare_resumed(one, other)


def test_copies_of_all_ranks(results):
    for name in WIDE.keys() - results.left_out:
        results("take4", f"{name}/taken")
        source, copy = (results.directory / "snapshots" / n for n in (name, f"{name}-copy"))
        assert verify(copy) == []
        assert hashes(copy) == hashes(source)
        names = {(part.rank, part.name) for part in all_parts(source)}
        parts = {"opt0", "opt1"} if name == "dp_moe" else {"opt0"}
        assert names == {(rank, part) for rank in range(4) for part in parts}


@pytest.mark.parametrize(("name", "streaming"), each_of(PARALLEL_CASES))
def test_tensor_pipeline_and_expert_parallelism(results, name, streaming):
    taken = results("restore2", f"{name}/taken")
    restored = results("restore2", f"{name}/{streaming}")
    # A rank that owns no parameter has nothing in the snapshot, nor need of it.
    owners = [rank for rank in range(2) if taken[rank].moments[TAKEN].states]
    assert owners == [0, 1] or name == "dp_small"
    for rank in owners:
        compare_moments(taken[rank].moments[TAKEN], restored[rank].moments[TAKEN])
        compare_resumed(taken[rank], restored[rank])


def test_fewer_data_parallel_ranks_of_tensor_parallel_ones(results):
    """Four ranks are two times two; two of them are enough."""
    taken = results("take4", "tp_dp/taken")
    restored = results("restore2", "tp_dp/snapshot")
    saved = assemble([rank.moments[TAKEN].parts for rank in taken])
    both(saved, assemble([rank.moments[TAKEN].parts for rank in restored]))


@pytest.mark.parametrize("name", each_of(["dp_small"]))
def test_ranks_without_parameters(results, name):
    """One small parameter trains, which one rank owns."""
    path = results.directory / "snapshots" / name
    results("restore2", f"{name}/taken")
    assert [part.rank for part in all_parts(path)] in ([0], [1])


@pytest.mark.parametrize(
    ("run", "message"),
    each_of(
        [
            ("tp to dp", "nothing of opt0 for the parallel position"),
            ("tp to pp", "nothing of opt0 for the parallel position"),
            ("dense of moe", "has opt0, not opt1: it is of another model"),
        ]
    ),
)
def test_what_does_not_fit_is_refused_on_all_ranks(results, run, message):
    """And training goes on as if nothing had been."""
    ranks = results("restore2", run)
    for result in ranks:
        assert message in result.notes["refusal"]
        assert len(result.record.steps) == STEPS


@pytest.mark.parametrize(
    ("stage", "run"),
    [
        ("restore1", "adamw/resident"),
        pytest.param("restore2", "dp_small/resident", marks=marks_of("dp_small" in LEFT_OUT)),
    ],
)
def test_an_optimizer_that_is_not_streamed_is_refused(results, stage, run):
    """On all ranks alike, also on one that owns no parameter; snapshots are as they were."""
    for result in results(stage, run):
        assert result.notes["refused"] == 3
        assert len(result.record.steps) == STEPS


def test_a_snapshot_is_small(results):
    """Beside the links there is a description; the model's parameters are not in it."""
    results("take1", "adamw/taken")
    path = results.directory / "snapshots" / f"adamw-{TAKEN}"
    other = sum(p.stat().st_size for p in path.rglob("*") if p.is_file() and p.suffix != ".bin")
    assert other < 100_000
    (part,) = all_parts(path)
    assert sum(p.stat().st_size for p in path.rglob("bucket*.bin")) == part.nbytes
    assert os.stat(path / "rank00000" / "opt0" / "resident.bin").st_size == 0


def test_moving_a_snapshot_within_its_file_system(results, tmp_path):
    results("take1", "adamw/taken")
    shutil.copytree(results.directory / "snapshots" / "adamw-again", tmp_path / "moved")
    assert verify(tmp_path / "moved") == []

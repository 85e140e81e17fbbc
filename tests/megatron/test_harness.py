"""The instrument itself: resident training runs repeat bit for bit, in every configuration.

What streamed runs are compared with is only worth something if it is the same every time, trains,
and exercises what its name says. All trainings of one world size share their processes.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import math
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gds_optimizer.errors import ConfigError, UnsupportedError
from gds_optimizer.megatron import cpu, fused_adam, shards
from gds_optimizer.megatron.tiny_gpt import (
    StepRecord,
    TinyGptConfig,
    TrainingRecord,
    run_training,
)
from tests.megatron import MEGATRON_PATH
from tests.megatron.harness import RankError, compare_records, compare_states, run_ranks

pytestmark = pytest.mark.megatron

SKIPPED = 1  # the step that is skipped where one is
BUCKETS = {"overlap": True, "ddp_bucket_size": 4096}

ONE_RANK = {
    "basic": TinyGptConfig(steps=20),
    "moe": TinyGptConfig(experts=4),
    "swiglu": TinyGptConfig(swiglu=True),
    "tied": TinyGptConfig(tied_embeddings=True),
    "mixed_dtype": TinyGptConfig(mixed_dtype=True),
    "mixed_dtype_moe": TinyGptConfig(mixed_dtype=True, experts=4),
    "bf16_gradients": TinyGptConfig(grad_reduce_in_fp32=False),
    "overlap": TinyGptConfig(**BUCKETS),
    "no_clipping": TinyGptConfig(clip_grad=0.0),
    "schedule": TinyGptConfig(schedule="changing"),
    "fused": TinyGptConfig(inner_optimizer="fused", experts=4, schedule="changing"),
    "fp16_skip": TinyGptConfig(fp16=True, skip_step_at=SKIPPED, steps=6),
    "loss_scale_skip": TinyGptConfig(loss_scale=8.0, skip_step_at=SKIPPED, inner_optimizer="fused"),
    "frozen": TinyGptConfig(frozen=("embedding", "layers.0.")),
    "frozen_experts": TinyGptConfig(experts=4, frozen=("experts",)),
    "all_frozen": TinyGptConfig(frozen=("",)),
}
TWO_RANKS = {
    "dp": TinyGptConfig(),
    "dp_overlap": TinyGptConfig(**BUCKETS),
    "dp_overlap_mixed_dtype_moe": TinyGptConfig(**BUCKETS, mixed_dtype=True, experts=4),
    "dp_bf16_gradients": TinyGptConfig(**BUCKETS, grad_reduce_in_fp32=False),
    "dp_fused": TinyGptConfig(inner_optimizer="fused", schedule="changing"),
    "dp_fp16_skip": TinyGptConfig(fp16=True, skip_step_at=SKIPPED),
    "dp_frozen": TinyGptConfig(frozen=("embedding", "layers.0.")),
    "dp_one_small_param": TinyGptConfig(
        frozen=("embedding", "output", "linear", "layers.0", "final", "input", "layernorm.bias")
    ),
    "tp": TinyGptConfig(tensor_parallel=2, swiglu=True),
    "tp_tied": TinyGptConfig(tensor_parallel=2, tied_embeddings=True, **BUCKETS),
    "ep": TinyGptConfig(experts=4, expert_parallel=2),
    "ep_fused_overlap": TinyGptConfig(
        experts=4, expert_parallel=2, inner_optimizer="fused", **BUCKETS
    ),
    "pp_tied": TinyGptConfig(pipeline_parallel=2, tied_embeddings=True),
}
CASES = [(1, name) for name in ONE_RANK] + [(2, name) for name in TWO_RANKS]
# Without --slow these, with the installed version of Megatron.
QUICK = {
    (1, "basic"),
    (1, "mixed_dtype_moe"),
    (1, "no_clipping"),
    (1, "schedule"),
    (1, "fp16_skip"),
    (1, "all_frozen"),
    (2, "dp_overlap"),
    (2, "dp_one_small_param"),
    (2, "ep"),
    (2, "pp_tied"),
}


@dataclass
class Run:
    """One training, with what its callbacks saw."""

    record: TrainingRecord
    initial_digests: dict[str, str]
    params: dict[str, tuple[int, bool]]  # elements, trains
    shards: list[tuple[str, str, bool, int, int]]  # name, parameter, native fp32, start, end
    shards_in_inner_order: bool
    mains_before_steps_equal_params: bool
    # Before the first step and after each, as `collect_resident_state` returns it.
    states: list[dict[str, dict[str, Any]]] = field(default_factory=list)


@dataclass
class Outcome:
    runs: list[Run]
    leftovers: list[str]
    megatron_file: str = ""
    threads: int = 0
    error: str = ""


def train_once(config: TinyGptConfig) -> Run:
    seen = SimpleNamespace(states=[])

    def after_build(chunks: list[Any], optimizer: Any) -> None:
        names = shards.param_names(chunks)
        seen.params = {name: (p.numel(), p.requires_grad) for p, name in names.items()}
        seen.initial = {name: digest(p) for p, name in names.items()}
        seen.shards, seen.in_order, seen.mains_equal = [], True, True
        for index, part in enumerate(shards.distributed_optimizers(optimizer)):
            named = list(shards.named_shards(part, index))
            if not part.is_stub_optimizer:
                mains = [p for group in part.optimizer.param_groups for p in group["params"]]
                groups = [i for i, g in enumerate(part.optimizer.param_groups) for _ in g["params"]]
                seen.in_order &= [id(s.main_param) for s in named] == [id(p) for p in mains]
                seen.in_order &= [s.group_index for s in named] == groups
            for shard in named:
                owned = shard.model_param.detach().flatten()[shard.range.start : shard.range.stop]
                seen.mains_equal &= torch.equal(shard.main_param.detach(), owned.float())
                seen.shards.append(
                    (
                        shard.name,
                        names[shard.model_param],
                        shard.is_native_fp32,
                        shard.range.start,
                        shard.range.stop,
                    )
                )
        seen.states.append(shards.collect_resident_state(optimizer))

    def after_step(step: int, chunks: list[Any], optimizer: Any) -> None:
        seen.states.append(shards.collect_resident_state(optimizer))

    record = run_training(config, after_build=after_build, after_step=after_step)
    return Run(
        record=record,
        initial_digests=seen.initial,
        params=seen.params,
        shards=seen.shards,
        shards_in_inner_order=seen.in_order,
        mains_before_steps_equal_params=seen.mains_equal,
        states=seen.states,
    )


def digest(param: torch.Tensor) -> str:
    data = param.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()


def patched_places() -> dict[str, int]:
    """Identity of every attribute of every module and class that anything here patches."""
    import megatron.core.optimizer as builder
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    owners = [torch, torch.cuda, torch.Tensor, builder, distrib_optimizer, megatron_random]
    return {
        f"{owner.__name__}.{name}": id(value)
        for owner in [*owners, moe_utils]
        for name, value in vars(owner).items()
    }


def leftovers_of(before: dict[str, int]) -> list[str]:
    after = patched_places()
    changed = [name for name in {*before, *after} if before.get(name) != after.get(name)]
    if torch.overrides._get_current_function_mode_stack():
        changed.append("a torch function mode")
    return sorted(changed)


def train_twice(configs: dict[str, TinyGptConfig]) -> dict[str, Outcome]:
    """On a rank: every configuration, twice."""
    cpu.import_megatron()
    gc.freeze()  # what was imported stays, and the collection after each training is fast
    outcomes = {}
    for name, config in configs.items():
        try:
            first = train_once(config)
            before = patched_places()
            second = train_once(config)
            file = str(Path(sys.modules["megatron.core"].__file__ or "").resolve())
            threads = len(os.listdir("/proc/self/task"))
            outcomes[name] = Outcome([first, second], leftovers_of(before), file, threads)
        except Exception:  # noqa: BLE001 - reported by the test of this configuration
            outcomes[name] = Outcome([], [], error=traceback.format_exc())
    return outcomes


@pytest.fixture(scope="module")
def outcomes(pytestconfig: pytest.Config) -> dict[tuple[int, str], list[Outcome]]:
    """By world size and name: what each rank saw."""
    if MEGATRON_PATH and not pytestconfig.getoption("slow"):
        pytest.skip("slow: give --slow")  # the instrument is tried with the installed version
    found = {}
    is_slow = pytestconfig.getoption("slow")
    for world_size, every in ((1, ONE_RANK), (2, TWO_RANKS)):
        configs = {
            name: config for name, config in every.items() if is_slow or (world_size, name) in QUICK
        }
        ranks = run_ranks(world_size, train_twice, configs)
        for name in configs:
            found[world_size, name] = [rank[name] for rank in ranks]
    return found


@pytest.fixture
def runs(outcomes: Any, request: pytest.FixtureRequest) -> list[Run]:
    """The first run of the case, by rank."""
    case = getattr(request, "param", None) or request.node.callspec.params["case"]
    if case not in outcomes:
        pytest.skip("slow: give --slow")
    errors = [outcome.error for outcome in outcomes[case] if outcome.error]
    assert not errors, errors[0]
    return [outcome.runs[0] for outcome in outcomes[case]]


def of_cases(*cases: tuple[int, str]) -> pytest.MarkDecorator:
    assert set(cases) <= set(CASES)
    return pytest.mark.parametrize("runs", cases, indirect=True, ids=[f"{w}-{n}" for w, n in cases])


every_case = pytest.mark.parametrize("case", CASES, ids=[f"{w}-{n}" for w, n in CASES])


@every_case
def test_a_run_repeats_bit_for_bit(outcomes, runs, case):
    for outcome in outcomes[case]:
        first, second = outcome.runs
        compare_records(first.record, second.record)
        for state_first, state_second in zip(first.states, second.states, strict=True):
            compare_states(state_first, state_second)


def test_a_run_repeats_in_another_process(outcomes):
    again = run_ranks(1, train_twice, {"basic": ONE_RANK["basic"]})[0]["basic"]
    assert not again.error, again.error
    compare_records(outcomes[1, "basic"][0].runs[0].record, again.runs[0].record)
    compare_states(outcomes[1, "basic"][0].runs[0].states[-1], again.runs[0].states[-1])


@every_case
def test_no_patched_attribute_is_left_behind(outcomes, runs, case):
    assert [outcome.leftovers for outcome in outcomes[case]] == [[]] * case[0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_trainings_do_not_pile_up_process_groups(outcomes, world_size, pytestconfig):
    """Each of a training's groups keeps threads and sockets, some fifty of both."""
    threads = [ranks[0].threads for (size, _), ranks in outcomes.items() if size == world_size]
    assert len(threads) > (10 if pytestconfig.getoption("slow") else 3)
    assert threads[-1] < threads[0] + 10


@every_case
def test_every_trainable_parameter_moves_and_no_other(runs, case):
    for run in runs:
        assert run.params
        for name, (_, trains) in run.params.items():
            moved = run.record.param_digests[name] != run.initial_digests[name]
            assert moved == trains, name


@every_case
def test_losses_and_norms_are_numbers(runs, case):
    for rank, run in enumerate(runs):
        for step in run.record.steps:
            has_loss = case[1] != "pp_tied" or rank == 1
            assert (step.loss is not None) == has_loss
            assert step.loss is None or math.isfinite(step.loss)
            assert step.grad_norm is None or math.isfinite(step.grad_norm)
            assert step.success or (step.step == SKIPPED and "skip" in case[1])


@every_case
def test_shards_have_unique_names_in_the_order_of_the_inner_optimizer(runs, case):
    for run in runs:
        names = [name for name, *_ in run.shards]
        assert len(set(names)) == len(names)
        assert run.shards_in_inner_order
        assert run.mains_before_steps_equal_params
        for state in run.states:
            assert set(state) == set(names)


@every_case
def test_the_shards_of_all_data_ranks_cover_each_trainable_parameter_once(runs, case):
    model_parallel = any(word in case[1] for word in ("tp", "pp"))
    for rank, run in enumerate(runs):
        for name, (numel, trains) in run.params.items():
            alone = model_parallel or (case[1].startswith("ep") and ".experts." in name)
            peers = [run] if alone else runs
            owned = sorted(
                (start, end)
                for peer in peers
                for _, param, _, start, end in peer.shards
                if param == name
            )
            assert all(left[1] == right[0] for left, right in itertools.pairwise(owned))
            covered = (owned[0][0], owned[-1][1]) if owned else None
            assert covered == ((0, numel) if trains else None), (rank, name)


@every_case
def test_hooks_fire_once_in_every_step_that_is_not_skipped(runs, case):
    for run in runs:
        steps = sum(step.success for step in run.record.steps)
        optimizers = [i for i, name in enumerate(run.record.inner_optimizers) if name != "stub"]
        assert run.record.hook_calls == {
            f"{i}.{when}": steps for i in optimizers for when in ("pre", "post")
        }


@every_case
def test_the_resident_state_has_moments_and_the_right_step(runs, case):
    for run in runs:
        for shard, initial in run.states[0].items():
            assert set(initial) == {"main"}
            last = run.states[-1][shard]
            assert set(last) == {"main", "exp_avg", "exp_avg_sq", "step"}
            for name in ("main", "exp_avg", "exp_avg_sq"):
                assert last[name].dtype == torch.float32
                assert last[name].shape == initial["main"].shape
            assert last["step"] == sum(step.success for step in run.record.steps)


@pytest.mark.parametrize(
    "case", [(2, name) for name in TWO_RANKS if name.startswith(("dp", "ep"))], ids=lambda c: c[1]
)
def test_data_parallel_ranks_end_with_the_same_parameters(runs, case):
    first, second = (run.record.param_digests for run in runs)
    for name in first:
        if not (case[1].startswith("ep") and ".experts." in name):
            assert first[name] == second[name], name


@of_cases((1, "basic"))
def test_the_loss_falls(runs):
    losses = [step.loss for step in runs[0].record.steps]
    assert len(losses) == 20
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 1


@of_cases((1, "fp16_skip"), (1, "loss_scale_skip"), (2, "dp_fp16_skip"))
def test_a_skipped_step_changes_no_state(runs):
    for run in runs:
        steps = run.record.steps
        assert [step.success for step in steps] == [i != SKIPPED for i in range(len(steps))]
        assert steps[SKIPPED].grad_norm is None
        compare_states(run.states[SKIPPED], run.states[SKIPPED + 1])
        with pytest.raises(AssertionError, match="main differs"):
            compare_states(run.states[SKIPPED + 1], run.states[SKIPPED + 2])


@of_cases((1, "fp16_skip"))
def test_the_dynamic_loss_scale_falls_and_rises(runs):
    assert [step.loss_scale for step in runs[0].record.steps] == [1024, 1024, 512, 512, 512, 512]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ((1, "basic"), ["AdamW"]),
        ((1, "moe"), ["AdamW", "AdamW"]),
        ((1, "fused"), ["FusedAdamStandIn", "FusedAdamStandIn"]),
        ((1, "frozen_experts"), ["AdamW"]),
        ((1, "all_frozen"), ["stub"]),
        ((2, "ep"), ["AdamW", "AdamW"]),
    ],
    indirect=["runs"],
)
def test_inner_optimizers(runs, expected):
    assert runs[0].record.inner_optimizers == expected


@of_cases((1, "overlap"), (2, "dp_overlap"))
def test_overlap_has_several_communication_buckets(runs):
    assert all(min(run.record.ddp_buckets) > 1 for run in runs)


@pytest.mark.parametrize(
    ("runs", "native"),
    [
        ((1, "basic"), ()),
        ((1, "mixed_dtype"), ("layernorm",)),
        ((2, "dp_overlap_mixed_dtype_moe"), ("layernorm", "router")),
    ],
    indirect=["runs"],
)
def test_native_fp32_parameters(runs, native):
    for run in runs:
        for _, param, is_native, _, _ in run.shards:
            assert is_native == any(word in param for word in native), param
    for word in native:
        assert any(word in param for run in runs for _, param, *_ in run.shards)


@of_cases((1, "mixed_dtype_moe"))
def test_a_group_mixes_native_fp32_and_half_precision(runs):
    """Weights of routers and of linear layers decay alike, so they share a group."""
    with_router = [name for name, param, *_ in runs[0].shards if "router" in param]
    with_linear = [name for name, param, *_ in runs[0].shards if "linear_qkv.weight" in param]
    assert with_router
    assert with_linear


@of_cases((2, "dp_one_small_param"))
def test_a_rank_can_own_no_shard(runs):
    """Buffers are padded, so a single parameter of 32 elements falls to one rank alone."""
    assert sum(numel for numel, trains in runs[0].params.values() if trains) == 32
    assert sorted(len(run.shards) for run in runs) == [0, 1]


@of_cases((1, "schedule"), (1, "fused"))
def test_a_schedule_gives_every_step_its_own_learning_rate_and_betas(runs):
    record = runs[0].record
    assert len({step.lr for step in record.steps}) == len(record.steps)
    assert len({record.config.hyper_parameters(i)["betas"] for i in range(3)}) == 3


def test_clipping_changes_the_result(outcomes):
    clipped, unclipped = (outcomes[1, n][0].runs[0].record for n in ("schedule", "no_clipping"))
    assert clipped.steps[0].grad_norm == unclipped.steps[0].grad_norm > clipped.config.clip_grad
    assert clipped.params_digest != unclipped.params_digest


def test_the_megatron_under_test_is_used(outcomes):
    file = Path(outcomes[1, "basic"][0].megatron_file)
    if MEGATRON_PATH is None:
        assert "site-packages" in file.parts
    else:
        assert file == Path(MEGATRON_PATH).resolve() / "megatron/core/__init__.py"


# ---------------------------------------------------------------- running ranks

# Which megatron-core ranks import makes no difference to how they are run.
slow_with_another_megatron = pytest.mark.slow if MEGATRON_PATH else pytest.mark.megatron


def fail_on_rank(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"told to fail on {rank}")
    torch.distributed.barrier()


def die(status: int) -> None:
    print("famous last words", flush=True)
    os._exit(status)


def sleep_for_ever(directory: Path) -> None:
    (directory / os.environ["RANK"]).write_text(str(os.getpid()))
    while True:
        time.sleep(60)


def who_am_i(*args: Any) -> tuple[Any, ...]:
    group = torch.distributed
    return group.get_rank(), group.get_world_size(), torch.get_num_threads(), args


@slow_with_another_megatron
def test_run_ranks_returns_results_by_rank():
    assert run_ranks(2, who_am_i, "a", 1) == [(0, 2, 1, ("a", 1)), (1, 2, 1, ("a", 1))]


@slow_with_another_megatron
def test_a_failing_rank_is_reported_with_its_traceback():
    with pytest.raises(RankError, match=r"(?s)fail_on_rank: rank 1 of 2 .*told to fail on 1"):
        run_ranks(2, fail_on_rank, 1)


@slow_with_another_megatron
def test_a_dying_rank_is_reported_with_its_output():
    with pytest.raises(RankError, match=r"(?s)rank 0 of 1 ended with status 3.*famous last words"):
        run_ranks(1, die, 3)


@slow_with_another_megatron
def test_a_hanging_rank_is_killed(tmp_path):
    with pytest.raises(RankError, match="did not finish in"):
        run_ranks(1, sleep_for_ever, tmp_path, timeout_s=4.0)
    for file in tmp_path.iterdir():
        assert not Path(f"/proc/{file.read_text()}").exists()


# ---------------------------------------------------------------- comparing


def record_with(**step: Any) -> TrainingRecord:
    defaults = {"loss": 1.0, "loss_bits": "3f800000", "grad_norm": 2.0, "num_zeros": 0.0}
    values = {"step": 0, "success": True, "loss_scale": 1.0, "lr": 0.1, **defaults, **step}
    return TrainingRecord(
        config=TinyGptConfig(),
        megatron_version="",
        torch_version="",
        device="cpu",
        rank=0,
        world_size=1,
        inner_optimizers=["AdamW"],
        ddp_buckets=[1],
        steps=[StepRecord(**values)],
        param_digests={"a": "00"},
        hook_calls={"0.pre": 1},
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 1}, "rank 0 of 1 is compared with rank 1 of 1"),
        ({"steps": []}, "rank 0 of 1: 1 steps and 0"),
        ({"steps": record_with(grad_norm=-0.0).steps}, "step 0: grad_norm is 2.0 and -0.0"),
        ({"steps": record_with(success=False).steps}, "step 0: success is True and False"),
        ({"param_digests": {"a": "01"}}, "parameter a differs at the end"),
        ({"param_digests": {}}, "parameter a is missing in the second"),
        ({"param_digests": {"a": "00", "b": ""}}, "parameter b is missing in the first"),
        ({"hook_calls": {"0.pre": 2}}, "hook calls are {'0.pre': 1} and {'0.pre': 2}"),
    ],
)
def test_compare_records_names_the_first_difference(change, message):
    compare_records(record_with(), record_with())
    with pytest.raises(AssertionError) as error:
        compare_records(record_with(), replace(record_with(), **change))
    assert message in str(error.value)


def test_records_are_compared_by_bits():
    compare_records(record_with(grad_norm=math.nan), record_with(grad_norm=math.nan))
    with pytest.raises(AssertionError, match=r"grad_norm is 0.0 and -0.0"):
        compare_records(record_with(grad_norm=0.0), record_with(grad_norm=-0.0))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([1.0, 2.0], [1.0, 2.5], "s: main differs in 1 of 2 elements, first in number 1"),
        ([0.0, 2.0], [-0.0, 2.0], "first in number 0: 0.0 and -0.0"),
        ([1.0, 2.0], [1.0], "torch.float32 (2,) and torch.float32 (1,)"),
        (1.0, 2.0, "s: main is 1.0 and 2.0"),
        (1.0, [1.0], "s: main is 1.0 and tensor"),
    ],
)
def test_compare_states_names_the_first_difference(first, second, message):
    a, b = (
        {"s": {"main": torch.tensor(value) if isinstance(value, list) else value}}
        for value in (first, second)
    )
    compare_states(a, a)
    with pytest.raises(AssertionError) as error:
        compare_states(a, b)
    assert message in str(error.value)


def test_states_with_other_shards_or_planes_differ():
    state = {"s": {"main": torch.tensor([math.nan])}}
    compare_states(state, {"s": {"main": torch.tensor([math.nan])}})
    with pytest.raises(AssertionError, match="shard s is missing in the second"):
        compare_states(state, {})
    with pytest.raises(AssertionError, match="s: state step is missing in the first"):
        compare_states(state, {"s": {**state["s"], "step": 1.0}})


# ---------------------------------------------------------------- the shim


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for no GPU")


@needs_no_gpu
def test_the_shim_puts_everything_back_after_an_error():
    cpu.import_megatron()
    before = patched_places()
    with contextlib.suppress(KeyError), cpu.missing_names(), cpu.cuda_on_cpu():
        assert len(leftovers_of(before)) > 5
        raise KeyError
    assert leftovers_of(before) == []


@needs_no_gpu
def test_a_failing_callback_leaves_nothing_behind():
    run_training(TinyGptConfig(steps=1))
    before = patched_places()

    def fail(*unused: Any) -> None:
        raise KeyError("told to")

    for callback in ("after_build", "before_step", "after_step"):
        with pytest.raises(KeyError):
            run_training(TinyGptConfig(steps=1, inner_optimizer="fused"), **{callback: fail})
        assert leftovers_of(before) == []
        assert not torch.distributed.is_initialized()


@needs_no_gpu
def test_the_shim_is_reentrant():
    cpu.import_megatron()
    before = patched_places()
    with cpu.cuda_on_cpu():
        with cpu.cuda_on_cpu():
            pass
        assert torch.zeros(1, device="cuda").type() == "torch.cuda.FloatTensor"
    assert leftovers_of(before) == []


@needs_no_gpu
def test_the_shim_refuses_a_second_thread():
    errors = []

    def enter() -> None:
        try:
            with cpu.cuda_on_cpu():
                pass
        except UnsupportedError as error:
            errors.append(str(error))

    with cpu.cuda_on_cpu():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert errors == ["cuda_on_cpu: another thread of this process is using it"]


def test_the_shim_refuses_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match="has a GPU"), cpu.cuda_on_cpu():
        pass


@needs_no_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda", 1)])
def test_the_shim_makes_cpu_tensors_of_cuda_ones(device):
    with cpu.cuda_on_cpu():
        made = torch.ones(2, device=device)
        assert made.device.type == "cpu"
        assert made.to(device).device.type == made.cuda().device.type == "cpu"
        assert made.to(made).dtype == made.dtype
        assert made.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert made.type(torch.float16).dtype == torch.float16
        assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"


# ---------------------------------------------------------------- the stand-in for FusedAdam


def adam_pair(adam_w_mode: bool) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """The stand-in and torch's own, over equal parameters in two groups."""
    reference = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    made = []
    for build in (lambda g: fused_adam.FusedAdamStandIn(g, adam_w_mode=adam_w_mode), reference):
        generator = torch.Generator().manual_seed(7)
        params = [
            torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
            for shape in ((5, 3), (4,))
        ]
        groups = [
            {"params": params[:1], "lr": 0.1, "weight_decay": 0.2, "betas": (0.8, 0.95)},
            {"params": params[1:], "lr": 0.05, "weight_decay": 0.0, "betas": (0.9, 0.99)},
        ]
        made.append(build(groups))
    return made[0], made[1]


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_the_stand_in_is_adam(adam_w_mode):
    optimizers = adam_pair(adam_w_mode)
    for step in range(5):
        for optimizer in optimizers:
            generator = torch.Generator().manual_seed(step)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            optimizer.step()
    for ours, theirs in zip(*(o.param_groups for o in optimizers), strict=True):
        torch.testing.assert_close(ours["params"][0], theirs["params"][0], rtol=1e-12, atol=1e-12)


def test_the_stand_in_keeps_its_step_in_groups_with_parameters():
    param = torch.ones(3, requires_grad=True)
    optimizer = fused_adam.FusedAdamStandIn([{"params": [param]}, {"params": []}])
    param.grad = torch.ones(3)
    optimizer.step()
    optimizer.step()
    assert [group.get("step") for group in optimizer.param_groups] == [2, None]
    assert type(optimizer.param_groups[0]["step"]) is int
    assert set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq"}


def test_the_stand_in_gives_the_same_bits_on_pieces():
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(64 * 9 + 5, generator=generator)
    gradients = [torch.randn(whole.shape, generator=generator) for _ in range(3)]
    results = []
    for cuts in ([], [64, 192, 512]):
        pieces = [piece.clone() for piece in whole.tensor_split(cuts)]
        optimizer = fused_adam.FusedAdamStandIn(pieces, lr=0.1, weight_decay=0.1)
        for gradient in gradients:
            for piece, part in zip(pieces, gradient.tensor_split(cuts), strict=True):
                piece.grad = part.clone()
            optimizer.step()
        results.append(torch.cat(pieces))
    compare_states(*({"whole": {"main": result}} for result in results))


def test_the_stand_in_refuses_what_it_is_not():
    with pytest.raises(ConfigError, match="capturable is True"):
        fused_adam.FusedAdamStandIn([torch.ones(1)], capturable=True)


def test_use_inner_adam_restores_and_rejects():
    cpu.import_megatron()
    before = patched_places()
    with contextlib.suppress(KeyError), fused_adam.use_inner_adam("fused"):
        assert len(leftovers_of(before)) == 5
        raise KeyError
    assert leftovers_of(before) == []
    with pytest.raises(ConfigError, match="'lion', wanted one of adamw, fused, installed"):
        fused_adam.use_inner_adam("lion").__enter__()


# ---------------------------------------------------------------- names and settings


def test_parameter_names_lose_wrappers_and_get_chunk_numbers():
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    chunks = [Wrapper(Wrapper(torch.nn.Sequential(torch.nn.Linear(2, 1)))) for _ in range(2)]
    one = shards.param_names(chunks[:1])
    assert list(one.values()) == ["0.weight", "0.bias"]
    assert list(shards.param_names(chunks).values()) == [
        "chunk0.0.weight",
        "chunk0.0.bias",
        "chunk1.0.weight",
        "chunk1.0.bias",
    ]
    assert shards.shard_name(1, "a.weight", 8, 16) == "1/a.weight[8:16]"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "cosine"}, "schedule is 'cosine', wanted one of constant, changing"),
        ({"inner_optimizer": "sgd"}, "inner_optimizer is 'sgd'"),
        ({"hidden": 30}, "hidden is 30, wanted a multiple of heads"),
        ({"layers": 0}, "layers is 0, wanted at least 1"),
        ({"experts": 3, "expert_parallel": 2}, "experts is 3, wanted a multiple"),
        ({"expert_parallel": 2}, "expert_parallel is 2, but experts is 0"),
        ({"experts": 4, "tensor_parallel": 2}, "wanted one of them alone"),
        ({"skip_step_at": 1}, "skip_step_at needs a loss scaler"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        TinyGptConfig(**settings)


@needs_no_gpu
def test_too_few_ranks_are_refused():
    with pytest.raises(ConfigError, match="the run has 1 ranks, wanted a multiple"):
        run_training(TinyGptConfig(tensor_parallel=2))
    assert not torch.distributed.is_initialized()

"""Streamed and resident training give the same bits: losses, parameters, mains, moments, counters.

Every case trains twice in the same processes, resident and streamed, in buckets so small that
every parameter larger than a bucket is split, for 20 steps with --slow. Without it one case of each
kind makes as many, the others, in which a difference would show in the first few, 8, and each of
the two versions of Megatron under test has every second case, and those that are for both. All of
it is done with main parameters stored in fp32 and as remainders; most of the latter is for --slow.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from gds_optimizer.megatron.tiny_gpt import TinyGptConfig
from tests.megatron import MEGATRON_PATH, has_turn, marks_of
from tests.megatron.forking import run_forked_ranks
from tests.megatron.streaming import SMALL_BUCKET_BYTES, Comparison, Streaming, compare_all

pytestmark = pytest.mark.megatron

# Passes go forwards and backwards in turn, and every step has other hyper-parameters.
STEPS = 8
MANY_STEPS = 20
SKIPPED = 4
BUCKETS: dict[str, Any] = {"overlap": True, "ddp_bucket_size": 4096}
# Twice the smallest: half as many transfers, and large parameters are split all the same. Some
# cases have the smallest.
BUCKET_BYTES = 2 * SMALL_BUCKET_BYTES
# The step before the skipped one, the skipped one, the next, the last.
AROUND_SKIP = Streaming(bucket_size=BUCKET_BYTES, states_at=(SKIPPED - 1, SKIPPED, SKIPPED + 1, -1))


def gpt(steps: int = STEPS, **options: Any) -> TinyGptConfig:
    return TinyGptConfig(steps=steps, schedule="changing", hidden=48, **options)


DEFAULT = Streaming(bucket_size=BUCKET_BYTES)
# Some buckets of each kind; a chain of optimizers shares the budgets.
MIXED_HOMES = Streaming(
    bucket_size=BUCKET_BYTES, hbm_budget=100_001, host_budget=250_001, states_at=(0, -1)
)
ON_DEVICE = Streaming(bucket_size=BUCKET_BYTES, hbm_budget=2**30)
ONE_RANK: dict[str, tuple[TinyGptConfig, Streaming]] = {
    "basic": (gpt(MANY_STEPS), Streaming(states_at=(0, 1, -1))),
    "fused_step_convention": (gpt(MANY_STEPS, inner_optimizer="fused", experts=4), DEFAULT),
    "tight_clipping": (gpt(clip_grad=0.05), DEFAULT),
    "no_clipping": (gpt(clip_grad=0.0), DEFAULT),
    "swiglu": (gpt(swiglu=True), DEFAULT),
    "tied": (gpt(tied_embeddings=True), DEFAULT),
    "mixed_dtype": (gpt(mixed_dtype=True), DEFAULT),
    "mixed_dtype_moe": (gpt(MANY_STEPS, mixed_dtype=True, experts=4), DEFAULT),
    "moe": (gpt(experts=4), DEFAULT),
    "moe_one_slot": (gpt(experts=4), Streaming(slots=1)),
    "moe_two_slots": (gpt(experts=4), Streaming(bucket_size=BUCKET_BYTES, slots=2)),
    "bf16_gradients": (gpt(MANY_STEPS, grad_reduce_in_fp32=False, clip_grad=0.3), DEFAULT),
    "bf16_gradients_fused": (
        gpt(grad_reduce_in_fp32=False, inner_optimizer="fused", mixed_dtype=True),
        DEFAULT,
    ),
    "bf16_gradients_loss_scale": (gpt(grad_reduce_in_fp32=False, loss_scale=8.0), DEFAULT),
    "overlap": (gpt(**BUCKETS), DEFAULT),
    "overlap_bf16_gradients": (gpt(**BUCKETS, grad_reduce_in_fp32=False), DEFAULT),
    "fp16_skip": (gpt(fp16=True, skip_step_at=SKIPPED), AROUND_SKIP),
    "fp16_gradients_skip": (
        gpt(fp16=True, skip_step_at=SKIPPED, grad_reduce_in_fp32=False),
        AROUND_SKIP,
    ),
    "loss_scale_skip_fused": (
        gpt(loss_scale=8.0, skip_step_at=SKIPPED, inner_optimizer="fused"),
        AROUND_SKIP,
    ),
    "skip_the_first": (gpt(fp16=True, skip_step_at=0), Streaming(states_at=(0, 1, -1))),
    "frozen": (gpt(frozen=("embedding", "layers.0.")), DEFAULT),
    "frozen_experts": (gpt(experts=4, frozen=("experts",)), DEFAULT),
    "all_frozen": (gpt(frozen=("",)), DEFAULT),
    "lazy": (gpt(), Streaming(bucket_size=BUCKET_BYTES, init="lazy", states_at=(0, -1))),
    "lazy_bf16_gradients_moe": (
        gpt(experts=4, grad_reduce_in_fp32=False, **BUCKETS),
        Streaming(bucket_size=BUCKET_BYTES, init="lazy"),
    ),
    "one_large_bucket": (gpt(mixed_dtype=True), Streaming(bucket_size=2**24, states_at=(0, -1))),
    "one_large_bucket_bf16_gradients": (
        gpt(grad_reduce_in_fp32=False, clip_grad=0.3),
        Streaming(bucket_size=2**24),
    ),
    "attached": (gpt(experts=4, mixed_dtype=True), Streaming(attach=True, states_at=(0, -1))),
    "mixed_homes_moe": (gpt(experts=4), MIXED_HOMES),
    "on_device_bf16_gradients": (gpt(experts=4, grad_reduce_in_fp32=False), ON_DEVICE),
    "on_device_fused": (gpt(inner_optimizer="fused", mixed_dtype=True), ON_DEVICE),
    "attached_fused": (
        gpt(inner_optimizer="fused"),
        Streaming(bucket_size=BUCKET_BYTES, attach=True),
    ),
}
TWO_RANKS: dict[str, tuple[TinyGptConfig, Streaming]] = {
    "dp": (gpt(MANY_STEPS), DEFAULT),
    "dp_overlap": (gpt(**BUCKETS), DEFAULT),
    "dp_overlap_mixed_dtype_moe": (
        gpt(MANY_STEPS, **BUCKETS, mixed_dtype=True, experts=4),
        DEFAULT,
    ),
    "dp_bf16_gradients": (gpt(**BUCKETS, grad_reduce_in_fp32=False, clip_grad=0.3), DEFAULT),
    "dp_fused": (gpt(inner_optimizer="fused"), DEFAULT),
    "dp_fp16_skip": (gpt(fp16=True, skip_step_at=SKIPPED), AROUND_SKIP),
    "dp_frozen": (gpt(frozen=("embedding", "layers.0.")), DEFAULT),
    "dp_one_small_param": (
        gpt(frozen=("embedding", "output", "linear", "layers.0", "final", "input", "norm.bias")),
        DEFAULT,
    ),
    "dp_lazy": (gpt(), Streaming(bucket_size=BUCKET_BYTES, init="lazy")),
    "tp": (gpt(MANY_STEPS, tensor_parallel=2, swiglu=True), DEFAULT),
    "tp_tied": (gpt(tensor_parallel=2, tied_embeddings=True, **BUCKETS), DEFAULT),
    "tp_bf16_gradients": (gpt(tensor_parallel=2, grad_reduce_in_fp32=False), DEFAULT),
    "ep": (gpt(experts=4, expert_parallel=2), DEFAULT),
    "ep_fused_overlap": (
        gpt(experts=4, expert_parallel=2, inner_optimizer="fused", **BUCKETS),
        DEFAULT,
    ),
    "dp_mixed_homes": (gpt(**BUCKETS), MIXED_HOMES),
    "ep_mixed_homes": (gpt(MANY_STEPS, experts=4, expert_parallel=2), MIXED_HOMES),
    "pp_tied": (gpt(pipeline_parallel=2, tied_embeddings=True), DEFAULT),
}
CASES = [(1, name) for name in ONE_RANK] + [(2, name) for name in TWO_RANKS]
# Without --slow these with every version.
ALWAYS = {(1, "basic"), (1, "fp16_skip"), (2, "dp"), (2, "pp_tied")}
# With mains as remainders: these always, and without --slow some of them.
REMAINDERS = {
    (1, "fused_step_convention"),
    (1, "mixed_dtype_moe"),
    (1, "bf16_gradients_fused"),
    (1, "fp16_skip"),
    (1, "frozen"),
    (1, "lazy_bf16_gradients_moe"),
    (2, "dp_overlap_mixed_dtype_moe"),
    (2, "dp_mixed_homes"),
    (2, "tp_bf16_gradients"),
    (2, "pp_tied"),
}
QUICK_REMAINDERS = {
    (1, "fp16_skip"),
    (1, "lazy_bf16_gradients_moe"),
    (2, "dp_mixed_homes"),
    (2, "pp_tied"),
}
ARE_ALL_WANTED = bool(os.environ.get("GDS_OPTIMIZER_TEST_ALL"))
FP32, REMAINDER, REMAINDER_REST = "fp32", "remainder", "remainder_rest"


def is_slow(case: tuple[int, str], group: str) -> bool:
    if group == FP32:
        return not (case in ALWAYS or has_turn(CASES.index(case)))
    return case not in QUICK_REMAINDERS or bool(MEGATRON_PATH)


def param(case: tuple[int, str], group: str) -> Any:
    size, name = case
    suffix = "" if group == FP32 else "-remainder"
    marks = marks_of(is_slow(case, group))
    return pytest.param((size, name, group), id=f"{size}-{name}{suffix}", marks=marks)


def runs(group: str) -> list[Any]:
    """Parameters of tests: (number of ranks, name, group), whose cases run together."""
    chosen = {
        FP32: CASES,
        REMAINDER: [case for case in CASES if case in REMAINDERS],
        REMAINDER_REST: [case for case in CASES if case not in REMAINDERS and ARE_ALL_WANTED],
    }[group]
    return [param(case, group) for case in chosen]


ALL = runs(FP32) + runs(REMAINDER) + runs(REMAINDER_REST)


class Comparisons:
    """Comparisons by (world size, name, group); those of a size and group share processes."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory, is_slow: bool) -> None:
        self._tmp_path_factory = tmp_path_factory
        self._is_slow = is_slow
        self._ranks: dict[tuple[int, str], list[dict[str, Comparison]]] = {}

    def __getitem__(self, case: tuple[int, str, str]) -> list[Comparison]:
        world_size, name, group = case
        if (world_size, group) not in self._ranks:
            directory = str(self._tmp_path_factory.mktemp(f"state{world_size}"))
            main = "fp32" if group == FP32 else "auto"
            # At least: nothing that a case looks at depends on what comes after its last step.
            least = MANY_STEPS if self._is_slow else STEPS
            cases = {
                other: (
                    replace(config, steps=max(config.steps, least)),
                    replace(streaming, main=main),
                )
                for other, (config, streaming) in {1: ONE_RANK, 2: TWO_RANKS}[world_size].items()
                if (world_size, other, group) in {each.values[0] for each in runs(group)}
                and (self._is_slow or not is_slow((world_size, other), group))
            }
            self._ranks[world_size, group] = run_forked_ranks(
                world_size, compare_all, cases, directory, timeout_s=600
            )
        return [rank[name] for rank in self._ranks[world_size, group]]


@pytest.fixture(scope="module")
def comparisons(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Comparisons:
    return Comparisons(tmp_path_factory, pytestconfig.getoption("slow"))


@pytest.mark.parametrize("case", ALL)
def test_streamed_equals_resident(comparisons, case):
    for comparison in comparisons[case]:
        assert not comparison.error, comparison.error


@pytest.mark.parametrize("case", runs(REMAINDER))
def test_mains_of_bf16_parameters_are_remainders(comparisons, case):
    has_bf16 = case[1] != "fp16_skip"
    for comparison in comparisons[case]:
        assert not comparison.error, comparison.error
        assert ("main:remainder16" in comparison.main_codecs) == has_bf16
        assert ("fp32" in comparison.main_codecs) != has_bf16


def test_parameters_are_split(comparisons):
    """The small buckets do what they are for."""
    for comparison in comparisons[1, "basic", FP32]:
        assert comparison.bucket_count > 20
        assert comparison.split_shards > 8


@pytest.mark.parametrize("case", [case for case in runs(FP32) if "homes" in case.values[0][1]])
def test_buckets_live_everywhere(comparisons, case):
    for comparison in comparisons[case]:
        assert comparison.homes == {"device", "host", "nvme"}


@pytest.mark.parametrize(
    "case",
    [param((1, name), FP32) for name in ("one_large_bucket", "one_large_bucket_bf16_gradients")],
)
def test_neighbours_are_stepped_as_one(comparisons, case):
    """Shards of one group that follow each other in the gradient buffer, in fp32 or not."""
    (comparison,) = comparisons[case]
    assert 0 < comparison.stepped_tensors <= comparison.pieces * 2 // 3


@pytest.mark.parametrize("case", ALL)
def test_closing_leaves_nothing_on_disk(comparisons, case):
    assert [comparison.leftovers for comparison in comparisons[case]] == [[]] * case[0]


@pytest.mark.parametrize(
    ("case", "skipped"),
    [
        pytest.param(*each.values, skipped, id=name, marks=each.marks)
        for each, skipped, name in (
            (param((1, "fp16_skip"), FP32), SKIPPED, "one"),
            (param((2, "dp_fp16_skip"), FP32), SKIPPED, "two"),
            (param((1, "skip_the_first"), FP32), 0, "first"),
        )
    ],
)
def test_the_skipped_step_was_skipped(comparisons, case, skipped):
    for comparison in comparisons[case]:
        made = [s.success for s in comparison.resident.steps]
        assert len(made) >= STEPS
        assert made == [step != skipped for step in range(len(made))]

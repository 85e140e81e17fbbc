"""The engine: streamed steps give the bits of resident steps, and nothing else is touched."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gds_optimizer.bench.page_cache import resident_pages
from gds_optimizer.errors import (
    ClosedError,
    ConfigError,
    EvictedReadError,
    StepFailedError,
    UnsupportedError,
)
from gds_optimizer.evicted import evicted_like
from gds_optimizer.layout import PlaneSpec, Shard, SpaceSpec, plan_layout
from gds_optimizer.megatron.fused_adam import FusedAdamStandIn
from gds_optimizer.plan import Binding, plan_engine
from gds_optimizer.slots import SlotPool
from tests.support import io_backends
from tests.support.engines import (
    SIZES,
    SMALL_BUCKET_BYTES,
    adamw,
    bits_of,
    first_values,
    grads_of,
    leftovers,
    pair,
    same_bits,
    streamed,
)
from tests.support.libcuda_stub import DriverStubUnavailableError, load_driver_stub

sgd = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
nadam = partial(torch.optim.NAdam, lr=1e-2)
# Counts its steps in the groups, also of groups without a gradient.
fused_adam = partial(FusedAdamStandIn, lr=1e-2, weight_decay=0.1)
EVERY = tuple(range(len(SIZES)))


@pytest.fixture(params=["host", "posix-cpu"])
def kind(request):
    if request.param == "posix-cpu":
        try:
            load_driver_stub()
        except DriverStubUnavailableError as error:
            pytest.skip(str(error))
    return request.param


def contents(paths: list[Path]) -> list[bytes]:
    return [path.read_bytes() for path in paths]


# Shapes


@pytest.mark.parametrize("slots", [1, 2, 3, 64])
def test_any_number_of_slots(tmp_path, slots):
    with pair(tmp_path, adamw, slots=slots) as both:
        for step in range(5):
            both.step(step)
        both.check()


def test_both_io_paths(tmp_path, kind):
    with pair(tmp_path, adamw, kind=kind) as both:
        for step in range(4):
            both.step(step)
        both.check()
        assert both.engine.last_stats.io_path == {"host": "host", "posix-cpu": "posix"}[kind]


def test_all_sizes_from_1_to_4097(tmp_path):
    sizes = [1, 2, 3, 7, 63, 64, 65, 127, 128, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097]
    with pair(tmp_path, partial(torch.optim.AdamW, fused=True), sizes) as both:
        assert len(both.engine.layout.buckets) > 15
        for step in range(3):
            both.step(step)
        both.check()


@pytest.mark.parametrize(
    "sizes",
    [[1], [10 * 1024], [10 * 1024 + 1], [1] * 100, [0, 1, 0], [64] * 16 + [1], [4 * 64] * 9],
    ids=str,
)
def test_one_large_or_only_tiny_shards(tmp_path, sizes):
    with pair(tmp_path, adamw, sizes) as both:
        for step in range(3):
            both.step(step)
        both.check()


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_nothing_to_stream(tmp_path, sizes):
    with pair(tmp_path, partial(torch.optim.AdamW, lr=1e-2), sizes or [0]) as both:
        assert both.engine.layout.buckets == ()
        for step in range(2):
            both.step(step)
        both.check()
        assert both.engine.steps == 2


def test_one_bucket_that_holds_everything(tmp_path):
    with pair(tmp_path, adamw, bucket_size=2**24) as both:
        assert len(both.engine.layout.buckets) == 1
        for step in range(3):
            both.step(step)
        both.check()
        assert both.engine.last_stats.read_bytes == 0  # it is still in its slot


def test_fp16_models(tmp_path):
    """The engine asks nothing of the model's precision."""
    with pair(tmp_path, adamw, dtype=torch.float16) as both:
        assert both.streamed.models[3].dtype == torch.float16
        for step in range(3):
            both.step(step)
        both.check()


@pytest.mark.parametrize("make", [adamw, sgd, partial(torch.optim.SGD, lr=1e-2)])
def test_mains_that_stay_resident_beside_others(tmp_path, make):
    """fp32 parameters are their own mains: only their moments are on disk."""
    with pair(tmp_path, make, native=(1, 3, 4)) as both:
        spaces = {
            tuple(shard.name for shard in space.shards): [plane.name for plane in space.planes]
            for space in both.engine.layout.spaces
        }
        for shards, planes in spaces.items():
            assert ("main" in planes) == ("p0" in shards)
            assert ("p0" in shards) != ("p1" in shards)
        for step in range(5):
            both.step(step, {2: (1, 5), 3: (3, 8)}.get(step, ()))
        both.check()
        assert type(both.streamed.mains[3]) is torch.Tensor


def test_only_mains_that_stay_resident(tmp_path):
    with pair(tmp_path, adamw, native=EVERY) as both:
        for step in range(4):
            both.step(step)
        both.check()


def test_no_moments_at_all(tmp_path):
    with pair(tmp_path, partial(torch.optim.SGD, lr=1e-2)) as both:
        assert [plane.name for plane in both.engine.layout.spaces[0].planes] == ["main"]
        for step in range(4):
            both.step(step)
        both.check()


def test_groups_with_different_planes(tmp_path):
    groups = {0: {"amsgrad": False}, 3: {"amsgrad": True}, 6: {}}
    with pair(tmp_path, adamw, groups=groups, bucket_size=16 * 1024) as both:
        planes = [[plane.name for plane in space.planes] for space in both.engine.layout.spaces]
        assert sorted(map(len, planes)) == [3, 4]
        for step in range(4):
            both.step(step)
        both.check()


# Time


def test_two_hundred_steps(tmp_path):
    with pair(tmp_path, adamw, [5000, 100, 1]) as both:
        schedulers = [
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
            for optimizer in both.optimizers
        ]
        for step in range(200):
            both.step(step)
            for scheduler in schedulers:
                scheduler.step()
        both.check()


def test_schedulers_and_changes_of_hyper_parameters(tmp_path):
    with pair(tmp_path, adamw, groups={4: {"weight_decay": 0.5}}) as both:
        schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
            for optimizer in both.optimizers
        ]
        for step in range(8):
            for optimizer in both.optimizers:
                first, second = optimizer.param_groups
                first["betas"] = (0.9 - 0.02 * step, 0.99 - 0.001 * step)
                second["weight_decay"] = 0.1 * step
                second["eps"] = 1e-8 * (1 + step)
            both.step(step)
            for scheduler in schedulers:
                scheduler.step()
        both.check()
        assert both.optimizers[1].param_groups[0]["lr"] == pytest.approx(1e-2 / 9)


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
def test_a_scheduler_that_patches_step_sees_every_step(tmp_path):
    with pair(tmp_path, adamw) as both:
        optimizer = both.optimizers[1]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for step in range(4):
            both.step(step)
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_a_learning_rate_that_is_a_tensor(tmp_path):
    def make(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=torch.tensor(1e-2), foreach=False)

    with pair(tmp_path, make) as both:
        rates = [optimizer.param_groups[0]["lr"] for optimizer in both.optimizers]
        for step in range(5):
            for rate in rates:
                rate.mul_(0.9)
            both.step(step)
        both.check()
        assert both.optimizers[1].param_groups[0]["lr"] is rates[1]


def test_scalars_of_a_parameter_are_its_own(tmp_path):
    """After freezing, the step counters of the parameters differ."""
    with pair(tmp_path, nadam) as both:
        patterns = [(0, 1), (), (3, 8), (2, 3), (), (8,)]
        for step, without in enumerate(patterns):
            both.step(step, without)
            both.check()
        state = both.engine.read_state()
        steps = [int(state[f"p{i}"]["step"]) for i in (0, 2, 3, 5, 8)]
        assert steps == [5, 5, 4, 6, 4]
        products = {float(state[f"p{i}"]["mu_product"]) for i in (0, 3, 5)}
        assert len(products) == 3


def test_a_parameter_that_never_trains(tmp_path):
    with pair(tmp_path, adamw) as both:
        for step in range(4):
            both.step(step, (3, 4, 8))
        both.check()
        state = both.engine.read_state()
        assert set(state["p3"]) == {"main"}
        assert same_bits(state["p3"]["main"], first_values(SIZES)[3].float())


@pytest.mark.parametrize("make", [adamw, fused_adam], ids=["adamw", "fused"])
def test_a_group_without_gradients_for_a_while(tmp_path, make):
    groups = {0: {}, 4: {"lr": 1e-3}}
    second = tuple(range(4, len(SIZES)))
    with pair(tmp_path, make, groups=groups) as both:
        for step, without in enumerate([(), second, second, (), EVERY, ()]):
            both.step(step, without)
            both.check()


def test_buckets_without_gradients_are_not_touched(tmp_path):
    with pair(tmp_path, adamw) as both:
        for step in range(2):
            both.step(step)
        both.engine.drain()
        paths = both.streamed.paths
        before = contents(paths)
        both.step(2, (8,))
        both.engine.drain()
        after = contents(paths)
        touched = {i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}
        buckets = both.engine.layout.buckets
        wanted = {b.index for b in buckets if any(piece.shard != 8 for piece in b.pieces)}
        assert touched == wanted
        assert len(touched) < len(buckets)
        assert both.engine.last_stats.buckets == len(touched)
        both.check()


def test_a_step_without_any_gradient(tmp_path):
    with pair(tmp_path, adamw) as both:
        both.step(0)
        both.engine.drain()
        before = contents(both.streamed.paths)
        both.step(1, EVERY)
        both.engine.drain()
        assert contents(both.streamed.paths) == before
        assert both.engine.last_stats.buckets == 0
        both.check()


def test_hooks_and_closures(tmp_path):
    with pair(tmp_path, adamw) as both:
        calls: list[str] = []
        optimizer = both.streamed.optimizer
        optimizer.register_step_pre_hook(lambda *a: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *a: calls.append("post"))
        both.step(0)
        assert calls == ["pre", "post"]
        for main in both.streamed.mains:
            main.grad = None
        assert optimizer.step(lambda: 7.5) == 7.5
        assert calls == ["pre", "post"] * 2


def test_gradients_are_left_as_they_were(tmp_path):
    with streamed(tmp_path) as run:
        grads = grads_of(SIZES, 0)
        for main, grad in zip(run.mains, grads, strict=True):
            main.grad = grad
        before = bits_of(grads)
        run.optimizer.step()
        assert all(m.grad is g for m, g in zip(run.mains, grads, strict=True))
        assert bits_of(grads) == before
        run.optimizer.zero_grad()
        assert all(main.grad is None for main in run.mains)


# First values


@pytest.mark.parametrize("make", [adamw, sgd, nadam], ids=["adamw", "sgd", "nadam"])
def test_lazy_eager_and_given_first_values_are_the_same(tmp_path, make):
    for initialize in ("eager", "lazy", "given"):
        with pair(tmp_path, make, initialize=initialize) as both:
            for step in range(4):
                both.step(step, {0: (3, 8), 2: (0, 3)}.get(step, ()))
                both.check()


def plane_values(directory: Path) -> dict[str, dict[str, np.ndarray]]:
    """What the files below `directory` say, by shard and plane: read without this package's engine.

    The layout comes from `layout.json` and its documented rules.
    """
    described = json.loads((directory / "layout.json").read_text())
    specs = [
        SpaceSpec(
            planes=tuple(PlaneSpec(**plane) for plane in space["planes"]),
            shards=tuple(Shard(**shard) for shard in space["shards"]),
        )
        for space in described["spaces"]
    ]
    layout = plan_layout(specs, bucket_numel=described["bucket_numel"])
    assert layout.describe() == described
    found: dict[str, dict[str, np.ndarray]] = {}
    for bucket in layout.buckets:
        content = np.fromfile(directory / f"bucket{bucket.index:05d}.bin", dtype=np.uint8)
        assert content.nbytes == bucket.file_bytes
        shards = layout.spaces[bucket.space].shards
        for plane in bucket.planes:
            values = content[plane.offset : plane.offset + 4 * bucket.numel].view(np.float32)
            for piece in bucket.pieces:
                shard = shards[piece.shard]
                target = found.setdefault(shard.name, {}).setdefault(
                    plane.name, np.zeros(shard.numel, np.float32)
                )
                target[piece.shard_offset : piece.shard_offset + piece.numel] = values[
                    piece.bucket_offset : piece.bucket_offset + piece.numel
                ]
    return found


def test_eager_files_hold_the_fp32_casts(tmp_path):
    with streamed(tmp_path) as run:
        run.engine.drain()
        found = plane_values(run.store.directories[0])
        for index, value in enumerate(first_values(SIZES)):
            if value.numel():
                assert found[f"p{index}"]["main"].tobytes() == value.float().numpy().tobytes()
        assert run.engine.last_stats.read_bytes == 0


def test_files_hold_the_state_after_a_step(tmp_path):
    with pair(tmp_path, adamw) as both:
        for step in range(3):
            both.step(step)
        both.engine.drain()
        found = plane_values(both.streamed.store.directories[0])
        for index, numel in enumerate(SIZES):
            state = both.resident.state(index)
            for plane in ("main", "exp_avg", "exp_avg_sq") if numel else ():
                assert found[f"p{index}"][plane].tobytes() == state[plane].numpy().tobytes()


def test_a_lazy_start_writes_nothing_before_the_first_step(tmp_path):
    with streamed(tmp_path, initialize="lazy") as run:
        assert not any(content.strip(b"\0") for content in contents(run.paths))
        assert run.backend.counters() == {"host.read": 0, "host.write": 0}
        assert run.engine.read_state().keys() == {f"p{i}" for i in EVERY}
        run.step(grads_of(SIZES, 0))
        assert run.engine.last_stats.read_bytes == 0
        assert run.backend.counters()["host.read"] == 0
        assert run.engine.last_stats.written_bytes == run.layout.total_bytes


def test_an_eager_start_writes_mains_and_footers_only(tmp_path):
    with streamed(tmp_path) as run:
        wanted = sum(bucket.planes[0].nbytes + 4096 for bucket in run.layout.buckets)
        assert run.engine.last_stats.written_bytes == wanted
        run.step(grads_of(SIZES, 0))
        # Of the buckets that are no more in a slot.
        read = run.layout.buckets[: -len(run.pool.slots)]
        assert run.engine.last_stats.read_bytes == sum(b.planes[0].nbytes + 4096 for b in read)


@pytest.mark.parametrize("make", [adamw, nadam, fused_adam], ids=["adamw", "nadam", "fused"])
@pytest.mark.parametrize("slots", [1, 3])
def test_state_that_is_given_continues(tmp_path, make, slots):
    """Resident for 3 steps, streamed for 3 more, in which a parameter joins."""
    groups = {4: {"weight_decay": 0.3}}

    def train(optimizer: torch.optim.Optimizer, mains: list[torch.Tensor]) -> None:
        for step in range(3):
            for main, grad in zip(mains, grads_of(SIZES, step, (2, 7)), strict=True):
                main.grad = grad
            optimizer.step()

    options: dict[str, Any] = {"initialize": "given", "warm_up": train, "slots": slots}
    with pair(tmp_path, make, groups=groups, **options) as both:
        assert all(binding.initial is None for binding in both.engine.plan.bindings)
        for step in range(3):
            both.resident.step(grads_of(SIZES, step, (2, 7)))
        for step in range(3, 6):
            both.step(step)
            both.check()


# Reloading


def test_mains_from_the_model(tmp_path):
    with pair(tmp_path, adamw) as both:
        for step in range(2):
            both.step(step)
        new = first_values(SIZES, seed=9)
        for models in (both.resident.models, both.streamed.models):
            for model, value in zip(models, new, strict=True):
                model.copy_(value)
        for main, value in zip(both.resident.mains, new, strict=True):
            main.copy_(value)
        both.engine.drain()
        before = contents(both.streamed.paths)
        both.engine.take_mains_from_model()
        assert contents(both.streamed.paths) == before
        both.check()
        for step in range(2, 5):
            both.step(step, (3,) if step == 2 else ())
            both.check()


def test_mains_from_the_model_are_not_read(tmp_path):
    with streamed(tmp_path) as run:
        run.step(grads_of(SIZES, 0))
        run.engine.take_mains_from_model()
        run.step(grads_of(SIZES, 1))
        # Which buckets the slots still hold depends on which write ended first; how many does not.
        held = run.engine.last_stats.cached_buckets
        moments_and_footer = sorted(
            sum(plane.nbytes for plane in bucket.planes[1:]) + 4096 for bucket in run.layout.buckets
        )
        assert run.engine.last_stats.read_bytes <= sum(moments_and_footer[held:])


def test_a_reload_before_the_first_step(tmp_path):
    for initialize in ("eager", "lazy"):
        with pair(tmp_path, adamw, initialize=initialize) as both:
            new = first_values(SIZES, seed=9)
            for models in (both.resident.models, both.streamed.models):
                for model, value in zip(models, new, strict=True):
                    model.copy_(value)
            for main, value in zip(both.resident.mains, new, strict=True):
                main.copy_(value)
            both.engine.take_mains_from_model()
            both.check()
            both.step(0)
            both.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("steps", [0, 2])
def test_mains_from_elsewhere(tmp_path, dtype, steps):
    for initialize in ("eager", "lazy"):
        with pair(tmp_path, adamw, initialize=initialize) as both:
            for step in range(steps):
                both.step(step)
            values = {i: torch.randn(SIZES[i]).to(dtype) for i in (0, 3, 4, 8)}
            for index, value in values.items():
                both.resident.mains[index].copy_(value)
            for index in set(EVERY) - set(values):
                both.resident.mains[index].copy_(both.resident.models[index])
            both.engine.write_mains({id(both.streamed.mains[i]): v for i, v in values.items()})
            assert both.engine.steps == steps
            both.check()
            both.step(9)
            both.check()


# Reading and changing mains between steps


def test_reading_between_steps_is_refused(tmp_path):
    with streamed(tmp_path) as run:
        run.step(grads_of(SIZES, 0))
        main = run.mains[3]
        with pytest.raises(EvictedReadError, match="p3"):
            main.norm()
        with pytest.raises(EvictedReadError, match="exp_avg of p3"):
            run.optimizer.state[main]["exp_avg"]
        assert run.optimizer.state[main]["step"].item() == 1


def test_reading_the_state_changes_nothing(tmp_path):
    with pair(tmp_path, adamw) as both:
        both.step(0)
        both.engine.drain()
        before = contents(both.streamed.paths)
        first = both.engine.read_state()
        second = both.engine.read_state()
        for name, entry in first.items():
            assert all(same_bits(value, second[name][key]) for key, value in entry.items())
        assert contents(both.streamed.paths) == before
        both.step(1)
        both.check()


def test_materialized_mains_can_be_read(tmp_path):
    with pair(tmp_path, adamw) as both:
        for step in range(2):
            both.step(step)
        both.engine.drain()
        before = contents(both.streamed.paths)
        chosen = [both.streamed.mains[i] for i in (3, 8, 4, 3)]
        with both.engine.materialized(chosen):
            for index in (3, 4, 8):
                assert same_bits(both.streamed.mains[index] + 0, both.resident.mains[index] + 0)
            with pytest.raises(EvictedReadError, match="p7"):
                both.streamed.mains[7].norm()
        with pytest.raises(EvictedReadError, match="p3"):
            both.streamed.mains[3].norm()
        assert both.engine.last_stats.written_bytes == 0
        assert contents(both.streamed.paths) == before
        both.step(2)
        both.check()


CHANGES = {
    "mul_": lambda main: main.mul_(0.5),
    "data": lambda main: main.data.mul_(0.5),
    "copy_": lambda main: main.data.copy_(main * 0.5),
    "replaced": lambda main: setattr(main, "data", main * 0.5),
    "slice": lambda main: main[:5].mul_(0.5),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("initialize", ["eager", "lazy"])
@pytest.mark.parametrize("steps", [0, 2])
def test_what_is_changed_inside_is_written_back(tmp_path, how, initialize, steps):
    with pair(tmp_path, adamw, initialize=initialize) as both:
        for step in range(steps):
            both.step(step)
        with both.engine.materialized([both.streamed.mains[i] for i in (3, 8)]):
            for mains in (both.resident.mains, both.streamed.mains):
                for index in (3, 8):
                    CHANGES[how](mains[index])
        both.check()
        for step in range(2, 4):
            both.step(step)
            both.check()


def test_the_model_gets_what_was_changed_at_the_next_step_even_without_a_gradient(tmp_path):
    with pair(tmp_path, adamw) as both:
        both.step(0)
        with both.engine.materialized([both.streamed.mains[8]]):
            for mains in (both.resident.mains, both.streamed.mains):
                mains[8].mul_(2)
        new = torch.randn(SIZES[3])
        assert not same_bits(both.streamed.models[8], (both.resident.mains[8]).bfloat16())
        both.step(1, EVERY)
        both.check()
        both.resident.mains[3].copy_(new)
        for index in set(EVERY) - {3}:
            both.resident.mains[index].copy_(both.resident.models[index])
        both.engine.write_mains({id(both.streamed.mains[3]): new})
        both.step(2, EVERY)
        both.check()
        both.step(3, EVERY)
        assert both.engine.last_stats.buckets == 0


def test_a_change_to_minus_zero_is_a_change(tmp_path):
    with pair(tmp_path, adamw) as both:
        for mains in (both.resident.mains, both.streamed.mains):
            with both.engine.materialized([mains[3]]):
                mains[3][7] = 0.0
        for mains in (both.resident.mains, both.streamed.mains):
            with both.engine.materialized([mains[3]]):
                mains[3][7] = -0.0
        both.check()


def test_what_was_changed_before_an_exception_stays(tmp_path):
    def change_and_fail() -> None:
        with both.engine.materialized([both.streamed.mains[3]]):
            both.streamed.mains[3].mul_(2)
            raise ValueError("odd")

    with pair(tmp_path, adamw) as both:
        both.step(0)
        with pytest.raises(ValueError, match="odd"):
            change_and_fail()
        both.resident.mains[3].mul_(2)
        with pytest.raises(EvictedReadError):
            both.streamed.mains[3].norm()
        both.check()
        both.step(1)
        both.check()


def test_materialized_after_a_reload(tmp_path):
    with pair(tmp_path, adamw) as both:
        both.step(0)
        for main, model in zip(both.resident.mains, both.resident.models, strict=True):
            main.copy_(model)
        both.engine.take_mains_from_model()
        with both.engine.materialized([both.streamed.mains[3]]):
            assert same_bits(both.streamed.mains[3] + 0, both.resident.mains[3] + 0)
            both.streamed.mains[3].mul_(3)
        both.resident.mains[3].mul_(3)
        both.check()
        both.step(1)
        both.check()


def test_materialized_blocks_nest(tmp_path):
    with pair(tmp_path, adamw) as both:
        first, second = both.streamed.mains[3], both.streamed.mains[8]
        with both.engine.materialized([first]):
            with both.engine.materialized([first, second]):
                first.add_(1)
                second.add_(1)
            first.add_(1)
            with pytest.raises(EvictedReadError):
                second.norm()
        both.resident.mains[3].add_(1).add_(1)
        both.resident.mains[8].add_(1)
        both.check()


def test_materializing_what_is_not_ours_is_nothing(tmp_path):
    other = evicted_like(torch.ones(3), dtype=torch.float32, name="other")
    with pair(tmp_path, adamw, native=(3,)) as both:
        both.step(0)
        with both.engine.materialized([other, both.streamed.mains[3], torch.ones(2)]):
            both.streamed.mains[3].mul_(2)
            both.resident.mains[3].mul_(2)
            with pytest.raises(EvictedReadError):
                other.norm()
        assert both.engine.last_stats.buckets == 0
        both.check()


def test_a_step_inside_a_materialized_block_is_refused(tmp_path):
    with pair(tmp_path, adamw) as both:
        both.step(0)
        for main, grad in zip(both.streamed.mains, grads_of(SIZES, 1), strict=True):
            main.grad = grad
        with (
            both.engine.materialized([both.streamed.mains[3]]),
            pytest.raises(UnsupportedError, match="inside `materialized` would be undone"),
        ):
            both.streamed.optimizer.step()
        both.step(1)
        both.check()


# What is in slots and caches


def test_the_page_cache_stays_empty(tmp_path, kind):
    with pair(tmp_path, adamw, kind=kind) as both:
        engine, paths = both.engine, both.streamed.paths

        def check(what: str) -> None:
            engine.drain()
            assert {path.name: resident_pages(path) for path in paths} == dict.fromkeys(
                (path.name for path in paths), 0
            ), what

        check("eager construction")
        both.step(0)
        check("step 1")
        both.step(1, (3,))
        check("step 2")
        engine.take_mains_from_model()
        both.streamed.step(grads_of(SIZES, 2))
        check("a step after a reload")
        engine.write_mains({id(both.streamed.mains[8]): torch.ones(SIZES[8])})
        check("a reload of mains")
        with engine.materialized(both.streamed.mains):
            both.streamed.mains[3].mul_(2)
        check("materialized")
        engine.read_state()
        check("reading")
    with streamed(tmp_path, initialize="lazy", kind=kind) as run:
        assert not any(resident_pages(path) for path in run.paths)
        run.step(grads_of(SIZES, 0))
        run.engine.drain()
        assert not any(resident_pages(path) for path in run.paths)


def test_the_resident_pages_are_seen(tmp_path):
    """The test above can fail."""
    with streamed(tmp_path) as run:
        run.paths[0].read_bytes()
        assert resident_pages(run.paths[0]) == 4


def test_steps_go_forwards_and_backwards(tmp_path):
    with streamed(tmp_path, slots=3) as run:
        for step in range(4):
            run.step(grads_of(SIZES, step))
            assert run.engine.last_stats.cached_buckets == 3
            assert run.engine.last_stats.buckets == len(run.layout.buckets)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_slots_that_are_given_back_are_free(tmp_path, dtype):
    """Tensors that the optimizer stepped keep no memory alive."""
    with pair(tmp_path, adamw, moments={"moment_dtype": dtype}) as both:
        both.step(0)
        both.engine.drain()
        pool = both.streamed.pool
        storages = [slot.buffer.untyped_storage() for slot in pool.slots]
        storages.append(pool.scratch.untyped_storage())
        pool.suspend()
        gc.collect()
        assert [torch._C._storage_Use_Count(each._cdata) for each in storages] == [1] * 4
        pool.resume()
        both.step(1)
        both.check()


def test_slots_can_be_given_back_between_steps(tmp_path):
    with pair(tmp_path, adamw) as both:
        both.step(0)
        both.engine.drain()
        both.streamed.pool.suspend()
        for use in (
            lambda: both.streamed.step(grads_of(SIZES, 1)),
            both.engine.read_state,
            both.engine.initialize,
            lambda: both.engine.write_mains({}),
        ):
            with pytest.raises(ClosedError, match=r"slots .* were given back.*take them again"):
                use()
        both.streamed.pool.resume()
        both.step(1)
        both.check()
        both.engine.drain()
        both.streamed.pool.suspend()
        both.engine.take_mains_from_model()
        for main, model in zip(both.resident.mains, both.resident.models, strict=True):
            main.copy_(model)
        both.streamed.pool.resume()
        both.step(2)
        both.check()


def test_the_files_do_not_depend_on_the_slots(tmp_path):
    """Nothing of one bucket is left in the gaps of another."""
    found = []
    for slots in (1, 64):
        with streamed(tmp_path, slots=slots) as run:
            for step in range(2):
                run.step(grads_of(SIZES, step))
            run.engine.drain()
            found.append(contents(run.paths))
    assert found[0] == found[1]


def test_two_engines_share_a_pool(tmp_path):
    backend = io_backends.make("host")
    pool = SlotPool(2, 16 * 4096, backend)
    options: dict[str, Any] = {"backend": backend, "pool": pool}
    with (
        pair(tmp_path, adamw, name="rank00000/opt0", **options) as first,
        pair(tmp_path, sgd, [7000, 3], name="rank00000/opt1", **options) as second,
    ):
        for step in range(4):
            first.step(step)
            second.step(step)
        first.check()
        second.check()
        first.step(5)
        second.check()
        first.close()
        second.step(5)
        second.check()
    pool.close()
    backend.close()
    assert leftovers(tmp_path) == []


def test_two_directories_share_the_state(tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    with pair(roots, adamw) as both:
        for step in range(3):
            both.step(step)
        both.check()
        both.engine.drain()
        for root in roots:
            sizes = [path.stat().st_size for path in root.rglob("bucket*.bin")]
            assert len(sizes) >= len(both.engine.layout.buckets) // 2
            assert all(path.read_bytes().strip(b"\0") for path in root.rglob("bucket*.bin"))


def test_statistics_add_up(tmp_path):
    with streamed(tmp_path) as run:
        run.engine.drain()
        before = run.backend.counters()
        run.step(grads_of(SIZES, 0))
        run.engine.drain()
        stats, after = run.engine.last_stats, run.backend.counters()
        assert stats.written_bytes == after["host.write"] - before["host.write"]
        assert stats.read_bytes == after["host.read"] - before["host.read"]
        assert stats.written_bytes == run.layout.total_bytes
        assert stats.buckets == len(run.layout.buckets)
        assert sum(stats.phases_s.values()) == pytest.approx(stats.wall_s)
        assert min(stats.phases_s.values()) >= 0


# Misuse


def test_bytes_that_go_another_way_are_reported_once(tmp_path, monkeypatch, caplog):
    with streamed(tmp_path) as run:
        way = str(run.backend.io_path)
        counters = {f"{way}.read": 8, "elsewhere.total": 0}
        monkeypatch.setattr(run.backend, "counters", lambda: counters)
        run.step(grads_of(SIZES, 0))
        assert caplog.records == []
        counters["elsewhere.total"] = 4096
        run.step(grads_of(SIZES, 0))
        run.step(grads_of(SIZES, 0))
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert f"the I/O path is {way}, but" in record.message
        assert "elsewhere" in record.message


class InTheMiddle(torch.optim.AdamW):
    """An optimizer whose step is interrupted, as a signal handler would."""

    interruption: Callable[[], Any] | None = None

    def step(self, closure: Any = None) -> Any:
        if type(self).interruption is not None:
            type(self).interruption()
        return super().step(closure)


def test_nothing_else_happens_in_the_middle_of_a_step(tmp_path, monkeypatch):
    refused: list[str] = []
    (tmp_path / "b").mkdir()
    with streamed(tmp_path, InTheMiddle) as run, streamed(tmp_path / "b", InTheMiddle) as reference:

        def interrupt() -> None:
            for use in (run.engine.read_state, run.engine.drain, run.engine.settle):
                with pytest.raises(UnsupportedError, match="in the middle of a step"):
                    use()
                refused.append(use.__name__)
            with (
                pytest.raises(UnsupportedError, match="between two steps"),
                run.engine.materialized(run.mains),
            ):
                pass

        for step in range(3):
            monkeypatch.setattr(InTheMiddle, "interruption", staticmethod(interrupt))
            run.step(grads_of(SIZES, step))
            monkeypatch.setattr(InTheMiddle, "interruption", None)
            reference.step(grads_of(SIZES, step))
        assert refused
        found, wanted = run.engine.read_state(), reference.engine.read_state()
        for shard, values in wanted.items():
            for name, value in values.items():
                assert same_bits(found[shard][name], value), (shard, name)


def test_another_thread_is_refused_in_the_middle_of_a_step(tmp_path, monkeypatch):
    refused: list[bool] = []
    with streamed(tmp_path, InTheMiddle) as run:

        def read() -> None:
            with pytest.raises(UnsupportedError, match="from one thread"):
                run.engine.read_state()
            refused.append(True)

        def interrupt() -> None:
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()

        monkeypatch.setattr(InTheMiddle, "interruption", staticmethod(interrupt))
        run.step(grads_of(SIZES, 0))
    assert refused


def test_state_put_into_the_optimizer_itself_is_refused(tmp_path):
    with streamed(tmp_path) as run:
        run.step(grads_of(SIZES, 0))
        main = run.mains[0]
        run.optimizer.state[main] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(SIZES[0])}
        with pytest.raises(UnsupportedError, match="exp_avg of p0 was put into the optimizer"):
            run.step(grads_of(SIZES, 1))


def test_a_failure_is_a_new_exception_every_time(tmp_path):
    with streamed(tmp_path) as run:
        run.engine._failure = StepFailedError("torn")
        found = []
        for _ in range(2):
            with pytest.raises(StepFailedError, match="torn") as caught:
                run.engine.check_usable()
            found.append(caught.value)
        assert found[0] is not found[1]
        run.engine._failure = None


def test_a_parameter_that_joins_later_is_refused(tmp_path):
    with pair(tmp_path, adamw) as both:
        both.step(0)
        late = torch.ones(5)
        late.grad = torch.ones(5)
        both.streamed.optimizer.add_param_group({"params": [late]})
        with pytest.raises(UnsupportedError, match="1 parameters were added to the optimizer"):
            both.streamed.optimizer.step()
        both.streamed.optimizer.param_groups.pop()
        both.step(1)
        both.check()


def test_state_that_appears_later_is_refused(tmp_path):
    with streamed(tmp_path, partial(torch.optim.SGD, lr=1e-2)) as run:
        run.step(grads_of(SIZES, 0))
        run.optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(
            StepFailedError, match="began to keep 'momentum_buffer' for p"
        ) as caught:
            run.step(grads_of(SIZES, 1))
        assert isinstance(caught.value.__cause__, UnsupportedError)


def test_a_bucket_that_is_too_small_is_refused():
    models = first_values(SIZES)
    mains = [evicted_like(m, dtype=torch.float32, name="p") for m in models]
    optimizer = adamw([torch.ones(1)])
    optimizer.param_groups[0]["params"] = mains
    bindings = [Binding(f"p{i}", a, m) for i, (a, m) in enumerate(zip(mains, models, strict=True))]
    with pytest.raises(ConfigError, match="takes 12288"):
        plan_engine(optimizer, bindings, SMALL_BUCKET_BYTES - 1)
    assert plan_engine(optimizer, bindings, SMALL_BUCKET_BYTES).layout.bucket_numel == 1024


def test_a_closed_engine_is_refused(tmp_path):
    with streamed(tmp_path) as run:
        run.engine.close()
        run.engine.close()
        assert leftovers(tmp_path) == []
        for use in (
            lambda: run.step(grads_of(SIZES, 0)),
            run.engine.read_state,
            run.engine.drain,
            run.engine.initialize,
            run.engine.take_mains_from_model,
        ):
            with pytest.raises(ClosedError, match=f"{tmp_path}/rank00000/opt0 is closed"):
                use()


def test_an_engine_that_is_dropped_closes_itself(tmp_path):
    backend = io_backends.make("host")
    with streamed(tmp_path, backend=backend) as run:
        run.step(grads_of(SIZES, 0))
        assert leftovers(tmp_path)
        # `step` of the optimizer is all that holds it, apart from this test.
        run.optimizer.__dict__.pop("step")
        run._undo.pop_all()
        del run.engine
        gc.collect()
        assert leftovers(tmp_path) == []
    backend.close()


# Anything at all


@settings(max_examples=40)
@given(data=st.data())
def test_any_shards_buckets_slots_and_gradients(tmp_path_factory, data):
    sizes = data.draw(
        st.lists(st.one_of(st.integers(0, 80), st.integers(0, 5000)), min_size=1, max_size=12)
    )
    make = data.draw(
        st.sampled_from(
            [
                adamw,
                fused_adam,
                partial(torch.optim.AdamW, lr=1e-2, fused=True),
                sgd,
                nadam,
                partial(torch.optim.Rprop, lr=1e-2),
            ]
        )
    )
    numbers = st.integers(0, len(sizes) - 1)
    native = data.draw(st.sets(numbers, max_size=2))
    split = data.draw(numbers)
    directory = tmp_path_factory.mktemp("any")
    with pair(
        directory,
        make,
        sizes,
        groups={split: {"lr": 3e-3}} if split else None,
        native=tuple(native),
        bucket_size=data.draw(st.sampled_from([12 * 1024, 24 * 1024, 50_000, 2**20])),
        slots=data.draw(st.integers(1, 4)),
        initialize=data.draw(st.sampled_from(["eager", "lazy", "given"])),
    ) as both:
        for step in range(data.draw(st.integers(1, 6))):
            without = data.draw(st.sets(numbers)) if data.draw(st.booleans()) else ()
            both.step(step, tuple(without))
            both.check_models()
            action = data.draw(st.sampled_from(["", "check", "materialize", "reload", "drain"]))
            if action == "check":
                both.check()
            elif action == "materialize":
                chosen = data.draw(st.sets(numbers, max_size=3))
                with both.engine.materialized([both.streamed.mains[i] for i in chosen]):
                    for mains in (both.resident.mains, both.streamed.mains):
                        for index in chosen - native:
                            mains[index].mul_(0.7)
            elif action == "reload":
                both.engine.take_mains_from_model()
                for main, model in zip(both.resident.mains, both.resident.models, strict=True):
                    main.copy_(model)
            elif action == "drain":
                both.engine.drain()
        both.check()
    assert leftovers(directory) == []
    directory.rmdir()


def test_what_a_step_refuses_is_known_before_it(tmp_path):
    """In a chain, nothing may have stepped by then; see `Runtime.prepare_step`."""
    with streamed(tmp_path) as each:
        each.step(grads_of(SIZES, 0))
        params, state = each.optimizer.param_groups[0]["params"], each.optimizer.state

        def check_refused(kind: type[Exception], message: str) -> None:
            for refuse in (each.engine.prepare_step, each.optimizer.step):
                with pytest.raises(kind, match=message):
                    refuse()
            assert each.engine.steps == 1

        params.append(torch.zeros(3))
        check_refused(UnsupportedError, "after its state was set up")
        params.pop()
        held = state[each.mains[2]]
        state[each.mains[2]] = {**held, "exp_avg": torch.zeros(SIZES[2])}
        check_refused(UnsupportedError, "was put into the optimizer itself")
        state[each.mains[2]] = held
        each.engine.drain()
        each.pool.suspend()
        check_refused(ClosedError, "given back")
        each.pool.resume()
        each.engine.prepare_step()
        each.step(grads_of(SIZES, 1))
        assert each.engine.steps == 2

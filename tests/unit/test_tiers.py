"""Buckets on the device, in host memory and on NVMe: the same bits whatever the budgets are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.errors import StepFailedError
from gds_optimizer.footer import BucketRecord
from tests.support.engines import adamw, grads_of, pair

LOTS = 2**30
BUDGETS: dict[str, tuple[int, int]] = {
    "all_on_device": (LOTS, 0),
    "all_in_host_memory": (0, LOTS),
    "device_and_host": (100_000, LOTS),
    "device_and_nvme": (100_000, 0),
    "host_and_nvme": (0, 100_000),
    "three_kinds": (70_001, 60_001),  # no multiple of a bucket
    "less_than_a_bucket": (1000, 1000),
}
MOMENTS = {
    "fp32": {},
    "bf16": {"moment_dtype": "bf16"},
    "int8": {"moment_dtype": "int8"},
}


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


def amsgrad(groups: Any) -> torch.optim.Optimizer:
    return adamw(groups, amsgrad=True)


def fused(groups: Any) -> torch.optim.Optimizer:
    return adamw(groups, fused=True)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": adamw,
    "fused": fused,
    "amsgrad": amsgrad,
    "sgd": sgd,
}


@pytest.mark.thinned
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("budgets", BUDGETS)
def test_budgets_change_no_bit(tmp_path: Path, budgets: str, optimizer: str, moments: str) -> None:
    with pair(
        tmp_path,
        OPTIMIZERS[optimizer],
        budgets=BUDGETS[budgets],
        moments=MOMENTS[moments],
        bucket_size=16 * 1024,
    ) as both:
        for step in range(4):
            both.step(step, without=(3,) if step == 1 else ())
            both.check_models()
        both.check()


@pytest.mark.usefixtures("host_homes_are_copied")
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("budgets", ["all_in_host_memory", "host_and_nvme", "three_kinds"])
def test_copies_of_host_memory_change_no_bit(tmp_path: Path, budgets: str, moments: str) -> None:
    """As where there is a GPU; above, what is in host memory is stepped where it is."""
    with pair(tmp_path, fused, budgets=BUDGETS[budgets], moments=MOMENTS[moments]) as both:
        for step in range(4):
            both.step(step, without=(3,) if step == 1 else ())
            both.check_models()
            assert both.engine.last_stats.host_written_bytes > 0
        both.check()


class Moving(torch.optim.AdamW):
    """Leaves moments in other memory: as new tensors, and as other memory of the same tensor."""

    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].clone()
            state["exp_avg_sq"].data = state["exp_avg_sq"].clone()
        if Moving.fails:
            raise RuntimeError("out of memory")


def moving(groups: Any) -> torch.optim.Optimizer:
    return Moving(groups, lr=1e-2)


@pytest.mark.parametrize("budgets", ["all_on_device", "device_and_nvme", "less_than_a_bucket"])
def test_moments_that_the_optimizer_leaves_elsewhere_are_fetched(
    tmp_path: Path, budgets: str
) -> None:
    with pair(tmp_path, moving, budgets=BUDGETS[budgets]) as both:
        for step in range(4):
            both.step(step)
            both.check_models()
        both.check()


def test_what_a_failed_step_has_moved_is_forgotten_by_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(tmp_path, moving, budgets=BUDGETS["all_on_device"]) as both:
        both.step(0)
        both.step(1)
        engine, files = both.engine, both.streamed.store.in_memory
        bytes_before = {index: file.memory.clone() for index, file in files.items()}
        records = [BucketRecord(each.step, list(each.written)) for each in engine.records]
        shards = {name: (has, scalars) for name, has, scalars in engine.shard_scalars()}
        resident = [(name, key, values.clone()) for name, key, values in engine.resident_tensors()]
        with monkeypatch.context() as patch:
            patch.setattr(Moving, "fails", True)
            with pytest.raises(StepFailedError, match="out of memory"):
                both.streamed.step(grads_of(both.sizes, 2))
        for index, file in files.items():
            file.memory.copy_(bytes_before[index])
        engine.restore(engine.steps, records, shards)
        for each in resident:
            engine.set_resident(*each)
        both.step(2)
        both.check()


def test_views_of_what_lives_on_the_device_are_dropped_when_it_is_given_back(
    tmp_path: Path,
) -> None:
    with pair(tmp_path, fused, budgets=BUDGETS["all_on_device"]) as both:
        streamed = both.streamed

        def owners(tensor: torch.Tensor) -> int:
            return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))

        def most() -> int:
            return max(owners(file.memory) for file in streamed.store.in_memory.values())

        both.step(0)
        both.step(1)
        alone = owners(torch.empty(8))
        assert most() > alone
        streamed.pool.suspend()
        assert most() == alone
        streamed.pool.resume()
        both.step(2)
        both.check()
        memories = [file.memory for file in streamed.store.in_memory.values()]
        streamed.engine.close()
        assert max(map(owners, memories)) == alone

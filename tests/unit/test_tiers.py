"""Buckets on the device, in host memory and on NVMe: the same bits whatever the budgets are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import adamw, pair

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

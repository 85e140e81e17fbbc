"""The front end for plain PyTorch on a GPU: the same bits as resident, in bounded device memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.config import StreamConfig
from gds_optimizer.pytorch import stream
from tests.support.plain_pytorch import (
    FP32,
    MIXED,
    Twins,
    check_six_steps,
    check_twenty_steps,
)
from tests.support.probed import probed_once

pytestmark = pytest.mark.gpu

adamw = partial(torch.optim.AdamW, lr=1e-2)
OPTIMIZERS = {
    "adamw": adamw,
    "adamw_single": partial(adamw, foreach=False),
    "adamw_fused": partial(adamw, fused=True),
    "adamw_capturable": partial(adamw, capturable=True),
    "adamw_amsgrad": partial(adamw, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "sgd_fused": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
}
LOTS = 2**30
BUDGETS: dict[str, dict[str, Any]] = {
    "drives": {"host_budget": 0},
    "auto": {},
    "device": {"hbm_budget": LOTS},
    "all_three": {"hbm_budget": 20_000, "host_budget": 40_000},
    "remainder": {"host_budget": 0, "main": "auto"},
}


@pytest.fixture(scope="module", autouse=True)
def _probed_once() -> Iterator[None]:
    with probed_once():
        yield


@pytest.mark.parametrize("dtypes", [MIXED, FP32], ids=["mixed", "fp32"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_twenty_steps_are_those_of_a_resident_optimizer(
    tmp_path: Path, kind: str, dtypes: Any
) -> None:
    check_twenty_steps(tmp_path, OPTIMIZERS[kind], dtypes=dtypes, device="cuda")


@pytest.mark.parametrize("budget", BUDGETS)
def test_where_buckets_live_changes_no_bit(tmp_path: Path, budget: str) -> None:
    check_six_steps(tmp_path, OPTIMIZERS["adamw_fused"], device="cuda", **BUDGETS[budget])


def test_a_saved_state_continues(tmp_path: Path) -> None:
    twins = Twins(tmp_path, adamw, device="cuda", host_budget=0)
    with twins.streamed:
        for _ in range(4):
            twins.step()
        torch.save(twins.streamed.state_dict(), tmp_path / "state.pt")
        kept = torch.load(tmp_path / "state.pt", mmap=True, weights_only=True)
        twins.streamed.load_state_dict(kept)
        for _ in range(3):
            twins.step()
        twins.check()


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_skips_a_step(tmp_path: Path, fused: bool) -> None:
    twins = Twins(tmp_path, partial(adamw, fused=fused), dtypes=FP32, device="cuda", host_budget=0)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    with twins.streamed:
        for step in range(4):
            twins.give_gradients()
            scale = scaler.scale(torch.ones((), device="cuda"))
            for param in twins.params:
                param.grad.mul_(scale)
            if step == 2:
                twins.params[3].grad.view(-1)[5] = torch.inf
            scaler.step(twins.streamed)
            scaler.update()
            if step != 2:
                twins.step_resident()
        twins.check()


def test_device_memory_is_the_slots(tmp_path: Path) -> None:
    """Neither mains nor moments nor fp32 gradients are ever on the device as a whole."""
    numel, bucket_bytes = 2**26, 12 * 2**20
    param = torch.nn.Parameter(torch.ones(numel, dtype=torch.bfloat16, device="cuda"))
    param.grad = torch.ones_like(param)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    config = StreamConfig(
        directories=(tmp_path,), bucket_size=bucket_bytes, host_budget=0, tune="never"
    )
    with stream(torch.optim.AdamW([param], lr=1e-2, fused=True), config) as optimizer:
        for _ in range(2):
            optimizer.step()
        torch.cuda.synchronize()
        extra_bytes = torch.cuda.max_memory_allocated() - before_bytes
    # An fp32 copy of anything of the parameter's size would take 256 MiB.
    assert extra_bytes < 8 * bucket_bytes  # temporaries of stepping and summing up one bucket

"""Buckets on the GPU, in pinned host memory and on NVMe: the same bits, and nothing is allocated.

Buckets are large and slots few here, so that copies and kernels overlap: a missing wait shows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.bench.tiers import run_tiers_bench
from gds_optimizer.config import StreamConfig
from gds_optimizer.io.memory import HostBuffer, _pin
from gds_optimizer.mapped_state import map_state
from gds_optimizer.written_out import lend_device_memory, take_device_memory
from tests.support.engines import Pair, adamw, grads_of, pair, same_bits
from tests.support.snapshots import restore, take

pytestmark = pytest.mark.gpu

MIB = 2**20
LOTS = 2**40
# Of elements; 12 bytes each. About twenty buckets of 6 MiB.
SIZES = (1_000_000, 64, 700_001, 2_000_000, 5, 3_000_000, 1_500_000, 1_200_000, 100)
BUCKET_BYTES = 6 * MIB
BUDGETS: dict[str, tuple[int, int]] = {
    "device": (LOTS, 0),
    "host": (0, LOTS),
    "device_and_host": (50 * MIB, LOTS),
    "mix": (40 * MIB, 45 * MIB),
}


def foreach(groups: Any) -> torch.optim.Optimizer:
    return adamw(groups, foreach=True)


def fused(groups: Any) -> torch.optim.Optimizer:
    return adamw(groups, fused=True)


def capturable(groups: Any) -> torch.optim.Optimizer:
    return adamw(groups, capturable=True)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "foreach": foreach,
    "fused": fused,
    "capturable": capturable,
    "sgd": sgd,
}


def options(budgets: str, **more: Any) -> dict[str, Any]:
    return {
        "sizes": SIZES,
        "kind": "posix-cuda",
        "device": "cuda",
        "bucket_size": BUCKET_BYTES,
        "budgets": BUDGETS[budgets],
        **more,
    }


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("budgets", BUDGETS)
def test_the_same_bits(tmp_path: Path, budgets: str, optimizer: str, slots: int) -> None:
    with pair(tmp_path, OPTIMIZERS[optimizer], **options(budgets, slots=slots)) as both:
        for step in range(8):
            both.step(step, without=(3,) if step == 2 else ())
            if step % 3 == 0:
                both.check_models()
        both.check()


@pytest.mark.parametrize("moments", ["bf16", "int8"])
@pytest.mark.parametrize("budgets", BUDGETS)
def test_encoded_moments(tmp_path: Path, budgets: str, moments: str) -> None:
    with pair(tmp_path, fused, **options(budgets, moments={"moment_dtype": moments})) as both:
        for step in range(4):
            both.step(step)
        both.check()


def steps_without_waiting(both: Pair, grads: list[Any], count: int) -> None:
    """Steps whose gradients are there already, one right behind the other."""
    for number in range(count):
        for main, grad in zip(both.streamed.mains, grads[number % len(grads)], strict=True):
            main.grad = grad
        both.streamed.optimizer.step()


@pytest.mark.parametrize("budgets", BUDGETS)
def test_steps_right_behind_each_other(tmp_path: Path, budgets: str) -> None:
    """The host runs ahead of the device, also from one step into the next."""
    with pair(tmp_path, fused, **options(budgets)) as both:
        grads = [[g.cuda() for g in grads_of(SIZES, step)] for step in range(2)]
        steps_without_waiting(both, grads, 10)
        for number in range(10):
            both.resident.step(grads[number % 2])
        both.check()


@pytest.mark.parametrize("budgets", ["device", "host", "device_and_host"])
def test_a_steady_step_allocates_nothing_and_does_not_wait(tmp_path: Path, budgets: str) -> None:
    with pair(tmp_path, fused, **options(budgets)) as both:
        grads = [[g.cuda() for g in grads_of(SIZES, step)] for step in range(2)]
        steps_without_waiting(both, grads, 3)
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info(), torch.cuda.memory_stats()["num_device_alloc"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps_without_waiting(both, grads, 6)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert before == (
            torch.cuda.mem_get_info(),
            torch.cuda.memory_stats()["num_device_alloc"],
        )
        assert both.engine.last_stats.read_bytes == both.engine.last_stats.written_bytes == 0


def test_a_steady_step_with_a_part_on_nvme_allocates_nothing_either(tmp_path: Path) -> None:
    with pair(tmp_path, fused, **options("mix")) as both:
        grads = [[g.cuda() for g in grads_of(SIZES, step)] for step in range(2)]
        steps_without_waiting(both, grads, 3)
        both.engine.drain()
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info(), torch.cuda.memory_stats()["num_device_alloc"]
        steps_without_waiting(both, grads, 6)
        both.engine.drain()
        torch.cuda.synchronize()
        assert before == (
            torch.cuda.mem_get_info(),
            torch.cuda.memory_stats()["num_device_alloc"],
        )
        stats = both.engine.last_stats
        assert min(stats.written_bytes, stats.host_written_bytes, stats.in_place_buckets) > 0


@pytest.mark.parametrize("budgets", BUDGETS)
def test_snapshots_mappings_and_lent_memory(tmp_path: Path, budgets: str) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with pair(state, fused, **options(budgets)) as both:
        both.step(0)
        take(both.streamed, tmp_path / "snapshot")
        both.step(1)
        mapped = map_state(both.engine)
        for index in range(len(SIZES)):
            wanted = both.resident.state(index)
            for key, value in mapped.tensors(index).items():
                assert same_bits(value, wanted[key]), f"{key} of p{index}"
        both.step(2)
        both.engine.drain()
        free = torch.cuda.mem_get_info()[0]
        lend_device_memory([both.engine])
        both.streamed.pool.suspend()
        torch.cuda.synchronize()
        assert torch.cuda.mem_get_info()[0] > free
        both.streamed.pool.resume()
        take_device_memory([both.engine])
        both.step(3)
        both.check()
        models = [model.clone() for model in both.streamed.models]
        assert restore(both.streamed, tmp_path / "snapshot") == 1
        for step in (1, 2, 3):
            both.streamed.step([grad.cuda() for grad in grads_of(SIZES, step)])
        for wanted, found in zip(models, both.streamed.models, strict=True):
            assert same_bits(wanted, found)


def test_memory_comes_back(tmp_path: Path) -> None:
    torch.cuda.synchronize()
    with pair(tmp_path, fused, **options("mix")) as both:
        both.step(0)
        files = both.streamed.store.in_memory.values()
        host = [file for file in files if not file.stays_on_device]
        assert host
        assert all(file.memory.is_pinned() for file in host)
        held = torch.cuda.mem_get_info()[0]
    gc.collect()
    torch.cuda.empty_cache()
    assert all(file.memory.numel() == 0 for file in files)
    assert torch.cuda.mem_get_info()[0] > held + 40 * MIB


def test_pages_that_cannot_be_pinned() -> None:
    """A call that fails must not fail torch's next kernel, too."""
    device = torch.device("cuda", 0)
    buffer = HostBuffer(2 * MIB, device)
    assert buffer.is_pinned
    assert buffer.tensor.is_pinned()
    with pytest.raises(MemoryError, match="cannot be pinned"):
        _pin(buffer.tensor, device)
    assert int(torch.ones(1000, device=device).sum()) == 1000
    buffer.close()
    again = HostBuffer(2 * MIB, device)
    assert again.tensor.is_pinned()
    again.close()


def test_the_benchmark_runs(tmp_path: Path) -> None:
    found = run_tiers_bench(
        StreamConfig(directories=(tmp_path,), bucket_size=12 * MIB, io="posix"),
        numel=20_000_000,
        repeats=2,
        device=torch.device("cuda", 0),
    )
    assert found["buckets"]["host_and_nvme"]["nvme"] > 0
    assert min(found["seconds"].values()) > 0

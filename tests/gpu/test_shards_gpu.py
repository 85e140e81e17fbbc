"""Many small shards on a GPU: a steady step allocates nothing; counters that are set count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gds_optimizer.bench.shards import ShardedRun, run_shards_bench
from gds_optimizer.config import StreamConfig

pytestmark = pytest.mark.gpu

SIZES = [64 * (1 + n % 7) - n % 5 for n in range(3000)]
BUDGETS = {"nvme": {}, "host": {"host_budget": 2**34}, "device": {"hbm_budget": 2**34}}


def config_of(directory: Path, tier: str) -> StreamConfig:
    return StreamConfig(
        directories=(directory,), io="posix", bucket_size=3 * 2**20, **BUDGETS[tier]
    )


@pytest.mark.parametrize("tier", BUDGETS)
def test_a_steady_step_allocates_nothing_on_the_device(tmp_path: Path, tier: str) -> None:
    run = ShardedRun("run", config_of(tmp_path, tier), SIZES, torch.device("cuda", 0))
    try:
        for _ in range(4):
            run.step(counts=False)
        free_bytes, _ = torch.cuda.mem_get_info()
        for _ in range(6):
            run.step(counts=True)
        assert run.times.device_allocations == 0
        assert torch.cuda.mem_get_info()[0] >= free_bytes
        counters = [state["step"] for state in run.optimizer.state.values()]
        run.step(counts=False)
        again = [state["step"] for state in run.optimizer.state.values()]
        assert all(a is b for a, b in zip(counters, again, strict=True))
        assert {float(each) for each in counters[:3]} == {11.0}
    finally:
        run.close()


@pytest.mark.parametrize("tier", BUDGETS)
def test_a_counter_set_between_steps_counts(tmp_path: Path, tier: str) -> None:
    """In place or by another tensor: what was foreseen of the counters must not be believed."""
    found = []
    for is_in_place in (True, False):
        torch.manual_seed(0)
        directory = tmp_path / str(is_in_place)
        directory.mkdir()
        run = ShardedRun("run", config_of(directory, tier), SIZES, torch.device("cuda", 0))
        try:
            for step in range(5):
                if step == 3:
                    state = list(run.optimizer.state.values())[1500]
                    if is_in_place:
                        state["step"].fill_(100.0)
                    else:
                        state["step"] = torch.full_like(state["step"], 100.0)
                run.step(counts=False)
            counters = [float(each["step"]) for each in run.optimizer.state.values()]
            assert sorted(set(counters)) == [5.0, 102.0]
            entries = run.engine.read_state().values()
            found.append([(entry["main"], entry["exp_avg"]) for entry in entries])
        finally:
            run.close()
    for first, second in zip(*found, strict=True):
        assert all(map(torch.equal, first, second))


@pytest.mark.slow
def test_the_benchmark(tmp_path: Path) -> None:
    result = run_shards_bench(
        StreamConfig(directories=(tmp_path,), io="posix"),
        numel=100_000_000,
        shards=20_000,
        repeats=5,
        device=torch.device("cuda", 0),
    )
    print({name: round(way["step_s"], 4) for name, way in result["ways"].items()})
    print(result["tiny_to_large"], result["tiny_on_top_s"], result["python_s"])
    print("queueing", result["queueing_s"])
    assert result["device_allocations"] == 0

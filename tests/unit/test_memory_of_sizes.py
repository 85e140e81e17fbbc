"""Memory of a model four times as large at the same settings: the same slots, the same bound."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.bench.steps import synthetic_optimizer
from gds_optimizer.config import StreamConfig
from gds_optimizer.planning import plan_streaming
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.stepper import install_step

MIB = 2**20
SMALL_NUMEL = 2**22
BUCKET_BYTES = 3 * MIB // 2
LIMIT_BYTES = 16 * MIB
"""Slots, the temporaries of stepping a bucket, and what the interpreter takes for its objects."""


@pytest.mark.parametrize("main", ["fp32", "remainder"])
@pytest.mark.parametrize("moment_dtype", ["fp32", "bf16", "int8"])
def test_slots_do_not_know_the_number_of_parameters(
    tmp_path: Path, moment_dtype: str, main: str
) -> None:
    config = StreamConfig(directories=(tmp_path,), moment_dtype=moment_dtype, main=main)
    plans = [plan_streaming(numel, config) for numel in (1_240_000_000, 4_960_000_000)]
    assert plans[0].device_bytes == plans[1].device_bytes <= 3 * 2**28
    assert plans[0].rank_buckets < plans[1].rank_buckets


def _resident_bytes(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(what)


def measure(directory: str, numel: int) -> dict[str, Any]:
    """Construction and three steps; memory over the parameters and their gradients."""
    config = StreamConfig(
        directories=(Path(directory),),
        bucket_size=BUCKET_BYTES,
        io="host",
        allow_tmpfs=True,
        io_threads=4,
        self_check="never",
    )
    device = torch.device("cpu")

    def run(count: int) -> dict[str, Any]:
        optimizer, bindings = synthetic_optimizer(count, device)
        grads = torch.full((min(count, 2**24),), 0.01)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before_bytes = _resident_bytes("VmRSS")
        runtime = Runtime.build(
            [Part(optimizer, bindings, "opt0")], config, device=device, rank=0, eager=True
        )
        (engine,) = runtime.engines
        install_step(optimizer, engine.step)
        for _ in range(3):
            for binding in bindings:
                binding.main.grad = grads[: binding.main.numel()]
            optimizer.step()
        engine.drain()
        found = {
            "pool_bytes": runtime.pool.nbytes,
            "state_bytes": engine.layout.total_bytes,
            "peak_bytes": _resident_bytes("VmHWM") - before_bytes,
        }
        runtime.close_engine(engine)
        return found

    run(2**18)  # what is imported and started once
    return run(numel)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's clear_refs")
def test_a_run_takes_no_more_memory_for_more_parameters(tmp_path: Path) -> None:
    found = []
    for numel in (SMALL_NUMEL, 4 * SMALL_NUMEL):
        program = f"import json; from {__name__} import measure; "
        program += f"print(json.dumps(measure({str(tmp_path)!r}, {numel})))"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    small, large = found
    assert small["pool_bytes"] == large["pool_bytes"] <= 3 * (BUCKET_BYTES + 4096)
    assert large["state_bytes"] > 3.9 * small["state_bytes"] > 3.9 * 1.5 * LIMIT_BYTES
    assert small["peak_bytes"] <= LIMIT_BYTES, found
    assert large["peak_bytes"] <= LIMIT_BYTES, found

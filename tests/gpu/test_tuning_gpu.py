"""Tuning on a GPU: cuFile's calls and KvikIO's POSIX mode timed against each other for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer import tuning
from gds_optimizer.config import StreamConfig
from gds_optimizer.drive_speeds import MIN_STATE_BYTES
from gds_optimizer.evicted import evicted_like
from gds_optimizer.io import IoPath
from gds_optimizer.plan import Binding
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.stepper import install_step
from gds_optimizer.tuning import tune
from gds_optimizer.tuning_result import path_rates
from tests.gpu.test_io_gpu import why_cufile_does_not_work
from tests.support import io_backends
from tests.support.engines import grads_of, leftovers, same_bits
from tests.support.tuning_process import report_of

pytestmark = pytest.mark.gpu

SPARE_BYTES = 64 * 2**20
NUMEL = 3_000_000


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    for name in ("kvikio", "cupy"):
        pytest.importorskip(name, reason=f"needs {name}")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for name in ("KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS", "KVIKIO_TASK_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def _cufile(tmp_path_factory):
    root = tmp_path_factory.mktemp("cufile")
    io_backends.allow_cufile_compat_mode(root)
    reason = why_cufile_does_not_work(root)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def directory(tmp_path) -> Any:
    path = tmp_path / "state"
    path.mkdir()
    yield path
    assert leftovers(path) == []


@pytest.mark.usefixtures("_cufile")
def test_two_paths_are_timed_and_the_faster_is_taken(directory):
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    config = StreamConfig(directories=(directory,))
    report = report_of(IoPath.GDS_COMPAT, IoPath.POSIX, directories=(directory,))
    first = tune(config, report, device, MIN_STATE_BYTES)
    print(first.describe())  # with -s: what this machine gives
    assert [each.io_path for each in first.timings] == [IoPath.GDS_COMPAT, IoPath.POSIX]
    rates = path_rates(first.timings)
    assert first.io_path is max(rates, key=lambda path: rates[path])
    for path, rate in rates.items():
        assert f"{path} {rate / 1e9:.2f} GB/s" in first.describe()
    assert first.point in tuning.GRID
    free_bytes, _ = torch.cuda.mem_get_info(device)
    second = tune(config, report, device, MIN_STATE_BYTES)
    assert all(each.is_cached for each in second.timings)
    assert (second.io_path, second.point) == (first.io_path, first.point)
    third = tune(config, report, device, MIN_STATE_BYTES)
    assert third.timings == second.timings
    # Buffers are given back: another measurement leaves as much as there was.
    again = StreamConfig(directories=(directory,), io_threads=16)
    assert not tune(again, report, device, MIN_STATE_BYTES).timings[0].is_cached
    assert torch.cuda.mem_get_info(device)[0] > free_bytes - SPARE_BYTES


def test_steps_after_tuning_are_those_of_the_resident_optimizer(directory, monkeypatch):
    monkeypatch.setattr(tuning, "MIN_STATE_BYTES", 1)
    device = torch.device("cuda", 0)
    generator = torch.Generator().manual_seed(5)
    model = torch.randn(NUMEL, generator=generator).to(device, torch.bfloat16)
    resident_main = model.float()
    resident = torch.optim.AdamW([resident_main], lr=1e-2, fused=True)
    main = evicted_like(model, dtype=torch.float32, name="main")
    optimizer = torch.optim.AdamW([torch.zeros(1, device=device)], lr=1e-2, fused=True)
    optimizer.param_groups[0]["params"] = [main]
    config = StreamConfig(directories=(directory,), io="posix", bucket_size=12 * 2**20)
    part = Part(optimizer, [Binding("p", main, model)], "opt")
    made = Runtime.build([part], config, device=device, rank=0, eager=True)
    try:
        assert made.tuning.timings
        backend: Any = made.backend
        assert (backend.threads, backend.task_size_bytes) == made.tuning.point
        undo = install_step(optimizer, made.engines[0].step)
        for step in range(4):
            (grad,) = grads_of([NUMEL], step)
            main.grad = grad.to(device)
            resident_main.grad = grad.to(device)
            optimizer.step()
            resident.step()
        state = made.engines[0].read_state()["p"]
        undo()
    finally:
        made.close_engine(made.engines[0])
    wanted = {"main": resident_main, **resident.state[resident_main]}
    for name in ("main", "exp_avg", "exp_avg_sq"):
        assert same_bits(state[name].cpu(), wanted[name].cpu()), name
    assert torch.equal(model, resident_main.to(torch.bfloat16))


def test_the_command_times_what_works_here(directory):
    command = [sys.executable, "-m", "gds_optimizer.cli", "probe", "--time", "--json"]
    done = subprocess.run(
        [*command, str(directory)], capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    proven = report["directories"][0]["proven"]
    assert [each["io_path"] for each in report["timings"]] == proven
    fastest = max(report["timings"], key=lambda each: each["mixed_bytes_per_s"])
    assert report["io_path"] == fastest["io_path"]
    assert Path(report["timings"][0]["directory"]) == directory

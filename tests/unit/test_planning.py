"""`gds-optimizer plan`: what it says is what a run takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer import host_memory
from gds_optimizer.bench.steps import synthetic_optimizer
from gds_optimizer.cli import main as cli_main
from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import ConfigError
from gds_optimizer.homes import Home
from gds_optimizer.planning import engine_plan, plan_streaming
from gds_optimizer.rates import Rates
from gds_optimizer.room import free_bytes
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.tiers import Tiers

MOMENTS = [("fp32", "stochastic"), ("bf16", "nearest"), ("int8", "stochastic")]


def config_of(directory: Path, **options: Any) -> StreamConfig:
    values = {"bucket_size": 48 * 1024, "io": "host", "allow_tmpfs": True, "self_check": "never"}
    return StreamConfig(directories=(directory,), **{**values, **options})


@pytest.mark.parametrize(("dtype", "rounding"), MOMENTS)
@pytest.mark.parametrize("numel", [1, 4096, 50_001])
def test_a_run_takes_what_is_planned(tmp_path, numel, dtype, rounding):
    config = config_of(tmp_path, moment_dtype=dtype, moment_rounding=rounding)
    plan = plan_streaming(numel, config)
    device = torch.device("cpu")
    optimizer, bindings = synthetic_optimizer(numel, device)
    runtime = Runtime.build(
        [Part(optimizer, bindings, "opt0")], config, device=device, rank=0, eager=True
    )
    (engine,) = runtime.engines
    try:
        assert plan.device_bytes == runtime.pool.nbytes
        assert (plan.slots, plan.slot_bytes) == (len(runtime.pool.slots), runtime.pool.slot_bytes)
        files = list(tmp_path.rglob("bucket*.bin"))
        assert plan.files == plan.rank_buckets == len(files)
        sizes = [file.stat().st_size for file in files]
        assert plan.state_bytes == plan.rank_state_bytes == plan.local_bytes == sum(sizes)
        assert plan.bucket_bytes == max(sizes)
        assert plan.bytes_per_param == sum(sizes) / numel
        planes = engine.layout.spaces[0].planes
        assert plan.planes == {plane.name: plane.codec for plane in planes}
        for _ in range(3):
            for binding in bindings:
                binding.main.grad = torch.ones(binding.main.numel())
            engine.step()
            engine.drain()
        assert engine.last_stats.written_bytes == plan.written_bytes
        kept_bytes = plan.slots * plan.slot_bytes
        assert plan.read_bytes - kept_bytes <= engine.last_stats.read_bytes <= plan.read_bytes
    finally:
        runtime.close_engine(engine)


@pytest.mark.thinned
@pytest.mark.parametrize("main", ["fp32", "remainder"])
@pytest.mark.parametrize(
    "budgets", [(2**30, 0), (0, 2**30), (110_000, 0), (0, 110_000), (110_000, 60_000), (9, 9)]
)
def test_a_run_with_budgets_takes_what_is_planned(tmp_path, budgets, main, is_copied):
    hbm_budget, host_budget = budgets
    config = config_of(tmp_path, hbm_budget=hbm_budget, host_budget=host_budget, main=main)
    numel, device = 50_001, torch.device("cpu")
    plan = plan_streaming(numel, config, device_type="cpu")
    optimizer, bindings = synthetic_optimizer(numel, device)
    runtime = Runtime.build(
        [Part(optimizer, bindings, "opt0")], config, device=device, rank=0, eager=True
    )
    (engine,) = runtime.engines
    try:
        memory = engine.store.in_memory.values()
        found = {
            Home.DEVICE.value: [f.memory.numel() for f in memory if f.stays_on_device],
            Home.HOST.value: [f.memory.numel() for f in memory if not f.stays_on_device],
            Home.NVME.value: [f.stat().st_size for f in tmp_path.rglob("bucket*.bin")],
        }
        assert plan.buckets_by_home == {home: len(sizes) for home, sizes in found.items()}
        assert plan.bytes_by_home == {home: sum(sizes) for home, sizes in found.items()}
        assert plan.device_bytes == runtime.pool.nbytes + sum(found["device"])
        assert (plan.files, plan.local_bytes) == (len(found["nvme"]), sum(found["nvme"]))
        assert plan.local_host_bytes == sum(found["host"])
        for _ in range(2):
            for binding in bindings:
                binding.main.grad = torch.ones(binding.main.numel())
            engine.step()
            engine.drain()
        assert engine.last_stats.written_bytes == plan.written_bytes
        assert engine.last_stats.host_written_bytes == plan.host_written_bytes
        assert engine.last_stats.in_place_buckets == len(found["device"]) + (
            0 if is_copied else len(found["host"])
        )
        kept_bytes = plan.slots * plan.slot_bytes
        read_bytes = engine.last_stats.read_bytes + engine.last_stats.host_read_bytes
        assert plan.pcie_bytes - kept_bytes <= read_bytes <= plan.pcie_bytes
    finally:
        runtime.close_engine(engine)


@pytest.mark.parametrize("hbm_budget", [0, 110_000])
def test_unused_memory_is_that_of_the_log(tmp_path, hbm_budget):
    """What the plan says more memory would buy is what the same run says, and what it then gets."""
    config = config_of(tmp_path, hbm_budget=hbm_budget)
    available = 4 * 2**30
    plan = plan_streaming(50_001, config, host_memory_bytes=2 * available, ranks=4, local_ranks=2)
    tiers = Tiers.plan([engine_plan(plan.rank_numel, config).layout], config)
    offer = tiers.offer(available)
    assert offer is not None
    assert str(offer) in plan.to_text()
    assert plan.unused.host_budget_bytes == offer.budget_bytes == 2**30
    assert plan.unused.buckets_off_drives == offer.kept == plan.buckets_by_home["nvme"] > 0
    assert plan.unused.read_bytes == 0
    assert plan_streaming(50_001, config, host_memory_bytes=2**31 - 1).unused is None
    asked = plan_streaming(50_001, config_of(tmp_path, host_budget=2**30), host_memory_bytes=2**40)
    assert asked.unused is None


def test_a_step_in_which_nothing_would_move_is_not_said_to_take_no_time(tmp_path):
    options = {"rates": Rates(mixed_gbps=2.0, copy_gbps=40.0), "host_memory_bytes": 2**32}
    plans = [
        plan_streaming(10**8, config_of(tmp_path), device_type=kind, **options)
        for kind in ("cuda", "cpu")
    ]
    assert [plan.unused.step_high_s > 0 for plan in plans] == [True, False]
    told = [plan.to_text().splitlines()[-1].endswith("estimated") for plan in plans]
    assert told == [True, False]


def test_auto_is_the_half_of_a_machine_s_memory_by_its_ranks(tmp_path):
    config = config_of(tmp_path, host_budget="auto")
    layout = engine_plan(12_501, config).layout
    room_bytes = layout.buckets[0].file_bytes + layout.buckets[1].file_bytes
    plan = plan_streaming(
        50_001, config, ranks=4, local_ranks=2, host_memory_bytes=2 * 2 * room_bytes
    )
    assert plan.buckets_by_home == {"device": 0, "host": 2, "nvme": len(layout.buckets) - 2}
    assert plan.local_host_bytes == 2 * room_bytes


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_ranks_share_the_parameters(tmp_path, ranks):
    """All that the ranks have together is one number for each of them, added up."""
    numel, config = 50_001, config_of(tmp_path)
    plan = plan_streaming(numel, config, ranks=ranks)
    shares = [numel * (r + 1) // ranks - numel * r // ranks for r in range(ranks)]
    layouts = [engine_plan(share, config).layout for share in shares]
    assert plan.rank_numel == max(shares)
    assert plan.state_bytes == sum(layout.total_bytes for layout in layouts)
    assert plan.files == sum(len(layout.buckets) for layout in layouts)
    one = plan_streaming(numel, config, ranks=ranks, local_ranks=1)
    assert one.local_bytes == one.rank_state_bytes == max(e.total_bytes for e in layouts)
    assert one.state_bytes == plan.state_bytes == plan.local_bytes


def test_large_models_take_no_memory_to_plan(tmp_path):
    config = StreamConfig(directories=(tmp_path,))
    plan = plan_streaming(10**12, config, ranks=64)
    assert plan.device_bytes == 3 * plan.bucket_bytes == 3 * (192 * 2**20 + 4096)
    assert 12 <= plan.bytes_per_param < 12.01


def test_the_optimizer_decides_what_is_kept(tmp_path):
    plan = plan_streaming(4096, config_of(tmp_path), optimizer="sgd")
    assert plan.planes == {"main": "fp32", "momentum_buffer": "fp32"}


@pytest.mark.parametrize(
    ("rates", "wanted"),
    [
        ({}, None),
        ({"read_gbps": 4.0}, None),
        ({"read_gbps": 4.0, "write_gbps": 2.0}, (5.0, 7.5)),
        ({"mixed_gbps": 5.0}, (4.0, 4.0)),
        ({"mixed_gbps": 5.0, "read_gbps": 4.0, "ratio_to_limit": 1.5}, (6.0, 6.0)),
    ],
)
def test_seconds(rates, wanted):
    assert Rates(**rates).step_s(10**10, 10**10) == wanted


@pytest.mark.parametrize(
    ("rates", "moved", "wanted"),
    [
        ({}, (0, 0, 0), (0.0, 0.0)),
        ({"mixed_gbps": 5.0}, (10**10, 10**10, 10**10), None),
        ({"copy_gbps": 50.0}, (0, 0, 10**11), (2.0, 2.0)),
        ({"copy_gbps": 50.0}, (1, 1, 10**11), None),
        ({"mixed_gbps": 5.0, "copy_gbps": 50.0}, (10**10, 10**10, 10**11), (4.0, 6.0)),
    ],
)
def test_seconds_with_copies(rates, moved, wanted):
    assert Rates(**rates).step_s(*moved) == wanted


def test_seconds_are_of_the_ranks_of_a_machine(tmp_path):
    config, rates = config_of(tmp_path), Rates(mixed_gbps=0.001)
    one, four = (
        plan_streaming(40_000, config, ranks=8, local_ranks=n, rates=rates) for n in (1, 4)
    )
    assert one.step_low_s == 2 * one.rank_state_bytes / 1e6
    assert four.step_low_s == 4 * one.step_low_s


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), 10**400, "fast", True])
def test_rates_that_there_are_not(value):
    with pytest.raises(ConfigError, match="mixed_gbps is"):
        Rates(mixed_gbps=value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"numel": 0}, "numel is 0"),
        ({"ranks": 5001}, "ranks is 5001, wanted a whole number from 1 to 5000"),
        ({"ranks": 2, "local_ranks": 3}, "local_ranks is 3"),
        ({"optimizer": "lion"}, "optimizer is 'lion', wanted one of adamw, sgd"),
        ({"numel": 10**12}, "ask for larger buckets"),
    ],
)
def test_what_cannot_be_planned(tmp_path, options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        plan_streaming(**{"numel": 5000, "config": config_of(tmp_path), **options})


# ---------------------------------------------------------------------- the command


def run(*arguments: object) -> int:
    return cli_main.main(["plan", *map(str, arguments)])


def test_the_command(tmp_path, capsys):
    arguments = ("--numel", "7e9", "--ranks", 8, "--mixed-gbps", 10, "--dir", tmp_path)
    assert run(*arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["numel"], found["ranks"], found["rank_numel"]) == (7 * 10**9, 8, 875 * 10**6)
    config = StreamConfig(directories=(tmp_path,))
    assert found["rank_state_bytes"] == engine_plan(875 * 10**6, config).layout.total_bytes
    assert found["fits"] is (found["local_bytes"] <= found["free_bytes"])
    assert 0 < found["free_bytes"] <= 2 * free_bytes(tmp_path)
    assert run(*arguments) == 0
    text = capsys.readouterr().out
    assert "16.80 s a step, estimated, with 8 ranks on a machine's drives" in text
    assert "on the device 0 (0.00 GB), in host memory 0 (0.00 GB), on NVMe 53" in text
    assert "10.50 GB a rank, 84.00 GB in all" in text
    assert ("it does not fit" in text) is not found["fits"]


def test_without_directories_and_rates(capsys):
    assert run("--numel", 1e6, "--moment-dtype", "int8", "--bucket-size", "96KiB") == 0
    text = capsys.readouterr().out
    assert "exp_avg fp32:int8-signed-sr" in text
    assert "time        unknown: no rate was given or measured" in text
    assert "free" not in text


def test_rates_of_a_benchmark(tmp_path, capsys):
    """From a benchmark that was run, and what is named besides counts instead."""
    (tmp_path / "drive").mkdir()
    options = ("--dir", tmp_path / "drive", "--numel", 4e5, "--steps", 1, "--io", "host")
    arguments = ["bench", *options, "--device", "cpu", "--allow-tmpfs", "--json"]
    assert cli_main.main(list(map(str, arguments))) == 0
    printed = capsys.readouterr().out
    file = tmp_path / "bench.json"
    file.write_text(printed)
    measured = json.loads(printed)
    assert run("--numel", 4e5, "--bench", file, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    ratio = measured["ratio_to_limit"]
    moved_bytes = found["read_bytes"] + found["written_bytes"]
    assert found["step_low_s"] == pytest.approx(
        moved_bytes / measured["limit"]["mixed_gbps"] / 1e9 * ratio
    )
    assert run("--numel", 4e5, "--bench", file, "--mixed-gbps", 0.5, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_low_s"] == pytest.approx(moved_bytes / 0.5e9 * ratio)


def test_budgets_and_a_machine(capsys):
    options = ("--numel", "7e9", "--ranks", 8, "--host-memory", "400GiB", "--hbm-budget", "1GiB")
    assert run(*options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["buckets_by_home"] == {"device": 5, "host": 0, "nvme": 48}
    unused = found["unused"]
    assert unused["available_bytes"] == 50 * 2**30
    assert (unused["buckets_off_drives"], unused["read_bytes"]) == (48, 0)
    rates = ("--mixed-gbps", 8, "--copy-gbps", 50)
    assert run(*options, *rates) == 0
    text = capsys.readouterr().out
    assert "host memory has 50 GiB available to this rank" in text
    assert "would keep 48 of 48 buckets off the drives, which then read 0.00 GB a rank: 0.3" in text
    assert run(*options, "--host-budget", "auto", *rates) == 0
    text = capsys.readouterr().out
    assert "on NVMe 0" in text
    assert "unused" not in text
    assert run("--numel", "1e9", "--hbm-budget", "1TiB") == 0
    assert "nothing moves" in capsys.readouterr().out


def test_rates_that_are_measured(tmp_path, capsys):
    options = ("--numel", 1e6, "--dir", tmp_path, "--measure", "--allow-tmpfs", "--io", "host")
    assert run(*options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_low_s"] == found["step_high_s"] > 0
    assert list(tmp_path.iterdir()) == []
    assert run("--numel", 1e6, "--measure") == 2
    assert "--measure needs --dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"limit": {"read_gbps": 1}}', "[" * 100_000, None],
    ids=lambda content: str(content)[:30],
)
def test_files_that_are_no_benchmark(tmp_path, capsys, content):
    file = tmp_path / "bench.json"
    if content is not None:
        file.write_text(content)
    assert run("--numel", 10, "--bench", file) == 2
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [("--moment-dtype", "fp8"), ("--slots", 65), ("--dir", "/no such"), ("--ranks", 9)]
)
def test_settings_that_cannot_work(arguments):
    assert run("--numel", 8, *arguments) == 2


@pytest.mark.parametrize(
    ("options", "free_gib", "slots", "size"),
    [
        ([], 64, 3, 192 * 2**20),
        (["--device", "cpu"], 8, 6, 96 * 2**20),
        (["--device", "cpu"], 64, 12, 96 * 2**20),
        (["--device", "cpu", "--ranks", "8"], 64, 6, 96 * 2**20),
        (["--device", "cpu", "--host-memory", "4GiB"], 64, 6, 96 * 2**20),
        (["--device", "cpu", "--slots", "3"], 64, 3, 192 * 2**20),
        (["--device", "cpu", "--bucket-size", "48MiB"], 64, 3, 48 * 2**20),
    ],
)
def test_slots_and_buckets_are_those_of_a_run(capsys, monkeypatch, options, free_gib, slots, size):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: free_gib * 2**30)
    assert cli_main.main(["plan", "--numel", "1e9", "--json", *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["slots"] == slots
    assert data["slot_bytes"] == size + 4096  # with its footer

"""The benchmark of small shards: the same bytes in both, nothing left behind."""

from __future__ import annotations

import json
import pstats
import subprocess
import sys
from pathlib import Path

import pytest

from gds_optimizer.bench.shards import shard_sizes
from gds_optimizer.errors import ConfigError


@pytest.mark.parametrize("gap", [0, 1, 63])
@pytest.mark.parametrize("shards", [20, 33, 20_000])
def test_large_and_tiny_ones_take_the_same_bytes(shards, gap):
    large, tiny = shard_sizes(10_000_000, shards, gap)
    assert (len(large), len(tiny)) == (20, shards)
    assert sum(large) == sum(size + gap for size in tiny)
    assert all((size + gap) % 64 == 0 for size in tiny)
    assert sum(large) <= 10_000_000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [((10**6, 19, 0), "--shards is 19"), ((10**6, 20_000, 0), "1280000"), ((10**7, 20, 64), "gap")],
)
def test_what_cannot_be_measured(arguments, complaint):
    with pytest.raises(ConfigError, match=complaint):
        shard_sizes(*arguments)


def test_every_way_is_timed(tmp_path):
    directory, profile = tmp_path / "drive", tmp_path / "profile"
    directory.mkdir()
    command = [sys.executable, "-m", "gds_optimizer.bench.shards", "--numel", "2e5", "--json"]
    command += ["--dir", str(directory), "--shards", "200", "--gap", "5", "--repeats", "2"]
    command += ["--io", "host", "--device", "cpu", "--bucket-size", "400KiB"]
    command += ["--profile", str(profile)]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    ).stdout
    found = json.loads(printed)
    ways = {f"{tier}_{kind}" for tier in ("host", "nvme") for kind in ("large", "tiny")}
    assert set(found["ways"]) == ways | {"python"}
    assert all(len(way["runs"]["step_s"]) == 2 for way in found["ways"].values())
    buckets, in_memory = found["buckets"], found["buckets_in_memory"]
    for kind in ("large", "tiny"):
        assert in_memory[f"host_{kind}"] == buckets[f"host_{kind}"] == buckets[f"nvme_{kind}"] > 4
        assert in_memory[f"nvme_{kind}"] == 0
    seconds = {name: way["step_s"] for name, way in found["ways"].items()}
    assert found["tiny_on_top_s"]["host"] == seconds["host_tiny"] - seconds["host_large"]
    assert found["tiny_to_large"]["nvme"] == seconds["nvme_tiny"] / seconds["nvme_large"]
    assert found["python_s"] == found["ways"]["python"]["thread_s"]
    assert pstats.Stats(str(profile)).total_calls > 200
    assert list(directory.iterdir()) == []

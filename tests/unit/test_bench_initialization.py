"""The benchmark of the first writing measures both sides alike and leaves nothing behind."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest


def test_both_sides_are_timed_in_every_round(tmp_path):
    command = [sys.executable, "-m", "gds_optimizer.bench.initialization", "--numel", "3e6"]
    command += ["--dir", str(tmp_path), "--rounds", "3", "--io", "host", "--device", "cpu"]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    ).stdout
    found = json.loads(printed)
    assert (found["io_path"], found["numel"]) == ("host", 3_000_000)
    assert 4 * 3_000_000 <= found["bytes"] < 1.1 * 4 * 3_000_000
    assert [len(found[key]) for key in ("initialize_s", "initialize_gbps", "plain_gbps")] == [3] * 3
    assert found["ratio"] == pytest.approx(
        statistics.median(found["plain_gbps"]) / statistics.median(found["initialize_gbps"])
    )
    assert not list(tmp_path.iterdir())

"""DistributedDataParallel with streamed state: every rank has its own, and all have the bits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engines import leftovers

pytestmark = pytest.mark.distributed

REPOSITORY = Path(__file__).parents[2]
RANKS = 2
LIMIT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_ranks_train_as_with_resident_state(tmp_path):
    (tmp_path / "state").mkdir()
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.support.ddp_process", str(tmp_path)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert process.returncode == 0, output
        assert f"rank {rank} is done" in output
    assert leftovers(tmp_path / "state") == []

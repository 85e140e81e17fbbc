"""The benchmark of checkpoints times everything it names and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

OF_SNAPSHOTS = {
    "step_s",
    "first_snapshot_s",
    "step_after_first_snapshot_s",
    "snapshot_s",
    "step_after_snapshot_s",
}
TIMES = OF_SNAPSHOTS | {
    "verify_s",
    "copy_s",
    "step_during_copy_s",
    "restore_s",
    "torch_save_s",
    "torch_load_s",
}


@pytest.mark.thinned
@pytest.mark.parametrize(("options", "times"), [([], TIMES), (["--snapshots-only"], OF_SNAPSHOTS)])
def test_everything_is_timed(tmp_path, options, times):
    (tmp_path / "state").mkdir()
    (tmp_path / "copies").mkdir()
    command = [sys.executable, "-m", "gds_optimizer.bench.checkpoints", "--numel", "1e5"]
    command += ["--dir", str(tmp_path / "state"), "--copy-to", str(tmp_path / "copies")]
    command += ["--bucket-size", "96KiB", "--io", "host", "--device", "cpu", *options]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    ).stdout
    found = json.loads(printed)
    assert (found["numel"], found["io_path"], found["buckets"]) == (100_000, "host", 13)
    assert 12 * 100_000 < found["state_bytes"] < 1.1 * 12 * 100_000
    assert {key for key in found if key.endswith("_s")} == times
    assert all(found[key] > 0 for key in times)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["copies", "state"]

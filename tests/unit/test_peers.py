"""Peers are run or said to be missing."""

from __future__ import annotations

import json

import pytest

from gds_optimizer.bench import peers

STREAMER = """
import torch
def build(params, directory):
    assert directory.is_dir()
    return torch.optim.AdamW(params)
"""


@pytest.mark.slow
def test_resident_ours_and_a_streamer(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(STREAMER)
    arguments = ["--dir", str(tmp_path), "--numel", "1e5", "--steps", "2", "--device", "cpu"]
    assert peers.main([*arguments, "--streamer", str(tmp_path / "mine.py")]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("resident", "gds-optimizer", "mine.py"):
        assert found[name]["step_s"] > 0
    for name, row in found.items():
        assert ("step_s" in row) != ("missing" in row), name
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]

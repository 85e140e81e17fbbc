"""The check of the direct path says "proven" for proof alone."""

from __future__ import annotations

import json

import pytest
import torch

from gds_optimizer.bench import gds_check


@pytest.mark.parametrize(
    ("operations", "refusal", "bench", "reason"),
    [
        ({"p2p.read": 3, "posix.read": 0}, "", None, None),
        ({"nvfs.write": 3}, "", None, None),
        ({"nvfs.write": 3, "posix.read": 1}, "", None, "1 operations by POSIX"),
        ({"posix.read": 0}, "", None, "no operation by peer-to-peer"),
        (None, "", None, "does not say"),
        ({"p2p.read": 3}, "no module", None, "no module"),
        ({"p2p.read": 3}, "", "refused", "refused"),
    ],
)
def test_what_is_proof(operations, refusal, bench, reason):
    reasons = gds_check.reasons_against(operations, refusal, bench)
    assert (reasons == []) is (reason is None)
    assert reason is None or reason in reasons[0]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_proven(tmp_path, capsys):
    output = tmp_path / "report.json"
    store = tmp_path / "store"
    store.mkdir()
    status = gds_check.main([str(store), "--numel", "1e5", "--output", str(output)])
    assert status == gds_check.EXIT_NOT_PROVEN
    report = json.loads(output.read_text())
    assert report["proven"] is False
    assert report["reasons"]
    assert "direct path: not proven" in capsys.readouterr().out

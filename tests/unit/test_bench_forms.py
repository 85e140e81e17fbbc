"""Several forms side by side: what is counted, what is set against what, and nothing is left."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from gds_optimizer.bench.forms import run_forms_bench
from gds_optimizer.bench.process_io import own_io
from gds_optimizer.cli import main as cli_main
from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import ConfigError, NoSpaceError

BUCKET_NUMEL = 2**15
FORMS = [(moments, main) for main in ("fp32", "remainder") for moments in ("fp32", "bf16", "int8")]
ENCODED = [12, 8, 4 + 2 * (1 + 1 / 64), 10, 6, 2.125 + 2 * (1 + 1 / 64)]


def run(directory, forms=FORMS, **options):
    return run_forms_bench(
        StreamConfig(directories=(directory,), bucket_size=12 * BUCKET_NUMEL, slots=2),
        forms=forms,
        **{"numel": 7 * BUCKET_NUMEL + 1, "steps": 2, "device": torch.device("cpu"), **options},
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bench")
    lines: list[str] = []
    result = run(directory, limit_bytes=2**20, progress=lines.append)
    return result, lines, directory


def test_forms_take_turns(found):
    result, lines, directory = found
    turns = [line.partition(" mains")[0] for line in lines if ": round " in line]
    wanted = [f"{moments} moments, {main}" for moments, main in FORMS]
    assert turns == wanted * 3
    assert list(directory.iterdir()) == []
    assert [len(form.steps) for form in result.forms] == [2] * len(FORMS)


def test_bytes_and_ratios(found):
    result = found[0]
    data = json.loads(json.dumps(result.to_dict()))
    assert data["numel"] == 8 * BUCKET_NUMEL
    assert [(each["moment_dtype"], each["main"]) for each in data["forms"]] == FORMS
    first = data["forms"][0]
    for each, encoded in zip(data["forms"], ENCODED, strict=True):
        counted = each["bytes_per_param"]
        assert counted["encoded"] == encoded
        assert encoded < counted["stored"] < encoded + 4 * 4096 / BUCKET_NUMEL + 1e-9
        assert counted["read"] == counted["written"] == counted["stored"]
        if own_io() is not None:
            for key in ("kernel_read", "kernel_written"):
                assert counted[key] == pytest.approx(counted["stored"], rel=0.05)
        assert (each["buckets"], each["cached_buckets"]) == (8, 2)
        wanted = counted["stored"] / first["bytes_per_param"]["stored"]
        assert each["bytes_ratio"] == pytest.approx(wanted)
        assert each["time_over_bytes"] == each["time_ratio"] / each["bytes_ratio"]
        pairs = zip(each["step"]["all_s"], first["step"]["all_s"], strict=True)
        low, high = sorted(own / other for own, other in pairs)
        assert low <= each["time_ratio"] <= high
        moved = each["gbps"] * each["step"]["median_s"]
        limit_s = moved / data["limit"]["mixed_gbps"]
        assert each["ratio_to_limit"] == pytest.approx(each["step"]["median_s"] / limit_s)
    assert (first["bytes_ratio"], first["time_ratio"]) == (1, 1)


def test_the_table_has_them_all(found):
    text = found[0].to_text()
    for (moments, main), encoded in zip(FORMS, ENCODED, strict=True):
        assert any(
            line.split()[:3] == [moments, main, f"{encoded:.3f}"] for line in text.splitlines()
        )


def test_what_does_not_go(tmp_path):
    with pytest.raises(ConfigError, match="a form is asked for twice"):
        run(tmp_path, [("fp32", "fp32"), ("fp32", "fp32")])
    with pytest.raises(NoSpaceError, match=r"the files of the benchmark need \d+ bytes"):
        run(tmp_path, numel=10**15)
    config = StreamConfig(directories=(tmp_path,), hbm_budget=1)
    with pytest.raises(ConfigError, match="leave --hbm-budget and --host-budget out"):
        run_forms_bench(config, forms=FORMS, numel=1, steps=1, device=torch.device("cpu"))
    assert list(tmp_path.iterdir()) == []


def test_the_command(tmp_path, capsys):
    command = ["bench", "--dir", str(tmp_path), "--numel", "4e4", "--bucket-size", "96KiB"]
    command += ["--steps", "1", "--device", "cpu", "--json", "--moment-dtype", "bf16,int8"]
    assert cli_main.main([*command, "--main", "fp32,remainder"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(each["main"], each["moment_dtype"]) for each in data["forms"]] == list(
        itertools.product(("fp32", "remainder"), ("bf16", "int8"))
    )
    assert cli_main.main([*command, "--ranks", "2"]) == 2
    assert "compare one thing at a time" in capsys.readouterr().err
    assert cli_main.main([*command, "--main", "fp32,half"]) == 2
    assert list(tmp_path.iterdir()) == []

"""The precision benchmark: the same numbers twice, the resident ones in fp32, honest verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from gds_optimizer.bench.precision import Training
from gds_optimizer.bench.precision_model import SIZES, batches, standard_library
from gds_optimizer.bench.precision_report import (
    TWINS,
    VARIANTS,
    codec_errors,
    differing,
    pack,
    summarize,
    to_text,
)
from gds_optimizer.errors import ConfigError

SIZE = SIZES["tiny"]
STEPS = 6


def losses(tmp_path: Path, variant: str | None, text: torch.Tensor) -> tuple[list[float], bytes]:
    run = Training(SIZE, variant, 3, torch.device("cpu"), tmp_path, STEPS)
    try:
        data = batches(text, SIZE, 3)
        for _ in range(STEPS):
            run.step(next(data))
        parameters = torch.cat([p.detach().view(-1) for p in run.model.parameters()])
        found = [loss.item() for loss in run.losses]
        return found, parameters.view(torch.uint8).numpy().tobytes()
    finally:
        run.close()


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return standard_library()[0]


def test_fp32_is_what_the_resident_optimizer_gives(tmp_path, text):
    assert losses(tmp_path, "fp32", text) == losses(tmp_path, None, text)


@pytest.mark.thinned
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_run_repeats_and_differs_where_it_should(tmp_path, text, variant):
    first = losses(tmp_path, variant, text)
    assert first == losses(tmp_path, variant, text)
    exact = not VARIANTS[variant].get("moment_dtype")
    assert (first == losses(tmp_path, "fp32", text)) == exact
    if variant in TWINS:
        assert first == losses(tmp_path, TWINS[variant], text)


def test_text_is_split(text):
    training, held_out, digest = standard_library()
    assert training.numel() > 10 * held_out.numel() > 100_000
    assert digest == standard_library()[2]
    batch = next(batches(training, SIZE, 1))
    assert batch.shape == (SIZE.batch, SIZE.context + 1)


@pytest.mark.slow
def test_errors_of_codecs():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(10_000, generator=generator)
    found = codec_errors({"exp_avg": values, "exp_avg_sq": values**2}, torch.device("cpu"))
    by_name = {(each["moment"], each["codec"], each["round_trips"]): each for each in found}
    assert len(by_name) == len(found) == 2 * 2 * 2 * 2
    assert 0 < by_name["exp_avg", "fp32:bf16", 1]["largest"] <= 2**-8
    # What was rounded once is a value that can be stored.
    assert by_name["exp_avg", "fp32:bf16", 1] == {
        **by_name["exp_avg", "fp32:bf16", 1000],
        "round_trips": 1,
    }


def result(variant: str, seed: int, loss: float) -> dict[str, object]:
    return {
        "variant": variant,
        "seed": seed,
        "validation_loss": loss,
        "final_training_loss": loss,
        "curve": [loss],
    }


def test_verdicts():
    results = [result("fp32", seed, loss) for seed, loss in enumerate((1.0, 1.1, 1.2))]
    results += [result("bf16", seed, loss) for seed, loss in enumerate((1.1, 1.2, 1.3))]
    results += [result("int8", seed, loss) for seed, loss in enumerate((1.3, 1.4, 1.5))]
    summary = summarize(results)
    rows = summary["variants"]
    assert summary["fp32_spread"] == pytest.approx(0.2)
    assert rows["bf16"]["difference_from_fp32"] == pytest.approx(0.1)
    assert rows["bf16"]["holds_up"]
    assert not rows["int8"]["holds_up"]
    assert "does not hold up" in to_text(summary)
    # One seed has no spread to hold anything against.
    assert not summarize(results[:1] + results[3:4])["variants"]["bf16"]["holds_up"]


@pytest.mark.parametrize("key", ["curve", "validation_loss", "parameters_sha256"])
def test_a_variant_that_loses_something_after_all_is_named(key):
    results = [{**result("bf16", seed, 1.0), "parameters_sha256": "a"} for seed in (0, 1)]
    results += [{**each, "variant": "bf16-remainder"} for each in results]
    summary = summarize(results)
    assert differing(summary) == []
    assert "the bits of `bf16`" in to_text(summary)
    results[3] = {**results[3], key: [2.0] if key == "curve" else 2.0}
    summary = summarize(results)
    assert differing(summary) == ["bf16-remainder"]
    assert "NOT the bits of `bf16`: seeds 1" in to_text(summary)
    assert differing(summarize(results[2:])) == []  # nothing to compare with


def test_what_is_packed_is_small(tmp_path):
    out = tmp_path / "results"
    out.mkdir()
    (out / "summary.json").write_text("{}")
    (out / "weights.pt").write_bytes(bytes(100))
    with tarfile.open(pack(out)) as tar:
        assert tar.getnames() == ["results/summary.json"]
    with open(out / "large.json", "wb") as file:
        file.truncate(16 * 2**20)
    with pytest.raises(ConfigError, match="name a new directory"):
        pack(out)


@pytest.mark.slow
def test_the_command(tmp_path):
    out = tmp_path / "results"
    command = [sys.executable, "-m", "gds_optimizer.bench.precision", "--out", str(out)]
    command += ["--size", "tiny", "--steps", "4", "--seeds", "1", "--device", "cpu"]
    command += ["--variants", "fp32", "int8", "remainder"]

    def run() -> str:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
        ).stdout

    table = run()
    assert "`fp32`" in table
    assert "`int8`" in table
    summary = json.loads((out / "summary.json").read_text())
    assert summary["codec_errors"]
    assert summary["variants"]["remainder"]["seeds_compared"] == [0]
    assert "the bits of `fp32`" in table
    names = {f"{variant}-0.json" for variant in ("fp32", "int8", "remainder")}
    names |= {"summary.json", "codec_errors.json", "table.md"}
    files = {path.name for path in out.iterdir()}
    assert files - {"curves.png"} == names
    errors = json.loads((out / "codec_errors.json").read_text())
    assert {each["round_trips"] for each in errors} == {1, 1000}
    with tarfile.open(tmp_path / "results.tar") as tar:
        assert set(tar.getnames()) == {f"results/{name}" for name in files}
    assert (tmp_path / "results.tar").stat().st_size < 2**20
    times = (out / "fp32-0.json").stat().st_mtime_ns
    assert run() == table
    assert (out / "fp32-0.json").stat().st_mtime_ns == times

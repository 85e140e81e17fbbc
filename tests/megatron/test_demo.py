"""`gds-optimizer demo` as a user runs it, and what it says where the two trainings differ."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.demo.compare import Snapshot, earliest, first_difference
from gds_optimizer.demo.launch import FOLDER
from gds_optimizer.demo.report import DemoConfig, DemoStep, Difference, PeakMemory
from gds_optimizer.demo.training import bucket_bytes_for
from gds_optimizer.errors import ConfigError
from gds_optimizer.lock import OwnedDirectory
from gds_optimizer.megatron.tiny_gpt import StepRecord
from tests.megatron import MEGATRON_PATH

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = ("--steps", "3", "--layers", "2", "--hidden", "64")
needs_megatron = pytest.mark.megatron
needs_ranks = pytest.mark.distributed
# One version demonstrates on one rank, the other on two; what the demo makes of a difference has
# nothing to do with the version.
slow_with_another_megatron = pytest.mark.slow if MEGATRON_PATH else pytest.mark.megatron
slow_with_the_installed_megatron = pytest.mark.megatron if MEGATRON_PATH else pytest.mark.slow
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def environment(**variables: str) -> dict[str, str]:
    paths = [MEGATRON_PATH, str(REPOSITORY), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), **variables}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "gds_optimizer.cli", "demo", *map(str, arguments)]


def run(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment() if env is None else env,
    )


def run_broken(patch: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The demo in a process in which `patch` has been executed first."""
    program = f"import sys\nfrom gds_optimizer.cli.main import main\n{patch}\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, "demo", *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        env=environment(),
    )


# ---------------------------------------------------------------------- real runs


@needs_megatron
@slow_with_another_megatron
def test_text_on_one_rank(tmp_path):
    """Everything at its default, in the current directory."""
    result = run(cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    text = result.stdout
    lines = text.splitlines()
    assert lines[0].startswith(f"{tmp_path}  ")
    path = re.search(r"^io path: (\S+) \(asked: auto\)$", text, re.MULTILINE)
    assert path is not None
    steps = re.findall(
        r"^ +(\d+) +(\S+) +(\S+) +([\d.]+) MB +([\d.]+) MB +([\d.]+) +([\d.]+)  (\S+)$",
        text,
        re.MULTILINE,
    )
    assert [int(step[0]) for step in steps] == list(range(6))
    for _, resident, streamed, read, written, seconds, rate, way in steps:
        assert resident == streamed
        assert float(seconds) > 0
        assert float(rate) >= 0
        assert way == path[1]
        assert 0 < float(read) < float(written)
    assert len({step[1] for step in steps}) == 6
    resident_mib, streamed_mib = (
        float(re.search(rf"^  {name} +([\d.]+) MiB: ", text, re.MULTILINE)[1])
        for name in ("resident", "streamed")
    )
    assert 0 < streamed_mib < resident_mib / 2
    assert lines[-1] == "bit-identical: yes"
    assert list(tmp_path.iterdir()) == []


@needs_megatron
@needs_ranks
@slow_with_the_installed_megatron
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs or none")
def test_json_on_two_ranks(tmp_path):
    result = run("--ranks", 2, "--json", *SMALL, "--dir", tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert set(report) == {
        "version",
        "config",
        "probe",
        "steps",
        "memory",
        "bit_identical",
        "first_difference",
    }
    assert (report["bit_identical"], report["first_difference"]) == (True, None)
    assert report["probe"]["io_path"]
    config = report["config"]
    assert config["directory"] == str(tmp_path)
    assert (config["ranks"], config["steps"], config["layers"]) == (2, 3, 2)
    assert config["buckets"] >= 16
    assert len(report["steps"]) == 3
    for number, step in enumerate(report["steps"]):
        assert set(step) == {field.name for field in fields(DemoStep)} | {"gb_per_s"}
        assert step["step"] == number
        assert step["loss_resident"] == step["loss_streamed"] > 0
        assert step["grad_norm_resident"] == step["grad_norm_streamed"] > 0
        assert step["written_bytes"] == config["state_bytes"]  # all buckets of both ranks
        assert 0 < step["read_bytes"] < step["written_bytes"]
        assert step["path"] == report["probe"]["io_path"]
    memory = report["memory"]
    assert set(memory) == {"resident", "streamed"}
    assert set(memory["resident"]) == {field.name for field in fields(PeakMemory)}
    # A rank has half of the shards: a main and two moments of fp32 each, and some counters.
    shard_bytes = 12 * config["parameters"] / 2
    assert shard_bytes * 0.9 < memory["resident"]["held_bytes"] < shard_bytes * 1.1
    assert memory["resident"]["slot_bytes"] == 0
    slots_bytes = config["slots"] * (config["bucket_bytes"] + 4096)
    assert 0 < memory["streamed"]["slot_bytes"] <= slots_bytes
    assert memory["streamed"]["held_bytes"] < 4096
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- different bits

FLIP_A_MOMENT = """
from gds_optimizer.demo import training
collect = training.collect_streamed_state
def flipped(optimizer):
    state = collect(optimizer)
    name = sorted(state)[0]
    state[name]["exp_avg"][5] += 1.0
    return state
training.collect_streamed_state = flipped
"""
STEP_TOO_FAR = """
import torch
from gds_optimizer.stepper import Stepper
run = Stepper.run
def too_far(self, pieces):
    results = run(self, pieces)
    if pieces and self.optimizer.state and pieces[0][1].numel() > 300:
        pieces[0][1][0] += 0.5
    return results
Stepper.run = too_far
"""


@needs_megatron
@pytest.mark.slow
def test_a_moment_that_differs_is_named(tmp_path):
    result = run_broken(FLIP_A_MOMENT, "--json", *SMALL, "--dir", tmp_path)
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    assert report["bit_identical"] is False
    difference = report["first_difference"]
    assert set(difference) == {field.name for field in fields(Difference)}
    assert difference["what"] == "exp_avg"
    assert re.fullmatch(r"rank 0, 0/.*\[0:\d+\], element 5; 1 of \d+ differ", difference["where"])
    assert difference["streamed"] == pytest.approx(difference["resident"] + 1.0)
    assert list(tmp_path.iterdir()) == []


@needs_megatron
@slow_with_another_megatron
def test_a_wrong_step_shows_in_the_loss_of_the_next(tmp_path):
    result = run_broken(STEP_TOO_FAR, *SMALL, "--dir", tmp_path)
    assert result.returncode == 1, result.stderr
    last = result.stdout.splitlines()[-1]
    match = re.fullmatch(
        r"bit-identical: no, first difference: loss \(rank 0, step \d\): "
        r"resident (\S+), streamed (\S+)",
        last,
    )
    assert match, last
    assert match[1] != match[2]
    assert list(tmp_path.iterdir()) == []


def records(*losses: float) -> list[StepRecord]:
    return [
        StepRecord(
            step=step,
            success=True,
            loss=loss,
            loss_bits="",
            grad_norm=1.0,
            num_zeros=None,
            loss_scale=1.0,
            lr=0.1,
        )
        for step, loss in enumerate(losses)
    ]


def snapshot(**changes: Any) -> Snapshot:
    base = Snapshot(
        records(3.0, 2.0),
        {"weight": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)},
        {"0/weight[0:2]": {"main": torch.tensor([1.0, 0.0]), "step": 2.0}},
    )
    return base._replace(**changes)


def state(**changes: Any) -> dict[str, Any]:
    return {"state": {"0/weight[0:2]": {"main": torch.tensor([1.0, 0.0]), "step": 2.0} | changes}}


@pytest.mark.parametrize(
    ("changes", "when", "wanted"),
    [
        ({"steps": records(3.0, 2.5)}, 1, ("loss", "rank 1, step 1", 2.0, 2.5)),
        (
            {"steps": [replace(record, grad_norm=None) for record in records(3.0, 2.0)]},
            0,
            ("grad_norm", "rank 1, step 0", 1.0, None),
        ),
        (
            {"parameters": {"weight": torch.tensor([1.0, 4.0], dtype=torch.bfloat16)}},
            2,
            ("parameter", "rank 1, weight, element 1; 1 of 2 differ", 2.0, 4.0),
        ),
        ({"parameters": {}}, 2, ("parameter", "rank 1", "weight", None)),
        (
            state(main=torch.tensor([1.0, -0.0])),
            3,
            ("main", "rank 1, 0/weight[0:2], element 1; 1 of 2 differ", 0.0, -0.0),
        ),
        (state(step=3.0), 3, ("step", "rank 1, 0/weight[0:2]", 2.0, 3.0)),
        (state(step=2), 3, ("step", "rank 1, 0/weight[0:2]", 2.0, 2)),
        (
            state(main=torch.tensor([1.0])),
            3,
            ("main", "rank 1, 0/weight[0:2]", "torch.float32 (2,)", "torch.float32 (1,)"),
        ),
        (state(extra=1.0), 3, ("state", "rank 1, 0/weight[0:2]", None, "extra")),
        ({"state": {}}, 3, ("shard", "rank 1", "0/weight[0:2]", None)),
    ],
)
def test_first_difference(changes, when, wanted):
    found = first_difference(snapshot(), snapshot(**changes), rank=1)
    assert found is not None
    assert found[0] == when
    assert found[1] == Difference(*wanted)
    assert repr(found[1]) == repr(Difference(*wanted))  # 0.0 == -0.0


def test_equal_snapshots_have_none():
    nan = {"steps": records(float("nan"), 2.0), **state(main=torch.tensor([float("nan"), -0.0]))}
    assert first_difference(snapshot(), snapshot(), rank=0) is None
    assert first_difference(snapshot(**nan), snapshot(**nan), rank=0) is None


def test_the_earliest_of_several_ranks_counts():
    late, early = Difference("main", "rank 0", 1, 2), Difference("loss", "rank 1", 3, 4)
    assert earliest([None, None]) is None
    assert earliest([(4, late), None, (1, early)]) == early


# ---------------------------------------------------------------------- failures leave nothing


@needs_megatron
@needs_ranks
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs or none")
def test_a_rank_that_fails_ends_all_and_leaves_nothing(tmp_path):
    (tmp_path / FOLDER).mkdir()
    owned = OwnedDirectory.acquire(tmp_path / FOLDER / "rank00001" / "opt0")
    try:
        result = run("--ranks", 2, *SMALL, "--dir", tmp_path)
        assert result.returncode == 1
        error = result.stderr.splitlines()[-1]
        assert error.startswith("gds-optimizer: error: rank 1: ")
        assert f"is in use by process {os.getpid()}" in error
        assert sorted(str(p.relative_to(tmp_path / FOLDER)) for p in tmp_path.rglob("*/*")) == [
            "rank00001",
            "rank00001/opt0",
            "rank00001/opt0/lock",
        ]
    finally:
        owned.close()


@needs_megatron
@pytest.mark.faults
@pytest.mark.slow
def test_what_a_killed_demo_left_is_removed_by_the_next(tmp_path):
    victim = subprocess.Popen(
        command("--steps", 200, *SMALL[2:], "--dir", tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
        start_new_session=True,
    )
    deadline_s = time.monotonic() + 300
    try:
        while not list(tmp_path.rglob("layout.json")):
            assert victim.poll() is None, f"the demo ended by itself with {victim.returncode}"
            assert time.monotonic() < deadline_s, "the streamed training never started"
            time.sleep(0.02)
    finally:
        os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()
    assert list(tmp_path.rglob("bucket*.bin"))
    result = run(*SMALL, "--dir", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "reclaimed" in result.stderr
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- refusals


@needs_megatron
@no_gpu
def test_a_path_that_is_not_to_be_had_is_status_3(tmp_path):
    result = run("--io", "gds", "--json", "--dir", tmp_path)
    assert result.returncode == 3
    report = json.loads(result.stdout)
    assert report["probe"]["io_path"] is None
    assert (report["steps"], report["memory"], report["bit_identical"]) == ([], {}, None)
    assert result.stderr == f"gds-optimizer: error: {report['probe']['refusal']}\n"
    assert list(tmp_path.iterdir()) == []


@needs_megatron
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_memory_is_no_disk():
    before = set(Path("/dev/shm").iterdir())
    result = run("--dir", "/dev/shm")
    assert result.returncode == 3
    assert "tmpfs keeps files in memory" in result.stderr
    assert "io path: none (asked: auto)" in result.stdout
    assert "bit-identical" not in result.stdout
    assert set(Path("/dev/shm").iterdir()) <= before


def test_without_megatron_it_says_what_to_install(tmp_path):
    program = (
        "import sys\n"
        "sys.modules['megatron'] = None\n"
        "from gds_optimizer.cli.main import main\n"
        f"sys.exit(main(['demo', '--dir', {str(tmp_path)!r}]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert result.returncode == 1
    assert result.stderr == (
        "gds-optimizer: error: the demo trains megatron-core's GPT, and megatron-core is not "
        "installed: pip install 'gds-optimizer[megatron]'\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--steps", 0), "steps is 0, wanted 1 to 10000"),
        pytest.param(("--ranks", 65), "ranks is 65, wanted 1 to 64", marks=pytest.mark.slow),
        pytest.param(
            ("--hidden", 12), "hidden is 12, wanted a multiple of 8", marks=pytest.mark.slow
        ),
        (("--dir", "/no/such/place"), "/no/such/place is not an existing directory: create it"),
        pytest.param(("--io", "magic"), "invalid choice: 'magic'", marks=pytest.mark.slow),
        (("--break-it",), "unrecognized arguments: --break-it"),
    ],
)
def test_wrong_usage_is_status_2(arguments, complaint, tmp_path):
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_io_path_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="io is 'magic', wanted one of auto, gds"):
        DemoConfig(io="magic")


@pytest.mark.parametrize(
    ("parameters", "ranks", "wanted"),
    [
        (1, 1, 12 * 1024),
        (16 * 1024, 1, 12 * 1024),
        (16 * 1024 + 16, 1, 2 * 12 * 1024),
        (16 * 1024 * 10, 2, 5 * 12 * 1024),
        (10**12, 1, 192 * 2**20),
    ],
)
def test_bucket_size(parameters, ranks, wanted):
    assert bucket_bytes_for(parameters, ranks) == wanted

"""`gds-optimizer inspect` and `verify` on snapshots, whole and damaged."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from gds_optimizer.cli import main as cli_main
from gds_optimizer.snapshot_read import all_parts
from gds_optimizer.snapshots import take_snapshot
from tests.support.snapshots import all_well, flip, world

BUCKET, OFFSET = "rank00001/opt0/bucket00002.bin", 100


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cli")
    with world(directory, 2, sizes=(100, 5000, 3000)) as made:
        made.train(0, 3)
        path = directory / "taken"
        all_well(made.together(lambda e, p: take_snapshot(e, path, placement=p)))
    return path


@pytest.fixture
def damaged(snapshot: Path) -> Iterator[Path]:
    """One flipped bit."""
    flip(snapshot / BUCKET, OFFSET, 3)
    yield snapshot
    flip(snapshot / BUCKET, OFFSET, 3)


def run(*arguments: object) -> int:
    return cli_main.main(list(map(str, arguments)))


# ---------------------------------------------------------------------- inspect


def test_inspect(snapshot, capsys):
    assert run("inspect", snapshot) == 0
    title, whole, *ranks = capsys.readouterr().out.splitlines()
    assert title == f"snapshot {snapshot}"
    assert whole.startswith("  step 3, 2 ranks, opt0, 0.00 GiB")
    assert len(ranks) == 2
    for number, line in enumerate(ranks):
        assert f"rank {number} opt0: torch.optim.adamw.AdamW, 3 shards" in line
        assert "(main fp32, exp_avg fp32, exp_avg_sq fp32)" in line


def test_inspect_as_json(snapshot, capsys):
    assert run("inspect", snapshot, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["world_size"], found["optimizers"]) == (3, 2, ["opt0"])
    for summary, part in zip(found["parts"], all_parts(snapshot), strict=True):
        files = list(part.directory.glob("bucket*.bin"))
        assert (summary["rank"], summary["step"], summary["groups"]) == (part.rank, 3, 1)
        assert summary["buckets"] == len(files)
        assert summary["bytes"] == sum(file.stat().st_size for file in files)
        assert summary["planes"] == {"main": "fp32", "exp_avg": "fp32", "exp_avg_sq": "fp32"}


def test_inspect_reads_manifests_only(damaged, capsys):
    """Data may be damaged or elsewhere; a manifest may not."""
    assert run("inspect", damaged) == 0
    manifest = damaged / "rank00001" / "opt0" / "manifest.json"
    flip(manifest, 500)
    try:
        assert run("inspect", damaged) == 1
        assert f"{manifest} is damaged" in capsys.readouterr().err
    finally:
        flip(manifest, 500)


# ---------------------------------------------------------------------- verify


def total_bytes(snapshot: Path) -> int:
    return sum(path.stat().st_size for path in snapshot.rglob("bucket*.bin"))


def test_verify(snapshot, capsys):
    assert run("verify", snapshot) == 0
    out = capsys.readouterr().out
    assert out == f"{snapshot}: {total_bytes(snapshot)} bytes, everything is as it was written\n"


def test_one_flipped_bit(damaged, capsys):
    assert run("verify", damaged) == 1
    damage, summary = capsys.readouterr().out.splitlines()
    assert damage.startswith(f"damaged: bucket 2 in {damaged / BUCKET} is damaged: checksum of")
    assert "plane 'exp_avg'" in damage
    assert summary == f"{damaged}: 1 damaged"


def test_verify_as_json(damaged, capsys):
    assert run("verify", damaged, "--json") == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["bytes"] == total_bytes(damaged)
    (damage,) = found["damages"]
    assert f"bucket 2 in {damaged / BUCKET}" in damage
    assert captured.err == ""


def test_everything_that_is_damaged_is_named(damaged, capsys):
    """Also a manifest, whose buckets nobody can check any more."""
    manifest = damaged / "rank00000" / "opt0" / "manifest.json"
    flip(manifest, 500)
    try:
        assert run("verify", damaged) == 1
    finally:
        flip(manifest, 500)
    *damages, summary = capsys.readouterr().out.splitlines()
    assert [str(manifest) in damages[0], str(damaged / BUCKET) in damages[1]] == [True, True]
    assert summary == f"{damaged}: 2 damaged"


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_what_is_no_snapshot(tmp_path, command, capsys):
    for path, message in (
        (tmp_path, "snapshot.json, which is written last, is missing"),
        (tmp_path / "nothing", "it is not a directory"),
    ):
        assert run(command, path) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("gds-optimizer: error: there is no ")
        assert message in captured.err
    with pytest.raises(SystemExit) as exit_:
        run(command)
    assert exit_.value.code == 2


PROGRAM = """
import sys, time
from gds_optimizer import snapshot_read
from gds_optimizer.cli import main, verify
real = snapshot_read.verify
def slow(path, progress):
    def count(nbytes):
        time.sleep(0.03)
        progress(nbytes)
    return real(path, count)
snapshot_read.verify = slow
verify._LOG_INTERVAL_S = 0.05
sys.exit(main.main(["verify", sys.argv[1]]))
"""


@pytest.mark.thinned
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_and_time_left(snapshot, terminal):
    """On a terminal, and in a log."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        termios.tcsetwinsize(ours, (24, 100))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, snapshot],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            some = os.read(ours, 2**16)
        except OSError:  # how a terminal ends
            break
        if not some:
            break
        shown += some
    os.close(ours)
    assert process.wait(60) == 0
    lines = shown.decode().replace("\r", "\n").split("\n")
    # "reading:  40%|####      | 49.2k/123k [00:01<00:01, 80kB/s]"
    during = [line for line in lines if "reading:" in line and re.search(r"<\d\d:\d\d", line)]
    assert len(during) >= 3
    assert any("100%" in line for line in lines)

"""A wrong setting of any command is one line and a status, never a traceback."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gds_optimizer import command
from gds_optimizer.bench import (
    checkpoints,
    gds_check,
    initialization,
    peers,
    precision,
    shards,
    tiers,
)
from gds_optimizer.errors import ConfigError, IoPathError, NoSpaceError

ON_DRIVES = (checkpoints, initialization, tiers, peers)
MAINS = [*ON_DRIVES, gds_check, shards]


def arguments(module: object, directory: Path, *more: str) -> list[str]:
    where = [str(directory)] if module is gds_check else ["--dir", str(directory)]
    return [*where, *more]


@pytest.mark.parametrize("numel", ["nan", "inf", "0", "-5", "1.5", "many"])
@pytest.mark.parametrize("module", MAINS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_wrong_number_of_parameters(tmp_path, capsys, module, numel):
    with pytest.raises(SystemExit) as stopped:
        module.main(arguments(module, tmp_path, f"--numel={numel}"))
    assert stopped.value.code == 2
    assert f"--numel: wanted a whole number of at least 1, got '{numel}'" in capsys.readouterr().err


@pytest.mark.parametrize("module", ON_DRIVES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_directory_that_is_not_there(tmp_path, capsys, module):
    missing = tmp_path / "missing" / "one"
    options = ("--numel", "1e5", "--device", "cpu")
    assert module.main(arguments(module, missing, *options)) in (1, 2)
    said = capsys.readouterr().err.splitlines()[-1]
    assert ": error: " in said
    assert str(missing) in said


@pytest.mark.parametrize("module", ON_DRIVES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_device_that_is_not_there(tmp_path, capsys, module):
    options = ("--numel", "1e5", "--device", "warp")
    assert module.main(arguments(module, tmp_path, *options)) == command.EXIT_USAGE
    assert "error: --device is 'warp'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--seeds", "0"), ("--steps", "-1"), ("--jobs", "0"), ("--limit-s", "nan")],
)
def test_wrong_settings_of_the_precision_benchmark(tmp_path, capsys, option, value):
    with pytest.raises(SystemExit) as stopped:
        precision.main(["--out", str(tmp_path), f"{option}={value}"])
    assert stopped.value.code == 2
    assert f"{option}: wanted " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "option"), [(peers, "--output"), (gds_check, "--output"), (shards, "--profile")]
)
def test_where_a_file_cannot_be_is_known_before_it_is_made(tmp_path, capsys, module, option):
    for place in (tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(SystemExit) as stopped:
            module.main(arguments(module, tmp_path, option, str(place)))
        assert stopped.value.code == 2
        assert f"argument {option}: wanted a file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_what_is_no_duration(text):
    with pytest.raises(argparse.ArgumentTypeError, match="wanted seconds, more than 0"):
        command.seconds(text)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("it is wrong"), 2),
        (IoPathError("it is wrong"), 3),
        (NoSpaceError("it is wrong"), 1),
        (OSError("it is wrong"), 1),
    ],
)
def test_each_error_has_its_status(capsys, error, status):
    def fail() -> int:
        raise error

    assert command.exit_status("program", fail) == status
    assert capsys.readouterr().err == "program: error: it is wrong\n"


def test_an_interrupt_is_said(capsys):
    def interrupt() -> int:
        raise KeyboardInterrupt

    assert command.exit_status("program", interrupt) == 130
    assert capsys.readouterr().err == "program: interrupted\n"
    assert command.exit_status("program", lambda: 7) == 7


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("descriptor", "given", "status"), [(1, "--numel 1e9", 0), (2, "--numel 1e9 --slots 99", 2)]
)
def test_a_process_without_standard_streams(descriptor, given, status):
    """As some daemons start theirs: Python has no object for what is closed."""
    program = [sys.executable, "-m", "gds_optimizer.cli", "plan", *given.split()]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {descriptor}>&-', "sh", *program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed pipe", "full disk"])
def test_an_error_that_nobody_reads_has_its_status(monkeypatch, is_closed):
    def fail() -> int:
        raise ConfigError("it is wrong")

    where: Any = "/dev/full"
    if is_closed:
        reading, where = os.pipe()
        os.close(reading)
    found = []
    # A line that could not be written is tried again on closing.
    with contextlib.suppress(OSError), open(where, "w", 1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        found.append(command.exit_status("program", fail))
    assert found == [2]


TERMINATED = """
import signal, sys, time
from pathlib import Path
from gds_optimizer.command import exit_status

def action():
    Path(sys.argv[1]).touch()
    try:
        print("here", flush=True)
        time.sleep(600)
    finally:
        Path(sys.argv[1]).unlink()

sys.exit(exit_status("program", action))
"""


def test_what_a_job_scheduler_ends_leaves_nothing(tmp_path):
    program = subprocess.Popen(
        [sys.executable, "-c", TERMINATED, str(tmp_path / "scratch")], stdout=subprocess.PIPE
    )
    assert program.stdout is not None
    assert program.stdout.readline() == b"here\n"
    program.terminate()
    program.communicate(timeout=60)
    assert program.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_how_a_program_deals_with_sigterm_is_its_own():
    def handler() -> object:
        return signal.getsignal(signal.SIGTERM)

    found = []
    assert command.exit_status("program", lambda: found.append(handler()) or 0) == 0
    assert found[0] is not signal.SIG_DFL
    assert handler() is signal.SIG_DFL
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert command.exit_status("program", lambda: found.append(handler()) or 0) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found[1] is signal.SIG_IGN

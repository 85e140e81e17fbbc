"""`gds-optimizer probe` as a user runs it: real processes, real directories."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from gds_optimizer import tuning_measure
from gds_optimizer.cli import probe
from gds_optimizer.cli.main import build_parser, main
from gds_optimizer.config import IO_CHOICES

no_driver = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without an NVIDIA driver"
)
needs_shm = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "gds_optimizer.cli", "probe", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), check=False, capture_output=True, text=True)


@no_driver
def test_text_starts_with_the_verdicts(tmp_path):
    result = run(tmp_path)
    assert result.returncode == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path}  host  ")
    assert " GB free" in lines[0]
    assert lines[2] == "io path: host (asked: auto)"
    assert "  missing  driver" in result.stdout
    assert "-> install the NVIDIA driver" in result.stdout
    assert "\033" not in result.stdout
    assert list(tmp_path.iterdir()) == []


@no_driver
def test_json_goes_to_standard_output_alone(tmp_path):
    result = run("--json", "--io", "gds", tmp_path)
    assert result.returncode == 3
    report = json.loads(result.stdout)
    assert (report["asked"], report["io_path"]) == ("gds", None)
    assert report["directories"][0]["path"] == str(tmp_path)
    assert report["directories"][0]["free_bytes"] > 0
    assert result.stderr == f"gds-optimizer: error: {report['refusal']}\n"
    assert "libcuda.so.1" in report["refusal"] or "cuInit" in report["refusal"]


@no_driver
def test_what_works_is_timed_on_request(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning_measure, "_POINT_S", 0.01)
    directory = tmp_path / "state"
    directory.mkdir()
    for _ in range(2):  # what is remembered is measured again
        assert main(["probe", "--time", "--json", str(directory)]) == 0
        captured = capsys.readouterr()
        (timing,) = json.loads(captured.out)["timings"]
        assert (timing["directory"], timing["io_path"]) == (str(directory), "host")
        assert timing["mixed_bytes_per_s"] > 0
        assert timing["half_duplex"] in (True, False)
        assert timing["cached"] is False
        assert captured.err.startswith("timed in ")
    assert list(directory.iterdir()) == []
    assert main(["probe", "--json", "--io", "host", str(directory)]) == 0
    assert json.loads(capsys.readouterr().out)["timings"] == []


def test_nothing_is_timed_where_nothing_works(tmp_path, capsys):
    assert main(["probe", "--time", "--io", "host", str(tmp_path / "none")]) == 3
    assert "timed in " not in capsys.readouterr().err


def test_a_missing_directory_is_status_3(tmp_path, capsys):
    assert main(["probe", "--io", "host", str(tmp_path / "none")]) == 3
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == f"{tmp_path / 'none'}  none"
    assert f"-> mkdir {tmp_path / 'none'}" in captured.out
    assert captured.err.startswith("gds-optimizer: error: io=host is not to be had in ")
    assert captured.err.count("\n") == 1


@needs_shm
def test_memory_has_to_be_allowed(capsys):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        assert main(["probe", "--io", "host", directory]) == 3
        assert "keeps files in memory" in capsys.readouterr().err
        assert main(["probe", "--io", "host", "--allow-tmpfs", directory]) == 0
        assert "  warn     memory-file-system" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--io", "fast", "/tmp"],
        ["--timeout", "0", "/tmp"],
        ["--timeout", "-1", "/tmp"],
        ["--timeout", "soon", "/tmp"],
        ["--timeout", "nan", "/tmp"],
    ],
)
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["probe", *arguments])
    assert exit_.value.code == 2
    assert "usage: gds-optimizer probe" in capsys.readouterr().err


def test_the_time_limit_reaches_the_children(tmp_path, capsys):
    assert main(["probe", "--io", "host", "--timeout", "0.001", str(tmp_path)]) == 3
    assert "did not answer within 0.001 s" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_choices_are_those_of_the_configuration():
    assert probe.IO_CHOICES == IO_CHOICES
    arguments = build_parser().parse_args(["probe", "/a", "/b"])
    assert (arguments.directories, arguments.io) == (["/a", "/b"], "auto")
    assert arguments.timeout == 60


def test_colours_on_a_terminal(tmp_path):
    leader, follower = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    arguments = command("--io", "host", tmp_path)
    with subprocess.Popen(arguments, stdout=follower, env=environment):
        os.close(follower)
        output = b""
        while True:
            try:
                chunk = os.read(leader, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            output += chunk
    os.close(leader)
    assert "\033[32mok     \033[0m  direct-io" in output.decode()


def test_colours_can_be_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for no_color, is_colored in ((None, True), ("1", False)):
        if no_color:
            monkeypatch.setenv("NO_COLOR", no_color)
        else:
            monkeypatch.delenv("NO_COLOR", raising=False)
        assert main(["probe", "--io", "host", str(tmp_path)]) == 0
        assert ("\033" in capsys.readouterr().out) is is_colored

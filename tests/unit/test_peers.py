"""Each peer in a process of its own: run, or said to be missing and why."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gds_optimizer.bench import peer_child, peers
from gds_optimizer.bench.memory_cap import Cap, capped
from gds_optimizer.bench.peer_child import Task
from gds_optimizer.bench.peer_recipes import HYPER_PARAMETERS, RECIPES
from gds_optimizer.bench.peer_table import to_text

STREAMER = """
import torch
class Streamer:
    def __init__(self, params, directory):
        assert directory.is_dir()
        self.file = directory / "state.bin"
        self.optimizer = torch.optim.AdamW(params)
    def step(self):
        self.file.write_bytes(bytes(3 * 2**20))
        self.optimizer.step()
    def close(self):
        print("closed")
build = Streamer
"""
FAILING = {
    "abort": ("import os\ndef build(params, directory): os.abort()", "SIGABRT"),
    "raise": ("def build(params, directory): raise ValueError('no such plan')", "no such plan"),
    "exit": ("import os\ndef build(params, directory): os._exit(7)", "status 7 and no result"),
    "idle": (
        "class Idle:\n    def step(self): pass\ndef build(params, directory): return Idle()",
        "parameter 0 did not change in 2 steps",
    ),
    "empty": ("", r"has no function build\(params, directory\)"),
    "nested": (
        "class A:\n    def setup_optimizer_state_streaming(args, optimizer): pass",
        "not as a function of the module",
    ),
}


SLOW = pytest.mark.slow
"""Each of these is fast; there are many of them, and each imports torch."""


def run(tmp_path: Path, program: str, timeout_s: float = 120.0, cap: Cap | None = None, **changes):
    """The row of a streamer."""
    (tmp_path / "mine.py").write_text(program)
    own = tmp_path / "own"
    (own / "files").mkdir(parents=True)
    group = cap.group if cap else None
    values = {
        "peer": str(tmp_path / "mine.py"),
        "is_streamer": True,
        "directory": str(own / "files"),
        "result": str(own / "result.json"),
        "numel": 1000,
        "steps": 1,
        "device": "cpu",
        "cap_bytes": None,
        "group": str(group.path) if group else None,
        "version": group.version if group else 2,
        "has_group": bool(cap and cap.is_capped),
        "io": "auto",
        "parent": os.getpid(),
    }
    task = Task(**{**values, **changes})
    return peers.run_alone(task, own, cap or Cap("no cap"), timeout_s)


def test_a_streamer_is_timed_and_its_bytes_are_counted(tmp_path):
    row = run(tmp_path, STREAMER, steps=3)
    assert "missing" not in row, row
    assert len(row["steps_s"]) == 3
    assert row["step_io"]["asked_written"] >= 3 * 2**20
    assert row["host_peak_bytes"] > 2**20
    assert row["capped_bytes"] is None
    assert "closed" in (tmp_path / "own" / "log").read_text()


@pytest.mark.parametrize(
    "name",
    [name if name in ("abort", "idle") else pytest.param(name, marks=SLOW) for name in FAILING],
)
def test_a_failure_is_a_row_with_its_reason(tmp_path, name):
    program, reason = FAILING[name]
    row = run(tmp_path, program)
    assert set(row) <= {"missing", "log"}
    assert re.search(reason, row["missing"]), row


def test_one_that_takes_too_long_is_ended_with_its_children(tmp_path):
    # A process that gets nowhere, with one of its own; no other than these is to be waited for.
    script = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    row = run(tmp_path, "", timeout_s=5, cap=Cap("no cap", prefix=["sh", "-c", script]))
    assert row["missing"] == "took longer than 5 s (--timeout)"
    pid = (tmp_path / "pid").read_text().strip()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and _is_running(pid):
        time.sleep(0.05)
    assert not _is_running(pid)


def _is_running(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "name", [name if name == "resident" else pytest.param(name, marks=SLOW) for name in RECIPES]
)
def test_every_peer_runs_or_says_why_not(tmp_path, name):
    if name.startswith("DeepSpeed"):
        try:
            __import__("deepspeed")
        except ImportError:
            pass
        else:
            pytest.skip("needs a machine without DeepSpeed, which compiles for minutes")
    row = run(tmp_path, "", peer=name, is_streamer=False, numel=2**20)
    if name in ("resident", "gds-optimizer"):
        assert row["step_s"] > 0, row
    else:
        assert ("step_s" in row) or row["missing"].startswith(
            ("not installed: pip install", "needs ", "megatron-core")
        ), row


def test_what_adamw_did_not_make_is_refused():
    params = [torch.ones(10), torch.ones(5)]
    grads = [torch.full((10,), 0.1), torch.full((5,), 0.1)]
    expected = peer_child._Expected(params, grads)
    made = [param.clone().requires_grad_() for param in params]
    optimizer = torch.optim.AdamW(made, **HYPER_PARAMETERS)
    for param, grad in zip(made, grads, strict=True):
        param.grad = grad
    optimizer.step()
    expected.check(made, 1, is_adamw=True)
    expected = peer_child._Expected(params, grads)
    with pytest.raises(RuntimeError, match="parameter 1 is not what AdamW makes of it in 1 steps"):
        expected.check([made[0], made[1] - 0.05], 1, is_adamw=True)
    expected = peer_child._Expected(params, grads)
    expected.check([made[0], made[1] - 0.05], 1, is_adamw=False)


@contextlib.contextmanager
def a_cap(name: str):
    with capped(name) as cap:
        if cap.group is None:
            pytest.skip(f"needs a memory control group that may be written: {cap.how}")
        yield cap


GREEDY = """
import torch
def build(params, directory):
    held = torch.ones(2**28)
"""


def test_the_cap_kills_what_wants_more_memory(tmp_path):
    with a_cap(f"gds-optimizer-test-{os.getpid()}-a") as cap:
        row = run(tmp_path, GREEDY, cap=cap, cap_bytes=256 * 2**20)
        path = cap.group.path
    assert row["missing"] == "killed by the kernel: it wanted more memory than the cap"
    assert not path.exists()


CACHING = """
import torch
class Streamer:
    def __init__(self, params, directory):
        self.directory, self.number = directory, 0
        self.optimizer = torch.optim.AdamW(params)
    def step(self):
        self.number += 1
        with (self.directory / str(self.number)).open("wb") as file:
            for _ in range(96):
                file.write(bytes(2**20))
        self.optimizer.step()
build = Streamer
"""


@pytest.mark.thinned
@pytest.mark.parametrize("cap_bytes", [160 * 2**20, 2**30])
def test_the_cap_holds_the_page_cache_too(tmp_path, cap_bytes):
    with a_cap(f"gds-optimizer-test-{os.getpid()}-b") as cap:
        row = run(tmp_path, CACHING, cap=cap, cap_bytes=cap_bytes, steps=3)
    assert "missing" not in row, row
    assert row["capped_bytes"] == cap_bytes
    written = 4 * 96 * 2**20
    if cap_bytes < written:
        assert row["page_cache_bytes"] <= cap_bytes
        assert row["files_in_page_cache_bytes"] <= cap_bytes
    else:
        assert row["page_cache_bytes"] >= written
        assert row["files_in_page_cache_bytes"] == written


def row_of(**changes):
    row = {
        "note": "",
        "step_s": 2.0,
        "steps_s": [1.5, 2.0, 2.5],
        "flush_s": 0.0,
        "step_io": {"read": 3e9, "written": 4e9},
        "page_cache_bytes": 0,
        "files_in_page_cache_bytes": 0,
        "host_peak_bytes": 1e9,
        "device_peak_bytes": None,
        "capped_bytes": None,
        "ratio_to_limit": 1.1,
    }
    return {**row, **changes}


def found_of(rows, **cap):
    return {
        "device": "cpu",
        "directory": "/nvme0",
        "numel": 2**30,
        "steps": 3,
        "cap": {"bytes": None, "by": "", "holds": False, **cap},
        "limit": {
            "read_gbps": 2.0,
            "write_gbps": 3.0,
            "mixed_gbps": 2.5,
            "first_write_gbps": 1.0,
            "file_bytes": 1,
            "sustained_bytes": 0,
        },
        "peers": rows,
    }


def test_the_table():
    rows = {
        "mine": row_of(note="a note"),
        "a longer name": row_of(
            ratio_to_limit=0.4, device_peak_bytes=5e9, files_in_page_cache_bytes=1e9
        ),
        "past it": row_of(ratio_to_limit=0.9, page_cache_bytes=1e5),
        "broken": {"missing": "ended with status 7 and no result", "log": ["last words"]},
    }
    text = to_text(found_of(rows))
    lines = text.splitlines()
    head = next(line for line in lines if line.startswith("peer"))
    mine = next(line for line in lines if line.startswith("mine"))
    assert head.split("  ")[0] == "peer"
    assert mine.split()[1:] == [
        *("2.000", "1.500", "2.500", "0.00"),
        *("3.00", "4.00", "0.00", "0.00", "1.00", "-", "1.10"),
    ]
    assert len(head) == len(mine)
    assert "broken         ended with status 7 and no result" in lines
    assert any(line.endswith("last words") for line in lines)
    assert "mine           a note" in lines
    assert "a longer name is faster than the drive gives its bytes: memory took some" in text
    assert (
        "past it is faster than the drive gives its bytes: the page cache has next to none" in text
    )
    assert "mine is faster" not in text


@pytest.mark.parametrize(
    ("cap", "wanted"),
    [
        ({}, "page cache: NOT capped (--memory-cap BYTES does)"),
        ({"bytes": 10**9, "by": "nothing may be written"}, "NOT capped, its growth is the whole"),
        ({"bytes": 10**9, "by": "cgroup v2", "holds": True}, "capped at 1.00 GB by cgroup v2"),
    ],
)
def test_the_table_says_whether_the_cap_held(cap, wanted):
    assert wanted in to_text(found_of({"mine": row_of()}, **cap))


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--peers", "resident;nobody"], "nobody"),
        (["--streamer", "nowhere.py"], "nowhere.py is not a file"),
        (["--memory-cap", "much"], "wanted a size"),
        (["--dir", "/nowhere"], "is not a directory"),
    ],
)
def test_wrong_usage(tmp_path, capsys, arguments, wanted):
    try:
        status: object = peers.main(["--dir", str(tmp_path), "--device", "cpu", *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.slow
def test_one_run_gives_one_table(tmp_path):
    (tmp_path / "mine.py").write_text(STREAMER)
    command = [sys.executable, "-m", "gds_optimizer.bench.peers", "--dir", str(tmp_path)]
    command += ["--numel", "1e5", "--steps", "2", "--device", "cpu"]
    command += ["--peers", "resident;gds-optimizer;torchao CPUOffloadOptimizer"]
    command += ["--streamer", str(tmp_path / "mine.py"), "--output", str(tmp_path / "out.json")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert list(found["peers"]) == [
        "resident",
        "gds-optimizer",
        "torchao CPUOffloadOptimizer",
        "mine.py",
    ]
    for name in ("resident", "gds-optimizer", "mine.py"):
        assert found["peers"][name]["step_s"] > 0
        assert f"\n{name} " in ended.stdout
    ours = found["peers"]["gds-optimizer"]
    assert ours["step_io"]["written"] >= 12e5
    assert ours["files_in_page_cache_bytes"] < 12e5
    assert found["limit"]["mixed_gbps"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py", "out.json"]


@pytest.mark.slow
def test_ended_in_the_middle_it_leaves_nothing_behind(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\ndef build(params, directory):\n    print('here', flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "gds_optimizer.bench.peers", "--dir", str(tmp_path)]
    command += ["--numel", "1e5", "--device", "cpu", "--peers", "", "--memory-cap", "1GiB"]
    program = subprocess.Popen([*command, "--streamer", str(tmp_path / "slow.py")])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any("here" in path.read_text() for path in tmp_path.glob("*/0/log")):
            break
        time.sleep(0.1)
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["slow.py"]

"""A round trip's process: whatever becomes of it, there is an answer and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gds_optimizer.probing import children
from gds_optimizer.probing.children import run_child, scratch_file

# Far above what a healthy child needs on a busy machine.
LONG_S = 60.0
SHORT_S = 0.5


@pytest.fixture(autouse=True)
def scratch_space(tmp_path, monkeypatch):
    """Where the children's working directories go; empty again after every test."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert list(directory.iterdir()) == []


@pytest.fixture
def target(tmp_path):
    """A probed directory; empty again after every test."""
    directory = tmp_path / "target"
    directory.mkdir()
    yield directory
    assert list(directory.iterdir()) == []


def program(tmp_path: Path, source: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text("import json, os, sys, time\nrequest = json.loads(sys.argv[-1])\n" + source)
    return [sys.executable, str(path)]


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + LONG_S
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + LONG_S
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.01)
    return path.read_text()


# --- what goes wrong ---


def test_a_child_that_hangs_is_killed_with_all_it_started(tmp_path, target):
    pids = tmp_path / "pids"
    command = program(
        tmp_path,
        f"""
import subprocess
open(request["file"], "w").write("half")
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{other.pid}}\\n")
time.sleep(600)
""",
    )
    # A limit within which it does not come to hang says nothing: it gets a longer one.
    for limit_s in (2, 10, LONG_S):
        answer = run_child(
            {"operation": "x", "file": scratch_file(target)}, timeout_s=limit_s, command=command
        )
        assert answer.error == f"did not answer within {limit_s:g} s"
        if pids.exists() and pids.read_text().endswith("\n"):
            break
    assert not answer.answered
    assert not answer.ok
    assert answer.leftover is None
    for pid in map(int, wait_for(pids).split()):
        wait_until_dead(pid)


def test_a_child_that_ignores_signals_is_killed_too(tmp_path, target):
    command = program(
        tmp_path,
        "import signal\n"
        "for s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass\n",
    )
    answer = run_child({"operation": "x"}, timeout_s=SHORT_S, command=command)
    assert answer.error == "did not answer within 0.5 s"


def test_a_hung_child_s_grandchild_does_not_outlive_a_healthy_one(tmp_path, target):
    pids = tmp_path / "pids"
    command = program(
        tmp_path,
        f"""
import subprocess
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write(f"{{other.pid}}\\n")
print(json.dumps({{"error": ""}}))
""",
    )
    assert run_child({"operation": "x"}, timeout_s=LONG_S, command=command).ok
    wait_until_dead(int(wait_for(pids)))


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_child_that_dies_is_named_by_its_signal(tmp_path, target, number):
    file = scratch_file(target)
    source = (
        "open(request['file'], 'w').close()\n"
        "print('last words', file=sys.stderr, flush=True)\n"
        f"os.kill(os.getpid(), {int(number)})\n"
    )
    command = program(tmp_path, source)
    answer = run_child({"operation": "x", "file": file}, timeout_s=LONG_S, command=command)
    assert answer.error == f"died of {number.name} (last words)"
    assert answer.leftover is None
    assert not os.path.exists(file)


def test_a_child_that_fails_is_quoted(tmp_path, target):
    command = program(tmp_path, "raise RuntimeError('no such thing')\n")
    answer = run_child({"operation": "x"}, timeout_s=LONG_S, command=command)
    assert answer.error == "ended with exit status 1 (RuntimeError: no such thing)"


@pytest.mark.parametrize(
    ("output", "seen"),
    [
        ("", "answered nothing instead of a result"),
        ("hello world\n", "answered 'hello world' instead of a result"),
        ('["error"]\n', "answered '[\"error\"]' instead of a result"),
        ('{"error": 1}\n', "instead of a result"),
        ("\x00\xff\n", "instead of a result"),
    ],
)
def test_garbage_is_no_answer(tmp_path, target, output, seen):
    source = f"sys.stdout.buffer.write({output.encode('latin-1')!r})\n"
    answer = run_child({"operation": "x"}, timeout_s=LONG_S, command=program(tmp_path, source))
    assert seen in answer.error
    assert not answer.answered


def test_a_flood_of_output_is_cut(tmp_path, target):
    source = (
        "for _ in range(64): sys.stdout.write('x' * (1 << 20) + '\\n')\n"
        "print(json.dumps({'error': '', 'n': 1}))\n"
    )
    answer = run_child({"operation": "x"}, timeout_s=LONG_S, command=program(tmp_path, source))
    assert answer.ok
    assert answer.data["n"] == 1


def test_a_program_that_is_not_there(target):
    answer = run_child({"operation": "x"}, timeout_s=LONG_S, command=["/nonexistent/python"])
    assert answer.error == "could not be started: /nonexistent/python: No such file or directory"


def test_a_file_that_cannot_be_removed_is_reported(tmp_path, target, monkeypatch):
    file = scratch_file(target)
    source = "os.mkdir(request['file'])\n"  # unlink refuses a directory
    answer = run_child(
        {"operation": "x", "file": file}, timeout_s=LONG_S, command=program(tmp_path, source)
    )
    assert answer.leftover == file
    os.rmdir(file)


def test_kill_running_ends_a_child_of_another_thread(tmp_path, target):
    from concurrent.futures import ThreadPoolExecutor

    started = tmp_path / "started"
    source = f"open({str(started)!r}, 'w').write('yes\\n')\ntime.sleep(600)\n"
    command = program(tmp_path, source)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run_child, {"operation": "x"}, timeout_s=LONG_S, command=command)
        wait_for(started)
        children.kill_running()
        assert future.result(LONG_S).error == "died of SIGKILL"


# --- what a child gets ---

SHOW = """
print(json.dumps({
    "error": "",
    "request": request,
    "stdin": os.readlink("/proc/self/fd/0"),
    "session": os.getsid(0) == os.getpid(),
    "cwd": os.getcwd(),
    "env": dict(os.environ),
    "config": open(os.environ["CUFILE_ENV_PATH_JSON"]).read()
        if "CUFILE_ENV_PATH_JSON" in os.environ else None,
}))
"""


def test_a_child_stands_alone(tmp_path, target, scratch_space, monkeypatch):
    monkeypatch.setenv("CUFILE_ALLOW_COMPAT_MODE", "true")
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", "/the/user's")
    # The test runner's own standard input is /dev/null already.
    original, (read_end, write_end) = os.dup(0), os.pipe()
    os.dup2(read_end, 0)
    try:
        answer = run_child(
            {"operation": "x", "n": 1},
            timeout_s=LONG_S,
            command=program(tmp_path, SHOW),
            cufile_config=lambda log_dir: json.dumps({"logs": log_dir}),
        )
    finally:
        os.dup2(original, 0)
        for fd in (original, read_end, write_end):
            os.close(fd)
    assert answer.ok
    data = answer.data
    assert data["request"] == {"operation": "x", "n": 1}
    assert data["stdin"] == "/dev/null"
    assert data["session"]
    assert Path(data["cwd"]).parent == scratch_space.resolve()
    assert json.loads(data["config"]) == {"logs": data["cwd"]}
    assert data["env"]["CUFILE_ENV_PATH_JSON"].startswith(data["cwd"])
    assert data["env"]["CUFILE_LOGFILE_PATH"].startswith(data["cwd"])
    # It would have overruled the configuration.
    assert "CUFILE_ALLOW_COMPAT_MODE" not in data["env"]


def test_without_a_configuration_cufile_reads_the_user_s(tmp_path, target, monkeypatch):
    config = tmp_path / "mine.json"
    config.write_text("{}")
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(config))
    answer = run_child({"operation": "x"}, timeout_s=LONG_S, command=program(tmp_path, SHOW))
    assert answer.data["env"]["CUFILE_ENV_PATH_JSON"] == str(config)


def test_cufile_s_last_errors_are_kept(tmp_path, target):
    line = " 06-04-2026 14:59:16:997 [pid=44 tid=44] {}"
    log = [line.format(f"ERROR  cufio-fs:204 {text}") for text in ("one", "two", "two", "three")]
    log += [line.format("NOTICE  cufio-fs:451 dumping"), line.format("ERROR  cufio:1 four")]
    source = (
        f"open(os.environ['CUFILE_LOGFILE_PATH'], 'w').write({chr(10).join(log)!r})\n"
        "print(json.dumps({'error': 'refused'}))\n"
    )
    answer = run_child({"operation": "x"}, timeout_s=LONG_S, command=program(tmp_path, source))
    assert (answer.answered, answer.ok, answer.error) == (True, False, "refused")
    assert answer.cufile_log == ("two", "three", "four")


def test_scratch_files_cannot_be_guessed(target):
    names = {scratch_file(target) for _ in range(100)}
    assert len(names) == 100
    assert all(Path(name).parent == target for name in names)
    assert all(len(Path(name).name) >= 32 + len(children.SCRATCH_PREFIX) for name in names)


def test_a_child_dies_with_its_parent(tmp_path, target):
    """Our own child, hanging in the import of a library as a broken driver makes it."""
    started = tmp_path / "started"
    (tmp_path / "cupy.py").write_text(
        "import os, time\n"
        f"open({str(started)!r}, 'w').write(f'{{os.getpid()}}\\n')\n"
        "time.sleep(600)\n"
    )
    launcher = (
        "from gds_optimizer.probing.children import run_child\n"
        "run_child({'operation': 'device', 'mode': 'posix', 'device': 0, 'file': '/none/x'}, "
        "timeout_s=600)\n"
    )
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    # Its working directory stays behind when it is killed: put that where the test cleans up.
    (tmp_path / "killed").mkdir()
    env["TMPDIR"] = str(tmp_path / "killed")
    with subprocess.Popen([sys.executable, "-c", launcher], env=env) as parent:
        pid = int(wait_for(started))
        assert is_alive(pid)
        parent.kill()
    wait_until_dead(pid)

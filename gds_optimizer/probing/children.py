"""Runs one round trip in a process of its own, with a time limit, and cleans up after it.

cuFile can spin for ever or close descriptor 0 in a broken container, and a network mount can hang
any call, so nothing that touches a probed directory happens in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHILD_COMMAND = (sys.executable, "-P", "-m", "gds_optimizer.probing.child")
SCRATCH_PREFIX = ".gds-optimizer-probe-"
# A killed process disappears at once unless it sits in the kernel (a dead mount): wait that long.
KILL_WAIT_S = 5.0
CLEAN_TIMEOUT_S = 10.0
MAX_OUTPUT_BYTES = 1 << 20

_running: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one child.

    Attributes:
        data: what it answered; empty where it did not.
        error: why it failed, in words; empty where it succeeded.
        answered: whether it answered at all, with success or failure.
        cufile_log: the last error messages of cuFile, oldest first.
        leftover: the scratch file, where it could not be removed.
    """

    data: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    answered: bool = False
    cufile_log: tuple[str, ...] = ()
    leftover: str | None = None

    @property
    def ok(self) -> bool:
        return self.answered and not self.error


def scratch_file(directory: str | os.PathLike[str]) -> str:
    """A path in `directory` that nobody can guess; nothing is created."""
    return os.path.join(directory, SCRATCH_PREFIX + secrets.token_hex(16))


def run_child(
    request: dict[str, Any],
    *,
    timeout_s: float,
    command: Sequence[str] | None = None,
    cufile_config: Callable[[str], str] | None = None,
) -> Answer:
    """Send `request` to a fresh process and return its answer, whatever becomes of it.

    The process gets its request as JSON in its last argument, nothing on standard input, and a
    process group of its own that is killed after `timeout_s` seconds. If the request names a
    scratch `file` and the process does not say that it removed it, another one does.

    Args:
        command: the program to start instead of `gds_optimizer.probing.child`.
        cufile_config: given the directory for cuFile's log, the text of the configuration file
            that cuFile shall read; None leaves it to cuFile.
    """
    with tempfile.TemporaryDirectory(prefix="gds-optimizer-probe-") as work:
        env = _child_env(work, cufile_config)
        answer = _run(request, [*(command or CHILD_COMMAND)], work, env, timeout_s)
    file = request.get("file")
    if file and request.get("operation") != "remove" and answer.data.get("removed") is not True:
        leftover = _remove(file)
        answer = Answer(answer.data, answer.error, answer.answered, answer.cufile_log, leftover)
    return answer


def kill_running() -> None:
    """Kill the children of all threads, whose `run_child` then returns."""
    for process in tuple(_running):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _child_env(work: str, cufile_config: Callable[[str], str] | None) -> dict[str, str]:
    env = dict(os.environ)
    # The child imports what this process would import, from wherever it stands.
    package_root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join([package_root, *filter(None, sys.path)])
    env["CUFILE_LOGFILE_PATH"] = os.path.join(work, "cufile.log")
    env["CUFILE_LOGGING_LEVEL"] = "ERROR"
    if cufile_config is not None:
        path = os.path.join(work, "cufile.json")
        Path(path).write_text(cufile_config(work))
        env["CUFILE_ENV_PATH_JSON"] = path
        # It would override what the file says about cuFile's fallback.
        env.pop("CUFILE_ALLOW_COMPAT_MODE", None)
    return env


def _run(
    request: dict[str, Any], command: list[str], work: str, env: dict[str, str], timeout_s: float
) -> Answer:
    out_path, err_path = Path(work, "stdout"), Path(work, "stderr")
    # Files, not pipes: a pipe stays open for as long as a process that cannot be killed holds it.
    with out_path.open("wb") as out, err_path.open("wb") as err:
        try:
            process = subprocess.Popen(
                [*command, json.dumps(request)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=work,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            return Answer(error=f"could not be started: {command[0]}: {error.strerror}")
        _running.add(process)
        try:
            process.wait(timeout_s)
            problem = ""
        except subprocess.TimeoutExpired:
            problem = f"did not answer within {timeout_s:g} s"
        finally:
            # Also when this process is interrupted: leave nothing running.
            killed = _kill_group(process)
            _running.discard(process)
    if problem and not killed:
        problem += " and could not be killed: it is stuck in the kernel, perhaps on a dead mount"
    log = _cufile_errors(Path(work))
    if problem:
        return Answer(error=problem, cufile_log=log)
    return _read_answer(process.returncode, _tail(out_path), _tail(err_path), log)


def _kill_group(process: subprocess.Popen[bytes]) -> bool:
    """Kill the child and all it started; whether it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _read_answer(returncode: int, out: str, err: str, log: tuple[str, ...]) -> Answer:
    lines = out.strip().splitlines()
    try:
        data = json.loads(lines[-1]) if lines else None
    except ValueError:
        data = None
    if isinstance(data, dict) and isinstance(data.get("error"), str):
        return Answer(data, data["error"], answered=True, cufile_log=log)
    last_words = err.strip().splitlines()[-1:] or lines[-1:]
    words = f" ({last_words[0][:200]})" if last_words else ""
    if returncode < 0:
        return Answer(error=f"died of {_signal_name(-returncode)}{words}", cufile_log=log)
    if returncode:
        return Answer(error=f"ended with exit status {returncode}{words}", cufile_log=log)
    seen = f"answered {lines[-1][:80]!r}" if lines else "answered nothing"
    return Answer(error=f"{seen} instead of a result", cufile_log=log)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_OUTPUT_BYTES))
        return file.read().decode(errors="replace")


def _cufile_errors(work: Path) -> tuple[str, ...]:
    """The last three different error messages of cuFile, without time and process."""
    text = "\n".join(_tail(path) for path in sorted(work.glob("cufile*.log")))
    messages = re.findall(r"\bERROR\s+(?:[\w-]+:\d+\s+)?(.+)", text)
    return tuple(dict.fromkeys(reversed([m.strip() for m in messages])))[:3][::-1]


def _remove(file: str) -> str | None:
    """Remove a scratch file in a process of its own; the path if that failed."""
    request = {"operation": "remove", "file": file}
    answer = run_child(request, timeout_s=CLEAN_TIMEOUT_S)
    return None if answer.ok else file

"""Processes that are killed, interrupted, fork, or just end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults import engine_process
from tests.faults.engine_process import digest
from tests.support.engines import SIZES, adamw, grads_of, leftovers, pair, streamed

pytestmark = pytest.mark.faults

REPOSITORY = Path(__file__).parents[2]


class Programs:
    """Runs tasks of `engine_process` as processes of their own, one after another."""

    def __init__(self, directory: Path) -> None:
        self.output = directory / "program"
        self.server = subprocess.Popen(
            # Forking with threads is the point; newer Pythons warn of it.
            (sys.executable, "-W", "ignore::DeprecationWarning", "-m", engine_process.__name__),
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _line(self) -> str:
        assert self.server.stdout is not None
        return self.server.stdout.readline()

    def start(self, task: str, kind: str, directory: Path) -> int:
        """Process number of the new process."""
        assert self.server.stdin is not None
        self.output.with_suffix(".out").unlink(missing_ok=True)
        self.server.stdin.write(f"{task} {kind} {directory} {self.output}\n")
        self.server.stdin.flush()
        return int(self._line())

    def out(self) -> str:
        path = self.output.with_suffix(".out")
        return path.read_text() if path.exists() else ""

    def finish(self) -> tuple[int, list[str], str]:
        """Exit status, lines of the output, errors."""
        status = int(self._line())
        return status, self.out().splitlines(), self.output.with_suffix(".err").read_text()

    def run(self, task: str, kind: str, directory: Path) -> tuple[int, list[str], str]:
        self.start(task, kind, directory)
        return self.finish()

    def close(self) -> None:
        self.server.kill()
        self.server.communicate()


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    made = Programs(tmp_path_factory.mktemp("programs"))
    yield made
    made.close()


def used_bytes(directory: Path) -> int:
    """What `du` says."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory):
    """What five undisturbed steps come to."""
    with streamed(tmp_path_factory.mktemp("undisturbed")) as run:
        for step in range(5):
            run.step(grads_of(SIZES, step))
        return digest(run)


def test_a_run_that_is_killed_in_its_third_step_is_reclaimed_by_the_next(
    tmp_path, kind, programs, five_steps
):
    used = []
    for _ in range(3):
        process = programs.start("hang", kind, tmp_path)
        while programs.out() != "in the third step\n":
            time.sleep(0.01)
        used.append(used_bytes(tmp_path))
        os.kill(process, signal.SIGKILL)
        assert programs.finish()[0] == -signal.SIGKILL
        assert used_bytes(tmp_path) == used[-1] > 300_000  # it could not clean up
    assert used == used[:1] * 3
    status, lines, errors = programs.run("train", kind, tmp_path)
    assert (status, lines) == (0, [five_steps]), errors
    assert f"that a dead run left in {tmp_path}/rank00000/opt0" in errors
    assert leftovers(tmp_path) == []


def test_ending_without_close_leaves_nothing(tmp_path, kind, programs, five_steps):
    status, lines, errors = programs.run("train", kind, tmp_path)
    assert (status, lines, errors) == (0, [five_steps], "")
    assert leftovers(tmp_path) == []


@pytest.mark.thinned
def test_exiting_without_close_leaves_nothing_and_keeps_the_status(
    tmp_path, kind, programs, five_steps
):
    status, lines, errors = programs.run("exit", kind, tmp_path)
    assert (status, errors) == (3, "")
    assert lines[0] == five_steps
    assert int(lines[1]) > 10
    assert leftovers(tmp_path) == []


@pytest.mark.thinned
def test_an_unhandled_exception_leaves_nothing(tmp_path, kind, programs):
    status, _, errors = programs.run("raise", kind, tmp_path)
    assert status == 1
    assert errors.rstrip().endswith("ValueError: unhandled")
    assert errors.count("Traceback") == 1
    assert leftovers(tmp_path) == []


@pytest.mark.thinned(first=1)
def test_a_failed_step_that_ends_the_process_leaves_nothing(tmp_path, kind, programs):
    status, _, errors = programs.run("exit-after-failure", kind, tmp_path)
    assert status == 1
    assert "optimizer step 2 failed: bucket file" in errors.splitlines()[-1]
    assert leftovers(tmp_path) == []


@pytest.mark.thinned(first=1)
def test_forked_children_are_refused_and_end_quietly(tmp_path, kind, programs, five_steps):
    status, lines, errors = programs.run("fork", kind, tmp_path)
    assert (status, errors) == (0, "")
    assert lines == [five_steps, "0"]


def test_an_interrupt_in_a_step(tmp_path, kind, programs, five_steps):
    status, lines, errors = programs.run("interrupt", kind, tmp_path)
    assert (status, errors) == (0, "")
    assert lines[0] == "interrupted"
    assert lines[1].startswith("StepFailedError optimizer step 3 failed: ")
    # Two buckets were finished before the third was interrupted.
    assert " 2 of " in lines[1]
    assert " buckets hold step 3. All others hold step 2 or earlier." in lines[1]
    assert lines[2:] == ["0", five_steps]


def test_the_undisturbed_run_is_the_resident_one(tmp_path, five_steps):
    with pair(tmp_path, adamw) as both:
        for step in range(5):
            both.step(step)
        both.check()
        assert digest(both.streamed) == five_steps

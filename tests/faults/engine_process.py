"""What a test must not do in its own process: die in a step, exit without closing, fork and exit.

`python -m tests.faults.engine_process` reads lines "TASK KIND DIRECTORY OUTPUT" and does each in a
forked copy of itself, which ends like any other program; importing torch for each would take a
second. A child's standard output and error go to the files OUTPUT.out and OUTPUT.err. Its number
is printed when it starts, its exit status when it has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.errors import ForkedError
from tests.support.engines import (
    SIZES,
    StreamedOptimizer,
    adamw,
    bits_of,
    first_values,
    grads_of,
    in_child,
)
from tests.support.libcuda_stub import DriverStubUnavailableError, load_driver_stub

CHILD_STATUS = 7


class InTheMiddle(torch.optim.AdamW):
    """Calls `event` when it comes to the `at`-th bucket of the `at_step`-th step."""

    event: Callable[[], None] = staticmethod(lambda: None)
    at_step = 3
    at = 3
    engine: Any = None
    seen = (0, 0)

    def step(self, closure: Any = None) -> Any:
        cls = InTheMiddle
        if cls.engine is not None:
            step = cls.engine.steps + 1
            count = cls.seen[1] + 1 if cls.seen[0] == step else 1
            cls.seen = (step, count)
            if cls.seen == (cls.at_step, cls.at):
                cls.event()
        return torch.optim.AdamW.step.__wrapped__(self)  # type: ignore[attr-defined]


def make(kind: str, directory: Path, **options: Any) -> StreamedOptimizer:
    return StreamedOptimizer(directory, adamw, first_values(SIZES), kind=kind, **options)


def digest(run: StreamedOptimizer) -> str:
    return hashlib.sha256(b"".join(bits_of(run.models))).hexdigest()


def run_hang(kind: str, directory: Path) -> None:
    """Two steps, then stop in the middle of the third for ever."""

    def hang() -> None:
        print("in the third step", flush=True)
        time.sleep(300)

    InTheMiddle.event = staticmethod(hang)
    run = StreamedOptimizer(directory, InTheMiddle, first_values(SIZES), kind=kind)
    InTheMiddle.engine = run.engine
    for step in range(3):
        run.step(grads_of(SIZES, step))


def run_train(kind: str, directory: Path) -> None:
    """Five steps, and what they came to; nothing is closed."""
    run = make(kind, directory)
    for step in range(5):
        run.step(grads_of(SIZES, step))
    print(digest(run))


def run_exit(kind: str, directory: Path) -> None:
    run_train(kind, directory)
    print(len(list(directory.rglob("bucket*.bin"))))
    sys.exit(3)


def run_raise(kind: str, directory: Path) -> None:
    run_train(kind, directory)
    raise ValueError("unhandled")


def run_exit_after_failure(kind: str, directory: Path) -> None:
    run = make(kind, directory)
    run.step(grads_of(SIZES, 0))
    run.engine.drain()
    os.truncate(run.paths[3], 0)
    run.step(grads_of(SIZES, 1))


def refused(use: Callable[[], Any]) -> None:
    with pytest.raises(ForkedError, match=f"forked child {os.getpid()}"):
        use()


def run_fork(kind: str, directory: Path) -> None:
    """Fork with writes in flight; the child is refused and exits, the parent goes on."""
    run = make(kind, directory, slots=64)
    for step in range(2):
        run.step(grads_of(SIZES, step))
    child = os.fork()
    if child == 0:
        refused(lambda: run.step(grads_of(SIZES, 2)))
        refused(run.engine.read_state)
        refused(run.engine.drain)
        refused(run.engine.initialize)
        refused(run.engine.take_mains_from_model)
        # Metadata and messages need no store.
        assert run.mains[3].shape == (5000,)
        sys.exit(CHILD_STATUS)  # through the whole of the interpreter's exit
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == CHILD_STATUS

    def close() -> None:
        run.engine.close()

    run.step(grads_of(SIZES, 2))
    in_child(close)
    run.step(grads_of(SIZES, 3))
    # As the workers of a data loader end.
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    run.step(grads_of(SIZES, 4))
    assert all(path.exists() for path in run.paths)
    print(digest(run))
    run.close()
    print(len(list(directory.iterdir())))


def run_interrupt(kind: str, directory: Path) -> None:
    """Ctrl-C in the middle of a step stays a KeyboardInterrupt, and everything can be closed."""
    # A shell that starts something in the background has it ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    InTheMiddle.event = staticmethod(lambda: os.kill(os.getpid(), signal.SIGINT))
    run = StreamedOptimizer(directory, InTheMiddle, first_values(SIZES), kind=kind, slots=3)
    InTheMiddle.engine = run.engine
    for step in range(2):
        run.step(grads_of(SIZES, step))
    try:
        run.step(grads_of(SIZES, 2))
    except KeyboardInterrupt:
        print("interrupted")
    assert all(slot.is_idle for slot in run.pool.slots)
    try:
        run.step(grads_of(SIZES, 3))
    except Exception as error:  # noqa: BLE001 - the test looks at it
        print(type(error).__name__, error)
    run.close()
    print(len(list(directory.iterdir())))
    InTheMiddle.engine = None
    again = make(kind, directory)
    for step in range(5):
        again.step(grads_of(SIZES, step))
    print(digest(again))
    again.close()


TASKS = {
    "hang": run_hang,
    "train": run_train,
    "exit": run_exit,
    "raise": run_raise,
    "exit-after-failure": run_exit_after_failure,
    "fork": run_fork,
    "interrupt": run_interrupt,
}


def redirect(output: str) -> None:
    sys.stdout.flush()
    for fd, name in ((1, "out"), (2, "err")):
        opened = os.open(f"{output}.{name}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(opened, fd)
        os.close(opened)


def serve() -> None:
    for line in sys.stdin:
        task, kind, directory, output = line.split()
        child = os.fork()
        if child == 0:
            redirect(output)
            TASKS[task](kind, Path(directory))
            return  # through the whole of the interpreter's exit
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    adamw([torch.ones(1)])  # torch imports a lot more when the first optimizer is made
    with contextlib.suppress(DriverStubUnavailableError):
        load_driver_stub()
    serve()

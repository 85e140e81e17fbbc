"""What a test must not do in its own process: fork with I/O in flight, exit with I/O in flight.

Run as `python -m tests.support.io_process KIND TASK DIRECTORY`. The processes of `fork` check
themselves and exit with a traceback; `exit` leaves its files to be checked by the test.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gds_optimizer.errors import ForkedError
from gds_optimizer.io import IoBackend
from tests.support import io_backends

MIB = 2**20
FILE_BYTES = 40 * MIB
SMALL_LIMIT_BYTES = 8 * MIB
CHILD_STATUS = 7
CHILD_LIMIT_S = 120.0


def payload(device: torch.device, value: int) -> torch.Tensor:
    """A buffer of one byte value, ready to be written."""
    buffer = io_backends.allocate(device, FILE_BYTES)
    fill(buffer, value)
    return buffer


def fill(buffer: torch.Tensor, value: int) -> None:
    buffer.fill_(value)
    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)


def run_open(backend: IoBackend, directory: Path) -> None:
    """Open and close a file: whether this backend works here at all."""
    backend.open(io_backends.create_file(directory / "opened.bin", MIB)).close()
    backend.close()


def run_exit(backend: IoBackend, directory: Path) -> None:
    """Exit with writes in flight, one of which will fail; nothing is waited for or closed."""
    buffer = payload(backend.device, 1)
    small = buffer[:SMALL_LIMIT_BYTES]
    files = [
        backend.open(io_backends.create_file(directory / f"{i}.bin", FILE_BYTES)) for i in range(8)
    ]
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_LIMIT_BYTES, resource.RLIM_INFINITY))
    for file in files:
        file.write(small, 0)
    files[0].write(buffer, 0)


def expect_forked_error(use: Callable[[], object]) -> None:
    try:
        use()
    except ForkedError as error:
        message = str(error)
    else:
        raise AssertionError("the forked child was not refused")
    assert str(os.getpid()) in message


def run_fork(backend: IoBackend, directory: Path) -> None:
    """Fork with a write in flight: the child is refused and may exit; the parent goes on."""
    kind = sys.argv[1]
    buffer = payload(backend.device, 1)
    path = io_backends.create_file(directory / "forked.bin", FILE_BYTES)
    file = backend.open(path)
    descriptor = file.fileno()
    idle = backend.open(path)
    idle_descriptor = idle.fileno()
    transfers = [file.write(buffer, 0) for _ in range(4)]
    status_read, status_write = os.pipe()
    child = os.fork()
    if child == 0:
        expect_forked_error(lambda: file.read(buffer, 0))
        expect_forked_error(lambda: file.write(buffer, 0))
        expect_forked_error(transfers[-1].done)
        expect_forked_error(transfers[-1].wait)
        expect_forked_error(lambda: backend.open(path))
        expect_forked_error(file.close)
        expect_forked_error(backend.close)
        if kind != "host":
            expect_forked_error(lambda: io_backends.make(kind))
            expect_forked_error(backend.counters)
        if buffer.device.type == "cuda":
            # Device memory cannot be freed in a child, which is nothing that I/O could change.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))
        transfers.clear()
        del file, idle, backend
        gc.collect()
        os.fstat(idle_descriptor)  # the child destroys nothing of its parent's
        os.write(status_write, b"done")
        # Through the whole of the interpreter's exit, not os._exit.
        sys.exit(CHILD_STATUS)
    deadline = time.monotonic() + CHILD_LIMIT_S
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the forked child does not end")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == CHILD_STATUS
    assert os.read(status_read, 4) == b"done"

    for transfer in transfers:
        transfer.wait()
    assert file.fileno() == descriptor
    assert os.path.samestat(os.fstat(descriptor), path.stat())
    fill(buffer, 0)
    file.read(buffer, 0).wait()
    assert int(buffer.min()) == 1
    backend.close()
    assert path.read_bytes() == b"\1" * FILE_BYTES


if __name__ == "__main__":
    {"open": run_open, "exit": run_exit, "fork": run_fork}[sys.argv[2]](
        io_backends.make(sys.argv[1], threads=2), Path(sys.argv[3])
    )

"""Ranks as forks of one process that has imported megatron-core.

Importing it takes seconds for every rank. Here one process does so, once, and whatever it is asked
for is a fork of it: a process of its own that shares nothing with the ranks before it. That process
has one thread, no process group and no optimizer, now and ever, so that nothing is torn by forking.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import pickle
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.megatron import MEGATRON_PATH

# Neither torch nor megatron-core is imported with this module: helpers that megatron-core spawns
# import the main module of their rank again, which is this one.


def run_forked_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0
) -> list[Any]:
    """What `harness.run_ranks` does, without the seconds. Several threads may call it at once."""
    import torch

    from tests.megatron import harness

    name = f"{function.__module__}:{function.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="ranks-") as temporary:
        directory = Path(temporary)
        (directory / "task").write_bytes(pickle.dumps((name, args)))
        ranks: list[Any] = _server().fork(directory, world_size)
        try:
            harness._wait_for(ranks, directory, name, timeout_s)
        finally:
            for rank in ranks:
                harness._kill(rank)
        return [
            torch.load(directory / f"result-{rank}", weights_only=False)
            for rank in range(world_size)
        ]


class _ForkedRank:
    """As much of `subprocess.Popen` as the harness uses."""

    def __init__(self, pid: int, status: Path, server: subprocess.Popen[str]) -> None:
        self.pid, self._status, self._server = pid, status, server

    def poll(self) -> int | None:
        try:
            return int(self._status.read_text())
        except FileNotFoundError:
            return self._server.poll()  # ranks die with it

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


class _Server:
    """The process that forks; it ends when this one closes its input, however it ends."""

    def __init__(self) -> None:
        from tests.megatron import harness

        self._lock = threading.Lock()
        paths = [MEGATRON_PATH, str(harness.REPOSITORY), os.environ.get("PYTHONPATH")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.megatron.forking"],
            cwd=harness.REPOSITORY,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in paths if path),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def fork(self, directory: Path, world_size: int) -> list[_ForkedRank]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(f"{json.dumps([str(directory), world_size])}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, f"the process that forks ranks ended with status {self._process.wait()}"
        return [
            _ForkedRank(pid, directory / f"status-{rank}", self._process)
            for rank, pid in enumerate(json.loads(answer))
        ]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.communicate()


_servers: list[_Server] = []
_starting = threading.Lock()


def _server() -> _Server:
    with _starting:
        if not _servers:
            _servers.append(_Server())
        return _servers[0]


# ---------------------------------------------------------------------- in the process that forks


def _serve() -> None:
    importlib.import_module("gds_optimizer.megatron.cpu").import_megatron()
    for name in ("gds_optimizer.megatron.tiny_gpt_model", "tests.megatron.checkpointing"):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
    gc.collect()
    gc.freeze()

    running: dict[int, Path] = {}
    while True:
        if select.select([sys.stdin], [], [], 0.02)[0]:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)  # some of what is imported complains of its own end
            directory, world_size = json.loads(line)
            pids = []
            for rank in range(world_size):
                pids.append(pid := os.fork())
                if not pid:
                    _be_rank(Path(directory), rank, world_size)
                    _end()
                running[pid] = Path(directory) / f"status-{rank}"
            print(json.dumps(pids), flush=True)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            path = running.pop(pid)
            part = path.with_suffix(".part")
            # Whoever does not wait for it any more has taken the directory away.
            with contextlib.suppress(FileNotFoundError):
                part.write_text(str(os.waitstatus_to_exitcode(status)))
                part.rename(path)


def _be_rank(directory: Path, rank: int, world_size: int) -> None:
    """In a fork: from here on a process like one that the harness starts."""
    os.setsid()  # so that a kill reaches the children it made
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(directory / f"output-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    faulthandler.enable()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    error = directory / f"error-{rank}"
    try:
        import torch

        torch.set_num_threads(1)
        _start_queue()
        torch.distributed.init_process_group(
            importlib.import_module("gds_optimizer.megatron.tiny_gpt").process_group_backend(),
            store=_store(directory, rank, world_size),
            rank=rank,
            world_size=world_size,
        )
        name, args = pickle.loads((directory / "task").read_bytes())
        module, _, attribute = name.partition(":")
        result = getattr(importlib.import_module(module), attribute)(*args)
        torch.save(result, directory / f"result-{rank}")
        torch.distributed.destroy_process_group()
    except BaseException:
        error.write_text(traceback.format_exc())
        raise


def _end() -> None:
    """End a rank that has done its work: what was to happen at exit does, and nothing after it.

    An interpreter that takes itself apart in a fork does so with libraries whose threads were
    never there.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _start_queue() -> None:
    """Start what megatron-core's writers report to, which it would spawn: import torch again."""
    module = "megatron.core.dist_checkpointing.strategies.filesystem_async"
    manager = multiprocessing.get_context("fork").Manager()
    importlib.import_module(module)._results_queue = manager.Queue()


def _store(directory: Path, rank: int, world_size: int) -> Any:
    """Where ranks meet: the harness's is a file, and every look into that sleeps a while."""
    from torch.distributed import HashStore, TCPStore

    if world_size == 1:
        return HashStore()
    meeting = directory / "port"
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        part = meeting.with_suffix(".part")
        part.write_text(str(store.port))
        part.rename(meeting)
        return store
    while not meeting.exists():
        time.sleep(0.01)
    return TCPStore("127.0.0.1", int(meeting.read_text()), world_size)


if __name__ == "__main__":
    _serve()

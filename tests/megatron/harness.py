"""Run a function on several real ranks, and say where two training runs first differ.

Each rank is a fresh Python process with one thread, a gloo process group that met in a file, and
the megatron-core version under test first on its path:

    GDS_OPTIMIZER_TEST_MEGATRON=/some/directory pytest tests/megatron

runs the suite against the `megatron` package in that directory instead of the installed one.
Starting a rank costs seconds (imports), so let one `run_ranks` call do many trainings.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import math
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.megatron.tiny_gpt import StepRecord, TrainingRecord, process_group_backend
from tests.megatron import MEGATRON_PATH

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
REPOSITORY = Path(__file__).resolve().parents[2]


class RankError(AssertionError):
    """A rank raised, died, or did not finish; the message has its traceback or output."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any] | str,
    *args: Any,
    timeout_s: float = 300.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `function(*args)` on every rank of a new process group.

    Args:
        world_size: number of processes.
        function: a module's function, or "package.module:function". It finds torch's default
            process group initialised and `RANK`, `WORLD_SIZE` and `LOCAL_RANK` set.
        args: anything that can be pickled.
        timeout_s: all processes are killed when they take longer.
        environment: variables that the processes get beside the present ones.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankError: a rank raised, died or did not finish. The others are killed.
    """
    if not isinstance(function, str):
        function = f"{function.__module__}:{function.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        (directory / "task").write_bytes(pickle.dumps((function, args)))
        ranks = [
            _start_rank(directory, rank, world_size, environment or {})
            for rank in range(world_size)
        ]
        try:
            _wait_for(ranks, directory, function, timeout_s)
        finally:
            for process in ranks:
                _kill(process)
        return [
            torch.load(directory / f"result-{rank}", weights_only=False)
            for rank in range(world_size)
        ]


def _start_rank(
    directory: Path, rank: int, world_size: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    paths = [MEGATRON_PATH, str(REPOSITORY), os.environ.get("PYTHONPATH")]
    with open(directory / f"output-{rank}", "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.megatron.harness", str(directory)],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in paths if path),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                **environment,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a kill reaches the children it made
        )


def _wait_for(
    ranks: list[subprocess.Popen[bytes]], directory: Path, function: str, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                raise RankError(
                    f"{function}: rank {rank} of {len(ranks)} ended with status {code}:\n"
                    f"{_last_words(directory, rank)}"
                )
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            rank = codes.index(None)
            raise RankError(
                f"{function}: rank {rank} of {len(ranks)} did not finish in {timeout_s:g} s:\n"
                f"{_last_words(directory, rank)}"
            )
        time.sleep(0.02)


def _last_words(directory: Path, rank: int) -> str:
    error = directory / f"error-{rank}"
    if error.exists():
        return error.read_text()
    return (directory / f"output-{rank}").read_text(errors="replace")[-4000:] or "(no output)"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _run_rank(directory: Path) -> None:
    """One rank: what `python -m tests.megatron.harness` does."""
    # A killed test run must not leave ranks behind that wait for each other.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            process_group_backend(),
            init_method=f"file://{directory / 'rendezvous'}",
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        # Each training ends with a collection, which need not look at what was imported.
        importlib.import_module("gds_optimizer.megatron.cpu").import_megatron()
        gc.collect()
        gc.freeze()
        name, args = pickle.loads((directory / "task").read_bytes())
        module, _, attribute = name.partition(":")
        result = getattr(importlib.import_module(module), attribute)(*args)
        # Not pickle: megatron-core 0.19 replaces what plain pickling of a tensor refers to.
        torch.save(result, directory / f"result-{rank}")
        torch.distributed.destroy_process_group()
    except BaseException:
        (directory / f"error-{rank}").write_text(traceback.format_exc())
        raise


def _bits(value: Any) -> Any:
    """Something that is equal exactly when the value's bits are."""
    return struct.pack(">d", value) if isinstance(value, float) else value


def compare_records(first: TrainingRecord, second: TrainingRecord) -> None:
    """Raise an AssertionError at the first thing that two trainings did not have in common.

    Compared are steps (floats by their bits), parameters and hook calls of one rank. Configuration
    and versions may differ: whether they matter is what one wants to know.
    """
    who = f"rank {first.rank} of {first.world_size}"
    assert (first.rank, first.world_size) == (second.rank, second.world_size), (
        f"{who} is compared with rank {second.rank} of {second.world_size}"
    )
    for step_first, step_second in zip(first.steps, second.steps, strict=False):
        for name in (each.name for each in fields(StepRecord)):
            a, b = getattr(step_first, name), getattr(step_second, name)
            assert _bits(a) == _bits(b), f"{who}, step {step_first.step}: {name} is {a!r} and {b!r}"
    assert len(first.steps) == len(second.steps), (
        f"{who}: {len(first.steps)} steps and {len(second.steps)}"
    )
    _compare_keys(first.param_digests, second.param_digests, f"{who}: parameter")
    for name, digest in first.param_digests.items():
        assert digest == second.param_digests[name], f"{who}: parameter {name} differs at the end"
    assert first.hook_calls == second.hook_calls, (
        f"{who}: hook calls are {first.hook_calls} and {second.hook_calls}"
    )


def compare_states(
    first: Mapping[str, Mapping[str, Any]], second: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise an AssertionError at the first bit in which two optimizer states differ.

    Takes what `collect_resident_state` returns: by shard name, tensors and scalars by their name.
    """
    _compare_keys(first, second, "shard")
    for shard, planes in first.items():
        _compare_keys(planes, second[shard], f"{shard}: state")
        for name, a in planes.items():
            b = second[shard][name]
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                _compare_tensors(a, b, f"{shard}: {name}")
            else:
                same = type(a) is type(b) and _bits(a) == _bits(b)
                assert same, f"{shard}: {name} is {a!r} and {b!r}"


def _compare_keys(first: Mapping[str, Any], second: Mapping[str, Any], what: str) -> None:
    for name in first:
        assert name in second, f"{what} {name} is missing in the second"
    for name in second:
        assert name in first, f"{what} {name} is missing in the first"


def _compare_tensors(first: torch.Tensor, second: torch.Tensor, what: str) -> None:
    assert (first.dtype, first.shape) == (second.dtype, second.shape), (
        f"{what} is {first.dtype} {tuple(first.shape)} and {second.dtype} {tuple(second.shape)}"
    )
    size = first.element_size()
    differing = (
        (first.contiguous().view(-1, 1).view(torch.uint8).view(-1, size))
        .ne(second.contiguous().view(-1, 1).view(torch.uint8).view(-1, size))
        .any(dim=1)
        .nonzero()
        .flatten()
    )
    if differing.numel():
        index = int(differing[0])
        a, b = first.flatten()[index].item(), second.flatten()[index].item()
        gap = abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.nan
        raise AssertionError(
            f"{what} differs in {differing.numel()} of {first.numel()} elements, first in number "
            f"{index}: {a!r} and {b!r} (by {gap:g})"
        )


if __name__ == "__main__":
    # Run the module under its real name, so that there is one of it.
    importlib.import_module("tests.megatron.harness")._run_rank(Path(sys.argv[1]))

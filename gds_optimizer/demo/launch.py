"""Start the demo's ranks, and leave nothing behind, whatever becomes of them."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from gds_optimizer.demo.report import DemoConfig, DemoReport, DemoStep, PeakMemory
from gds_optimizer.errors import (
    ConfigError,
    GdsOptimizerError,
    IoPathError,
    UnsupportedError,
)
from gds_optimizer.lock import reclaim_dead
from gds_optimizer.probe import ProbeReport, probe_directories
from gds_optimizer.probing.reasons import MEMORY_FS
from gds_optimizer.probing.system import System

if TYPE_CHECKING:
    from gds_optimizer.demo.training import RankReport

FOLDER = "gds-optimizer-demo"
PEER_FAILURE_S = 3.0


def run_demo(
    config: DemoConfig, on_probe: Callable[[ProbeReport], None] | None = None
) -> DemoReport:
    """Train the same small GPT with its optimizer state resident and streamed, and compare.

    Args:
        config: what and where.
        on_probe: called with the probe of the directory before training starts.

    Returns:
        What was found. `bit_identical` is None, and nothing was trained, where the I/O path that
        was asked for is not to be had: `on_probe` got the report that says why.

    Raises:
        UnsupportedError: megatron-core is not installed.
        ConfigError: more ranks than GPUs, or no directory on a disk.
        StoreLockedError: another demo is running in the same directory.
        GdsOptimizerError: a training failed.
    """
    _check_megatron()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and config.ranks > gpus:
        raise ConfigError(f"ranks is {config.ranks}, but there are {gpus} GPUs: one rank each")
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    parent = (config.directory or _default_directory()).absolute()
    # Without a GPU a path for device memory is still probed: the report says what is missing.
    asks_for_gpu = config.io not in ("auto", "host")
    probe = probe_directories(
        (parent,),
        io=config.io,
        device=None if asks_for_gpu and not gpus else device,
        allow_tmpfs=config.allow_tmpfs,
    )
    if on_probe is not None:
        on_probe(probe)
    settings = {**asdict(config), "directory": str(parent), "device": device.type}
    report = DemoReport(config=settings, probe=probe.to_dict())
    if probe.verdict is not None:
        with _folder(parent) as directory:
            _fill(report, _run_ranks(config, directory))
    return report


def _check_megatron() -> None:
    try:
        found = importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise UnsupportedError(
            "the demo trains megatron-core's GPT, and megatron-core is not installed: "
            "pip install 'gds-optimizer[megatron]'"
        )


def _default_directory() -> Path:
    """The current directory or the system's temporary one: the first on a disk that is writable."""
    candidates = [Path.cwd(), Path(tempfile.gettempdir())]
    for path in candidates:
        mount = System().mount_of(str(path.resolve()))
        in_memory = mount is not None and mount.fs_type in MEMORY_FS
        if not in_memory and os.access(path, os.W_OK | os.X_OK):
            return path
    raise ConfigError(
        f"neither {candidates[0]} nor {candidates[1]} is writable and on a disk: name a directory "
        "that is with --dir"
    )


@contextlib.contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    """The demo's own folder. What a dead demo left in it is removed before and what is ours after.

    Its name is always the same, so that leftovers of a killed demo are found by the next one.
    """
    directory = parent / FOLDER
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror}") from error
    try:
        reclaim_dead(directory, keep=directory)
        yield directory
    finally:
        # Ranks that closed properly have left nothing; this is for those that did not.
        reclaim_dead(directory, keep=directory)
        with contextlib.suppress(OSError):
            directory.rmdir()  # stays while another demo runs in it


class _Failure(NamedTuple):
    """An exception on its way from a rank; ours take arguments, so they cannot be pickled."""

    rank: int
    kind: str
    """Class of one of our errors; empty for any other."""
    message: str

    def raise_(self) -> NoReturn:
        for known in (ConfigError, IoPathError, UnsupportedError):
            if self.kind == known.__name__:
                raise known(self.message)
        if self.kind:
            raise GdsOptimizerError(f"rank {self.rank}: {self.message}")
        raise RuntimeError(f"rank {self.rank} of the demo failed:\n{self.message}")


def _run_ranks(config: DemoConfig, directory: Path) -> list[RankReport]:
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER}-") as meeting:
        rendezvous = Path(meeting) / "rendezvous"
        if config.ranks > 1:
            return _spawn(config, directory, rendezvous)
        from gds_optimizer.demo.training import run_rank

        with contextlib.redirect_stdout(sys.stderr):  # a library may print; ours is the report
            return [run_rank(config, 0, directory, rendezvous)]


def _child(
    config: DemoConfig,
    rank: int,
    directory: Path,
    rendezvous: Path,
    threads: int,
    sender: multiprocessing.connection.Connection,
) -> None:
    outcome: Any
    try:
        torch.set_num_threads(threads)
        from gds_optimizer.demo.training import run_rank

        with contextlib.redirect_stdout(sys.stderr):
            outcome = run_rank(config, rank, directory, rendezvous)
    except GdsOptimizerError as error:
        outcome = _Failure(rank, type(error).__name__, str(error))
    except Exception:  # noqa: BLE001 - reported by the parent
        outcome = _Failure(rank, "", traceback.format_exc())
    except KeyboardInterrupt:
        return  # the parent was interrupted too
    sender.send(outcome)


def _spawn(config: DemoConfig, directory: Path, rendezvous: Path) -> list[RankReport]:
    """Run every rank in a process of its own. A failure of one ends all of them."""
    context = multiprocessing.get_context("spawn")
    threads = max(1, len(os.sched_getaffinity(0)) // config.ranks)
    processes: list[BaseProcess] = []
    pending: dict[Any, int] = {}
    reports: dict[int, RankReport] = {}
    try:
        for rank in range(config.ranks):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (config, rank, directory, rendezvous, threads, sender)
            processes.append(context.Process(target=_child, args=arguments))
            processes[-1].start()
            sender.close()
            pending[receiver] = rank
        failures = _receive(pending, processes, reports)
        if failures:
            # A rank whose peer has failed fails too, and says less.
            min(failures, key=lambda failure: failure.kind == "").raise_()
        for process in processes:
            process.join()
    finally:
        # The others would wait for a rank that has failed.
        for process in processes:
            process.kill()
            process.join()
    return [reports[rank] for rank in range(config.ranks)]


def _receive(
    pending: dict[Any, int], processes: list[BaseProcess], reports: dict[int, RankReport]
) -> list[_Failure]:
    """Collect what the ranks send. After a failure the others get a short time to say theirs.

    Args:
        pending: connection -> rank.
        reports: gets what ranks without failure found.
    """
    failures: list[_Failure] = []
    deadline_s = math.inf
    while pending and time.monotonic() < deadline_s:
        limit_s = None if not failures else deadline_s - time.monotonic()
        for ready in multiprocessing.connection.wait(list(pending), limit_s):
            receiver: Any = ready
            rank = pending.pop(receiver)
            outcome: Any
            try:
                outcome = receiver.recv()
            except EOFError:
                processes[rank].join()
                status = processes[rank].exitcode
                outcome = _Failure(rank, "GdsOptimizerError", f"died with exit status {status}")
            if not isinstance(outcome, _Failure):
                reports[rank] = outcome
                continue
            failures.append(outcome)
            deadline_s = min(deadline_s, time.monotonic() + PEER_FAILURE_S)
    return failures


def _fill(report: DemoReport, ranks: list[RankReport]) -> None:
    """Put what the ranks found into the report."""
    from gds_optimizer.demo.compare import earliest

    first = ranks[0]
    report.config |= {
        "vocab": first.resident.config.vocab,
        "sequence_length": first.resident.config.sequence_length,
        "parameters": first.parameters,
        "inner_optimizer": ", ".join(dict.fromkeys(first.streamed.inner_optimizers)),
        "megatron_core": first.streamed.megatron_version,
        "torch": first.streamed.torch_version,
        "slots": max(rank.slots for rank in ranks),
        "buckets": sum(rank.buckets for rank in ranks),
        "bucket_bytes": first.bucket_bytes,
        "state_bytes": sum(rank.state_bytes for rank in ranks),
    }
    for number, (a, b) in enumerate(zip(first.resident.steps, first.streamed.steps, strict=True)):
        ways = {way for rank in ranks for way in rank.paths[number]}
        assert a.loss is not None, "there is one pipeline stage"
        assert b.loss is not None, "there is one pipeline stage"
        report.steps.append(
            DemoStep(
                step=number,
                loss_resident=a.loss,
                loss_streamed=b.loss,
                grad_norm_resident=a.grad_norm,
                grad_norm_streamed=b.grad_norm,
                read_bytes=sum(rank.read_bytes[number] for rank in ranks),
                written_bytes=sum(rank.written_bytes[number] for rank in ranks),
                resident_s=max(rank.resident_s[number] for rank in ranks),
                streamed_s=max(rank.streamed_s[number] for rank in ranks),
                path="+".join(sorted(ways)) or "none",
            )
        )
    for name in ("resident", "streamed"):
        peaks: list[PeakMemory] = [rank.memory[name] for rank in ranks]
        report.memory[name] = max(peaks, key=lambda peak: peak.peak_bytes)
    report.first_difference = earliest(rank.difference for rank in ranks)
    report.bit_identical = report.first_difference is None

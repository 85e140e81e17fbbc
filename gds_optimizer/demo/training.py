"""What one rank of the demo does: train resident, train streamed, measure and compare."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gds_optimizer.config import StreamConfig
from gds_optimizer.demo.compare import Found, Snapshot, first_difference
from gds_optimizer.demo.report import DemoConfig, PeakMemory
from gds_optimizer.megatron.setup import streamed_optimizer
from gds_optimizer.megatron.shards import (
    collect_resident_state,
    collect_streamed_state,
    distributed_optimizers,
    param_names,
)
from gds_optimizer.megatron.tiny_gpt import (
    StepRecord,
    TinyGptConfig,
    TrainingRecord,
    process_group_backend,
    run_training,
    sync_model_params,
)

VOCAB = 512
SEQUENCE_LENGTH = 64
# Enough buckets that the slots are a small part of the state, whatever the model.
BUCKETS_PER_RANK = 16
MAX_BUCKET_BYTES = 192 * 2**20
# The smallest bucket: 1024 elements of a fp32 main and two moments.
BUCKET_STEP_BYTES = 1024 * 12


@dataclass(slots=True)
class RankReport:
    """What a rank tells the process that prints; nothing in it is a tensor."""

    resident: TrainingRecord
    streamed: TrainingRecord
    resident_s: list[float]
    streamed_s: list[float]
    read_bytes: list[int]
    written_bytes: list[int]
    paths: list[list[str]]
    memory: dict[str, PeakMemory]
    parameters: int
    state_bytes: int
    buckets: int
    bucket_bytes: int
    slots: int
    difference: Found | None


@dataclass(slots=True)
class Run:
    """One training, while it goes on and afterwards."""

    memory: PeakMemory
    parameters: int = 0
    seconds: list[float] = field(default_factory=list)
    record: TrainingRecord | None = None
    model: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, torch.Tensor | float]] = field(default_factory=dict)

    @property
    def steps(self) -> list[StepRecord]:
        return self.record.steps if self.record is not None else []

    def snapshot(self) -> Snapshot:
        return Snapshot(self.steps, self.model, self.state)


def run_rank(config: DemoConfig, rank: int, directory: Path, rendezvous: Path) -> RankReport:
    """Train twice on this rank and compare. All ranks of the demo call it.

    Args:
        config: the demo's.
        rank: of this process; it uses the GPU of that number.
        directory: where the state goes.
        rendezvous: a file that does not exist yet, where the ranks meet.
    """
    with _quiet_logs(), _process_group(rank, config.ranks, rendezvous):
        return _train_twice(config, rank, directory)


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Keep setup lines to ourselves: the demo prints the probe's verdict itself."""
    logger = logging.getLogger("gds_optimizer")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _process_group(rank: int, world_size: int, rendezvous: Path) -> Iterator[None]:
    """torch's default group of the demo's ranks, whatever a job's environment says."""
    before = dict(os.environ)
    os.environ["LOCAL_RANK"] = str(rank)
    # All ranks are on this machine; a host that cannot look itself up must not stop gloo.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            process_group_backend(),
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
        )
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in ("LOCAL_RANK", "GLOO_SOCKET_IFNAME"):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _gpt(config: DemoConfig) -> TinyGptConfig:
    return TinyGptConfig(
        layers=config.layers,
        hidden=config.hidden,
        heads=8,
        vocab=VOCAB,
        sequence_length=SEQUENCE_LENGTH,
        steps=config.steps,
        schedule="changing",
        lr=1e-3,
        # Fused kernels for a GPU do not run on the CPU, where they may be installed all the same.
        inner_optimizer="installed" if torch.cuda.is_available() else "adamw",
    )


def bucket_bytes_for(parameters: int, ranks: int) -> int:
    """Bytes of a bucket that give a rank about sixteen of them, up to the usual 192 MiB."""
    wanted = parameters * 12 / ranks / BUCKETS_PER_RANK
    steps = max(1, -(-int(wanted) // BUCKET_STEP_BYTES))
    return min(steps * BUCKET_STEP_BYTES, MAX_BUCKET_BYTES)


def _train_twice(config: DemoConfig, rank: int, directory: Path) -> RankReport:
    gpt = _gpt(config)
    resident = _train(gpt, contextlib.nullcontext, collect_resident_state, lambda optimizer: None)
    stream_config = StreamConfig(
        directories=(directory,),
        io=config.io,
        bucket_size=bucket_bytes_for(resident.parameters, config.ranks),
        slots=config.slots,
        allow_tmpfs=config.allow_tmpfs,
    )
    watch = _Watch()
    try:
        streamed = _train(
            gpt,
            lambda: streamed_optimizer(stream_config),
            collect_streamed_state,
            watch.after_step,
        )
    finally:
        watch.close()
    assert resident.record is not None
    assert streamed.record is not None
    return RankReport(
        resident=resident.record,
        streamed=streamed.record,
        resident_s=resident.seconds,
        streamed_s=streamed.seconds,
        read_bytes=watch.read_bytes,
        written_bytes=watch.written_bytes,
        paths=watch.paths,
        memory={"resident": resident.memory, "streamed": streamed.memory},
        parameters=resident.parameters,
        state_bytes=watch.state_bytes,
        buckets=watch.buckets,
        bucket_bytes=stream_config.bucket_size,
        slots=watch.slots,
        difference=first_difference(resident.snapshot(), streamed.snapshot(), rank),
    )


class _Watch:
    """Counts what the engines of one streamed training move; closes them in the end."""

    def __init__(self) -> None:
        self.read_bytes: list[int] = []
        self.written_bytes: list[int] = []
        self.paths: list[list[str]] = []
        self.state_bytes = self.buckets = self.slots = 0
        self._optimizer: Any = None
        self._counters: dict[str, int] = {}

    def after_step(self, optimizer: Any) -> None:
        """Called when the training's optimizer is built and after each step."""
        engines = _engines(optimizer)
        for engine in engines:
            engine.drain()
        counters = engines[0].pool.backend.counters() if engines else {}
        if self._optimizer is None:
            self._optimizer = optimizer
            self.state_bytes = sum(engine.layout.total_bytes for engine in engines)
            self.buckets = sum(len(engine.layout.buckets) for engine in engines)
            self.slots = len(engines[0].pool.slots) if engines else 0
        else:
            self.read_bytes.append(sum(engine.last_stats.read_bytes for engine in engines))
            self.written_bytes.append(sum(engine.last_stats.written_bytes for engine in engines))
            self.paths.append(
                sorted(
                    {
                        key.rpartition(".")[0]
                        for key, count in counters.items()
                        if count > self._counters.get(key, 0)
                    }
                )
            )
        self._counters = counters

    def close(self) -> None:
        if self._optimizer is not None:
            for part in distributed_optimizers(self._optimizer):
                if not part.is_stub_optimizer:
                    part.close()


def _engines(optimizer: Any) -> list[Any]:
    parts = distributed_optimizers(optimizer)
    return [engine for part in parts if (engine := getattr(part, "engine", None)) is not None]


def _train(
    gpt: TinyGptConfig,
    make_context: Callable[[], contextlib.AbstractContextManager[Any]],
    collect: Callable[[Any], dict[str, dict[str, torch.Tensor | float]]],
    finish_step: Callable[[Any], None],
) -> Run:
    """One training.

    Args:
        make_context: entered while the optimizer is built.
        collect: copies the optimizer's state to the host after the last step.
        finish_step: called with the optimizer when it is built and after each step, in the time
            that the step is said to take.
    """
    meter = _MemoryMeter()
    run = Run(meter.peak)
    started_s = 0.0

    @contextlib.contextmanager
    def building() -> Iterator[None]:
        meter.begin()
        with make_context():
            yield

    def after_build(chunks: list[Any], optimizer: Any) -> None:
        finish_step(optimizer)
        meter.end(optimizer)
        run.parameters = sum(p.numel() for chunk in chunks for p in chunk.parameters())

    def before_step(step: int, chunks: list[Any], optimizer: Any) -> None:
        nonlocal started_s
        _synchronize()
        meter.begin()
        started_s = time.perf_counter()

    def after_step(step: int, chunks: list[Any], optimizer: Any) -> None:
        _synchronize()
        finish_step(optimizer)
        run.seconds.append(time.perf_counter() - started_s)
        meter.end(optimizer)
        if step == gpt.steps - 1:
            sync_model_params(chunks)
            run.model = {
                name: param.detach().to("cpu", copy=True)
                for param, name in param_names(chunks).items()
            }
            run.state = collect(optimizer)

    run.record = run_training(
        gpt,
        optimizer_context=building,
        after_build=after_build,
        before_step=before_step,
        after_step=after_step,
    )
    return run


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _MemoryMeter:
    """The most memory that an optimizer had, from its construction on; see `PeakMemory`.

    On a GPU it follows torch's allocator, but only between `begin` and `end`, so that what
    forward and backward passes keep (activations, libraries' workspaces) does not count.
    """

    def __init__(self) -> None:
        self._follows_allocator = torch.cuda.is_available()
        self.peak = PeakMemory(includes_temporaries=self._follows_allocator)
        self._kept_bytes = 0
        self._start_bytes = 0

    def begin(self) -> None:
        if self._follows_allocator:
            torch.cuda.reset_peak_memory_stats()
            self._start_bytes = torch.cuda.memory_allocated()

    def end(self, optimizer: Any) -> None:
        peak = self.peak
        pools = {id(engine.pool): engine.pool.nbytes for engine in _engines(optimizer)}
        held_bytes, slot_bytes = _held_bytes(optimizer), sum(pools.values())
        if self._follows_allocator:
            grown_bytes = torch.cuda.max_memory_allocated() - self._start_bytes
            now_bytes = self._kept_bytes + grown_bytes + slot_bytes
            self._kept_bytes += torch.cuda.memory_allocated() - self._start_bytes
        else:
            now_bytes = held_bytes + slot_bytes
        peak.held_bytes = max(peak.held_bytes, held_bytes)
        peak.slot_bytes = max(peak.slot_bytes, slot_bytes)
        peak.peak_bytes = max(peak.peak_bytes, now_bytes)


def _held_bytes(optimizer: Any) -> int:
    """Bytes of the storages behind the inner optimizers' parameters and state, each once."""
    storages: dict[int, int] = {}
    # Stand-ins of state that is on disk refuse to be looked at; what they hold counts all the same.
    with torch._C.DisableTorchFunctionSubclass():
        for part in distributed_optimizers(optimizer):
            if part.is_stub_optimizer:
                continue
            inner = part.optimizer
            tensors = [main for group in inner.param_groups for main in group["params"]]
            tensors += [value for state in inner.state.values() for value in state.values()]
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())

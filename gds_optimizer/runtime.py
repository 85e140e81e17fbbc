"""Everything that one process needs to stream: built together, closed together.

Front ends describe what is to be streamed as `Part`s. The runtime decides the I/O path once,
allocates one slot pool for all parts, creates the stores and engines, and writes the first state.
If any of it fails, nothing stays behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from gds_optimizer.config import StreamConfig
from gds_optimizer.drive_speeds import directory_speeds, several_drives
from gds_optimizer.engine import Engine
from gds_optimizer.errors import ConfigError, GdsOptimizerError
from gds_optimizer.homes import Home
from gds_optimizer.io import IoBackend, make_backend, reaches_host_memory
from gds_optimizer.plan import Binding, EnginePlan, plan_as_configured
from gds_optimizer.probe import ProbeReport, Severity, decide_io_path
from gds_optimizer.self_check import check_optimizer
from gds_optimizer.slots import SlotPool
from gds_optimizer.store import Store
from gds_optimizer.tiers import Tiers, budget_hint, host_share
from gds_optimizer.tracing import Tracer, trace_path
from gds_optimizer.tuning import is_wanted, tune
from gds_optimizer.tuning_result import Tuning
from gds_optimizer.tuning_shape import bucket_advice, choose_shape
from gds_optimizer.written_out import lend_device_memory, take_device_memory

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Part:
    """One optimizer to be streamed.

    Attributes:
        optimizer: the resident optimizer; its groups hold the bindings' mains.
        bindings: all its shards.
        name: its own part of the path below the rank's directory, e.g. "opt0".
        covered: whether our tests cover the framework around it; if not, it is checked first.
    """

    optimizer: torch.optim.Optimizer
    bindings: list[Binding]
    name: str
    covered: bool = True


@dataclass(eq=False)
class Runtime:
    """Engines that share a backend and a slot pool. Create it with `build`.

    Attributes:
        report: how the I/O path was chosen.
        tuning: what was measured for it, and chosen.
        engines: one for each part, in order.
    """

    config: StreamConfig
    report: ProbeReport
    tuning: Tuning
    backend: IoBackend
    pool: SlotPool
    engines: list[Engine] = field(default_factory=list)
    _pid: int = field(default_factory=os.getpid)

    @classmethod
    def build(
        cls,
        parts: Sequence[Part],
        config: StreamConfig,
        *,
        device: torch.device,
        rank: int,
        eager: bool,
    ) -> Runtime:
        """Set up streaming of `parts` for this rank.

        Args:
            parts: at least one.
            config: the settings.
            device: where the mains and the model's parameters live.
            rank: global rank; the stores are in "rank<rank>" below each directory.
            eager: write the first mains now rather than in the first step.

        Raises:
            GdsOptimizerError: what failed; no file, descriptor, thread or buffer stays behind.
        """
        config = config.for_device(device.type, host_bytes=host_share())
        plans = _plans(parts, config)
        state_bytes = sum(plan.layout.total_bytes for plan in plans)
        report = decide_io_path(config, device, try_all=is_wanted(config, state_bytes))
        tiers = Tiers.plan([plan.layout for plan in plans], config)
        tuning = tune(config, report, device, tiers.nbytes(Home.NVME))
        if tuning.timings:
            report = report.with_timings(tuning.io_path, tuning.path_timings())
        slots, bucket_bytes = choose_shape(tuning, config)
        if (slots, bucket_bytes) != (config.slots, config.bucket_size):
            config = replace(config, slots=slots, bucket_size=bucket_bytes)
            plans = _plans(parts, config)
            tiers = Tiers.plan([plan.layout for plan in plans], config)
        with contextlib.ExitStack() as undo:
            backend = make_backend(
                report.io_path,
                device=device,
                threads=tuning.point.threads,
                task_size_bytes=tuning.point.task_bytes,
                queue_per_drive=several_drives(config.directories),
            )
            undo.callback(backend.close)
            for part in parts:
                check_optimizer(part.optimizer, config, backend, rank, covered=part.covered)
            speeds = directory_speeds(
                config, backend, tiers.nbytes(Home.NVME), measured=tuning.rates_by_device()
            )
            undo.callback(tiers.close)
            from_host = not reaches_host_memory(backend.device)
            if not from_host:
                # What there is no room for goes to NVMe, and needs slots then.
                tiers.take_host_memory(backend.device, rank)
            sizes = tiers.pool_sizes(config.slots, from_host=from_host)
            pool = SlotPool(
                sizes.count, sizes.slot_bytes, backend, scratch_bytes=sizes.scratch_bytes
            )
            undo.callback(pool.close)
            tiers.take_device_memory(pool)
            if from_host:
                # Last: to pin it takes long, and how many slots there are does not depend on it.
                tiers.take_host_memory(backend.device, rank)
            if config.trace is not None:
                pool.trace = _tracer(config.trace, rank, device)
            runtime = cls(config, report, tuning, backend, pool)
            # Before the engines' own: at exit, the newest finalizer runs first.
            weakref.finalize(runtime, _close_shared, pool, backend, os.getpid())
            for part, plan, in_memory in zip(parts, plans, tiers.in_memory, strict=True):
                store = Store(
                    plan.layout,
                    config.directories,
                    f"rank{rank:05d}/{part.name}",
                    backend,
                    in_memory=in_memory,
                    speeds=speeds,
                )
                undo.callback(store.close)
                engine = Engine(plan, pool, store, timeout_s=config.io_timeout_s)
                runtime.engines.append(engine)
                undo.callback(_close_after_failure, engine)
            runtime._log_setup(tiers, config, rank)
            for part, engine in zip(parts, runtime.engines, strict=True):
                if eager or any(binding.initial for binding in part.bindings):
                    stats = engine.initialize()
                    logger.info("rank %d: initialised %s: %s", rank, part.name, stats.describe())
            for engine in runtime.engines:
                engine.drain()  # a disk that cannot hold the first mains is no start
            undo.pop_all()
        return runtime

    def _log_setup(self, tiers: Tiers, config: StreamConfig, rank: int) -> None:
        total_bytes = sum(engine.layout.total_bytes for engine in self.engines)
        buckets = sum(len(engine.layout.buckets) for engine in self.engines)
        logger.info(
            "rank %d: %.2f GiB of optimizer state in %d buckets on %s, %d slots of %.1f MiB on %s",
            rank,
            total_bytes / 2**30,
            buckets,
            ", ".join(map(str, config.directories)),
            len(self.pool.slots),
            self.pool.slot_bytes / 2**20,
            self.pool.device,
        )
        if tiers.count(Home.NVME) != buckets:
            logger.info("rank %d: %s", rank, tiers.describe())
        hint = budget_hint(tiers, config)
        if hint is not None:
            logger.info("rank %d: %s", rank, hint)
        if config.main != "fp32":
            logger.info(
                "rank %d: main parameters are kept as %s: they must not change between steps "
                "without a reload; %.1f MiB on %s hold a bucket's decoded ones",
                rank,
                "remainders" if config.main == "remainder" else "remainders or fp32",
                self.pool.scratch_bytes / 2**20,
                self.pool.device,
            )
        if config.moment_dtype != "fp32":
            logger.info(
                "rank %d: moments are kept in %s, rounded %s: training differs from fp32 moments; "
                "%.1f MiB on %s hold a bucket's decoded ones",
                rank,
                config.moment_dtype,
                "stochastically" if config.moment_rounding == "stochastic" else "to nearest",
                self.pool.scratch_bytes / 2**20,
                self.pool.device,
            )
        halved = sum(len(engine.halves.buckets) for engine in self.engines)
        if halved:
            logger.info(
                "rank %d: main parameters of %d buckets are kept as remainders of the model's "
                "bf16 parameters: call reload_model_params() after changing those",
                rank,
                halved,
            )
        logger.info("rank %d: %s", rank, self.report.summary())
        logger.info("rank %d: %s", rank, self.tuning.describe())
        advice = bucket_advice(self.tuning, config)
        if advice:
            logger.info("rank %d: %s", rank, advice)
        for finding in self.report.findings:
            if finding.severity in (Severity.WARN, Severity.MISSING):
                mend = f" -> {finding.mend}" if finding.mend else ""
                logger.info("rank %d: %s: %s%s", rank, finding.name, finding.what, mend)

    def prepare_step(self, first: Engine) -> None:
        """Let engines that are about to step after `first` refuse before that one has stepped.

        They step in turn, each as often: those that have stepped more often had their turn.

        Raises:
            GdsOptimizerError: of the first that would refuse its step; nothing was done.
        """
        for engine in self.engines:
            if engine is not first and engine.steps <= first.steps:
                engine.prepare_step()

    def suspend(self) -> None:
        """Free the slots, which all engines share, when nothing is in flight any more.

        Buckets that live on the device are written to files until `resume`.

        Raises:
            StepFailedError: a write that went on behind the last step has failed.
            NoSpaceError: there is no room for those files; nothing was freed.
            UnsupportedError: a block of `materialized` is open; nothing was freed.
        """
        for engine in self.engines:
            engine.check_can_lend()
        for engine in self.engines:
            engine.drain()
        if not self.pool.is_suspended:
            lend_device_memory(self.engines)
        self.pool.suspend()

    def resume(self) -> None:
        """Undo `suspend`; nothing if it was not called.

        Raises:
            ConfigError: the memory has gone to somebody else meanwhile.
            CorruptBucketError, IoError: what was written meanwhile cannot be read back.
            ForkedError: it is a forked child's, whose parent still needs those files.
        """
        for engine in self.engines:
            engine.store.check_owner()
        was_suspended = self.pool.is_suspended
        self.pool.resume()
        try:
            take_device_memory(self.engines)
        except BaseException:
            if was_suspended:
                self.pool.suspend()
            raise

    def close_engine(self, engine: Engine) -> None:
        """Close one engine; the last one takes slots and backend with it."""
        if engine not in self.engines:
            return
        self.engines.remove(engine)
        try:
            engine.close()
        finally:
            if not self.engines:
                _close_shared(self.pool, self.backend, self._pid)


def _plans(parts: Sequence[Part], config: StreamConfig) -> list[EnginePlan]:
    """How each part is laid out."""
    return [plan_as_configured(part.optimizer, part.bindings, config) for part in parts]


def _tracer(path: Path, rank: int, device: torch.device) -> Tracer:
    path = trace_path(path, rank)
    try:
        tracer = Tracer(path, rank=rank, device=device)
    except OSError as error:
        raise ConfigError(
            f"trace: {path} cannot be written ({error.strerror}): name a file in an existing "
            "directory"
        ) from error
    logger.info("rank %d: a timeline goes to %s", rank, path)
    return tracer


def _close_after_failure(engine: Engine) -> None:
    with contextlib.suppress(GdsOptimizerError):  # the first failure is on its way up already
        engine.close()


def _close_shared(pool: SlotPool, backend: IoBackend, pid: int) -> None:
    if os.getpid() != pid:
        return  # memory and threads are the parent's, not its forked child's
    try:
        backend.close()  # waits for what is in flight
    finally:
        pool.close()

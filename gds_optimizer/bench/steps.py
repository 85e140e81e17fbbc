"""Whole steps on synthetic state, between measurements of what the drives allow."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.bench.limit import THREADS, Limit, LimitFiles
from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import ConfigError
from gds_optimizer.evicted import evicted_like
from gds_optimizer.plan import Binding
from gds_optimizer.probing.cufile_stats import operations_by_path
from gds_optimizer.room import check_room, free_bytes
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.stepper import install_step
from gds_optimizer.telemetry import PHASES, PassClock, PassStats
from gds_optimizer.tuning_result import Tuning

_SHARD_NUMEL = 2**24
_LIMIT_BYTES = 4 * 2**30
_MAX_THREADS = 128


@dataclass(slots=True)
class BenchResult:
    """What a benchmark found; `to_dict` is its JSON form."""

    io_path: str
    device: str
    directories: list[str]
    numel: int
    state_bytes: int
    limit: Limit
    initialize: PassStats
    initialize_s: float
    steps: list[PassStats] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    ranks: int = 1
    rank_medians_s: list[float] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    cufile_operations: dict[str, int] | None = None
    tuning: Tuning | None = None

    @property
    def median_s(self) -> float:
        """Seconds of a step; with several ranks, of the slowest one in each step."""
        return statistics.median(self.steps_s)

    @property
    def rank_spread(self) -> float | None:
        """The slowest rank's median step time over the fastest one's; None for one rank."""
        if len(self.rank_medians_s) < 2:
            return None
        return max(self.rank_medians_s) / min(self.rank_medians_s)

    @property
    def moved_bytes(self) -> float:
        """Bytes that a step reads and writes; the median over the steps."""
        return statistics.median(s.read_bytes + s.written_bytes for s in self.steps)

    @property
    def ratio_to_limit(self) -> float | None:
        """Median step time over the time that its bytes take at the drives' mixed rate.

        None where no byte goes to the drives.
        """
        if not self.moved_bytes:
            return None
        return statistics.median(self.steps_s) / (self.moved_bytes / self.limit.mixed / 1e9)

    @property
    def ratio_to_best_round(self) -> float | None:
        """The same, over the mixed rate in the best of all rounds."""
        ratio = self.ratio_to_limit
        return ratio and ratio * self.limit.best_mixed / self.limit.mixed

    @property
    def initialize_ratio(self) -> float | None:
        """Time of the first writing over what its bytes take at the drives' first-write rate.

        None where no byte goes to the drives.
        """
        if not self.initialize.written_bytes:
            return None
        return self.initialize_s / (self.initialize.written_bytes / self.limit.first_write / 1e9)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; rates are 10⁹ bytes a second, times seconds."""
        phases = {
            f"{name}_s": statistics.median(s.phases_s[name] for s in self.steps) for name in PHASES
        }
        return {
            "io_path": self.io_path,
            "device": self.device,
            "directories": self.directories,
            "numel": self.numel,
            "state_bytes": self.state_bytes,
            "limit": self.limit.to_dict(),
            "initialize": {
                "seconds": self.initialize_s,
                "bytes": self.initialize.written_bytes,
                "ratio_to_limit": self.initialize_ratio,
            },
            "step": {
                "count": len(self.steps_s),
                "median_s": statistics.median(self.steps_s),
                "min_s": min(self.steps_s),
                "max_s": max(self.steps_s),
                **phases,
            },
            "bytes": {
                "read": statistics.median(s.read_bytes for s in self.steps),
                "written": statistics.median(s.written_bytes for s in self.steps),
                "host_read": statistics.median(s.host_read_bytes for s in self.steps),
                "host_written": statistics.median(s.host_written_bytes for s in self.steps),
            },
            "in_place_buckets": max(s.in_place_buckets for s in self.steps),
            "ratio_to_limit": self.ratio_to_limit,
            "ratio_to_best_round": self.ratio_to_best_round,
            "ranks": self.ranks,
            "rank_spread": self.rank_spread,
            "counters": self.counters,
            "cufile_operations": self.cufile_operations,
            "tuning": self.tuning and self.tuning.to_dict(),
        }

    def to_text(self) -> str:
        """For people; the last sentence says what it means."""
        limit, step_s = self.limit, statistics.median(self.steps_s)
        phases = ", ".join(f"{name} {self.to_dict()['step'][f'{name}_s']:.2f} s" for name in PHASES)
        moved, ratio, first_ratio = (
            self.to_dict()["bytes"],
            self.ratio_to_limit,
            self.initialize_ratio,
        )
        first_writing = f", {first_ratio:.2f} times what the drives need" if first_ratio else ""
        verdict = (
            f"A step takes {ratio:.2f} times what these drives need for its bytes"
            if ratio
            else "No byte of a step goes to the drives"
        )
        in_memory = (
            f"in memory   {self.to_dict()['in_place_buckets']} buckets stepped where they live, "
            f"{(moved['host_read'] + moved['host_written']) / 1e9:.2f} GB copied from and to host "
            "memory in a step\n"
        )
        duplex = (
            "half-duplex: reads and writes take turns, so only compute hides behind them"
            if limit.is_half_duplex
            else "reads and writes go on at the same time"
        )
        return (
            f"{self.numel / 1e9:.3f} billion parameters, {self.state_bytes / 1e9:.2f} GB of state "
            f"on {', '.join(self.directories)} ({self.io_path}, {self.device})\n"
            f"drives      read {limit.read:.2f}, write {limit.write:.2f}, both at once "
            f"{limit.mixed:.2f} (best round {limit.best_mixed:.2f}), "
            f"first write {limit.first_write:.2f} GB/s\n"
            f"            {duplex}\n"
            f"{self._tuning_text()}"
            f"initialise  {self.initialize.written_bytes / 1e9:.2f} GB in "
            f"{self.initialize_s:.2f} s{first_writing}\n"
            f"step        {step_s:.2f} s (median of {len(self.steps_s)}, {min(self.steps_s):.2f} "
            f"to {max(self.steps_s):.2f}), {self.moved_bytes / step_s / 1e9:.2f} GB/s\n"
            f"of which    {phases}\n"
            f"{in_memory}{self._ranks_text()}{self._limit_text()}\n"
            f"{verdict}; "
            f"7 billion parameters a rank would take {7e9 / self.numel * step_s:.0f} s. "
            f"{self._advice()}"
        )

    def _tuning_text(self) -> str:
        return "" if self.tuning is None else f"setup       {self.tuning.describe()}\n"

    def _ranks_text(self) -> str:
        if self.rank_spread is None:
            return ""
        return (
            f"ranks       {self.ranks}, each {self.numel / 1e9:.3f} billion parameters; times are "
            f"the slowest's, {self.rank_spread:.2f} times the fastest's\n"
        )

    def _limit_text(self) -> str:
        limit = self.limit
        how = (
            f"limit       direct I/O past the page cache, {limit.point_bytes / 1e9:.2f} GB a "
            f"measurement out of {limit.file_bytes / 1e9:.2f} GB of files; both at once: "
            f"{limit.read_share:.0%} read"
        )
        if limit.sustained_bytes:
            return f"{how}; {limit.sustained_bytes / 1e9:.0f} GB were written before"
        return f"{how}; consumer drives may write slower for long (--sustained BYTES tells)"

    def _advice(self) -> str:
        """Whether the drives or something else set the pace."""
        waits_s = statistics.median(
            s.phases_s["read_wait"] + s.phases_s["write_wait"] for s in self.steps
        )
        if waits_s > self.median_s / 2:
            return (
                "It mostly waits for the drives: more or faster ones (--dir for each) or fewer "
                "bytes (--moment-dtype) make it shorter. They are fast enough for you if a step of "
                "your training takes several times as long."
            )
        return (
            "It waits for the drives less than half of the time: they are fast enough for what "
            "computes here."
        )


def device_named(name: str | None) -> torch.device:
    """The device of this name, with its index; by default a GPU if there is one.

    Raises:
        ConfigError: torch cannot use it here.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"--device is {name!r}, which torch cannot use here ({reason}): wanted cpu, cuda or "
            "cuda:N"
        ) from error


def check_room_for_files(directories: Sequence[Path], nbytes: int) -> None:
    """Refuse a benchmark that cannot fit.

    Raises:
        NoSpaceError: says how many bytes are needed and free.
    """
    check_room(
        directories,
        nbytes,
        "the files of the benchmark",
        "name larger directories, or fewer parameters (--numel)",
    )


def synthetic_optimizer(
    numel: int, device: torch.device
) -> tuple[torch.optim.Optimizer, list[Binding]]:
    """An AdamW over `numel` bf16 parameters whose fp32 mains are evicted, and its bindings."""
    bindings = []
    for start in range(0, numel, _SHARD_NUMEL):
        count = min(_SHARD_NUMEL, numel - start)
        name = f"synthetic[{start}:{start + count}]"
        model = torch.randn(count, device=device).to(torch.bfloat16)
        main = evicted_like(model, dtype=torch.float32, name=name)
        bindings.append(Binding(name, main, model))
    optimizer = torch.optim.AdamW([torch.zeros(1, device=device)], lr=1e-4, fused=True)
    optimizer.param_groups[0]["params"] = [binding.main for binding in bindings]
    return optimizer, bindings


@torch.no_grad()
def run_bench(
    config: StreamConfig,
    *,
    numel: int,
    steps: int,
    device: torch.device,
    limit_bytes: int = _LIMIT_BYTES,
    progress: Callable[[str], None] = lambda line: None,
    team: Team | None = None,
    sustained_bytes: int = 0,
) -> BenchResult:
    """Measure the drives, the first writing and some steps, in turn.

    Args:
        config: directories, path, slots and so on.
        numel: parameters of this rank; their state takes up to 12 bytes each in the directories.
        steps: how many to time, at least 1; one before them is not counted.
        device: where parameters and slots are.
        limit_bytes: that one measurement of the drives moves at most.
        progress: gets a line now and then.
        team: the ranks that do this at the same time; by default this process is alone.
        sustained_bytes: to be written before the drives are measured.

    Returns:
        With several ranks: in each step the times of the slowest, and the bytes of all together.
        The drives are measured by rank 0 alone, over all directories at once, while the others
        wait: what is asked for is what the drives give to whoever asks, and one process of plain
        direct I/O reaches that, with as many requests in flight as all ranks have.

    Raises:
        GdsOptimizerError: setting up or a step failed.
    """
    team = team or Team()
    state_bytes = 12 * numel * team.size
    limit_bytes = min(limit_bytes, state_bytes)
    host_bytes = config.host_budget if isinstance(config.host_budget, int) else 0
    on_drives = max(state_bytes - (config.hbm_budget + host_bytes) * team.size, 0)
    check_room_for_files(config.directories, on_drives + limit_bytes)
    spare_bytes = free_bytes(*config.directories) - on_drives - on_drives // 50
    file_bytes = max(limit_bytes, min(state_bytes, spare_bytes))
    optimizer, bindings = synthetic_optimizer(numel, device)
    grads = torch.randn(min(numel, _SHARD_NUMEL), device=device) * 0.01
    threads = sorted({*THREADS, min(config.io_threads * team.size, _MAX_THREADS)})
    with contextlib.ExitStack() as stack:
        files = None
        if team.rank == 0:
            files = stack.enter_context(
                LimitFiles(config.directories, file_bytes, point_bytes=limit_bytes, threads=threads)
            )
            files.measure_first_write(fresh=False)
            progress(f"first write {files.limit.first_write:.2f} GB/s")
            files.write_first(sustained_bytes)
        team.barrier()
        runtime = Runtime.build(
            [Part(optimizer, bindings, "bench")],
            config,
            device=device,
            rank=team.rank,
            eager=False,
        )
        engine = runtime.engines[0]
        stack.callback(runtime.close_engine, engine)
        stack.callback(install_step(optimizer, engine.step))
        started = operations_by_path()
        team.barrier()
        _, initialize_s = timed(engine.initialize, engine.drain)
        initialize, initialize_s, _ = _together(team, engine.last_stats, initialize_s)
        if files is not None:
            files.measure_first_write()
            # What is in the slots when a step begins is not read.
            buckets = len(engine.layout.buckets) - len(engine.store.in_memory)
            read = max(buckets - len(runtime.pool.slots), 0) / max(buckets, 1)
            files.limit.read_share = read / (1 + read)
            files.choose_points()
        result = BenchResult(
            str(runtime.report.io_path),
            str(device),
            [str(directory) for directory in config.directories],
            numel,
            sum(team.gather(engine.layout.total_bytes)),
            Limit() if files is None else files.limit,
            initialize,
            initialize_s,
            ranks=team.size,
            tuning=runtime.tuning,
        )
        own_s = []
        for number in range(steps + 1):
            for binding in bindings:
                binding.main.grad = grads[: binding.main.numel()]
            team.barrier()
            _, seconds = timed(optimizer.step, engine.drain)
            stats, slowest_s, all_s = _together(team, engine.last_stats, seconds)
            if number:
                result.steps.append(stats)
                result.steps_s.append(slowest_s)
                own_s.append(all_s)
            progress(f"step {number}: {slowest_s:.2f} s, {stats.describe()}")
            if files is not None and number:
                moved = stats.read_bytes + stats.written_bytes
                kinds = ("read", "write", "mixed") if number == (steps + 1) // 2 else ("mixed",)
                files.measure(stats.read_bytes / moved if moved else None, kinds)
        result.rank_medians_s = [statistics.median(each) for each in zip(*own_s, strict=True)]
        for counters in team.gather(runtime.backend.counters()):
            _add(result.counters, counters)
        ended = operations_by_path()
        for counts in team.gather(ended and _difference(ended, started or {})):
            if counts is not None:
                result.cufile_operations = _add(result.cufile_operations or {}, counts)
        team.barrier()  # nobody removes its files while another still measures
    return result


class Team:
    """The processes that run the benchmark together: by default, this one alone."""

    rank = 0
    size = 1

    def barrier(self) -> None:
        """Wait for all."""

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        return [value]


def _together(team: Team, stats: PassStats, seconds: float) -> tuple[PassStats, float, list[float]]:
    """Times of the slowest rank with the bytes of all; its seconds; everybody's seconds."""
    everybody = team.gather((stats, seconds))
    all_s = [each_s for _, each_s in everybody]
    slowest, slowest_s = max(everybody, key=lambda each: each[1])
    summed = replace(
        slowest,
        buckets=sum(each.buckets for each, _ in everybody),
        read_bytes=sum(each.read_bytes for each, _ in everybody),
        written_bytes=sum(each.written_bytes for each, _ in everybody),
    )
    return summed, slowest_s, all_s


def _add(counts: dict[str, int], others: dict[str, int]) -> dict[str, int]:
    for key, count in others.items():
        counts[key] = counts.get(key, 0) + count
    return counts


def _difference(counts: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {key: count - before.get(key, 0) for key, count in counts.items()}


def timed(*actions: Callable[[], Any]) -> tuple[Any, float]:
    """Results and seconds of some calls, the device included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    clock = PassClock("")
    results = [action() for action in actions]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return results, clock.finish().wall_s

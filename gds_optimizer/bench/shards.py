"""What many small shards cost: `python -m gds_optimizer.bench.shards --dir D --numel N`.

One optimizer step over the same bytes in a few large shards and in thousands of tiny ones, with the
state in host memory and on NVMe, timed in turn in one process. Parameters and gradients lie in one
buffer each, as a framework's data-parallel buffers have them.

Python's share is measured too: what the calling thread computes in a step over as many shards in as
many buckets of next to no elements, where nothing else is left to do, and, on a GPU, how long the
host takes to queue a step that lives in host memory, which the device works off later.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.bench.arguments import add_timing_options, module_parser, stream_config
from gds_optimizer.bench.steps import check_room_for_files, device_named, timed
from gds_optimizer.command import count, exit_status, file_to_write
from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import ConfigError
from gds_optimizer.evicted import evicted_like
from gds_optimizer.plan import Binding
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.stepper import install_step

LARGE_SHARDS = 20
_ALIGNMENT = 64  # of shards in buckets and in frameworks' buffers
_STATE_BYTES = 12  # of a parameter: fp32 main, exp_avg, exp_avg_sq
_SLACK_BYTES = 2**22  # for the ends of buckets
_LOTS_BYTES = 2**50


@dataclass(slots=True)
class _Times:
    """Seconds of each step that counts.

    Attributes:
        step_s: until the last byte is where it belongs.
        host_s: until `optimizer.step()` has returned.
        thread_s: that the calling thread computed meanwhile.
        device_allocations: calls of cudaMalloc by torch in these steps.
    """

    step_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    thread_s: list[float] = field(default_factory=list)
    device_allocations: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_s": statistics.median(self.step_s),
            "host_s": statistics.median(self.host_s),
            "thread_s": statistics.median(self.thread_s),
            "runs": {"step_s": self.step_s, "host_s": self.host_s, "thread_s": self.thread_s},
            "device_allocations": self.device_allocations,
        }


class ShardedRun:
    """An engine over equal shards whose parameters and gradients are views of two buffers.

    Args:
        name: of its directory.
        config: the settings.
        sizes: elements of each shard; each begins at a multiple of 64 in its buffer.
        device: where buffers and slots are.
    """

    def __init__(
        self, name: str, config: StreamConfig, sizes: Sequence[int], device: torch.device
    ) -> None:
        spans = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        models = torch.randn(sum(spans), device=device).to(torch.bfloat16).split(spans)
        grads = (torch.randn(sum(spans), device=device) * 0.01).split(spans)
        self._grads = [grad[:size] for grad, size in zip(grads, sizes, strict=True)]
        self._bindings = []
        for number, (whole, size) in enumerate(zip(models, sizes, strict=True)):
            model = whole[:size]
            main = evicted_like(model, dtype=torch.float32, name=f"shard {number}")
            self._bindings.append(Binding(f"shard {number}", main, model))
        self.optimizer = torch.optim.AdamW([torch.zeros(1, device=device)], lr=1e-4, fused=True)
        self.optimizer.param_groups[0]["params"] = [each.main for each in self._bindings]
        self.runtime = Runtime.build(
            [Part(self.optimizer, self._bindings, name)], config, device=device, rank=0, eager=True
        )
        (self.engine,) = self.runtime.engines
        self._uninstall = install_step(self.optimizer, self.engine.step)
        self._device = device
        self.times = _Times()

    def set_gradients(self) -> None:
        """As a backward pass leaves them: new tensors each time."""
        for binding, grad in zip(self._bindings, self._grads, strict=True):
            binding.main.grad = grad.detach()

    def step(self, *, counts: bool) -> None:
        """One step, timed until everything is where it belongs."""
        self.set_gradients()
        allocations = _device_allocations(self._device)
        host_s, thread_s = 0.0, 0.0

        def step() -> None:
            nonlocal host_s, thread_s
            began, thread_began = time.perf_counter(), time.thread_time()
            self.optimizer.step()
            host_s, thread_s = time.perf_counter() - began, time.thread_time() - thread_began

        _, step_s = timed(step, self.engine.drain)
        if counts:
            self.times.step_s.append(step_s)
            self.times.host_s.append(host_s)
            self.times.thread_s.append(thread_s)
            self.times.device_allocations += _device_allocations(self._device) - allocations

    def close(self) -> None:
        """Give memory and files back."""
        self._uninstall()
        self.runtime.close_engine(self.engine)


def _device_allocations(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device)["segment.all.allocated"])


def shard_sizes(numel: int, shards: int, gap: int) -> tuple[list[int], list[int]]:
    """Elements of the large and of the tiny shards: the same bytes of buckets for both.

    Args:
        numel: of all, about.
        shards: tiny ones, at least 20.
        gap: elements at the end of each tiny shard's last 64 that belong to nobody.

    Raises:
        ConfigError: there are too few elements, or the gap is not from 0 to 63.
    """
    if shards < LARGE_SHARDS:
        raise ConfigError(f"--shards is {shards}, wanted at least {LARGE_SHARDS}")
    if not 0 <= gap < _ALIGNMENT:
        raise ConfigError(f"--gap is {gap}, wanted 0 to {_ALIGNMENT - 1}")
    # A whole number of tiny ones in each large one, so that both are as long to the element.
    tiny = numel // shards // _ALIGNMENT * _ALIGNMENT
    if not tiny:
        raise ConfigError(
            f"--numel is {numel}, wanted at least {_ALIGNMENT * shards} for {shards} shards"
        )
    parts = [shards // LARGE_SHARDS + (i < shards % LARGE_SHARDS) for i in range(LARGE_SHARDS)]
    return [count * tiny for count in parts], [tiny - gap] * shards


@torch.no_grad()
def run_shards_bench(
    config: StreamConfig,
    *,
    numel: int,
    shards: int,
    repeats: int,
    device: torch.device,
    gap: int = 0,
    profile: Path | None = None,
) -> dict[str, Any]:
    """Time large and tiny shards in host memory and on NVMe, in turn.

    Args:
        config: directories, bucket size, slots and so on; its budgets are not used.
        numel: parameters, about; each of two runs takes 12 bytes of host memory for each, each of
            two more as much on the drives.
        shards: tiny ones.
        repeats: how often each is timed; twice more before that is not counted.
        device: where parameters and slots are.
        gap: see `shard_sizes`.
        profile: a file for what cProfile has seen of one more step over tiny shards of next to no
            elements.

    Returns:
        For each way medians and runs, and what the tiny shards cost on top.

    Raises:
        GdsOptimizerError: setting up or a step failed.
    """
    large, tiny = shard_sizes(numel, shards, gap)
    check_room_for_files(config.directories, 2 * _STATE_BYTES * numel + _SLACK_BYTES)
    tiers = {
        "host": replace(config, hbm_budget=0, host_budget=_LOTS_BYTES),
        "nvme": replace(config, hbm_budget=0, host_budget=0),
    }
    with contextlib.ExitStack() as undo:

        def build(name: str, settings: StreamConfig, sizes: Sequence[int]) -> ShardedRun:
            run = ShardedRun(name, settings, sizes, device)
            undo.callback(run.close)
            return run

        runs = {
            f"{tier}_{kind}": build(f"{tier}_{kind}", settings, sizes)
            for tier, settings in tiers.items()
            for kind, sizes in (("large", large), ("tiny", tiny))
        }
        buckets = len(runs["host_tiny"].engine.layout.buckets)
        # As many shards in about as many buckets, of 64 elements each: arithmetic is nothing.
        small = max(_ALIGNMENT * shards // buckets // 1024, 1) * 1024 * _STATE_BYTES
        runs["python"] = build(
            "python", replace(tiers["host"], bucket_size=small), [_ALIGNMENT - gap] * shards
        )
        homes = {
            name: [len(run.engine.store.in_memory), len(run.engine.layout.buckets)]
            for name, run in runs.items()
        }
        for number in range(repeats + 2):
            for run in runs.values():
                run.step(counts=number > 1)
        if profile is not None:
            _profile(runs["python"], profile)
        found = {name: run.times.to_dict() for name, run in runs.items()}
    seconds = {name: each["step_s"] for name, each in found.items()}
    return {
        "device": str(device),
        "numel": sum(large),
        "shards": {"large": len(large), "tiny": len(tiny)},
        "state_bytes": _STATE_BYTES * sum(large),
        "buckets_in_memory": {name: in_memory for name, (in_memory, _) in homes.items()},
        "buckets": {name: count for name, (_, count) in homes.items()},
        "ways": found,
        "tiny_to_large": {
            tier: seconds[f"{tier}_tiny"] / seconds[f"{tier}_large"] for tier in tiers
        },
        "tiny_on_top_s": {
            tier: seconds[f"{tier}_tiny"] - seconds[f"{tier}_large"] for tier in tiers
        },
        "python_s": found["python"]["thread_s"],
        "queueing_s": found["host_tiny"]["host_s"] if device.type == "cuda" else None,
        "device_allocations": sum(each["device_allocations"] for each in found.values()),
    }


def _profile(run: ShardedRun, path: Path) -> None:
    run.set_gradients()
    profiler = cProfile.Profile()
    profiler.runcall(_as_function(run.optimizer.step))
    profiler.dump_stats(path)


def _as_function(step: Callable[[], Any]) -> Callable[[], None]:
    def call() -> None:
        step()

    return call


def _text(found: dict[str, Any]) -> str:
    shards = found["shards"]
    lines = [
        (
            f"{found['numel'] / 1e9:.3f} billion parameters on {found['device']}, in "
            f"{shards['large']} large or {shards['tiny']} tiny shards"
        )
    ]
    for name, way in found["ways"].items():
        runs = way["runs"]["step_s"]
        lines.append(
            f"{name:<11} {way['step_s']:8.4f} s ({min(runs):.4f} to {max(runs):.4f}), the host "
            f"returns after {way['host_s']:.4f} s, {found['buckets_in_memory'][name]} of "
            f"{found['buckets'][name]} buckets in memory"
        )
    for tier, ratio in found["tiny_to_large"].items():
        lines.append(
            f"{tier}: tiny shards take {ratio:.3f} times as long as large ones, "
            f"{found['tiny_on_top_s'][tier]:+.4f} s"
        )
    lines.append(f"Python's share of a step over tiny shards: {found['python_s']:.4f} s")
    if found["device"] != "cpu":
        lines.append(f"cudaMalloc calls in steps that count: {found['device_allocations']}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = module_parser("shards", __doc__)
    parser.add_argument("--numel", type=count, default=200_000_000, help="parameters (default 2e8)")
    parser.add_argument("--shards", type=count, default=20_000, help="tiny ones (default 20000)")
    parser.add_argument("--gap", type=int, default=0, help="elements between tiny shards (0 to 63)")
    add_timing_options(parser)
    parser.add_argument(
        "--profile", type=file_to_write, help="a file for cProfile's statistics of a step"
    )
    arguments = parser.parse_args(argv)
    return exit_status(parser.prog, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    found = run_shards_bench(
        stream_config(arguments),
        numel=arguments.numel,
        shards=arguments.shards,
        repeats=arguments.repeats,
        device=device_named(arguments.device),
        gap=arguments.gap,
        profile=arguments.profile,
    )
    sys.stdout.write((json.dumps(found, indent=1) if arguments.json else _text(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

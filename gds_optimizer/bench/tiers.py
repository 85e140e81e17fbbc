"""What memory for buckets buys: `python -m gds_optimizer.bench.tiers --dir D`.

Five ways of one optimizer step over the same number of parameters, timed in turn in one process:
a bare loop of copies and Adam that shares no code with the engine, the resident step, the engine
with its state in host memory, the same with a part of it on NVMe, and the engine with its state on
the device. `--ways` chooses some of them, for states of which not all fit beside each other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim.adamw import adamw

from gds_optimizer.bench.arguments import add_timing_options, module_parser, stream_config
from gds_optimizer.bench.steps import (
    check_room_for_files,
    device_named,
    synthetic_optimizer,
    timed,
)
from gds_optimizer.command import count, exit_status
from gds_optimizer.config import StreamConfig
from gds_optimizer.io.memory import HostBuffer
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.stepper import install_step

_SHARD_NUMEL = 2**24
_STATE_BYTES = 12  # of a parameter: fp32 main, exp_avg, exp_avg_sq
_SLACK_BYTES = 2**20  # for the ends of the last bucket, more than all of its padding
_NVME_PART = 0.9 / 14.9
_ADAMW: dict[str, Any] = {
    "lr": 1e-4,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "amsgrad": False,
    "maximize": False,
}

WAYS = ("bare_loop", "resident", "host", "host_and_nvme", "device")
_RATIOS = {
    "host_to_bare_loop": ("host", "bare_loop"),
    "host_and_nvme_to_bare_loop": ("host_and_nvme", "bare_loop"),
    "device_to_resident": ("device", "resident"),
}

Step = Callable[[], None]


class BareLoop:
    """Copies a bucket to a slot, steps it, copies it back: streams, events and nothing else.

    Args:
        params: flat bf16 parameters, one for each bucket.
        grads: fp32, at least as long as the longest of them.
        slots: buckets on the device at a time.
    """

    def __init__(self, params: Sequence[torch.Tensor], grads: torch.Tensor, slots: int = 3) -> None:
        device, largest = grads.device, max(param.numel() for param in params)
        self._params, self._grads = params, grads
        self._memory = [HostBuffer(_STATE_BYTES * param.numel(), device) for param in params]
        self._host = [each.tensor.view(torch.float32).view(3, -1) for each in self._memory]
        self._slots = [torch.empty(3 * largest, device=device) for _ in range(slots)]
        self._counters = [torch.zeros(1, device=device).squeeze(0) for _ in params]
        self._is_cuda = device.type == "cuda"
        for host, param in zip(self._host, params, strict=True):
            host[0].copy_(param)
        if self._is_cuda:
            self._in, self._compute, self._out = (torch.cuda.Stream(device) for _ in range(3))
            self._loaded, self._stepped, self._stored = (
                [torch.cuda.Event() for _ in range(slots)] for _ in range(3)
            )

    def step(self) -> None:
        if not self._is_cuda:
            for number in range(len(self._params)):
                planes = self._planes(number, 0)
                planes.copy_(self._host[number])
                self._adam(number, planes)
                self._host[number].copy_(planes)
            return
        start = torch.cuda.current_stream()
        for stream in (self._in, self._compute, self._out):
            stream.wait_stream(start)
        for number in range(len(self._params)):
            slot = number % len(self._slots)
            planes, host = self._planes(number, slot), self._host[number]
            with torch.cuda.stream(self._in):
                if number >= len(self._slots):
                    self._in.wait_event(self._stored[slot])
                planes.copy_(host, non_blocking=True)
                self._loaded[slot].record(self._in)
            with torch.cuda.stream(self._compute):
                self._compute.wait_event(self._loaded[slot])
                self._adam(number, planes)
                self._stepped[slot].record(self._compute)
            with torch.cuda.stream(self._out):
                self._out.wait_event(self._stepped[slot])
                host.copy_(planes, non_blocking=True)
                self._stored[slot].record(self._out)
        for stream in (self._compute, self._out):
            start.wait_stream(stream)

    def _planes(self, number: int, slot: int) -> torch.Tensor:
        numel = self._params[number].numel()
        return self._slots[slot][: 3 * numel].view(3, numel)

    def _adam(self, number: int, planes: torch.Tensor) -> None:
        main, exp_avg, exp_avg_sq = planes
        grads = [self._grads[: main.numel()]]
        counters = [self._counters[number]]
        adamw([main], grads, [exp_avg], [exp_avg_sq], [], counters, fused=True, **_ADAMW)
        self._params[number].copy_(main)

    def close(self) -> None:
        self._host = []
        for each in self._memory:
            each.close()


def _flat_params(numel: int, size: int, device: torch.device) -> list[torch.Tensor]:
    starts = range(0, numel, size)
    return [torch.randn(min(size, numel - at), device=device).to(torch.bfloat16) for at in starts]


def _resident(numel: int, grads: torch.Tensor) -> Step:
    """The step with everything on the device, and its mains copied into the parameters."""
    params = _flat_params(numel, _SHARD_NUMEL, grads.device)
    mains = [param.float() for param in params]
    optimizer = torch.optim.AdamW(mains, lr=_ADAMW["lr"], fused=True)
    for main in mains:
        main.grad = grads[: main.numel()]

    def step() -> None:
        optimizer.step()
        torch._foreach_copy_(params, mains)

    return step


@contextlib.contextmanager
def _engine(
    name: str, config: StreamConfig, numel: int, grads: torch.Tensor
) -> Iterator[tuple[Step, Runtime]]:
    optimizer, bindings = synthetic_optimizer(numel, grads.device)
    runtime = Runtime.build(
        [Part(optimizer, bindings, name)], config, device=grads.device, rank=0, eager=True
    )
    (engine,) = runtime.engines
    uninstall = install_step(optimizer, engine.step)
    for binding in bindings:
        binding.main.grad = grads[: binding.main.numel()]

    def step() -> None:
        optimizer.step()
        engine.drain()

    try:
        yield step, runtime
    finally:
        uninstall()
        runtime.close_engine(engine)


@torch.no_grad()
def run_tiers_bench(
    config: StreamConfig,
    *,
    numel: int,
    repeats: int,
    device: torch.device,
    wanted: Sequence[str] = WAYS,
) -> dict[str, Any]:
    """Time the ways in turn.

    Each timed step follows one of its own kind that is not counted, as it would in a training run:
    another way's, which waits for a drive perhaps, leaves cold caches and a sleeping processor.

    Args:
        config: directories, bucket size, slots and so on; its budgets are not used.
        numel: parameters. Three of the ways take 12 bytes each of host memory, two of the device's.
        repeats: how often each is timed.
        device: where parameters and slots are.
        wanted: some of `WAYS`.

    Returns:
        Medians ("seconds"), all times ("runs"), and ratios of medians (None without both).

    Raises:
        GdsOptimizerError: setting up or a step failed.
        MemoryError: the bare loop's host memory is not to be had.
    """
    state_bytes = _STATE_BYTES * numel
    everything = state_bytes + state_bytes // 256 + _SLACK_BYTES
    if "host_and_nvme" in wanted:
        check_room_for_files(config.directories, int(_NVME_PART * state_bytes) + _SLACK_BYTES)
    budgets = {
        "host": replace(config, host_budget=everything),
        "host_and_nvme": replace(config, host_budget=int((1 - _NVME_PART) * state_bytes)),
        "device": replace(config, hbm_budget=everything),
    }
    grads = torch.randn(min(numel, _SHARD_NUMEL), device=device) * 0.01
    bucket_numel = min(config.bucket_size // _STATE_BYTES // 1024 * 1024, grads.numel())
    with contextlib.ExitStack() as undo:
        ways: dict[str, Step] = {}
        if "bare_loop" in wanted:
            loop = BareLoop(_flat_params(numel, bucket_numel, device), grads, config.slots)
            undo.callback(loop.close)
            ways["bare_loop"] = loop.step
        if "resident" in wanted:
            ways["resident"] = _resident(numel, grads)
        where: dict[str, Any] = {}
        for name, budget in budgets.items():
            if name not in wanted:
                continue
            ways[name], runtime = undo.enter_context(_engine(name, budget, numel, grads))
            files = runtime.engines[0].store.in_memory.values()
            on_device = sum(file.stays_on_device for file in files)
            where[name] = {
                "device": on_device,
                "host": len(files) - on_device,
                "nvme": len(runtime.engines[0].layout.buckets) - len(files),
            }
        runs: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, step in ways.items():
                timed(step)
                runs[name].append(timed(step)[1])
    median = {name: statistics.median(each) for name, each in runs.items()}
    return {
        "device": str(device),
        "numel": numel,
        "state_bytes": state_bytes,
        "buckets": where,
        "seconds": median,
        "runs": runs,
        **{
            ratio: median[over] / median[under] if {over, under} <= median.keys() else None
            for ratio, (over, under) in _RATIOS.items()
        },
    }


def _text(found: dict[str, Any]) -> str:
    lines = [f"{found['numel'] / 1e9:.3f} billion parameters on {found['device']}"]
    for name, seconds in found["seconds"].items():
        homes = found["buckets"].get(name, {})
        buckets = ", ".join(f"{count} {home}" for home, count in homes.items() if count)
        runs = found["runs"][name]
        lines.append(
            f"{name:<14} {seconds:8.4f} s ({min(runs):.4f} to {max(runs):.4f})"
            + (f"  buckets: {buckets}" if buckets else "")
        )
    for ratio, (over, under) in _RATIOS.items():
        if found[ratio] is not None:
            lines.append(f"{over} takes {found[ratio]:.3f} times as long as {under}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = module_parser("tiers", __doc__)
    parser.add_argument(
        "--numel", type=count, default=1_240_000_000, help="parameters (default 1.24e9)"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=WAYS,
        metavar="WAY",
        help=f"which to time (default all: {' '.join(WAYS)})",
    )
    add_timing_options(parser)
    arguments = parser.parse_args(argv)
    return exit_status(parser.prog, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    found = run_tiers_bench(
        stream_config(arguments),
        numel=arguments.numel,
        repeats=arguments.repeats,
        device=device_named(arguments.device),
        wanted=arguments.ways,
    )
    sys.stdout.write((json.dumps(found, indent=1) if arguments.json else _text(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

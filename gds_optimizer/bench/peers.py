"""The same AdamW step by this package and its peers: `python -m gds_optimizer.bench.peers --dir D`.

A streamer of one's own is a Python file with `build(params, directory)`, which returns an object
with `step()`; `params` are fp32 leaf tensors whose `.grad` is set before every step.
"""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.bench.steps import device_named, run_bench, timed
from gds_optimizer.command import count, exit_status
from gds_optimizer.config import StreamConfig

_SHARD_NUMEL = 2**24


def _params(numel: int, device: torch.device) -> list[torch.Tensor]:
    sizes = [min(_SHARD_NUMEL, numel - start) for start in range(0, numel, _SHARD_NUMEL)]
    return [torch.randn(size, device=device).requires_grad_() for size in sizes]


def _cached_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Cached:"))


def _time(
    build: Callable[[list[torch.Tensor]], Any], numel: int, steps: int, device: torch.device
) -> dict[str, Any]:
    params = _params(numel, device)
    cached = _cached_bytes()
    optimizer = build(params)
    seconds = []
    for number in range(steps + 1):
        for param in params:
            param.grad = torch.full_like(param, 0.01)
        taken_s = timed(optimizer.step)[1]
        if number:
            seconds.append(taken_s)
    return {
        "step_s": statistics.median(seconds),
        "page_cache_growth_bytes": _cached_bytes() - cached,
    }


def compare(
    directory: Path, *, numel: int, steps: int, device: torch.device, streamers: list[Path]
) -> dict[str, dict[str, Any]]:
    """Median seconds of a step by peer, or why there is none.

    Growth of the page cache is that of the whole machine, which is not capped.
    """
    found: dict[str, dict[str, Any]] = {
        "resident": _time(
            lambda params: torch.optim.AdamW(params, fused=True), numel, steps, device
        )
    }
    cached = _cached_bytes()
    ours = run_bench(
        StreamConfig(directories=(directory,)), numel=numel, steps=steps, device=device
    )
    found["gds-optimizer"] = {
        "step_s": ours.median_s,
        "page_cache_growth_bytes": _cached_bytes() - cached,
    }
    builders: dict[str, tuple[str, str, Callable[[Any, list[torch.Tensor]], Any]]] = {
        "torchao CPUOffloadOptimizer": (
            "torchao.optim",
            "torchao",
            lambda m, params: m.CPUOffloadOptimizer(params, torch.optim.AdamW),
        ),
        "bitsandbytes PagedAdamW": (
            "bitsandbytes",
            "bitsandbytes",
            lambda m, params: m.optim.PagedAdamW(params),
        ),
    }
    for name, (module_name, package, make) in builders.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            found[name] = {"missing": f"not installed: pip install {package}"}
            continue
        try:
            found[name] = _time(lambda p, m=module, f=make: f(m, p), numel, steps, device)  # type: ignore[misc]
        except Exception as error:  # noqa: BLE001 - another's failure is a row of the table
            found[name] = {"missing": f"failed: {error}"}
    for path in streamers:
        build = runpy.run_path(str(path))["build"]
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            where = Path(scratch)
            found[path.name] = _time(
                lambda p, b=build, w=where: b(p, w),  # type: ignore[misc]
                numel,
                steps,
                device,
            )
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="compare-peers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--numel", type=count, default=2**27)
    parser.add_argument("--steps", type=count, default=5)
    parser.add_argument("--device")
    parser.add_argument("--streamer", type=Path, action="append", default=[])
    arguments = parser.parse_args(argv)
    return exit_status(parser.prog, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    found = compare(
        arguments.dir,
        numel=arguments.numel,
        steps=arguments.steps,
        device=device_named(arguments.device),
        streamers=arguments.streamer,
    )
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

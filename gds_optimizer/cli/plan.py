"""`gds-optimizer plan --numel N`: what streaming will take, before anything runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gds_optimizer.cli.arguments import add_layout_options, given
from gds_optimizer.command import count

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Say what streaming will take: bytes a parameter and of each rank, where buckets live, files, device
and host memory, bytes of a step, seconds where rates are given or measured, and what unused host
memory would buy. The numbers come from the plan that a run would make. Allocates and writes
nothing, but for --measure, and needs no GPU.
"""
EPILOG = """\
exit status: 0 planned, whether or not it fits; 2 wrong usage or a setting that cannot work; 1
anything else.
"""

_SETTINGS = (
    "bucket_size",
    "slots",
    "moment_dtype",
    "moment_rounding",
    "main",
    "hbm_budget",
    "host_budget",
    "io",
    "allow_tmpfs",
)
"""Fields of `StreamConfig` that are options here."""


def register(subparsers: SubParsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="say what streaming will take",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--numel", type=count, required=True, help="parameters, e.g. 7e9")
    parser.add_argument(
        "--ranks", type=count, default=1, help="GPUs that share the optimizer state (default 1)"
    )
    parser.add_argument(
        "--local-ranks", type=count, help="of them, on one machine with its drives (default: all)"
    )
    parser.add_argument("--optimizer", default="adamw", help="adamw, or sgd with momentum")
    add_layout_options(parser)
    parser.add_argument(
        "--hbm-budget", default="0", help="of each rank, for buckets that stay on its device"
    )
    parser.add_argument(
        "--host-budget", default="0", help="of each rank, the same in host memory; or auto"
    )
    parser.add_argument(
        "--host-memory", help="available on a machine, e.g. 1TiB (default: what this one has)"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="where the optimizer steps: the CPU has other slots and buckets by default, and takes "
        "what is in host memory as it is",
    )
    parser.add_argument(
        "--dir",
        dest="directories",
        nargs="+",
        help="look at the free room in these directories: one for each drive",
    )
    parser.add_argument("--bench", type=Path, help="file with what `bench --json` printed")
    for kind in ("read", "write", "mixed"):
        parser.add_argument(
            f"--{kind}-gbps",
            type=float,
            help=f"{kind} rate of a machine's drives, 10**9 bytes a second",
        )
    parser.add_argument(
        "--copy-gbps",
        type=float,
        help="one GPU and pinned host memory, both directions at once, both counted",
    )
    parser.add_argument(
        "--measure", action="store_true", help="measure the drives of --dir, and this GPU's copies"
    )
    parser.add_argument("--io", default="auto", help="the I/O path to measure (default auto)")
    parser.add_argument("--allow-tmpfs", action="store_true", help="accept a directory in memory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    from gds_optimizer.bench.steps import device_named
    from gds_optimizer.config import StreamConfig, parse_size
    from gds_optimizer.errors import ConfigError
    from gds_optimizer.host_memory import available_bytes
    from gds_optimizer.planning import plan_streaming
    from gds_optimizer.rates import Rates, measure_rates

    settings: dict[str, Any] = given(arguments, *_SETTINGS)
    # Settings are checked as those of a run, which has directories.
    config = StreamConfig(directories=tuple(map(Path, arguments.directories or ["/"])), **settings)
    host_bytes = parse_size(arguments.host_memory) if arguments.host_memory else available_bytes()
    local_ranks = arguments.local_ranks or arguments.ranks
    config = config.for_device(arguments.device, host_bytes=host_bytes // local_ranks)
    if arguments.measure and not arguments.directories:
        raise ConfigError("--measure needs --dir: name a directory on each drive")
    rates = Rates.from_bench(arguments.bench) if arguments.bench else Rates()
    if arguments.measure:
        measured = measure_rates(config, device_named(None))
        rates = replace(rates, mixed_gbps=measured.mixed_gbps, copy_gbps=measured.copy_gbps)
    named = given(arguments, "read_gbps", "write_gbps", "mixed_gbps", "copy_gbps")
    plan = plan_streaming(
        arguments.numel,
        config,
        ranks=arguments.ranks,
        local_ranks=local_ranks,
        optimizer=arguments.optimizer,
        device_type=arguments.device,
        rates=replace(rates, **named),
        look_for_room=bool(arguments.directories),
        host_memory_bytes=host_bytes,
    )
    print(json.dumps(plan.to_dict(), indent=1) if arguments.json else plan.to_text())
    return 0

"""`gds-optimizer bench --dir D`: is this machine's NVMe fast enough?"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from gds_optimizer.cli.probe import IO_CHOICES

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Time optimizer steps whose state is in the directories, and what the drives would allow at best: a
loop of plain direct reads and writes that shares no code with the steps, run between them. Needs
room for up to 12 bytes a parameter and at most 4 GiB more; leaves nothing behind.
"""
EPILOG = """\
exit status: 0 measured; 2 wrong usage; 3 the path asked for is not to be had; 1 anything else.
"""


def register(subparsers: SubParsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time steps against what the drives allow",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dir", dest="directories", action="append", required=True, help="one for each drive"
    )
    parser.add_argument(
        "--numel", type=_count, default=2**30, help="parameters, e.g. 1.24e9 (default 2**30)"
    )
    parser.add_argument("--steps", type=_count, default=5, help="steps to time (default 5)")
    parser.add_argument("--io", choices=IO_CHOICES, default="auto", help="path (default auto)")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    parser.add_argument("--slots", type=_count, default=3, help="buckets in memory (default 3)")
    parser.add_argument("--bucket-size", default="192MiB", help="e.g. 96MiB (default 192MiB)")
    parser.add_argument(
        "--moment-dtype", default="fp32", help="fp32, bf16 or int8: how moments are kept"
    )
    parser.add_argument(
        "--moment-rounding", default="stochastic", help="or nearest; where they are not in fp32"
    )
    parser.add_argument(
        "--hbm-budget", default="0", help="bytes of state that stay on the device, e.g. 8GiB"
    )
    parser.add_argument(
        "--host-budget", default="0", help="the same of host memory, or auto (default 0)"
    )
    parser.add_argument(
        "--main", default="fp32", help="or remainder, or auto: how main parameters are kept"
    )
    parser.add_argument("--allow-tmpfs", action="store_true", help="accept a directory in memory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < 2**63 or value != int(value):
        raise argparse.ArgumentTypeError(f"wanted a whole number of at least 1, got {text!r}")
    return int(value)


def run(arguments: argparse.Namespace) -> int:
    from gds_optimizer.bench.steps import device_named, run_bench
    from gds_optimizer.config import StreamConfig

    config = StreamConfig(
        directories=tuple(arguments.directories),
        io=arguments.io,
        bucket_size=arguments.bucket_size,
        slots=arguments.slots,
        moment_dtype=arguments.moment_dtype,
        moment_rounding=arguments.moment_rounding,
        hbm_budget=arguments.hbm_budget,
        host_budget=arguments.host_budget,
        main=arguments.main,
        allow_tmpfs=arguments.allow_tmpfs,
    )
    result = run_bench(
        config,
        numel=arguments.numel,
        steps=arguments.steps,
        device=device_named(arguments.device),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(result.to_dict(), indent=1) if arguments.json else result.to_text())
    return 0

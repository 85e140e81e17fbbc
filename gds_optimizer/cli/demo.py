"""`gds-optimizer demo`: streaming shown, and proven bit-identical, on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gds_optimizer.probe import ProbeReport

    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

# As `gds_optimizer.config.IO_CHOICES`, whose import takes torch along.
IO_CHOICES = ("auto", "gds", "posix", "host", "gds-compat")

DESCRIPTION = """\
Train the same small GPT twice, once with its optimizer state resident and once streamed from disk,
and compare losses, gradient norms, model parameters, main parameters, moments and counters bit by
bit. Runs on GPUs where there are any, else on the CPU. Needs megatron-core. Leaves nothing behind.
"""
EPILOG = """\
exit status: 0 bit-identical; 1 not, or a failure; 2 wrong usage; 3 the I/O path asked for is not to
be had (or none is).
"""


def register(subparsers: SubParsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train a small GPT resident and streamed, and compare them bit by bit",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="directory on the drive to try (default: the current one); the demo works in "
        "gds-optimizer-demo inside it",
    )
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps (default 6)")
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="data-parallel processes on this machine (default 1); on a GPU each, if there is one",
    )
    parser.add_argument(
        "--io",
        choices=IO_CHOICES,
        default="auto",
        help="the I/O path; auto (the default) takes the fastest that works",
    )
    parser.add_argument("--layers", type=int, default=4, help="of the model (default 4)")
    parser.add_argument("--hidden", type=int, default=256, help="its width (default 256)")
    parser.add_argument("--slots", type=int, default=3, help="buckets in memory (default 3)")
    parser.add_argument(
        "--allow-tmpfs", action="store_true", help="accept a directory in memory (tmpfs, ramfs)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and print what it found.

    Returns:
        0 for bit-identical trainings, 1 for different ones.

    Raises:
        IoPathError: the path is not to be had; the probe's report has been printed.
    """
    from gds_optimizer.command import EXIT_FAILED
    from gds_optimizer.demo import DemoConfig, run_demo
    from gds_optimizer.errors import IoPathError

    config = DemoConfig(
        directory=arguments.dir,
        steps=arguments.steps,
        ranks=arguments.ranks,
        io=arguments.io,
        layers=arguments.layers,
        hidden=arguments.hidden,
        slots=arguments.slots,
        allow_tmpfs=arguments.allow_tmpfs,
    )

    def show(probe: ProbeReport) -> None:
        print(probe.to_text(color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
        if probe.verdict is not None:
            ranks = "1 rank" if config.ranks == 1 else f"{config.ranks} ranks"
            print(f"\ntraining {config.steps} steps twice on {ranks} ...")
        sys.stdout.flush()

    report = run_demo(config, None if arguments.json else show)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2, allow_nan=False))
    elif report.bit_identical is not None:
        print(f"{report.describe_run()}\n\n{report.to_text()}")
    sys.stdout.flush()
    if report.bit_identical is None:
        raise IoPathError(str(report.probe["refusal"]))
    return 0 if report.bit_identical else EXIT_FAILED

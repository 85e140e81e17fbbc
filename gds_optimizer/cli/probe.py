"""`gds-optimizer probe DIR...`: which way bytes would take, and what keeps a faster one away."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from gds_optimizer.command import seconds

if TYPE_CHECKING:
    from gds_optimizer.probing.report import ProbeReport

    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

# As `gds_optimizer.config.IO_CHOICES`, whose import takes torch along.
IO_CHOICES = ("auto", "gds", "posix", "host", "gds-compat")

DESCRIPTION = """\
Write a few MiB in each directory, read them back and compare, by GPUDirect Storage, by KvikIO's
POSIX mode or from host memory, in a process that is given up after a time limit. Says which way
works, why not the faster one, and what mends it. Leaves nothing behind.
"""
EPILOG = """\
exit status: 0 a path works in all directories; 2 wrong usage; 3 the path asked for is not to be had
(or none is); 1 anything else.
"""


def register(subparsers: SubParsers) -> None:
    parser = subparsers.add_parser(
        "probe",
        help="show which way bytes take between a device and directories, and why",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directories", nargs="+", metavar="DIR", help="one for each drive")
    parser.add_argument(
        "--io",
        choices=IO_CHOICES,
        default="auto",
        help="the path to try; auto (the default) takes the fastest that works everywhere",
    )
    parser.add_argument(
        "--time",
        action="store_true",
        help="time the paths that work, about 5 seconds and 384 MiB for each drive and path, and "
        "take the faster",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--allow-tmpfs", action="store_true", help="accept a directory in memory (tmpfs, ramfs)"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds that one round trip may take (default 60)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report, as text or JSON.

    Raises:
        IoPathError: what was asked for is not to be had; the report has been printed.
    """
    from gds_optimizer.probe import choose_io_path, probe_directories

    report = probe_directories(
        arguments.directories,
        io=arguments.io,
        allow_tmpfs=arguments.allow_tmpfs,
        timeout_s=arguments.timeout,
        try_all=arguments.time,
    )
    if arguments.time and report.verdict is not None:
        report = _timed(report)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print(report.to_text(color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    sys.stdout.flush()
    choose_io_path(report)
    return 0


def _timed(report: ProbeReport) -> ProbeReport:
    """With what its paths give.

    Raises:
        OSError, GdsOptimizerError: it could not be measured.
    """
    import torch

    from gds_optimizer.io.base import IoPath
    from gds_optimizer.tuning import time_report

    name = "cpu" if report.io_path is IoPath.HOST else "cuda:0"
    report, tuning = time_report(report, device=torch.device(name))
    print(f"timed in {tuning.seconds:.1f} s", file=sys.stderr)
    return report

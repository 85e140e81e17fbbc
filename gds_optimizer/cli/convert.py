"""`gds-optimizer convert SNAPSHOT DEST`: a snapshot in another storage form."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Make a snapshot that keeps moments or main parameters in another form of one that stays as it is,
with all its ranks.
A run with the settings that are named here restores the result by links, as one that it took
itself. What is read is compared with its checksums, and nothing is left of a conversion that fails.
"""
EPILOG = """\
exit status: 0 converted; 2 wrong usage, or the snapshot has that form already; 1 the snapshot is
damaged or incomplete, DEST is taken, there is too little room, or anything else.
"""

_LOG_INTERVAL_S = 10.0


def register(subparsers: SubParsers) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="make a snapshot in another storage form",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("snapshot", metavar="SNAPSHOT", type=Path, help="directory of the snapshot")
    parser.add_argument("dest", metavar="DEST", type=Path, help="directory for the result")
    parser.add_argument(
        "--moment-dtype", help="fp32, bf16 or int8 (default: as they are): how moments are kept"
    )
    parser.add_argument(
        "--moment-rounding",
        help="nearest or stochastic: what the run that restores it is to be given (default: as it "
        "is, stochastic for moments in fp32); what is converted is rounded to nearest",
    )
    parser.add_argument(
        "--main",
        help="fp32 or remainder (default: as they are): how main parameters are kept, lossless",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from gds_optimizer.snapshot_convert import convert, plan_conversion
    from gds_optimizer.storage_form import StorageForm

    form = StorageForm(
        moment_dtype=arguments.moment_dtype,
        moment_rounding=arguments.moment_rounding,
        main=arguments.main,
    )
    conversion = plan_conversion(arguments.snapshot, arguments.dest, form)
    with tqdm(
        total=conversion.read_bytes,
        unit="B",
        unit_scale=True,
        desc="converting",
        file=sys.stderr,
        # A log file is to show that it goes on, not every step of it.
        mininterval=0.1 if sys.stderr.isatty() else _LOG_INTERVAL_S,
    ) as bar:
        convert(conversion, bar.update)
    print(
        f"{arguments.dest}: {conversion.written_bytes} bytes of buckets, converted from "
        f"{conversion.read_bytes} in {arguments.snapshot}"
    )
    return 0

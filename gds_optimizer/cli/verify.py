"""`gds-optimizer verify PATH`: read a snapshot and compare its checksums."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Read everything in a snapshot, past the page cache, and compare it with the checksums that were
taken when it was written. Names every bucket that is damaged.
"""
EPILOG = """\
exit status: 0 everything is as it was written; 1 something is damaged, or there is no complete
snapshot; 2 wrong usage.
"""

_LOG_INTERVAL_S = 10.0


def register(subparsers: SubParsers) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="read a snapshot and compare its checksums",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="directory of the snapshot")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from gds_optimizer.snapshot_read import readable_parts, verify

    total_bytes = sum(part.nbytes for part in readable_parts(arguments.path))
    with tqdm(
        total=total_bytes,
        unit="B",
        unit_scale=True,
        desc="reading",
        file=sys.stderr,
        # A log file is to show that it goes on, not every step of it.
        mininterval=0.1 if sys.stderr.isatty() else _LOG_INTERVAL_S,
        disable=arguments.json,
    ) as bar:
        damages = verify(arguments.path, bar.update)
    if arguments.json:
        print(json.dumps({"path": str(arguments.path), "bytes": total_bytes, "damages": damages}))
    else:
        for damage in damages:
            print(f"damaged: {damage}")
        print(
            f"{arguments.path}: {len(damages)} damaged"
            if damages
            else f"{arguments.path}: {total_bytes} bytes, everything is as it was written"
        )
    return 1 if damages else 0

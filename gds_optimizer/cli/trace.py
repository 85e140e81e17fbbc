"""`gds-optimizer trace FILE`: what a timeline says about where steps spend their time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Summarise timelines that --stream-optimizer-state-trace has written: how long each lane was busy,
what was waited for, and the longest time in which nothing was computed. Several files (of several
ranks) are put together. With --plot, draw the lanes instead; that needs matplotlib.
"""
EPILOG = "exit status: 0 shown; 2 wrong usage, or not such a file; 1 anything else.\n"


def register(subparsers: SubParsers) -> None:
    parser = subparsers.add_parser(
        "trace",
        help="show where the steps of a timeline spend their time",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="one for each rank")
    parser.add_argument("--plot", metavar="PICTURE", type=Path, help="draw the lanes to this file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gds_optimizer.timeline import load_spans, plot, summarize, to_dict, to_text

    spans = [span for file in arguments.files for span in load_spans(file)]
    if arguments.plot is not None:
        plot(spans, arguments.plot)
        print(f"{len(spans)} spans drawn to {arguments.plot}")
        return 0
    data = to_dict(summarize(spans))
    print(json.dumps(data, indent=1) if arguments.json else to_text(data))
    return 0

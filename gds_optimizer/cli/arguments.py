"""Options that several commands have."""

from __future__ import annotations

import argparse
from typing import Any

from gds_optimizer.command import count


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Add what decides how much room a bucket and a parameter take, with the defaults of a run."""
    parser.add_argument(
        "--slots",
        type=count,
        help="buckets in memory (default 3; for an optimizer on the CPU 6, or 12 with 9 GiB free)",
    )
    parser.add_argument("--bucket-size", help="e.g. 64MiB (default 192MiB; 96MiB on the CPU)")
    parser.add_argument(
        "--moment-dtype", default="fp32", help="fp32, bf16 or int8: how moments are kept"
    )
    parser.add_argument(
        "--moment-rounding", default="stochastic", help="or nearest; where they are not in fp32"
    )
    parser.add_argument(
        "--main", default="fp32", help="or remainder, or auto: how main parameters are kept"
    )


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the options that were given: what was not, is for the settings to decide."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}

"""Options that several commands have."""

from __future__ import annotations

import argparse

from gds_optimizer.command import count


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Add what decides how much room a bucket and a parameter take, with the defaults of a run."""
    parser.add_argument("--slots", type=count, default=3, help="buckets in memory (default 3)")
    parser.add_argument("--bucket-size", default="192MiB", help="e.g. 96MiB (default 192MiB)")
    parser.add_argument(
        "--moment-dtype", default="fp32", help="fp32, bf16 or int8: how moments are kept"
    )
    parser.add_argument(
        "--moment-rounding", default="stochastic", help="or nearest; where they are not in fp32"
    )
    parser.add_argument(
        "--main", default="fp32", help="or remainder, or auto: how main parameters are kept"
    )

"""What the benchmarks that are modules (`python -m gds_optimizer.bench.MODULE`) take alike."""

from __future__ import annotations

import argparse

from gds_optimizer.command import count
from gds_optimizer.config import StreamConfig


def module_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all of them have.

    Args:
        module: its name in this package.
        doc: its docstring, whose first line describes it.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m gds_optimizer.bench.{module}", description=(doc or "").split("\n")[0]
    )
    parser.add_argument("--dir", dest="directories", action="append", required=True)
    parser.add_argument("--io", default="auto")
    parser.add_argument("--device", help="cuda or cpu (default: a GPU if there is one)")
    return parser


def add_timing_options(parser: argparse.ArgumentParser) -> None:
    """Add those of benchmarks that time steps in several ways, in turn."""
    parser.add_argument("--repeats", type=count, default=5, help="times that count (default 5)")
    parser.add_argument("--bucket-size", default="192MiB")
    parser.add_argument("--slots", type=count, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON")


def stream_config(arguments: argparse.Namespace) -> StreamConfig:
    """The settings that the arguments name.

    Raises:
        ConfigError: one of them cannot work.
    """
    names = {"directories", "io", "bucket_size", "slots"} & vars(arguments).keys()
    return StreamConfig(**{name: getattr(arguments, name) for name in names})

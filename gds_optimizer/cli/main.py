"""`gds-optimizer`: the command and its subcommands.

Every module of this package that has a `register(subparsers)` is a subcommand: it adds its parser
and sets `run`, a function that takes the parsed arguments and returns the exit status. Such a
module imports what it works with inside `run`, so that `--help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence

import gds_optimizer
from gds_optimizer import cli
from gds_optimizer.command import exit_status


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand of this package."""
    parser = argparse.ArgumentParser(
        prog="gds-optimizer",
        description="Optimizer state on NVMe, streamed through a fixed device buffer.",
    )
    parser.add_argument(
        "--version", action="version", version=f"gds-optimizer {gds_optimizer.__version__}"
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module_info in pkgutil.iter_modules(cli.__path__):
        if module_info.name in ("main", "__main__"):
            continue
        module = importlib.import_module(f"{cli.__name__}.{module_info.name}")
        if hasattr(module, "register"):
            module.register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        Its exit status: 0 for success, 2 for a wrong setting, 3 for an I/O path that is not to be
        had, 1 for any other failure of ours (one line on standard error).

    Raises:
        SystemExit: for arguments that the parser refuses (2), `--help` and `--version` (0).
    """
    arguments = build_parser().parse_args(argv)
    return exit_status("gds-optimizer", lambda: arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())

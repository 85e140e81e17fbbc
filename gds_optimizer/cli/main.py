"""`gds-optimizer`: the command and its subcommands.

Every module of this package that has a `register(subparsers)` is a subcommand: it adds its parser
and sets `run`, a function that takes the parsed arguments and returns the exit status. Such a
module imports what it works with inside `run`, so that `--help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

import gds_optimizer
from gds_optimizer import cli
from gds_optimizer.errors import ConfigError, GdsOptimizerError, IoPathError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PATH_NOT_TO_BE_HAD = 3
EXIT_INTERRUPTED = 130


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
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except GdsOptimizerError as error:
        print(f"gds-optimizer: error: {error}", file=sys.stderr)
        if isinstance(error, IoPathError):
            return EXIT_PATH_NOT_TO_BE_HAD
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except BrokenPipeError:
        # `| head` is no failure; keep the interpreter from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        print(f"gds-optimizer: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("gds-optimizer: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())

"""What every command line of the package has in common: types of arguments, errors, exit statuses.

`gds-optimizer` and the benchmarks that are modules of their own (`python -m
gds_optimizer.bench.tiers`) share it, so that a wrong setting is one line and never a traceback.
Imports neither torch nor anything that does: `--help` does not wait for it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from gds_optimizer.errors import ConfigError, GdsOptimizerError, IoPathError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PATH_NOT_TO_BE_HAD = 3
EXIT_INTERRUPTED = 130


def count(text: str) -> int:
    """A whole number of at least 1, also written as 7e9.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    value = _number(text)
    if not 1 <= value < 2**63 or value != int(value):
        raise argparse.ArgumentTypeError(f"wanted a whole number of at least 1, got {text!r}")
    return int(value)


def seconds(text: str) -> float:
    """A duration of more than nothing.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"wanted seconds, more than 0, got {text!r}")
    return value


def _number(text: str) -> float:
    """What a text says, 0 where that is no number."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def exit_status(program: str, action: Callable[[], int]) -> int:
    """Do what a command is for; what goes wrong on the way is one line on standard error.

    Returns:
        What `action` returns; 2 for a wrong setting, 3 for an I/O path that is not to be had, 1 for
        any other failure of ours or of the system, 130 after an interrupt.

    Raises:
        SystemExit: with 143, after SIGTERM.
    """
    # A process may be started without them: then Python has none.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        with _ended_by_exit():
            status = action()
        sys.stdout.flush()
    except GdsOptimizerError as error:
        _complain(program, error)
        if isinstance(error, IoPathError):
            return EXIT_PATH_NOT_TO_BE_HAD
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except BrokenPipeError:
        # `| head` is no failure; keep the interpreter from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        _complain(program, error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        _say(f"{program}: interrupted")
        return EXIT_INTERRUPTED
    return status


def file_to_write(text: str) -> Path:
    """A file that can be made, which is known before what is to be in it has taken its time.

    Raises:
        argparse.ArgumentTypeError: it is a directory, or would be in none.
    """
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"wanted a file in an existing directory, got {text!r}")
    return path


@contextlib.contextmanager
def _ended_by_exit() -> Iterator[None]:
    """SIGTERM ends what is inside as an exception would: scratch files are to go.

    `timeout` and job schedulers ask that way. Somebody else's way of dealing with it stays.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _complain(program: str, error: Exception) -> None:
    _say(f"{program}: error: {error}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it: the status tells
        sys.stderr.write(f"{line}\n")

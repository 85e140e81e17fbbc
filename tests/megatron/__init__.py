"""Tests against megatron-core: the installed one, or that in GDS_OPTIMIZER_TEST_MEGATRON."""

import os
import sys
from typing import Any

if __name__ != "tests.megatron":
    # With tests/ itself on the path this package would be `megatron` and hide megatron-core.
    raise ImportError(
        f"this package was imported as {__name__!r}, wanted 'tests.megatron': put the repository, "
        "not its tests directory, on sys.path"
    )

MEGATRON_PATH = os.environ.get("GDS_OPTIMIZER_TEST_MEGATRON") or None
"""Directory that holds `megatron/core`, or None for the installed version."""

HAS_ALL_FORMS = not MEGATRON_PATH or bool(os.environ.get("GDS_OPTIMIZER_TEST_ALL"))
"""Whether slow tests go over all forms in which state is stored: these are the package's own and
not Megatron's, so one version will do."""

TURN = 1 if MEGATRON_PATH else 0
"""Which of the versions under test this is: the installed one, or the other."""


def has_turn(*places: int) -> bool:
    """Whether the version under test has a case without --slow: each case is one of the two's.

    Args:
        places: of the case, in each of the lists that it combines, so that either version has
            something of every list's every entry.
    """
    return sum(places) % 2 == TURN


def marks_of(is_slow: bool) -> tuple[Any, ...]:
    """For `pytest.param`."""
    import pytest

    return (pytest.mark.slow,) if is_slow else ()


if MEGATRON_PATH and MEGATRON_PATH not in sys.path:
    sys.path.insert(0, MEGATRON_PATH)

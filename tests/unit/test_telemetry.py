"""Where a pass spends its time, in numbers that add up."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from gds_optimizer import telemetry
from gds_optimizer.telemetry import PHASES, PassClock, PassStats

REPOSITORY = Path(__file__).parents[2]


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(telemetry, "time", time)
    return time


def test_phases_and_the_rest_sum_to_the_wall(fake):
    clock = PassClock("host")
    fake.now_s += 1
    for name, seconds in (("read_wait", 2), ("compute", 4), ("write_wait", 8), ("read_wait", 16)):
        with clock.phase(name):
            fake.now_s += seconds
        fake.now_s += 0.5
    stats = clock.finish()
    assert stats.wall_s == 33.0
    assert stats.phases_s == {"read_wait": 18, "compute": 4, "write_wait": 8, "other": 3}
    assert sum(stats.phases_s.values()) == stats.wall_s
    assert tuple(stats.phases_s) == PHASES


def test_a_phase_that_raises_is_counted(fake):
    clock = PassClock("host")

    def fail() -> None:
        with clock.phase("compute"):
            fake.now_s += 3
            raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        fail()
    assert clock.finish().phases_s["compute"] == 3


def test_passes_do_not_share_their_books():
    first, second = PassStats("host"), PassStats("host")
    first.phases_s["compute"] = 1.0
    assert second.phases_s["compute"] == 0.0


def test_one_line_for_people():
    stats = PassStats("posix", wall_s=2.0, read_bytes=3 * 10**9, written_bytes=10**9)
    stats.phases_s = {"read_wait": 1.0, "compute": 0.25, "write_wait": 0.5, "other": 0.25}
    assert stats.describe() == (
        "3.000 GB read, 1.000 GB written in 2.000 s (2.00 GB/s, posix; "
        "read_wait 1.000 s, compute 0.250 s, write_wait 0.500 s, other 0.250 s)"
    )
    assert "0.00 GB/s" in PassStats("host").describe()


SHOW_LOG = """
import logging, sys
if "root" in sys.argv:
    logging.basicConfig(level=logging.WARNING, format="root %(message)s", stream=sys.stderr)
if "quiet" in sys.argv:
    logging.getLogger("gds_optimizer").setLevel(logging.ERROR)
from gds_optimizer.telemetry import show_log
show_log()
show_log()
logging.getLogger("gds_optimizer.engine").info("which path")
logging.getLogger("other").info("noise")
"""


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        # Nobody has set up logging: our lines are shown, once, and nobody else's.
        ([], "[gds_optimizer.engine] which path\n"),
        # The application has: its handler shows them.
        (["root"], "root which path\n"),
        # It does not want them.
        (["quiet"], ""),
    ],
)
def test_setup_lines_are_seen_unless_the_application_says_otherwise(arguments, shown):
    done = subprocess.run(
        (sys.executable, "-c", SHOW_LOG, *arguments),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == shown


def test_a_level_that_shows_everything_already_is_left(monkeypatch):
    package = logging.getLogger("gds_optimizer")
    monkeypatch.setattr(package, "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger(), "level", logging.DEBUG)
    package.manager._clear_cache()  # type: ignore[attr-defined]
    telemetry.show_log()
    assert package.level == logging.NOTSET
    package.manager._clear_cache()  # type: ignore[attr-defined]

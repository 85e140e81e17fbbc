"""How fast drives are: measured for real, remembered, and taken only where it pays."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import pytest

from gds_optimizer import drive_speeds
from gds_optimizer.config import StreamConfig
from gds_optimizer.drive_speeds import (
    CACHE_DAYS,
    MIN_STATE_BYTES,
    SpeedCache,
    directory_speeds,
    measure_mixed_rate,
)
from gds_optimizer.errors import IoError
from tests.support import io_backends
from tests.support.engines import leftovers, mounted_disk

LARGE = 4 * MIN_STATE_BYTES


@pytest.fixture
def backend():
    with contextlib.closing(io_backends.make("host")) as made:
        yield made


@pytest.fixture
def cache(tmp_path, monkeypatch) -> SpeedCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return SpeedCache()


@pytest.fixture
def roots(tmp_path):
    made = (tmp_path / "a", tmp_path / "b", tmp_path / "c")
    for root in made:
        root.mkdir()
    return made


@pytest.fixture
def measured(monkeypatch, roots):
    """Directories a and b are on one drive, c on another; the rates are given."""
    devices = {roots[0]: 1, roots[1]: 1, roots[2]: 2}
    rates = {roots[0]: 3e9, roots[2]: 1e9}
    asked: list[Path] = []

    def measure(directory, backend):
        asked.append(directory)
        return rates[directory]

    class Stat:
        @staticmethod
        def stat(directory):
            return type("Status", (), {"st_dev": devices[directory]})

        def __getattr__(self, name):
            import os

            return getattr(os, name)

    monkeypatch.setattr(drive_speeds, "measure_mixed_rate", measure)
    monkeypatch.setattr(drive_speeds, "os", Stat())
    return asked


def test_a_real_drive_is_measured_and_nothing_stays(tmp_path, backend):
    assert measure_mixed_rate(tmp_path, backend) > 1e6
    assert leftovers(tmp_path) == []
    assert backend.counters() == {"host.read": 2**27, "host.write": 2**28}


def test_too_little_room_leaves_nothing(tmp_path, backend):
    with mounted_disk(tmp_path, 2**23) as small:
        with pytest.raises(OSError, match="No space left"):
            measure_mixed_rate(small, backend)
        assert leftovers(small) == ["lost+found"]


def test_speeds_of_drives_are_shared_and_remembered(measured, roots, cache, backend):
    config = StreamConfig(directories=roots)
    assert directory_speeds(config, backend, LARGE) == (1.5e9, 1.5e9, 1e9)
    assert measured == [roots[0], roots[2]]
    assert directory_speeds(config, backend, LARGE) == (1.5e9, 1.5e9, 1e9)
    assert len(measured) == 2
    assert json.loads(cache.path.read_text())["version"] == 1


def test_what_is_not_measured(measured, roots, cache, backend):
    given = StreamConfig(directories=roots, directory_weights=(1, 2, 4))
    assert directory_speeds(given, backend, LARGE) == (1, 2, 4)
    small = StreamConfig(directories=roots)
    assert directory_speeds(small, backend, 3 * MIN_STATE_BYTES - 1) == (1, 1, 1)
    one_drive = StreamConfig(directories=roots[:2])
    assert directory_speeds(one_drive, backend, LARGE) == (1, 1)
    assert measured == []
    assert not cache.path.exists()


def test_a_measurement_that_fails_is_no_failure(
    measured, roots, cache, backend, monkeypatch, caplog
):
    def fail(directory, backend):
        raise IoError(directory, "write", file_offset=0, wanted_bytes=1, got="an error")

    monkeypatch.setattr(drive_speeds, "measure_mixed_rate", fail)
    assert directory_speeds(StreamConfig(directories=roots), backend, LARGE) == (1, 1, 1)
    assert "could not be measured" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\0\xff",
        '{"version": 99, "drives": {"k": {"mixed": 1.0, "at": 1.0}}}',
        '{"version": 1, "drives": []}',
        '{"version": 1, "drives": {"k": 3}}',
        '{"version": 1, "drives": {"k": {"mixed": "fast", "at": 1.0}}}',
        '{"version": 1, "drives": {"k": {"mixed": -1.0, "at": 1.0}}}',
    ],
)
def test_a_damaged_cache_counts_as_empty(cache, text):
    cache.path.parent.mkdir(parents=True)
    cache.path.write_text(text)
    assert cache.get("k") is None
    cache.put("k", 5.0)
    assert cache.get("k") == 5.0
    assert leftovers(cache.path.parent) == ["drives.json"]


def test_what_is_old_or_of_the_future_is_measured_again(cache, monkeypatch):
    cache.put("k", 5.0)
    now = time.time()
    for age_s, wanted in (
        (CACHE_DAYS * 86_400 - 60, 5.0),
        (CACHE_DAYS * 86_400 + 60, None),
        (-3600, None),
    ):
        monkeypatch.setattr(drive_speeds.time, "time", lambda age_s=age_s: now + age_s)
        assert cache.get("k") == wanted


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("")
    cache = SpeedCache(tmp_path / "file" / "drives.json")
    cache.put("k", 5.0)
    assert cache.get("k") is None

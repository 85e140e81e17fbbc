"""How fast drives are: measured for real, remembered, and taken only where it pays."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest

from gds_optimizer import drive_speeds
from gds_optimizer.config import StreamConfig
from gds_optimizer.drive_speeds import (
    MIN_STATE_BYTES,
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


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch) -> Path:
    home = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


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
    monkeypatch.setattr(drive_speeds, "drive_key", lambda directory: f"drive {devices[directory]}")
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


def test_speeds_of_drives_are_shared_and_remembered(measured, roots, backend):
    config = StreamConfig(directories=roots)
    assert directory_speeds(config, backend, LARGE) == (1.5e9, 1.5e9, 1e9)
    assert measured == [roots[0], roots[2]]
    assert directory_speeds(config, backend, LARGE) == (1.5e9, 1.5e9, 1e9)
    assert len(measured) == 2


@pytest.mark.parametrize(
    "value",
    [
        *({}, {"mixed": "fast"}, {"mixed": -1.0}, {"mixed": math.inf}),
        *({"mixed": 1e300}, {"mixed": 10**400}),
    ],
)
def test_what_is_no_rate_is_measured_again(measured, roots, backend, cache_home, value):
    config = StreamConfig(directories=roots)
    directory_speeds(config, backend, LARGE)
    for path in cache_home.rglob("*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "value": value}))
    assert directory_speeds(config, backend, LARGE) == (1.5e9, 1.5e9, 1e9)
    assert measured == [roots[0], roots[2]] * 2


def test_what_is_not_measured(measured, roots, backend, cache_home):
    given = StreamConfig(directories=roots, directory_weights=(1, 2, 4))
    assert directory_speeds(given, backend, LARGE) == (1, 2, 4)
    small = StreamConfig(directories=roots)
    assert directory_speeds(small, backend, 3 * MIN_STATE_BYTES - 1) == (1, 1, 1)
    one_drive = StreamConfig(directories=roots[:2])
    assert directory_speeds(one_drive, backend, LARGE) == (1, 1)
    assert measured == []
    assert not cache_home.exists()


@pytest.mark.parametrize(
    "error",
    [
        IoError("file", "write", file_offset=0, wanted_bytes=1, got="an error"),
        RuntimeError("CUDA error"),
        MemoryError(),
    ],
)
def test_a_measurement_that_fails_is_no_failure(
    measured, roots, backend, monkeypatch, caplog, error
):
    def fail(directory, backend):
        raise error

    monkeypatch.setattr(drive_speeds, "measure_mixed_rate", fail)
    assert directory_speeds(StreamConfig(directories=roots), backend, LARGE) == (1, 1, 1)
    assert "could not be measured" in caplog.text

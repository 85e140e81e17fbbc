"""What is chosen at setup: by measuring real files, from memory, or not at all."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pwd
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gds_optimizer import runtime as runtime_module
from gds_optimizer import tuning, tuning_cache, tuning_measure
from gds_optimizer.config import StreamConfig, add_arguments
from gds_optimizer.drive_speeds import MIN_STATE_BYTES
from gds_optimizer.errors import ConfigError, IoError, IoTimeoutError
from gds_optimizer.evicted import evicted_like
from gds_optimizer.io import IoPath, allocate_host_buffer, make_backend
from gds_optimizer.io.direct import DirectBackend, DirectFile
from gds_optimizer.io.tasks import Task, open_direct
from gds_optimizer.plan import Binding
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.stepper import install_step
from gds_optimizer.tuning import GRID, choose, grid_for, tune
from gds_optimizer.tuning_cache import CACHE_DAYS, TuningCache, TurnError, drive_key
from gds_optimizer.tuning_measure import (
    Measurement,
    Point,
    TuningError,
    best_point,
    measure_path,
    opened,
)
from gds_optimizer.tuning_result import DriveTiming, Tuning, path_rates
from gds_optimizer.tuning_shape import bucket_advice, choose_shape
from tests.support.engines import adamw, first_values, grads_of, in_child, leftovers, same_bits
from tests.support.io_conformance import file_size_limit
from tests.support.libcuda_stub import DriverStubUnavailableError, load_driver_stub
from tests.support.throttled import DuplexBackend, ThrottledBackend
from tests.support.tuning_process import BUCKET_BYTES, report_of

CPU = torch.device("cpu")
MIB = 2**20
GIB = 2**30
MEMORY_BYTES = 6 * MIB
A_POINT = Point(4, MIB)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Shorter than is any good for choosing; what is tested is not how good the choice is."""
    monkeypatch.setattr(tuning_measure, "_POINT_S", 0.005)


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch) -> Path:
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    for name in ("KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS", "KVIKIO_TASK_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def kvikio() -> None:
    try:
        load_driver_stub()
    except DriverStubUnavailableError as error:
        pytest.skip(str(error))
    pytest.importorskip("kvikio", reason="needs kvikio")


def host(point: Point) -> Any:
    return make_backend(
        IoPath.HOST, device="cpu", threads=point.threads, task_size_bytes=point.task_bytes
    )


class Maker:
    """Makes real backends and counts them."""

    def __init__(self, **throttled: Callable[[], Any]) -> None:
        self.throttled = throttled
        self.made: Counter[tuple[IoPath, Point]] = Counter()

    def __call__(self, io_path: IoPath, point: Point) -> Any:
        self.made[io_path, point] += 1
        if io_path.value in self.throttled:
            return self.throttled[io_path.value]()
        return make_backend(
            io_path, device="cpu", threads=point.threads, task_size_bytes=point.task_bytes
        )


def tuned(directory: Path, *proven: IoPath, make: Any = None, **settings: Any) -> Tuning:
    """What is chosen for 2 GiB of state; buffers are small, so that it takes no time."""
    settings = {"bucket_size": BUCKET_BYTES, **settings}
    config = StreamConfig(directories=(directory,), **settings)
    report = report_of(*(proven or (IoPath.HOST,)), directories=(directory,))
    return tune(config, report, CPU, MIN_STATE_BYTES, make=make or Maker())


# ---------------------------------------------------------------------- measuring


def check_measurement(found: Measurement, points: list[Point]) -> None:
    assert list(found.points) == points[: len(found.points)]
    assert found.best in found.points
    rates = [*found.points.values(), found.read, found.write, found.mixed]
    assert all(1e6 < rate < 1e12 for rate in rates)
    assert found.round_trip_s > 0
    assert Measurement.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_a_real_drive_is_measured_and_nothing_stays(tmp_path):
    points = [A_POINT, Point(2, 8 * MIB), Point(1, 4096 * 4)]
    made = []

    def make(point: Point) -> Any:
        made.append(host(point))
        return made[-1]

    found = measure_path(tmp_path, make, points, memory_bytes=MEMORY_BYTES)
    check_measurement(found, points)
    assert len(found.points) == 3
    assert leftovers(tmp_path) == []
    assert all(backend.is_closed for backend in made)
    # Both ways, as a step does.
    assert all(count > MIB for backend in made[1:4] for count in backend.counters().values())


@pytest.mark.usefixtures("kvikio")
def test_kvikio_is_measured(tmp_path):
    def make(point: Point) -> Any:
        return make_backend(
            IoPath.POSIX, device="cpu", threads=point.threads, task_size_bytes=point.task_bytes
        )

    points = [A_POINT, Point(2, 2 * MIB)]
    check_measurement(measure_path(tmp_path, make, points, memory_bytes=MEMORY_BYTES), points)
    assert leftovers(tmp_path) == []


@pytest.fixture
def in_memory():
    """A directory whose rates are those of throttles, whatever else the disk has to do."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("needs /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def longer(monkeypatch):
    """Long enough for the drives' rates to show on a busy machine."""
    monkeypatch.setattr(tuning_measure, "_POINT_S", 0.3)


@pytest.mark.thinned
@pytest.mark.usefixtures("longer")
@pytest.mark.parametrize("takes_turns", [True, False])
@pytest.mark.parametrize(("read", "write"), [(1e8, 1e8), (0.7e8, 1e8)])
def test_half_duplex_is_recognised(in_memory, read, write, takes_turns):
    def drive(point: Point) -> DuplexBackend:
        return DuplexBackend(read=read, write=write, takes_turns=takes_turns)

    found = measure_path(in_memory, drive, [A_POINT], memory_bytes=MEMORY_BYTES)
    assert found.is_half_duplex == takes_turns


def test_what_half_duplex_means():
    def drive(read: float, write: float, mixed: float) -> bool:
        return measurement(read=read, write=write, mixed=mixed).is_half_duplex

    assert drive(2e9, 2e9, 2e9)
    assert drive(2e9, 2e9, 2.4e9)
    assert not drive(2e9, 2e9, 2.6e9)
    assert not drive(2e9, 2e9, 4e9)
    # One after the other takes a drive with these rates to 2.67 GB/s; both at once, to 4.
    assert drive(2e9, 4e9, 2.7e9)
    assert not drive(2e9, 4e9, 4e9)


def measurement(**values: Any) -> Measurement:
    defaults = {
        "points": {A_POINT: 1e9},
        "best": A_POINT,
        "read": 1e9,
        "write": 1e9,
        "mixed": 1e9,
        "round_trip_s": 1e-4,
        "seconds": 1.0,
    }
    return Measurement(**{**defaults, **values})


def test_a_drive_that_is_too_slow_is_given_up(tmp_path):
    with pytest.raises(TuningError, match="too slow to be measured"):
        measure_path(
            tmp_path,
            lambda point: ThrottledBackend({tmp_path: 2e7}),
            [A_POINT],
            memory_bytes=MEMORY_BYTES,
            limit_s=0.05,
        )
    assert leftovers(tmp_path) == []


def test_the_first_point_stays_unless_another_is_noticeably_faster():
    a, b, c = Point(1, MIB), Point(2, MIB), Point(3, MIB)
    assert best_point({a: 100.0, b: 109.0, c: 20.0}) == a
    assert best_point({a: 100.0, b: 111.0, c: 120.0}) == c
    assert best_point({a: 100.0}) == a


def test_the_dead_leave_nothing_and_the_living_keep_theirs(tmp_path):
    dead = tmp_path / ".gds-optimizer-tuning-1-abc.bin"
    dead.write_bytes(b"left")
    alive: list[list[str]] = []

    def make(point: Point) -> Any:
        if not alive:  # another measurement of the directory begins and ends
            alive.append(leftovers(tmp_path))
            measure_path(tmp_path, host, [A_POINT], memory_bytes=MEMORY_BYTES)
            assert leftovers(tmp_path) == alive[0]
        return host(point)

    measure_path(tmp_path, make, [A_POINT], memory_bytes=MEMORY_BYTES)
    assert len(alive[0]) == 1
    assert dead.name not in alive[0]
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [
        {"points": []},
        {"points": [[1, 2]]},
        {"points": None},
        {"points": [[4, MIB, float("nan")]]},
        {"best": [9, 9]},
        {"best": [4]},
        {"read": "fast"},
        {"write": 0.0},
        {"mixed": -1.0},
        {"mixed": None},
        {"round_trip_s": float("inf")},
        # Advice and slots are made of them.
        {"round_trip_s": 1e300},
        {"mixed": 1e300},
        {"read": 5e-324},
    ],
)
def test_a_damaged_record_is_none(change):
    assert Measurement.from_dict({**measurement().to_dict(), **change}) is None


# ---------------------------------------------------------------------- which path


@pytest.mark.usefixtures("kvikio")
def test_the_faster_path_is_taken_not_the_preferred_one(in_memory):
    def slow() -> Any:
        return ThrottledBackend({in_memory: 1e8})

    maker = Maker(host=slow)
    result = tuned(in_memory, IoPath.HOST, IoPath.POSIX, make=maker, io_threads=2)
    assert result.io_path is IoPath.POSIX
    assert {each.io_path for each in result.timings} == {IoPath.HOST, IoPath.POSIX}
    figures = path_rates(result.timings)
    assert figures[IoPath.POSIX] > figures[IoPath.HOST] > 0
    line = result.describe()
    for path, rate in figures.items():
        assert f"{path} {rate / 1e9:.2f} GB/s" in line
    assert line.startswith("io path posix (")
    assert "2 threads, tasks of " in line
    assert "measured in" in line
    data = json.loads(json.dumps(result.to_dict()))
    assert (data["io_path"], data["threads"]) == ("posix", 2)
    assert [each["io_path"] for each in data["timings"]] == ["host", "posix"]
    # The other way round the preferred one is the faster one, and stays.
    other = tuned(in_memory, IoPath.POSIX, IoPath.HOST, make=Maker(host=slow), io_threads=3)
    assert other.io_path is IoPath.POSIX
    assert leftovers(in_memory) == []


def timing(path: IoPath, name: str, rates: dict[Point, float]) -> DriveTiming:
    best = best_point(rates)
    found = measurement(points=rates, best=best, mixed=rates[best])
    return DriveTiming(Path(name), path, found, False)


def test_several_drives_share_a_path_and_a_point():
    a, b, c = Point(1, MIB), Point(2, MIB), Point(3, MIB)
    grids = {IoPath.GDS: (a, b, c), IoPath.POSIX: (a, b, c)}
    timings = [
        timing(IoPath.GDS, "0", {a: 5.0, b: 1.0, c: 1.0}),
        timing(IoPath.GDS, "1", {a: 1.0, b: 1.0, c: 1.0}),
        timing(IoPath.POSIX, "0", {a: 2.0, b: 4.0, c: 9.0}),
        timing(IoPath.POSIX, "1", {a: 2.0, b: 4.0}),  # there was no time for c
    ]
    assert choose(timings, grids) == (IoPath.POSIX, b)
    assert choose(timings[:2], grids) == (IoPath.GDS, a)
    # Where they are equal, the preferred one.
    equal = [timing(path, "0", {a: 1.0}) for path in (IoPath.POSIX, IoPath.GDS)]
    assert choose(equal, grids) == (IoPath.GDS, a)


@pytest.mark.usefixtures("kvikio")
def test_a_path_that_fails_is_not_taken(tmp_path, caplog):
    def broken() -> Any:
        raise IoError(tmp_path, "open", file_offset=0, wanted_bytes=0, got="nothing")

    result = tuned(tmp_path, IoPath.HOST, IoPath.POSIX, make=Maker(host=broken))
    assert result.io_path is IoPath.POSIX
    assert "the path host could not be measured and is not taken" in caplog.text
    assert [each.io_path for each in result.timings] == [IoPath.POSIX]


# ---------------------------------------------------------------------- what is not measured


def test_what_was_given_is_not_measured(tmp_path):
    maker = Maker()
    result = tuned(tmp_path, make=maker, io_threads=3, io_task_size=MIB)
    assert (result.io_path, result.point) == (IoPath.HOST, Point(3, MIB))
    assert result.timings == ()
    assert not maker.made
    assert "not timed: path, threads and size of tasks are given" in result.describe()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("given", "attribute"),
    [({"io_threads": 3}, "threads"), ({"io_task_size": 2 * MIB}, "task_bytes")],
)
def test_what_was_given_stays_while_the_rest_is_chosen(tmp_path, given, attribute):
    maker = Maker()
    result = tuned(tmp_path, make=maker, **given)
    (wanted,) = given.values()
    assert getattr(result.point, attribute) == wanted
    assert {getattr(point, attribute) for _, point in maker.made} == {wanted}
    assert len(maker.made) > 1


def test_the_default_number_may_be_given_too(tmp_path):
    config = StreamConfig(directories=(tmp_path,))
    assert not config.is_given("io_threads")
    assert not replace(config, slots=2).is_given("io_task_size")
    given = StreamConfig(directories=(tmp_path,), io_threads=16, io_task_size="16MiB")
    assert given.is_given("io_threads")
    assert given.is_given("io_task_size")
    assert grid_for(given, IoPath.POSIX) == (GRID[0],)
    assert grid_for(config, IoPath.POSIX) == GRID


def test_flags_count_as_given(tmp_path):
    import argparse

    parser = add_arguments(argparse.ArgumentParser())
    flags = ["--stream-optimizer-state-to-disk", "--stream-optimizer-state-dir", str(tmp_path)]
    config = StreamConfig.from_args(parser.parse_args(flags))
    assert config is not None
    assert not config.is_given("io_threads")
    flags += ["--stream-optimizer-state-io-threads", "16", "--stream-optimizer-state-tune", "never"]
    config = StreamConfig.from_args(parser.parse_args(flags))
    assert config is not None
    assert config.is_given("io_threads")
    assert config.tune == "never"


def test_the_environment_of_kvikio_counts_as_given(tmp_path, monkeypatch):
    config = StreamConfig(directories=(tmp_path,))
    monkeypatch.setenv("KVIKIO_NTHREADS", "5")
    monkeypatch.setenv("KVIKIO_TASK_SIZE", str(MIB))
    assert grid_for(config, IoPath.POSIX) == (Point(5, MIB),)
    assert grid_for(config, IoPath.HOST) == GRID  # which is not KvikIO's
    flags = StreamConfig(directories=(tmp_path,), io_threads=7)
    assert grid_for(flags, IoPath.GDS) == (Point(7, MIB),)
    monkeypatch.delenv("KVIKIO_NTHREADS")
    monkeypatch.setenv("KVIKIO_NUM_THREADS", "9")
    assert grid_for(config, IoPath.GDS) == (Point(9, MIB),)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KVIKIO_NTHREADS", "0"),
        ("KVIKIO_NTHREADS", "many"),
        ("KVIKIO_NUM_THREADS", "257"),
        ("KVIKIO_TASK_SIZE", "5000"),
        ("KVIKIO_TASK_SIZE", "4MiB"),
        ("KVIKIO_TASK_SIZE", "0"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path, monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name} is '{text}'"):
        grid_for(StreamConfig(directories=(tmp_path,)), IoPath.POSIX)


def test_no_point_pins_more_than_the_defaults(tmp_path):
    most_bytes = GRID[0].threads * GRID[0].task_bytes
    assert GRID[0] == Point(16, 16 * MIB)
    assert all(point.threads * point.task_bytes <= most_bytes for point in GRID)
    wide = StreamConfig(directories=(tmp_path,), io_threads=64)
    first, *others = grid_for(wide, IoPath.POSIX)
    assert first == Point(64, 16 * MIB)
    assert others
    assert all(point.threads * point.task_bytes <= 2**30 for point in others)


@pytest.mark.parametrize(
    ("settings", "state_bytes", "words"),
    [
        ({"tune": "never"}, MIN_STATE_BYTES, "switched off"),
        ({}, MIN_STATE_BYTES - 1, "2.00 GiB of state on drives are not worth it"),
        ({}, 0, "0.00 GiB of state"),
    ],
)
def test_when_nothing_is_measured(tmp_path, settings, state_bytes, words, cache_home):
    maker = Maker()
    config = StreamConfig(directories=(tmp_path,), **settings)
    report = report_of(IoPath.HOST, IoPath.POSIX, directories=(tmp_path,))
    result = tune(config, report, CPU, state_bytes, make=maker)
    assert (result.io_path, result.point) == (IoPath.HOST, GRID[0])
    assert words in result.describe()
    assert result.is_half_duplex is None
    assert not maker.made
    assert leftovers(cache_home) == []


def test_a_file_system_without_room_is_no_failure(tmp_path):
    def check() -> None:
        handler = Noted()
        tuning.logger.addHandler(handler)
        with file_size_limit(MIB):
            result = tuned(tmp_path)
        assert (result.io_path, result.point) == (IoPath.HOST, GRID[0])
        assert result.why_not == "the measurement failed"
        assert "could not be measured" in handler.text
        assert "File too large" in handler.text
        assert leftovers(tmp_path) == []

    in_child(check)


class _StuckFile(DirectFile):
    until: threading.Event

    def start_task(self, operation: str, buffer: torch.Tensor, file_offset: int) -> Task:
        self._executor.submit(self.until.wait)
        return super().start_task(operation, buffer, file_offset)


class StuckBackend(DirectBackend):
    """A drive that answers nothing until it is told to. Args: until: tells it."""

    def __init__(self, until: threading.Event) -> None:
        super().__init__(1, MIB)
        self._until = until

    def open_file(self, path: Path) -> DirectFile:
        file = _StuckFile(path, self, open_direct(path))
        file.until = self._until
        return file


def test_a_drive_that_does_not_answer_is_named(tmp_path, monkeypatch):
    """A file with transfers in flight cannot be closed, which must not hide what they raise."""
    monkeypatch.setattr(tuning_measure, "_TIMEOUT_S", 0.05)
    (tmp_path / "file").write_bytes(bytes(2 * MIB))
    until = threading.Event()
    try:
        with (
            pytest.raises(IoTimeoutError, match="so far"),
            opened(StuckBackend(until), tmp_path / "file") as file,
        ):
            file.read(allocate_host_buffer(MIB), 0).wait(0.05)
    finally:
        until.set()


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), MemoryError("pinning")])
def test_whatever_a_device_raises_is_no_failure(tmp_path, caplog, error):
    def broken() -> Any:
        raise error

    result = tuned(tmp_path, make=Maker(host=broken))
    assert (result.io_path, result.point) == (IoPath.HOST, GRID[0])
    assert str(error) in caplog.text


class Noted(logging.Handler):
    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


# ---------------------------------------------------------------------- remembering


def test_what_was_measured_is_remembered(tmp_path):
    maker = Maker()
    first = tuned(tmp_path, make=maker)
    assert not first.timings[0].is_cached
    count = maker.made.total()
    assert count
    second = tuned(tmp_path, make=maker)
    assert maker.made.total() == count
    assert second.timings[0].is_cached
    assert second.timings[0].measurement == first.timings[0].measurement
    assert second.point == first.point
    assert "from the cache in" in second.describe()
    # Another grid, or other buffers, are another question.
    for settings in ({"io_threads": 4}, {"bucket_size": 2 * BUCKET_BYTES}):
        other = tuned(tmp_path, make=maker, **settings)
        assert not other.timings[0].is_cached


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "\0\xff", '{"version": 99}', '{"version": 1}', "wrong key", "empty"),
        *("a large number", "[" * 100_000, " " * 2**21),
    ],
    ids=lambda text: text[:16],
)
def test_a_damaged_cache_is_measured_again(tmp_path, cache_home, text):
    tuned(tmp_path)
    (path,) = cache_home.rglob("*.json")
    data = json.loads(path.read_text())
    if text == "wrong key":
        text = json.dumps({**data, "key": "another drive"})
    elif text == "empty":
        text = json.dumps({**data, "value": {}})
    elif text == "a large number":
        text = json.dumps({**data, "at": 10**400})
    path.write_text(text)
    assert not tuned(tmp_path).timings[0].is_cached
    assert tuned(tmp_path).timings[0].is_cached
    assert len(list(cache_home.rglob("*.json"))) == 1
    assert list(cache_home.rglob("new-*")) == []


def test_a_pipe_in_the_cache_is_not_waited_for(tmp_path):
    cache = TuningCache(tmp_path)
    os.mkfifo(cache._path("k", "json"))
    assert cache.get("k") is None
    cache.put("k", {"a": 1})
    assert cache.get("k") == {"a": 1}


def test_what_is_old_or_of_the_future_is_measured_again(tmp_path, monkeypatch):
    cache = TuningCache(tmp_path)
    cache.put("k", {"a": 1})
    now = time.time()
    for age_s, wanted in (
        (CACHE_DAYS * 86_400 - 60, {"a": 1}),
        (CACHE_DAYS * 86_400 + 60, None),
        (-3600, None),
    ):
        monkeypatch.setattr(tuning_cache, "time", SimpleNamespace(time=lambda a=age_s: now + a))
        assert cache.get("k") == wanted


def test_drives_have_names_of_their_own(tmp_path):
    key = drive_key(tmp_path)
    device = os.stat(tmp_path).st_dev
    assert key.startswith(f"{os.major(device)}:{os.minor(device)}")
    assert drive_key(Path("/proc")) != key


def test_a_home_that_cannot_be_written_is_none(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tuning_cache.tempfile, "tempdir", str(tmp_path / "temporary"))
    cache = TuningCache()
    assert cache.directory == tmp_path / "temporary" / f"gds-optimizer-{os.getuid()}"
    cache.put("k", {"a": 1})
    assert TuningCache().get("k") == {"a": 1}
    other = tmp_path / "elsewhere"
    other.mkdir()
    monkeypatch.setattr(tuning_cache.tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"gds-optimizer-{os.getuid()}").symlink_to(other)
    with pytest.raises(PermissionError, match="somebody else's"):
        TuningCache()


def test_a_user_without_a_home_is_no_failure(tmp_path, monkeypatch):
    """Containers run under a number that no list of users has."""

    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tuning_cache.tempfile, "tempdir", str(tmp_path / "temporary"))
    assert tuned(tmp_path).timings
    assert tuned(tmp_path).timings[0].is_cached
    assert len(list((tmp_path / "temporary").rglob("*.json"))) == 1


# ---------------------------------------------------------------------- several ranks


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.tuning_process", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_one_rank_measures_and_the_others_find_it(tmp_path):
    ranks = [start(tmp_path) for _ in range(3)]
    said = [rank.communicate(timeout=120)[0].split(" ", 1) for rank in ranks]
    assert sorted(word for word, _ in said) == ["measured", "remembered", "remembered"]
    assert len({point for _, point in said}) == 1
    assert leftovers(tmp_path) == []


def test_nobody_waits_for_a_rank_that_died(tmp_path):
    hanging = start(tmp_path, "hang")
    assert hanging.stdout is not None
    assert hanging.stdout.readline() == "hanging\n"
    with pytest.raises(TurnError, match="has been measuring this drive for"):  # noqa: SIM117
        with TuningCache().turn(drive_key(tmp_path), 0.1):
            pass
    hanging.kill()
    hanging.communicate()
    assert not tuned(tmp_path).timings[0].is_cached
    assert leftovers(tmp_path) == []


def test_a_rank_that_waits_for_too_long_takes_the_defaults(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(TuningCache.turn, "__wrapped__", TuningCache.turn.__wrapped__)
    monkeypatch.setattr(TuningCache.turn.__wrapped__, "__defaults__", (0.1,))
    with TuningCache().turn(drive_key(tmp_path)):
        result = tuned(tmp_path)
    assert result.point == GRID[0]
    assert result.why_not == "the measurement failed"
    assert "another process has been measuring this drive" in caplog.text


# ---------------------------------------------------------------------- slots, bucket size


def drives_of(directory: Path, count: int, mixed: float) -> Tuning:
    """As if so many drives gave this much together."""
    found = measurement(mixed=mixed / count)
    timing = DriveTiming(directory, IoPath.HOST, found, False)
    return Tuning(IoPath.HOST, A_POINT, (timing,) * count)


def test_where_larger_buckets_would_pay(tmp_path):
    config = StreamConfig(directories=(tmp_path,))

    def advice(mixed: float, drives: int = 1, **settings: Any) -> str:
        return bucket_advice(drives_of(tmp_path, drives, mixed), replace(config, **settings))

    assert advice(2e9) == ""  # 200 ms a bucket, for about one of overhead
    assert "--stream-optimizer-state-bucket-size 576MiB" in advice(50e9)
    assert advice(50e9, bucket_size="576MiB") == ""
    assert "--stream-optimizer-state-slots 6" in advice(8e9, drives=4)
    assert advice(8e9, drives=4, slots=6) == ""
    assert advice(4e9, drives=2) == ""
    assert bucket_advice(Tuning(IoPath.HOST, A_POINT), config) == ""


def test_many_drives_get_more_slots_for_the_same_memory(tmp_path):
    config = StreamConfig(directories=(tmp_path,))
    usual = (3, 192 * MIB)

    def shape(drives: int, mixed: float = 8e9, **settings: Any) -> tuple[int, int]:
        return choose_shape(drives_of(tmp_path, drives, mixed), replace(config, **settings))

    assert [shape(drives) for drives in (1, 2)] == [usual, usual]
    assert shape(3) == (5, 115 * MIB)
    assert shape(4) == (6, 96 * MIB)
    assert all(slots * size <= 3 * 192 * MIB for slots, size in map(shape, range(1, 20)))
    # Such buckets would cost too much of their time.
    assert shape(4, 50e9) == usual
    assert shape(4, slots=3) == usual
    assert shape(4, bucket_size=192 * MIB) == usual
    assert shape(4, moment_dtype="int8") == usual
    assert choose_shape(Tuning(IoPath.HOST, A_POINT), config) == usual
    on_cpu = config.for_device("cpu")
    assert choose_shape(drives_of(tmp_path, 3, 8e9), on_cpu) == (6, 96 * MIB)
    assert choose_shape(drives_of(tmp_path, 6, 4e9), on_cpu) == (8, 72 * MIB)


def test_the_cpu_has_slots_and_buckets_of_its_own(tmp_path):
    config = StreamConfig(directories=(tmp_path,))
    assert config.for_device("cuda") is config
    found = config.for_device("cpu")
    assert (found.slots, found.bucket_size) == (6, 96 * MIB)
    assert found.slots * found.bucket_size == config.slots * config.bucket_size
    assert not found.is_given("slots")
    few, many = (config.for_device("cpu", host_bytes=room) for room in (9 * GIB - 1, 9 * GIB))
    assert (few, many.slots, many.bucket_size) == (found, 12, 96 * MIB)
    assert config.for_device("cuda", host_bytes=2**40) is config
    for given in ({"slots": 3}, {"bucket_size": "192MiB"}):
        kept = StreamConfig(directories=(tmp_path,), **given)
        assert kept.for_device("cpu") is kept


# ---------------------------------------------------------------------- setting up


def test_setting_up_takes_what_was_chosen(tmp_path, monkeypatch, caplog):
    """The real thing, but for the limit below which it is not worth it; and the same bits."""
    monkeypatch.setattr(tuning, "MIN_STATE_BYTES", 1)
    caplog.set_level(logging.INFO)
    model = first_values([40_000])[0]
    resident_model = model.clone()
    main = evicted_like(model, dtype=torch.float32, name="main")
    optimizer = adamw([torch.ones(1)])
    optimizer.param_groups[0]["params"] = [main]
    resident_main = resident_model.float()
    resident = adamw([resident_main])
    config = StreamConfig(directories=(tmp_path,), bucket_size=MIB // 8, io_threads=3)
    for source in ("measured in", "from the cache in"):
        part = Part(optimizer, [Binding("p", main, model)], "opt")
        made = Runtime.build([part], config, device=CPU, rank=0, eager=True)
        (line,) = (m for m in caplog.messages if "tasks of" in m)
        caplog.clear()
        assert made.tuning.describe() in line
        assert line.startswith("rank 0: io path host (read and written at once: host ")
        assert source in line
        assert "half-duplex (read " in line
        assert "3 threads" in line
        backend: Any = made.backend
        assert (backend.threads, backend.task_size_bytes) == made.tuning.point
        assert [each.threads for each in made.report.timings] == [3]
        assert made.report.io_path is IoPath.HOST
        if source == "measured in":
            made.close_engine(made.engines[0])
            assert leftovers(tmp_path) == []
    undo = install_step(optimizer, made.engines[0].step)
    for step in range(3):
        (grad,) = grads_of([40_000], step)
        main.grad, resident_main.grad = grad, grad.clone()
        optimizer.step()
        resident.step()
    state = made.engines[0].read_state()["p"]
    undo()
    made.close_engine(made.engines[0])
    assert same_bits(state["main"], resident_main)
    assert same_bits(state["exp_avg_sq"], resident.state[resident_main]["exp_avg_sq"])


def test_a_faster_path_is_what_the_runtime_takes(tmp_path, monkeypatch):
    """The verdict of the probe is replaced by that of the clock, and everything follows it."""
    monkeypatch.setattr(tuning, "MIN_STATE_BYTES", 1)
    asked: list[bool] = []
    a = timing(IoPath.POSIX, str(tmp_path), {GRID[0]: 2e9})
    b = timing(IoPath.HOST, str(tmp_path), {GRID[0]: 1e9, GRID[4]: 3e9})

    def decide(config: StreamConfig, device: torch.device, *, try_all: bool) -> Any:
        asked.append(try_all)
        return report_of(IoPath.POSIX, IoPath.HOST, directories=config.directories)

    monkeypatch.setattr(runtime_module, "decide_io_path", decide)
    monkeypatch.setattr(tuning, "time_paths", lambda *args, **options: (a, b))
    model = first_values([5_000])[0]
    main = evicted_like(model, dtype=torch.float32, name="main")
    optimizer = adamw([torch.ones(1)])
    optimizer.param_groups[0]["params"] = [main]
    part = Part(optimizer, [Binding("p", main, model)], "opt")
    config = StreamConfig(directories=(tmp_path,), bucket_size=MIB // 8)
    made = Runtime.build([part], config, device=CPU, rank=0, eager=True)
    with contextlib.ExitStack() as stack:
        stack.callback(made.close_engine, made.engines[0])
        assert asked == [True]
        assert made.backend.io_path is IoPath.HOST
        backend: Any = made.backend
        assert (backend.threads, backend.task_size_bytes) == GRID[4] != GRID[0]
        assert made.report.io_path is IoPath.HOST
        assert [each.io_path for each in made.report.timings] == [IoPath.POSIX, IoPath.HOST]
        assert "posix 2.00 GB/s, host 3.00 GB/s" in made.tuning.describe()


@pytest.mark.thinned(every=3)
@pytest.mark.parametrize(
    ("drives", "given", "slots", "size"),
    [
        (1, {}, 6, 96 * MIB),  # on the CPU
        (9, {}, 12, 96 * MIB),
        (6, {}, 8, 72 * MIB),
        (6, {"slots": 3}, 3, 192 * MIB),
        (1, {"bucket_size": 128 * MIB}, 3, 128 * MIB),
    ],
    ids=["cpu", "much memory", "drives", "slots given", "size given"],
)
def test_slots_and_buckets_of_a_runtime(tmp_path, monkeypatch, drives, given, slots, size):
    """State is cut as chosen, and the bits are the same."""
    free_bytes = 16 * GIB if slots == 12 else 8 * GIB
    monkeypatch.setattr(runtime_module, "host_share", lambda: free_bytes)
    timed = drives_of(tmp_path, drives, 4e9)
    monkeypatch.setattr(tuning, "MIN_STATE_BYTES", 1)
    monkeypatch.setattr(tuning, "time_paths", lambda *args, **options: timed.timings)
    numel = 18_000_000
    model = first_values([numel])[0]
    resident_main = model.float()
    resident = adamw([resident_main])
    main = evicted_like(model, dtype=torch.float32, name="main")
    optimizer = adamw([torch.ones(1)])
    optimizer.param_groups[0]["params"] = [main]
    part = Part(optimizer, [Binding("p", main, model)], "opt")
    config = StreamConfig(directories=(tmp_path,), **given)
    made = Runtime.build([part], config, device=CPU, rank=0, eager=True)
    try:
        assert len(made.engines[0].layout.buckets) == -(-numel * 12 // size)
        assert (made.config.slots, made.config.bucket_size) == (slots, size)
        assert made.pool.slot_bytes == pytest.approx(size, abs=MIB)
        undo = install_step(optimizer, made.engines[0].step)
        for step in range(2):
            (grad,) = grads_of([numel], step)
            main.grad, resident_main.grad = grad, grad.clone()
            optimizer.step()
            resident.step()
        state = made.engines[0].read_state()["p"]
        undo()
    finally:
        made.close_engine(made.engines[0])
    assert same_bits(state["main"], resident_main)
    assert same_bits(state["exp_avg"], resident.state[resident_main]["exp_avg"])

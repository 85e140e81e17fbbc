"""The benchmark measures what it says, adds up, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.bench import limit as limit_module
from gds_optimizer.bench import tiers
from gds_optimizer.bench.limit import Limit, LimitFiles
from gds_optimizer.bench.steps import run_bench
from gds_optimizer.bench.tiers import run_tiers_bench
from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import NoSpaceError
from gds_optimizer.telemetry import PHASES
from tests.support.engines import in_child

NUMEL = 100_000
LIMIT_BYTES = 64 * 2**20


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bench")
    lines: list[str] = []
    result = run_bench(
        StreamConfig(directories=(directory,), bucket_size=12 * 8192),
        numel=NUMEL,
        steps=3,
        device=torch.device("cpu"),
        limit_bytes=LIMIT_BYTES,
        progress=lines.append,
    )
    return result, directory, lines


def test_every_step_is_counted_and_moves_all_bytes(result):
    found, _, lines = result
    assert len(found.steps) == len(found.steps_s) == 3
    for stats in found.steps:
        assert stats.written_bytes == found.state_bytes
        # What the pass before left in the slots is not read again.
        assert found.state_bytes - 4 * 2**20 < stats.read_bytes < found.state_bytes
    assert sum(line.startswith("step") for line in lines) == 4


def test_the_phases_of_a_step_sum_to_its_wall_time(result):
    for stats in result[0].steps:
        assert set(stats.phases_s) == set(PHASES)
        assert sum(stats.phases_s.values()) == pytest.approx(stats.wall_s, rel=0.02)
        assert all(seconds >= 0 for seconds in stats.phases_s.values())


def test_the_json_has_the_documented_keys(result):
    data = json.loads(json.dumps(result[0].to_dict()))
    assert set(data["limit"]) == {
        "first_write_gbps",
        "read_gbps",
        "write_gbps",
        "mixed_gbps",
        "best_mixed_gbps",
        "rounds_gbps",
        "best",
        "read_share",
        "grid",
        "file_bytes",
        "point_bytes",
        "sustained_bytes",
    }
    assert data["ranks"] == 1
    assert data["rank_spread"] is None
    assert data["counters"]["host.write"] > 0
    assert {"median_s", "min_s", "max_s", "read_wait_s", "compute_s", "write_wait_s"} <= set(
        data["step"]
    )
    assert set(data["bytes"]) == {"read", "written", "host_read", "host_written"}
    assert (data["bytes"]["host_written"], data["in_place_buckets"]) == (0, 0)
    moved = data["bytes"]["read"] + data["bytes"]["written"]
    wanted = data["step"]["median_s"] / (moved / data["limit"]["mixed_gbps"] / 1e9)
    assert data["ratio_to_limit"] == pytest.approx(wanted, rel=0.05)
    assert data["initialize"]["bytes"] >= 4 * NUMEL


def test_what_was_chosen_at_setup_is_shown(result):
    data = json.loads(json.dumps(result[0].to_dict()))["tuning"]
    assert (data["io_path"], data["threads"], data["task_bytes"]) == ("host", 16, 2**24)
    assert data["timings"] == []  # so little state is not worth measuring for
    assert "are not worth it" in data["why_not"]
    assert f"\nsetup       {result[0].tuning.describe()}\n" in result[0].to_text()


def test_nothing_is_left(result):
    assert list(result[1].iterdir()) == []


def test_state_that_lives_in_memory_does_not_reach_the_drives(tmp_path, is_copied):
    config = StreamConfig(
        directories=(tmp_path,), bucket_size=12 * 8192, hbm_budget=12 * 2**14, host_budget=2**30
    )
    found = run_bench(
        config, numel=NUMEL, steps=1, device=torch.device("cpu"), limit_bytes=LIMIT_BYTES
    )
    data = json.loads(json.dumps(found.to_dict()))
    assert (data["ratio_to_limit"], data["initialize"]["ratio_to_limit"]) == (None, None)
    in_place = 1 if is_copied else -(-NUMEL // 8192)
    copied_bytes = found.state_bytes - 12 * 2**13 - 4096 if is_copied else 0
    assert (data["bytes"]["written"], data["in_place_buckets"]) == (0, in_place)
    assert data["bytes"]["host_written"] == copied_bytes
    assert "No byte of a step goes to the drives" in found.to_text()
    assert f"{in_place} buckets stepped where they live" in found.to_text()


def test_the_ways_that_state_lives_in_memory_are_timed(tmp_path):
    found = run_tiers_bench(
        StreamConfig(directories=(tmp_path,), bucket_size=12 * 8192),
        numel=NUMEL * 2,
        repeats=2,
        device=torch.device("cpu"),
    )
    assert set(found["seconds"]) == {"bare_loop", "resident", "host", "host_and_nvme", "device"}
    assert all(len(runs) == 2 for runs in found["runs"].values())
    assert found["buckets"]["host"] == {"device": 0, "host": 25, "nvme": 0}
    assert found["buckets"]["device"] == {"device": 25, "host": 0, "nvme": 0}
    assert found["buckets"]["host_and_nvme"]["nvme"] in (2, 3)
    assert found["device_to_resident"] == found["seconds"]["device"] / found["seconds"]["resident"]
    assert list(tmp_path.iterdir()) == []


def test_some_of_the_ways_are_timed(tmp_path, capsys):
    arguments = ["--dir", str(tmp_path), "--numel", "20000", "--device", "cpu", "--repeats", "1"]
    assert tiers.main([*arguments, "--json", "--ways", "device", "bare_loop"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["seconds"]) == {"bare_loop", "device"}
    assert found["device_to_resident"] is None
    assert tiers.main([*arguments, "--ways", "device", "resident"]) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "times as long" in line]
    assert told.startswith("device takes ")


def test_limit_files_are_removed_when_measuring_fails(tmp_path):
    def measure() -> None:
        with LimitFiles([tmp_path], LIMIT_BYTES) as files:
            os.truncate(files.paths[0], 4096)
            files.measure()

    with pytest.raises(OSError, match="moved"):
        measure()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails", ["an interrupt", "a buffer"])
def test_threads_that_do_not_all_start_are_not_waited_for(tmp_path, monkeypatch, fails):
    """Those that had started would wait for the others for ever, and the pool for them."""
    count = itertools.count(1)

    def check() -> None:
        signal.alarm(60)  # ends this forked process if it hangs
        submit, buffer = ThreadPoolExecutor.submit, LimitFiles._buffer

        def interrupted(pool: Any, *arguments: Any) -> Any:
            if next(count) == 4:
                raise KeyboardInterrupt
            return submit(pool, *arguments)

        def failing(files: LimitFiles, task_bytes: int) -> memoryview:
            if next(count) == 4:
                raise MemoryError("no buffer")
            return buffer(files, task_bytes)

        if fails == "an interrupt":
            monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
        else:
            monkeypatch.setattr(LimitFiles, "_buffer", failing)
        kind = KeyboardInterrupt if fails == "an interrupt" else MemoryError
        with pytest.raises(kind), LimitFiles([tmp_path], LIMIT_BYTES) as files:
            files.measure()

    in_child(check)
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_killed_run_are_removed(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    of_the_dead = tmp_path / f"gds-optimizer-limit-{dead.pid}-00000.bin"
    of_the_living = tmp_path / "gds-optimizer-limit-1-00000.bin"
    for path in (of_the_dead, of_the_living):
        path.touch()
    with LimitFiles([tmp_path], LIMIT_BYTES):
        assert not of_the_dead.exists()
    assert list(tmp_path.iterdir()) == [of_the_living]


def test_what_cannot_fit_is_refused_at_once(tmp_path):
    config = StreamConfig(directories=(tmp_path,), io="host")
    with pytest.raises(NoSpaceError, match=r"the benchmark need 12.* bytes, and \d+ are free"):
        run_bench(config, numel=10**13, steps=1, device=torch.device("cpu"))
    assert list(tmp_path.iterdir()) == []


def test_limit_files_are_spread_over_the_directories(tmp_path):
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    with LimitFiles(directories, LIMIT_BYTES):
        assert [len(list(directory.iterdir())) for directory in directories] == [1, 1]


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gds_optimizer.cli", "bench", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.slow
def test_the_command_prints_json_alone_on_stdout(tmp_path):
    done = run_cli(
        *("--dir", str(tmp_path), "--numel", "1e5", "--steps", "1", "--device", "cpu", "--json"),
        *("--moment-dtype", "int8", "--moment-rounding", "nearest"),
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["numel"] == NUMEL
    assert 6 * NUMEL < data["bytes"]["written"] < 7 * NUMEL
    assert "step 1" in done.stderr


@pytest.mark.parametrize("numel", ["0", "1.5", "many"])
def test_a_wrong_count_is_a_usage_error(tmp_path, numel):
    done = run_cli("--dir", str(tmp_path), "--numel", numel)
    assert done.returncode == 2
    assert "wanted a whole number" in done.stderr


@pytest.mark.parametrize(
    ("read", "write", "mixed", "half_duplex"),
    [
        (1.8, 2.9, 2.2, True),  # as measured on a virtual disk
        (2.0, 2.0, 2.49, True),
        (2.0, 2.0, 2.51, False),
        (7.0, 5.0, 9.0, False),
        (6.0, 2.0, 4.0, False),  # all that the writes allow, though less than reads alone
    ],
)
def test_drives_that_take_turns_are_told(result, read, write, mixed, half_duplex):
    rounds = {"read": [read], "write": [write], "mixed": [mixed], "first_write": [1.0]}
    limit = Limit(rounds)
    assert limit.is_half_duplex is half_duplex
    shown = dataclasses.replace(result[0], limit=limit)
    assert ("half-duplex" in shown.to_text()) is half_duplex


def test_the_limit_is_the_median_of_rounds_as_the_step_is_of_steps(result):
    limit = Limit({"mixed": [1.0, 4.0, 2.0]})
    assert (limit.read, limit.mixed, limit.best_mixed) == (0.0, 2.0, 4.0)
    shown = dataclasses.replace(result[0], limit=limit)
    needed_s = shown.moved_bytes / 2e9
    assert shown.ratio_to_limit == pytest.approx(shown.median_s / needed_s)
    assert shown.ratio_to_best_round == pytest.approx(2 * shown.ratio_to_limit)


def test_the_drives_are_measured_after_every_step(result):
    found = result[0]
    assert len(found.limit.rounds["mixed"]) == len(found.steps)
    assert {kind: len(rates) for kind, rates in found.limit.rounds.items() if kind != "mixed"} == {
        "first_write": 2,
        "read": 1,
        "write": 1,
    }


def test_a_slow_drive_makes_no_other_one_wait(tmp_path, monkeypatch):
    roots = [tmp_path / "slow", tmp_path / "fast"]
    for root in roots:
        root.mkdir()
    monkeypatch.setattr(limit_module, "_drive_of", lambda path: roots.index(path.parent))
    fast_is_done, left, pwritev = threading.Event(), [16], os.pwritev

    def write(fd, buffers, start):
        if Path(os.readlink(f"/proc/self/fd/{fd}")).parent == roots[0]:
            assert fast_is_done.wait(60)
        else:
            left[0] -= 1
            if not left[0]:
                fast_is_done.set()
        return pwritev(fd, buffers, start)

    with LimitFiles(roots, 2 * LIMIT_BYTES, threads=[1]) as files:
        monkeypatch.setattr(os, "pwritev", write)
        assert files._rate("write", 4 * 2**20, 1, files.paths) > 0


def test_an_interrupt_gives_up_what_has_not_begun(tmp_path, monkeypatch):
    started, pwritev = [], os.pwritev
    # A shell that starts us in the background has the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def write(fd, buffers, start):
        started.append(start)
        if len(started) == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return pwritev(fd, buffers, start)

    with LimitFiles([tmp_path], 8 * LIMIT_BYTES, threads=[1]) as files:
        monkeypatch.setattr(os, "pwritev", write)
        try:
            with pytest.raises(KeyboardInterrupt):
                files._rate("write", 4 * 2**20, 1, files.paths)
        finally:
            signal.signal(signal.SIGINT, before)
    assert 0 < len(started) < 8 * LIMIT_BYTES // (4 * 2**20)
    assert not list(tmp_path.iterdir())


def test_threads_without_a_task_are_no_other_points(tmp_path):
    with LimitFiles([tmp_path], 4 * LIMIT_BYTES, threads=[4, 8, 16, 32]) as files:
        tried = []
        files._rate = lambda kind, *point: tried.append(point[:2]) or 1.0
        files.choose_points(["read"])
    # One file a trial, of four requests of 16 MiB and sixteen of 4 MiB.
    assert len(tried) == 4
    assert {min(threads, LIMIT_BYTES // task) for task, threads in tried} == {4, 8, 16}


def test_no_byte_is_met_twice_in_a_round(tmp_path):
    with LimitFiles([tmp_path], 8 * 2**26, point_bytes=2**40, threads=[1]) as files:
        taken = []
        files._rate = lambda kind, task_bytes, threads, paths: taken.append(paths) or 1.0
        files.measure(kinds=["mixed"])
    grid, kept = taken[: len(taken) - 2], taken[-2:]
    assert [len(paths) for paths in grid] == [4, 4]  # of 8 files, two sizes of requests
    assert files.limit.point_bytes == 4 * 2**26
    assert not set(kept[0]) & set(kept[1])


def test_the_mixed_rate_reads_the_share_that_it_is_told(tmp_path, monkeypatch):
    moved = {"read": 0, "write": 0}
    preadv, pwritev = os.preadv, os.pwritev

    def count(kind, function):
        def call(fd, buffers, start):
            nbytes = function(fd, buffers, start)
            moved[kind] += nbytes
            return nbytes

        return call

    with LimitFiles([tmp_path], 4 * LIMIT_BYTES, point_bytes=2 * LIMIT_BYTES, threads=[2]) as files:
        files.measure()
        assert files.limit.point_bytes * 2 == files.limit.file_bytes
        monkeypatch.setattr(os, "preadv", count("read", preadv))
        monkeypatch.setattr(os, "pwritev", count("write", pwritev))
        limit = files.measure(read_share=0.25)
    # Two points of each other kind. The mixed rate starts anew: both sizes of requests are tried,
    # and then measured.
    points = 4
    both = 2 * limit.point_bytes
    assert moved["read"] - both == points * limit.point_bytes * 0.25
    assert moved["write"] - both == points * limit.point_bytes * 0.75
    assert limit.read_share == 0.25


def test_one_measurement_goes_on_where_the_last_stopped(tmp_path):
    with LimitFiles([tmp_path], 5 * LIMIT_BYTES, point_bytes=2 * LIMIT_BYTES) as files:
        assert files._take() == files.paths[:2]
        assert files._take() == files.paths[2:4]
        assert files._take() == [files.paths[4], files.paths[0]]


def test_writing_before_measuring_is_counted(tmp_path):
    with LimitFiles([tmp_path], LIMIT_BYTES) as files:
        files.write_first(LIMIT_BYTES + 1)
        assert files.limit.sustained_bytes == 2 * LIMIT_BYTES


SMALL = ("--numel", "1e5", "--steps", "2", "--device", "cpu", "--bucket-size", "96KiB", "--json")


@pytest.mark.slow
def test_ranks_run_together(tmp_path):
    done = run_cli("--dir", str(tmp_path), "--ranks", "2", *SMALL)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["ranks"] == 2
    assert data["rank_spread"] >= 1.0
    assert data["bytes"]["written"] == data["state_bytes"] > 2 * 12 * NUMEL
    assert data["step"]["median_s"] >= data["step"]["min_s"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_paths_side_by_side_say_which_is_not_to_be_had(tmp_path):
    done = run_cli("--dir", str(tmp_path), "--io", "gds,host", *SMALL)
    assert done.returncode == 0, done.stderr
    paths = json.loads(done.stdout)["paths"]
    assert list(paths) == ["gds", "host"]
    assert "device memory" in paths["gds"]["not_available"]
    assert paths["host"]["io_path"] == "host"
    done = run_cli("--dir", str(tmp_path), "--io", "host,gds", *SMALL[:-1])
    assert "gds is not available: " in done.stdout
    assert "times the limit" in done.stdout


@pytest.mark.slow
def test_no_path_at_all_is_status_3(tmp_path):
    done = run_cli("--dir", str(tmp_path), "--io", "gds,posix", *SMALL)
    assert done.returncode == 3
    assert set(json.loads(done.stdout)["paths"]) == {"gds", "posix"}
    assert "none of the paths gds, posix" in done.stderr


def test_an_unknown_path_is_a_usage_error(tmp_path):
    done = run_cli("--dir", str(tmp_path), "--io", "gds,fast")
    assert done.returncode == 2
    assert "'fast'" in done.stderr


@pytest.mark.slow
def test_a_rank_that_fails_is_named(tmp_path):
    done = run_cli("--dir", str(tmp_path), "--ranks", "2", "--numel", "1e13", "--device", "cpu")
    assert done.returncode == 1
    assert "need 24000" in done.stderr

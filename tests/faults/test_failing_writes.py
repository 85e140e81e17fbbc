"""Writes that the file system refuses, in the middle of a step and behind its end."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gds_optimizer.errors import IoError, StepFailedError
from gds_optimizer.footer import BucketRecord, expected_words, footer_words
from gds_optimizer.snapshots import restore_snapshot, take_snapshot
from tests.support.engines import (
    StreamedOptimizer,
    adamw,
    bits_of,
    grads_of,
    leftovers,
    mounted_disk,
    open_files,
    pair,
    streamed,
)
from tests.support.forms import INT8, REMAINDER, name_of
from tests.support.io_conformance import file_size_limit
from tests.support.snapshots import compare, everything

pytestmark = pytest.mark.faults

# Two buckets of three planes, then three of four: only those pass the limit on file size.
SIZES = (2048, 3072)
OPTIONS: dict[str, Any] = {
    "sizes": SIZES,
    "groups": {0: {}, 1: {"amsgrad": True}},
    "bucket_size": 16 * 1024,
}
SMALL, LARGE = 4 * 4096, 5 * 4096


def step(run: StreamedOptimizer, number: int) -> None:
    run.step(grads_of(SIZES, number))


def step_and_drain(run: StreamedOptimizer, number: int) -> None:
    step(run, number)
    run.engine.drain()


def steps_on_disk(run: StreamedOptimizer) -> list[int | None]:
    """Which step each bucket file holds, going by its own footer; None for one that is torn."""
    steps: list[int | None] = []
    for bucket, path in zip(run.layout.buckets, run.paths, strict=True):
        content = torch.from_numpy(np.fromfile(path, dtype=np.uint8))
        found = footer_words(content, bucket)
        planes = range(len(bucket.planes))
        record = BucketRecord(int(found[7]), [True] * len(bucket.planes))
        expected = expected_words(content, bucket, run.layout, record, planes)
        steps.append(record.step if torch.equal(expected, found) else None)
    return steps


class Claims:
    """What a message says of the buckets: which are torn, how many hold which step."""

    def __init__(self, error: StepFailedError) -> None:
        text = str(error)
        torn = re.search(r"The last write of buckets? ([\d, ]+) did not complete\.", text)
        ahead = re.search(r"(\d+) of 5 buckets hold step (\d+)\.", text)
        rest = re.search(r"All (?:others|buckets) hold step (\d+) or earlier\.", text)
        assert rest, text
        self.torn = [int(n) for n in torn[1].split(", ")] if torn else []
        self.count_ahead, self.step_ahead = map(int, ahead.groups()) if ahead else (0, -1)
        self.step_of_the_others = int(rest[1])

    def check(self, steps: list[int | None]) -> None:
        """Compare it with what the files hold."""
        whole = [held for index, held in enumerate(steps) if index not in self.torn]
        assert None not in whole, steps
        assert whole.count(self.step_ahead) == self.count_ahead, steps
        others = [held for held in whole if held is not None and held != self.step_ahead]
        assert all(held <= self.step_of_the_others for held in others), steps


@pytest.mark.parametrize("slots", [1, 2, 3, 64])
def test_a_write_that_fails_in_the_third_of_five_buckets(tmp_path, kind, slots):
    before = open_files()
    with streamed(tmp_path, kind=kind, slots=slots, **OPTIONS) as run:
        assert [bucket.file_bytes for bucket in run.layout.buckets] == [SMALL] * 2 + [LARGE] * 3
        # Steps go backwards and forwards in turn; the second one comes to bucket 2 third.
        step(run, 0)
        run.engine.drain()
        assert steps_on_disk(run) == [1] * 5
        with file_size_limit(SMALL), pytest.raises(StepFailedError) as caught:
            step_and_drain(run, 1)
        cause = caught.value.__cause__
        assert isinstance(cause, IoError)
        assert cause.path in [str(run.paths[index]) for index in ((2,) if slots < 3 else (2, 3, 4))]
        assert (cause.operation, cause.file_offset, cause.wanted_bytes) == ("write", 0, LARGE)
        assert "File too large" in str(cause.got)
        assert str(cause) in str(caught.value)

        # The message is what is on the disk.
        claims = Claims(caught.value)
        claims.check(steps_on_disk(run))
        assert 2 in claims.torn
        assert steps_on_disk(run)[:2] == [2, 2]
        if slots == 1:
            assert (claims.torn, claims.count_ahead, claims.step_ahead) == ([2], 2, 2)

        for use in (lambda: step(run, 2), run.engine.drain, run.engine.read_state):
            with pytest.raises(StepFailedError) as again:
                use()
            assert str(again.value) == str(caught.value)
            assert again.value.__cause__ is caught.value.__cause__
        run.engine.close()
        run.engine.close()
    assert open_files() == before
    assert leftovers(tmp_path) == []
    with pair(tmp_path, adamw, kind=kind, **OPTIONS) as both:
        for number in range(2):
            both.step(number)
        both.check()


@pytest.fixture
def tail(tmp_path, kind):
    """An engine whose last step has left a write behind that fails, unnoticed so far."""
    with streamed(tmp_path, kind=kind, slots=64, **OPTIONS) as run:
        step(run, 0)
        run.engine.drain()
        with file_size_limit(SMALL):
            step(run, 1)
            while not all(slot.is_idle for slot in run.pool.slots):
                pass
        yield run


def assert_tail(error: BaseException | None) -> None:
    assert isinstance(error, IoError)
    assert re.search(r"write of \S+bucket0000[234]\.bin failed .*File too large", str(error))


def test_a_tail_write_fails_at_the_next_step(tail):
    with pytest.raises(StepFailedError, match="optimizer step 3 failed: write of") as caught:
        step(tail, 2)
    assert_tail(caught.value.__cause__)
    assert Claims(caught.value).torn


def test_a_tail_write_fails_at_the_next_drain(tail):
    with pytest.raises(StepFailedError, match="writing behind the last step failed") as caught:
        tail.engine.drain()
    assert_tail(caught.value.__cause__)
    claims = Claims(caught.value)
    assert (claims.torn, claims.count_ahead, claims.step_of_the_others) == ([2, 3, 4], 0, 2)
    claims.check(steps_on_disk(tail))
    with pytest.raises(StepFailedError, match="writing behind the last step failed"):
        step(tail, 2)


def test_a_tail_write_fails_at_the_next_reading(tail):
    with pytest.raises(StepFailedError, match="writing behind the last step failed") as caught:
        tail.engine.read_state()
    assert_tail(caught.value.__cause__)
    with pytest.raises(StepFailedError):
        step(tail, 2)


def test_a_tail_write_fails_at_close_and_everything_is_removed(tail, tmp_path):
    with pytest.raises(IoError) as caught:
        tail.engine.close()
    assert_tail(caught.value)
    assert leftovers(tmp_path) == []
    tail.engine.close()


def test_a_tail_write_is_raised_once(tail, tmp_path):
    with pytest.raises(StepFailedError):
        step(tail, 2)
    tail.engine.close()
    assert leftovers(tmp_path) == []


def test_a_failed_rewrite_says_what_it_was(tmp_path, kind):
    with streamed(tmp_path, kind=kind, **OPTIONS) as run:
        step(run, 0)
        run.engine.drain()
        with (
            file_size_limit(SMALL),
            pytest.raises(StepFailedError, match="rewriting the main parameters failed: write of"),
        ):
            run.engine.write_mains({})


def test_a_failed_initialisation_says_what_it_was(tmp_path, kind):
    with streamed(tmp_path, kind=kind, initialize="lazy", **OPTIONS) as run:
        with (
            file_size_limit(4096),
            pytest.raises(StepFailedError, match="initialisation failed: write of") as caught,
        ):
            run.engine.initialize()
        assert re.search(r"bucket0000\d\.bin failed at offset", str(caught.value))


def test_a_disk_that_others_fill_is_no_matter(tmp_path, kind):
    """The space was reserved."""
    with mounted_disk(tmp_path, 8 * 2**20) as disk:
        with pair(disk, adamw, kind=kind, initialize="lazy", **OPTIONS) as both:
            fill(disk / "others")
            for number in range(3):
                both.step(number)
            both.check()
        (disk / "others").unlink()
        assert leftovers(disk) == ["lost+found"]


def fill(path: Path) -> None:
    """Take all the space that is left, to the last block."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    for nbytes in (65536, 512):
        with pytest.raises(OSError, match="No space left"):
            write_forever(fd, bytes(nbytes))
    os.fsync(fd)
    os.close(fd)


def write_forever(fd: int, data: bytes) -> None:
    while True:
        os.write(fd, data)


def test_models_are_whole_after_a_failure(tmp_path):
    """Each element of the model is that of step 1 or of step 2."""
    with streamed(tmp_path, slots=1, **OPTIONS) as run:
        step(run, 0)
        run.engine.drain()
        before = [model.clone() for model in run.models]
        with file_size_limit(SMALL), pytest.raises(StepFailedError):
            step(run, 1)
        after = [model.clone() for model in run.models]
    with pair(tmp_path, adamw, **OPTIONS) as both:
        for number in range(2):
            both.step(number)
        for old, new, found in zip(before, both.resident.models, after, strict=True):
            assert bool(((found == old) | (found == new)).all())
    assert bits_of(before) != bits_of(after)


@pytest.mark.parametrize("form", [REMAINDER, INT8 | REMAINDER], ids=name_of)
def test_a_snapshot_is_the_way_back_where_the_model_holds_halves(tmp_path, form):
    """The model is half a step ahead then; what a snapshot has is whole without it."""
    state = tmp_path / "state"
    state.mkdir()
    with streamed(state, slots=1, moments=form, **OPTIONS) as run:
        engines = {"opt0": run.engine}
        for number in range(2):
            step(run, number)
        take_snapshot(engines, tmp_path / "snapshot")
        wanted = [everything(run)]
        for number in range(2, 4):
            step_and_drain(run, number)
            wanted.append(everything(run))
        assert [path.stat().st_size for path in run.paths] == [SMALL] * 2 + [LARGE] * 3
        models = [model.clone() for model in run.models]
        with file_size_limit(SMALL), pytest.raises(StepFailedError):
            step_and_drain(run, 4)
        assert bits_of(models) != bits_of(run.models)
        assert restore_snapshot(engines, tmp_path / "snapshot") == 2
        compare(wanted[0], everything(run))
        for number in range(2, 4):
            step(run, number)
            compare(wanted[number - 1], everything(run))


def test_the_limit_of_these_tests_is_undone():
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY

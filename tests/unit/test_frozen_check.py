"""What a checkpoint's writer still reads is checked in the background, and damage is said."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gds_optimizer import frozen_check as module
from gds_optimizer.errors import CorruptBucketError
from gds_optimizer.frozen_check import FrozenCheck
from gds_optimizer.mapped_state import freeze_mapped, map_state
from tests.support.engines import StreamedOptimizer, in_child, leftovers
from tests.support.snapshots import build, built, compare, everything, flip, train


@pytest.fixture
def optimizer(tmp_path: Path) -> Iterator[StreamedOptimizer]:
    with built(tmp_path) as made:
        train(made, 0, 2)
        yield made


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reading waits for this."""
    opened = threading.Event()
    read = module._read

    def wait(*args: Any) -> bytearray:
        assert opened.wait(60)
        return read(*args)

    monkeypatch.setattr(module, "_read", wait)
    yield opened
    opened.set()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def save(optimizer: StreamedOptimizer) -> FrozenCheck:
    """What an asynchronous save does; nobody writes."""
    map_state(optimizer.engine, verify=False)
    freeze_mapped(optimizer.engine)
    return FrozenCheck(optimizer.engine)


def test_nothing_is_said_where_nothing_is(tmp_path, optimizer, caplog):
    before = descriptors()
    check = save(optimizer)
    check.wait()
    assert check.failure is None
    assert descriptors() == before
    train(optimizer, 2, 4)
    assert not caplog.records
    (tmp_path / "plain").mkdir()
    with built(tmp_path / "plain") as plain:
        train(plain, 0, 4)
        compare(everything(plain), everything(optimizer))


def offsets(optimizer: StreamedOptimizer, index: int) -> dict[str, int]:
    bucket = optimizer.layout.buckets[index]
    where = {plane.name: plane.offset + plane.nbytes - 4 for plane in bucket.planes}
    return where | {"footer": bucket.footer_offset + 60, "padding": bucket.footer_offset + 2000}


@pytest.mark.parametrize("what", ["main", "exp_avg", "exp_avg_sq", "footer", "padding"])
def test_a_bit_that_changes_while_training_goes_on(tmp_path, optimizer, held_back, caplog, what):
    """In a file that has lost its name; said at once, raised once, and training is not touched."""
    index = 9
    path = optimizer.paths[index]
    kept = tmp_path / "kept"
    os.link(path, kept)  # to reach it
    check = save(optimizer)
    train(optimizer, 2, 3)
    flip(kept, offsets(optimizer, index)[what])
    assert not caplog.records
    held_back.set()
    check.wait()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    message = record.getMessage()
    assert f"of step 2 in {tmp_path}" in message
    assert f"must not be used: bucket {index} in {path} is not what was written" in message
    assert "delete it and save another" in message
    before = optimizer.engine.read_state()
    with pytest.raises(CorruptBucketError, match=f"must not be used: bucket {index} in"):
        train(optimizer, 3, 4)
    for shard, values in optimizer.engine.read_state().items():
        compare(before[shard], values)
    train(optimizer, 3, 5)
    (tmp_path / "plain").mkdir()
    with built(tmp_path / "plain") as plain:
        train(plain, 0, 5)
        compare(everything(plain), everything(optimizer))


def test_a_file_of_another_step(tmp_path, optimizer, held_back):
    """Whole in itself."""
    check = save(optimizer)
    check._files[9].written[1] = False
    held_back.set()
    check.wait()
    assert f"bucket 9 in {optimizer.paths[9]} is not what was written" in str(check.failure)
    assert "got [True, True, True] of step 2" in str(check.failure)


def test_a_file_that_cannot_be_read(tmp_path, optimizer, held_back, caplog):
    kept = tmp_path / "kept"
    os.link(optimizer.paths[9], kept)
    check = save(optimizer)
    train(optimizer, 2, 3)
    os.truncate(kept, 5000)
    held_back.set()
    check.wait()
    assert "bucket00009.bin failed at offset" in str(check.failure)
    with pytest.raises(CorruptBucketError, match="must not be used: read of"):
        train(optimizer, 3, 4)


def test_two_saves_take_turns(optimizer, monkeypatch):
    """One thread reads at a time; neither has to wait for the other to be started."""
    opened = threading.Event()
    reading: list[int] = []
    read = module._read

    def note(*args: Any) -> bytearray:
        reading.append(threading.get_ident())
        assert opened.wait(60)
        return read(*args)

    monkeypatch.setattr(module, "_read", note)
    checks = [save(optimizer)]
    train(optimizer, 2, 3)
    checks.append(save(optimizer))
    opened.set()
    for check in checks:
        check.wait()
        assert check.failure is None
    assert len(set(reading)) == 2
    assert sum(a != b for a, b in itertools.pairwise(reading)) == 1


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_writer(optimizer, held_back):
    """It ends without waiting for the thread, which is its parent's; and closes nothing there."""
    check = save(optimizer)
    in_child(gc.collect)
    held_back.set()
    check.wait()
    assert check.failure is None


def test_the_optimizer_is_closed_meanwhile(tmp_path, held_back):
    optimizer = build(tmp_path)
    train(optimizer, 0, 1)
    check = save(optimizer)
    engine = weakref.ref(optimizer.engine)
    optimizer.close()
    assert leftovers(tmp_path) == []
    del optimizer
    gc.collect()
    assert engine() is None
    held_back.set()
    check.wait()
    assert check.failure is None


def test_too_many_open_files(optimizer, monkeypatch, caplog):
    """The checkpoint is written without the check, and somebody says so."""
    before = descriptors()
    opened: list[Path] = []

    def refuse(path: Path, flags: int) -> int:
        if len(opened) == 5:
            raise OSError(24, "Too many open files")
        opened.append(path)
        return os_open(path, flags)

    os_open = os.open
    map_state(optimizer.engine, verify=False)
    freeze_mapped(optimizer.engine)
    with monkeypatch.context() as patched:
        patched.setattr(module.os, "open", refuse)
        check = FrozenCheck(optimizer.engine)
    check.wait()
    assert "is not compared with its checksums: [Errno 24] Too many open files" in caplog.text
    assert descriptors() == before
    train(optimizer, 2, 3)


def test_a_process_that_ends_waits_for_it(tmp_path):
    """Nobody takes another step after the last checkpoint of a run."""
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from gds_optimizer import frozen_check\n"
        "from tests.support.snapshots import build, flip, train\n"
        "from tests.unit.test_frozen_check import save\n"
        "optimizer = build(Path(sys.argv[1]))\n"
        "train(optimizer, 0, 1)\n"
        "optimizer.engine.drain()\n"
        "flip(optimizer.paths[9], 10)\n"
        "read = frozen_check._read\n"
        "frozen_check._read = lambda *args: (time.sleep(0.01), read(*args))[1]\n"
        "save(optimizer)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        check=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert "must not be used: bucket 9 in" in done.stderr
    assert leftovers(tmp_path) == []

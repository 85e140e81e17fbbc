"""Setting up that fails anywhere leaves nothing behind: no file, descriptor, thread or buffer."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer import runtime as module
from gds_optimizer.bucket_state import BucketState
from gds_optimizer.config import StreamConfig
from gds_optimizer.engine import Engine
from gds_optimizer.errors import IoError, NoSpaceError, StepFailedError, StoreLockedError
from gds_optimizer.evicted import evicted_like
from gds_optimizer.io import CuFileBackend, DirectBackend
from gds_optimizer.io.tasks import TaskBackend
from gds_optimizer.lock import OwnedDirectory
from gds_optimizer.pipeline import Ranges
from gds_optimizer.plan import Binding
from gds_optimizer.probe import ProbeReport, decide_io_path
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.scalars import Scalars
from gds_optimizer.slots import Slot, SlotPool
from tests.support import io_backends
from tests.support.engines import (
    SMALL_BUCKET_BYTES,
    adamw,
    first_values,
    flat_groups,
    grads_of,
    leftovers,
    mounted_disk,
    open_files,
    same_bits,
)
from tests.support.io_conformance import file_size_limit

pytestmark = pytest.mark.faults

CPU = torch.device("cpu")
# Two optimizers: three buckets and two.
SIZES = ((600, 2400), (1500,))
COUNT = 5


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> ProbeReport:
    """The probe's verdict, asked for once: it starts a process each time."""
    directory = tmp_path_factory.mktemp("probed")
    return decide_io_path(StreamConfig(directories=(directory,)), CPU)


@pytest.fixture(autouse=True)
def chosen(report, kind, monkeypatch) -> None:
    monkeypatch.setattr(module, "decide_io_path", lambda config, device, **options: report)
    monkeypatch.setattr(module, "SlotPool", NotedPool)
    monkeypatch.setattr(module, "make_backend", lambda path, **options: io_backends.make(kind))


def parts(sizes: Any = SIZES) -> list[Part]:
    made = []
    for number, own in enumerate(sizes):
        models = first_values(own, seed=number)
        mains = [evicted_like(m, dtype=torch.float32, name="main") for m in models]
        optimizer = adamw([torch.ones(1)])
        optimizer.param_groups[0]["params"] = mains
        bindings = [
            Binding(f"p{i}", a, m) for i, (a, m) in enumerate(zip(mains, models, strict=True))
        ]
        made.append(Part(optimizer, bindings, f"opt{number}"))
    return made


pools: list[SlotPool] = []


class NotedPool(SlotPool):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        pools.append(self)
        super().__init__(*arguments, **options)


def build(directory: Path, *, eager: bool = True, sizes: Any = SIZES, **budgets: Any) -> Runtime:
    config = StreamConfig(
        directories=(directory,), bucket_size=SMALL_BUCKET_BYTES, slots=2, **budgets
    )
    return Runtime.build(parts(sizes), config, device=CPU, rank=0, eager=eager)


@contextmanager
def nothing_left(directory: Path) -> Iterator[None]:
    """Inside, setting up fails; afterwards everything is as it was, and works."""
    files, threads = open_files(), set(threading.enumerate())
    before = leftovers(directory)
    pools.clear()
    yield
    assert leftovers(directory) == before
    assert open_files() == files
    assert set(threading.enumerate()) == threads
    assert [pool.slots for pool in pools] == [[]] * len(pools)


def assert_works(directory: Path) -> None:
    runtime = build(directory)
    assert len(runtime.engines) == 2
    assert [len(engine.layout.buckets) for engine in runtime.engines] == [3, 2]
    for engine, sizes in zip(list(runtime.engines), SIZES, strict=True):
        for binding, grad in zip(engine.plan.bindings, grads_of(sizes, 0), strict=True):
            binding.main.grad = grad
        engine.step()
        runtime.close_engine(engine)
    assert leftovers(directory) == []


def fail_at(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int, error: Exception
) -> None:
    """The `number`-th call of a method raises."""
    calls = [0]
    original: Callable[..., Any] = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number + 1:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)


# The last writes go on behind the pass, and are waited for at its end.
WRITES = r"(initialisation|writing behind the last step) failed: write of "
NO_LUCK = IoError("somewhere", "open", file_offset=0, wanted_bytes=0, got="no luck")


@pytest.mark.parametrize("number", range(COUNT))
def test_opening_the_files(tmp_path, monkeypatch, number):
    with nothing_left(tmp_path), monkeypatch.context() as patch:
        fail_at(patch, TaskBackend, "open", number, NO_LUCK)
        with pytest.raises(IoError, match="no luck"):
            build(tmp_path)
    assert_works(tmp_path)


@pytest.mark.parametrize("number", range(COUNT))
def test_writing_the_first_mains(tmp_path, monkeypatch, number):
    """The writes are refused by the kernel, from the `number`-th bucket on."""
    filled = [0]
    visit = Engine._visit_initial

    def limited(self: Engine, index: int, slot: Slot, from_disk: bool) -> Ranges:
        ranges = visit(self, index, slot, from_disk)
        filled[0] += 1
        if filled[0] == number + 1:
            self.pipeline.drain()
            stack.__enter__()
        return ranges

    stack = file_size_limit(4096)
    with nothing_left(tmp_path), monkeypatch.context() as patch:
        patch.setattr(Engine, "_visit_initial", limited)
        try:
            with pytest.raises(StepFailedError, match=WRITES) as caught:
                build(tmp_path)
        finally:
            stack.__exit__(None, None, None)
        assert isinstance(caught.value.__cause__, IoError)
        assert "File too large" in str(caught.value)
    assert_works(tmp_path)


@pytest.mark.parametrize("limit_bytes", [4096, 16383])
def test_reserving_the_space(tmp_path, limit_bytes):
    with (
        nothing_left(tmp_path),
        file_size_limit(limit_bytes),
        pytest.raises(NoSpaceError, match="too little room"),
    ):
        build(tmp_path)
    assert_works(tmp_path)


def test_a_disk_that_is_too_small_for_the_second_optimizer(tmp_path):
    """The first one's files, which did fit, go as well."""
    with (
        mounted_disk(tmp_path, 8 * 2**20) as disk,
        nothing_left(disk),
        pytest.raises(NoSpaceError, match="No space left on device"),
    ):
        build(disk, sizes=((1000,), (600_000,)))


@pytest.mark.parametrize("number", [0, 1])
def test_registering_the_slots(tmp_path, monkeypatch, kind, number):
    backend = {"host": DirectBackend, "posix-cpu": CuFileBackend}[kind]
    with nothing_left(tmp_path), monkeypatch.context() as patch:
        fail_at(patch, backend, "register", number, RuntimeError("no pinning today"))
        with pytest.raises(RuntimeError, match="no pinning today"):
            build(tmp_path)
    assert_works(tmp_path)


@pytest.mark.parametrize("number", [0, 1])
def test_making_the_engines(tmp_path, monkeypatch, number):
    with nothing_left(tmp_path), monkeypatch.context() as patch:
        fail_at(patch, Scalars, "adopt", number, ValueError("odd state"))
        with pytest.raises(ValueError, match="odd state"):
            build(tmp_path)
    assert_works(tmp_path)


@pytest.mark.parametrize("name", ["opt0", "opt1"])
def test_a_directory_of_somebody_else(tmp_path, name):
    owned = OwnedDirectory.acquire(tmp_path / "rank00000" / name)
    (owned.path / "bucket00000.bin").write_text("theirs")
    with nothing_left(tmp_path), pytest.raises(StoreLockedError, match=name):
        build(tmp_path)
    assert (owned.path / "bucket00000.bin").read_text() == "theirs"
    owned.close()
    assert_works(tmp_path)


def test_a_directory_that_cannot_be_written(tmp_path):
    blocked = tmp_path / "rank00000"
    blocked.write_text("a file where a directory should be")
    with nothing_left(tmp_path), pytest.raises(OSError, match="rank00000"):
        build(tmp_path)
    blocked.unlink()
    assert_works(tmp_path)


def test_an_interrupt(tmp_path, monkeypatch):
    def interrupt(self: BucketState, index: int, main: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with nothing_left(tmp_path), monkeypatch.context() as patch:
        patch.setattr(BucketState, "fill_main_from_model", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path)
    assert_works(tmp_path)


def test_what_was_built_is_closed_by_its_last_engine(tmp_path):
    with nothing_left(tmp_path):
        runtime = build(tmp_path)
        first, second = runtime.engines
        assert same_bits(
            first.read_state()["p1"]["main"], first_values(SIZES[0], seed=0)[1].float()
        )
        runtime.close_engine(first)
        runtime.close_engine(first)
        assert (second.pool.slots, len(list(tmp_path.rglob("bucket*")))) != ([], 0)
        second.read_state()
        runtime.close_engine(second)
        assert runtime.pool.slots == []
        del first, second, runtime


def test_what_was_built_and_dropped_closes_itself(tmp_path):
    with nothing_left(tmp_path):
        runtime = build(tmp_path, eager=False)
        assert len(list(tmp_path.rglob("bucket*"))) == COUNT
        del runtime
        gc.collect()


def test_groups_are_flat():
    """The helper that all of these tests rest on."""
    params = [torch.ones(1) for _ in range(3)]
    groups = flat_groups(params, {1: {"lr": 5}})
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(params[0])],
        [id(params[1]), id(params[2])],
    ]
    assert groups[1]["lr"] == 5

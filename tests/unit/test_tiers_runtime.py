"""Homes of all engines of a process: shared budgets, memory that cannot be had, giving it back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer import runtime as module
from gds_optimizer import tiers
from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import ConfigError, ForkedError, NoSpaceError
from gds_optimizer.evicted import evicted_like
from gds_optimizer.io import memory
from gds_optimizer.plan import Binding
from gds_optimizer.probe import decide_io_path
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.slots import SlotPool
from gds_optimizer.stepper import install_step
from tests.support.engines import (
    SMALL_BUCKET_BYTES,
    adamw,
    first_values,
    flat_groups,
    grads_of,
    in_child,
    leftovers,
    same_bits,
)

CPU = torch.device("cpu")
BUCKET_BYTES = SMALL_BUCKET_BYTES + 4096  # with its footer
SIZES = (3072, 2048)  # of two optimizers: three buckets and two
LOTS = 2**30


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The probe's verdict, asked for once: it starts a process each time."""
    directory = tmp_path_factory.mktemp("probed")
    return decide_io_path(StreamConfig(directories=(directory,)), CPU)


@pytest.fixture(autouse=True)
def probed_once(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "decide_io_path", lambda config, device, **options: report)


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[memory.HostBuffer]]:
    """Host memory that was taken."""
    taken: list[memory.HostBuffer] = []
    original = memory.HostBuffer

    class Noted(original):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            taken.append(self)

    monkeypatch.setattr(memory, "HostBuffer", Noted)
    yield taken
    assert all(buffer.tensor.numel() == 0 for buffer in taken), "host memory was not given back"


class Run:
    def __init__(self, directory: Path, **options: Any) -> None:
        self.models = [first_values([n], seed=i)[0] for i, n in enumerate(SIZES)]
        parts, self.mains = [], []
        for number, model in enumerate(self.models):
            main = evicted_like(model, dtype=torch.float32, name="main")
            optimizer = adamw([torch.ones(1)])
            optimizer.param_groups[0]["params"] = [main]
            parts.append(Part(optimizer, [Binding("p", main, model)], f"opt{number}"))
            self.mains.append(main)
        config = StreamConfig(directories=(directory,), bucket_size=SMALL_BUCKET_BYTES, **options)
        self.runtime = Runtime.build(parts, config, device=CPU, rank=0, eager=True)
        self.optimizers = [part.optimizer for part in parts]
        for optimizer, engine in zip(self.optimizers, self.runtime.engines, strict=True):
            install_step(optimizer, engine.step)

    @property
    def homes(self) -> str:
        """A letter for each bucket, engines separated."""
        engines = []
        for engine in self.runtime.engines:
            files = engine.store.in_memory
            engines.append(
                "".join(
                    "n" if i not in files else "d" if files[i].stays_on_device else "h"
                    for i in range(len(engine.layout.buckets))
                )
            )
        return " ".join(engines)

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            grads = grads_of(SIZES, step)
            for main, optimizer, grad in zip(self.mains, self.optimizers, grads, strict=True):
                main.grad = grad
                optimizer.step()

    def close(self) -> None:
        for engine in list(self.runtime.engines):
            self.runtime.close_engine(engine)


def oracle(steps: int) -> list[torch.Tensor]:
    models = [first_values([n], seed=i)[0] for i, n in enumerate(SIZES)]
    for number, model in enumerate(models):
        main = model.float()
        optimizer = adamw(flat_groups([main], None))
        for step in range(steps):
            main.grad = grads_of(SIZES, step)[number]
            optimizer.step()
        model.copy_(main)
    return models


@pytest.mark.parametrize(
    ("hbm", "host", "homes"),
    [
        (0, 0, "nnn nn"),
        (LOTS, 0, "ddd dd"),
        (0, LOTS, "hhh hh"),
        (2 * BUCKET_BYTES, 2 * BUCKET_BYTES, "ddh hn"),
        (BUCKET_BYTES - 1, 4 * BUCKET_BYTES + 5, "hhh hn"),
    ],
)
def test_engines_share_the_budgets(
    tmp_path: Path,
    buffers: Any,
    hbm: int,
    host: int,
    homes: str,
    is_copied: bool,
) -> None:
    run = Run(tmp_path, hbm_budget=hbm, host_budget=host)
    assert run.homes == homes
    moving = homes.count("n") + is_copied * homes.count("h")
    assert len(run.runtime.pool.slots) == min(3, moving)
    run.train(0, 2)
    run.runtime.suspend()
    run.runtime.suspend()
    run.runtime.resume()
    run.runtime.resume()
    run.train(2, 4)
    for wanted, found in zip(oracle(4), run.models, strict=True):
        assert same_bits(wanted, found)
    assert len(buffers) == homes.count("h")
    run.close()
    assert leftovers(tmp_path) == []


def test_auto_takes_half_of_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "available_bytes", lambda: 2 * 2 * 3 * BUCKET_BYTES + 2 * LOTS)
    monkeypatch.setattr(tiers, "_SPARE_BYTES", 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run = Run(tmp_path, host_budget="auto")
    assert run.homes == "hhh hh"
    run.close()
    monkeypatch.setattr(tiers, "available_bytes", lambda: 2 * 2 * 3 * BUCKET_BYTES)
    run = Run(tmp_path, host_budget="auto")
    assert run.homes == "hhh nn"
    run.close()


def test_host_memory_that_is_not_to_be_had_leaves_buckets_on_nvme(
    tmp_path: Path,
    buffers: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    take = memory.MemoryFile.in_host_memory.__func__  # type: ignore[attr-defined]

    def refuse_the_third(cls: Any, nbytes: int, streams: Any) -> Any:
        if len(buffers) == 2:
            raise MemoryError("no more locked pages")
        return take(cls, nbytes, streams)

    monkeypatch.setattr(memory.MemoryFile, "in_host_memory", classmethod(refuse_the_third))
    with caplog.at_level(logging.INFO, "gds_optimizer"):
        run = Run(tmp_path, host_budget=LOTS)
    assert run.homes == "hhn nn"
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "no more locked pages" in warnings[0]
    assert "buckets live on the device 0 (0.00 GiB), in host memory 2" in caplog.text
    run.train(0, 3)
    for wanted, found in zip(oracle(3), run.models, strict=True):
        assert same_bits(wanted, found)
    run.close()


def test_memory_that_a_machine_needs_itself_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "available_bytes", lambda: tiers._SPARE_BYTES + BUCKET_BYTES - 1)
    run = Run(tmp_path, host_budget=LOTS)
    assert run.homes == "nnn nn"
    run.close()


def test_without_a_budget_the_log_says_what_one_would_buy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiers, "available_bytes", lambda: 20 * 2**30)
    with caplog.at_level(logging.INFO, "gds_optimizer"):
        run = Run(tmp_path)
    run.close()
    assert (
        "host memory has 20 GiB available to this rank: --stream-optimizer-state-host-budget "
        "1GiB would keep 5 of 5 buckets off the drives" in caplog.text
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, "gds_optimizer"):
        run = Run(tmp_path, host_budget=1)
    run.close()
    assert "would keep" not in caplog.text


def test_setting_up_that_fails_gives_all_memory_back(
    tmp_path: Path, buffers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = {"hbm_budget": BUCKET_BYTES, "host_budget": 3 * BUCKET_BYTES}

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise ConfigError("the device is full")

    for owner, name in ((SlotPool, "allocate_home"), (module, "SlotPool")):
        taken = len(buffers)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            with pytest.raises(ConfigError, match="the device is full"):
                Run(tmp_path, **budgets)
        assert len(buffers) == taken + 3
        assert not any(each.tensor.numel() for each in buffers)
    for number in range(2):
        made: list[Any] = []

        class Failing(module.Engine):  # type: ignore[misc, name-defined]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                if len(made) == number:  # noqa: B023 - built within this turn
                    raise NoSpaceError("no engine")
                made.append(self)  # noqa: B023
                super().__init__(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(module, "Engine", Failing)
            with pytest.raises(NoSpaceError, match="no engine"):
                Run(tmp_path, **budgets)
        assert buffers[-1].tensor.numel() == 0
        assert leftovers(tmp_path) == []
    run = Run(tmp_path, **budgets)
    run.close()


def test_suspending_needs_room_for_what_lives_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, hbm_budget=LOTS)
    run.train(0, 1)
    with monkeypatch.context() as patch:
        patch.setattr("gds_optimizer.room.free_bytes", lambda *directories: 5)
        with pytest.raises(NoSpaceError, match="live in memory"):
            run.runtime.suspend()
    assert not run.runtime.pool.is_suspended
    run.train(1, 2)
    run.runtime.suspend()

    def refuse(self: SlotPool, nbytes: int) -> Any:
        raise ConfigError("somebody else has it")

    with monkeypatch.context() as patch:
        patch.setattr(SlotPool, "allocate_home", refuse)
        with pytest.raises(ConfigError, match="somebody else"):
            run.runtime.resume()
    run.runtime.resume()
    run.train(2, 3)
    for wanted, found in zip(oracle(3), run.models, strict=True):
        assert same_bits(wanted, found)
    run.close()
    assert leftovers(tmp_path) == []


def test_a_forked_child_does_not_take_back_what_was_lent(tmp_path: Path) -> None:
    run = Run(tmp_path, hbm_budget=LOTS)
    run.train(0, 1)
    run.runtime.suspend()

    def resume() -> None:
        with pytest.raises(ForkedError):
            run.runtime.resume()

    in_child(resume)
    run.runtime.resume()
    run.train(1, 2)
    for wanted, found in zip(oracle(2), run.models, strict=True):
        assert same_bits(wanted, found)
    run.close()


def test_closing_while_suspended_leaves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, hbm_budget=LOTS)
    run.train(0, 1)
    run.runtime.suspend()
    run.close()
    assert leftovers(tmp_path) == []

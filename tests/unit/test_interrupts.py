"""Interrupts (Ctrl-C, a signal's handler) between two statements that belong together."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gds_optimizer.checkpoint import state_dict
from gds_optimizer.errors import NoSpaceError, StepFailedError
from gds_optimizer.snapshot_read import verify
from gds_optimizer.telemetry import PassClock
from tests.support.engines import SIZES, grads_of, leftovers, streamed
from tests.support.snapshots import (
    BUDGETS,
    LOTS,
    MIX,
    StreamedOptimizer,
    built,
    compare,
    everything,
    hashes,
    restore,
    root,
    take,
    train,
)

all_budgets = pytest.mark.parametrize("budgets", BUDGETS.values(), ids=list(BUDGETS))


def interrupting(original: Callable[..., Any], turn: int) -> Callable[..., Any]:
    """Does what the original does; once, at the given call, an interrupt follows."""
    calls: list[None] = []

    def call(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        calls.append(None)
        if len(calls) == turn:
            raise KeyboardInterrupt
        return result

    return call


@pytest.mark.parametrize("what", ["saving", "snapshot"])
@all_budgets
def test_files_that_were_just_made(
    tmp_path: Path, budgets: tuple[int, int], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with built(root(tmp_path), budgets=budgets) as optimizer:
        train(optimizer, 0, 2)
        wanted = everything(optimizer)
        before = leftovers(root(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(optimizer.store, "_create", interrupting(optimizer.store._create, 2))
            try:
                if what == "saving":
                    state_dict(optimizer.engine)
                else:
                    take(optimizer, tmp_path / "snapshot")
            except KeyboardInterrupt:
                if what == "saving":
                    assert leftovers(root(tmp_path)) == before
            else:  # no file is needed
                assert (what, budgets) == ("saving", BUDGETS["none"])
        state_dict(optimizer.engine)
        take(optimizer, tmp_path / "another")
        compare(wanted, everything(optimizer))
        train(optimizer, 2, 3)


def _torn(optimizer: StreamedOptimizer, step: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(optimizer, step, step + 1)
    with pytest.raises(StepFailedError):
        optimizer.engine.read_state()


@pytest.mark.thinned
@pytest.mark.parametrize("at", ["replace", "open"])
@pytest.mark.parametrize("budgets", [(0, 0), MIX], ids=["drive", "mix"])
def test_a_bucket_that_gets_another_file(
    tmp_path: Path, budgets: tuple[int, int], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step, and while a snapshot is restored: any snapshot can be restored afterwards."""
    first, second = tmp_path / "first", tmp_path / "second"
    with built(root(tmp_path), budgets=budgets) as optimizer:
        train(optimizer, 0, 2)
        take(optimizer, first)
        states = {first: everything(optimizer)}
        train(optimizer, 2, 3)
        take(optimizer, second)
        states[second] = everything(optimizer)
        files = hashes(first), hashes(second)

        def interrupt(patch: pytest.MonkeyPatch, turn: int) -> None:
            if at == "open":
                patch.setattr(optimizer.backend, "open", interrupting(optimizer.backend.open, turn))
            else:
                patch.setattr(os, "replace", interrupting(os.replace, turn))

        with monkeypatch.context() as patch:
            interrupt(patch, 2)
            _torn(optimizer, 3)
        for turn in range(1, 5):
            for path, other in ((second, first), (first, second)):
                with monkeypatch.context() as patch:
                    interrupt(patch, turn)
                    with pytest.raises(KeyboardInterrupt):
                        restore(optimizer, path)
                restore(optimizer, other)
                compare(states[other], everything(optimizer))
                train(optimizer, optimizer.engine.steps, optimizer.engine.steps + 2)
                restore(optimizer, path)
                compare(states[path], everything(optimizer))
                train(optimizer, optimizer.engine.steps, optimizer.engine.steps + 1)
        assert (hashes(first), hashes(second)) == files
        assert not list(verify(first))
        assert not list(verify(second))


@all_budgets
def test_a_step_that_is_done_is_counted(
    tmp_path: Path, budgets: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed(tmp_path, budgets=budgets) as optimizer:
        optimizer.step(grads_of(SIZES, 0))
        with monkeypatch.context() as patch:
            patch.setattr(PassClock, "finish", interrupting(PassClock.finish, 1))
            with pytest.raises(KeyboardInterrupt):
                optimizer.step(grads_of(SIZES, 1))
        assert optimizer.engine.steps == 2
        assert {record.step for record in optimizer.engine.records} == {2}


def test_a_file_system_that_refuses_what_is_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota, say, of which the free space says nothing."""

    def refuse(*_: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with streamed(tmp_path, budgets=(0, LOTS)) as optimizer:
        total = sum(bucket.file_bytes for bucket in optimizer.layout.buckets)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse)
            with pytest.raises(NoSpaceError, match=f"live in memory, .* need {total} bytes"):
                state_dict(optimizer.engine)
        state_dict(optimizer.engine)

"""Homes, remainders and merged pieces together: what each of them alone does not show."""

from __future__ import annotations

import os
import weakref
from functools import partial

import pytest
import torch

from gds_optimizer import bucket_state
from gds_optimizer.checkpoint import load_state_dict, state_dict
from gds_optimizer.codecs import clear_tie_bits
from gds_optimizer.errors import ModelChangedError
from gds_optimizer.io.memory import HostBuffer
from gds_optimizer.merging import Gradients
from gds_optimizer.snapshots import restore_snapshot, take_snapshot
from gds_optimizer.written_out import lend_device_memory, take_device_memory
from tests.support.engines import SMALL_BUCKET_BYTES, adamw, grads_of, same_bits, streamed

LOTS = 2**30
SIZES = (100, 5000)
BUDGETS = {"drive": (0, 0), "host": (0, LOTS), "device": (LOTS, 0), "mix": (20_000, 20_000)}
REMAINDER = {"main": "remainder"}
all_budgets = pytest.mark.parametrize("budgets", BUDGETS.values(), ids=list(BUDGETS))


@all_budgets
def test_saved_then_suspended_then_stepped(tmp_path, budgets):
    """What was handed out needs the files of buckets in memory for longer than a suspension."""
    with streamed(tmp_path, sizes=SIZES, budgets=budgets) as run:
        run.step(grads_of(SIZES, 0))
        saved = state_dict(run.engine)
        wanted = {name: entry["planes"]["main"].clone() for name, entry in saved["shards"].items()}
        run.engine.drain()
        lend_device_memory([run.engine])
        run.pool.suspend()
        run.pool.resume()
        take_device_memory([run.engine])
        found = run.engine.read_state()
        assert all(same_bits(found[name]["main"], main) for name, main in wanted.items())
        run.step(grads_of(SIZES, 1))
        run.engine.drain()


@all_budgets
def test_another_layout_is_restored_after_a_save(tmp_path, budgets):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with streamed(tmp_path / "first", sizes=SIZES, bucket_size=4 * SMALL_BUCKET_BYTES) as run:
        for step in range(2):
            run.step(grads_of(SIZES, step))
        wanted = run.engine.read_state()
        take_snapshot({"opt0": run.engine}, tmp_path / "snapshot")
    with streamed(tmp_path / "second", sizes=SIZES, budgets=budgets) as run:
        run.step(grads_of(SIZES, 7))
        state_dict(run.engine)
        restore_snapshot({"opt0": run.engine}, tmp_path / "snapshot")
        found = run.engine.read_state()
        assert run.engine.steps == 2
        assert all(same_bits(found[name]["main"], wanted[name]["main"]) for name in wanted)


@all_budgets
def test_a_dictionary_of_another_step_is_loaded(tmp_path, budgets):
    with streamed(tmp_path, sizes=SIZES, budgets=budgets) as run:
        run.step(grads_of(SIZES, 0))
        path = tmp_path / "saved.pt"
        torch.save(state_dict(run.engine), path)
        wanted = run.engine.read_state()
        run.step(grads_of(SIZES, 1))
        load_state_dict(run.engine, torch.load(path, weights_only=True))
        found = run.engine.read_state()
        assert all(same_bits(found[name]["main"], wanted[name]["main"]) for name in wanted)


def test_a_neighbour_that_changes_inside_materialized_is_noticed(tmp_path):
    """Its main would be put together from the wrong half, and nobody would ever know."""
    sizes = (100, 200)
    with streamed(tmp_path, sizes=sizes, moments=REMAINDER) as run:
        for step in range(2):
            run.step(grads_of(sizes, step))
        block = run.engine.materialized([run.mains[0]])
        block.__enter__()
        run.mains[0].add_(1.0)
        run.models[1].mul_(2)
        with pytest.raises(ModelChangedError, match="p1"):
            block.__exit__(None, None, None)


@all_budgets
def test_a_read_that_is_interrupted_changes_nothing(tmp_path, budgets, monkeypatch):
    """The tie bits of mains lie in a moment that is cleared for whoever reads it."""
    numel = 4096
    with streamed(tmp_path, sizes=(numel,), budgets=budgets, moments=REMAINDER) as run:
        run.step([torch.zeros(numel)])
        ties = run.models[0].float()
        ties.view(torch.int32).bitwise_and_(~0x1FFFF).bitwise_or_(0x18000)
        run.engine.write_mains({id(run.mains[0]): ties})
        assert same_bits(run.engine.read_state()["p0"]["main"], ties)

        def interrupt(index, planes):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run.engine.read_planes(interrupt, range(len(run.layout.buckets)))
        assert same_bits(run.engine.read_state()["p0"]["main"], ties)

        def clear_and_interrupt(moments):
            clear_tie_bits(moments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(bucket_state, "clear_tie_bits", clear_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                run.engine.read_state()
        assert same_bits(run.engine.read_state()["p0"]["main"], ties)


def test_gradients_are_put_together_for_one_bucket_at_a_time(tmp_path, monkeypatch):
    sizes = (512,) * 320
    held: dict[str, int] = {"now": 0, "most": 0}
    gathered = Gradients._gathered

    def freed(numel):
        held["now"] -= numel

    def counting(self, run):
        made = gathered(self, run)
        held["now"] += made.numel()
        held["most"] = max(held["most"], held["now"])
        weakref.finalize(made, freed, made.numel())
        return made

    monkeypatch.setattr(Gradients, "_gathered", counting)
    fused = partial(adamw, fused=True)
    with streamed(tmp_path, fused, sizes=sizes, budgets=(LOTS, 0)) as run:
        run.step(grads_of(sizes, 1))
        assert 0 < held["most"] <= max(bucket.numel for bucket in run.layout.buckets)


def test_a_forked_child_unmaps_nothing_that_it_did_not_get():
    """The buffer is not copied into it, and its own mappings may lie there by the time."""
    size = 64 * 2**20
    buffer = HostBuffer(size, torch.device("cpu"))
    pid = os.fork()
    if pid == 0:
        own = [torch.empty(size, dtype=torch.uint8) for _ in range(4)]
        buffer.close()
        for each in own:
            each.fill_(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    buffer.close()

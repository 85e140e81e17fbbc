"""Megatron's asynchronous save: training goes on while a forked process writes the checkpoint.

The writers are held back until training has overwritten everything, and then write what was there
when they were started.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from gds_optimizer.errors import CorruptBucketError
from gds_optimizer.megatron.cpu import replaced
from gds_optimizer.megatron.shards import distributed_optimizers
from gds_optimizer.megatron.tiny_gpt import TinyGptConfig, sync_model_params
from tests.megatron.checkpointing import (
    BUCKET_SHAPED,
    MODEL_SHAPED,
    PLAN,
    Checkpoint,
    Context,
    Load,
    Look,
    Run,
    compare_moments,
    compare_resumed,
    sharded_state,
)
from tests.megatron.harness import compare_records
from tests.megatron.streaming import SMALL_BUCKET_BYTES, Streaming
from tests.support.snapshots import flip

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

EARLY, LATE, STEPS = 2, 4, 7
STREAMING = Streaming(bucket_size=3 * SMALL_BUCKET_BYTES)


def gpt(**options: Any) -> TinyGptConfig:
    return TinyGptConfig(steps=STEPS, layers=1, hidden=48, schedule="changing", **options)


@dataclass(frozen=True)
class Case:
    """A training on some ranks, with state in some form."""

    size: int
    config: TinyGptConfig
    form: tuple[tuple[str, str], ...] = ()


ONE = gpt(inner_optimizer="fused", swiglu=True, mixed_dtype=True)
TWO = gpt(experts=4, overlap=True, ddp_bucket_size=4096)
CASES = {
    "one": Case(1, ONE),
    "two": Case(2, TWO),
    "one-bf16": Case(1, ONE, (("moment_dtype", "bf16"),)),
    "one-remainder": Case(1, ONE, (("main", "auto"),)),
    "two-int8-remainder": Case(2, TWO, (("main", "remainder"), ("moment_dtype", "int8"))),
}
FORMATS = (BUCKET_SHAPED, MODEL_SHAPED)
SAVED = [(case, kind) for case in CASES for kind in FORMATS if case in ("one", "two")]
# One format each: what is decoded is the same for both.
SAVED += [("one-bf16", MODEL_SHAPED), ("one-remainder", BUCKET_SHAPED)]
SAVED += [("two-int8-remainder", MODEL_SHAPED)]


def checkpoint(case: str, kind: str, step: int) -> Checkpoint:
    return Checkpoint(name=f"async-{case}-{kind}-{step}", format=kind)


# ---------------------------------------------------------------------- actions


def gate_of(context: Context) -> Path:
    return context.directory / f"gate-{context.result.notes['name']}"


def writers_held_back(gate: Path) -> contextlib.AbstractContextManager[None]:
    """In processes that are forked inside, writing waits until `gate` exists."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer = filesystem_async.FileSystemWriterAsync
    write, parent = writer.write_preloaded_data, os.getpid()

    @functools.wraps(write)
    def waiting(*args: Any, **options: Any) -> Any:
        assert os.getpid() != parent, "the checkpoint is written by the training process"
        deadline = time.monotonic() + 300
        while not gate.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return write(*args, **options)

    return replaced(writer, write_preloaded_data=staticmethod(waiting))


@dataclass(frozen=True)
class Begin:
    """Note how a run is called, and keep the writers of its checkpoints waiting."""

    name: str

    def __call__(self, context: Context) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        context.result.notes["name"] = self.name
        context.result.notes["queue"] = AsyncCallsQueue()
        held_back = context.result.notes["held back"] = contextlib.ExitStack()
        held_back.enter_context(writers_held_back(gate_of(context)))


@dataclass(frozen=True)
class SaveAsync:
    checkpoint: Checkpoint

    def __call__(self, context: Context) -> None:
        from megatron.core import dist_checkpointing

        path = context.path(self.checkpoint)
        path.mkdir(parents=True, exist_ok=True)
        sync_model_params(context.chunks)
        torch.distributed.barrier()
        state = sharded_state(context.chunks, context.optimizer, self.checkpoint, is_loading=False)
        options: dict[str, Any] = {"async_sharded_save": True}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            options["async_strategy"] = "mcore"
        request = dist_checkpointing.save(state, str(path), **options)
        context.result.notes["queue"].schedule_async_request(request)


@dataclass(frozen=True)
class Finish:
    """Let the writers write, and wait for them."""

    def __call__(self, context: Context) -> None:
        queue = context.result.notes["queue"]
        assert len(queue.async_calls) == 2
        assert queue.maybe_finalize_async_calls(blocking=False) == []
        gate_of(context).touch()
        assert len(queue.maybe_finalize_async_calls(blocking=True)) == 2
        queue.close()
        del context.result.notes["queue"]
        context.result.notes.pop("held back").close()
        torch.distributed.barrier()


@dataclass(frozen=True)
class NoteMaps:
    """How many mappings of bucket files there are, and of ones that have lost their name."""

    when: str

    def __call__(self, context: Context) -> None:
        gc.collect()
        maps = [m for m in Path("/proc/self/maps").read_text().splitlines() if ".bin" in m]
        context.result.notes[f"maps {self.when}"] = len(maps)
        context.result.notes[f"nameless {self.when}"] = sum("(deleted)" in m for m in maps)
        files = context.state_directory.rglob("*.bin")
        context.result.notes[f"files {self.when}"] = len(list(files))
        context.result.notes["buckets"] = sum(
            len(part.engine.layout.buckets)
            for part in distributed_optimizers(context.optimizer)
            if not part.is_stub_optimizer
        )


@dataclass(frozen=True)
class HandOutDamaged:
    """Give a writer a bucket with a wrong bit, which is put right before training goes on.

    Notes what is raised when the next step begins.
    """

    format: str

    def __call__(self, context: Context) -> None:
        engines = [
            part.engine
            for part in distributed_optimizers(context.optimizer)
            if not part.is_stub_optimizer
        ]
        path = engines[-1].store.paths[0]
        engines[-1].settle()
        flip(path, 20)
        state = sharded_state(
            context.chunks,
            context.optimizer,
            checkpoint("damaged", self.format, context.completed),
            is_loading=False,
        )
        for thread in threading.enumerate():
            if thread.name == "checkpoint-check":
                thread.join()
        flip(path, 20)
        del state
        raised = []
        for engine in engines:
            while engine.before_step:
                with pytest.raises(CorruptBucketError) as failure:
                    engine.before_step.pop()()
                raised.append(str(failure.value))
        context.result.notes["raised"] = raised
        context.result.notes["path"] = str(path)


# ---------------------------------------------------------------------- runs


def add(case: str, name: str, **run: Any) -> str:
    options = {"async_save": True, **dict(CASES[case].form)}
    return PLAN.add(
        f"async-{case}/{name}",
        CASES[case].size,
        Run(streaming=STREAMING, stream_options=options, **run),
        slow=True,
    )


def add_runs(case: str, kind: str) -> None:
    config = CASES[case].config
    add(case, f"{kind}/damaged", config=config, actions={EARLY: (HandOutDamaged(kind),)})
    add(
        case,
        kind,
        config=config,
        actions={
            0: (Begin(f"{case}-{kind}"),),
            EARLY: (SaveAsync(checkpoint(case, kind, EARLY)), NoteMaps("saved")),
            LATE: (SaveAsync(checkpoint(case, kind, LATE)), Look()),
            STEPS - 1: (NoteMaps("during"), Finish()),
            STEPS: (NoteMaps("after"),),
        },
    )
    for step in (EARLY, LATE):
        add(
            case,
            f"{kind}/{step}",
            config=replace(config, first_step=step),
            actions={step: (Load(checkpoint(case, kind, step)), Look())},
        )


for each in CASES:
    actions = {EARLY: (Look(),), LATE: (Look(),)}
    add(each, "plain", config=CASES[each].config, actions=actions)
for each, kind in SAVED:
    add_runs(each, kind)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    by_name = PLAN.results_in(tmp_path_factory)
    return lambda case, run: by_name(f"async-{case}/{run}")


@pytest.mark.parametrize(("case", "kind"), SAVED)
def test_training_does_not_notice(results, case, kind):
    """Two saves at once, both still to be written: the bits of a run without."""
    for plain, saved in zip(results(case, "plain"), results(case, kind), strict=True):
        compare_records(plain.record, saved.record)
        compare_moments(plain.moments[LATE], saved.moments[LATE])
        compare_moments(plain.moments[STEPS], saved.moments[STEPS])
        assert not any("must not be used" in line for line in saved.log)


@pytest.mark.parametrize(("case", "kind"), SAVED)
def test_a_wrong_bit_is_not_written_without_a_word(results, case, kind):
    """It is logged, and raised when the next step begins; training is not touched."""
    for plain, damaged in zip(
        results(case, "plain"), results(case, f"{kind}/damaged"), strict=True
    ):
        (message,) = damaged.notes["raised"]
        assert f"must not be used: bucket 0 in {damaged.notes['path']} is not what" in message
        assert [line for line in damaged.log if "must not be used" in line] == [message]
        compare_records(plain.record, damaged.record)
        compare_moments(plain.moments[STEPS], damaged.moments[STEPS])


@pytest.mark.parametrize("step", [EARLY, LATE])
@pytest.mark.parametrize(("case", "kind"), SAVED)
def test_what_was_saved_is_the_state_at_the_save(results, case, kind, step):
    """Though it was written when nothing of it was in the optimizer's files any more."""
    for plain, loaded in zip(results(case, "plain"), results(case, f"{kind}/{step}"), strict=True):
        compare_moments(plain.moments[step], loaded.moments[step])
        compare_resumed(plain, loaded)


@pytest.mark.parametrize(("case", "kind"), SAVED)
def test_files_come_and_go(results, case, kind):
    """The second set stays in use; what only the writers had is gone with them."""
    for result in results(case, kind):
        notes = result.notes
        buckets = notes["buckets"]
        # From the save to the next step there is a spare for every bucket; steps use them up.
        assert notes["files saved"] == 2 * buckets
        assert notes["files during"] == notes["files after"] == buckets
        # Of decoded planes there are files without names, and here all are decoded.
        assert (notes["maps saved"] > 0) == (case != "two-int8-remainder")
        assert notes["nameless saved"] == 0
        assert notes["maps after"] == 0

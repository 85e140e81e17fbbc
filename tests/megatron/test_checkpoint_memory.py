"""Saving and loading hold no copy of the state: not in memory, and not in the page cache after.

One rank keeps more than a GiB of state. Anonymous and shared memory of the process and of all its
children (Megatron's writer forks) is sampled while it saves and loads.
"""

from __future__ import annotations

import ctypes
import gc
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.bench.page_cache import resident_pages
from gds_optimizer.megatron.shards import distributed_optimizers
from gds_optimizer.megatron.tiny_gpt import TinyGptConfig
from tests.megatron import HAS_ALL_FORMS
from tests.megatron.checkpointing import (
    BUCKET_SHAPED,
    MODEL_SHAPED,
    Checkpoint,
    Context,
    Run,
    dist_checkpointing,
    perform,
    sharded_state,
)
from tests.megatron.harness import run_ranks
from tests.megatron.streaming import Streaming

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

MIB = 2**20
BUCKET_BYTES = 24 * MIB
# 98 million parameters. A reader holds the bytes of a tensor or two: none has more than 6 MiB.
CONFIG = TinyGptConfig(
    layers=30, hidden=512, heads=4, vocab=3072, micro_batch=1, steps=3, inner_optimizer="fused"
)
LIMIT_BYTES = 64 * MIB
FORMATS = (MODEL_SHAPED, BUCKET_SHAPED)
# What is decoded for a checkpoint, and encoded of one, is all of it in the second: 4.2 bytes a
# parameter, which are handed out as 12.
FORMS: dict[str, dict[str, str]] = {"fp32": {}}
if HAS_ALL_FORMS:
    FORMS["int8-remainder"] = {"moment_dtype": "int8", "main": "remainder"}


# ---------------------------------------------------------------------- on the rank


def _family(pid: int) -> list[int]:
    """A process and all its descendants that live."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += _family(int(child))
    return found


def _private_bytes() -> dict[str, int] | None:
    """Anonymous and shared memory of this process and each of its descendants.

    RssAnon and RssShmem, but proportional: a forked child's pages that it shares with its parent
    count once, not for each of them.

    Returns:
        None if a process has come or gone meanwhile: what it shared counted for one reader as
        shared by more processes than for the next.
    """
    root = threading.main_thread().native_id or 0
    family = _family(root)
    found = {}
    try:
        for pid in family:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            values = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
            found[f"{pid} {command}"] = 1024 * (int(values["Pss_Anon"]) + int(values["Pss_Shmem"]))
        sizes = [Path(f"/proc/{pid}/statm").read_text().split()[0] for pid in family]
    except (FileNotFoundError, ProcessLookupError, KeyError):
        return None
    # A process that ends has no memory any more, long before it is gone.
    return found if _family(root) == family and "0" not in sizes else None


class Watch:
    """The largest memory use while a block runs, over what it was before."""

    def __enter__(self) -> Watch:
        gc.collect()
        # What the allocator keeps for later would hide as much.
        ctypes.CDLL(None).malloc_trim(0)
        while (before := _private_bytes()) is None:
            pass
        self._before = self._peak = before
        self.samples = 1
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._is_over.wait(0.01):
            self._look()

    def _look(self) -> None:
        now = _private_bytes()
        self.samples += now is not None
        if now is not None and sum(now.values()) > sum(self._peak.values()):
            self._peak = now

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._look()

    @property
    def peak_bytes(self) -> int:
        return sum(self._peak.values()) - sum(self._before.values())

    def describe(self) -> str:
        """Whose memory it was, before and at the peak."""
        return f"{self.samples} samples; before: {self._before}; at the peak: {self._peak}"


def _bucket_files(context: Context) -> list[Path]:
    return [
        path
        for part in distributed_optimizers(context.optimizer)
        for path in part.engine.store.paths
    ]


def note_cached_pages(context: Context) -> None:
    pages = sum(map(resident_pages, _bucket_files(context)))
    context.result.notes[f"cached pages after step {context.completed}"] = pages


def note_size(context: Context) -> None:
    layouts = [part.engine.layout for part in distributed_optimizers(context.optimizer)]
    context.result.notes["numel"] = sum(layout.numel for layout in layouts)
    context.result.notes["state"] = sum(path.stat().st_size for path in _bucket_files(context))


def save_something_small(context: Context) -> None:
    """The first save starts a helper of Megatron's that stays: a process of its own."""
    from megatron.core.dist_checkpointing import ShardedTensor

    path = context.directory / "small"
    path.mkdir()
    tensor = ShardedTensor.from_rank_offsets("small", torch.zeros(4))
    dist_checkpointing().save({"small": tensor}, str(path))


@dataclass(frozen=True)
class WatchedSave:
    """Only the optimizer's part: Megatron's writer copies the model's."""

    checkpoint: Checkpoint

    def __call__(self, context: Context) -> None:
        path = context.path(self.checkpoint)
        path.mkdir(parents=True)
        with Watch() as watch:
            state = sharded_state(
                context.chunks, context.optimizer, self.checkpoint, is_loading=False
            )
            dist_checkpointing().save({"optimizer": state["optimizer"]}, str(path))
            del state
        context.result.notes[f"save {self.checkpoint.format}"] = watch.peak_bytes
        context.result.notes[f"samples save {self.checkpoint.format}"] = watch.samples
        context.result.notes[f"whose save {self.checkpoint.format}"] = watch.describe()


@dataclass(frozen=True)
class WatchedLoad:
    """Afterwards the checkpoint is removed."""

    checkpoint: Checkpoint

    def __call__(self, context: Context) -> None:
        path = context.path(self.checkpoint)
        with Watch() as watch:
            state = sharded_state(
                context.chunks, context.optimizer, self.checkpoint, is_loading=True
            )
            loaded = dist_checkpointing().load({"optimizer": state["optimizer"]}, str(path))
            context.optimizer.load_state_dict(loaded["optimizer"])
            del state, loaded
        context.result.notes[f"load {self.checkpoint.format}"] = watch.peak_bytes
        context.result.notes[f"samples load {self.checkpoint.format}"] = watch.samples
        context.result.notes[f"whose load {self.checkpoint.format}"] = watch.describe()
        shutil.rmtree(path)


def measure(directory: str, form: str) -> dict[str, Any]:
    checkpoints = [Checkpoint(name=kind, format=kind) for kind in FORMATS]
    run = Run(
        config=CONFIG,
        streaming=Streaming(bucket_size=BUCKET_BYTES, slots=2, init="lazy"),
        stream_options=FORMS[form],
        actions={
            1: (note_size, save_something_small, *map(WatchedSave, checkpoints)),
            2: (note_cached_pages, *map(WatchedLoad, checkpoints)),
            3: (note_cached_pages,),
        },
        looks_at_end=False,
    )
    result = perform(run, Path(directory))
    assert not result.error, result.error
    return result.notes


# ---------------------------------------------------------------------- tests


@pytest.fixture(scope="module", params=FORMS)
def measured(request, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("memory"))
    # Not a fork: what one shares with its parent is only partly counted.
    (notes,) = run_ranks(1, measure, directory, request.param, timeout_s=600)
    return {**notes, "form": request.param}


def test_the_state_is_large(measured):
    assert 12 * measured["numel"] > 2**30
    per_param = 12 if measured["form"] == "fp32" else 4.15
    assert per_param <= measured["state"] / measured["numel"] < 1.01 * per_param


@pytest.mark.parametrize(
    "what", [f"{verb} {kind}" for verb in ("save", "load") for kind in FORMATS]
)
def test_memory_is_bounded(measured, what):
    assert measured[f"samples {what}"] >= 4
    assert measured[what] <= LIMIT_BYTES, measured[f"whose {what}"]


@pytest.mark.parametrize("step", [2, 3], ids=["saving", "loading"])
def test_nothing_is_cached_after_the_step_that_follows(measured, step):
    assert measured[f"cached pages after step {step}"] == 0

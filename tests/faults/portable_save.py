"""Dies in the middle of saving a checkpoint in one of Megatron's formats, again and again.

Run as `python -m tests.faults.portable_save DIRECTORY POINTS FORM`, where FORM is JSON: settings of
`StreamConfig`. megatron-core is imported once, and everything else happens in forked children,
those of one format beside those of the other. Prints one JSON document for the test to look at.
"""

from __future__ import annotations

import builtins
import gc
import hashlib
import importlib
import io
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tests.megatron  # noqa: F401 - puts the version under test on the path
from gds_optimizer.config import StreamConfig
from gds_optimizer.megatron import streamed_optimizer
from gds_optimizer.megatron.cpu import import_megatron
from gds_optimizer.megatron.shards import collect_streamed_state
from gds_optimizer.megatron.tiny_gpt import TinyGptConfig, run_training
from gds_optimizer.snapshot_read import verify
from tests.megatron.checkpointing import BUCKET_SHAPED, MODEL_SHAPED, Checkpoint, load, save
from tests.megatron.streaming import SMALL_BUCKET_BYTES, close
from tests.support.killing import Countdown, killed_at

import_megatron()
filesystem_async = importlib.import_module(
    "megatron.core.dist_checkpointing.strategies.filesystem_async"
)

STEPS = 3
FIRST = {
    kind: Checkpoint(name=f"first-{kind}", format=kind) for kind in (BUCKET_SHAPED, MODEL_SHAPED)
}
SECOND = {kind: Checkpoint(name=f"second-{kind}", format=kind) for kind in FIRST}
FORM: dict[str, str] = {}


def digest(optimizer: Any) -> str:
    text = hashlib.sha256()
    for shard, state in sorted(collect_streamed_state(optimizer).items()):
        for key, value in sorted(state.items()):
            data = (
                value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
            )
            text.update(f"{shard} {key} {hashlib.sha256(data).hexdigest()}\n".encode())
    return text.hexdigest()


def run(directory: Path, actions: dict[int, Callable[[list[Any], Any], None]]) -> None:
    """Train in `directory`; actions by number of completed steps."""
    made: list[Any] = []
    config = TinyGptConfig(
        layers=1, hidden=48, steps=STEPS, inner_optimizer="fused", mixed_dtype=True
    )
    stream = StreamConfig(
        directories=(directory / "state",), bucket_size=3 * SMALL_BUCKET_BYTES, **FORM
    )

    def act(completed: int, chunks: list[Any], optimizer: Any) -> None:
        actions.get(completed, lambda *unused: None)(chunks, optimizer)

    def after_build(chunks: list[Any], optimizer: Any) -> None:
        made.append(optimizer)
        act(0, chunks, optimizer)

    run_training(
        config,
        optimizer_context=lambda: streamed_optimizer(stream),
        after_build=after_build,
        after_step=lambda step, chunks, optimizer: act(step + 1, chunks, optimizer),
    )
    for optimizer in made:
        close(optimizer)


def save_twice(directory: Path, kind: str, countdown: Countdown, *, is_last: bool) -> None:
    """A checkpoint and a snapshot after the first step, and a checkpoint after the second.

    The last death is behind that. It is not counted: writers, which are forked, count on from
    where they were, and come to more than there are here.
    """
    from gds_optimizer.megatron import snapshot

    def first(chunks: list[Any], optimizer: Any) -> None:
        save(directory / FIRST[kind].name, chunks, optimizer, FIRST[kind])
        (directory / "digest").write_text(digest(optimizer))
        snapshot(optimizer, directory / "snapshot")

    def second(chunks: list[Any], optimizer: Any) -> None:
        countdown.arm()
        save(directory / SECOND[kind].name, chunks, optimizer, SECOND[kind])
        countdown.disarm()
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    run(directory, {1: first, 2: second})


def is_declared(path: Path) -> bool:
    """Whether a directory says that it is a checkpoint.

    megatron-core writes what says so in place, as the last thing; an empty one makes it refuse.
    """
    try:
        json.loads((path / "metadata.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return True


def look(directory: Path, kind: str, found: Path) -> None:
    """What a new run in the same place finds: digests of what it can load."""
    from gds_optimizer.megatron import restore

    seen: dict[str, Any] = {}

    def load_all(chunks: list[Any], optimizer: Any) -> None:
        for checkpoint in (FIRST[kind], SECOND[kind]):
            path = directory / checkpoint.name
            seen[f"{checkpoint.name} is declared"] = is_declared(path)
            if seen[f"{checkpoint.name} is declared"]:
                load(path, chunks, optimizer, checkpoint)
                seen[checkpoint.name] = digest(optimizer)
        seen["damages"] = verify(directory / "snapshot")
        seen["snapshot is of"] = restore(optimizer, directory / "snapshot")
        seen["snapshot"] = digest(optimizer)

        if not seen[f"{SECOND[kind].name} is declared"]:
            # What is left of the save that died is in nobody's way.
            path = directory / SECOND[kind].name
            save(path, chunks, optimizer, SECOND[kind])
            load(path, chunks, optimizer, SECOND[kind])
            seen["saved again"] = digest(optimizer)

    run(directory, {0: load_all})
    seen["was"] = (directory / "digest").read_text()
    seen["left"] = [str(p) for p in (directory / "state").rglob("*") if p.is_file()]
    found.write_text(json.dumps(seen))


def deaths(base: Path, kind: str, points: int) -> list[dict[str, Any]]:
    """Save in one format without a death, and with one at each of `points`; what is found then."""
    directory, found = base / kind, base / f"found-{kind}"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    # Writers report through a helper process that megatron-core spawns for everyone who saves;
    # the helpers of those who die would stay.
    gc.collect()
    gc.freeze()  # megatron-core collects garbage at every turn
    helper = multiprocessing.get_context("fork").Manager()

    def work(countdown: Countdown, *, is_last: bool = False) -> None:
        filesystem_async._results_queue = helper.Queue()
        countdown.count(builtins, "open")
        countdown.count(io, "open")  # of paths
        save_twice(directory, kind, countdown, is_last=is_last)

    def look_after(countdown: Countdown) -> None:
        filesystem_async._results_queue = helper.Queue()
        look(directory, kind, found)

    results: list[dict[str, Any]] = []

    def die(at: int, *, is_last: bool = False) -> int | None:
        shutil.rmtree(directory, ignore_errors=True)
        (directory / "state").mkdir(parents=True)
        found.unlink(missing_ok=True)
        calls = killed_at(at, partial(work, is_last=is_last))
        killed_at(-1, look_after)
        seen = json.loads(found.read_text())
        results.append({"kind": kind, "at": at, "died": calls is None, **seen})
        return calls

    calls = die(-1)
    assert calls is not None
    for number in range(points - 1):
        die(calls * number // (points - 1))
    die(-1, is_last=True)
    helper.shutdown()
    return results


def main() -> None:
    base, points = Path(sys.argv[1]), int(sys.argv[2])
    FORM.update(json.loads(sys.argv[3]))
    with ProcessPoolExecutor(len(FIRST), mp_context=multiprocessing.get_context("fork")) as pool:
        each = [pool.submit(deaths, base, kind, points) for kind in FIRST]
        print(json.dumps([result for future in each for result in future.result()]))


if __name__ == "__main__":
    main()

"""Optimizers to take snapshots of, what there is to compare of them, and ranks that are threads."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.engine import Engine
from gds_optimizer.snapshot import Placement
from gds_optimizer.snapshots import restore_snapshot, take_snapshot
from tests.support.engines import (
    SIZES,
    OptimizerClass,
    StreamedOptimizer,
    adamw,
    first_values,
    grads_of,
    same_bits,
)

# Parameters that are fp32 themselves, one that never has a gradient, one that gets its first late.
NATIVE = (1, 6)
FROZEN = (2,)
LATE, LATE_FROM = (3,), 5
GROUPS = {4: {"lr": 3e-3, "weight_decay": 0.1}}
LOTS = 2**30
# Bytes on the device and in host memory. Of some twenty buckets of 16 KiB or less: a few of each
# kind.
MIX = (50_001, 60_001)
BUDGETS = {"none": (0, 0), "device": (LOTS, 0), "host": (0, LOTS), "mix": MIX}


def build(
    directories: Path | Sequence[Path],
    make: OptimizerClass | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    native: Sequence[int] = NATIVE,
    groups: Mapping[int, Mapping[str, Any]] | None = GROUPS,
    **options: Any,
) -> StreamedOptimizer:
    models = first_values(sizes)
    models = [v.float() if index in native else v for index, v in enumerate(models)]
    return StreamedOptimizer(
        directories, make or adamw, models, groups=groups, native=native, **options
    )


def root(tmp_path: Path, name: str = "state") -> Path:
    """A directory for state, made where needed."""
    directory = tmp_path / name
    directory.mkdir(exist_ok=True)
    return directory


def take(optimizer: StreamedOptimizer, path: Path, **options: Any) -> Path:
    """A snapshot of one optimizer; returns its path."""
    take_snapshot({"opt0": optimizer.engine}, path, **options)
    return path


def restore(optimizer: StreamedOptimizer, path: Path) -> int:
    """Restore what `take` took; returns its step."""
    return restore_snapshot({"opt0": optimizer.engine}, path)


@contextlib.contextmanager
def built(*args: Any, **options: Any) -> Iterator[StreamedOptimizer]:
    """Closed on leaving, whatever happens."""
    made = build(*args, **options)
    try:
        yield made
    finally:
        made.close()


def train(optimizer: StreamedOptimizer, start: int, stop: int) -> None:
    """Steps `start` to `stop`, each with a learning rate and gradients of its own."""
    sizes = [model.numel() for model in optimizer.models]
    for step in range(start, stop):
        optimizer.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        optimizer.step(grads_of(sizes, step, (*FROZEN, *(LATE if step < LATE_FROM else ()))))


def everything(optimizer: StreamedOptimizer) -> dict[str, Any]:
    """A copy of models, mains, moments, counters, options and the number of steps."""
    found: dict[str, Any] = {"steps": optimizer.engine.steps}
    for index, model in enumerate(optimizer.models):
        found[f"model of p{index}"] = model.detach().clone()
    for shard, planes in optimizer.engine.read_state().items():
        found |= {f"{key} of {shard}": value for key, value in planes.items()}
    for number, group in enumerate(optimizer.optimizer.param_groups):
        found |= {f"{k} of group {number}": v for k, v in group.items() if k != "params"}
    # What is in no bucket, and what is kept of shards that have no state.
    for shard, key, value in optimizer.engine.resident_tensors():
        found[f"resident {key} of {shard}"] = value.clone()
    for shard, has_state, scalars in optimizer.engine.shard_scalars():
        found[f"has_state of {shard}"] = has_state
        found |= {f"scalar {key} of {shard}": value for key, value in scalars.items()}
    return found


def compare(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    assert wanted.keys() == found.keys(), sorted(wanted.keys() ^ found.keys())
    for what, value in wanted.items():
        same = (
            same_bits(value, found[what])
            if isinstance(value, torch.Tensor)
            else (type(value), value) == (type(found[what]), found[what])
        )
        assert same, f"{what}: wanted {value!r}, got {found[what]!r}"


def hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory, by name."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Change one bit of a file in place."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def inodes(paths: Sequence[Path]) -> list[int]:
    return [path.stat().st_ino for path in paths]


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# ---------------------------------------------------------------------- ranks


class Ranks:
    """What ranks that are threads of this process gather through."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._values: list[Any] = [None] * world_size

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return gather

    def run(self, action: Callable[[int], Any]) -> list[Any]:
        """Call `action(rank)` in a thread for each rank: what each returned or raised."""
        outcomes: list[Any] = [None] * self.world_size

        def call(rank: int) -> None:
            try:
                outcomes[rank] = action(rank)
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                outcomes[rank] = error
                if not isinstance(error, Exception):
                    self._barrier.abort()

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return outcomes


class World:
    """The same parameters, each cut into a range for every data-parallel rank.

    Rank `r` of `n` owns elements [numel r / n, numel (r + 1) / n) of each; a parameter without
    elements belongs to rank 0.
    """

    def __init__(
        self,
        directory: Path,
        world_size: int,
        make: OptimizerClass | None = None,
        *,
        sizes: Sequence[int] = SIZES,
        parts: Sequence[str] = ("opt0",),
        **options: Any,
    ) -> None:
        self.sizes, self.world_size = list(sizes), world_size
        self.ranks = Ranks(world_size)
        self.placements = [
            Placement(
                rank=rank,
                world_size=world_size,
                coordinates={name: {"model": 0, "dp": rank} for name in parts},
                gather=self.ranks.gather(rank),
            )
            for rank in range(world_size)
        ]
        self.optimizers: list[dict[str, StreamedOptimizer]] = [
            {name: self._build(directory, make or adamw, rank, name, **options) for name in parts}
            for rank in range(world_size)
        ]

    def _owned(self, rank: int) -> list[tuple[int, int, int]]:
        """(parameter, start, end) of what a rank owns."""
        owned = []
        for index, size in enumerate(self.sizes):
            start = size * rank // self.world_size
            end = size * (rank + 1) // self.world_size
            if start < end or (not size and not rank):
                owned.append((index, start, end))
        return owned

    def _build(
        self, directory: Path, make: OptimizerClass, rank: int, name: str, **options: Any
    ) -> StreamedOptimizer:
        whole = first_values(self.sizes)
        owned = self._owned(rank)
        models = [
            (whole[i].float() if i in NATIVE else whole[i])[start:end].clone()
            for i, start, end in owned
        ]
        return StreamedOptimizer(
            directory,
            make,
            models,
            native=[place for place, (i, _, _) in enumerate(owned) if i in NATIVE],
            name=f"rank{rank:05d}/{name}",
            names=[f"{name}/p{i}[{start}:{end}]" for i, start, end in owned],
            **options,
        )

    def engines(self, rank: int) -> dict[str, Engine]:
        return {name: each.engine for name, each in self.optimizers[rank].items()}

    def train(self, start: int, stop: int) -> None:
        for rank, optimizers in enumerate(self.optimizers):
            for step in range(start, stop):
                whole = grads_of(self.sizes, step, FROZEN)
                for optimizer in optimizers.values():
                    optimizer.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
                    optimizer.step(
                        [
                            None if whole[i] is None else whole[i][low:high]
                            for i, low, high in self._owned(rank)
                        ]
                    )

    def everything(self) -> dict[str, Any]:
        """Whole tensors put together from all ranks; counters must agree where they meet."""
        found: dict[str, Any] = {}
        for rank, optimizers in enumerate(self.optimizers):
            for name, optimizer in optimizers.items():
                state = optimizer.engine.read_state()
                for (index, start, end), model in zip(
                    self._owned(rank), optimizer.models, strict=True
                ):
                    values = {"model": model, **state[f"{name}/p{index}[{start}:{end}]"]}
                    for key, value in values.items():
                        what = f"{name} {key} of p{index}"
                        if isinstance(value, torch.Tensor) and value.dim():
                            whole = torch.zeros(self.sizes[index], dtype=value.dtype)
                            found.setdefault(what, whole)[start:end] = value
                        else:
                            assert same_bits(found.setdefault(what, value), value), what
                for number, group in enumerate(optimizer.optimizer.param_groups):
                    for key in group.keys() - {"params"}:
                        what = f"{name} {key} of group {number}"
                        assert found.setdefault(what, group[key]) == group[key], what
                steps = found.setdefault(f"{name} steps", optimizer.engine.steps)
                assert steps == optimizer.engine.steps
        return found

    def together(self, action: Callable[[dict[str, Engine], Placement], Any]) -> list[Any]:
        """Call `action(engines, placement)` on every rank: what each returned or raised."""
        return self.ranks.run(lambda rank: action(self.engines(rank), self.placements[rank]))

    def close(self) -> None:
        for optimizers in self.optimizers:
            for optimizer in optimizers.values():
                optimizer.close()


@contextlib.contextmanager
def world(*args: Any, **options: Any) -> Iterator[World]:
    made = World(*args, **options)
    try:
        yield made
    finally:
        made.close()


def all_well(outcomes: Sequence[Any]) -> list[Any]:
    """Raise the first exception among the outcomes."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return list(outcomes)

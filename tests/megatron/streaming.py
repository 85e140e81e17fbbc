"""What the ranks of the bit-identity tests run: a training resident, then the same one streamed."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed

from gds_optimizer.config import StreamConfig
from gds_optimizer.megatron import attach, streamed_optimizer
from gds_optimizer.megatron.shards import (
    collect_resident_state,
    collect_streamed_state,
    distributed_optimizers,
)
from gds_optimizer.megatron.tiny_gpt import TinyGptConfig, TrainingRecord, run_training
from gds_optimizer.stepper import Stepper
from tests.megatron.harness import compare_records, compare_states
from tests.megatron.kept_groups import groups_kept, paths_tried_once

# The smallest bucket holds 1024 elements of 12 bytes.
SMALL_BUCKET_BYTES = 12 * 1024


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """How a configuration is streamed, apart from the directory."""

    bucket_size: int = SMALL_BUCKET_BYTES
    slots: int = 3
    init: str = "auto"
    io: str = "auto"
    hbm_budget: int = 0
    host_budget: int = 0
    main: str = "fp32"
    attach: bool = False
    """Build the optimizer resident and attach to it, instead of building it streamed."""
    states_at: tuple[int, ...] = (-1,)
    """Steps after which mains, moments and counters are compared; -1 is the last."""


@dataclass
class Comparison:
    """What one rank found."""

    error: str = ""
    resident: TrainingRecord | None = None
    bucket_count: int = 0
    split_shards: int = 0
    homes: set[str] = field(default_factory=set)
    """Where buckets live: "device", "host", "nvme"."""
    main_codecs: set[str] = field(default_factory=set)
    pieces: int = 0
    stepped_tensors: int = 0
    """How many tensors the inner optimizers stepped for those pieces in the last step."""
    leftovers: list[str] = field(default_factory=list)


def close(optimizer: Any) -> None:
    for part in distributed_optimizers(optimizer):
        if not part.is_stub_optimizer:
            part.close()


def _homes(engine: Any) -> set[str]:
    in_memory = engine.store.in_memory
    homes = {"device" if file.stays_on_device else "host" for file in in_memory.values()}
    return homes | ({"nvme"} if len(in_memory) < len(engine.layout.buckets) else set())


def _collector(
    steps: int, at: tuple[int, ...], collect: Callable[[Any], Any], into: list[Any]
) -> Callable[[int, list[Any], Any], None]:
    wanted = {step % steps for step in at}

    def after_step(step: int, chunks: list[Any], optimizer: Any) -> None:
        if step in wanted:
            into.append(collect(optimizer))

    return after_step


def train_streamed(
    config: TinyGptConfig,
    streaming: Streaming,
    directory: Path,
    comparison: Comparison,
    states: list[Any],
) -> TrainingRecord:
    stream_config = StreamConfig(
        directories=(directory,),
        bucket_size=streaming.bucket_size,
        slots=streaming.slots,
        init=streaming.init,
        io=streaming.io,
        hbm_budget=streaming.hbm_budget,
        host_budget=streaming.host_budget,
        main=streaming.main,
    )
    kept: list[Any] = []

    def after_build(chunks: list[Any], optimizer: Any) -> None:
        if streaming.attach:
            attach(optimizer, stream_config)
        kept.append(optimizer)
        for part in distributed_optimizers(optimizer):
            if part.is_stub_optimizer or part.engine is None:
                continue
            layout = part.engine.layout
            comparison.homes |= _homes(part.engine)
            comparison.bucket_count += len(layout.buckets)
            comparison.main_codecs |= {
                plane.codec
                for space in layout.spaces
                for plane in space.planes
                if plane.name == "main"
            }
            pieces = [(b.space, p.shard) for b in layout.buckets for p in b.pieces]
            comparison.pieces += len(pieces)
            comparison.split_shards += sum(pieces.count(piece) > 1 for piece in set(pieces))

    def context() -> contextlib.AbstractContextManager[Any]:
        if streaming.attach:
            return contextlib.nullcontext()
        return streamed_optimizer(stream_config)

    collect = _collector(config.steps, streaming.states_at, collect_streamed_state, states)
    original = Stepper.run

    def counting(stepper: Stepper, pieces: Any) -> Any:
        comparison.stepped_tensors += len(pieces)
        return original(stepper, pieces)

    def after_step(step: int, chunks: list[Any], optimizer: Any) -> None:
        collect(step, chunks, optimizer)
        if step < config.steps - 1:
            comparison.stepped_tensors = 0

    Stepper.run = counting  # type: ignore[method-assign]
    try:
        return run_training(
            config,
            optimizer_context=context,
            after_build=after_build,
            after_step=after_step,
        )
    finally:
        Stepper.run = original  # type: ignore[method-assign]
        for optimizer in kept:
            close(optimizer)


def compare(config: TinyGptConfig, streaming: Streaming, directory: Path) -> Comparison:
    comparison = Comparison()
    try:
        wanted: list[Any] = []
        comparison.resident = run_training(
            config,
            after_step=_collector(
                config.steps, streaming.states_at, collect_resident_state, wanted
            ),
        )
        found: list[Any] = []
        streamed = train_streamed(config, streaming, directory, comparison, found)
        compare_records(comparison.resident, streamed)
        assert len(wanted) == len(found) == len(streaming.states_at)
        for state_wanted, state_found in zip(wanted, found, strict=True):
            compare_states(state_wanted, state_found)
        rank = f"rank{comparison.resident.rank:05d}"
        # `rglob` fails where another rank is just removing its own.
        comparison.leftovers = sorted(
            str(path)
            for folder, folders, files in os.walk(directory)
            for path in (Path(folder, name) for name in folders + files)
            if rank in str(path)
        )
    except Exception:  # reported by the test of this configuration
        if torch.distributed.get_world_size() > 1:
            raise  # the other ranks wait for this one, and only its end frees them
        comparison.error = traceback.format_exc()
    return comparison


def compare_all(
    cases: dict[str, tuple[TinyGptConfig, Streaming]], directory: str
) -> dict[str, Comparison]:
    """On a rank: every case in turn, those of the same process groups together."""
    os.makedirs(directory, exist_ok=True)
    with groups_kept() as groups, paths_tried_once():
        return {
            name: compare(config, streaming, Path(directory))
            for name, (config, streaming) in sorted(
                cases.items(), key=lambda case: groups.wanted(case[1][0])
            )
        }

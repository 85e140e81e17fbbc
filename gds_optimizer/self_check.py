"""A rehearsal on a small shard: does this optimizer give the same bits streamed as resident?

Our tests cover certain optimizer classes and framework versions. For any other one, a copy of the
optimizer steps a shard of a few thousand elements twice: whole and resident, and cut into buckets
that travel to the real directory and back.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from gds_optimizer.config import StreamConfig
from gds_optimizer.engine import Engine
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.evicted import evicted_like
from gds_optimizer.io import IoBackend
from gds_optimizer.plan import MAIN_PLANE, Binding, plan_engine
from gds_optimizer.slots import SlotPool
from gds_optimizer.stepper import copy_value, undecorated_step
from gds_optimizer.store import Store

logger = logging.getLogger(__name__)

COVERED_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizer classes whose streamed steps our own tests compare with resident ones."""

_NUMEL = 5003
_BUCKET_BYTES = 12 * 2048
_STEPS = 3


def _rehearsal_copy(
    optimizer: torch.optim.Optimizer, group: int, main: torch.Tensor
) -> torch.optim.Optimizer:
    """An optimizer of the same class, attributes and options with `main` as its only parameter."""
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)
    options = {k: copy_value(v) for k, v in optimizer.param_groups[group].items() if k != "params"}
    copy.param_groups = [{**options, "params": [main]}]
    copy.state = defaultdict(dict)
    return copy


@contextlib.contextmanager
def _small_engine(
    optimizer: torch.optim.Optimizer,
    binding: Binding,
    config: StreamConfig,
    backend: IoBackend,
    rank: int,
) -> Iterator[Engine]:
    plan = plan_engine(optimizer, [binding], _BUCKET_BYTES, main=config.main)
    with contextlib.ExitStack() as undo:
        pool = SlotPool(
            2, plan.layout.max_file_bytes, backend, scratch_bytes=plan.layout.max_scratch_bytes
        )
        undo.callback(pool.close)
        store = Store(plan.layout, config.directories, f"rank{rank:05d}/self-check", backend)
        undo.callback(store.close)
        engine = Engine(plan, pool, store, timeout_s=config.io_timeout_s)
        undo.callback(engine.close)
        yield engine


@torch.no_grad()
def _first_difference(
    optimizer: torch.optim.Optimizer,
    group: int,
    config: StreamConfig,
    backend: IoBackend,
    rank: int,
) -> str:
    """What differs after a few steps; empty if nothing does."""
    device = backend.device
    generator = torch.Generator().manual_seed(1234)
    start = torch.randn(_NUMEL, generator=generator).to(torch.bfloat16).to(device)
    resident_main = start.float()
    resident = _rehearsal_copy(optimizer, group, resident_main)
    model = start.clone()
    evicted = evicted_like(start, dtype=torch.float32, name="the rehearsal's main parameter")
    streamed = _rehearsal_copy(optimizer, group, evicted)
    binding = Binding("rehearsal", evicted, model)
    with _small_engine(streamed, binding, config, backend, rank) as engine:
        for _ in range(_STEPS):
            grad = torch.randn(_NUMEL, generator=generator).to(device)
            resident_main.grad, evicted.grad = grad, grad.clone()
            undecorated_step(type(resident))(resident)
            engine.step()
        found = engine.read_state()["rehearsal"]
    wanted: dict[str, Any] = {MAIN_PLANE: resident_main, **resident.state[resident_main]}
    for name, value in wanted.items():
        if name not in found:
            return f"{name} is missing"
        a = torch.as_tensor(value).detach().cpu().reshape(-1)
        b = torch.as_tensor(found[name]).detach().cpu().reshape(-1)
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{name}: wanted {a.dtype} {tuple(a.shape)}, got {b.dtype} {tuple(b.shape)}"
        different = (a.view(torch.uint8) != b.view(torch.uint8)).view(a.numel(), -1).any(1)
        if different.any():
            at = int(different.nonzero()[0])
            return f"{name}[{at}]: wanted {a[at].item()!r}, got {b[at].item()!r}"
    if not torch.equal(model, resident_main.to(model.dtype)):
        return "the model's parameter"
    return ""


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    config: StreamConfig,
    backend: IoBackend,
    rank: int,
    *,
    covered: bool = True,
) -> None:
    """Rehearse streaming `optimizer` where `config.self_check` asks for it.

    Args:
        optimizer: read, not changed.
        config: `self_check` is "auto" (rehearse what our tests do not cover), "always" or "never".
        backend: moves the bytes of the rehearsal.
        rank: global rank, for the scratch directory.
        covered: whether our tests cover the framework that built the optimizer.

    Raises:
        UnsupportedError: the bits differ.
    """
    known = covered and type(optimizer) in COVERED_CLASSES
    if config.self_check == "never" or (config.self_check == "auto" and known):
        return
    groups = [i for i, group in enumerate(optimizer.param_groups) if group["params"]]
    if not groups:
        return
    # A small transfer needs no more room than it takes.
    small = replace(config, bucket_size=_BUCKET_BYTES)
    if type(optimizer) not in COVERED_CLASSES:
        reason = "a class that our tests do not cover"
    elif not covered:
        reason = "in a framework that our tests do not cover"
    else:
        reason = "asked for"
    difference = _first_difference(optimizer, groups[0], small, backend, rank)
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    if difference:
        raise UnsupportedError(
            f"a rehearsal of {kind} on {_NUMEL} elements came out different streamed and resident "
            f"after {_STEPS} steps ({difference}): it cannot be streamed bit for bit here"
        )
    logger.info(
        "rank %d: a rehearsal of %s (%s) in %d steps came out bit-identical",
        rank,
        kind,
        reason,
        _STEPS,
    )

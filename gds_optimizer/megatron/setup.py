"""Ways into Megatron: around the construction of an optimizer, or after it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed

from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.evicted import EvictedTensor, restore_
from gds_optimizer.megatron.optimizer import bind_shards, is_streamed, streamed_class
from gds_optimizer.megatron.refusals import refuse_unsupported
from gds_optimizer.megatron.shards import distributed_optimizers
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.telemetry import show_log

logger = logging.getLogger(__name__)

COVERED_VERSIONS = ("0.16.1", "0.19.2")
"""megatron-core releases that the test suite runs against."""


def _version_is_covered() -> bool:
    import megatron.core

    return megatron.core.__version__.split("+")[0] in COVERED_VERSIONS


@functools.lru_cache(maxsize=1)
def _warn_of_version(version: str) -> None:
    logger.warning(
        "megatron-core %s is not among the versions that are tested (%s): a rehearsal on a small "
        "shard is compared bit for bit before training starts",
        version,
        ", ".join(COVERED_VERSIONS),
    )


def _start(optimizers: list[tuple[int, Any]], config: StreamConfig) -> Runtime | None:
    """Bind, build and connect. `optimizers` are (place in the chain, optimizer with parameters)."""
    import megatron.core

    covered = _version_is_covered()
    if not covered:
        _warn_of_version(megatron.core.__version__)
    parts = []
    device = torch.device("cpu")
    for index, optimizer in optimizers:
        bindings = bind_shards(optimizer, index)
        if not bindings:
            continue
        device = bindings[0].main.device
        parts.append(Part(optimizer.optimizer, bindings, f"opt{index}", covered))
    if not parts:
        return None
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    runtime = Runtime.build(parts, config, device=device, rank=rank, eager=config.init != "lazy")
    engines = dict(zip((id(part.optimizer) for part in parts), runtime.engines, strict=True))
    for _, optimizer in optimizers:
        engine = engines.get(id(optimizer.optimizer))
        if engine is not None:
            optimizer.start_streaming(runtime, engine)
    return runtime


@contextlib.contextmanager
def streamed_optimizer(config: StreamConfig | None) -> Iterator[None]:
    """Inside, `get_megatron_optimizer` builds optimizers whose state is on disk.

        with streamed_optimizer(StreamConfig(directories=("/nvme0", "/nvme1"))):
            optimizer = get_megatron_optimizer(optimizer_config, model_chunks)

    The fp32 main parameters never exist on the device. On leaving, the files are reserved and
    (unless `config.init` is "lazy") the first mains written, bucket by bucket.

    Args:
        config: the settings; None does nothing, so that a flag can decide.

    Raises:
        UnsupportedError: an option that does not go with streaming is on, or no
            `DistributedOptimizer` was built inside.
        GdsOptimizerError: setting up failed; no file, descriptor or patch stays behind.
    """
    if config is None:
        yield
        return
    import megatron.core.optimizer as module

    show_log()
    original = module.DistributedOptimizer
    built: list[Any] = []

    class Recorded(streamed_class(original)):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.__class__ = streamed_class(original)  # the class that outlives this block
            built.append(self)

    module.DistributedOptimizer = Recorded
    try:
        with _layer_wise_noted() as saw_layer_wise:
            yield
    finally:
        module.DistributedOptimizer = original
    if not built and not saw_layer_wise():
        raise UnsupportedError(
            "no DistributedOptimizer was built: --stream-optimizer-state-to-disk needs "
            "--use-distributed-optimizer"
        )
    if saw_layer_wise():
        logger.info(
            "a layer-wise optimizer (Muon and the like) keeps its state where it always does; "
            "only DistributedOptimizer state is streamed"
        )
    _start([(i, o) for i, o in enumerate(built) if not o.is_stub_optimizer], config)


@contextlib.contextmanager
def _layer_wise_noted() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether a layer-wise optimizer was built inside."""
    try:
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    except ImportError:
        yield lambda: False
        return
    seen: list[bool] = []
    original = LayerWiseDistributedOptimizer.__init__

    @functools.wraps(original)
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(True)
        original(self, *args, **kwargs)

    LayerWiseDistributedOptimizer.__init__ = noting
    try:
        yield lambda: bool(seen)
    finally:
        LayerWiseDistributedOptimizer.__init__ = original


def attach(optimizer: Any, config: StreamConfig) -> Any:
    """Stream the state of an optimizer that a framework has built already.

    Values are kept: mains, moments and counters continue from where they are. Mains whose memory
    was released (or never taken) start from the model's parameters. Construction was not bounded,
    then; where that matters use `streamed_optimizer`.

    Args:
        optimizer: a `ChainedOptimizer` or a `DistributedOptimizer`. Other members of a chain
            (layer-wise optimizers) are left as they are.
        config: the settings. `init="lazy"` writes nothing before the first step unless there are
            values to keep.

    Returns:
        `optimizer`, changed in place.

    Raises:
        UnsupportedError: an option that does not go with streaming is on, or there is no
            `DistributedOptimizer` in the chain.
        GdsOptimizerError: setting up failed; the optimizer is as it was.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    show_log()
    members = [
        (index, member)
        for index, member in enumerate(distributed_optimizers(optimizer))
        if isinstance(member, DistributedOptimizer)
    ]
    if not members:
        raise UnsupportedError(
            f"{type(optimizer).__name__} has no DistributedOptimizer whose state could be "
            "streamed: pass --use-distributed-optimizer"
        )
    others = len(distributed_optimizers(optimizer)) - len(members)
    if others:
        logger.info("%d other optimizers of the chain keep their state where it is", others)
    members = [(index, member) for index, member in members if not member.is_stub_optimizer]
    for _, member in members:
        if is_streamed(member):
            raise UnsupportedError("the optimizer is streamed already")
        params = [param for chunk in member.model_chunks for param in chunk.parameters()]
        refuse_unsupported(member.config, member.ddp_config, params)
    with contextlib.ExitStack() as undo:
        resident_bytes = 0
        for _, member in members:
            undo.callback(_remember(member))
            resident_bytes += _main_bytes(member)
            base: Any = type(member)
            member.__class__ = streamed_class(base)
        _start(members, config)
        undo.pop_all()
    if resident_bytes:
        logger.warning(
            "freed %.2f GiB of fp32 main parameters that existed on the device until now: "
            "construction was not bounded; build inside `streamed_optimizer` to avoid that",
            resident_bytes / 2**30,
        )
    return optimizer


def _half_precision_mains(member: Any) -> list[torch.Tensor]:
    return [
        main
        for group in member.shard_fp32_from_float16_groups
        for main in group
        if isinstance(main, torch.Tensor)
    ]


def _main_bytes(member: Any) -> int:
    return sum(main.untyped_storage().nbytes() for main in _half_precision_mains(member))


def _remember(member: Any) -> Callable[[], None]:
    """A function that puts class, mains and state of a member back as they are now."""
    kept = [(main, main.detach()) for main in _half_precision_mains(member)]
    states = [(main, dict(state)) for main, state in member.optimizer.state.items()]
    original = type(member)

    def put_back() -> None:
        member.__class__ = original
        for main, values in kept:
            if isinstance(main, EvictedTensor):
                restore_(main, values)
                plain: Any = main
                plain.__class__ = torch.Tensor
        for main, state in states:
            member.optimizer.state[main] = state

    return put_back

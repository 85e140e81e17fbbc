"""Megatron's own checkpoint formats, with bounded memory.

The standard keys, so that streamed and plain runs load each other's. What is handed to Megatron's
writers and readers are mappings of the bucket files: no gather, no copy of the state, no strategy
of our own. In the model-shaped format (`fully_reshardable`) a shard becomes a few rectangles of
its parameter, each a `ShardedTensor`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from gds_optimizer.engine import Engine
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.evicted import EvictedState
from gds_optimizer.mapped_state import MappedState, map_state
from gds_optimizer.megatron.rectangles import rectangles
from gds_optimizer.plan import MAIN_PLANE

logger = logging.getLogger(__name__)

# Megatron calls the main parameter "param" in its checkpoints.
_PARAM = "param"
STREAMED_MARK = "optimizer_state_streamed"
"""Key in the common part of a model-shaped checkpoint that a streamed run wrote."""


def shard_tensors(
    engine: Engine, binding: int, start: int = 0, end: int | None = None, *, writable: bool
) -> dict[str, torch.Tensor]:
    """Elements of one shard's state under Megatron's names, mapped from the files.

    A main that stays in the model is the model's own tensor.
    """
    bound = engine.plan.bindings[binding]
    found: dict[str, torch.Tensor] = {}
    if not bound.keeps_main:
        found[_PARAM] = bound.main.detach()[slice(start, end)]
    for name, tensor in map_state(engine, writable=writable).tensors(binding, start, end).items():
        found[_PARAM if name == MAIN_PLANE else name] = tensor
    return found


def set_shard_tensors(engine: Engine, binding: int, tensors: dict[str, Any]) -> None:
    """Take the values of one shard's state; those that were loaded in place are there already.

    Args:
        engine: keeps the shard.
        binding: number of the shard's binding.
        tensors: 1-D tensors of the whole shard, by Megatron's names.
    """
    for name, target in shard_tensors(engine, binding, writable=True).items():
        source = tensors[name]
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)


def commit_loaded(engine: Engine) -> None:
    """Everything has been loaded into the mapped files: it is the state from now on.

    Does nothing where that has been said already: Megatron's ways of loading call each other.
    """
    if isinstance(engine.handed_out, MappedState) and engine.handed_out.writable:
        engine.handed_out.commit()


@contextlib.contextmanager
def first_scalars(engine: Engine) -> Iterator[None]:
    """Inside, the optimizer's state has an entry for every shard, also before the first step.

    Megatron derives the step counter of a checkpoint from the entries, and allocates every moment
    when it finds none.
    """
    state = engine.plan.optimizer.state
    added = []
    for binding, schema in zip(engine.plan.bindings, engine.plan.schemas, strict=True):
        if binding.main in state or not binding.main.numel():
            continue
        planes = tuple(plane.name for plane in schema.planes)
        state[binding.main] = EvictedState(dict(schema.initial or {}), binding.name, planes)
        added.append(binding.main)
    try:
        yield
    finally:
        for main in added:
            state.pop(main, None)


def model_shaped_state(
    optimizer: Any, model_sharded_state_dict: Any, *, is_loading: bool
) -> dict[int, dict[str, dict[str, Any]]]:
    """The state in the model's shapes: what `sharded_param_state_fully_reshardable` returns.

    Each rank hands out exactly the elements it owns, so there is nothing to gather when saving,
    and nothing to cut out when loading.

    Args:
        optimizer: the streamed `DistributedOptimizer`.
        model_sharded_state_dict: Megatron's description of the model's tensors.
        is_loading: whether the tensors will be written.

    Returns:
        Number of the parameter -> state name -> number of the rectangle -> `ShardedTensor`.

    Raises:
        UnsupportedError: a parameter is not described, or cut in a way that has no rectangles.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    described, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    by_param = {each.data: each for each in nested_values(described)}
    params = [param for buffer in optimizer.buffers for param in buffer.param_index_map]
    state = {}
    for number, param in enumerate(params):
        binding = optimizer.binding_of(param)
        if binding is None:
            continue
        if param not in by_param:
            name = optimizer.engine.plan.bindings[binding].name
            raise UnsupportedError(
                f"the model's sharded state dict does not hold the parameter of {name}: make it "
                "from the parameters themselves (state_dict with keep_vars=True), not from copies"
            )
        state[number] = _sharded_rectangles(optimizer, by_param[param], param, is_loading)
    return state


def _sharded_rectangles(
    optimizer: Any, described: Any, model_param: Any, is_loading: bool
) -> dict[str, dict[str, Any]]:
    from megatron.core.dist_checkpointing import ShardedTensor

    owned = optimizer._get_model_param_range_map(model_param)["param"]
    binding = optimizer.binding_of(model_param)
    found: dict[str, dict[str, Any]] = {}
    for part_number, part in enumerate(_parts_of(described, model_param)):
        first = part.data.storage_offset()
        start, end = max(owned.start, first), min(owned.end, first + part.data.numel())
        # Axes that the global tensor has before the parameter's own (layers, experts).
        before = part.global_offset[: part.prepend_axis_num]
        own_offset = part.global_offset[part.prepend_axis_num :]
        for number, cut in enumerate(
            rectangles(tuple(part.data.shape), start - first, end - first)
        ):
            at = first + cut.start - owned.start
            shape = (1,) * len(before) + cut.shape
            offset = tuple(map(sum, zip(own_offset, cut.offset, strict=True)))
            for name, tensor in shard_tensors(
                optimizer.engine, binding, at, at + cut.numel, writable=is_loading
            ).items():
                if is_loading and part.allow_shape_mismatch:
                    # A smaller tensor in the checkpoint leaves the rest as Megatron does: zero.
                    tensor.zero_()
                found.setdefault(name, {})[f"{part_number}.{number}"] = ShardedTensor(
                    f"optimizer.state.{name}.{part.key}",
                    tensor.view(shape),
                    tensor.dtype,
                    shape,
                    tuple(part.global_shape),
                    (*before, *offset),
                    None,
                    # This rank alone has these elements among its data-parallel peers.
                    replica_id=(
                        *part.replica_id[:2],
                        optimizer.distributed_optimizer_instance_id,
                    ),
                    allow_shape_mismatch=part.allow_shape_mismatch,
                )
    return found


def take_loaded_rectangles(handed_out: dict[int, Any], loaded: dict[int, Any]) -> None:
    """Copy what a reader did not put where it was told to: most load in place."""
    for number, by_name in handed_out.items():
        for name, by_key in by_name.items():
            for key, target in by_key.items():
                source = loaded[number][name][key]
                if source.data_ptr() != target.data.data_ptr():
                    target.data.copy_(source)


def _parts_of(described: Any, model_param: Any) -> Iterator[Any]:
    """Sharded tensors of a parameter whose data is a view of the whole, so that it shows where.

    A factory (gated linear units, grouped experts) cuts a parameter into several tensors; it is
    given a tensor without memory of the parameter's shape.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    whole = torch.empty(model_param.shape, device="meta")
    if isinstance(described, ShardedTensor):
        part = replace(described, data=None)
        part.data = whole
        yield part
        return
    built = described.build_fn(described.key, whole, described.replica_id, None)
    parts = [part for part in nested_values(built) if isinstance(part, ShardedTensor)]
    storage = whole.untyped_storage()._cdata
    # A factory that copies (transposes, say) leaves no trace of where its elements come from.
    are_ranges = all(
        part.data.is_contiguous() and part.data.untyped_storage()._cdata == storage
        for part in parts
    )
    if not are_ranges or sum(part.data.numel() for part in parts) != whole.numel():
        raise UnsupportedError(
            f"the model rearranges {described.key} in its checkpoints, so that what a "
            "data-parallel rank owns of it are no ranges there: use the dp_reshardable format "
            "(leave --dist-ckpt-optim-fully-reshardable out)"
        )
    yield from parts


def warn_of_broken_writer(optimizer: Any, common: dict[str, Any]) -> None:
    """Say so where a checkpoint may come from a version that wrote wrong optimizer state.

    megatron-core 0.16 to 0.19 mixes elements up when it gathers buffers of several communication
    buckets with padded ends into the model's shapes. Streamed runs do not gather.
    """
    if common.get("param_state_sharding_type") != "fully_reshardable" or common.get(STREAMED_MARK):
        return
    from megatron.core import __version__

    major, minor = (int(part) for part in __version__.split(".")[:2])
    padded = any(
        bucket.numel_unpadded != bucket.grad_data.numel()
        for buffer in optimizer.buffers
        if len(buffer.buckets) > 1
        for bucket in buffer.buckets[:-1]
    )
    if (major, minor) <= (0, 19) and padded:
        logger.warning(
            "this fully_reshardable checkpoint was written without streaming. megatron-core 0.16 "
            "to 0.19 writes wrong optimizer state in that format when there are several "
            "communication buckets with padded ends, as here: if one of them wrote it, load the "
            "weights only (--no-load-optim) or a checkpoint in another format"
        )

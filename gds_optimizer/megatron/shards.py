"""Names for what a rank's distributed optimizer owns, and a copy of it for comparisons.

megatron-core cuts every parameter into flat ranges, one for each data-parallel rank. A *shard* is
one such range. Here it gets a name that does not depend on the run, the order of construction, or
whether the state is resident, such as

    0/decoder.layers.1.mlp.linear_fc2.weight[0:4096]

(optimizer 0 of the chain, parameter, range of its flattened elements on this rank; with several
model chunks the parameter's name starts with `chunk1.`). Names are a rank's own: the parts of a
tensor-parallel parameter, and layers of different pipeline stages, are named alike.

Only attributes that the optimizer's own step uses are read: `model_float16_groups`,
`shard_fp32_from_float16_groups`, `model_fp32_groups`, `shard_fp32_groups`, and `param_groups` of
the inner optimizer. `model_param_group_index_map` is not: in a group with parameters of both
precisions its positions are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

_Range = range  # the field below hides the built-in name from its own annotation


class NamedShard(NamedTuple):
    """One shard of one distributed optimizer.

    Attributes:
        name: unique among the rank's shards of the whole chain.
        model_param: the model's parameter, of any shape.
        main_param: 1-D fp32 tensor of the range's length that the inner optimizer steps. For a
            parameter that is fp32 itself it is a view of the parameter.
        group_index: index of the group among the inner optimizer's `param_groups`.
        range: elements of the flattened parameter that this rank owns.
    """

    name: str
    model_param: torch.nn.Parameter
    main_param: torch.Tensor
    group_index: int
    range: _Range

    @property
    def is_native_fp32(self) -> bool:
        """Whether the model's parameter is fp32, so that it is its own main parameter."""
        return self.model_param.dtype == torch.float32


def shard_name(optimizer_index: int, param_name: str, start: int, end: int) -> str:
    """Name of elements `start` to `end` of a parameter in optimizer number `optimizer_index`."""
    return f"{optimizer_index}/{param_name}[{start}:{end}]"


def param_names(model_chunks: Sequence[torch.nn.Module]) -> dict[torch.nn.Parameter, str]:
    """Names of all parameters, frozen ones too, without the wrappers' leading `module.`.

    With several model chunks the name starts with the chunk's number: `chunk0.`, `chunk1.`.
    """
    names = {}
    for index, chunk in enumerate(model_chunks):
        prefix = f"chunk{index}." if len(model_chunks) > 1 else ""
        for name, param in chunk.named_parameters():
            while name.startswith("module."):
                name = name.removeprefix("module.")
            names[param] = prefix + name
    return names


def distributed_optimizers(optimizer: Any) -> list[Any]:
    """The distributed optimizers of a chain, or the one that is given; stubs included."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def named_shards(distributed_optimizer: Any, optimizer_index: int = 0) -> Iterator[NamedShard]:
    """All shards that this rank owns, in the order in which the inner optimizer steps them.

    That is group by group, and in each group first the parameters that are fp32 themselves.

    Args:
        distributed_optimizer: a megatron-core `DistributedOptimizer`. A stub, which it makes
            where nothing trains, has no shards.
        optimizer_index: its place in the chain, for the names.
    """
    if distributed_optimizer.is_stub_optimizer:
        return
    names = param_names(distributed_optimizer.model_chunks)
    native = zip(
        distributed_optimizer.model_fp32_groups,
        distributed_optimizer.shard_fp32_groups,
        strict=True,
    )
    half = zip(
        distributed_optimizer.model_float16_groups,
        distributed_optimizer.shard_fp32_from_float16_groups,
        strict=True,
    )
    for group_index, groups in enumerate(zip(native, half, strict=True)):
        for model_params, main_params in groups:
            for model_param, main_param in zip(model_params, main_params, strict=True):
                owned = distributed_optimizer._get_model_param_range_map(model_param)["param"]
                yield NamedShard(
                    name=shard_name(optimizer_index, names[model_param], owned.start, owned.end),
                    model_param=model_param,
                    main_param=main_param,
                    group_index=group_index,
                    range=range(owned.start, owned.end),
                )


def collect_resident_state(optimizer: Any) -> dict[str, dict[str, torch.Tensor | float]]:
    """Everything this rank's inner optimizers keep, copied to the CPU, by shard name.

    For optimizers whose state is resident: it is the oracle that streamed state is compared with.

    Args:
        optimizer: a `ChainedOptimizer` or a `DistributedOptimizer`.

    Returns:
        For each shard its `main` (1-D, fp32), every tensor of the parameter's state that has its
        length (`exp_avg`, ...), and as floats the scalars of that state and the group's `step`
        where it has one. Before the first step only `main`.
    """
    collected: dict[str, dict[str, torch.Tensor | float]] = {}
    for index, distributed_optimizer in enumerate(distributed_optimizers(optimizer)):
        inner = distributed_optimizer.optimizer
        for shard in named_shards(distributed_optimizer, index):
            state: dict[str, torch.Tensor | float] = {
                "main": shard.main_param.detach().to("cpu", copy=True)
            }
            group = inner.param_groups[shard.group_index]
            if "step" in group:
                state["step"] = float(group["step"])
            # `get`, because the state is a defaultdict and looking must not change it.
            for key, value in inner.state.get(shard.main_param, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    state[key] = value.detach().to("cpu", copy=True)
                elif isinstance(value, torch.Tensor | int | float):
                    state[key] = float(value)
            collected[shard.name] = state
    return collected


def collect_streamed_state(optimizer: Any) -> dict[str, dict[str, torch.Tensor | float]]:
    """What `collect_resident_state` returns, for an optimizer whose state is streamed."""
    collected: dict[str, dict[str, torch.Tensor | float]] = {}
    for index, distributed_optimizer in enumerate(distributed_optimizers(optimizer)):
        if distributed_optimizer.is_stub_optimizer or distributed_optimizer.engine is None:
            continue
        groups = distributed_optimizer.optimizer.param_groups
        kept = distributed_optimizer.engine.read_state()
        for shard in named_shards(distributed_optimizer, index):
            state: dict[str, torch.Tensor | float] = {}
            if "step" in groups[shard.group_index]:
                state["step"] = float(groups[shard.group_index]["step"])
            for key, value in kept[shard.name].items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    state[key] = value
                elif isinstance(value, torch.Tensor | int | float):
                    state[key] = float(value)
            collected[shard.name] = state
    return collected

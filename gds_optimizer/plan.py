"""What an engine will keep: shards bound to an optimizer's tensors, their planes and the layout.

Nothing is allocated here, neither on the device nor on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gds_optimizer.evicted import EvictedTensor
from gds_optimizer.layout import (
    Bucket,
    Layout,
    PlaneSpec,
    Shard,
    SpaceSpec,
    bucket_numel_for,
    plan_layout,
)
from gds_optimizer.schema import StateSchema, discover_schema

MAIN_PLANE = "main"


@dataclass(slots=True, eq=False)
class Binding:
    """One shard and the tensors that go with it.

    Attributes:
        name: global name of the shard, unique within an engine.
        main: what the optimizer's groups hold: an `EvictedTensor` whose values are kept in a main
            plane, or a 1-D tensor that stays where it is and is stepped in place.
        model: 1-D half-precision part of the model's parameter: the main's first value comes from
            it and every new one goes into it. None for a main that stays.
        initial: state to start from instead of `model` and nothing: plane name -> 1-D tensor.
    """

    name: str
    main: torch.Tensor
    model: torch.Tensor | None = None
    initial: dict[str, torch.Tensor] | None = None

    @property
    def keeps_main(self) -> bool:
        return isinstance(self.main, EvictedTensor)


@dataclass(slots=True, eq=False)
class EnginePlan:
    """What an engine will keep, before anything is allocated."""

    optimizer: torch.optim.Optimizer
    bindings: list[Binding]
    schemas: list[StateSchema]
    layout: Layout
    shard_bindings: list[list[int]]
    """Binding index by space and shard; bindings without planes are in no space."""


@torch.no_grad()
def plan_engine(
    optimizer: torch.optim.Optimizer, bindings: Sequence[Binding], bucket_size_bytes: int
) -> EnginePlan:
    """Ask the optimizer what it keeps and lay it out.

    Raises:
        UnsupportedError: the optimizer cannot be streamed, or holds a parameter without binding.
        ConfigError: the bucket size is too small.
    """
    group_of = {
        id(main): index
        for index, group in enumerate(optimizer.param_groups)
        for main in group["params"]
    }
    known: dict[tuple[int, torch.dtype, torch.device], StateSchema] = {}
    schemas = []
    for binding in bindings:
        key = (group_of[id(binding.main)], binding.main.dtype, binding.main.device)
        if key not in known:
            known[key] = discover_schema(optimizer, *key)
        schemas.append(known[key])

    members: dict[tuple[PlaneSpec, ...], list[int]] = {}
    for index, (binding, schema) in enumerate(zip(bindings, schemas, strict=True)):
        planes = schema.planes
        if binding.keeps_main:
            planes = (PlaneSpec(name=MAIN_PLANE), *planes)
        if planes:
            members.setdefault(planes, []).append(index)
    specs = [
        SpaceSpec(
            planes=planes,
            shards=tuple(Shard(name=bindings[i].name, numel=bindings[i].main.numel()) for i in own),
        )
        for planes, own in members.items()
    ]
    layout = plan_layout(specs, bucket_numel=bucket_numel_for(bucket_size_bytes, specs))
    return EnginePlan(optimizer, list(bindings), schemas, layout, list(members.values()))


@dataclass(slots=True, eq=False)
class BoundPiece:
    """A piece, its binding, and the tensor that the optimizer steps for it.

    The tensor lives as long as the engine: optimizers may key their own caches by it.
    """

    binding: int
    shard_slice: slice
    bucket_slice: slice
    tensor: torch.Tensor


def bind_pieces(plan: EnginePlan, bucket: Bucket) -> list[BoundPiece]:
    """The pieces of a bucket with what they belong to."""
    members = plan.shard_bindings[bucket.space]
    bound = []
    for piece in bucket.pieces:
        index = members[piece.shard]
        main = plan.bindings[index].main
        bound.append(
            BoundPiece(
                index,
                slice(piece.shard_offset, piece.shard_offset + piece.numel),
                slice(piece.bucket_offset, piece.bucket_offset + piece.numel),
                torch.empty(0, dtype=main.dtype, device=main.device),
            )
        )
    return bound

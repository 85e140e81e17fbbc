"""What an engine will keep: shards bound to an optimizer's tensors, their planes and the layout.

Nothing is allocated here, neither on the device nor on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gds_optimizer.codecs import get_codec
from gds_optimizer.codecs.remainder import SIGNLESS_CODECS, TIE_PLANE, RemainderCodec
from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.evicted import EvictedTensor
from gds_optimizer.layout import (
    Bucket,
    Layout,
    PlaneSpec,
    Shard,
    Space,
    SpaceSpec,
    bucket_numel_for,
    plan_layout,
)
from gds_optimizer.schema import StateSchema, discover_schema

MAIN_PLANE = "main"

INT8_CODECS = {
    "exp_avg": "fp32:int8-signed",
    "momentum_buffer": "fp32:int8-signed",
    "exp_avg_sq": "fp32:int8-unsigned",
    "max_exp_avg_sq": "fp32:int8-unsigned",
}
"""Planes that may be kept in 8 bits: their codec is made for what these moments are used for."""


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
    """What an engine will keep, before anything is allocated.

    Attributes:
        schemas: of each binding, with the codecs that its planes are stored by.
        shard_bindings: binding index by space and shard; bindings without planes are in no space.
    """

    optimizer: torch.optim.Optimizer
    bindings: list[Binding]
    schemas: list[StateSchema]
    layout: Layout
    shard_bindings: list[list[int]]


def moment_codec(plane: PlaneSpec, moment_dtype: str, moment_rounding: str, kind: str) -> str:
    """Name of the codec that stores a state plane.

    Args:
        plane: as the optimizer keeps it; what it does not keep in fp32 stays as it is.
        moment_dtype: "fp32", "bf16" or "int8".
        moment_rounding: "nearest" or "stochastic".
        kind: the optimizer's class, for messages.

    Raises:
        UnsupportedError: 8 bits are asked for and there is no codec for such a plane.
    """
    if moment_dtype == "fp32" or plane.codec != "fp32":
        return plane.codec
    if moment_dtype == "bf16":
        name = "fp32:bf16"
    elif plane.name in INT8_CODECS:
        name = INT8_CODECS[plane.name]
    else:
        raise UnsupportedError(
            f"moment_dtype is 'int8', and {kind} keeps {plane.name!r}, which has no 8-bit "
            f"encoding: only {', '.join(INT8_CODECS)} have one: use 'bf16' or 'fp32'"
        )
    return name + ("-sr" if moment_rounding == "stochastic" else "")


def main_codec(binding: Binding, planes: Sequence[PlaneSpec], main: str) -> str:
    """Name of the codec that stores a shard's main plane.

    Args:
        binding: keeps its main.
        planes: of its state, with the codecs that they are stored by.
        main: "auto", "fp32" or "remainder", see `StreamConfig`.

    Raises:
        UnsupportedError: remainders are asked for, and the model does not hold the other halves.
    """
    if main == "fp32":
        return "fp32"
    if binding.model is None or binding.model.dtype != torch.bfloat16:
        if main == "auto":
            return "fp32"
        held = "no parameter" if binding.model is None else f"a {binding.model.dtype} parameter"
        raise UnsupportedError(
            f"main is 'remainder', but the model has {held} of {binding.name}: only of a bf16 one "
            "does the main lack no more than 16 bits: use 'auto' or 'fp32'"
        )
    return remainder_name(planes)


def remainder_name(planes: Sequence[PlaneSpec]) -> str:
    """Name of the codec of mains as remainders: where their tie bits are depends on the moments.

    Args:
        planes: of the same space, with the codecs that they are stored by.
    """
    if any(plane.name == TIE_PLANE and plane.codec in SIGNLESS_CODECS for plane in planes):
        return "main:remainder16"
    return "main:remainder16-bitmap"


def remainder_codec(of: Bucket | Space) -> RemainderCodec | None:
    """The codec of mains that are stored as what their model parameters lack; None for others."""
    codec = get_codec(of.planes[0].codec)
    return codec if isinstance(codec, RemainderCodec) else None


def keeps_remainder(bucket: Bucket) -> bool:
    """Whether the mains of a bucket are stored as what their model parameters lack."""
    return remainder_codec(bucket) is not None


def tie_plane(of: Bucket | Space) -> int | None:
    """Number of the plane whose signs are tie bits of the mains; None without one."""
    if of.planes[0].codec != "main:remainder16":
        return None
    return [plane.name for plane in of.planes].index(TIE_PLANE)


def _encoded(
    schema: StateSchema, moment_dtype: str, moment_rounding: str, kind: str
) -> StateSchema:
    planes = (
        replace(plane, codec=moment_codec(plane, moment_dtype, moment_rounding, kind))
        for plane in schema.planes
    )
    return replace(schema, planes=tuple(planes))


@torch.no_grad()
def plan_engine(
    optimizer: torch.optim.Optimizer,
    bindings: Sequence[Binding],
    bucket_size_bytes: int,
    *,
    moment_dtype: str = "fp32",
    moment_rounding: str = "stochastic",
    main: str = "fp32",
) -> EnginePlan:
    """Ask the optimizer what it keeps and lay it out.

    Args:
        optimizer: its groups hold the bindings' mains.
        bindings: all shards.
        bucket_size_bytes: decoded bytes of a bucket.
        moment_dtype, moment_rounding: how fp32 state planes are stored, see `StreamConfig`.
        main: how main planes are stored, see `StreamConfig`.

    Raises:
        UnsupportedError: the optimizer cannot be streamed, or holds a parameter without binding,
            or a state tensor or main that cannot be stored as asked.
        ConfigError: the bucket size is too small.
    """
    group_of = {
        id(param): index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    known: dict[tuple[int, torch.dtype, torch.device], StateSchema] = {}
    schemas = []
    for binding in bindings:
        key = (group_of[id(binding.main)], binding.main.dtype, binding.main.device)
        if key not in known:
            known[key] = _encoded(
                discover_schema(optimizer, *key),
                moment_dtype,
                moment_rounding,
                type(optimizer).__name__,
            )
        schemas.append(known[key])

    members: dict[tuple[PlaneSpec, ...], list[int]] = {}
    for index, (binding, schema) in enumerate(zip(bindings, schemas, strict=True)):
        planes = schema.planes
        if binding.keeps_main:
            codec = main_codec(binding, planes, main)
            planes = (PlaneSpec(name=MAIN_PLANE, codec=codec), *planes)
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


def plan_as_configured(
    optimizer: torch.optim.Optimizer, bindings: Sequence[Binding], config: StreamConfig
) -> EnginePlan:
    """`plan_engine` with the settings of a configuration; raises what that does."""
    return plan_engine(
        optimizer,
        bindings,
        config.bucket_size,
        moment_dtype=config.moment_dtype,
        moment_rounding=config.moment_rounding,
        main=config.main,
    )


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

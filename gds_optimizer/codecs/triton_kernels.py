"""Fused kernels of the codecs: each reads and writes every byte once.

They compute on bit patterns as integers and contain no floating-point operation at all, so there
is no contraction, no flushing of subnormals and no approximate division that could make their
bytes differ from those of the plain torch operations, which remain the reference.

Imported only where Triton and a CUDA device are (`acceleration.kernels_for`), and by tests under
`TRITON_INTERPRET=1`. Arguments are what the codecs have checked; tensors are integer views.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Annotations mean something else to Triton: kernels and their parts carry none.

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from gds_optimizer.codecs import rounding
from gds_optimizer.codecs.blockwise import RANDOM_BITS, STEP_SHIFT, deepest_distance

TILE_NUMEL = 2048
"""Elements of one program."""

_INDEX_FACTOR = tl.constexpr(rounding.INDEX_FACTOR)
_FIRST_FACTOR = tl.constexpr(rounding.FIRST_FACTOR)
_SECOND_FACTOR = tl.constexpr(rounding.SECOND_FACTOR)

# Where tie bits are.
TIES_IN_INT32 = tl.constexpr(0)
TIES_IN_INT16 = tl.constexpr(1)
TIES_IN_BITMAP = tl.constexpr(2)

# Keys and offsets differ with every call: they must not make a kernel of their own.
_VARYING = ["first", "key0", "key1"]


class BlockFormat(Protocol):
    """What the kernels need to know of a `BlockwiseCodec`."""

    is_signed: bool
    rounds_stochastically: bool
    range_numel: int
    segment: int
    top_byte: int


@triton.jit
def _shift_right(bits, by: tl.constexpr):
    return (bits >> by) & ((1 << (32 - by)) - 1)


@triton.jit
def _random_bits(index, key0, key1):
    bits = index.to(tl.int32) * _INDEX_FACTOR + key0
    bits = (bits ^ _shift_right(bits, 16)) * _FIRST_FACTOR + key1
    bits = (bits ^ _shift_right(bits, 15)) * _SECOND_FACTOR
    return bits ^ _shift_right(bits, 16)


@triton.jit
def _is_nan(bits):
    return (bits & 0x7FFFFFFF) > 0x7F800000


# ---------------------------------------------------------------------- bf16


@triton.jit(do_not_specialize=_VARYING)
def _encode_bf16(
    bits_ptr,
    halves_ptr,
    numel,
    first,
    key0,
    key1,
    STOCHASTIC: tl.constexpr,  # noqa: N803 - constants of a kernel are written so
    TILE: tl.constexpr,  # noqa: N803
):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = index < numel
    bits = tl.load(bits_ptr + index, mask=inside, other=0)
    upper = bits >> 16
    if STOCHASTIC:
        rounded = (bits + _shift_right(_random_bits(index + first, key0, key1), 16)) >> 16
    else:
        rounded = (bits + 0x7FFF + (upper & 1)) >> 16
    halves = tl.where(_is_nan(bits), upper | 0x40, rounded)
    tl.store(halves_ptr + index, halves.to(tl.int16), mask=inside)


def encode_bf16(
    bits: torch.Tensor, halves: torch.Tensor, start: int, keys: tuple[int, int], stochastic: bool
) -> None:
    """See `Bf16Codec.encode_by_torch`."""
    grid = (triton.cdiv(bits.numel(), TILE_NUMEL),)
    with _on(bits):
        _encode_bf16[grid](
            bits,
            halves,
            bits.numel(),
            rounding.wrap_int32(start),
            *keys,
            STOCHASTIC=stochastic,
            TILE=TILE_NUMEL,
        )


# ---------------------------------------------------------------------- int8 in blocks


@triton.jit
def _decode_blocks(
    codes_ptr,
    tops_ptr,
    bits_ptr,
    numel,
    SEGMENT: tl.constexpr,  # noqa: N803
    STEP_SHIFT: tl.constexpr,  # noqa: N803
    OFFSET: tl.constexpr,  # noqa: N803
    TOP_BYTE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = index < numel
    byte = tl.load(codes_ptr + index, mask=inside, other=0).to(tl.int32)
    tops = tl.load(tops_ptr + row, mask=row * BLOCK < numel, other=0)[:, None]
    magnitude = tl.where(byte < 0, -byte, byte)
    code = TOP_BYTE - tl.where(magnitude > TOP_BYTE, TOP_BYTE, magnitude)
    segment = code // SEGMENT
    distance = ((code - segment * SEGMENT + SEGMENT) << (segment + STEP_SHIFT)) - OFFSET
    bits = tops - distance
    # A tiny top may be nearer to zero than the code is to the top: never reach zero.
    bits = tl.where(bits < 1, 1, bits)
    bits = tl.where(byte == 0, 0, bits) | ((byte >> 31) << 31)
    bits = tl.where(tops >= 0x7F800000, 0x7FC00000, bits)
    tl.store(bits_ptr + index, bits, mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def _encode_blocks(
    bits_ptr,
    codes_ptr,
    tops_ptr,
    numel,
    first,
    key0,
    key1,
    SEGMENT: tl.constexpr,  # noqa: N803
    STEP_SHIFT: tl.constexpr,  # noqa: N803
    OFFSET: tl.constexpr,  # noqa: N803
    TOP_BYTE: tl.constexpr,  # noqa: N803
    RANDOM_SHIFT: tl.constexpr,  # noqa: N803
    DEEPEST: tl.constexpr,  # noqa: N803
    SIGNED: tl.constexpr,  # noqa: N803
    STOCHASTIC: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = index < numel
    bits = tl.load(bits_ptr + index, mask=inside, other=0)
    magnitude = bits & 0x7FFFFFFF
    tops = tl.max(magnitude, axis=1)
    is_fault = tops >= 0x7F800000
    if not SIGNED:
        below_zero = (bits < 0) & (magnitude != 0)
        is_fault = is_fault | (tl.max(below_zero.to(tl.int32), axis=1) != 0)
    tops = tl.where(is_fault, 0x7FC00000, tops)

    distance = tops[:, None] - magnitude
    is_zero = (magnitude == 0) | is_fault[:, None]
    if SIGNED:
        is_zero = is_zero | (distance > DEEPEST)
    t = tl.where(distance > DEEPEST, DEEPEST, distance) + OFFSET
    segment = (
        (t >= 2 * OFFSET).to(tl.int32)
        + (t >= 4 * OFFSET).to(tl.int32)
        + (t >= 8 * OFFSET).to(tl.int32)
    )
    shift = segment + STEP_SHIFT
    step = tl.full((ROWS, BLOCK), 1, tl.int32) << shift
    if STOCHASTIC:
        t += _shift_right(_random_bits(index + first, key0, key1), RANDOM_SHIFT) & (step - 1)
    else:
        t += step >> 1
    byte = TOP_BYTE - ((t >> shift) + (segment - 1) * SEGMENT)
    if SIGNED:
        byte = tl.where(bits < 0, -byte, byte)
    byte = tl.where(is_zero, 0, byte)
    tl.store(codes_ptr + index, byte.to(codes_ptr.dtype.element_ty), mask=inside)
    tl.store(tops_ptr + row, tops, mask=row * BLOCK < numel)


def decode_blocks(
    codes: torch.Tensor, tops: torch.Tensor, bits: torch.Tensor, codec: BlockFormat
) -> None:
    """See `BlockwiseCodec.decode_by_torch`."""
    rows = max(TILE_NUMEL // codec.range_numel, 1)
    with _on(bits):
        _decode_blocks[(triton.cdiv(tops.numel(), rows),)](
            codes,
            tops,
            bits,
            bits.numel(),
            SEGMENT=codec.segment,
            STEP_SHIFT=STEP_SHIFT,
            OFFSET=codec.segment << STEP_SHIFT,
            TOP_BYTE=codec.top_byte,
            BLOCK=codec.range_numel,
            ROWS=rows,
        )


def encode_blocks(
    bits: torch.Tensor,
    codes: torch.Tensor,
    tops: torch.Tensor,
    start: int,
    keys: tuple[int, int],
    codec: BlockFormat,
) -> None:
    """See `BlockwiseCodec.encode_by_torch`."""
    rows = max(TILE_NUMEL // codec.range_numel, 1)
    with _on(bits):
        _encode_blocks[(triton.cdiv(tops.numel(), rows),)](
            bits,
            codes,
            tops,
            bits.numel(),
            rounding.wrap_int32(start),
            *keys,
            SEGMENT=codec.segment,
            STEP_SHIFT=STEP_SHIFT,
            OFFSET=codec.segment << STEP_SHIFT,
            TOP_BYTE=codec.top_byte,
            RANDOM_SHIFT=32 - RANDOM_BITS,
            DEEPEST=deepest_distance(codec.segment),
            SIGNED=codec.is_signed,
            STOCHASTIC=codec.rounds_stochastically,
            BLOCK=codec.range_numel,
            ROWS=rows,
        )


# ---------------------------------------------------------------------- remainders


@triton.jit
def _decode_remainder(
    remainder_ptr,
    ties_ptr,
    model_ptr,
    bits_ptr,
    numel,
    TIES: tl.constexpr,  # noqa: N803
    FROM_MODEL: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = index < numel
    low = tl.load(remainder_ptr + index, mask=inside, other=0).to(tl.int32) & 0xFFFF
    if TIES == TIES_IN_BITMAP:
        byte = tl.load(ties_ptr + index // 8, mask=inside, other=0).to(tl.int32)
        tie = (byte >> (index % 8).to(tl.int32)) & 1
    else:
        tie = (tl.load(ties_ptr + index, mask=inside, other=0) < 0).to(tl.int32)
    if FROM_MODEL:
        bits = tl.load(model_ptr + index, mask=inside, other=0).to(tl.int32) << 16
    else:
        bits = tl.load(bits_ptr + index, mask=inside, other=0)
    is_below = (low + tie > 0x8000) & ((bits & 0x7FFFFFFF) != 0) & (_is_nan(bits) == 0)
    bits = bits + low - (is_below.to(tl.int32) << 16)
    tl.store(bits_ptr + index, bits, mask=inside)


@triton.jit
def _encode_remainder(
    bits_ptr,
    remainder_ptr,
    ties_ptr,
    numel,
    TIES: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    # Rows of eight: a byte of the bitmap each.
    row = tl.program_id(0).to(tl.int64) * (TILE // 8) + tl.arange(0, TILE // 8)
    column = tl.arange(0, 8)
    index = row[:, None] * 8 + column[None, :]
    inside = index < numel
    bits = tl.load(bits_ptr + index, mask=inside, other=0)
    tl.store(remainder_ptr + index, bits.to(tl.int16), mask=inside)
    is_tie = ((bits & 0x1FFFF) == 0x18000) & (_is_nan(bits) == 0)
    tie = is_tie.to(tl.int32)
    if TIES == TIES_IN_BITMAP:
        byte = tl.sum(tie << column[None, :], axis=1)
        tl.store(ties_ptr + row, byte.to(tl.uint8), mask=row * 8 < numel)
    elif TIES == TIES_IN_INT16:
        kept = tl.load(ties_ptr + index, mask=inside, other=0).to(tl.int32) & 0x7FFF
        tl.store(ties_ptr + index, (kept | (tie << 15)).to(tl.int16), mask=inside)
    else:
        kept = tl.load(ties_ptr + index, mask=inside, other=0) & 0x7FFFFFFF
        tl.store(ties_ptr + index, kept | (tie << 31), mask=inside)


def decode_remainder(
    remainder: torch.Tensor, ties: torch.Tensor, model: torch.Tensor | None, bits: torch.Tensor
) -> None:
    """See `RemainderCodec.complete_by_torch`; `model` (int16), if given, fills `bits` first."""
    with _on(bits):
        _decode_remainder[(triton.cdiv(bits.numel(), TILE_NUMEL),)](
            remainder,
            ties,
            bits if model is None else model,
            bits,
            bits.numel(),
            TIES=_place_of(ties),
            FROM_MODEL=model is not None,
            TILE=TILE_NUMEL,
        )


def encode_remainder(bits: torch.Tensor, remainder: torch.Tensor, ties: torch.Tensor) -> None:
    """See `RemainderCodec.encode_by_torch`."""
    with _on(bits):
        _encode_remainder[(triton.cdiv(bits.numel(), TILE_NUMEL),)](
            bits, remainder, ties, bits.numel(), TIES=_place_of(ties), TILE=TILE_NUMEL
        )


def _place_of(ties: torch.Tensor) -> int:
    places = {torch.int32: TIES_IN_INT32, torch.int16: TIES_IN_INT16, torch.uint8: TIES_IN_BITMAP}
    return int(places[ties.dtype].value)


def _on(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, whatever its arguments' is."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()

"""Codecs by name: how a plane's values become bytes.

| name | decoded | bytes an element | |
|---|---|---|---|
| `fp32`, `bf16`, `int8`, ... | that dtype | its size | as it is |
| `fp32:bf16`, `fp32:bf16-sr` | fp32 | 2 | rounded to nearest, or stochastically |
| `fp32:int8-signed`, `…-sr` | fp32 | 1.016 | companded in blocks: `exp_avg` |
| `fp32:int8-unsigned`, `…-sr` | fp32 | 1.016 | companded in blocks: `exp_avg_sq` |
| `main:remainder16` | fp32 | 2 | lossless, with the bf16 model and `exp_avg_sq` |
| `main:remainder16-bitmap` | fp32 | 2.125 | lossless, with the bf16 model |
"""

from __future__ import annotations

import torch

from gds_optimizer.codecs.acceleration import fused_kernels
from gds_optimizer.codecs.base import Codec
from gds_optimizer.codecs.blockwise import BlockwiseCodec
from gds_optimizer.codecs.half import Bf16Codec
from gds_optimizer.codecs.raw import RawCodec
from gds_optimizer.codecs.remainder import (
    RemainderCodec,
    clear_tie_bits,
    encodes_exactly,
    upper_half_checksum,
)
from gds_optimizer.codecs.rounding import rounding_seed

_RAW = (
    RawCodec("fp32", torch.float32),
    RawCodec("bf16", torch.bfloat16),
    RawCodec("fp16", torch.float16),
    RawCodec("fp64", torch.float64),
    RawCodec("int8", torch.int8),
    RawCodec("uint8", torch.uint8),
    RawCodec("int16", torch.int16),
    RawCodec("int32", torch.int32),
    RawCodec("int64", torch.int64),
)
_ENCODED: tuple[Codec, ...] = (
    *(Bf16Codec(stochastic=stochastic) for stochastic in (False, True)),
    *(
        BlockwiseCodec(signed=signed, stochastic=stochastic)
        for signed in (True, False)
        for stochastic in (False, True)
    ),
    *(RemainderCodec(bitmap=bitmap) for bitmap in (False, True)),
)
_BY_NAME: dict[str, Codec] = {codec.name: codec for codec in _RAW}
_ENCODED_BY_NAME: dict[str, Codec] = {codec.name: codec for codec in _ENCODED}


def get_codec(name: str) -> Codec:
    """The codec called `name`; KeyError for a name that no layout of ours contains."""
    return _BY_NAME[name] if name in _BY_NAME else _ENCODED_BY_NAME[name]


def nearest_codec(name: str) -> Codec:
    """The codec that stores the same form as the one called `name` and rounds to nearest.

    For values that no step has computed (loaded, restored, taken over): nothing accumulates, so
    nothing is gained by chance, and what was decoded before comes out as it was.
    """
    return get_codec(name.removesuffix("-sr"))


def raw_codec_name(dtype: torch.dtype) -> str:
    """Name of the lossless codec of `dtype`; KeyError where there is none (complex, fp8)."""
    for codec in _RAW:
        if codec.dtype == dtype:
            return codec.name
    raise KeyError(dtype)


__all__ = [
    "Bf16Codec",
    "BlockwiseCodec",
    "Codec",
    "RawCodec",
    "RemainderCodec",
    "clear_tie_bits",
    "encodes_exactly",
    "fused_kernels",
    "get_codec",
    "nearest_codec",
    "raw_codec_name",
    "rounding_seed",
    "upper_half_checksum",
]

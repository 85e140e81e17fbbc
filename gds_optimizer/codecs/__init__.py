"""Codecs by name: how a plane's values become bytes."""

from __future__ import annotations

import torch

from gds_optimizer.codecs.base import Codec
from gds_optimizer.codecs.raw import RawCodec

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
_BY_NAME: dict[str, Codec] = {codec.name: codec for codec in _RAW}


def get_codec(name: str) -> Codec:
    """The codec called `name`; KeyError for a name that no layout of ours contains."""
    return _BY_NAME[name]


def raw_codec_name(dtype: torch.dtype) -> str:
    """Name of the lossless codec of `dtype`; KeyError where there is none (complex, fp8)."""
    for codec in _RAW:
        if codec.dtype == dtype:
            return codec.name
    raise KeyError(dtype)


__all__ = ["Codec", "RawCodec", "get_codec", "raw_codec_name"]

"""Values as they are in memory: lossless, and decoding is a view."""

from __future__ import annotations

import torch

from gds_optimizer.codecs.base import Codec


class RawCodec(Codec):
    """Identity encoding of one dtype; little-endian, as the hardware stores it."""

    is_view = True
    is_lossless = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype

    def encoded_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def decode(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        return encoded[: self.encoded_bytes(numel)].view(self.dtype)

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        if values.data_ptr() != encoded.data_ptr():
            self.decode(encoded, values.numel()).copy_(values)

    def decode_into(
        self,
        encoded: torch.Tensor,
        values: torch.Tensor,
        *,
        numel: int | None = None,
        start: int = 0,
    ) -> None:
        numel = self.check_part(encoded, values, numel, start)
        part = self.decode(encoded, numel)[start : start + values.numel()]
        if values.data_ptr() != part.data_ptr():
            values.copy_(part)

    def encode_from(
        self,
        values: torch.Tensor,
        encoded: torch.Tensor,
        *,
        numel: int | None = None,
        start: int = 0,
        seed: int = 0,
    ) -> None:
        numel = self.check_part(encoded, values, numel, start)
        part = self.decode(encoded, numel)[start : start + values.numel()]
        if values.data_ptr() != part.data_ptr():
            part.copy_(values)

"""The line between tensors and bytes: a codec turns a plane's values into a fixed number of bytes.

Everything below a codec (slots, files, I/O) sees bytes; everything above it sees tensors. A codec
works in the caller's buffers and declares its encoded size beforehand, so that a bucket's file is
laid out before the first byte exists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Codec(ABC):
    """Fixed-size encoding of one plane.

    Attributes:
        name: what layouts and footers record.
        dtype: dtype of the decoded values.
    """

    name: str
    dtype: torch.dtype

    @abstractmethod
    def encoded_bytes(self, numel: int) -> int:
        """Bytes that `numel` values take when encoded, before page alignment."""

    @abstractmethod
    def decode(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """Values of an encoded plane.

        Args:
            encoded: 1-D uint8 tensor, at least `encoded_bytes(numel)` long, 4 KiB-aligned.
            numel: number of values.

        Returns:
            1-D tensor of `dtype` and `numel` elements. It may be a view of `encoded`.
        """

    @abstractmethod
    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Write `values` (1-D, `dtype`) into `encoded` (1-D uint8); a no-op for a view of it."""

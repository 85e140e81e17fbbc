"""fp32 values as bf16: two bytes each, rounded to nearest even or stochastically.

Rounding to nearest loses what an exponential moving average adds: bf16 has steps of 2**-8 to
2**-7 of a value, and with beta2 = 0.999 an `exp_avg_sq` changes by 2**-10 of itself. It then
hardly ever falls (measured: a second moment whose gradients shrink stays 15 % off in its root, 2 %
with stochastic rounding). Stochastic rounding keeps the expected value: round away from zero with
the probability that the dropped 16 bits state (Gupta et al., arXiv 1502.02551).

Every conversion is made of integer operations on the bit patterns. `Tensor.bfloat16` gives the
same for numbers, but for NaN its vectorised, scalar and CUDA versions each give other bits.
"""

from __future__ import annotations

import torch

from gds_optimizer.codecs.acceleration import kernels_for
from gds_optimizer.codecs.base import EncodedCodec, chunks, is_nan_bits
from gds_optimizer.codecs.rounding import random_bits, seed_keys, shift_right

QUIET_BIT = 0x40


def nearest_upper_half(bits: torch.Tensor) -> torch.Tensor:
    """bf16 patterns, in the low 16 bits of int32, of fp32 patterns rounded to nearest even.

    A NaN keeps its sign and the upper part of its payload and becomes quiet.
    """
    upper = bits >> 16
    rounded = ((upper & 1).add_(0x7FFF) + bits).bitwise_right_shift_(16)
    return torch.where(is_nan_bits(bits), upper.bitwise_or_(QUIET_BIT), rounded)


def stochastic_upper_half(bits: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """As `nearest_upper_half`, rounded up where the dropped bits exceed 16 random ones."""
    rounded = shift_right(random, 16).add_(bits).bitwise_right_shift_(16)
    return torch.where(is_nan_bits(bits), (bits >> 16).bitwise_or_(QUIET_BIT), rounded)


class Bf16Codec(EncodedCodec):
    """fp32 values stored as little-endian bf16.

    Subnormals, zeros and infinities keep their signs; NaN stays NaN. A finite value beyond the
    largest bf16 rounds to infinity as IEEE wants it (stochastically: with the probability that
    the last interval gives it).

    Args:
        stochastic: round stochastically, with the seed of `encode_from`.
    """

    def __init__(self, *, stochastic: bool = False) -> None:
        self.name = "fp32:bf16-sr" if stochastic else "fp32:bf16"
        self.rounds_stochastically = stochastic

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def stored(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """The bf16 values as they are stored: a view of `encoded`."""
        return encoded[: 2 * numel].view(torch.bfloat16)

    def _decode_part(
        self, encoded: torch.Tensor, values: torch.Tensor, numel: int, start: int
    ) -> None:
        # A shift by 16 bits on every device, and one pass over memory as it is.
        values.copy_(self.stored(encoded, numel)[start : start + values.numel()])

    def _encode_part(
        self, values: torch.Tensor, encoded: torch.Tensor, numel: int, start: int, seed: int
    ) -> None:
        halves = self.stored(encoded, numel)[start : start + values.numel()].view(torch.int16)
        bits = values.view(torch.int32)
        kernels = kernels_for(values)
        if kernels is not None:
            kernels.encode_bf16(bits, halves, start, seed_keys(seed), self.rounds_stochastically)
        else:
            self.encode_by_torch(bits, halves, start, seed)

    def encode_by_torch(
        self, bits: torch.Tensor, halves: torch.Tensor, start: int, seed: int
    ) -> None:
        """Reference of the fused kernel.

        Args:
            bits: fp32 patterns as int32.
            halves: int16, receives the bf16 patterns.
            start: index of the first element in its plane.
            seed: of stochastic rounding.
        """
        keys = seed_keys(seed)
        for part in chunks(bits.numel()):
            some = bits[part]
            if self.rounds_stochastically:
                random = random_bits(start + part.start, some.numel(), keys, bits.device)
                halves[part].copy_(stochastic_upper_half(some, random))
            else:
                halves[part].copy_(nearest_upper_half(some))

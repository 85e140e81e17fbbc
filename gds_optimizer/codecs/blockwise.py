"""fp32 moments as one byte each, companded logarithmically below the largest of their block.

A block (256 elements) keeps the bits of its largest magnitude, the *top*; an element keeps how far
below the top it lies. Distances are differences of fp32 bit patterns, read as integers: 2**23 to
an octave and linear within one, so they behave like a logarithm and need nothing but integer
addition. A distance d becomes an 8-bit *code* with the precision where most of a block is. With
C codes to a segment, segment s holds the distances from (2**s - 1) C 2**18 on, in steps of
2**(18 + s):

    t = d + C 2**18        s = floor(log2(t / (C 2**18)))        code = C s + (t >> (18 + s)) - C

so a code is itself a little float of t. What each codec keeps, with s from 0 to 3:

    fp32:int8-unsigned  C = 64: 32 codes an octave for 2 octaves, 16 for 4, 8 for 8, 4 for 15.5
                        byte = 255 - code; 0 is the value zero and nothing else
    fp32:int8-signed    C = 32: 32 codes an octave for 1 octave, 16 for 2, 8 for 4, 4 for 7.5
                        byte = ±(127 - code); 0 is zero and all that lies further below

The top comes back exactly, everything within 1.6 % (near the top) to 12.5 % (at the bottom).

Why this one. Scaling by blocks and spending precision unevenly is Dettmers et al., 8-bit Optimizers
via Block-wise Quantization (arXiv 2110.02861). Companding before a uniform byte is FlashOptim
(arXiv 2602.23349: softsign for `exp_avg`, square root for `exp_avg_sq`, in groups of 32). That a
second moment wants a logarithm, since linear codes swamp what an average adds to small values, is
SOLO (arXiv 2505.00347). Piecewise-linear logarithms as integers are old in telephony (ITU-T
G.711). Three things decided for the combination:

- Adam divides by the root of `exp_avg_sq`. Square-root codes turn what is below 4e-6 of the largest
  into zero (linear ones: below 2e-3), and the step is then `exp_avg` / eps. In simulated moments
  with gradients that differ by a factor of 3 within blocks (one standard deviation), the largest
  step was hundreds of times too long. Here only zero becomes zero; what is nonzero comes back as at
  least 2**-29.5 of the top, so that what lies out of range makes steps too short, never too long.
- `exp_avg` spans the root of what `exp_avg_sq` spans, so that their quotient stays bounded, and
  below its range it becomes zero: the remnant of a gradient long gone would push the parameter the
  same way for ever. (Of the small linear codes, nine tenths round back to the code itself.)
- For blocks of 256 whose gradients differ by 1, 3 and 7 times (one standard deviation), relative
  errors of the step were 0.03, 0.07 and 0.20 (simulated, beta2 = 0.95, to nearest); with softsign
  and square root, nonzero kept nonzero, 0.01, 0.19 and 0.73; with the dynamic maps of 8-bit
  Optimizers 0.02, 0.08 and 0.36 if nonzero is kept nonzero, else steps 800 times too long.

Rounding to nearest makes an average stick where a step changes it by less than half a code's
width; stochastic rounding makes it move by the right amount on average. Prefer the latter with a
large beta2.

Not a number: if a block holds NaN, an infinity or, for the unsigned codec, a value below zero, its
top is NaN and the whole block comes back as NaN: a fault shows and is never taken for zero.
"""

from __future__ import annotations

import torch

from gds_optimizer.codecs.acceleration import kernels_for
from gds_optimizer.codecs.base import (
    INFINITY_BITS,
    MAGNITUDE_BITS,
    NAN_BITS,
    EncodedCodec,
    chunks,
)
from gds_optimizer.codecs.rounding import random_bits, seed_keys, shift_right

BLOCK_NUMEL = 256
STEP_SHIFT = 18
"""The finest step between distances is 2**18: a 32nd of an octave."""
RANDOM_BITS = STEP_SHIFT + 3
SCALE_BYTES = 4


def deepest_distance(segment: int) -> int:
    """Distance below the top of the last code, for `segment` codes to a segment."""
    return ((2 * segment - 2) << (STEP_SHIFT + 3)) - (segment << STEP_SHIFT)


class BlockwiseCodec(EncodedCodec):
    """fp32 values as one byte each, with a scale for every block, in one plane.

    The plane is `numel` bytes (int8 or uint8), zeros up to a multiple of 4, and for each block the
    fp32 bits of its largest magnitude. A last block may be short.

    Args:
        signed: for values of both signs; otherwise values are at least zero.
        stochastic: round stochastically, with the seed of `encode_from`.
        block_numel: elements of a block, a power of two from 64 to 4096.
    """

    def __init__(
        self, *, signed: bool, stochastic: bool = False, block_numel: int = BLOCK_NUMEL
    ) -> None:
        if block_numel not in (64, 128, 256, 512, 1024, 2048, 4096):
            raise ValueError(
                f"a block has {block_numel} elements, wanted a power of two from 64 to 4096"
            )
        self.name = "fp32:int8-" + ("signed" if signed else "unsigned")
        self.name += "-sr" if stochastic else ""
        self.is_signed = signed
        self.rounds_stochastically = stochastic
        self.range_numel = block_numel
        self.segment = 32 if signed else 64
        # Code 0 in a byte; it counts downwards.
        self.top_byte = 127 if signed else 255

    def encoded_bytes(self, numel: int) -> int:
        return self._scale_offset(numel) + SCALE_BYTES * -(-numel // self.range_numel)

    @staticmethod
    def _scale_offset(numel: int) -> int:
        return -(-numel // SCALE_BYTES) * SCALE_BYTES

    def _views(
        self, encoded: torch.Tensor, numel: int, start: int, part_numel: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes (int8 or uint8) and the tops (int32) of a part."""
        codes = encoded[start : start + part_numel]
        tops = encoded[self._scale_offset(numel) : self.encoded_bytes(numel)].view(torch.int32)
        first = start // self.range_numel
        count = -(-part_numel // self.range_numel)
        return codes.view(torch.int8) if self.is_signed else codes, tops[first : first + count]

    def _decode_part(
        self, encoded: torch.Tensor, values: torch.Tensor, numel: int, start: int
    ) -> None:
        codes, tops = self._views(encoded, numel, start, values.numel())
        kernels = kernels_for(values)
        if kernels is not None:
            kernels.decode_blocks(codes, tops, values.view(torch.int32), self)
        else:
            self.decode_by_torch(codes, tops, values.view(torch.int32))

    def _encode_part(
        self, values: torch.Tensor, encoded: torch.Tensor, numel: int, start: int, seed: int
    ) -> None:
        codes, tops = self._views(encoded, numel, start, values.numel())
        if start + values.numel() == numel:
            encoded[numel : self._scale_offset(numel)].zero_()
        kernels = kernels_for(values)
        if kernels is not None:
            kernels.encode_blocks(
                values.view(torch.int32), codes, tops, start, seed_keys(seed), self
            )
        else:
            self.encode_by_torch(values.view(torch.int32), codes, tops, start, seed)

    # ------------------------------------------------------------------ by torch operations

    def decode_by_torch(self, codes: torch.Tensor, tops: torch.Tensor, bits: torch.Tensor) -> None:
        """Reference of the fused kernel; `bits` (int32) receives fp32 patterns."""
        for part, rows in self._blocks(bits.numel()):
            self._decode_rows(_rows(codes[part], rows), tops[rows], _rows(bits[part], rows))

    def _decode_rows(self, codes: torch.Tensor, tops: torch.Tensor, bits: torch.Tensor) -> None:
        """Blocks of equal length (rows)."""
        tops = tops[:, None]
        bits.copy_(codes)
        signs = (bits >> 31).bitwise_left_shift_(31)
        is_zero = bits == 0
        # -128 is never written; read it as -127.
        code = bits.abs_().clamp_max_(self.top_byte).neg_().add_(self.top_byte)
        segment = code // self.segment
        code -= segment * self.segment
        code += self.segment
        code <<= segment.add_(STEP_SHIFT)
        distance = code.sub_(self.segment << STEP_SHIFT)
        # A tiny top may be nearer to zero than the code is to the top: never reach zero.
        torch.sub(tops, distance, out=bits)
        bits.clamp_min_(1).masked_fill_(is_zero, 0).bitwise_or_(signs)
        bits.masked_fill_(tops >= INFINITY_BITS, NAN_BITS)

    def encode_by_torch(
        self, bits: torch.Tensor, codes: torch.Tensor, tops: torch.Tensor, start: int, seed: int
    ) -> None:
        """Reference of the fused kernel.

        Args:
            bits: fp32 patterns as int32, not written to.
            codes: int8 or uint8, receives the bytes.
            tops: int32, receives the scales.
            start: index of the first element in its plane.
            seed: of stochastic rounding.
        """
        keys = seed_keys(seed)
        for part, rows in self._blocks(bits.numel()):
            some = _rows(bits[part], rows)
            random = None
            if self.rounds_stochastically:
                random = random_bits(start + part.start, some.numel(), keys, bits.device)
                random = shift_right(random.view_as(some), 32 - RANDOM_BITS)
            self._encode_rows(some, _rows(codes[part], rows), tops[rows], random)

    def _encode_rows(
        self,
        bits: torch.Tensor,
        codes: torch.Tensor,
        tops: torch.Tensor,
        random: torch.Tensor | None,
    ) -> None:
        """Blocks of equal length (rows)."""
        magnitude = bits & MAGNITUDE_BITS
        tops.copy_(magnitude.amax(dim=1))
        is_fault = tops >= INFINITY_BITS
        if not self.is_signed:
            is_fault |= ((bits < 0) & (magnitude != 0)).any(dim=1)
        tops.masked_fill_(is_fault, NAN_BITS)

        is_zero = magnitude == 0
        distance = magnitude.neg_().add_(tops[:, None])
        deepest = deepest_distance(self.segment)
        if self.is_signed:
            is_zero |= distance > deepest
        t = distance.clamp_max_(deepest).add_(self.segment << STEP_SHIFT)
        segment = (t >= self.segment << (STEP_SHIFT + 1)).int()
        segment += t >= self.segment << (STEP_SHIFT + 2)
        segment += t >= self.segment << (STEP_SHIFT + 3)
        shift = segment + STEP_SHIFT
        if random is None:
            t += (1 << (shift - 1)).to(torch.int32)
        else:
            t += random.bitwise_and_((1 << shift).to(torch.int32) - 1)
        t >>= shift
        byte = t.add_(segment.sub_(1).mul_(self.segment)).neg_().add_(self.top_byte)
        if self.is_signed:
            byte = torch.where(bits < 0, -byte, byte)
        codes.copy_(byte.masked_fill_(is_zero | is_fault[:, None], 0))

    def _blocks(self, numel: int) -> list[tuple[slice, slice]]:
        """Elements and blocks of a part in chunks of whole blocks, and of a short one."""
        unit = self.range_numel
        whole = numel // unit * unit
        cuts = [(part, slice(part.start // unit, part.stop // unit)) for part in chunks(whole)]
        if whole < numel:
            cuts.append((slice(whole, numel), slice(whole // unit, whole // unit + 1)))
        return cuts


def _rows(flat: torch.Tensor, rows: slice) -> torch.Tensor:
    return flat.view(rows.stop - rows.start, -1)

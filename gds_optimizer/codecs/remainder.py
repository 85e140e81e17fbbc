"""fp32 main parameters as the 16 bits that their bf16 model parameter lacks: lossless.

The model's parameter is the main rounded to nearest, ties to even. Its bf16 pattern is therefore
the upper half of the main or one above it, and the lower half (the *remainder*) says which:

    remainder < 0x8000      rounded down: upper half = parameter
    remainder > 0x8000      rounded up:   upper half = parameter - 1 (with the carry into the
                            exponent undone; so also for infinity, by rounding of a finite main)
    remainder = 0x8000      a tie; the parameter is even, and the main may be half a step above
                            it or below it: one more bit, the *tie bit*, is set if it is below

The 16 bits are a little-endian int16 plane. The tie bits live in one of two places:

    main:remainder16         in the sign bit of `exp_avg_sq` as it is stored (fp32 or bf16), which
                             no second moment needs. Its plane must be encoded first, and whoever
                             reads it must clear the signs: `clear_tie_bits`.
    main:remainder16-bitmap  in a bitmap after the remainders, 0.125 bytes a parameter: for an
                             optimizer without such a moment, or with an int8 one. Bit i % 8 of
                             byte i // 8.

Both depend on the main alone, so encoding needs no model.

What is and is not kept: every number, zero and infinity comes back bit for bit if the model's
parameter is the main rounded. Of a NaN main the low 16 bits come back; sign and upper payload are
those of the model's NaN, which is up to whoever rounded it. It stays NaN.

If the parameter was changed from outside, decoding gives a main that is within half a step of
the new parameter and has the low bits of the old main; it rounds to the new parameter, unless the
old main was a tie. Next to zero, where no upper half below exists, the parameter is taken as the
upper half; an infinity from outside may become NaN. Whoever needs to know compares
`upper_half_checksum` of the shard after the step with that before the next one, and
`encodes_exactly` says whether a main and a parameter belong together.
"""

from __future__ import annotations

import torch

from gds_optimizer.codecs.acceleration import kernels_for
from gds_optimizer.codecs.base import (
    MAGNITUDE_BITS,
    Codec,
    check_flat,
    chunks,
    is_nan_bits,
)
from gds_optimizer.codecs.half import nearest_upper_half
from gds_optimizer.errors import UnsupportedError

TIE = 0x8000
TIE_PLANE = "exp_avg_sq"
SIGNLESS_CODECS = frozenset({"fp32", "bf16", "fp32:bf16", "fp32:bf16-sr"})
"""Codecs that store `TIE_PLANE` as floats, whose signs are free for tie bits."""
_LOW_HALF = 0xFFFF


class RemainderCodec(Codec):
    """Low halves of fp32 mains whose bf16 parameters are at hand.

    It decodes and encodes by `decode_main` and `encode_main`, since it needs more than bytes.

    Args:
        bitmap: keep the tie bits in a bitmap of its own instead of signs of `exp_avg_sq`.
    """

    dtype = torch.float32
    is_lossless = True
    workspace_itemsize = 2  # the parameters, gathered

    def __init__(self, *, bitmap: bool = False) -> None:
        self.name = "main:remainder16-bitmap" if bitmap else "main:remainder16"
        self.has_bitmap = bitmap
        # A byte of the bitmap.
        self.range_numel = 8 if bitmap else 1

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel + (-(-numel // 8) if self.has_bitmap else 0)

    @torch.no_grad()
    def decode_main(
        self,
        encoded: torch.Tensor,
        main: torch.Tensor,
        *,
        model: torch.Tensor | None = None,
        exp_avg_sq: torch.Tensor | None = None,
        numel: int | None = None,
        start: int = 0,
    ) -> None:
        """Put mains together from their parameters and remainders.

        Args:
            encoded: the whole encoded plane, 1-D uint8.
            main: 1-D contiguous fp32, receives elements `start` to `start + main.numel()`.
            model: the parameters of these elements, 1-D bf16. None: `main` holds them already,
                as fp32 (`main.copy_(model)`), and is completed in place.
            exp_avg_sq: the second moments of these elements as stored, 1-D contiguous fp32 or
                bf16, whose signs are tie bits; they stay as they are. None for the codec with a
                bitmap.
            numel: elements of the whole plane; by default the part is all of it.
            start: first element of the part; a multiple of 8 for the codec with a bitmap.

        Raises:
            ValueError: dtype, shape, size or place of a tensor is none that the codec can handle.
        """
        numel = self.check_part(encoded, main, numel, start)
        ties = self._ties(encoded, main, exp_avg_sq, numel, start)
        remainder = self._remainder(encoded, main, numel, start)
        if model is not None:
            check_flat(self.name, "model", model, torch.bfloat16)
            self._check_same(main, "model", model)
        if not main.numel():
            return
        kernels = kernels_for(main)
        if kernels is not None:
            halves = None if model is None else model.view(torch.int16)
            kernels.decode_remainder(remainder, ties, halves, main.view(torch.int32))
        else:
            if model is not None:
                main.copy_(model)
            self.complete_by_torch(remainder, ties, main.view(torch.int32))

    @torch.no_grad()
    def encode_main(
        self,
        main: torch.Tensor,
        encoded: torch.Tensor,
        *,
        exp_avg_sq: torch.Tensor | None = None,
        numel: int | None = None,
        start: int = 0,
    ) -> None:
        """Store the remainders of mains, and their tie bits.

        Args:
            main: 1-D contiguous fp32, elements `start` to `start + main.numel()`.
            encoded: the whole encoded plane, 1-D uint8.
            exp_avg_sq: the second moments of these elements as stored, 1-D contiguous fp32 or
                bf16: their signs become tie bits. None for the codec with a bitmap.
            numel: elements of the whole plane; by default the part is all of it.
            start: first element of the part; a multiple of 8 for the codec with a bitmap.

        Raises:
            ValueError: dtype, shape, size or place of a tensor is none that the codec can handle.
        """
        numel = self.check_part(encoded, main, numel, start)
        ties = self._ties(encoded, main, exp_avg_sq, numel, start)
        remainder = self._remainder(encoded, main, numel, start)
        if not main.numel():
            return
        kernels = kernels_for(main)
        if kernels is not None:
            kernels.encode_remainder(main.view(torch.int32), remainder, ties)
        else:
            self.encode_by_torch(main.view(torch.int32), remainder, ties)

    # ------------------------------------------------------------------ tensors in the plane

    @staticmethod
    def _remainder(
        encoded: torch.Tensor, main: torch.Tensor, numel: int, start: int
    ) -> torch.Tensor:
        return encoded[: 2 * numel].view(torch.int16)[start : start + main.numel()]

    def _ties(
        self,
        encoded: torch.Tensor,
        main: torch.Tensor,
        exp_avg_sq: torch.Tensor | None,
        numel: int,
        start: int,
    ) -> torch.Tensor:
        """Where tie bits live: int32 or int16 with them in the sign, or uint8 for a bitmap."""
        if self.has_bitmap:
            if exp_avg_sq is not None:
                raise ValueError(
                    f"codec {self.name}: its tie bits are in a bitmap, wanted no exp_avg_sq"
                )
            first = 2 * numel + start // 8
            return encoded[first : first + -(-main.numel() // 8)]
        if exp_avg_sq is None:
            raise ValueError(
                f"codec {self.name}: its tie bits are in the signs of exp_avg_sq, which is "
                "missing: pass it as it is stored, fp32 or bf16"
            )
        check_flat(self.name, "exp_avg_sq", exp_avg_sq, torch.float32, torch.bfloat16)
        self._check_same(main, "exp_avg_sq", exp_avg_sq)
        return _as_integers(exp_avg_sq)

    def _check_same(self, main: torch.Tensor, what: str, other: torch.Tensor) -> None:
        if (main.numel(), main.device) != (other.numel(), other.device):
            raise ValueError(
                f"codec {self.name}: main has {main.numel()} elements on {main.device}, but "
                f"{what} has {other.numel()} on {other.device}"
            )

    # ------------------------------------------------------------------ by torch operations

    def complete_by_torch(
        self, remainder: torch.Tensor, ties: torch.Tensor, bits: torch.Tensor
    ) -> None:
        """Reference of the fused kernel: `bits` (int32) holds parameters << 16."""
        for part in chunks(bits.numel()):
            main = bits[part]
            low = remainder[part].to(torch.int32).bitwise_and_(_LOW_HALF)
            # Above the tie, or at it with the bit set.
            is_below = low + self._tie_bits(ties, part) > TIE
            is_below &= (main & MAGNITUDE_BITS) != 0
            is_below &= ~is_nan_bits(main)
            main += low
            main -= is_below.to(torch.int32) << 16

    def encode_by_torch(
        self, bits: torch.Tensor, remainder: torch.Tensor, ties: torch.Tensor
    ) -> None:
        """Reference of the fused kernel; `bits` (int32) are fp32 patterns, not written to."""
        for part in chunks(bits.numel()):
            main = bits[part]
            remainder[part].copy_(main)
            # Odd upper half and remainder 0x8000, of anything but NaN.
            is_tie = (main & 0x1FFFF) == 0x10000 + TIE
            is_tie &= ~is_nan_bits(main)
            self._store_ties(ties, part, is_tie)

    def _tie_bits(self, ties: torch.Tensor, part: slice) -> torch.Tensor:
        if not self.has_bitmap:
            return ties[part] < 0
        weights = torch.arange(8, dtype=torch.int32, device=ties.device)
        some = ties[part.start // 8 : -(-part.stop // 8)].to(torch.int32)
        spread = (some[:, None] >> weights).bitwise_and_(1).view(-1)
        return spread[: part.stop - part.start]

    def _store_ties(self, ties: torch.Tensor, part: slice, is_tie: torch.Tensor) -> None:
        if not self.has_bitmap:
            set_signs(ties[part], is_tie)
            return
        some = ties[part.start // 8 : -(-part.stop // 8)]
        padded = torch.zeros(8 * some.numel(), dtype=torch.int32, device=ties.device)
        padded[: is_tie.numel()] = is_tie
        weights = torch.arange(8, dtype=torch.int32, device=ties.device)
        some.copy_((padded.view(-1, 8) << weights).sum(dim=1))

    # ------------------------------------------------------------------ what it cannot do alone

    def _alone(self) -> UnsupportedError:
        return UnsupportedError(
            f"codec {self.name} needs the bf16 parameters besides the plane: use decode_main and "
            "encode_main"
        )

    def decode(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """Raises UnsupportedError: see `decode_main`."""
        raise self._alone()

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Raises UnsupportedError: see `encode_main`."""
        raise self._alone()

    def decode_into(
        self,
        encoded: torch.Tensor,
        values: torch.Tensor,
        *,
        numel: int | None = None,
        start: int = 0,
    ) -> None:
        """Raises UnsupportedError: see `decode_main`."""
        raise self._alone()

    def encode_from(
        self,
        values: torch.Tensor,
        encoded: torch.Tensor,
        *,
        numel: int | None = None,
        start: int = 0,
        seed: int = 0,
    ) -> None:
        """Raises UnsupportedError: see `encode_main`."""
        raise self._alone()


def _as_integers(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16 if values.dtype.itemsize == 2 else torch.int32)


def set_signs(integers: torch.Tensor, signs: torch.Tensor) -> None:
    """Make `signs` (bool) the sign bits of int16 or int32 patterns, in place."""
    limits = torch.iinfo(integers.dtype)
    integers.bitwise_and_(limits.max).bitwise_or_(signs.to(integers.dtype).mul_(limits.min))


def stored_moments(encoded: torch.Tensor, codec: str, numel: int) -> torch.Tensor:
    """The floats whose signs are tie bits: a view, fp32 or bf16.

    Args:
        encoded: the encoded plane, 1-D uint8.
        codec: its name, one of `SIGNLESS_CODECS`.
        numel: elements.
    """
    dtype = torch.float32 if codec == "fp32" else torch.bfloat16
    return encoded[: numel * dtype.itemsize].view(dtype)


@torch.no_grad()
def clear_tie_bits(exp_avg_sq: torch.Tensor) -> None:
    """Clear the signs of second moments (fp32 or bf16) in place: before they are used, always.

    A sign of their own they have none: -0 and NaN lose theirs.
    """
    integers = _as_integers(exp_avg_sq)
    integers.bitwise_and_(torch.iinfo(integers.dtype).max)


@torch.no_grad()
def encodes_exactly(main: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Whether `model` is `main` rounded, so that every main comes back from its remainder.

    NaN goes with NaN, whatever the payloads.

    Args:
        main: 1-D contiguous fp32.
        model: 1-D contiguous bf16 of as many elements, on the same device.

    Returns:
        0-dim bool tensor on their device, computed without waiting for it.

    Raises:
        ValueError: other shapes or dtypes.
    """
    check_flat("main:remainder16", "main", main, torch.float32)
    check_flat("main:remainder16", "model", model, torch.bfloat16)
    if main.numel() != model.numel():
        raise ValueError(f"main has {main.numel()} elements, but model has {model.numel()}")
    bits, halves = main.view(torch.int32), model.view(torch.int16)
    is_exact = torch.ones((), dtype=torch.bool, device=main.device)
    for part in chunks(bits.numel()):
        ours, theirs = bits[part], halves[part]
        is_same = nearest_upper_half(ours).to(torch.int16) == theirs
        is_same |= is_nan_bits(ours) & is_nan_bits(theirs.to(torch.int32) << 16)
        is_exact &= is_same.all()
    return is_exact


@torch.no_grad()
def upper_half_checksum(model: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Checksum of bf16 parameters: sum over i of (2 (offset + i) + 1) * pattern[i], mod 2**64.

    Every change of one element changes it, since odd weights have an inverse. Unlike the checksum
    of buckets it counts 16-bit words (sign-extended): a shard starts anywhere and has any length.
    The parts of a whole, each with its offset, add up to the checksum of the whole.

    Args:
        model: 1-D contiguous bf16.
        offset: index of the first element in the whole.

    Returns:
        0-dim int64 tensor on the model's device, computed without waiting for it.
    """
    check_flat("main:remainder16", "model", model, torch.bfloat16)
    halves = model.view(torch.int16)
    total = torch.zeros((), dtype=torch.int64, device=model.device)
    for part in chunks(halves.numel()):
        first = offset + part.start
        weights = torch.arange(
            2 * first + 1,
            2 * (first + part.stop - part.start) + 1,
            2,
            dtype=torch.int64,
            device=model.device,
        )
        total += weights.mul_(halves[part]).sum()
    return total

"""Random numbers for stochastic rounding that every device, and every resumed run, repeats.

They are a hash of a seed and of the element's index in its plane, made of 32-bit integer
operations that wrap around: nothing is stored, nothing depends on the order of evaluation or on
how a plane is cut. The steps are those of Wellons's "lowbias32"
(https://nullprogram.com/blog/2018/07/31/); of two keys that a seed gives, one is added to the index
and one between the multiplications, so that two seeds do not give permutations of one sequence.
"""

from __future__ import annotations

import torch

_MASK_64 = 2**64 - 1


def wrap_int32(value: int) -> int:
    """The int32 that equals `value` modulo 2**32."""
    return (value + 2**31) % 2**32 - 2**31


INDEX_FACTOR = wrap_int32(0x9E3779B1)
FIRST_FACTOR = wrap_int32(0x7FEB352D)
SECOND_FACTOR = wrap_int32(0x846CA68B)


def rounding_seed(step: int, bucket: int, plane: int) -> int:
    """Seed (64 bits) of one encoding: a resumed run that repeats a step repeats its rounding.

    Args:
        step: number of the optimizer step whose result is encoded.
        bucket: index of the bucket in its layout.
        plane: index of the plane in its bucket.
    """
    seed = 0
    for word in (step, bucket, plane):
        seed = _mix(seed + word)
    return seed


def _mix(value: int) -> int:
    """One step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def seed_keys(seed: int) -> tuple[int, int]:
    """What `random_bits` takes for a seed (64 bits): the int32 halves of its mix.

    Mixed since neighbouring seeds are welcome, but keys that differ in few bits are not.
    """
    mixed = _mix(seed)
    return wrap_int32(mixed), wrap_int32(mixed >> 32)


def random_bits(
    start: int, numel: int, keys: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """32 random bits for each of the elements from `start` on: 1-D int32 of `numel` elements."""
    bits = torch.arange(numel, dtype=torch.int32, device=device)
    bits.add_(wrap_int32(start)).mul_(INDEX_FACTOR).add_(keys[0])
    bits.bitwise_xor_(shift_right(bits, 16)).mul_(FIRST_FACTOR).add_(keys[1])
    bits.bitwise_xor_(shift_right(bits, 15)).mul_(SECOND_FACTOR)
    return bits.bitwise_xor_(shift_right(bits, 16))


def shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift of int32, whose own shift in torch copies the sign."""
    return (bits >> by).bitwise_and_((1 << (32 - by)) - 1)

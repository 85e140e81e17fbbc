"""What tests of moments and of mains that are not kept in fp32 have in common."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

FP32: dict[str, str] = {}
BF16 = {"moment_dtype": "bf16"}
INT8 = {"moment_dtype": "int8"}
REMAINDER = {"main": "remainder"}

momentum = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
BUCKET_BYTES = 16 * 1024  # 1024 elements of up to four planes
# Without a gradient: some never, some now and then, and with them all pieces of some buckets.
FROZEN = {0: (2, 5), 1: (2,), 2: (2, 3, 8), 3: (0, 1, 2, 3, 5, 6), 4: (2, 7, 8)}


def name_of(value: Any) -> str:
    """Of a set of options, for the name of a test."""
    return "-".join(value.values()) or "fp32" if isinstance(value, dict) else ""


def special_values(numel: int, seed: int) -> torch.Tensor:
    """Mains of any exponent, half of them ties, and zeros, subnormals and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32)
    bits[::2] = bits[::2] & ~0xFFFF | 0x8000
    bits[3::7] &= ~0x7F800000  # subnormals, among them ties next to zero
    first = (0, -(2**31), 0x7F800000, 0x7F800000 - 2**31, 0x8000, 0x18000, 1, 0x7F7FFFFF)
    bits[: len(first)] = torch.tensor(first[:numel], dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    values[values.isnan()] = 1.0
    return values

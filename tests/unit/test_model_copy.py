"""Copies between mains and parameters, by lists and one by one: the same bits either way."""

from __future__ import annotations

import math

import pytest
import torch

from gds_optimizer import model_copy
from tests.support.engines import same_bits

SIZES = (1, 63, 0, 64, 65, 5000, 7)


def mains(numel: int, seed: int) -> torch.Tensor:
    """Random ones, and values at which rounding and signs could differ."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    # 1 + 2**-8 and 1 + 3 * 2**-8 lie halfway between two bf16 numbers.
    special = (-0.0, math.inf, -math.inf, 1e-45, -3.4e38, 1 + 2**-8, 1 + 3 * 2**-8)
    values[: len(special)] = torch.tensor(special)[:numel]
    return values


@pytest.mark.parametrize("sizes", [SIZES, SIZES[:1], (64,), ()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("large_numel", [0, 64, 10**6])
def test_a_kernel_for_each_or_for_a_list(monkeypatch, large_numel, dtype, sizes):
    monkeypatch.setattr(model_copy, "_LARGE_NUMEL", large_numel)
    sources = [mains(size, seed) for seed, size in enumerate(sizes)]
    targets = [torch.full((size,), math.nan, dtype=dtype) for size in sizes]
    model_copy._copy(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert same_bits(target, source.to(dtype))

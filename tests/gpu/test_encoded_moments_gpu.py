"""Encoded moments on a GPU: what its kernels leave in files is what the CPU's would."""

from __future__ import annotations

import pytest
import torch

from gds_optimizer.mapped_state import map_state
from tests.support.engines import SIZES, pair, same_bits
from tests.support.forms import FROZEN, name_of
from tests.unit.test_encoded_moments import LOSSY

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("moments", LOSSY, ids=name_of)
def test_a_step_is_the_resident_one_with_rounded_moments(tmp_path, moments, fused, slots):
    """Stepped on the GPU, rounded for comparison on the CPU."""

    def make(groups):
        return torch.optim.AdamW(groups, lr=1e-2, fused=fused)

    options = {"moments": moments, "slots": slots, "kind": "posix-cuda", "device": "cuda"}
    with pair(tmp_path, make, **options) as both:
        assert both.engine.pool.scratch.is_cuda
        for step in range(6):
            both.step(step, FROZEN.get(step, ()))
        both.check()
        mapped = map_state(both.engine)
        for index, size in enumerate(SIZES):
            wanted = both.resident.state(index)
            if size and "exp_avg" in wanted:
                for key, value in mapped.tensors(index).items():
                    assert same_bits(value, wanted[key]), f"{key} of p{index}"
        both.engine.drain()
        both.engine.pool.suspend()
        both.engine.pool.resume()
        both.step(6)
        both.check()

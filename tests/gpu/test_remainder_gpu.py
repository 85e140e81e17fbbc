"""Mains as remainders on a GPU: its kernels do what the CPU's code does."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gds_optimizer.codecs import fused_kernels
from gds_optimizer.errors import ModelChangedError
from gds_optimizer.mapped_state import map_state
from tests.support.engines import SIZES, adamw, grads_of, pair, same_bits
from tests.support.forms import BF16, FP32, FROZEN, INT8, name_of, special_values
from tests.support.snapshots import built, compare, everything, restore, root, take
from tests.unit.test_remainder_mains import OPTIMIZERS, with_remainders

pytestmark = pytest.mark.gpu

CUDA = {"kind": "posix-cuda", "device": "cuda"}
KINDS = {**OPTIMIZERS, "capturable": partial(adamw, capturable=True)}
all_moments = pytest.mark.parametrize("moments", [FP32, BF16, INT8], ids=name_of)


def test_the_kernels_are_in_use():
    is_used, reason = fused_kernels(torch.device("cuda"))
    assert is_used, reason


@all_moments
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [1, 3])
def test_streamed_equals_resident(tmp_path, kind, moments, slots):
    with pair(tmp_path, KINDS[kind], slots=slots, **with_remainders(moments), **CUDA) as both:
        assert both.engine.pool.scratch.is_cuda
        for step in range(6):
            both.step(step, FROZEN.get(step, ()))
        both.check()
        mapped = map_state(both.engine)  # put together on the CPU
        for index, size in enumerate(SIZES):
            wanted = both.resident.state(index)
            for key, value in mapped.tensors(index).items() if size else ():
                if key in wanted:
                    assert same_bits(value, wanted[key]), f"{key} of p{index}"
        del mapped
        both.step(6)
        both.check()


@all_moments
def test_ties_and_special_values(tmp_path, moments):
    make = partial(adamw, weight_decay=0.0)
    with pair(tmp_path, make, **with_remainders(moments), **CUDA) as both:
        both.step(0)
        sources = {}
        for index, size in enumerate(SIZES):
            values = special_values(size, index).to("cuda")
            both.resident.mains[index].copy_(values)
            sources[id(both.streamed.mains[index])] = values
        both.engine.write_mains(sources)
        both.check()
        for optimizer in both.optimizers:
            optimizer.param_groups[0]["lr"] = 0.0
        for step in range(1, 5):
            both.step(step, FROZEN.get(step, ()))
            both.check()


def test_a_changed_model_is_refused(tmp_path):
    with pair(tmp_path, adamw, **with_remainders(FP32), **CUDA) as both:
        both.step(0)
        model = both.streamed.models[7]
        kept = model[4000].clone()
        model[4000] += 1
        with pytest.raises(ModelChangedError, match="p7"):
            both.streamed.step([grad.to("cuda") for grad in grads_of(SIZES, 1)])
        model[4000] = kept
        both.step(1)
        both.check()


@all_moments
def test_snapshots(tmp_path, moments):
    """Taken on the GPU also without slots, restored there and on the CPU."""
    path, options = tmp_path / "snapshot", with_remainders(moments)
    with pair(root(tmp_path, "a"), adamw, **options, **CUDA) as both:
        for step in range(3):
            both.step(step)
        wanted = everything(both.streamed)
        both.engine.drain()
        both.engine.pool.suspend()
        take(both.streamed, path)
        both.engine.pool.resume()
        both.step(3)
        restore(both.streamed, path)
        compare(wanted, everything(both.streamed))
    with built(root(tmp_path, "b"), adamw, native=(), groups=None, **options) as other:
        restore(other, path)
        compare(wanted, everything(other))

"""Moments that are not kept in fp32: what is stored, and that nothing else changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from gds_optimizer.checkpoint import load_state_dict, state_dict
from gds_optimizer.codecs import get_codec
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.layout import align_up
from gds_optimizer.mapped_state import map_state
from tests.support.engines import SIZES, adamw, grads_of, pair, same_bits, streamed

BF16 = {"moment_dtype": "bf16", "moment_rounding": "nearest"}
BF16_SR = {"moment_dtype": "bf16", "moment_rounding": "stochastic"}
INT8 = {"moment_dtype": "int8", "moment_rounding": "nearest"}
INT8_SR = {"moment_dtype": "int8", "moment_rounding": "stochastic"}
LOSSY = [BF16, BF16_SR, INT8, INT8_SR]
IDS = {"ids": lambda value: f"{value['moment_dtype']}-{value['moment_rounding']}"}

momentum = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
nadam = partial(torch.optim.NAdam, lr=1e-2)
OPTIMIZERS = {
    "default": adamw,
    "foreach": partial(adamw, foreach=True),
    "fused": partial(adamw, fused=True),
    "amsgrad": partial(adamw, amsgrad=True),
    "momentum": momentum,
}
BUCKET_BYTES = 16 * 1024  # 1024 elements of up to four planes
# Without a gradient: some from the start, some in between, all pieces of some buckets.
FROZEN = {0: (2, 5), 1: (2,), 2: (2, 3, 8), 3: (0, 1, 2, 3, 5, 6), 4: (2, 7, 8)}


def codecs_of(layout: Any) -> dict[str, str]:
    return {plane.name: plane.codec for plane in layout.spaces[0].planes}


# ---------------------------------------------------------------------- the step


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("moments", LOSSY, **IDS)
def test_a_step_is_the_resident_one_with_rounded_moments(tmp_path, moments, make, slots):
    with pair(tmp_path, make, moments=moments, slots=slots, bucket_size=BUCKET_BYTES) as both:
        assert len(both.engine.layout.buckets) > 10
        for step in range(6):
            both.step(step, FROZEN.get(step, ()))
        both.check()


# ---------------------------------------------------------------------- handed out


@pytest.mark.parametrize("moments", LOSSY, **IDS)
def test_what_is_handed_out_is_decoded(tmp_path, moments):
    with pair(tmp_path, adamw, moments=moments) as both:
        for step in range(3):
            both.step(step)
            mapped = map_state(both.engine)
            for index, size in enumerate(SIZES):
                if size:
                    wanted = both.resident.state(index)
                    for key, value in mapped.tensors(index).items():
                        assert same_bits(value, wanted[key]), f"{key} of p{index}"
        del mapped
        both.step(3)
        both.check()


@pytest.mark.parametrize("moments", LOSSY, **IDS)
def test_a_state_dict_is_taken_up_to_the_bit(tmp_path, moments):
    """Also with other bucket sizes: blocks are counted from each shard's start."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with streamed(tmp_path / "a", moments=moments) as source:
        for step in range(3):
            source.step(grads_of(SIZES, step))
        torch.save(state_dict(source.engine), tmp_path / "state.pt")
        state = source.engine.read_state()
        with streamed(tmp_path / "b", moments=moments, bucket_size=5 * BUCKET_BYTES) as target:
            saved = torch.load(tmp_path / "state.pt", mmap=True, weights_only=True)
            load_state_dict(target.engine, saved)
            for name, planes in target.engine.read_state().items():
                for key, value in planes.items():
                    assert same_bits(value, state[name][key]), f"{key} of {name}"

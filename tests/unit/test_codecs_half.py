"""fp32 as bf16: the nearest for every upper half, and stochastically right on average."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gds_optimizer.codecs import Bf16Codec, get_codec
from tests.unit.test_codecs import every_upper_half

ALL_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def encoded(codec: Bf16Codec, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """The bf16 values that are stored."""
    plane = torch.zeros(2 * values.numel(), dtype=torch.uint8)
    codec.encode_from(values, plane, seed=seed)
    return codec.stored(plane, values.numel())


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


def test_rounding_to_nearest_is_torch_s_own():
    values = every_upper_half().view(torch.float32)
    stored, wanted = encoded(get_codec("fp32:bf16"), values), values.bfloat16()
    is_nan = values.isnan()
    assert torch.equal(bits(stored)[~is_nan], bits(wanted)[~is_nan])
    assert torch.equal(stored.isnan(), is_nan)


@pytest.mark.parametrize("name", ["fp32:bf16", "fp32:bf16-sr"])
def test_nan_keeps_sign_and_upper_payload_and_becomes_quiet(name):
    patterns = [0x7F800001, 0x7FC12345, 0x7FFFFFFF, 0x7F912345]
    patterns += [pattern - 2**31 for pattern in patterns]
    values = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    wanted = [(pattern >> 16) | 0x40 for pattern in patterns]
    for seed in range(20):
        assert bits(encoded(get_codec(name), values, seed)).tolist() == wanted


@pytest.mark.parametrize("name", ["fp32:bf16", "fp32:bf16-sr"])
def test_every_bf16_survives(name):
    codec, values = get_codec(name), ALL_BF16.float()
    stored = encoded(codec, values, seed=5)
    # Only signalling NaN change.
    expected = torch.where(ALL_BF16.isnan(), bits(ALL_BF16) | 0x40, bits(ALL_BF16))
    assert torch.equal(bits(stored), expected)
    decoded = codec.decode(stored.view(torch.uint8), stored.numel())
    assert torch.equal(bits(decoded), bits(stored).to(torch.int32) << 16)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_stochastic_rounding_goes_to_one_of_the_neighbours(seed):
    patterns = every_upper_half()
    values = patterns.view(torch.float32)
    stored = bits(encoded(get_codec("fp32:bf16-sr"), values, seed))
    numbers = ~values.isnan()
    steps = (stored.to(torch.int32) - (patterns >> 16))[numbers]
    exact = (patterns[numbers] & 0xFFFF) == 0
    # One step outwards: +1 in the pattern, whatever the sign (0x7FFF wraps to 0x8000 for none).
    assert set(steps.tolist()) == {0, 1}
    assert bool((steps[exact] == 0).all())


@pytest.mark.parametrize("low", [0x0001, 0x1000, 0x8000, 0xC000, 0xFFFF])
@pytest.mark.parametrize("upper", [0x3F80, 0xBF81, 0x0000, 0x7F7F])
def test_stochastic_rounding_is_right_on_average(low, upper):
    """Also for subnormals and, with infinity as the last step, for the largest numbers."""
    numel = 2**16
    pattern = (upper << 16 | low) - (2**32 if upper >= 2**15 else 0)
    values = torch.full((numel,), pattern, dtype=torch.int32).view(torch.float32)
    stored = bits(encoded(get_codec("fp32:bf16-sr"), values, seed=77)).to(torch.int32)
    share = ((stored - (pattern >> 16)) == 1).double().mean().item()
    p = low / 2**16
    assert abs(share - p) <= 5 * (p * (1 - p) / numel) ** 0.5 + 1 / numel


@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_any_number_is_rounded_as_torch_rounds_it(values):
    tensor = torch.tensor(values)
    assert torch.equal(bits(encoded(get_codec("fp32:bf16"), tensor)), bits(tensor.bfloat16()))


@pytest.mark.parametrize(("name", "falls"), [("fp32:bf16", False), ("fp32:bf16-sr", True)])
def test_an_average_that_changes_by_a_thousandth(name, falls):
    """What the stochastic variant is for: with beta2 = 0.999 the nearest bf16 is the old one."""
    codec, values = get_codec(name), torch.full((4096,), 1.5)
    plane = torch.zeros(2 * 4096, dtype=torch.uint8)
    for step in range(200):
        codec.encode_from(values * 0.999, plane, seed=step)
        codec.decode_into(plane, values)
    if falls:
        assert values.mean().item() == pytest.approx(1.5 * 0.999**200, rel=2e-3)
    else:
        assert bool((values == 1.5).all())

"""Remainders: every fp32 main comes back, bit for bit, from its bf16 parameter and 16 bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gds_optimizer.codecs import (
    clear_tie_bits,
    encodes_exactly,
    get_codec,
    upper_half_checksum,
)
from tests.unit.test_codecs import LOW_HALVES, any_bits, every_upper_half

TIES = ["fp32 sign", "bf16 sign", "bitmap"]


class Stored:
    """What is kept of some mains: remainders, and wherever the tie bits are."""

    def __init__(self, ties: str, numel: int) -> None:
        bitmap = ties == "bitmap"
        self.numel = numel
        self.codec = get_codec("main:remainder16-bitmap" if bitmap else "main:remainder16")
        self.plane = torch.full((self.codec.encoded_bytes(numel) + 64,), 0xA5, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(1)
        second = torch.rand(numel, generator=generator)
        if ties == "bf16 sign":
            second = second.bfloat16()
        self.second = None if bitmap else second
        self.kept_second = None if bitmap else second.clone()

    def _part(self, start: int, numel: int) -> dict[str, object]:
        second = None if self.second is None else self.second[start : start + numel]
        return {"exp_avg_sq": second, "numel": self.numel, "start": start}

    def encode(self, main: torch.Tensor, start: int = 0) -> None:
        self.codec.encode_main(main, self.plane, **self._part(start, main.numel()))

    def decode(self, model: torch.Tensor, start: int = 0, *, in_place: bool = False):
        """The mains of these parameters, with the parameters in a tensor or in the result."""
        main = model.float() if in_place else torch.full((model.numel(),), 9.0)
        self.codec.decode_main(
            self.plane,
            main,
            model=None if in_place else model,
            **self._part(start, model.numel()),
        )
        return main


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Numbers equal bit for bit; where NaN is wanted there is NaN with the same low half."""
    is_nan = wanted.isnan()
    found_bits, wanted_bits = found.view(torch.int32), wanted.view(torch.int32)
    assert torch.equal(found_bits[~is_nan], wanted_bits[~is_nan])
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(found_bits[is_nan] & 0xFFFF, wanted_bits[is_nan] & 0xFFFF)


@pytest.mark.parametrize("in_place", [False, True], ids=["model given", "model in place"])
@pytest.mark.parametrize("ties", TIES)
def test_every_upper_half_with_every_tie(ties, in_place):
    main = every_upper_half().view(torch.float32)
    stored = Stored(ties, main.numel())
    stored.encode(main)
    model = main.bfloat16()
    assert_same_bits(stored.decode(model, in_place=in_place), main)
    assert bool(encodes_exactly(main, model))
    assert bool((stored.plane[-64:] == 0xA5).all()), "wrote past its bytes"


def test_the_cases_that_need_a_tie_bit_are_there():
    """Two mains, one parameter, one remainder: 0x3F808000 and 0x3F7F8000."""
    main = torch.tensor([0x3F808000, 0x3F7F8000], dtype=torch.int32).view(torch.float32)
    model = main.bfloat16()
    assert model[0] == model[1] == 1.0
    for ties in TIES:
        stored = Stored(ties, 2)
        stored.encode(main)
        assert stored.plane[:4].tolist() == [0x00, 0x80, 0x00, 0x80]
        assert torch.equal(stored.decode(model), main)
        if ties == "bitmap":
            assert stored.plane[4] == 0b10
        else:
            assert torch.signbit(stored.second).tolist() == [False, True]


@pytest.mark.parametrize(
    "pattern",
    [
        0x00000000,
        0x00000001,
        0x00008000,
        0x00008001,
        0x007FFFFF,
        0x7F7F8000,
        0x7F7FFFFF,
        0x7F800000,
    ],
    ids=lambda pattern: f"{pattern:08X}",
)
@pytest.mark.parametrize("sign", [0, -(2**31)], ids=["+", "-"])
@pytest.mark.parametrize("ties", TIES)
def test_edges(ties, sign, pattern):
    """Zeros, subnormals, mains that round to infinity, infinities: with both signs."""
    main = torch.tensor([pattern + sign] * 3, dtype=torch.int32).view(torch.float32)
    stored = Stored(ties, 3)
    stored.encode(main)
    found = stored.decode(main.bfloat16())
    assert found.view(torch.int32).tolist() == [pattern + sign] * 3


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("model_nan", [0x7F81, 0x7FC0, 0x7FFF, -1, -0x3F, -0x7F])
def test_nan_has_the_model_s_upper_half_and_its_own_lower_one(ties, model_nan):
    low = torch.tensor(LOW_HALVES, dtype=torch.int32)
    main = (low | 0x7FC50000).view(torch.float32)
    stored = Stored(ties, main.numel())
    stored.encode(main)
    model = torch.full((main.numel(),), model_nan, dtype=torch.int16).view(torch.bfloat16)
    found = stored.decode(model).view(torch.int32)
    assert torch.equal(found, low | (model_nan << 16))


@pytest.mark.parametrize("ties", TIES)
@given(numel=st.integers(1, 700), seed=st.integers(0, 2**31), data=st.data())
def test_any_bits_in_any_parts(ties, numel, seed, data):
    main = any_bits(4 * numel, seed).view(torch.float32)
    # Random bits hardly ever tie: make every third one do so.
    main.view(torch.int32)[::3].bitwise_and_(-(2**16)).bitwise_or_(0x8000)
    model = main.bfloat16()
    whole, in_parts = Stored(ties, numel), Stored(ties, numel)
    whole.encode(main)
    cuts = data.draw(st.sets(st.integers(1, 90), max_size=3))
    bounds = sorted({0, numel} | {8 * cut for cut in cuts if 8 * cut < numel})
    for start, stop in itertools.pairwise(bounds):
        in_parts.encode(main[start:stop], start)
    assert torch.equal(whole.plane, in_parts.plane)
    assert whole.second is None or torch.equal(whole.second, in_parts.second)
    for start, stop in itertools.pairwise(bounds):
        assert_same_bits(whole.decode(model[start:stop], start), main[start:stop])


@pytest.mark.parametrize("ties", ["fp32 sign", "bf16 sign"])
def test_signs_are_all_that_exp_avg_sq_lends(ties):
    main = every_upper_half().view(torch.float32)
    stored = Stored(ties, main.numel())
    stored.second[::2].neg_()  # an older tie bit: overwritten
    stored.encode(main)
    is_tie = (main.view(torch.int32) & 0x1FFFF) == 0x18000
    assert torch.equal(torch.signbit(stored.second), is_tie & ~main.isnan())
    lent = stored.second.clone()
    stored.decode(main.bfloat16())
    assert torch.equal(stored.second, lent), "decoding must not change the plane"
    clear_tie_bits(stored.second)
    assert torch.equal(stored.second, stored.kept_second)


def test_clearing_tie_bits_of_everything():
    values = any_bits(4096, seed=3).view(torch.float32).clone()
    for tensor in (values, values.view(torch.bfloat16).clone()):
        integers = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
        wanted = integers & torch.iinfo(integers.dtype).max
        clear_tie_bits(tensor)
        assert torch.equal(integers, wanted)


@pytest.mark.parametrize("ties", TIES)
def test_a_parameter_changed_from_outside(ties):
    """The main follows to within rounding of the new parameter, with its old low bits."""
    main = every_upper_half().view(torch.float32)
    main = main[~main.isnan() & (main.abs() < 1e30)]
    stored = Stored(ties, main.numel())
    stored.encode(main)
    changed = (main.bfloat16().float() * 3 + 1e-30).bfloat16()
    assert not bool(encodes_exactly(main, changed))
    found = stored.decode(changed)
    assert torch.equal(found.view(torch.int32) & 0xFFFF, main.view(torch.int32) & 0xFFFF)
    is_tie = (main.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(found.bfloat16()[~is_tie], changed[~is_tie])
    half_step = (changed.view(torch.int16) + 1).view(torch.bfloat16).double() - changed.double()
    assert bool(((found.double() - changed.double()).abs() <= half_step.abs() / 2).all())


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_parameter_zeroed_from_outside_is_never_nan(ties, zero):
    main = every_upper_half().view(torch.float32)
    stored = Stored(ties, main.numel())
    stored.encode(main)
    found = stored.decode(torch.full_like(main, zero, dtype=torch.bfloat16))
    assert bool((found.abs() <= torch.finfo(torch.float32).tiny).all())


def test_encodes_exactly_sees_one_wrong_parameter():
    main = torch.randn(2**18 + 77, generator=torch.Generator().manual_seed(0))
    model = main.bfloat16()
    for index in (0, 2**18 - 1, 2**18, main.numel() - 1):
        wrong = model.clone()
        wrong.view(torch.int16)[index] += 1
        assert not bool(encodes_exactly(main, wrong))
    assert bool(encodes_exactly(main, model))
    assert bool(encodes_exactly(main[:0], model[:0]))


@pytest.mark.parametrize(
    ("main", "model", "is_exact"),
    [
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (1.0, float("nan"), False),
        (3.4e38, float("inf"), True),
        (1.0 + 2**-8, 1.0, True),
        (1.0 + 2**-8 + 2**-20, 1.0, False),
        (1.0 + 3 * 2**-8, 1.0 + 2**-6, True),
        (1.0 + 3 * 2**-8, 1.0 + 2**-7, False),
    ],
)
def test_what_belongs_together(main, model, is_exact):
    pair = torch.tensor([2.0, main]), torch.tensor([2.0, model]).bfloat16()
    assert bool(encodes_exactly(*pair)) == is_exact


def test_the_checksum_is_the_documented_sum():
    model = any_bits(2 * 5001, seed=2).view(torch.bfloat16)
    wanted = sum((2 * (100 + i) + 1) * w for i, w in enumerate(model.view(torch.int16).tolist()))
    assert upper_half_checksum(model, 100).item() % 2**64 == wanted % 2**64


@given(numel=st.integers(0, 400_000), cut=st.integers(0, 400_000), flip=st.integers(0, 15))
def test_the_checksum_adds_up_and_sees_a_flipped_bit(numel, cut, flip):
    cut = min(cut, numel)
    model = any_bits(2 * numel, seed=numel).view(torch.bfloat16)
    whole = upper_half_checksum(model)
    parts = upper_half_checksum(model[:cut]) + upper_half_checksum(model[cut:], cut)
    assert whole.item() == parts.item()
    if numel:
        model.view(torch.int16)[cut - 1] ^= 1 << flip if flip < 15 else -(2**15)
        assert upper_half_checksum(model).item() != whole.item()


def test_wrong_arguments_are_refused():
    main, model = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    sign, bitmap = get_codec("main:remainder16"), get_codec("main:remainder16-bitmap")
    plane = torch.zeros(200, dtype=torch.uint8)
    calls = {
        "which is missing": lambda: sign.decode_main(plane, main, model=model),
        "wanted no exp_avg_sq": lambda: bitmap.encode_main(main, plane, exp_avg_sq=main.clone()),
        "exp_avg_sq has 32": lambda: sign.encode_main(main, plane, exp_avg_sq=torch.zeros(32)),
        "torch.float32 or torch.bfloat16": lambda: sign.encode_main(
            main, plane, exp_avg_sq=torch.zeros(64, dtype=torch.float16)
        ),
        "model must be 1-D, contiguous and torch.bfloat16": lambda: bitmap.decode_main(
            plane, main, model=model.half()
        ),
        "model has 32": lambda: bitmap.decode_main(plane, main, model=model[:32]),
        "take 136 bytes": lambda: bitmap.encode_main(main, plane[:135]),
        "elements 4 to 68 of 80, wanted a part of the plane between multiples of 8": (
            lambda: bitmap.encode_main(main, plane, start=4, numel=80)
        ),
        "main must be": lambda: encodes_exactly(main.double(), model),
        "but model has 32": lambda: encodes_exactly(main, model[:32]),
        "got torch.float16": lambda: upper_half_checksum(model.half()),
    }
    for complaint, call in calls.items():
        with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
            call()
    assert not plane.any()


def test_the_samples_contain_the_tie():
    assert 0x8000 in LOW_HALVES
    assert {0x7FFF, 0x8001} <= set(LOW_HALVES)

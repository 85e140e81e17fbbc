"""A flat range of a tensor as rectangles: exactly covered, in order, and few."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gds_optimizer.megatron.rectangles import Rectangle, rectangles


@st.composite
def ranges(draw, least=0, most=4):
    """A shape of so many dimensions and a range of its elements."""
    count = draw(st.integers(least, most))
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=count, max_size=count)))
    start = draw(st.integers(0, math.prod(shape)))
    end = draw(st.integers(start, math.prod(shape)))
    return shape, start, end


def check(shape, start, end):
    found = list(rectangles(shape, start, end))
    flat_indices = torch.arange(math.prod(shape)).view(shape)
    covered = []
    for each in found:
        region = tuple(slice(o, o + s) for o, s in zip(each.offset, each.shape, strict=True))
        elements = flat_indices[region]
        assert tuple(elements.shape) == each.shape  # inside the tensor
        assert each.numel == elements.numel() > 0
        assert elements.flatten().tolist() == list(range(each.start, each.start + each.numel))
        covered += elements.flatten().tolist()
    assert covered == list(range(start, end))
    return found


@settings(max_examples=400, deadline=None)
@given(ranges())
def test_any_range_is_covered_exactly_and_in_order(case):
    shape, _, _ = case
    assert len(check(*case)) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=200, deadline=None)
@given(ranges(least=2, most=2))
def test_a_range_of_a_matrix_is_at_most_three(case):
    assert len(check(*case)) <= 3


def test_every_range_of_a_small_tensor():
    shape = (2, 3, 2, 2)
    for start, end in itertools.combinations_with_replacement(range(25), 2):
        check(shape, start, end)


@pytest.mark.parametrize(
    ("shape", "start", "end", "wanted"),
    [
        ((), 0, 1, [Rectangle((), (), 0)]),
        ((), 0, 0, []),
        ((7,), 2, 5, [Rectangle((2,), (3,), 2)]),
        ((4, 5), 0, 20, [Rectangle((0, 0), (4, 5), 0)]),
        ((4, 5), 5, 15, [Rectangle((1, 0), (2, 5), 5)]),
        ((4, 5), 6, 9, [Rectangle((1, 1), (1, 3), 6)]),
        (
            (4, 5),
            3,
            17,
            [
                Rectangle((0, 3), (1, 2), 3),
                Rectangle((1, 0), (2, 5), 5),
                Rectangle((3, 0), (1, 2), 15),
            ],
        ),
        ((4, 5), 3, 7, [Rectangle((0, 3), (1, 2), 3), Rectangle((1, 0), (1, 2), 5)]),
        ((3, 0), 0, 0, []),
        ((0,), 0, 0, []),
    ],
)
def test_examples(shape, start, end, wanted):
    assert list(rectangles(shape, start, end)) == wanted

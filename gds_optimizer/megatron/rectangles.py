"""A contiguous range of a flattened tensor, as rectangles of the tensor.

A data-parallel rank owns a flat range of a parameter; a checkpoint in the model's shapes stores
rectangles. A range of a matrix is at most three: the end of a row, whole rows, the start of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rectangle:
    """`shape` elements at `offset` in every dimension; `start` is the first's flat index."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def rectangles(shape: Sequence[int], start: int, end: int) -> Iterator[Rectangle]:
    """Cut elements `start` to `end` of a C-ordered tensor of `shape` into rectangles.

    They come in order and cover the range exactly; each is contiguous in the flattened tensor.
    """
    if start >= end:
        return
    if not shape:
        yield Rectangle((), (), start)
        return
    row_numel = math.prod(shape[1:])
    first_row, last_row = start // row_numel, (end - 1) // row_numel
    starts_whole = start == first_row * row_numel
    ends_whole = end == (last_row + 1) * row_numel
    if first_row == last_row and not (starts_whole and ends_whole):
        yield from _in_row(shape, first_row, start, end)
        return
    whole_start = first_row if starts_whole else first_row + 1
    whole_end = last_row + 1 if ends_whole else last_row
    if not starts_whole:
        yield from _in_row(shape, first_row, start, whole_start * row_numel)
    if whole_end > whole_start:
        yield Rectangle(
            (whole_start, *(0 for _ in shape[1:])),
            (whole_end - whole_start, *shape[1:]),
            whole_start * row_numel,
        )
    if not ends_whole:
        yield from _in_row(shape, last_row, whole_end * row_numel, end)


def _in_row(shape: Sequence[int], row: int, start: int, end: int) -> Iterator[Rectangle]:
    """Rectangles of a range that lies within one row."""
    first = row * math.prod(shape[1:])
    for inner in rectangles(shape[1:], start - first, end - first):
        yield Rectangle((row, *inner.offset), (1, *inner.shape), inner.start + first)

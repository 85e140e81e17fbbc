"""The checksum against arithmetic with Python's integers, and what it must notice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gds_optimizer import checksum as module
from gds_optimizer.checksum import checksum

ROW_WORDS, BLOCK_WORDS = module._CPU_SHAPE


def words(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63, count, dtype=np.int64)


def reference(values: np.ndarray) -> int:
    total = sum((2 * index + 1) * word for index, word in enumerate(values.tolist())) % 2**64
    return total - 2**64 if total >= 2**63 else total


def computed(values: np.ndarray) -> int:
    result = checksum(torch.from_numpy(values.copy()).view(torch.uint8))
    assert (result.dtype, result.shape) == (torch.int64, ())
    return int(result)


@pytest.mark.parametrize(
    "count",
    [
        1,
        2,
        511,
        512,
        *(rows * ROW_WORDS + extra for rows in (1, 2) for extra in (-1, 0, 1)),
        3 * ROW_WORDS + 345,
        *(BLOCK_WORDS + extra for extra in (-1, 0, 1)),
        2 * BLOCK_WORDS + 12345,
    ],
)
def test_equals_arithmetic_with_python_integers(count):
    values = words(count)
    assert computed(values) == reference(values)


def test_extreme_words():
    for word in (0, -1, 2**63 - 1, -(2**63)):
        values = np.full(ROW_WORDS + 3, word, dtype=np.int64)
        assert computed(values) == reference(values)


def test_does_not_depend_on_how_the_work_is_cut(monkeypatch):
    values = words(5000)
    expected = reference(values)
    for row_words in (1, 7, 64, 4999, 5000, 5001):
        for rows in (1, 3):
            monkeypatch.setattr(module, "_CPU_SHAPE", (row_words, rows * row_words))
            module._odd_weights.cache_clear()
            assert computed(values) == expected, (row_words, rows)
    module._odd_weights.cache_clear()


def test_every_flipped_bit_is_noticed():
    data = torch.from_numpy(words(64)).view(torch.uint8)
    right = int(checksum(data))
    for byte in range(data.numel()):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert int(checksum(data)) != right, (byte, bit)
            data[byte] ^= 1 << bit
    assert int(checksum(data)) == right


@pytest.mark.parametrize("index", [0, ROW_WORDS - 1, ROW_WORDS, 2 * ROW_WORDS, 2 * ROW_WORDS + 6])
def test_flipped_bits_at_the_borders_of_rows_are_noticed(index):
    values = words(2 * ROW_WORDS + 7)
    right = computed(values)
    for bit in (0, 1, 31, 62, 63):
        flipped = values.copy()
        flipped.view(np.uint64)[index] ^= np.uint64(1 << bit)
        assert computed(flipped) != right, bit


def test_the_order_of_words_counts():
    values = words(ROW_WORDS + 100)
    right = computed(values)
    for first, second in ((0, 1), (5, ROW_WORDS + 5), (ROW_WORDS - 1, ROW_WORDS), (0, 99)):
        swapped = values.copy()
        swapped[[first, second]] = swapped[[second, first]]
        assert computed(swapped) != right, (first, second)
    assert computed(np.roll(values, 1)) != right


def test_one_word_too_many_or_too_few_is_noticed():
    values = words(100)
    assert computed(values[:-1]) != computed(values)
    assert computed(np.append(values, 1)) != computed(values)


def test_a_page_that_was_not_written_is_noticed():
    data = torch.from_numpy(words(2048)).view(torch.uint8)
    right = int(checksum(data))
    for start in range(0, data.numel(), 4096):
        torn = data.clone()
        torn[start : start + 4096] = 0
        assert int(checksum(torn)) != right, start
    torn = data.clone()
    torn[4096:8192] = data[8192:12288]
    assert int(checksum(torn)) != right


def test_bytes_that_are_no_whole_words_are_refused():
    with pytest.raises(RuntimeError):
        checksum(torch.zeros(12, dtype=torch.uint8))

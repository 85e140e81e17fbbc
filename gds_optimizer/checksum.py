"""One checksum for device and host: a position-weighted 64-bit sum.

    sum over i of (2 i + 1) * word[i]   (mod 2**64, words are little-endian int64)

Odd weights have an inverse modulo 2**64, so every change confined to one word (a flipped bit, say)
changes the sum; position in the weight tells reordered words apart. It guards against torn writes
and decay, not against an adversary. Plain torch operations compute it where the bytes are, at a
few hundred GB/s on a GPU, without a copy to the host.
"""

from __future__ import annotations

import functools

import torch

WORD_BYTES = 8
# Words of one row, and words handled at once. The value does not depend on them. On a CPU a block,
# which is read twice, stays in a core's second cache; on a GPU it bounds the temporary products to
# 8 MiB.
_CPU_SHAPE = (2**14, 2**17)
_GPU_SHAPE = (2**16, 2**20)


@functools.lru_cache(maxsize=16)
def _odd_weights(device: torch.device) -> torch.Tensor:
    count = (_GPU_SHAPE if device.type == "cuda" else _CPU_SHAPE)[0]
    return torch.arange(count, dtype=torch.int64, device=device).mul_(2).add_(1)


def _row_sum(words: torch.Tensor) -> torch.Tensor:
    """Weighted sum of at most one row."""
    weights = _odd_weights(words.device)[: words.numel()]
    # An integer dot product exists on the CPU only, where it is one call instead of two.
    return (words * weights).sum() if words.is_cuda else torch.dot(words, weights)


def _rows_sum(rows: torch.Tensor, block_rows: int) -> torch.Tensor:
    """Weighted sum of whole rows, of which so many are handled at once.

    (2 (r R + i) + 1) w = (2 i + 1) w + 2 r R w: weights within a row, and a weight for each row.
    """
    weights = _odd_weights(rows.device)
    count, row_words = rows.shape
    starts = torch.arange(count, dtype=torch.int64, device=rows.device).mul_(2 * row_words)
    if rows.is_cuda:
        total = torch.zeros((), dtype=torch.int64, device=rows.device)
        for block, start in zip(rows.split(block_rows), starts.split(block_rows), strict=True):
            total += ((block * weights).sum(dim=1) + start * block.sum(dim=1)).sum()
        return total
    # A CPU adds faster than it multiplies: add the rows up first.
    columns, sums = torch.zeros_like(weights), []
    for block in rows.split(block_rows):
        columns += block.sum(dim=0)
        sums.append(block.sum(dim=1))
    return torch.dot(columns, weights) + torch.dot(torch.cat(sums), starts)


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Checksum of `data`, on its device and without waiting for it.

    Args:
        data: contiguous 1-D uint8 tensor, 8-byte aligned, a multiple of 8 bytes long.

    Returns:
        0-dim int64 tensor on `data`'s device.
    """
    words = data.view(torch.int64)
    row_words, block_words = _GPU_SHAPE if data.is_cuda else _CPU_SHAPE
    if words.numel() <= row_words:
        return _row_sum(words)
    whole = words.numel() // row_words * row_words
    total = _rows_sum(words[:whole].view(-1, row_words), block_words // row_words)
    if whole < words.numel():
        tail = words[whole:]
        total = total + _row_sum(tail) + 2 * whole * tail.sum()
    return total


def partial_checksum(data: torch.Tensor, offset: int) -> torch.Tensor:
    """Contribution of a part to the checksum of a whole: the parts' contributions add up.

    Args:
        data: as for `checksum`.
        offset: where the part starts in the whole, in bytes, a multiple of 8.
    """
    words = data.view(torch.int64)
    return checksum(data) + 2 * (offset // WORD_BYTES) * words.sum()

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
# Words of one row: a row's products stay in a CPU core's cache. The value does not depend on it.
_ROW_WORDS = 2**16
# Words handled at once on a device: bounds the temporary products to 8 MiB.
_DEVICE_BLOCK_WORDS = 2**20


@functools.lru_cache(maxsize=16)
def _odd_weights(device: torch.device) -> torch.Tensor:
    return torch.arange(_ROW_WORDS, dtype=torch.int64, device=device).mul_(2).add_(1)


def _rows_sum(rows: torch.Tensor, first_word: int) -> torch.Tensor:
    """Weighted sum of a (row count, row words) matrix whose first word has index `first_word`."""
    row_count, row_words = rows.shape
    weights = _odd_weights(rows.device)[:row_words]
    # (2 (r R + i) + 1) w = (2 i + 1) w + 2 r R w: one product with shared weights for all rows.
    # Integer matrix-vector products exist on the CPU only, where they are the faster form.
    if rows.is_cuda:
        inner = (rows * weights).sum(dim=1)
    else:
        inner = torch.mv(rows, weights)
    row_starts = torch.arange(row_count, dtype=torch.int64, device=rows.device)
    row_starts = row_starts.mul_(row_words).add_(first_word).mul_(2)
    return (inner + row_starts * rows.sum(dim=1)).sum()


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Checksum of `data`, on its device and without waiting for it.

    Args:
        data: contiguous 1-D uint8 tensor, 8-byte aligned, a multiple of 8 bytes long.

    Returns:
        0-dim int64 tensor on `data`'s device.
    """
    words = data.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    block_words = _DEVICE_BLOCK_WORDS if data.is_cuda else _ROW_WORDS
    for start in range(0, words.numel(), block_words):
        block = words[start : start + block_words]
        whole = block.numel() // _ROW_WORDS * _ROW_WORDS
        if whole:
            total += _rows_sum(block[:whole].view(-1, _ROW_WORDS), start)
        if whole < block.numel():
            total += _rows_sum(block[whole:].view(1, -1), start + whole)
    return total

"""Tensors as rows of elements in the order in which they lie in memory.

An elementwise optimizer does not care about the order, as long as a parameter, its gradient and its
state have the same one. Taking the parameter's own (which is not that of its indices where it is
transposed or `channels_last`) needs no copy of it.
"""

from __future__ import annotations

import torch


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Dimensions from the outermost to the innermost in memory, those of one element left out.

    Returns:
        None where elements overlap or leave gaps, so that there is no row of them.
    """
    strides = tensor.stride()
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != 1]
    order = sorted(dims, key=lambda dim: (-strides[dim], dim))
    step = 1
    for dim in reversed(order):
        if strides[dim] != step and tensor.numel():
            return None
        step *= tensor.shape[dim]
    return tuple(order)


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D view of a tensor that has a memory order."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def row_like(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """`values` as a 1-D tensor in the memory order of `reference`, which has the same shape.

    A view where they have the same order, else a copy.
    """
    if reference.is_contiguous():
        return values.reshape(-1)
    if memory_order(values) == memory_order(reference):
        return row_of(values)
    ordered = torch.empty_strided(
        reference.shape, reference.stride(), dtype=values.dtype, device=values.device
    )
    return row_of(ordered.copy_(values))


def shaped_like(row: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Undo `row_like`: a view of `row` with the shape and memory order of `reference`."""
    if reference.is_contiguous():
        return row.view(reference.shape)
    return row.as_strided(reference.shape, reference.stride())

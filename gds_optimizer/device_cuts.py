"""Buckets that are stepped where they live, cut once: the same views of them serve every step.

Cutting tensors takes the host longer than stepping a bucket takes a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

MAX_CUTS = 4096
"""Of one bucket that are kept; a steady run has as many as the bucket has runs."""


@dataclass(slots=True, eq=False)
class Cut:
    """The elements of a run in each plane of its bucket.

    Args:
        planes: of the bucket, by name.
        where: the run's elements.

    Attributes:
        parts: views of the planes, by name.
        addresses: of their first elements; an optimizer may let a tensor show other memory.
    """

    planes: dict[str, torch.Tensor]
    where: slice
    parts: dict[str, torch.Tensor] = field(init=False)
    addresses: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = {name: values[self.where] for name, values in self.planes.items()}
        self.addresses = {name: part.data_ptr() for name, part in self.parts.items()}

    def put(self, name: str, values: torch.Tensor) -> None:
        """Copy what the optimizer has left elsewhere into the plane."""
        self.parts[name] = self.planes[name][self.where]  # the old one may show other memory
        self.parts[name].copy_(values)


@dataclass(slots=True, eq=False)
class _Planes:
    buffer: torch.Tensor
    planes: dict[str, torch.Tensor]
    cuts: dict[tuple[int, int], Cut] = field(default_factory=dict)


class DeviceCuts:
    """What is kept of the buckets of one engine that are stepped where they live."""

    def __init__(self) -> None:
        self._known: dict[int, _Planes] = {}

    def planes(self, index: int, buffer: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """The planes that `keep` was told of; None where the bucket has none in this buffer."""
        held = self._known.get(index)
        return held.planes if held is not None and held.buffer is buffer else None

    def keep(self, index: int, buffer: torch.Tensor, planes: dict[str, torch.Tensor]) -> None:
        """From now on these are the planes of a bucket: views of the buffer that it lives in."""
        self._known[index] = _Planes(buffer, planes)

    def cut(self, index: int, planes: dict[str, torch.Tensor], where: slice) -> Cut:
        """The elements `where` of a bucket, in its planes; kept for the next step if they are."""
        held = self._known.get(index)
        if held is None or held.planes is not planes:
            return Cut(planes, where)
        key = (where.start, where.stop)
        known = held.cuts.get(key)
        if known is None:
            if len(held.cuts) >= MAX_CUTS:
                held.cuts.clear()  # runs change from step to step: what gradients there are does
            known = held.cuts[key] = Cut(planes, where)
        return known

    def clear(self) -> None:
        """Hold on to no buffer."""
        self._known.clear()

"""Copies between a bucket's mains and the model's parameters, in as few operations as possible.

Where parameters are neighbours in one buffer, as their shards are in the bucket, one copy serves
them all. It never covers elements between two shards: in the parameters' memory those may be
somebody else's. The rest goes as lists, but for large parts, which go one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gds_optimizer.plan import BoundPiece, EnginePlan

_LARGE_NUMEL = 2**20
"""Elements from which a kernel of its own copies more bytes a second than one for a list."""


@dataclass(slots=True, eq=False)
class _Copies:
    """For one bucket: the parameters' parts, and how the main plane is cut to match them.

    Attributes:
        addresses: of the parameters, and of their storages, when this was made.
        models: parts of parameters, several neighbours in one tensor.
        sizes: elements of the main plane from its start, in turn part or gap.
        picks: which of those are the parts, in the order of `models`.
        cut: a main plane that stays where it is, and its parts.
    """

    addresses: list[int]
    models: list[torch.Tensor]
    sizes: list[int]
    picks: list[int]
    cut: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    def mains(self, main: torch.Tensor) -> list[torch.Tensor]:
        parts = main[: sum(self.sizes)].split_with_sizes(self.sizes)
        return [parts[pick] for pick in self.picks]

    def kept_mains(self, main: torch.Tensor) -> list[torch.Tensor]:
        """The same, and the next time the very same tensors."""
        if self.cut is None or self.cut[0] is not main:
            self.cut = (main, self.mains(main))
        return self.cut[1]


class ModelCopies:
    """Copies mains to and from the parameters of one engine's bindings.

    Args:
        plan: the bindings.
        pieces: of each bucket, bound.
    """

    def __init__(self, plan: EnginePlan, pieces: Sequence[list[BoundPiece]]) -> None:
        self._plan = plan
        self._pieces = pieces
        self._known: dict[int, _Copies] = {}
        self._models: dict[int, list[torch.Tensor]] = {}

    def to_model(self, index: int, main: torch.Tensor) -> None:
        """Give the parameters of a bucket its mains, rounded to their dtype."""
        copies = self._of(index)
        _copy(copies.models, copies.mains(main))

    def all_to_model(self, mains: Sequence[tuple[int, torch.Tensor]]) -> None:
        """The same for several buckets (index, main plane), in as few operations as possible.

        Where the same main plane comes again, so do its parts: see `let_go_of_mains`.
        """
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, main in mains:
            copies = self._of(index)
            targets += copies.models
            sources += copies.kept_mains(main)
        _copy(targets, sources)

    def from_model(self, index: int, main: torch.Tensor) -> None:
        """Set the mains of a bucket to its parameters, and elements without one to zero."""
        copies = self._of(index)
        if len(copies.picks) < len(copies.sizes) or sum(copies.sizes) < main.numel():
            main.zero_()
        _copy(copies.mains(main), copies.models)

    def forget(self, index: int) -> None:
        """Hold on to no parameter of a bucket: one that moves would keep its old memory."""
        self._known.pop(index, None)

    def let_go_of_mains(self) -> None:
        """Hold on to no main plane."""
        for copies in self._known.values():
            copies.cut = None

    def count(self, index: int) -> int:
        """How many copies a bucket takes."""
        return len(self._of(index).models)

    def _of(self, index: int) -> _Copies:
        bindings = self._plan.bindings
        models = self._models.get(index)
        if models is None:
            held = (bindings[piece.binding].model for piece in self._pieces[index])
            models = self._models[index] = [model for model in held if model is not None]
        addresses = [
            *map(torch.Tensor.data_ptr, models),
            *[model.untyped_storage()._cdata for model in models],
        ]
        known = self._known.get(index)
        # Frameworks may give a parameter other memory. What a view holds on to is nobody else's.
        if known is None or known.addresses != addresses:
            known = self._known[index] = self._make(index, addresses)
        return known

    def _make(self, index: int, addresses: list[int]) -> _Copies:
        copies = _Copies(addresses, [], [], [])
        position = 0
        # The end of the last part: in the bucket, in memory, and that memory.
        last: tuple[int, int, int] | None = None
        for piece in self._pieces[index]:
            model = self._plan.bindings[piece.binding].model
            if model is None:
                last = None
                continue
            start, stop = piece.bucket_slice.start, piece.bucket_slice.stop
            part = model[piece.shard_slice]
            address, memory = part.data_ptr(), part.untyped_storage().data_ptr()
            is_flat = part.is_contiguous()
            before = copies.models[-1] if copies.models else part
            if is_flat and last == (start, address, memory) and before.dtype == part.dtype:
                numel = before.numel() + part.numel()
                copies.models[-1] = before.as_strided((numel,), (1,), before.storage_offset())
                copies.sizes[-1] += part.numel()
            else:
                if start > position:
                    copies.sizes.append(start - position)
                copies.picks.append(len(copies.sizes))
                copies.sizes.append(part.numel())
                copies.models.append(part)
            position = stop
            last = (stop, address + part.numel() * part.element_size(), memory) if is_flat else None
        return copies


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    small = [at for at, target in enumerate(targets) if target.numel() < _LARGE_NUMEL]
    if len(small) < len(targets):
        for target, source in zip(targets, sources, strict=True):
            if target.numel() >= _LARGE_NUMEL:
                target.copy_(source)
        targets, sources = ([held[at] for at in small] for held in (targets, sources))
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(targets, sources)

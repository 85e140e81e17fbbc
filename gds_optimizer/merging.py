"""Which pieces of a bucket the optimizer may step as one: what keeps small shards cheap.

An elementwise optimizer gives an element the same bits in whatever tensor it lies, so neighbours in
a bucket whose gradients are neighbours too (views of one gradient buffer, say) become one *run*:
one tensor, one gradient, one state. Small neighbours whose gradients lie elsewhere do too: theirs
are first put together in a temporary tensor, no larger than a bucket's. A step of 20,000 small
shards then costs what one of a few large shards does. Everything that could make a difference is
looked at in every step, and what differs is stepped apart: group, the kind of gradient, and
per-parameter scalars, which are compared again whenever somebody else has touched one.

Between two shards lie up to an alignment's worth of elements that belong to nobody. A run covers
them; whatever the gradient holds there stays there, since arithmetic is elementwise, and the step
sets them back to zero before anything is encoded, which keeps the files the same and keeps them
out of the scales of blockwise codecs. Nothing here is written to a gradient or a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch

from gds_optimizer.evicted import gradients_of
from gds_optimizer.layout import shard_alignment
from gds_optimizer.plan import BoundPiece, EnginePlan

MERGED_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizer classes of which tests prove that merged pieces are stepped with the same bits."""

MERGED_MARK = "steps_merged_pieces_alike"
"""A class of its own, not its subclasses, says with this attribute that the same holds for it."""


GATHERED_NUMEL = 2**16
"""Elements; gradients of larger pieces are not copied, since launching a kernel costs less."""


_LAYOUT, _DTYPE, _DEVICE = (
    getattr(torch.Tensor, name).__get__ for name in ("layout", "dtype", "device")
)

MAX_GAP_NUMEL = 1024
"""Elements; more than shards of any layout are apart."""


class LazyGradient(Protocol):
    """A gradient that is kept in another form and converted when it is used."""

    def stored(self) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The 1-D tensor it is kept in, and one-element factors that are applied in turn."""

    def convert(self, stored: torch.Tensor) -> torch.Tensor:
        """What it would be if it were kept in `stored`, in the dtype of the main."""


@dataclass(slots=True, eq=False)
class Run:
    """Pieces that lie next to each other in a bucket and are stepped as one tensor.

    Attributes:
        pieces: in element order, at least one.
        bucket_slice: from the first piece's first element to the last one's last, gaps included.
        tensor: what the optimizer steps; the first piece's own.
        is_gathered: whether its gradients must be put together first.
        owners: bindings whose first piece it has; each binding has one owner in a step.
    """

    pieces: list[BoundPiece]
    bucket_slice: slice
    tensor: torch.Tensor
    is_gathered: bool
    owners: list[int]


@dataclass(slots=True, eq=False)
class BucketRuns:
    """How a bucket is stepped.

    Attributes:
        runs: in element order.
        pieces: all pieces of the runs, in element order.
        gaps: int64 indices of elements of the bucket that runs cover and no shard owns; None
            without any.
        has_gathered: whether the gradients of any run must be put together first.
    """

    runs: list[Run]
    pieces: list[BoundPiece]
    gaps: torch.Tensor | None
    has_gathered: bool


def merges(optimizer: torch.optim.Optimizer) -> bool:
    """Whether tests prove that this optimizer's class steps merged pieces with the same bits."""
    kind = type(optimizer)
    return kind in MERGED_CLASSES or bool(vars(kind).get(MERGED_MARK, False))


class Mains:
    """What stays the same of the mains of a plan: so that steps need not ask 20,000 of them.

    Args:
        plan: bindings.
    """

    def __init__(self, plan: EnginePlan) -> None:
        self.tensors = [binding.main for binding in plan.bindings]
        self.kept = np.array([binding.keeps_main for binding in plan.bindings], dtype=bool)
        kept = [main for main, kept in zip(self.tensors, self.kept, strict=True) if kept]
        self.numel = np.array([main.numel() for main in self.tensors], dtype=np.int64)
        self.dtypes = {main.dtype for main in kept}
        self.devices = {main.device for main in kept}


class Gradients:
    """The gradients of one step, by binding, and where they are in memory.

    Args:
        mains: of the bindings.
        group: for each binding the index of its group; -1 where the optimizer has none for it.

    Attributes:
        held: binding index -> gradient.
        is_there: for each binding, whether it has one.
        are_plain: whether all of them are plain tensors.
    """

    def __init__(self, mains: Mains, group: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._mains = mains
        count = len(mains.tensors)
        self.group = group
        self.is_there = np.zeros(count, dtype=bool)
        self.address = np.full(count, -1, dtype=np.int64)
        self.itemsize = np.zeros(count, dtype=np.int64)
        self.kind = np.zeros(count, dtype=np.int64)
        self._sources: dict[int, torch.Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():  # mains are a subclass: metadata only here
            grads = gradients_of(mains.tensors)
            self.held = {
                index: grad
                for index, (grad, number) in enumerate(zip(grads, group.tolist(), strict=True))
                if grad is not None and number >= 0
            }
            self.is_there[list(self.held)] = True
            self.are_plain = set(map(type, self.held.values())) <= {torch.Tensor}
            if not self._note_alike():
                self._note_each()

    def _note_alike(self) -> bool:
        """Note all at once if they are alike: plain, contiguous, as their mains are."""
        chosen = np.flatnonzero(self.is_there & self._mains.kept)
        indices = chosen.tolist()
        grads = [self.held[index] for index in indices]
        tensor: Any = torch.Tensor
        if set(map(type, grads)) != {torch.Tensor} or set(map(_LAYOUT, grads)) != {torch.strided}:
            return False
        dtypes, devices = set(map(_DTYPE, grads)), set(map(_DEVICE, grads))
        if (
            len(dtypes | self._mains.dtypes) > 1
            or len(devices | self._mains.devices) > 1
            or not all(map(tensor.is_contiguous, grads))
            or not np.array_equal(
                np.fromiter(map(tensor.numel, grads), np.int64, len(grads)),
                self._mains.numel[chosen],
            )
        ):
            return False
        self.address[chosen] = np.fromiter(map(tensor.data_ptr, grads), np.int64, len(grads))
        self.itemsize[chosen] = grads[0].element_size()
        self._sources = dict(zip(indices, grads, strict=True))
        return True

    def _note_each(self) -> None:
        lazy: dict[int, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}
        for index, grad in self.held.items():
            if not self._mains.kept[index]:
                continue
            main = self._mains.tensors[index]
            if type(grad) is torch.Tensor:
                if grad.dtype is main.dtype:
                    self._note(index, grad, main)
            elif hasattr(grad, "stored") and hasattr(grad, "convert"):
                lazy[index] = cast(LazyGradient, grad).stored()
                self._note(index, lazy[index][0], main)
        self._tell_factors_apart(lazy)

    def _note(self, index: int, source: torch.Tensor, main: torch.Tensor) -> None:
        """Where a gradient is, if its elements lie one after the other."""
        if (
            source.layout is torch.strided
            and source.is_contiguous()
            and source.numel() == main.numel()
            and source.device == main.device
        ):
            self.address[index] = source.data_ptr()
            self.itemsize[index] = source.element_size()
            self._sources[index] = source

    def _tell_factors_apart(
        self, lazy: Mapping[int, tuple[torch.Tensor, Sequence[torch.Tensor]]]
    ) -> None:
        """Lazy gradients are of one kind if they have the same dtype and factors, to the bit."""
        by_form: dict[tuple[torch.dtype, int], list[int]] = {}
        for index, (stored, factors) in lazy.items():
            by_form.setdefault((stored.dtype, len(factors)), []).append(index)
        kinds: dict[Any, int] = {}
        for form, members in by_form.items():
            rows = [b""] * len(members)
            if form[1]:
                # One tensor and one wait for the device, however many shards there are.
                values = torch.cat([f.reshape(1) for i in members for f in lazy[i][1]])
                bits = values.view(torch.int32).cpu().numpy().reshape(len(members), form[1])
                rows = [row.tobytes() for row in bits]
            for index, row in zip(members, rows, strict=True):
                self.kind[index] = kinds.setdefault((form, row), len(kinds) + 1)

    def reach(self, run: Run) -> bool:
        """Whether one tensor over the memory of the first piece's gradient covers a run."""
        first = run.pieces[0]
        source = self._sources[first.binding]
        end = source.storage_offset() + first.shard_slice.start + _numel(run.bucket_slice)
        return bool(end * source.element_size() <= source.untyped_storage().nbytes())

    def of(self, run: Run) -> torch.Tensor:
        """The gradient of a run, 1-D, of its length."""
        first = run.pieces[0]
        grad = self.held[first.binding]
        if len(run.pieces) == 1:
            where = first.shard_slice
            is_whole = where.start == 0 and type(grad) is torch.Tensor
            if is_whole and grad.dim() == 1 and grad.numel() == where.stop:
                return grad
            return grad[where]
        source = self._sources[first.binding]
        if run.is_gathered:
            return self._gathered(run)
        start = source.storage_offset() + first.shard_slice.start
        whole = source.as_strided((_numel(run.bucket_slice),), (1,), start)
        if source is grad:
            return whole
        return cast(LazyGradient, grad).convert(whole)

    def _gathered(self, run: Run) -> torch.Tensor:
        """Copies of the gradients of a run, zero between them."""
        parts: list[torch.Tensor] = []
        first = self._sources[run.pieces[0].binding]
        zeros: torch.Tensor | None = None
        position = run.bucket_slice.start
        for piece in run.pieces:
            gap = piece.bucket_slice.start - position
            if gap:
                if zeros is None:
                    zeros = first.new_zeros(MAX_GAP_NUMEL)
                parts.append(zeros[:gap])
            source, where = self._sources[piece.binding], piece.shard_slice
            is_whole = where.start == 0 and where.stop == source.numel()
            parts.append(source if is_whole else source[where])
            position = piece.bucket_slice.stop
        return torch.cat(parts)


def _numel(part: slice) -> int:
    return int(part.stop - part.start)


class Merger:
    """Finds the runs of every bucket, and keeps them while nothing changes.

    Args:
        plan: what the buckets belong to.
        pieces: of each bucket, bound.
    """

    def __init__(self, plan: EnginePlan, pieces: Sequence[list[BoundPiece]]) -> None:
        self.plan = plan
        self.pieces = pieces
        self.is_allowed = merges(plan.optimizer)
        self._tables: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self._known: dict[int, tuple[bytes, BucketRuns]] = {}
        # What runs were made of in the last step, how often that has changed, and for each bucket
        # when its runs were last looked at.
        self._made_of: tuple[bytes, bytes] | None = None
        self._changes = 0
        self._seen: dict[int, int] = {}
        self.mains = Mains(plan)
        self._groups: tuple[list[list[int]], np.ndarray[Any, np.dtype[np.int64]], int] | None = None

    def groups(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
        """For each binding the index of its group of the optimizer, -1 without one.

        Returns:
            These, and how many parameters the optimizer has that are no binding's.
        """
        members = [list(map(id, group["params"])) for group in self.plan.optimizer.param_groups]
        if self._groups is None or self._groups[0] != members:
            of = {main: index for index, each in enumerate(members) for main in each}
            mains = [id(binding.main) for binding in self.plan.bindings]
            group = np.array([of.get(main, -1) for main in mains], dtype=np.int64)
            unknown = len(of.keys() - set(mains))
            if unknown:  # others may get the same numbers when these are gone
                return group, unknown
            self._groups = (members, group, unknown)
        return self._groups[1:]

    def begin(
        self, gradients: Gradients, scalar_classes: np.ndarray[Any, np.dtype[np.int64]] | None
    ) -> None:
        """Compare with the last step, once for all buckets: in a steady run nothing has changed."""
        by_binding = [
            gradients.group,
            gradients.is_there,
            gradients.address,
            gradients.itemsize,
            gradients.kind,
            *(() if scalar_classes is None else (scalar_classes,)),
        ]
        fused = bytes(bool(group.get("fused")) for group in self.plan.optimizer.param_groups)
        # As bytes: comparing that many arrays takes longer than joining them.
        made_of = (fused, b"".join(each.tobytes() for each in by_binding))
        if made_of != self._made_of:
            self._changes += 1
        self._made_of = made_of

    def runs(
        self,
        index: int,
        gradients: Gradients,
        scalar_classes: np.ndarray[Any, np.dtype[np.int64]] | None,
    ) -> BucketRuns:
        """The runs of a bucket in this step.

        Args:
            index: of the bucket.
            gradients: of the step.
            scalar_classes: for each binding, a number that those with equal scalars share; None
                where nothing may be merged. Both are those that `begin` was told.
        """
        if self._seen.get(index) == self._changes:
            made = self._known[index][1]
            if all(
                len(run.pieces) == 1 or run.is_gathered or gradients.reach(run) for run in made.runs
            ):
                return made
        made = self._found(index, gradients, scalar_classes)
        self._seen[index] = self._changes
        return made

    def _found(
        self,
        index: int,
        gradients: Gradients,
        scalar_classes: np.ndarray[Any, np.dtype[np.int64]] | None,
    ) -> BucketRuns:
        """What `runs` gives, found out anew."""
        table = self._table(index)
        binding, start, stop, offset = table
        group = gradients.group[binding]
        active = gradients.is_there[binding]
        joined = np.zeros(len(binding), dtype=bool)
        apart = np.zeros(len(binding), dtype=bool)
        if scalar_classes is not None and self.is_allowed:
            itemsize = gradients.itemsize[binding]
            address = gradients.address[binding]
            where = address + offset * itemsize
            scalars, kind = scalar_classes[binding], gradients.kind[binding]
            gap = start[1:] - stop[:-1]
            most = self._gaps_allowed(index, group)
            is_plain_and_small = (kind == 0) & (stop - start <= GATHERED_NUMEL)
            # The next one's gradient is not where it would have to be.
            apart[:-1] = where[1:] - where[:-1] != (start[1:] - start[:-1]) * itemsize[:-1]
            joined[:-1] = (
                (address[1:] >= 0)
                & (address[:-1] >= 0)
                & (~apart[:-1] | (is_plain_and_small[1:] & is_plain_and_small[:-1]))
                & (itemsize[1:] == itemsize[:-1])
                & (kind[1:] == kind[:-1])
                & (group[1:] == group[:-1])
                & (scalars[1:] == scalars[:-1])
                & (gap >= 0)
                & (gap < most[:-1])
            )
        made = self._cached(index, active, joined, apart)
        for run in made.runs:
            if len(run.pieces) > 1 and not run.is_gathered and not gradients.reach(run):
                # Next to each other in memory, but not one piece of memory.
                nothing = np.zeros_like(joined)
                return self._cached(index, active, nothing, nothing)
        return made

    def _gaps_allowed(
        self, index: int, group: np.ndarray[Any, np.dtype[np.int64]]
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """For each piece, more elements than may lie between it and the next one of its run.

        Fused kernels on the CPU treat the elements of a whole vector and the rest after the last
        one differently, so there a shard's end must stay one unless it ends with a vector.
        """
        space = self.plan.layout.buckets[index].space
        alignment = shard_alignment(self.plan.layout.spaces[space].planes)
        groups = self.plan.optimizer.param_groups
        on_cpu = self.plan.bindings[self.pieces[index][0].binding].main.device.type == "cpu"
        most = np.array([1 if on_cpu and g.get("fused") else alignment for g in groups] or [1])
        return np.asarray(most[group])

    def _table(self, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        table = self._tables.get(index)
        if table is None:
            rows = [
                (p.binding, p.bucket_slice.start, p.bucket_slice.stop, p.shard_slice.start)
                for p in self.pieces[index]
            ]
            table = self._tables[index] = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return table

    def _cached(
        self,
        index: int,
        active: np.ndarray[Any, np.dtype[np.bool_]],
        joined: np.ndarray[Any, np.dtype[np.bool_]],
        apart: np.ndarray[Any, np.dtype[np.bool_]],
    ) -> BucketRuns:
        key = active.tobytes() + joined.tobytes() + (joined & apart).tobytes()
        known = self._known.get(index)
        if known is None or known[0] != key:
            known = self._known[index] = (key, self._make(index, active, joined, apart))
        return known[1]

    def _make(
        self,
        index: int,
        active: np.ndarray[Any, np.dtype[np.bool_]],
        joined: np.ndarray[Any, np.dtype[np.bool_]],
        apart: np.ndarray[Any, np.dtype[np.bool_]],
    ) -> BucketRuns:
        runs: list[list[BoundPiece]] = []
        gathered: list[bool] = []
        gaps: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        previous: BoundPiece | None = None
        is_joined = is_apart = False
        for piece, is_active, joins, next_is_apart in zip(
            self.pieces[index], active.tolist(), joined.tolist(), apart.tolist(), strict=True
        ):
            if is_active:
                if is_joined and previous is not None:
                    runs[-1].append(piece)
                    gathered[-1] |= is_apart
                    between = (previous.bucket_slice.stop, piece.bucket_slice.start)
                    if between[0] < between[1]:
                        gaps.append(np.arange(*between, dtype=np.int64))
                else:
                    runs.append([piece])
                    gathered.append(False)
            previous, is_joined, is_apart = piece, joins, next_is_apart
        device = self.pieces[index][0].tensor.device
        return BucketRuns(
            [
                Run(
                    members,
                    slice(members[0].bucket_slice.start, members[-1].bucket_slice.stop),
                    members[0].tensor,
                    is_gathered,
                    [piece.binding for piece in members if not piece.shard_slice.start],
                )
                for members, is_gathered in zip(runs, gathered, strict=True)
            ],
            [piece for members in runs for piece in members],
            torch.from_numpy(np.concatenate(gaps)).to(device) if gaps else None,
            any(gathered),
        )

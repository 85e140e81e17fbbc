"""The halves of mains that no bucket file holds, because the model's parameters hold them.

A main stored as a 16-bit remainder is whole only together with the bf16 parameter, which is the
main rounded. So it must be noticed when somebody changes a parameter between steps (a checksum of
every bucket's parameters is kept), and a main that changes between steps, whose parameter must not
change before the next step, needs its half somewhere else (a file without a name, until then).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch

from gds_optimizer.checksum import checksum, partial_checksum
from gds_optimizer.errors import ModelChangedError
from gds_optimizer.io import allocate_host_buffer
from gds_optimizer.layout import PAGE_BYTES, SCRATCH_ALIGNMENT, align_up
from gds_optimizer.mapping import ScratchMapping
from gds_optimizer.plan import BoundPiece, EnginePlan, keeps_remainder
from gds_optimizer.room import free_bytes
from gds_optimizer.slots import SlotPool
from gds_optimizer.store import Store

# Elements that are handled at a time: 8 MiB of halves, and a launch of few kernels for many.
_PART_NUMEL = 2**22
# The same in host memory, where several threads do it at once.
_HOST_PART_NUMEL = 2**19
_NAMED_SHARDS = 3


class UpperHalves:
    """Upper halves of the mains of one engine.

    Args:
        plan: layout and bindings.
        pieces: of each bucket.
        store: its directories take the halves that the model must not have yet.
        pool: for the device, and the scratch of a visit.

    Attributes:
        buckets: indices of those whose mains are stored as remainders.
        apart: of these, the ones whose halves are not the model's, by index.
    """

    def __init__(
        self,
        plan: EnginePlan,
        pieces: Sequence[Sequence[BoundPiece]],
        store: Store,
        pool: SlotPool,
    ) -> None:
        self._plan = plan
        self._pieces = pieces
        self._store = store
        self._pool = pool
        layout = plan.layout
        self.buckets = frozenset(b.index for b in layout.buckets if keeps_remainder(b))
        self.apart: dict[int, ScratchMapping] = {}
        self._sums = torch.zeros(len(layout.buckets), dtype=torch.int64, device=pool.device)

    def room(self, index: int) -> torch.Tensor:
        """Scratch of the visit at hand for the halves of a bucket: 1-D bf16, on the device."""
        bucket = self._plan.layout.buckets[index]
        nbytes = 2 * bucket.numel
        start = bucket.scratch_bytes - align_up(nbytes, SCRATCH_ALIGNMENT)
        return self._pool.scratch[start : start + nbytes].view(torch.bfloat16)

    def gather(self, index: int, halves: torch.Tensor, start: int = 0) -> None:
        """Put the halves of elements from `start` on into a 1-D bf16 tensor, on any device.

        Gaps between shards get zeros.
        """
        if index in self.apart:
            halves.copy_(self.apart[index].tensor(start, halves.numel()))
        else:
            self._gather_from_model(index, halves, start)

    def _gather_from_model(self, index: int, halves: torch.Tensor, start: int) -> None:
        halves.zero_()
        end = start + halves.numel()
        for piece in self._pieces[index]:
            low = max(piece.bucket_slice.start, start)
            high = min(piece.bucket_slice.stop, end)
            model = self._plan.bindings[piece.binding].model
            if low < high and model is not None:
                first = piece.shard_slice.start + low - piece.bucket_slice.start
                halves[low - start : high - start].copy_(model[first : first + high - low])

    def give(self, index: int, halves: torch.Tensor) -> None:
        """Make a bucket's halves (1-D bf16, any device) the model's parameters."""
        for piece in self._pieces[index]:
            model = self._plan.bindings[piece.binding].model
            if model is not None:
                model[piece.shard_slice].copy_(halves[piece.bucket_slice])
        self.apart.pop(index, None)
        self._note(index, halves)

    def _note(self, index: int, halves: torch.Tensor) -> None:
        self._sums[index] = checksum(halves.view(torch.uint8))

    def keep(self, index: int, main: torch.Tensor) -> None:
        """Mains have changed and the model must not: keep what the model does not have.

        Args:
            index: of the bucket.
            main: all its mains, 1-D fp32, on the device or, in any thread, in host memory.

        Raises:
            NoSpaceError: the store's directories have too little room.
        """
        kept: ScratchMapping | None = None
        numel, total = main.numel(), 0
        part = _HOST_PART_NUMEL if main.device.type == "cpu" else _PART_NUMEL
        room = torch.empty(min(part, numel), dtype=torch.bfloat16, device=main.device)
        for start in range(0, numel, part):
            halves = main[start : start + part].to(torch.bfloat16)
            held = room[: halves.numel()]
            self._gather_from_model(index, held, start)
            total += int(partial_checksum(held.view(torch.uint8), 2 * start))
            if not torch.equal(halves.view(torch.int16), held.view(torch.int16)):
                kept = self._store_apart(main)
                break
        if kept is None:
            self.apart.pop(index, None)
            self._sums[index] = (total + 2**63) % 2**64 - 2**63
        else:
            self.apart[index] = kept

    def _store_apart(self, main: torch.Tensor) -> ScratchMapping:
        directory = max(self._store.directories, key=free_bytes)
        numel = align_up(main.numel(), PAGE_BYTES // 2)  # direct I/O wants whole pages
        kept = ScratchMapping(numel, torch.bfloat16, directory)
        part = _HOST_PART_NUMEL if main.device.type == "cpu" else _PART_NUMEL
        buffer = allocate_host_buffer(2 * min(part, numel)).view(torch.bfloat16)
        for start in range(0, main.numel(), part):
            values = main[start : start + part]
            buffer[: values.numel()].copy_(values)
            whole = buffer[: align_up(values.numel(), PAGE_BYTES // 2)]
            kept.write(start, whole.view(torch.int16))
        kept.map(writable=False)
        return kept

    def check(self, buckets: Iterable[int]) -> None:
        """Compare the model's parameters with what they were when their mains were stored.

        One look for all of them, which waits for the device once. It needs no slots.

        Args:
            buckets: indices; those whose halves the model does not hold are left out.

        Raises:
            ModelChangedError: they were changed; names shards.
        """
        wanted = [index for index in buckets if index in self.buckets and index not in self.apart]
        if not wanted:
            return
        longest = max(self._plan.layout.buckets[index].numel for index in wanted)
        device = self._pool.device
        room = torch.empty(min(_PART_NUMEL, longest), dtype=torch.bfloat16, device=device)
        found = [self._sum_of_model(index, room) for index in wanted]
        differs = torch.stack(found) != self._sums[wanted]
        changed = [i for i, is_changed in zip(wanted, differs.tolist(), strict=True) if is_changed]
        if changed:
            raise self._changed(changed)

    @torch.no_grad()
    def sums_of_others(self, buckets: Iterable[int], bindings: Container[int]) -> dict[int, int]:
        """Checksums of the model's parameters in some buckets, without those of some bindings."""
        sums: dict[int, int] = {}
        for index in buckets:
            if index not in self.buckets or index in self.apart:
                continue
            numel = self._plan.layout.buckets[index].numel
            halves = torch.empty(numel, dtype=torch.bfloat16, device=self._pool.device)
            self._gather_from_model(index, halves, 0)
            for piece in self._pieces[index]:
                if piece.binding in bindings:
                    halves[piece.bucket_slice].zero_()
            sums[index] = int(checksum(halves.view(torch.uint8)))
        return sums

    def check_others(self, sums: dict[int, int], bindings: Container[int]) -> None:
        """Compare with what `sums_of_others` gave before.

        Raises:
            ModelChangedError: they were changed; names shards.
        """
        now = self.sums_of_others(sums, bindings)
        changed = [index for index, found in now.items() if found != sums[index]]
        if changed:
            raise self._changed(changed)

    def _sum_of_model(self, index: int, room: torch.Tensor) -> torch.Tensor:
        numel = self._plan.layout.buckets[index].numel
        total = torch.zeros((), dtype=torch.int64, device=room.device)
        for start in range(0, numel, _PART_NUMEL):
            halves = room[: min(_PART_NUMEL, numel - start)]
            self._gather_from_model(index, halves, start)
            total += partial_checksum(halves.view(torch.uint8), 2 * start)
        return total

    def _changed(self, buckets: list[int]) -> ModelChangedError:
        names = dict.fromkeys(
            self._plan.bindings[piece.binding].name
            for index in buckets
            for piece in self._pieces[index]
        )
        shown = " or ".join(list(names)[:_NAMED_SHARDS])
        if len(names) > _NAMED_SHARDS:
            shown += f" or {len(names) - _NAMED_SHARDS} more"
        return ModelChangedError(
            f"the model's parameter of {shown} is not what the last step left there, and it holds "
            f"the upper half of the main parameter (state in {self._store.directories[0]}): call "
            "reload_model_params() after changing the model (loading weights, say) to take the "
            "main parameters from it, or put the parameter back; the state itself is unharmed"
        )

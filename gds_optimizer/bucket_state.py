"""What each bucket's file holds, and the way from its bytes in a slot to tensors and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from gds_optimizer.codecs import (
    Codec,
    clear_tie_bits,
    get_codec,
    nearest_codec,
    rounding_seed,
)
from gds_optimizer.codecs.remainder import stored_moments
from gds_optimizer.device_cuts import DeviceCuts
from gds_optimizer.errors import CorruptBucketError
from gds_optimizer.footer import (
    BucketRecord,
    build_footer,
    describe_difference,
    expected_words,
    footer_words,
    replace_plane_checksum,
)
from gds_optimizer.layout import (
    PAGE_BYTES,
    SCRATCH_ALIGNMENT,
    Bucket,
    Plane,
    align_up,
    shard_alignment,
)
from gds_optimizer.model_copy import ModelCopies
from gds_optimizer.pipeline import Ranges
from gds_optimizer.plan import (
    MAIN_PLANE,
    BoundPiece,
    EnginePlan,
    bind_pieces,
    remainder_codec,
    tie_plane,
)
from gds_optimizer.slots import Slot, SlotPool
from gds_optimizer.store import Store
from gds_optimizer.upper_halves import UpperHalves


class BucketState:
    """The buckets of one engine.

    Args:
        plan: layout and bindings.
        store: where the files are, for messages.
        pool: the slots, for their scratch.

    Attributes:
        records: for each bucket, what its file holds.
        pieces: for each bucket, its pieces with their bindings.
        bindings: for each bucket, the bindings of its pieces.
        main_from_model: for each bucket, whether its main plane is out of date because the model's
            parameters hold the values.
        model_is_behind: buckets whose mains were changed between steps; the next step gives them
            to the model.
        halves: of mains, where they are stored as remainders.
        needs_scratch: for each bucket, whether planes of it are decoded into the pool's scratch.
    """

    def __init__(self, plan: EnginePlan, store: Store, pool: SlotPool) -> None:
        self.plan = plan
        self.layout = plan.layout
        self.store = store
        self.pool = pool
        buckets = self.layout.buckets
        self.records = [BucketRecord(0, [False] * len(bucket.planes)) for bucket in buckets]
        self.pieces: list[list[BoundPiece]] = [bind_pieces(plan, bucket) for bucket in buckets]
        self.bindings = [frozenset(piece.binding for piece in pieces) for pieces in self.pieces]
        self._model_copies = ModelCopies(plan, self.pieces)
        self.main_from_model = [False] * len(buckets)
        self.model_is_behind: set[int] = set()
        self.halves = UpperHalves(plan, self.pieces, store, pool)
        # Of each bucket whose planes are all stored as they are in memory: name, bytes, dtype.
        self._views = [_views(bucket) for bucket in buckets]
        self.needs_scratch = [bucket.scratch_bytes > 0 for bucket in buckets]
        self.device_cuts = DeviceCuts()
        pool.viewers.add(self)

    def let_go_of_slots(self) -> None:
        """Let the tensors that the optimizer steps show nothing, until the next visit."""
        for pieces in self.pieces:
            for piece in pieces:
                piece.tensor.data = piece.tensor.new_empty(0)
        self.forget_cuts()

    def forget_cuts(self) -> None:
        """Hold on to no memory of buckets that are stepped where they live."""
        self.device_cuts.clear()
        self._model_copies.let_go_of_mains()

    # ------------------------------------------------------------------ what is where

    def needed(self, index: int) -> list[int]:
        """Planes of a bucket that a step must read."""
        written, bucket = self.records[index].written, self.layout.buckets[index]
        if all(written) and not self.main_from_model[index]:
            return list(range(len(written)))  # in a steady run always: without a look at the planes
        return [
            number
            for number, plane in enumerate(bucket.planes)
            if written[number] and not (plane.name == MAIN_PLANE and self.main_from_model[index])
        ]

    def ranges(self, index: int, planes: Sequence[int]) -> Ranges:
        """Planes and the footer as byte ranges, neighbours merged; nothing for a blank bucket."""
        bucket = self.layout.buckets[index]
        if self.records[index].is_blank:
            return ()
        spans = [(bucket.planes[n].offset, bucket.planes[n].nbytes) for n in planes]
        spans.append((bucket.footer_offset, PAGE_BYTES))
        merged: list[tuple[int, int]] = []
        for offset, nbytes in spans:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
            else:
                merged.append((offset, nbytes))
        return merged

    def written_ranges(self, index: int) -> Ranges:
        """Byte ranges of all planes that were ever written."""
        written = self.records[index].written
        return self.ranges(index, [n for n, is_written in enumerate(written) if is_written])

    def with_main(self) -> Iterator[int]:
        """Buckets that have a main plane; it is their first."""
        for index, bucket in enumerate(self.layout.buckets):
            if bucket.planes[0].name == MAIN_PLANE:
                yield index

    def adopt(self, records: Sequence[BucketRecord]) -> None:
        """From now on the files hold what these records say, and nothing else counts."""
        for own, other in zip(self.records, records, strict=True):
            own.step, own.written = other.step, list(other.written)
        self.main_from_model = [False] * len(self.records)

    # ------------------------------------------------------------------ tensors in a slot

    def planes(self, bucket: Bucket, slot: Slot) -> dict[str, torch.Tensor]:
        """Room for the values of a bucket's planes, by name; nothing is decoded.

        Planes that are stored as they are in memory are views of the slot. The others lie in the
        pool's scratch with whatever is there: `current_planes` decodes them, `encode` and
        `encode_initial` put them into the slot.
        """
        views = self._views[bucket.index]
        if views is not None:
            buffer = slot.buffer
            known = self.device_cuts.planes(bucket.index, buffer)
            if known is not None:
                return known
            cut = {name: buffer[start:stop].view(dtype) for name, start, stop, dtype in views}
            file = self.store.in_memory.get(bucket.index)
            if file is not None and file.is_stepped_in_place:
                self.device_cuts.keep(bucket.index, buffer, cut)
            return cut
        planes, offset = {}, 0
        for plane in bucket.planes:
            codec = get_codec(plane.codec)
            if codec.is_view:
                planes[plane.name] = codec.decode(_encoded(slot, plane), bucket.numel)
                continue
            nbytes = bucket.numel * codec.dtype.itemsize
            planes[plane.name] = self.pool.scratch[offset : offset + nbytes].view(codec.dtype)
            offset += align_up(nbytes, SCRATCH_ALIGNMENT)
        return planes

    def current_planes(
        self, index: int, slot: Slot, *, main_only: bool = False
    ) -> dict[str, torch.Tensor]:
        """The planes with what no file holds filled in: mains from the model, zero elsewhere.

        Args:
            index: of the bucket.
            slot: holds what of it a step must read.
            main_only: leave all but the main plane out, and decode nothing.
        """
        needed, bucket = self.needed(index), self.layout.buckets[index]
        planes = self.planes(bucket, slot)
        if len(needed) == len(planes) and not main_only and self._views[index] is not None:
            return planes  # all of it is there, as it is
        if main_only:
            planes = {name: values for name, values in planes.items() if name == MAIN_PLANE}
        if index in self.halves.buckets and 0 in needed:
            self.decode_main(index, slot, planes[MAIN_PLANE])
        ties = self._tie_bits(bucket, slot)
        if ties is not None and not main_only:
            clear_tie_bits(ties)  # the optimizer must not see them
        for number, plane in enumerate(bucket.planes):
            if plane.name not in planes:
                continue
            values, codec = planes[plane.name], get_codec(plane.codec)
            if number in needed:
                if codec.is_converted:
                    codec.decode_into(_encoded(slot, plane), values)
            elif plane.name == MAIN_PLANE:
                self.fill_main_from_model(index, values)
            else:
                values.zero_()
        return planes

    def encode(
        self,
        index: int,
        slot: Slot,
        planes: dict[str, torch.Tensor],
        changed: Sequence[BoundPiece],
        *,
        step: int,
    ) -> None:
        """Put what a step has changed into the slot, encoded; call it before `seal`.

        Pieces that were not stepped keep their very bytes, since rounding what was rounded before
        need not give the same for every value. Planes that no file holds yet are encoded whole.

        Args:
            index: of the bucket.
            slot: holds it.
            planes: from `current_planes`.
            changed: pieces that were stepped, in element order.
            step: number of the step, for the seed of stochastic rounding.
        """
        bucket, record = self.layout.buckets[index], self.records[index]
        if not self.needs_scratch[index]:
            return
        ranges = self._block_ranges(bucket, changed)
        for number, plane in enumerate(bucket.planes):
            codec = get_codec(plane.codec)
            if not codec.is_converted:
                continue
            encoded, values = _encoded(slot, plane), planes[plane.name]
            seed = rounding_seed(step, index, number)
            if not record.written[number]:
                _encode_whole(codec, values, encoded, seed)
                continue
            for start, end in ranges:
                codec.encode_from(
                    values[start:end], encoded, numel=bucket.numel, start=start, seed=seed
                )
        self.encode_main(index, slot, planes)

    def encode_initial(self, index: int, slot: Slot, planes: dict[str, torch.Tensor]) -> None:
        """Put planes that no step has computed into the slot, encoded, rounded to nearest.

        Args:
            index: of the bucket.
            slot: holds it.
            planes: from `planes`, filled where the bucket's record says that they are written.
        """
        bucket, record = self.layout.buckets[index], self.records[index]
        for plane, written in zip(bucket.planes, record.written, strict=True):
            codec = nearest_codec(plane.codec)
            if written and codec.is_converted:
                _encode_whole(codec, planes[plane.name], _encoded(slot, plane))
        if record.written[0]:
            if any(
                MAIN_PLANE in (self.plan.bindings[piece.binding].initial or {})
                for piece in self.pieces[index]
            ):
                self.hold_ties(index, slot)  # mains that are the model's have none
            self.encode_main(index, slot, planes)

    # ------------------------------------------------------------------ mains as remainders

    def _tie_bits(self, bucket: Bucket, slot: Slot) -> torch.Tensor | None:
        """The stored moments in a slot whose signs are tie bits of the mains, if there are any."""
        number = tie_plane(bucket)
        if number is None:
            return None
        plane = bucket.planes[number]
        return stored_moments(_encoded(slot, plane), plane.codec, bucket.numel)

    def decode_main(self, index: int, slot: Slot, main: torch.Tensor) -> None:
        """Put mains together from their remainders in a slot and their upper halves.

        Before anything else is decoded: the signs of the moments beside them are part of it, and
        stay as they are.
        """
        bucket = self.layout.buckets[index]
        codec = remainder_codec(bucket)
        assert codec is not None
        ties = self._tie_bits(bucket, slot)
        if ties is not None and not self.records[index].written[tie_plane(bucket) or 0]:
            ties.zero_()  # no file holds them
        halves = self.halves.room(index)
        self.halves.gather(index, halves)
        codec.decode_main(_encoded(slot, bucket.planes[0]), main, model=halves, exp_avg_sq=ties)

    def encode_main(self, index: int, slot: Slot, planes: dict[str, torch.Tensor]) -> None:
        """Put the remainders of mains into a slot; nothing where mains are stored otherwise.

        After everything else was encoded, since it sets signs of the moments. All of the bucket:
        mains that did not change get the bytes that they had.
        """
        bucket = self.layout.buckets[index]
        codec = remainder_codec(bucket)
        if codec is None:
            return
        encoded = _encoded(slot, bucket.planes[0])
        codec.encode_main(planes[MAIN_PLANE], encoded, exp_avg_sq=self._tie_bits(bucket, slot))
        encoded[codec.encoded_bytes(bucket.numel) :].zero_()

    def main_parts(self, index: int) -> list[int]:
        """Numbers of the planes that hold the mains of a bucket, or a bit of them."""
        ties = tie_plane(self.layout.buckets[index])
        return [0] if ties is None else [0, ties]

    def put_main(self, index: int, slot: Slot, main: torch.Tensor) -> None:
        """Put mains into a slot that were changed between steps; their model stays as it is.

        The slot holds the plane with the tie bits, if a file does. Call `seal` or `reseal_main`
        afterwards.
        """
        self.records[index].written[0] = True
        self.main_from_model[index] = False
        if index not in self.halves.buckets:
            return
        self.hold_ties(index, slot)
        self.encode_main(index, slot, {MAIN_PLANE: main})
        self.halves.keep(index, main)

    def hold_ties(self, index: int, slot: Slot) -> None:
        """Make sure that the plane with the tie bits will be written: it may never have been."""
        bucket, record = self.layout.buckets[index], self.records[index]
        ties = tie_plane(bucket)
        if ties is not None and not record.written[ties]:
            _encoded(slot, bucket.planes[ties]).zero_()
            record.written[ties] = True

    def _block_ranges(self, bucket: Bucket, pieces: Sequence[BoundPiece]) -> list[tuple[int, int]]:
        """Elements of whole codec blocks that pieces lie in, neighbours merged."""
        alignment = shard_alignment(self.layout.spaces[bucket.space].planes)
        merged: list[tuple[int, int]] = []
        for piece in pieces:
            start = piece.bucket_slice.start
            end = min(align_up(piece.bucket_slice.stop, alignment), bucket.numel)
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, end))
        return merged

    def fill_main_from_model(self, index: int, main: torch.Tensor) -> None:
        self._model_copies.from_model(index, main)
        if index in self.halves.buckets:  # steps never ask for these, so nothing would drop them
            self._model_copies.forget(index)

    def copy_main_to_model(self, index: int, main: torch.Tensor) -> None:
        if index in self.halves.buckets:
            halves = self.halves.room(index)
            halves.copy_(main)
            self.halves.give(index, halves)
            return
        self._model_copies.to_model(index, main)

    def copy_mains_to_model(self, mains: Sequence[tuple[int, torch.Tensor]]) -> None:
        """The same for several buckets (index, main plane) in as few kernels as possible."""
        halves = [index for index, _ in mains if index in self.halves.buckets]
        for index, main in mains:
            if index in halves:
                self.copy_main_to_model(index, main)
        self._model_copies.all_to_model([each for each in mains if each[0] not in halves])

    def check_models(self, buckets: Iterable[int]) -> None:
        """Make sure that the model holds the halves of mains that are about to be decoded.

        Raises:
            ModelChangedError: it was changed from outside.
        """
        self.halves.check(index for index in buckets if 0 in self.needed(index))

    # ------------------------------------------------------------------ footers

    def expect(self, index: int, slot: Slot, planes: Sequence[int]) -> Callable[[], None]:
        """Start comparing a bucket that was read with its footer; call the result to know.

        The comparison is queued on the device. Its outcome is asked for when the visit waits for
        the device anyway.
        """
        record, bucket = self.records[index], self.layout.buckets[index]
        if record.is_blank or index in self.store.in_memory:
            return lambda: None
        expected = expected_words(slot.buffer, bucket, self.layout, record, planes)
        found = footer_words(slot.buffer, bucket).clone()
        differs = (expected != found).any()

        def check() -> None:
            if differs.item():
                raise CorruptBucketError(
                    f"bucket {index} in {self.store.paths[index]} is not what was written: "
                    f"{describe_difference(expected, found, bucket)}"
                )

        return check

    def seal(self, index: int, slot: Slot, record: BucketRecord) -> None:
        """Write the footer of what is in the slot.

        Buckets that live in memory have none until they are written to a file: on every step it
        would cost more than the step.
        """
        if index in self.store.in_memory:
            return
        bucket = self.layout.buckets[index]
        footer_words(slot.buffer, bucket).copy_(
            build_footer(slot.buffer, bucket, self.layout, record)
        )

    def reseal_main(self, index: int, slot: Slot) -> None:
        """Bring the footer up to date after the main plane alone has changed."""
        if index in self.store.in_memory:
            return
        for number in self.main_parts(index):
            replace_plane_checksum(slot.buffer, self.layout.buckets[index], number)


def _views(bucket: Bucket) -> list[tuple[str, int, int, torch.dtype]] | None:
    """How a slot is cut into the values of a bucket; None where some must be decoded."""
    codecs = [get_codec(plane.codec) for plane in bucket.planes]
    if not all(codec.is_view for codec in codecs):
        return None
    return [
        (plane.name, plane.offset, plane.offset + codec.encoded_bytes(bucket.numel), codec.dtype)
        for plane, codec in zip(bucket.planes, codecs, strict=True)
    ]


def _encoded(slot: Slot, plane: Plane) -> torch.Tensor:
    """The bytes of a plane in a slot, padding included."""
    return slot.buffer[plane.offset : plane.offset + plane.nbytes]


def _encode_whole(codec: Codec, values: torch.Tensor, encoded: torch.Tensor, seed: int = 0) -> None:
    """Encode a plane that the slot does not hold yet; its padding must not be left as it is."""
    codec.encode_from(values, encoded, seed=seed)
    encoded[codec.encoded_bytes(values.numel()) :].zero_()

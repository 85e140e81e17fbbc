"""What each bucket's file holds, and the way from its bytes in a slot to tensors and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from gds_optimizer.codecs import Codec, get_codec, nearest_codec, rounding_seed
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
from gds_optimizer.plan import MAIN_PLANE, BoundPiece, EnginePlan, bind_pieces
from gds_optimizer.slots import Slot, SlotPool
from gds_optimizer.store import Store


class BucketState:
    """The buckets of one engine.

    Args:
        plan: layout and bindings.
        store: where the files are, for messages.
        pool: the slots, for their scratch.

    Attributes:
        records: for each bucket, what its file holds.
        pieces: for each bucket, its pieces with their bindings.
        main_from_model: for each bucket, whether its main plane is out of date because the model's
            parameters hold the values.
        model_is_behind: buckets whose mains were changed between steps; the next step gives them
            to the model.
    """

    def __init__(self, plan: EnginePlan, store: Store, pool: SlotPool) -> None:
        self.plan = plan
        self.layout = plan.layout
        self.store = store
        self.pool = pool
        buckets = self.layout.buckets
        self.records = [BucketRecord(0, [False] * len(bucket.planes)) for bucket in buckets]
        self.pieces: list[list[BoundPiece]] = [bind_pieces(plan, bucket) for bucket in buckets]
        self._model_copies = ModelCopies(plan, self.pieces)
        self.main_from_model = [False] * len(buckets)
        self.model_is_behind: set[int] = set()

    # ------------------------------------------------------------------ what is where

    def needed(self, index: int) -> list[int]:
        """Planes of a bucket that a step must read."""
        record, bucket = self.records[index], self.layout.buckets[index]
        return [
            number
            for number, plane in enumerate(bucket.planes)
            if record.written[number]
            and not (plane.name == MAIN_PLANE and self.main_from_model[index])
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
        if main_only:
            planes = {name: values for name, values in planes.items() if name == MAIN_PLANE}
        for number, plane in enumerate(bucket.planes):
            if plane.name not in planes:
                continue
            values, codec = planes[plane.name], get_codec(plane.codec)
            if number in needed:
                if not codec.is_view:
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
        if not bucket.scratch_bytes:
            return
        ranges = self._block_ranges(bucket, changed)
        for number, plane in enumerate(bucket.planes):
            codec = get_codec(plane.codec)
            if codec.is_view:
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
            if written and not codec.is_view:
                _encode_whole(codec, planes[plane.name], _encoded(slot, plane))

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
        main.zero_()
        self._model_copies.from_model(index, main)

    def copy_main_to_model(self, index: int, main: torch.Tensor) -> None:
        self._model_copies.to_model(index, main)

    # ------------------------------------------------------------------ footers

    def expect(self, index: int, slot: Slot, planes: Sequence[int]) -> Callable[[], None]:
        """Start comparing a bucket that was read with its footer; call the result to know.

        The comparison is queued on the device. Its outcome is asked for when the visit waits for
        the device anyway.
        """
        record, bucket = self.records[index], self.layout.buckets[index]
        if record.is_blank:
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
        """Write the footer of what is in the slot."""
        bucket = self.layout.buckets[index]
        footer_words(slot.buffer, bucket).copy_(
            build_footer(slot.buffer, bucket, self.layout, record)
        )

    def reseal_main(self, index: int, slot: Slot) -> None:
        """Bring the footer up to date after the main plane alone has changed."""
        replace_plane_checksum(slot.buffer, self.layout.buckets[index], 0)


def _encoded(slot: Slot, plane: Plane) -> torch.Tensor:
    """The bytes of a plane in a slot, padding included."""
    return slot.buffer[plane.offset : plane.offset + plane.nbytes]


def _encode_whole(codec: Codec, values: torch.Tensor, encoded: torch.Tensor, seed: int = 0) -> None:
    """Encode a plane that the slot does not hold yet; its padding must not be left as it is."""
    codec.encode_from(values, encoded, seed=seed)
    encoded[codec.encoded_bytes(values.numel()) :].zero_()

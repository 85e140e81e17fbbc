"""What each bucket's file holds, and the way from its bytes in a slot to tensors and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from gds_optimizer.codecs import get_codec
from gds_optimizer.errors import CorruptBucketError
from gds_optimizer.footer import (
    BucketRecord,
    build_footer,
    describe_difference,
    expected_words,
    footer_words,
    replace_plane_checksum,
)
from gds_optimizer.layout import PAGE_BYTES, Bucket
from gds_optimizer.pipeline import Ranges
from gds_optimizer.plan import MAIN_PLANE, BoundPiece, EnginePlan, bind_pieces
from gds_optimizer.slots import Slot
from gds_optimizer.store import Store


class BucketState:
    """The buckets of one engine.

    Args:
        plan: layout and bindings.
        store: where the files are, for messages.

    Attributes:
        records: for each bucket, what its file holds.
        pieces: for each bucket, its pieces with their bindings.
        main_from_model: for each bucket, whether its main plane is out of date because the model's
            parameters hold the values.
        model_is_behind: buckets whose mains were changed between steps; the next step gives them
            to the model.
    """

    def __init__(self, plan: EnginePlan, store: Store) -> None:
        self.plan = plan
        self.layout = plan.layout
        self.store = store
        buckets = self.layout.buckets
        self.records = [BucketRecord(0, [False] * len(bucket.planes)) for bucket in buckets]
        self.pieces: list[list[BoundPiece]] = [bind_pieces(plan, bucket) for bucket in buckets]
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
        """The planes of a bucket that is in a slot, by name."""
        return {
            plane.name: get_codec(plane.codec).decode(
                slot.buffer[plane.offset : plane.offset + plane.nbytes], bucket.numel
            )
            for plane in bucket.planes
        }

    def current_planes(self, index: int, slot: Slot) -> dict[str, torch.Tensor]:
        """The planes with what no file holds filled in: mains from the model, zero elsewhere."""
        needed = self.needed(index)
        planes = self.planes(self.layout.buckets[index], slot)
        for number, (name, values) in enumerate(planes.items()):
            if number in needed:
                continue
            if name == MAIN_PLANE:
                self.fill_main_from_model(index, values)
            else:
                values.zero_()
        return planes

    def fill_main_from_model(self, index: int, main: torch.Tensor) -> None:
        main.zero_()
        for piece in self.pieces[index]:
            model = self.plan.bindings[piece.binding].model
            if model is not None:
                main[piece.bucket_slice].copy_(model[piece.shard_slice])

    def copy_main_to_model(self, index: int, main: torch.Tensor) -> None:
        for piece in self.pieces[index]:
            model = self.plan.bindings[piece.binding].model
            if model is not None:
                model[piece.shard_slice].copy_(main[piece.bucket_slice])

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

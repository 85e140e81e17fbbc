"""One bucket in another storage form, from the buckets of a snapshot that hold its elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gds_optimizer.codecs import RemainderCodec, clear_tie_bits, get_codec, nearest_codec
from gds_optimizer.codecs.remainder import stored_moments
from gds_optimizer.direct_file import PlaneChecksums, Progress, read_chunks
from gds_optimizer.footer import BucketRecord, Footer, build_footer, footer_words, parse_footer
from gds_optimizer.io.direct import allocate_host_buffer
from gds_optimizer.layout import Bucket, Layout, Plane, align_up
from gds_optimizer.plan import remainder_codec, tie_plane
from gds_optimizer.snapshot_read import Part, check_footer, check_planes
from gds_optimizer.storage_form import same_bytes


@dataclass(frozen=True, slots=True)
class _Segment:
    """Elements `low` to `high` of a saved bucket, which are to be at `place` in the new one."""

    saved: int
    low: int
    high: int
    place: int


class BucketConverter:
    """Makes the buckets of a layout, in order, from those of a part in another form.

    In memory are the bucket that is made, the saved ones that it takes from (those of the same
    elements, but for what alignment adds up to), and decoded values of one plane of each.

    Args:
        part: of the snapshot.
        layout: of the same shards in the same spaces, with planes of the same names.
        progress: called with bytes of the part's files as they are dealt with.

    Attributes:
        halves: of the mains of the bucket made last, which are stored as remainders: the mains
            rounded, 1-D bf16; None for a bucket without such.
    """

    def __init__(self, part: Part, layout: Layout, progress: Progress | None = None) -> None:
        self._part, self._layout = part, layout
        self._progress = progress
        self._made = allocate_host_buffer(max(layout.max_file_bytes, 1))
        self._spare: list[torch.Tensor] = []
        self._saved: dict[int, torch.Tensor] = {}
        self._saved_halves: dict[int, torch.Tensor] = {}
        self.halves: torch.Tensor | None = None

    def convert(self, bucket: Bucket) -> tuple[torch.Tensor, Footer]:
        """One bucket's file; call it for every bucket, in order.

        Args:
            bucket: of the layout.

        Returns:
            Its bytes, 1-D uint8, good until the next call, and what its footer says. A bucket of
            which nothing was written is zeros and has no footer.

        Raises:
            CorruptBucketError: a saved bucket is not what was written; names it, file and plane.
            IoError, OSError: it cannot be read.
        """
        segments = list(self._segments(bucket))
        sources = sorted({segment.saved for segment in segments})
        self._load(sources)
        records = [self._part.record(index) for index in sources]
        written = [any(record.written[n] for record in records) for n in range(len(bucket.planes))]
        data = self._made[: bucket.file_bytes]
        data.zero_()
        codecs = [remainder_codec(self._part.layout.spaces[bucket.space]), remainder_codec(bucket)]
        has_remainders = codecs != [None, None]
        for number, plane in enumerate(bucket.planes):
            if written[number] and not (number == 0 and has_remainders):
                self._convert_plane(bucket, number, plane, segments, data)
        self.halves = None
        if has_remainders:  # last, since signs of the moments are part of it
            self._convert_mains(bucket, segments, written, data)
        if not any(written):
            return data, Footer(0, written, [0] * len(written))
        record = BucketRecord(max(r.step for r in records if not r.is_blank), written)
        words = footer_words(data, bucket)
        words.copy_(build_footer(data, bucket, self._layout, record))
        return data, parse_footer(words.numpy().tobytes(), bucket, self._layout.layout_id)

    def _segments(self, bucket: Bucket) -> Iterator[_Segment]:
        """Where a bucket's elements are, in element order."""
        space, size = self._part.layout.spaces[bucket.space], self._part.layout.bucket_numel
        for piece in bucket.pieces:
            start = space.shard_starts[piece.shard] + piece.shard_offset
            position, end = start, start + piece.numel
            while position < end:
                saved = self._part.bucket_at[space.index, position // size]
                stop = min(end, saved.start + saved.numel)
                yield _Segment(
                    saved.index,
                    position - saved.start,
                    stop - saved.start,
                    piece.bucket_offset + position - start,
                )
                position = stop

    # ------------------------------------------------------------------ what was saved

    def _load(self, indices: list[int]) -> None:
        """Have these saved buckets in memory, and no others."""
        for index in self._saved.keys() - set(indices):
            self._spare.append(self._saved.pop(index))
            self._saved_halves.pop(index, None)
        for index in indices:
            if index not in self._saved:
                self._saved[index] = self._read(index)
                if index in self._part.upper:
                    halves = self._part.upper.checked(index, self._progress)
                    self._saved_halves[index] = halves

    def _read(self, index: int) -> torch.Tensor:
        """A saved bucket's bytes, compared with its footer and the manifest; read only once."""
        part, bucket = self._part, self._part.layout.buckets[index]
        check_footer(part, index)
        buffer = (
            self._spare.pop()
            if self._spare
            else allocate_host_buffer(max(part.layout.max_file_bytes, 1))
        )
        if not part.record(index).is_blank:
            sums, position = PlaneChecksums(bucket), 0
            for chunk in read_chunks(part.file(index), 0, bucket.footer_offset):
                sums.add(chunk, position)
                buffer[position : position + chunk.numel()].copy_(chunk)
                position += chunk.numel()
                self._count(chunk.numel())
            check_planes(part, index, sums.values)
            self._count(bucket.file_bytes - position)
        else:
            self._count(bucket.file_bytes)
        return buffer

    def _count(self, nbytes: int) -> None:
        if self._progress:
            self._progress(nbytes)

    # ------------------------------------------------------------------ a plane

    def _convert_plane(
        self,
        bucket: Bucket,
        number: int,
        plane: Plane,
        segments: list[_Segment],
        data: torch.Tensor,
    ) -> None:
        """Fill one plane of the new bucket's bytes, which are zeros."""
        encoded = _bytes_of(plane, data)
        copied = self._same_places(bucket, number, plane)
        if copied is not None:
            encoded.copy_(copied)
            if number == tie_plane(self._part.layout.spaces[bucket.space]):
                clear_tie_bits(stored_moments(encoded, plane.codec, bucket.numel))
            return
        codec = nearest_codec(plane.codec)
        values = (
            codec.decode(encoded, bucket.numel)
            if codec.is_view
            else torch.zeros(bucket.numel, dtype=codec.dtype)
        )
        self._decode_all(number, segments, values)
        codec.encode_from(values, encoded, numel=bucket.numel)

    def _convert_mains(
        self, bucket: Bucket, segments: list[_Segment], written: list[bool], data: torch.Tensor
    ) -> None:
        """Fill the main plane, from remainders or with them, where all other planes are there.

        Sets `halves`, and in `written` the plane with the tie bits, if there are any.
        """
        mains = torch.zeros(bucket.numel)
        self._decode_all(0, segments, mains)
        encoded, codec = _bytes_of(bucket.planes[0], data), remainder_codec(bucket)
        if codec is None:
            get_codec(bucket.planes[0].codec).encode_from(mains, encoded, numel=bucket.numel)
            return
        number, ties = tie_plane(bucket), None
        if number is not None:
            plane = bucket.planes[number]
            ties = stored_moments(_bytes_of(plane, data), plane.codec, bucket.numel)
        codec.encode_main(mains, encoded, exp_avg_sq=ties, numel=bucket.numel)
        if number is not None and ties is not None and not written[number]:
            written[number] = bool(torch.signbit(ties).any())
        self.halves = mains.to(torch.bfloat16)

    def _decode_all(self, number: int, segments: list[_Segment], values: torch.Tensor) -> None:
        """Put the saved values of a plane of the new bucket where they belong; others stay."""
        for index in sorted({segment.saved for segment in segments}):
            if self._part.record(index).written[number]:  # else it is zeros, whatever the file has
                self._decode(index, number, [s for s in segments if s.saved == index], values)

    def _same_places(self, bucket: Bucket, number: int, plane: Plane) -> torch.Tensor | None:
        """The saved plane's bytes, if they are those of the new one; None if not.

        Rounding again what was rounded before need not give the same for every value.
        """
        space = self._part.layout.spaces[bucket.space]
        if (
            not same_bytes(space.planes[number].codec, plane.codec)
            or space.shard_starts != self._layout.spaces[bucket.space].shard_starts
        ):
            return None
        saved = self._part.bucket_at[bucket.space, bucket.start // self._layout.bucket_numel]
        return _bytes_of(saved.planes[number], self._saved[saved.index])

    def _decode(
        self, index: int, number: int, segments: list[_Segment], values: torch.Tensor
    ) -> None:
        """Put a saved bucket's values where they belong."""
        saved = self._part.layout.buckets[index]
        plane = saved.planes[number]
        codec, encoded = get_codec(plane.codec), _bytes_of(plane, self._saved[index])
        # The codec handles whole blocks.
        first = segments[0].low // codec.range_numel * codec.range_numel
        last = min(align_up(segments[-1].high, codec.range_numel), saved.numel)
        if codec.is_view:
            decoded = codec.decode(encoded, saved.numel)[first:last]
        else:
            decoded = torch.empty(last - first, dtype=codec.dtype)
            if isinstance(codec, RemainderCodec):
                self._decode_mains(saved, codec, decoded, first)
            else:
                codec.decode_into(encoded, decoded, numel=saved.numel, start=first)
        for segment in segments:
            target = values[segment.place : segment.place + segment.high - segment.low]
            target.copy_(decoded[segment.low - first : segment.high - first])
            if number == tie_plane(saved):  # what was saved stays as it is: mains need it
                clear_tie_bits(target)

    def _decode_mains(
        self, saved: Bucket, codec: RemainderCodec, mains: torch.Tensor, first: int
    ) -> None:
        """Mains of a saved bucket from `first` on that are stored as remainders."""
        data, number, ties = self._saved[saved.index], tie_plane(saved), None
        if number is not None:
            plane = saved.planes[number]
            ties = stored_moments(_bytes_of(plane, data), plane.codec, saved.numel)
            ties = ties[first : first + mains.numel()]
            if not self._part.record(saved.index).written[number]:
                ties = torch.zeros_like(ties)
        codec.decode_main(
            _bytes_of(saved.planes[0], data),
            mains,
            model=self._saved_halves[saved.index][first : first + mains.numel()],
            exp_avg_sq=ties,
            numel=saved.numel,
            start=first,
        )


def _bytes_of(plane: Plane, data: torch.Tensor) -> torch.Tensor:
    """The bytes of a plane in a file's, padding included."""
    return data[plane.offset : plane.offset + plane.nbytes]

"""Where every element of the optimizer state lives: shards, element spaces, buckets, planes.

Pure: it reads and writes nothing, needs no device, and its results are frozen. Everyone else
obeys them.

A *shard* is the flat part of one parameter that this rank's optimizer owns. The shards of one
*space* (those with the same planes) are laid end to end, each start aligned to 64 elements (or to
the blocks of 256 that a codec encodes together, so that no block holds elements of two shards), and
the resulting element space is cut into equal *buckets*. A bucket is one file:

    plane 0 | padding to 4 KiB | plane 1 | padding | ... | footer page (4 KiB)

Bucket boundaries are multiples of 1024 elements, so a shard is only ever cut at a multiple of 64
elements from its start. Vectorised CPU kernels give other bits at other cuts, and a fp32 plane
stays a whole number of pages.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gds_optimizer.codecs import get_codec
from gds_optimizer.errors import ConfigError, UnsupportedError

PAGE_BYTES = 4096
SHARD_ALIGNMENT = 64
"""Elements; every shard starts at a multiple of it, and of what its planes' codecs want."""
SCRATCH_ALIGNMENT = 256
"""Bytes; decoded planes start at multiples of it, as cudaMalloc's allocations do."""
BUCKET_ALIGNMENT = 1024
"""Elements; every bucket's length is a multiple of it."""
MAX_PLANES = 247
"""As many as a footer page has room for: 512 words, 17 of them fixed, two a plane."""
LAYOUT_VERSION = 1


def align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSpec:
    """One state tensor of the parameter's shape: its name in the optimizer and its codec's."""

    name: str
    codec: str = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A flat range of one parameter; `name` is unique within a layout."""

    name: str
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSpec:
    """Shards that keep the same planes."""

    planes: tuple[PlaneSpec, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a shard that falls into one bucket; all fields count elements.

    Attributes:
        shard: index of the shard in its space.
        shard_offset: where the piece starts in the shard; a multiple of 64, and of its blocks.
        bucket_offset: where it starts in the bucket's planes.
        numel: its length, at least 1.
    """

    shard: int
    shard_offset: int
    bucket_offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane of one bucket: `nbytes` encoded bytes at `offset`, both multiples of 4 KiB."""

    name: str
    codec: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of `numel` elements of one space, and how its file is laid out."""

    index: int
    space: int
    start: int
    numel: int
    planes: tuple[Plane, ...]
    pieces: tuple[Piece, ...]

    @property
    def footer_offset(self) -> int:
        last = self.planes[-1]
        return last.offset + last.nbytes

    @property
    def file_bytes(self) -> int:
        return self.footer_offset + PAGE_BYTES

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the decoded values of planes that cannot be used where they are stored.

        With what their codecs need beside them.
        """
        return sum(
            align_up(self.numel * codec.dtype.itemsize, SCRATCH_ALIGNMENT)
            + align_up(self.numel * codec.workspace_itemsize, SCRATCH_ALIGNMENT)
            for codec in (get_codec(plane.codec) for plane in self.planes)
            if not codec.is_view
        )


@dataclass(frozen=True, slots=True)
class Space:
    """An element space: its shards and where each starts."""

    index: int
    planes: tuple[PlaneSpec, ...]
    shards: tuple[Shard, ...]
    shard_starts: tuple[int, ...]
    numel: int


@dataclass(frozen=True)
class Layout:
    """All spaces and buckets of one optimizer on one rank."""

    bucket_numel: int
    spaces: tuple[Space, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all bucket files, footers included."""
        return sum(bucket.file_bytes for bucket in self.buckets)

    @cached_property
    def max_file_bytes(self) -> int:
        """Bytes of the largest bucket file: what a slot must hold; 0 without buckets."""
        return max((bucket.file_bytes for bucket in self.buckets), default=0)

    @cached_property
    def max_scratch_bytes(self) -> int:
        """Most bytes that a bucket's decoded values take; 0 where all are views of the slot."""
        return max((bucket.scratch_bytes for bucket in self.buckets), default=0)

    @cached_property
    def numel(self) -> int:
        """Elements of all shards, without alignment gaps."""
        return sum(shard.numel for space in self.spaces for shard in space.shards)

    def describe(self) -> dict[str, Any]:
        """The layout as plain JSON data: what `layout_id` hashes and a manifest records."""
        return {
            "version": LAYOUT_VERSION,
            "bucket_numel": self.bucket_numel,
            "spaces": [
                {
                    "planes": [{"name": p.name, "codec": p.codec} for p in space.planes],
                    "shards": [{"name": s.name, "numel": s.numel} for s in space.shards],
                }
                for space in self.spaces
            ],
        }

    @classmethod
    def from_description(cls, data: dict[str, Any]) -> Layout:
        """The layout that `describe` described.

        Raises:
            ConfigError: it is of another version.
        """
        if data.get("version") != LAYOUT_VERSION:
            raise ConfigError(
                f"the layout has version {data.get('version')}, wanted {LAYOUT_VERSION}: it was "
                "written by another version of this package"
            )
        specs = [
            SpaceSpec(
                planes=tuple(PlaneSpec(**plane) for plane in space["planes"]),
                shards=tuple(Shard(**shard) for shard in space["shards"]),
            )
            for space in data["spaces"]
        ]
        return plan_layout(specs, bucket_numel=data["bucket_numel"])

    @cached_property
    def layout_id(self) -> bytes:
        """32 bytes that two layouts share exactly when they are the same."""
        text = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()


def decoded_bytes_per_element(planes: Sequence[PlaneSpec]) -> int:
    """Bytes of one element over all `planes`, as the optimizer sees it."""
    return sum(get_codec(plane.codec).dtype.itemsize for plane in planes)


def shard_alignment(planes: Sequence[PlaneSpec]) -> int:
    """Elements; the shards of a space with these planes start at multiples of it."""
    return math.lcm(SHARD_ALIGNMENT, *(get_codec(plane.codec).range_numel for plane in planes))


def bucket_numel_for(bucket_size_bytes: int, spaces: Sequence[SpaceSpec]) -> int:
    """Largest bucket length whose decoded values fit `bucket_size_bytes` in every space.

    Decoded, so that a bucket has as many elements however they are encoded, and encoding makes
    slots smaller rather than buckets longer. Padding (less than a page for each plane) and the
    footer come on top.

    Raises:
        ConfigError: when not even the smallest bucket (1024 elements) fits.
    """
    per_element = max((decoded_bytes_per_element(s.planes) for s in spaces), default=0)
    smallest = per_element * BUCKET_ALIGNMENT
    if bucket_size_bytes < smallest:
        raise ConfigError(
            f"bucket size is {bucket_size_bytes} bytes, but the smallest bucket "
            f"({BUCKET_ALIGNMENT} elements of {per_element} bytes) takes {smallest}: "
            "ask for a larger one"
        )
    if per_element == 0:
        return BUCKET_ALIGNMENT
    return bucket_size_bytes // per_element // BUCKET_ALIGNMENT * BUCKET_ALIGNMENT


def _lay_planes(specs: Sequence[PlaneSpec], numel: int) -> tuple[Plane, ...]:
    planes = []
    offset = 0
    for spec in specs:
        nbytes = align_up(get_codec(spec.codec).encoded_bytes(numel), PAGE_BYTES)
        planes.append(Plane(spec.name, spec.codec, offset, nbytes))
        offset += nbytes
    return tuple(planes)


def _cut_pieces(
    shards: Sequence[Shard], starts: Sequence[int], bucket_numel: int
) -> dict[int, list[Piece]]:
    """Pieces by bucket number within the space, in element order."""
    pieces: dict[int, list[Piece]] = {}
    for index, (shard, start) in enumerate(zip(shards, starts, strict=True)):
        position, end = start, start + shard.numel
        while position < end:
            bucket, bucket_offset = divmod(position, bucket_numel)
            numel = min(end - position, bucket_numel - bucket_offset)
            pieces.setdefault(bucket, []).append(
                Piece(index, position - start, bucket_offset, numel)
            )
            position += numel
    return pieces


def plan_layout(specs: Sequence[SpaceSpec], *, bucket_numel: int) -> Layout:
    """Lay the shards of each space end to end and cut the result into buckets.

    Args:
        specs: the spaces; one without shards (or with empty ones only) gets no bucket.
        bucket_numel: elements of a bucket, a positive multiple of 1024. The last bucket of a
            space is as short as its elements allow.

    Raises:
        ConfigError: for a bucket length that is no positive multiple of 1024.
        UnsupportedError: for more planes than a footer describes.
        ValueError: for a space without planes or two shards of one name (our own mistakes).
    """
    if bucket_numel <= 0 or bucket_numel % BUCKET_ALIGNMENT:
        raise ConfigError(
            f"bucket length is {bucket_numel} elements, wanted a positive multiple of "
            f"{BUCKET_ALIGNMENT}"
        )
    names = [shard.name for spec in specs for shard in spec.shards]
    if len(set(names)) != len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two shards are called {duplicate!r}")

    spaces: list[Space] = []
    buckets: list[Bucket] = []
    for spec in specs:
        if not spec.planes:
            raise ValueError("a space without planes keeps no state")
        if len(spec.planes) > MAX_PLANES:
            raise UnsupportedError(
                f"the optimizer keeps {len(spec.planes)} state tensors for every parameter "
                f"({', '.join(plane.name for plane in spec.planes[:4])}, ...), and a bucket file "
                f"holds at most {MAX_PLANES}: this optimizer cannot be streamed"
            )
        starts, end, alignment = [], 0, shard_alignment(spec.planes)
        for shard in spec.shards:
            starts.append(align_up(end, alignment))
            end = starts[-1] + shard.numel
        space = Space(len(spaces), spec.planes, spec.shards, tuple(starts), end)
        spaces.append(space)
        pieces = _cut_pieces(spec.shards, starts, bucket_numel)
        for number in sorted(pieces):
            start = number * bucket_numel
            numel = min(bucket_numel, align_up(end - start, BUCKET_ALIGNMENT))
            buckets.append(
                Bucket(
                    index=len(buckets),
                    space=space.index,
                    start=start,
                    numel=numel,
                    planes=_lay_planes(spec.planes, numel),
                    pieces=tuple(pieces[number]),
                )
            )
    return Layout(bucket_numel, tuple(spaces), tuple(buckets))

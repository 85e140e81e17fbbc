"""The footer page: what a bucket file says about itself.

4 KiB, 512 little-endian int64 words, written together with the planes:

    0        magic
    1        format version
    2 .. 5   layout id (32 bytes)
    6        bucket index
    7        step of the last write
    8        number of planes
    16 + 2p  1 if plane p has been written, else 0
    17 + 2p  checksum of plane p with its padding, 0 if it has not been written
    511      checksum of words 0 .. 510

Everything else is 0. The checksums are computed where the bytes are, and a footer is verified by
building the one that ought to be there and comparing all 512 words.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gds_optimizer.checksum import checksum
from gds_optimizer.errors import CorruptBucketError
from gds_optimizer.layout import PAGE_BYTES, Bucket, Layout

MAGIC = int.from_bytes(b"GDSOPTB1", "little")
FORMAT_VERSION = 1
WORDS = PAGE_BYTES // 8

_STEP = 7
_PLANES = 16
_SELF = WORDS - 1
_FIELD_NAMES = {
    0: "magic",
    1: "format version",
    6: "bucket index",
    _STEP: "step",
    8: "number of planes",
    _SELF: "footer checksum",
}


@dataclass(slots=True)
class BucketRecord:
    """What the process remembers of a bucket file: the step it holds and its written planes."""

    step: int
    written: list[bool]

    @property
    def is_blank(self) -> bool:
        """Whether no plane has been written: the file has no footer either."""
        return not any(self.written)


def _plane_bytes(buffer: torch.Tensor, bucket: Bucket, plane: int) -> torch.Tensor:
    spec = bucket.planes[plane]
    return buffer[spec.offset : spec.offset + spec.nbytes]


@dataclass(frozen=True, slots=True)
class Footer:
    """What the footer of a file says, after its own checksum was found right.

    Attributes:
        step: of the last write.
        written: for each plane, whether it has been.
        checksums: for each plane, 0 where it has not been written.
    """

    step: int
    written: list[bool]
    checksums: list[int]


def parse_footer(page: bytes, bucket: Bucket, layout_id: bytes) -> Footer:
    """Read a footer page.

    Raises:
        CorruptBucketError: it is none, of another bucket or layout, or damaged; says what differs.
    """
    found = torch.from_numpy(np.frombuffer(page, dtype="<i8").copy())
    words = found.tolist()
    planes = range(len(bucket.planes))
    footer = Footer(
        words[_STEP],
        [bool(words[_PLANES + 2 * plane]) for plane in planes],
        [words[_PLANES + 2 * plane + 1] for plane in planes],
    )
    record = BucketRecord(footer.step, footer.written)
    expected = torch.from_numpy(
        np.frombuffer(host_footer(bucket, layout_id, record, footer.checksums), dtype="<i8").copy()
    )
    if not torch.equal(expected, found):
        raise CorruptBucketError(describe_difference(expected, found, bucket))
    return footer


def read_footer(path: Path, bucket: Bucket, layout_id: bytes) -> Footer:
    """The footer of a bucket's file.

    Raises:
        CorruptBucketError: it is not what belongs there; names the file.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        file.seek(bucket.footer_offset)
        page = file.read(PAGE_BYTES)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if len(page) != PAGE_BYTES:
        raise CorruptBucketError(
            f"bucket {bucket.index} in {path} is too short: wanted {bucket.file_bytes} bytes, got "
            f"{bucket.footer_offset + len(page)} or fewer"
        )
    try:
        return parse_footer(page, bucket, layout_id)
    except CorruptBucketError as error:
        raise CorruptBucketError(f"bucket {bucket.index} in {path}: {error}") from None


def footer_words(buffer: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """The footer inside a slot's buffer: a view of 512 int64 words."""
    return buffer[bucket.footer_offset : bucket.file_bytes].view(torch.int64)


def _unsealed(bucket: Bucket, layout_id: bytes, record: BucketRecord) -> torch.Tensor:
    """A footer in host memory in which all checksums are 0."""
    words = np.zeros(WORDS, dtype=np.int64)
    words[0], words[1] = MAGIC, FORMAT_VERSION
    words[2:6] = np.frombuffer(layout_id, dtype="<i8")
    words[6], words[_STEP], words[8] = bucket.index, record.step, len(bucket.planes)
    words[_PLANES : _PLANES + 2 * len(record.written) : 2] = record.written
    return torch.from_numpy(words)


def host_footer(
    bucket: Bucket, layout_id: bytes, record: BucketRecord, checksums: Sequence[int]
) -> bytes:
    """The footer page for planes whose checksums are known already (one for each plane)."""
    footer = _unsealed(bucket, layout_id, record)
    for plane, (written, value) in enumerate(zip(record.written, checksums, strict=True)):
        if written:
            footer[_PLANES + 2 * plane + 1] = value
    return _seal(footer).numpy().tobytes()


def build_footer(
    buffer: torch.Tensor, bucket: Bucket, layout: Layout, record: BucketRecord
) -> torch.Tensor:
    """The footer that belongs to the planes in `buffer`, on its device.

    Args:
        buffer: a slot's bytes (1-D uint8); of the planes, those that `record` calls written.
        bucket: which bucket the slot holds.
        layout: the layout it belongs to.
        record: step and written planes to state.

    Returns:
        512 int64 words, not yet in the slot.
    """
    footer = _unsealed(bucket, layout.layout_id, record).to(buffer.device)
    for plane, written in enumerate(record.written):
        if written:
            footer[_PLANES + 2 * plane + 1] = checksum(_plane_bytes(buffer, bucket, plane))
    return _seal(footer)


def replace_plane_checksum(buffer: torch.Tensor, bucket: Bucket, plane: int) -> None:
    """Rewrite the checksum of one plane in the slot's own footer, after that plane was written."""
    footer = footer_words(buffer, bucket)
    footer[_PLANES + 2 * plane] = 1
    footer[_PLANES + 2 * plane + 1] = checksum(_plane_bytes(buffer, bucket, plane))
    _seal(footer)


def _seal(footer: torch.Tensor) -> torch.Tensor:
    footer[_SELF] = 0
    footer[_SELF] = checksum(footer.view(torch.uint8))
    return footer


def expected_words(
    buffer: torch.Tensor,
    bucket: Bucket,
    layout: Layout,
    record: BucketRecord,
    planes: Sequence[int],
) -> torch.Tensor:
    """The footer that ought to be in `buffer`, given that only `planes` of it were read.

    The checksums of planes that were not read are taken from the footer itself.
    """
    read = [written and plane in planes for plane, written in enumerate(record.written)]
    expected = build_footer(buffer, bucket, layout, BucketRecord(record.step, read))
    found = footer_words(buffer, bucket)
    for plane, written in enumerate(record.written):
        if written and not read[plane]:
            expected[_PLANES + 2 * plane] = 1
            expected[_PLANES + 2 * plane + 1] = found[_PLANES + 2 * plane + 1]
    return _seal(expected)


def describe_difference(expected: torch.Tensor, found: torch.Tensor, bucket: Bucket) -> str:
    """Which words of a footer differ, in words; for messages."""
    wanted, got = expected.tolist(), found.tolist()
    if got[0] != MAGIC:
        return "it has no footer (wanted the magic number, got other bytes)"
    parts = []
    for index in range(WORDS):
        if wanted[index] == got[index] or index == _SELF:
            continue
        parts.append(f"{_field_name(index, bucket)}: wanted {wanted[index]}, got {got[index]}")
    if not parts:
        parts.append("footer checksum is wrong")
    return "; ".join(parts[:4]) + (" and more" if len(parts) > 4 else "")


def _field_name(index: int, bucket: Bucket) -> str:
    if 2 <= index <= 5:
        return "layout id"
    plane, is_checksum = divmod(index - _PLANES, 2)
    if 0 <= plane < len(bucket.planes):
        what = "checksum" if is_checksum else "written flag"
        return f"{what} of plane {bucket.planes[plane].name!r}"
    return _FIELD_NAMES.get(index, f"word {index}")

"""Reading snapshots: what is in one, and whether it is as it was written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.checksum import checksum
from gds_optimizer.codecs import get_codec
from gds_optimizer.direct_file import Progress, plane_checksums
from gds_optimizer.errors import CorruptBucketError, GdsOptimizerError, SnapshotError
from gds_optimizer.footer import BucketRecord, read_footer
from gds_optimizer.jsonvalues import seal_of, unseal
from gds_optimizer.layout import Bucket, Layout
from gds_optimizer.snapshot import (
    COMPLETE_NAME,
    FORMAT,
    MANIFEST_NAME,
    RESIDENT_NAME,
    VERSION,
    part_key,
)
from gds_optimizer.snapshot_files import matching
from gds_optimizer.snapshot_upper import UpperFile, upper_bytes


def _read_sealed(path: Path) -> tuple[dict[str, Any], str]:
    """What a sealed file says, and its seal."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
    try:
        data = unseal(content)
    except ValueError as error:
        raise SnapshotError(f"{path} is damaged or none of this package's: {error}") from error
    if data.get("format") != FORMAT:
        raise SnapshotError(f"{path} does not describe a snapshot of this package")
    if data.get("version") != VERSION:
        raise SnapshotError(
            f"{path} has version {data.get('version')}, wanted {VERSION}: it was written by "
            "another version of this package"
        )
    return data, seal_of(content)


@dataclass(frozen=True)
class Part:
    """One optimizer of one rank in a snapshot."""

    directory: Path
    manifest: dict[str, Any]

    @cached_property
    def layout(self) -> Layout:
        """How the bucket files are laid out."""
        return Layout.from_description(self.manifest["layout"])

    @cached_property
    def bucket_at(self) -> dict[tuple[int, int], Bucket]:
        """Buckets by their space and their number in it."""
        size = self.layout.bucket_numel
        return {(bucket.space, bucket.start // size): bucket for bucket in self.layout.buckets}

    @property
    def rank(self) -> int:
        return int(self.manifest["rank"])

    @property
    def name(self) -> str:
        """Of the engine, e.g. "opt0"."""
        return str(self.manifest["name"])

    def file(self, index: int) -> Path:
        """A bucket's file; on another file system it has an absolute path."""
        return self.directory / str(self.manifest["buckets"][index]["file"])

    def record(self, index: int) -> BucketRecord:
        entry = self.manifest["buckets"][index]
        return BucketRecord(entry["step"], list(entry["written"]))

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket files, and of the halves of mains that they lack."""
        return self.layout.total_bytes + upper_bytes(self.layout)

    @cached_property
    def upper(self) -> UpperFile:
        """Halves of mains that are stored as remainders."""
        return UpperFile(self.directory, self.manifest, self.layout)

    def resident(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Entries of the state without bucket, and their values on the CPU, one at a time.

        Raises:
            SnapshotError: the file is damaged; names the shard.
        """
        path = self.directory / RESIDENT_NAME
        try:
            with open(path, "rb") as file:
                for entry in self.manifest["resident"]:
                    codec = get_codec(entry["codec"])
                    shape = torch.Size(entry["shape"])
                    nbytes = codec.encoded_bytes(shape.numel())
                    raw = torch.empty(-(-nbytes // 8) * 8, dtype=torch.uint8)
                    read_bytes = file.readinto(raw.numpy().data) if raw.numel() else 0
                    found = int(checksum(raw)) if raw.numel() else 0
                    if read_bytes != raw.numel() or found != entry["checksum"]:
                        raise SnapshotError(
                            f"{path} is damaged: {entry['key']} of {entry['shard']} is not what "
                            "was written"
                        )
                    yield entry, codec.decode(raw, shape.numel()).reshape(shape)
                if file.read(1):
                    raise SnapshotError(f"{path} is damaged: it is longer than it was written")
        except OSError as error:
            raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error


def describe(path: Path) -> dict[str, Any]:
    """What `snapshot.json` says.

    Raises:
        SnapshotError: there is no complete snapshot at `path`, or the file is damaged.
    """
    if not path.is_dir():
        raise SnapshotError(f"there is no snapshot at {path}: it is not a directory")
    if not (path / COMPLETE_NAME).exists():
        raise SnapshotError(
            f"there is no complete snapshot at {path}: {COMPLETE_NAME}, which is written last, is "
            "missing"
        )
    return _read_sealed(path / COMPLETE_NAME)[0]


def open_part(path: Path, whole: dict[str, Any], key: str) -> Part:
    """One optimizer of one rank.

    Args:
        path: the snapshot.
        whole: what `describe` says of it.
        key: see `part_key`.

    Raises:
        SnapshotError: its manifest is missing, damaged, or another snapshot's.
    """
    manifest, seal = _read_sealed(path / key / MANIFEST_NAME)
    if seal != whole["manifests"][key] or manifest["snapshot"] != whole["snapshot"]:
        raise SnapshotError(
            f"{path / key / MANIFEST_NAME} is not the one that was written: it is of another "
            "snapshot"
        )
    return Part(path / key, manifest)


def read_manifest(directory: Path) -> tuple[Part, str]:
    """A part by itself, of a snapshot that need not be complete, and its manifest's seal.

    Raises:
        SnapshotError: its manifest is missing or damaged.
    """
    manifest, seal = _read_sealed(directory / MANIFEST_NAME)
    return Part(directory, manifest), seal


def part_keys(whole: dict[str, Any], name: str | None = None) -> list[str]:
    """Keys of the parts of a snapshot; only those of one engine, where it is named."""
    keys = sorted(whole["manifests"])
    return [key for key in keys if name is None or key.partition("/")[2] == name]


def own_part_key(whole: dict[str, Any], rank: int, name: str) -> str | None:
    """Key of a rank's own part; None if the snapshot has none."""
    key = part_key(rank, name)
    return key if key in whole["manifests"] else None


def all_parts(path: Path) -> list[Part]:
    """Every part of a complete snapshot.

    Raises:
        SnapshotError: it is incomplete, or a manifest is missing or damaged.
    """
    whole = describe(path)
    return [open_part(path, whole, key) for key in part_keys(whole)]


def readable_parts(path: Path) -> list[Part]:
    """The parts of a complete snapshot whose manifest is as it was written.

    Raises:
        SnapshotError: it is incomplete, or `snapshot.json` is damaged.
    """
    whole = describe(path)
    parts = []
    for key in part_keys(whole):
        with contextlib.suppress(SnapshotError):
            parts.append(open_part(path, whole, key))
    return parts


def outdated(path: Path, keep_last: int, busy: Collection[str]) -> list[Path]:
    """Complete snapshots beside `path` that are one too many once it is complete, oldest first.

    Args:
        path: a snapshot, complete or not yet.
        keep_last: how many are to be left, it included.
        busy: resolved paths of those that must stay; they do not count.
    """
    others = []
    for file in matching(path.parent, f"*/{COMPLETE_NAME}"):
        each = file.parent
        with contextlib.suppress(SnapshotError, OSError):  # it stays, where it cannot be looked at
            if each == path or each.is_symlink() or str(each.resolve()) in busy:
                continue
            others.append((file.stat().st_mtime_ns, describe(each)["step"], each))
    others.sort()
    return [each for _, _, each in others[: max(0, len(others) + 1 - keep_last)]]


# ---------------------------------------------------------------------- verifying


def check_footer(part: Part, index: int) -> None:
    """Compare the size and the footer of a bucket's file with the manifest.

    Raises:
        CorruptBucketError: they differ, or the file is missing; names bucket and file.
    """
    bucket, path = part.layout.buckets[index], part.file(index)
    entry = part.manifest["buckets"][index]
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        hint = (
            "; it is outside of the snapshot, on a drive of the machine that it was taken on"
            if part.directory not in path.parents
            else ""
        )
        raise CorruptBucketError(
            f"bucket {index} in {path} cannot be found ({error.strerror}){hint}"
        ) from error
    if nbytes != bucket.file_bytes:
        raise CorruptBucketError(
            f"bucket {index} in {path} is damaged: wanted {bucket.file_bytes} bytes, got {nbytes}"
        )
    if not any(entry["written"]):
        return
    footer = read_footer(path, bucket, part.layout.layout_id)
    stated = (entry["step"], entry["written"], entry["checksums"])
    if (footer.step, footer.written, footer.checksums) != stated:
        raise CorruptBucketError(
            f"bucket {index} in {path} is not the one that was taken: the manifest says step "
            f"{entry['step']}, the file step {footer.step}, or their checksums differ"
        )


def check_planes(part: Part, index: int, found: list[int]) -> None:
    """Compare checksums of a bucket's planes with the manifest.

    Raises:
        CorruptBucketError: they differ; names bucket, file and plane.
    """
    entry = part.manifest["buckets"][index]
    for plane, written, wanted, got in zip(
        part.layout.buckets[index].planes, entry["written"], entry["checksums"], found, strict=True
    ):
        if written and wanted != got:
            raise CorruptBucketError(
                f"bucket {index} in {part.file(index)} is damaged: checksum of plane "
                f"{plane.name!r}: wanted {wanted}, got {got}"
            )


def check_bucket(part: Part, index: int, progress: Progress | None = None) -> None:
    """Read a bucket's file and compare it with its footer and the manifest.

    Raises:
        CorruptBucketError: they differ; names bucket, file and plane.
        GdsOptimizerError, OSError: it cannot be read.
    """
    bucket = part.layout.buckets[index]
    left_bytes = bucket.file_bytes

    def count(nbytes: int) -> None:
        nonlocal left_bytes
        left_bytes -= nbytes
        if progress:
            progress(nbytes)

    try:
        check_footer(part, index)
        if any(part.manifest["buckets"][index]["written"]):
            check_planes(part, index, plane_checksums(part.file(index), bucket, count))
    finally:
        count(left_bytes)  # the footer, and what a damaged file does not have


def _check_resident(part: Part) -> None:
    for _ in part.resident():
        pass


def verify(path: Path, progress: Progress | None = None) -> list[str]:
    """Read everything and compare checksums.

    Args:
        path: a snapshot.
        progress: called with bytes as they are read.

    Returns:
        What is damaged, one sentence each; empty if nothing is.

    Raises:
        SnapshotError: there is no complete snapshot, or `snapshot.json` is damaged.
    """
    damages = []
    whole = describe(path)
    for key in part_keys(whole):
        try:
            part = open_part(path, whole, key)
        except SnapshotError as error:
            damages.append(str(error))
            continue
        checks: list[Callable[[], Any]] = [partial(_check_resident, part)]
        checks += [
            partial(check_bucket, part, bucket.index, progress) for bucket in part.layout.buckets
        ]
        checks += [partial(part.upper.checked, index, progress) for index in part.upper]
        for check in checks:
            try:
                check()
            except (GdsOptimizerError, OSError) as error:
                damages.append(str(error))
    return damages

"""Converting a snapshot to another storage form: offline, all ranks by one process.

Every bucket of the result is put together from the source's values: decoded, and encoded anew,
rounded to nearest. Where a shard lies in its space may change with the form (8-bit blocks start at
multiples of 256 elements), so a bucket may take from several of the source's. No more than those
few are in memory. What is read is compared with its checksums before it is used.

The result becomes a snapshot with `snapshot.json`, which is renamed into place last. What a killed
conversion leaves has the form of an incomplete snapshot, like that of a killed copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.bucket_convert import BucketConverter
from gds_optimizer.direct_file import Progress, write_file
from gds_optimizer.errors import ConfigError, SnapshotError, UnsupportedError
from gds_optimizer.jsonvalues import seal, seal_of
from gds_optimizer.layout import Layout, PlaneSpec, Shard, SpaceSpec, plan_layout
from gds_optimizer.room import check_room
from gds_optimizer.snapshot import (
    COMPLETE_NAME,
    MANIFEST_NAME,
    PARTIAL,
    RESIDENT_NAME,
    declare,
    fsync_directory,
    make_directories,
    part_key,
    rank_directory,
    write_durably,
)
from gds_optimizer.snapshot_files import (
    being_made,
    rank_numbers,
    refuse_foreign,
    remove_declaration,
    remove_rank,
)
from gds_optimizer.snapshot_read import Part, describe, open_part, part_keys
from gds_optimizer.snapshot_upper import UPPER_NAME, UpperWriter, upper_bytes
from gds_optimizer.storage_form import StorageForm


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is to be converted, and into what. Create it with `plan_conversion`.

    Attributes:
        source: a complete snapshot.
        target: directory for the result.
        whole: what the source's `snapshot.json` says.
        parts: all of the source's, each with the layout of the result.
    """

    source: Path
    target: Path
    whole: dict[str, Any]
    parts: tuple[tuple[Part, Layout], ...]

    @property
    def read_bytes(self) -> int:
        """Of the source's bucket files, and of the halves of mains that they lack."""
        return sum(part.nbytes for part, _ in self.parts)

    @property
    def written_bytes(self) -> int:
        """Of the result's bucket files, and of the halves of mains that they lack."""
        return sum(layout.total_bytes + upper_bytes(layout) for _, layout in self.parts)

    @property
    def needed_bytes(self) -> int:
        """Room for all files of the result."""
        # A manifest's length may change with the names of codecs: twice is enough.
        small = (
            2 * (part.directory / MANIFEST_NAME).stat().st_size
            + (part.directory / RESIDENT_NAME).stat().st_size
            for part, _ in self.parts
        )
        return self.written_bytes + sum(small)


def converted_layout(part: Part, form: StorageForm) -> Layout:
    """The layout of a part in another form: that of a run with those settings.

    Raises:
        UnsupportedError: the form has no codec for a plane, or the plane's own cannot be converted.
    """
    kind = str(part.manifest["optimizer"]).rpartition(".")[2]
    data = part.manifest["layout"]
    try:
        specs = [
            SpaceSpec(
                planes=form.planes([PlaneSpec(**each) for each in space["planes"]], kind),
                shards=tuple(Shard(**shard) for shard in space["shards"]),
            )
            for space in data["spaces"]
        ]
    except UnsupportedError as error:
        raise UnsupportedError(f"{part.directory} cannot be converted: {error}") from None
    # A bucket has as many elements in every form: its size counts decoded bytes.
    return plan_layout(specs, bucket_numel=data["bucket_numel"])


def plan_conversion(source: Path, target: Path, form: StorageForm) -> Conversion:
    """Find out what a conversion takes, and whether it can be made; nothing is changed.

    Args:
        source: a complete snapshot, or a copy of one.
        target: directory for the result, on any file system; it must not hold a snapshot.
        form: in which form the result is to be.

    Raises:
        SnapshotError: the source is incomplete or damaged, or the target is taken.
        ConfigError: the source is in that form already.
        UnsupportedError: there is no such form for one of its planes.
    """
    source, target = Path(source).absolute(), Path(target).absolute()
    whole = describe(source)
    own, other = source.resolve(), target.resolve()
    if own == other or own in other.parents or other in own.parents:
        raise SnapshotError(
            f"{target} and the snapshot {source} are inside of one another: choose another path "
            "for the result"
        )
    if (target / COMPLETE_NAME).exists():
        raise SnapshotError(f"there is a snapshot in {target} already: choose another path")
    found = [open_part(source, whole, key) for key in part_keys(whole)]
    parts = tuple((part, converted_layout(part, form)) for part in found)
    if all(part.layout.layout_id == layout.layout_id for part, layout in parts):
        planes = {
            f"{plane.name} {plane.codec}"
            for part, _ in parts
            for space in part.layout.spaces
            for plane in space.planes
        }
        raise ConfigError(
            f"{form.describe() or 'nothing'} is asked for, and the snapshot {source} has that form "
            f"already ({', '.join(sorted(planes)) or 'it has no buckets'}): there is nothing to "
            "convert; name another form, or copy the snapshot as it is"
        )
    ranks = {part.rank for part in found}
    for rank in sorted(ranks | set(rank_numbers(target) if target.is_dir() else ())):
        refuse_foreign(target, rank)
    return Conversion(source, target, whole, parts)


def convert(conversion: Conversion, progress: Progress | None = None) -> None:
    """Make a snapshot in another form of one that stays as it is.

    Nobody else may be making a snapshot at the target.

    Args:
        conversion: from `plan_conversion`.
        progress: called with bytes of the source as they are dealt with.

    Raises:
        CorruptBucketError: the source is not what was written; names bucket, file and plane.
        SnapshotError: a file of the source is damaged or missing.
        NoSpaceError: the result does not fit.
        OSError: reading or writing failed.
        In each case nothing of the result is left.
    """
    target, whole = conversion.target, conversion.whole
    identity = uuid.uuid4().hex
    seals: dict[str, str] = {}
    with being_made(target), contextlib.ExitStack() as undo:
        undo.callback(_remove, target, [each for each in target.parents if not each.exists()])
        make_directories(target)
        _remove_ranks(target)  # what a killed conversion left
        _check_room(conversion)
        for rank in sorted({part.rank for part, _ in conversion.parts}):
            final = rank_directory(target, rank)
            partial = final.with_name(final.name + PARTIAL)
            partial.mkdir(mode=0o700)
            for part, layout in conversion.parts:
                if part.rank == rank:
                    seals[part_key(rank, part.name)] = _convert_part(
                        part, layout, partial / part.name, identity, progress
                    )
            fsync_directory(partial)
            os.replace(partial, final)
        declare(target, {**whole, "snapshot": identity, "manifests": seals})
        undo.pop_all()


def _remove(target: Path, made: list[Path]) -> None:
    """Remove what a failed conversion has made, with the directories above that were missing."""
    with contextlib.suppress(OSError):
        remove_declaration(target)
        _remove_ranks(target)
    for each in (target, *made):
        with contextlib.suppress(OSError):  # somebody else's files are in it
            each.rmdir()


def _remove_ranks(target: Path) -> None:
    (target / (COMPLETE_NAME + PARTIAL)).unlink(missing_ok=True)
    for rank in rank_numbers(target):
        remove_rank(target, rank)


def _check_room(conversion: Conversion) -> None:
    check_room(
        [conversion.target],
        conversion.needed_bytes,
        "the files of the converted snapshot",
        "name a directory on a larger file system",
    )


def _convert_part(
    part: Part, layout: Layout, directory: Path, identity: str, progress: Progress | None
) -> str:
    """Make one part of the result in a new directory.

    Returns:
        The seal of its manifest.
    """
    directory.mkdir(mode=0o700)
    converter = BucketConverter(part, layout, progress)
    buckets = []
    with UpperWriter(directory / UPPER_NAME, layout) as upper:
        for bucket in layout.buckets:
            name = f"bucket{bucket.index:05d}.bin"
            data, footer = converter.convert(bucket)
            write_file(directory / name, data)
            if converter.halves is not None:
                upper.add(bucket.index, partial(_put, converter.halves))
            buckets.append(
                {
                    "file": name,
                    "step": footer.step,
                    "written": footer.written,
                    "checksums": footer.checksums,
                }
            )
    _copy_resident(part, directory)
    manifest = seal(
        {
            **part.manifest,
            "snapshot": identity,
            "layout": layout.describe(),
            "layout_id": layout.layout_id.hex(),
            "buckets": buckets,
            "upper": upper.entries,
        }
    )
    write_durably(directory / MANIFEST_NAME, manifest)
    return seal_of(manifest)


def _put(values: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(values)


def _copy_resident(part: Part, directory: Path) -> None:
    """State without bucket is as the optimizer keeps it in every form."""
    with (
        open(part.directory / RESIDENT_NAME, "rb") as source,
        open(directory / RESIDENT_NAME, "xb") as target,
    ):
        shutil.copyfileobj(source, target, 2**20)
        target.flush()
        os.fsync(target.fileno())
    for _ in Part(directory, part.manifest).resident():
        pass  # each value is compared with its checksum

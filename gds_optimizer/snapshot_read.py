"""Reading snapshots: what is in one, whether it is whole, and taking it up again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.checksum import checksum
from gds_optimizer.codecs import get_codec
from gds_optimizer.direct_file import Progress, copy_file, plane_checksums
from gds_optimizer.engine import MAIN_PLANE, Engine
from gds_optimizer.errors import CorruptBucketError, GdsOptimizerError, SnapshotError
from gds_optimizer.footer import BucketRecord, read_footer
from gds_optimizer.jsonvalues import from_json
from gds_optimizer.layout import Layout
from gds_optimizer.mapped_state import map_state
from gds_optimizer.mapping import PlaneMapping
from gds_optimizer.snapshot import (
    COMPLETE_NAME,
    FORMAT,
    MANIFEST_NAME,
    RESIDENT_NAME,
    VERSION,
    Placement,
    rank_directory,
)

_RANGE = re.compile(r"(?P<base>.*)\[(?P<start>\d+):(?P<end>\d+)\]")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SnapshotError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise SnapshotError(f"{path} does not describe a snapshot of this package")
    if data.get("version") != VERSION:
        raise SnapshotError(
            f"{path} has version {data.get('version')}, wanted {VERSION}: it was written by "
            "another version of this package"
        )
    return data


@dataclass(frozen=True)
class Part:
    """One optimizer of one rank in a snapshot."""

    directory: Path
    manifest: dict[str, Any]

    @cached_property
    def layout(self) -> Layout:
        """How the bucket files are laid out.

        Raises:
            SnapshotError: the description does not go with its own identity.
        """
        layout = Layout.from_description(self.manifest["layout"])
        if layout.layout_id.hex() != self.manifest["layout_id"]:
            raise SnapshotError(f"{self.directory / MANIFEST_NAME} is damaged: layout_id is wrong")
        return layout

    def file(self, index: int) -> Path:
        """A bucket's file; on another file system it has an absolute path."""
        return self.directory / str(self.manifest["buckets"][index]["file"])

    def record(self, index: int) -> BucketRecord:
        entry = self.manifest["buckets"][index]
        return BucketRecord(entry["step"], list(entry["written"]))

    @property
    def nbytes(self) -> int:
        return self.layout.total_bytes

    def resident(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Entries of the state without bucket, and their values on the CPU.

        Raises:
            SnapshotError: the file is damaged; names the shard.
        """
        entries = self.manifest["resident"]
        if not entries:
            return
        data = (self.directory / RESIDENT_NAME).read_bytes()
        for entry in entries:
            codec = get_codec(entry["codec"])
            nbytes = codec.encoded_bytes(entry["numel"])
            padded = data[entry["offset"] : entry["offset"] + -(-nbytes // 8) * 8]
            raw = torch.frombuffer(bytearray(padded), dtype=torch.uint8) if padded else None
            if raw is None:
                raw = torch.empty(0, dtype=torch.uint8)
            found = int(checksum(raw)) if raw.numel() else 0
            if len(padded) < nbytes or found != entry["checksum"]:
                raise SnapshotError(
                    f"{self.directory / RESIDENT_NAME} is damaged: {entry['key']} of "
                    f"{entry['shard']} is not what was written"
                )
            yield entry, codec.decode(raw, entry["numel"])


def describe(path: Path) -> dict[str, Any]:
    """What `snapshot.json` says.

    Raises:
        SnapshotError: there is no complete snapshot at `path`.
    """
    if not path.is_dir():
        raise SnapshotError(f"there is no snapshot at {path}: it is not a directory")
    if not (path / COMPLETE_NAME).exists():
        raise SnapshotError(
            f"there is no complete snapshot at {path}: {COMPLETE_NAME}, which is written last, is "
            "missing"
        )
    return _read_json(path / COMPLETE_NAME)


def open_part(path: Path, rank: int, name: str) -> Part:
    """One optimizer of one rank.

    Raises:
        SnapshotError: it is not there, or its manifest is damaged.
    """
    directory = rank_directory(path, rank) / name
    return Part(directory, _read_json(directory / MANIFEST_NAME))


def all_parts(path: Path) -> list[Part]:
    """Every part of a complete snapshot.

    Raises:
        SnapshotError: it is incomplete or a manifest is damaged.
    """
    whole = describe(path)
    parts = []
    for rank in range(whole["world_size"]):
        names = sorted(p.parent.name for p in rank_directory(path, rank).glob(f"*/{MANIFEST_NAME}"))
        parts += [open_part(path, rank, name) for name in names]
    return parts


def check_bucket(part: Part, index: int, progress: Progress | None = None) -> None:
    """Read a bucket's file and compare it with its footer and the manifest.

    Raises:
        CorruptBucketError: they differ; names bucket, file and plane.
        GdsOptimizerError, OSError: it cannot be read.
    """
    bucket, path = part.layout.buckets[index], part.file(index)
    entry = part.manifest["buckets"][index]
    if not any(entry["written"]):
        return
    footer = read_footer(path, bucket, part.layout.layout_id)
    stated = (entry["step"], entry["written"], entry["checksums"])
    if (footer.step, footer.written, footer.checksums) != stated:
        raise CorruptBucketError(
            f"bucket {index} in {path} is not the one that was taken: the manifest says step "
            f"{entry['step']}, the file step {footer.step}, or their checksums differ"
        )
    found = plane_checksums(path, bucket, progress)
    for plane, written, wanted, got in zip(
        bucket.planes, footer.written, footer.checksums, found, strict=True
    ):
        if written and wanted != got:
            raise CorruptBucketError(
                f"bucket {index} in {path} is damaged: checksum of plane {plane.name!r}: wanted "
                f"{wanted}, got {got}"
            )


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
        SnapshotError: there is no complete snapshot, or a manifest cannot be read.
    """
    damages = []
    for part in all_parts(path):
        checks: list[Callable[[], Any]] = [partial(_check_resident, part)]
        checks += [
            partial(check_bucket, part, bucket.index, progress) for bucket in part.layout.buckets
        ]
        for check in checks:
            try:
                check()
            except (GdsOptimizerError, OSError) as error:
                damages.append(str(error))
    return damages


# ---------------------------------------------------------------------- restoring


def restore_part(engine: Engine, path: Path, name: str, placement: Placement) -> None:
    """Make a snapshot the state of an engine, and the model's parameters follow it.

    With the layout that the snapshot was taken from, the files are linked (or, from another file
    system, copied). With another number of data-parallel ranks or other bucket sizes, elements are
    found by shard name and range.

    Args:
        engine: gets the state. What it held is gone, also after a failure.
        path: a complete snapshot.
        name: the engine's own part, as it was taken.
        placement: this process.

    Raises:
        SnapshotError: it is incomplete, damaged (names the bucket) or does not cover this rank.
    """
    whole = describe(path)
    engine.forget_slots()
    mine = None
    if placement.rank < whole["world_size"]:
        mine = open_part(path, placement.rank, name)
    if mine is not None and mine.manifest["layout_id"] == engine.layout.layout_id.hex():
        _take_files(engine, mine)
        source = mine
    else:
        source = _take_ranges(engine, path, name, placement)
    _take_groups(engine, source)
    try:
        engine.update_model()
    except CorruptBucketError as error:
        raise SnapshotError(f"the snapshot in {path} is damaged: {error}") from error


def _take_files(engine: Engine, part: Part) -> None:
    for bucket in engine.layout.buckets:
        if not engine.store.adopt_frozen(bucket.index, part.file(bucket.index)):
            engine.store.file_for_write(bucket.index)
            copy_file(part.file(bucket.index), engine.store.paths[bucket.index])
    device = engine.pool.device
    engine.restore(
        part.manifest["step"],
        [part.record(bucket.index) for bucket in engine.layout.buckets],
        {
            shard: (
                entry["has_state"],
                {key: from_json(value, device) for key, value in entry["scalars"].items()},
            )
            for shard, entry in part.manifest["shards"].items()
        },
    )
    for entry, values in part.resident():
        engine.set_resident(entry["shard"], entry["key"], values)


def _take_groups(engine: Engine, part: Part) -> None:
    groups = engine.plan.optimizer.param_groups
    saved = part.manifest["groups"]
    if len(groups) != len(saved):
        raise SnapshotError(
            f"the snapshot has {len(saved)} parameter groups, the optimizer {len(groups)}: build "
            "it with the same groups"
        )
    for group, entry in zip(groups, saved, strict=True):
        for key, value in entry["options"].items():
            group[key] = from_json(value, engine.pool.device)


@dataclass(frozen=True, slots=True)
class _Source:
    """A saved shard: elements `start` to `end` of a parameter."""

    start: int
    end: int
    part: Part
    shard: str


def _split_name(shard: str) -> tuple[str, int, int | None]:
    match = _RANGE.fullmatch(shard)
    if match is None:
        return shard, 0, None
    return match["base"], int(match["start"]), int(match["end"])


def _take_ranges(engine: Engine, path: Path, name: str, placement: Placement) -> Part:
    """Copy every shard's elements from whichever saved shards hold them."""
    own = {k: v for k, v in placement.of(name).items() if k != "dp"}
    sources: dict[str, list[_Source]] = {}
    peers = []
    for part in all_parts(path):
        theirs = {k: v for k, v in part.manifest["coordinates"].items() if k != "dp"}
        if part.manifest["name"] != name or theirs != own:
            continue
        peers.append(part)
        for space in part.layout.spaces:
            for shard in space.shards:
                base, start, end = _split_name(shard.name)
                sources.setdefault(base, []).append(
                    _Source(start, start + shard.numel if end is None else end, part, shard.name)
                )
    if not peers:
        raise SnapshotError(
            f"the snapshot in {path} has nothing of {name} for the parallel position {own}: "
            "restore it with the same tensor, pipeline and expert parallelism, or use a "
            "checkpoint in Megatron's own format"
        )
    for part in peers:
        for bucket in part.layout.buckets:
            check_bucket(part, bucket.index)
    reader = _ShardReader()
    mapped = map_state(engine, writable=True)
    scalars: dict[str, tuple[bool, dict[str, Any]]] = {}
    for index, binding in enumerate(engine.plan.bindings):
        base, start, _ = _split_name(binding.name)
        end = start + binding.main.numel()
        position = start
        for source in sorted(sources.get(base, []), key=lambda each: each.start):
            if source.end <= position or source.start > position or position >= end:
                continue
            stop = min(end, source.end)
            _copy_elements(
                mapped.tensors(index, position - start, stop - start),
                reader.read(source, position, stop),
            )
            scalars.setdefault(binding.name, _saved_scalars(engine, source))
            position = stop
        if position < end:
            raise SnapshotError(
                f"the snapshot in {path} lacks elements {position} to {end} of {base}: it was "
                "taken from another model or an incomplete set of ranks"
            )
        scalars.setdefault(binding.name, _scalars_of_empty(engine, sources.get(base, [])))
    engine.steps = peers[0].manifest["step"]
    mapped.commit()
    records = [
        BucketRecord(engine.steps, [True] * len(bucket.planes)) for bucket in engine.layout.buckets
    ]
    engine.restore(engine.steps, records, scalars)
    _take_resident_ranges(engine, peers)
    return peers[0]


def _saved_scalars(engine: Engine, source: _Source) -> tuple[bool, dict[str, Any]]:
    entry = source.part.manifest["shards"][source.shard]
    values = {k: from_json(v, engine.pool.device) for k, v in entry["scalars"].items()}
    return entry["has_state"], values


def _scalars_of_empty(engine: Engine, sources: list[_Source]) -> tuple[bool, dict[str, Any]]:
    """Counters of a shard without elements: those of any shard of its parameter."""
    return _saved_scalars(engine, sources[0]) if sources else (False, {})


def _copy_elements(targets: dict[str, torch.Tensor], sources: dict[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        if name not in sources:
            raise SnapshotError(f"the snapshot has no {name}: it is of another optimizer")
        target.copy_(sources[name])


class _ShardReader:
    """Elements of saved shards, mapped from the snapshot's files."""

    def __init__(self) -> None:
        self._mappings: dict[tuple[Path, int, int], PlaneMapping] = {}

    def read(self, source: _Source, start: int, stop: int) -> dict[str, torch.Tensor]:
        layout = source.part.layout
        for space in layout.spaces:
            for number, shard in enumerate(space.shards):
                if shard.name == source.shard:
                    first = space.shard_starts[number] + start - source.start
                    return {
                        plane.name: self._mapping(source.part, space.index, plane_number).tensor(
                            first, stop - start
                        )
                        for plane_number, plane in enumerate(space.planes)
                    }
        raise SnapshotError(f"{source.part.directory} does not hold {source.shard}")

    def _mapping(self, part: Part, space: int, plane: int) -> PlaneMapping:
        key = (part.directory, space, plane)
        if key not in self._mappings:
            paths = [part.file(bucket.index) for bucket in part.layout.buckets]
            self._mappings[key] = PlaneMapping(part.layout, paths, space, plane, writable=False)
        return self._mappings[key]


def _take_resident_ranges(engine: Engine, peers: list[Part]) -> None:
    """Values without bucket: mains by name and range, other state by the shard's very name."""
    saved: dict[str, list[tuple[int, torch.Tensor]]] = {}
    names = {binding.name for binding in engine.plan.bindings}
    for part in peers:
        for entry, values in part.resident():
            if entry["key"] == MAIN_PLANE:
                base, start, _ = _split_name(entry["shard"])
                saved.setdefault(base, []).append((start, values))
            elif entry["shard"] in names:
                engine.set_resident(entry["shard"], entry["key"], values)
    for shard, key, target in engine.resident_tensors():
        if key != MAIN_PLANE:
            continue
        base, start, _ = _split_name(shard)
        for first, values in saved.get(base, []):
            low = max(start, first)
            high = min(start + target.numel(), first + values.numel())
            if low < high:
                target[low - start : high - start].copy_(values[low - first : high - first])

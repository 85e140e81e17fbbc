"""Taking up a snapshot in another layout: elements are found by parameter name and range."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.codecs import RemainderCodec, clear_tie_bits, get_codec
from gds_optimizer.codecs.remainder import stored_moments
from gds_optimizer.direct_file import read_exactly
from gds_optimizer.engine import Engine
from gds_optimizer.errors import SnapshotError
from gds_optimizer.layout import Bucket, Plane, Space, align_up
from gds_optimizer.mapped_state import MappedState, reserve_scratch
from gds_optimizer.mapping import plane_bytes
from gds_optimizer.plan import MAIN_PLANE, tie_plane
from gds_optimizer.snapshot import Placement
from gds_optimizer.snapshot_match import (
    Scalars,
    check_groups,
    check_optimizer,
    saved_scalars,
    split_name,
    take_groups,
)
from gds_optimizer.snapshot_read import Part, check_bucket, open_part, part_keys

# Elements that are decoded at a time: 16 MiB.
_PART_NUMEL = 2**22


@dataclass(frozen=True, slots=True)
class _Source:
    """A saved shard: elements `start` to `end` of a parameter."""

    start: int
    end: int
    part: Part
    name: str
    space: Space
    first: int
    """Where it begins in the space."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Elements `start` to `stop` of a parameter, for one of our shards from a saved one."""

    binding: int
    position: int
    """Where they go in the shard."""
    source: _Source
    start: int
    stop: int


def other_layout(
    engine: Engine, path: Path, whole: dict[str, Any], name: str, placement: Placement
) -> Callable[[], None]:
    """What copies every shard's elements from whichever saved shards hold them."""
    peers = _peers(path, whole, name, placement)
    check_optimizer(engine, peers[0])
    check_groups(engine, peers)
    sources = _sources(peers)
    resident = _saved_resident_mains(peers)
    cuts: list[_Cut] = []
    for index, binding in enumerate(engine.plan.bindings):
        base, start, _ = split_name(binding.name)
        end = start + binding.main.numel()
        if engine.is_streamed(index):
            cuts += _cuts(engine, path, index, sources.get(base, []), start, end)
        if not binding.keeps_main:
            _check_covered(path, base, start, end, resident.get(base, []))
    needed: dict[tuple[Path, int], Part] = {}
    for cut in cuts:
        for bucket, _, _ in _elements(cut):
            needed[cut.source.part.directory, bucket.index] = cut.source.part
    for (_, index), part in needed.items():
        check_bucket(part, index)
        if index in part.upper:
            part.upper.checked(index)
    scratch = reserve_scratch(engine)  # while what the engine holds is still there

    def take() -> None:
        engine.store.thaw()
        # What was handed out before has taken the names with it (`Engine.abandon_state`).
        engine.store.reserve_written_out()
        mapped = MappedState(engine, writable=True, scratch=scratch)
        for cut in cuts:
            end = cut.position + cut.stop - cut.start
            _copy_elements(cut, mapped.tensors(cut.binding, cut.position, end))
        engine.steps = peers[0].manifest["step"]
        mapped.commit()
        del mapped
        engine.restore(engine.steps, engine.records, _scalars(engine, cuts, peers))
        _take_resident(engine, peers)
        take_groups(engine, peers[0])

    return take


def _peers(path: Path, whole: dict[str, Any], name: str, placement: Placement) -> list[Part]:
    """Parts of the ranks that together hold the parameters that this rank has a share of."""
    own = {k: v for k, v in placement.of(name).items() if k != "dp"}
    found = []
    for key in part_keys(whole, name):
        part = open_part(path, whole, key)
        theirs = {k: v for k, v in part.manifest["coordinates"].items() if k != "dp"}
        if theirs == own:
            found.append(part)
    if not found:
        raise SnapshotError(
            f"the snapshot in {path} has nothing of {name} for the parallel position {own}: "
            "restore it with the same tensor, pipeline and expert parallelism, or use a "
            "checkpoint in Megatron's own format"
        )
    return found


def _sources(peers: list[Part]) -> dict[str, list[_Source]]:
    """Saved shards by the parameter's name, in order."""
    sources: dict[str, list[_Source]] = {}
    for part in peers:
        for space in part.layout.spaces:
            for shard, first in zip(space.shards, space.shard_starts, strict=True):
                base, start, _ = split_name(shard.name)
                sources.setdefault(base, []).append(
                    _Source(start, start + shard.numel, part, shard.name, space, first)
                )
    for found in sources.values():
        found.sort(key=lambda source: (source.start, source.end))
    return sources


def _cuts(
    engine: Engine, path: Path, index: int, sources: list[_Source], start: int, end: int
) -> Iterator[_Cut]:
    binding = engine.plan.bindings[index]
    position = start
    wanted = {plane.name for plane in engine.plan.schemas[index].planes}
    wanted |= {MAIN_PLANE} if binding.keeps_main else set()
    for source in sources:
        if source.start <= position < source.end and position < end:
            saved = {plane.name for plane in source.space.planes}
            if saved != wanted:
                raise SnapshotError(
                    f"the snapshot in {path} has {', '.join(sorted(saved))} of {source.name}, and "
                    f"the optimizer keeps {', '.join(sorted(wanted))}: build "
                    "it with the same options"
                )
            stop = min(end, source.end)
            yield _Cut(index, position - start, source, position, stop)
            position = stop
    if position < end:
        raise SnapshotError(
            f"the snapshot in {path} does not hold elements {position} to {end} of "
            f"{binding.name}: it was taken from another model or with another tensor, pipeline or "
            "expert parallelism"
        )


def _elements(cut: _Cut) -> Iterator[tuple[Bucket, int, int]]:
    """Buckets that hold a cut's elements, and which of theirs they are (from, to)."""
    source = cut.source
    low = source.first + cut.start - source.start
    high = low + cut.stop - cut.start
    size = source.part.layout.bucket_numel
    for number in range(low // size, -(-high // size)):
        bucket = source.part.bucket_at[source.space.index, number]
        first, last = max(low, bucket.start), min(high, bucket.start + bucket.numel)
        yield bucket, first - bucket.start, last - bucket.start


def _copy_elements(cut: _Cut, targets: dict[str, torch.Tensor]) -> None:
    part, done = cut.source.part, 0
    for bucket, low, high in _elements(cut):
        record, path = part.record(bucket.index), part.file(bucket.index)
        with open(path, "rb", buffering=0) as file:
            for number, plane in enumerate(bucket.planes):
                target = targets[plane.name][done : done + high - low]
                if not record.written[number]:
                    target.zero_()  # never written: what is in the file means nothing
                    continue
                codec = get_codec(plane.codec)
                if isinstance(codec, RemainderCodec):
                    _decode_main_into(target, part, bucket, codec, low)
                elif codec.is_view:
                    offset = plane.offset + low * codec.dtype.itemsize
                    view = memoryview(target.view(torch.uint8).numpy().data)
                    read_exactly(path, file.fileno(), view, offset)
                else:
                    _decode_into(target, path, plane, bucket.numel, low)
                if number == tie_plane(bucket):
                    clear_tie_bits(target)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        done += high - low


def _decode_into(target: torch.Tensor, path: Path, plane: Plane, numel: int, low: int) -> None:
    """Elements of an encoded plane (of `numel`) from `low` on, as many as the target has."""
    codec, encoded = get_codec(plane.codec), plane_bytes(path, plane)
    done = 0
    while done < target.numel():
        start, stop = low + done, min(low + done + _PART_NUMEL, low + target.numel())
        # The codec handles whole blocks, which saved shards need not be cut at.
        first = start // codec.range_numel * codec.range_numel
        last = min(align_up(stop, codec.range_numel), numel)
        values = torch.empty(last - first, dtype=codec.dtype)
        codec.decode_into(encoded, values, numel=numel, start=first)
        target[done : done + stop - start].copy_(values[start - first : stop - first])
        done += stop - start


def _decode_main_into(
    target: torch.Tensor, part: Part, bucket: Bucket, codec: RemainderCodec, low: int
) -> None:
    """Mains of a bucket from `low` on that are stored as remainders, as many as the target has."""
    path, numel, number = part.file(bucket.index), bucket.numel, tie_plane(bucket)
    encoded, stored = plane_bytes(path, bucket.planes[0]), None
    if number is not None:
        plane = bucket.planes[number]
        stored = stored_moments(plane_bytes(path, plane), plane.codec, numel)
        if not part.record(bucket.index).written[number]:
            stored = torch.zeros_like(stored)
    done = 0
    while done < target.numel():
        start, stop = low + done, min(low + done + _PART_NUMEL, low + target.numel())
        first = start // codec.range_numel * codec.range_numel
        last = min(align_up(stop, codec.range_numel), numel)
        main = torch.empty(last - first, dtype=codec.dtype)
        halves = torch.empty(last - first, dtype=torch.bfloat16)
        part.upper.read(bucket.index, first, halves)
        ties = None if stored is None else stored[first:last]
        codec.decode_main(encoded, main, model=halves, exp_avg_sq=ties, numel=numel, start=first)
        target[done : done + stop - start].copy_(main[start - first : stop - first])
        done += stop - start


def _scalars(engine: Engine, cuts: list[_Cut], peers: list[Part]) -> Scalars:
    """Counters of every shard: those of the saved shard that its first elements come from.

    A shard that has no elements, or none in buckets, counts as the rest of its parameter.
    """
    first = {cut.binding: cut.source for cut in reversed(cuts)}
    of_parameter = {
        split_name(shard)[0]: (part, shard) for part in peers for shard in part.manifest["shards"]
    }
    same_name = {shard: part for part in peers for shard in part.manifest["shards"]}
    scalars: Scalars = {}
    for index, binding in enumerate(engine.plan.bindings):
        base = split_name(binding.name)[0]
        if index in first:
            saved = saved_scalars(engine, first[index].part, first[index].name)
        elif binding.name in same_name:
            saved = saved_scalars(engine, same_name[binding.name], binding.name)
        elif base in of_parameter:
            saved = saved_scalars(engine, *of_parameter[base])
        else:
            saved = (False, {})
        scalars[binding.name] = saved
    return scalars


# ---------------------------------------------------------------------- without bucket


def _saved_resident_mains(peers: list[Part]) -> dict[str, list[tuple[int, int]]]:
    """Ranges of mains without bucket, by the parameter's name."""
    found: dict[str, list[tuple[int, int]]] = {}
    for part in peers:
        for entry in part.manifest["resident"]:
            if entry["key"] == MAIN_PLANE:
                base, start, _ = split_name(entry["shard"])
                end = start + torch.Size(entry["shape"]).numel()
                found.setdefault(base, []).append((start, end))
    return found


def _check_covered(
    path: Path, base: str, start: int, end: int, ranges: list[tuple[int, int]]
) -> None:
    position = start
    for low, high in sorted(ranges):
        if low <= position < high:
            position = high
    if position < end:
        raise SnapshotError(
            f"the snapshot in {path} does not hold elements {position} to {end} of {base}: it was "
            "taken from another model or with another tensor, pipeline or expert parallelism"
        )


def _take_resident(engine: Engine, peers: list[Part]) -> None:
    """Values without bucket: mains by name and range, other state by the shard's very name."""
    mains: dict[str, list[tuple[int, torch.Tensor]]] = {}
    unstreamed: dict[str, int] = {}
    for index, binding in enumerate(engine.plan.bindings):
        if not binding.keeps_main and binding.main.numel():
            base, start, _ = split_name(binding.name)
            mains.setdefault(base, []).append((start, binding.main.detach()))
        if not engine.is_streamed(index):
            unstreamed[binding.name] = index
    for part in peers:
        for entry, values in part.resident():
            base, first, _ = split_name(entry["shard"])
            if entry["key"] == MAIN_PLANE:
                for start, target in mains.get(base, []):
                    low = max(start, first)
                    high = min(start + target.numel(), first + values.numel())
                    if low < high:
                        target[low - start : high - start].copy_(values[low - first : high - first])
            elif entry["shard"] in unstreamed:
                engine.set_resident(entry["shard"], entry["key"], values)
    for name, index in unstreamed.items():
        _fill_empty_state(engine, name, index)


def _fill_empty_state(engine: Engine, name: str, index: int) -> None:
    """Give a shard without elements the state tensors, without elements, that go with its scalars.

    No saved shard need have had the same name.
    """
    main = engine.plan.bindings[index].main
    state = engine.plan.optimizer.state.get(main)
    if not state or main.numel():
        return
    for plane in engine.plan.schemas[index].planes:
        if plane.name not in state:
            dtype = get_codec(plane.codec).dtype
            engine.set_resident(name, plane.name, torch.empty(main.shape, dtype=dtype))

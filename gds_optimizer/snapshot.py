"""Instant snapshots: hard links to the bucket files, and a small manifest.

    <path>/snapshot.json                    written last: what has it is complete
    <path>/rank00000/opt0/manifest.json
    <path>/rank00000/opt0/bucket00000.bin   links, on the same file system as the buckets
    <path>/rank00000/opt0/resident.bin      state that has no bucket file

A linked file is never written again: the bucket's next write goes to another file. Buckets on
other file systems than `path` are linked in a directory beside them, which the manifest names.
There is no pickle: JSON, and values as they are in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.checksum import checksum
from gds_optimizer.codecs import raw_codec_name
from gds_optimizer.engine import Engine
from gds_optimizer.errors import SnapshotError
from gds_optimizer.footer import Footer, read_footer
from gds_optimizer.jsonvalues import to_json

FORMAT = "gds-optimizer snapshot"
VERSION = 1
COMPLETE_NAME = "snapshot.json"
MANIFEST_NAME = "manifest.json"
RESIDENT_NAME = "resident.bin"
NOTE_NAME = "snapshot.json"
LINKS_DIRECTORY = "gds-optimizer-snapshots"
"""Beside the buckets, for those on another file system than the snapshot."""


def rank_directory(path: Path, rank: int) -> Path:
    return path / f"rank{rank:05d}"


@dataclass(slots=True, kw_only=True)
class Placement:
    """Who takes a snapshot, for its manifest.

    Attributes:
        rank, world_size: of the process.
        coordinates: place in the parallel layout by engine, e.g. {"opt0": {"model": 1, "dp": 3}}.
            Ranks that differ in "dp" only hold parts of the same parameters.
    """

    rank: int = 0
    world_size: int = 1
    coordinates: dict[str, dict[str, int]] = field(default_factory=dict)

    def of(self, name: str) -> dict[str, int]:
        """Coordinates of one engine."""
        return self.coordinates.get(name, {})


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, sync it, rename it: it is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    fsync_directory(path.parent)


def take_part(engine: Engine, path: Path, name: str, placement: Placement) -> None:
    """Link one engine's files into `path` and describe them; part of a snapshot.

    Waits for the last step's writes, and for nothing else that depends on the state's size. The
    engine must be told to `freeze` its store before its next step.

    Args:
        engine: what to take.
        path: directory of the whole snapshot.
        name: the engine's own part of it below the rank, e.g. "opt0".
        placement: for the manifest.

    Raises:
        SnapshotError: the part is there already, or something cannot be described.
        StepFailedError: the state is torn, or a write behind the last step failed.
        OSError: the file system refused a link or a file. Nothing of the part is left.
    """
    engine.settle()
    final = rank_directory(path, placement.rank) / name
    partial = final.with_name(name + ".partial")
    if final.exists():
        raise SnapshotError(f"{final} exists already: choose another path for the snapshot")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, parents=True)
    elsewhere: dict[int, Path] = {}
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, partial, ignore_errors=True)
        outside = _LinksOutside(final)
        undo.callback(outside.remove)

        def link(index: int) -> Path:
            source = engine.store.paths[index]
            if os.stat(source.parent).st_dev == os.stat(partial).st_dev:
                return partial / f"bucket{index:05d}.bin"
            elsewhere[index] = outside.place(source)
            return elsewhere[index]

        engine.store.link_all(link)
        resident = _write_resident(engine, partial / RESIDENT_NAME)
        manifest = _describe(engine, placement, name, elsewhere, resident)
        _sync_buckets(engine)
        write_durably(partial / MANIFEST_NAME, json.dumps(manifest, indent=1).encode())
        os.replace(partial, final)
        fsync_directory(final.parent)
        undo.pop_all()


class _LinksOutside:
    """Links to buckets on other file systems than the snapshot's, beside those buckets.

    <root>/gds-optimizer-snapshots/<token>/rank00000/opt0/bucket00000.bin, and in the token's
    directory a note of the snapshot that they belong to.
    """

    def __init__(self, part: Path) -> None:
        self._part = part
        self._token = uuid.uuid4().hex
        self._made: set[Path] = set()

    def place(self, source: Path) -> Path:
        root = source.parent.parent.parent
        own = root / LINKS_DIRECTORY / self._token
        if own not in self._made:
            own.mkdir(mode=0o700, parents=True)
            self._made.add(own)
            note = {"part": str(self._part), "pid": os.getpid(), "host": socket.gethostname()}
            write_durably(own / NOTE_NAME, json.dumps(note).encode())
        directory = own / source.parent.relative_to(root)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory / source.name

    def remove(self) -> None:
        for directory in self._made:
            shutil.rmtree(directory, ignore_errors=True)


def complete(path: Path, placement: Placement, step: int, names: list[str]) -> None:
    """Declare a snapshot whole, once every rank's parts are there: by one rank, last."""
    fsync_directory(path)
    description = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "world_size": placement.world_size,
        "optimizers": names,
    }
    write_durably(path / COMPLETE_NAME, json.dumps(description, indent=1).encode())


def _sync_buckets(engine: Engine) -> None:
    """Make sure that the drives have what direct I/O gave them."""
    for path in engine.store.paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


def _write_resident(engine: Engine, path: Path) -> list[dict[str, Any]]:
    """State that no bucket file holds: mains that stay in the model, and unstreamed state."""
    entries: list[dict[str, Any]] = []
    with open(path, "wb") as file:
        for shard, key, tensor in engine.resident_tensors():
            values = tensor.detach().cpu().contiguous().reshape(-1)
            data = values.view(torch.uint8)
            padded = torch.nn.functional.pad(data, (0, -data.numel() % 8))
            entries.append(
                {
                    "shard": shard,
                    "key": key,
                    "codec": raw_codec_name(values.dtype),
                    "numel": values.numel(),
                    "offset": file.tell(),
                    "checksum": int(checksum(padded)) if padded.numel() else 0,
                }
            )
            file.write(padded.numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
    return entries


def _describe(
    engine: Engine,
    placement: Placement,
    name: str,
    elsewhere: dict[int, Path],
    resident: list[dict[str, Any]],
) -> dict[str, Any]:
    optimizer = engine.plan.optimizer
    buckets = []
    for bucket in engine.layout.buckets:
        if engine.is_blank(bucket.index):
            footer = Footer(0, [False] * len(bucket.planes), [0] * len(bucket.planes))
        else:
            footer = read_footer(engine.store.paths[bucket.index], bucket, engine.layout.layout_id)
        file = elsewhere.get(bucket.index)
        buckets.append(
            {
                "file": str(file) if file else f"bucket{bucket.index:05d}.bin",
                "step": footer.step,
                "written": footer.written,
                "checksums": footer.checksums,
            }
        )
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": placement.rank,
        "world_size": placement.world_size,
        "coordinates": placement.of(name),
        "name": name,
        "step": engine.steps,
        "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "groups": [
            {
                "shards": [engine.name_of(main) for main in group["params"]],
                "options": {k: to_json(v) for k, v in group.items() if k != "params"},
            }
            for group in optimizer.param_groups
        ],
        "shards": {
            shard: {"has_state": has_state, "scalars": {k: to_json(v) for k, v in scalars.items()}}
            for shard, has_state, scalars in engine.shard_scalars()
        },
        "layout": engine.layout.describe(),
        "layout_id": engine.layout.layout_id.hex(),
        "buckets": buckets,
        "resident": resident,
    }

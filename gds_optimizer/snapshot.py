"""Instant snapshots: hard links to the bucket files, and a small manifest.

    <path>/snapshot.json                    written last: what has it is complete
    <path>/rank00000/opt0/manifest.json
    <path>/rank00000/opt0/bucket00000.bin   links, on the same file system as the buckets
    <path>/rank00000/opt0/resident.bin      state that has no bucket file
    <path>/rank00000/opt0/upper.bin         halves of mains that the model holds (`snapshot_upper`)

A linked file is never written again: the bucket's next write goes to another file. Buckets on
other file systems than `path` are linked in a directory beside them, which the manifest names.
There is no pickle: sealed JSON (see `jsonvalues`), and values as they are in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gds_optimizer.bucket_files import MANIFEST_NAME, SNAPSHOT_NAME
from gds_optimizer.checksum import checksum
from gds_optimizer.codecs import raw_codec_name
from gds_optimizer.engine import Engine
from gds_optimizer.errors import SnapshotError
from gds_optimizer.footer import Footer, read_footer
from gds_optimizer.jsonvalues import seal, seal_of, to_json
from gds_optimizer.snapshot_upper import UPPER_NAME, write_upper
from gds_optimizer.store import NO_LINK_ERRORS
from gds_optimizer.written_out import write_out

FORMAT = "gds-optimizer snapshot"
VERSION = 1
COMPLETE_NAME = SNAPSHOT_NAME
RESIDENT_NAME = "resident.bin"
NOTE_NAME = "snapshot.json"
PARTIAL = ".partial"
LINKS_DIRECTORY = "gds-optimizer-snapshots"
"""Beside the buckets, for those on another file system than the snapshot."""

T = TypeVar("T")


def rank_directory(path: Path, rank: int) -> Path:
    return path / f"rank{rank:05d}"


def part_key(rank: int, name: str) -> str:
    """How the whole calls one of its parts: where it is, too."""
    return f"rank{rank:05d}/{name}"


def gather_by_rank(value: Any) -> list[Any]:
    """Every rank's value, by rank; this one's alone where there is no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@dataclass(slots=True, kw_only=True)
class Placement:
    """This process among those that take or restore a snapshot together.

    Attributes:
        rank, world_size: of the process.
        coordinates: place in the parallel layout by engine, e.g. {"opt0": {"model": 1, "dp": 3}}.
            Ranks that differ in "dp" only hold parts of the same parameters.
        gather: gives every rank's value (plain data), by rank, and waits for all of them.
    """

    rank: int = 0
    world_size: int = 1
    coordinates: dict[str, dict[str, int]] = field(default_factory=dict)
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    def of(self, name: str) -> dict[str, int]:
        """Coordinates of one engine."""
        return self.coordinates.get(name, {})

    def together(self, what: str, action: Callable[[], T]) -> list[T]:
        """Do something on every rank; it has worked everywhere or raises everywhere.

        Args:
            what: for the message on ranks whose own part worked.
            action: this rank's part; returns plain data.

        Returns:
            What it returned on each rank.

        Raises:
            SnapshotError: it failed on another rank.
            Exception: what `action` raised here.
        """
        failure: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - raised when the others know of it
            failure = error
        outcomes = self.gather((result, None if failure is None else str(failure)))
        if failure is not None:
            raise failure
        for rank, (_, text) in enumerate(outcomes):
            if text is not None:
                raise SnapshotError(f"{what} failed on rank {rank}: {text}")
        return [value for value, _ in outcomes]


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path) -> None:
    """Make a directory and what is missing above it, and make their names durable.

    Raises:
        OSError: one of them could not be made or synced.
    """
    new: list[Path] = []
    for each in (path, *path.parents):
        if each.is_dir():
            break
        new.append(each)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in new:
        fsync_directory(each.parent)
    if not new:  # a killed run may have made it, and not have got as far as this
        with contextlib.suppress(PermissionError):
            fsync_directory(path.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, sync it, rename it: it is there whole or not at all."""
    partial = path.with_name(path.name + PARTIAL)
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    fsync_directory(path.parent)


def take_part(engine: Engine, path: Path, name: str, placement: Placement, identity: str) -> str:
    """Link one engine's files into `path` and describe them; part of a snapshot.

    Waits for the last step's writes, and for nothing else that depends on the state's size, except
    that buckets which live in memory are written to files, as many bytes as they have, and halves
    of mains that the model holds, 2 bytes a parameter. From then on the files are frozen;
    `Store.reserve_spares` should follow.

    Args:
        engine: what to take.
        path: directory of the whole snapshot.
        name: the engine's own part of it below the rank, e.g. "opt0".
        placement: for the manifest.
        identity: of the snapshot, the same in all parts.

    Returns:
        The seal of the manifest.

    Raises:
        SnapshotError: something cannot be described.
        ModelChangedError: the model holds some, and was changed without a reload.
        StepFailedError: the state is torn, is being loaded, or a write behind the last step failed.
        NoSpaceError: there is no room for those halves or those buckets.
        OSError: the file system refused a link or a file.
        In each case nothing of the part is left and nothing is frozen.
    """
    engine.check_usable()
    engine.check_not_lent()
    engine.take_files_back()
    engine.settle()
    final = rank_directory(path, placement.rank) / name
    if final.exists():
        raise SnapshotError(f"{final} exists already: choose another path for the snapshot")
    partial = final.with_name(name + PARTIAL)
    partial.mkdir(mode=0o700, parents=True)
    linked = _Links(partial, final)
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, partial, ignore_errors=True)
        undo.callback(shutil.rmtree, final, ignore_errors=True)
        undo.callback(linked.remove_elsewhere)
        engine.store.reserve_written_out()
        undo.callback(engine.store.drop_written_out)
        write_out(engine)
        fresh = engine.store.link_all(linked.place)
        undo.callback(engine.store.unfreeze, fresh)
        resident = _write_resident(engine, partial / RESIDENT_NAME)
        upper = write_upper(engine, partial / UPPER_NAME)
        manifest = seal(
            {
                "format": FORMAT,
                "version": VERSION,
                "snapshot": identity,
                "rank": placement.rank,
                "world_size": placement.world_size,
                "coordinates": placement.of(name),
                "name": name,
                **_describe(engine, linked.elsewhere),
                "resident": resident,
                "upper": upper,
            }
        )
        _sync_buckets(engine)
        linked.sync_elsewhere()
        write_durably(partial / MANIFEST_NAME, manifest)
        os.replace(partial, final)
        fsync_directory(final.parent)
        undo.pop_all()
    engine.store.drop_written_out()  # the snapshot has them under its own names
    return seal_of(manifest)


class _Links:
    """Names for bucket files in the snapshot, or beside the buckets where that cannot be.

    <root>/gds-optimizer-snapshots/<token>/rank00000/opt0/bucket00000.bin, and in the token's
    directory a note of the snapshot that they belong to.

    Attributes:
        elsewhere: by bucket, where its link is if that is outside of the snapshot.
    """

    def __init__(self, partial: Path, final: Path) -> None:
        self._partial, self._final = partial, final
        self._token = uuid.uuid4().hex
        self._made: list[Path] = []
        self.elsewhere: dict[int, Path] = {}

    def place(self, index: int, source: Path) -> Path:
        target = self._partial / f"bucket{index:05d}.bin"
        try:
            os.link(source, target)
        except OSError as error:
            # Not only between file systems: two mounts of one do not link either.
            if error.errno not in NO_LINK_ERRORS:
                raise
            target = self._directory_beside(source) / source.name
            os.link(source, target)
            self.elsewhere[index] = target
        return target

    def _directory_beside(self, source: Path) -> Path:
        root = source.parent.parent.parent
        own = root / LINKS_DIRECTORY / self._token
        if own not in self._made:
            own.mkdir(mode=0o700, parents=True)
            self._made.append(own)
            note = {"part": str(self._final), "pid": os.getpid(), "host": socket.gethostname()}
            write_durably(own / NOTE_NAME, json.dumps(note).encode())
        directory = own / source.parent.relative_to(root)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory

    def sync_elsewhere(self) -> None:
        """Make the names that are outside durable."""
        directories = {own.parent for own in self._made} | {own.parent.parent for own in self._made}
        for file in self.elsewhere.values():
            directories |= {file.parent, file.parent.parent, file.parent.parent.parent}
        for directory in directories:
            fsync_directory(directory)

    def remove_elsewhere(self) -> None:
        for directory in self._made:
            shutil.rmtree(directory, ignore_errors=True)
            with contextlib.suppress(OSError):  # other snapshots' are beside it
                directory.parent.rmdir()


def complete(
    path: Path, identity: str, placement: Placement, step: int, seals: dict[str, str]
) -> None:
    """Declare a snapshot whole, once every rank's parts are there: by one rank, last.

    Args:
        path: directory of the snapshot.
        identity: of the snapshot.
        placement: for the number of ranks.
        step: that it was taken after.
        seals: of every part's manifest, by `part_key`.

    Raises:
        OSError: it could not be written; it is not declared whole, then.
    """
    declare(
        path,
        {
            "format": FORMAT,
            "version": VERSION,
            "snapshot": identity,
            "step": step,
            "world_size": placement.world_size,
            "optimizers": sorted({key.partition("/")[2] for key in seals}),
            "manifests": seals,
        },
    )


def declare(path: Path, description: dict[str, Any]) -> None:
    """Make a directory, whose parts are all there and synced, a complete snapshot.

    Args:
        path: made by `make_directories`.
        description: what `snapshot.json` is to say.

    Raises:
        OSError: it could not be written or synced; it is not declared whole, then.
    """
    fsync_directory(path)
    try:
        write_durably(path / COMPLETE_NAME, seal(description))
    except BaseException:
        # It may be there under its final name, of which nobody knows whether it lasts.
        with contextlib.suppress(OSError):
            (path / COMPLETE_NAME).unlink(missing_ok=True)
        raise


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
            try:
                codec = raw_codec_name(values.dtype)
            except KeyError:
                raise SnapshotError(
                    f"{key} of {shard} is of {values.dtype}, which a snapshot cannot record"
                ) from None
            data = values.view(torch.uint8)
            padded = torch.nn.functional.pad(data, (0, -data.numel() % 8))
            entries.append(
                {
                    "shard": shard,
                    "key": key,
                    "codec": codec,
                    "shape": list(tensor.shape),
                    "offset": file.tell(),
                    "checksum": int(checksum(padded)) if padded.numel() else 0,
                }
            )
            file.write(padded.numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return entries


def _describe(engine: Engine, elsewhere: dict[int, Path]) -> dict[str, Any]:
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
    }

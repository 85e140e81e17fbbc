"""Taking, keeping, copying and taking up snapshots of all engines of a process.

Ranks work together through a barrier that the front end gives: every rank links its own files,
and one declares the whole complete. A copy to other storage goes on in a thread while training
does; it becomes visible under its name only when it is whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gds_optimizer.direct_file import copy_file
from gds_optimizer.engine import Engine
from gds_optimizer.errors import GdsOptimizerError, NoSpaceError, SnapshotError
from gds_optimizer.lock import LOCK_NAME
from gds_optimizer.snapshot import (
    COMPLETE_NAME,
    LINKS_DIRECTORY,
    MANIFEST_NAME,
    NOTE_NAME,
    RESIDENT_NAME,
    Placement,
    complete,
    fsync_directory,
    rank_directory,
    take_part,
    write_durably,
)
from gds_optimizer.snapshot_read import Part, all_parts, describe, open_part, restore_part

logger = logging.getLogger(__name__)

Barrier = Callable[[], None]
_RANK = re.compile(r"rank\d{5}")
# Snapshots that a copy is being made of; they are not pruned.
_being_copied: set[Path] = set()


def take_snapshot(
    engines: Mapping[str, Engine],
    path: Path,
    *,
    placement: Placement | None = None,
    barrier: Barrier = lambda: None,
    keep_last: int | None = None,
) -> None:
    """Take a snapshot of all engines of all ranks. Every rank calls it.

    Args:
        engines: this rank's, by name.
        path: directory for the snapshot; it must not hold one yet. On the file system of the
            state it costs links; nothing is copied.
        placement: this process; None for a process of its own.
        barrier: waits for all ranks.
        keep_last: remove complete snapshots beside this one until so many are left, this one
            included. Their files are written in the next steps, whose extents are then not new.

    Raises:
        SnapshotError: there is a snapshot already, or the state cannot be described.
        NoSpaceError: there is no room for the files that the next step writes instead; the
            snapshot is removed again, and training can go on.
        StepFailedError: the state is torn.
    """
    placement = placement or Placement()
    path = Path(path).absolute()
    if (path / COMPLETE_NAME).exists():
        raise SnapshotError(f"there is a snapshot in {path} already: choose another path")
    if keep_last is not None and keep_last < 1:
        raise SnapshotError(f"keep_last is {keep_last}, wanted at least 1")
    barrier()
    _remove_leftover(rank_directory(path, placement.rank))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        undo.callback(_remove_part_files, path, placement.rank)
        for name, engine in engines.items():
            take_part(engine, path, name, placement)
        old = list(_outdated(path, keep_last)) if keep_last else []
        _check_room(engines, old, placement.rank)
        barrier()
        if placement.rank == 0:
            step = max((engine.steps for engine in engines.values()), default=0)
            complete(path, placement, step, sorted(engines))
        barrier()
        undo.pop_all()
    for each in old:
        remove_snapshot(each, engines, rank=placement.rank, barrier=barrier)
    for engine in engines.values():
        engine.store.freeze()


def _remove_leftover(directory: Path) -> None:
    """Remove what a killed run left of the same part.

    Raises:
        SnapshotError: it is a directory of optimizer state, not of a snapshot.
    """
    if any(directory.glob(f"*/{LOCK_NAME}")):
        raise SnapshotError(
            f"{directory.parent} holds the optimizer's state itself: choose another path for the "
            "snapshot"
        )
    shutil.rmtree(directory, ignore_errors=True)


def _check_room(engines: Mapping[str, Engine], old: list[Path], rank: int) -> None:
    """Refuse before anything is given up: the next step needs files that are not linked."""
    retired_bytes = sum(
        file.stat().st_size
        for path in old
        for file in rank_directory(path, rank).glob("*/bucket*.bin")
    )
    for engine in engines.values():
        file_systems = {os.stat(d).st_dev: os.statvfs(d) for d in engine.store.directories}
        free_bytes = sum(fs.f_bavail * fs.f_frsize for fs in file_systems.values())
        needed_bytes = engine.store.missing_spare_bytes
        if needed_bytes > free_bytes + retired_bytes:
            raise NoSpaceError(
                f"a snapshot in place needs {needed_bytes} bytes for the files that the next step "
                f"writes instead of the linked ones, and {free_bytes} are free in "
                f"{', '.join(map(str, engine.store.directories))}: free space or keep fewer "
                "snapshots"
            )


def _outdated(path: Path, keep_last: int) -> Iterator[Path]:
    """Complete snapshots beside `path` that are one too many once it is complete."""
    others = []
    for file in path.parent.glob(f"*/{COMPLETE_NAME}"):
        if file.parent == path or file.parent in _being_copied:
            continue
        with contextlib.suppress(SnapshotError):
            others.append((describe(file.parent)["step"], file.stat().st_mtime_ns, file.parent))
    others.sort()
    for _, _, each in others[: max(0, len(others) + 1 - keep_last)]:
        yield each


def remove_snapshot(
    path: Path,
    engines: Mapping[str, Engine] | None = None,
    *,
    rank: int = 0,
    barrier: Barrier = lambda: None,
) -> None:
    """Remove a snapshot; every rank removes its own part.

    Args:
        path: the snapshot.
        engines: may take over files that nobody else links.
        rank: of this process.
        barrier: waits for all ranks.
    """
    barrier()
    if rank == 0:
        with contextlib.suppress(FileNotFoundError):
            (path / COMPLETE_NAME).unlink()  # first: a half-removed snapshot must not look whole
            fsync_directory(path)
    barrier()
    for name, engine in (engines or {}).items():
        with contextlib.suppress(SnapshotError):
            part = open_part(path, rank, name)
            for bucket in part.layout.buckets:
                with contextlib.suppress(OSError):
                    engine.store.adopt_spare(part.file(bucket.index))
    _remove_part_files(path, rank)
    barrier()
    if rank == 0:
        for leftover in path.glob("rank*"):
            if _RANK.fullmatch(leftover.name):
                _remove_part_files(path, int(leftover.name[4:]))
        with contextlib.suppress(OSError):
            path.rmdir()


def _remove_part_files(path: Path, rank: int) -> None:
    directory = rank_directory(path, rank)
    for manifest in directory.glob(f"*/{MANIFEST_NAME}"):
        with contextlib.suppress(SnapshotError):
            part = open_part(path, rank, manifest.parent.name)
            for index in range(len(part.layout.buckets)):
                file = part.file(index)
                if part.directory not in file.parents:
                    token = file.parent.parent.parent
                    if token.parent.name == LINKS_DIRECTORY:
                        shutil.rmtree(token, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rmdir()


def clean_incomplete(directory: Path) -> list[Path]:
    """Remove what killed runs left of snapshots and copies in `directory`.

    Only what has the form of our snapshots and is not complete; nobody may be writing there.

    Returns:
        What was removed.
    """
    removed = []
    for path in sorted(p for p in directory.iterdir() if p.is_dir()):
        if not _is_leftover(path):
            continue
        for entry in list(path.iterdir()):
            _remove_part_files(path, int(entry.name.removesuffix(".partial")[4:]))
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path)
    return removed


def _is_leftover(path: Path) -> bool:
    """Whether a directory is an incomplete snapshot, and neither whole nor live state."""
    names = [entry.name for entry in path.iterdir()]
    if not names or not all(_RANK.fullmatch(name.removesuffix(".partial")) for name in names):
        return False
    if any(path.glob(f"rank*/*/{LOCK_NAME}")):
        return False
    return any(name.endswith(".partial") for name in names) or any(
        part.name.endswith(".partial") or (part / MANIFEST_NAME).exists()
        for part in path.glob("rank*/*")
    )


def clean_links(root: Path) -> list[Path]:
    """Remove links outside of snapshots that no snapshot names any more.

    Args:
        root: a directory of optimizer state.

    Returns:
        What was removed.
    """
    removed = []
    for note_path in (root / LINKS_DIRECTORY).glob(f"*/{NOTE_NAME}"):
        note = json.loads(note_path.read_text())
        token = note_path.parent
        alive = note["host"] != socket.gethostname() or Path(f"/proc/{note['pid']}").exists()
        try:
            named = token.name in (Path(note["part"]) / MANIFEST_NAME).read_text()
        except OSError:
            named = False
        if not named and not (alive and note["pid"] != os.getpid()):
            shutil.rmtree(token, ignore_errors=True)
            removed.append(token)
    return removed


def restore_snapshot(
    engines: Mapping[str, Engine],
    path: Path,
    *,
    placement: Placement | None = None,
    barrier: Barrier = lambda: None,
) -> int:
    """Make a snapshot the state of all engines. Every rank calls it.

    Returns:
        The step that it was taken after.

    Raises:
        SnapshotError: it is incomplete or damaged, or does not fit.
    """
    placement = placement or Placement()
    path = Path(path).absolute()
    whole = describe(path)
    missing = set(engines) - set(whole["optimizers"])
    if missing:
        raise SnapshotError(
            f"the snapshot in {path} has {', '.join(whole['optimizers'])}, not "
            f"{', '.join(sorted(missing))}: it is of another model"
        )
    for name, engine in engines.items():
        restore_part(engine, path, name, placement)
    barrier()
    step: int = whole["step"]
    return step


# ---------------------------------------------------------------------- copies


class SnapshotCopy:
    """A copy of one rank's part of a snapshot, made in a thread.

    Each rank copies its own part under a temporary name and renames it; rank 0 waits for all and
    declares the copy complete. A failure is logged when it happens and by `check`, and leaves
    earlier copies alone.

    Args:
        source: a complete snapshot.
        target: directory for the copy, on any file system; it must not hold a snapshot.
        placement: this process.
        bytes_per_s: go no faster; None for as fast as it goes.
        wait_for_ranks_s: how long rank 0 waits for the parts of others after its own.
    """

    def __init__(
        self,
        source: Path,
        target: Path,
        *,
        placement: Placement | None = None,
        bytes_per_s: float | None = None,
        wait_for_ranks_s: float = 3600.0,
    ) -> None:
        self.source, self.target = Path(source).absolute(), Path(target).absolute()
        if (self.target / COMPLETE_NAME).exists():
            raise SnapshotError(f"there is a snapshot in {self.target} already")
        self._whole = describe(self.source)
        self._placement = placement or Placement()
        self._bytes_per_s = bytes_per_s
        self._wait_for_ranks_s = wait_for_ranks_s
        self._stop = threading.Event()
        self._reported = False
        self.failure: Exception | None = None
        self.copied_bytes = 0
        _being_copied.add(self.source)
        self._thread = threading.Thread(target=self._run, name="snapshot-copy", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def check(self) -> None:
        """Log a failure, once; to be called between steps."""
        if self.failure is not None and not self._reported:
            self._reported = True
            logger.error(
                "the copy of snapshot %s to %s failed: %s; earlier copies are as they were",
                self.source,
                self.target,
                self.failure,
            )

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until it has ended.

        Raises:
            SnapshotError: it failed, or is still going on after `timeout_s`.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise SnapshotError(f"the copy to {self.target} is still going on")
        if self.failure is not None:
            raise SnapshotError(
                f"the copy of {self.source} to {self.target} failed: {self.failure}"
            ) from self.failure

    def stop(self) -> None:
        """Give up and remove what was copied."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._copy_rank()
            if self._placement.rank == 0:
                self._complete()
        except (OSError, GdsOptimizerError, ValueError) as error:
            self.failure = error
            shutil.rmtree(self._partial, ignore_errors=True)
            self.check()
        finally:
            _being_copied.discard(self.source)

    @property
    def _partial(self) -> Path:
        final = rank_directory(self.target, self._placement.rank)
        return final.with_name(final.name + ".partial")

    def _copy_rank(self) -> None:
        rank = self._placement.rank
        partial = self._partial
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)
        for manifest in rank_directory(self.source, rank).glob(f"*/{MANIFEST_NAME}"):
            self._copy_part(open_part(self.source, rank, manifest.parent.name), partial)
        fsync_directory(partial)
        final = rank_directory(self.target, rank)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        fsync_directory(self.target)

    def _copy_part(self, part: Part, partial: Path) -> None:
        directory = partial / part.directory.name
        directory.mkdir(mode=0o700)
        manifest = json.loads(json.dumps(part.manifest))
        for index, entry in enumerate(manifest["buckets"]):
            entry["file"] = f"bucket{index:05d}.bin"
            copy_file(
                part.file(index),
                directory / entry["file"],
                bytes_per_s=self._bytes_per_s,
                stop=self._stop.is_set,
                progress=self._count,
            )
        resident = part.directory / RESIDENT_NAME
        write_durably(directory / RESIDENT_NAME, resident.read_bytes())
        write_durably(directory / MANIFEST_NAME, json.dumps(manifest, indent=1).encode())

    def _count(self, nbytes: int) -> None:
        self.copied_bytes += nbytes

    def _complete(self) -> None:
        deadline = time.monotonic() + self._wait_for_ranks_s
        ranks = range(self._whole["world_size"])
        while missing := [r for r in ranks if not rank_directory(self.target, r).is_dir()]:
            if self._stop.is_set():
                raise InterruptedError("it was stopped")
            if time.monotonic() > deadline:
                raise SnapshotError(
                    f"the parts of ranks {missing} did not arrive in {self.target} within "
                    f"{self._wait_for_ranks_s:g} s"
                )
            time.sleep(0.05)
        write_durably(self.target / COMPLETE_NAME, json.dumps(self._whole, indent=1).encode())


__all__ = [
    "SnapshotCopy",
    "all_parts",
    "clean_incomplete",
    "clean_links",
    "remove_snapshot",
    "restore_snapshot",
    "take_snapshot",
]

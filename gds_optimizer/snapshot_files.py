"""Telling files of snapshots from everything else, and removing them: nothing else is touched.

Snapshots are removed file by file, by name, never as whole trees. What holds anything that is not
of a snapshot's form (a user's file, a lock of live state, a symbolic link) is left as it is.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gds_optimizer.engine import Engine
from gds_optimizer.errors import SnapshotError
from gds_optimizer.jsonvalues import unseal
from gds_optimizer.lock import LOCK_NAME
from gds_optimizer.snapshot import (
    COMPLETE_NAME,
    FORMAT,
    LINKS_DIRECTORY,
    MANIFEST_NAME,
    NOTE_NAME,
    PARTIAL,
    fsync_directory,
    rank_directory,
    write_durably,
)

_RANK = re.compile(r"rank\d{5,}(\.partial)?")
_BUCKET = re.compile(r"bucket\d{5,}\.bin")
_FILE = re.compile(r"(bucket\d{5,}\.bin|manifest\.json|resident\.bin|upper\.bin)(\.partial)?")
_TOKEN = re.compile(r"[0-9a-f]{32}")

_lock = threading.Lock()
_being_made: Counter[Path] = Counter()


@contextlib.contextmanager
def being_made(path: Path) -> Iterator[None]:
    """Meanwhile `clean_incomplete` does not take `path` for a leftover, in this process."""
    path = path.resolve()
    with _lock:
        _being_made[path] += 1
    try:
        yield
    finally:
        with _lock:
            _being_made[path] -= 1


def matching(directory: Path, pattern: str) -> list[Path]:
    """Sorted; unlike `Path.glob`, this bears with directories that others remove meanwhile."""
    return sorted(map(Path, glob.glob(f"{glob.escape(str(directory))}/{pattern}")))


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _is_plain_directory(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _is_ours(manifest: Path) -> bool:
    """Whether a file has the look of a manifest of ours, damaged or not."""
    try:
        with open(manifest, "rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(4096)
    except OSError:
        return False


def foreign_in_rank(directory: Path) -> Path | None:
    """The first thing in a rank's directory (it may be missing) that is not of a snapshot."""
    if not directory.is_dir() or directory.is_symlink():
        return directory if os.path.lexists(directory) else None
    in_partial_rank = directory.name.endswith(PARTIAL)
    for part in _entries(directory):
        if not _is_plain_directory(part):
            return Path(part.path)
        files = _entries(Path(part.path))
        for file in files:
            if not file.is_file(follow_symlinks=False) or not _FILE.fullmatch(file.name):
                return Path(file.path)
        # The manifest is the last to come and to go, so anything whole or half removed has it.
        is_partial = in_partial_rank or part.name.endswith(PARTIAL)
        if files and not is_partial and not _is_ours(Path(part.path) / MANIFEST_NAME):
            return Path(part.path)
    return None


def _rank_directories(path: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(path) if _RANK.fullmatch(entry.name)]


def rank_numbers(path: Path) -> list[int]:
    """Ranks that have a directory in a snapshot, whole or not."""
    return sorted({int(each.name.removesuffix(PARTIAL)[4:]) for each in _rank_directories(path)})


def refuse_foreign(path: Path, rank: int) -> None:
    """Refuse a place for a snapshot (or a copy) where this rank's part would meet other files.

    Raises:
        SnapshotError: what is there is neither nothing nor a leftover of a snapshot.
    """
    if LINKS_DIRECTORY in path.parts:
        raise SnapshotError(
            f"{path} is where links of snapshots are kept: choose another path for the snapshot"
        )
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise SnapshotError(f"{path} is no directory: choose another path for the snapshot")
    if matching(path, f"rank*/*/{LOCK_NAME}"):
        raise SnapshotError(
            f"{path} holds a run's optimizer state itself: choose another path for the snapshot"
        )
    for directory in (rank_directory(path, rank), _partial_rank(path, rank)):
        foreign = foreign_in_rank(directory)
        if foreign is not None:
            raise SnapshotError(
                f"{path} holds {foreign.relative_to(path)}, which is not of a snapshot: choose "
                "another path for the snapshot"
            )


def _partial_rank(path: Path, rank: int) -> Path:
    directory = rank_directory(path, rank)
    return directory.with_name(directory.name + PARTIAL)


# ---------------------------------------------------------------------- removing


def remove_declaration(path: Path) -> None:
    """Before anything else of a snapshot goes: what is half removed must not look whole."""
    if (path / COMPLETE_NAME).exists():
        (path / COMPLETE_NAME).unlink()
        fsync_directory(path)


def remove_whole(path: Path) -> None:
    """Remove a snapshot with all its ranks, by one process. Other files in `path` stay.

    Raises:
        SnapshotError: there is something else among its files; nothing is removed.
        OSError: something could not be removed.
    """
    for directory in _rank_directories(path):
        foreign = foreign_in_rank(directory)
        if foreign is not None:
            raise SnapshotError(f"{foreign} is not of a snapshot: it and {path} are left alone")
    remove_declaration(path)
    for rank in rank_numbers(path):
        remove_rank(path, rank)
    with contextlib.suppress(OSError):  # not empty
        path.rmdir()


def remove_rank(
    path: Path, rank: int, take: Callable[[str, Path], bool] = lambda name, file: False
) -> None:
    """Remove one rank's parts, whole or not; nothing of them is foreign.

    Args:
        path: directory of the snapshot.
        rank: whose.
        take: called with a part's name and each bucket file; may move the file away.

    Raises:
        OSError: something could not be removed; what is left is recognised the next time.
    """
    for directory in (rank_directory(path, rank), _partial_rank(path, rank)):
        if foreign_in_rank(directory) is None and directory.is_dir():
            for part in _entries(directory):
                _remove_part(Path(part.path), take)
            directory.rmdir()


def _remove_part(part: Path, take: Callable[[str, Path], bool]) -> None:
    manifest: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        manifest = unseal((part / MANIFEST_NAME).read_bytes())
    outside = [Path(entry["file"]) for entry in manifest.get("buckets", [])]
    outside = [file for file in outside if file.is_absolute()]
    inside = [Path(file.path) for file in _entries(part) if file.name != MANIFEST_NAME]
    for file in [*outside, *inside]:
        if not _BUCKET.fullmatch(file.name) or (file in outside and not _belongs(file, part)):
            continue
        with contextlib.suppress(FileNotFoundError):
            if not take(part.name, file):
                file.unlink()
    for token in {file.parents[2] for file in outside if _belongs(file, part)}:
        _remove_token(token)
    for file in inside:
        file.unlink(missing_ok=True)
    # Last: it tells this directory from others, and where the links are.
    (part / MANIFEST_NAME).unlink(missing_ok=True)
    part.rmdir()


def _belongs(file: Path, part: Path) -> bool:
    """Whether a link outside is this part's own: a copied manifest names links of another."""
    token = file.parents[2]
    return token.parent.name == LINKS_DIRECTORY and _note(token).get("part") == str(part)


def _note(token: Path) -> dict[str, Any]:
    try:
        note = json.loads((token / NOTE_NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _remove_token(token: Path) -> None:
    """Remove a directory of links outside of a snapshot, with its note last."""
    for directory, _, files in os.walk(token, topdown=False):
        for file in files:
            if _BUCKET.fullmatch(file):
                os.unlink(os.path.join(directory, file))
        if Path(directory) != token:
            with contextlib.suppress(OSError):
                os.rmdir(directory)
    for name in (NOTE_NAME + PARTIAL, NOTE_NAME):
        (token / name).unlink(missing_ok=True)
    for emptied in (token, token.parent):
        with contextlib.suppress(OSError):  # not empty
            emptied.rmdir()


# ---------------------------------------------------------------------- leftovers


def clean_incomplete(directory: Path) -> list[Path]:
    """Remove what killed runs left of snapshots and copies in `directory`.

    Only what has the form of our snapshots through and through, and is not complete. No other run
    may be taking or copying a snapshot there.

    Args:
        directory: whose subdirectories are, among others, snapshots.

    Returns:
        What was removed.
    """
    removed = []
    for entry in _entries(Path(directory)):
        path = Path(entry.path)
        if not _is_plain_directory(entry) or not _is_leftover(path):
            continue
        with _lock:
            if _being_made[path.resolve()]:
                continue
        (path / (COMPLETE_NAME + PARTIAL)).unlink(missing_ok=True)
        for rank in rank_numbers(path):
            remove_rank(path, rank)
        path.rmdir()
        removed.append(path)
    return removed


def _is_leftover(path: Path) -> bool:
    """Whether a directory is an incomplete snapshot and nothing else."""
    try:
        names = {entry.name for entry in _entries(path)} - {COMPLETE_NAME + PARTIAL}
        ranks = _rank_directories(path)
        if names != {each.name for each in ranks} or any(map(foreign_in_rank, ranks)):
            return False
        # Empty directories may be somebody's beginning.
        return any(
            each.is_file() or each.name.endswith(PARTIAL)
            for pattern in ("rank*", "rank*/*", "rank*/*/*")
            for each in matching(path, pattern)
        )
    except OSError:
        return False


def check_keep_last(keep_last: Any) -> None:
    """SnapshotError unless it is None or a number of snapshots."""
    if keep_last is None:
        return
    if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
        raise SnapshotError(f"keep_last is {keep_last!r}, wanted a whole number of at least 1")


def check_outside(engine: Engine, path: Path) -> None:
    """SnapshotError for a path inside of the state itself, which goes with the process."""
    for directory in engine.store.directories:
        if directory.parent.resolve() in (path.resolve(), *path.resolve().parents):
            raise SnapshotError(
                f"{path} is inside of the optimizer's state {directory}: choose another path "
                "for the snapshot"
            )


def mark_complete(root: Path, part: Path) -> None:
    """Note beside the links of a rank's part that its snapshot is complete.

    It may be moved from now on, and the links are then still in use though nobody names them here.

    Args:
        root: a directory of optimizer state.
        part: the rank's directory in the snapshot.
    """
    links = Path(root) / LINKS_DIRECTORY
    for entry in _entries(links) if links.is_dir() else ():
        token = Path(entry.path)
        note = _note(token) if _TOKEN.fullmatch(entry.name) else {}
        if note and Path(str(note.get("part"))).parent == part:
            write_durably(token / NOTE_NAME, json.dumps({**note, "complete": True}).encode())


def clean_links(root: Path, *, of_complete: bool = True) -> list[Path]:
    """Remove links outside of snapshots that no snapshot names any more.

    Links are kept where it cannot be known: the directory that the snapshot was in is not there
    (its file system may not be mounted), or the process that made them still runs. A snapshot that
    was renamed within its directory is found. Nobody may be taking a snapshot of that state.

    Args:
        root: a directory of optimizer state.
        of_complete: also those of a snapshot that was complete and is not where it was. It may
            have been removed by other means, or moved: then it would lose them.

    Returns:
        What was removed.
    """
    links = Path(root) / LINKS_DIRECTORY
    if not links.is_dir():
        return []
    removed = []
    for entry in _entries(links):
        if not _is_plain_directory(entry) or not _TOKEN.fullmatch(entry.name):
            continue
        token = Path(entry.path)
        note = _note(token)
        if not note:
            if set(os.listdir(token)) <= {NOTE_NAME + PARTIAL}:  # killed before it was written
                _remove_token(token)
                removed.append(token)
            continue
        if note.get("complete") and not of_complete:
            continue
        if not _may_be_in_use(token, note):
            _remove_token(token)
            removed.append(token)
    return removed


def _may_be_in_use(token: Path, note: dict[str, Any]) -> bool:
    if note.get("host") != socket.gethostname():
        return True
    if note.get("pid") != os.getpid() and Path(f"/proc/{note.get('pid')}").exists():
        return True
    part = Path(str(note.get("part")))
    siblings = part.parent.parent.parent
    if not siblings.is_dir():
        return True
    return any(token.name in text for text in _manifests(siblings, part))


def _manifests(siblings: Path, part: Path) -> Iterator[str]:
    for manifest in matching(siblings, f"*/{part.parent.name}/{part.name}/{MANIFEST_NAME}"):
        with contextlib.suppress(OSError):
            yield manifest.read_text(errors="replace")

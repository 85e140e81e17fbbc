"""Taking, keeping and taking up snapshots of all engines of all ranks.

Ranks work together through what the front end gives (see `Placement.gather`): every rank links its
own files, and one declares the whole complete. Whatever fails on one rank fails on all, and leaves
nothing of a new snapshot and everything of the old ones.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from gds_optimizer.engine import Engine
from gds_optimizer.errors import NoSpaceError, SnapshotError
from gds_optimizer.snapshot import (
    COMPLETE_NAME,
    PARTIAL,
    Placement,
    complete,
    make_directories,
    part_key,
    rank_directory,
    take_part,
)
from gds_optimizer.snapshot_copy import SnapshotCopy, being_copied
from gds_optimizer.snapshot_files import (
    being_made,
    check_keep_last,
    check_outside,
    clean_incomplete,
    clean_links,
    foreign_in_rank,
    mark_complete,
    rank_numbers,
    refuse_foreign,
    remove_declaration,
    remove_rank,
)
from gds_optimizer.snapshot_read import describe, open_part, outdated, own_part_key
from gds_optimizer.snapshot_restore import prepare_part

logger = logging.getLogger(__name__)


def take_snapshot(
    engines: Mapping[str, Engine],
    path: Path,
    *,
    placement: Placement | None = None,
    keep_last: int | None = None,
) -> None:
    """Take a snapshot of all engines of all ranks. Every rank calls it between two steps.

    Args:
        engines: this rank's, by name.
        path: directory for the snapshot; it must not hold one yet. On the file system of the
            state it costs links; nothing is copied.
        placement: this process; None for a process of its own.
        keep_last: remove complete snapshots beside this one, oldest first, until so many are left,
            this one included, and what killed runs left there. Whoever took them: give each run a
            directory of its own. The next steps write to their files, whose extents are then not
            new.

    Raises:
        SnapshotError: there is a snapshot already, something else is in the way, the state cannot
            be described, or it failed on another rank.
        NoSpaceError: there is no room for the files that the next step writes instead.
        StepFailedError: the state is torn or is being loaded.
        OSError: the file system refused a link or a file.
        In each case nothing of the snapshot is left, and training can go on.
    """
    placement = placement or Placement()
    path = Path(path).absolute()
    what = f"taking the snapshot {path}"
    with contextlib.ExitStack() as undo:
        made = undo.enter_context(contextlib.ExitStack())

        def begin() -> tuple[str, list[str]]:
            made.enter_context(being_made(path))  # before any rank makes the directory
            return _begin(engines, path, placement, keep_last)

        begun = placement.together(what, begin)
        identity = begun[0][0]
        old = _outdated(path, placement, keep_last, {each for _, busy in begun for each in busy})
        undo.callback(_remove_own, path, placement)
        parts = placement.together(
            what, lambda: _take_parts(engines, path, placement, identity, old, undo)
        )
        seals = {key: seal for part, _ in parts for key, seal in part.items()}
        step = max((steps for _, steps in parts), default=0)

        def finish() -> None:
            if placement.rank == 0:
                complete(path, identity, placement, step, seals)

        placement.together(what, finish)
        undo.pop_all()
        made.close()
    _mark_complete(engines, path, placement)
    for each in old:
        try:
            remove_snapshot(each, engines, placement=placement)
        except Exception as error:  # noqa: BLE001 - the other ranks go on to the next one
            logger.warning("the older snapshot %s could not be removed: %s", each, error)
    if keep_last is not None:
        _clean(engines, path, placement)
    placement.together(what, lambda: _reserve_rest(engines, path))


def _begin(
    engines: Mapping[str, Engine], path: Path, placement: Placement, keep_last: int | None
) -> tuple[str, list[str]]:
    """Look whether there is a place for the snapshot.

    Returns:
        An identity for it, and which snapshots this process is copying.
    """
    check_keep_last(keep_last)
    if (path / COMPLETE_NAME).exists():
        raise SnapshotError(f"there is a snapshot in {path} already: choose another path")
    for engine in engines.values():
        check_outside(engine, path)
    refuse_foreign(path, placement.rank)
    return uuid.uuid4().hex, [str(each) for each in being_copied()]


def _take_parts(
    engines: Mapping[str, Engine],
    path: Path,
    placement: Placement,
    identity: str,
    old: list[Path],
    undo: contextlib.ExitStack,
) -> tuple[dict[str, str], int]:
    """Link this rank's files and reserve what the next step writes instead.

    Returns:
        Seals of the parts by their keys, and the number of completed steps.
    """
    make_directories(path)
    if placement.rank == 0:
        (path / (COMPLETE_NAME + PARTIAL)).unlink(missing_ok=True)
    remove_rank(path, placement.rank)  # what a killed run left
    seals = {}
    for name, engine in engines.items():
        buckets = range(len(engine.layout.buckets))
        fresh = [index for index in buckets if not engine.store.is_frozen(index)]
        with engine.exclusive(f"taking the snapshot {path}"):
            seal = take_part(engine, path, name, placement, identity)
        undo.callback(engine.store.unfreeze, fresh)
        seals[part_key(placement.rank, name)] = seal
    for name, engine in engines.items():
        promised = [file for each in old for file in _retiring(each, placement.rank, name)]
        undo.callback(engine.store.drop_spares, engine.store.reserve_spares(promised))
    return seals, max((engine.steps for engine in engines.values()), default=0)


def _retiring(path: Path, rank: int, name: str) -> list[tuple[int, int]]:
    """Files of a snapshot that a store can take over once it is removed: (device, bytes)."""
    found = []
    with contextlib.suppress(SnapshotError):
        whole = describe(path)
        key = own_part_key(whole, rank, name)
        part = open_part(path, whole, key) if key else None
        for bucket in part.layout.buckets if part else ():
            with contextlib.suppress(OSError):
                state = part.file(bucket.index).stat()  # type: ignore[union-attr]
                if state.st_nlink == 1:
                    found.append((state.st_dev, state.st_size))
    return found


def _roots(engines: Mapping[str, Engine]) -> set[Path]:
    """The directories that the state of these engines was given."""
    return {each.parent.parent for engine in engines.values() for each in engine.store.directories}


def _clean(engines: Mapping[str, Engine], path: Path, placement: Placement) -> None:
    """Remove what killed runs left beside a snapshot, and links that none names any more."""
    removed: list[Path] = []
    try:
        if placement.rank == 0:
            removed += clean_incomplete(path.parent)
        for root in _roots(engines):
            removed += clean_links(root, of_complete=False)
    except Exception as error:  # noqa: BLE001 - ranks that share a drive may meet
        logger.warning("not all leftovers could be removed: %s", error)
    for each in removed:
        logger.info("removed %s, which was never completed", each)


def _mark_complete(engines: Mapping[str, Engine], path: Path, placement: Placement) -> None:
    for root in _roots(engines):
        try:
            mark_complete(root, rank_directory(path, placement.rank))
        except OSError as error:  # it is complete all the same, as long as it stays where it is
            logger.warning("the links in %s could not be marked as complete: %s", root, error)


def _reserve_rest(engines: Mapping[str, Engine], path: Path) -> None:
    """Spares that were expected of removed snapshots and did not come."""
    for engine in engines.values():
        try:
            engine.store.reserve_spares()
        except NoSpaceError as error:
            raise NoSpaceError(
                f"the snapshot {path} is complete, but the next step cannot be taken before there "
                f"is room: {error}"
            ) from error


def _remove_own(path: Path, placement: Placement) -> None:
    with contextlib.suppress(OSError):
        if placement.rank == 0:
            remove_declaration(path)
        remove_rank(path, placement.rank)
    with contextlib.suppress(OSError):
        path.rmdir()  # the last rank's succeeds


def _outdated(
    path: Path, placement: Placement, keep_last: int | None, busy: set[str]
) -> list[Path]:
    """Complete snapshots beside `path` that are one too many once it is complete.

    One rank looks, so that all remove the same ones.
    """

    def look() -> list[str]:
        if placement.rank or keep_last is None:
            return []
        return [str(each) for each in outdated(path, keep_last, busy)]

    what = f"looking for snapshots older than {path}"
    return [Path(each) for each in placement.together(what, look)[0]]


def remove_snapshot(
    path: Path,
    engines: Mapping[str, Engine] | None = None,
    *,
    placement: Placement | None = None,
) -> None:
    """Remove a snapshot; every rank removes its own part. Other files in `path` stay.

    Args:
        path: the snapshot.
        engines: may take over files that nobody else links.
        placement: this process; None for a process of its own.

    Raises:
        SnapshotError: it is being copied, or it failed on another rank.
        OSError: something could not be removed.
    """
    placement = placement or Placement()
    path = Path(path).absolute()
    what = f"removing the snapshot {path}"

    def begin() -> None:
        if path.resolve() in being_copied():
            raise SnapshotError(f"{path} is being copied: wait for it or stop it")
        foreign = foreign_in_rank(rank_directory(path, placement.rank))
        if foreign is not None:
            raise SnapshotError(f"{foreign} is not of a snapshot: it and {path} are left alone")

    placement.together(what, begin)

    def unmake() -> None:
        if placement.rank == 0:
            remove_declaration(path)

    placement.together(what, unmake)

    def take(name: str, file: Path) -> bool:
        engine = (engines or {}).get(name.removesuffix(PARTIAL))
        return engine is not None and engine.store.adopt_spare(file)

    placement.together(what, lambda: remove_rank(path, placement.rank, take))
    if placement.rank == 0:
        with contextlib.suppress(OSError):
            for rank in rank_numbers(path):
                remove_rank(path, rank)
            path.rmdir()


def restore_snapshot(
    engines: Mapping[str, Engine],
    path: Path,
    *,
    placement: Placement | None = None,
) -> int:
    """Make a snapshot the state of all engines. Every rank calls it between two steps.

    First all ranks find out whether it fits. What they held is gone once it does on all of them;
    if restoring fails after that, on whichever rank, the engines of all ranks accept nothing but
    another restore.

    Args:
        engines: this rank's, by name. Those that are not named in the snapshot are refused.
        path: a complete snapshot, or a copy of one.
        placement: this process; None for a process of its own.

    Returns:
        The step that it was taken after.

    Raises:
        SnapshotError: it is incomplete or damaged, does not fit, or it failed on another rank.
    """
    placement = placement or Placement()
    path = Path(path).absolute()
    what = f"restoring the snapshot {path}"
    takes: list[Callable[[], None]] = []

    def prepare() -> int:
        whole = describe(path)
        missing = set(engines) - set(whole["optimizers"])
        if missing:
            raise SnapshotError(
                f"the snapshot in {path} has {', '.join(whole['optimizers'])}, not "
                f"{', '.join(sorted(missing))}: it is of another model"
            )
        for name, engine in engines.items():
            takes.append(prepare_part(engine, path, whole, name, placement))
        return int(whole["step"])

    why = (
        f"restoring the snapshot in {path} did not finish: restore this or another one, or close "
        "the optimizer"
    )

    def take() -> None:
        for engine in engines.values():
            engine.abandon_state(why)
        for each in takes:
            each()

    step = placement.together(what, prepare)[0]
    with contextlib.ExitStack() as undo:
        # Also where another rank failed: the ranks' states are of different steps then.
        for engine in engines.values():
            undo.callback(engine.abandon_state, why)
        placement.together(what, take)
        undo.pop_all()
    return step


__all__ = [
    "SnapshotCopy",
    "clean_incomplete",
    "clean_links",
    "remove_snapshot",
    "restore_snapshot",
    "take_snapshot",
]

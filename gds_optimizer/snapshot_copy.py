"""Copying a snapshot to other storage in a thread, while training goes on.

The copy becomes visible under its name only when it is whole, and what is copied is compared with
the checksums on the way.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gds_optimizer.direct_file import PlaneChecksums, copy_file
from gds_optimizer.engine import Engine
from gds_optimizer.errors import SnapshotError
from gds_optimizer.jsonvalues import seal
from gds_optimizer.snapshot import (
    COMPLETE_NAME,
    MANIFEST_NAME,
    PARTIAL,
    RESIDENT_NAME,
    Placement,
    declare,
    fsync_directory,
    make_directories,
    part_key,
    rank_directory,
    write_durably,
)
from gds_optimizer.snapshot_files import (
    being_made,
    check_keep_last,
    check_outside,
    clean_incomplete,
    matching,
    refuse_foreign,
    remove_declaration,
    remove_rank,
    remove_whole,
)
from gds_optimizer.snapshot_read import (
    Part,
    check_footer,
    check_planes,
    describe,
    open_part,
    outdated,
    own_part_key,
    part_keys,
    read_manifest,
)

logger = logging.getLogger(__name__)

# How long a part of another rank may be nowhere to be seen before it counts as given up: a network
# file system shows a renamed directory after a while only.
_VANISHED_S = 60.0

# How often to look at the target: seldom, once it takes long, because many ranks may be waiting.
_POLL_S, _LONGEST_POLL_S = 0.05, 1.0

_REPORT_INTERVAL_S = 30.0

_lock = threading.Lock()
_being_copied: Counter[Path] = Counter()


def being_copied() -> set[Path]:
    """Snapshots that this process is making a copy of, as resolved paths: they must stay."""
    with _lock:
        return {path for path, copies in _being_copied.items() if copies}


class SnapshotCopy:
    """A copy of a snapshot, made in a thread. Every rank makes one of these, together.

    Each rank copies its own part under a temporary name and renames it; rank 0 waits for all and
    declares the copy complete, for which the others wait. A failure on whichever rank is one on
    all: each logs it at once and again when the next step begins, `wait` raises it, and it leaves
    nothing of this copy and everything of earlier ones.

    Args:
        source: a complete snapshot.
        target: directory for the copy, on any file system; it must not hold a snapshot.
        engines: this rank's, whose next step says so when the copy has failed.
        placement: this process; None for a process of its own.
        bytes_per_s: go no faster; None for as fast as it goes.
        keep_last: once the copy is complete, remove complete snapshots beside it, oldest first,
            until so many are left, this one included, and what killed runs left there. A copy
            that fails removes none.
        wait_for_ranks_s: how long rank 0 waits for the parts of others after its own. The others
            wait until nothing is to be seen of rank 0's work for a little longer than that.

    Attributes:
        copied_bytes: of this rank's bucket files, until now.
        total_bytes: of this rank's bucket files.
        failure: why it ended without a copy; None while it goes on, or if it went well.

    Raises:
        SnapshotError: the source is incomplete or damaged, the target is taken, or this failed on
            another rank.
        OSError: the target cannot be made.
    """

    def __init__(
        self,
        source: Path,
        target: Path,
        *,
        engines: Mapping[str, Engine] | None = None,
        placement: Placement | None = None,
        bytes_per_s: float | None = None,
        keep_last: int | None = None,
        wait_for_ranks_s: float = 3600.0,
    ) -> None:
        self.source, self.target = Path(source).absolute(), Path(target).absolute()
        self.failure: Exception | None = None
        self.copied_bytes = self.total_bytes = 0
        self._engines = list((engines or {}).values())
        self._placement = placement or Placement()
        self._bytes_per_s = bytes_per_s
        self._keep_last = keep_last
        self._wait_for_ranks_s = wait_for_ranks_s
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._is_done = False  # the copy is declared complete
        self._whole: dict[str, Any] = {}
        self._parts: list[Part] = []
        self._counted = self.source
        what = f"copying {self.source} to {self.target}"
        with contextlib.ExitStack() as undo:
            self._placement.together(what, lambda: self._check(undo))
            self._placement.together(what, lambda: self._begin(undo))
            self._undo = undo.pop_all()
        self._began = self._reported = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="snapshot-copy", daemon=True)
        self._thread.start()

    def _check(self, undo: contextlib.ExitStack) -> None:
        """Make sure that there is something to copy and a place for it."""
        self._counted = self.source.resolve()
        undo.enter_context(being_made(self.target))  # before any rank makes the directory
        if self._bytes_per_s is not None and not self._bytes_per_s > 0:
            raise SnapshotError(f"bytes_per_s is {self._bytes_per_s}, wanted more than 0")
        check_keep_last(self._keep_last)
        for engine in self._engines:
            check_outside(engine, self.target)
        if (self.target / COMPLETE_NAME).exists():
            raise SnapshotError(f"there is a snapshot in {self.target} already")
        if self._counted in (self.target.resolve(), *self.target.resolve().parents):
            raise SnapshotError(f"{self.target} is inside of the snapshot {self.source}")
        self._whole = describe(self.source)
        for name in self._whole["optimizers"]:
            key = own_part_key(self._whole, self._placement.rank, name)
            if key is not None:
                self._parts.append(open_part(self.source, self._whole, key))
        self.total_bytes = sum(part.nbytes for part in self._parts)
        refuse_foreign(self.target, self._placement.rank)

    def _begin(self, undo: contextlib.ExitStack) -> None:
        """Make that place.

        Every rank's temporary directory is there when this has ended everywhere, so that rank 0
        can tell a rank that copies from one that has given up.
        """
        make_directories(self.target)
        if self._placement.rank == 0:
            (self.target / (COMPLETE_NAME + PARTIAL)).unlink(missing_ok=True)
        remove_rank(self.target, self._placement.rank)  # what a killed copy left
        self._partial.mkdir(mode=0o700)
        with _lock:
            _being_copied[self._counted] += 1
        undo.callback(self._leave_source)
        undo.callback(self._remove_own_if_incomplete)

    def _leave_source(self) -> None:
        with _lock:
            _being_copied[self._counted] -= 1

    def _remove_own_if_incomplete(self) -> None:
        # Another rank than 0 may have been stopped while the copy was being declared complete.
        if not self._is_done and (self._placement.rank == 0 or not self._is_declared()):
            self._remove_own()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def left_s(self) -> float:
        """Seconds until this rank's bucket files are copied, at the mean rate until now."""
        if not self.copied_bytes:
            return math.inf if self.total_bytes else 0.0
        passed_s = time.monotonic() - self._began
        return passed_s * (self.total_bytes - self.copied_bytes) / self.copied_bytes

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until it has ended.

        Raises:
            SnapshotError: it failed, was stopped, or is still going on after `timeout_s`.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise SnapshotError(f"the copy to {self.target} is still going on")
        if self.failure is not None:
            raise SnapshotError(
                f"the copy of {self.source} to {self.target} failed: {self.failure}"
            ) from self.failure

    def stop(self) -> None:
        """Give up and remove what was copied; a copy that is complete stays.

        In a forked child it does nothing: the copy is the parent's.
        """
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join()

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            self._copy_rank()
            if self._placement.rank == 0:
                self._complete()
                self._is_done = True
                self._prune()
            else:
                self._await_outcome()
                self._is_done = True
        except Exception as error:  # noqa: BLE001 - nobody would see it otherwise
            self.failure = error
            if not self._stop.is_set():
                self._say_failure()
                for engine in self._engines[:1]:
                    engine.before_step.append(self._say_failure)
        finally:
            self._undo.close()

    def _say_failure(self) -> None:
        logger.error(
            "the copy of snapshot %s to %s failed: %s; earlier copies are as they were",
            self.source,
            self.target,
            self.failure,
        )

    def _remove_own(self) -> None:
        with contextlib.suppress(OSError):
            if self._placement.rank == 0:
                remove_declaration(self.target)
            remove_rank(self.target, self._placement.rank)
        with contextlib.suppress(OSError):
            self.target.rmdir()  # the last rank's succeeds

    @property
    def _partial(self) -> Path:
        return self._directories_of(self._placement.rank)[1]

    def _copy_rank(self) -> None:
        rank = self._placement.rank
        for part in self._parts:
            self._copy_part(part)
        fsync_directory(self._partial)
        os.replace(self._partial, rank_directory(self.target, rank))
        fsync_directory(self.target)

    def _copy_part(self, part: Part) -> None:
        directory = self._partial / part.name
        directory.mkdir(mode=0o700)
        manifest = {**part.manifest, "buckets": [dict(e) for e in part.manifest["buckets"]]}
        for bucket in part.layout.buckets:
            file = f"bucket{bucket.index:05d}.bin"
            manifest["buckets"][bucket.index]["file"] = file
            check_footer(part, bucket.index)
            sums = PlaneChecksums(bucket)
            copy_file(
                part.file(bucket.index),
                directory / file,
                bytes_per_s=self._bytes_per_s,
                stop=self._stop,
                progress=self._count,
                sums=sums,
            )
            check_planes(part, bucket.index, sums.values)
        with (
            open(part.directory / RESIDENT_NAME, "rb") as source,
            open(directory / RESIDENT_NAME, "xb") as target,
        ):
            shutil.copyfileobj(source, target, 2**20)
            target.flush()
            os.fsync(target.fileno())
        copied = Part(directory, manifest)
        for _ in copied.resident():
            pass
        if part.manifest.get("upper"):
            copy_file(
                part.upper.path,
                copied.upper.path,
                bytes_per_s=self._bytes_per_s,
                stop=self._stop,
                progress=self._count,
            )
            for index in copied.upper:
                copied.upper.checked(index)
        write_durably(directory / MANIFEST_NAME, seal(manifest))

    def _count(self, nbytes: int) -> None:
        self.copied_bytes += nbytes
        now = time.monotonic()
        if now >= self._reported + _REPORT_INTERVAL_S:
            self._reported = now
            logger.info(
                "copying snapshot %s to %s: %.1f of %.1f GB, %.0f s left",
                self.source,
                self.target,
                self.copied_bytes / 1e9,
                self.total_bytes / 1e9,
                self.left_s,
            )

    # ------------------------------------------------------------------ other ranks, in the thread

    def _await_outcome(self) -> None:
        """Wait until rank 0 declares the copy complete.

        Raises:
            SnapshotError: it has given up, or nothing is to be seen of it any more.
            InterruptedError: this rank's copy was stopped.
        """
        began = time.monotonic()
        vanished_at: dict[int, float] = {}
        seen: object = None
        deadline = 0.0
        was_declared = False
        while True:
            is_declared = self._is_declared()
            if is_declared and was_declared:  # rank 0 takes back what it cannot make durable
                return
            was_declared = is_declared
            is_stopped = self._is_stopped_meanwhile(began)
            if is_declared:
                continue
            if is_stopped:
                raise InterruptedError("it was stopped")
            if self._has_given_up(0, vanished_at):
                raise SnapshotError("rank 0 has given up, and its log says why")
            # Its own part may take it as long as it likes, as long as there is progress.
            progress = self._progress_of(0)
            if progress != seen:
                seen = progress
                deadline = time.monotonic() + self._wait_for_ranks_s + _VANISHED_S
            elif time.monotonic() > deadline:
                raise SnapshotError(
                    f"rank 0 has neither declared the copy complete nor given up within "
                    f"{self._wait_for_ranks_s + _VANISHED_S:g} s"
                )

    def _is_stopped_meanwhile(self, began: float) -> bool:
        """Pause between two looks at what others do; whether the copy was to stop."""
        waited_s = time.monotonic() - began
        return self._stop.wait(min(max(_POLL_S, waited_s / 10), _LONGEST_POLL_S))

    def _is_declared(self) -> bool:
        """Whether this copy is complete."""
        try:
            return bool(describe(self.target)["snapshot"] == self._whole["snapshot"])
        except (SnapshotError, OSError):
            return False

    def _progress_of(self, rank: int) -> list[tuple[str, int]]:
        """Something that changes with every file of a rank's part, until it is whole."""
        found = []
        for directory in self._directories_of(rank):
            with contextlib.suppress(OSError):  # renamed meanwhile
                found += [(str(each), each.stat().st_mtime_ns) for each in matching(directory, "*")]
        return found

    def _directories_of(self, rank: int) -> tuple[Path, Path]:
        """Where a rank's part is once it is whole, and before."""
        final = rank_directory(self.target, rank)
        return final, final.with_name(final.name + PARTIAL)

    def _has_given_up(self, rank: int, vanished_at: dict[int, float]) -> bool:
        """Whether a rank's part has been nowhere for long; notes since when that is."""
        if any(directory.is_dir() for directory in self._directories_of(rank)):
            vanished_at.pop(rank, None)
            return False
        now = time.monotonic()
        return now > vanished_at.setdefault(rank, now) + _VANISHED_S

    # ------------------------------------------------------------------ rank 0, in the thread

    def _complete(self) -> None:
        """Wait for the parts of all ranks and declare the copy whole."""
        began = time.monotonic()
        deadline = began + self._wait_for_ranks_s
        vanished_at: dict[int, float] = {}
        while missing := self._missing_ranks():
            if self._is_stopped_meanwhile(began):
                raise InterruptedError("it was stopped")
            gone = [rank for rank in missing if self._has_given_up(rank, vanished_at)]
            if gone:
                raise SnapshotError(f"rank {gone[0]} has given up")
            if time.monotonic() > deadline:
                raise SnapshotError(
                    f"the parts of ranks {missing} did not arrive in {self.target} within "
                    f"{self._wait_for_ranks_s:g} s"
                )
        seals = {}
        for key in part_keys(self._whole):
            part, manifest_seal = read_manifest(self.target / key)
            stated = (part.manifest["snapshot"], part_key(part.rank, part.name))
            if stated != (self._whole["snapshot"], key):
                raise SnapshotError(f"{part.directory} is of another snapshot")
            seals[key] = manifest_seal
        declare(self.target, {**self._whole, "manifests": seals})
        if missing := self._missing_ranks():  # stopped while it was being declared
            raise SnapshotError(f"rank {missing[0]} has given up")

    def _missing_ranks(self) -> list[int]:
        """Ranks whose parts are not there yet."""
        ranks = range(self._whole["world_size"])
        return [rank for rank in ranks if not rank_directory(self.target, rank).is_dir()]

    def _prune(self) -> None:
        """Remove what is one too many; the copy is complete whatever comes of it."""
        if self._keep_last is None:
            return
        directory = self.target.parent
        try:
            for each in outdated(self.target, self._keep_last, set(map(str, being_copied()))):
                try:
                    remove_whole(each)
                except Exception as error:  # noqa: BLE001 - no failure of the copy
                    logger.warning("the older snapshot %s could not be removed: %s", each, error)
        except Exception as error:  # noqa: BLE001 - no failure of the copy
            logger.warning("older snapshots in %s could not be looked at: %s", directory, error)
        try:
            for each in clean_incomplete(directory):
                logger.info("removed %s, which was never completed", each)
        except Exception as error:  # noqa: BLE001 - no failure of the copy
            logger.warning("leftovers in %s could not be removed: %s", directory, error)

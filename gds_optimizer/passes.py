"""What all passes of an engine over its buckets share: who may use the state, failure, reading.

Scope: that one user at a time has the state, that a failed pass leaves a store that is known to be
torn, and the passes that read buckets or change their main planes for whoever asks. Anti-scope:
the optimizer's step and what else is made of passes; see `engine`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import NoReturn, Protocol

import torch

from gds_optimizer.bucket_state import BucketState
from gds_optimizer.errors import (
    ClosedError,
    GdsOptimizerError,
    StepFailedError,
    UnsupportedError,
)
from gds_optimizer.footer import BucketRecord
from gds_optimizer.pipeline import Pipeline, Ranges
from gds_optimizer.plan import MAIN_PLANE, EnginePlan, tie_plane
from gds_optimizer.slots import Slot, SlotPool
from gds_optimizer.store import Store
from gds_optimizer.telemetry import PassClock, PassStats
from gds_optimizer.upper_halves import UpperHalves

logger = logging.getLogger(__name__)


class HandedOutState(Protocol):
    """State that somebody outside holds as tensors over the files (see `mapped_state`)."""

    writable: bool

    def leave(self) -> None:
        """Make the files fit for direct I/O again."""


class Passes:
    """Passes over the buckets of one optimizer's state: `Engine` says what its arguments are."""

    def __init__(self, plan: EnginePlan, pool: SlotPool, store: Store, *, timeout_s: float) -> None:
        self.plan = plan
        self.layout = plan.layout
        self.pool = pool
        self.store = store
        self.pipeline = Pipeline(pool, store, timeout_s=timeout_s, order=store.drive_order)
        self.steps = 0
        self.last_stats = PassStats(str(pool.backend.io_path))
        self.handed_out: HandedOutState | None = None
        self._buckets = BucketState(plan, store, pool)
        self._failure: StepFailedError | None = None
        self._forward = True
        self._strays_reported = False
        self._materialized = 0  # blocks of `materialized` that are open
        self._finalizer = weakref.finalize(self, _close, self.pipeline, store)

    @property
    def records(self) -> list[BucketRecord]:
        """What each bucket's file holds."""
        return self._buckets.records

    @property
    def halves(self) -> UpperHalves:
        """Halves of mains that the model holds, where mains are stored as remainders."""
        return self._buckets.halves

    # ------------------------------------------------------------------ use and failure

    @contextmanager
    def exclusive(self, what: str, *, is_pass: bool = False) -> Iterator[None]:
        """Nobody else uses the state inside: no other thread, and no signal handler in a pass.

        Args:
            what: what is about to be done, for the message.
            is_pass: whether transfers and slots are in motion inside, so that not even the same
                thread may begin anything else.

        Raises:
            UnsupportedError: somebody else is using it.
        """
        with self.pool.usage.hold(is_pass=is_pass) as is_held:
            if not is_held:
                raise UnsupportedError(
                    f"{what} in the middle of a step, or of another use, of the optimizer state "
                    f"in {self.store.directories[0]}: do it between two steps, and from one thread"
                )
            yield

    def check_not_materialized(self, what: str) -> None:
        """Refuse what would be undone, or would miss changes, inside `materialized`.

        Raises:
            UnsupportedError
        """
        if self._materialized:
            raise UnsupportedError(
                f"{what} inside `materialized` would be undone, or would miss what was changed, "
                "when the block writes its values back: do it outside of it"
            )

    def check_can_lend(self) -> None:
        """Refuse to give the slots away that an open block of `materialized` needs in the end.

        Raises:
            UnsupportedError
        """
        if self._materialized:
            raise UnsupportedError(
                "the slots cannot be given back to the device (`offload_to_cpu`) inside "
                "`materialized`, which writes what was changed back through them when it ends: "
                "leave the block first"
            )

    def check_usable(self) -> None:
        """Refuse use when closed, forked or failed.

        Raises:
            ClosedError, ForkedError, StepFailedError
        """
        self.store.check_owner()
        if self._failure is not None:
            # A new object, or its traceback would grow, and keep frames alive, with every call.
            raise StepFailedError(str(self._failure)) from self._failure.__cause__

    def _check_slots(self) -> None:
        if self.layout.buckets and self.pool.is_suspended:
            raise ClosedError(
                f"the slots of the optimizer state in {self.store.directories[0]} were given back "
                "to the device: take them again (`restore_from_cpu`) before its next use"
            )

    def check_not_lent(self) -> None:
        """Refuse use of state on the device whose memory was given back.

        Raises:
            ClosedError
        """
        if any(file.stays_on_device for file in self.store.in_memory.values()):
            self._check_slots()

    def _fail(self, what: str, error: BaseException) -> NoReturn:
        """Mark the store as torn and raise what callers get to see."""
        self._buckets.forget_cuts()  # the optimizer may have let them show other memory
        torn = sorted(self.pipeline.unfinished_writes)
        done = [
            index
            for index, record in enumerate(self._buckets.records)
            if record.step > self.steps and index not in torn
        ]
        held = ""
        if torn:
            held += f"The last write of {_numbered(torn)} did not complete. "
        if done:
            held += (
                f"{len(done)} of {len(self._buckets.records)} buckets hold step {self.steps + 1}. "
            )
        self._failure = StepFailedError(
            f"{what} failed: {error}. {held}{'All others' if held else 'All buckets'} hold step "
            f"{self.steps} or earlier. The state in "
            f"{', '.join(map(str, self.store.directories))} is not usable: close the optimizer "
            "and resume from the last checkpoint"
        )
        if not isinstance(error, Exception):
            raise error  # KeyboardInterrupt and the like stay what they are
        raise self._failure from error

    @contextmanager
    def _pass(self, what: str) -> Iterator[PassClock]:
        """A pass over buckets that writes: statistics, the compute stream, failure."""
        self.check_usable()
        with self.exclusive(what, is_pass=True):
            self.take_files_back()
            self._check_slots()
            clock = PassClock(str(self.pool.backend.io_path), self.pool.trace)
            self.pool.trace.begin_pass(what)
            try:
                with torch.no_grad(), self.pool.computing():
                    yield clock
            except BaseException as error:  # noqa: BLE001 - `_fail` raises it, or what it caused
                self.pool.trace.end_pass({"failed": str(error)})
                self._fail(what, error)
            self.last_stats = clock.finish()
            self.pool.trace.end_pass(asdict(self.last_stats))
            if self.last_stats.read_bytes or self.last_stats.written_bytes:
                self._check_ways()

    def _check_ways(self) -> None:
        """Say so once if bytes went another way than the one that was chosen and printed."""
        backend = self.pool.backend
        ways = {key.partition(".")[0] for key, nbytes in backend.counters().items() if nbytes}
        strays = ways - {str(backend.io_path)}
        if strays and not self._strays_reported:
            self._strays_reported = True
            logger.warning(
                "the I/O path is %s, but KvikIO also counts bytes that went by %s: by another user "
                "of KvikIO in this process, or because the path does not hold here",
                backend.io_path,
                ", ".join(sorted(strays)),
            )

    def take_files_back(self) -> None:
        """End what `mapped_state` handed out; direct I/O and mapped pages must not meet.

        Raises:
            StepFailedError: it was handed out for writing and never committed.
        """
        if self.handed_out is None:
            if not self.pool.is_suspended:  # else they are all there is
                self.store.drop_written_out()
            return
        self._check_not_loading()
        self.handed_out.leave()
        self.handed_out = None

    def _check_not_loading(self) -> None:
        if self.handed_out is not None and self.handed_out.writable:
            raise StepFailedError(
                "a checkpoint was being loaded into the optimizer's state and did not finish: "
                "load it again, or close the optimizer"
            )

    def _ordered(self, buckets: Iterable[int]) -> list[int]:
        """Forwards and backwards in turn: a pass starts with what the last one left in slots."""
        ordered = sorted(buckets, reverse=not self._forward)
        self._forward = not self._forward
        return ordered

    def _check_models(self, buckets: Iterable[int], what: str) -> None:
        """Refuse what needs the halves of mains that the model held, where it was changed.

        Raises:
            ModelChangedError: nothing was done; the state is unharmed.
        """
        is_loading = self.handed_out is not None and self.handed_out.writable
        if not self._buckets.halves.buckets or is_loading:  # what follows refuses the latter
            return
        with self.exclusive(what, is_pass=True), torch.no_grad(), self.pool.computing():
            self._buckets.check_models(buckets)

    # ------------------------------------------------------------------ reading and rewriting

    def read_planes(
        self,
        visit: Callable[[int, dict[str, torch.Tensor]], None],
        buckets: Iterable[int],
        *,
        main_only: bool = False,
    ) -> None:
        """Call `visit(bucket index, planes)` with the current values of each bucket.

        Planes that were never written are zero. The tensors are good during the call only.

        Args:
            visit: what to call.
            buckets: indices.
            main_only: give it the main plane (where there is one) and nothing else.
        """
        self.check_usable()
        state, buckets = self._buckets, list(buckets)
        self._check_models(buckets, "reading the state")

        def read(index: int, slot: Slot, from_disk: bool) -> Ranges:
            if from_disk:
                state.expect(index, slot, state.needed(index))()
            is_home = self.store.files[index].is_stepped_in_place
            has_ties = not main_only and tie_plane(self.layout.buckets[index]) is not None
            if has_ties and is_home:
                # Tie bits are cleared for whoever reads: an interrupt must not lose the only ones.
                slot = Slot(index, slot.buffer.clone())
            planes = state.current_planes(index, slot, main_only=main_only)
            try:
                visit(index, planes)
            finally:
                if has_ties and not is_home and 0 in state.needed(index):
                    # The slot may serve the next step: the tie bits go back into it.
                    state.encode_main(index, slot, planes)
            self.pool.synchronize_compute()
            return ()

        clock = PassClock(str(self.pool.backend.io_path))
        with self.exclusive("reading the state", is_pass=True):
            self.take_files_back()
            self._check_slots()
            try:
                with torch.no_grad(), self.pool.computing():
                    self.pipeline.run(
                        self._ordered(buckets),
                        reads=lambda index: state.ranges(index, state.needed(index)),
                        visit=read,
                        clock=clock,
                    )
            except GdsOptimizerError as error:
                if self.pipeline.unfinished_writes:
                    self._fail("writing behind the last step", error)
                raise

    def _rewrite(
        self,
        buckets: Iterable[int],
        fill: Callable[[int, torch.Tensor], bool],
        *,
        read_main: bool,
    ) -> None:
        """Change main planes and nothing else; `fill` says whether it changed anything.

        A bucket whose file must stay as it is (a snapshot's) is copied as a whole to its next one.
        """

        state = self._buckets

        def planes_to_read(index: int) -> list[int]:
            frozen = self.store.is_frozen(index)
            parts = set(state.main_parts(index)) - (set() if read_main else {0})
            return [n for n in state.needed(index) if frozen or n in parts]

        def visit(index: int, slot: Slot, from_disk: bool) -> Ranges:
            record = state.records[index]
            if from_disk:
                state.expect(index, slot, planes_to_read(index))()
            main = state.planes(self.layout.buckets[index], slot)[MAIN_PLANE]
            with self.pool.trace.visit_span("compute", index):
                if read_main and 0 not in state.needed(index):
                    state.fill_main_from_model(index, main)
                elif read_main and index in state.halves.buckets:
                    state.decode_main(index, slot, main)
                if not fill(index, main):
                    return ()
            blank = record.is_blank
            state.put_main(index, slot, main)
            if blank:
                state.seal(index, slot, record)
            else:
                state.reseal_main(index, slot)
            self.pool.synchronize_compute()
            if self.store.is_frozen(index):
                return state.written_ranges(index)
            return state.ranges(index, state.main_parts(index))

        with_main = set(state.with_main())
        wanted = [index for index in buckets if index in with_main]
        with self._pass("rewriting the main parameters") as clock:
            self.pipeline.run(
                self._ordered(wanted),
                reads=lambda index: state.ranges(index, planes_to_read(index)),
                visit=visit,
                clock=clock,
            )
            # The slots hold parts of buckets, which is no good to the next step.
            self.pipeline.forget()

    def forget_slots(self) -> None:
        """Drop what slots still hold: the files are about to be written by other means."""
        self.pipeline.forget()

    # ------------------------------------------------------------------ the end

    def drain(self) -> None:
        """Wait until everything is on disk.

        Raises:
            StepFailedError: a write that went on behind the last step has failed.
        """
        self.check_usable()
        with self.exclusive("waiting for the last writes", is_pass=True):
            try:
                self.pipeline.drain()
            except GdsOptimizerError as error:
                self._fail("writing behind the last step", error)

    def close(self) -> None:
        """Wait for what is in flight and remove the files. May be called again.

        Raises:
            IoError: a write that went on behind the last step has failed; the files are removed
                all the same.
        """
        if self._finalizer.detach() is not None:
            try:
                _close(self.pipeline, self.store)
            finally:
                if not self.store.is_foreign:  # a forked child may not touch the parent's device
                    self._buckets.let_go_of_slots()


def _numbered(buckets: Sequence[int]) -> str:
    """ "bucket 3" or "buckets 1, 2, 3, 4, ..."."""
    shown = ", ".join(map(str, buckets[:4])) + (", ..." if len(buckets) > 4 else "")
    return f"bucket{'s' if len(buckets) > 1 else ''} {shown}"


def _close(pipeline: Pipeline, store: Store) -> None:
    try:
        if not store.is_foreign:  # a forked child has no part in its parent's transfers
            pipeline.forget()
    finally:
        store.close()

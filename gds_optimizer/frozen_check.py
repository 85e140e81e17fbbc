"""Checking files in the background that a checkpoint's writer still reads.

Reading all of the state before an asynchronous save would hold training up, so what the writer gets
is compared with its checksums meanwhile, in a thread. The files are frozen (see `freeze_mapped`):
training writes to others, and these live as long as somebody has them open, here too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from gds_optimizer.direct_file import PlaneChecksums, read_exactly
from gds_optimizer.engine import Engine
from gds_optimizer.errors import CorruptBucketError, GdsOptimizerError, IoError
from gds_optimizer.footer import parse_footer
from gds_optimizer.layout import PAGE_BYTES, Bucket

logger = logging.getLogger(__name__)

# Small enough that torch sums it in the calling thread alone, and leaves the others to training.
_CHUNK_BYTES = 128 * 2**10

# Two optimizers of a chain, or two saves, take turns: one thread reads at a time.
_turn = threading.Lock()


@dataclass(frozen=True, slots=True)
class _File:
    bucket: Bucket
    path: Path
    fd: int
    step: int
    written: list[bool]


class FrozenCheck:
    """Compares the frozen files of an engine with their checksums, in a thread that begins at once.

    Create it right after `freeze_mapped`, between two steps. Damage is logged when it is found, and
    raised as a CorruptBucketError when the engine's next step begins. The thread holds open files,
    one for each bucket, and nothing of the engine. The interpreter waits for it when it exits, so
    that the last checkpoint of a run is checked too. A forked child (the writer) has no part in it.

    Args:
        engine: quiet, with everything on disk.

    Attributes:
        failure: what is damaged or could not be read; None while the check goes on, and if it
            found nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self.failure: GdsOptimizerError | None = None
        self._layout_id = engine.layout.layout_id
        self._saved = f"step {engine.steps} in {engine.store.directories[0]}"
        self._before_step = engine.before_step
        self._files: list[_File] = []
        self._thread: threading.Thread | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._close)
            try:
                self._open(engine)
            except OSError as error:  # too many open files, say: the writer may do without
                logger.warning(
                    "the checkpoint that is being written of %s is not compared with its "
                    "checksums: %s",
                    self._saved,
                    error,
                )
                return
            self._thread = threading.Thread(target=self._run, name="checkpoint-check")
            self._thread.start()
            undo.pop_all()

    def _open(self, engine: Engine) -> None:
        for bucket in engine.layout.buckets:
            record, path = engine.records[bucket.index], engine.store.paths[bucket.index]
            if not record.is_blank:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._files.append(_File(bucket, path, fd, record.step, list(record.written)))

    def _close(self) -> None:
        while self._files:
            os.close(self._files.pop().fd)

    def wait(self) -> None:
        """Block until everything is checked."""
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            with _turn:
                for file in self._files:
                    self._check(file)
        except Exception as error:  # noqa: BLE001 - nobody would see it otherwise
            self.failure = CorruptBucketError(
                f"the checkpoint that was being written of {self._saved} must not be used: "
                f"{error}: delete it and save another; training may go on, whose own files are "
                "checked whenever they are read"
            )
            logger.error("%s", self.failure)
            self._before_step.append(self._raise)
        finally:
            self._close()

    def _raise(self) -> None:
        assert self.failure is not None
        raise self.failure

    def _check(self, file: _File) -> None:
        bucket = file.bucket
        what = f"bucket {bucket.index} in {file.path}"
        footer_page = _read(file, bucket.footer_offset, bytearray(PAGE_BYTES))
        try:
            footer = parse_footer(bytes(footer_page), bucket, self._layout_id)
        except CorruptBucketError as error:
            raise CorruptBucketError(f"{what} is not what was written: {error}") from None
        if (footer.step, footer.written) != (file.step, file.written):
            raise CorruptBucketError(
                f"{what} is not what was written: wanted planes {file.written} of step "
                f"{file.step}, got {footer.written} of step {footer.step}"
            )
        sums = PlaneChecksums(bucket)
        for start in range(0, bucket.footer_offset, _CHUNK_BYTES):
            chunk = bytearray(min(_CHUNK_BYTES, bucket.footer_offset - start))
            sums.add(torch.frombuffer(_read(file, start, chunk), dtype=torch.uint8), start)
        for plane, written, wanted, got in zip(
            bucket.planes, footer.written, footer.checksums, sums.values, strict=True
        ):
            if written and wanted != got:
                raise CorruptBucketError(
                    f"{what} is not what was written: checksum of plane {plane.name!r}: wanted "
                    f"{wanted}, got {got}"
                )


def _read(file: _File, offset: int, into: bytearray) -> bytearray:
    """Through the page cache, where the writer finds it too."""
    try:
        read_exactly(file.path, file.fd, memoryview(into), offset)
    except OSError as error:
        if isinstance(error, IoError):
            raise
        raise IoError(
            file.path, "read", file_offset=offset, wanted_bytes=len(into), got=str(error)
        ) from error
    return into

"""The whole state of an engine as tensors over its files, for checkpoint writers and readers.

Between two steps the state is on disk and nothing else uses the files, so it can be handed out as
mappings: saving and loading then hold no copy of it. The first step (or any other pass) after that
takes the files back.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from gds_optimizer.checksum import checksum
from gds_optimizer.engine import Engine
from gds_optimizer.errors import CorruptBucketError, IoError
from gds_optimizer.footer import BucketRecord, describe_difference, host_footer
from gds_optimizer.mapping import PlaneMapping, flush_and_drop

# Enough to keep a drive busy with page faults, and to compute checksums as fast as it reads.
_THREADS = 4


def _words(page: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(page), dtype=torch.int64)


class MappedState:
    """State tensors of one engine, mapped from its files. Create it with `map_state`.

    Args:
        engine: quiet: nothing in flight, everything on disk.
        writable: tensors may be written; `commit` must follow before the next step.

    Raises:
        StoreChangedError: a file is not the one that was created; touching what is mapped from
            one that somebody shortened would kill the process.
    """

    def __init__(self, engine: Engine, *, writable: bool) -> None:
        self.engine = engine
        self.writable = writable
        layout = engine.layout
        for bucket in layout.buckets:
            engine.store.check_unchanged(bucket.index)
        self._planes = {
            (space.index, number): PlaneMapping(
                layout,
                engine.store.paths,
                space.index,
                number,
                writable=writable,
                blank=self._blank_buckets(space.index, number),
            )
            for space in layout.spaces
            for number in range(len(space.planes))
            if space.numel
        }
        self._places = {
            binding: (space, shard)
            for space, members in zip(layout.spaces, engine.plan.shard_bindings, strict=True)
            for shard, binding in enumerate(members)
        }

    def _blank_buckets(self, space: int, plane: int) -> frozenset[int]:
        """Buckets whose file has never been given this plane; what is in it means nothing."""
        return frozenset(
            bucket.index
            for bucket in self.engine.layout.buckets
            if bucket.space == space and not self.engine.records[bucket.index].written[plane]
        )

    def tensors(
        self, binding: int, start: int = 0, end: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Elements `start` to `end` of a shard's planes, by plane name ("main" among them).

        Each is a 1-D CPU tensor that alone owns its storage, over the mapped files. Planes that
        were never written read as zeros, which is what optimizers start from. Unless the state was
        handed out for writing, storing into a tensor kills the process (SIGSEGV): its pages are
        read-only, and neither torch nor Python knows.
        """
        space, shard = self._places[binding]
        first = space.shard_starts[shard] + start
        numel = (space.shards[shard].numel if end is None else end) - start
        return {
            plane.name: self._planes[space.index, number].tensor(first, numel)
            for number, plane in enumerate(space.planes)
        }

    def verify(self) -> None:
        """Compare everything with its checksums, so that no checkpoint is made of wrong bytes.

        What is read for it stays in the page cache, for whoever reads the tensors next.

        Raises:
            CorruptBucketError: a bucket is not what was written; says which.
        """
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(self._verify_bucket, range(len(self.engine.layout.buckets))))

    def _verify_bucket(self, index: int) -> None:
        engine = self.engine
        bucket, record = engine.layout.buckets[index], engine.records[index]
        if record.is_blank:
            return
        checksums = [
            int(checksum(self._plane_bytes(index, number))) if written else 0
            for number, written in enumerate(record.written)
        ]
        expected = host_footer(bucket, engine.layout.layout_id, record, checksums)
        path = engine.store.paths[index]
        with open(path, "rb") as file:
            found = os.pread(file.fileno(), len(expected), bucket.footer_offset)
        if found != expected:
            what = describe_difference(_words(expected), _words(found), bucket)
            raise CorruptBucketError(f"bucket {index} in {path} is not what was written: {what}")

    def commit(self) -> None:
        """Make what was written through the tensors the engine's state.

        Every bucket gets a new footer, whose checksums are taken from the mapped pages.

        Raises:
            IoError: a footer could not be written; the engine goes on refusing to be used.
            OSError: the files could not be flushed; likewise.
        """
        engine = self.engine
        for bucket in engine.layout.buckets:
            checksums = [
                int(checksum(self._plane_bytes(bucket.index, number)))
                for number in range(len(bucket.planes))
            ]
            record = BucketRecord(engine.steps, [True] * len(bucket.planes))
            footer = host_footer(bucket, engine.layout.layout_id, record, checksums)
            path = engine.store.paths[bucket.index]
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                written_bytes = os.pwrite(fd, footer, bucket.footer_offset)
            finally:
                os.close(fd)
            if written_bytes != len(footer):
                raise IoError(
                    path,
                    "write",
                    file_offset=bucket.footer_offset,
                    wanted_bytes=len(footer),
                    got=written_bytes,
                )
        self.leave()
        engine.adopt_files()

    def _plane_bytes(self, index: int, number: int) -> torch.Tensor:
        bucket = self.engine.layout.buckets[index]
        mapping = self._planes[bucket.space, number]
        return mapping.tensor(bucket.start, bucket.numel).view(torch.uint8)

    def leave(self) -> None:
        """Write back what is dirty and take the files out of the page cache.

        Tensors that somebody still holds stay valid; they read the files again.
        """
        flush_and_drop(list(self._planes.values()), self.engine.store.paths)


def freeze_mapped(engine: Engine) -> None:
    """Let training go on while somebody still reads what was handed out.

    From now on the buckets are written to other files; the ones that were handed out live as long
    as their tensors do.

    Raises:
        NoSpaceError: there is no room for a second set of files.
    """
    engine.store.freeze_read_elsewhere()
    engine.handed_out = None


def map_state(engine: Engine, *, writable: bool = False, verify: bool = True) -> MappedState:
    """Hand out the state of `engine` as tensors, once everything is on disk.

    A mapping of the same kind that is still there is handed out again. Reading (`writable=False`)
    leaves the engine as it is. After writing, `MappedState.commit` must be called; until then the
    engine refuses every other use.

    Args:
        engine: what keeps the state.
        writable: for loading rather than saving.
        verify: compare what is handed out for reading with its checksums, which reads all of it.

    Raises:
        CorruptBucketError: a bucket is not what was written.
        StepFailedError: the state is torn, a write that went on behind the last step failed, or
            tensors were handed out for writing before and never committed.
    """
    engine.check_usable()
    held = engine.handed_out
    if isinstance(held, MappedState) and held.writable == writable:
        return held
    engine.take_files_back()
    if writable:
        # Everything will be overwritten, so nothing needs to be brought into the files first, and
        # files that a snapshot keeps must not be the ones.
        engine.drain()
        engine.forget_slots()
        engine.store.thaw()
    else:
        engine.settle()
    mapped = MappedState(engine, writable=writable)
    if verify and not writable:
        mapped.verify()
    engine.handed_out = mapped
    return mapped

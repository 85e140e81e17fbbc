"""The whole state of an engine as tensors over its files, for checkpoint writers and readers.

Between two steps the state is on disk and nothing else uses the files, so it can be handed out as
mappings: saving and loading then hold no copy of it. The first step (or any other pass) after that
takes the files back.

State that is encoded in the files is decoded into files without names, which are handed out
instead and encoded again by `commit`. They take room on the drives for as long as somebody uses
them, and no more memory than a part of a bucket.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from gds_optimizer.checksum import checksum
from gds_optimizer.codecs import RemainderCodec, clear_tie_bits, get_codec, nearest_codec
from gds_optimizer.codecs.remainder import stored_moments
from gds_optimizer.engine import Engine
from gds_optimizer.errors import CorruptBucketError, IoError
from gds_optimizer.footer import BucketRecord, describe_difference, host_footer
from gds_optimizer.io import allocate_host_buffer
from gds_optimizer.layout import Bucket
from gds_optimizer.mapping import (
    Mapping,
    PlaneMapping,
    ScratchMapping,
    drop_pages,
    flush_and_drop,
    no_room_for_decoded,
    plane_bytes,
)
from gds_optimizer.plan import remainder_codec, tie_plane
from gds_optimizer.room import free_bytes
from gds_optimizer.written_out import read_back, write_out

# Enough to keep a drive busy with page faults, and to compute checksums as fast as it reads.
_THREADS = 4
# Where values are decoded or encoded: that computes more than it waits, and the C library keeps
# several MiB for each of the threads.
_CODING_THREADS = 2
# Elements that are decoded and written at a time, by each of the threads: 256 KiB, and as much
# again several times over for what decoding needs. The C library gives little of it back, and
# larger parts are no faster.
_PART_NUMEL = 2**16

Scratch = dict[tuple[int, int], ScratchMapping]
"""Room for decoded values, by space and number of the plane."""


def _words(page: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(page), dtype=torch.int64)


class MappedState:
    """State tensors of one engine, mapped from its files. Create it with `map_state`.

    Args:
        engine: quiet: nothing in flight, everything on disk.
        writable: tensors may be written; `commit` must follow before the next step.
        scratch: room for decoded values, from `reserve_scratch`.

    Raises:
        StoreChangedError: a file is not the one that was created; touching what is mapped from
            one that somebody shortened would kill the process.
    """

    def __init__(self, engine: Engine, *, writable: bool, scratch: Scratch) -> None:
        self.engine = engine
        self.writable = writable
        layout = engine.layout
        if not writable:
            write_out(engine)
        for bucket in layout.buckets:
            engine.store.check_unchanged(bucket.index)
        self._scratch = scratch
        # Of encoded planes, by bucket and plane, when they were decoded.
        self._checksums: dict[tuple[int, int], int] = {}
        if self._scratch and not writable:
            self._for_each_bucket(self._decode_bucket, _CODING_THREADS)
        for decoded in self._scratch.values():
            decoded.map(writable=writable)
        self._planes: dict[tuple[int, int], Mapping] = {
            (space.index, number): self._scratch.get((space.index, number))
            or PlaneMapping(
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

    def _for_each_bucket(self, action: Callable[[int], None], threads: int = _THREADS) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(action, range(len(self.engine.layout.buckets))))

    def _decode_bucket(self, index: int) -> None:
        """Put the decoded values of a bucket's encoded planes into their files."""
        bucket, record = self.engine.layout.buckets[index], self.engine.records[index]
        path = self.engine.store.paths[index]
        ties = tie_plane(bucket)
        part = None
        for number, plane in enumerate(bucket.planes):
            target = self._scratch.get((bucket.space, number))
            if target is None or not record.written[number]:
                continue
            codec = get_codec(plane.codec)
            if part is None:
                part = allocate_host_buffer(min(_PART_NUMEL, bucket.numel) * codec.dtype.itemsize)
            encoded = plane_bytes(path, plane)
            self._checksums[index, number] = int(checksum(encoded))
            for start in range(0, bucket.numel, _PART_NUMEL):
                numel = min(_PART_NUMEL, bucket.numel - start)
                values = part.view(codec.dtype)[:numel]
                if isinstance(codec, RemainderCodec):
                    self._decode_main(index, codec, encoded, values, start)
                else:
                    codec.decode_into(encoded, values, numel=bucket.numel, start=start)
                if number == ties:
                    clear_tie_bits(values)
                target.write(bucket.start + start, values)
            del encoded
        if part is not None:
            drop_pages(path)

    def _decode_main(
        self,
        index: int,
        codec: RemainderCodec,
        encoded: torch.Tensor,
        main: torch.Tensor,
        start: int,
    ) -> None:
        bucket = self.engine.layout.buckets[index]
        stored = self._stored_ties(bucket)
        if stored is not None:
            stored = stored[start : start + main.numel()]
            if not self.engine.records[index].written[tie_plane(bucket) or 0]:
                stored = torch.zeros_like(stored)
        halves = torch.empty(main.numel(), dtype=torch.bfloat16)
        self.engine.halves.gather(index, halves, start)
        codec.decode_main(
            encoded, main, model=halves, exp_avg_sq=stored, numel=bucket.numel, start=start
        )

    def _stored_ties(self, bucket: Bucket, *, writable: bool = False) -> torch.Tensor | None:
        """The moments in a bucket's file whose signs are tie bits of its mains, mapped."""
        number = tie_plane(bucket)
        if number is None:
            return None
        plane = bucket.planes[number]
        encoded = plane_bytes(self.engine.store.paths[bucket.index], plane, writable=writable)
        return stored_moments(encoded, plane.codec, bucket.numel)

    def _encode_main(self, index: int, codec: RemainderCodec) -> dict[int, int]:
        """Put the mains of a bucket into its file, as remainders; all other planes are there.

        Returns:
            Checksums of the planes that this has changed, by number.
        """
        bucket, path = self.engine.layout.buckets[index], self.engine.store.paths[index]
        encoded = plane_bytes(path, bucket.planes[0], writable=True)
        main = self._planes[bucket.space, 0].tensor(bucket.start, bucket.numel)
        ties = self._stored_ties(bucket, writable=True)
        codec.encode_main(main, encoded, exp_avg_sq=ties)
        encoded[codec.encoded_bytes(bucket.numel) :].zero_()
        self.engine.halves.keep(index, main)
        sums = {0: int(checksum(encoded))}
        number = tie_plane(bucket)
        if number is not None:
            sums[number] = int(checksum(plane_bytes(path, bucket.planes[number])))
        return sums

    def _encode_plane(self, index: int, number: int) -> int:
        """Put what was written into a bucket's decoded values into its file; its checksum."""
        bucket = self.engine.layout.buckets[index]
        plane = bucket.planes[number]
        codec = nearest_codec(plane.codec)
        encoded = plane_bytes(self.engine.store.paths[index], plane, writable=True)
        values = self._planes[bucket.space, number].tensor(bucket.start, bucket.numel)
        codec.encode_from(values, encoded)
        encoded[codec.encoded_bytes(bucket.numel) :].zero_()
        return int(checksum(encoded))

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

        After the engine's next step, tensors over the files themselves show what is there then;
        decoded ones show what was there.
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
        self._for_each_bucket(self._verify_bucket)

    def _verify_bucket(self, index: int) -> None:
        engine = self.engine
        bucket, record = engine.layout.buckets[index], engine.records[index]
        if record.is_blank:
            return
        checksums = [
            self._plane_checksum(index, number) if written else 0
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

        Every bucket gets a new footer, whose checksums are taken from the mapped pages. Decoded
        values are encoded, rounded to nearest.

        Raises:
            IoError: a footer could not be written; the engine goes on refusing to be used.
            OSError: the files could not be flushed; likewise.
        """
        self._for_each_bucket(self._commit_bucket, _CODING_THREADS if self._scratch else _THREADS)
        self._flush()
        read_back(self.engine)
        self.engine.store.drop_written_out()
        self.engine.adopt_files()

    def _commit_bucket(self, index: int) -> None:
        engine = self.engine
        bucket, path = engine.layout.buckets[index], engine.store.paths[index]
        codec = remainder_codec(bucket)
        sums: dict[int, int] = {}
        for number in range(len(bucket.planes)):
            if number == 0 and codec is not None:
                continue
            if (bucket.space, number) in self._scratch:
                sums[number] = self._encode_plane(index, number)
            else:
                sums[number] = self._plane_checksum(index, number)
        if codec is not None:
            sums |= self._encode_main(index, codec)
        checksums = [sums[number] for number in range(len(bucket.planes))]
        record = BucketRecord(engine.steps, [True] * len(bucket.planes))
        footer = host_footer(bucket, engine.layout.layout_id, record, checksums)
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

    def _plane_checksum(self, index: int, number: int) -> int:
        """Of the bytes that a bucket's file has, or had when they were decoded."""
        if (index, number) in self._checksums:
            return self._checksums[index, number]
        bucket = self.engine.layout.buckets[index]
        mapping = self._planes[bucket.space, number]
        return int(checksum(mapping.tensor(bucket.start, bucket.numel).view(torch.uint8)))

    def leave(self) -> None:
        """Write back what is dirty and take the files out of the page cache.

        Tensors that somebody still holds stay valid; they read the files again.
        """
        self._flush()
        self.engine.store.drop_written_out()

    def _flush(self) -> None:
        flush_and_drop(list(self._planes.values()), self.engine.store.paths)


def reserve_scratch(engine: Engine) -> Scratch:
    """Room for the decoded values of every plane that is encoded in the files; often none.

    Buckets that live in memory get their files here, too, since what follows needs all of them. The
    rest is taken from the store's directory with the most room, plane by plane, and given back when
    the last tensor over it is gone.

    Raises:
        NoSpaceError: there is too little; names bytes needed and free.
    """
    layout, directories = engine.layout, engine.store.directories
    engine.store.reserve_written_out()
    wanted = {
        (space.index, number): (
            sum(bucket.numel for bucket in layout.buckets if bucket.space == space.index),
            codec.dtype,
        )
        for space in layout.spaces
        for number, codec in enumerate(get_codec(plane.codec) for plane in space.planes)
        if space.numel and (not codec.is_view or number == tie_plane(space))
    }
    needed_bytes = sum(numel * dtype.itemsize for numel, dtype in wanted.values())
    room_bytes = free_bytes(*directories)
    if needed_bytes > room_bytes:
        engine.store.drop_written_out()
        raise no_room_for_decoded(", ".join(map(str, directories)), needed_bytes, room_bytes)
    scratch: Scratch = {}
    try:
        for key, (numel, dtype) in wanted.items():
            scratch[key] = ScratchMapping(numel, dtype, max(directories, key=free_bytes))
    except BaseException:
        for mapping in scratch.values():
            mapping.close()  # at once: the traceback keeps the objects
        engine.store.drop_written_out()
        raise
    return scratch


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
        NoSpaceError: there is no room for decoded values; the engine is as it was.
        StepFailedError: the state is torn, a write that went on behind the last step failed, or
            tensors were handed out for writing before and never committed.
        UnsupportedError: inside `materialized`.
    """
    engine.check_usable()
    engine.check_not_materialized("saving or loading the whole state")
    engine.check_not_lent()
    held = engine.handed_out
    if isinstance(held, MappedState) and held.writable == writable:
        return held
    engine.take_files_back()
    if writable:
        # Everything will be overwritten, so nothing needs to be brought into the files first, and
        # files that a snapshot keeps must not be the ones.
        engine.drain()
        engine.forget_slots()
        scratch = reserve_scratch(engine)  # before anything is given up
        engine.store.thaw()
    else:
        engine.settle()
        scratch = reserve_scratch(engine)
    mapped = MappedState(engine, writable=writable, scratch=scratch)
    if verify and not writable:
        mapped.verify()
    engine.handed_out = mapped
    return mapped

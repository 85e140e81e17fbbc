"""The whole state of an engine as tensors over its files, for checkpoint writers and readers.

Between two steps the state is on disk and nothing else uses the files, so it can be handed out as
mappings: saving and loading then hold no copy of it. The first step (or any other pass) after that
takes the files back.
"""

from __future__ import annotations

import os

import torch

from gds_optimizer.checksum import checksum
from gds_optimizer.engine import Engine
from gds_optimizer.footer import BucketRecord, host_footer
from gds_optimizer.mapping import PlaneMapping, flush_and_drop


class MappedState:
    """State tensors of one engine, mapped from its files. Create it with `map_state`.

    Args:
        engine: quiet: nothing in flight, everything on disk.
        writable: tensors may be written; `commit` must follow before the next step.
    """

    def __init__(self, engine: Engine, *, writable: bool) -> None:
        self.engine = engine
        self.writable = writable
        layout = engine.layout
        self._planes = {
            (space.index, number): PlaneMapping(
                layout, engine.store.paths, space.index, number, writable=writable
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

    def tensors(
        self, binding: int, start: int = 0, end: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Elements `start` to `end` of a shard's planes, by plane name ("main" among them).

        Each is a 1-D CPU tensor that alone owns its storage, over the mapped files. Planes that
        were never written read as zeros, which is what optimizers start from.
        """
        space, shard = self._places[binding]
        first = space.shard_starts[shard] + start
        numel = (space.shards[shard].numel if end is None else end) - start
        return {
            plane.name: self._planes[space.index, number].tensor(first, numel)
            for number, plane in enumerate(space.planes)
        }

    def commit(self) -> None:
        """Make what was written through the tensors the engine's state.

        Every bucket gets a new footer, whose checksums are taken from the mapped pages.
        """
        engine = self.engine
        for bucket in engine.layout.buckets:
            checksums = [
                int(checksum(self._plane_bytes(bucket.index, number)))
                for number in range(len(bucket.planes))
            ]
            record = BucketRecord(engine.steps, [True] * len(bucket.planes))
            footer = host_footer(bucket, engine.layout, record, checksums)
            fd = os.open(engine.store.paths[bucket.index], os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(fd, footer, bucket.footer_offset)
            finally:
                os.close(fd)
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


def map_state(engine: Engine, *, writable: bool = False) -> MappedState:
    """Hand out the state of `engine` as tensors, once everything is on disk.

    A mapping that is still there is handed out again. Reading (`writable=False`) leaves the
    engine as it is. After writing, `MappedState.commit` must be called; until then a step refuses.

    Raises:
        StepFailedError: the state is torn, or a write that went on behind the last step failed.
    """
    held = engine.handed_out
    if isinstance(held, MappedState) and (held.writable or not writable):
        return held
    engine.settle()
    engine.handed_out = MappedState(engine, writable=writable)
    if writable:
        engine.forget_slots()
    return engine.handed_out

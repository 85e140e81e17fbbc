"""Giving buckets their homes: the budgets, the memory itself, and what the log says of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gds_optimizer.config import AUTO_BUDGET, StreamConfig
from gds_optimizer.homes import Home, assign_homes, fitting
from gds_optimizer.host_memory import available_bytes, local_share
from gds_optimizer.io import CopyStreams, MemoryFile
from gds_optimizer.layout import PAGE_BYTES, Bucket, Layout, align_up
from gds_optimizer.slots import SlotPool

logger = logging.getLogger(__name__)

_SPARE_BYTES = 2**30
"""Host memory that is never taken: a machine without any left kills processes."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """What a slot pool takes; arguments of `SlotPool`.

    Attributes:
        count: slots; 0 where every bucket is stepped where it lives.
        slot_bytes: of each.
        scratch_bytes: for the decoded values of one bucket.
    """

    count: int
    slot_bytes: int
    scratch_bytes: int


@dataclass(frozen=True, slots=True)
class HostOffer:
    """What host memory that nobody uses would buy.

    Attributes:
        available_bytes: of host memory, to this rank.
        budget_bytes: of host memory to ask for, whole GiB: at most half of what is available.
        kept: buckets that would live there.
        moving: buckets that are not on the device: in host memory and on the drives.
    """

    available_bytes: int
    budget_bytes: int
    kept: int
    moving: int

    def __str__(self) -> str:
        return (
            f"host memory has {self.available_bytes // 2**30} GiB available to this rank: "
            f"--stream-optimizer-state-host-budget {self.budget_bytes // 2**30}GiB would keep "
            f"{self.kept} of {self.moving} buckets off the drives"
        )


class Tiers:
    """Homes of the buckets of all engines of a process. Create it with `plan`.

    Attributes:
        homes: for each engine the home of each bucket.
        in_memory: for each engine its buckets that live in memory, by index, once it was taken.
    """

    def __init__(self, layouts: Sequence[Layout], homes: list[list[Home]]) -> None:
        self.layouts = list(layouts)
        self.homes = homes
        self.in_memory: list[dict[int, MemoryFile]] = [{} for _ in layouts]

    @classmethod
    def plan(
        cls, layouts: Sequence[Layout], config: StreamConfig, *, share_bytes: int | None = None
    ) -> Tiers:
        """Assign homes within the budgets; nothing is taken yet.

        Args:
            layouts: of all engines of a process.
            config: its budgets.
            share_bytes: host memory available to this process, of which the budget "auto" is the
                half; by default its share of this machine's.
        """
        host_budget = config.host_budget
        if host_budget == AUTO_BUDGET:
            host_budget = (host_share() if share_bytes is None else share_bytes) // 2
        sizes = [[bucket.file_bytes for bucket in layout.buckets] for layout in layouts]
        homes = assign_homes(
            sizes, hbm_budget_bytes=config.hbm_budget, host_budget_bytes=int(host_budget)
        )
        return cls(layouts, homes)

    def _sizes(self, *homes: Home) -> list[int]:
        return [
            bucket.file_bytes
            for layout, own in zip(self.layouts, self.homes, strict=True)
            for bucket, home in zip(layout.buckets, own, strict=True)
            if home in homes
        ]

    def count(self, home: Home) -> int:
        """Buckets that live there."""
        return len(self._sizes(home))

    def nbytes(self, home: Home) -> int:
        """Bytes of the buckets that live there."""
        return sum(self._sizes(home))

    def moving_bytes(self, *, from_host: bool = True) -> list[int]:
        """Bytes of each bucket that goes through a slot in a step.

        Args:
            from_host: whether those in host memory do.
        """
        return self._sizes(Home.HOST, Home.NVME) if from_host else self._sizes(Home.NVME)

    def pool_sizes(self, slots: int, *, from_host: bool = True) -> PoolSizes:
        """What the slot pool for these homes takes.

        Args:
            slots: buckets that may be in memory at once.
            from_host: whether buckets that live in host memory need one.
        """
        moving = self.moving_bytes(from_host=from_host)
        has_buckets = any(layout.buckets for layout in self.layouts)
        return PoolSizes(
            min(slots, len(moving)) if has_buckets else 1,
            align_up(max(moving, default=PAGE_BYTES), PAGE_BYTES),
            max((layout.max_scratch_bytes for layout in self.layouts), default=0),
        )

    def offer(self, share_bytes: int) -> HostOffer | None:
        """What more host memory would buy; None where that is nothing.

        Args:
            share_bytes: available to this process, what its buckets take there included.
        """
        moving = self.moving_bytes()
        count = fitting(moving, share_bytes // 2 // 2**30 * 2**30)
        if count <= self.count(Home.HOST):
            return None
        needed_gib = -(-sum(moving[:count]) // 2**30)
        return HostOffer(share_bytes, needed_gib * 2**30, count, len(moving))

    def take_host_memory(self, device: torch.device, rank: int) -> None:
        """Take the buckets' host memory, one after the other; `close` gives it back.

        What is not to be had leaves the rest of these buckets on NVMe, with a warning.

        Args:
            device: where the state is stepped, with its index: slots are compared with it.
            rank: for the log.
        """
        host_bytes = self.nbytes(Home.HOST)
        if not host_bytes:
            return
        logger.info(
            "rank %d: taking %.2f GiB of %shost memory for %d buckets",
            rank,
            host_bytes / 2**30,
            "pinned " if device.type == "cuda" else "",
            self.count(Home.HOST),
        )
        streams, failure = CopyStreams(device), ""
        for own, files, bucket in self._living_in(Home.HOST):
            if not failure:
                try:
                    files[bucket.index] = _in_host_memory(bucket.file_bytes, streams)
                    continue
                except MemoryError as error:
                    failure = str(error)
            own[bucket.index] = Home.NVME
        if failure:
            logger.warning(
                "rank %d: only %.2f of %.2f GiB of host memory could be had (%s): the remaining "
                "buckets live on NVMe",
                rank,
                self.nbytes(Home.HOST) / 2**30,
                host_bytes / 2**30,
                failure,
            )

    def take_device_memory(self, pool: SlotPool) -> None:
        """Take the device's memory for the buckets that live there; `close` gives it back.

        Args:
            pool: on the device.

        Raises:
            ConfigError: the device has too little free memory.
        """
        streams = CopyStreams(pool.device)
        for _, files, bucket in self._living_in(Home.DEVICE):
            buffer = pool.allocate_home(bucket.file_bytes)
            files[bucket.index] = MemoryFile(buffer, streams)

    def _living_in(self, home: Home) -> Iterator[tuple[list[Home], dict[int, MemoryFile], Bucket]]:
        """Every bucket with that home, with the homes and the buckets in memory of its engine."""
        for layout, own, files in zip(self.layouts, self.homes, self.in_memory, strict=True):
            for bucket in layout.buckets:
                if own[bucket.index] is home:
                    yield own, files, bucket

    def describe(self) -> str:
        """How many buckets live where, in words."""
        return "buckets live " + ", ".join(
            f"{where} {self.count(home)} ({self.nbytes(home) / 2**30:.2f} GiB)"
            for home, where in (
                (Home.DEVICE, "on the device"),
                (Home.HOST, "in host memory"),
                (Home.NVME, "on NVMe"),
            )
        )

    def close(self) -> None:
        """Give all of it back; no copy may be in flight. May be called again."""
        with contextlib.ExitStack() as stack:
            for files in self.in_memory:
                for file in files.values():
                    stack.callback(file.close)


def _in_host_memory(nbytes: int, streams: CopyStreams) -> MemoryFile:
    left = available_bytes()
    if left - nbytes < _SPARE_BYTES:
        raise MemoryError(f"{left} bytes are available, of which {_SPARE_BYTES} are left to others")
    return MemoryFile.in_host_memory(nbytes, streams)


def host_share() -> int:
    """Bytes of host memory available to this process, if the ranks of this machine share it."""
    return local_share(available_bytes())


def budget_hint(tiers: Tiers, config: StreamConfig) -> HostOffer | None:
    """What host memory would buy that nobody asked for; None where a budget was set."""
    return None if config.host_budget else tiers.offer(host_share())

"""Giving buckets their homes: the budgets, the memory itself, and what the log says of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from gds_optimizer.config import AUTO_BUDGET, StreamConfig
from gds_optimizer.homes import Home, assign_homes, fitting
from gds_optimizer.host_memory import available_bytes, local_share
from gds_optimizer.io import CopyStreams, MemoryFile
from gds_optimizer.layout import Layout
from gds_optimizer.slots import SlotPool

logger = logging.getLogger(__name__)

_SPARE_BYTES = 2**30
"""Host memory that is never taken: a machine without any left kills processes."""


class Tiers:
    """Homes of the buckets of all engines of a process. Create it with `plan`.

    Attributes:
        homes: for each engine the home of each bucket.
        in_memory: for each engine its buckets that live in memory, by index, after `allocate`.
    """

    def __init__(self, layouts: Sequence[Layout], homes: list[list[Home]]) -> None:
        self.layouts = list(layouts)
        self.homes = homes
        self.in_memory: list[dict[int, MemoryFile]] = [{} for _ in layouts]

    @classmethod
    def plan(cls, layouts: Sequence[Layout], config: StreamConfig) -> Tiers:
        """Assign homes within the budgets; nothing is taken yet."""
        host_budget = config.host_budget
        if host_budget == AUTO_BUDGET:
            host_budget = local_share(available_bytes()) // 2
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

    @property
    def moving_bytes(self) -> list[int]:
        """Bytes of each bucket that goes through a slot in a step."""
        return self._sizes(Home.HOST, Home.NVME)

    def allocate(self, pool: SlotPool, rank: int) -> None:
        """Take the memory, bucket by bucket.

        Host memory that is not to be had leaves the rest of its buckets on NVMe, with a warning.

        Args:
            pool: on the device.
            rank: for the log.

        Raises:
            ConfigError: the device has too little free memory. `close` gives back what was taken.
        """
        streams = CopyStreams(pool.device)
        host_bytes = self.nbytes(Home.HOST)
        if host_bytes:
            logger.info(
                "rank %d: taking %.2f GiB of %shost memory for %d buckets",
                rank,
                host_bytes / 2**30,
                "pinned " if pool.device.type == "cuda" else "",
                self.count(Home.HOST),
            )
        failure = ""
        for layout, own, files in zip(self.layouts, self.homes, self.in_memory, strict=True):
            for bucket in layout.buckets:
                home = own[bucket.index]
                if home is Home.DEVICE:
                    buffer = pool.allocate_home(bucket.file_bytes)
                    files[bucket.index] = MemoryFile(buffer, streams)
                elif home is Home.HOST:
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


def budget_hint(tiers: Tiers, config: StreamConfig) -> str:
    """What host memory that nobody uses would buy; empty where a budget was set or it buys nothing.

    Half of the available memory, as the budget "auto" would take.
    """
    budget: Any = config.host_budget
    on_nvme = tiers.moving_bytes
    if budget or not on_nvme:
        return ""
    gib = local_share(available_bytes()) // 2 // 2**30
    count = fitting(on_nvme, gib * 2**30)
    if not count:
        return ""
    needed_gib = -(-sum(on_nvme[:count]) // 2**30)
    return (
        f"host memory has {2 * gib} GiB available to this rank: "
        f"--stream-optimizer-state-host-budget {needed_gib}GiB would keep {count} of "
        f"{len(on_nvme)} buckets off the drives"
    )

"""Where buckets live between steps: on the device, in host memory, or on NVMe. Pure.

Homes are static: the first buckets that fit the device's budget stay on the device, the next that
fit the host's budget live in host memory, the rest on NVMe. A budget changes where bytes are, and
nothing about them: what is encoded is encoded in every home.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class Home(str, Enum):
    """Where a bucket's bytes are between two steps."""

    DEVICE = "device"
    """In a buffer of its own on the device; it never moves."""
    HOST = "host"
    """In host memory: pinned and copied through a slot in each step where the device is a GPU,
    stepped where it is without one."""
    NVME = "nvme"
    """In a file; read and written in each step."""

    def __str__(self) -> str:
        return self.value


def assign_homes(
    bucket_bytes: Sequence[Sequence[int]], *, hbm_budget_bytes: int, host_budget_bytes: int
) -> list[list[Home]]:
    """A home for every bucket of every engine, in order.

    The first bucket that a budget has no room for ends it, so that what lives where can be told
    from the budgets alone: device first, then host, then NVMe.

    Args:
        bucket_bytes: for each engine the bytes of its buckets.
        hbm_budget_bytes: bytes on the device that all engines together may keep for good.
        host_budget_bytes: the same of host memory.

    Returns:
        The homes, shaped like `bucket_bytes`.
    """
    tiers = [(Home.DEVICE, hbm_budget_bytes), (Home.HOST, host_budget_bytes)]
    homes: list[list[Home]] = []
    for sizes in bucket_bytes:
        own: list[Home] = []
        for nbytes in sizes:
            while tiers and tiers[0][1] < nbytes:
                tiers.pop(0)
            if not tiers:
                own.append(Home.NVME)
                continue
            home, left_bytes = tiers[0]
            tiers[0] = (home, left_bytes - nbytes)
            own.append(home)
        homes.append(own)
    return homes


def fitting(bucket_bytes: Sequence[int], budget_bytes: int) -> int:
    """How many buckets, from the first on, fit into a budget."""
    count = 0
    for nbytes in bucket_bytes:
        budget_bytes -= nbytes
        if budget_bytes < 0:
            break
        count += 1
    return count

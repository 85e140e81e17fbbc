"""How much host memory a process may take: what the kernel and its control group leave.

Read when it is asked for; other processes take memory at any time, so it is an estimate.
"""

from __future__ import annotations

import os
from pathlib import Path

_UNLIMITED = 2**60
"""cgroup v1 says "no limit" as a number near 2**63."""


def available_bytes(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be had without swapping, in this control group.

    Page cache counts as free, in the control group too: the kernel gives it up.

    Args:
        proc, cgroups: where the kernel says so; others for tests.
    """
    found = [_mem_available(proc / "meminfo")]
    for group in _groups(proc / "self" / "cgroup", cgroups):
        found += _left_in(group)
    return max(min(found), 0)


def local_share(nbytes: int) -> int:
    """This process's part of something that the ranks on this machine share (LOCAL_WORLD_SIZE)."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return nbytes // max(int(text) if text.isdecimal() else 1, 1)


def _mem_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0


def _groups(membership: Path, root: Path) -> list[Path]:
    """Directories of the control groups that limit this process's memory, and of their parents."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        # In a container the name may be the host's, with the limit at the root that we see.
        own = base / name.lstrip("/")
        found += [each for each in (own, *own.parents) if each == base or base in each.parents]
    return found


def _left_in(group: Path) -> list[int]:
    """What a group's limit leaves: nothing where it has none."""
    names = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    found = []
    for limit_name, usage_name, cache_name in names:
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        found.append(limit - usage + _cache_bytes(group / "memory.stat", cache_name))
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _cache_bytes(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0

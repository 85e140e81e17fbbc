"""What a process and its children moved and took, by the kernel's own books."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class IoBytes:
    """Bytes since a process began.

    Attributes:
        read, written: that the drives gave and, for buffered files, are to take: the kernel books
            a buffered write when its page gets dirty.
        asked_read, asked_written: by read and write calls, whether a drive or the page cache
            answered; libaio's requests and mappings are not among them.
    """

    read: int = 0
    written: int = 0
    asked_read: int = 0
    asked_written: int = 0

    def __sub__(self, other: IoBytes) -> IoBytes:
        return IoBytes(
            self.read - other.read,
            self.written - other.written,
            self.asked_read - other.asked_read,
            self.asked_written - other.asked_written,
        )

    def __add__(self, other: IoBytes) -> IoBytes:
        return self - (IoBytes() - other)


def own_io() -> IoBytes | None:
    """What this process alone moved so far, or None where the kernel does not count it.

    Direct I/O is counted when it is submitted. GPUDirect Storage by nvidia-fs passes by.

    Raises:
        OSError: the counters are there and cannot be read.
    """
    try:
        return _parsed(Path("/proc/self/io").read_text())
    except FileNotFoundError:
        return None


def io_of_tree(pid: int | None = None, proc: Path = Path("/proc")) -> IoBytes:
    """What a process (by default this one) and its children moved so far.

    Children that it waited for count as well. Processes that end meanwhile, or that another user
    owns, count as nothing.
    """
    total = IoBytes()
    for each in tree(os.getpid() if pid is None else pid, proc):
        total = total + _io_of(proc / str(each) / "io")
    return total


def tree(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for path in proc.iterdir():
        if path.name.isdigit():
            try:
                # The name, in brackets, may hold spaces.
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            children.setdefault(parent, []).append(int(path.name))
    found = [pid]
    for each in found:  # grows while it is gone over
        found += children.get(each, [])
    return found


def peak_rss_bytes() -> int:
    """The most host memory that this process ever had at a time; page cache is not part of it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine_page_cache_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Page cache of the whole machine, whoever filled it."""
    found = {}
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        found[name] = int(value.split()[0]) * 1024
    return found["Cached"] - found.get("Shmem", 0)


def _io_of(path: Path) -> IoBytes:
    try:
        return _parsed(path.read_text())
    except OSError:
        return IoBytes()


def _parsed(text: str) -> IoBytes:
    lines = text.splitlines()
    values = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return IoBytes(
        values["read_bytes"],
        max(values["write_bytes"] - values["cancelled_write_bytes"], 0),
        values["rchar"],
        values["wchar"],
    )

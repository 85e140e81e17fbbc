"""What the kernel counts of this process's bytes, beside what the engine counts itself."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = Path("/proc/self/io")


def kernel_bytes() -> tuple[int, int] | None:
    """Bytes that this process had read from drives and written to them, or None without counters.

    Direct I/O is counted when it is submitted. What is in the page cache is not read, and what is
    written through it counts when it gets there. GPUDirect Storage by nvidia-fs passes by.

    Raises:
        OSError: the counters are there and cannot be read.
    """
    try:
        lines = _COUNTERS.read_text().splitlines()
    except FileNotFoundError:
        return None
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]), int(counts["write_bytes"])

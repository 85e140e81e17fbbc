"""Where a pass over the buckets spends its time and how many bytes it moves."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gds_optimizer.tracing import NO_TRACE, NoTrace

PHASES = ("read_wait", "compute", "write_wait", "other")


@dataclass(slots=True)
class PassStats:
    """One pass over the buckets: a step, an initialisation, a reload.

    The seconds of `phases_s` are exclusive and sum to `wall_s`: waiting for reads, computing
    (launching and awaiting kernels, checksums included), waiting for writes so that a slot gets
    free, and everything else.
    """

    io_path: str
    wall_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    buckets: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    """From and to files."""
    cached_buckets: int = 0
    """Buckets that were still in a slot from the pass before and needed no read."""
    host_read_bytes: int = 0
    host_written_bytes: int = 0
    """Copied from and to buckets that live in host memory; they are in no other count of bytes."""
    in_place_buckets: int = 0
    """Buckets stepped where they live: on the device, or without a GPU in host memory."""

    def describe(self) -> str:
        """One line for people: bytes, seconds, rate, path, and what was waited for."""
        moved = self.read_bytes + self.written_bytes
        rate = moved / self.wall_s / 1e9 if self.wall_s else 0.0
        waits = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases_s.items())
        return (
            f"{self.read_bytes / 1e9:.3f} GB read, {self.written_bytes / 1e9:.3f} GB written in "
            f"{self.wall_s:.3f} s ({rate:.2f} GB/s, {self.io_path}; {waits}{self._in_memory()})"
        )

    def _in_memory(self) -> str:
        text = ""
        if self.host_read_bytes or self.host_written_bytes:
            text += (
                f"; {self.host_read_bytes / 1e9:.3f} GB from and "
                f"{self.host_written_bytes / 1e9:.3f} GB to host memory"
            )
        if self.in_place_buckets:
            text += f"; {self.in_place_buckets} buckets were stepped where they live"
        return text


class PassClock:
    """Accumulates a `PassStats`: whatever no `phase` covers counts as "other"."""

    def __init__(self, io_path: str, trace: NoTrace = NO_TRACE) -> None:
        self.stats = PassStats(io_path)
        self.trace = trace
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the time inside to `name`. Phases must not nest."""
        start = time.perf_counter()
        try:
            if name.endswith("_wait"):
                with self.trace.span("wait", name):
                    yield
            else:
                yield
        finally:
            self.stats.phases_s[name] += time.perf_counter() - start

    def finish(self) -> PassStats:
        """Close the books: sets wall time and the remainder."""
        stats = self.stats
        stats.wall_s = time.perf_counter() - self._start
        covered = sum(stats.phases_s[name] for name in PHASES if name != "other")
        stats.phases_s["other"] = stats.wall_s - covered
        return stats


def show_log() -> None:
    """Let this package's setup lines be seen where the application has not said otherwise.

    Which path bytes take must not hide behind Python's default of showing warnings only.
    """
    package = logging.getLogger("gds_optimizer")
    if package.level == logging.NOTSET and package.getEffectiveLevel() > logging.INFO:
        package.setLevel(logging.INFO)
        if not package.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
            package.addHandler(handler)

"""What was chosen at setup, and from which measurements: for a log line, a report, JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gds_optimizer.io import IoPath
from gds_optimizer.probing.report import PathTiming
from gds_optimizer.tuning_measure import Measurement, Point


@dataclass(frozen=True, slots=True)
class DriveTiming:
    """What one drive gives by one path."""

    directory: Path
    io_path: IoPath
    measurement: Measurement
    is_cached: bool


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was chosen, and from what.

    Attributes:
        io_path: the path that bytes take.
        point: requests in flight and bytes of each.
        timings: of every drive by every path that was timed; empty where nothing was.
        why_not: why nothing was timed, in words; empty otherwise.
        seconds: that it took, waiting for other ranks included.
    """

    io_path: IoPath
    point: Point
    timings: tuple[DriveTiming, ...] = ()
    why_not: str = ""
    seconds: float = 0.0

    @property
    def own(self) -> tuple[DriveTiming, ...]:
        """Those of the path that was taken, one for each drive."""
        return tuple(each for each in self.timings if each.io_path is self.io_path)

    @property
    def mixed(self) -> float:
        """Bytes a second that all drives give, reading and writing at once; 0 if not timed."""
        return sum(each.measurement.mixed for each in self.own)

    @property
    def is_half_duplex(self) -> bool | None:
        """Whether every drive is; None where nothing was timed."""
        return all(each.measurement.is_half_duplex for each in self.own) if self.own else None

    def rates_by_device(self) -> dict[int, float]:
        """Mixed rate of each drive by its number (`st_dev`), by the path that was taken."""
        return {os.stat(each.directory).st_dev: each.measurement.mixed for each in self.own}

    def path_timings(self) -> tuple[PathTiming, ...]:
        """What was timed, as a probe reports it."""
        return tuple(
            PathTiming(
                directory=each.directory,
                io_path=each.io_path,
                read_bytes_per_s=each.measurement.read,
                write_bytes_per_s=each.measurement.write,
                mixed_bytes_per_s=each.measurement.mixed,
                half_duplex=each.measurement.is_half_duplex,
                threads=each.measurement.best.threads,
                task_bytes=each.measurement.best.task_bytes,
                cached=each.is_cached,
            )
            for each in self.timings
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data: what was chosen, `why_not` anything was timed, and what was."""
        return {
            "io_path": self.io_path.value,
            "threads": self.point.threads,
            "task_bytes": self.point.task_bytes,
            "half_duplex": self.is_half_duplex,
            "why_not": self.why_not,
            "timings": [each.to_dict() for each in self.path_timings()],
        }

    def describe(self) -> str:
        """In one line: path, figures, threads, size of tasks, duplex, where from, how long."""
        threads, task_bytes = self.point
        parts = [f"{threads} threads", f"tasks of {task_bytes / 2**20:g} MiB"]
        if not self.timings:
            return f"io path {self.io_path}, {', '.join(parts)}; not timed: {self.why_not}"
        figures = [
            f"{path} {rate / 1e9:.2f} GB/s" for path, rate in path_rates(self.timings).items()
        ]
        own = [each.measurement for each in self.own]
        duplex = "half-duplex" if self.is_half_duplex else "not half-duplex"
        alone = (
            f"{duplex} (read {sum(m.read for m in own) / 1e9:.2f}, "
            f"write {sum(m.write for m in own) / 1e9:.2f} GB/s alone)"
        )
        cached = sum(each.is_cached for each in self.timings)
        source = "measured" if not cached else "from the cache"
        if 0 < cached < len(self.timings):
            source = "partly from the cache"
        return (
            f"io path {self.io_path} (read and written at once: {', '.join(figures)}), "
            f"{', '.join(parts)}, {alone}; {source} in {self.seconds:.1f} s"
        )


def path_rates(timings: Sequence[DriveTiming]) -> dict[IoPath, float]:
    """Mixed rate of each path over all drives, bytes a second."""
    rates: dict[IoPath, float] = {}
    for each in timings:
        rates[each.io_path] = rates.get(each.io_path, 0.0) + each.measurement.mixed
    return rates

"""How fast a drive is by one I/O path, for several numbers of threads and sizes of tasks.

Scope: one measurement of a few seconds, on the backend that steps will use, with the transfers of
a step: some in flight, each of which is read and then written. Anti-scope: what is made of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gds_optimizer.duplex import is_half_duplex
from gds_optimizer.errors import GdsOptimizerError
from gds_optimizer.io import PAGE_BYTES, BucketFile, IoBackend, Transfer
from gds_optimizer.slots import SlotPool

LIMIT_S = 5.0
"""After so many seconds nothing new is begun; what is in flight may end."""
TRANSFERS = 6
"""In flight, and parts of the scratch file."""
TRANSFER_BYTES = 64 * 2**20
NOTICEABLE = 1.1
"""What a point must beat the first one by, since two measurements of one drive differ."""
MOST_RATE = 1e14
"""Bytes a second, more than any drive moves."""
MEASURING_FAILED = (OSError, MemoryError, RuntimeError, GdsOptimizerError)
"""What a measurement raises that goes wrong; torch raises a RuntimeError for a device."""

_POINT_S = 0.2
_GRID_SHARE = 0.6
_TIMEOUT_S = 30.0
_POLL_S = 0.0002
_MOST_S = 3600.0
_PREFIX = ".gds-optimizer-tuning-"
_LATENCY_TRIES = 7


class TuningError(GdsOptimizerError):
    """A drive could not be measured."""


class Point(NamedTuple):
    """What is tried: requests in flight, and bytes of each."""

    threads: int
    task_bytes: int


MakeBackend = Callable[[Point], IoBackend]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a drive gives by one path; rates are bytes a second.

    Attributes:
        points: the rate of reading and writing at once, both counted, for each point tried.
        best: the first point, or one that is noticeably faster.
        read, write, mixed: at that point, one kind alone and both at once.
        round_trip_s: a page written and read back, one after the other: what a transfer costs
            however small it is.
        seconds: that measuring took.
    """

    points: dict[Point, float]
    best: Point
    read: float
    write: float
    mixed: float
    round_trip_s: float
    seconds: float

    @property
    def is_half_duplex(self) -> bool:
        """Whether both at once are hardly faster than one after the other: see `duplex`."""
        return is_half_duplex(self.read, self.write, self.mixed)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, for `from_dict`."""
        points = [[*point, rate] for point, rate in self.points.items()]
        return {**asdict(self), "points": points, "best": list(self.best)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Measurement | None:
        """None if that is not what it is made from: whoever reads a cache must expect anything."""
        try:
            points = {Point(int(t), int(size)): float(rate) for t, size, rate in data["points"]}
            numbers = {
                name: float(data[name])
                for name in ("read", "write", "mixed", "round_trip_s", "seconds")
            }
            best = Point(*map(int, data["best"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        rates = [*points.values(), *(numbers[name] for name in ("read", "write", "mixed"))]
        durations = [numbers["round_trip_s"], numbers["seconds"]]
        if best not in points or not all(1 <= rate <= MOST_RATE for rate in rates):
            return None
        if not all(0 < each <= _MOST_S for each in durations):
            return None
        return cls(points=points, best=best, **numbers)


def best_point(rates: dict[Point, float]) -> Point:
    """The first point, unless another one is noticeably faster."""
    first = next(iter(rates))
    best = max(rates, key=lambda point: rates[point])
    return best if rates[best] > NOTICEABLE * rates[first] else first


def measure_path(
    directory: Path,
    make: MakeBackend,
    points: Sequence[Point],
    *,
    memory_bytes: int = TRANSFERS * TRANSFER_BYTES,
    limit_s: float = LIMIT_S,
) -> Measurement:
    """Measure a drive by one path.

    It writes a scratch file of 384 MiB, moves its parts back and forth for each point, and again
    for the best ones, as long as there is time, then reads, writes, and does both at the best one.
    A point that the time did not suffice for is not among those of the result.

    Args:
        directory: an existing one on the drive; nothing stays in it.
        make: the backend of a point; it is closed again.
        points: what to try, the default first; at least one.
        memory_bytes: most bytes that buffers may take where the backend wants them; fewer than
            384 MiB make the file smaller.
        limit_s: after so many seconds nothing new is begun.

    Raises:
        TuningError: the drive is too slow to be measured in that time.
        OSError: the file cannot be made (too little room).
        GdsOptimizerError: a transfer failed, or a backend or the memory is not to be had.
    """
    began = time.perf_counter()
    size = min(TRANSFER_BYTES, memory_bytes // TRANSFERS) // PAGE_BYTES * PAGE_BYTES
    size = max(size, PAGE_BYTES)

    def used(share: float = 1.0) -> bool:
        return time.perf_counter() - began > share * limit_s

    with contextlib.ExitStack() as stack:
        path = stack.enter_context(scratch_file(directory, TRANSFERS * size))
        holder = make(points[0])  # cuFile's registration of buffers holds for all of a process
        stack.callback(holder.close)
        pool = SlotPool(TRANSFERS, size, holder)
        stack.callback(pool.close)
        buffers = [slot.buffer for slot in pool.slots]
        _fill(buffers)
        with opened(holder, path) as file:
            for number, buffer in enumerate(buffers):  # fresh blocks are slower, and only once
                file.write(buffer, number * size).wait(_TIMEOUT_S)
                if used():
                    raise TuningError(
                        f"{directory} is too slow to be measured: writing "
                        f"{(number + 1) * size} bytes took {time.perf_counter() - began:.1f} s"
                    )
        rates: dict[Point, float] = {}

        def try_point(point: Point) -> None:
            with contextlib.closing(make(point)) as backend, opened(backend, path) as file:
                _rate(file, buffers, "mixed", 0.0)  # threads start, memory is pinned
                rate = _rate(file, buffers, "mixed", _POINT_S)
                rates[point] = max(rate, rates.get(point, 0.0))

        for point in points:
            if not rates or not used(_GRID_SHARE):
                try_point(point)
        if len(rates) > 1:  # what was lucky once has to be so again
            for point in (points[0], max(rates, key=lambda each: rates[each])):
                if not used(_GRID_SHARE):
                    try_point(point)
        best = best_point(rates)
        with contextlib.closing(make(best)) as backend, opened(backend, path) as file:
            found = dict.fromkeys(("read", "write", "mixed"), 0.0)
            _rate(file, buffers, "mixed", 0.0)
            for _ in range(3):  # in turn, since a drive has good and bad moments
                for kind in found:
                    found[kind] = max(found[kind], _rate(file, buffers, kind, _POINT_S))
                if used():
                    break
            round_trip_s = _round_trip_s(file, buffers[0][:PAGE_BYTES])
    return Measurement(
        points=rates,
        best=best,
        round_trip_s=round_trip_s,
        seconds=time.perf_counter() - began,
        **found,
    )


@contextlib.contextmanager
def scratch_file(directory: Path, nbytes: int) -> Iterator[Path]:
    """A file whose blocks are allocated; what a killed process has left goes as well."""
    for old in directory.glob(f"{_PREFIX}*.bin"):
        with contextlib.suppress(OSError):
            fd = os.open(old, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the living hold theirs
                old.unlink()
            finally:
                os.close(fd)
    path = directory / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}.bin"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, nbytes)
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


@contextlib.contextmanager
def opened(backend: IoBackend, path: Path) -> Iterator[BucketFile]:
    """A file that is closed again, and not before transfers of it have ended."""
    file = backend.open(path)
    try:
        yield file
    finally:
        file.quiesce(_TIMEOUT_S)
        with contextlib.suppress(RuntimeError):  # what does not end is on its way up already
            file.close()


def _fill(buffers: Sequence[torch.Tensor]) -> None:
    """Bytes that no drive can compress or leave out."""
    block = torch.frombuffer(bytearray(os.urandom(2**20)), dtype=torch.uint8)
    block = block.to(buffers[0].device)
    for buffer in buffers:
        for start in range(0, buffer.numel(), block.numel()):
            part = buffer[start : start + block.numel()]
            part.copy_(block[: part.numel()])
    if block.device.type == "cuda":
        torch.cuda.synchronize(block.device)


def _rate(file: BucketFile, buffers: Sequence[torch.Tensor], kind: str, at_least_s: float) -> float:
    """Bytes a second with one transfer of each buffer in flight, each followed by the next.

    Mixed, every buffer is read and written in turn, half of them beginning with either.
    """
    size = buffers[0].numel()
    is_read = [kind == "read" or (kind == "mixed" and i % 2 == 0) for i in range(len(buffers))]

    def start(i: int) -> Transfer:
        move = file.read if is_read[i] else file.write
        is_read[i] ^= kind == "mixed"
        return move(buffers[i], i * size)

    began, moved = time.perf_counter(), 0
    in_flight = {i: start(i) for i in range(len(buffers))}
    while in_flight:
        elapsed_s = time.perf_counter() - began
        ended = [i for i, transfer in in_flight.items() if transfer.done()]
        for i in ended:
            in_flight.pop(i).wait(_TIMEOUT_S)
            moved += size
            if elapsed_s < at_least_s:
                in_flight[i] = start(i)
        if not ended:
            if elapsed_s > at_least_s + _TIMEOUT_S:
                next(iter(in_flight.values())).wait(0.0)  # raises what is the matter
            time.sleep(_POLL_S)
    return moved / (time.perf_counter() - began)


def _round_trip_s(file: BucketFile, page: torch.Tensor) -> float:
    tries = []
    for _ in range(_LATENCY_TRIES):
        began = time.perf_counter()
        file.write(page, 0).wait(_TIMEOUT_S)
        file.read(page, 0).wait(_TIMEOUT_S)
        tries.append(time.perf_counter() - began)
    return sorted(tries)[_LATENCY_TRIES // 2]

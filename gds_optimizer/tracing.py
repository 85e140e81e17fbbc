"""A timeline of the passes of a run, as Chrome and Perfetto read it.

The file is an array of JSON trace events: one process for each rank, one thread for each lane. It
is written through after every pass, and an array without its end is read too, so a run that is
killed leaves what it had done. It ends before `LIMIT_BYTES`: the passes after that are left out.

What a span means:

- `read`, `write`: from the submission of a bucket's transfers to when their end was observed. They
  are looked at in every turn of the control loop, between the parts of a visit, and every
  `POLL_S` while the loop waits; `seen_in_flight_ms_before_end` in a span's arguments says how long
  before its end the transfer was last seen in flight, which is what its end is good for.
- `decode`, `compute`, `write back`: parts of a visit. On a GPU, times of CUDA events on the compute
  stream, brought to the host's clock by one event a pass; on the CPU, the host's time.
- `wait`: the control loop waits for a read, or for a write whose slot it needs.
- `pass`: a step, an initialisation, a reload.

On a GPU the spans are NVTX ranges too, for Nsight Systems, and stay so when the file is full. There
the ranges of a visit's parts cover launching, not running: Nsight shows the kernels below them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.io.base import Transfer

LANES = ("pass", "wait", "read", "decode", "compute", "write back", "write")
LIMIT_BYTES = 64 * 2**20
POLL_S = 0.0005
_FLUSH_EVENTS = 512
_ROWS = 100
"""Thread numbers of a lane: spans that overlap get rows of their own."""

_NOTHING: AbstractContextManager[None] = nullcontext()


class NoTrace:
    """What is called where nobody wants a timeline; every call does nothing."""

    is_on = False

    def begin_pass(self, what: str) -> None:
        """A pass begins."""

    def end_pass(self, arguments: dict[str, Any]) -> None:
        """It has ended, well or not."""

    def span(self, lane: str, name: str) -> AbstractContextManager[None]:
        """The time inside, by the host's clock."""
        return _NOTHING

    def visit_span(self, lane: str, bucket: int) -> AbstractContextManager[None]:
        """The time inside, by the device's clock where there is one."""
        return _NOTHING

    def started(
        self, lane: str, bucket: int, transfers: Sequence[Transfer], nbytes: int, start_s: float
    ) -> None:
        """Transfers of a bucket are in flight, since `start_s` of `time.perf_counter`."""

    def poll(self) -> None:
        """Look which transfers have ended."""

    def wait(self, transfer: Transfer, limit_s: float) -> float:
        """Look again and again, until this one has ended or `limit_s` seconds have passed.

        Returns:
            The seconds that are left of them.
        """
        return limit_s

    def close(self) -> None:
        """Write what is missing; nothing is recorded after."""


NO_TRACE = NoTrace()


class _InFlight:
    __slots__ = ("begin_s", "bucket", "lane", "nbytes", "nvtx", "row", "seen_s", "transfers")

    def __init__(
        self,
        lane: str,
        row: int,
        bucket: int,
        transfers: Sequence[Transfer],
        nbytes: int,
        start_s: float,
        nvtx: int | None,
    ) -> None:
        self.lane, self.row, self.bucket = lane, row, bucket
        self.transfers, self.nbytes = list(transfers), nbytes
        self.begin_s = self.seen_s = start_s
        self.nvtx = nvtx


class Tracer(NoTrace):
    """Records to a file.

    Args:
        path: of the file; what is there is replaced.
        rank: process number in the timeline.
        device: of the compute stream.
        limit_bytes: the file is never longer.

    Raises:
        OSError: the file cannot be made.
    """

    is_on = True

    def __init__(
        self, path: Path, *, rank: int, device: torch.device, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.path = path
        self._rank = rank
        self._device = device
        self._limit_bytes = limit_bytes
        self._pid = os.getpid()
        self._is_cuda = device.type == "cuda"
        # Spans of all ranks share a time axis: this clock's zero is the epoch on every machine.
        self._epoch_s = time.time() - time.perf_counter()
        self._in_flight: list[_InFlight] = []
        self._rows: set[tuple[str, int]] = set()
        self._device_spans: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._pass: tuple[str, float] | None = None
        self._anchor: tuple[torch.cuda.Event, float] | None = None
        self._anchor_stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._events: list[str] = []
        self._nbytes = 0
        self._is_full = False
        self._fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        self._metadata("process_name", 0, name=f"rank {rank} ({device})")
        for number, lane in enumerate(LANES):
            for row in range(2 if lane in ("read", "write") else 1):
                self._name_row(number, lane, row)

    # ------------------------------------------------------------------ what is recorded

    def begin_pass(self, what: str) -> None:
        self.poll()
        self._pass = what, time.perf_counter()
        if self._anchor_stream is not None and not self._is_full:
            # On an idle stream, so that it does not wait for the gradients, as compute does.
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._anchor_stream)
            event.synchronize()
            self._anchor = event, time.perf_counter()
        if self._is_cuda:
            torch.cuda.nvtx.range_push(what)

    def end_pass(self, arguments: dict[str, Any]) -> None:
        self.poll()
        if self._pass is None:
            return
        (what, begin_s), self._pass = self._pass, None
        if self._is_cuda:
            torch.cuda.nvtx.range_pop()
        self._take_device_spans()
        self._complete("pass", 0, what, begin_s, time.perf_counter(), arguments)
        self._write_through()

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        begin_s = time.perf_counter()
        if self._is_cuda:
            torch.cuda.nvtx.range_push(f"{lane}: {name}")
        try:
            yield
        finally:
            if self._is_cuda:
                torch.cuda.nvtx.range_pop()
            self._complete(lane, 0, name, begin_s, time.perf_counter(), {})

    @contextmanager
    def visit_span(self, lane: str, bucket: int) -> Iterator[None]:
        self.poll()
        if not self._is_cuda or self._is_full:
            with self.span(lane, f"bucket {bucket}"):
                yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.nvtx.range_push(f"{lane}: bucket {bucket}")
        begin.record(torch.cuda.current_stream(self._device))
        try:
            yield
        finally:
            end.record(torch.cuda.current_stream(self._device))
            torch.cuda.nvtx.range_pop()
            self._device_spans.append((lane, bucket, begin, end))

    def started(
        self, lane: str, bucket: int, transfers: Sequence[Transfer], nbytes: int, start_s: float
    ) -> None:
        if not transfers:
            return
        row = next(row for row in range(_ROWS) if (lane, row) not in self._rows)
        self._rows.add((lane, row))
        nvtx = torch.cuda.nvtx.range_start(f"{lane}: bucket {bucket}") if self._is_cuda else None
        self._in_flight.append(_InFlight(lane, row, bucket, transfers, nbytes, start_s, nvtx))

    def poll(self) -> None:
        still = []
        for each in self._in_flight:
            # In this order: what is done at a later time was in flight at this one.
            now_s = time.perf_counter()
            if not all(transfer.done() for transfer in each.transfers):
                each.seen_s = now_s
                still.append(each)
                continue
            now_s = time.perf_counter()
            self._rows.discard((each.lane, each.row))
            if each.nvtx is not None:
                torch.cuda.nvtx.range_end(each.nvtx)
            arguments = {
                "bucket": each.bucket,
                "bytes": each.nbytes,
                "seen_in_flight_ms_before_end": round((now_s - each.seen_s) * 1e3, 3),
            }
            self._complete(
                each.lane, each.row, f"bucket {each.bucket}", each.begin_s, now_s, arguments
            )
        self._in_flight = still

    def wait(self, transfer: Transfer, limit_s: float) -> float:
        deadline_s = time.monotonic() + limit_s
        self.poll()
        while not transfer.done() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            self.poll()
        self.poll()
        return max(deadline_s - time.monotonic(), 0.0)

    def close(self) -> None:
        if self._fd < 0:
            return
        if os.getpid() == self._pid:  # a forked child has its parent's descriptor
            self.poll()
            self._write_through()
            self._write(b"\n]\n")
        os.close(self._fd)
        self._fd = -1

    # ------------------------------------------------------------------ events and the file

    def _take_device_spans(self) -> None:
        spans, self._device_spans = self._device_spans, []
        if not spans or self._anchor is None:
            return
        anchor, anchor_s = self._anchor
        for lane, bucket, begin, end in spans:
            end.synchronize()
            begin_s = anchor_s + anchor.elapsed_time(begin) / 1e3
            end_s = anchor_s + anchor.elapsed_time(end) / 1e3
            self._complete(lane, 0, f"bucket {bucket}", begin_s, end_s, {"bucket": bucket})

    def _complete(
        self,
        lane: str,
        row: int,
        name: str,
        begin_s: float,
        end_s: float,
        arguments: dict[str, Any],
    ) -> None:
        number = LANES.index(lane)
        if row > 1:
            self._name_row(number, lane, row)
        self._add(
            {
                "ph": "X",
                "name": name,
                "cat": lane,
                "pid": self._rank,
                "tid": number * _ROWS + row,
                "ts": round((begin_s + self._epoch_s) * 1e6, 1),
                "dur": round((end_s - begin_s) * 1e6, 1),
                "args": arguments,
            }
        )

    def _name_row(self, number: int, lane: str, row: int) -> None:
        thread = number * _ROWS + row
        self._metadata("thread_name", thread, name=f"{lane} ({row + 1})" if row else lane)
        self._metadata("thread_sort_index", thread, sort_index=thread)

    def _metadata(self, kind: str, thread: int, **arguments: Any) -> None:
        self._add({"ph": "M", "name": kind, "pid": self._rank, "tid": thread, "args": arguments})

    def _add(self, event: dict[str, Any]) -> None:
        if self._fd < 0 or self._is_full:
            return
        self._events.append(json.dumps(event, separators=(",", ":")))
        if len(self._events) >= _FLUSH_EVENTS:
            self._write_through()

    def _write_through(self) -> None:
        """Give the events to the system, which keeps them when this process is killed."""
        if self._fd < 0 or not self._events or os.getpid() != self._pid:
            return
        text = ("[\n" if not self._nbytes else ",\n") + ",\n".join(self._events)
        self._events = []
        data = text.encode()
        if self._nbytes + len(data) + 16 > self._limit_bytes:
            self._is_full = True
            return
        self._write(data)

    def _write(self, data: bytes) -> None:
        try:
            self._nbytes += os.write(self._fd, data)
        except OSError:
            # A full disk must not end a training run; the file ends here.
            self._is_full = True


def trace_path(path: Path, rank: int) -> Path:
    """The file of this rank: `{rank}` is replaced, else the rank is put in before the suffix.

    A process that is alone, without or with `torch.distributed`, writes the file as it is named.
    """
    if "{rank}" in path.name:
        return path.with_name(path.name.replace("{rank}", f"{rank:05d}"))
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return path
    if distributed.get_world_size() == 1:
        return path
    return path.with_name(f"{path.stem}.rank{rank:05d}{path.suffix}")

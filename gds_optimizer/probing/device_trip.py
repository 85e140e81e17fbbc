"""The round trip of device memory, in the probe's child: KvikIO, cupy and libcufile alone.

Run as `__main__`'s helper by `child`; it sets process-wide KvikIO defaults and opens cuFile, so
it is for a process that ends afterwards.
"""

from __future__ import annotations

import os
from typing import Any

import numpy

from gds_optimizer.probing.cufile_stats import library_version, operations_by_path
from gds_optimizer.probing.scratch import scratch

TRIP_BYTES = 8 << 20
TASK_BYTES = 2 << 20


def run(request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Write a random pattern from one device buffer, read it into another, compare.

    `mode` is "posix" (KvikIO copies and does the I/O), "gds" or "gds-compat" (cuFile does both;
    its configuration, chosen by the parent, says whether it may fall back). Adds to `answer`:
    `backends` (KvikIO's bytes by back end) and, for cuFile, `operations` by real path (absent
    where this libcufile does not count) and `libcufile_version`.

    Raises:
        OSError, RuntimeError, ImportError: the trip failed; the message says where.
    """
    import cupy
    import kvikio
    import kvikio.defaults

    uses_cufile = request["mode"] != "posix"
    kvikio.defaults.set(
        {
            "compat_mode": kvikio.CompatMode.OFF if uses_cufile else kvikio.CompatMode.ON,
            "num_threads": 4,
            "task_size": TASK_BYTES,
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
        }
    )
    pattern = os.urandom(TRIP_BYTES)
    with cupy.cuda.Device(int(request["device"])), scratch(request["file"], TRIP_BYTES, answer):
        source, target = _device_buffer(cupy), _device_buffer(cupy)
        source.set(numpy.frombuffer(pattern, dtype=numpy.uint8))
        cupy.cuda.runtime.deviceSynchronize()
        if uses_cufile:
            kvikio.memory_register(source)
            kvikio.memory_register(target)
        monitor = _start_monitor(kvikio)
        with kvikio.CuFile(request["file"], "r+") as file:
            before = operations_by_path() if uses_cufile else None
            _check_count("write", file.pwrite(source, TRIP_BYTES, 0).get())
            _check_count("read", file.pread(target, TRIP_BYTES, 0).get())
            after = operations_by_path() if uses_cufile else None
            answer["libcufile_version"] = library_version() if uses_cufile else None
        _report(answer, monitor, before, after)
        if uses_cufile:
            kvikio.memory_deregister(source)
            kvikio.memory_deregister(target)
        if target.get().tobytes() != pattern:
            raise RuntimeError("the bytes that came back are not those that were written")
        with open(request["file"], "rb") as plain:
            if plain.read() != pattern:
                raise RuntimeError("the file does not hold the bytes that were written")


def _device_buffer(cupy: Any) -> Any:
    """An allocation of its own (cudaMalloc), zeroed: registration is of whole allocations."""
    memory = cupy.cuda.Memory(TRIP_BYTES)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    pointer.memset(0, TRIP_BYTES)
    return cupy.ndarray((TRIP_BYTES,), dtype=cupy.uint8, memptr=pointer)


def _start_monitor(kvikio: Any) -> Any:
    """KvikIO's own account of bytes by back end; None where this version has none."""
    if not hasattr(kvikio, "SummaryMonitor"):
        return None
    return kvikio.SummaryMonitor()


def _report(
    answer: dict[str, Any],
    monitor: Any,
    before: dict[str, int] | None,
    after: dict[str, int] | None,
) -> None:
    if monitor is not None:
        answer["backends"] = {
            name: totals["bytes_transferred"] for name, totals in monitor.get().by_backend.items()
        }
    if before is not None and after is not None:
        answer["operations"] = {path: after[path] - before[path] for path in after}


def _check_count(what: str, moved: int) -> None:
    if moved != TRIP_BYTES:
        raise RuntimeError(f"a {what} moved {moved} of {TRIP_BYTES} bytes")

"""How fast a machine moves a step's bytes: given, read from a benchmark, or measured.

What is not known stays unknown: no rate is made up for a drive or a bus.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.config import StreamConfig
from gds_optimizer.drive_speeds import each_drive, measure_mixed_rate, several_drives
from gds_optimizer.errors import ConfigError
from gds_optimizer.io import CopyStreams, make_backend
from gds_optimizer.io.memory import HostBuffer
from gds_optimizer.probe import decide_io_path

_COPIED_BYTES = 128 * 2**20
_COPIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one machine gives, in 10⁹ bytes a second; None where it is not known.

    Attributes:
        read_gbps, write_gbps: its drives, one kind alone.
        mixed_gbps: its drives, as many bytes read as written at the same time, both counted.
        copy_gbps: one device and pinned host memory, both directions at the same time, both
            counted, while the other devices do the same.
        ratio_to_limit: how many times as long as the drives' rates say a step was measured to take.

    Raises:
        ConfigError: one of them is not more than 0.
    """

    read_gbps: float | None = None
    write_gbps: float | None = None
    mixed_gbps: float | None = None
    copy_gbps: float | None = None
    ratio_to_limit: float = 1.0

    def __post_init__(self) -> None:
        for name in ("read_gbps", "write_gbps", "mixed_gbps", "copy_gbps", "ratio_to_limit"):
            value: Any = getattr(self, name)
            if value is None and name != "ratio_to_limit":
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value <= sys.float_info.max:
                raise ConfigError(f"{name} is {value!r}, wanted a number of more than 0")

    @classmethod
    def from_bench(cls, path: Path) -> Rates:
        """What `gds-optimizer bench --json` printed into a file.

        Raises:
            ConfigError: it did not, or the file cannot be read.
        """
        try:
            found = json.loads(Path(path).read_bytes())
            if isinstance(found, dict) and "paths" in found:
                raise ConfigError(
                    f"it has several I/O paths ({', '.join(found['paths'])}), wanted one: repeat "
                    "the benchmark with the --io that the run will take"
                )
            limit = found["limit"]
            return cls(
                read_gbps=limit["read_gbps"],
                write_gbps=limit["write_gbps"],
                mixed_gbps=limit["mixed_gbps"],
                ratio_to_limit=found["ratio_to_limit"],
            )
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path} is not what `gds-optimizer bench --json` prints ({error!r}): name a file "
                "with its output"
            ) from error

    def step_s(
        self, read_bytes: int, written_bytes: int, copied_bytes: int = 0
    ) -> tuple[float, float] | None:
        """Least and most seconds that a step's bytes take; None where that is not known.

        From the mixed rate both are the same. Without it, reading and writing are somewhere
        between going on beside and after one another; so are copies and the drives.

        Args:
            read_bytes, written_bytes: of the machine's drives.
            copied_bytes: between one device and host memory, both directions counted.
        """
        drives = self._drives_s(read_bytes, written_bytes)
        if copied_bytes and self.copy_gbps is None:
            return None
        copies = copied_bytes / self.copy_gbps / 1e9 if copied_bytes and self.copy_gbps else 0.0
        return drives and (max(drives[0], copies), drives[1] + copies)

    def _drives_s(self, read_bytes: int, written_bytes: int) -> tuple[float, float] | None:
        if not read_bytes and not written_bytes:
            return 0.0, 0.0
        if self.mixed_gbps is not None:
            seconds = (read_bytes + written_bytes) / self.mixed_gbps / 1e9 * self.ratio_to_limit
            return seconds, seconds
        if self.read_gbps is None or self.write_gbps is None:
            return None
        alone = read_bytes / self.read_gbps / 1e9, written_bytes / self.write_gbps / 1e9
        return max(alone) * self.ratio_to_limit, sum(alone) * self.ratio_to_limit


def measure_rates(config: StreamConfig, device: torch.device) -> Rates:
    """Measure what the drives of the directories give, and the way to host memory on a GPU.

    Drives one after the other, added up; those that several directories are on, once. It takes a
    second or so for each drive, and writes a scratch file of 128 MiB there that does not stay.

    Args:
        config: directories, path, threads and task size.
        device: where buckets would be.

    Raises:
        ConfigError: a directory has no room for the file.
        GdsOptimizerError: there is no I/O path, or a transfer failed.
    """
    report = decide_io_path(config, device)
    total = 0.0
    with contextlib.closing(
        make_backend(
            report.io_path,
            device=device,
            threads=config.io_threads,
            task_size_bytes=config.io_task_size,
            queue_per_drive=several_drives(config.directories),
        )
    ) as backend:
        for directory in each_drive(config.directories):
            try:
                total += measure_mixed_rate(directory, backend)
            except OSError as error:
                raise ConfigError(
                    f"the drive of {directory} cannot be measured ({error.strerror}): it takes "
                    "128 MiB of room there; or give its rate"
                ) from error
    copied = measure_copy_rate(device) if device.type == "cuda" else None
    return Rates(mixed_gbps=total / 1e9, copy_gbps=copied)


def measure_copy_rate(device: torch.device) -> float:
    """10⁹ bytes a second between a GPU and pinned host memory, both directions at once, counted.

    Of this GPU alone: several of a machine may get less each.

    Raises:
        ConfigError: the host memory is not to be had.
    """
    streams = CopyStreams(device)
    with contextlib.ExitStack() as undo:
        try:
            buffers = [HostBuffer(_COPIED_BYTES, device) for _ in range(2)]
        except MemoryError as error:
            raise ConfigError(f"copies cannot be measured: {error}") from error
        for buffer in buffers:
            undo.callback(buffer.close)
        there, back = (
            torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
        )

        def copy() -> None:
            with torch.cuda.stream(streams.to_device):
                there.copy_(buffers[0].tensor, non_blocking=True)
            with torch.cuda.stream(streams.to_host):
                buffers[1].tensor.copy_(back, non_blocking=True)

        seconds = _seconds_of(copy, _COPIES, lambda: torch.cuda.synchronize(device))
    return 2 * _COPIED_BYTES * _COPIES / seconds / 1e9


def _seconds_of(what: Callable[[], None], count: int, wait: Callable[[], None]) -> float:
    what()
    wait()
    began = time.perf_counter()
    for _ in range(count):
        what()
    wait()
    return time.perf_counter() - began

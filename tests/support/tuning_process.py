"""A rank that tunes at setup: `python -m tests.support.tuning_process DIRECTORY [hang]`.

Prints whether it measured or remembered; with `hang` it never ends its measurement, and says so.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from gds_optimizer import tuning
from gds_optimizer.config import StreamConfig
from gds_optimizer.drive_speeds import MIN_STATE_BYTES
from gds_optimizer.io import DirectBackend, IoBackend, IoPath
from gds_optimizer.probing.report import DirectoryReport, MachineReport, ProbeReport
from gds_optimizer.tuning_measure import Point

BUCKET_BYTES = 2**21


def report_of(*proven: IoPath, directories: tuple[Path, ...]) -> ProbeReport:
    """What a probe says that has proven these paths everywhere."""
    return ProbeReport(
        asked="auto",
        verdict=proven[0],
        refusal="",
        machine=MachineReport(),
        directories=tuple(
            DirectoryReport(path=each, io_path=proven[0], proven=proven) for each in directories
        ),
    )


def main() -> None:
    directory = Path(sys.argv[1])

    def make(io_path: IoPath, point: Point) -> IoBackend:
        if "hang" in sys.argv:
            print("hanging", flush=True)
            time.sleep(600)
        return DirectBackend(point.threads, point.task_bytes)

    config = StreamConfig(directories=(directory,), bucket_size=BUCKET_BYTES)
    report = report_of(IoPath.HOST, directories=(directory,))
    cpu = torch.device("cpu")
    result = tuning.tune(config, report, cpu, MIN_STATE_BYTES, make=make)
    print(["measured", "remembered"][result.timings[0].is_cached], result.point)


if __name__ == "__main__":
    main()

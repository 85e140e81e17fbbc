"""Does the first writing run at the drives' rate? `python -m gds_optimizer.bench.initialization`.

Rounds of two things that write as many bytes to newly allocated files: the engine's initialisation,
and a plain loop with requests of the same size. The order alternates, and both sides of the ratio
are medians over the rounds, since a drive's rate may move by a fifth from one second to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from gds_optimizer.bench.arguments import module_parser, stream_config
from gds_optimizer.bench.limit import FIRST_WRITE, LimitFiles
from gds_optimizer.bench.steps import (
    check_room_for_files,
    device_named,
    synthetic_optimizer,
    timed,
)
from gds_optimizer.command import count, exit_status
from gds_optimizer.config import StreamConfig
from gds_optimizer.runtime import Part, Runtime


def run_initialization_bench(
    config: StreamConfig, *, numel: int, rounds: int, device: torch.device
) -> dict[str, Any]:
    """Time both in turn.

    Args:
        config: directories, path, slots and so on.
        numel: parameters: 4 bytes each are written, and room for 16 is needed.
        rounds: how often.
        device: where parameters and slots are.

    Returns:
        Seconds and rates (10⁹ bytes a second) of every round, and `ratio`: the median time of the
        initialisation, until everything is on the drives, over that of the loop for as many bytes.

    Raises:
        GdsOptimizerError: setting up, or what is timed, failed.
    """
    check_room_for_files(config.directories, 16 * numel)
    ours: list[float] = []  # seconds a byte, since the two need not write exactly the same
    plain: list[float] = []
    written_bytes = 0
    io_path = ""

    def initialize() -> None:
        nonlocal written_bytes, io_path
        optimizer, bindings = synthetic_optimizer(numel, device)
        runtime = Runtime.build(
            [Part(optimizer, bindings, "bench")], config, device=device, rank=0, eager=False
        )
        engine = runtime.engines[0]
        try:
            os.sync()
            seconds = timed(engine.initialize, engine.drain)[1]
            written_bytes = engine.last_stats.written_bytes
            io_path = str(runtime.report.io_path)
        finally:
            runtime.close_engine(engine)
        ours.append(seconds / written_bytes)

    def write_plainly() -> None:
        with LimitFiles(config.directories, 4 * numel) as files:
            os.sync()
            files.measure_first_write(fresh=False)
            plain.append(1e-9 / files.limit.first_write)

    for number in range(rounds):
        pair = [write_plainly, initialize]
        for action in pair if number % 2 == 0 else reversed(pair):
            action()
    return {
        "io_path": io_path,
        "device": str(device),
        "numel": numel,
        "bytes": written_bytes,
        "plain_requests": dict(zip(("task_bytes", "threads"), FIRST_WRITE, strict=True)),
        "initialize_s": [each * written_bytes for each in ours],
        "initialize_gbps": [1e-9 / each for each in ours],
        "plain_gbps": [1e-9 / each for each in plain],
        "ratio": statistics.median(ours) / statistics.median(plain),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = module_parser("initialization", __doc__)
    parser.add_argument("--numel", type=count, default=2**27, help="parameters (default 2**27)")
    parser.add_argument("--rounds", type=count, default=7, help="default 7")
    arguments = parser.parse_args(argv)
    return exit_status(parser.prog, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    found = run_initialization_bench(
        stream_config(arguments),
        numel=arguments.numel,
        rounds=arguments.rounds,
        device=device_named(arguments.device),
    )
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

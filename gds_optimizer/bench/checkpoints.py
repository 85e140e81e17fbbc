"""What saving and restoring cost: `python -m gds_optimizer.bench.checkpoints --dir D`.

On synthetic state, through the parts that every front end uses. Steps are timed as well, because a
snapshot's cost is partly in the step that follows it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.bench.arguments import module_parser, stream_config
from gds_optimizer.bench.steps import (
    check_room_for_files,
    device_named,
    synthetic_optimizer,
    timed,
)
from gds_optimizer.checkpoint import load_state_dict, state_dict
from gds_optimizer.command import count, exit_status
from gds_optimizer.config import StreamConfig
from gds_optimizer.engine import Engine
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.snapshot_read import verify
from gds_optimizer.snapshots import SnapshotCopy, restore_snapshot, take_snapshot
from gds_optimizer.stepper import install_step

_REPEATS = 3


def run_checkpoint_bench(
    config: StreamConfig,
    *,
    numel: int,
    copy_to: Path,
    device: torch.device,
    snapshots_only: bool = False,
) -> dict[str, Any]:
    """Time steps, snapshots, a copy, `verify`, restoring, and plain saving and loading.

    Args:
        config: directories, path, slots and so on; snapshots are taken in the first directory.
        numel: parameters. Their state takes 12 bytes each, up to three times in the directories and
            twice in `copy_to`.
        copy_to: directory for the copy and the plain file, preferably on another file system.
        device: where parameters and slots are.
        snapshots_only: time steps and snapshots, and nothing that reads the state again.

    Returns:
        Seconds by name, the median where something is repeated, and what they are of.

    Raises:
        GdsOptimizerError: setting up, or something that is timed, failed.
    """
    check_room_for_files(config.directories, (24 if snapshots_only else 36) * numel)
    optimizer, bindings = synthetic_optimizer(numel, device)
    grads = torch.randn(min(numel, bindings[0].main.numel()), device=device) * 0.01
    runtime = Runtime.build(
        [Part(optimizer, bindings, "bench")], config, device=device, rank=0, eager=True
    )
    engine = runtime.engines[0]
    snapshots = Path(tempfile.mkdtemp(prefix="bench-snapshots-", dir=config.directories[0]))
    copies = Path(tempfile.mkdtemp(prefix="bench-copies-", dir=copy_to))
    uninstall = install_step(optimizer, engine.step)

    def step() -> float:
        for binding in bindings:
            binding.main.grad = grads[: binding.main.numel()]
        return timed(optimizer.step, engine.drain)[1]

    try:
        step()
        found = {
            "io_path": str(runtime.report.io_path),
            "numel": numel,
            "state_bytes": engine.layout.total_bytes,
            "buckets": len(engine.layout.buckets),
            **_time_snapshots(engine, step, snapshots),
            **({} if snapshots_only else _time_rest(engine, step, snapshots, copies)),
        }
    finally:
        uninstall()
        runtime.close_engine(engine)
        for directory in (snapshots, copies):
            shutil.rmtree(directory, ignore_errors=True)
    return found


def _time_snapshots(engine: Engine, step: Callable[[], float], snapshots: Path) -> dict[str, float]:
    engines = {"opt0": engine}
    found: dict[str, float] = {"step_s": statistics.median(step() for _ in range(_REPEATS))}

    def take(number: int) -> float:
        path = snapshots / str(number)
        return timed(lambda: take_snapshot(engines, path, keep_last=1))[1]

    found["first_snapshot_s"] = take(0)
    found["step_after_first_snapshot_s"] = step()
    taken, stepped = [], []
    for number in range(1, 1 + _REPEATS):
        taken.append(take(number))
        stepped.append(step())
    found["snapshot_s"] = statistics.median(taken)
    found["step_after_snapshot_s"] = statistics.median(stepped)
    return found


def _time_rest(
    engine: Engine, step: Callable[[], float], snapshots: Path, copies: Path
) -> dict[str, float]:
    engines = {"opt0": engine}
    last = snapshots / str(_REPEATS)
    found: dict[str, float] = {}
    found["verify_s"] = timed(lambda: verify(last))[1]
    found["copy_s"] = timed(lambda: SnapshotCopy(last, copies / "1").wait())[1]
    copy = SnapshotCopy(last, copies / "2", keep_last=1)
    during = [step()]
    while not copy.done:
        during.append(step())
    copy.wait()
    found["step_during_copy_s"] = statistics.median(during)
    found["restore_s"] = timed(lambda: restore_snapshot(engines, last))[1]
    if os.stat(copies).st_dev != os.stat(snapshots).st_dev:  # else it is linked like the original
        found["restore_from_copy_s"] = timed(lambda: restore_snapshot(engines, copies / "2"))[1]

    file = copies / "state.pt"
    found["torch_save_s"] = timed(lambda: _save(engine, file))[1]
    found["torch_load_s"] = timed(
        lambda: load_state_dict(engine, torch.load(file, mmap=True, weights_only=True))
    )[1]
    return found


def _save(engine: Engine, path: Path) -> None:
    torch.save(state_dict(engine), path)
    with open(path, "r+b") as file:
        os.fsync(file.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    parser = module_parser("checkpoints", __doc__)
    parser.add_argument("--copy-to", type=Path, help="default: the first directory")
    parser.add_argument("--numel", type=count, default=2**27, help="parameters (default 2**27)")
    parser.add_argument("--bucket-size", default="192MiB")
    parser.add_argument(
        "--snapshots-only", action="store_true", help="time steps and snapshots alone"
    )
    arguments = parser.parse_args(argv)
    return exit_status(parser.prog, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    found = run_checkpoint_bench(
        stream_config(arguments),
        numel=arguments.numel,
        copy_to=arguments.copy_to or Path(arguments.directories[0]),
        device=device_named(arguments.device),
        snapshots_only=arguments.snapshots_only,
    )
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The same AdamW step by this package and its peers: `python -m gds_optimizer.bench.peers --dir D`.

Each peer runs in a process of its own, one after the other, between measurements of what the drive
gives to a plain loop of direct I/O. A streamer of one's own is a Python file with
`build(params, directory)`, which returns an object with `step()`; `params` are fp32 leaf tensors
whose `.grad` is set before every step. Or it has `setup_optimizer_state_streaming(args, optimizer)`
for Megatron's distributed optimizer: see `peer_megatron`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gds_optimizer.bench.limit import LimitFiles
from gds_optimizer.bench.memory_cap import Cap, capped
from gds_optimizer.bench.peer_child import Task
from gds_optimizer.bench.peer_recipes import RECIPES
from gds_optimizer.bench.peer_table import to_text
from gds_optimizer.bench.steps import check_room_for_files, device_named
from gds_optimizer.command import count, exit_status, file_to_write, seconds
from gds_optimizer.config import IO_CHOICES, parse_size
from gds_optimizer.errors import ConfigError

_STATE_BYTES = 16
"""Of a parameter at most, on the drive: DeepSpeed keeps a gradient beside main and moments."""
_LIMIT_BYTES = 4 * 2**30
_SCRATCH = "gds-optimizer-peers-"
_LOG_LINES = 3
OURS = "gds-optimizer"

Progress = Callable[[str], None]


def compare(
    directory: Path,
    *,
    numel: int,
    steps: int,
    device: str,
    peers: Sequence[str] = tuple(RECIPES),
    streamers: Sequence[Path] = (),
    cap_bytes: int | None = None,
    timeout_s: float = 600.0,
    io: str = "auto",
    sustained_bytes: int = 0,
    limit_bytes: int = _LIMIT_BYTES,
    progress: Progress = lambda line: None,
) -> dict[str, Any]:
    """Run every peer in turn, and measure the drive before, between and after.

    Args:
        directory: on the drive; everything in it is removed afterwards.
        numel: parameters of each.
        steps: that are timed, at least 1; one before them is not.
        device: of parameters and gradients, by torch's name.
        peers: names out of `RECIPES`.
        streamers: Python files, see the module.
        cap_bytes: of host memory and page cache together for each, from when its parameters and
            gradients are there; None for no cap.
        timeout_s: a peer that takes longer is ended.
        io: this package's I/O path.
        sustained_bytes: to be written before the drive is measured.
        limit_bytes: that one measurement of the drive moves.
        progress: gets a line now and then.

    Returns:
        Plain JSON data: `peers` has a row for each, by name, with either `missing` or measurements.

    Raises:
        NoSpaceError: the drive has too little room.
        OSError: the drive cannot be measured.
    """
    state_bytes = _STATE_BYTES * numel
    limit_bytes = min(limit_bytes, state_bytes)
    check_room_for_files([directory], state_bytes + 2 * limit_bytes)
    rows: dict[str, dict[str, Any]] = {}
    caps: set[str] = set()
    named = [*((name, name) for name in peers), *((each.name, str(each)) for each in streamers)]
    with (
        _scratch(directory) as scratch,
        LimitFiles([scratch], 2 * limit_bytes, point_bytes=limit_bytes) as files,
    ):
        files.measure_first_write(fresh=False)
        files.write_first(sustained_bytes)
        files.measure()
        for number, (name, peer) in enumerate(named):
            progress(f"{name} ...")
            own = scratch / str(number)
            (own / "files").mkdir(parents=True)
            group_name = f"{_SCRATCH}{os.getpid()}-{number}"
            with capped(group_name) if cap_bytes else _no_cap() as cap:
                task = Task(
                    peer=peer,
                    is_streamer=number >= len(peers),
                    directory=str(own / "files"),
                    result=str(own / "result.json"),
                    numel=numel,
                    steps=steps,
                    device=device,
                    cap_bytes=cap_bytes,
                    group=str(cap.group.path) if cap.group else None,
                    version=cap.group.version if cap.group else 2,
                    has_group=cap.is_capped,
                    io=io,
                    parent=os.getpid(),
                )
                row = run_alone(task, own, cap, timeout_s)
                caps.add(cap.how)
            # Two streamers may have the same file name.
            rows[name if name not in rows else peer] = row
            progress(f"{name}: {row.get('missing') or format(row['step_s'], '.3f') + ' s'}")
            shutil.rmtree(own, ignore_errors=True)
            if row.get("step_io", {}).get("written"):
                files.measure()
        limit = files.limit
    for row in rows.values():
        if "missing" not in row:
            moved = row["step_io"]["read"] + row["step_io"]["written"]
            row["ratio_to_limit"] = row["step_s"] / (moved / limit.mixed / 1e9) if moved else None
    return {
        "device": device,
        "directory": str(directory),
        "numel": numel,
        "steps": steps,
        "cap": {"bytes": cap_bytes, "by": "; ".join(sorted(caps)), "holds": _cap_holds(rows)},
        "limit": limit.to_dict(),
        "peers": rows,
    }


def run_alone(task: Task, own: Path, cap: Cap, timeout_s: float) -> dict[str, Any]:
    """A peer's row, whatever happens to its process.

    Args:
        task: for the child.
        own: a directory for the task and what the child prints.
        cap: around the child.
        timeout_s: the child and its descendants are killed after that.
    """
    path, log = own / "task.json", own / "log"
    path.write_text(task.to_json())
    command = [*cap.prefix, sys.executable, "-m", "gds_optimizer.bench.peer_child", str(path)]
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
        ended = f"took longer than {timeout_s:g} s (--timeout)"
        try:
            status = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        else:
            ended = _reason(status, cap)
        finally:
            # The session is the child's own: nobody else is in it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    try:
        found: dict[str, Any] = json.loads(Path(task.result).read_text())
    except FileNotFoundError:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"missing": ended, "log": lines[-_LOG_LINES:]}
    return found


def _reason(status: int, cap: Cap) -> str:
    if cap.group is not None and cap.group.killed():
        return "killed by the kernel: it wanted more memory than the cap"
    if status == -signal.SIGKILL:
        return "killed by signal 9, as the kernel does when memory runs out"
    if status < 0:
        return f"ended by signal {-status} ({signal.Signals(-status).name})"
    return f"ended with status {status} and no result"


def _cap_holds(rows: dict[str, dict[str, Any]]) -> bool:
    ran = [row for row in rows.values() if "missing" not in row]
    return bool(ran) and all(row["capped_bytes"] is not None for row in ran)


@contextlib.contextmanager
def _no_cap() -> Iterator[Cap]:
    yield Cap("not asked for (--memory-cap)")


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """A directory of this process; those that killed ones left are removed."""
    for path in directory.glob(f"{_SCRATCH}*"):
        pid = path.name.removeprefix(_SCRATCH).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        dir=directory, prefix=f"{_SCRATCH}{os.getpid()}-", ignore_cleanup_errors=True
    ) as scratch:
        yield Path(scratch)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare-peers",
        description=(__doc__ or "").partition(":")[0] + ", each in a process of its own.",
        epilog="exit status: 0 this package's row was measured, or not asked for; 1 it was not; "
        "2 wrong usage.",
    )
    parser.add_argument("--dir", type=Path, required=True, help="on the drive")
    parser.add_argument("--numel", type=count, default=2**27, help="parameters (default 2**27)")
    parser.add_argument("--steps", type=count, default=5, help="steps to time (default 5)")
    parser.add_argument("--device", help="cuda or cpu (default: a GPU if there is one)")
    parser.add_argument(
        "--peers",
        type=lambda text: [name.strip() for name in text.split(";")],
        help=f"names separated by semicolons (default: all): {'; '.join(RECIPES)}",
    )
    parser.add_argument(
        "--streamer",
        type=Path,
        action="append",
        default=[],
        help="a Python file with build(params, directory), which returns an object with step(), or "
        "with setup_optimizer_state_streaming(args, optimizer) for Megatron's",
    )
    parser.add_argument(
        "--memory-cap",
        metavar="BYTES",
        help="host memory and page cache for each peer's state, e.g. 4GiB, by a memory cgroup",
    )
    parser.add_argument(
        "--sustained",
        metavar="BYTES",
        default="0",
        help="write this much, e.g. 300GB, before anything is measured (default 0)",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=600.0, help="seconds for each peer (default 600)"
    )
    parser.add_argument("--io", choices=IO_CHOICES, default="auto", help="this package's path")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", type=file_to_write, help="write the JSON to this file too")
    parser.set_defaults(peers=list(RECIPES))
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    for name in arguments.peers:
        if name and name not in RECIPES:
            parser.error(f"--peers: wanted names out of {'; '.join(RECIPES)}, got {name!r}")
    for path in arguments.streamer:
        if not path.is_file():
            parser.error(f"--streamer: {path} is not a file")
    return exit_status(parser.prog, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.dir.is_dir():
        raise ConfigError(f"--dir: {arguments.dir} is not a directory: create it")
    peers = [name for name in arguments.peers if name]
    found = compare(
        arguments.dir.absolute(),
        numel=arguments.numel,
        steps=arguments.steps,
        device=str(device_named(arguments.device)),
        peers=peers,
        streamers=[path.absolute() for path in arguments.streamer],
        cap_bytes=parse_size(arguments.memory_cap) if arguments.memory_cap else None,
        timeout_s=arguments.timeout,
        io=arguments.io,
        sustained_bytes=parse_size(arguments.sustained),
        progress=lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
    )
    document = json.dumps(found, indent=1) + "\n"
    sys.stdout.write(document if arguments.json else to_text(found) + "\n")
    if arguments.output is not None:
        arguments.output.write_text(document)
    return 1 if OURS in peers and "missing" in found["peers"][OURS] else 0


if __name__ == "__main__":
    sys.exit(main())

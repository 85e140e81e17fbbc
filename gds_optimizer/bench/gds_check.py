"""Proves or disproves the direct path on this node: `python -m gds_optimizer.bench.gds_check DIR`.

Proven means: the probe's strict round trip worked in every directory, the benchmark ran by
GPUDirect Storage, and cuFile's own counters show peer-to-peer or nvidia-fs operations and none by
POSIX.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.bench.ranks import Settings, paths_to_text, run_paths
from gds_optimizer.bench.steps import BenchResult
from gds_optimizer.command import count, exit_status, file_to_write
from gds_optimizer.config import StreamConfig
from gds_optimizer.probe import Severity, probe_directories
from gds_optimizer.probing.system import System

EXIT_NOT_PROVEN = 3
_STATS = "/proc/driver/nvidia-fs/stats"


def reasons_against(
    operations: dict[str, int] | None, refusal: str, bench: str | None
) -> list[str]:
    """Why the direct path is not proven; nothing if it is.

    Args:
        operations: cuFile's counters over the benchmark; None where it does not tell.
        refusal: of the probe; empty where it has proven the path.
        bench: why the benchmark did not run by it; None if it did.
    """
    reasons = [text for text in (refusal, bench) if text]
    if reasons:
        return list(dict.fromkeys(reasons))
    if operations is None:
        return ["cuFile does not say which way its operations went: use libcufile 1.15 or later"]
    direct = sum(n for key, n in operations.items() if key.startswith(("p2p.", "nvfs.")))
    fallen_back = sum(n for key, n in operations.items() if key.startswith("posix."))
    if fallen_back:
        reasons.append(f"cuFile made {fallen_back} operations by POSIX calls: see cufile.log")
    if not direct:
        reasons.append("cuFile counted no operation by peer-to-peer DMA or nvidia-fs")
    return reasons


def check(directories: list[Path], *, numel: int, steps: int) -> dict[str, Any]:
    """The report, as plain JSON data.

    Raises:
        ConfigError: a directory does not exist.
        GdsOptimizerError: the benchmark failed for another reason than the path.
    """
    config = StreamConfig(directories=tuple(directories), io="gds")
    system = System("/")
    probe = probe_directories(directories, io="gds")
    stats_before = system.read(_STATS)
    settings = Settings(config=config, numel=numel, steps=steps, device=None, ranks=1, options={})
    found = run_paths(settings, ["gds", "posix"])
    gds = found["gds"]
    reasons = reasons_against(
        gds.cufile_operations if isinstance(gds, BenchResult) else None,
        probe.refusal,
        None if isinstance(gds, BenchResult) else gds,
    )
    mends = [
        finding.mend
        for finding in probe.findings
        if finding.mend and finding.severity in (Severity.MISSING, Severity.FATAL)
    ]
    return {
        "version": 1,
        "proven": not reasons,
        "reasons": reasons,
        "mends": list(dict.fromkeys(mends)) if reasons else [],
        "probe": probe.to_dict(),
        "bench": {
            path: {"not_available": each} if isinstance(each, str) else each.to_dict()
            for path, each in found.items()
        },
        "nvidia_fs_stats": {"before": stats_before, "after": system.read(_STATS)},
        "kernel": platform.release(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "text": f"{probe.to_text()}\n\n{paths_to_text(found)}",
    }


def to_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [report["text"], ""]
    lines.append(
        f"kernel {report['kernel']}, torch {report['torch']} (CUDA {report['torch_cuda']})"
    )
    lines.append(f"direct path: {'proven' if report['proven'] else 'not proven'}")
    lines += [f"  because {reason}" for reason in report["reasons"]]
    lines += [f"  mend: {mend}" for mend in report["mends"]]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gds-check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--numel", type=count, default=2**29, help="parameters (default 2**29)")
    parser.add_argument("--steps", type=count, default=5, help="steps to time (default 5)")
    parser.add_argument(
        "--output", type=file_to_write, help="write the report as JSON to this file too"
    )
    arguments = parser.parse_args(argv)
    return exit_status(parser.prog, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    report = check(arguments.directories, numel=arguments.numel, steps=arguments.steps)
    sys.stdout.write(to_text(report) + "\n")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["proven"] else EXIT_NOT_PROVEN


if __name__ == "__main__":
    sys.exit(main())

"""Which way bytes take between a device and a directory, proven by taking it, and why.

A flag that says "GDS available" can lie: KvikIO's means that a module is loaded, cuFile has a
fallback of its own that KvikIO cannot see, and an O_DIRECT open succeeds on tmpfs. So each path is
tried: a child process writes a file in the directory, reads it back and compares, strictly (cuFile
forbidden to fall back, its own counters read) and within a time limit. What the kernel says about
modules, mounts and disks only explains the outcome.

Setup code calls `decide_io_path`; `gds-optimizer probe DIR` prints what `probe_directories` finds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from gds_optimizer.config import IO_CHOICES, StreamConfig
from gds_optimizer.errors import ConfigError
from gds_optimizer.io.base import IoPath
from gds_optimizer.probing.report import (
    DirectoryReport,
    Finding,
    MachineReport,
    ProbeReport,
    Severity,
    soften,
)
from gds_optimizer.probing.system import System
from gds_optimizer.probing.trials import Prober, Trial, all_prove

__all__ = [
    "DirectoryReport",
    "Finding",
    "MachineReport",
    "ProbeReport",
    "Severity",
    "choose_io_path",
    "decide_io_path",
    "probe_directories",
]

DEFAULT_TIMEOUT_S = 60.0


def decide_io_path(
    config: StreamConfig,
    device: torch.device,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    root: str | os.PathLike[str] = "/",
    child_command: Sequence[str] | None = None,
    try_all: bool = False,
) -> ProbeReport:
    """Decide, once at setup, which way bytes take between `device` and the directories.

    Args:
        config: names the directories and what is asked for (`io`).
        device: where the buckets' buffers will live.
        timeout_s, root, child_command, try_all: see `probe_directories`.

    Returns:
        A report whose `io_path` is the path for all directories.

    Raises:
        ConfigError: `config.io` does not go with the kind of `device`.
        IoPathError: what was asked for is not to be had in some directory, or nothing works.
    """
    report = probe_directories(
        config.directories,
        io=config.io,
        device=device,
        allow_tmpfs=config.allow_tmpfs,
        timeout_s=timeout_s,
        root=root,
        child_command=child_command,
        try_all=try_all,
    )
    choose_io_path(report)
    return report


def choose_io_path(report: ProbeReport) -> IoPath:
    """The path that all directories of `report` take.

    Raises:
        IoPathError: there is none, or not the one asked for; says why and what mends it.
    """
    return report.io_path


def probe_directories(
    directories: Iterable[str | os.PathLike[str]],
    *,
    io: str = "auto",
    device: torch.device | str | None = None,
    allow_tmpfs: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    root: str | os.PathLike[str] = "/",
    child_command: Sequence[str] | None = None,
    try_all: bool = False,
) -> ProbeReport:
    """Try the paths that `io` asks for in each directory, and explain what came of it.

    Needs a few MiB of space in each directory while it runs and leaves nothing behind. A directory
    that nothing works in is reported, not raised.

    Args:
        directories: at least one.
        io: "auto" takes GDS where it works in every directory, else POSIX, else (without a GPU,
            or for tensors on the CPU) direct I/O from host memory. Any other value is the only
            path tried.
        device: where the tensors live; None means the first GPU if its driver answers, else the
            CPU.
        allow_tmpfs: accept a directory in memory.
        timeout_s: a child that takes longer is killed, in seconds.
        root: where the kernel's files (/proc, /sys, /run/udev, ...) are read from.
        child_command: the program that makes the round trips instead of our own; for tests.
        try_all: with "auto" on a GPU, try POSIX as well where GDS works, since whoever times them
            wants to know both.

    Raises:
        ConfigError: a value is out of range, or `io` does not go with `device`.
    """
    paths = tuple(Path(os.path.abspath(directory)) for directory in directories)
    if not paths:
        raise ConfigError("no directory was named: name at least one to probe")
    if io not in IO_CHOICES:
        raise ConfigError(f"io is {io!r}, wanted one of {', '.join(IO_CHOICES)}")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s is {timeout_s}, wanted more than 0")
    target = _parse_device(device)
    _check_device(io, target)
    probe = Prober(
        io=io,
        device_index=_device_index(target),
        allow_tmpfs=allow_tmpfs,
        timeout_s=timeout_s,
        system=System(root),
        child_command=child_command,
        try_all=try_all,
    )
    asks_driver = io != "host" and (target is None or target.type == "cuda")
    machine = probe.machine() if asks_driver else MachineReport()
    on_device = asks_driver and bool(machine.gpu_usable or target is not None or io != "auto")
    wanted = _wanted_paths(io, on_device)
    can_try = not on_device or (machine.gpu_usable and machine.kvikio_version is not None)
    trials = probe.run(paths, wanted if can_try else ())
    return _conclude(probe, machine, trials, wanted)


def _parse_device(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}, wanted cpu or cuda:N: {error}") from None


def _check_device(io: str, device: torch.device | None) -> None:
    if device is None:
        return
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device}, wanted a CUDA device or cpu")
    if io == "host" and device.type == "cuda":
        raise ConfigError(
            f"io is 'host', which moves host memory, but the tensors are on {device}: "
            "use auto, gds or posix"
        )
    if io not in ("auto", "host") and device.type == "cpu":
        raise ConfigError(
            f"io is {io!r}, which moves device memory, but the tensors are on the CPU: "
            "use auto or host"
        )


def _device_index(device: torch.device | None) -> int:
    if device is None or device.type != "cuda":
        return 0
    index = cast("int | None", device.index)  # torch's annotation forgets the None
    if index is not None:
        return index
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def _wanted_paths(io: str, on_device: bool) -> tuple[IoPath, ...]:
    """Paths to try, best first."""
    if io != "auto":
        return (IoPath(io),)
    return (IoPath.GDS, IoPath.POSIX) if on_device else (IoPath.HOST,)


def _conclude(
    probe: Prober, machine: MachineReport, trials: Sequence[Trial], wanted: Sequence[IoPath]
) -> ProbeReport:
    verdict = next((path for path in wanted if all_prove(trials, path)), None)
    explains_gds = any(path in (IoPath.GDS, IoPath.GDS_COMPAT) for path in wanted)
    if verdict in (IoPath.GDS, IoPath.GDS_COMPAT):
        machine = replace(machine, findings=soften(machine.findings))
    versions = [trial.libcufile_version for trial in trials if trial.libcufile_version]
    if machine.libcufile_version in (None, "unknown") and versions:
        machine = replace(machine, libcufile_version=versions[0])
    directories = []
    for trial in trials:
        proven = tuple(path for path in wanted if path in trial.proven)
        findings = list(trial.findings)
        if verdict is IoPath.GDS:  # what keeps POSIX away then keeps no faster path away
            findings = [
                soften([each])[0] if each.name == "posix-round-trip" else each for each in findings
            ]
        if explains_gds and trial.usable:
            works = IoPath.GDS in proven or IoPath.GDS_COMPAT in proven
            findings += soften(trial.gds_findings) if works else trial.gds_findings
        directories.append(
            DirectoryReport(
                path=trial.path,
                io_path=verdict or next(iter(proven), None),
                proven=proven,
                findings=tuple(findings),
                fs_type=trial.fs_type,
                mount_point=trial.mount_point,
                mount_options=trial.mount_options,
                block_devices=trial.disks.names,
                rotational=trial.disks.rotational,
                free_bytes=trial.free_bytes,
            )
        )
    report = ProbeReport(
        asked=probe.io,
        verdict=verdict,
        refusal="",
        machine=machine,
        directories=tuple(directories),
    )
    return report if verdict is not None else replace(report, refusal=_refusal(report))


def _refusal(report: ProbeReport) -> str:
    """What is not to be had, where and why, in one or two sentences."""
    asked = "no I/O path works" if report.asked == "auto" else f"io={report.asked} is not to be had"
    failing = [d for d in report.directories if d.io_path is None] or report.directories
    names = ", ".join(str(directory.path) for directory in failing)
    reasons: list[Finding] = []
    machine = [f for f in report.machine.findings if f.severity is Severity.MISSING]
    for directory in failing:
        fatal = [f for f in directory.findings if f.severity is Severity.FATAL]
        missing = [f for f in directory.findings if f.severity is Severity.MISSING]
        reasons += fatal or [*machine, *missing]
    reasons = list(dict.fromkeys(reasons))
    if len(reasons) <= 2:
        whys = [f.what + (f" ({f.mend})" if f.mend else "") for f in reasons]
        return f"{asked} in {names}: {'; '.join(whys)}"
    whys = [f.what for f in reasons]
    return (
        f"{asked} in {names}: {'; '.join(whys)}. What mends each: "
        f"gds-optimizer probe --io {report.asked} {' '.join(str(d.path) for d in failing)}"
    )

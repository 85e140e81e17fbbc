"""Tries the paths in each directory, one child process a round trip, and notes what came of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gds_optimizer.io.base import IoPath
from gds_optimizer.probing.children import Answer, kill_running, run_child, scratch_file
from gds_optimizer.probing.cufile_config import CufileConfig, load_cufile_config, probe_config
from gds_optimizer.probing.reasons import (
    MEMORY_FS,
    gds_directory_findings,
    gds_machine_findings,
    storage_findings,
)
from gds_optimizer.probing.report import Finding, MachineReport, Severity
from gds_optimizer.probing.system import FS_MAGIC, Disks, System

# A child that opens a device takes some hundred MiB of its memory.
MAX_CHILDREN = 4


@dataclass
class Trial:
    """What is known of one directory so far; filled in by `Prober`."""

    path: Path
    usable: bool = False
    proven: list[IoPath] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    gds_findings: list[Finding] = field(default_factory=list)
    real_path: str | None = None
    fs_type: str | None = None
    mount_point: str | None = None
    mount_options: tuple[str, ...] = ()
    disks: Disks = field(default_factory=Disks)
    free_bytes: int | None = None
    libcufile_version: str | None = None


@dataclass
class Prober:
    """Runs the round trips of one probe; the settings are those of `probe_directories`."""

    io: str
    device_index: int
    allow_tmpfs: bool
    timeout_s: float
    system: System
    child_command: Sequence[str] | None
    try_all: bool = False
    is_stopped: bool = False

    def __post_init__(self) -> None:
        self.cufile: CufileConfig = load_cufile_config(self.system, os.environ)

    def ask(self, request: dict[str, Any], io_path: IoPath | None = None) -> Answer:
        """Run one child; for a cuFile path, under a configuration that decides its fallback."""
        config: Callable[[str], str] | None = None
        if io_path in (IoPath.GDS, IoPath.GDS_COMPAT):
            allow = io_path is IoPath.GDS_COMPAT
            config = partial(probe_config, self.cufile, allow_compat_mode=allow)
        return run_child(
            request, timeout_s=self.timeout_s, command=self.child_command, cufile_config=config
        )

    # --- the machine ---

    def machine(self) -> MachineReport:
        answer = self.ask({"operation": "machine", "device": self.device_index})
        data = answer.data
        problem = answer.error or data.get("gpu_error") or ""
        usable = answer.ok and not problem
        driver_version, _ = self.system.driver
        findings = [_driver_finding(problem, driver_version, data)]
        if usable:
            findings += _package_findings(data)
        p2pdma = None
        if usable or self.io in ("gds", "gds-compat"):
            gds_findings, p2pdma = gds_machine_findings(self.system, self.cufile, os.environ)
            findings += gds_findings
        return MachineReport(
            gpu_usable=usable,
            gpu_name=data.get("gpu_name"),
            cuda_version=data.get("cuda_version"),
            driver_version=driver_version,
            kvikio_version=data.get("kvikio_version"),
            cupy_version=data.get("cupy_version"),
            libcufile_version=data.get("libcufile_version"),
            nvidia_fs=self.system.nvidia_fs_version,
            p2pdma=p2pdma,
            findings=tuple(findings),
        )

    # --- directories ---

    def run(self, paths: Sequence[Path], wanted: Sequence[IoPath]) -> list[Trial]:
        """Probe all directories, a few at a time."""
        with ThreadPoolExecutor(min(len(paths), MAX_CHILDREN)) as pool:
            try:
                trials = list(pool.map(lambda path: self.try_directory(path, wanted), paths))
                if wanted == (IoPath.GDS, IoPath.POSIX) and (
                    self.try_all or not all_prove(trials, IoPath.GDS)
                ):
                    # All take one path: those that have GDS must show that POSIX works as well.
                    list(pool.map(lambda trial: self.try_path(trial, IoPath.POSIX), trials))
            except BaseException:
                # An interrupt reaches this thread alone; do not wait for the children's time limit.
                self.is_stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                kill_running()
                raise
        return trials

    def try_directory(self, path: Path, wanted: Sequence[IoPath]) -> Trial:
        trial = Trial(path)
        self.try_host(trial)
        for io_path in wanted:
            if trial.usable and not trial.proven and not self.is_stopped:
                self.try_path(trial, io_path)
        return trial

    def try_host(self, trial: Trial) -> None:
        """What the directory is, and direct I/O from host memory, which every path builds on."""
        answer = self.ask(
            {
                "operation": "directory",
                "directory": str(trial.path),
                "file": scratch_file(trial.path),
            }
        )
        data = answer.data
        trial.real_path = data.get("real_path")
        trial.free_bytes = data.get("free_bytes")
        mount = self.system.mount_of(trial.real_path) if trial.real_path else None
        magic_type = FS_MAGIC.get(data.get("fs_magic") or 0)
        if mount is not None:
            trial.mount_point, trial.mount_options = mount.mount_point, mount.options
            trial.disks = self.system.disks_of(mount)
        # The kernel's own word for memory wins over a mount table that shows something else.
        in_memory = magic_type in MEMORY_FS
        trial.fs_type = mount.fs_type if mount is not None and not in_memory else magic_type
        if trial.real_path is not None:
            trial.findings += storage_findings(
                trial.fs_type, trial.disks, trial.free_bytes, allow_tmpfs=self.allow_tmpfs
            )
            trial.gds_findings = gds_directory_findings(
                self.system, mount, trial.fs_type, trial.disks
            )
        if answer.ok:
            trial.findings.append(
                Finding("direct-io", Severity.OK, "direct I/O from host memory brings bytes back")
            )
        else:
            trial.findings.append(_directory_finding(answer, trial))
        trial.findings += _leftover_findings(answer)
        trial.usable = not any(f.severity is Severity.FATAL for f in trial.findings)

    def try_path(self, trial: Trial, io_path: IoPath) -> None:
        """Add a round trip by `io_path`, unless it was made or cannot be."""
        name = f"{io_path}-round-trip"
        if not trial.usable or any(f.name == name for f in trial.findings):
            return
        if io_path is IoPath.HOST:
            trial.proven.append(io_path)  # `try_host` was that
            return
        request = {
            "operation": "device",
            "mode": io_path.value,
            "device": self.device_index,
            "directory": str(trial.path),
            "file": scratch_file(trial.path),
        }
        answer = self.ask(request, io_path)
        problem, words = judge(answer, io_path)
        if problem:
            log = f"; cuFile says: {'; '.join(answer.cufile_log)}" if answer.cufile_log else ""
            trial.findings.append(Finding(name, Severity.MISSING, problem + log))
        else:
            trial.proven.append(io_path)
            trial.findings.append(Finding(name, Severity.OK, words))
        trial.findings += _leftover_findings(answer)
        trial.libcufile_version = answer.data.get("libcufile_version") or trial.libcufile_version


def judge(answer: Answer, io_path: IoPath) -> tuple[str, str]:
    """Why a device round trip does not prove `io_path` (empty if it does), and what it showed."""
    if not answer.ok:
        return f"the round trip failed: {answer.error}", ""
    backend = "POSIX" if io_path is IoPath.POSIX else "GDS"
    backends = answer.data.get("backends")
    if backends is not None:
        strays = {k: v for k, v in backends.items() if k != backend and v}
        if strays or not backends.get(backend):
            return f"KvikIO moved bytes another way than {backend}: {backends}", ""
    operations = answer.data.get("operations")
    words = f"bytes written by {io_path} came back"
    if io_path is IoPath.POSIX:
        return "", words
    if operations is None or not any(operations.values()):
        return "", f"{words}; this libcufile does not tell which way it took"
    seen = ", ".join(f"{path} {count}" for path, count in operations.items() if count)
    if io_path is IoPath.GDS:
        posix = operations["posix.read"] + operations["posix.write"]
        direct = [
            sum(operations[f"{path}.{what}"] for path in ("p2p", "nvfs"))
            for what in ("read", "write")
        ]
        if posix or not all(direct):
            return f"cuFile took its POSIX path although forbidden to (operations: {seen})", ""
    return "", f"{words} (libcufile's operations: {seen})"


def _driver_finding(problem: str, driver_version: str | None, data: dict[str, Any]) -> Finding:
    if problem:
        return Finding(
            "driver",
            Severity.MISSING,
            f"no usable NVIDIA driver: {problem}",
            "install the NVIDIA driver on the host; start a container with --gpus all",
        )
    driver = f", driver {driver_version}" if driver_version else ""
    return Finding(
        "driver", Severity.OK, f"{data.get('gpu_name')}{driver}, CUDA {data.get('cuda_version')}"
    )


def _package_findings(data: dict[str, Any]) -> list[Finding]:
    extra = "cu12" if str(data.get("cuda_version", "")).startswith("12.") else "cu13"
    findings = []
    for package in ("kvikio", "cupy"):
        version = data.get(f"{package}_version")
        if version:
            findings.append(Finding(package, Severity.OK, f"{package} {version}"))
        else:
            findings.append(
                Finding(
                    package,
                    Severity.MISSING,
                    f"the Python package {package} is not installed",
                    f"pip install 'gds-optimizer[{extra}]'",
                )
            )
    return findings


def _directory_finding(answer: Answer, trial: Trial) -> Finding:
    """Why the first round trip failed; nothing works in the directory then."""
    stage, number = answer.data.get("stage"), answer.data.get("errno")
    path = trial.path
    if not answer.answered:
        return Finding(
            "directory",
            Severity.FATAL,
            f"the round trip of host memory {answer.error}",
            "see whether the mount answers: stat -f " + str(path),
        )
    what, mend = f"{stage} fails: {answer.error}", ""
    if stage == "stat":
        what = f"{path} cannot be looked at: {answer.error}"
        if number == errno.ENOENT:
            what, mend = f"{path} does not exist", f"mkdir {path}"
        elif number == errno.ENOTDIR:
            what, mend = f"{path} is not a directory", "name a directory"
    elif number in (errno.EACCES, errno.EPERM):
        what = f"no permission to create a file in {path} (user id {os.geteuid()})"
        mend = f"chown or chmod {path}, or name another directory"
    elif number == errno.EROFS:
        what, mend = f"{path} is on a read-only file system", "mount it read-write"
    elif number in (errno.ENOSPC, errno.EDQUOT):
        what, mend = f"no space for a few MiB in {path}: {answer.error}", "free some space"
    elif number in (errno.EINVAL, errno.EOPNOTSUPP) and stage and "direct" in stage:
        what = f"{trial.fs_type or 'the file system'} refuses direct I/O at multiples of 4 KiB"
        mend = "name a directory on ext4 or xfs"
    return Finding("directory", Severity.FATAL, what, mend)


def _leftover_findings(answer: Answer) -> list[Finding]:
    if answer.leftover is None:
        return []
    return [
        Finding(
            "leftover",
            Severity.WARN,
            f"the probe could not remove {answer.leftover}, which may exist",
            f"rm -f {answer.leftover}",
        )
    ]


def all_prove(trials: Sequence[Trial], io_path: IoPath) -> bool:
    """Whether a round trip by `io_path` worked in every directory."""
    return all(io_path in trial.proven for trial in trials)

"""What a probe found: frozen data, its JSON form and its text form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from gds_optimizer.errors import IoPathError
from gds_optimizer.io.base import IoPath

REPORT_VERSION = 1


class Severity(str, Enum):
    """How much a finding matters."""

    OK = "ok"
    """Something is as it should be."""
    INFO = "info"
    """Worth knowing; changes nothing."""
    WARN = "warn"
    """Works, but slowly or with a risk."""
    MISSING = "missing"
    """Keeps a faster path away."""
    FATAL = "fatal"
    """Nothing can be stored here."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason: `what` is so, and `mend` changes it (empty where nothing needs mending).

    `name` is stable; programs may compare it.
    """

    name: str
    severity: Severity
    what: str
    mend: str = ""

    def to_dict(self) -> dict[str, str]:
        return {
            "name": self.name,
            "severity": self.severity.value,
            "what": self.what,
            "mend": self.mend,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryReport:
    """One directory.

    Attributes:
        path: absolute.
        io_path: the path that bytes take here: the one that all directories share, or, where
            they share none, the best one proven here; None where nothing works.
        proven: every path that was tried and works, best first.
        fs_type: as the mount table names it, e.g. "ext4"; None where nobody knows.
        mount_point, mount_options: of the mount that holds the directory.
        block_devices: names of the disks under it, e.g. ("nvme0n1",); empty without one.
        rotational: whether the kernel calls one of them rotational; None where it does not say.
        free_bytes: what an ordinary user may still write.
    """

    path: Path
    io_path: IoPath | None
    proven: tuple[IoPath, ...] = ()
    findings: tuple[Finding, ...] = ()
    fs_type: str | None = None
    mount_point: str | None = None
    mount_options: tuple[str, ...] = ()
    block_devices: tuple[str, ...] = ()
    rotational: bool | None = None
    free_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "io_path": self.io_path and self.io_path.value,
            "proven": [path.value for path in self.proven],
            "findings": [finding.to_dict() for finding in self.findings],
            "fs_type": self.fs_type,
            "mount_point": self.mount_point,
            "mount_options": list(self.mount_options),
            "block_devices": list(self.block_devices),
            "rotational": self.rotational,
            "free_bytes": self.free_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """What all directories share. A version is None where the thing is not there or not asked.

    Attributes:
        gpu_usable: the driver answered and has a device; None where it was not asked.
        gpu_name: of the device that was probed.
        cuda_version: what the driver supports, e.g. "13.0".
        driver_version: of the kernel module, e.g. "580.159.04".
        nvidia_fs: version of the nvidia-fs module, "loaded" where it does not tell.
        p2pdma: whether all that peer-to-peer DMA without nvidia-fs needs seems to be there;
            None where it was not looked at. A sign, not a proof.
    """

    gpu_usable: bool | None = None
    gpu_name: str | None = None
    cuda_version: str | None = None
    driver_version: str | None = None
    kvikio_version: str | None = None
    cupy_version: str | None = None
    libcufile_version: str | None = None
    nvidia_fs: str | None = None
    p2pdma: bool | None = None
    findings: tuple[Finding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "gpu_usable": self.gpu_usable,
            "gpu_name": self.gpu_name,
            "cuda_version": self.cuda_version,
            "driver_version": self.driver_version,
            "kvikio_version": self.kvikio_version,
            "cupy_version": self.cupy_version,
            "libcufile_version": self.libcufile_version,
            "nvidia_fs": self.nvidia_fs,
            "p2pdma": self.p2pdma,
            "findings": [finding.to_dict() for finding in self.findings],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTiming:
    """How fast one drive is by one path; rates are bytes a second.

    Attributes:
        directory: one on the drive; the others on it count as timed too.
        read_bytes_per_s, write_bytes_per_s: one kind alone.
        mixed_bytes_per_s: both at once, both counted.
        half_duplex: whether both at once is hardly faster than one after the other.
        threads, task_bytes: what did best on this drive.
        cached: whether it was measured earlier.
    """

    directory: Path
    io_path: IoPath
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    half_duplex: bool
    threads: int
    task_bytes: int
    cached: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "io_path": self.io_path.value,
            "read_bytes_per_s": self.read_bytes_per_s,
            "write_bytes_per_s": self.write_bytes_per_s,
            "mixed_bytes_per_s": self.mixed_bytes_per_s,
            "half_duplex": self.half_duplex,
            "threads": self.threads,
            "task_bytes": self.task_bytes,
            "cached": self.cached,
        }

    def to_text(self) -> str:
        """The figures, in 10⁹ bytes a second, and what they mean."""
        duplex = "half-duplex" if self.half_duplex else "not half-duplex"
        source = ", from the cache" if self.cached else ""
        return (
            f"read {self.read_bytes_per_s / 1e9:.2f}, write {self.write_bytes_per_s / 1e9:.2f}, "
            f"both at once {self.mixed_bytes_per_s / 1e9:.2f} GB/s, {duplex}; best with "
            f"{self.threads} threads and tasks of {self.task_bytes / 2**20:g} MiB{source}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The answer of a probe.

    Attributes:
        asked: "auto", "gds", "posix", "host" or "gds-compat".
        verdict: the path that every directory can take; None where there is none.
        refusal: why there is none, in one or two sentences; empty otherwise.
        machine: what all directories share.
        directories: one each, in the order asked.
        timings: what was timed; empty unless somebody asked for it.
    """

    asked: str
    verdict: IoPath | None
    refusal: str
    machine: MachineReport
    directories: tuple[DirectoryReport, ...]
    timings: tuple[PathTiming, ...] = ()

    @property
    def candidates(self) -> tuple[IoPath, ...]:
        """The paths that were proven in every directory, best first: the verdict and others.

        Raises:
            IoPathError: there is none.
        """
        others = (
            path
            for path in self.directories[0].proven
            if all(path in directory.proven for directory in self.directories)
        )
        return tuple(dict.fromkeys((self.io_path, *others)))

    def with_timings(self, verdict: IoPath, timings: Iterable[PathTiming]) -> ProbeReport:
        """The report once paths were timed, and `verdict` was the fastest."""
        directories = tuple(replace(each, io_path=verdict) for each in self.directories)
        return replace(self, verdict=verdict, directories=directories, timings=tuple(timings))

    @property
    def io_path(self) -> IoPath:
        """The path that every directory takes.

        Raises:
            IoPathError: there is none; the message says why and what mends it.
        """
        if self.verdict is None:
            raise IoPathError(self.refusal)
        return self.verdict

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of the machine, then those of each directory."""
        return self.machine.findings + tuple(f for d in self.directories for f in d.findings)

    def summary(self) -> str:
        """The verdict in one line."""
        return f"io path: {self.verdict or 'none'} (asked: {self.asked})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data with these keys; later versions may add some, and rename none.

        `version` (of this form), `asked`, `io_path` (or null), `refusal`, `machine` and
        `directories`, whose keys are the attributes of `MachineReport` and `DirectoryReport`, and
        `timings`, those of `PathTiming`.
        A finding has `name`, `severity` (ok, info, warn, missing, fatal), `what` and `mend`.
        """
        return {
            "version": REPORT_VERSION,
            "asked": self.asked,
            "io_path": self.verdict and self.verdict.value,
            "refusal": self.refusal,
            "machine": self.machine.to_dict(),
            "directories": [directory.to_dict() for directory in self.directories],
            "timings": [timing.to_dict() for timing in self.timings],
        }

    def to_text(self, *, color: bool = False) -> str:
        """The report for people: a verdict for each directory, then the reasons for it."""
        rows = [(str(d.path), d.io_path or "none", _describe_storage(d)) for d in self.directories]
        width = max((len(row[0]) for row in rows), default=0)
        lines = [
            f"{path:<{width}}  {verdict!s:<10}  {rest}".rstrip() for path, verdict, rest in rows
        ]
        lines += ["", self.summary()]
        for each in self.timings:
            lines.append(f"{each.directory} by {each.io_path}: {each.to_text()}")
        sections = [("this machine", self.machine.findings)]
        sections += [(str(d.path), d.findings) for d in self.directories]
        names = [finding.name for _, findings in sections for finding in findings]
        name_width = max(map(len, names), default=0)
        for title, findings in sections:
            if findings:
                lines += ["", title]
                lines += _finding_lines(findings, name_width, color=color)
        return "\n".join(lines)


def soften(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings with what is only missing turned into information.

    For the reasons why GDS might not work, once a round trip has shown that it does.
    """
    return tuple(
        replace(f, severity=Severity.INFO) if f.severity is Severity.MISSING else f
        for f in findings
    )


_COLORS = {
    Severity.OK: "32",
    Severity.INFO: "36",
    Severity.WARN: "33",
    Severity.MISSING: "33",
    Severity.FATAL: "31",
}


def _finding_lines(findings: Iterable[Finding], name_width: int, *, color: bool) -> list[str]:
    lines = []
    for finding in findings:
        severity = f"{finding.severity.value:<7}"
        if color:
            severity = f"\033[{_COLORS[finding.severity]}m{severity}\033[0m"
        lines.append(f"  {severity}  {finding.name:<{name_width}}  {finding.what}")
        if finding.mend:
            lines.append(f"  {'':<7}  {'':<{name_width}}  -> {finding.mend}")
    return lines


def _describe_storage(directory: DirectoryReport) -> str:
    parts = []
    if directory.fs_type:
        where = f" on {', '.join(directory.block_devices)}" if directory.block_devices else ""
        parts.append(directory.fs_type + where)
    if directory.free_bytes is not None:
        parts.append(f"{directory.free_bytes / 10**9:.1f} GB free")
    return ", ".join(parts)

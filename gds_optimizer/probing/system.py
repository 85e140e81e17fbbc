"""What the kernel says about mounts, disks and modules, read from a root directory.

Only files under `root` are read, never the probed directories themselves: those may be on a mount
that hangs. Nothing here decides a path; it explains one.
"""

from __future__ import annotations

import gzip
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

# statfs(2) f_type of file systems that matter here, for when there is no mount table.
FS_MAGIC = {
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x794C7630: "overlay",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb3",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x65735546: "fuse",
    0x2FC12FC1: "zfs",
    0x00C36400: "ceph",
    0x01021997: "9p",
    0xF2F52010: "f2fs",
}


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo.

    Attributes:
        device: "major:minor" as the kernel names it; major 0 has no block device.
        mount_point: in this process's view.
        fs_type: e.g. "ext4".
        source: e.g. "/dev/nvme0n1p1".
        options: of the mount and of the file system, without duplicates.
    """

    device: str
    mount_point: str
    fs_type: str
    source: str
    options: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """The value of `name=value`, "" for a bare `name`, None where it is absent."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                return value
        return None


@dataclass(frozen=True, slots=True)
class Disks:
    """The disks under a mount: names such as "nvme0n1", and whether one is rotational."""

    names: tuple[str, ...] = ()
    rotational: bool | None = None


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Mounts in the order they were made; a line that is none is left out."""
    mounts = []
    for line in text.splitlines():
        fields = line.split()
        # A variable number of optional fields ends with a lone dash.
        if "-" not in fields[6:] or len(fields) < 10:
            continue
        dash = fields.index("-", 6)
        if len(fields) < dash + 4:
            continue
        options = dict.fromkeys(fields[5].split(",") + fields[dash + 3].split(","))
        mounts.append(
            Mount(
                device=fields[2],
                mount_point=_unescape(fields[4]),
                fs_type=fields[dash + 1],
                source=_unescape(fields[dash + 2]),
                options=tuple(options),
            )
        )
    return tuple(mounts)


class System:
    """Reads kernel files under `root`; what cannot be read is None or empty, never an error."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = Path(root)

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        try:
            return self.path(name).read_text(errors="replace")
        except OSError:
            return None

    def exists(self, name: str) -> bool:
        try:
            return self.path(name).exists()
        except OSError:
            return False

    def entries(self, name: str) -> list[Path]:
        try:
            return sorted(self.path(name).iterdir())
        except OSError:
            return []

    @cached_property
    def mounts(self) -> tuple[Mount, ...]:
        return parse_mountinfo(self.read("/proc/self/mountinfo") or "")

    def mount_of(self, path: str) -> Mount | None:
        """The mount that holds `path`, an absolute path without symbolic links.

        By name rather than by device number: btrfs and overlayfs give their files other numbers
        than the mount table shows. Of mounts on one point the last one made is on top.
        """
        inside = [path, *(str(parent) for parent in PurePosixPath(path).parents)]
        found: Mount | None = None
        for mount in self.mounts:
            if mount.mount_point in inside and (
                found is None or len(mount.mount_point) >= len(found.mount_point)
            ):
                found = mount
        return found

    def disks_of(self, mount: Mount) -> Disks:
        """The physical or virtual disks under `mount`, through partitions, md and dm."""
        device = self.path(f"/sys/dev/block/{mount.device}")
        if not device.exists():
            # File systems over several devices have an anonymous number, but name one device.
            device = self.path(f"/sys/class/block/{PurePosixPath(mount.source).name}")
        names: dict[str, bool | None] = {}
        if mount.source.startswith("/dev/") or not mount.device.startswith("0:"):
            self._collect_disks(device, names, depth=0)
        flags = [flag for flag in names.values() if flag is not None]
        return Disks(tuple(sorted(names)), any(flags) if flags else None)

    def _collect_disks(self, device: Path, names: dict[str, bool | None], depth: int) -> None:
        try:
            device = device.resolve(strict=True)
            if (device / "partition").exists():
                device = device.parent
            slaves = sorted((device / "slaves").iterdir()) if (device / "slaves").is_dir() else []
            if slaves and depth < 8:
                for slave in slaves:
                    self._collect_disks(slave, names, depth + 1)
                return
            names[device.name] = None
            names[device.name] = (device / "queue/rotational").read_text().strip() == "1"
        except OSError:
            return

    @cached_property
    def in_container(self) -> bool:
        return self.exists("/.dockerenv") or self.exists("/run/.containerenv")

    @cached_property
    def kernel_release(self) -> str:
        return (self.read("/proc/sys/kernel/osrelease") or "").strip()

    @cached_property
    def nvidia_fs_version(self) -> str | None:
        """Version of the nvidia-fs module; "loaded" where it does not tell; None if not loaded."""
        text = self.read("/proc/driver/nvidia-fs/version")
        if text is not None:
            match = re.search(r"\d+(?:\.\d+)+", text)
            return match[0] if match else "loaded"
        modules = self.read("/proc/modules") or ""
        loaded = any(line.startswith("nvidia_fs ") for line in modules.splitlines())
        return "loaded" if loaded else None

    @cached_property
    def driver(self) -> tuple[str | None, bool]:
        """Version of the NVIDIA kernel module, and whether it is the open one."""
        text = self.read("/proc/driver/nvidia/version") or ""
        match = re.search(r"\b\d{3,}\.\d+(?:\.\d+)*\b", text)
        return (match[0] if match else None), "Open Kernel Module" in text

    def registry_dword(self, name: str) -> str | None:
        """A value of the NVIDIA module's NVreg_RegistryDwords, by name in any case."""
        text = self.read("/proc/driver/nvidia/params") or ""
        match = re.search(rf"RegistryDwords:.*?\b{name}=(\w+)", text, re.IGNORECASE)
        return match[1] if match else None

    @cached_property
    def kernel_has_p2pdma(self) -> bool | None:
        """Whether the kernel was built with CONFIG_PCI_P2PDMA; None where it does not tell."""
        config = self._kernel_config()
        if config is not None:
            return re.search(r"^CONFIG_PCI_P2PDMA=y", config, re.MULTILINE) is not None
        try:
            with self.path("/proc/kallsyms").open("rb") as symbols:
                return any(b" p2pdma_pgmap_ops" in line for line in symbols)
        except OSError:
            return None

    def _kernel_config(self) -> str | None:
        try:
            with gzip.open(self.path("/proc/config.gz"), "rt", errors="replace") as file:
                return file.read()
        except OSError:
            pass
        return self.read(f"/boot/config-{self.kernel_release}") if self.kernel_release else None

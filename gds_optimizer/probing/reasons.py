"""Why bytes can or cannot take a path, and what mends it.

These are explanations, never verdicts: a round trip decides. Sources: NVIDIA's GPUDirect Storage
installation and troubleshooting guide ("NVMe P2PDMA", "NVMe and NVMe-oF", known issues) and the
messages of libcufile.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping

from gds_optimizer.probing.cufile_config import CufileConfig
from gds_optimizer.probing.report import Finding, Severity
from gds_optimizer.probing.system import Disks, Mount, System

MEMORY_FS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
LOCAL_GDS_FS = frozenset({"ext4", "xfs"})
NETWORK_GDS_FS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "wekafs", "panfs", "scatefs"}
)
NETWORK_FS = NETWORK_GDS_FS | frozenset(
    {"cifs", "smb3", "smbfs", "ceph", "9p", "afs", "glusterfs", "virtiofs", "ocfs2", "gfs2"}
)
NETWORK_FUSE = ("sshfs", "glusterfs", "s3fs", "gcsfuse", "ceph", "goofys", "juicefs", "blobfuse")

LOW_SPACE_BYTES = 10 * 10**9
MIN_P2PDMA_KERNEL = (6, 2)
MIN_P2PDMA_DRIVER = (565, 47)


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version or "")[:2])


def is_network_fs(fs_type: str) -> bool:
    kind, _, name = fs_type.partition(".")
    return fs_type in NETWORK_FS or (kind == "fuse" and name.startswith(NETWORK_FUSE))


def storage_findings(
    fs_type: str | None, disks: Disks, free_bytes: int | None, *, allow_tmpfs: bool
) -> list[Finding]:
    """What any path cares about: the kind of file system and disk, and its free space."""
    found = []
    if fs_type in MEMORY_FS:
        found.append(
            Finding(
                "memory-file-system",
                Severity.WARN if allow_tmpfs else Severity.FATAL,
                f"{fs_type} keeps files in memory, so nothing would be offloaded",
                "name a directory on an NVMe drive"
                + ("" if allow_tmpfs else ", or set allow_tmpfs where memory is what you want"),
            )
        )
    elif fs_type == "overlay":
        found.append(
            Finding(
                "overlay",
                Severity.WARN,
                "overlayfs: a container's own writable layer, on whatever drive the images are",
                "mount a directory of an NVMe drive into the container (docker: -v /nvme:/nvme)",
            )
        )
    elif fs_type and is_network_fs(fs_type):
        found.append(
            Finding(
                "network-file-system",
                Severity.WARN,
                f"{fs_type} is a network or shared file system: its latency and its locks are "
                "in every step",
                "name a directory on a local NVMe drive",
            )
        )
    if disks.rotational:
        found.append(
            Finding(
                "rotational",
                Severity.WARN,
                f"the kernel calls {', '.join(disks.names)} a rotational disk "
                "(of virtual disks it may say so wrongly)",
                "name a directory on an NVMe drive",
            )
        )
    if free_bytes is not None and free_bytes < LOW_SPACE_BYTES:
        found.append(
            Finding(
                "free-space",
                Severity.INFO,
                f"{free_bytes / 10**9:.2f} GB free; fp32 state with two moments takes 12 bytes "
                "a parameter",
            )
        )
    return found


def gds_directory_findings(
    system: System, mount: Mount | None, fs_type: str | None, disks: Disks
) -> list[Finding]:
    """What cuFile asks of the file system and disk under a directory."""
    found = []
    if fs_type in NETWORK_GDS_FS:
        found.append(
            Finding(
                "gds-file-system",
                Severity.INFO,
                f"cuFile has GDS over {fs_type} where the vendor's client and RDMA are set up",
            )
        )
    elif fs_type not in LOCAL_GDS_FS:
        found.append(
            Finding(
                "gds-file-system",
                Severity.MISSING,
                f"cuFile has no GDS on {fs_type or 'this unknown file system'}",
                "name a directory on ext4 (data=ordered) or xfs on an NVMe drive",
            )
        )
    if mount is None:
        found.append(
            Finding(
                "mount-table",
                Severity.MISSING,
                "no mount in /proc/self/mountinfo holds this directory; cuFile looks there",
                "mount /proc",
            )
        )
        return found
    if fs_type == "ext4":
        found.append(_ext4_finding(mount))
    if fs_type in LOCAL_GDS_FS:
        strangers = [name for name in disks.names if not name.startswith("nvme")]
        if strangers or not disks.names:
            found.append(
                Finding(
                    "nvme",
                    Severity.MISSING,
                    f"{', '.join(strangers) or mount.source} is no NVMe drive that this system "
                    "shows; GDS moves bytes from NVMe drives",
                    "name a directory on an NVMe drive",
                )
            )
        elif len(disks.names) > 1:
            found.append(
                Finding(
                    "raid",
                    Severity.INFO,
                    f"{len(disks.names)} drives behind one file system: P2PDMA over md wants "
                    "block.raid.use_pci_p2pdma in cufile.json",
                    "name one directory for each drive instead",
                )
            )
        if system.exists("/run/udev/data") and not system.exists(f"/run/udev/data/b{mount.device}"):
            found.append(
                Finding(
                    "udev-device",
                    Severity.MISSING,
                    f"udev has no record of {mount.source} (/run/udev/data/b{mount.device}); "
                    "cuFile refuses files on a device that udev does not know",
                    f"on the host: udevadm trigger --action=add --name-match={mount.source}",
                )
            )
    return found


def _ext4_finding(mount: Mount) -> Finding:
    mode = mount.option("data")
    remedy = f"sudo mount -o remount,data=ordered {mount.mount_point} (some modes want a new mount)"
    if mode == "ordered":
        return Finding("ext4-journal", Severity.OK, "ext4 is mounted with data=ordered")
    if mode is None:
        return Finding(
            "ext4-journal",
            Severity.INFO,
            "the mount table of ext4 shows no data= option; the kernel then uses data=ordered, "
            "but some versions of cuFile want to see it",
            "mount with -o data=ordered",
        )
    return Finding(
        "ext4-journal",
        Severity.MISSING,
        f"ext4 is mounted with data={mode}; GDS wants data=ordered",
        remedy,
    )


def gds_machine_findings(
    system: System, config: CufileConfig, env: Mapping[str, str]
) -> tuple[list[Finding], bool]:
    """What cuFile asks of the machine, and whether P2PDMA seems complete.

    GDS needs the nvidia-fs module or P2PDMA; each is only "missing" where the other is too.
    """
    found = _proc_and_udev_findings(system)
    fs_version = system.nvidia_fs_version
    unmet = p2pdma_unmet(system, config, env)
    if fs_version is not None:
        devices = [p.name for p in system.entries("/dev") if p.name.startswith("nvidia-fs")]
        if devices:
            found.append(Finding("nvidia-fs", Severity.OK, f"nvidia-fs {fs_version} is loaded"))
        else:
            found.append(
                Finding(
                    "nvidia-fs-device",
                    Severity.MISSING,
                    f"nvidia-fs {fs_version} is loaded, but there is no /dev/nvidia-fs*",
                    "start the container with NVIDIA_GDS=enabled (NVIDIA container toolkit) or "
                    "with a --device=/dev/nvidia-fsN for each of the host's"
                    if system.in_container
                    else "run as root what makes the devices: nvidia-fs's modprobe rules, or a "
                    "container's --device=/dev/nvidia-fsN for each",
                )
            )
    else:
        found.append(
            Finding(
                "nvidia-fs",
                Severity.MISSING if unmet else Severity.INFO,
                "the kernel module nvidia-fs is not loaded",
                "on the host: install nvidia-gds (or nvidia-fs-dkms), then sudo modprobe nvidia_fs",
            )
        )
    if unmet:
        found.append(
            Finding(
                "p2pdma",
                Severity.INFO if fs_version else Severity.MISSING,
                f"GDS without nvidia-fs (P2PDMA) lacks: {'; '.join(what for what, _ in unmet)}",
                "; ".join(mend for _, mend in unmet),
            )
        )
    else:
        found.append(Finding("p2pdma", Severity.OK, "what P2PDMA needs seems to be there"))
    found += _iommu_findings(system)
    found += _config_findings(config, env)
    return found, not unmet


def _proc_and_udev_findings(system: System) -> list[Finding]:
    found = []
    if not system.exists("/proc/modules"):
        found.append(
            Finding(
                "proc-modules",
                Severity.MISSING,
                "/proc/modules is missing (a sandbox, or a kernel without modules); some "
                "versions of cuFile wait for it for ever",
                "run on a kernel with loadable modules and with its /proc visible",
            )
        )
    if not system.exists("/run/udev/data"):
        found.append(
            Finding(
                "udev",
                Severity.MISSING,
                "/run/udev/data is missing; cuFile asks udev what a file's device is",
                "start the container with -v /run/udev:/run/udev:ro"
                if system.in_container
                else "start systemd-udevd, or a container with -v /run/udev:/run/udev:ro",
            )
        )
    return found


def p2pdma_unmet(
    system: System, config: CufileConfig, env: Mapping[str, str]
) -> list[tuple[str, str]]:
    """What peer-to-peer DMA without nvidia-fs (cuFile 1.13 or later) still lacks, with remedies."""
    unmet = []
    if system.kernel_has_p2pdma is False:
        unmet.append(("a kernel with CONFIG_PCI_P2PDMA", "boot a kernel built with it"))
    if system.kernel_release and _numbers(system.kernel_release) < MIN_P2PDMA_KERNEL:
        unmet.append((f"Linux 6.2 (this is {system.kernel_release})", "boot a newer kernel"))
    version, is_open = system.driver
    if version is None or not is_open or _numbers(version) < MIN_P2PDMA_DRIVER:
        kind = "open" if is_open else "proprietary"
        seen = f" (this is {version}, {kind})" if version else ""
        unmet.append(
            (
                f"the open NVIDIA kernel module 565.47 or later{seen}",
                "install nvidia-open 565.47 or later",
            )
        )
    if platform.machine() == "x86_64" and system.registry_dword("RMForceStaticBar1") != "1":
        unmet.append(
            (
                "a static BAR1",
                (
                    'set NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;" '
                    "for the nvidia module and reboot"
                ),
            )
        )
    multipath = system.read("/sys/module/nvme_core/parameters/multipath")
    if multipath is not None and multipath.strip() == "Y":
        unmet.append(
            ("NVMe multipathing switched off", "set nvme_core multipath=N in modprobe.d and reboot")
        )
    by_env = env.get("CUFILE_USE_PCIP2PDMA", "").lower() in ("1", "true")
    if not by_env and config.get("properties", "use_pci_p2pdma") is not True:
        unmet.append(
            (
                "properties.use_pci_p2pdma in cuFile's configuration",
                (
                    "set properties.use_pci_p2pdma and block.nvme.use_pci_p2pdma to true in "
                    f"{config.source or '/etc/cufile.json'}"
                ),
            )
        )
    return unmet


def _iommu_findings(system: System) -> list[Finding]:
    words = (system.read("/proc/cmdline") or "").split()
    passes = any(re.fullmatch(r"(intel_|amd_)?iommu=(pt|off)", word) for word in words)
    if passes or not system.entries("/sys/class/iommu"):
        return []
    return [
        Finding(
            "iommu",
            Severity.WARN,
            "the IOMMU translates device addresses; DMA between a drive and a GPU may then be "
            "slow or fail",
            "boot with iommu=off, or iommu=pt where the platform wants one",
        )
    ]


def _config_findings(config: CufileConfig, env: Mapping[str, str]) -> list[Finding]:
    found = []
    if config.error:
        found.append(
            Finding(
                "cufile-config",
                Severity.WARN,
                f"cuFile's configuration {config.source} was left out: {config.error}",
                "mend the file, or unset CUFILE_ENV_PATH_JSON",
            )
        )
    by_env = env.get("CUFILE_FORCE_COMPAT_MODE", "").lower() in ("1", "true")
    if by_env or config.get("properties", "force_compat_mode") is True:
        where = "CUFILE_FORCE_COMPAT_MODE" if by_env else f"force_compat_mode in {config.source}"
        found.append(
            Finding(
                "cufile-forced-compat",
                Severity.MISSING,
                f"{where} forces cuFile into its compatibility mode",
                "unset it" if by_env else "set it to false",
            )
        )
    return found

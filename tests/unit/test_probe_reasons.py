"""Every reason is found where its cause is, names what mends it, and is absent where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gds_optimizer.probing import reasons
from gds_optimizer.probing.cufile_config import CufileConfig
from gds_optimizer.probing.report import Finding, Severity
from gds_optimizer.probing.system import Disks, Mount, System

NVME = Disks(("nvme0n1",), False)
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
P2PDMA_CONFIG = CufileConfig("/etc/cufile.json", {"properties": {"use_pci_p2pdma": True}})

# A machine where both ways of GDS are complete.
COMPLETE = {
    "/proc/modules": "nvidia_fs 1 0 - Live 0x0\n",
    "/proc/driver/nvidia-fs/version": "version: 2.26\n",
    "/proc/sys/kernel/osrelease": "6.8.0-90-generic\n",
    "/proc/kallsyms": "0000 d p2pdma_pgmap_ops\n",
    "/proc/driver/nvidia/version": OPEN_DRIVER,
    "/proc/driver/nvidia/params": 'RegistryDwords: "RMForceStaticBar1=1"\n',
    "/proc/cmdline": "quiet iommu=pt\n",
    "/sys/class/iommu/dmar0": "",
    "/sys/module/nvme_core/parameters/multipath": "N\n",
    "/run/udev/data/b259:0": "E:ID_FS_TYPE=ext4\n",
    "/dev/nvidia-fs0": "",
}


@pytest.fixture(autouse=True)
def x86_64(monkeypatch):
    monkeypatch.setattr(reasons.platform, "machine", lambda: "x86_64")


def tree(root: Path, **changes: str | None) -> System:
    """The complete machine with files changed; None leaves one out."""
    for name, text in {**COMPLETE, **changes}.items():
        if text is not None:
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return System(root)


def machine(system: System, config: CufileConfig = P2PDMA_CONFIG, **env: str):
    found, p2pdma = reasons.gds_machine_findings(system, config, env)
    names = [finding.name for finding in found]
    assert len(set(names)) == len(names)
    return {finding.name: finding for finding in found}, p2pdma


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in found}


def mount(fs_type: str, *options: str, source: str = "/dev/nvme0n1", device: str = "259:0"):
    return Mount(
        device=device, mount_point="/data", fs_type=fs_type, source=source, options=options
    )


def directory(system: System, a_mount: Mount | None, disks: Disks = NVME):
    fs_type = a_mount.fs_type if a_mount else None
    return by_name(reasons.gds_directory_findings(system, a_mount, fs_type, disks))


# --- the machine ---


def test_a_complete_machine_lacks_nothing(tmp_path):
    found, p2pdma = machine(tree(tmp_path))
    assert p2pdma
    assert {name: f.severity for name, f in found.items()} == {
        "nvidia-fs": Severity.OK,
        "p2pdma": Severity.OK,
    }
    assert "2.26" in found["nvidia-fs"].what


def test_nothing_at_all(tmp_path):
    found, p2pdma = machine(System(tmp_path), CufileConfig())
    assert not p2pdma
    assert {name: f.severity for name, f in found.items()} == {
        "proc-modules": Severity.MISSING,
        "udev": Severity.MISSING,
        "nvidia-fs": Severity.MISSING,
        "p2pdma": Severity.MISSING,
    }
    assert all(f.mend for f in found.values())
    assert "modprobe nvidia_fs" in found["nvidia-fs"].mend


def test_one_of_the_two_is_enough(tmp_path):
    without_fs = {"/proc/modules": "", "/proc/driver/nvidia-fs/version": None}
    found, p2pdma = machine(tree(tmp_path / "a", **without_fs))
    assert p2pdma
    assert found["nvidia-fs"].severity is Severity.INFO
    found, p2pdma = machine(tree(tmp_path / "b"), CufileConfig())
    assert not p2pdma
    assert found["p2pdma"].severity is Severity.INFO


@pytest.mark.parametrize("marker", ["/.dockerenv", "/run/.containerenv"])
def test_a_container_hears_of_flags(tmp_path, marker):
    lacking = {"/run/udev/data/b259:0": None, "/dev/nvidia-fs0": None, marker: ""}
    found, _ = machine(tree(tmp_path, **lacking))
    assert found["udev"].severity is Severity.MISSING
    assert found["udev"].mend == "start the container with -v /run/udev:/run/udev:ro"
    assert found["nvidia-fs-device"].severity is Severity.MISSING
    assert "--device=/dev/nvidia-fs" in found["nvidia-fs-device"].mend
    assert "NVIDIA_GDS=enabled" in found["nvidia-fs-device"].mend
    assert "nvidia-fs" not in found


def test_outside_a_container_udev_is_started(tmp_path):
    found, _ = machine(tree(tmp_path, **{"/run/udev/data/b259:0": None}))
    assert "start systemd-udevd" in found["udev"].mend


@pytest.mark.parametrize(
    ("changes", "what", "mend"),
    [
        ({"/proc/kallsyms": "0000 T x\n"}, "CONFIG_PCI_P2PDMA", "boot"),
        ({"/proc/sys/kernel/osrelease": "5.15.0-100\n"}, "Linux 6.2 (this is 5.15", "newer"),
        (
            {"/proc/driver/nvidia/version": OPEN_DRIVER.replace("580.95", "550.54")},
            "(this is 550.54.05, open)",
            "nvidia-open",
        ),
        (
            {"/proc/driver/nvidia/version": OPEN_DRIVER.replace("Open Kernel", "Kernel")},
            "(this is 580.95.05, proprietary)",
            "nvidia-open",
        ),
        ({"/proc/driver/nvidia/version": None}, "the open NVIDIA kernel module", "nvidia-open"),
        ({"/proc/driver/nvidia/params": 'RegistryDwords: ""\n'}, "static BAR1", "NVreg_Registry"),
        ({"/sys/module/nvme_core/parameters/multipath": "Y\n"}, "multipath", "multipath=N"),
    ],
)
def test_what_p2pdma_lacks(tmp_path, changes, what, mend):
    unmet = reasons.p2pdma_unmet(tree(tmp_path, **changes), P2PDMA_CONFIG, {})
    assert len(unmet) == 1
    assert what in unmet[0][0]
    assert mend in unmet[0][1]


def test_p2pdma_has_to_be_switched_on(tmp_path):
    system = tree(tmp_path)
    off = CufileConfig("/my/cufile.json", {"properties": {"use_pci_p2pdma": False}})
    [(what, mend)] = reasons.p2pdma_unmet(system, off, {})
    assert "properties.use_pci_p2pdma" in what
    assert mend.endswith("in /my/cufile.json")
    assert reasons.p2pdma_unmet(system, off, {"CUFILE_USE_PCIP2PDMA": "true"}) == []


def test_static_bar1_is_a_matter_of_x86(tmp_path, monkeypatch):
    monkeypatch.setattr(reasons.platform, "machine", lambda: "aarch64")
    system = tree(tmp_path, **{"/proc/driver/nvidia/params": None})
    assert reasons.p2pdma_unmet(system, P2PDMA_CONFIG, {}) == []


def test_an_iommu_that_translates_is_a_risk(tmp_path):
    found, _ = machine(tree(tmp_path, **{"/proc/cmdline": "quiet intel_iommu=on\n"}))
    assert found["iommu"].severity is Severity.WARN
    assert "iommu=pt" in found["iommu"].mend
    found, _ = machine(tree(tmp_path / "b", **{"/proc/cmdline": "amd_iommu=off\n"}))
    assert "iommu" not in found


def test_forced_compat_mode_is_named_with_its_place(tmp_path):
    forced = CufileConfig("/c.json", {"properties": {"force_compat_mode": True}})
    found, _ = machine(tree(tmp_path), forced)
    assert found["cufile-forced-compat"].severity is Severity.MISSING
    assert "/c.json" in found["cufile-forced-compat"].what
    found, _ = machine(tree(tmp_path), CUFILE_FORCE_COMPAT_MODE="true")
    assert found["cufile-forced-compat"].what.startswith("CUFILE_FORCE_COMPAT_MODE forces")
    found, _ = machine(tree(tmp_path), CUFILE_FORCE_COMPAT_MODE="false")
    assert "cufile-forced-compat" not in found


def test_an_unreadable_configuration_is_named(tmp_path):
    found, _ = machine(tree(tmp_path), CufileConfig("/c.json", error="it is no JSON"))
    assert found["cufile-config"].severity is Severity.WARN
    assert "/c.json" in found["cufile-config"].what


# --- a directory, for GDS ---


@pytest.mark.parametrize(
    ("options", "severity"),
    [
        (("rw", "data=ordered"), Severity.OK),
        (("rw",), Severity.INFO),
        (("rw", "data=writeback"), Severity.MISSING),
        (("rw", "data=journal"), Severity.MISSING),
    ],
)
def test_ext4_wants_ordered_data(tmp_path, options, severity):
    found = directory(tree(tmp_path), mount("ext4", *options))
    assert {name: f.severity for name, f in found.items()} == {"ext4-journal": severity}
    if severity is Severity.MISSING:
        assert options[1] in found["ext4-journal"].what
        assert "data=ordered" in found["ext4-journal"].mend


def test_xfs_on_nvme_lacks_nothing(tmp_path):
    assert directory(tree(tmp_path), mount("xfs", "rw")) == {}


@pytest.mark.parametrize("fs_type", ["btrfs", "zfs", "overlay", "tmpfs", "cifs", "fuse.sshfs"])
def test_file_systems_without_gds(tmp_path, fs_type):
    found = directory(tree(tmp_path), mount(fs_type, "rw"))
    assert found["gds-file-system"].severity is Severity.MISSING
    assert fs_type in found["gds-file-system"].what
    assert "xfs" in found["gds-file-system"].mend


@pytest.mark.parametrize("fs_type", sorted(reasons.NETWORK_GDS_FS))
def test_network_file_systems_with_gds_are_named(tmp_path, fs_type):
    remote = mount(fs_type, "rw", source="server:/x", device="0:50")
    found = directory(tree(tmp_path), remote, Disks())
    assert {name: f.severity for name, f in found.items()} == {"gds-file-system": Severity.INFO}
    assert fs_type in found["gds-file-system"].what


def test_a_drive_that_is_no_nvme(tmp_path):
    found = directory(tree(tmp_path), mount("xfs", "rw", source="/dev/vda"), Disks(("vda",), True))
    assert found["nvme"].severity is Severity.MISSING
    assert "vda" in found["nvme"].what
    hidden = directory(tree(tmp_path), mount("xfs", "rw", source="/dev/sdq"), Disks())
    assert "/dev/sdq" in hidden["nvme"].what


def test_several_drives_behind_one_file_system(tmp_path):
    raid = Disks(("nvme0n1", "nvme1n1"), False)
    found = directory(tree(tmp_path), mount("xfs", "rw"), raid)
    assert found["raid"].severity is Severity.INFO
    assert "block.raid.use_pci_p2pdma" in found["raid"].what


def test_a_device_that_udev_does_not_know(tmp_path):
    found = directory(tree(tmp_path), mount("xfs", "rw", device="259:7"))
    assert found["udev-device"].severity is Severity.MISSING
    assert "b259:7" in found["udev-device"].what
    # Without any udev data the machine's own finding says so, once.
    bare = tree(tmp_path / "b", **{"/run/udev/data/b259:0": None})
    assert directory(bare, mount("xfs", "rw", device="259:7")) == {}


def test_a_directory_in_no_mount_table(tmp_path):
    found = directory(tree(tmp_path), None)
    assert found["mount-table"].severity is Severity.MISSING


# --- a directory, for any path ---


def storage(fs_type="xfs", disks=NVME, free_bytes=10**12, *, allow_tmpfs=False):
    found = reasons.storage_findings(fs_type, disks, free_bytes, allow_tmpfs=allow_tmpfs)
    return by_name(found)


def test_a_good_directory_raises_no_eyebrow():
    assert storage() == {}


@pytest.mark.parametrize("fs_type", ["tmpfs", "ramfs"])
def test_memory_is_refused_unless_allowed(fs_type):
    assert storage(fs_type)["memory-file-system"].severity is Severity.FATAL
    assert "allow_tmpfs" in storage(fs_type)["memory-file-system"].mend
    allowed = storage(fs_type, allow_tmpfs=True)
    assert allowed["memory-file-system"].severity is Severity.WARN


def test_overlayfs_is_a_container_s_own_layer():
    assert storage("overlay")["overlay"].severity is Severity.WARN
    assert "-v /nvme" in storage("overlay")["overlay"].mend


@pytest.mark.parametrize(
    "fs_type", ["nfs", "nfs4", "cifs", "lustre", "gpfs", "beegfs", "9p", "fuse.sshfs"]
)
def test_network_file_systems_are_slow(fs_type):
    assert storage(fs_type)["network-file-system"].severity is Severity.WARN
    assert "locks" in storage(fs_type)["network-file-system"].what


@pytest.mark.parametrize("fs_type", ["ext4", "btrfs", "fuse.ntfs-3g", None])
def test_local_file_systems_are_not_network_ones(fs_type):
    assert storage(fs_type) == {}


def test_rotational_disks():
    found = storage(disks=Disks(("sda",), True))
    assert found["rotational"].severity is Severity.WARN
    assert "sda" in found["rotational"].what
    assert storage(disks=Disks(("sda",), None)) == {}


def test_low_free_space():
    found = storage(free_bytes=reasons.LOW_SPACE_BYTES - 1)
    assert found["free-space"].severity is Severity.INFO
    assert storage(free_bytes=reasons.LOW_SPACE_BYTES) == {}

"""Reading /proc, /sys and cuFile's settings from a root directory."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from gds_optimizer.probing.cufile_config import (
    CufileConfig,
    load_cufile_config,
    parse_commented_json,
    probe_config,
)
from gds_optimizer.probing.system import Disks, Mount, System, parse_mountinfo

MOUNTINFO = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro,data=ordered
23 22 0:21 / /proc rw - proc proc rw
30 22 259:5 / /mnt/my\\040disk rw,noatime shared:7 master:3 - xfs /dev/nvme1n1 rw,attr2
31 22 0:50 / /data ro - nfs4 server:/export rw,vers=4.2
32 31 9:0 / /data rw,relatime - ext4 /dev/md0 rw
what is this
"""


def tree(root: Path, files: dict[str, str]) -> System:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return System(root)


def test_mounts_are_read_with_their_options():
    mounts = parse_mountinfo(MOUNTINFO)
    assert [m.mount_point for m in mounts] == ["/", "/proc", "/mnt/my disk", "/data", "/data"]
    assert mounts[0] == Mount(
        device="259:2",
        mount_point="/",
        fs_type="ext4",
        source="/dev/nvme0n1p2",
        options=("rw", "relatime", "errors=remount-ro", "data=ordered"),
    )
    assert mounts[0].option("data") == "ordered"
    assert mounts[0].option("relatime") == ""
    assert mounts[0].option("dat") is None


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("/", "/dev/nvme0n1p2"),
        ("/database/x", "/dev/nvme0n1p2"),  # /data is no parent of /database
        ("/mnt/my disk", "/dev/nvme1n1"),
        ("/mnt/my disk/a/b", "/dev/nvme1n1"),
        ("/data/x", "/dev/md0"),  # mounted over the other
    ],
)
def test_the_mount_of_a_path_is_the_innermost_and_topmost(tmp_path, path, source):
    mount = tree(tmp_path, {"/proc/self/mountinfo": MOUNTINFO}).mount_of(path)
    assert mount is not None
    assert mount.source == source


def test_without_a_mount_table_there_is_no_mount(tmp_path):
    assert System(tmp_path).mount_of("/data") is None


def test_this_machine_s_mount_agrees_with_df(tmp_path):
    mount = System().mount_of(str(tmp_path.resolve()))
    command = ["df", "--output=fstype,target", str(tmp_path)]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert mount is not None
    assert [mount.fs_type, mount.mount_point] == words[-2:]


def block_device(root: Path, path: str, number: str, *, rotational: str | None) -> Path:
    """A device as sysfs has it: a directory under devices, and links by number and by name."""
    device = root / "sys/devices" / path
    (device / "slaves").mkdir(parents=True)
    for index in (f"sys/dev/block/{number}", f"sys/class/block/{device.name}"):
        link = root / index
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
    if rotational is not None:
        (device / "queue").mkdir()
        (device / "queue/rotational").write_text(rotational + "\n")
    return device


def mount_on(device: str, source: str) -> Mount:
    return Mount(device=device, mount_point="/d", fs_type="ext4", source=source, options=())


def test_the_disk_of_a_partition_is_the_whole_disk(tmp_path):
    block_device(tmp_path, "pci/nvme0n1", "259:0", rotational="0")
    partition = block_device(tmp_path, "pci/nvme0n1/nvme0n1p2", "259:2", rotational=None)
    (partition / "partition").write_text("2\n")
    disks = System(tmp_path).disks_of(mount_on("259:2", "/dev/nvme0n1p2"))
    assert disks == Disks(("nvme0n1",), False)


def test_the_disks_of_a_volume_are_those_below_it(tmp_path):
    fast = block_device(tmp_path, "pci/nvme0n1", "259:0", rotational="0")
    slow = block_device(tmp_path, "pci/sda", "8:0", rotational="1")
    part = block_device(tmp_path, "pci/sda/sda1", "8:1", rotational=None)
    (part / "partition").write_text("1\n")
    raid = block_device(tmp_path, "virtual/md0", "9:0", rotational="0")
    (raid / "slaves/nvme0n1").symlink_to(fast)
    (raid / "slaves/sda1").symlink_to(part)
    mapped = block_device(tmp_path, "virtual/dm-0", "253:0", rotational="0")
    (mapped / "slaves/md0").symlink_to(raid)
    disks = System(tmp_path).disks_of(mount_on("253:0", "/dev/mapper/vg-data"))
    assert disks == Disks(("nvme0n1", "sda"), True)
    assert slow.exists()


def test_an_anonymous_device_is_found_by_its_source(tmp_path):
    block_device(tmp_path, "pci/nvme3n1", "259:3", rotational="0")
    disks = System(tmp_path).disks_of(mount_on("0:44", "/dev/nvme3n1"))
    assert disks == Disks(("nvme3n1",), False)


def test_a_network_mount_has_no_disk(tmp_path):
    block_device(tmp_path, "pci/export", "259:3", rotational="0")
    assert System(tmp_path).disks_of(mount_on("0:50", "server:/export")) == Disks()


NVRM = "NVRM version: NVIDIA UNIX {}  {}  Release Build  (dvs-builder)\nGCC version: gcc 13.3.0\n"


@pytest.mark.parametrize(
    ("kind", "version", "wanted"),
    [
        ("Open Kernel Module for x86_64", "580.159.04", ("580.159.04", True)),
        ("x86_64 Kernel Module", "535.104", ("535.104", False)),
    ],
)
def test_the_driver_s_version_and_kind(tmp_path, kind, version, wanted):
    system = tree(tmp_path, {"/proc/driver/nvidia/version": NVRM.format(kind, version)})
    assert system.driver == wanted


def test_no_driver(tmp_path):
    assert System(tmp_path).driver == (None, False)


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({}, None),
        ({"/proc/modules": "nvidia_fsx 1 0 - Live 0x0\nnvme 2 0 - Live 0x0\n"}, None),
        ({"/proc/modules": "nvme 2 0 - Live 0x0\nnvidia_fs 1 0 - Live 0x0\n"}, "loaded"),
        ({"/proc/driver/nvidia-fs/version": "version: 2.26.6\n"}, "2.26.6"),
        ({"/proc/driver/nvidia-fs/version": ""}, "loaded"),
    ],
)
def test_nvidia_fs(tmp_path, files, version):
    assert tree(tmp_path, files).nvidia_fs_version == version


def test_registry_dwords_are_found_in_any_case(tmp_path):
    params = 'EnableMSI: 1\nRegistryDwords: "A=2;RMForceStaticBar1=1;B=3"\n'
    system = tree(tmp_path, {"/proc/driver/nvidia/params": params})
    assert system.registry_dword("rmforcestaticbar1") == "1"
    assert system.registry_dword("EnableMSI") is None
    assert system.registry_dword("ForceStaticBar1") is None


def test_p2pdma_in_the_kernel_s_own_configuration(tmp_path):
    (tmp_path / "proc").mkdir()
    with gzip.open(tmp_path / "proc/config.gz", "wt") as file:
        file.write("CONFIG_PCI=y\n# CONFIG_PCI_P2PDMA is not set\n")
    assert System(tmp_path).kernel_has_p2pdma is False


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, None),
        ({"/boot/config-6.8.0": "CONFIG_PCI_P2PDMA=y\n"}, True),
        ({"/boot/config-6.8.0": "CONFIG_PCI_P2PDMA_NOT=y\n"}, False),
        ({"/proc/kallsyms": "0000 T x\n0000 d p2pdma_pgmap_ops\n"}, True),
        ({"/proc/kallsyms": "0000 T x\n0000 d not_p2pdma_pgmap_ops\n"}, False),
    ],
)
def test_p2pdma_elsewhere(tmp_path, files, wanted):
    system = tree(tmp_path, {"/proc/sys/kernel/osrelease": "6.8.0\n", **files})
    assert system.kernel_has_p2pdma is wanted


COMMENTED = """\
{
    // where "logs" go
    "logging": {"level": "INFO"},  /* "not": "here" */
    "properties": {
        "allow_compat_mode": true,
        "rdma": "http://host//x",  // two slashes in a string
        "list": [1, 2,],
        "commas": ",}",
    },
}
"""


def test_json_with_comments_and_trailing_commas():
    assert parse_commented_json(COMMENTED) == {
        "logging": {"level": "INFO"},
        "properties": {
            "allow_compat_mode": True,
            "rdma": "http://host//x",
            "list": [1, 2],
            "commas": ",}",
        },
    }


def test_the_probe_changes_only_the_fallback_the_log_and_the_counters(tmp_path):
    system = tree(tmp_path, {"/etc/cufile.json": COMMENTED})
    config = load_cufile_config(system, {})
    assert config.source == "/etc/cufile.json"
    strict = json.loads(probe_config(config, "/logs", allow_compat_mode=False))
    assert strict == {
        "logging": {"level": "ERROR", "dir": "/logs"},
        "profile": {"cufile_stats": 3},
        "properties": {
            "allow_compat_mode": False,
            "rdma": "http://host//x",
            "list": [1, 2],
            "commas": ",}",
        },
    }
    loose = json.loads(probe_config(config, "/logs", allow_compat_mode=True))
    assert loose["properties"]["allow_compat_mode"] is True
    assert config.get("properties", "allow_compat_mode") is True  # the original is as it was


def test_the_environment_names_the_configuration(tmp_path):
    system = tree(tmp_path, {"/etc/cufile.json": '{"from": "etc"}'})
    mine = tmp_path / "mine.json"
    mine.write_text('{"from": "mine"}')
    config = load_cufile_config(system, {"CUFILE_ENV_PATH_JSON": str(mine)})
    assert (config.source, config.data) == (str(mine), {"from": "mine"})


@pytest.mark.parametrize(
    ("text", "error"), [("{", "no JSON"), ("[1]", "no JSON object"), ("", "cannot be read or is")]
)
def test_a_bad_configuration_says_so_and_counts_as_none(tmp_path, text, error):
    mine = tmp_path / "mine.json"
    mine.write_text(text)
    config = load_cufile_config(System(tmp_path), {"CUFILE_ENV_PATH_JSON": str(mine)})
    assert error in config.error
    assert config.data == {}
    assert json.loads(probe_config(config, "/l", allow_compat_mode=False))


def test_no_configuration(tmp_path):
    assert load_cufile_config(System(tmp_path), {}) == CufileConfig()
    assert CufileConfig().get("properties", "x") is None
    assert CufileConfig(data={"properties": 1}).get("properties", "x") is None

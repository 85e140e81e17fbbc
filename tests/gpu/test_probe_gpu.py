"""The probe on a machine with a GPU: what it proves there, and what it does not believe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import IoPathError
from gds_optimizer.io.base import IoPath
from gds_optimizer.probe import Severity, decide_io_path, probe_directories
from gds_optimizer.probing.children import run_child, scratch_file
from gds_optimizer.probing.system import System

pytest.importorskip("kvikio", reason="needs kvikio")
pytest.importorskip("cupy", reason="needs cupy")

pytestmark = pytest.mark.gpu

TIMEOUT_S = 60.0

without_nvidia_fs = pytest.mark.skipif(
    System().nvidia_fs_version is not None, reason="needs a machine without nvidia-fs"
)


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "state"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == []


def named(report):
    return {finding.name: finding for finding in report.findings}


def has_udev_record(directory: Path) -> bool:
    """Whether udev describes the device under `directory`; cuFile asks it."""
    mount = System().mount_of(str(directory.resolve()))
    return mount is not None and Path(f"/run/udev/data/b{mount.device}").exists()


def test_the_machine_is_described(directory):
    report = probe_directories([directory], io="posix")
    assert report.machine.gpu_usable is True
    assert report.machine.gpu_name == torch.cuda.get_device_name(0)
    assert report.machine.cuda_version
    assert report.machine.kvikio_version
    assert report.machine.cupy_version
    assert named(report)["driver"].severity is Severity.OK


def test_posix_works(directory):
    config = StreamConfig(directories=(directory,), io="posix")
    report = decide_io_path(config, torch.device("cuda", 0), timeout_s=TIMEOUT_S)
    assert report.io_path is IoPath.POSIX
    assert named(report)["posix-round-trip"].severity is Severity.OK


@without_nvidia_fs
def test_without_nvidia_fs_auto_takes_posix_and_says_why(directory):
    report = probe_directories([directory], timeout_s=TIMEOUT_S)
    if report.machine.p2pdma:
        pytest.skip("needs a machine without P2PDMA")
    assert report.io_path is IoPath.POSIX
    found = named(report)
    assert found["nvidia-fs"].severity is Severity.MISSING
    assert found["p2pdma"].severity is Severity.MISSING
    assert found["gds-round-trip"].severity is Severity.MISSING


@without_nvidia_fs
def test_without_nvidia_fs_gds_is_refused(directory):
    if probe_directories([directory], io="gds", timeout_s=TIMEOUT_S).machine.p2pdma:
        pytest.skip("needs a machine without P2PDMA")
    config = StreamConfig(directories=(directory,), io="gds")
    with pytest.raises(IoPathError, match="io=gds is not to be had"):
        decide_io_path(config, torch.device("cuda"), timeout_s=TIMEOUT_S)


def test_gds_compat_works_where_udev_knows_the_device(directory):
    if not has_udev_record(directory):
        pytest.skip("needs a record of the device in /run/udev/data")
    report = probe_directories([directory], io="gds-compat", timeout_s=TIMEOUT_S)
    assert report.io_path is IoPath.GDS_COMPAT, report.to_text()
    assert named(report)["gds-compat-round-trip"].severity is Severity.OK


def test_libcufile_s_counters_see_its_posix_path(directory):
    """The strict verdict rests on them: in compatibility mode they must not stay zero."""
    if not has_udev_record(directory):
        pytest.skip("needs a record of the device in /run/udev/data")
    request = {
        "operation": "device",
        "mode": "gds-compat",
        "device": 0,
        "file": scratch_file(directory),
    }
    config = json.dumps({"properties": {"allow_compat_mode": True, "force_compat_mode": True}})
    answer = run_child(request, timeout_s=TIMEOUT_S, cufile_config=lambda log_dir: config)
    assert answer.ok, answer
    assert answer.data["backends"]["GDS"] == 2 * (8 << 20)
    version = tuple(map(int, answer.data["libcufile_version"].split(".")))
    if version < (1, 15):
        pytest.skip("needs a libcufile that counts (1.15 or later)")
    operations = answer.data["operations"]
    assert operations["posix.read"] > 0
    assert operations["posix.write"] > 0
    assert operations["p2p.read"] == operations["nvfs.read"] == 0


def test_a_device_that_is_not_there(directory):
    config = StreamConfig(directories=(directory,), io="posix")
    with pytest.raises(IoPathError, match="there is no cuda:99"):
        decide_io_path(config, torch.device("cuda", 99))


def test_hidden_devices_leave_the_host_path(directory):
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-m", "gds_optimizer.cli", "probe", "--json", str(directory)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    report = json.loads(result.stdout)
    assert report["io_path"] == "host"
    assert report["machine"]["gpu_usable"] is False

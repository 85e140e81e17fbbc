"""The verdict: on this machine's disks, and on machines that a stand-in for the child describes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import ConfigError, IoPathError
from gds_optimizer.io.base import IoPath
from gds_optimizer.probe import (
    DirectoryReport,
    Finding,
    MachineReport,
    ProbeReport,
    Severity,
    choose_io_path,
    decide_io_path,
    probe_directories,
)
from gds_optimizer.probing import trials
from gds_optimizer.probing.children import run_child
from gds_optimizer.probing.report import PathTiming

SHM = Path("/dev/shm")
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)

no_driver = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without an NVIDIA driver"
)
needs_shm = pytest.mark.skipif(not SHM.is_dir(), reason="needs /dev/shm")


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """No probe leaves a scratch file in a directory or a working directory of a child."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    assert [str(p) for p in tmp_path.rglob(".gds-optimizer-probe-*")] == []
    assert list(temporary.iterdir()) == []


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "state"
    path.mkdir()
    return path


def named(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


# --- this machine ---


@no_driver
def test_without_a_driver_bytes_go_through_host_memory(directory):
    report = probe_directories([directory])
    assert report.io_path is IoPath.HOST
    assert choose_io_path(report) is IoPath.HOST
    assert report.machine.gpu_usable is False
    driver = named(report.machine.findings)["driver"]
    assert driver.severity is Severity.MISSING
    assert "libcuda.so.1" in driver.what or "cuInit" in driver.what
    [here] = report.directories
    assert here.path == directory
    assert (here.io_path, here.proven) == (IoPath.HOST, (IoPath.HOST,))
    assert here.free_bytes > 0
    assert here.fs_type
    assert named(here.findings)["direct-io"].severity is Severity.OK


@no_driver
@pytest.mark.parametrize("io", ["gds", "posix", "gds-compat"])
def test_a_device_path_without_a_driver_is_refused(directory, io):
    report = probe_directories([directory], io=io)
    assert report.verdict is None
    assert report.directories[0].io_path is None
    with pytest.raises(IoPathError, match=r"libcuda\.so\.1|cuInit") as refusal:
        choose_io_path(report)
    assert f"io={io} is not to be had in {directory}" in str(refusal.value)
    # Half of it works: that has to be visible, and not to count.
    assert named(report.findings)["direct-io"].severity is Severity.OK


@no_driver
@pytest.mark.parametrize("io", ["auto", "gds", "posix"])
def test_device_tensors_without_a_driver_are_refused(directory, io):
    config = StreamConfig(directories=(directory,), io=io)
    with pytest.raises(IoPathError, match=r"libcuda\.so\.1|cuInit"):
        decide_io_path(config, CUDA)


@pytest.mark.parametrize("io", ["auto", "host"])
def test_tensors_on_the_cpu_take_the_host_path(directory, io):
    report = decide_io_path(StreamConfig(directories=(directory,), io=io), CPU)
    assert report.io_path is IoPath.HOST
    assert report.machine == MachineReport()  # nobody asked the driver


def test_a_directory_that_does_not_exist(tmp_path):
    report = probe_directories([tmp_path / "none"], io="host")
    finding = named(report.findings)["directory"]
    assert finding.severity is Severity.FATAL
    assert finding.what == f"{tmp_path / 'none'} does not exist"
    assert "does not exist" in report.refusal
    with pytest.raises(IoPathError):
        choose_io_path(report)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    report = probe_directories([tmp_path / "file"], io="host")
    assert report.verdict is None
    assert named(report.findings)["directory"].what == f"{tmp_path / 'file'} is not a directory"


def test_one_bad_directory_spoils_all(directory, tmp_path):
    report = probe_directories([directory, tmp_path / "none"], io="host")
    assert report.verdict is None
    assert [d.io_path for d in report.directories] == [IoPath.HOST, None]
    assert str(tmp_path / "none") in report.refusal
    assert f"in {directory}" not in report.refusal


def test_a_relative_directory_is_made_absolute(directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    report = probe_directories([directory.name], io="host")
    assert report.directories[0].path == directory
    assert report.io_path is IoPath.HOST


@needs_shm
def test_memory_is_refused_although_it_accepts_direct_io():
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        report = probe_directories([directory], io="host")
        assert list(Path(directory).iterdir()) == []
    assert report.verdict is None
    assert named(report.findings)["memory-file-system"].severity is Severity.FATAL
    assert report.directories[0].fs_type in ("tmpfs", "ramfs")


@needs_shm
def test_memory_can_be_allowed():
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        config = StreamConfig(directories=(directory,), allow_tmpfs=True)
        report = decide_io_path(config, CPU)
        assert list(Path(directory).iterdir()) == []
    assert report.io_path is IoPath.HOST
    assert named(report.findings)["memory-file-system"].severity is Severity.WARN


@needs_shm
def test_memory_is_recognised_where_the_mount_table_hides_it(tmp_path):
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        report = probe_directories([directory], io="host", root=fake_root(tmp_path, "ext4"))
    assert report.verdict is None
    assert report.directories[0].fs_type in ("tmpfs", "ramfs")


def run_restricted(prologue: str, directory: Path, **options: Any) -> dict[str, Any]:
    """Probe in a process that first gives something up; the report as plain data."""
    program = (
        f"{prologue}\n"
        "import json\n"
        "from gds_optimizer.probe import probe_directories\n"
        f"report = probe_directories([{str(directory)!r}], io='host', **{options!r})\n"
        "print(json.dumps(report.to_dict()))\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(result.stdout)


# Root may write anywhere. Without these three capabilities, also in what it executes, it may not.
GIVE_UP_CAPABILITIES = """
import ctypes, os, sys
if os.geteuid() == 0 and "ROOT_IS_TAMED" not in os.environ:
    for capability in (1, 2, 3):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
        if ctypes.CDLL(None, use_errno=True).prctl(24, capability, 0, 0, 0):  # PR_CAPBSET_DROP
            sys.exit(77)
    os.environ["ROOT_IS_TAMED"] = "1"
    os.execv(sys.executable, sys.orig_argv)
"""


def test_a_directory_that_may_not_be_written(directory):
    directory.chmod(0o555)
    try:
        report = run_restricted(GIVE_UP_CAPABILITIES, directory)
    except subprocess.CalledProcessError as error:
        if error.returncode == 77:
            pytest.skip("needs the right to give up capabilities")
        raise
    finally:
        directory.chmod(0o755)
    assert report["io_path"] is None
    [finding] = [f for f in report["directories"][0]["findings"] if f["severity"] == "fatal"]
    assert finding["name"] == "directory"
    assert finding["what"].startswith(f"no permission to create a file in {directory}")
    assert "chmod" in finding["mend"]


def in_mounts(script: str, directory: Path, *options: str) -> dict[str, Any]:
    """`gds-optimizer probe` in a mount namespace of its own, after `script`; its JSON report."""
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec"]
    probe = [sys.executable, "-m", "gds_optimizer.cli", "probe", "--json", "--io", "host"]
    try:
        subprocess.run([*command, script, "sh", directory], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount (root and unshare)")
    program = script + '\nshift\nexec "$@"'
    arguments = [*command, program, "sh", directory, *probe, *options, directory]
    result = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert result.returncode in (0, 3), result.stderr
    return json.loads(result.stdout)


def test_a_read_only_file_system(directory):
    read_only = 'mount --bind "$1" "$1"\nmount -o remount,ro,bind "$1"'
    report = in_mounts(read_only, directory)
    [finding] = [f for f in report["directories"][0]["findings"] if f["severity"] == "fatal"]
    assert finding["what"] == f"{directory} is on a read-only file system"
    assert "ro" in report["directories"][0]["mount_options"]
    assert report["directories"][0]["mount_point"] == str(directory)


def test_a_full_file_system(directory):
    small = 'mount -t tmpfs -o size=1m tmpfs "$1"'
    report = in_mounts(small, directory, "--allow-tmpfs")
    assert report["io_path"] is None
    [finding] = [f for f in report["directories"][0]["findings"] if f["severity"] == "fatal"]
    assert finding["what"].startswith(f"no space for a few MiB in {directory}")
    assert report["directories"][0]["free_bytes"] == 1 << 20


# --- wrong values ---


def test_wrong_values_are_refused(directory):
    with pytest.raises(ConfigError, match="no directory was named"):
        probe_directories([])
    with pytest.raises(ConfigError, match="io is 'fast', wanted one of auto"):
        probe_directories([directory], io="fast")
    for timeout_s in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="timeout_s is"):
            probe_directories([directory], timeout_s=timeout_s)
    for device in ("tpu", "meta"):
        with pytest.raises(ConfigError, match="device is"):
            probe_directories([directory], device=device)


def test_paths_that_do_not_go_with_the_device(directory):
    with pytest.raises(ConfigError, match=r"io is 'host'.*tensors are on cuda:0"):
        decide_io_path(StreamConfig(directories=(directory,), io="host"), CUDA)
    for io in ("gds", "posix", "gds-compat"):
        with pytest.raises(ConfigError, match="tensors are on the CPU"):
            decide_io_path(StreamConfig(directories=(directory,), io=io), CPU)


# --- machines with a GPU, described by a stand-in for the child ---

MACHINE = {
    "error": "",
    "gpu_error": "",
    "gpu_name": "NVIDIA Test",
    "cuda_version": "13.0",
    "kvikio_version": "26.10.0",
    "cupy_version": "14.2.0",
    "libcufile_version": "1.15.1.6",
}
P2P = {"p2p.read": 4, "p2p.write": 4, "nvfs.read": 0, "nvfs.write": 0}
DIRECT = {**P2P, "posix.read": 0, "posix.write": 0}
GDS_WORKS = {"error": "", "removed": True, "backends": {"GDS": 1, "POSIX": 0}, "operations": DIRECT}
POSIX_WORKS = {"error": "", "removed": True, "backends": {"GDS": 0, "POSIX": 1}}
REFUSED = {"error": "GPUDirect Storage not supported on current file", "removed": True}

CHILD = """
import json, os, sys
here = os.path.dirname(os.path.abspath(__file__))
request = json.loads(sys.argv[-1])
answers = json.load(open(os.path.join(here, "answers.json")))
key = request.get("mode", request["operation"])
config = os.environ.get("CUFILE_ENV_PATH_JSON")
with open(os.path.join(here, "calls"), "a") as calls:
    entry = dict(key=key, request=request, config=config and open(config).read())
    calls.write(json.dumps(entry) + "\\n")
for rule in (key + " " + os.path.basename(request.get("directory", "")), key):
    if rule in answers:
        if "log" in answers[rule]:
            open(os.environ["CUFILE_LOGFILE_PATH"], "w").write(answers[rule]["log"])
        print(json.dumps(answers[rule]))
        sys.exit()
if key == "directory":
    os.execv(sys.executable, [sys.executable, "-m", "gds_optimizer.probing.child", sys.argv[-1]])
sys.exit("no answer to " + key)
"""


class FakeMachine:
    """A child program that answers as told, and really looks at directories unless told not to.

    Keys of `answers`: an operation or a mode of the device operation, optionally followed by a
    space and the name of a directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "child.py").write_text(CHILD)
        self.command = (sys.executable, str(folder / "child.py"))
        self.answer()

    def answer(self, **answers: Any) -> None:
        text = json.dumps({"machine": MACHINE, **answers})
        (self.folder / "answers.json").write_text(text)

    @property
    def calls(self) -> list[dict[str, Any]]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def fake(tmp_path):
    return FakeMachine(tmp_path / "fake")


@pytest.fixture(autouse=True)
def no_cufile_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("CUFILE_")]:
        monkeypatch.delenv(name)


def fake_root(tmp_path: Path, fs_type: str, *options: str) -> Path:
    """A root whose only mount is everything under the temporary directory's own root."""
    root = tmp_path / "root"
    (root / "proc/self").mkdir(parents=True)
    line = f"1 0 259:0 / / rw - {fs_type} /dev/nvme0n1 {','.join(['rw', *options])}\n"
    (root / "proc/self/mountinfo").write_text(line)
    return root


def test_gds_where_it_is_proven(directory, fake, tmp_path):
    fake.answer(gds=GDS_WORKS)
    root = fake_root(tmp_path, "ext4", "data=writeback")
    report = probe_directories([directory], child_command=fake.command, root=root)
    assert report.io_path is IoPath.GDS
    assert report.refusal == ""
    assert [call["key"] for call in fake.calls] == ["machine", "directory", "gds"]
    trip = named(report.findings)["gds-round-trip"]
    assert trip.severity is Severity.OK
    assert "p2p.read 4" in trip.what
    # What looks missing is no reason any more: the round trip has shown that it works.
    assert {f.severity for f in report.findings} <= {Severity.OK, Severity.INFO}
    assert named(report.findings)["nvidia-fs"].severity is Severity.INFO
    assert named(report.findings)["ext4-journal"].severity is Severity.INFO
    assert report.machine.gpu_name == "NVIDIA Test"
    assert named(report.machine.findings)["driver"].what == "NVIDIA Test, CUDA 13.0"


def test_whoever_times_paths_gets_all_that_work(tmp_path, fake):
    directories = [tmp_path / "a", tmp_path / "b"]
    for each in directories:
        each.mkdir()
    fake.answer(gds=GDS_WORKS, posix=POSIX_WORKS)
    report = probe_directories(directories, child_command=fake.command, try_all=True)
    assert report.candidates == (IoPath.GDS, IoPath.POSIX)
    assert report.io_path is IoPath.GDS  # until they are timed
    assert sorted(call["key"] for call in fake.calls).count("posix") == 2
    # Asked for by name, nothing else is tried.
    only = probe_directories([tmp_path], io="gds", child_command=fake.command, try_all=True)
    assert only.candidates == (IoPath.GDS,)


def test_a_second_path_that_fails_spoils_nothing(directory, fake):
    fake.answer(gds=GDS_WORKS, posix=REFUSED)
    report = decide_io_path(
        StreamConfig(directories=(directory,)), CUDA, child_command=fake.command, try_all=True
    )
    assert report.candidates == (IoPath.GDS,)
    assert named(report.findings)["posix-round-trip"].severity is Severity.INFO


def test_posix_where_gds_is_not_to_be_had(directory, fake, tmp_path):
    log = " 01-01-2026 [pid=1 tid=1] ERROR  cufio-fs:204 NVMe Driver not registered\n"
    fake.answer(gds={**REFUSED, "log": log}, posix=POSIX_WORKS)
    root = fake_root(tmp_path, "ext4", "data=writeback")
    report = probe_directories([directory], child_command=fake.command, root=root)
    assert report.io_path is IoPath.POSIX
    assert report.directories[0].proven == (IoPath.POSIX,)
    found = named(report.findings)
    assert found["gds-round-trip"].severity is Severity.MISSING
    assert "GPUDirect Storage not supported" in found["gds-round-trip"].what
    assert "cuFile says: NVMe Driver not registered" in found["gds-round-trip"].what
    assert found["posix-round-trip"].severity is Severity.OK
    for name in ("nvidia-fs", "p2pdma", "udev", "proc-modules", "ext4-journal"):
        assert found[name].severity is Severity.MISSING, name
    assert report.machine.p2pdma is False
    assert report.machine.nvidia_fs is None


def test_asking_for_gds_alone_refuses_and_says_all(directory, fake, tmp_path):
    fake.answer(gds=REFUSED, posix=POSIX_WORKS)
    config = StreamConfig(directories=(directory,), io="gds")
    with pytest.raises(IoPathError) as refusal:
        decide_io_path(config, CUDA, child_command=fake.command, root=fake_root(tmp_path, "xfs"))
    message = str(refusal.value)
    assert message.startswith(f"io=gds is not to be had in {directory}: ")
    for words in ("nvidia-fs is not loaded", "/run/udev/data", "GPUDirect Storage not supported"):
        assert words in message
    assert f"gds-optimizer probe --io gds {directory}" in message
    assert "posix" not in [call["key"] for call in fake.calls]


def test_asking_for_posix_tries_only_that(directory, fake):
    fake.answer(gds=GDS_WORKS, posix=POSIX_WORKS)
    report = decide_io_path(
        StreamConfig(directories=(directory,), io="posix"), CUDA, child_command=fake.command
    )
    assert report.io_path is IoPath.POSIX
    assert [call["key"] for call in fake.calls] == ["machine", "directory", "posix"]
    assert "nvidia-fs" not in named(report.findings) or report.machine.p2pdma is not None


def test_all_directories_take_one_path(tmp_path, fake):
    directories = [tmp_path / name for name in ("a", "b")]
    for directory in directories:
        directory.mkdir()
    fake.answer(posix=POSIX_WORKS, gds=REFUSED, **{"gds a": GDS_WORKS})
    report = probe_directories(directories, child_command=fake.command)
    assert report.io_path is IoPath.POSIX
    assert [d.io_path for d in report.directories] == [IoPath.POSIX, IoPath.POSIX]
    assert report.directories[0].proven == (IoPath.GDS, IoPath.POSIX)
    assert report.directories[1].proven == (IoPath.POSIX,)
    posix = [c["request"]["directory"] for c in fake.calls if c["key"] == "posix"]
    assert sorted(posix) == [str(directory) for directory in directories]


def test_no_common_path(tmp_path, fake):
    directories = [tmp_path / name for name in ("a", "b")]
    for directory in directories:
        directory.mkdir()
    fake.answer(**{"gds a": GDS_WORKS, "posix b": POSIX_WORKS, "gds": REFUSED, "posix": REFUSED})
    report = probe_directories(directories, child_command=fake.command)
    assert report.verdict is None
    assert [d.io_path for d in report.directories] == [IoPath.GDS, IoPath.POSIX]
    assert all(str(directory) in report.refusal for directory in directories)
    assert "GPUDirect Storage not supported" in report.refusal


@pytest.mark.parametrize(
    "operations",
    [
        {**DIRECT, "posix.read": 1},
        {**DIRECT, "posix.write": 4, "p2p.write": 0},
        {**DIRECT, "p2p.write": 0},
        {**DIRECT, "p2p.read": 0},
    ],
)
def test_cufile_s_own_counters_overrule_its_success(directory, fake, operations):
    fake.answer(gds={**GDS_WORKS, "operations": operations}, posix=POSIX_WORKS)
    report = probe_directories([directory], child_command=fake.command)
    assert report.io_path is IoPath.POSIX
    assert "although forbidden" in named(report.findings)["gds-round-trip"].what


@pytest.mark.parametrize("path", ["p2p", "nvfs"])
def test_either_way_of_gds_counts(directory, fake, path):
    operations = {**dict.fromkeys(DIRECT, 0), f"{path}.read": 4, f"{path}.write": 4}
    fake.answer(gds={**GDS_WORKS, "operations": operations})
    assert probe_directories([directory], child_command=fake.command).io_path is IoPath.GDS


@pytest.mark.parametrize("operations", [None, dict.fromkeys(DIRECT, 0)])
def test_without_counters_the_strict_configuration_is_the_proof(directory, fake, operations):
    fake.answer(gds={**GDS_WORKS, "operations": operations})
    report = probe_directories([directory], child_command=fake.command)
    assert report.io_path is IoPath.GDS
    assert "does not tell" in named(report.findings)["gds-round-trip"].what


@pytest.mark.parametrize(
    ("mode", "backends"),
    [
        ("gds", {"GDS": 1, "POSIX": 1}),
        ("gds", {"GDS": 0, "POSIX": 1}),
        ("gds", {"GDS": 0, "POSIX": 0}),
        ("posix", {"GDS": 1, "POSIX": 1}),
    ],
)
def test_bytes_that_kvikio_moved_another_way_prove_nothing(directory, fake, mode, backends):
    fake.answer(**{mode: {**GDS_WORKS, "backends": backends}})
    report = probe_directories([directory], io=mode, child_command=fake.command)
    assert report.verdict is None
    assert "another way" in named(report.findings)[f"{mode}-round-trip"].what


def test_gds_compat_may_take_cufile_s_posix_path(directory, fake):
    posix = {**dict.fromkeys(DIRECT, 0), "posix.read": 4, "posix.write": 4}
    fake.answer(**{"gds-compat": {**GDS_WORKS, "operations": posix}})
    report = probe_directories([directory], io="gds-compat", child_command=fake.command)
    assert report.io_path is IoPath.GDS_COMPAT
    assert "posix.read 4" in named(report.findings)["gds-compat-round-trip"].what


@pytest.mark.parametrize(("io", "allowed"), [("gds", False), ("gds-compat", True)])
def test_cufile_runs_under_the_user_s_settings_but_for_the_fallback(
    directory, fake, tmp_path, monkeypatch, io, allowed
):
    mine = tmp_path / "mine.json"
    mine.write_text('{"properties": {"allow_compat_mode": true, "use_pci_p2pdma": true}} // mine')
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(mine))
    fake.answer(**{io: GDS_WORKS})
    probe_directories([directory], io=io, child_command=fake.command)
    config = json.loads(fake.calls[-1]["config"])
    assert config["properties"] == {"allow_compat_mode": allowed, "use_pci_p2pdma": True}
    assert config["profile"] == {"cufile_stats": 3}


def test_posix_leaves_cufile_alone(directory, fake):
    fake.answer(posix=POSIX_WORKS)
    probe_directories([directory], io="posix", child_command=fake.command)
    assert fake.calls[-1]["config"] is None


def test_every_round_trip_has_a_file_of_its_own_in_the_directory(directory, fake):
    fake.answer(gds=REFUSED, posix=POSIX_WORKS)
    probe_directories([directory], child_command=fake.command)
    files = [call["request"]["file"] for call in fake.calls if "file" in call["request"]]
    assert len(set(files)) == len(files) == 3
    assert all(Path(file).parent == directory for file in files)


def test_the_device_is_the_one_asked_for(directory, fake):
    fake.answer(posix=POSIX_WORKS)
    config = StreamConfig(directories=(directory,), io="posix")
    decide_io_path(config, torch.device("cuda", 5), child_command=fake.command)
    devices = [c["request"]["device"] for c in fake.calls if "device" in c["request"]]
    assert devices == [5, 5]


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "cu12"), ("13.1", "cu13")])
@pytest.mark.parametrize("package", ["kvikio", "cupy"])
def test_a_missing_package_is_named_with_its_extra(directory, fake, cuda, extra, package):
    machine = {**MACHINE, "cuda_version": cuda, f"{package}_version": None}
    fake.answer(machine=machine, gds=REFUSED, posix={"error": f"No module named {package!r}"})
    report = probe_directories([directory], device=CUDA, child_command=fake.command)
    assert f"{package} is not installed" in report.refusal
    assert named(report.findings)[package].mend == f"pip install 'gds-optimizer[{extra}]'"


def test_a_driver_without_a_device_leaves_the_host_path(directory, fake):
    fake.answer(machine={**MACHINE, "gpu_error": "cuInit answers CUDA_ERROR_NO_DEVICE"})
    report = probe_directories([directory], child_command=fake.command)
    assert report.io_path is IoPath.HOST
    assert "CUDA_ERROR_NO_DEVICE" in named(report.findings)["driver"].what


def hanging_command(tmp_path: Path, operation: str) -> tuple[str, ...]:
    """A child that makes its file and then hangs in one operation, and else does its work."""
    path = tmp_path / "hang.py"
    path.write_text(
        "import json, os, sys\n"
        "request = json.loads(sys.argv[-1])\n"
        f"if request['operation'] == {operation!r}:\n"
        "    if 'file' in request: open(request['file'], 'w').close()\n"
        "    while True: pass\n"
        f"if request['operation'] == 'machine': print({json.dumps(MACHINE)!r}); sys.exit()\n"
        "os.execv(sys.executable,"
        " [sys.executable, '-m', 'gds_optimizer.probing.child', sys.argv[-1]])\n"
    )
    return (sys.executable, str(path))


@pytest.fixture
def hurry(monkeypatch):
    """Give a limit of half a second to one operation; others have all the time that they need."""

    def hurry(operation: str) -> None:
        def run(request: dict[str, Any], *, timeout_s: float, **options: Any) -> Any:
            limit_s = 0.5 if request["operation"] == operation else timeout_s
            return run_child(request, timeout_s=limit_s, **options)

        monkeypatch.setattr(trials, "run_child", run)

    return hurry


def test_a_hung_mount_is_given_up(directory, tmp_path, hurry):
    hurry("directory")
    report = probe_directories(
        [directory], io="host", child_command=hanging_command(tmp_path, "directory")
    )
    assert report.verdict is None
    finding = named(report.findings)["directory"]
    assert finding.severity is Severity.FATAL
    assert "did not answer within 0.5 s" in finding.what
    assert list(directory.iterdir()) == []


def test_a_hung_driver_leaves_the_host_path(directory, tmp_path, hurry):
    hurry("machine")
    report = probe_directories([directory], child_command=hanging_command(tmp_path, "machine"))
    assert report.io_path is IoPath.HOST
    assert "did not answer within 0.5 s" in named(report.findings)["driver"].what


def test_a_hung_cufile_is_given_up(directory, tmp_path, hurry):
    hurry("device")
    with pytest.raises(IoPathError, match=r"the round trip failed: did not answer within 0\.5 s"):
        decide_io_path(
            StreamConfig(directories=(directory,), io="gds"),
            CUDA,
            child_command=hanging_command(tmp_path, "device"),
            root=fake_root(tmp_path, "xfs"),
        )
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    ("errno_", "stage", "words"),
    [
        (22, "open for direct I/O", "refuses direct I/O"),
        (122, "allocate", "no space for a few MiB"),
        (5, "direct write", "direct write fails: Input/output error"),
        (13, "stat", "cannot be looked at"),
    ],
)
def test_other_failures_of_a_directory(directory, fake, errno_, stage, words):
    fake.answer(
        directory={
            "error": os.strerror(errno_),
            "errno": errno_,
            "stage": stage,
            "removed": True,
            "real_path": str(directory),
        }
    )
    report = probe_directories([directory], io="host", child_command=fake.command)
    assert report.verdict is None
    assert words in named(report.findings)["directory"].what


def test_a_network_mount_is_named_with_its_disks_unknown(directory, fake, tmp_path):
    root = fake_root(tmp_path, "nfs4", "vers=4.2")
    fake.answer(gds=REFUSED, posix=POSIX_WORKS)
    report = probe_directories([directory], child_command=fake.command, root=root)
    [here] = report.directories
    assert (here.fs_type, here.block_devices, here.rotational) == ("nfs4", (), None)
    assert "vers=4.2" in here.mount_options
    assert named(here.findings)["network-file-system"].severity is Severity.WARN
    assert named(here.findings)["gds-file-system"].severity is Severity.INFO
    assert report.io_path is IoPath.POSIX


# --- the report ---


def an_example() -> ProbeReport:
    return ProbeReport(
        asked="auto",
        verdict=IoPath.POSIX,
        refusal="",
        machine=MachineReport(
            gpu_usable=True,
            gpu_name="NVIDIA Test",
            findings=(Finding("nvidia-fs", Severity.MISSING, "it is not loaded", "load it"),),
        ),
        directories=(
            DirectoryReport(
                path=Path("/nvme0"),
                io_path=IoPath.POSIX,
                proven=(IoPath.POSIX,),
                findings=(Finding("direct-io", Severity.OK, "works"),),
                fs_type="ext4",
                mount_point="/nvme0",
                mount_options=("rw",),
                block_devices=("nvme0n1",),
                rotational=False,
                free_bytes=1_500_000_000,
            ),
            DirectoryReport(path=Path("/other"), io_path=None),
        ),
    )


GDS_TIMING = PathTiming(
    directory=Path("/nvme0"),
    io_path=IoPath.GDS,
    read_bytes_per_s=1.5e9,
    write_bytes_per_s=2.5e9,
    mixed_bytes_per_s=2e9,
    half_duplex=True,
    threads=8,
    task_bytes=2**24,
    cached=False,
)


def test_the_json_form():
    report = dataclasses.replace(an_example(), timings=(GDS_TIMING,))
    data = json.loads(json.dumps(report.to_dict()))
    assert data == {
        "version": 1,
        "asked": "auto",
        "io_path": "posix",
        "refusal": "",
        "machine": {
            "gpu_usable": True,
            "gpu_name": "NVIDIA Test",
            "cuda_version": None,
            "driver_version": None,
            "kvikio_version": None,
            "cupy_version": None,
            "libcufile_version": None,
            "nvidia_fs": None,
            "p2pdma": None,
            "findings": [
                {
                    "name": "nvidia-fs",
                    "severity": "missing",
                    "what": "it is not loaded",
                    "mend": "load it",
                }
            ],
        },
        "directories": [
            {
                "path": "/nvme0",
                "io_path": "posix",
                "proven": ["posix"],
                "findings": [{"name": "direct-io", "severity": "ok", "what": "works", "mend": ""}],
                "fs_type": "ext4",
                "mount_point": "/nvme0",
                "mount_options": ["rw"],
                "block_devices": ["nvme0n1"],
                "rotational": False,
                "free_bytes": 1_500_000_000,
            },
            {
                "path": "/other",
                "io_path": None,
                "proven": [],
                "findings": [],
                "fs_type": None,
                "mount_point": None,
                "mount_options": [],
                "block_devices": [],
                "rotational": None,
                "free_bytes": None,
            },
        ],
        "timings": [
            {
                "directory": "/nvme0",
                "io_path": "gds",
                "read_bytes_per_s": 1.5e9,
                "write_bytes_per_s": 2.5e9,
                "mixed_bytes_per_s": 2e9,
                "half_duplex": True,
                "threads": 8,
                "task_bytes": 2**24,
                "cached": False,
            }
        ],
    }


@pytest.mark.parametrize("kind", [ProbeReport, MachineReport, DirectoryReport, PathTiming])
def test_the_json_form_has_every_attribute(kind):
    report = an_example()
    data = {
        PathTiming: GDS_TIMING.to_dict(),
        ProbeReport: report.to_dict(),
        MachineReport: report.machine.to_dict(),
        DirectoryReport: report.directories[0].to_dict(),
    }[kind]
    renamed = {"verdict": "io_path"} if kind is ProbeReport else {}
    names = {renamed.get(field.name, field.name) for field in dataclasses.fields(kind)}
    assert set(data) == names | ({"version"} if kind is ProbeReport else set())


def test_the_text_form():
    assert an_example().to_text() == (
        "/nvme0  posix       ext4 on nvme0n1, 1.5 GB free\n"
        "/other  none\n"
        "\n"
        "io path: posix (asked: auto)\n"
        "\n"
        "this machine\n"
        "  missing  nvidia-fs  it is not loaded\n"
        "                      -> load it\n"
        "\n"
        "/nvme0\n"
        "  ok       direct-io  works"
    )


def test_what_was_timed_follows_the_verdict():
    cached = dataclasses.replace(GDS_TIMING, io_path=IoPath.POSIX, half_duplex=False, cached=True)
    report = an_example().with_timings(IoPath.GDS, [GDS_TIMING, cached])
    rates = "read 1.50, write 2.50, both at once 2.00 GB/s"
    best = "best with 8 threads and tasks of 16 MiB"
    assert report.io_path is IoPath.GDS
    assert [each.io_path for each in report.directories] == [IoPath.GDS, IoPath.GDS]
    assert report.to_text().splitlines()[3:6] == [
        "io path: gds (asked: auto)",
        f"/nvme0 by gds: {rates}, half-duplex; {best}",
        f"/nvme0 by posix: {rates}, not half-duplex; {best}, from the cache",
    ]


def test_colours_only_on_request():
    assert "\033" not in an_example().to_text()
    colored = an_example().to_text(color=True)
    assert "\033[33mmissing\033[0m" in colored
    plain = colored.replace("\033[33m", "").replace("\033[32m", "").replace("\033[0m", "")
    assert plain == an_example().to_text()


def test_the_report_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        an_example().verdict = None  # type: ignore[misc]


def test_a_report_without_a_path_raises_its_refusal():
    report = dataclasses.replace(an_example(), verdict=None, refusal="because")
    with pytest.raises(IoPathError, match=r"^because$"):
        _ = report.io_path

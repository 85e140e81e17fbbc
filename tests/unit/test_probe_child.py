"""The child's own work: real directories, and device round trips over stand-ins for the GPU."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gds_optimizer.probing import child, cufile_stats
from gds_optimizer.probing.children import run_child, scratch_file

LONG_S = 60.0


@pytest.fixture
def target(tmp_path):
    directory = tmp_path / "target"
    directory.mkdir()
    yield directory
    assert list(directory.iterdir()) == []


def ask_directory(directory: Path, file: str | None = None):
    request = {
        "operation": "directory",
        "directory": str(directory),
        "file": file or scratch_file(directory),
    }
    return run_child(request, timeout_s=LONG_S)


def test_a_directory_on_a_disk(target):
    answer = ask_directory(target)
    assert answer.error == ""
    assert answer.data["real_path"] == str(target.resolve())
    assert answer.data["removed"] is True
    status = os.statvfs(target)
    assert answer.data["free_bytes"] == pytest.approx(status.f_bavail * status.f_frsize, rel=0.1)
    command = ["stat", "-f", "--format=%t", str(target)]
    magic = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert answer.data["fs_magic"] == int(magic, 16)


def test_a_link_is_followed(tmp_path, target):
    link = tmp_path / "link"
    link.symlink_to(target)
    assert ask_directory(link).data["real_path"] == str(target.resolve())


@pytest.mark.parametrize(
    ("make", "stage", "number"),
    [
        (lambda path: None, "stat", errno.ENOENT),
        (lambda path: path.write_text(""), "stat", errno.ENOTDIR),
        (lambda path: path.symlink_to(path), "stat", errno.ELOOP),
    ],
)
def test_what_is_no_directory(tmp_path, make, stage, number):
    path = tmp_path / "thing"
    make(path)
    answer = ask_directory(path)
    assert answer.answered
    assert (answer.data["stage"], answer.data["errno"]) == (stage, number)
    assert answer.error == os.strerror(number)


def test_a_file_that_exists_is_neither_used_nor_removed(tmp_path):
    file = tmp_path / "precious"
    file.write_text("precious")
    answer = ask_directory(tmp_path, str(file))
    assert (answer.data["stage"], answer.data["errno"]) == ("create", errno.EEXIST)
    assert file.read_text() == "precious"


def test_the_file_is_private_and_allocated(target, monkeypatch):
    seen = []

    def look(file, answer):
        seen.append(os.stat(file))
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(child, "_host_trip", look)
    answer: dict = {}
    with pytest.raises(child.TripError, match="broken"):
        child.probe_directory({"directory": str(target), "file": scratch_file(target)}, answer)
    [status] = seen
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= child.HOST_TRIP_BYTES
    assert answer["errno"] == errno.EIO
    assert answer["removed"] is True


def test_a_file_too_large_for_the_process_is_no_space(target):
    """As on a full disk or over a quota: the allocation fails, and the file goes away."""
    program = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from gds_optimizer.probing.child import main\n"
        "main()\n"
    )
    request = {
        "operation": "directory",
        "directory": str(target),
        "file": scratch_file(target),
    }
    answer = run_child(request, timeout_s=LONG_S, command=[sys.executable, "-c", program])
    assert (answer.data["stage"], answer.data["errno"]) == ("allocate", errno.EFBIG)
    assert answer.data["removed"] is True


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_short_transfers_are_failures(target, monkeypatch, call):
    real = getattr(os, call)
    monkeypatch.setattr(os, call, lambda *arguments: real(*arguments) - 512)
    with pytest.raises(child.TripError, match="moved 4193792 of 4194304 bytes"):
        child.probe_directory({"directory": str(target), "file": scratch_file(target)}, {})


def test_wrong_bytes_are_a_failure(target, monkeypatch):
    real = os.preadv

    def flip(fd, buffers, offset):
        count = real(fd, buffers, offset)
        buffers[0][-1] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", flip)
    answer: dict = {}
    with pytest.raises(child.TripError, match="not those that were written"):
        child.probe_directory({"directory": str(target), "file": scratch_file(target)}, answer)
    assert answer["stage"] == "comparison"


def test_noise_on_standard_output_does_not_reach_the_answer(target):
    program = (
        "import os, gds_optimizer.probing.child as child\n"
        "def loud(request, answer):\n"
        "    print('python noise', flush=True)\n"
        '    os.write(1, b\'{"error": "library noise"}\')\n'
        "child._OPERATIONS['loud'] = loud\n"
        "child.main()\n"
    )
    command = [sys.executable, "-c", program]
    answer = run_child({"operation": "loud"}, timeout_s=LONG_S, command=command)
    assert answer.ok
    assert answer.data == {"error": ""}


def test_an_unexpected_error_is_an_answer():
    answer = run_child({"operation": "directory"}, timeout_s=LONG_S)
    assert answer.answered
    assert answer.error == "KeyError: 'directory'"


def test_the_machine_without_a_driver():
    answer = run_child({"operation": "machine", "device": 0}, timeout_s=LONG_S)
    assert answer.ok
    if answer.data["gpu_error"] == "":
        pytest.skip("needs a machine without an NVIDIA driver")
    assert "libcuda.so.1" in answer.data["gpu_error"] or "cuInit" in answer.data["gpu_error"]


def test_a_package_that_is_missing_has_no_version():
    assert child._package_version("no_such_module", "numpy") is None
    assert child._package_version("json", "no-such-distribution") == "unknown"
    assert child._package_version(None, "no-such-distribution") is None
    assert child._package_version("numpy", "no-such-distribution", "numpy") is not None


def test_the_child_starts_without_torch():
    program = (
        "import sys, gds_optimizer.probing.child, gds_optimizer.probing.device_trip\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "False\n"


# --- device round trips ---

FAKE_CUPY = """
import contextlib, numpy
uint8 = numpy.uint8
class ndarray:
    def __init__(self, shape, dtype, memptr): self.host = memptr.host
    def set(self, values): self.host[:] = values
    def get(self): return self.host
class Memory:
    def __init__(self, nbytes): self.host = numpy.empty(nbytes, uint8)
class MemoryPointer:
    def __init__(self, memory, offset): self.host = memory.host
    def memset(self, value, nbytes): self.host[:nbytes] = value
class cuda:
    Memory, MemoryPointer = Memory, MemoryPointer
    class runtime:
        deviceSynchronize = staticmethod(lambda: None)
    @staticmethod
    def Device(index): return contextlib.nullcontext()
"""
FAKE_KVIKIO = """
import json, os, sys, time
from types import SimpleNamespace
behaviour = {behaviour!r}
CompatMode = SimpleNamespace(ON="on", OFF="off")
registered, moved = [], dict(POSIX=0, GDS=0)
def memory_register(buffer):
    if behaviour == "no-register":
        raise RuntimeError("cuFile error at: /a/buffer.cpp:31:\\n  cannot register")
    registered.append(buffer)
def memory_deregister(buffer): registered.remove(buffer)
class SummaryMonitor:
    def get(self):
        totals = {{name: dict(bytes_transferred=count) for name, count in moved.items()}}
        return SimpleNamespace(by_backend=totals)
class CuFile:
    def __init__(self, path, flags):
        if behaviour == "no-open": raise RuntimeError("GPUDirect Storage not supported")
        assert flags == "r+"
        self.fd = os.open(path, os.O_RDWR)
    def __enter__(self): return self
    def __exit__(self, *error): os.close(self.fd)
    def move(self, function, buffer, nbytes, offset):
        assert buffer.host.nbytes == nbytes
        if behaviour == "hang": time.sleep(600)
        if behaviour == "die": os.abort()
        moved["POSIX" if SETTINGS["compat_mode"] == "on" else "GDS"] += nbytes
        count = function(self.fd, [buffer.host], offset)
        return SimpleNamespace(get=lambda: count - (4096 if behaviour == "short" else 0))
    def pwrite(self, buffer, nbytes, offset): return self.move(os.pwritev, buffer, nbytes, offset)
    def pread(self, buffer, nbytes, offset):
        if behaviour == "no-read": return SimpleNamespace(get=lambda: nbytes)
        return self.move(os.preadv, buffer, nbytes, offset)
SETTINGS = {{}}
"""
FAKE_DEFAULTS = """
import kvikio
def set(values): kvikio.SETTINGS.update(values)
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Put a cupy over host memory and a kvikio over pwritev before the real ones."""

    def install(behaviour=""):
        site = tmp_path / "site"
        (site / "kvikio").mkdir(parents=True)
        (site / "cupy.py").write_text(FAKE_CUPY)
        (site / "kvikio/__init__.py").write_text(FAKE_KVIKIO.format(behaviour=behaviour))
        (site / "kvikio/defaults.py").write_text(FAKE_DEFAULTS)
        monkeypatch.syspath_prepend(site)

    return install


def ask_device(target: Path, mode: str, timeout_s: float = LONG_S):
    request = {"operation": "device", "mode": mode, "device": 0, "file": scratch_file(target)}
    return run_child(request, timeout_s=timeout_s)


@pytest.mark.parametrize(("mode", "backend"), [("posix", "POSIX"), ("gds", "GDS")])
def test_a_device_round_trip(target, stand_ins, mode, backend):
    stand_ins()
    answer = ask_device(target, mode)
    assert answer.error == ""
    assert answer.data["removed"] is True
    assert answer.data["backends"] == {"POSIX": 0, "GDS": 0, backend: 2 * (8 << 20)}
    assert "operations" not in answer.data  # no libcufile in that process


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        ("no-register", "cuFile error: cannot register"),
        ("no-open", "GPUDirect Storage not supported"),
        ("short", "a write moved 8384512 of 8388608 bytes"),
        ("no-read", "the bytes that came back are not those that were written"),
    ],
)
def test_a_failed_device_round_trip_says_why(target, stand_ins, behaviour, error):
    stand_ins(behaviour)
    answer = ask_device(target, "gds")
    assert answer.answered
    assert answer.error == error
    assert answer.data["removed"] is True


@pytest.mark.parametrize(
    ("behaviour", "error"), [("hang", "did not answer within 2 s"), ("die", "died of SIGABRT")]
)
def test_the_file_of_a_killed_round_trip_is_removed(target, stand_ins, behaviour, error):
    stand_ins(behaviour)
    answer = ask_device(target, "gds", timeout_s=2.0 if behaviour == "hang" else LONG_S)
    assert answer.error.startswith(error)
    assert answer.leftover is None


def test_a_missing_library_is_named(target, tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/cupy.py").write_text("raise ImportError('cupy is not here')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert ask_device(target, "posix").error == "cupy is not here"


# --- libcufile's counters ---


def level3(level1_bytes: int, gpus: list[dict[int, int]], *, entries: int | None = None) -> bytes:
    """CUfileStatsLevel3_t as libcufile fills it; `gpus` give counters by their position."""
    data = bytes(level1_bytes + 2 * 32 * 8) + struct.pack("<II", len(gpus), 0)
    for index in range(len(gpus) if entries is None else entries):
        counters = [0] * 29
        for position, value in (gpus[index] if index < len(gpus) else {}).items():
            counters[position] = value
        data += b"GPU-uuid-16bytes" + struct.pack("<29Q", *counters)
    return data + b"\xa5" * 500


@pytest.mark.parametrize("level1_bytes", [512, 624])  # up to 1.18, and from 1.19 on
@pytest.mark.parametrize("entries", [2, 16])
def test_counters_are_summed_over_gpus(level1_bytes, entries):
    gpus = [{5: 1, 6: 2, 7: 3, 18: 10}, {5: 4, 19: 20, 20: 30}]
    data = level3(level1_bytes, gpus, entries=entries)
    assert cufile_stats.parse_level3(data, level1_bytes=level1_bytes) == {
        "p2p.read": 5,
        "nvfs.read": 2,
        "posix.read": 3,
        "p2p.write": 10,
        "nvfs.write": 20,
        "posix.write": 30,
    }


@pytest.mark.parametrize("change", [-512, -8, 8])
def test_an_unknown_layout_is_not_guessed_at(change):
    assert cufile_stats.parse_level3(level3(512, [{}]), level1_bytes=512 + change) is None


@pytest.mark.parametrize("num_gpus", [2, 17, 2**32 - 1])
def test_an_impossible_number_of_gpus_is_not_believed(num_gpus):
    data = bytearray(level3(512, [{}]))
    data[1024:1028] = struct.pack("<I", num_gpus)
    assert cufile_stats.parse_level3(bytes(data), level1_bytes=512) is None


def test_the_written_part_of_a_buffer_is_measured():
    assert cufile_stats._written_bytes(bytes(1024) + b"\xa5" * 100) == 1024
    assert cufile_stats._written_bytes(bytes(1019) + b"\xa5" * 100) == 1024
    assert cufile_stats._written_bytes(b"\xa5" * 100) == 0


@pytest.mark.parametrize("missing", ["library", "function", "level"])
def test_a_libcufile_that_does_not_count(monkeypatch, missing):
    library: object = SimpleNamespace(cuFileGetStatsL3=None) if missing == "level" else object()
    monkeypatch.setattr(
        cufile_stats, "_loaded_library", lambda: None if missing == "library" else library
    )
    monkeypatch.setattr(cufile_stats, "_call", lambda *arguments: 5011)
    cufile_stats._counting_library.cache_clear()
    assert cufile_stats.operations_by_path() is None
    cufile_stats._counting_library.cache_clear()


def test_the_answer_is_one_line_of_json(target):
    command = [sys.executable, "-m", "gds_optimizer.probing.child"]
    request = {"operation": "remove", "file": str(target / "x")}
    command.append(json.dumps(request))
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stderr == ""
    assert json.loads(result.stdout) == {"error": "", "removed": True}

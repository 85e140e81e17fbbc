"""KvikIO in POSIX mode on host buffers, and what is special about KvikIO."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from gds_optimizer.bench.page_cache import resident_pages
from gds_optimizer.errors import IoPathError
from gds_optimizer.io import CuFileBackend, IoPath, make_backend
from tests.support import io_backends
from tests.support.io_conformance import MIB, IoConformance, noise, put
from tests.support.libcuda_stub import DriverStubUnavailableError, load_driver_stub


@pytest.fixture(scope="module")
def kvikio():
    try:
        load_driver_stub()
    except DriverStubUnavailableError as error:
        pytest.skip(str(error))
    importlib.import_module("kvikio.defaults")
    return importlib.import_module("kvikio")


@pytest.mark.usefixtures("kvikio")
class TestPosixOnHostBuffers(IoConformance):
    kind = "posix-cpu"
    way = "posix"


@contextlib.contextmanager
def opened(**options):
    backend = io_backends.make("posix-cpu", **options)
    try:
        yield backend
    finally:
        backend.close()


def test_make_backend(kvikio):
    with opened() as backend:
        assert isinstance(backend, CuFileBackend)
        assert (backend.io_path, backend.device) == (IoPath.POSIX, torch.device("cpu"))


def test_settings_of_the_process(kvikio, tmp_path):
    path = io_backends.create_file(tmp_path / "bucket.bin", MIB)
    before = kvikio.defaults.get("compat_mode")
    with opened(threads=3, task_size_bytes=5 * MIB) as backend:
        backend.open(path)
        found = {
            name: kvikio.defaults.get(name)
            for name in (
                "num_threads",
                "task_size",
                "bounce_buffer_size",
                "gds_threshold",
                "auto_direct_io_read",
                "auto_direct_io_write",
                "compat_mode",
            )
        }
    assert found == {
        "num_threads": 3,
        "task_size": 5 * MIB,
        "bounce_buffer_size": 5 * MIB,
        "gds_threshold": 0,
        "auto_direct_io_read": True,
        "auto_direct_io_write": True,
        "compat_mode": before,
    }


def test_the_mode_is_reset_after_an_open_that_fails(kvikio, tmp_path):
    before = kvikio.defaults.get("compat_mode")
    with opened() as backend, pytest.raises(OSError, match="absent"):
        backend.open(tmp_path / "absent")
    assert kvikio.defaults.get("compat_mode") == before


def test_direct_io_stays_on_when_others_turn_it_off(kvikio, tmp_path):
    path = io_backends.create_file(tmp_path / "bucket.bin", MIB)
    with opened() as backend:
        file = backend.open(path)
        buffer = put(io_backends.allocate(backend.device, MIB), noise(MIB))
        for start in (file.write, file.read):
            kvikio.defaults.set({"auto_direct_io_read": False, "auto_direct_io_write": False})
            start(buffer, 0).wait()
            assert resident_pages(path) == 0


def test_registering_host_buffers_does_nothing(kvikio):
    with opened() as backend:
        buffer = io_backends.allocate(backend.device, MIB)
        backend.register(buffer)
        backend.deregister(buffer)


def test_counters_say_which_way_bytes_went(kvikio, tmp_path):
    """Ours by direction while there is one way; each way's total once KvikIO used another."""
    path = io_backends.create_file(tmp_path / "bucket.bin", 2 * MIB)
    with opened() as backend:
        assert backend.counters() == {}
        file = backend.open(path)
        buffer = io_backends.allocate(backend.device, 2 * MIB)
        file.write(buffer, 0).wait()
        file.read(buffer[:MIB], 0).wait()
        assert backend.counters() == {"posix.write": 2 * MIB, "posix.read": MIB}
        mapped = kvikio.Mmap(path)
        assert mapped.read(buffer.numpy()) == 2 * MIB
        mapped.close()
        assert backend.counters() == {"posix.total": 3 * MIB, "mmap.total": 2 * MIB}


@pytest.mark.parametrize("io_path", [IoPath.GDS, IoPath.GDS_COMPAT])
def test_gds_moves_device_memory_only(io_path):
    with pytest.raises(IoPathError, match=f"{io_path} moves device memory"):
        make_backend(io_path, device="cpu", threads=1, task_size_bytes=MIB)


@pytest.mark.parametrize("io_path", [IoPath.POSIX, IoPath.GDS, IoPath.GDS_COMPAT])
def test_devices_that_are_not_served(kvikio, io_path):
    with pytest.raises(IoPathError, match=f"{io_path} needs device cuda:99"):
        make_backend(io_path, device="cuda:99", threads=1, task_size_bytes=MIB)
    with pytest.raises(IoPathError, match="got meta"):
        make_backend(io_path, device="meta", threads=1, task_size_bytes=MIB)


def test_without_kvikio(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(IoPathError, match=r"pip install 'gds-optimizer\[cu1[23]\]'"):
        make_backend(IoPath.POSIX, device="cpu", threads=1, task_size_bytes=MIB)


def test_with_a_kvikio_that_is_too_old(kvikio, monkeypatch):
    old = SimpleNamespace(__version__="26.08.00", defaults=kvikio.defaults)
    monkeypatch.setitem(sys.modules, "kvikio", old)
    with pytest.raises(IoPathError, match=r"KvikIO 26\.10 or later.*got 26\.08"):
        make_backend(IoPath.POSIX, device="cpu", threads=1, task_size_bytes=MIB)


WITHOUT_DRIVER = """
import ctypes, sys
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    pass
else:
    sys.exit("driver")
from gds_optimizer.errors import IoPathError
from gds_optimizer.io import IoPath, make_backend
try:
    make_backend(IoPath.POSIX, device="cpu", threads=1, task_size_bytes=4096)
except IoPathError as error:
    print(error)
"""


def test_without_a_driver(pytestconfig):
    pytest.importorskip("kvikio", reason="needs KvikIO")
    done = subprocess.run(
        (sys.executable, "-c", WITHOUT_DRIVER),
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stderr.strip() == "driver":
        pytest.skip("needs a machine without an NVIDIA driver")
    assert "posix needs the NVIDIA driver" in done.stdout, done.stderr
    assert "libcuda.so.1" in done.stdout


QUEUES = """
import os, sys
from pathlib import Path
from tests.support import io_backends
from tests.support.libcuda_stub import load_driver_stub
from gds_optimizer.io import IoPath, make_backend

load_driver_stub()
path = Path(sys.argv[1])
backend = make_backend(
    IoPath.POSIX, device="cpu", threads=3, task_size_bytes=2**20, queue_per_drive=sys.argv[2] == "1"
)
before = len(os.listdir("/proc/self/task"))
buffer = io_backends.allocate_host_buffer(2**20)
file = backend.open(path)
file.write(buffer, 0).wait(60)
file.read(buffer, 0).wait(60)
print(len(os.listdir("/proc/self/task")) - before)
file.close()
backend.close()
"""


@pytest.mark.thinned(first=1)
@pytest.mark.parametrize("asked", [False, True])
def test_a_queue_for_each_drive(kvikio, tmp_path, asked):
    """A block device gets threads of its own when its first file is used, if that was asked for."""
    path = io_backends.create_file(tmp_path / "bucket.bin", MIB)
    if "/" not in _block_device_of(path):
        pytest.skip("needs a directory on a block device")
    done = subprocess.run(
        [sys.executable, "-c", QUEUES, str(path), str(int(asked))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == (3 if asked else 0)


def _block_device_of(path) -> str:
    """Where the kernel describes it; empty without one."""
    device = path.stat().st_dev
    place = pathlib.Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    return str(place.resolve()) if place.exists() else ""


def test_kvikio_that_was_loaded_before_shares_its_threads(kvikio, monkeypatch, caplog):
    monkeypatch.delenv("KVIKIO_THREAD_POOL_PER_BLOCK_DEVICE", raising=False)
    make_backend(
        IoPath.POSIX, device="cpu", threads=1, task_size_bytes=4096, queue_per_drive=True
    ).close()
    assert "all drives share its threads" in caplog.text

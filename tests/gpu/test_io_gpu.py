"""KvikIO on device buffers: POSIX mode, and cuFile's calls with registered buffers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gds_optimizer.errors import IoPathError
from gds_optimizer.io import PAGE_BYTES, CuFileBackend, IoPath, make_backend
from gds_optimizer.io.memory import HostBuffer
from gds_optimizer.tuning_measure import opened
from tests.conftest import REPOSITORY
from tests.support import io_backends
from tests.support.io_conformance import MIB, IoConformance, noise, put

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kvikio_libraries")]


class TestPosixOnDeviceBuffers(IoConformance):
    kind = "posix-cuda"
    way = "posix"


@pytest.mark.usefixtures("cufile")
class TestCufileOnRegisteredBuffers(IoConformance):
    kind = "gds-compat"
    way = "gds-compat"
    failure_words = "Unable to write file"
    is_registered = True


@pytest.mark.usefixtures("cufile")
class TestCufileOnOtherBuffers(IoConformance):
    kind = "gds-compat"
    way = "gds-compat"
    failure_words = "Unable to write file"


def test_make_backend_knows_the_device():
    backend = make_backend(IoPath.POSIX, device="cuda", threads=2, task_size_bytes=PAGE_BYTES)
    assert isinstance(backend, CuFileBackend)
    assert backend.device == torch.device("cuda", torch.cuda.current_device())
    backend.close()


def test_host_buffers_are_refused(tmp_path):
    backend = io_backends.make("posix-cuda")
    file = backend.open(io_backends.create_file(tmp_path / "bucket.bin", MIB))
    with pytest.raises(ValueError, match="wanted a buffer on cuda:0, got one on cpu"):
        file.write(torch.zeros(MIB, dtype=torch.uint8), 0)
    backend.close()


def test_every_device_is_served_whatever_the_current_one(tmp_path):
    """On a machine with one GPU it is that one; with more, those that are not current too."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        backend = make_backend(IoPath.POSIX, device=device, threads=2, task_size_bytes=MIB)
        file = backend.open(io_backends.create_file(tmp_path / f"{index}.bin", 4 * MIB))
        buffer = put(io_backends.allocate(device, 4 * MIB), noise(4 * MIB))
        file.write(buffer, 0).wait()
        put(buffer, torch.zeros(4 * MIB, dtype=torch.uint8))
        file.read(buffer, 0).wait()
        assert torch.equal(buffer.cpu(), noise(4 * MIB))
        assert torch.cuda.current_device() == 0
        backend.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_threads_stay_off_the_first_device(tmp_path):
    """Every rank's threads would take memory of it."""
    program = (
        "import pathlib, sys, torch\n"
        "from gds_optimizer.io import IoPath, make_backend\n"
        "from tests.support import io_backends\n"
        "torch.cuda.set_device(1)\n"
        "device = torch.device('cuda', 1)\n"
        "backend = make_backend(IoPath.POSIX, device=device, threads=4, task_size_bytes=2**20)\n"
        "path = io_backends.create_file(pathlib.Path(sys.argv[1]), 2**23)\n"
        "file, buffer = backend.open(path), io_backends.allocate(device, 2**23)\n"
        "file.write(buffer, 0).wait()\n"
        "file.read(buffer, 0).wait()\n"
        "backend.close()\n"
        "assert not torch._C._cuda_hasPrimaryContext(0)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "bucket.bin")]
    done = subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_read_is_visible_to_every_stream(tmp_path):
    backend = io_backends.make("posix-cuda")
    file = backend.open(io_backends.create_file(tmp_path / "bucket.bin", 32 * MIB))
    buffer = io_backends.allocate(backend.device, 32 * MIB)
    stream = torch.cuda.Stream()
    for seed in range(5):
        file.write(put(buffer, noise(32 * MIB, seed)), 0).wait()
        put(buffer, torch.zeros(32 * MIB, dtype=torch.uint8))
        file.read(buffer, 0).wait()
        with torch.cuda.stream(stream):
            copied = buffer.clone()
        stream.synchronize()
        assert torch.equal(copied.cpu(), noise(32 * MIB, seed))
    backend.close()


def test_backends_with_requests_of_different_sizes_take_turns(tmp_path):
    path = io_backends.create_file(tmp_path / "bucket.bin", 32 * MIB)
    for size in (16, 8, 16, 4, 16):
        backend = io_backends.make("posix-cuda", threads=32, task_size_bytes=size * MIB)
        buffer = put(io_backends.allocate(backend.device, 32 * MIB), noise(32 * MIB, size))
        with opened(backend, path) as file:
            file.write(buffer, 0).wait()
            put(buffer, torch.zeros(32 * MIB, dtype=torch.uint8))
            file.read(buffer, 0).wait()
        assert torch.equal(buffer.cpu(), noise(32 * MIB, size))
        backend.close()


def test_pinned_memory_that_nobody_closes_is_given_back():
    """Its addresses serve others, which must be able to pin them."""
    device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(20):
        buffer = HostBuffer(16 * MIB, device)
        assert buffer.is_pinned
        del buffer


@pytest.mark.usefixtures("cufile")
def test_a_buffer_that_cufile_cannot_register():
    backend = io_backends.make("gds-compat")
    buffer = io_backends.allocate(backend.device, MIB)
    backend.register(buffer)
    with pytest.raises(IoPathError, match=f"cannot register a buffer of {MIB} bytes on cuda:0"):
        backend.register(buffer)
    backend.deregister(buffer)
    backend.deregister(buffer)  # left alone
    backend.register(buffer)
    backend.deregister(buffer)
    backend.close()

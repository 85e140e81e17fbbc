"""The backends under test by name, for tests and for the processes that tests start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from gds_optimizer.io import IoBackend, IoPath, allocate_host_buffer, make_backend
from gds_optimizer.io.base import PAGE_BYTES
from tests.support.libcuda_stub import load_driver_stub

KINDS = {
    "host": (IoPath.HOST, "cpu"),
    "posix-cpu": (IoPath.POSIX, "cpu"),
    "posix-cuda": (IoPath.POSIX, "cuda"),
    "gds-compat": (IoPath.GDS_COMPAT, "cuda"),
}


def make(kind: str, *, threads: int = 4, task_size_bytes: int = 2**20) -> IoBackend:
    """A backend of `kind`, a key of `KINDS`."""
    io_path, device = KINDS[kind]
    if kind == "posix-cpu":
        load_driver_stub()
    return make_backend(io_path, device=device, threads=threads, task_size_bytes=task_size_bytes)


def allow_cufile_compat_mode(directory: Path) -> None:
    """Have cuFile work without GPUDirect in this process and its children, from its first use."""
    config = directory / "cufile.json"
    config.write_text(json.dumps({"properties": {"allow_compat_mode": True}}))
    os.environ["CUFILE_ENV_PATH_JSON"] = str(config)


def allocate(device: torch.device, nbytes: int) -> torch.Tensor:
    """A page-aligned buffer; on a GPU from cudaMalloc, which cuFile can register."""
    if device.type == "cpu":
        return allocate_host_buffer(nbytes)
    import cupy

    with cupy.cuda.Device(device.index):
        memory = cupy.cuda.Memory(nbytes + PAGE_BYTES)
        start = cupy.cuda.MemoryPointer(memory, -memory.ptr % PAGE_BYTES)
        return torch.as_tensor(cupy.ndarray((nbytes,), cupy.uint8, start), device=device)


def create_file(path: Path, nbytes: int) -> Path:
    """A file whose blocks are allocated and whose pages are not in the page cache."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)
    return path

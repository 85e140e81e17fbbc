"""How much of a file the kernel keeps in its page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np


def resident_pages(path: str | os.PathLike[str]) -> int:
    """Pages of the file at `path` that are in the page cache; asking reads none of them.

    The kernel tells the file's owner and those who may write to it; others would get a wrong
    answer, and an error here.
    """
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{path} is not writable: the kernel would not tell what is cached")
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return 0
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    view = np.frombuffer(mapping, dtype=np.uint8)
    pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    if libc.mincore(view.ctypes.data, size, pages.ctypes.data) != 0:
        raise OSError(ctypes.get_errno(), f"mincore of {path} failed")
    return int((pages & 1).sum())  # the other bits mean nothing


def resident_bytes(directory: Path) -> int:
    """Bytes of the files under `directory` that are in the page cache; whole pages count."""
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(resident_pages(path) for path in paths) * mmap.PAGESIZE

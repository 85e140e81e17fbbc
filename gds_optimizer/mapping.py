"""Bucket files as memory: the planes of one space, each as one contiguous run of elements.

A checkpoint writer wants tensors; the state is in files. Each plane's part of every bucket file is
mapped into one range of addresses, so that a shard is one slice of it however many buckets it is
spread over. Nothing is read until somebody looks, and looking takes page cache, not memory of the
process.

The mapped pages and direct I/O do not know of each other: whoever wrote through a mapping calls
`flush_and_drop` before the files are read directly again.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Container, Sequence
from pathlib import Path

import torch

from gds_optimizer.codecs import get_codec
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.layout import BUCKET_ALIGNMENT, PAGE_BYTES, Layout

_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_DONTNEED = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int, at: int) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, fd, at)
    if mapped is None or mapped == _MAP_FAILED:
        error = ctypes.get_errno()
        hint = ""
        if error == errno.ENOMEM:
            hint = "; there may be too many mappings: raise vm.max_map_count or use larger buckets"
        raise OSError(error, f"cannot map {nbytes} bytes: {os.strerror(error)}{hint}")
    return int(mapped)


class PlaneMapping:
    """One plane of one space, mapped from its bucket files. Lives as long as a tensor of it does.

    Args:
        layout: what the files hold.
        paths: the bucket files, by bucket index.
        space: index of the space.
        plane: number of the plane within the space; encoded as it is in memory (fp32 and the
            like), so that a bucket's part is a whole number of pages.
        writable: whether stores into the tensors reach the files. Where not, a store kills the
            process with SIGSEGV.
        blank: buckets (by index) whose part of the file means nothing: it reads as zeros.

    Raises:
        UnsupportedError: the kernel's pages are larger than those of the files.
        OSError: a file cannot be opened, or there is no room for another mapping.
    """

    def __init__(
        self,
        layout: Layout,
        paths: Sequence[Path],
        space: int,
        plane: int,
        *,
        writable: bool,
        blank: Container[int] = (),
    ) -> None:
        if mmap.PAGESIZE > PAGE_BYTES:
            raise UnsupportedError(
                f"this kernel has pages of {mmap.PAGESIZE} bytes, and bucket files can be mapped "
                f"for a checkpoint only with pages of {PAGE_BYTES}: use snapshots instead"
            )
        spec = layout.spaces[space].planes[plane]
        self.dtype = get_codec(spec.codec).dtype
        item_bytes = self.dtype.itemsize
        if BUCKET_ALIGNMENT * item_bytes % PAGE_BYTES:
            raise ValueError(f"plane {spec.name!r} ({spec.codec}) is not page-aligned in a bucket")
        buckets = [bucket for bucket in layout.buckets if bucket.space == space]
        self.nbytes = sum(bucket.numel for bucket in buckets) * item_bytes
        # The range is reserved first (as zeros), then the files' parts are put over it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = _map(None, max(self.nbytes, PAGE_BYTES), mmap.PROT_READ, flags, -1, 0)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            for bucket in buckets:
                if bucket.index in blank and not writable:
                    continue
                fd = os.open(paths[bucket.index], os.O_RDWR if writable else os.O_RDONLY)
                try:
                    _map(
                        self.address + bucket.start * item_bytes,
                        bucket.numel * item_bytes,
                        protection,
                        mmap.MAP_SHARED | _MAP_FIXED,
                        fd,
                        bucket.planes[plane].offset,
                    )
                finally:
                    os.close(fd)
        except BaseException:
            self._unmap()
            raise

    def tensor(self, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of the space: a 1-D tensor over the mapped files.

        It is the only one in its storage: writers that copy what does not own its storage leave
        it alone. The mapping lives until the last of them is gone.
        """
        if numel == 0:
            return torch.empty(0, dtype=self.dtype)
        item_bytes = self.dtype.itemsize
        kind = ctypes.c_char * (numel * item_bytes)
        buffer = kind.from_address(self.address + start * item_bytes)
        buffer.mapping = self  # type: ignore[attr-defined] # keeps the pages mapped
        return torch.frombuffer(buffer, dtype=self.dtype, count=numel)

    def drop(self) -> None:
        """Let go of the mapped pages, so that the page cache can: they are read again on use."""
        _libc.madvise(self.address, self.nbytes, _MADV_DONTNEED)

    def _unmap(self) -> None:
        address, self.address = self.address, 0
        if address:
            _libc.munmap(address, max(self.nbytes, PAGE_BYTES))

    def __del__(self) -> None:
        # A forked child has a mapping of its own, so unmapping there does no harm.
        if getattr(self, "address", 0):
            self._unmap()


def flush_and_drop(mappings: Sequence[PlaneMapping], paths: Sequence[Path]) -> None:
    """Put everything written through `mappings` on disk, and take the files out of the page cache.

    The order matters: pages that are dirty or mapped stay.
    """
    fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
    try:
        for fd in fds:
            os.fdatasync(fd)
        for mapping in mappings:
            mapping.drop()
        for fd in fds:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        for fd in fds:
            os.close(fd)

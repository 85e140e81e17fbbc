"""Bucket files as memory: the planes of one space, each as one contiguous run of elements.

A checkpoint writer wants tensors; the state is in files. Each plane's part of every bucket file is
mapped into one range of addresses, so that a shard is one slice of it however many buckets it is
spread over. Nothing is read until somebody looks, and looking takes page cache, not memory of the
process.

The mapped pages and direct I/O do not know of each other: whoever wrote through a mapping calls
`flush_and_drop` before the files are read directly again.

A plane that is encoded in its files is no run of values. Its decoded values are put into a file of
their own that has no name, and that file is mapped.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

import torch

from gds_optimizer.codecs import get_codec
from gds_optimizer.errors import NoSpaceError, UnsupportedError
from gds_optimizer.layout import BUCKET_ALIGNMENT, PAGE_BYTES, Layout, Plane
from gds_optimizer.room import free_bytes

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


def _check_page_size() -> None:
    if mmap.PAGESIZE > PAGE_BYTES:
        raise UnsupportedError(
            f"this kernel has pages of {mmap.PAGESIZE} bytes, and bucket files can be mapped "
            f"for a checkpoint only with pages of {PAGE_BYTES}: use snapshots instead"
        )


class Mapping:
    """A run of elements over mapped files. Lives as long as a tensor of it does.

    Args:
        numel: elements.
        dtype: theirs.

    Attributes:
        address: where it begins; at first all of it reads as zeros.
        nbytes: its size.

    Raises:
        UnsupportedError: the kernel's pages are larger than those of the files.
        OSError: there is no room for another mapping.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        _check_page_size()
        self.dtype = dtype
        self.nbytes = numel * dtype.itemsize
        # The range is reserved first (as zeros), then the files' parts are put over it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = _map(None, max(self.nbytes, PAGE_BYTES), mmap.PROT_READ, flags, -1, 0)

    def _put(self, position: int, nbytes: int, fd: int, at: int, *, writable: bool) -> None:
        """Let `nbytes` of a file from `at` on show at byte `position`; all page multiples."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _map(self.address + position, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, at)

    def tensor(self, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel`: a 1-D tensor over the mapped files.

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


class PlaneMapping(Mapping):
    """One plane of one space, mapped from its bucket files.

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
        spec = layout.spaces[space].planes[plane]
        dtype = get_codec(spec.codec).dtype
        item_bytes = dtype.itemsize
        if BUCKET_ALIGNMENT * item_bytes % PAGE_BYTES:
            raise ValueError(f"plane {spec.name!r} ({spec.codec}) is not page-aligned in a bucket")
        buckets = [bucket for bucket in layout.buckets if bucket.space == space]
        super().__init__(sum(bucket.numel for bucket in buckets), dtype)
        try:
            for bucket in buckets:
                if bucket.index in blank and not writable:
                    continue
                fd = os.open(paths[bucket.index], os.O_RDWR if writable else os.O_RDONLY)
                try:
                    self._put(
                        bucket.start * item_bytes,
                        bucket.numel * item_bytes,
                        fd,
                        bucket.planes[plane].offset,
                        writable=writable,
                    )
                finally:
                    os.close(fd)
        except BaseException:
            self._unmap()
            raise


class ScratchMapping(Mapping):
    """Decoded values in a file without a name, which lives as long as a tensor of it does.

    Its space is reserved at once, so that a full disk is met here and not by a store into a
    mapped page, which would kill the process. It begins as zeros.

    Args:
        numel: elements, a multiple of 1024.
        dtype: theirs.
        directory: whose file system takes it.

    Raises:
        NoSpaceError: it does not fit; names bytes needed and free.
        UnsupportedError: the kernel's pages are too large.
    """

    def __init__(self, numel: int, dtype: torch.dtype, directory: Path) -> None:
        super().__init__(numel, dtype)
        self._fd = -1
        try:
            self._fd = _unnamed_file(directory)
            self._reserve(directory)
        except BaseException:
            self.close()
            self._unmap()
            raise

    def _reserve(self, directory: Path) -> None:
        room_bytes = free_bytes(directory)
        try:
            if self.nbytes > room_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._fd, 0, self.nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise no_room_for_decoded(str(directory), self.nbytes, room_bytes) from error

    def write(self, start: int, values: torch.Tensor) -> None:
        """Put values (on the CPU) into the file from element `start` on, before it is mapped."""
        view = memoryview(values.numpy().view("u1").data)
        position, done = start * self.dtype.itemsize, 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], position + done)

    def map(self, *, writable: bool) -> None:
        """Let the tensors show the file. Where not `writable`, a store kills the process."""
        # What went through the page cache is on its way out; it comes back when it is used.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._put(0, self.nbytes, self._fd, 0, writable=writable)
        self.close()

    def close(self) -> None:
        """Close the file, which is gone with that unless it is mapped."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()
        super().__del__()


def no_room_for_decoded(where: str, needed_bytes: int, free_bytes: int) -> NoSpaceError:
    """What is raised where decoded values do not fit."""
    return NoSpaceError(
        f"{where} has too little room to hand out state that is not kept in fp32: its decoded "
        f"values need {needed_bytes} bytes for as long as somebody uses them, and {free_bytes} "
        "are free: free space, or use snapshots, which need no such room"
    )


def _unnamed_file(directory: Path) -> int:
    """A descriptor of a new file that nobody can find, for direct I/O where that is known."""
    for flags in (os.O_DIRECT, 0):
        with contextlib.suppress(OSError):  # not all file systems know either
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    fd, path = tempfile.mkstemp(prefix="decoded", dir=directory)
    os.unlink(path)
    return fd


def plane_bytes(path: Path, plane: Plane, *, writable: bool = False) -> torch.Tensor:
    """The encoded bytes of one plane of a bucket file, padding included, mapped.

    Returns:
        1-D uint8 tensor of `plane.nbytes` elements, which keeps the mapping. Where not `writable`,
        stores into it reach neither the file nor anybody else.

    Raises:
        UnsupportedError: the kernel's pages are too large.
        OSError: the file cannot be opened, or there is no room for another mapping.
        ValueError: the file is too short.
    """
    _check_page_size()
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        memory = mmap.mmap(fd, plane.nbytes, access=access, offset=plane.offset)
        memory.madvise(mmap.MADV_SEQUENTIAL)
    finally:
        os.close(fd)
    return torch.frombuffer(memory, dtype=torch.uint8)


def files_behind(tensors: Iterable[torch.Tensor]) -> set[tuple[int, int]]:
    """Device and inode of every file that the beginning of a CPU tensor is mapped from."""
    spans = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, _, _, device, inode, *_ = line.split()
            start, end = (int(each, 16) for each in span.split("-"))
            major, minor = (int(each, 16) for each in device.split(":"))
            spans.append((start, end, (os.makedev(major, minor), int(inode))))
    starts = [start for start, _, _ in spans]
    found = set()
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel():
            _, end, file = spans[bisect.bisect_right(starts, tensor.data_ptr()) - 1]
            if tensor.data_ptr() < end and file[1]:
                found.add(file)
    return found


def drop_pages(path: Path) -> None:
    """Take a file's clean pages that nobody maps out of the page cache.

    Looking at a mapped plane has brought in its neighbours', too.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def flush_and_drop(mappings: Sequence[Mapping], paths: Sequence[Path]) -> None:
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

"""KvikIO's CuFile: GPUDirect Storage, cuFile's compatibility mode, and KvikIO's POSIX mode.

Scope: exact byte ranges between one buffer and one file, with KvikIO's and cuFile's traps closed.
Anti-scope: it neither proves that GPUDirect Storage works here (cuFile can spin for ever where it
does not, so a probe in a child process comes first) nor falls back to anything.

KvikIO is imported when a backend is made. Its settings belong to the whole process: the backend
that was made last decides the number of threads and the size of the bounce buffers.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.errors import IoPathError
from gds_optimizer.io.base import IoPath
from gds_optimizer.io.staging import Staging
from gds_optimizer.io.tasks import (
    Outcome,
    Task,
    TaskBackend,
    TaskFile,
    check_process,
    open_direct,
    open_error,
)
from gds_optimizer.probing.cufile_config import load_cufile_config, strict_config
from gds_optimizer.probing.system import System

logger = logging.getLogger(__name__)

POLL_S = 0.0002
"""Seconds between two looks at a future: KvikIO's can be asked, or waited for without limit."""

_POOLS_VARIABLE = "KVIKIO_THREAD_POOL_PER_BLOCK_DEVICE"
_STRICT_CONFIG_VARIABLE = "GDS_OPTIMIZER_STRICT_CUFILE_JSON"

_settings_lock = threading.RLock()
_backends: weakref.WeakSet[CuFileBackend] = weakref.WeakSet()


def _import_kvikio(io_path: IoPath) -> Any:
    """KvikIO, once it and the driver library are known to load.

    Raises:
        IoPathError: either cannot be loaded, or KvikIO is too old.
        ForkedError: a process that has used KvikIO forked this one.
    """
    # Where nobody asked for cuFile's log, do not leave one in the working directory.
    os.environ.setdefault("CUFILE_LOGFILE_PATH", os.devnull)
    extra = "cu12" if (torch.version.cuda or "").startswith("12.") else "cu13"
    install = f"pip install 'gds-optimizer[{extra}]'"
    try:
        import kvikio
        import kvikio.defaults
    except ImportError as error:
        raise IoPathError(
            f"the I/O path {io_path} needs KvikIO, which cannot be imported ({error}): {install}"
        ) from error
    if not hasattr(kvikio, "SummaryMonitor"):
        raise IoPathError(
            f"the I/O path {io_path} needs KvikIO 26.10 or later, which says which way bytes "
            f"went, got {kvikio.__version__}: {install}"
        )
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise IoPathError(
            f"the I/O path {io_path} needs the NVIDIA driver, whose library cannot be loaded "
            f"({error}): use the path host, or run where the driver is (docker: --gpus)"
        ) from error
    check_process(_claim_kvikio(), "KvikIO")
    return kvikio


@functools.cache
def _claim_kvikio() -> int:
    """The process that uses KvikIO: this one at the first call. A forked child inherits it."""
    os.register_at_fork(after_in_child=_make_child_hook())
    return os.getpid()


def _make_child_hook() -> Callable[[], None]:
    """What makes a forked child leave its parent's KvikIO alone, also when the child exits.

    KvikIO's threads do not exist in the child. Its destructors do, and would join those threads
    for ever or deregister the parent's files and buffers: so no KvikIO object is ever destroyed
    there, and the child leaves by `_exit`, as those of `multiprocessing` do, once the interpreter
    is finalised, with the exit status that it would have had.
    """
    hold = ctypes.pythonapi.Py_IncRef
    # Looked up before the fork: in the child, the loader's lock may be held by a thread of old.
    libc = ctypes.CDLL(None)
    on_exit = getattr(libc, "on_exit", None)  # not every C library has it
    leave, flush, at_exit = libc._exit, libc.fflush, libc["__cxa_atexit"]

    def after_fork_in_child() -> None:
        for backend in list(_backends):
            for owner in (backend, *backend.files):
                hold(ctypes.py_object(owner))
        if on_exit is not None:
            # Handlers run from the last to the first, and before destructors of static objects.
            on_exit(leave, None)  # calls _exit(status)
            at_exit(flush, None, None)  # calls fflush(NULL)

    return after_fork_in_child


def _forbid_cufile_fallback() -> None:
    """Give cuFile the user's settings with its own fallback switched off.

    KvikIO cannot see that cuFile falls back, so where GDS was asked for and proven a file that
    cannot have it must fail. cuFile reads its settings once, when it is first used.
    """
    if os.environ.get(_STRICT_CONFIG_VARIABLE):
        return
    config = load_cufile_config(System("/"), os.environ)
    directory = tempfile.mkdtemp(prefix="gds-optimizer-")
    path = os.path.join(directory, "cufile.json")
    with open(path, "w") as file:
        file.write(strict_config(config))
    atexit.register(_remove_directory, directory, os.getpid())
    os.environ["CUFILE_ENV_PATH_JSON"] = os.environ[_STRICT_CONFIG_VARIABLE] = path


def _remove_directory(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child runs its parent's exit handlers too
        shutil.rmtree(directory, ignore_errors=True)


def _check_no_cufile_fallback() -> None:
    """Open cuFile and see that it took those settings.

    Raises:
        IoPathError: it cannot be opened, or was opened before, with others.
    """
    from kvikio import cufile_driver

    try:
        cufile_driver.driver_open()
        falls_back = cufile_driver.get("allow_compat_mode")
    except RuntimeError as error:
        raise IoPathError(
            f"the I/O path {IoPath.GDS} is not to be had, cuFile cannot be opened without its "
            f"fallback: {error}; use the path posix"
        ) from error
    if falls_back:
        raise IoPathError(
            "cuFile was opened in this process before the optimizer was set up, with its silent "
            "fallback allowed: set up the optimizer first, or set allow_compat_mode to false in "
            "cufile.json, or use the path posix"
        )


def _want_queue_per_drive() -> None:
    """Have KvikIO give every block device a thread pool of its own.

    Unlike its other settings this one is read from the environment only, when KvikIO is loaded.
    """
    if os.environ.get(_POOLS_VARIABLE) is not None:
        return
    if "kvikio" in sys.modules:
        logger.warning(
            "KvikIO was loaded before the optimizer was set up, so that all drives share its "
            "threads and a slow one may hold up the others: set %s=on in the environment",
            _POOLS_VARIABLE,
        )
        return
    os.environ[_POOLS_VARIABLE] = "on"


def _set_kvikio(kvikio: Any, **wanted: Any) -> dict[str, Any]:
    """Change settings of KvikIO, for the whole process; nothing else in this package does.

    Only what differs is set: setting the number of threads restarts them.

    Returns:
        The previous values of what was changed.
    """
    previous = {}
    with _settings_lock:
        for name, value in wanted.items():
            current = kvikio.defaults.get(name)
            if current != value:
                kvikio.defaults.set(name, value)
                previous[name] = current
    return previous


class _FutureTask:
    """A request in KvikIO's thread pool."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def done(self) -> bool:
        return bool(self._future.done())

    def sleep(self, limit_s: float | None) -> None:
        time.sleep(POLL_S if limit_s is None else min(POLL_S, limit_s))

    def outcome(self) -> Outcome:
        try:
            return Outcome(self._future.get())
        except (OSError, RuntimeError, MemoryError, ValueError) as error:
            return Outcome(0, str(error))


class CuFileFile(TaskFile):
    """An open `kvikio.CuFile`; made by `CuFileBackend.open`."""

    def __init__(self, path: Path, backend: CuFileBackend, cufile: Any) -> None:
        super().__init__(path, backend)
        self._cufile = cufile
        self._kvikio = backend.kvikio
        self._is_host = backend.device.type == "cpu"
        self._staging = backend.staging
        self._queue = backend.queue_of(self.fileno())

    def start_task(self, operation: str, buffer: torch.Tensor, file_offset: int) -> Task:
        nbytes = buffer.numel()
        begin = self._cufile.pread if operation == "read" else self._cufile.pwrite

        def start(memory: Any) -> Any:
            # KvikIO asks these again at every request, and they are anybody's to change.
            _set_kvikio(self._kvikio, auto_direct_io_read=True, auto_direct_io_write=True)
            # One request, one KvikIO task: the last of several would hold a thread of the pool
            # until the others have ended, and a failure would not say how much has been moved.
            return begin(memory, nbytes, file_offset, nbytes)

        if self._staging is not None:
            return self._staging.start(
                self._queue, operation, buffer, lambda part: int(start(part.numpy()).get())
            )
        if self._is_host:
            return _FutureTask(start(buffer.numpy()))
        with torch.cuda.device(buffer.device):
            return _FutureTask(start(buffer))

    def fileno(self) -> int:
        """The descriptor without O_DIRECT; -1 once the file is closed."""
        return int(self._cufile.fileno())

    def release(self) -> None:
        self._cufile.close()


class CuFileBackend(TaskBackend):
    """`IoPath.GDS`, `IoPath.GDS_COMPAT` and `IoPath.POSIX`, by KvikIO.

    In POSIX mode buffers on a device go through up to `threads * task_size_bytes` bytes of pinned
    host memory, with `queue_per_drive` for each file system.

    Args:
        io_path: one of the three. Which of `GDS` and `GDS_COMPAT` it is, is decided by cuFile's
            configuration, before its first use; the difference here is what `counters` says.
        device: where buffers must live; the host ("cpu") in POSIX mode only.
        threads: requests in flight at a time.
        task_size_bytes: most bytes of one request, a positive multiple of 4096.
        queue_per_drive: have that many in flight on each block device. It holds for the whole
            process, and must be asked for before KvikIO is first used in it.

    Raises:
        IoPathError: KvikIO, the driver or the device is not to be had.
        ForkedError: a process that has used KvikIO forked this one.
        ValueError: a size, number or path outside its range.
    """

    def __init__(
        self,
        io_path: IoPath,
        device: str | torch.device,
        *,
        threads: int,
        task_size_bytes: int,
        queue_per_drive: bool = False,
    ) -> None:
        if io_path not in (IoPath.GDS, IoPath.GDS_COMPAT, IoPath.POSIX):
            raise ValueError(f"io_path is {io_path}, wanted gds, gds-compat or posix")
        device = torch.device(device)
        _check_device_type(io_path, device)
        if queue_per_drive:
            _want_queue_per_drive()
        self.kvikio = _import_kvikio(io_path)
        super().__init__(
            io_path,
            _with_index(io_path, device),
            threads=threads,
            task_size_bytes=task_size_bytes,
        )
        self._uses_cufile = io_path is not IoPath.POSIX
        self._queue_per_drive = queue_per_drive
        self.staging: Staging | None = None
        if not self._uses_cufile and self.device.type == "cuda":
            self.staging = Staging(self.device, threads=threads, piece_bytes=task_size_bytes)
        if io_path is IoPath.GDS:
            _forbid_cufile_fallback()
            _check_no_cufile_fallback()
        self._registered: set[int] = set()
        _set_kvikio(
            self.kvikio,
            num_threads=threads,
            task_size=task_size_bytes,
            # Of what cuFile does not take; a smaller one would cut every task again.
            bounce_buffer_size=task_size_bytes,
            # Below the threshold KvikIO leaves cuFile and its threads aside.
            gds_threshold=0,
            auto_direct_io_read=True,
            auto_direct_io_write=True,
        )
        self._monitor = self.kvikio.SummaryMonitor()
        _backends.add(self)

    @contextlib.contextmanager
    def _compat_mode(self) -> Iterator[None]:
        """KvikIO's mode for what is opened or registered inside; AUTO could fall back silently."""
        modes = self.kvikio.CompatMode
        with _settings_lock:
            previous = _set_kvikio(
                self.kvikio, compat_mode=modes.OFF if self._uses_cufile else modes.ON
            )
            try:
                yield
            finally:
                _set_kvikio(self.kvikio, **previous)

    def queue_of(self, fd: int) -> object:
        """What a file shares its threads with: files of which this is equal."""
        return os.fstat(fd).st_dev if self._queue_per_drive else None

    def open_file(self, path: Path) -> CuFileFile:
        fd = open_direct(path)  # what the system refuses, it says better than KvikIO
        try:
            if self.staging is not None:
                self.staging.prepare(self.queue_of(fd))
        except MemoryError as error:
            raise IoPathError(
                f"the I/O path {self.io_path} takes {self.threads} times {self.task_size_bytes} "
                f"bytes of pinned host memory, which are not to be had: {error}; use fewer or "
                "smaller requests (--stream-optimizer-state-io-threads, -io-task-size)"
            ) from error
        finally:
            os.close(fd)
        try:
            with self._compat_mode():
                cufile = self.kvikio.CuFile(path, "r+")
        except RuntimeError as error:
            raise open_error(path, f"KvikIO says: {error}") from error
        if not cufile.is_direct_io_supported():
            cufile.close()
            raise open_error(path, "KvikIO has opened it without O_DIRECT")
        return CuFileFile(path, self, cufile)

    def register(self, buffer: torch.Tensor) -> None:
        """Pin a device buffer for GPUDirect Storage; in POSIX mode nothing.

        cuFile registers the whole allocation that the buffer is in.

        Raises:
            IoPathError: cuFile refuses it.
        """
        self.check_usable()
        if not self._uses_cufile:
            return
        try:
            with self._compat_mode(), torch.cuda.device(buffer.device):
                self.kvikio.memory_register(buffer)
        except RuntimeError as error:
            raise IoPathError(
                f"cuFile cannot register a buffer of {buffer.numel()} bytes on {buffer.device} "
                f"for the I/O path {self.io_path}: {error}; use the path posix"
            ) from error
        self._registered.add(buffer.data_ptr())

    def deregister(self, buffer: torch.Tensor) -> None:
        """Undo `register`; a buffer that is not registered is left alone.

        Raises:
            IoPathError: cuFile refuses it.
        """
        check_process(self.pid, f"the {self.io_path} I/O backend")
        if buffer.data_ptr() not in self._registered:
            return
        self._registered.discard(buffer.data_ptr())
        try:
            with self._compat_mode(), torch.cuda.device(buffer.device):
                self.kvikio.memory_deregister(buffer)
        except RuntimeError as error:
            raise IoPathError(
                f"cuFile cannot deregister a buffer of {buffer.numel()} bytes on "
                f"{buffer.device}: {error}"
            ) from error

    def counters(self) -> dict[str, int]:
        """Bytes that completed transfers moved, by the way that KvikIO says they went.

        KvikIO counts bytes by way, for the whole process, but not by way and direction. While
        one way has carried everything since this backend was made, that is where ours went:
        "posix.read" and "posix.write" (or "gds", "gds-compat"). Once there are several, each
        gets a ".total", which includes what others in this process moved through KvikIO. "gds"
        means handed to cuFile; what cuFile made of it, the probe tells.
        """
        check_process(self.pid, f"the {self.io_path} I/O backend")
        totals = {}
        for backend, summary in self._monitor.get().by_backend.items():
            if summary["bytes_transferred"]:
                way = backend.lower()
                if way == "gds" and self.io_path is IoPath.GDS_COMPAT:
                    way = "gds-compat"
                totals[way] = summary["bytes_transferred"]
        if len(totals) == 1:
            (way,) = totals
            return {f"{way}.{operation}": count for operation, count in self.moved_bytes.items()}
        return {f"{way}.total": count for way, count in totals.items()}

    def release(self) -> None:
        try:
            self._monitor.stop()
        finally:
            if self.staging is not None:
                self.staging.close()


def _check_device_type(io_path: IoPath, device: torch.device) -> None:
    if device.type == "cpu" and io_path is not IoPath.POSIX:
        raise IoPathError(
            f"the I/O path {io_path} moves device memory, got buffers on the CPU: use the path host"
        )
    if device.type not in ("cpu", "cuda"):
        raise IoPathError(f"the I/O path {io_path} serves CUDA devices, got {device}")


def _with_index(io_path: IoPath, device: torch.device) -> torch.device:
    """A CUDA device with its index; the CPU as it is.

    Raises:
        IoPathError: there is no such device.
    """
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    index: int | None = device.index
    if index is None and count:
        index = torch.cuda.current_device()
    if index is None or index >= count:
        raise IoPathError(f"the I/O path {io_path} needs device {device}, but {count} are visible")
    return torch.device("cuda", index)

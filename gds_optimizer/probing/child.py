"""The program that the probe runs in a process of its own: one request, one answer, no torch.

The request is JSON in the last argument, the answer one line of JSON on standard output:
`error` (empty on success), `removed` (the scratch file is gone) and what the operation found.
Operations: `machine`, `directory`, `device` and `remove`.

It shares no I/O code with the rest of the package, so that no bug there can vouch for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.metadata
import importlib.util
import json
import mmap
import os
import re
import signal
import stat
import sys
from typing import Any

from gds_optimizer.probing.scratch import scratch, stage

PAGE_BYTES = 4096
HOST_TRIP_BYTES = 4 << 20
_PR_SET_PDEATHSIG = 1


class TripError(Exception):
    """A round trip did not bring back what it took; the message is for the user."""


def main() -> int:
    request = json.loads(sys.argv[-1])
    # Libraries print what they like: only the answer may reach the real standard output.
    with os.fdopen(os.dup(1), "w") as answer_file:
        os.dup2(2, 1)
        _die_with_parent()
        answer: dict[str, Any] = {"error": ""}
        try:
            _OPERATIONS[request["operation"]](request, answer)
        except TripError as error:
            answer["error"] = str(error)
        except Exception as error:  # noqa: BLE001 - the parent turns any failure into a reason
            answer["error"] = f"{type(error).__name__}: {error}"
        answer_file.write(json.dumps(answer) + "\n")
        answer_file.flush()
        # Skip interpreter and library teardown: cuFile's can hang, and the answer is out.
        os._exit(0)


def _die_with_parent() -> None:
    """A child that spins must not outlive the process that would have stopped it."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)


# --- machine ---------------------------------------------------------------------------------


def probe_machine(request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Versions of the Python packages, and what the CUDA driver says of one device."""
    answer["kvikio_version"] = _package_version("kvikio", "kvikio-cu13", "kvikio-cu12", "kvikio")
    answer["cupy_version"] = _package_version("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy")
    answer["libcufile_version"] = _package_version(None, "nvidia-cufile", "nvidia-cufile-cu12")
    answer["gpu_error"] = ""
    try:
        _ask_driver(int(request["device"]), answer)
    except TripError as error:
        answer["gpu_error"] = str(error)


def _package_version(module: str | None, *distributions: str) -> str | None:
    """Version of what provides `module`, "unknown" where it has none, None where it is absent."""
    if module is not None and importlib.util.find_spec(module) is None:
        return None
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None if module is None else "unknown"


def _ask_driver(index: int, answer: dict[str, Any]) -> None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TripError(str(error)) from None
    version, count, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        major, rest = divmod(version.value, 1000)
        answer["cuda_version"] = f"{major}.{rest // 10}"
    _check_cuda(cuda, "cuInit", cuda.cuInit(0))
    _check_cuda(cuda, "cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count)))
    if index >= count.value:
        raise TripError(f"the driver shows {count.value} device(s), there is no cuda:{index}")
    _check_cuda(cuda, "cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), index))
    _check_cuda(cuda, "cuDeviceGetName", cuda.cuDeviceGetName(name, len(name), device))
    answer["gpu_name"] = name.value.decode(errors="replace")


def _check_cuda(cuda: ctypes.CDLL, call: str, error: int) -> None:
    if error:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(error, ctypes.byref(text))
        raise TripError(f"{call} answers {(text.value or str(error).encode()).decode()}")


# --- directory -------------------------------------------------------------------------------


def probe_directory(request: dict[str, Any], answer: dict[str, Any]) -> None:
    """What the directory is, and a round trip of direct I/O from host memory.

    Answers `stage` beside `error`: what was being done ("stat", "create", ...), and `errno`.
    """
    directory, file = request["directory"], request["file"]
    answer["removed"] = True  # nothing was created yet
    try:
        with stage(answer, "stat"):
            status = os.stat(directory)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            answer["real_path"] = os.path.realpath(directory)
            space = os.statvfs(directory)
            answer["free_bytes"] = space.f_bavail * space.f_frsize
            answer["fs_magic"] = fs_magic(directory)
        with scratch(file, HOST_TRIP_BYTES + 2 * PAGE_BYTES, answer):
            _host_trip(file, answer)
    except OSError as error:
        answer["errno"] = error.errno
        raise TripError(error.strerror or str(error)) from None


def fs_magic(path: str) -> int | None:
    """statfs(2)'s f_type, which os.statvfs leaves out; None where the call fails."""
    # struct statfs starts with f_type, one machine word on every 64-bit Linux.
    buffer = ctypes.create_string_buffer(1024)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), buffer):
        return None
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF


def _host_trip(file: str, answer: dict[str, Any]) -> None:
    """Write and read back 4 MiB and one page, as the package does: multiples of 4 KiB."""
    with stage(answer, "open for direct I/O"):
        fd = os.open(file, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        # A gap of one page between the two leaves the second at an odd page.
        for offset, nbytes in ((0, HOST_TRIP_BYTES), (HOST_TRIP_BYTES + PAGE_BYTES, PAGE_BYTES)):
            pattern = os.urandom(nbytes)
            with mmap.mmap(-1, nbytes) as buffer:
                buffer[:] = pattern
                with stage(answer, "direct write"):
                    _check_count("write", os.pwritev(fd, [buffer], offset), nbytes)
            with mmap.mmap(-1, nbytes) as buffer:
                with stage(answer, "direct read"):
                    _check_count("read", os.preadv(fd, [buffer], offset), nbytes)
                if buffer[:] != pattern:
                    answer["stage"] = "comparison"
                    raise TripError("the bytes that came back are not those that were written")
    finally:
        os.close(fd)


def _check_count(what: str, moved: int, nbytes: int) -> None:
    if moved != nbytes:
        raise TripError(f"a {what} moved {moved} of {nbytes} bytes")


def remove(request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Remove the scratch file of a child that could not."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it was never made
        os.unlink(request["file"])
    answer["removed"] = True


def probe_device(request: dict[str, Any], answer: dict[str, Any]) -> None:
    """A round trip between device memory and the directory; see `device_trip`."""
    from gds_optimizer.probing import device_trip

    answer["removed"] = True
    try:
        device_trip.run(request, answer)
    except (OSError, RuntimeError, ImportError) as error:
        # KvikIO puts the place in its own source before what happened.
        text = re.sub(r" at: \S+:\d+:", ":", " ".join(str(error).split()))
        raise TripError(text or type(error).__name__) from None


_OPERATIONS = {
    "machine": probe_machine,
    "directory": probe_directory,
    "device": probe_device,
    "remove": remove,
}

if __name__ == "__main__":
    sys.exit(main())

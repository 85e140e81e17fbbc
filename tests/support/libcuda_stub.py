"""A stand-in for the NVIDIA driver library, so that KvikIO's POSIX mode runs without a driver.

KvikIO looks up the driver's entry points before it serves even a host buffer, and takes a buffer
for host memory where the driver says that it is not initialised. So this library has every entry
point that KvikIO looks up (`cpp/src/shim/cuda.cpp`), and all of them say just that.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

SONAME = "libcuda.so.1"

# Without the version suffixes that cuda.h adds: each name gets all of them, since they depend on
# the CUDA version that KvikIO was built with.
ENTRY_POINTS = {
    "contexts": ("Create", "Destroy", "GetCurrent", "GetDevice", "PopCurrent", "PushCurrent"),
    "devices": ("Get", "GetAttribute", "GetCount", "PrimaryCtxRelease", "PrimaryCtxRetain"),
    "events": ("Create", "Destroy", "Query", "Record", "Synchronize"),
    "memory": ("FreeHost", "GetAddressRange", "HostAlloc", "HostRegister", "HostUnregister"),
    "copies": ("Async", "BatchAsync", "DtoHAsync", "HtoDAsync"),
    "pointers": ("GetAttribute", "GetAttributes"),
    "streams": ("Create", "Destroy", "Synchronize"),
    "launches": ("HostFunc",),
}
PREFIXES = {
    "contexts": "cuCtx",
    "devices": "cuDevice",
    "events": "cuEvent",
    "memory": "cuMem",
    "copies": "cuMemcpy",
    "pointers": "cuPointer",
    "streams": "cuStream",
    "launches": "cuLaunch",
}

HEAD = """
#define NOT_INITIALIZED { return 3; /* CUDA_ERROR_NOT_INITIALIZED */ }
#define REFUSE(name) \\
    int name(void) NOT_INITIALIZED \\
    int name##_v2(void) NOT_INITIALIZED \\
    int name##_v3(void) NOT_INITIALIZED \\
    int name##_v4(void) NOT_INITIALIZED

REFUSE(cuInit)
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
static int words(const char **text) { *text = "stand-in for libcuda.so.1"; return 0; }
int cuGetErrorName(int error, const char **text) { (void)error; return words(text); }
int cuGetErrorString(int error, const char **text) { (void)error; return words(text); }
"""


class DriverStubUnavailableError(Exception):
    """There is no driver and no way to make a stand-in; the message says what is missing."""


def source() -> str:
    """The library in C."""
    names = (PREFIXES[group] + name for group, names in ENTRY_POINTS.items() for name in names)
    return HEAD + "".join(f"REFUSE({name})\n" for name in names)


def _has_driver() -> bool:
    try:
        ctypes.CDLL(SONAME)
    except OSError:
        return False
    return True


@functools.cache
def load_driver_stub() -> None:
    """Make KvikIO usable on host buffers in this process. Call it before KvikIO's first use.

    A real driver library is left in place: with one, nothing needs to be done.

    Raises:
        DriverStubUnavailableError: KvikIO or a C compiler is missing; a reason to skip.
    """
    if importlib.util.find_spec("kvikio") is None:
        raise DriverStubUnavailableError("needs KvikIO")
    if _has_driver():
        return
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise DriverStubUnavailableError("needs an NVIDIA driver, or a C compiler for a stand-in")
    with tempfile.TemporaryDirectory() as work:
        library = Path(work, SONAME)
        command = (compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{SONAME}", "-x", "c", "-")
        try:
            subprocess.run(
                (*command, "-o", str(library)),
                input=source(),
                text=True,
                check=True,
                capture_output=True,
            )
        except subprocess.CalledProcessError as error:
            raise DriverStubUnavailableError(
                f"needs a working C compiler, but {compiler} says: {error.stderr.strip()}"
            ) from error
        # KvikIO asks for the name only, and the loader has a library of that name then.
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)

"""Which way libcufile's operations really went, from its own counters.

`cuFileGetStatsL3` (libcufile 1.15 and later) counts reads and writes of each GPU by peer-to-peer
DMA, by nvidia-fs and by POSIX calls. Read with ctypes, from the library that KvikIO has loaded.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache

# CUfilePerGpuStats_t: a 16-byte UUID and 29 64-bit counters; the same from 1.15 to 1.20.
_GPU_BYTES = 16 + 29 * 8
_MAX_GPUS = 16
# Level 2 is level 1 and two histograms of 32 64-bit counters.
_HISTOGRAMS_BYTES = 2 * 32 * 8
_READS = {"p2p": 5, "nvfs": 6, "posix": 7}  # index among the 64-bit counters
_WRITES = {"p2p": 18, "nvfs": 19, "posix": 20}
_BUFFER_BYTES = 1 << 16
_FILL = 0xA5
_LEVEL = 3


def operations_by_path() -> dict[str, int] | None:
    """Operations so far, keyed "p2p.read", "posix.write" and so on; all GPUs together.

    The first call starts the counting. None where libcufile is not loaded, too old, or lays its
    counters out in a way that is not known here.
    """
    library = _counting_library()
    if library is None:
        return None
    level1, level3 = _filled_buffer(), _filled_buffer()
    if _call(library, "cuFileGetStatsL1", level1) or _call(library, "cuFileGetStatsL3", level3):
        return None
    return parse_level3(level3.raw, level1_bytes=_written_bytes(level1.raw))


@cache
def _counting_library() -> ctypes.CDLL | None:
    library = _loaded_library()
    if library is None or not hasattr(library, "cuFileGetStatsL3"):
        return None
    if _call(library, "cuFileSetStatsLevel", ctypes.c_int(_LEVEL)):
        return None
    _call(library, "cuFileStatsStart")  # refuses where the configuration has started it
    return library


def parse_level3(data: bytes, *, level1_bytes: int) -> dict[str, int] | None:
    """Counters in a CUfileStatsLevel3_t that starts with `level1_bytes` of level 1.

    Level 1 grew in 1.19 (from 512 to 624 bytes), so its length is measured; libcufile writes as
    many GPUs as there are, and the rest has to be whole ones.
    """
    level2_bytes = level1_bytes + _HISTOGRAMS_BYTES
    gpus_offset = level2_bytes + 8  # num_gpus, 32 bits and padding
    entries, rest = divmod(_written_bytes(data) - gpus_offset, _GPU_BYTES)
    if level1_bytes <= 0 or rest:
        return None
    (num_gpus,) = struct.unpack_from("<I", data, level2_bytes)
    if num_gpus > min(entries, _MAX_GPUS):
        return None
    counts: dict[str, int] = {}
    for operation, fields in (("read", _READS), ("write", _WRITES)):
        for path, index in fields.items():
            counts[f"{path}.{operation}"] = sum(
                struct.unpack_from("<Q", data, gpus_offset + gpu * _GPU_BYTES + 16 + 8 * index)[0]
                for gpu in range(num_gpus)
            )
    return counts


def _written_bytes(data: bytes) -> int:
    """How much of a buffer of fill bytes was written, to the next multiple of 8."""
    return -(-len(data.rstrip(bytes([_FILL]))) // 8) * 8


def _filled_buffer() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(bytes([_FILL]) * _BUFFER_BYTES, _BUFFER_BYTES)


class _CufileError(ctypes.Structure):
    _fields_ = (("error", ctypes.c_int), ("cuda_error", ctypes.c_int))


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> int:
    """Call a function that returns a CUfileError_t; its error code, 0 for success."""
    function = getattr(library, name)
    function.restype = _CufileError
    return int(function(*arguments).error)


def _loaded_library() -> ctypes.CDLL | None:
    """The libcufile in this process: another copy would have counters of its own."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if path.startswith("/") and "/libcufile.so" in path:
                return ctypes.CDLL(path)
    return None


def library_version() -> str | None:
    """Version of the loaded libcufile, e.g. "1.15"; None where there is none."""
    library = _loaded_library()
    version = ctypes.c_int()
    if library is None or not hasattr(library, "cuFileGetVersion"):
        return None
    if _call(library, "cuFileGetVersion", ctypes.byref(version)):
        return None
    major, rest = divmod(version.value, 1000)
    return f"{major}.{rest // 10}"

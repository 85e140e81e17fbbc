"""What several modules of GPU tests need, or skip without."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support import io_backends
from tests.support.io_conformance import run_process


@pytest.fixture(scope="module")
def kvikio_libraries():
    for name in ("kvikio", "cupy"):
        pytest.importorskip(name, reason=f"needs {name}")


@functools.cache
def _why_cufile_does_not_work(root: Path) -> str:
    """Empty if cuFile opens a file on the disk under `root`; asked of another process.

    In a container that lacks what it looks for, cuFile can spin for ever.
    """
    with tempfile.TemporaryDirectory(dir=root) as directory:
        try:
            done = run_process("gds-compat", "open", Path(directory), timeout_s=60)
        except subprocess.TimeoutExpired:
            return "needs cuFile, which does not answer here (are /proc/modules, /run/udev there?)"
    return f"needs cuFile, which fails here: {done.stderr[-500:]}" if done.returncode else ""


@pytest.fixture(scope="module")
def cufile(kvikio_libraries, tmp_path_factory):
    root = tmp_path_factory.mktemp("cufile")
    io_backends.allow_cufile_compat_mode(root)
    reason = _why_cufile_does_not_work(root)
    if reason:
        pytest.skip(reason)

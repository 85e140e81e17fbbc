"""A memory control group around one process, so that the page cache cannot hide a slow drive.

The group is made inside the caller's own one, or beside it under the same parent, so that limits
above go on to hold: by cgroup v2 or v1 where its directory may be written, else as a scope of the
user's systemd. The process joins it while it is still small and later sets the limit itself
(`Group.limit`), to what it uses by then and the cap: programs and their gradients do not count, an
optimizer's memory and the page cache it fills do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_REMOVE_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Group:
    """One memory control group.

    Attributes:
        path: its directory.
        version: of the cgroup interface, 1 or 2.
    """

    path: Path
    version: int

    def join(self) -> None:
        """Move this process into the group.

        Raises:
            OSError: the kernel refuses.
        """
        (self.path / "cgroup.procs").write_text("0")

    def limit(self, cap_bytes: int) -> None:
        """Let the group have `cap_bytes` more than it uses now; page cache of now not counted.

        Raises:
            OSError: the kernel refuses.
        """
        stat = self._stat()
        cache = self.page_cache_bytes() + stat.get("shmem", 0)
        usage_name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        used_bytes = max(int((self.path / usage_name).read_text()) - cache, 0)
        limit = str(used_bytes + cap_bytes)
        if self.version == 2:
            (self.path / "memory.max").write_text(limit)
            with contextlib.suppress(OSError):  # a kernel without swap has no such file
                (self.path / "memory.swap.max").write_text("0")
        else:
            (self.path / "memory.limit_in_bytes").write_text(limit)
            with contextlib.suppress(OSError):
                (self.path / "memory.memsw.limit_in_bytes").write_text(limit)

    def page_cache_bytes(self) -> int:
        """Of files on drives, charged to the group; shared memory is not among them."""
        stat = self._stat()
        return max(stat.get("file" if self.version == 2 else "cache", 0) - stat.get("shmem", 0), 0)

    def killed(self) -> int:
        """How many of its processes the kernel killed for want of memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return _pairs(self.path / name).get("oom_kill", 0)

    def remove(self) -> None:
        """Kill what is still in it, and remove it; a group that stays is left alone in the end."""
        deadline_s = time.monotonic() + _REMOVE_WITHIN_S
        while time.monotonic() < deadline_s:
            try:
                for pid in (self.path / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.05)
            else:
                return

    def _stat(self) -> dict[str, int]:
        return _pairs(self.path / "memory.stat")


@dataclass(slots=True)
class Cap:
    """What a process is started with so that it is capped, or why it is not.

    Attributes:
        how: in plain words.
        group: that the process joins; None where systemd puts it into one, or there is none.
        prefix: of the command line.
        is_capped: whether there is a group at all.
    """

    how: str
    group: Group | None = None
    prefix: list[str] = field(default_factory=list)
    is_capped: bool = False


def own_group(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> Group | None:
    """The memory control group that this process is in, if its directory is to be seen."""
    for line in membership.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _existing(root / "memory", name, 1)
    for line in membership.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            return _existing(root, name, 2)
    return None


@contextlib.contextmanager
def capped(name: str, root: Path = _ROOT) -> Iterator[Cap]:
    """A fresh group for one process, gone afterwards with all that is in it.

    Args:
        name: of the group's directory.
        root: where control groups are mounted.
    """
    reasons = []
    own = own_group(root)
    if own is None:
        reasons.append(f"no memory control group of this process is to be seen under {root}")
    else:
        try:
            group = _make(own, name)
        except OSError as error:
            reasons.append(f"{own.path} cannot take a group: {error.strerror}")
        else:
            try:
                yield Cap(f"cgroup v{group.version}", group, is_capped=True)
            finally:
                group.remove()
            return
    scope = _systemd_scope()
    if isinstance(scope, list):
        yield Cap("a scope of the user's systemd", prefix=scope, is_capped=True)
        return
    yield Cap("; ".join([*reasons, scope]))


def _make(own: Group, name: str) -> Group:
    """A group below `own`, or beside it where v2 allows none below a group with processes.

    Raises:
        OSError: there may be none; its `strerror` says why.
    """
    if own.version == 1:
        path = own.path / name
        path.mkdir()
        return Group(path, 1)
    error: OSError | None = None
    for parent in (own.path, own.path.parent):
        path = parent / name
        try:
            path.mkdir()
        except OSError as refused:
            error = error or refused
            continue
        if (path / "memory.max").exists():
            return Group(path, 2)
        path.rmdir()
        error = error or OSError(0, "its memory controller is not delegated")
    assert error is not None
    raise error


def _existing(base: Path, name: str, version: int) -> Group | None:
    # In a container the name may be the host's, whose directory we see as the root.
    for path in (base / name.lstrip("/"), base):
        if (path / "cgroup.procs").exists():
            return Group(path, version)
    return None


def _systemd_scope() -> list[str] | str:
    """A command line that starts a scope whose memory is counted, or why there is none."""
    if shutil.which("systemd-run") is None:
        return "there is no systemd-run"
    # The limit is set later, from inside; any limit makes systemd turn the controller on.
    command = ["systemd-run", "--user", "--scope", "--quiet", "--collect"]
    command += ["-p", "Delegate=yes", "-p", f"MemoryMax={2**60}", "--"]
    try:
        tried = subprocess.run(
            [*command, "true"], capture_output=True, text=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:
        return "systemd-run --user does not answer"
    if tried.returncode:
        reason = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"systemd-run --user fails: {reason}"
    return command


def _pairs(path: Path) -> dict[str, int]:
    """Of a file with a name and a number a line; nothing where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}

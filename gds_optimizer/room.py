"""Whether bytes still fit on the file systems of some directories, and what is said where not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gds_optimizer.errors import NoSpaceError


def free_bytes(*directories: Path) -> int:
    """What may still be allocated on the file systems of these directories, each counted once."""
    status = {os.stat(each).st_dev: os.statvfs(each) for each in directories}
    return sum(each.f_bavail * each.f_frsize for each in status.values())


def check_room(directories: Sequence[Path], needed_bytes: int, what: str, advice: str) -> None:
    """Refuse at once what cannot fit, before anything is made for it.

    Args:
        directories: over which it may be spread.
        needed_bytes: of all of it.
        what: needs them; comes before "need ... bytes", so a plural.
        advice: what helps besides freeing space; comes after "free space, or".

    Raises:
        NoSpaceError: says how many bytes are needed and free.
    """
    room_bytes = free_bytes(*directories)
    if needed_bytes > room_bytes:
        raise NoSpaceError(
            f"too little room in {', '.join(map(str, directories))}: {what} need {needed_bytes} "
            f"bytes, and {room_bytes} are free: free space, or {advice}"
        )

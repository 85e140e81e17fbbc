"""Which drive gets which bucket, and whose turn it is: pure, and the same every time.

Drives of unequal speed are busy for equally long if each gets bytes in proportion to its speed. The
shares are interleaved, so that at any stretch of the order every drive has its part, whichever way
a pass goes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

from gds_optimizer.errors import NoSpaceError


def equal_speeds(count: int) -> tuple[float, ...]:
    return (1.0,) * count


def spread(
    sizes_bytes: Sequence[int],
    speeds: Sequence[float],
    *,
    devices: Sequence[Hashable] | None = None,
    room_bytes: Mapping[Hashable, int] | None = None,
) -> list[int]:
    """The directory of every bucket.

    Each bucket in turn goes where it would be done first, counting what was given out before. With
    equal speeds and sizes that is one directory after the other.

    Args:
        sizes_bytes: of the buckets, in order.
        speeds: of the directories, in any unit, more than 0.
        devices: what the directories are on, to share its room; each its own by default.
        room_bytes: what still fits on each device; without limit where it is missing.

    Raises:
        NoSpaceError: a bucket fits nowhere; names the bytes wanted and had.
        ValueError: speeds that are not positive and finite, or not one for each device.
    """
    devices = range(len(speeds)) if devices is None else devices
    if len(devices) != len(speeds) or not speeds:
        raise ValueError(f"{len(speeds)} speeds for {len(devices)} directories")
    if not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ValueError(f"speeds are {list(speeds)}, wanted numbers of more than 0")
    room = dict(room_bytes or {})
    given = [0] * len(speeds)
    chosen: list[int] = []
    for size in sizes_bytes:
        fitting = [
            number
            for number, device in enumerate(devices)
            if device not in room or room[device] >= size
        ]
        if not fitting:
            had = sum((room_bytes or {}).values())
            raise NoSpaceError(
                f"the directories have too little room: the state needs {sum(sizes_bytes)} bytes "
                f"in files of up to {max(sizes_bytes)}, and {had} were free on "
                f"{len(room)} file systems, of which {sum(sizes_bytes[: len(chosen)])} could be "
                "used: free space, or name a larger or another directory"
            )
        number = min(fitting, key=lambda i: ((given[i] + size) / speeds[i], i))
        given[number] += size
        if devices[number] in room:
            room[devices[number]] -= size
        chosen.append(number)
    return chosen


class DriveOrder:
    """Chooses which bucket to read next, so that no drive idles because another one is slow.

    Args:
        drive_of: drive of each bucket.
        speeds: of the drives.
    """

    def __init__(self, drive_of: Sequence[int], speeds: Sequence[float]) -> None:
        self.drive_of = list(drive_of)
        self.speeds = list(speeds)

    def pick(self, queue: Iterable[int], in_flight: Iterable[int]) -> int:
        """Position in `queue` of the bucket to start next.

        A drive that has nothing to do comes first; then the one whose work would be done first.
        The buckets of one drive keep their order.

        Args:
            queue: buckets that wait, at least one.
            in_flight: buckets that are being read or written.
        """
        busy = [0] * len(self.speeds)
        for bucket in in_flight:
            busy[self.drive_of[bucket]] += 1
        first: dict[int, int] = {}
        for position, bucket in enumerate(queue):
            first.setdefault(self.drive_of[bucket], position)
            if len(first) == len(self.speeds):
                break
        return min(
            first.items(),
            key=lambda item: (
                busy[item[0]] > 0,
                (busy[item[0]] + 1) / self.speeds[item[0]] if busy[item[0]] else 0.0,
                item[1],
            ),
        )[1]

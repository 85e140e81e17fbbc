"""When drives are half-duplex: one rule for what setup and what benchmarks measure."""

from __future__ import annotations

HALF_DUPLEX_FACTOR = 1.25
"""Above 1, since a drive that takes turns still hides some latency when it has both to do."""


def rate_in_turns(read: float, write: float, read_share: float = 0.5) -> float:
    """The rate of bytes that are first read and then written, never both at once.

    Args:
        read, write: rates of one kind alone, in any unit, more than 0.
        read_share: which part of the bytes is read; the rest is written.
    """
    return 1 / (read_share / read + (1 - read_share) / write)


def is_half_duplex(read: float, write: float, mixed: float, read_share: float = 0.5) -> bool:
    """Whether both at once move at most a quarter more than one after the other would.

    A drive that does both at full speed moves twice the lesser rate, if half of the bytes is read.
    One that shares its time between them moves `rate_in_turns`, which is far below the greater rate
    where the other is small: neither of the two rates alone says what to compare with.

    Args:
        read, write, read_share: as for `rate_in_turns`.
        mixed: the rate of both at once, bytes of both counted, in the same unit.
    """
    return mixed <= HALF_DUPLEX_FACTOR * rate_in_turns(read, write, read_share)

"""Which directory gets which bucket, and whose turn it is."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gds_optimizer.errors import NoSpaceError
from gds_optimizer.spread import DriveOrder, equal_speeds, spread

SPEEDS = st.lists(st.floats(0.1, 20.0), min_size=1, max_size=6)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_drives_take_turns(count):
    assert spread([7] * 23, equal_speeds(count)) == [index % count for index in range(23)]


@given(SPEEDS, st.integers(1, 400))
def test_shares_are_in_proportion_everywhere(speeds, count):
    places = spread([1] * count, speeds)
    for length in range(1, count + 1):
        got = Counter(places[:length])
        for number, speed in enumerate(speeds):
            share = length * speed / sum(speeds)
            assert abs(got[number] - share) <= len(speeds), (length, number)


@given(SPEEDS, st.lists(st.integers(1, 100), max_size=60))
def test_no_drive_is_busy_for_much_longer_than_the_others(speeds, sizes):
    places = spread(sizes, speeds)
    assert places == spread(sizes, speeds)
    done = [
        sum(s for s, p in zip(sizes, places, strict=True) if p == i) for i in range(len(speeds))
    ]
    slowest = max(d / s for d, s in zip(done, speeds, strict=True))
    ideal = sum(sizes) / sum(speeds)
    assert slowest <= ideal + max(sizes, default=0) / min(speeds)


def test_a_directory_with_little_room_takes_less():
    places = spread([10] * 12, (1.0, 1.0), devices=("a", "b"), room_bytes={"a": 25, "b": 1000})
    assert Counter(places) == {0: 2, 1: 10}


def test_directories_of_one_file_system_share_its_room():
    places = spread([10] * 6, (1, 1, 1), devices="aab", room_bytes={"a": 30, "b": 40})
    assert Counter("aab"[place] for place in places) == {"a": 3, "b": 3}
    with pytest.raises(NoSpaceError, match=r"needs 80 bytes.*70 were free on 2 file systems"):
        spread([10] * 8, (1, 1, 1), devices="aab", room_bytes={"a": 30, "b": 40})


@pytest.mark.parametrize("speeds", [(), (1.0, 0.0), (1.0, float("nan")), (float("inf"),), (-1.0,)])
def test_speeds_that_are_none(speeds):
    with pytest.raises(ValueError, match="speeds"):
        spread([1], speeds)


def test_one_speed_for_each_directory():
    with pytest.raises(ValueError, match="2 speeds for 1 directories"):
        spread([1], (1.0, 1.0), devices=("a",))


def test_an_idle_drive_comes_first():
    order = DriveOrder([0, 0, 1, 0, 1], (10.0, 1.0))
    assert order.pick([0, 1, 2, 3, 4], []) == 0
    assert order.pick([1, 2, 3, 4], [0]) == 1  # bucket 2, on the drive that does nothing
    assert order.pick([1, 3, 4], [0, 2]) == 0  # both work: the fast one is done sooner
    assert order.pick([4], [0, 2]) == 0


def test_a_fast_drive_gets_more_at_a_time():
    order = DriveOrder([0] * 10 + [1] * 10, (3.0, 1.0))
    in_flight: list[int] = []
    queue = list(range(20))
    for _ in range(8):
        in_flight.append(queue.pop(order.pick(queue, in_flight)))
    assert Counter(order.drive_of[bucket] for bucket in in_flight) == {0: 6, 1: 2}

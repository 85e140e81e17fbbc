"""Which buckets live where, given the budgets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gds_optimizer.homes import Home, assign_homes, fitting

D, H, N = Home.DEVICE, Home.HOST, Home.NVME


def homes(sizes: list[list[int]], hbm: int, host: int) -> list[list[Home]]:
    return assign_homes(sizes, hbm_budget_bytes=hbm, host_budget_bytes=host)


def test_without_budgets_everything_is_on_nvme() -> None:
    assert homes([[10, 10], [10]], 0, 0) == [[N, N], [N]]


def test_first_the_device_then_the_host_then_nvme() -> None:
    assert homes([[10] * 6], 25, 20) == [[D, D, H, H, N, N]]


def test_a_budget_that_fits_exactly_is_used_up() -> None:
    assert homes([[10, 10, 10]], 20, 10) == [[D, D, H]]
    assert homes([[10, 10, 10]], 19, 10) == [[D, H, N]]


def test_engines_share_the_budgets_in_order() -> None:
    assert homes([[10, 10, 5], [10, 10]], 20, 16) == [[D, D, H], [H, N]]


def test_more_than_enough() -> None:
    assert homes([[10, 10], []], 10**9, 10**9) == [[D, D], []]


def test_a_small_bucket_does_not_overtake_a_large_one() -> None:
    assert homes([[10, 30, 1]], 20, 0) == [[D, N, N]]


sizes = st.lists(st.lists(st.integers(1, 50), max_size=6), max_size=4)


@given(sizes, st.integers(0, 200), st.integers(0, 200))
def test_budgets_are_kept_and_homes_are_in_order(
    sizes: list[list[int]], hbm: int, host: int
) -> None:
    found = homes(sizes, hbm, host)
    assert [len(own) for own in found] == [len(own) for own in sizes]
    flat = [
        (home, n)
        for own, s in zip(found, sizes, strict=True)
        for home, n in zip(own, s, strict=True)
    ]
    assert sum(n for home, n in flat if home is D) <= hbm
    assert sum(n for home, n in flat if home is H) <= host
    ranks = [[D, H, N].index(home) for home, _ in flat]
    assert ranks == sorted(ranks)


def test_how_many_fit() -> None:
    assert [fitting([10, 10, 30, 1], budget) for budget in (0, 9, 10, 25, 50, 51, 99)] == [
        0,
        0,
        1,
        2,
        3,
        4,
        4,
    ]

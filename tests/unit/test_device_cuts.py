"""Views that are kept of buckets on the device: the same ones, of the right memory, not many."""

from __future__ import annotations

import torch

from gds_optimizer import device_cuts
from gds_optimizer.device_cuts import Cut, DeviceCuts


def planes_of(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    half = buffer.numel() // 2
    return {"main": buffer[:half], "exp_avg": buffer[half:]}


def test_the_same_views_serve_every_step() -> None:
    cuts, buffer = DeviceCuts(), torch.arange(20.0)
    assert cuts.planes(3, buffer) is None
    planes = planes_of(buffer)
    cuts.keep(3, buffer, planes)
    assert cuts.planes(3, buffer) is planes
    assert cuts.planes(3, buffer.clone()) is None
    assert cuts.planes(4, buffer) is None
    cut = cuts.cut(3, planes, slice(2, 5))
    assert cut.parts["exp_avg"].tolist() == [12.0, 13.0, 14.0]
    assert cuts.cut(3, planes, slice(2, 5)) is cut
    assert cuts.cut(3, planes, slice(2, 6)) is not cut
    cuts.clear()
    assert cuts.planes(3, buffer) is None


def test_nothing_is_kept_of_planes_that_are_not() -> None:
    cuts, buffer = DeviceCuts(), torch.arange(20.0)
    cuts.keep(0, buffer, planes_of(buffer))
    others = planes_of(buffer)
    assert cuts.cut(0, others, slice(0, 1)) is not cuts.cut(0, others, slice(0, 1))
    assert cuts.cut(1, others, slice(0, 1)) is not cuts.cut(1, others, slice(0, 1))


def test_runs_that_change_do_not_pile_up(monkeypatch) -> None:
    monkeypatch.setattr(device_cuts, "MAX_CUTS", 3)
    cuts, buffer = DeviceCuts(), torch.arange(20.0)
    planes = planes_of(buffer)
    cuts.keep(0, buffer, planes)
    for stop in range(1, 10):
        cut = cuts.cut(0, planes, slice(0, stop))
        assert cut.parts["main"].numel() == stop
        assert len(cuts._known[0].cuts) <= 3


def test_what_was_left_elsewhere_is_put_into_the_plane() -> None:
    buffer = torch.arange(20.0)
    cut = Cut(planes_of(buffer), slice(1, 3))
    part = cut.parts["exp_avg"]
    part.data = torch.tensor([7.0, 8.0])
    cut.put("exp_avg", part)
    assert buffer[10:14].tolist() == [10.0, 7.0, 8.0, 13.0]
    assert cut.parts["exp_avg"].data_ptr() == cut.addresses["exp_avg"] == buffer[11:].data_ptr()

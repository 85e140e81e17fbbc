"""Mains as remainders, through Megatron's own checkpoints: the bits of a plain run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron import has_turn, marks_of
from tests.megatron.checkpointing import PLAN, compare_moments, compare_resumed
from tests.megatron.forms import FORMATS, SAVED, add_loading, add_saving
from tests.megatron.harness import compare_records

pytestmark = pytest.mark.megatron

MAINS: dict[str, dict[str, Any]] = {
    "fp32": {"main": "fp32"},
    "remainder": {"main": "remainder"},
    "bitmap": {"main": "remainder", "moment_dtype": "int8", "moment_rounding": "nearest"},
}
LOADS = [
    (saved, loaded, kind, not has_turn(place, kind_place))
    for place, (saved, loaded) in enumerate(
        (
            ("remainder", "remainder"),
            ("remainder", "fp32"),
            ("fp32", "remainder"),
            ("bitmap", "bitmap"),
        )
    )
    for kind_place, kind in enumerate(FORMATS)
]
for main, form in MAINS.items():
    add_saving(f"remainder/{main}", form, inner_optimizer="fused")
for saved, loaded, kind, is_slow in LOADS:
    add_loading(
        f"remainder/{saved}/{loaded}/{kind}",
        f"remainder/{saved}",
        kind,
        MAINS[loaded],
        slow=is_slow,
        inner_optimizer="fused",
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return PLAN.results_in(tmp_path_factory)


@pytest.mark.parametrize(
    ("saved", "loaded", "kind"),
    [pytest.param(*names, marks=marks_of(is_slow)) for *names, is_slow in LOADS],
)
def test_resumed_equals_uninterrupted(results, saved, loaded, kind):
    """Whichever form mains are kept in when it is saved and when it is loaded."""
    (whole,), (resumed,) = (
        results(f"remainder/{saved}"),
        results(f"remainder/{saved}/{loaded}/{kind}"),
    )
    compare_moments(whole.moments[SAVED], resumed.moments[SAVED])
    compare_resumed(whole, resumed)


def test_training_is_the_same(results):
    (plain,), (remainders,) = results("remainder/fp32"), results("remainder/remainder")
    compare_records(plain.record, remainders.record)

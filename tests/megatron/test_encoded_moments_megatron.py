"""Moments that are not kept in fp32, through Megatron's own checkpoints."""

from __future__ import annotations

import math

import pytest

from tests.megatron import has_turn, marks_of
from tests.megatron.checkpointing import MODEL_SHAPED, PLAN, compare_moments, compare_resumed
from tests.megatron.forms import FORMATS, SAVED, add, add_loading, add_saving
from tests.megatron.harness import compare_records

pytestmark = pytest.mark.megatron

# One counts its steps for each parameter, the other in its groups.
INNER = {"bf16": "adamw", "int8": "fused"}
MOMENTS = tuple(INNER)
LOADS = [
    (moments, kind, not has_turn(place, kind_place))
    for place, moments in enumerate(MOMENTS)
    for kind_place, kind in enumerate(FORMATS)
]

for moments, inner in INNER.items():
    form, options = {"moment_dtype": moments}, {"inner_optimizer": inner}
    add(f"encoded/{moments}/fp32", {}, **options)
    add(f"encoded/{moments}/not-saved", form, **options)
    add_saving(f"encoded/{moments}", form, **options)
for moments, kind, is_slow in LOADS:
    add_loading(
        f"encoded/{moments}/{kind}",
        f"encoded/{moments}",
        kind,
        {"moment_dtype": moments},
        slow=is_slow,
        inner_optimizer=INNER[moments],
    )
add_loading("encoded/bf16/by-fp32", "encoded/bf16", MODEL_SHAPED, {}, inner_optimizer="adamw")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return PLAN.results_in(tmp_path_factory)


@pytest.mark.parametrize(
    ("moments", "kind"),
    [pytest.param(*names, marks=marks_of(is_slow)) for *names, is_slow in LOADS],
)
def test_resumed_equals_uninterrupted(results, moments, kind):
    """What is decoded for the checkpoint is encoded to the same bytes when it is loaded."""
    (whole,), (resumed,) = results(f"encoded/{moments}"), results(f"encoded/{moments}/{kind}")
    compare_moments(whole.moments[SAVED], resumed.moments[SAVED])
    compare_resumed(whole, resumed)


@pytest.mark.parametrize("moments", MOMENTS)
def test_saving_changes_nothing(results, moments):
    (saved,), (other,) = results(f"encoded/{moments}"), results(f"encoded/{moments}/not-saved")
    compare_records(other.record, saved.record)


@pytest.mark.parametrize("moments", MOMENTS)
def test_it_trains_to_other_numbers(results, moments):
    (plain,), (encoded,) = results(f"encoded/{moments}/fp32"), results(f"encoded/{moments}")
    losses, wanted = ([step.loss for step in r.record.steps] for r in (encoded, plain))
    assert losses[0] == wanted[0]
    assert losses != wanted
    assert all(math.isclose(a, b, rel_tol=0.02) for a, b in zip(losses, wanted, strict=True))


def test_a_run_with_fp32_moments_loads_them(results):
    (saved,), (loaded,) = results("encoded/bf16"), results("encoded/bf16/by-fp32")
    compare_moments(saved.moments[SAVED], loaded.moments[SAVED])

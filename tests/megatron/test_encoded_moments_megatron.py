"""Moments that are not kept in fp32, through Megatron's own checkpoints."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gds_optimizer.megatron.tiny_gpt import TinyGptConfig
from tests.megatron.checkpointing import (
    BUCKET_SHAPED,
    MODEL_SHAPED,
    PLAN,
    Checkpoint,
    Load,
    Look,
    Run,
    Save,
    compare_moments,
    compare_resumed,
)
from tests.megatron.harness import compare_records
from tests.megatron.streaming import SMALL_BUCKET_BYTES, Streaming

pytestmark = pytest.mark.megatron

STEPS, SAVED = 7, 4
CONFIG = {"layers": 1, "hidden": 48, "schedule": "changing", "swiglu": True, "mixed_dtype": True}
# One counts its steps for each parameter, the other in its groups.
INNER = {"fp32": "adamw", "bf16": "adamw", "int8": "fused"}
MOMENTS = ("bf16", "int8")
FORMATS = (BUCKET_SHAPED, MODEL_SHAPED)


def checkpoint(moments: str, kind: str) -> Checkpoint:
    return Checkpoint(name=f"encoded-{moments}-{kind}", format=kind)


def add(name: str, moments: str, *actions: object, **options: Any) -> None:
    options = {**CONFIG, "steps": STEPS, "inner_optimizer": INNER[moments], **options}
    PLAN.add(
        f"encoded/{name}",
        1,
        Run(
            config=TinyGptConfig(**options),
            streaming=Streaming(bucket_size=3 * SMALL_BUCKET_BYTES),
            stream_options={"moment_dtype": moments},
            actions={SAVED: actions} if actions else {},
        ),
    )


for moments in MOMENTS:
    add(f"{moments}/fp32", "fp32", inner_optimizer=INNER[moments])
    add(f"{moments}/not-saved", moments)
    add(moments, moments, *(Save(checkpoint(moments, kind)) for kind in FORMATS), Look())
    for kind in FORMATS:
        load = Load(checkpoint(moments, kind))
        add(f"{moments}/{kind}", moments, load, Look(), first_step=SAVED)
add("bf16/by-fp32", "fp32", Load(checkpoint("bf16", MODEL_SHAPED)), Look(), first_step=SAVED)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return PLAN.results_in(tmp_path_factory)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("kind", FORMATS)
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

"""Mains as remainders, through Megatron's own checkpoints: the bits of a plain run."""

from __future__ import annotations

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
FORMATS = (BUCKET_SHAPED, MODEL_SHAPED)
MAINS: dict[str, dict[str, Any]] = {
    "fp32": {"main": "fp32"},
    "remainder": {"main": "remainder"},
    "bitmap": {"main": "remainder", "moment_dtype": "int8", "moment_rounding": "nearest"},
}


def checkpoint(main: str, kind: str) -> Checkpoint:
    return Checkpoint(name=f"remainder-{main}-{kind}", format=kind)


def add(name: str, main: str, *actions: object, **options: Any) -> None:
    PLAN.add(
        f"remainder/{name}",
        1,
        Run(
            config=TinyGptConfig(**CONFIG, steps=STEPS, inner_optimizer="fused", **options),
            streaming=Streaming(bucket_size=3 * SMALL_BUCKET_BYTES),
            stream_options=MAINS[main],
            actions={SAVED: actions} if actions else {},
        ),
    )


for main in MAINS:
    add(main, main, *(Save(checkpoint(main, kind)) for kind in FORMATS), Look())
LOADS = [
    (saved, loaded, kind)
    for saved, loaded in (
        ("remainder", "remainder"),
        ("remainder", "fp32"),
        ("fp32", "remainder"),
        ("bitmap", "bitmap"),
    )
    for kind in FORMATS
]
for saved, loaded, kind in LOADS:
    load = Load(checkpoint(saved, kind))
    add(f"{saved}/{loaded}/{kind}", loaded, load, Look(), first_step=SAVED)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return PLAN.results_in(tmp_path_factory)


@pytest.mark.parametrize(("saved", "loaded", "kind"), LOADS)
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

"""Trainings on one rank with state in some form, that save in both formats, or go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
)
from tests.megatron.streaming import SMALL_BUCKET_BYTES, Streaming

STEPS, SAVED = 7, 4
CONFIG = {"layers": 1, "hidden": 48, "schedule": "changing", "swiglu": True, "mixed_dtype": True}
FORMATS = (BUCKET_SHAPED, MODEL_SHAPED)


def checkpoint(source: str, kind: str) -> Checkpoint:
    """What the run called `source` saves in a format."""
    return Checkpoint(name=f"{source.replace('/', '-')}-{kind}", format=kind)


def add(
    name: str,
    form: Mapping[str, Any],
    *actions: object,
    slow: bool = False,
    **options: Any,
) -> None:
    """A training with actions after step `SAVED`.

    Args:
        name: of the run.
        form: settings of `StreamConfig`.
        actions: see `Run`.
        slow: see `Plan.add`.
        options: of `TinyGptConfig`; "inner_optimizer" among them.
    """
    run = Run(
        config=TinyGptConfig(**{**CONFIG, "steps": STEPS, **options}),
        streaming=Streaming(bucket_size=3 * SMALL_BUCKET_BYTES),
        stream_options=form,
        actions={SAVED: actions} if actions else {},
    )
    PLAN.add(name, 1, run, slow=slow)


def add_saving(name: str, form: Mapping[str, Any], **options: Any) -> None:
    """One that saves in both formats, and goes on."""
    add(name, form, *(Save(checkpoint(name, kind)) for kind in FORMATS), Look(), **options)


def add_loading(name: str, source: str, kind: str, form: Mapping[str, Any], **options: Any) -> None:
    """One that begins with what the run called `source` has saved in a format."""
    add(name, form, Load(checkpoint(source, kind)), Look(), first_step=SAVED, **options)

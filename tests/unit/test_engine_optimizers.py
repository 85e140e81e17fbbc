"""Streamed steps give the bits of resident steps: every elementwise class of torch.optim."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.support.engines import SIZES, pair

OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adamw_foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw_loop": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "adamw_fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw_amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "adamw_amsgrad_fused": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True, fused=True),
    "adamw_maximize": partial(torch.optim.AdamW, lr=1e-2, maximize=True),
    "adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "adam_fused": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-2),
    "sgd_momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "sgd_dampening": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, dampening=0.5),
    "sgd_nesterov": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd_fused": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "radam": partial(torch.optim.RAdam, lr=1e-2),
    "adamax": partial(torch.optim.Adamax, lr=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2),
    "rmsprop_centered": partial(torch.optim.RMSprop, lr=1e-2, centered=True, momentum=0.9),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "asgd": partial(torch.optim.ASGD, lr=1e-2, t0=3),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "adagrad_fused": partial(torch.optim.Adagrad, lr=1e-2, fused=True),
    "rprop": partial(torch.optim.Rprop, lr=1e-2),
}
STEPS = 12
# 1024 elements of main and up to three moments.
BUCKET_BYTES = 16 * 1024
# The first group has the options of the class, the second others.
GROUPS = {4: {"lr": 3e-3}}
# Frozen for a while, joining later, never trained.
WITHOUT = {
    **dict.fromkeys((0, 1), (1, 3)),
    **dict.fromkeys((5, 6, 7), (2, 8)),
    8: tuple(range(len(SIZES))),
    9: (0, 1, 2, 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_streamed_equals_resident(tmp_path, name):
    # These keep state from their construction on.
    initialize = "given" if name.startswith("adagrad") else "eager"
    options: dict[str, Any] = {"initialize": initialize, "bucket_size": BUCKET_BYTES}
    with pair(tmp_path, OPTIMIZERS[name], groups=GROUPS, **options) as both:
        assert max(bucket.numel for bucket in both.engine.layout.buckets) <= 4096
        for step in range(STEPS):
            # torch's fused SGD cannot have a parameter join whose group has momentum already.
            both.step(step, () if name == "sgd_fused" else WITHOUT.get(step, ()))
            both.check_models()
            if step in (0, 2, 5):
                both.check()
        both.check()
    assert not list(tmp_path.iterdir())

"""State saved in one form and number of ranks, and loaded in another number, in Megatron's formats.

Remainders and bf16 moments come back as they were saved, wherever shards are cut. Blocks of 8 bits
are counted from each shard's start: where that moves, what was saved (the values that were kept)
is rounded once more, to nearest, and that is all that happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gds_optimizer.codecs import get_codec
from gds_optimizer.megatron.tiny_gpt import TinyGptConfig
from gds_optimizer.plan import INT8_CODECS
from tests.megatron import HAS_ALL_FORMS
from tests.megatron.checkpointing import (
    BUCKET_SHAPED,
    MODEL_SHAPED,
    PLAN,
    Checkpoint,
    Load,
    Look,
    Run,
    Save,
    assemble,
    compare_resumed,
)
from tests.megatron.harness import compare_states
from tests.megatron.streaming import SMALL_BUCKET_BYTES, Streaming
from tests.support.engines import same_bits

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.skipif(
        not HAS_ALL_FORMS, reason="needs the installed Megatron, or GDS_OPTIMIZER_TEST_ALL"
    ),
]

SAVED, STEPS = 3, 5
DENSE = {"inner_optimizer": "fused", "layers": 2, "hidden": 48, "swiglu": True}
STREAMING = Streaming(bucket_size=3 * SMALL_BUCKET_BYTES, init="lazy")
REMAINDER = {"main": "remainder"}
FORMS: dict[str, dict[str, str]] = {
    "plain": {},
    "remainder": REMAINDER,
    "bf16-remainder": {**REMAINDER, "moment_dtype": "bf16"},
    "int8-remainder": {**REMAINDER, "moment_dtype": "int8"},
}


@dataclass(frozen=True, kw_only=True)
class Move:
    """From some ranks to others: `source` and `target` are the number of ranks and options."""

    form: str
    source: tuple[int, tuple[tuple[str, int], ...]]
    target: tuple[int, tuple[tuple[str, int], ...]]
    format: str = MODEL_SHAPED

    def name(self, of: tuple[int, tuple[tuple[str, int], ...]]) -> str:
        ranks, options = of
        cut = "".join(f"-{key.partition('_')[0]}{value}" for key, value in options)
        return f"forms/{self.form}/{ranks}{cut}"

    @property
    def checkpoint(self) -> Checkpoint:
        name = f"{self.name(self.source)}-{self.format}".replace("/", "-")
        return Checkpoint(name=name, format=self.format)

    @property
    def saving(self) -> str:
        return self.name(self.source)

    def loading(self, form: str) -> str:
        moved = self.name(self.target).removeprefix("forms/")
        return f"{self.saving}-{self.format}/{moved}/by-{form}"


DP3, DP2, ONE, TP2 = (3, ()), (2, ()), (1, ()), (2, (("tensor_parallel", 2),))
MOVES = [
    Move(form="remainder", source=DP3, target=DP2),
    Move(form="remainder", source=DP3, target=DP2, format=BUCKET_SHAPED),
    Move(form="remainder", source=TP2, target=ONE),
    Move(form="bf16-remainder", source=DP3, target=TP2),
    Move(form="int8-remainder", source=DP3, target=DP2),
    Move(form="int8-remainder", source=TP2, target=ONE),
]


def run(of: tuple[int, Any], form: str, steps: int, first: int, *actions: object) -> Run:
    options = {**DENSE, **dict(of[1])}
    return Run(
        config=TinyGptConfig(steps=steps, first_step=first, schedule="changing", **options),
        streaming=STREAMING,
        stream_options=FORMS[form],
        actions={SAVED: actions},
    )


def add_all() -> None:
    for saving in dict.fromkeys(move.saving for move in MOVES):
        moves = [move for move in MOVES if move.saving == saving]
        saves = [Save(c) for c in dict.fromkeys(move.checkpoint for move in moves)]
        (ranks, _), form = moves[0].source, moves[0].form
        PLAN.add(saving, ranks, run(moves[0].source, form, SAVED, 0, *saves), slow=True)
    for move in MOVES:
        for form in (move.form, "plain"):
            load = run(move.target, form, STEPS, SAVED, Load(move.checkpoint), Look())
            PLAN.add(move.loading(form), move.target[0], load, slow=True)


add_all()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return PLAN.results_in(tmp_path_factory)


def everything(ranks: Any) -> dict[str, dict[str, Any]]:
    return assemble([rank.moments[SAVED].parts for rank in ranks])


def rounded(values: torch.Tensor, codec_name: str) -> torch.Tensor:
    """A shard's moments as they come back: blocks are counted from its start."""
    codec, values = get_codec(codec_name), values.contiguous().view(-1)
    encoded = torch.zeros(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode_from(values, encoded)
    return codec.decode(encoded, values.numel())


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.loading(move.form))
def test_what_was_kept_is_what_is_loaded(results, move):
    """By a run that keeps fp32, all of it; by one of the same form, rounded where blocks moved."""
    saved, plain = results(move.saving), results(move.loading("plain"))
    compare_states(everything(saved), everything(plain))
    loaded = results(move.loading(move.form))
    if not move.form.startswith("int8"):
        compare_states(everything(saved), everything(loaded))
        return
    rounded_anew = 0
    for wanted, found in zip(plain, loaded, strict=True):
        states = [rank.moments[SAVED].states for rank in (wanted, found)]
        assert states[0].keys() == states[1].keys()
        for shard, state in states[0].items():
            for key, value in state.items():
                expected = rounded(value, INT8_CODECS[key]) if key in INT8_CODECS else value
                rounded_anew += not same_bits(expected, value)
                assert same_bits(expected, states[1][shard][key]), f"{key} of {shard}"
    assert rounded_anew


@pytest.mark.parametrize(
    "move",
    [move for move in MOVES if move.form == "remainder"],
    ids=lambda move: move.loading(move.form),
)
def test_training_goes_on_as_with_fp32(results, move):
    plain, found = results(move.loading("plain")), results(move.loading("remainder"))
    for wanted, own in zip(plain, found, strict=True):
        compare_resumed(wanted, own, SAVED)

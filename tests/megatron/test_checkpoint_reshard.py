"""Optimizer state saved on some ranks and loaded on others, in the formats that allow it.

What is compared is the state of all ranks together, placed in the model's global tensors: after
loading it is what was saved. Where Megatron itself loads the same checkpoint rightly, training
goes on like there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gds_optimizer.errors import UnsupportedError
from gds_optimizer.megatron.checkpoint import _parts_of
from gds_optimizer.megatron.cpu import import_megatron
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
    assemble,
    compare_resumed,
)
from tests.megatron.harness import compare_states
from tests.megatron.streaming import SMALL_BUCKET_BYTES, Streaming

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

SAVED = 3
STEPS = 5
STREAMING = Streaming(bucket_size=3 * SMALL_BUCKET_BYTES, init="lazy")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A training that saves in the model's shapes (and in others), resident and streamed."""

    world_size: int
    options: dict[str, Any]
    formats: tuple[str, ...] = (MODEL_SHAPED,)
    metadata: tuple[tuple[str, Any], ...] = ()

    @property
    def vocab(self) -> int:
        return TinyGptConfig(**self.options).vocab


@dataclass(frozen=True, kw_only=True)
class Target:
    """Ranks that load what a source saved.

    Attributes:
        source: its name.
        world_size: number of ranks.
        options: what differs from the source's configuration.
        format: of the checkpoint.
        is_plain_right: Megatron itself loads this right, so training goes on like there.
        from_plain: load what the resident source saved as well.
        steps_before: steps that it makes before it loads.
    """

    source: str
    world_size: int
    options: dict[str, Any]
    format: str = MODEL_SHAPED
    is_plain_right: bool = True
    from_plain: bool = False
    steps_before: int = 0


DENSE = {"inner_optimizer": "fused", "layers": 2, "hidden": 48, "swiglu": True}
MOE = {"inner_optimizer": "fused", "layers": 1, "hidden": 48, "experts": 4}
ONLY_FINAL_NORM = ("embedding", "output", "layers", "bias")
PADDED = {**DENSE, "swiglu": False, "overlap": True, "ddp_bucket_size": 4096}
TP2 = {"tensor_parallel": 2}
TP1 = {"tensor_parallel": 1}
PP2 = {"pipeline_parallel": 2}
PP1 = {"pipeline_parallel": 1}

SOURCES = {
    "dp4": Source(world_size=4, options=DENSE, formats=(MODEL_SHAPED, BUCKET_SHAPED)),
    "tp2_dp2": Source(world_size=4, options={**DENSE, **TP2, "tied_embeddings": True}),
    "ep2_dp2": Source(world_size=4, options={**MOE, "expert_parallel": 2, "swiglu": True}),
    "single_keys": Source(
        world_size=2,
        options={**MOE, "expert_parallel": 2, "swiglu": True},
        metadata=(("singleton_local_shards", True),),
    ),
    # One rank owns nothing.
    "sparse": Source(world_size=2, options={**DENSE, "frozen": ONLY_FINAL_NORM}),
    "tp2": Source(world_size=2, options={**DENSE, **TP2}),
    "pp2_tied": Source(world_size=2, options={**DENSE, **PP2, "tied_embeddings": True}),
    "mixed_moe": Source(world_size=2, options={**MOE, "mixed_dtype": True}),
    "padded": Source(world_size=2, options=PADDED),
    "one": Source(world_size=1, options={**DENSE, "tied_embeddings": True}),
}
TARGETS = {
    "dp4_to_dp3": Target(source="dp4", world_size=3, options={}),
    "dp4_to_dp2": Target(source="dp4", world_size=2, options={}, from_plain=True),
    "dp4_to_dp1": Target(source="dp4", world_size=1, options={}),
    "dp4_to_dp2_buckets": Target(
        source="dp4", world_size=2, options={}, format=BUCKET_SHAPED, from_plain=True
    ),
    "dp4_to_pp2": Target(source="dp4", world_size=2, options=PP2),
    "tp2_dp2_to_dp3": Target(source="tp2_dp2", world_size=3, options=TP1),
    "tp2_dp2_to_pp2": Target(source="tp2_dp2", world_size=2, options={**TP1, **PP2}),
    "ep2_dp2_to_ep2": Target(source="ep2_dp2", world_size=2, options={}, from_plain=True),
    "ep2_dp2_to_ep1": Target(source="ep2_dp2", world_size=2, options={"expert_parallel": 1}),
    "tp2_to_tp1": Target(source="tp2", world_size=1, options=TP1, from_plain=True),
    "pp2_to_pp1": Target(source="pp2_tied", world_size=1, options=PP1, from_plain=True),
    "one_to_tp2": Target(source="one", world_size=2, options=TP2),
    "one_to_pp2": Target(source="one", world_size=2, options=PP2),
    "one_to_dp2": Target(source="one", world_size=2, options={}),
    # Megatron itself mixes shards up where a group has fp32 and half-precision parameters.
    "mixed_moe_to_dp1": Target(source="mixed_moe", world_size=1, options={}, is_plain_right=False),
    "single_keys_to_ep1": Target(
        source="single_keys", world_size=1, options={"expert_parallel": 1}, from_plain=True
    ),
    "sparse_to_dp1": Target(source="sparse", world_size=1, options={}, from_plain=True),
    "sparse_to_dp2": Target(source="sparse", world_size=2, options={}, from_plain=True),
    "padded_to_dp1": Target(source="padded", world_size=1, options={}),
    "padded_to_dp2": Target(source="padded", world_size=2, options={}),
    # The rest of a larger vocabulary starts from nothing, also in a run that has stepped.
    "one_to_larger_vocabulary": Target(
        source="one", world_size=1, options={"vocab": 72}, steps_before=2
    ),
}


def _checkpoint(source: str, side: str, kind: str) -> Checkpoint:
    metadata = SOURCES[source].metadata
    return Checkpoint(name=f"reshard-{source}-{side}-{kind}", format=kind, metadata=metadata)


def _add_sources() -> None:
    for name, source in SOURCES.items():
        from_plain = any(t.source == name and t.from_plain for t in TARGETS.values())
        for side in ("plain", "streamed") if from_plain or name == "padded" else ("streamed",):
            saves = [Save(_checkpoint(name, side, kind)) for kind in source.formats]
            PLAN.add(
                f"reshard/{name}/{side}",
                source.world_size,
                Run(
                    config=TinyGptConfig(steps=SAVED, schedule="changing", **source.options),
                    streaming=STREAMING if side == "streamed" else None,
                    actions={SAVED: saves},
                ),
                slow=True,
            )


# Megatron itself writes wrong state here.
BROKEN = PLAN.add(
    "reshard/padded_to_dp2/plain-streamed",
    2,
    Run(
        config=TinyGptConfig(first_step=SAVED, steps=SAVED, **PADDED),
        streaming=STREAMING,
        actions={SAVED: (Load(_checkpoint("padded", "plain", MODEL_SHAPED)), Look())},
    ),
    slow=True,
)


def _add_target(name: str, target: Target) -> list[tuple[str, str]]:
    """Add the runs that load; returns (source's side, loading side) of each."""
    sides = [("streamed", "streamed")]
    sides += [("streamed", "plain")] if target.is_plain_right else []
    sides += [("plain", "streamed")] if target.from_plain else []
    options = {**SOURCES[target.source].options, **target.options}
    for source_side, side in sides:
        load = Load(_checkpoint(target.source, source_side, target.format))
        PLAN.add(
            f"reshard/{name}/{source_side}-{side}",
            target.world_size,
            Run(
                config=TinyGptConfig(first_step=SAVED, steps=STEPS, schedule="changing", **options),
                streaming=STREAMING if side == "streamed" else None,
                actions={SAVED: (load, Look())},
            ),
            slow=True,
        )
    return sides


_add_sources()
LOADED = [
    (name, source_side, side)
    for name, target in TARGETS.items()
    for source_side, side in _add_target(name, target)
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return PLAN.results_in(tmp_path_factory)


def _everything(ranks: Any, step: int) -> dict[str, dict[str, Any]]:
    return assemble([rank.moments[step].parts for rank in ranks])


def _split_off_vocabulary(state: dict[str, dict[str, Any]], size: int) -> list[torch.Tensor]:
    """Cut embeddings down to `size` rows; returns what their mains and moments had beyond."""
    rest = []
    for key, planes in state.items():
        if "word_embeddings" not in key:
            continue
        for name, values in planes.items():
            if isinstance(values, torch.Tensor):
                rest += [values[size:]] if name != "model" else []
                planes[name] = values[:size]
    assert len(rest) == 3
    return rest


@pytest.mark.parametrize(
    ("name", "source_side", "side"), LOADED, ids=["-".join(each) for each in LOADED]
)
def test_loaded_state_is_the_saved_one(results, name, source_side, side):
    saved = _everything(results(f"reshard/{TARGETS[name].source}/{source_side}"), SAVED)
    loaded = _everything(results(f"reshard/{name}/{source_side}-{side}"), SAVED)
    if "vocab" in TARGETS[name].options:
        rest = _split_off_vocabulary(loaded, SOURCES[TARGETS[name].source].vocab)
        for values in rest:
            assert not values.any()
    compare_states(saved, loaded)


@pytest.mark.parametrize(
    "name", [name for name, target in TARGETS.items() if target.is_plain_right]
)
def test_training_goes_on_like_resident(results, name):
    plain = results(f"reshard/{name}/streamed-plain")
    for wanted, found in zip(plain, results(f"reshard/{name}/streamed-streamed"), strict=True):
        compare_resumed(wanted, found, SAVED)


@pytest.mark.parametrize("name", ["dp4", "tp2", "pp2_tied", "ep2_dp2"])
def test_sources_agree(results, name):
    """Each side's checkpoints come from the same state."""
    plain, streamed = (results(f"reshard/{name}/{side}") for side in ("plain", "streamed"))
    compare_states(_everything(plain, SAVED), _everything(streamed, SAVED))


def test_one_rank_owned_nothing(results):
    assert [bool(rank.moments[SAVED].states) for rank in results("reshard/sparse/streamed")] in (
        [True, False],
        [False, True],
    )


def test_a_checkpoint_that_megatron_wrote_wrongly_is_announced(results):
    """Several communication buckets with padded ends, gathered by megatron-core 0.16 to 0.19."""
    saved = _everything(results("reshard/padded/plain"), SAVED)
    compare_states(saved, _everything(results("reshard/padded/streamed"), SAVED))
    loaded = _everything(results(BROKEN), SAVED)
    with pytest.raises(AssertionError, match="differs in"):
        compare_states(saved, loaded)
    for rank in results(BROKEN):
        (warning,) = rank.log
        assert "was written without streaming" in warning
        assert "--no-load-optim" in warning


@pytest.mark.parametrize("side", ["reshard/padded_to_dp2", "reshard/padded_to_dp1"])
def test_a_streamed_checkpoint_is_not_suspected(results, side):
    """Nor is anything else said, when saving and when loading."""
    for name in ("reshard/padded/streamed", f"{side}/streamed-streamed"):
        assert [rank.log for rank in results(name)] == [[]] * len(results(name))


@pytest.mark.parametrize("name", ["dp4_to_dp2_buckets", "dp4_to_dp2"])
def test_a_checkpoint_that_megatron_wrote_rightly_is_not_suspected(results, name):
    assert [rank.log for rank in results(f"reshard/{name}/plain-streamed")] == [[], []]


class TestParts:
    """How a model cuts a parameter for its checkpoints, with hand-made cuts."""

    @staticmethod
    def factory(build):
        import_megatron()
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        def build_fn(key, whole, replica_id, flattened_range):
            return [
                ShardedTensor.from_rank_offsets(f"{key}.{number}", part, replica_id=replica_id)
                for number, part in enumerate(build(whole))
            ]

        param = torch.empty(4, 6)
        return ShardedTensorFactory("weight", param, build_fn, lambda parts: None), param

    @pytest.mark.parametrize(
        ("build", "offsets"),
        [
            (lambda whole: whole.chunk(2), [0, 12]),
            (lambda whole: whole.split([1, 3]), [0, 6]),
            (lambda whole: whole.view(2, 2, 6).unbind(), [0, 12]),
            (lambda whole: [whole], [0]),
        ],
    )
    def test_ranges_are_found(self, build, offsets):
        parts = _parts_of(*self.factory(build))
        assert [part.data.storage_offset() for part in parts] == offsets

    @pytest.mark.parametrize(
        "build",
        [
            lambda whole: whole.chunk(2, dim=1),
            lambda whole: [whole.t()],
            # Grouped experts do this: contiguous, and not where it was.
            lambda whole: [whole.t().contiguous()],
            lambda whole: [whole[:3]],
        ],
        ids=["columns", "transposed", "copied", "incomplete"],
    )
    def test_what_is_no_range_is_refused(self, build):
        with pytest.raises(UnsupportedError, match=r"rearranges weight .*dp_reshardable"):
            list(_parts_of(*self.factory(build)))

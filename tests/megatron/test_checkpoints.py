"""N + M steps equal N, save, load in a new process, M: bit for bit, in each of Megatron's formats.

Streamed and resident runs load each other's checkpoints. Pairs with a resident side use the fused
Adam's stand-in: resuming with torch's AdamW is broken in Megatron itself. Without --slow each of
the two versions of Megatron under test has every second combination of a pair, a format and a step.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gds_optimizer.megatron.tiny_gpt import TinyGptConfig
from tests.megatron import has_turn, marks_of
from tests.megatron.checkpointing import (
    BUCKET_SHAPED,
    GATHERED,
    LEGACY,
    MODEL_SHAPED,
    PLAN,
    Checkpoint,
    Context,
    Load,
    Look,
    Run,
    Save,
    compare_moments,
    compare_resumed,
    dist_checkpointing,
    load,
    load_model,
    model_state,
    save,
    sharded_state,
)
from tests.megatron.harness import compare_records
from tests.megatron.streaming import SMALL_BUCKET_BYTES, Streaming

pytestmark = pytest.mark.megatron

STEPS = 9
SAVED = 7
SKIPPED = 5
BUCKET_BYTES = 3 * SMALL_BUCKET_BYTES


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A configuration and the combinations it is tried in."""

    world_size: int
    options: dict[str, Any]
    formats: tuple[str, ...] = (BUCKET_SHAPED, MODEL_SHAPED)
    pairs: tuple[tuple[str, str], ...] = (
        ("streamed", "streamed"),
        ("plain", "streamed"),
        ("streamed", "plain"),
    )
    init: str = "eager"
    parallel: bool = False
    budgets: dict[str, int] = field(default_factory=dict)
    slow: bool = False

    @property
    def config(self) -> TinyGptConfig:
        options = {"layers": 1, "hidden": 48, "schedule": "changing", **self.options}
        return TinyGptConfig(steps=STEPS, **options)


STREAMED_ONLY = (("streamed", "streamed"),)
FUSED = {"inner_optimizer": "fused"}
SETUPS = {
    "fp16": Setup(
        world_size=1,
        options={**FUSED, "fp16": True, "skip_step_at": SKIPPED, "swiglu": True, "layers": 2},
        formats=(BUCKET_SHAPED, MODEL_SHAPED, GATHERED, LEGACY),
    ),
    "adamw": Setup(
        world_size=1,
        options={"mixed_dtype": True, "experts": 2, "fp16": True, "skip_step_at": SKIPPED},
        formats=(BUCKET_SHAPED, MODEL_SHAPED, GATHERED, LEGACY),
        pairs=STREAMED_ONLY,
        init="lazy",
    ),
    "dp_moe": Setup(
        world_size=2,
        options={**FUSED, "experts": 4},
        formats=(BUCKET_SHAPED, MODEL_SHAPED, GATHERED, LEGACY),
        init="lazy",
    ),
    "dp_parallel": Setup(
        world_size=2, options={**FUSED, "tied_embeddings": True}, parallel=True, slow=True
    ),
    "dp_adamw_overlap": Setup(
        world_size=2,
        options={"overlap": True, "ddp_bucket_size": 4096, "mixed_dtype": True, "experts": 4},
        pairs=STREAMED_ONLY,
    ),
    "dp_mixed_homes": Setup(
        world_size=2,
        options={**FUSED, "experts": 4},
        formats=(BUCKET_SHAPED, MODEL_SHAPED, GATHERED),
        budgets={"hbm_budget": 100_001, "host_budget": 100_001},
    ),
    "tp_dp": Setup(
        world_size=4,
        options={**FUSED, "tensor_parallel": 2, "swiglu": True, "overlap": True},
    ),
    "ep_dp_adamw": Setup(
        world_size=4,
        options={"experts": 4, "expert_parallel": 2},
        pairs=STREAMED_ONLY,
        init="lazy",
        slow=True,
    ),
}


def add_setup(name: str, setup: Setup) -> list[Any]:
    """Add the runs of a setup; returns the parameters of its resumed ones."""

    def checkpoint(side: str, step: int, kind: str) -> Checkpoint:
        return Checkpoint(name=f"{name}-{side}-{step}-{kind}", format=kind, parallel=setup.parallel)

    def saves(side: str, step: int) -> tuple[Any, ...]:
        return tuple(Save(checkpoint(side, step, kind)) for kind in setup.formats)

    config = setup.config
    is_saved_plain = any(pair[0] == "plain" for pair in setup.pairs)
    plain_actions = {SAVED: (*(saves("plain", SAVED) if is_saved_plain else ()), Look())}
    PLAN.add(
        f"{name}/plain",
        setup.world_size,
        Run(config=config, actions=plain_actions),
        slow=setup.slow,
    )
    PLAN.add(
        f"{name}/streamed",
        setup.world_size,
        Run(
            config=config,
            streaming=Streaming(init=setup.init, bucket_size=BUCKET_BYTES, **setup.budgets),
            actions={
                0: saves("streamed", 0),
                SAVED: (*saves("streamed", SAVED), Look()),
            },
        ),
        slow=setup.slow,
    )
    found = []
    for pair_place, (source, target) in enumerate(setup.pairs):
        for place, kind in enumerate(setup.formats):
            # Resident runs cannot save before they have made a step.
            at_zero = source == "streamed" and (target == "streamed" or setup.world_size == 1)
            for step in (0, SAVED) if at_zero else (SAVED,):
                init = "lazy" if kind == BUCKET_SHAPED else "eager"
                streaming = Streaming(init=init, bucket_size=BUCKET_BYTES, **setup.budgets)
                is_slow = setup.slow or not has_turn(pair_place, place, int(step == SAVED))
                run = PLAN.add(
                    f"{name}/{source}-{target}/{kind}/{step}",
                    setup.world_size,
                    Run(
                        config=replace(config, first_step=step),
                        streaming=streaming if target == "streamed" else None,
                        actions={step: (Load(checkpoint(source, step, kind)), Look())},
                    ),
                    slow=is_slow,
                )
                found.append(pytest.param(name, run, step, id=run, marks=marks_of(is_slow)))
    return found


# ---------------------------------------------------------------------- more than save and load


MISC = {**FUSED, "layers": 1, "hidden": 48, "schedule": "changing", "steps": STEPS}
MISC_STREAMING = Streaming(bucket_size=BUCKET_BYTES)
SAVED_BUCKETS = Checkpoint(name="misc-buckets", format=BUCKET_SHAPED)
SAVED_MODEL = Checkpoint(name="misc-model", format=MODEL_SHAPED)
SAVED_ADAMW = Checkpoint(name="misc-adamw", format=MODEL_SHAPED)


@dataclass(frozen=True)
class Misused:
    """Loads that fail or are not finished, and what the optimizer lets happen then."""

    checkpoint: Checkpoint

    def __call__(self, context: Context) -> None:
        context.result.notes["damaged"] = self._load_damaged(context)
        context.result.notes["step"] = _error_of(context.optimizer.step)
        context.result.notes["save"] = _error_of(
            save, context.path(self.checkpoint), context.chunks, context.optimizer, self.checkpoint
        )
        # In between the tensors are asked for again, and nobody loads anything.
        sharded_state(context.chunks, context.optimizer, self.checkpoint, is_loading=True)
        context.result.notes["step again"] = _error_of(context.optimizer.step)

    def _load_damaged(self, context: Context) -> str:
        damaged = context.directory / f"damaged-{self.checkpoint.name}"
        shutil.copytree(context.path(self.checkpoint), damaged)
        largest = max(damaged.glob("*.distcp"), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
        return _error_of(load, damaged, context.chunks, context.optimizer, self.checkpoint)


@dataclass(frozen=True)
class LoadedFromElsewhere:
    """Optimizer state that was not asked of the optimizer that is to load it."""

    checkpoint: Checkpoint

    def __call__(self, context: Context) -> None:
        state = sharded_state(context.chunks, context.optimizer, self.checkpoint, is_loading=False)
        context.result.notes["error"] = _error_of(
            context.optimizer.load_state_dict, state["optimizer"]
        )


@dataclass(frozen=True)
class LoadWeights:
    """Only the weights, as with --no-load-optim and --finetune; mains are taken from them."""

    checkpoint: Checkpoint

    def __call__(self, context: Context) -> None:
        state = model_state(context.chunks, self.checkpoint)
        path = context.path(self.checkpoint)
        load_model(context.chunks, dist_checkpointing().load(state, str(path)))
        context.optimizer.reload_model_params()


def scheduler_of(optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-4,
        lr_warmup_steps=20,
        lr_decay_steps=50,
        lr_decay_style="cosine",
        start_wd=0.05,
        end_wd=0.1,
        wd_incr_steps=50,
        wd_incr_style="linear",
    )


def note_groups(context: Context) -> None:
    groups = [(group["lr"], group["weight_decay"]) for group in context.optimizer.param_groups]
    context.result.notes.setdefault("groups", []).append(groups)


@dataclass(frozen=True)
class SaveScheduled:
    """With Megatron's scheduler, as its training loop does; then two more steps of that alone."""

    checkpoint: Checkpoint

    def __call__(self, context: Context) -> None:
        scheduler = scheduler_of(context.optimizer)
        scheduler.step(increment=SAVED)
        state = sharded_state(context.chunks, context.optimizer, self.checkpoint, is_loading=False)
        state["opt_param_scheduler"] = scheduler.state_dict()
        path = context.path(self.checkpoint)
        path.mkdir(parents=True)
        dist_checkpointing().save(state, str(path))
        note_groups(context)
        for _ in range(2):
            scheduler.step(increment=1)
            note_groups(context)


@dataclass(frozen=True)
class LoadScheduled:
    """Into a new scheduler."""

    checkpoint: Checkpoint

    def __call__(self, context: Context) -> None:
        scheduler = scheduler_of(context.optimizer)
        state = sharded_state(context.chunks, context.optimizer, self.checkpoint, is_loading=True)
        loaded = dist_checkpointing().load(state, str(context.path(self.checkpoint)))
        load_model(context.chunks, loaded)
        context.optimizer.load_state_dict(loaded["optimizer"])
        scheduler.load_state_dict(loaded["opt_param_scheduler"])
        note_groups(context)
        for _ in range(2):
            scheduler.step(increment=1)
            note_groups(context)


def _error_of(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        return f"{type(error).__name__}: {error}"
    return ""


def add_misc(
    name: str,
    actions: dict[int, tuple[Any, ...]],
    *,
    plain: bool = False,
    slow: bool = False,
    **options: Any,
) -> str:
    return PLAN.add(
        f"misc/{name}",
        1,
        Run(
            config=TinyGptConfig(**{**MISC, **options}),
            streaming=None if plain else MISC_STREAMING,
            actions=actions,
        ),
        slow=slow,
    )


add_misc("plain", {}, plain=True)
add_misc("streamed", {SAVED: (Save(SAVED_BUCKETS), Save(SAVED_MODEL))})
ADAMW = {"inner_optimizer": "adamw"}
add_misc("adamw", {}, plain=True, **ADAMW)
add_misc("adamw_streamed", {SAVED: (Save(SAVED_ADAMW),)}, **ADAMW)
# Two steps of another past, with what they leave in the slots.
STEPPED = {
    add_misc("stepped_buckets", {SAVED: (Load(SAVED_BUCKETS),)}, first_step=SAVED - 2): "plain",
    add_misc("stepped_model", {SAVED: (Load(SAVED_MODEL),)}, first_step=SAVED - 2): "plain",
    add_misc(
        "stepped_adamw", {SAVED: (Load(SAVED_ADAMW),)}, first_step=SAVED - 2, **ADAMW
    ): "adamw",
}
AGAIN = [
    Checkpoint(name=f"again-{kind}", format=kind) for kind in (MODEL_SHAPED, BUCKET_SHAPED, LEGACY)
]
MISUSED = [(each, not has_turn(place)) for place, each in enumerate((SAVED_BUCKETS, SAVED_MODEL))]
for each, is_slow in MISUSED:
    add_misc(
        f"misused_{each.format}",
        {SAVED: (Misused(each), Load(each))},
        slow=is_slow,
        first_step=SAVED - 2,
    )
add_misc(
    "saved_after_loading",
    {SAVED: (Load(SAVED_MODEL), *map(Save, AGAIN))},
    first_step=SAVED - 1,
)
LOADED_AGAIN = [(each, not has_turn(place)) for place, each in enumerate(AGAIN)]
for each, is_slow in LOADED_AGAIN:
    add_misc(f"loaded_again_{each.format}", {SAVED: (Load(each),)}, slow=is_slow, first_step=SAVED)
add_misc("elsewhere", {1: (LoadedFromElsewhere(SAVED_MODEL),)}, steps=2)
OTHER_WEIGHTS = {"seed": 7, "first_step": SAVED - 2}
WEIGHTS = (LoadWeights(SAVED_MODEL),)
AFTER_WEIGHTS = Checkpoint(name="after-weights", format=MODEL_SHAPED)
BEFORE_WEIGHTS = Checkpoint(name="before-weights", format=MODEL_SHAPED)
add_misc("weights_plain", {SAVED: WEIGHTS}, plain=True, **OTHER_WEIGHTS)
add_misc("weights", {SAVED: WEIGHTS}, **OTHER_WEIGHTS)
add_misc("first_weights_plain", {SAVED: WEIGHTS}, plain=True, seed=7, first_step=SAVED)
add_misc("first_weights", {SAVED: WEIGHTS}, seed=7, first_step=SAVED)
add_misc(
    "weights_between_saves",
    {SAVED: (Save(BEFORE_WEIGHTS), *WEIGHTS, Save(AFTER_WEIGHTS))},
    **OTHER_WEIGHTS,
)
add_misc("weights_loaded", {SAVED: (Load(AFTER_WEIGHTS),)}, seed=7, first_step=SAVED)
SCHEDULED = {
    (side, kind): Checkpoint(name=f"scheduled-{side}-{kind}", format=kind)
    for side in ("plain", "streamed")
    for kind in (BUCKET_SHAPED, MODEL_SHAPED)
}
RESCHEDULED = [
    (saver, loader, kind, not has_turn(*places))
    for *places, saver, loader, kind in (
        (place, kind_place, *pair, kind)
        for place, pair in enumerate(
            (("streamed", "streamed"), ("plain", "streamed"), ("streamed", "plain"))
        )
        for kind_place, kind in enumerate((BUCKET_SHAPED, MODEL_SHAPED))
    )
]
for side in ("plain", "streamed"):
    actions = [SaveScheduled(each) for (saver, _), each in SCHEDULED.items() if saver == side]
    add_misc(f"scheduled_{side}", {2: tuple(actions)}, plain=side == "plain", steps=2)
for saver, loader, kind, is_slow in RESCHEDULED:
    add_misc(
        f"rescheduled_{saver}_{loader}_{kind}",
        {2: (LoadScheduled(SCHEDULED[saver, kind]),)},
        plain=loader == "plain",
        slow=is_slow,
        first_step=2,
        steps=2,
    )

RESUMED = [param for name, setup in SETUPS.items() for param in add_setup(name, setup)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return PLAN.results_in(tmp_path_factory)


@pytest.mark.parametrize(("setup", "run", "step"), RESUMED)
def test_resumed_equals_uninterrupted(results, setup, run, step):
    for whole, resumed in zip(results(f"{setup}/plain"), results(run), strict=True):
        compare_resumed(whole, resumed)


@pytest.mark.parametrize(
    ("setup", "run"),
    [
        pytest.param(*param.values[:2], marks=param.marks)
        for param in RESUMED
        if param.values[2] == SAVED
    ],
)
def test_state_after_loading_is_that_of_saving(results, setup, run):
    """Also what the next steps would hide: groups, scalers."""
    for saved, loaded in zip(results(f"{setup}/streamed"), results(run), strict=True):
        compare_moments(saved.moments[SAVED], loaded.moments[SAVED])


@pytest.mark.parametrize(
    "setup",
    [pytest.param(name, marks=marks_of(setup.slow)) for name, setup in SETUPS.items()],
)
def test_saving_changes_nothing(results, setup):
    """Before the first step and later, several formats in a row: training goes on as without."""
    plain, streamed = results(f"{setup}/plain"), results(f"{setup}/streamed")
    for wanted, found in zip(plain, streamed, strict=True):
        compare_records(wanted.record, found.record)
        for step in (SAVED, STEPS):
            compare_moments(wanted.moments[step], found.moments[step])


def test_a_step_was_skipped_before_saving(results):
    (result,) = results("fp16/streamed")
    assert [step.success for step in result.record.steps].index(False) == SKIPPED
    # It had grown twice by then, was halved once, and counts good steps anew.
    assert result.moments[SAVED].scalers[0]["growth_tracker"] == SAVED - SKIPPED - 1


@pytest.mark.parametrize("run", STEPPED)
def test_loading_replaces_the_state_of_a_run_that_has_stepped(results, run):
    (whole,), (resumed,) = results(f"misc/{STEPPED[run]}"), results(run)
    compare_resumed(whole, resumed, SAVED)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each.format, marks=marks_of(is_slow)) for each, is_slow in MISUSED],
)
def test_a_failed_load_must_be_repeated(results, kind):
    (whole,), (resumed,) = results("misc/plain"), results(f"misc/misused_{kind}")
    assert resumed.notes["damaged"]
    for what in ("step", "save", "step again"):
        assert resumed.notes[what].startswith("StepFailedError: a checkpoint was being loaded"), (
            what,
            resumed.notes[what],
        )
        assert "load it again" in resumed.notes[what]
    compare_resumed(whole, resumed, SAVED)


def test_saving_right_after_loading(results):
    (whole,), (resumed,) = results("misc/plain"), results("misc/saved_after_loading")
    compare_resumed(whole, resumed, SAVED)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each.format, marks=marks_of(is_slow)) for each, is_slow in LOADED_AGAIN],
)
def test_what_was_saved_right_after_loading(results, kind):
    (whole,), (resumed,) = results("misc/plain"), results(f"misc/loaded_again_{kind}")
    compare_resumed(whole, resumed)


def test_state_that_was_not_asked_for_is_refused(results):
    """Rather than ignored: nobody would have copied it."""
    (result,) = results("misc/elsewhere")
    assert result.notes["error"].startswith("UnsupportedError: the optimizer state to load")


@pytest.mark.parametrize("name", ["weights", "first_weights"])
def test_weights_alone(results, name):
    """Mains follow the weights, moments and counters stay."""
    (plain,), (streamed,) = results(f"misc/{name}_plain"), results(f"misc/{name}")
    compare_resumed(plain, streamed, SAVED)


def test_a_save_after_loading_weights_has_the_new_mains(results):
    (plain,), (resumed,) = results("misc/weights_plain"), results("misc/weights_loaded")
    compare_resumed(plain, resumed)


@pytest.mark.parametrize(
    ("saver", "loader", "kind"),
    [pytest.param(*names, marks=marks_of(is_slow)) for *names, is_slow in RESCHEDULED],
)
def test_the_scheduler_goes_on(results, saver, loader, kind):
    (saved,) = results(f"misc/scheduled_{saver}")
    (loaded,) = results(f"misc/rescheduled_{saver}_{loader}_{kind}")
    wanted = saved.notes["groups"][:3]
    assert len({str(groups) for groups in wanted}) == 3  # it moves
    assert loaded.notes["groups"] == wanted

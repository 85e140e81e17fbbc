"""Trainings that save and load checkpoints in Megatron's own formats, and what to compare of them.

A `Run` is a training with actions between its steps (save, load, look). Test modules add runs to
the one `PLAN`; the first test that wants a result makes all runs of the same number of ranks in
the same processes, those that load after (and in other processes than) those that save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from gds_optimizer.config import StreamConfig
from gds_optimizer.megatron import streamed_optimizer
from gds_optimizer.megatron.shards import (
    collect_resident_state,
    collect_streamed_state,
    distributed_optimizers,
    named_shards,
)
from gds_optimizer.megatron.tiny_gpt import (
    TinyGptConfig,
    TrainingRecord,
    run_training,
    sync_model_params,
)
from tests.megatron.forking import run_forked_ranks
from tests.megatron.harness import compare_records, compare_states
from tests.megatron.kept_groups import groups_kept, paths_tried_once
from tests.megatron.streaming import Streaming, close

BUCKET_SHAPED = "dp_reshardable"
MODEL_SHAPED = "fully_reshardable"
GATHERED = "dp_zero_gather_scatter"
LEGACY = "legacy"  # a file of its own for each model-parallel rank, not torch_dist

State = Mapping[str, Mapping[str, Any]]


# ---------------------------------------------------------------------- saving and loading


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where a checkpoint is and how it is written.

    Attributes:
        name: of its directory, below that of the plan.
        format: one of the four above.
        metadata: further options that Megatron's training loop passes on.
        parallel: let data-parallel ranks share the work, as the training loop does.
    """

    name: str
    format: str
    metadata: tuple[tuple[str, Any], ...] = ()
    parallel: bool = False


def dist_checkpointing() -> Any:
    from megatron.core import dist_checkpointing as module

    return module


def _model_keys(chunks: Sequence[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": checkpoint.format,
        "chained_optim_avoid_prefix": True,
        **dict(checkpoint.metadata),
    }


def model_state(chunks: Sequence[Any], checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    metadata = _metadata(checkpoint) if checkpoint else None
    return {
        key: chunk.module.sharded_state_dict(metadata=metadata)
        for key, chunk in zip(_model_keys(chunks), chunks, strict=True)
    }


def sharded_state(
    chunks: Sequence[Any], optimizer: Any, checkpoint: Checkpoint, *, is_loading: bool
) -> dict[str, Any]:
    """What Megatron's training loop hands to `dist_checkpointing`."""
    model = model_state(chunks, checkpoint)
    return {
        **model,
        "optimizer": optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=_metadata(checkpoint)
        ),
    }


def save(directory: Path, chunks: Sequence[Any], optimizer: Any, checkpoint: Checkpoint) -> None:
    """Write a checkpoint. All ranks call it; parameters are gathered first."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )

    directory.mkdir(parents=True, exist_ok=True)
    sync_model_params(chunks)
    torch.distributed.barrier()
    if checkpoint.format == LEGACY:
        _save_legacy(directory, chunks, optimizer)
    else:
        strategy = None
        if checkpoint.parallel:
            strategy = FullyParallelSaveStrategyWrapper(
                get_default_save_sharded_strategy(),
                parallel_state.get_data_parallel_group(with_context_parallel=True),
            )
        state = sharded_state(chunks, optimizer, checkpoint, is_loading=False)
        dist_checkpointing().save(state, str(directory), strategy)
    torch.distributed.barrier()


def load(directory: Path, chunks: Sequence[Any], optimizer: Any, checkpoint: Checkpoint) -> None:
    """Read a checkpoint into the model and the optimizer. All ranks call it."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
    )

    if checkpoint.format == LEGACY:
        _load_legacy(directory, chunks, optimizer)
        return
    strategy = None
    if checkpoint.parallel:
        strategy = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(directory)),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
    state = sharded_state(chunks, optimizer, checkpoint, is_loading=True)
    loaded = dist_checkpointing().load(state, str(directory), strategy)
    load_model(chunks, loaded)
    optimizer.load_state_dict(loaded["optimizer"])


def load_model(chunks: Sequence[Any], loaded: Mapping[str, Any]) -> None:
    for key, chunk in zip(_model_keys(chunks), chunks, strict=True):
        chunk.module.load_state_dict(loaded[key])


def _legacy_name() -> str:
    from megatron.core import parallel_state

    return (
        f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
        f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
        f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    )


def _save_legacy(directory: Path, chunks: Sequence[Any], optimizer: Any) -> None:
    from megatron.core import parallel_state

    optimizer.save_parameter_state(str(directory / f"{_legacy_name()}.distrib_optim.pt"))
    if parallel_state.get_expert_data_parallel_rank() == 0:
        models = zip(_model_keys(chunks), chunks, strict=True)
        state = {
            **{key: chunk.module.state_dict_for_save_checkpoint() for key, chunk in models},
            "optimizer": optimizer.state_dict(),
        }
        torch.save(state, directory / f"{_legacy_name()}.pt")


def _load_legacy(directory: Path, chunks: Sequence[Any], optimizer: Any) -> None:
    state = torch.load(directory / f"{_legacy_name()}.pt", weights_only=False)
    load_model(chunks, state)
    optimizer.load_state_dict(state["optimizer"])
    # Written as it is read, without a list of what may be in it.
    unrestricted = contextlib.ExitStack()
    with unrestricted:
        plain_load = torch.load
        torch.load = lambda *a, **k: plain_load(*a, **{"weights_only": False, **k})
        unrestricted.callback(setattr, torch, "load", plain_load)
        optimizer.load_parameter_state(str(directory / f"{_legacy_name()}.distrib_optim.pt"))


# ---------------------------------------------------------------------- state in model space


@dataclass
class Part:
    """A rank's part of one global tensor; only the elements in `owned` mean something."""

    key: str
    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor
    owned: torch.Tensor


def model_space(chunks: Sequence[Any], optimizer: Any, states: State) -> list[Part | tuple]:
    """What this rank keeps, placed in the model's global tensors.

    Takes `collect_resident_state` or `collect_streamed_state` of the same moment. For each
    parameter the model's own values ("model"), and every tensor of its state; scalars come as
    (key, name, value).
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    described, _ = extract_sharded_tensors_and_factories(model_state(chunks))
    by_param = {id(each.data): each for each in nested_values(described)}
    found: list[Part | tuple] = []
    for index, part in enumerate(distributed_optimizers(optimizer)):
        for shard in named_shards(part, index):
            param, entry = shard.model_param, by_param[id(shard.model_param)]
            owned = torch.zeros(param.numel(), dtype=torch.bool)
            owned[shard.range.start : shard.range.stop] = True
            everything = torch.ones_like(owned)
            found += _place(entry, "model", param.detach().cpu().flatten(), everything, param)
            for name, value in states[shard.name].items():
                if isinstance(value, torch.Tensor):
                    whole = torch.zeros(param.numel(), dtype=value.dtype)
                    whole[shard.range.start : shard.range.stop] = value
                    found += _place(entry, name, whole, owned, param)
                else:
                    found.append((entry.key, name, value))
    return found


def _place(
    entry: Any, name: str, values: torch.Tensor, owned: torch.Tensor, param: Any
) -> Iterator[Part]:
    pieces, owned_pieces = (_cut(entry, whole.view(param.shape)) for whole in (values, owned))
    for piece, owned_piece in zip(pieces, owned_pieces, strict=True):
        shape = (*(1,) * piece.prepend_axis_num, *piece.data.shape)
        yield Part(
            piece.key,
            name,
            tuple(piece.global_shape),
            tuple(piece.global_offset),
            piece.data.reshape(shape).clone(),
            owned_piece.data.reshape(shape).clone(),
        )


def _cut(entry: Any, whole: torch.Tensor) -> list[Any]:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    if isinstance(entry, ShardedTensor):
        return [replace(entry, data=whole, dtype=whole.dtype)]
    return list(nested_values(entry.build_fn(entry.key, whole, entry.replica_id, None)))


def assemble(ranks: Sequence[Sequence[Part | tuple]]) -> dict[str, dict[str, Any]]:
    """Global tensors from the parts of all ranks: key -> name -> tensor or number.

    Raises an AssertionError where two ranks disagree or nobody has an element.
    """
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    filled: dict[tuple[str, str], torch.Tensor] = {}
    found: dict[str, dict[str, Any]] = {}
    for part in (part for parts in ranks for part in parts):
        if isinstance(part, tuple):
            key, name, value = part
            assert found.setdefault(key, {}).setdefault(name, value) == value, (key, name)
            continue
        where = (part.key, part.name)
        if where not in tensors:
            tensors[where] = torch.zeros(part.global_shape, dtype=part.values.dtype)
            filled[where] = torch.zeros(part.global_shape, dtype=torch.bool)
        region = tuple(
            slice(start, start + length)
            for start, length in zip(part.offset, part.values.shape, strict=True)
        )
        known, has = tensors[where][region], filled[where][region]
        both = has & part.owned
        assert torch.equal(known[both], part.values[both]), f"{where}: two ranks disagree"
        known[part.owned] = part.values[part.owned]
        has |= part.owned
    for (key, name), tensor in tensors.items():
        missing = int((~filled[key, name]).sum())
        assert not missing, f"{key}: {missing} elements of {name} are nobody's"
        found.setdefault(key, {})[name] = tensor
    return found


# ---------------------------------------------------------------------- runs


@dataclass
class Moment:
    """What a rank looked like between two steps."""

    groups: list[list[dict[str, Any]]]
    scalers: list[dict[str, Any]]
    states: State
    parts: list[Part | tuple]


@dataclass
class RunResult:
    """What one rank of a run found.

    Attributes:
        left: files that are where the state was when the run is over.
        error: traceback, where the run failed (on several ranks it is raised instead).
        record: of the training.
        moments: by number of completed steps, where there was a `Look`; the last step always.
        log: warnings and worse.
        notes: whatever actions left, by name.
    """

    left: list[str] = field(default_factory=list)
    error: str = ""
    record: TrainingRecord | None = None
    moments: dict[int, Moment] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Context:
    """What an action gets."""

    directory: Path
    state_directory: Path
    streaming: Streaming | None
    completed: int
    chunks: list[Any]
    optimizer: Any
    result: RunResult

    def path(self, checkpoint: Checkpoint) -> Path:
        return self.directory / "checkpoints" / checkpoint.name


Action = Callable[[Context], None]


@dataclass(frozen=True)
class Save:
    checkpoint: Checkpoint

    def __call__(self, context: Context) -> None:
        path = context.path(self.checkpoint)
        save(path, context.chunks, context.optimizer, self.checkpoint)


@dataclass(frozen=True)
class Load:
    checkpoint: Checkpoint

    def __call__(self, context: Context) -> None:
        path = context.path(self.checkpoint)
        load(path, context.chunks, context.optimizer, self.checkpoint)


@dataclass(frozen=True)
class Look:
    """Note everything there is; what is streamed is read through the slots."""

    def __call__(self, context: Context) -> None:
        optimizer = context.optimizer
        sync_model_params(context.chunks)
        collect = collect_streamed_state if context.streaming else collect_resident_state
        states = collect(optimizer)
        context.result.moments[context.completed] = Moment(
            groups=[
                [
                    {key: value for key, value in group.items() if key != "params"}
                    for group in part.optimizer.param_groups
                ]
                for part in distributed_optimizers(optimizer)
                if not part.is_stub_optimizer
            ],
            scalers=[
                {key: float(value) for key, value in part.grad_scaler.state_dict().items()}
                for part in distributed_optimizers(optimizer)
                if not part.is_stub_optimizer and part.grad_scaler
            ],
            states=states,
            parts=model_space(context.chunks, optimizer, states),
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training.

    Attributes:
        config: what to train.
        streaming: how it is streamed; None for resident.
        actions: by number of completed steps (before the first: `config.first_step`), in order.
        stream_options: further settings of `StreamConfig`.
        looks_at_end: whether to look after the last step, which takes memory for all there is.
    """

    config: TinyGptConfig
    streaming: Streaming | None = None
    stream_options: Mapping[str, Any] = field(default_factory=dict)
    actions: Mapping[int, Sequence[Action]] = field(default_factory=dict)
    looks_at_end: bool = True

    @property
    def _all_actions(self) -> list[Action]:
        return [action for actions in self.actions.values() for action in actions]

    @property
    def saves(self) -> set[str]:
        """Names of the checkpoints that actions called `Save...` write."""
        return {
            action.checkpoint.name
            for action in self._all_actions
            if type(action).__name__.startswith(Save.__name__)
        }

    @property
    def needs(self) -> set[str]:
        """Names of the checkpoints that actions use; an action may say so in `checkpoint`."""
        used = {getattr(a, "checkpoint", None) for a in self._all_actions} - {None}
        return {checkpoint.name for checkpoint in used} - self.saves


class _KeptWarnings(logging.Handler):
    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        self._into.append(record.getMessage())


@contextlib.contextmanager
def _warnings_kept(into: list[str]) -> Iterator[None]:
    logger, handler = logging.getLogger("gds_optimizer"), _KeptWarnings(into)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def perform(run: Run, directory: Path) -> RunResult:
    """On a rank: do a run."""
    result = RunResult()
    made: list[Any] = []
    # Other ranks of the same number may be at work at the same time.
    state_directory = directory / "state" / str(os.getpid())
    state_directory.mkdir(parents=True, exist_ok=True)
    actions = dict(run.actions)
    if run.looks_at_end:
        last = run.config.steps
        actions[last] = (*actions.get(last, ()), Look())

    def act(completed: int, chunks: list[Any], optimizer: Any) -> None:
        context = Context(
            directory, state_directory, run.streaming, completed, chunks, optimizer, result
        )
        for action in actions.get(completed, ()):
            action(context)

    def after_build(chunks: list[Any], optimizer: Any) -> None:
        made.append(optimizer)
        act(run.config.first_step, chunks, optimizer)

    def context() -> contextlib.AbstractContextManager[Any]:
        if run.streaming is None:
            return contextlib.nullcontext()
        return streamed_optimizer(
            StreamConfig(
                directories=(state_directory,),
                bucket_size=run.streaming.bucket_size,
                slots=run.streaming.slots,
                init=run.streaming.init,
                io=run.streaming.io,
                hbm_budget=run.streaming.hbm_budget,
                host_budget=run.streaming.host_budget,
                **run.stream_options,
            )
        )

    try:
        with _warnings_kept(result.log):
            result.record = run_training(
                run.config,
                optimizer_context=context,
                after_build=after_build,
                after_step=lambda step, chunks, optimizer: act(step + 1, chunks, optimizer),
            )
    except Exception:
        if torch.distributed.get_world_size() > 1:
            raise  # the other ranks wait for this one, and only its end frees them
        result.error = traceback.format_exc()
    finally:
        if run.streaming is not None:
            for optimizer in made:
                close(optimizer)
    result.left = [str(path) for path in state_directory.rglob("*") if path.is_file()]
    return result


def perform_all(runs: Mapping[str, Run], directory: str) -> dict[str, RunResult]:
    """On a rank: every run in turn. A failure on several ranks names the run."""
    results = {}
    with groups_kept() as groups, paths_tried_once():
        for name, run in sorted(runs.items(), key=lambda item: groups.wanted(item[1].config)):
            try:
                results[name] = perform(run, Path(directory))
            except Exception as error:
                raise AssertionError(f"run {name!r} failed") from error
    return results


class Plan:
    """Runs by name, done when the first of their kind is asked for."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[int, Run]] = {}
        self._slow: set[str] = set()
        self._results: dict[str, list[RunResult]] = {}
        self._failures: dict[str, BaseException] = {}
        self._directory: Path | None = None

    def add(self, name: str, world_size: int, run: Run, *, slow: bool = False) -> str:
        """Returns the name.

        Args:
            slow: done only with other runs that are, since nobody may ask for any of them.
        """
        assert name not in self._runs, name
        self._runs[name] = (world_size, run)
        if slow:
            self._slow.add(name)
        return name

    def results_in(self, factory: pytest.TempPathFactory) -> Callable[[str], list[RunResult]]:
        """For a fixture: a function from the name of a run to its results by rank."""
        if self._directory is None:
            self._directory = factory.mktemp("checkpoints")
        return self._result

    def _result(self, name: str) -> list[RunResult]:
        self._ensure(name)
        for result in self._results[name]:
            assert not result.error, result.error
            assert not result.left
        return self._results[name]

    def _ensure(self, name: str) -> None:
        if name in self._failures:
            raise self._failures[name]
        if name not in self._results:
            self._do_those_like(name)

    def _stage(self, name: str) -> int:
        needed = self._runs[name][1].needs
        sources = [n for n, (_, run) in self._runs.items() if run.saves & needed]
        assert not needed or sources, f"nobody saves {needed}, which {name} wants"
        return 1 + max(map(self._stage, sources)) if sources else 0

    def _do_those_like(self, name: str) -> None:
        world_size, stage = self._runs[name][0], self._stage(name)
        names = [
            other
            for other, (size, _) in self._runs.items()
            if size == world_size
            and self._stage(other) == stage
            and (other in self._slow) == (name in self._slow)
        ]
        runs = {other: self._runs[other][1] for other in names}
        needed = set().union(*(run.needs for run in runs.values()))
        for source, (_, run) in self._runs.items():
            if run.saves & needed:
                self._ensure(source)
        try:
            self._do(world_size, runs)
        except Exception as error:
            self._failures.update(dict.fromkeys(names, error))
            raise

    def _do(self, world_size: int, runs: dict[str, Run]) -> None:
        names = list(runs)
        # Runs on one rank leave room for as many more.
        shares = [names[0::2], names[1::2]] if world_size == 1 else [names]

        def do(share: list[str]) -> list[dict[str, RunResult]]:
            own = {name: runs[name] for name in share}
            directory = str(self._directory)
            return run_forked_ranks(world_size, perform_all, own, directory, timeout_s=900)

        with ThreadPoolExecutor(len(shares)) as threads:
            for share, ranks in zip(shares, threads.map(do, shares), strict=True):
                self._results |= {name: [rank[name] for rank in ranks] for name in share}


PLAN = Plan()


# ---------------------------------------------------------------------- comparing


def compare_moments(first: Moment, second: Moment) -> None:
    """Groups, scalers and state by shard; for runs of the same ranks."""
    assert comparable(first.groups) == comparable(second.groups)
    assert first.scalers == second.scalers
    compare_states(first.states, second.states)


def comparable(groups: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Groups without a counter that nobody reads.

    Megatron leaves the step of torch's own optimizers in the groups that it has loaded; they
    count in their state.
    """
    return [
        [
            {k: v for k, v in group.items() if k != "step" or "bias_correction" in group}
            for group in part
        ]
        for part in groups
    ]


def compare_resumed(whole: RunResult, resumed: RunResult, first: int | None = None) -> None:
    """Raise an AssertionError unless a resumed run ends as the uninterrupted one.

    Step `first` is the first to be compared; None for the first of the resumed run.
    """
    assert whole.record is not None
    assert resumed.record is not None
    start = resumed.record.config.first_step if first is None else first
    records = [
        replace(record, steps=[step for step in record.steps if step.step >= start], hook_calls={})
        for record in (whole.record, resumed.record)
    ]
    compare_records(*records)
    last = whole.record.config.steps
    compare_moments(whole.moments[last], resumed.moments[last])

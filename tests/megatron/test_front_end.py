"""Streaming seen from Megatron: reloading, materialising, attaching, moving away, and failing.

All scenarios of one world size run one after another in the same processes, each with a training
of its own. A scenario raises where something is wrong. Without --slow each of the two versions of
Megatron under test has every second one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import (
    ClosedError,
    CorruptBucketError,
    EvictedReadError,
    IoError,
    IoPathError,
    ModelChangedError,
    StepFailedError,
    UnsupportedError,
)
from gds_optimizer.evicted import EvictedTensor
from gds_optimizer.io.tasks import TaskBackend
from gds_optimizer.megatron import attach, materialized, streamed_optimizer
from gds_optimizer.megatron import setup as megatron_setup
from gds_optimizer.megatron.cpu import cuda_on_cpu, replaced
from gds_optimizer.megatron.optimizer import is_streamed
from gds_optimizer.megatron.shards import (
    collect_resident_state,
    collect_streamed_state,
    distributed_optimizers,
    named_shards,
    param_names,
)
from gds_optimizer.megatron.tiny_gpt import TinyGptConfig, TrainingRecord, run_training
from tests.megatron import has_turn, marks_of
from tests.megatron.forking import run_forked_ranks
from tests.megatron.harness import compare_records, compare_states
from tests.megatron.kept_groups import groups_kept
from tests.megatron.streaming import SMALL_BUCKET_BYTES
from tests.support.engines import leftovers, open_files, same_bits
from tests.support.io_conformance import file_size_limit

pytestmark = pytest.mark.megatron

SMALL = TinyGptConfig(steps=4, layers=1, hidden=48)
MOE = TinyGptConfig(steps=4, layers=1, hidden=48, experts=2, mixed_dtype=True)
Action = Callable[[int, list[Any], Any], None]


def nothing(step: int, chunks: list[Any], optimizer: Any) -> None:
    pass


def stream_config(directory: Path, **options: Any) -> StreamConfig:
    options.setdefault("directories", (directory,))
    return StreamConfig(bucket_size=SMALL_BUCKET_BYTES, **options)


def close(optimizer: Any) -> None:
    for part in distributed_optimizers(optimizer):
        if is_streamed(part):
            part.close()


@dataclass
class Run:
    """A training and what its optimizer held at its end."""

    record: TrainingRecord
    state: Any
    notes: dict[str, Any] = field(default_factory=dict)


def run(
    config: TinyGptConfig,
    stream: StreamConfig | None = None,
    *,
    after_build: Callable[[list[Any], Any], None] | None = None,
    after_step: Action = nothing,
    before_step: Action = nothing,
) -> Run:
    """Train; resident without `stream`. `after_build` may attach."""
    ended: list[Any] = []
    kept: list[Any] = []

    def build(chunks: list[Any], optimizer: Any) -> None:
        kept.append(optimizer)
        if after_build is not None:
            after_build(chunks, optimizer)

    def end(step: int, chunks: list[Any], optimizer: Any) -> None:
        after_step(step, chunks, optimizer)
        if step == config.steps - 1:
            is_resident = not any(map(is_streamed, distributed_optimizers(optimizer)))
            ended.append(
                (collect_resident_state if is_resident else collect_streamed_state)(optimizer)
            )

    try:
        record = run_training(
            config,
            optimizer_context=lambda: streamed_optimizer(stream),
            after_build=build,
            before_step=before_step,
            after_step=end,
        )
    finally:
        for optimizer in kept:
            close(optimizer)
    return Run(record, ended[0])


@functools.cache
def resident(config: TinyGptConfig) -> Run:
    """The undisturbed resident training, which many scenarios compare with."""
    return run(config)


def same(first: Run, second: Run) -> None:
    compare_records(first.record, second.record)
    compare_states(first.state, second.state)


# ---------------------------------------------------------------------- reloading


def new_values(chunks: list[Any], step: int) -> dict[str, torch.Tensor]:
    """Other fp32 values for every parameter, by name."""
    values = {}
    for param, name in sorted(param_names(chunks).items(), key=lambda item: item[1]):
        generator = torch.Generator().manual_seed(len(name) + 31 * step)
        noise = torch.randn(param.shape, generator=generator)
        values[name] = param.detach().float() + 0.01 * noise.to(param.device)
    return values


def load_weights(chunks: list[Any], step: int) -> dict[str, torch.Tensor]:
    values = new_values(chunks, step)
    for param, name in param_names(chunks).items():
        param.data.copy_(values[name])
    return values


def reload_from_model(directory: Path) -> None:
    def reload(step: int, chunks: list[Any], optimizer: Any) -> None:
        if step in (1, 2):
            load_weights(chunks, step)
            optimizer.reload_model_params()

    for config in (SMALL, MOE):
        same(
            run(config, after_step=reload), run(config, stream_config(directory), after_step=reload)
        )


def reload_before_the_first_step(directory: Path) -> None:
    def reload(chunks: list[Any], optimizer: Any) -> None:
        load_weights(chunks, 7)
        optimizer.reload_model_params()

    wanted = run(MOE, after_build=reload)
    for init in ("eager", "lazy"):
        same(wanted, run(MOE, stream_config(directory, init=init), after_build=reload))


def reload_from_state_dict(directory: Path) -> None:
    """The state dict's values are more precise than the model's parameters."""

    def reload(step: int, chunks: list[Any], optimizer: Any) -> None:
        if step in (0, 2):
            optimizer.reload_model_params(state_dict={"model": load_weights(chunks, step)})

    for init in ("eager", "lazy"):
        same(
            run(SMALL, after_step=reload),
            run(SMALL, stream_config(directory, init=init), after_step=reload),
        )

    def reload_at_once(chunks: list[Any], optimizer: Any) -> None:
        optimizer.reload_model_params(state_dict=load_weights(chunks, 3))

    same(
        run(SMALL, after_build=reload_at_once),
        run(SMALL, stream_config(directory, init="lazy"), after_build=reload_at_once),
    )


def loaded_weights_survive_a_step_with_lr_0(directory: Path) -> None:
    config = TinyGptConfig(steps=3, layers=1, hidden=48, lr=0.0, weight_decay=0.0)
    wanted: dict[str, torch.Tensor] = {}

    def reload(step: int, chunks: list[Any], optimizer: Any) -> None:
        params = {name: param for param, name in param_names(chunks).items()}
        if step == 0:
            load_weights(chunks, step)
            wanted.update((name, param.detach().clone()) for name, param in params.items())
            optimizer.reload_model_params()
        else:
            for name, param in params.items():
                assert torch.equal(param, wanted[name]), name

    for init in ("eager", "lazy"):
        run(config, stream_config(directory, init=init), after_step=reload)


# ---------------------------------------------------------------------- materialising


def clip_main_params(step: int, chunks: list[Any], optimizer: Any) -> None:
    """As qk-clip does: change some mains between steps, through the model's parameters."""
    params = [
        param
        for chunk in chunks
        for name, param in chunk.named_parameters()
        if "linear_qkv" in name or "embedding" in name or "norm" in name
    ]
    with materialized(params):
        for param in params:
            main = getattr(param, "main_param", None)
            if main is not None:
                main.data.copy_(main.data * 0.98)


def changing_materialized_mains(directory: Path) -> None:
    for config in (SMALL, MOE):
        same(
            run(config, after_step=clip_main_params),
            run(config, stream_config(directory), after_step=clip_main_params),
        )


def norms_of_materialized_mains(directory: Path) -> None:
    """As `log_params_norm` does; and without `materialized` it is refused by name."""
    norms: dict[bool, list[list[float]]] = {True: [], False: []}

    def measure(step: int, chunks: list[Any], optimizer: Any) -> None:
        mains = [
            (name, param.main_param)
            for chunk in chunks
            for name, param in chunk.named_parameters()
            if getattr(param, "main_param", None) is not None
        ]
        streaming = any(isinstance(main, EvictedTensor) for _, main in mains)
        with materialized(param for chunk in chunks for param in chunk.parameters()):
            norms[streaming].append([float(torch.norm(main)) for _, main in mains])
        if not streaming:
            return
        refused = 0
        for name, main in mains:
            if isinstance(main, EvictedTensor):
                refused += 1
                with pytest.raises(EvictedReadError, match=name.removeprefix("module.module.")):
                    torch.norm(main)
                with pytest.raises(EvictedReadError):
                    main.data.mul_(2)
                with pytest.raises(EvictedReadError):
                    main.detach().clone()
        assert refused > 5

    same(
        run(MOE, after_step=measure),
        run(MOE, stream_config(directory), after_step=measure),
    )
    assert norms[True] == norms[False]
    assert len(norms[True]) == MOE.steps


def materializing_nothing(directory: Path) -> None:
    with materialized([]), materialized([torch.nn.Parameter(torch.ones(3))]):
        pass

    def of_resident(step: int, chunks: list[Any], optimizer: Any) -> None:
        with materialized(param for chunk in chunks for param in chunk.parameters()):
            pass

    same(resident(SMALL), run(SMALL, after_step=of_resident))


# ---------------------------------------------------------------------- attaching


def attaching_in_mid_run(directory: Path) -> None:
    """Resident for five steps, attached, five more: ten resident ones."""
    for options in ({}, {"inner_optimizer": "fused"}, {"experts": 2, "mixed_dtype": True}):
        config = TinyGptConfig(steps=10, layers=1, hidden=48, schedule="changing", **options)
        for init in ("eager", "lazy"):

            def switch(step: int, chunks: list[Any], optimizer: Any, init: str = init) -> None:
                if step == 4:
                    assert attach(optimizer, stream_config(directory, init=init)) is optimizer
                    assert any(map(is_streamed, distributed_optimizers(optimizer)))

            same(resident(config), run(config, after_step=switch))
    assert leftovers(directory) == []


def attaching_twice_is_refused(directory: Path) -> None:
    def again(chunks: list[Any], optimizer: Any) -> None:
        attach(optimizer, stream_config(directory))
        with pytest.raises(UnsupportedError, match="streamed already"):
            attach(optimizer, stream_config(directory))

    same(resident(SMALL), run(SMALL, after_build=again))


def attaching_after_the_mains_were_released(directory: Path) -> None:
    """A framework may have freed them: they start from the model."""

    def release(chunks: list[Any], optimizer: Any) -> None:
        for part in distributed_optimizers(optimizer):
            for shard in named_shards(part):
                if not shard.is_native_fp32:
                    shard.main_param.untyped_storage().resize_(0)
        attach(optimizer, stream_config(directory))

    same(resident(MOE), run(MOE, after_build=release))


def a_failed_attach_leaves_the_optimizer_as_it_was(directory: Path) -> None:
    """Resident training goes on, bit for bit, whatever went wrong in between."""

    def failing(step: int, chunks: list[Any], optimizer: Any) -> None:
        if step != 1:
            return
        files, threads = open_below(directory), set(threading.enumerate())
        parts = distributed_optimizers(optimizer)
        classes = [type(part) for part in parts]
        with file_size_limit(4096), pytest.raises(IoPathError, match="File too large"):
            attach(optimizer, stream_config(directory))
        for number in (0, 3):
            with failing_open(number), pytest.raises(IoError, match="no luck"):
                attach(optimizer, stream_config(directory))
        with failing_initialisation(), pytest.raises(StepFailedError, match="no luck"):
            attach(optimizer, stream_config(directory, init="lazy"))
        assert [type(part) for part in parts] == classes
        for part in parts:
            assert "step" not in part.optimizer.__dict__
            for shard in named_shards(part):
                assert type(shard.main_param) is torch.Tensor
                assert shard.main_param.grad is None or shard.main_param.grad.shape
        assert leftovers(directory) == []
        assert open_below(directory) == files
        assert set(threading.enumerate()) == threads

    for config in (SMALL, MOE):
        same(resident(config), run(config, after_step=failing))


def attaching_afterwards_works(directory: Path) -> None:
    def twice(step: int, chunks: list[Any], optimizer: Any) -> None:
        if step == 1:
            with failing_initialisation(), pytest.raises(StepFailedError):
                attach(optimizer, stream_config(directory))
            attach(optimizer, stream_config(directory))

    same(resident(MOE), run(MOE, after_step=twice))


# ---------------------------------------------------------------------- failing


@contextlib.contextmanager
def failing_open(number: int) -> Iterator[None]:
    """The `number`-th bucket file that is opened cannot be."""
    opened = [0]
    original = TaskBackend.open

    def counted(self: Any, path: Any) -> Any:
        opened[0] += 1
        if opened[0] == number + 1:
            raise IoError(path, "open", file_offset=0, wanted_bytes=0, got="no luck")
        return original(self, path)

    with replaced(TaskBackend, open=counted):
        yield


@contextlib.contextmanager
def failing_initialisation() -> Iterator[None]:
    from gds_optimizer.engine import Engine

    def fail(self: Any, index: int, slot: Any, from_disk: bool) -> Any:
        if index == 2:
            raise ValueError("no luck")
        return original(self, index, slot, from_disk)

    original = Engine._visit_initial
    with replaced(Engine, _visit_initial=fail):
        yield


def open_below(directory: Path) -> list[str]:
    return sorted(path for path in open_files() if path.startswith(str(directory)))


def patches() -> tuple[Any, ...]:
    """What streaming replaces for a while."""
    import megatron.core.optimizer as module
    from megatron.core.optimizer import layer_wise_optimizer

    return (
        module.DistributedOptimizer,
        module.get_megatron_optimizer,
        layer_wise_optimizer.LayerWiseDistributedOptimizer.__init__,
        torch.Tensor.clone,
        torch.Tensor.float,
    )


def failed_construction_leaves_nothing(directory: Path) -> None:
    before = patches()
    bucket_count = [0]

    def count(chunks: list[Any], optimizer: Any) -> None:
        bucket_count[0] = sum(
            len(part.engine.layout.buckets) for part in distributed_optimizers(optimizer)
        )

    run(SMALL, stream_config(directory), after_build=count)
    assert bucket_count[0] > 20
    files, threads = open_below(directory), set(threading.enumerate())
    failures: list[tuple[Any, Any]] = [
        (failing_open(number), IoError) for number in (0, 1, bucket_count[0] - 1)
    ]
    failures += [
        (failing_initialisation(), StepFailedError),
    ]
    for context, error in failures:
        with context, pytest.raises(error):
            run(SMALL, stream_config(directory))
        assert patches() == before
        assert leftovers(directory) == []
        assert open_below(directory) == files
        assert set(threading.enumerate()) == threads
    same(resident(SMALL), run(SMALL, stream_config(directory)))


def an_exception_inside_the_block_undoes_it(directory: Path) -> None:
    before = patches()

    def fail() -> None:
        with streamed_optimizer(stream_config(directory)):
            assert patches()[0] is not before[0]
            raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        fail()
    assert patches() == before
    assert leftovers(directory) == []


def a_step_that_fails(directory: Path) -> None:
    """Megatron's caller sees our error; closing works."""

    def damage(step: int, chunks: list[Any], optimizer: Any) -> None:
        if step == 1:
            (part,) = distributed_optimizers(optimizer)
            part.engine.drain()
            part.engine.store.paths[10].unlink()

    with pytest.raises(
        StepFailedError, match=r"optimizer step 3 failed: bucket file .*bucket00010"
    ):
        run(SMALL, stream_config(directory), after_step=damage)
    assert leftovers(directory) == []


# ---------------------------------------------------------------------- what it is told


def without_settings_nothing_happens(directory: Path) -> None:
    before = patches()
    with streamed_optimizer(None):
        assert patches() == before
    optimizers: list[Any] = []
    run(SMALL, after_build=lambda chunks, optimizer: optimizers.append(optimizer))
    assert not any(map(is_streamed, distributed_optimizers(optimizers[0])))


def plain_optimizer() -> Any:
    """An optimizer of Megatron's that is not distributed."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    return FP32Optimizer(inner, OptimizerConfig(lr=0.1), lambda *a: None)


def without_a_distributed_optimizer(directory: Path) -> None:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    def build_none() -> None:
        with streamed_optimizer(stream_config(directory)):
            pass

    with pytest.raises(UnsupportedError, match="needs --use-distributed-optimizer"):
        build_none()
    with contextlib.nullcontext() if torch.cuda.is_available() else cuda_on_cpu():
        plain = plain_optimizer()
    for optimizer in (plain, ChainedOptimizer([plain])):
        name = type(optimizer).__name__
        with pytest.raises(UnsupportedError, match=f"{name} has no DistributedOptimizer"):
            attach(optimizer, stream_config(directory))
    assert leftovers(directory) == []


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Lines of this package's log."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("gds_optimizer"), Keep(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def layer_wise_optimizers_are_left_alone(directory: Path) -> None:
    """Beside a distributed optimizer in a chain, and as all that there is."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    def layer_wise() -> Any:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        other = plain_optimizer()
        return LayerWiseDistributedOptimizer([other], OptimizerConfig(lr=0.1), groups)

    def in_a_chain(chunks: list[Any], optimizer: Any) -> None:
        other = layer_wise()
        optimizer.chained_optimizers.append(other)
        try:
            with logged() as lines:
                attach(optimizer, stream_config(directory))
        finally:
            optimizer.chained_optimizers.remove(other)
        assert [line for line in lines if "of the chain keep" in line] == [
            "1 other optimizers of the chain keep their state where it is"
        ]
        assert not is_streamed(other)
        assert type(other) is LayerWiseDistributedOptimizer
        with logged() as lines, streamed_optimizer(stream_config(directory)):
            alone = layer_wise()
        assert type(alone) is LayerWiseDistributedOptimizer
        assert len([line for line in lines if "layer-wise optimizer" in line]) == 1
        param = other.chained_optimizers[0].param_groups[0]["params"][0]
        param.grad = torch.ones(3)
        other.chained_optimizers[0].optimizer.step()
        assert param.tolist() == pytest.approx([0.9] * 3)

    before = patches()
    same(resident(SMALL), run(SMALL, after_build=in_a_chain))
    assert patches() == before


def an_option_of_a_fork_is_set_while_building(directory: Path) -> None:
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer

    from gds_optimizer.megatron import tiny_gpt_model

    @dataclass
    class ForkedConfig(OptimizerConfig):
        defer_main_param_initialization: bool = False

    configs: list[ForkedConfig] = []
    seen: list[bool] = []
    original = distrib_optimizer.DistributedOptimizer._build_model_and_main_param_groups.__func__

    def make(**options: Any) -> ForkedConfig:
        configs.append(ForkedConfig(**options))
        return configs[-1]

    def build(cls: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(configs[-1].defer_main_param_initialization)
        return original(cls, *arguments, **options)

    wanted = resident(SMALL)
    with (
        replaced(tiny_gpt_model, OptimizerConfig=make),
        replaced(
            distrib_optimizer.DistributedOptimizer,
            _build_model_and_main_param_groups=classmethod(build),
        ),
    ):
        same(wanted, run(SMALL))
        assert seen == [False]
        same(wanted, run(SMALL, stream_config(directory)))
        assert seen == [False, True]
        assert [config.defer_main_param_initialization for config in configs] == [False, False]


def a_version_without_tests_is_rehearsed(directory: Path) -> None:
    import megatron.core

    megatron_setup._warn_of_version.cache_clear()
    with replaced(megatron.core, __version__="99.0.1+local"), logged() as lines:
        streamed = run(MOE, stream_config(directory))
        run(SMALL, stream_config(directory))
    warnings = [line for line in lines if "99.0.1" in line]
    assert len(warnings) == 1
    assert "is not among the versions that are tested (0.16.1, 0.19.2)" in warnings[0]
    rehearsals = [line for line in lines if "came out bit-identical" in line]
    assert len(rehearsals) == 3  # of each optimizer: two and one
    assert "AdamW" in rehearsals[0]
    megatron_setup._warn_of_version.cache_clear()
    with logged() as lines:
        same(resident(MOE), run(MOE, stream_config(directory)))
    assert not [line for line in lines if "came out bit-identical" in line]
    same(resident(MOE), streamed)


# ---------------------------------------------------------------------- where the state is


def offloading_and_restoring(directory: Path) -> None:
    """Both optimizers of the chain share the slots, and have writes in flight."""

    def away_and_back(step: int, chunks: list[Any], optimizer: Any) -> None:
        parts = distributed_optimizers(optimizer)
        if not any(map(is_streamed, parts)):
            return
        (pool,) = {part.engine.pool for part in parts}
        slots, nbytes = len(pool.slots), pool.nbytes
        assert slots == 3
        optimizer.offload_to_cpu()
        assert (len(pool.slots), pool.nbytes) == (0, 0)
        for part in parts:
            assert not part.engine.pipeline.unfinished_writes
        optimizer.offload_to_cpu()
        optimizer.restore_from_cpu()
        optimizer.restore_from_cpu()
        assert (len(pool.slots), pool.nbytes) == (slots, nbytes)

    same(resident(MOE), run(MOE, stream_config(directory), after_step=away_and_back))


def offloading_inside_materialized_is_refused(directory: Path) -> None:
    """The block needs the slots when it ends: whatever was freed, its changes would be lost."""

    def inside(step: int, chunks: list[Any], optimizer: Any) -> None:
        parts = distributed_optimizers(optimizer)
        if step != 1 or not any(map(is_streamed, parts)):
            return
        # Of one member of the chain: the slots are everybody's.
        shard = next(iter(named_shards(parts[-1])))
        slots = len(parts[0].engine.pool.slots)
        with materialized([shard.model_param]):
            values = shard.main_param.detach().clone()
            with pytest.raises(UnsupportedError, match="offload_to_cpu"):
                optimizer.offload_to_cpu()
            assert len(parts[0].engine.pool.slots) == slots
            assert torch.equal(shard.main_param, values)
        optimizer.offload_to_cpu()
        optimizer.restore_from_cpu()

    for options in ({}, {"hbm_budget": 300_000}):
        found = run(MOE, stream_config(directory, **options), after_step=inside)
        same(resident(MOE), found)


def a_chain_refuses_before_any_member_steps(directory: Path) -> None:
    """Dense and expert parameters have an engine each; a step that one refuses, none has taken."""

    def refused(step: int, chunks: list[Any], optimizer: Any) -> None:
        parts = distributed_optimizers(optimizer)
        if step != 1 or not any(map(is_streamed, parts)):
            return
        assert len(parts) == 2
        engines = [part.engine for part in parts]
        before = [engine.read_state() for engine in engines]
        models = [param.detach().clone() for chunk in chunks for param in chunk.parameters()]

        def check_that_step_raises(kind: type[Exception], message: str) -> None:
            for _ in range(2):
                with pytest.raises(kind, match=message):
                    optimizer.step()
            assert [engine.steps for engine in engines] == [2, 2]

        for part in parts:
            shard = next(s for s in named_shards(part) if not s.is_native_fp32)
            flat = shard.model_param.data.view(-1)
            kept = flat[0].clone()
            flat[0] += 1
            check_that_step_raises(ModelChangedError, "reload_model_params")
            flat[0] = kept
            with materialized([shard.model_param]):
                check_that_step_raises(UnsupportedError, "inside `materialized`")

        def damaged() -> None:
            raise CorruptBucketError("a checkpoint was damaged while it was written")

        for engine in engines:
            engine.before_step.append(damaged)
            with pytest.raises(CorruptBucketError):
                optimizer.step()
            assert [each.steps for each in engines] == [2, 2]

        for engine, wanted in zip(engines, before, strict=True):
            for name, entry in engine.read_state().items():
                for key, value in entry.items():
                    assert same_bits(wanted[name][key], value), f"{key} of {name}"
        now = [param for chunk in chunks for param in chunk.parameters()]
        assert all(map(same_bits, models, now))

    found = run(MOE, stream_config(directory, main="remainder"), after_step=refused)
    # Hooks before a step know nothing of refusals yet.
    found.record.hook_calls = resident(MOE).record.hook_calls
    same(resident(MOE), found)


def reloading_while_offloaded(directory: Path) -> None:
    """As reinforcement learning does: weights come while the slots are away."""
    reload_while_offloaded(directory)


def reloading_while_the_state_on_the_device_is_offloaded(directory: Path) -> None:
    reload_while_offloaded(directory, hbm_budget=300_000, host_budget=300_000)


def reload_while_offloaded(directory: Path, **budgets: int) -> None:
    def reload(step: int, chunks: list[Any], optimizer: Any) -> None:
        if step == 1:
            streaming = any(map(is_streamed, distributed_optimizers(optimizer)))
            if streaming:
                optimizer.offload_to_cpu()
            load_weights(chunks, step)
            optimizer.reload_model_params()
            if streaming:
                optimizer.restore_from_cpu()

    config = stream_config(directory, **budgets)
    same(run(MOE, after_step=reload), run(MOE, config, after_step=reload))


def lazy_construction_writes_nothing(directory: Path) -> None:
    def look(chunks: list[Any], optimizer: Any) -> None:
        for part in distributed_optimizers(optimizer):
            assert type(part).__name__ == "StreamedDistributedOptimizer"
            engine = part.engine
            assert engine.pool.backend.counters() == {"host.read": 0, "host.write": 0}
            assert not any(path.read_bytes().strip(b"\0") for path in engine.store.paths)

    def look_again(step: int, chunks: list[Any], optimizer: Any) -> None:
        for part in distributed_optimizers(optimizer):
            part.engine.drain()
            assert all(path.read_bytes().strip(b"\0") for path in part.engine.store.paths)
            if step == 0:
                assert part.last_step_stats.read_bytes == 0

    for config in (SMALL, MOE):
        run(
            config,
            stream_config(directory, init="lazy"),
            after_build=look,
            after_step=look_again,
        )


def two_directories(directory: Path) -> None:
    roots = (directory / "first", directory / "second")
    for root in roots:
        root.mkdir()

    def look(step: int, chunks: list[Any], optimizer: Any) -> None:
        for part in distributed_optimizers(optimizer):
            part.engine.drain()
        for root in roots:
            files = list(root.rglob("bucket*.bin"))
            assert len(files) > 10
            assert all(path.read_bytes().strip(b"\0") for path in files)

    config = stream_config(directory, directories=roots)
    same(resident(SMALL), run(SMALL, config, after_step=look))
    assert leftovers(directory) == ["first", "second"]
    for root in roots:
        root.rmdir()


def others_may_wrap_the_step(directory: Path) -> None:
    """torch's schedulers replace the inner optimizer's `step` by one that counts."""
    calls: list[int] = []

    def wrap(chunks: list[Any], optimizer: Any) -> None:
        for part in distributed_optimizers(optimizer):
            inner, step = part.optimizer, part.optimizer.step

            def counting(self: Any, *arguments: Any, step: Any = step, **options: Any) -> Any:
                calls.append(1)
                return step(*arguments, **options)

            inner.step = types.MethodType(counting, inner)
            torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0)

    same(run(SMALL, after_build=wrap), run(SMALL, stream_config(directory), after_build=wrap))
    assert len(calls) == 2 * SMALL.steps


def a_skipped_step_touches_nothing(directory: Path) -> None:
    """Gradients that overflow: no byte moves, no counter does."""
    config = TinyGptConfig(steps=4, layers=1, hidden=48, fp16=True, skip_step_at=2)
    kept: list[Any] = []

    def look(optimizer: Any) -> list[Any]:
        (part,) = distributed_optimizers(optimizer)
        part.engine.drain()
        return [
            [path.read_bytes() for path in part.engine.store.paths],
            part.engine.pool.backend.counters(),
            part.engine.steps,
            [float(state["step"]) for state in part.optimizer.state.values()],
        ]

    def before(step: int, chunks: list[Any], optimizer: Any) -> None:
        if step == 2:
            kept.extend(look(optimizer))

    def after(step: int, chunks: list[Any], optimizer: Any) -> None:
        if step == 2:
            assert look(optimizer) == kept

    streamed = run(config, stream_config(directory), before_step=before, after_step=after)
    assert [step.success for step in streamed.record.steps] == [True, True, False, True]
    assert len(kept) == 4
    same(resident(config), streamed)


def use_after_close_is_refused(directory: Path) -> None:
    def close_early(step: int, chunks: list[Any], optimizer: Any) -> None:
        if step == 1:
            close(optimizer)
            close(optimizer)
            assert leftovers(directory) == []

    with pytest.raises(ClosedError, match="is closed"):
        run(SMALL, stream_config(directory), after_step=close_early)


# ---------------------------------------------------------------------- running them

ONE_RANK: list[Callable[[Path], None]] = [
    reload_from_model,
    reload_before_the_first_step,
    reload_from_state_dict,
    loaded_weights_survive_a_step_with_lr_0,
    changing_materialized_mains,
    norms_of_materialized_mains,
    materializing_nothing,
    attaching_in_mid_run,
    attaching_twice_is_refused,
    attaching_after_the_mains_were_released,
    a_failed_attach_leaves_the_optimizer_as_it_was,
    attaching_afterwards_works,
    failed_construction_leaves_nothing,
    an_exception_inside_the_block_undoes_it,
    a_step_that_fails,
    without_settings_nothing_happens,
    without_a_distributed_optimizer,
    layer_wise_optimizers_are_left_alone,
    an_option_of_a_fork_is_set_while_building,
    a_version_without_tests_is_rehearsed,
    offloading_and_restoring,
    offloading_inside_materialized_is_refused,
    a_chain_refuses_before_any_member_steps,
    reloading_while_offloaded,
    reloading_while_the_state_on_the_device_is_offloaded,
    lazy_construction_writes_nothing,
    two_directories,
    others_may_wrap_the_step,
    a_skipped_step_touches_nothing,
    use_after_close_is_refused,
]
# Here every rank owns a part of most parameters, and no part of some.
TWO_RANKS: list[Callable[[Path], None]] = [
    reload_from_model,
    changing_materialized_mains,
    offloading_and_restoring,
]
CASES = [(1, each.__name__) for each in ONE_RANK] + [(2, each.__name__) for each in TWO_RANKS]

QUICK = {case for place, case in enumerate(CASES) if has_turn(place)}


def run_scenarios(names: list[str], directory: str) -> dict[str, str]:
    """On a rank: each scenario in turn, and what it said where it failed."""
    outcomes = {}
    with groups_kept():
        resident(SMALL)
        for name in names:
            rank = torch.distributed.get_rank()
            own = Path(directory) / f"{name}-{rank}"
            own.mkdir(parents=True)
            try:
                globals()[name](own)
            except Exception:
                if torch.distributed.get_world_size() > 1:
                    raise  # the other ranks wait for this one, and only its end frees them
                outcomes[name] = traceback.format_exc()
            else:
                found = leftovers(own)
                outcomes[name] = f"left on disk: {found}" if found else ""
    return outcomes


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> dict[tuple[int, str], list[str]]:
    wanted = [case for case in CASES if case in QUICK or pytestconfig.getoption("slow")]
    found = {}
    for world_size in (1, 2):
        names = [name for size, name in wanted if size == world_size]
        directory = str(tmp_path_factory.mktemp(f"scenarios{world_size}"))
        ranks = run_forked_ranks(world_size, run_scenarios, names, directory, timeout_s=600)
        for name in names:
            found[world_size, name] = [rank[name] for rank in ranks]
    return found


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="{}-{}".format(*case), marks=marks_of(case not in QUICK))
        for case in CASES
    ],
)
def test_scenario(outcomes, case):
    for outcome in outcomes[case]:
        assert not outcome, outcome

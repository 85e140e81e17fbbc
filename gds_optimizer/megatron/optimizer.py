"""megatron-core's DistributedOptimizer with its state on disk.

A subclass that takes over only what touches main parameters or moments. Everything else (gradient
norm, clipping, loss scaling, the parameter all-gather, chaining) is Megatron's own code, which
sees main parameters of the usual shape that happen to have no values between steps.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gds_optimizer.engine import Engine
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.evicted import EvictedTensor, captured_copies, evict_
from gds_optimizer.frozen_check import FrozenCheck
from gds_optimizer.mapped_state import freeze_mapped, map_state
from gds_optimizer.megatron import checkpoint
from gds_optimizer.megatron.deferred import mains_deferred
from gds_optimizer.megatron.half_grads import HALF_DTYPES, half_grads_kept
from gds_optimizer.megatron.refusals import refuse_unsupported
from gds_optimizer.megatron.shards import NamedShard, named_shards
from gds_optimizer.plan import Binding
from gds_optimizer.runtime import Runtime
from gds_optimizer.stepper import install_step
from gds_optimizer.telemetry import PassStats

logger = logging.getLogger(__name__)

# A fork's option that leaves the mains unallocated; our placeholders do the same without it, but
# where it exists the fork's own code expects it to be set.
_FORK_DEFER_OPTION = "defer_main_param_initialization"


@contextlib.contextmanager
def _fork_defers(config: Any) -> Iterator[None]:
    if not hasattr(config, _FORK_DEFER_OPTION):
        yield
        return
    before = getattr(config, _FORK_DEFER_OPTION)
    setattr(config, _FORK_DEFER_OPTION, True)
    try:
        yield
    finally:
        setattr(config, _FORK_DEFER_OPTION, before)


@functools.lru_cache(maxsize=1)
def _warn_once(message: str) -> None:
    logger.warning(message)


@functools.lru_cache(maxsize=8)
def streamed_class(base: Any) -> Any:
    """The streamed subclass of a `DistributedOptimizer` class.

    A plain subclass, made where `base` is known: an object of `base` can then be turned into one
    of it in place, which a second base class would forbid.
    """

    class Streamed(base):
        """A `DistributedOptimizer` whose mains and moments are on disk between steps."""

        _runtime: Runtime | None = None
        _engine: Engine | None = None
        _is_loading = False
        _handed_out: Any = None  # tensors that a checkpoint is being loaded into

        # ------------------------------------------------------------------ construction

        def __init__(self, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            chunks = kwargs.get("model_chunks") or []
            params = [param for chunk in chunks for param in chunk.parameters()]
            refuse_unsupported(config, chunks[0].ddp_config if chunks else None, params)
            with _fork_defers(config):
                super().__init__(optimizer, config, *args, **kwargs)

        @classmethod
        def _build_model_and_main_param_groups(cls, *args: Any, **kwargs: Any) -> Any:
            with mains_deferred():
                return super()._build_model_and_main_param_groups(*args, **kwargs)

        def start_streaming(self, runtime: Runtime, engine: Engine) -> None:
            """From here on the inner optimizer's `step` goes through `engine`."""
            self._runtime, self._engine = runtime, engine
            self._binding_of = {
                shard.model_param: number for number, shard in enumerate(named_shards(self))
            }
            install_step(self.optimizer, engine.step)

        @property
        def engine(self) -> Engine | None:
            """What streams this optimizer's state; None where this rank owns no parameter."""
            return self._engine

        @property
        def last_step_stats(self) -> PassStats | None:
            """Bytes and seconds of the last pass over the state; None without an engine."""
            return self._engine.last_stats if self._engine is not None else None

        def close(self) -> None:
            """Wait for the last writes and remove the state from disk: the last call."""
            if self._engine is not None and self._runtime is not None:
                # The engine's step stays: it says that it is closed.
                self._runtime.close_engine(self._engine)

        # ------------------------------------------------------------------ the step

        def _copy_model_grads_to_main_grads(self) -> None:
            keep_half = self._engine is not None and any(
                buffer.grad_dtype in HALF_DTYPES for buffer in self.buffers
            )
            if keep_half and self.grad_scaler is not None:
                # Unscaling rounds every gradient in fp32 before the norm is taken, so the norm
                # cannot be had from the half-precision values.
                _warn_once(
                    "half-precision gradient buffers with a loss scale: Megatron converts all "
                    "gradients of this rank to fp32 (4 bytes a parameter) before the step"
                )
                keep_half = False
            with half_grads_kept() if keep_half else contextlib.nullcontext():
                super()._copy_model_grads_to_main_grads()

        def step_with_ready_grads(self) -> Any:
            # A chain steps its members in turn: none may refuse after another has stepped.
            if self._engine is not None and self._runtime is not None:
                self._runtime.prepare_step(self._engine)
            return super().step_with_ready_grads()

        def _copy_main_params_to_model_params(self) -> None:
            # The engine copied every streamed main while it was in a slot.
            with self._without_streamed_mains():
                super()._copy_main_params_to_model_params()

        @contextlib.contextmanager
        def _without_streamed_mains(self) -> Iterator[None]:
            if self._engine is None:
                yield
                return
            kept = self.shard_fp32_from_float16_groups
            self.shard_fp32_from_float16_groups: list[list[Any]] = [[] for _ in kept]
            try:
                yield
            finally:
                self.shard_fp32_from_float16_groups = kept

        # ------------------------------------------------------------------ reloading

        def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
            if self._engine is None:
                super()._copy_model_params_to_main_params(state_dict=state_dict)
                return
            with captured_copies() as sources:
                super()._copy_model_params_to_main_params(state_dict=state_dict)
            if state_dict is None:
                self._engine.take_mains_from_model()
            else:
                stats = self._engine.write_mains(sources)
                logger.info("rewrote the main parameters: %s", stats.describe())

        # ------------------------------------------------------------------ checkpoints

        def binding_of(self, model_param: Any) -> int | None:
            """Number of the binding of a model parameter; None if this rank owns none of it."""
            number: int | None = self._binding_of.get(model_param)
            return number

        def state_dict(self) -> Any:
            if self._engine is None:
                return super().state_dict()
            with checkpoint.first_scalars(self._engine):
                return super().state_dict()

        def load_state_dict(self, state_dict: Any) -> None:
            if self._engine is None:
                super().load_state_dict(state_dict)
                return
            checkpoint.warn_of_broken_writer(self, state_dict)
            with checkpoint.first_scalars(self._engine):
                super().load_state_dict(state_dict)
                self._engine.adopt_scalars()
            if "param_state" in state_dict:
                self._commit_loaded()

        def load_parameter_state_from_dp_zero(self, *args: Any, **kwargs: Any) -> None:
            # A chain calls it without `load_parameter_state`.
            super().load_parameter_state_from_dp_zero(*args, **kwargs)
            self._commit_loaded()

        def _commit_loaded(self) -> None:
            if self._engine is not None:
                checkpoint.commit_loaded(self._engine)
                self._handed_out = None

        def sharded_state_dict(
            self, model_sharded_state_dict: Any = None, is_loading: bool = False, **kwargs: Any
        ) -> Any:
            self._is_loading = is_loading
            async_save = self._runtime is not None and self._runtime.config.async_save
            try:
                if self._engine is not None and async_save and not is_loading:
                    # Reading it all now would hold training up: `FrozenCheck` does it meanwhile.
                    map_state(self._engine, verify=False)
                state_dict = super().sharded_state_dict(
                    model_sharded_state_dict or {}, is_loading, **kwargs
                )
            finally:
                self._is_loading = False
            if state_dict.get("param_state_sharding_type") == "fully_reshardable":
                state_dict[checkpoint.STREAMED_MARK] = True
            if self._engine is not None and async_save and not is_loading:
                freeze_mapped(self._engine)
                FrozenCheck(self._engine)
            return state_dict

        def sharded_param_state_fully_reshardable(
            self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
        ) -> Any:
            if self._engine is None:
                return {}  # owns nothing; its peers hand out theirs without a gather
            state = checkpoint.model_shaped_state(
                self, model_sharded_state_dict, is_loading=is_loading
            )
            if is_loading:
                self._handed_out = state
            return {
                number: {name: dict(by_key) for name, by_key in by_name.items()}
                for number, by_name in state.items()
            }

        def load_parameter_state_from_fully_reshardable(self, state_dict: Any) -> None:
            if self._engine is None:
                return
            if self._handed_out is None:
                raise UnsupportedError(
                    "the optimizer state to load was not asked of this optimizer: what is loaded "
                    "must come from its own sharded_state_dict(..., is_loading=True)"
                )
            checkpoint.take_loaded_rectangles(self._handed_out, state_dict)

        def _get_main_param_and_optimizer_states(self, model_param: Any) -> Any:
            if self._engine is None:
                return super()._get_main_param_and_optimizer_states(model_param)
            return checkpoint.shard_tensors(
                self._engine, self._binding_of[model_param], writable=self._is_loading
            )

        def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: Any) -> None:
            if self._engine is None:
                super()._set_main_param_and_optimizer_states(model_param, tensors)
                return
            checkpoint.set_shard_tensors(self._engine, self._binding_of[model_param], tensors)

        # ------------------------------------------------------------------ moving to the host

        def offload_to_cpu(self) -> None:
            """Free the slots: nothing else of this optimizer's state is on the device.

            Raises:
                UnsupportedError: inside `materialized`, which needs them when it ends.
            """
            if self._runtime is None:
                super().offload_to_cpu()
                return
            self._runtime.suspend()

        def restore_from_cpu(self) -> None:
            """Take the slots again."""
            if self._runtime is None:
                super().restore_from_cpu()
                return
            self._runtime.resume()

    Streamed.__name__ = Streamed.__qualname__ = f"Streamed{base.__name__}"
    return Streamed


def is_streamed(optimizer: Any) -> bool:
    """Whether an optimizer was made or changed by `streamed_class`."""
    return hasattr(type(optimizer), "start_streaming")


# ---------------------------------------------------------------------- bindings


def _model_shard(optimizer: Any, shard: NamedShard) -> torch.Tensor:
    """Where Megatron copies a main to: a part of the parameter buffer that is all-gathered."""
    where = optimizer._get_model_param_range_map(shard.model_param)["gbuf_world_in_bucket"]
    buffer_index, _, bucket_index = optimizer.model_param_gbuf_map[shard.model_param]
    param_data = optimizer.buffers[buffer_index].buckets[bucket_index].param_data
    part: torch.Tensor = param_data.view(-1)[where.start : where.end]
    return part


def _existing_state(
    optimizer: Any, shard: NamedShard, numel: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """State tensors of a shard that was resident until now, and its main if it still has one."""
    main = shard.main_param
    has_values = (
        main.numel() == numel and main.untyped_storage().nbytes() >= numel * main.element_size()
    )
    held = optimizer.optimizer.state.get(main, {})
    tensors = {
        key: value
        for key, value in held.items()
        if isinstance(value, torch.Tensor) and value.shape == main.shape and value.dim() > 0
    }
    return tensors, main.detach() if has_values and numel else None


def bind_shards(optimizer: Any, index: int) -> list[Binding]:
    """Bindings of all shards of a distributed optimizer.

    Mains that hold values (because the optimizer was built without streaming) are evicted here;
    their values and moments travel in the bindings' `initial` until they are written.

    Args:
        optimizer: a `DistributedOptimizer` with parameters on this rank.
        index: its place in the chain, for names.
    """
    bindings = []
    for shard in named_shards(optimizer, index):
        if shard.is_native_fp32:
            state, _ = _existing_state(optimizer, shard, shard.main_param.numel())
            bindings.append(Binding(shard.name, shard.main_param, None, state or None))
            continue
        name = f"main parameter {shard.name}"
        model = _model_shard(optimizer, shard)
        if isinstance(shard.main_param, EvictedTensor):
            shard.main_param.evicted_name = name
            bindings.append(Binding(shard.name, shard.main_param, model))
            continue
        initial, main = _existing_state(optimizer, shard, model.numel())
        if main is not None:
            initial["main"] = main
        evict_(shard.main_param, name=name, shape=model.shape, device=model.device)
        bindings.append(Binding(shard.name, shard.main_param, model, initial or None))
    return bindings


@contextlib.contextmanager
def materialized(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, the main parameters of `params` hold their values on the device.

    For code that reads or changes them between steps (qk-clip, norms of the parameters). What it
    changes is written back to disk on leaving. Takes 4 bytes an element of what is named, so name
    a few parameters at a time.

    Args:
        params: model parameters, or main parameters themselves. Those that are not streamed, and
            those whose shard is on other ranks, are left alone.
    """
    by_engine: dict[int, tuple[Engine, list[torch.Tensor]]] = {}
    for param in params:
        main = param if isinstance(param, EvictedTensor) else getattr(param, "main_param", None)
        engine = getattr(main, "streaming_engine", None)
        if engine is not None and main is not None and (live := engine()) is not None:
            by_engine.setdefault(id(live), (live, []))[1].append(main)
    with contextlib.ExitStack() as stack:
        for engine, mains in by_engine.values():
            stack.enter_context(engine.materialized(mains))
        yield

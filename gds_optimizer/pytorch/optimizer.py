"""A torch optimizer whose state is on disk: the same object, of a subclass of its class.

The engine steps a second optimizer object of the original class, the *shadow*, whose groups hold
the mains. What users, schedulers and loss scalers see and change is the original object, whose
groups hold the model's parameters as before; the options of its groups are taken over before every
step, and what the step changed in them is given back.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from gds_optimizer.config import AUTO_BUDGET, StreamConfig
from gds_optimizer.engine import Engine
from gds_optimizer.errors import ConfigError, UnsupportedError
from gds_optimizer.pytorch.parameters import Parameters
from gds_optimizer.pytorch.shape_check import check_shapes
from gds_optimizer.pytorch.state import load_torch_state, torch_state
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.snapshot import Placement, gather_by_rank
from gds_optimizer.snapshots import restore_snapshot, take_snapshot
from gds_optimizer.stepper import install_step
from gds_optimizer.telemetry import PassStats, show_log
from gds_optimizer.tiers import host_share

logger = logging.getLogger(__name__)

_AMP_MARK = "_step_supports_amp_scaling"
# What the original keeps to itself; everything else is an attribute of the shadow, too.
_OWN = ("param_groups", "state", "step", "_streaming", "_opt_called", "grad_scale", "found_inf")


class StreamedOptimizer(torch.optim.Optimizer):
    """What `stream` makes of an optimizer: all it could do before, and what is here.

    `with` closes it at the end of the block.
    """

    _streaming: Streaming | None = None

    def __enter__(self) -> StreamedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the last writes and remove the state from the drives. May be called again.

        Main parameters and moments are gone with it. The object is an ordinary optimizer again,
        with the options that its groups have now and without state: its next step starts anew.

        Raises:
            IoError: a write that went on behind the last step has failed; the files are removed
                all the same.
        """
        streaming, self._streaming = self._streaming, None
        if streaming is not None:
            streaming.end()

    @property
    def last_step_stats(self) -> PassStats | None:
        """Bytes and seconds of the last pass over the state; None after `close`."""
        return None if self._streaming is None else self._streaming.engine.last_stats

    @property
    def engine(self) -> Engine | None:
        """What streams the state; None after `close`."""
        return None if self._streaming is None else self._streaming.engine

    def reload_model_params(self) -> None:
        """Take the main parameters from the model: to be called after weights were loaded into it.

        Without it the next step overwrites half-precision parameters with what follows from their
        mains. Nothing is written now.
        """
        streaming = self._open("reload_model_params")
        streaming.params.follow()
        streaming.engine.take_mains_from_model()

    def snapshot(self, path: str | Path, *, keep_last: int | None = None) -> None:
        """Take a snapshot of the state by hard links; every rank calls it between two steps.

        Options of the groups and fp32 parameters are in it, half-precision ones follow from their
        mains; buffers of the model, schedulers and loss scalers are not.

        Args:
            path: directory for it, on the file system of the state.
            keep_last: remove older snapshots beside it until so many are left.

        Raises:
            SnapshotError, NoSpaceError, StepFailedError: see `take_snapshot`.
        """
        streaming = self._open("snapshot")
        streaming.params.follow()
        streaming.give_options()
        take_snapshot(
            {streaming.name: streaming.engine},
            Path(path),
            placement=_placement(streaming.name),
            keep_last=keep_last,
        )

    def restore(self, path: str | Path) -> int:
        """Make a snapshot the state, options and parameters that are streamed.

        Every rank calls it; the number of ranks must be that of when it was taken.

        Returns:
            The step that it was taken after.

        Raises:
            SnapshotError: it is incomplete, damaged or does not fit.
        """
        streaming = self._open("restore")
        streaming.params.follow()
        streaming.give_options()
        step = restore_snapshot(
            {streaming.name: streaming.engine},
            Path(path),
            placement=_placement(streaming.name),
        )
        streaming.take_options()
        return step

    # ------------------------------------------------------------------ torch's own methods

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; refused while the state is streamed.

        Raises:
            UnsupportedError
        """
        if self._streaming is not None:
            raise UnsupportedError(
                "add_param_group on an optimizer whose state is streamed: the layout of its files "
                "is fixed at setup, so build the optimizer with all groups before it is streamed"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """In torch's own format, with tensors that are mappings of the files.

        Moments have the parameter's shape. The state of a half-precision parameter has its fp32
        main parameter, too, as "main". The tensors are on the CPU and good until the next step;
        storing into one kills the process.

        Raises:
            StepFailedError: the state is torn.
            NoSpaceError: there is no room for the decoded values of what is not kept in fp32.
        """
        streaming = self._streaming
        if streaming is None:
            return super().state_dict()
        streaming.params.follow()
        streaming.give_options()
        kept = self.state
        self.state = cast(Any, torch_state(streaming.engine, streaming.params))
        try:
            return super().state_dict()
        finally:
            self.state = kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, of a streamed or of a plain optimizer, shard by shard.

        Half-precision parameters are set to what follows from their mains ("main").

        Raises:
            SnapshotError: it does not fit; the state is what it was.
            StepFailedError: the state that is to be replaced is torn.
        """
        streaming = self._streaming
        if streaming is None:
            super().load_state_dict(state_dict)
            return
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        streaming.params.follow()
        streaming.give_options()
        load_torch_state(streaming.engine, streaming.params, state_dict)
        streaming.take_options()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _open(self, what: str) -> Streaming:
        if self._streaming is None:
            raise UnsupportedError(f"{what} after close(): the state is not streamed any more")
        return self._streaming


class Streaming:
    """What goes on behind one streamed optimizer.

    Args:
        optimizer: the original object.
        shadow: what the engine steps.
        params: of the original.
        runtime: with one engine, for the shadow.
        name: of its directory.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shadow: torch.optim.Optimizer,
        params: Parameters,
        runtime: Runtime,
        name: str,
    ) -> None:
        self.optimizer, self.shadow, self.params = optimizer, shadow, params
        self.runtime, self.engine, self.name = runtime, runtime.engines[0], name
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """From here on the original's `step` goes through the engine. Cannot fail."""
        optimizer: Any = self.optimizer
        before = optimizer.__dict__.get("step")
        self._undo.append(install_step(optimizer, self._step))
        if hasattr(before, "_wrapped_by_lr_sched"):
            # A scheduler that was built earlier looks for its mark, and warns where it is gone.
            optimizer.step.__func__._wrapped_by_lr_sched = True
        supported = optimizer.__dict__.get(_AMP_MARK)
        self._undo.append(functools.partial(_put_back, optimizer, _AMP_MARK, supported))
        # Fused kernels unscale and skip by themselves, which they cannot do here. A `GradScaler`
        # unscales in place instead, except fp16 gradients, which `_step` then does.
        has_fp16 = any(param.dtype is torch.float16 for param in self.params.params)
        setattr(optimizer, _AMP_MARK, has_fp16)
        optimizer.state = _StateView(self.params, self.shadow)
        optimizer._streaming = self

    def end(self) -> None:
        """Undo `begin`, and close the engine."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.optimizer.state = defaultdict(dict)
        self.runtime.close_engine(self.engine)

    def give_options(self) -> None:
        """The shadow gets the options of the original's groups, and its attributes."""
        for own, other in zip(self.optimizer.param_groups, self.shadow.param_groups, strict=True):
            other.update({key: value for key, value in own.items() if key != "params"})
        self.shadow.__dict__.update(_attributes(self.optimizer))

    def take_options(self) -> None:
        """What a step has changed in options and attributes is the original's, too."""
        for own, other in zip(self.optimizer.param_groups, self.shadow.param_groups, strict=True):
            own.update({key: value for key, value in other.items() if key != "params"})
        self.optimizer.__dict__.update(_attributes(self.shadow))

    def _step(self) -> None:
        optimizer: Any = self.optimizer
        optimizer._opt_called = True
        self.engine.check_usable()
        self.params.check_groups(optimizer)
        self.params.follow()
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return
        scale = getattr(optimizer, "grad_scale", None)
        # As `GradScaler.unscale_` does it.
        factor = None if scale is None else scale.double().reciprocal().float()
        self.give_options()
        try:
            self.params.take_gradients(factor)
            self.engine.step()
        finally:
            self.params.drop_gradients()
        self.take_options()


class _StateView(Mapping[torch.Tensor, Any]):
    """`optimizer.state` between steps: counters by parameter; moments are on disk, and raise."""

    def __init__(self, params: Parameters, shadow: torch.optim.Optimizer) -> None:
        bindings = zip(params.params, params.bindings, strict=True)
        self._mains = {param: binding.main for param, binding in bindings}
        self._shadow = shadow

    def __getitem__(self, param: torch.Tensor) -> Any:
        held = self._shadow.state.get(self._mains[param])
        if held is None:
            raise KeyError(param)
        return held

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (param for param, main in self._mains.items() if main in self._shadow.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        key: value
        for key, value in optimizer.__dict__.items()
        if key not in _OWN and key != _AMP_MARK
    }


def _put_back(target: Any, name: str, value: Any) -> None:
    if value is None:
        target.__dict__.pop(name, None)
    else:
        setattr(target, name, value)


@functools.lru_cache(maxsize=32)
def _streamed_class(base: type[torch.optim.Optimizer]) -> type[StreamedOptimizer]:
    made = type(f"Streamed{base.__name__}", (StreamedOptimizer, base), {"streamed_base": base})
    return cast(type[StreamedOptimizer], made)


def _shadow_of(
    optimizer: torch.optim.Optimizer, base: type[torch.optim.Optimizer], params: Parameters
) -> torch.optim.Optimizer:
    """An optimizer of the same class, options and attributes over the mains, with their state."""
    shadow = object.__new__(base)
    shadow.__dict__.update(_attributes(optimizer))
    shadow.param_groups = [
        {**group, "params": mains}
        for group, mains in zip(optimizer.param_groups, params.mains_by_group(), strict=True)
    ]
    shadow.state = defaultdict(dict)
    for param, binding in zip(params.params, params.bindings, strict=True):
        if param in optimizer.state:
            shadow.state[binding.main] = dict(optimizer.state[param])
    return shadow


def _refuse_optimizer(optimizer: Any, config: Any) -> None:
    if not isinstance(config, StreamConfig):
        raise ConfigError(
            f"config is {config!r}, wanted StreamConfig(directories=(...,)), with a directory on "
            "each drive"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is no torch.optim.Optimizer: stream the one inside it"
        )
    if isinstance(optimizer, StreamedOptimizer) and optimizer._streaming is not None:
        raise UnsupportedError("the optimizer is streamed already")
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__} wraps another optimizer ({name}, of the class "
                f"{type(value).__name__}) and does not step by itself: stream that one, before it "
                "is wrapped"
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError(
            "the optimizer is differentiable=True: gradients cannot flow through state on disk"
        )


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def _placement(name: str) -> Placement:
    if not (dist.is_available() and dist.is_initialized()):
        return Placement(rank=_rank(), coordinates={name: {"replica": _rank()}})
    # Every rank has state of its own for all parameters: none is a part of another's.
    return Placement(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        coordinates={name: {"replica": dist.get_rank()}},
        gather=gather_by_rank,
    )


def _with_host_budget(config: StreamConfig, rank: int) -> StreamConfig:
    if config.is_given("host_budget"):
        return config
    logger.info(
        "rank %d: no host_budget was given: buckets take up to half of the host memory that is "
        "available to this rank, %.2f GiB, before the drives (host_budget=0 takes none)",
        rank,
        host_share() / 2 / 2**30,
    )
    return replace(config, host_budget=AUTO_BUDGET)


def stream(
    optimizer: torch.optim.Optimizer,
    config: StreamConfig,
    *,
    model: torch.nn.Module | None = None,
    name: str = "opt0",
) -> StreamedOptimizer:
    """Stream the state of an optimizer; to be called once the model is where it will be trained.

    Half-precision parameters are from now on stepped through fp32 main parameters, which start
    from them and exist in bucket files only; their gradients are converted bucket by bucket.
    Parameters in fp32 stay where they are. State that the optimizer holds already continues from
    where it is, and its memory is freed.

    Args:
        optimizer: any elementwise one. It is changed in place, so that schedulers and loss scalers
            that hold it go on working.
        config: the settings. Without a `host_budget`, buckets take up to half of the host memory
            that is available before they go to the drives.
        model: whose parameter names messages and files then use.
        name: of its directory below each rank's: a second optimizer in the same directories of
            `config` needs another one.

    Returns:
        `optimizer`, with `close`, `snapshot` and more.

    Raises:
        UnsupportedError: the optimizer or a parameter cannot be streamed; says which and why.
        GdsOptimizerError: setting up failed; the optimizer is as it was, and nothing stays behind.
    """
    base: Any = type(optimizer)
    _refuse_optimizer(optimizer, config)
    if isinstance(optimizer, StreamedOptimizer):
        base = base.streamed_base
    show_log()
    rank = _rank()
    params = Parameters(optimizer, model)
    shadow = _shadow_of(optimizer, base, params)
    for dtype in {binding.main.dtype for binding in params.bindings}:
        check_shapes(shadow, dtype, params.device)
    runtime = Runtime.build(
        [Part(shadow, params.bindings, name)],
        _with_host_budget(config, rank),
        device=params.device,
        rank=rank,
        eager=config.init != "lazy",
    )
    optimizer.__class__ = cast(Any, _streamed_class(base))
    Streaming(optimizer, shadow, params, runtime, name).begin()
    return cast(StreamedOptimizer, optimizer)

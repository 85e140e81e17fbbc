"""Run megatron-core where there is no GPU: the one place that knows how.

megatron-core creates its small tensors with `device="cuda"`, sorts parameters by type strings such
as `torch.cuda.BFloat16Tensor`, asks `torch.cuda` for a current device, and keeps a CUDA random
number tracker. `cuda_on_cpu` answers all of that with CPU tensors, so that the real model, buffers
and distributed optimizer run with the gloo backend. No file of megatron-core is changed, and
leaving the context puts every attribute back.

Scope: training steps and checkpoints with all dropouts at 0 and weights made on the CPU
(`use_cpu_initialization`). Not covered: CUDA streams of the caller's own, CUDA graphs, pinned
memory, activation recomputation.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gds_optimizer.errors import UnsupportedError

_MISSING = object()


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of a module or class, and put back what was there, or nothing, on exit.

    The old values are read from the owner's own dictionary, so that an inherited attribute is
    uncovered again, not copied.
    """
    before = {name: vars(owner).get(name, _MISSING) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is not _MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop warnings that say nothing about this package or the user's settings.

    megatron-core warns of every fallback for Transformer Engine and apex, which is what a run on a
    CPU wants, of its own deprecations, and it calls deprecated functions of torch. Everybody
    else's warnings come through.
    """
    logger = logging.getLogger("megatron")
    level = logger.level
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        # These are reported for torch's or our own line, not for megatron-core's.
        for category in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", r"`torch\.[\w.]+` is deprecated", category)
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def import_megatron() -> None:
    """Import the parts of megatron-core that are used here, quietly.

    Raises:
        UnsupportedError: megatron-core is not installed, or one of its own imports fails.
    """
    try:
        with quiet():
            import megatron.core.distributed
            import megatron.core.models.gpt.gpt_layer_specs
            import megatron.core.optimizer
            import megatron.core.pipeline_parallel
            import megatron.core.transformer.moe.moe_utils  # noqa: F401 - all for the side effect
    except ImportError as error:
        raise UnsupportedError(
            f"megatron-core cannot be imported ({error}): install megatron-core and what it needs"
        ) from error


@contextlib.contextmanager
def missing_names() -> Iterator[None]:
    """Define the names that megatron-core uses but leaves unbound without Transformer Engine.

    0.16.1 asks `te_general_gemm is not None` in the gating of every mixture-of-experts router and
    binds the name only where Transformer Engine is installed. This has nothing to do with the
    device: a GPU without Transformer Engine needs it as well.
    """
    import_megatron()
    from megatron.core.transformer.moe import moe_utils

    with contextlib.ExitStack() as stack:
        if not hasattr(moe_utils, "te_general_gemm"):
            stack.enter_context(replaced(moe_utils, te_general_gemm=None))
        yield


class _IdleStream:
    """What `torch.cuda.current_stream()` returns on a CPU: always finished, orders nothing."""

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _NoRngTracker:
    """Stands in for the tracker of CUDA random number states: forking it changes nothing.

    Attention and hidden dropout fork the tracker even at probability 0, so one must exist.
    """

    def is_initialized(self) -> bool:
        return True

    def reset(self) -> None:
        pass

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        pass

    def add(self, name: str, seed: int) -> None:
        pass

    def fork(self, name: str | None = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _cpu_for_cuda(device: Any) -> Any:
    """The CPU for any spelling of a CUDA device, everything else unchanged."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"  # a bare index means a device of the accelerator
    return device


_NAME_DEVICES = frozenset((torch.Tensor.cuda, torch.Tensor.to, torch.Tensor.type))
"""Methods that may name a device other than by `device=`."""


class _CudaNamesCpu(TorchFunctionMode):
    """Torch calls that name a CUDA device happen on the CPU; type strings say `torch.cuda`.

    Autograd runs backward functions and gradient hooks outside of all modes. megatron-core's name
    no device there but `torch.cuda.current_device()`.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Thousands of calls a step come here, and hardly any names a device.
        if kwargs is None:
            kwargs = {}
        elif "device" in kwargs:
            kwargs = {**kwargs, "device": _cpu_for_cuda(kwargs["device"])}
        if func not in _NAME_DEVICES:
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and not isinstance(args[1], torch.Tensor):
            args = (args[0], _cpu_for_cuda(args[1]), *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


_lock = threading.RLock()
_installations: list[TorchFunctionMode] = []  # none or one; guarded by the lock


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Let megatron-core run on the CPU inside this context.

    Re-entrant: entering it again in the same thread does nothing. What is installed is partly
    global (functions of `torch.cuda`) and partly the thread's own (torch's function modes), so
    only one thread may have it at a time.

    Raises:
        UnsupportedError: there is a GPU (use it: choose with `torch.cuda.is_available()`),
            another thread is inside, or megatron-core cannot be imported.
    """
    if torch.cuda.is_available():
        raise UnsupportedError("cuda_on_cpu: this machine has a GPU, so run megatron-core on it")
    if not _lock.acquire(blocking=False):
        raise UnsupportedError("cuda_on_cpu: another thread of this process is using it")
    try:
        if _installations:
            yield
        else:
            with _installed() as mode:
                _installations.append(mode)
                try:
                    yield
                finally:
                    _installations.clear()
    finally:
        _lock.release()


@contextlib.contextmanager
def _installed() -> Iterator[TorchFunctionMode]:
    import_megatron()
    from megatron.core.tensor_parallel import random as megatron_random

    stream = _IdleStream()
    with (
        replaced(
            torch.cuda,
            # Used as `device=torch.cuda.current_device()`, also where the mode is not active.
            current_device=lambda: "cpu",
            current_stream=lambda device=None: stream,
            default_stream=lambda device=None: stream,
            synchronize=lambda device=None: None,
            empty_cache=lambda: None,
            # Without a GPU torch would queue the call for ever.
            manual_seed=lambda seed: None,
        ),
        replaced(
            megatron_random,
            _CUDA_RNG_STATE_TRACKER=_NoRngTracker(),
            _CUDA_RNG_STATE_TRACKER_INITIALIZED=True,
            initialize_rng_tracker=lambda *args, **kwargs: None,
        ),
        _CudaNamesCpu() as mode,
    ):
        yield mode

"""Combinations that would give wrong results, refused by the flag that turns them on.

Everything else is let through: an unrelated option is no reason to stop a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gds_optimizer.errors import UnsupportedError

_OPTIMIZER_CONFIG = {
    "use_precision_aware_optimizer": (
        "--use-precision-aware-optimizer",
        "the optimizer then keeps the main parameters itself, in a form that cannot be cut",
    ),
    "optimizer_cpu_offload": (
        "--optimizer-cpu-offload",
        "it moves the same state to host memory: use one or the other",
    ),
    "reuse_grad_buf_for_mxfp8_param_ag": (
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "it copies the main parameters outside the optimizer step",
    ),
    "optimizer_cuda_graph": (
        "--optimizer-cuda-graph",
        "a captured step cannot wait for the disk",
    ),
    # Options that exist in forks only.
    "offload_optimizer_states": (
        "--offload-optimizer-states",
        "it moves the same state to host memory: use one or the other",
    ),
    "chunked_optimizer_state_offload": (
        "--chunked-optimizer-state-offload",
        "it moves the same state to host memory: use one or the other",
    ),
    "low_memory_resume": (
        "--low-memory-resume",
        "it loads the state into tensors that do not exist here",
    ),
}
_DDP_CONFIG = {
    "use_megatron_fsdp": (
        "--use-megatron-fsdp",
        "it shards parameters in a way of its own, without main parameter shards",
    ),
}


def _quantized_kinds(params: Sequence[torch.nn.Parameter]) -> Iterator[tuple[str, str]]:
    """Flag and reason for each kind of quantized parameter among `params`."""
    from megatron.core import fp8_utils

    reason = "quantized parameters are made from the whole main parameters at once"
    if any(fp8_utils.is_float8tensor(param) for param in params):
        yield "--fp8-param-gather", reason
    try:
        from megatron.core import fp4_utils
    except ImportError:
        return
    is_nvfp4tensor = getattr(fp4_utils, "is_nvfp4tensor", None)
    if is_nvfp4tensor is not None and any(is_nvfp4tensor(param) for param in params):
        yield "--fp4-param-gather", reason


def refuse_unsupported(
    optimizer_config: Any, ddp_config: Any, params: Sequence[torch.nn.Parameter]
) -> None:
    """Refuse what streaming would get wrong.

    Args:
        optimizer_config: megatron-core's `OptimizerConfig`.
        ddp_config: its `DistributedDataParallelConfig`.
        params: the model's parameters.

    Raises:
        UnsupportedError: names every flag that has to go, and why.
    """
    found = []
    for config, table in ((optimizer_config, _OPTIMIZER_CONFIG), (ddp_config, _DDP_CONFIG)):
        found += [entry for name, entry in table.items() if getattr(config, name, False)]
    found += _quantized_kinds(params)
    if found:
        reasons = "; ".join(f"{flag} ({why})" for flag, why in found)
        raise UnsupportedError(
            f"--stream-optimizer-state-to-disk does not go with {reasons}: drop one of them"
        )

"""Main parameters that are never built: placeholders in the place of fp32 copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gds_optimizer.evicted import evicted_like
from gds_optimizer.megatron.half_grads import HALF_DTYPES


class _DeferMains(TorchFunctionMode):
    """`shard.clone().float()` of a half-precision shard gives a placeholder.

    Megatron clones before it converts, so both calls are answered.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.clone, torch.Tensor.float):
            shard = args[0]
            if shard.dim() == 1 and shard.dtype in HALF_DTYPES:
                dtype = torch.float32 if func is torch.Tensor.float else shard.dtype
                return evicted_like(shard, dtype=dtype, name="a main parameter")
        return func(*args, **(kwargs or {}))


@contextmanager
def mains_deferred() -> Iterator[None]:
    """Inside, a framework's fp32 copies of flat half-precision shards take no memory."""
    with _DeferMains():
        yield

"""Streaming for megatron-core: the only part of this package that imports it."""

import importlib

from gds_optimizer.config import StreamConfig, add_arguments

# megatron-core takes seconds to import; the flags alone do not need it.
_LAZY = {
    "attach": "setup",
    "streamed_optimizer": "setup",
    "materialized": "optimizer",
    "streamed_training": "training",
    "snapshot": "snapshots",
    "restore": "snapshots",
    "copy_snapshot": "snapshots",
}

__all__ = [
    "StreamConfig",
    "add_arguments",
    "attach",
    "copy_snapshot",
    "materialized",
    "restore",
    "snapshot",
    "streamed_optimizer",
    "streamed_training",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

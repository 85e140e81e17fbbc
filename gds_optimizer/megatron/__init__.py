"""Streaming for megatron-core: the only part of this package that imports it."""

from gds_optimizer.config import StreamConfig, add_arguments

__all__ = ["StreamConfig", "add_arguments", "attach", "materialized", "streamed_optimizer"]


def __getattr__(name: str) -> object:
    # megatron-core takes seconds to import; the flags alone do not need it.
    if name in ("attach", "streamed_optimizer"):
        from gds_optimizer.megatron import setup

        return getattr(setup, name)
    if name == "materialized":
        from gds_optimizer.megatron.optimizer import materialized

        return materialized
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

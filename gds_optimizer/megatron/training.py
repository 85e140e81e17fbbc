"""Streaming for programs built on `megatron.training`, without a change to them.

    torchrun --nproc-per-node 8 -m gds_optimizer.megatron pretrain_gpt.py ... \\
        --stream-optimizer-state-to-disk --stream-optimizer-state-dir /nvme0 /nvme1

or, in a program of one's own, `with streamed_training(): pretrain(...)`. Without the first flag
nothing is different.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gds_optimizer.config import StreamConfig, add_arguments
from gds_optimizer.errors import ConfigError
from gds_optimizer.megatron.cpu import replaced


@contextlib.contextmanager
def streamed_training() -> Iterator[None]:
    """Inside, `megatron.training` knows our flags and builds the optimizers that they ask for.

    Names are replaced until the block is left: `parse_args`, and `get_megatron_optimizer` where
    `megatron.training.training` calls it. Flags that cannot work are refused while they are
    parsed, before a model is built.
    """
    from megatron.training import arguments, initialize, training
    from megatron.training.global_vars import get_args

    from gds_optimizer.megatron.setup import streamed_optimizer

    parse_args = arguments.parse_args
    get_megatron_optimizer = training.get_megatron_optimizer

    def parse(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        def provider(parser: Any) -> Any:
            return add_arguments(extra_args_provider(parser) if extra_args_provider else parser)

        parsed = parse_args(provider, *args, **kwargs)
        StreamConfig.from_args(parsed)
        return parsed

    def get_optimizer(*args: Any, **kwargs: Any) -> Any:
        with streamed_optimizer(StreamConfig.from_args(get_args())):
            return get_megatron_optimizer(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for module in (arguments, initialize):  # older versions import the function by name
            if hasattr(module, "parse_args"):
                stack.enter_context(replaced(module, parse_args=parse))
        stack.enter_context(replaced(training, get_megatron_optimizer=get_optimizer))
        yield


def main(arguments: Sequence[str]) -> None:
    """Run a training program (first argument) with its own arguments (the rest)."""
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            "no program was named: python -m gds_optimizer.megatron PROGRAM.py [ARGUMENT ...]"
        )
    sys.argv = list(arguments)
    # As if the program had been started itself: its own directory first on the path.
    sys.path[0] = str(Path(arguments[0]).absolute().parent)
    with streamed_training():
        runpy.run_path(arguments[0], run_name="__main__")

"""Process groups for a training run, and none left when it is over.

One process can run any number of trainings one after another, each with its own split of the ranks.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gds_optimizer.errors import ConfigError
from gds_optimizer.megatron.cpu import import_megatron, replaced

if TYPE_CHECKING:
    from gds_optimizer.megatron.tiny_gpt import TinyGptConfig

_groups: list[dist.ProcessGroup] = []  # what `initialize_distributed` had megatron-core make


def process_group_backend() -> str:
    """Backends for `init_process_group`: NCCL for a GPU's tensors, gloo for the CPU's."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def initialize_distributed(config: TinyGptConfig) -> None:
    """Make megatron-core's process groups for `config`, and torch's first if there are none.

    Without a process group, `RANK`, `WORLD_SIZE` and the rendezvous come from the environment, as
    torchrun sets it; without these the process is alone.

    Raises:
        ConfigError: the number of ranks is no multiple of what `config` wants.
    """
    import_megatron()
    from megatron.core import parallel_state

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(process_group_backend())
        else:
            dist.init_process_group(
                process_group_backend(), store=dist.HashStore(), rank=0, world_size=1
            )
    model_parallel = config.tensor_parallel * config.pipeline_parallel
    if dist.get_world_size() % model_parallel:
        raise ConfigError(
            f"the run has {dist.get_world_size()} ranks, wanted a multiple of tensor_parallel "
            f"times pipeline_parallel ({model_parallel})"
        )
    new_group = dist.new_group

    def recorded(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup):  # ranks outside the group get something else
            _groups.append(group)
        return group

    with replaced(dist, new_group=recorded):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            expert_model_parallel_size=config.expert_parallel,
        )


def destroy(*, process_group: bool = True) -> None:
    """Undo `initialize_distributed`.

    megatron-core only forgets its groups, each of which keeps threads and sockets, so they are
    destroyed here: a process can train any number of times. All ranks should be done.

    Args:
        process_group: destroy torch's default process group, and thereby all others, too.
    """
    from megatron.core import parallel_state

    if dist.is_initialized():
        # Before megatron-core, which destroys a few that are still there.
        for group in [None] if process_group else _groups:
            dist.destroy_process_group(group)
    _groups.clear()
    parallel_state.destroy_model_parallel()
    gc.collect()  # models and optimizers are in reference cycles, and hold groups


@contextlib.contextmanager
def process_groups(config: TinyGptConfig) -> Iterator[None]:
    """`initialize_distributed` and back to what there was before, with or without process group."""
    had_process_group = dist.is_initialized()
    try:
        initialize_distributed(config)
        yield
        dist.barrier()  # a rank that is ahead must not hang up on the others
    finally:
        destroy(process_group=not had_process_group)

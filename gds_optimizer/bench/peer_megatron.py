"""A streamer of one's own that takes over Megatron's distributed optimizer, as a peer.

Its file has `setup_optimizer_state_streaming(args, optimizer)`, which frameworks call once the
optimizer is there. It gets one of a single rank, whose parameters are all bf16 and whose gradient
buffer is fp32, and arguments that say where its files belong.
"""

from __future__ import annotations

import contextlib
import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from gds_optimizer.bench.peer_recipes import HYPER_PARAMETERS, Peer, Setting, Tensors
from gds_optimizer.megatron.cpu import cuda_on_cpu, import_megatron
from gds_optimizer.megatron.process_groups import process_groups

_CHUNK_MIB = 64


class _Flat(torch.nn.Module):
    """Parameters and no arithmetic. They have two dimensions: Megatron decays no vectors."""

    def __init__(self, params: Tensors) -> None:
        super().__init__()
        self.params = torch.nn.ParameterList(
            torch.nn.Parameter(param.detach().view(1, -1)) for param in params
        )


def arguments_for(setting: Setting) -> Namespace:
    """What a framework's parser would have made of the flags that name a directory.

    Args:
        setting: whose directory is meant.
    """
    return Namespace(
        stream_optimizer_state_to_disk=True,
        stream_optimizer_state_dir=[str(setting.directory)],
        stream_optimizer_state_moment_dtype="fp32",
        offload_train_disk_dir=str(setting.directory),
        offload_train_disk_chunk_mb=_CHUNK_MIB,
        no_load_optim=False,
        load=None,
        pretrained_checkpoint=None,
    )


def build(setup: Callable[..., Any], params: Tensors, grads: Tensors, setting: Setting) -> Peer:
    """Have `setup` take over an optimizer of these parameters.

    Args:
        setup: `setup_optimizer_state_streaming` of the streamer's file. It gets `role="actor"` too
            where it has such a parameter.
        params: bf16, 1-D. They become views of Megatron's parameter buffer.
        grads: copied into Megatron's gradient buffer once; steps leave them there.
        setting: the directory, and the device.

    Returns:
        A peer whose `step` raises RuntimeError where the optimizer skips one.
    """
    import_megatron()
    from gds_optimizer.megatron.tiny_gpt import TinyGptConfig

    with contextlib.ExitStack() as stack:
        if setting.device.type == "cpu":
            stack.enter_context(cuda_on_cpu())
        stack.enter_context(process_groups(TinyGptConfig()))
        chunk, optimizer = _optimizer(params)
        for param, own, grad in zip(params, chunk.module.params, grads, strict=True):
            param.data = own.data.view(-1)  # Megatron has moved them
            own.main_grad.view(-1).copy_(grad)
        has_role = "role" in inspect.signature(setup).parameters
        setup(arguments_for(setting), optimizer, **({"role": "actor"} if has_role else {}))
        undo = stack.pop_all()

    def step() -> None:
        is_done, _, _ = optimizer.step()
        if not is_done:
            raise RuntimeError("the optimizer has skipped a step")

    return Peer(step, lambda: params, undo.close, "behind Megatron's DistributedOptimizer")


def _optimizer(params: Tensors) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    chunk = DistributedDataParallel(
        TransformerConfig(
            num_layers=1,
            hidden_size=64,
            num_attention_heads=1,
            bf16=True,
            params_dtype=torch.bfloat16,
        ),
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        _Flat(params),
    )
    beta1, beta2 = HYPER_PARAMETERS["betas"]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=HYPER_PARAMETERS["lr"],
            min_lr=HYPER_PARAMETERS["lr"],
            weight_decay=HYPER_PARAMETERS["weight_decay"],
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_eps=HYPER_PARAMETERS["eps"],
            clip_grad=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        [chunk],
    )
    return chunk, optimizer

"""The pieces of the small training run that are pure megatron-core: model, optimizer, one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from gds_optimizer.megatron.tiny_gpt import TinyGptConfig


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _transformer_config(config: TinyGptConfig) -> TransformerConfig:
    options: dict[str, Any] = {}
    if config.swiglu:
        options |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if config.experts:
        options |= {
            "num_moe_experts": config.experts,
            "moe_router_topk": min(2, config.experts),
            "moe_ffn_hidden_size": 2 * config.hidden,
            "expert_model_parallel_size": config.expert_parallel,
            # All-to-all wants CUDA streams of its own.
            "moe_token_dispatcher_type": "allgather",
            "moe_router_dtype": "fp32" if config.mixed_dtype else None,
        }
    return TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        bf16=not config.fp16,
        fp16=config.fp16,
        params_dtype=config.dtype,
        pipeline_dtype=config.dtype,
        # The same weights whatever the device and the number of tensor-parallel ranks.
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=not (config.swiglu or config.experts),
        # Fused kernels come from extensions or a compiler; none is needed here.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        deterministic_mode=True,
        **options,
    )


def build_model(config: TinyGptConfig) -> list[DistributedDataParallel]:
    """The model of this rank's pipeline stage, wrapped for data parallelism: one chunk."""
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed)
    transformer_config = _transformer_config(config)
    model = GPTModel(
        config=transformer_config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=config.experts or None),
        vocab_size=config.vocab,
        max_sequence_length=config.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.tied_embeddings,
    )
    model = Float16Module(transformer_config, model.to(_device()))
    if config.mixed_dtype:
        _keep_small_params_fp32(model, config.dtype)
    for name, param in model.named_parameters():
        if ".experts." in name:
            # With one expert-parallel rank megatron-core counts experts as dense parameters.
            # Marked like this they get gradient buffers and an optimizer of their own, as on many.
            param.allreduce = False
        if any(text in name for text in config.frozen):
            param.requires_grad = False
    chunk = DistributedDataParallel(
        transformer_config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=config.grad_reduce_in_fp32,
            overlap_grad_reduce=config.overlap,
            overlap_param_gather=config.overlap,
            bucket_size=config.ddp_bucket_size,
        ),
        model,
    )
    chunk.broadcast_params()
    return [chunk]


def _keep_small_params_fp32(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give norms and routers fp32 parameters while activations stay in `dtype`.

    megatron-core's router casts its input itself. torch's norms want one dtype for input and
    weights, so theirs is cast on the way in and out.
    """

    def cast_in(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.float() if torch.is_tensor(x) else x for x in inputs)

    def cast_out(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(dtype)

    for module in model.modules():
        if isinstance(module, Router):
            module.float()
        elif isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
            module.float()
            module.register_forward_pre_hook(cast_in)
            module.register_forward_hook(cast_out)


def build_optimizer(config: TinyGptConfig, chunks: Sequence[DistributedDataParallel]) -> Any:
    """The optimizer (always a chain), and what the pipeline schedule must know about it."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
            bf16=not config.fp16,
            fp16=config.fp16,
            params_dtype=config.dtype,
            loss_scale=config.loss_scale,
            initial_loss_scale=config.initial_loss_scale,
            min_loss_scale=1.0,
            loss_scale_window=4,
            hysteresis=1,
            use_distributed_optimizer=True,
            overlap_param_gather=config.overlap,
            log_num_zeros_in_grad=True,
        ),
        list(chunks),
    )
    for chunk in chunks:
        chunk.config.grad_scale_func = optimizer.scale_loss
        chunk.config.finalize_model_grads_func = finalize_model_grads
        if config.overlap:
            chunk.config.no_sync_func = chunk.no_sync
    return optimizer


def _batch(config: TinyGptConfig, step: int) -> torch.Tensor:
    """Tokens of this rank and step, [micro_batch, sequence_length + 1], int64.

    Each sequence walks through the vocabulary with a fixed rule from a random start, so that
    there is something to learn. Tensor- and pipeline-parallel peers get the same tokens.
    """
    data_rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(config.seed + 100_003 * step + data_rank)
    token = torch.randint(0, config.vocab, (config.micro_batch,), generator=generator)
    tokens = []
    for _ in range(config.sequence_length + 1):
        tokens.append(token)
        token = (5 * token + 3) % config.vocab
    return torch.stack(tokens, dim=1).to(_device())


def forward_backward(
    config: TinyGptConfig, chunks: Sequence[DistributedDataParallel], optimizer: Any, step: int
) -> torch.Tensor | None:
    """Fill the gradient buffers for one step.

    Returns:
        This rank's mean loss, a 0-D fp32 tensor; None on all but the last pipeline stage.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()

    def forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        tokens = next(batches)
        length = config.sequence_length
        positions = torch.arange(length, device=tokens.device).expand(config.micro_batch, -1)
        shape = (length, length)
        future = torch.ones(shape, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        labels = tokens[:, 1:].contiguous()
        output = model(tokens[:, :-1].contiguous(), positions, future, labels=labels)

        def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = losses.float().mean()
            return loss, loss.detach().clone()

        return output, loss_function

    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([_batch(config, step)]),
        model=list(chunks),
        num_microbatches=1,
        seq_length=config.sequence_length,
        micro_batch_size=config.micro_batch,
        forward_only=False,
    )
    return losses[0] if losses else None


def release(chunks: Sequence[DistributedDataParallel]) -> None:
    """Let Python's garbage collector free models that train no more, and their process groups.

    The wrapper's gradient hooks tie it to autograd nodes. Where a tensor outlives its pass (the
    shards of fp32 parameters, what a token dispatcher remembers) these are nodes that the
    collector cannot look into, so that without this the whole model would stay.
    """
    for chunk in chunks:
        for node in getattr(chunk, "grad_accs", ()):
            hooks = node.register_hook(lambda *unused: None).hooks_dict_ref()
            if hooks is not None:
                hooks.clear()

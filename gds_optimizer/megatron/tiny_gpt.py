"""A small, deterministic training run of megatron-core's own GPT, buffers and optimizer.

The demo command and the tests use it to compare streamed optimizer state with resident state. It
runs on a GPU with NCCL, or on a machine without one with gloo and the shim of `cpu.py`, on as many
ranks as the process group has. Two runs of one configuration give the same bits.

Nothing here knows about streaming: it is plugged in as `optimizer_context`, entered while
`get_megatron_optimizer` builds the optimizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from gds_optimizer.errors import ConfigError
from gds_optimizer.megatron.cpu import cuda_on_cpu, missing_names, quiet
from gds_optimizer.megatron.fused_adam import INNER_ADAM_CHOICES, use_inner_adam
from gds_optimizer.megatron.process_groups import (
    destroy,
    initialize_distributed,
    process_group_backend,
    process_groups,
)
from gds_optimizer.megatron.shards import (
    collect_resident_state,
    distributed_optimizers,
    param_names,
)

SCHEDULE_CHOICES = ("constant", "changing")

Callback = Callable[[int, list[Any], Any], None]
"""Called with the step's number, the data-parallel model chunks and the optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyGptConfig:
    """What to train, and how.

    Args:
        layers, hidden, heads, vocab: shape of the model; `hidden` is also the FFN's quarter.
        sequence_length, micro_batch: tokens of a sample, samples of a rank in a step.
        steps: number of the last step and one; there is no gradient accumulation.
        first_step: where to begin, for runs that go on from a checkpoint.
        seed: of weights and data.
        tensor_parallel, pipeline_parallel, expert_parallel: ranks of each kind; the rest of the
            process group is data-parallel.
        experts: of each layer, with the top 2 used; 0 for a dense model. Experts get an
            optimizer of their own, chained to the dense one. Not with tensor parallelism.
        swiglu: gated linear units instead of GELU.
        tied_embeddings: input and output embedding share their weights.
        mixed_dtype: layer norms' and routers' parameters are fp32 in a half-precision model.
        frozen: parameters whose name contains one of these texts do not train.
        fp16: fp16 instead of bf16, with a dynamic loss scale.
        initial_loss_scale: where the dynamic loss scale starts.
        loss_scale: a constant loss scale; None for none.
        grad_reduce_in_fp32: fp32 gradient buffers, else the parameters' precision.
        overlap: gradients are reduced during the backward pass, parameters gathered during the
            forward pass.
        ddp_bucket_size: elements of a communication bucket; None for megatron-core's default.
            Without `overlap` megatron-core uses one bucket, whatever this says.
        clip_grad: largest gradient norm; 0 for no clipping.
        weight_decay: of weights; biases and norms have none, hence two groups.
        lr: learning rate.
        schedule: "constant", or "changing": every step has its own learning rate and betas.
        inner_optimizer: see `use_inner_adam`.
        skip_step_at: a step whose gradients get an infinity, so that the loss scaler skips it.

    Raises:
        ConfigError: a value or combination that cannot train.
    """

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    vocab: int = 64
    sequence_length: int = 16
    micro_batch: int = 4
    steps: int = 3
    first_step: int = 0
    seed: int = 1234
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    experts: int = 0
    swiglu: bool = False
    tied_embeddings: bool = False
    mixed_dtype: bool = False
    frozen: tuple[str, ...] = ()
    fp16: bool = False
    initial_loss_scale: float = 1024.0
    loss_scale: float | None = None
    grad_reduce_in_fp32: bool = True
    overlap: bool = False
    ddp_bucket_size: int | None = None
    clip_grad: float = 1.0
    weight_decay: float = 0.1
    lr: float = 1e-2
    schedule: str = "constant"
    inner_optimizer: str = "adamw"
    skip_step_at: int | None = None

    def __post_init__(self) -> None:
        for name, choice, choices in (
            ("schedule", self.schedule, SCHEDULE_CHOICES),
            ("inner_optimizer", self.inner_optimizer, INNER_ADAM_CHOICES),
        ):
            if choice not in choices:
                raise ConfigError(f"{name} is {choice!r}, wanted one of {', '.join(choices)}")
        for name in ("layers", "hidden", "heads", "vocab", "sequence_length", "micro_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, wanted at least 1")
        if self.hidden % self.heads:
            raise ConfigError(f"hidden is {self.hidden}, wanted a multiple of heads ({self.heads})")
        if self.experts and self.experts % self.expert_parallel:
            raise ConfigError(
                f"experts is {self.experts}, wanted a multiple of expert_parallel "
                f"({self.expert_parallel})"
            )
        if self.experts and self.tensor_parallel > 1:
            raise ConfigError(
                f"experts is {self.experts} and tensor_parallel {self.tensor_parallel}, wanted one "
                "of them alone: megatron-core has both only with sequence parallelism, which its "
                "layer norm without Transformer Engine or apex lacks"
            )
        if self.expert_parallel > 1 and not self.experts:
            raise ConfigError(f"expert_parallel is {self.expert_parallel}, but experts is 0")
        if self.skip_step_at is not None and not (self.fp16 or self.loss_scale):
            raise ConfigError(
                "skip_step_at needs a loss scaler, which alone looks for infinities: "
                "set fp16 or loss_scale"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the model."""
        return torch.float16 if self.fp16 else torch.bfloat16

    def hyper_parameters(self, step: int) -> dict[str, Any]:
        """`lr` and `betas` of a step."""
        if self.schedule == "constant":
            return {"lr": self.lr, "betas": (0.9, 0.999)}
        wave = math.sin(1.0 + step)
        return {"lr": self.lr * (1 + 0.5 * wave), "betas": (0.9 + 0.05 * wave, 0.99 + 0.009 * wave)}


@dataclass(kw_only=True, slots=True)
class StepRecord:
    """One step as seen by one rank; floats are compared by their bits (`loss_bits`).

    `loss` is None on all but the last pipeline stage. A skipped step has neither norm nor zeros.
    """

    step: int
    success: bool
    loss: float | None
    loss_bits: str | None
    grad_norm: float | None
    num_zeros: float | None
    loss_scale: float
    lr: float


@dataclass(kw_only=True, slots=True)
class TrainingRecord:
    """What a rank saw of a training run.

    Attributes:
        config: what was trained.
        megatron_version, torch_version, device: on what.
        rank, world_size: of this process.
        inner_optimizers: class names, one for each optimizer of the chain ("stub" without one).
        ddp_buckets: number of communication buckets of each gradient buffer.
        steps: one entry for each step.
        param_digests: SHA-256 of each model parameter's bytes after the last step, by name.
        hook_calls: how often the inner optimizers' step hooks ran, by "<optimizer>.pre" or ".post".
    """

    config: TinyGptConfig
    megatron_version: str
    torch_version: str
    device: str
    rank: int
    world_size: int
    inner_optimizers: list[str]
    ddp_buckets: list[int]
    steps: list[StepRecord] = field(default_factory=list)
    param_digests: dict[str, str] = field(default_factory=dict)
    hook_calls: dict[str, int] = field(default_factory=dict)

    @property
    def params_digest(self) -> str:
        """SHA-256 of all parameters' digests and names."""
        text = "".join(f"{name} {digest}\n" for name, digest in sorted(self.param_digests.items()))
        return hashlib.sha256(text.encode()).hexdigest()


def run_training(
    config: TinyGptConfig,
    *,
    optimizer_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    after_build: Callable[[list[Any], Any], None] | None = None,
    before_step: Callback | None = None,
    after_step: Callback | None = None,
) -> TrainingRecord:
    """Train and record. All ranks of the process group call it with the same configuration.

    Args:
        config: what to train.
        optimizer_context: makes a context that is entered while the optimizer is built.
        after_build: called with the model chunks and the optimizer before the first step.
        before_step: called when the gradients are ready, before `optimizer.step()`.
        after_step: called after `optimizer.step()`. With `overlap` the model's parameters are
            then still to be gathered: call `sync_model_params` first if you look at them.

    Raises:
        ConfigError: the configuration does not fit the number of ranks.
        UnsupportedError: megatron-core cannot be imported.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(missing_names())
        if not torch.cuda.is_available():
            stack.enter_context(cuda_on_cpu())
        stack.enter_context(use_inner_adam(config.inner_optimizer))
        stack.enter_context(process_groups(config))
        return _train(config, optimizer_context, after_build, before_step, after_step)


def sync_model_params(model_chunks: Sequence[Any]) -> None:
    """Gather the parameters that the last step updated, where that was left to the next forward.

    Afterwards every rank's model has its final values. All ranks must call it.
    """
    for chunk in model_chunks:
        chunk.start_param_sync(force_sync=True)


def _train(
    config: TinyGptConfig,
    optimizer_context: Callable[[], contextlib.AbstractContextManager[Any]] | None,
    after_build: Callable[[list[Any], Any], None] | None,
    before_step: Callback | None,
    after_step: Callback | None,
) -> TrainingRecord:
    from gds_optimizer.megatron import tiny_gpt_model

    chunks = tiny_gpt_model.build_model(config)
    try:
        with optimizer_context() if optimizer_context else contextlib.nullcontext():
            optimizer = tiny_gpt_model.build_optimizer(config, chunks)
        record = _new_record(config, chunks, optimizer)
        if after_build:
            after_build(chunks, optimizer)
        for step in range(config.first_step, config.steps):
            hyper_parameters = config.hyper_parameters(step)
            for group in optimizer.param_groups:
                group.update(hyper_parameters, weight_decay=config.weight_decay * group["wd_mult"])
            loss = tiny_gpt_model.forward_backward(config, chunks, optimizer, step)
            if step == config.skip_step_at:
                _overflow(chunks)
            if before_step:
                before_step(step, chunks, optimizer)
            scale = float(optimizer.get_loss_scale())
            success, grad_norm, num_zeros = optimizer.step()
            record.steps.append(
                StepRecord(
                    step=step,
                    success=bool(success),
                    loss=None if loss is None else loss.item(),
                    loss_bits=None if loss is None else struct.pack(">f", loss.item()).hex(),
                    grad_norm=None if grad_norm is None else float(grad_norm),
                    num_zeros=None if num_zeros is None else float(num_zeros),
                    loss_scale=scale,
                    lr=hyper_parameters["lr"],
                )
            )
            if after_step:
                after_step(step, chunks, optimizer)
        sync_model_params(chunks)
        record.param_digests.update(
            (name, hashlib.sha256(_bytes_of(param)).hexdigest())
            for param, name in param_names(chunks).items()
        )
        return record
    finally:
        tiny_gpt_model.release(chunks)


def _new_record(config: TinyGptConfig, chunks: Sequence[Any], optimizer: Any) -> TrainingRecord:
    """A record without steps, whose `hook_calls` count from now on."""
    import megatron.core

    record = TrainingRecord(
        config=config,
        megatron_version=megatron.core.__version__,
        torch_version=torch.__version__,
        device="cuda" if torch.cuda.is_available() else "cpu",
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        inner_optimizers=[
            "stub" if part.is_stub_optimizer else type(part.optimizer).__name__
            for part in distributed_optimizers(optimizer)
        ],
        ddp_buckets=[
            len(buffer.buckets)
            for chunk in chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ],
    )
    _count_hook_calls(optimizer, record.hook_calls)
    return record


def _count_hook_calls(optimizer: Any, calls: dict[str, int]) -> None:
    """Register step hooks on every inner optimizer that count in `calls`."""
    for index, part in enumerate(distributed_optimizers(optimizer)):
        if part.is_stub_optimizer:
            continue
        for when in ("pre", "post"):
            key = f"{index}.{when}"
            calls[key] = 0

            def count(*unused: Any, key: str = key) -> None:
                calls[key] += 1

            getattr(part.optimizer, f"register_step_{when}_hook")(count)


def _overflow(chunks: Sequence[Any]) -> None:
    """Put an infinity into one element of the reduced gradients, which one rank owns."""
    trainable = next(p for chunk in chunks for p in chunk.parameters() if p.requires_grad)
    trainable.main_grad.view(-1)[0] = math.inf


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


__all__ = [
    "Callback",
    "StepRecord",
    "TinyGptConfig",
    "TrainingRecord",
    "collect_resident_state",
    "destroy",
    "initialize_distributed",
    "process_group_backend",
    "run_training",
    "sync_model_params",
]

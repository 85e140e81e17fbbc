"""What cannot be right is refused at construction by its flag; everything else is let through."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.megatron import attach, streamed_optimizer
from gds_optimizer.megatron.cpu import import_megatron, quiet, replaced
from gds_optimizer.megatron.optimizer import is_streamed
from gds_optimizer.megatron.refusals import refuse_unsupported
from gds_optimizer.megatron.shards import distributed_optimizers
from gds_optimizer.megatron.tiny_gpt import TinyGptConfig, run_training
from tests.megatron.forking import run_forked_ranks
from tests.megatron.streaming import SMALL_BUCKET_BYTES
from tests.support.engines import leftovers

pytestmark = pytest.mark.megatron

OPTIMIZER_FLAGS = {
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "reuse_grad_buf_for_mxfp8_param_ag": "--reuse-grad-buf-for-mxfp8-param-ag",
    "optimizer_cuda_graph": "--optimizer-cuda-graph",
    # of forks
    "offload_optimizer_states": "--offload-optimizer-states",
    "chunked_optimizer_state_offload": "--chunked-optimizer-state-offload",
    "low_memory_resume": "--low-memory-resume",
}
DDP_FLAGS = {"use_megatron_fsdp": "--use-megatron-fsdp"}
PARAMS = [torch.nn.Parameter(torch.ones(3))]


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    with quiet():
        import_megatron()


def configs() -> tuple[Any, Any]:
    """What a run with streaming usually has."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    return (
        OptimizerConfig(lr=1e-3, bf16=True, use_distributed_optimizer=True),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
    )


def test_the_usual_is_let_through():
    refuse_unsupported(*configs(), PARAMS)
    refuse_unsupported(*configs(), [])
    refuse_unsupported(SimpleNamespace(), None, PARAMS)


@pytest.mark.parametrize("value", [True, 4])
@pytest.mark.parametrize("name", [*OPTIMIZER_FLAGS, *DDP_FLAGS])
def test_what_is_refused(name, value):
    optimizer_config, ddp_config = configs()
    setattr(ddp_config if name in DDP_FLAGS else optimizer_config, name, value)
    flag = {**OPTIMIZER_FLAGS, **DDP_FLAGS}[name]
    with pytest.raises(UnsupportedError) as caught:
        refuse_unsupported(optimizer_config, ddp_config, PARAMS)
    text = str(caught.value)
    assert text.startswith(f"--stream-optimizer-state-to-disk does not go with {flag} (")
    assert text.endswith("): drop one of them")
    assert text.count("--") == 2  # no other flag is blamed


@pytest.mark.parametrize("name", [*OPTIMIZER_FLAGS, *DDP_FLAGS])
@pytest.mark.parametrize("value", [False, None, 0])
def test_what_is_off_is_let_through(name, value):
    optimizer_config, ddp_config = configs()
    setattr(ddp_config if name in DDP_FLAGS else optimizer_config, name, value)
    refuse_unsupported(optimizer_config, ddp_config, PARAMS)


def test_all_of_them_are_named_at_once():
    optimizer_config, ddp_config = configs()
    for name in OPTIMIZER_FLAGS:
        setattr(optimizer_config, name, True)
    ddp_config.use_megatron_fsdp = True
    with pytest.raises(UnsupportedError) as caught:
        refuse_unsupported(optimizer_config, ddp_config, PARAMS)
    for flag in (*OPTIMIZER_FLAGS.values(), *DDP_FLAGS.values()):
        assert f"{flag} (" in str(caught.value)


class QuantizedParam(torch.nn.Parameter):
    pass


@pytest.mark.parametrize(
    ("module", "test", "flag"),
    [
        ("fp8_utils", "is_float8tensor", "--fp8-param-gather"),
        ("fp4_utils", "is_nvfp4tensor", "--fp4-param-gather"),
    ],
)
def test_quantized_parameters_are_refused(module, test, flag):
    """What Transformer Engine's tensors are taken for; without it there are none."""
    import importlib

    with replaced(
        importlib.import_module(f"megatron.core.{module}"),
        **{test: lambda tensor: isinstance(tensor, QuantizedParam)},
    ):
        refuse_unsupported(*configs(), PARAMS)
        with pytest.raises(UnsupportedError, match=flag):
            refuse_unsupported(*configs(), [*PARAMS, QuantizedParam(torch.ones(3))])


def other_value(value: Any, field: dataclasses.Field[Any]) -> Any:
    """Something else than a default."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, torch.dtype):
        return torch.bfloat16
    if isinstance(value, str):
        return f"other {value}"
    return "set"


def unrelated_fields() -> list[tuple[int, str]]:
    """Every option of either configuration that is not refused, by its place."""
    with quiet():
        try:
            import_megatron()
            both = configs()
        except (ImportError, UnsupportedError):
            return []
    refused = {*OPTIMIZER_FLAGS, *DDP_FLAGS}
    return [
        (place, field.name)
        for place, config in enumerate(both)
        for field in dataclasses.fields(config)
        if field.name not in refused
    ]


def test_every_unrelated_option_is_let_through():
    fields = unrelated_fields()
    assert len(fields) > 60
    assert (0, "clip_grad") in fields
    assert (1, "overlap_grad_reduce") in fields
    for place, name in fields:
        both = configs()
        field = next(f for f in dataclasses.fields(both[place]) if f.name == name)
        setattr(both[place], name, other_value(getattr(both[place], name), field))
        refuse_unsupported(*both, PARAMS)


def test_pairs_of_unrelated_options_are_let_through():
    """All of them at once, in either configuration."""
    both = configs()
    for place, name in unrelated_fields():
        field = next(f for f in dataclasses.fields(both[place]) if f.name == name)
        setattr(both[place], name, other_value(getattr(both[place], name), field))
    refuse_unsupported(*both, PARAMS)


# ---------------------------------------------------------------------- in a training

TINY = TinyGptConfig(steps=1, layers=1, hidden=16)


def run_refused(directory: str) -> dict[str, str]:
    """On a rank: what each flag's refusal says when an optimizer is built, or attached to."""
    from megatron.core.optimizer import OptimizerConfig

    from gds_optimizer.megatron import tiny_gpt_model

    config = StreamConfig(directories=(Path(directory),), bucket_size=SMALL_BUCKET_BYTES)
    messages: dict[str, str] = {}

    def note(key: str, error: UnsupportedError) -> None:
        messages[key] = str(error)
        assert leftovers(Path(directory)) == []

    def build(name: str) -> None:
        def make(**options: Any) -> Any:
            made = OptimizerConfig(**options)
            if name in OPTIMIZER_FLAGS:
                setattr(made, name, True)
            return made

        def build_model(tiny: TinyGptConfig) -> Any:
            chunks = model(tiny)
            if name in DDP_FLAGS:
                setattr(chunks[0].ddp_config, name, True)
            return chunks

        model = tiny_gpt_model.build_model
        with replaced(tiny_gpt_model, OptimizerConfig=make, build_model=build_model):
            run_training(TINY, optimizer_context=lambda: streamed_optimizer(config))

    # Megatron itself has no use for the other two without Transformer Engine.
    for name in (
        "reuse_grad_buf_for_mxfp8_param_ag",
        "offload_optimizer_states",
        "low_memory_resume",
        "use_megatron_fsdp",
    ):
        try:
            build(name)
        except UnsupportedError as error:
            note(f"build {name}", error)

    def attach_with_each(chunks: list[Any], optimizer: Any) -> None:
        (part,) = distributed_optimizers(optimizer)
        for name in (*OPTIMIZER_FLAGS, *DDP_FLAGS):
            holder = part.ddp_config if name in DDP_FLAGS else part.config
            with replaced(holder, **{name: True}):
                try:
                    attach(optimizer, config)
                except UnsupportedError as error:
                    note(f"attach {name}", error)
            assert not is_streamed(part)

    run_training(TINY, after_build=attach_with_each)
    return messages


def test_refusals_at_construction(tmp_path):
    (messages,) = run_forked_ranks(1, run_refused, str(tmp_path))
    flags = {**OPTIMIZER_FLAGS, **DDP_FLAGS}
    assert {key for key in messages if key.startswith("attach")} == {
        f"attach {name}" for name in flags
    }
    assert len(messages) == len(flags) + 4
    for key, text in messages.items():
        assert f"{flags[key.split()[1]]} (" in text

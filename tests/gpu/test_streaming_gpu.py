"""Streamed training on a GPU: the same bits as resident, in bounded device memory.

The whole of it runs on KvikIO's POSIX path and, with registered slots, on the cuFile calls in
cuFile's own compatibility mode (without GPUDirect hardware their DMA cannot be exercised).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.bench.page_cache import resident_pages
from gds_optimizer.config import StreamConfig
from tests.megatron.streaming import Streaming, compare
from tests.support.probed import probed_once

pytestmark = [pytest.mark.gpu, pytest.mark.megatron]

BUCKETS: dict[str, Any] = {"overlap": True, "ddp_bucket_size": 4096}
PATHS = ("posix", "gds-compat")


def _cases() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    skip_at = 9
    return {
        "basic": ({}, {"states_at": (0, 1, -1)}),
        "overlap_bf16_gradients": ({**BUCKETS, "grad_reduce_in_fp32": False}, {}),
        "fp32_gradients_moe_fused_ints": ({"experts": 4, "inner_optimizer": "fused"}, {}),
        "mixed_dtype_moe": ({"mixed_dtype": True, "experts": 4}, {}),
        "bf16_gradients_tight_clipping": ({"grad_reduce_in_fp32": False, "clip_grad": 0.05}, {}),
        "swiglu_tied": ({"swiglu": True, "tied_embeddings": True}, {}),
        "fp16_skip": (
            {"fp16": True, "skip_step_at": skip_at},
            {"states_at": (skip_at - 1, skip_at, skip_at + 1, -1)},
        ),
        "frozen": ({"frozen": ("embedding", "layers.0.")}, {}),
        "lazy": ({}, {"init": "lazy"}),
        "attached": ({"experts": 4}, {"attach": True}),
        "one_slot": ({}, {"slots": 1}),
    }


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    import torch.distributed as dist

    from gds_optimizer.megatron.tiny_gpt import process_group_backend

    torch.cuda.set_device(0)
    dist.init_process_group(process_group_backend(), store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def _probed_once() -> Iterator[None]:
    with probed_once():
        yield


@pytest.mark.parametrize("io", PATHS)
@pytest.mark.parametrize("name", _cases())
def test_streamed_equals_resident(name: str, io: str, tmp_path: Path) -> None:
    from gds_optimizer.megatron.tiny_gpt import TinyGptConfig

    options, streaming = _cases()[name]
    config = TinyGptConfig(steps=20, schedule="changing", hidden=64, **options)
    comparison = compare(config, Streaming(io=io, **streaming), tmp_path)
    assert not comparison.error, comparison.error
    assert comparison.leftovers == []
    assert comparison.bucket_count > 10


DEVICE_SLACK_BYTES = 2**27  # for blocks of the caching allocator, streams, KvikIO


class Memory:
    """Allocator peak and bytes taken from the device, in stages."""

    def __init__(self) -> None:
        self.allocated: dict[str, int] = {}
        self.device: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def note(self, stage: str) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        self.allocated[stage] = torch.cuda.max_memory_allocated()
        self.device[stage] = total - free
        self.reset()


def _large_model(steps: int) -> Any:
    from gds_optimizer.megatron.tiny_gpt import TinyGptConfig

    # 1.23 B parameters; the largest alone (a FFN weight of 67 M) is four default buckets.
    return TinyGptConfig(
        layers=6, hidden=4096, heads=32, vocab=2048, sequence_length=64, micro_batch=1, steps=steps
    )


def _train(
    directory: Path | None, memory: Memory, config: StreamConfig | None, model: Any = None
) -> dict[str, Any]:
    """Train three steps with a reload in between; without a configuration the step does nothing.

    Files are compared with the model's parameters where no other `model` is given.
    """
    import contextlib

    from gds_optimizer.megatron import setup
    from gds_optimizer.megatron.optimizer import streamed_class
    from gds_optimizer.megatron.shards import distributed_optimizers
    from gds_optimizer.megatron.tiny_gpt import run_training

    found: dict[str, Any] = {}

    @contextlib.contextmanager
    def no_optimizer() -> Iterator[None]:
        """The same optimizer without mains, moments, slots and steps: the model and gradients."""
        import megatron.core.optimizer as module

        original = module.DistributedOptimizer
        module.DistributedOptimizer = streamed_class(original)
        try:
            yield
        finally:
            module.DistributedOptimizer = original

    def context() -> Any:
        memory.reset()
        return setup.streamed_optimizer(config) if config else no_optimizer()

    def after_build(chunks: list[Any], optimizer: Any) -> None:
        memory.note("construction")
        for part in distributed_optimizers(optimizer):
            if config is None:
                part.optimizer.step = lambda: None
                part._copy_main_params_to_model_params = lambda: None
                part._copy_model_params_to_main_params = lambda state_dict=None: None
            else:
                found["engine"] = part.engine
                found["slot_bytes"] = part.engine.pool.nbytes
                part.engine.drain()
                if model is None:
                    check_files(part)
                    memory.reset()

    def check_files(part: Any) -> None:
        """The files hold the casts, byte for byte, and no page of them is cached."""
        from gds_optimizer.megatron.optimizer import _model_shard
        from gds_optimizer.megatron.shards import named_shards

        engine = part.engine
        models = {s.name: _model_shard(part, s) for s in named_shards(part)}
        names = [s.name for s in engine.layout.spaces[0].shards]
        for bucket in engine.layout.buckets:
            data = torch.from_file(
                str(engine.store.paths[bucket.index]),
                size=bucket.planes[0].nbytes // 4,
                dtype=torch.float32,
            )
            for piece in bucket.pieces:
                wanted = models[names[piece.shard]][
                    piece.shard_offset : piece.shard_offset + piece.numel
                ].float()
                got = data[piece.bucket_offset : piece.bucket_offset + piece.numel]
                assert torch.equal(wanted.cpu(), got)

    def after_step(step: int, chunks: list[Any], optimizer: Any) -> None:
        memory.note(f"step {step}")
        if step == 1:
            optimizer.reload_model_params()
            memory.note("reload")
            if config is not None:
                optimizer.chained_optimizers[0].engine.drain()
        if step == 2 and config is not None:
            engine = found["engine"]
            engine.drain()
            found["resident_pages"] = sum(
                resident_pages(path)
                for index, path in enumerate(engine.store.paths)
                if index not in engine.store.in_memory
            )
            found["stats"] = engine.last_stats
            optimizer.chained_optimizers[0].close()

    # A model that an earlier run has left to the collector would count as this one's.
    gc.collect()
    torch.cuda.empty_cache()
    run_training(
        model or _large_model(3),
        optimizer_context=context,
        after_build=after_build,
        after_step=after_step,
    )
    return found


def _device_over(streamed: Memory, baseline: Memory, slot_bytes: int) -> dict[str, int]:
    """What streaming takes from the device over the model and its gradients, as the driver sees it.

    The slots must show in it, else the baseline held more than that. The caching allocator rounds
    what it takes up to blocks of its own, so that all of this is good to `DEVICE_SLACK_BYTES`.
    """
    over = {stage: streamed.device[stage] - baseline.device[stage] for stage in baseline.device}
    assert all(nbytes >= slot_bytes - DEVICE_SLACK_BYTES for nbytes in over.values()), over
    return over


@pytest.mark.slow
@pytest.mark.parametrize("io", PATHS[:1])
def test_device_memory_is_bounded(io: str, tmp_path: Path) -> None:
    """Over the model and its gradients: the slots, two fp32 planes of a bucket, 64 MiB."""
    baseline, streamed = Memory(), Memory()
    _train(None, baseline, None)
    config = StreamConfig(directories=(tmp_path,), io=io, init="eager")
    found = _train(tmp_path, streamed, config)
    assert found["resident_pages"] == 0
    planes_bytes = 2 * 4 * found["engine"].layout.bucket_numel
    allowed_bytes = planes_bytes + 64 * 2**20
    over = {s: streamed.allocated[s] - baseline.allocated[s] for s in baseline.allocated}
    print({stage: round(nbytes / 2**20, 1) for stage, nbytes in over.items()}, "MiB")
    print(found["stats"].describe())
    assert all(nbytes <= allowed_bytes for nbytes in over.values()), over
    device_over = _device_over(streamed, baseline, found["slot_bytes"])
    assert all(
        nbytes <= found["slot_bytes"] + allowed_bytes + DEVICE_SLACK_BYTES
        for nbytes in device_over.values()
    ), device_over


SIZES = {"1.24e9": (6, 4096, 0), "4.96e9": (24, 16384, 44 * 2**30)}
"""Layers, vocabulary, bytes of host memory: what is left of the larger state fits a small disk."""


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_device_memory_does_not_grow_with_the_model(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 0.75 GiB over the model and its gradients, at default settings, for both sizes.

    The larger one needs 20 GB of room, 64 GiB of host memory and 40 GB of the device's. At 2 GB/s
    a step moves 12 to 30 GB, hence takes about as long for both (6 to 15 s); pinning adds to the
    larger one's construction. The times that it took are printed.
    """
    import time

    from gds_optimizer.megatron import tiny_gpt
    from gds_optimizer.megatron.tiny_gpt import TinyGptConfig

    # What the weights are is no matter here; drawing them on a CPU takes minutes, digests of them
    # take one.
    def fill(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.nn.init.constant_(tensor, 0.01)

    monkeypatch.setattr(torch.nn.init, "normal_", fill)
    monkeypatch.setattr(tiny_gpt, "_bytes_of", lambda tensor: b"")
    layers, vocab, host_bytes = SIZES[size]
    model = TinyGptConfig(
        layers=layers,
        hidden=4096,
        heads=32,
        vocab=vocab,
        sequence_length=64,
        micro_batch=1,
        steps=3,
    )
    baseline, streamed = Memory(), Memory()
    _train(None, baseline, None, model)
    config = StreamConfig(
        directories=(tmp_path,), io=PATHS[0], init="eager", host_budget=host_bytes
    )
    began = time.perf_counter()
    found = _train(tmp_path, streamed, config, model)
    seconds = time.perf_counter() - began
    engine, stats = found["engine"], found["stats"]
    numel = sum(shard.numel for space in engine.layout.spaces for shard in space.shards)
    assert numel >= float(size)
    assert found["slot_bytes"] == 3 * (192 * 2**20 + 4096)
    over = {
        stage: streamed.allocated[stage] - baseline.allocated[stage] + found["slot_bytes"]
        for stage in baseline.allocated
    }
    print(f"{numel} parameters, {seconds:.1f} s in all; a step: {stats.describe()}")
    print({stage: round(nbytes / 2**20, 1) for stage, nbytes in over.items()}, "MiB")
    device_over = _device_over(streamed, baseline, found["slot_bytes"])
    print({stage: round(nbytes / 2**20, 1) for stage, nbytes in device_over.items()}, "MiB taken")
    limit_bytes = 3 * 2**28
    assert all(nbytes <= limit_bytes for nbytes in over.values()), over
    assert all(nbytes <= limit_bytes + DEVICE_SLACK_BYTES for nbytes in device_over.values()), (
        device_over
    )

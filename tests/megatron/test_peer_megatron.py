"""A streamer behind Megatron's optimizer as a peer of the comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gds_optimizer.bench.peer_recipes import HYPER_PARAMETERS, Setting, streamer_recipe

STREAMER = """
from pathlib import Path
from gds_optimizer.megatron import StreamConfig, attach

def setup_optimizer_state_streaming(args, optimizer, *, role):
    assert role == "actor" and args.stream_optimizer_state_to_disk
    assert [args.offload_train_disk_dir] == args.stream_optimizer_state_dir
    attach(optimizer, StreamConfig.from_args(args))
"""
RESIDENT = "def setup_optimizer_state_streaming(args, optimizer): pass"
SKIPPING = """
def setup_optimizer_state_streaming(args, optimizer):
    optimizer.step = lambda: (False, None, None)
"""
SIZES = (1000, 4096, 7)


def peer_of(tmp_path: Path, name: str, program: str):
    path, directory = tmp_path / f"{name}.py", tmp_path / name
    path.write_text(program)
    directory.mkdir()
    recipe = streamer_recipe(path)
    assert recipe.half
    assert recipe.module == "megatron.core"
    torch.manual_seed(5)
    params = [torch.randn(size).bfloat16().requires_grad_() for size in SIZES]
    before = [param.detach().clone() for param in params]
    grads = [torch.randn(size).bfloat16() for size in SIZES]
    setting = Setting(directory=directory, device=torch.device("cpu"), cap_bytes=None, io="posix")
    return recipe.build(params, grads, setting), before, grads, directory


def steps_of(tmp_path: Path, name: str, program: str) -> list[torch.Tensor]:
    peer, _, _, directory = peer_of(tmp_path, name, program)
    try:
        for _ in range(3):
            peer.step()
        values = [value.detach().clone() for value in peer.values()]
        has_files = any(path.is_file() for path in directory.rglob("*"))
        assert has_files == (name == "streamed")
    finally:
        peer.close()
    return values


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without a GPU")
def test_it_steps_as_adamw_and_as_the_resident_optimizer_does(tmp_path):
    streamed = steps_of(tmp_path, "streamed", STREAMER)
    assert all(map(torch.equal, streamed, steps_of(tmp_path, "resident", RESIDENT)))
    peer, before, grads, _ = peer_of(tmp_path, "adamw", RESIDENT)
    peer.close()
    mains = [param.float().requires_grad_() for param in before]
    optimizer = torch.optim.AdamW(mains, **HYPER_PARAMETERS)
    for main, grad in zip(mains, grads, strict=True):
        main.grad = grad.float()
    for _ in range(3):
        optimizer.step()
    for value, main in zip(streamed, mains, strict=True):
        torch.testing.assert_close(value, main.detach().bfloat16(), rtol=0.01, atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without a GPU")
def test_a_skipped_step_is_an_error(tmp_path):
    peer, *_ = peer_of(tmp_path, "skipping", SKIPPING)
    try:
        with pytest.raises(RuntimeError, match="skipped a step"):
            peer.step()
    finally:
        peer.close()

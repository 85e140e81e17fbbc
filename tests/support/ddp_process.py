"""A rank of a DistributedDataParallel run: `python -m tests.support.ddp_process DIRECTORY`.

Trains the same model twice, with a resident and with a streamed optimizer, on data that differ from
rank to rank; takes a snapshot halfway, goes on, and trains the second half again from it. What
torchrun sets must be in the environment. The parameters must be equal to the bit after every step.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gds_optimizer.config import StreamConfig
from gds_optimizer.pytorch import stream
from tests.support.engines import same_bits

STEPS = 6
BUCKET_BYTES = 12 * 1024


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(40, 70)
        self.second = torch.nn.Linear(70, 90, dtype=torch.bfloat16)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(data).relu().bfloat16()).float()


def backward(model: DistributedDataParallel, step: int) -> float:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    loss = model(torch.randn(8, 40, generator=generator)).square().mean()
    loss.backward()
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = Model()
    model = DistributedDataParallel(copy.deepcopy(plain))
    twin = DistributedDataParallel(plain)
    mains = [p if p.dtype is torch.float32 else p.detach().float() for p in twin.parameters()]
    resident = torch.optim.AdamW(mains, lr=1e-2, fused=True)
    config = StreamConfig(
        directories=(directory / "state",), bucket_size=BUCKET_BYTES, host_budget=0
    )
    streamed = stream(
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), config, model=model
    )
    assert (directory / "state" / f"rank{rank:05d}" / "opt0").is_dir()
    for step in range(STEPS):
        if step == STEPS // 2:
            streamed.snapshot(directory / "snapshot")
        assert backward(model, step) == backward(twin, step)
        streamed.step()
        streamed.zero_grad()
        for param, main in zip(twin.parameters(), mains, strict=True):
            main.grad = param.grad if param is main else param.grad.float()
        resident.step()
        with torch.no_grad():
            for param, main in zip(twin.parameters(), mains, strict=True):
                param.copy_(main)
                param.grad = None
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert same_bits(mine, theirs), f"rank {rank}, step {step}"
    assert streamed.restore(directory / "snapshot") == STEPS // 2
    for step in range(STEPS // 2, STEPS):
        backward(model, step)
        streamed.step()
        streamed.zero_grad()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert same_bits(mine, theirs), f"rank {rank}, again"
    streamed.close()
    print(f"rank {rank} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

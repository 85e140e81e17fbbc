"""Plain PyTorch, streamed and resident side by side: the same parameters and gradients for both.

The resident one is an ordinary torch optimizer. Its half-precision parameters are stepped through
fp32 clones by an explicit loop, as mixed-precision training does it by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.config import StreamConfig
from gds_optimizer.pytorch import StreamedOptimizer, stream
from tests.support.engines import leftovers, same_bits

BUCKET_BYTES = 16 * 1024
"""The smallest that holds a main and three moments."""

SHAPES = ((3, 7), (), (64,), (40, 70), (17,), (0,), (5, 11, 13), (4097,), (8, 128))
"""Of parameters: some in one bucket, one in several, none aligned but by chance."""
MIXED = (torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)
"""Dtypes of the parameters, in turn."""
FP32 = (torch.float32,)

Make = Callable[..., torch.optim.Optimizer]


def parameters(
    dtypes: Sequence[torch.dtype], device: str, seed: int = 0
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [
        torch.nn.Parameter(value.to(device, dtypes[index % len(dtypes)]))
        for index, value in enumerate(values)
    ]


def groups_of(tensors: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Two groups with other options."""
    return [
        {"params": list(tensors[:4]), "lr": 3e-2},
        {"params": list(tensors[4:]), "weight_decay": 0.0},
    ]


class Twins:
    """A streamed optimizer and its resident twin.

    Args:
        directory: for the state.
        make: an optimizer of parameters or groups.
        dtypes: of the parameters, in turn.
        in_groups: whether they are in two groups.
        warm: whether both make two steps before the one is streamed.
        options: of `StreamConfig`.
    """

    def __init__(
        self,
        directory: Path,
        make: Make,
        *,
        dtypes: Sequence[torch.dtype] = MIXED,
        in_groups: bool = False,
        device: str = "cpu",
        warm: bool = False,
        **options: Any,
    ) -> None:
        group = groups_of if in_groups else list
        self.params = parameters(dtypes, device)
        self.copies = parameters(dtypes, device)
        self.mains = [
            copy if copy.dtype is torch.float32 else copy.detach().float() for copy in self.copies
        ]
        self.resident = make(group(self.mains))
        plain = make(group(self.params))
        self.steps = 0
        if warm:
            assert not any(param.dtype is not torch.float32 for param in self.params)
            for _ in range(2):
                self.give_gradients()
                plain.step()
                self.step_resident()
        options.setdefault("bucket_size", BUCKET_BYTES)
        self.config = StreamConfig(directories=(directory,), **options)
        self.streamed: StreamedOptimizer = stream(plain, self.config)
        assert self.streamed is plain

    def give_gradients(self, without: Sequence[int] = ()) -> None:
        generator = torch.Generator().manual_seed(1000 + self.steps)
        self.steps += 1
        for index, (param, copy) in enumerate(zip(self.params, self.copies, strict=True)):
            grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
            param.grad = None if index in without else grad
            copy.grad = None if index in without else grad.clone()

    def clip(self, norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, norm)
        torch.nn.utils.clip_grad_norm_(self.copies, norm)

    @torch.no_grad()
    def step_resident(self) -> None:
        pairs = [
            (copy, main)
            for copy, main in zip(self.copies, self.mains, strict=True)
            if copy is not main
        ]
        for copy, main in pairs:
            main.grad = None if copy.grad is None else copy.grad.float()
        self.resident.step()
        for copy, main in pairs:
            copy.copy_(main)

    def step(self, without: Sequence[int] = (), clip: float | None = None) -> None:
        self.give_gradients(without)
        if clip is not None:
            self.clip(clip)
        self.streamed.step()
        self.step_resident()

    def check_parameters(self) -> None:
        for number, (param, copy) in enumerate(zip(self.params, self.copies, strict=True)):
            assert same_bits(param, copy), f"parameter {number}"

    def check(self) -> None:
        """Parameters, mains, moments, counters and options are equal to the bit."""
        self.check_parameters()
        found = self.streamed.state_dict()
        assert options_of(found) == options_of(self.resident.state_dict())
        for number, main in enumerate(self.mains):
            wanted = dict(self.resident.state.get(main, {}))
            if main is not self.copies[number]:
                wanted["main"] = main
            entry = found["state"].get(number, {})
            assert set(entry) == set(wanted), f"parameter {number}"
            for key, value in wanted.items():
                both = (entry[key], value)
                assert both == (None, None) or same_bits(*both), f"{key} of parameter {number}"


def check_twenty_steps(directory: Path, make: Make, **options: Any) -> None:
    """Two groups, gradients that are missing in some steps, and clipping in the later ones."""
    twins = Twins(directory, make, in_groups=True, host_budget=0, **options)
    with twins.streamed:
        for step in range(20):
            twins.step(without=(3, 4) if step % 5 == 2 else (), clip=0.5 if step > 8 else None)
        twins.check()
    assert leftovers(directory) == []


def check_six_steps(directory: Path, make: Make, **options: Any) -> None:
    """One group, and a step without the first parameters."""
    twins = Twins(directory, make, **options)
    with twins.streamed:
        for step in range(6):
            twins.step(without=(0, 1, 2) if step == 3 else ())
        twins.check()
    assert leftovers(directory) == []


def options_of(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
        }
        for group in state_dict["param_groups"]
    ]

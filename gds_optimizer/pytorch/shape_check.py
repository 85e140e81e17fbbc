"""Does an optimizer treat a parameter of several dimensions as it does its elements in a row?

The engine steps flat pieces. An optimizer may be elementwise on those and still look at the number
of dimensions: to centre gradients of matrices, say, or to decay only these.
"""

from __future__ import annotations

from typing import Any

import torch

from gds_optimizer.errors import UnsupportedError
from gds_optimizer.schema import same_bits
from gds_optimizer.stepper import Stepper

_SHAPES = ((16, 16), (4, 4, 2, 8))
_NUMEL = 256
_STEPS = 2


@torch.no_grad()
def check_shapes(
    optimizer: torch.optim.Optimizer, dtype: torch.dtype, device: torch.device
) -> None:
    """Step a small parameter in several shapes with the options of every group.

    Args:
        optimizer: read, not changed.
        dtype: of what it steps.
        device: where that is.

    Raises:
        UnsupportedError: the shape makes a difference.
    """
    index = torch.arange(_NUMEL, dtype=torch.float32)
    values = (torch.cos(index * 0.7) + 0.01, torch.sin(index * 1.3) * 0.5 + 0.003)
    start, grad = (value.to(dtype).to(device) for value in values)
    for number, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            continue
        try:
            flat = _stepped(optimizer, number, start, grad)
        except Exception:  # noqa: BLE001 - `discover_schema` says what is wrong with it
            return
        for shape in _SHAPES:
            try:
                shaped = _stepped(optimizer, number, start.view(shape), grad.view(shape))
            except Exception as error:
                raise _refusal(optimizer, shape, f"it cannot step one ({error})") from error
            for key, value in flat.items():
                if not same_bits(value, shaped.get(key)):
                    raise _refusal(optimizer, shape, f"{key} comes out different")


def _refusal(
    optimizer: torch.optim.Optimizer, shape: tuple[int, ...], what: str
) -> UnsupportedError:
    return UnsupportedError(
        f"{type(optimizer).__name__} treats a parameter of {len(shape)} dimensions unlike its "
        f"elements in a row: {what}; state is streamed as rows of elements, so it cannot be"
    )


def _stepped(
    optimizer: torch.optim.Optimizer, group: int, start: torch.Tensor, grad: torch.Tensor
) -> dict[str, Any]:
    """A parameter and its state after some steps; nothing is committed to `optimizer`."""
    param, stepper = start.clone(), Stepper(optimizer)
    state: dict[str, Any] = {}
    for _ in range(_STEPS):
        param.grad = grad.clone()
        stepper.begin()
        (state,) = stepper.run([(group, param, state)])
    return {"the parameter": param, **state}

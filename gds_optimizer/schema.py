"""What state an optimizer keeps for a parameter, found out by asking it.

A tiny parameter is stepped by a copy of the optimizer. Its state tensors of the parameter's shape
become planes; everything else must be a scalar. Nothing is assumed about names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gds_optimizer.codecs import raw_codec_name
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.layout import PlaneSpec
from gds_optimizer.stepper import Stepper, copy_value

_PROBE_NUMEL = 256


@dataclass(frozen=True, slots=True)
class StateSchema:
    """State of one parameter.

    Attributes:
        planes: state tensors of the parameter's shape, in the optimizer's order.
        initial: scalars that, together with zeroed planes, make the optimizer's first step come
            out the same as with no state at all; None where that is not so, and a first step must
            leave it to the optimizer to create its state (which costs the planes' memory twice).
    """

    planes: tuple[PlaneSpec, ...]
    initial: dict[str, Any] | None


def _probe_values(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """A parameter and two gradients, with signed zeros and subnormals among ordinary values."""
    index = torch.arange(_PROBE_NUMEL, dtype=torch.float32)
    param = torch.cos(index * 0.7) + 0.01
    grads = (torch.sin(index * 1.3) * 0.5 + 0.003, torch.sin(index * 2.1) * 0.25 - 0.001)
    for values in (param, *grads):
        values[3::31], values[7::37], values[11::41] = 0.0, -0.0, 1e-40
    return tuple(value.to(dtype).to(device) for value in (param, *grads))


def _run(
    optimizer: torch.optim.Optimizer,
    group: int,
    values: tuple[torch.Tensor, ...],
    state: dict[str, Any],
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Two steps of a probe parameter; nothing is committed to `optimizer`."""
    param, *grads = (value.clone() for value in values)
    stepper = Stepper(optimizer)
    for grad in grads:
        param.grad = grad
        stepper.begin()
        (state,) = stepper.run([(group, param, state)])
    return param, state


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors to the bit and whatever their shapes are."""
    if isinstance(a, torch.Tensor):
        # Equality of values would take -0.0 for 0.0.
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        )
    return bool(a == b)


def _same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(same_bits(value, b[key]) for key, value in a.items())


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.numel() == 1


@torch.no_grad()
def discover_schema(
    optimizer: torch.optim.Optimizer, group: int, dtype: torch.dtype, device: torch.device
) -> StateSchema:
    """What `optimizer` keeps for a parameter of its group `group`.

    Args:
        optimizer: any torch optimizer; it is not changed.
        group: index of the parameter group, whose options decide (amsgrad, momentum, ...).
        dtype: dtype of what the optimizer steps.
        device: where that lives.

    Raises:
        UnsupportedError: it keeps tensors that are neither of the parameter's shape nor scalars,
            or of a dtype that has no lossless encoding; it is not elementwise.
    """
    kind = type(optimizer).__name__
    values = _probe_values(dtype, device)
    try:
        param, state = _run(optimizer, group, values, {})
        _check_elementwise(optimizer, group, values, param, state)
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{kind} cannot step a 1-D parameter of {_PROBE_NUMEL} elements on its own ({error}): "
            "only elementwise optimizers can be streamed"
        ) from error
    planes: list[PlaneSpec] = []
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == param.shape:
            try:
                planes.append(PlaneSpec(name=key, codec=raw_codec_name(value.dtype)))
            except KeyError:
                raise UnsupportedError(
                    f"{kind} keeps {key!r} in {value.dtype}, which cannot be stored losslessly: "
                    "only elementwise optimizers with real floating-point or integer state stream"
                ) from None
        elif not _is_scalar(value):
            raise UnsupportedError(
                f"{kind} keeps {key!r} of shape {tuple(value.shape)} for a parameter of shape "
                f"{tuple(param.shape)}: only elementwise optimizers can be streamed, whose state "
                "has the parameter's shape or is a scalar"
            )
    return StateSchema(tuple(planes), _zero_initial(optimizer, group, values, param, state))


def _check_elementwise(
    optimizer: torch.optim.Optimizer,
    group: int,
    values: tuple[torch.Tensor, ...],
    param: torch.Tensor,
    state: dict[str, Any],
) -> None:
    """Step the probe in two halves: what depends on the whole parameter comes out different."""
    half = _PROBE_NUMEL // 2
    for part in (slice(0, half), slice(half, None)):
        part_param, part_state = _run(optimizer, group, tuple(v[part] for v in values), {})
        wanted = {
            key: value[part] if not _is_scalar(value) and value.shape == param.shape else value
            for key, value in state.items()
        }
        if not (same_bits(param[part], part_param) and _same_state(wanted, part_state)):
            raise UnsupportedError(
                f"{type(optimizer).__name__} updates half a parameter differently from the whole: "
                "it is not elementwise and cannot be streamed"
            )


def _zero_initial(
    optimizer: torch.optim.Optimizer,
    group: int,
    values: tuple[torch.Tensor, ...],
    param: torch.Tensor,
    state: dict[str, Any],
) -> dict[str, Any] | None:
    """Scalars that start off zeroed planes, if the bits of two steps say that there are any."""
    initial: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            given[key] = torch.zeros_like(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            given[key] = type(value)(0)
        else:
            return None
        if _is_scalar(value):
            initial[key] = copy_value(given[key])
    try:
        zero_param, zero_state = _run(optimizer, group, values, given)
    except Exception:  # noqa: BLE001 - an optimizer may choke on state that it did not make itself
        return None
    same = same_bits(param, zero_param) and _same_state(state, zero_state)
    return initial if same else None

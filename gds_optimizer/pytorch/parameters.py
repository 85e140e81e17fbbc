"""The parameters of an optimizer as an engine wants them: flat, named, with mains and gradients.

A half-precision parameter gets an fp32 main that exists in bucket files only. Any other one is its
own main and stays where it is. Both are 1-D views of the parameter's memory, which is followed when
somebody gives the parameter another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gds_optimizer.errors import UnsupportedError
from gds_optimizer.evicted import evicted_like
from gds_optimizer.plan import Binding
from gds_optimizer.pytorch.memory_order import memory_order, row_like, row_of

HALF_DTYPES = (torch.bfloat16, torch.float16)
"""Parameters of these are stepped through an fp32 main."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SHARDED = ("DTensor", "FlatParameter")


class CastGradient:
    """A gradient that becomes the main's dtype, and is unscaled, where it is used.

    Args:
        flat: 1-D, as the backward pass left it.
        dtype: of the main.
        factor: one fp32 element that multiplies it after the conversion; None for none.
    """

    def __init__(self, flat: torch.Tensor, dtype: torch.dtype, factor: torch.Tensor | None) -> None:
        self._flat, self._dtype, self._factor = flat, dtype, factor

    def stored(self) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        return self._flat, () if self._factor is None else (self._factor,)

    def convert(self, stored: torch.Tensor) -> torch.Tensor:
        values = stored.to(self._dtype)
        return values if self._factor is None else values * self._factor

    def __getitem__(self, where: slice) -> torch.Tensor:
        return self.convert(self._flat[where])


class Parameters:
    """Parameters of an optimizer, in its order, and what an engine binds for them.

    Args:
        optimizer: read, not changed. State that it holds travels in the bindings' `initial`.
        model: whose names are used in messages and files; None for names by position.

    Attributes:
        params: of all groups, in order.
        bindings: one for each.
        device: where they are.

    Raises:
        UnsupportedError: a parameter cannot be streamed; says which and why.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self.params: list[torch.Tensor] = [param for group in self._groups for param in group]
        names = _names(optimizer, model)
        for name, param in zip(names, self.params, strict=True):
            _refuse_parameter(name, param)
        _refuse_together(names, self.params)
        self.device = self.params[0].device
        self._views = [row_of(param.detach()) for param in self.params]
        self._orders = [memory_order(param) for param in self.params]
        self._addresses = [view.data_ptr() for view in self._views]
        self.bindings = [
            _binding(name, view, _held_planes(optimizer, param))
            for name, param, view in zip(names, self.params, self._views, strict=True)
        ]

    def mains_by_group(self) -> list[list[torch.Tensor]]:
        """The mains in place of the parameters of each group of the optimizer."""
        mains = iter(self.bindings)
        return [[next(mains).main for _ in group] for group in self._groups]

    def check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose parameters are no longer those of the setup.

        Raises:
            UnsupportedError
        """
        now = [list(map(id, group["params"])) for group in optimizer.param_groups]
        if now != [list(map(id, group)) for group in self._groups]:
            raise UnsupportedError(
                "the parameters in the optimizer's groups are not those that its state was set up "
                "for streaming with: close it, build it anew with all parameters and stream that"
            )

    def follow(self) -> None:
        """Take notice of parameters that were given other memory of the same kind.

        Raises:
            UnsupportedError: one has another shape, dtype or device now.
        """
        addresses = [param.data_ptr() for param in self.params]
        if addresses == self._addresses:
            return
        for param, view, order, binding in zip(
            self.params, self._views, self._orders, self.bindings, strict=True
        ):
            found = (param.numel(), param.dtype, param.device)
            wanted = (view.numel(), view.dtype, view.device)
            if found != wanted:
                raise UnsupportedError(
                    f"parameter {binding.name} was {_kind(*wanted)} when its state was set up for "
                    f"streaming and is {_kind(*found)} now: move or convert the model before that"
                )
            if memory_order(param) != order:
                raise UnsupportedError(
                    f"parameter {binding.name} has another memory format than when its state was "
                    "set up for streaming: change the model's memory format before that"
                )
            if view.data_ptr() != param.data_ptr():
                view.data = row_of(param.detach())
        self._addresses = addresses

    def take_gradients(self, factor: torch.Tensor | None = None) -> None:
        """Let the mains have the parameters' gradients; nothing is copied or converted.

        Args:
            factor: one fp32 element that multiplies all of them; None for none.

        Raises:
            UnsupportedError: a gradient is sparse, or of a subclass; no main has any then.
        """
        found: list[Any] = []
        for param, binding in zip(self.params, self.bindings, strict=True):
            grad, dtype = param.grad, binding.main.dtype
            if grad is None:
                found.append(None)
                continue
            if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
                kind = type(grad).__name__ if type(grad) is not torch.Tensor else str(grad.layout)
                raise UnsupportedError(
                    f"the gradient of parameter {binding.name} is of the kind {kind}: only dense "
                    "gradients are streamed (of an nn.Embedding, set sparse=False)"
                )
            flat = row_like(grad.detach(), param)
            is_plain = flat.dtype == dtype and factor is None
            found.append(flat if is_plain else CastGradient(flat, dtype, factor))
        for value, binding in zip(found, self.bindings, strict=True):
            _set_grad(binding.main, value)

    def drop_gradients(self) -> None:
        """The parameters' gradients are theirs alone again."""
        for binding in self.bindings:
            _set_grad(binding.main, None)


def _set_grad(main: Any, value: Any) -> None:
    """Where `gradients_of` looks for it: torch's own slot refuses what is no tensor."""
    is_lazy = isinstance(value, CastGradient)
    main.grad = None if is_lazy else value
    main._lazy_grad = value if is_lazy else None


def _binding(name: str, view: torch.Tensor, initial: dict[str, torch.Tensor]) -> Binding:
    if view.dtype in HALF_DTYPES:
        main = evicted_like(view, dtype=torch.float32, name=f"main parameter {name}")
        return Binding(name, main, view, initial or None)
    return Binding(name, view, None, initial or None)


def _held_planes(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """State tensors of the parameter's shape that the optimizer holds already, flat."""
    if not param.numel() or param not in optimizer.state:
        return {}
    return {
        key: row_like(value.detach(), param)
        for key, value in optimizer.state[param].items()
        if isinstance(value, torch.Tensor) and value.shape == param.shape
    }


def _names(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> list[str]:
    """A name for each parameter, all different: the model's, the group's own, or its place."""
    known = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    names: dict[str, None] = {}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for name, param in zip(_wanted_names(optimizer, known), params, strict=True):
        if not param.is_contiguous():
            # Its state lies in this order in the files, and must not be taken for the usual one.
            name = f"{name} in the order {memory_order(param)}"
        unique, number = name, 1
        while unique in names:
            number += 1
            unique = f"{name}#{number}"
        names[unique] = None
    return list(names)


def _wanted_names(optimizer: torch.optim.Optimizer, known: dict[int, str]) -> Iterator[str]:
    for number, group in enumerate(optimizer.param_groups):
        own = group.get("param_names") or [
            f"group{number}.param{place}" for place in range(len(group["params"]))
        ]
        for param, name in zip(group["params"], own, strict=True):
            yield known.get(id(param), name)


def _refuse_parameter(name: str, param: torch.Tensor) -> None:
    kind = type(param).__name__
    if kind in _SHARDED or getattr(param, "_fsdp_flattened", False):
        raise UnsupportedError(
            f"parameter {name} is sharded ({kind}): FSDP and DTensor parameters are not streamed; "
            "use DistributedDataParallel, or megatron-core's DistributedOptimizer"
        )
    if type(param) not in _PLAIN:
        raise UnsupportedError(
            f"parameter {name} is of the tensor subclass {kind}, whose memory is not a plain "
            "array: only torch.nn.Parameter and torch.Tensor are streamed"
        )
    if param.layout is not torch.strided or param.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"parameter {name} is {param.layout} on {param.device}: only dense parameters on cpu "
            "or cuda are streamed"
        )
    if not param.is_floating_point() or param.dtype.itemsize < 2:
        raise UnsupportedError(
            f"parameter {name} is {param.dtype}: only bf16, fp16, fp32 and fp64 are streamed"
        )
    if memory_order(param) is None:
        raise UnsupportedError(
            f"parameter {name} is no dense piece of memory (strides {param.stride()} for the shape "
            f"{tuple(param.shape)}): make it one (`param.data = param.data.contiguous()`)"
        )


def _refuse_together(names: Sequence[str], params: Sequence[torch.Tensor]) -> None:
    if not params:
        raise UnsupportedError("the optimizer has no parameters: there is nothing to stream")
    first: dict[int, str] = {}
    for name, param in zip(names, params, strict=True):
        other = first.setdefault(id(param), name)
        if other != name:
            raise UnsupportedError(
                f"parameter {other} is in the optimizer twice: give it each parameter once"
            )
        if param.device != params[0].device:
            raise UnsupportedError(
                f"parameter {name} is on {param.device} and {names[0]} on {params[0].device}: "
                "stream an optimizer for each device"
            )


def _kind(numel: int, dtype: torch.dtype, device: torch.device) -> str:
    return f"{numel} elements of {dtype} on {device}"

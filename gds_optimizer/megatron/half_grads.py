"""Gradients of mains that live in a half-precision buffer, without a full fp32 copy.

With `grad_reduce_in_fp32` off, Megatron converts every gradient shard to fp32 before it computes
the norm and clips: 4 bytes a parameter. Here a main's `.grad` is a `HalfGrad`: a view of
the half-precision shard that looks like its fp32 conversion and remembers by what it was scaled.
Reductions run over the half-precision values with fp32 accumulation; the conversion, and after it
every scaling in order, happens a piece at a time when the piece is stepped.

Which factor Megatron scales by is found out by letting it scale: `.detach()` and `.data` of a
`HalfGrad` hand out a one-element fp32 tensor of value 1 that stands for the whole shard. Whatever
multiplies it in place, a Python operator or a compiled multi-tensor kernel, leaves the factor in
it, and x * factor rounds as it would have in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

HALF_DTYPES = (torch.bfloat16, torch.float16)
# Elements converted at once where a whole shard must be looked at: 16 MiB of fp32.
_CHUNK_NUMEL = 2**22

_Tensor: Any = torch.Tensor  # its properties are looked at as descriptors, which typing hides
# Each access makes a new wrapper object, so these are compared by value, not by identity.
_GET_DATA = _Tensor.data.__get__
_GET_DTYPE = _Tensor.dtype.__get__
_GET_GRAD_FN = _Tensor.grad_fn.__get__
_METADATA = {
    *(
        getattr(_Tensor, name).__get__
        for name in ("shape", "device", "is_cuda", "ndim", "layout", "requires_grad", "is_sparse")
    ),
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.__len__,
    torch.Tensor.is_contiguous,
    torch.Tensor.requires_grad_,
    torch.Tensor.__hash__,
    torch.numel,
}
_COUNT_NONZERO = (torch.count_nonzero, torch.Tensor.count_nonzero)
_IN_PLACE_OPERATORS = {
    "__setitem__",
    "__set__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")),
    *(f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")),
}
_NORM = (torch.norm, torch.Tensor.norm, torch.linalg.vector_norm)


class _ShardView(torch.Tensor):
    """Common to `HalfGrad` and `ScaleHandle`: answers for the fp32 gradient it stands for."""

    _shard: torch.Tensor
    _scales: list[torch.Tensor]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        view = args[0] if args and isinstance(args[0], _ShardView) else None
        if view is not None:
            if func in _METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(view._shard, *args[1:], **kwargs)
            if func == _GET_DTYPE:
                return torch.float32
            if func == _GET_GRAD_FN:
                return None
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                return torch.empty(0, dtype=torch.float32, device=view._shard.device).type()
            if func is torch.Tensor.float or func is torch.Tensor.contiguous:
                return view
            if func is torch.Tensor.detach or func == _GET_DATA:
                return view.scale_handle()
            if func is torch.Tensor.__getitem__:
                return view.converted(args[1])
            if func in _COUNT_NONZERO and len(args) == 1 and not kwargs:
                return view.count_nonzero_exact()
            if func in _NORM:
                return view.norm_exact(func, args[1:], kwargs)
            if func is torch.Tensor.zero_:
                view._shard.zero_()
                view._scales.clear()
                return view
            in_place = view._scale_in_place(func, args, kwargs)
            if in_place is not None:
                return in_place
        if _changes_a_view(func, args, kwargs):
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} cannot change a gradient that is kept in half "
                "precision: only scaling it can be deferred; set grad_reduce_in_fp32"
            )
        # Anything else sees the fp32 values: right, at the price of one shard's memory.
        args, kwargs = _convert((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _scale_in_place(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """`grad *= factor`, in the forms in which frameworks write it."""
        factor: Any = None
        if func is torch.Tensor.mul_ and len(args) == 2 and not kwargs:
            factor = args[1]
        elif func is torch.Tensor.copy_ and isinstance(args[1], _Scaled) and args[1].of is self:
            factor = args[1].factor
        elif func in (torch.Tensor.mul, torch.mul, torch.Tensor.__mul__) and len(args) == 2:
            if isinstance(self, ScaleHandle) and _is_factor(args[1]):
                return _Scaled.make(self, args[1])
            return None
        if factor is None or not _is_factor(factor):
            return None
        scale = torch.ones(1, dtype=torch.float32, device=self._shard.device)
        self._scales.append(scale.mul_(factor))
        return self

    def scale_handle(self) -> ScaleHandle:
        """A one-element stand-in whose value becomes one more factor of the gradient."""
        scale = torch.ones(1, dtype=torch.float32, device=self._shard.device)
        self._scales.append(scale)
        handle = scale.as_subclass(ScaleHandle)
        handle._shard, handle._scales = self._shard, self._scales
        return handle

    def stored(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The half-precision shard, and the one-element fp32 factors in order."""
        return self._shard, self._scales

    def converted(self, where: Any = slice(None)) -> torch.Tensor:
        """A part of the gradient in fp32 with every factor applied, in order."""
        return self.convert(self._shard[where])

    def convert(self, stored: torch.Tensor) -> torch.Tensor:
        """Half-precision values in fp32 with every factor of this gradient applied, in order."""
        values: torch.Tensor = stored.float()
        for scale in self._scales:
            values.mul_(scale if values.dim() else scale[0])
        return values

    def count_nonzero_exact(self) -> torch.Tensor:
        counts = [
            torch.count_nonzero(self.converted(slice(start, start + _CHUNK_NUMEL)))
            for start in range(0, self._shard.numel(), _CHUNK_NUMEL)
        ]
        return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)

    def norm_exact(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """The norm of the fp32 gradient, with the bits it would have.

        Frameworks take the norm before they clip, when there is no factor yet; accumulating the
        half-precision values in fp32 then adds the same numbers in the same order.
        """
        norm: torch.Tensor
        if self._scales or args or kwargs:
            norm = func(self.converted(), *args, **kwargs)
        else:
            norm = torch.linalg.vector_norm(self._shard, dtype=torch.float32)
        return norm

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(shape={tuple(self._shard.shape)}, kept in "
            f"{self._shard.dtype}, {len(self._scales)} factors)"
        )


class HalfGrad(_ShardView):
    """An fp32 gradient that is kept in half precision.

    To compiled code, which looks past torch's dispatch, it is the half-precision shard itself:
    right for reductions that accumulate in fp32.
    """

    @staticmethod
    def of(shard: torch.Tensor) -> HalfGrad:
        """Args: shard: 1-D bf16 or fp16 tensor; it is read when the gradient is used."""
        grad = shard.view(shard.shape).as_subclass(HalfGrad)
        grad._shard, grad._scales = shard, []
        return grad


class ScaleHandle(_ShardView):
    """What `HalfGrad.detach()` gives: in memory one fp32 element that collects a factor."""


class _Scaled(torch.Tensor):
    """`handle * factor`, not computed: it only makes sense copied back into the handle."""

    of: _ShardView
    factor: Any

    @staticmethod
    def make(of: _ShardView, factor: Any) -> _Scaled:
        scaled = torch.empty(0).as_subclass(_Scaled)
        scaled.of, scaled.factor = of, factor
        return scaled

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = _convert((args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) or (
        isinstance(value, torch.Tensor) and not isinstance(value, _ShardView) and value.numel() == 1
    )


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS


def _changes_a_view(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether an operation would write to a lazy gradient, and with `_convert` to a mere copy."""
    targets = [kwargs.get("out")]
    if _is_in_place(func):
        targets += args[:1] or list(kwargs.values())[:1]
    return any(
        isinstance(item, _ShardView | _Scaled)
        for target in targets
        for item in (target if isinstance(target, list | tuple) else (target,))
    )


def _convert(value: Any) -> Any:
    """Replace lazy gradients by their fp32 values, in nested arguments."""
    if isinstance(value, _ShardView):
        return value.converted()
    if isinstance(value, _Scaled):
        return value.of.converted() * value.factor
    if isinstance(value, list | tuple):
        return type(value)(_convert(item) for item in value)
    if isinstance(value, dict):
        return {key: _convert(item) for key, item in value.items()}
    return value


class _KeepHalf(TorchFunctionMode):
    """`.float()` of a half-precision shard gives a `HalfGrad` instead of a copy."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float and args[0].dtype in HALF_DTYPES:
            return HalfGrad.of(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def half_grads_kept() -> Iterator[None]:
    """Inside, a framework's "copy this gradient to fp32" makes `HalfGrad`s."""
    with _KeepHalf():
        yield

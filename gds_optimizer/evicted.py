"""Stand-ins for state that is on disk: they have the shape, and say so when somebody reads them.

`EvictedTensor` takes the place of a main parameter in the optimizer's groups between steps. It
has the main's shape, dtype, device, attributes and gradient, takes no memory, and raises when code
touches its values. Compiled extensions that bypass torch's dispatch see a broadcast NaN.

`EvictedState` takes the place of a parameter's state: scalars are there, tensors of the
parameter's shape raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from types import NoneType
from typing import Any

import torch

from gds_optimizer.errors import EvictedReadError

# Reading these tells nothing about values.
_METADATA_GETTERS = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "names",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_leaf",
    "requires_grad",
    "grad",
    "grad_fn",
    "_grad",
    "_version",
    "_backward_hooks",
    "output_nr",
    "retains_grad",
    "itemsize",
    "nbytes",
)
_METADATA_METHODS = (
    "size",
    "numel",
    "nelement",
    "dim",
    "ndimension",
    "stride",
    "storage_offset",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_inference",
    "is_pinned",
    "is_shared",
    "element_size",
    "get_device",
    "requires_grad_",
    "retain_grad",
    "__len__",
    "__hash__",
)


def _collect_allowed() -> frozenset[Any]:
    allowed: set[Any] = {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed}
    for name in _METADATA_GETTERS:
        attribute = getattr(torch.Tensor, name, None)
        if attribute is not None and hasattr(attribute, "__get__"):
            allowed.add(attribute.__get__)
    for name in ("grad", "requires_grad", "_backward_hooks"):
        setter = getattr(getattr(torch.Tensor, name), "__set__", None)
        deleter = getattr(getattr(torch.Tensor, name), "__delete__", None)
        allowed.update(function for function in (setter, deleter) if function is not None)
    for name in _METADATA_METHODS:
        method = getattr(torch.Tensor, name, None)
        if method is not None:
            allowed.add(method)
    return frozenset(allowed)


_ALLOWED = _collect_allowed()
_GRAD: Any = torch.Tensor.grad  # torch's own slot, which the class below hides
_DATA: Any = torch.Tensor.data
# Each access makes a new wrapper object, so it is compared by value, not by identity.
_DATA_GETTER = _DATA.__get__


def _name_of(func: Callable[..., Any]) -> str:
    """ "add" for torch.add, "T" for the getter of Tensor.T."""
    name = getattr(func, "__name__", repr(func))
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


@functools.lru_cache(maxsize=64)
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((1,), float("nan"), dtype=dtype, device=device)


class EvictedTensor(torch.Tensor):
    """A tensor whose values are on disk. Create it with `evicted_like` or `evict_`.

    Attributes:
        evicted_name: what error messages call it.
        streaming_engine: weak reference to what keeps its values, once something does.
    """

    evicted_name: str
    streaming_engine: Callable[[], Any]
    _is_present: bool
    _lazy_grad: torch.Tensor | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, EvictedTensor) and not first._is_present:
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                return torch.empty(0, dtype=first.dtype, device=first.device).type()
            # `.data` and `.detach()` are handles, not reads: whoever reads through them raises.
            if func is torch.Tensor.detach or func == _DATA_GETTER:
                return first
            if func is torch.Tensor.copy_ and _capture.sink is not None:
                _capture.sink(first, args[1])
                return first
        if func not in _ALLOWED:
            for tensor in _evicted_in(args, kwargs):
                raise EvictedReadError(
                    f"{_name_of(func)} needs the values of {tensor.evicted_name}, "
                    "which are on disk between optimizer steps: wrap the code in "
                    "`with materialized(params):`"
                )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # The gradient may be of a kind that torch's own slot refuses (see `half_grads`): keep it here.
    @property
    def grad(self) -> torch.Tensor | None:
        lazy = self._lazy_grad
        if lazy is not None:
            return lazy
        with torch._C.DisableTorchFunctionSubclass():  # it would only be allowed, and takes longer
            own: torch.Tensor | None = _GRAD.__get__(self)
        return own

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        is_lazy = value is not None and type(value) is not torch.Tensor
        self._lazy_grad = value if is_lazy else None
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, None if is_lazy else value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._is_present:
            return repr(self.as_subclass(torch.Tensor))
        return (
            f"EvictedTensor({self.evicted_name!r}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        raise EvictedReadError(f"{self.evicted_name} cannot be copied: its values are on disk")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EvictedReadError(f"{self.evicted_name} cannot be pickled: its values are on disk")


def gradients_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of tensors, evicted or not, in less time than asking each of them takes."""
    own: list[torch.Tensor | None] = list(map(_GRAD.__get__, tensors))
    lazies = list(map(getattr, tensors, repeat("_lazy_grad"), repeat(None)))
    if set(map(type, lazies)) != {NoneType}:
        for index, lazy in enumerate(lazies):
            if lazy is not None:
                own[index] = lazy
    return own


def _evicted_in(args: Any, kwargs: Any) -> Iterator[EvictedTensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, EvictedTensor):
            if not value._is_present:
                yield value
        elif isinstance(value, list | tuple):
            yield from _evicted_in(value, {})


class _Capture:
    sink: Callable[[EvictedTensor, torch.Tensor], None] | None = None


_capture = _Capture()


@contextmanager
def captured_copies() -> Iterator[dict[int, torch.Tensor]]:
    """Inside, `evicted.copy_(source)` records the source instead of raising.

    A framework's own code that refreshes mains from somewhere runs unchanged, and its sources can
    then be streamed bucket by bucket.

    Yields:
        id(evicted tensor) -> source tensor.
    """
    sources: dict[int, torch.Tensor] = {}
    previous = _capture.sink
    _capture.sink = lambda evicted, source: sources.__setitem__(id(evicted), source)
    try:
        yield sources
    finally:
        _capture.sink = previous


def evicted_like(reference: torch.Tensor, *, dtype: torch.dtype, name: str) -> EvictedTensor:
    """An evicted tensor of `reference`'s shape and device; takes no memory."""
    tensor = _nan(dtype, reference.device).expand(reference.shape).as_subclass(EvictedTensor)
    tensor.evicted_name = name
    tensor._is_present = False
    tensor._lazy_grad = None
    return tensor


def evict_(
    tensor: torch.Tensor,
    *,
    name: str,
    shape: torch.Size | None = None,
    device: torch.device | None = None,
) -> None:
    """Turn a tensor that others hold into an evicted one, in place, and free its memory.

    `shape` and `device` replace the tensor's own, where its values were released already.
    """
    shape = tensor.shape if shape is None else shape
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = _nan(tensor.dtype, device or tensor.device).expand(shape)
    tensor.__class__ = EvictedTensor
    evicted = tensor
    evicted.evicted_name = name  # type: ignore[attr-defined]
    evicted._is_present = False  # type: ignore[attr-defined]
    evicted._lazy_grad = None  # type: ignore[attr-defined]


def restore_(tensor: EvictedTensor, values: torch.Tensor) -> None:
    """Give an evicted tensor real values: from here on it behaves like any other."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = values
    tensor._is_present = True


def release_(tensor: EvictedTensor) -> None:
    """Undo `restore_`: drop the values again."""
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
        tensor.data = _nan(dtype, device).expand(shape)
    tensor._is_present = False


class EvictedState(dict[str, Any]):
    """A parameter's optimizer state without its planes: `state["step"]` works, a plane raises.

    So does copying or pickling it as a whole, since the result would look like a state and lack
    its moments.
    """

    def __init__(self, scalars: dict[str, Any], name: str, planes: tuple[str, ...]) -> None:
        super().__init__(scalars)
        self.name = name
        self.planes = planes

    def _refuse_plane(self, key: str) -> None:
        if key in self.planes and key not in self:
            raise self._error(key)

    def _error(self, what: str) -> EvictedReadError:
        return EvictedReadError(
            f"{what} of {self.name} is on disk between optimizer steps: save a checkpoint or "
            "use the streamed optimizer's own readers"
        )

    def __missing__(self, key: str) -> Any:
        self._refuse_plane(key)
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._refuse_plane(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._refuse_plane(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._refuse_plane(key)
        return super().setdefault(key, default)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._error(" and ".join(self.planes))

"""Half-precision gradients that pass for their fp32 conversion, bit for bit.

`Both` holds a gradient twice: converted in full, as the framework does it, and kept in half
precision. Whatever is done to both must give the same bits.
"""

from __future__ import annotations

import copy
import ctypes
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gds_optimizer.evicted import evicted_like
from gds_optimizer.megatron import half_grads as module
from gds_optimizer.megatron.half_grads import HalfGrad, ScaleHandle, half_grads_kept
from tests.support.engines import same_bits

DTYPES = [torch.bfloat16, torch.float16]
# Factors that do not round away: none is a power of two.
CLIP, UNSCALE = 0.3337, 1 / 3


class Both:
    def __init__(
        self, numel: int = 1000, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shard = torch.randn(numel, generator=generator).to(dtype)
        self.shard[::7] = 0.0
        self.full = self.shard.float()
        self.kept = HalfGrad.of(self.shard)

    def check(self) -> None:
        assert same_bits(self.full, self.kept.converted())
        assert same_bits(self.full[3:5], self.kept[3:5])


both_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@both_dtypes
def test_unscaled_it_is_the_conversion(dtype):
    both = Both(dtype=dtype)
    both.check()
    assert both.kept.converted().data_ptr() != both.shard.data_ptr()


def test_it_looks_like_an_fp32_gradient():
    both = Both(12)
    for grad in (both.kept, both.kept.detach(), both.kept.data):
        assert grad.dtype == torch.float32
        assert grad.type() == "torch.FloatTensor"
        for attribute in ("shape", "device", "ndim", "is_cuda", "layout", "is_sparse", "grad_fn"):
            assert getattr(grad, attribute) == getattr(both.full, attribute), attribute
        assert not grad.requires_grad
        assert grad.numel() == torch.numel(grad) == grad.nelement() == len(grad) == 12
        assert (grad.size(), grad.size(0), grad.dim()) == (torch.Size([12]), 12, 1)
        assert grad.is_contiguous()
        assert grad.float() is grad
        assert grad.contiguous() is grad
        assert len({grad}) == 1
    assert repr(both.kept).startswith("HalfGrad(shape=(12,), kept in torch.bfloat16, ")


def test_it_takes_no_memory_of_its_own():
    both = Both(12)
    with torch._C.DisableTorchFunctionSubclass():
        assert both.kept.data_ptr() == both.shard.data_ptr()
        assert torch.Tensor.dtype.__get__(both.kept) == torch.bfloat16
        assert both.kept.detach().numel() == 12  # plain torch, past the stand-in
    with torch._C.DisableTorchFunctionSubclass():
        handle = HalfGrad.scale_handle(both.kept)
        assert (torch.numel(handle), torch.Tensor.dtype.__get__(handle)) == (1, torch.float32)


# Norms and zeros


@pytest.mark.parametrize("numel", [0, 1, 5, 64, 1000, 65537])
@both_dtypes
def test_norms_have_the_same_bits(numel, dtype):
    both = Both(numel, dtype)
    assert same_bits(torch.norm(both.full), torch.norm(both.kept))
    assert same_bits(both.full.norm(), both.kept.norm())
    assert same_bits(torch.linalg.vector_norm(both.full), torch.linalg.vector_norm(both.kept))
    if numel:
        inf = torch.inf
        assert same_bits(torch.norm(both.full, inf), torch.norm(both.kept, inf))
    assert same_bits(torch.norm(both.full, 3.0), torch.norm(both.kept, 3.0))
    assert same_bits(both.full.abs().max(), both.kept.abs().max()) if numel else True


def test_the_norm_after_scaling_is_that_of_the_scaled_values():
    both = Both()
    for grad in (both.full, both.kept):
        grad.mul_(CLIP)
    assert same_bits(torch.norm(both.full), torch.norm(both.kept))


def test_the_norm_of_huge_values_does_not_overflow_in_half_precision():
    both = Both(dtype=torch.float16)
    for values in (both.shard, both.full):
        values.fill_(60000.0)
    norm = torch.norm(both.kept)
    assert torch.isfinite(norm)
    assert same_bits(torch.norm(both.full), norm)


@pytest.mark.parametrize("numel", [0, 1, 1000])
def test_zeros_are_counted(numel):
    both = Both(numel)
    for values in (both.full, both.kept):
        count = torch.count_nonzero(values)
        assert (count.dtype, count.item()) == (torch.int64, int((both.full != 0).sum()))
    assert both.kept.count_nonzero().item() == torch.count_nonzero(both.full).item()
    # As frameworks do it.
    zeros = both.kept.numel() - torch.count_nonzero(both.kept)
    assert zeros == both.full.numel() - torch.count_nonzero(both.full)


def test_zeros_are_counted_in_chunks(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_NUMEL", 64)
    both = Both(1000)
    sizes = []
    convert = HalfGrad.converted

    def converted(self: HalfGrad, where: Any = slice(None)) -> torch.Tensor:
        values = convert(self, where)
        sizes.append(values.numel())
        return values

    monkeypatch.setattr(HalfGrad, "converted", converted)
    assert torch.count_nonzero(both.kept) == torch.count_nonzero(both.full)
    assert sizes == [64] * 15 + [40]


def test_values_that_scaling_rounds_to_zero_count_as_zeros():
    both = Both(dtype=torch.bfloat16)
    both.shard[1] = both.full[1] = 1e-38
    for grad in (both.full, both.kept):
        grad.mul_(1e-20)
    assert torch.count_nonzero(both.kept) == torch.count_nonzero(both.full)


# Scaling


def local_multi_tensor_scale(lists: list[list[torch.Tensor]], scale: float) -> None:
    """megatron-core's own, used without its fused kernels."""
    for source, target in zip(lists[0], lists[1], strict=True):
        target.copy_(source * scale)


def compiled_multi_tensor_scale(lists: list[list[torch.Tensor]], scale: float) -> None:
    """A kernel that goes by address, dtype and length and knows nothing of torch's dispatch."""
    with torch._C.DisableTorchFunctionSubclass():
        for source, target in zip(lists[0], lists[1], strict=True):
            assert torch.Tensor.dtype.__get__(source) == torch.float32
            assert torch.Tensor.dtype.__get__(target) == torch.float32
            values = [
                (ctypes.c_float * torch.numel(tensor)).from_address(tensor.data_ptr())
                for tensor in (source, target)
            ]
            scaled = torch.frombuffer(values[0], dtype=torch.float32) * scale
            torch.frombuffer(values[1], dtype=torch.float32).copy_(scaled)


def assign_multiplied(grad: torch.Tensor, factor: Any) -> None:
    grad *= factor


SCALINGS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "mul_": lambda g, f: g.mul_(f),
    "imul": assign_multiplied,
    "data.mul_": lambda g, f: g.data.mul_(f),
    "detach.mul_": lambda g, f: g.detach().mul_(f),
    "local": lambda g, f: local_multi_tensor_scale([[d := g.detach()], [d]], f),
    "local_data": lambda g, f: local_multi_tensor_scale([[d := g.data], [d]], f),
    "compiled": lambda g, f: compiled_multi_tensor_scale([[d := g.detach()], [d]], float(f)),
    "mul_tensor": lambda g, f: g.mul_(torch.tensor(f, dtype=torch.float32)),
    "mul_tensor_1": lambda g, f: g.mul_(torch.tensor([f], dtype=torch.float32)),
    "local_tensor": lambda g, f: local_multi_tensor_scale(
        [[d := g.detach()], [d]],
        torch.tensor(f),  # type: ignore[arg-type]
    ),
    "torch.mul": lambda g, f: (d := g.detach()).copy_(torch.mul(d, f)),
}


@pytest.mark.parametrize("name", SCALINGS)
@both_dtypes
def test_scaling_in_place(name, dtype):
    both = Both(dtype=dtype)
    for grad in (both.full, both.kept):
        SCALINGS[name](grad, CLIP)
    both.check()
    assert not same_bits(both.full, both.shard.float())


@pytest.mark.parametrize("second", ["mul_", "local", "compiled"])
@pytest.mark.parametrize("first", SCALINGS)
def test_factors_apply_in_order_and_are_not_merged(first, second):
    both = Both()
    for grad in (both.full, both.kept):
        SCALINGS[first](grad, UNSCALE)
        SCALINGS[second](grad, CLIP)
    both.check()
    assert not same_bits(both.full, both.shard.float() * (UNSCALE * CLIP))


@settings(max_examples=60)
@given(
    factors=st.lists(
        st.tuples(
            st.sampled_from(sorted(SCALINGS)),
            st.floats(1e-6, 1e6),
        ),
        max_size=5,
    ),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
)
def test_any_sequence_of_scalings(factors, seed, dtype):
    both = Both(257, dtype, seed=seed)
    for name, factor in factors:
        for grad in (both.full, both.kept):
            SCALINGS[name](grad, factor)
    both.check()


def test_extreme_factors():
    for factor in (0.0, float("inf"), float("nan"), 1e-45, -1.0):
        both = Both()
        for grad in (both.full, both.kept):
            grad.mul_(factor)
        assert same_bits(both.full, both.kept.converted()), factor


def test_the_half_precision_values_are_not_touched():
    both = Both()
    before = both.shard.clone()
    for scaling in SCALINGS.values():
        scaling(both.kept, CLIP)
    assert same_bits(both.shard, before)


def test_a_handle_that_nobody_scales_changes_nothing():
    both = Both()
    both.kept.detach()
    both.kept.data  # noqa: B018
    both.check()


def test_slices_are_converted_on_their_own():
    both = Both(1000)
    for grad in (both.full, both.kept):
        grad.mul_(CLIP)
    for where in (slice(0, 64), slice(64, 1000), slice(None), slice(3, 3), slice(999, 1000)):
        part = both.kept[where]
        assert type(part) is torch.Tensor
        assert part.dtype == torch.float32
        assert same_bits(both.full[where], part)


def test_a_slice_is_a_copy_that_may_be_changed():
    both = Both()
    before = both.shard.clone()
    both.kept[:10].mul_(5)
    both.check()
    assert same_bits(both.shard, before)


def test_zeroing_drops_the_values_themselves():
    both = Both()
    both.kept.mul_(float("inf"))
    both.kept.zero_()
    assert not both.shard.any()
    assert not both.kept.converted().any()


# Everything else sees the fp32 values

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda g: g.sum(),
    "abs_max": lambda g: g.abs().max(),
    "isinf": lambda g: torch.isinf(g).any(),
    "add": lambda g: g + 1,
    "radd": lambda g: 1 + g,
    "times": lambda g: g * 2.5,
    "times_itself": lambda g: g * g,
    "dot": lambda g: torch.dot(g, g),
    "stack": lambda g: torch.stack([g, g]),
    "foreach": lambda g: torch._foreach_norm([g])[0],
    "into_another": lambda g: torch.ones(1000).add_(g),
    "copied": lambda g: torch.empty(1000).copy_(g),
    "lerp": lambda g: torch.zeros(1000).lerp_(g, 0.1),
    "addcmul": lambda g: torch.zeros(1000).addcmul_(g, g, value=0.5),
    "clone": lambda g: g.clone(),
    "view": lambda g: g.view(10, 100),
    "to": lambda g: g.to(torch.float64),
    "compare": lambda g: g == 0,
    "keyword": lambda g: torch.add(input=torch.ones(1000), other=g),
    "numpy": lambda g: torch.from_numpy(g.numpy()),
    "iterate": lambda g: torch.stack(list(g)),
    "unbind": lambda g: torch.stack(g.unbind()),
    "item": lambda g: g[5].item(),
    "tolist": lambda g: torch.tensor(g.tolist()),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("through", ["grad", "detach", "data"])
def test_other_operations_see_the_fp32_values(name, through):
    both = Both()
    results = []
    for grad in (both.full, both.kept):
        grad.mul_(CLIP)
        grad = grad if through == "grad" else getattr(grad, through)
        results.append(OPERATIONS[name](grad() if callable(grad) and through == "detach" else grad))
    assert same_bits(*results)
    both.check()


# What cannot be deferred

REFUSED: dict[str, Callable[[Any], Any]] = {
    "add_": lambda g: g.add_(1),
    "iadd": lambda g: operator.iadd(g, 1),
    "sub_": lambda g: g.sub_(g),
    "div_": lambda g: g.div_(3),
    "itruediv": lambda g: operator.itruediv(g, 3),
    "mul_by_vector": lambda g: g.mul_(torch.ones(1000)),
    "fill_": lambda g: g.fill_(1),
    "clamp_": lambda g: g.clamp_(-1, 1),
    "copy_": lambda g: g.copy_(torch.ones(1000)),
    "copy_other": lambda g: g.copy_(HalfGrad.of(torch.ones(1000, dtype=torch.bfloat16))),
    "copy_other_scaled": lambda g: g.copy_(
        HalfGrad.of(torch.ones(1000, dtype=torch.bfloat16)).detach() * 2.0
    ),
    "set_item": lambda g: operator.setitem(g, 0, 1.0),
    "set_slice": lambda g: operator.setitem(g, slice(0, 5), 0.0),
    "foreach_mul_": lambda g: torch._foreach_mul_([g], 2.0),
    "foreach_div_": lambda g: torch._foreach_div_([torch.ones(3), g], 2.0),
    "foreach_zero_": lambda g: torch._foreach_zero_([g]),
    "foreach_copy_": lambda g: torch._foreach_copy_([g], [torch.ones(1000)]),
    "out": lambda g: torch.mul(torch.ones(1000), 2, out=g),
    "out_list": lambda g: torch.aminmax(torch.ones(5), out=(g, g)),
    "nan_to_num_": torch.nan_to_num_,
    "clip_grad_norm": lambda g: torch._foreach_mul_([g.detach()], torch.tensor(0.5)),
    "unscale": lambda g: torch._amp_foreach_non_finite_check_and_unscale_(
        [g], torch.zeros(1), torch.ones(1)
    ),
    "set_data": lambda g: setattr(g, "data", torch.ones(1000)),
}


@pytest.mark.parametrize("through", ["grad", "detach"])
@pytest.mark.parametrize("name", REFUSED)
def test_other_changes_are_refused_rather_than_lost(name, through):
    both = Both()
    grad = both.kept if through == "grad" else both.kept.detach()
    with pytest.raises(RuntimeError, match=r"cannot change a gradient that is kept in half"):
        REFUSED[name](grad)
    both.check()


def test_a_single_number_can_be_read():
    both = Both(1)
    both.shard.fill_(3.0)
    assert (float(both.kept), int(both.kept), bool(both.kept)) == (3.0, 3, True)


def test_copies_of_the_object_are_its_fp32_values():
    both = Both()
    for grad in (both.full, both.kept):
        grad.mul_(CLIP)
    assert same_bits(both.full, copy.deepcopy(both.kept))


# Where they come from


@both_dtypes
def test_the_frameworks_own_conversion_makes_them(dtype):
    shard = torch.ones(12, dtype=dtype)
    with half_grads_kept():
        grad = shard.float()
        assert isinstance(grad, HalfGrad)
        assert type(torch.ones(3).float()) is torch.Tensor
        assert type(torch.ones(3, dtype=torch.float64).float()) is torch.Tensor
        assert type(torch.ones(3, dtype=torch.int32).float()) is torch.Tensor
        assert type(shard * 2) is torch.Tensor
    assert type(shard.float()) is torch.Tensor
    shard.fill_(3)
    assert grad.converted().tolist() == [3.0] * 12  # read when it is used


def test_an_evicted_main_takes_them():
    main = evicted_like(torch.ones(12), dtype=torch.float32, name="main")
    with half_grads_kept():
        main.grad = torch.ones(12, dtype=torch.bfloat16).float()
    assert isinstance(main.grad, HalfGrad)
    assert isinstance(main.grad.detach(), ScaleHandle)
    main.grad.data.mul_(CLIP)
    assert same_bits(main.grad[2:4], torch.ones(2).mul_(CLIP))


def test_the_conversion_of_a_slice_needs_the_memory_of_the_slice():
    """Of a gradient of 2**36 elements that takes no memory, a piece can be had."""
    shard = torch.ones(1, dtype=torch.bfloat16).expand(2**36)
    grad = HalfGrad.of(shard)
    grad.mul_(0.5)
    assert grad[2**35 : 2**35 + 4].tolist() == [0.5] * 4

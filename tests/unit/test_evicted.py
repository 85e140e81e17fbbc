"""Stand-ins for values on disk: they look like what they stand for, and say so when read."""

from __future__ import annotations

import copy
import ctypes
import io
import math
import operator
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gds_optimizer.errors import EvictedReadError
from gds_optimizer.evicted import (
    EvictedState,
    EvictedTensor,
    captured_copies,
    evict_,
    evicted_like,
    release_,
    restore_,
)

NAME = "main parameter layers.0.weight[0:12]"


@pytest.fixture
def evicted() -> EvictedTensor:
    return evicted_like(torch.zeros(12, dtype=torch.bfloat16), dtype=torch.float32, name=NAME)


OTHER = torch.ones(12)

READS: dict[str, Any] = {
    "add": lambda e: e + 1,
    "radd": lambda e: 1 + e,
    "add_tensor": lambda e: e + OTHER,
    "radd_tensor": lambda e: OTHER + e,
    "mul_": lambda e: e.mul_(2),
    "iadd": lambda e: operator.iadd(e, 1),
    "into_another": lambda e: OTHER.clone().add_(e),
    "copy_to_another": lambda e: OTHER.clone().copy_(e),
    "copy_": lambda e: e.copy_(OTHER),
    "data_copy_": lambda e: e.data.copy_(OTHER),
    "data": lambda e: e.data + 0,
    "set_data": lambda e: setattr(e, "data", OTHER),
    "detach": lambda e: e.detach().sum(),
    "zero_": lambda e: e.zero_(),
    "fill_": lambda e: e.fill_(0),
    "neg": lambda e: -e,
    "matmul": lambda e: e @ OTHER,
    "equal": lambda e: torch.equal(e, OTHER),
    "compare": lambda e: e == OTHER,
    "less": lambda e: e < 0,
    "allclose": lambda e: torch.allclose(OTHER, e),
    "sum": lambda e: e.sum(),
    "norm": lambda e: e.norm(),
    "torch_norm": torch.norm,
    "vector_norm": torch.linalg.vector_norm,
    "foreach_norm": lambda e: torch._foreach_norm([OTHER, e]),
    "foreach_mul_": lambda e: torch._foreach_mul_([e], 2.0),
    "foreach_copy_": lambda e: torch._foreach_copy_([OTHER.clone()], [e]),
    "isnan": lambda e: torch.isnan(e).any(),
    "any": lambda e: e.any(),
    "stack": lambda e: torch.stack([OTHER, e]),
    "cat": lambda e: torch.cat((OTHER, e)),
    "where": lambda e: torch.where(OTHER > 0, e, OTHER),
    "keyword": lambda e: torch.add(input=OTHER, other=e),
    "out": lambda e: torch.add(OTHER, OTHER, out=e),
    "index": lambda e: e[0],
    "slice": lambda e: e[2:5],
    "set_index": lambda e: operator.setitem(e, 0, 1.0),
    "iterate": list,
    "view": lambda e: e.view(3, 4),
    "reshape": lambda e: e.reshape(-1),
    "transpose": lambda e: e.T,
    "narrow": lambda e: e.narrow(0, 1, 2),
    "split": lambda e: e.split(4),
    "clone": lambda e: e.clone(),
    "to_dtype": lambda e: e.to(torch.bfloat16),
    "to_device": lambda e: e.to("meta"),
    "half": lambda e: e.bfloat16(),
    "float": lambda e: e.float(),
    "double": lambda e: e.double(),
    "cpu": lambda e: e.cpu(),
    "contiguous": lambda e: e.contiguous(),
    "tolist": lambda e: e.tolist(),
    "item": lambda e: e.item(),
    "float()": float,
    "bool()": bool,
    "int()": int,
    "numpy": lambda e: e.numpy(),
    "asarray": np.asarray,
    "numpy_sum": lambda e: np.add(e, 1),
    "dlpack": torch.from_dlpack,
    "format": lambda e: f"{e:.3f}",
    "contains": lambda e: 1.0 in e,
    "data_ptr": lambda e: e.data_ptr(),
    "storage": lambda e: e.untyped_storage(),
    "share_memory": lambda e: e.share_memory_(),
    "optimizer": lambda e: torch.optim.SGD([e], lr=1).param_groups[0]["params"][0] + 1,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "save": lambda e: torch.save(e, io.BytesIO()),
    "save_nested": lambda e: torch.save({"a": [e]}, io.BytesIO()),
    "deepcopy_nested": lambda e: copy.deepcopy({"a": [e]}),
}


@pytest.mark.parametrize("name", READS)
def test_every_way_to_the_values_is_refused_by_name(evicted, name):
    with pytest.raises(EvictedReadError) as caught:
        READS[name](evicted)
    assert NAME in str(caught.value)


def test_the_message_says_what_was_wanted_and_what_to_do(evicted):
    with pytest.raises(EvictedReadError) as caught:
        torch.add(evicted, 1)
    assert str(caught.value) == (
        f"add needs the values of {NAME}, which are on disk between optimizer steps: wrap the "
        "code in `with materialized(params):`"
    )
    with pytest.raises(EvictedReadError, match=r"^T needs the values"):
        evicted.T  # noqa: B018


METADATA = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_leaf"),
    *("requires_grad", "grad", "grad_fn"),
)
METADATA_METHODS = (
    *("size", "numel", "nelement", "dim", "element_size", "type"),
    *("is_floating_point", "is_complex"),
)


def test_metadata_is_that_of_the_main(evicted):
    real = torch.zeros(12)
    for attribute in METADATA:
        assert getattr(evicted, attribute) == getattr(real, attribute), attribute
    for method in METADATA_METHODS:
        assert getattr(evicted, method)() == getattr(real, method)(), method
    assert len(evicted) == 12
    assert evicted.size(0) == 12
    assert torch.numel(evicted) == 12
    assert torch.is_tensor(evicted)
    assert torch.is_floating_point(evicted)
    assert isinstance(evicted, torch.Tensor)
    assert evicted.type() == "torch.FloatTensor"


def test_it_can_be_a_key_and_be_told_apart(evicted):
    other = evicted_like(torch.zeros(12), dtype=torch.float32, name="other")
    table = {evicted: 1, other: 2}
    assert (table[evicted], table[other]) == (1, 2)
    assert len({evicted, other, evicted}) == 2


def test_it_takes_attributes(evicted):
    evicted.shared = True
    evicted.tensor_model_parallel = False
    assert (evicted.shared, evicted.tensor_model_parallel) == (True, False)


def test_its_description_reads_nothing(evicted):
    assert repr(evicted) == (
        f"EvictedTensor({NAME!r}, shape=(12,), dtype=torch.float32, device=cpu)"
    )
    assert repr([evicted]).startswith("[EvictedTensor(")


@pytest.mark.parametrize("numel", [0, 1, 10**12])
def test_it_takes_no_memory(numel):
    reference = torch.empty(1, dtype=torch.bfloat16).expand(numel)
    evicted = evicted_like(reference, dtype=torch.float32, name="huge")
    assert evicted.shape == (numel,)
    with torch._C.DisableTorchFunctionSubclass():
        assert evicted.untyped_storage().nbytes() == 4


def test_compiled_code_that_looks_past_torch_sees_nan(evicted):
    with torch._C.DisableTorchFunctionSubclass():
        assert math.isnan(ctypes.c_float.from_address(evicted.data_ptr()).value)
        assert evicted.stride() == (0,)
        with pytest.raises(RuntimeError, match="single memory location"):
            evicted.add_(1)


# Gradients


def test_gradients_can_be_set_read_and_dropped(evicted):
    assert evicted.grad is None
    grad = torch.ones(12)
    evicted.grad = grad
    assert evicted.grad is grad
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.Tensor.grad.__get__(evicted) is grad
    evicted.grad = None
    assert evicted.grad is None
    evicted.grad = grad
    del evicted.grad
    assert evicted.grad is None


def test_a_gradient_of_another_shape_is_refused(evicted):
    with pytest.raises(RuntimeError, match="grad"):
        evicted.grad = torch.ones(5)


class LazyGrad(torch.Tensor):
    pass


def test_gradients_of_a_kind_of_their_own_are_kept_aside(evicted):
    lazy = torch.ones(12, dtype=torch.bfloat16).as_subclass(LazyGrad)
    evicted.grad = torch.ones(12)
    evicted.grad = lazy  # torch itself would refuse the dtype
    assert evicted.grad is lazy
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.Tensor.grad.__get__(evicted) is None
    plain = torch.ones(12)
    evicted.grad = plain
    assert evicted.grad is plain
    evicted.grad = lazy
    evicted.grad = None
    assert evicted.grad is None


def test_zero_grad_drops_both_kinds(evicted):
    optimizer = torch.optim.SGD([torch.ones(1)], lr=1)
    optimizer.param_groups[0]["params"] = [evicted]
    for grad in (torch.ones(12), torch.ones(12, dtype=torch.bfloat16).as_subclass(LazyGrad)):
        evicted.grad = grad
        optimizer.zero_grad()
        assert evicted.grad is None


def test_requires_grad_can_be_asked_and_set(evicted):
    assert not evicted.requires_grad
    evicted.requires_grad_(True)
    assert evicted.requires_grad
    evicted.requires_grad = False
    assert not evicted.requires_grad


# Evicting, restoring, releasing


def test_evicting_in_place_keeps_the_object_and_frees_the_values():
    tensor = torch.arange(12.0)
    tensor.shared = True
    holder = [tensor]
    storage = tensor.untyped_storage()
    evict_(tensor, name=NAME)
    assert holder[0] is tensor
    assert isinstance(tensor, EvictedTensor)
    assert tensor.shared
    assert (tensor.shape, tensor.dtype) == ((12,), torch.float32)
    with torch._C.DisableTorchFunctionSubclass():
        assert tensor.untyped_storage().nbytes() == 4
        assert tensor.untyped_storage().data_ptr() != storage.data_ptr()
    with pytest.raises(EvictedReadError, match="layers"):
        tensor.sum()


def test_evicting_what_has_lost_its_values_already():
    tensor = torch.empty(0)
    evict_(tensor, name=NAME, shape=torch.Size([12]), device=torch.device("cpu"))
    assert tensor.shape == (12,)
    with pytest.raises(EvictedReadError):
        tensor.sum()


def test_evicting_keeps_a_gradient():
    tensor = torch.arange(12.0)
    tensor.grad = torch.ones(12)
    evict_(tensor, name=NAME)
    assert torch.equal(tensor.grad, torch.ones(12))


def test_restored_it_is_like_any_other_until_it_is_released(evicted):
    values = torch.arange(12.0)
    restore_(evicted, values)
    assert torch.equal(evicted, values)
    evicted.mul_(2)
    evicted.data.add_(1)
    assert values.tolist() == [2.0 * i + 1 for i in range(12)]  # no copy
    assert type(evicted + 1) is torch.Tensor
    assert repr(evicted).startswith("tensor([ 1.,  3.,")
    assert copy.deepcopy(evicted.clone()).tolist() == values.tolist()
    release_(evicted)
    assert evicted.shape == (12,)
    with pytest.raises(EvictedReadError, match="layers"):
        evicted.sum()
    assert values.sum() == 144  # what was restored is not touched


def test_memory_of_released_values_is_free(evicted):
    values = torch.arange(12.0)
    restore_(evicted, values)
    release_(evicted)
    with torch._C.DisableTorchFunctionSubclass():
        assert evicted.untyped_storage().nbytes() == 4


# Captured copies


def test_copies_into_it_can_be_captured(evicted):
    other = evicted_like(torch.zeros(3), dtype=torch.float32, name="other")
    first, second = torch.ones(12), torch.ones(3, dtype=torch.bfloat16)
    with captured_copies() as sources:
        assert evicted.copy_(first) is evicted
        other.data.copy_(second)
        other.detach().copy_(second)
        with pytest.raises(EvictedReadError):
            evicted.add_(first)
        with pytest.raises(EvictedReadError):
            torch.ones(12).copy_(evicted)
    assert sources == {id(evicted): first, id(other): second}
    with pytest.raises(EvictedReadError, match="copy_ needs the values"):
        evicted.copy_(first)


def test_captures_nest_and_end_with_an_exception(evicted):
    def fail() -> None:
        with captured_copies():
            raise ValueError("odd")

    with captured_copies() as outer:
        with captured_copies() as inner:
            evicted.copy_(OTHER)
        with pytest.raises(ValueError, match="odd"):
            fail()
        assert (list(inner), list(outer)) == ([id(evicted)], [])
        evicted.copy_(OTHER)
        assert list(outer) == [id(evicted)]
    with pytest.raises(EvictedReadError):
        evicted.copy_(OTHER)


def test_copies_into_real_values_happen(evicted):
    restore_(evicted, torch.zeros(12))
    with captured_copies() as sources:
        evicted.copy_(OTHER)
    assert not sources
    assert torch.equal(evicted, OTHER)


# State


@pytest.fixture
def state() -> EvictedState:
    return EvictedState({"step": torch.tensor(3.0)}, NAME, ("exp_avg", "exp_avg_sq"))


STATE_READS: dict[str, Any] = {
    "index": lambda s: s["exp_avg"],
    "get": lambda s: s.get("exp_avg_sq"),
    "get_default": lambda s: s.get("exp_avg_sq", None),
    "pop": lambda s: s.pop("exp_avg"),
    "setdefault": lambda s: s.setdefault("exp_avg", 0),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda s: torch.save({"state": {0: s}}, io.BytesIO()),
}


@pytest.mark.parametrize("name", STATE_READS)
def test_planes_of_the_state_are_refused_by_name(state, name):
    with pytest.raises(EvictedReadError, match=r"layers\.0\.weight") as caught:
        STATE_READS[name](state)
    assert "on disk" in str(caught.value)
    assert state == {"step": torch.tensor(3.0)}


def test_scalars_of_the_state_are_there(state):
    assert state["step"].item() == 3
    assert state.get("step").item() == 3
    assert state.get("absent") is None
    assert state.get("absent", 5) == 5
    assert dict(state) == {"step": torch.tensor(3.0)}
    assert list(state) == ["step"]
    with pytest.raises(KeyError, match="absent"):
        state["absent"]
    state["step"] += 1
    assert state["step"].item() == 4


def test_the_state_dict_of_a_plain_optimizer_cannot_be_saved_without_its_moments(state, evicted):
    """What it would write looks like a checkpoint and holds no moments."""
    optimizer = torch.optim.AdamW([torch.ones(12)])
    optimizer.param_groups[0]["params"] = [evicted]
    optimizer.state[evicted] = state
    with pytest.raises(EvictedReadError, match="layers"):
        torch.save(optimizer.state_dict(), io.BytesIO())
    with pytest.raises(EvictedReadError, match="layers"):
        copy.deepcopy(optimizer.state_dict())


def test_importing_it_changes_nothing_in_torch():
    program = """
import torch
before = {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)}
import gds_optimizer.evicted
after = {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)}
assert before == after
x = torch.ones(2, requires_grad=True)
(x * 2).sum().backward()
assert x.grad.tolist() == [2, 2]
"""
    subprocess.run((sys.executable, "-c", program), cwd=Path(__file__).parents[2], check=True)

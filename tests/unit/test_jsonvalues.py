"""What goes into a manifest comes out as it was, to the bit and to the type, or is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gds_optimizer.errors import SnapshotError
from gds_optimizer.jsonvalues import from_json, seal, seal_of, to_json, unseal
from tests.support.engines import same_bits

CPU = torch.device("cpu")

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["$float", "$tuple", "$tensor"]), inner)
    ),
    max_leaves=12,
)


def alike(first: Any, second: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(first) is not type(second):
        return False
    if isinstance(first, float):
        return first.hex() == second.hex()
    if isinstance(first, dict):
        return list(first) == list(second) and all(alike(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(alike, first, second))
    return bool(first == second)


def through_a_file(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value), allow_nan=False)), CPU)


@given(VALUES)
def test_plain_values(value):
    assert alike(through_a_file(value), value)


@pytest.mark.parametrize("value", [0.1, -0.0, 5e-324, math.pi, math.inf, -math.inf, math.nan])
def test_floats(value):
    assert alike(through_a_file(value), value)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensors_of_one_element(dtype, shape):
    value = torch.full(shape, 1 / 3).to(dtype)
    found = through_a_file(value)
    assert same_bits(found, value)
    assert found.device == CPU


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 1e-45])
def test_tensors_of_unusual_floats(value):
    assert same_bits(through_a_file(torch.tensor(value)), torch.tensor(value))


def test_integers_that_no_float_holds():
    for value in (2**63 - 1, -(2**63), 2**53 + 1):
        assert through_a_file(torch.tensor(value)).item() == value


def test_tensors_go_back_to_where_they_were():
    """What was on a device comes to the optimizer's device, the rest stays on the CPU."""
    data = to_json({"a": torch.tensor(1.0), "b": torch.tensor(2.0)})
    data["$dict"]["b"]["on_device"] = True
    found = from_json(data, torch.device("meta"))
    assert (found["a"].device.type, found["b"].device.type) == ("cpu", "meta")


@pytest.mark.parametrize(
    ("value", "plain"),
    [(np.float64(0.5), 0.5), (np.float32(0.5), 0.5), (np.int64(7), 7), (np.bool_(True), True)],
)
def test_numpy_s_scalars_become_python_s(value, plain):
    assert alike(through_a_file(value), plain)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), "a Tensor, which a snapshot cannot record"),
        (torch.zeros(0), "a Tensor, which a snapshot cannot record"),
        (torch.tensor(1j), r"a tensor of torch.complex64.*: wanted real numbers"),
        ({1: "a"}, "a dict, which"),
        ({1, 2}, "a set, which"),
        (b"bytes", "a bytes, which"),
        ([{"a": lambda: 0}], "a function, which"),
    ],
)
def test_everything_else_is_refused(value, message):
    with pytest.raises(SnapshotError, match=message):
        to_json(value)


# ---------------------------------------------------------------------- sealed files


@given(st.dictionaries(st.text().filter(lambda key: key != "sha256"), SCALARS, min_size=1))
def test_sealed(data):
    data = {key: to_json(value) for key, value in data.items()}
    content = seal(data)
    assert unseal(content) == data
    # It is JSON for everybody else, with its own digest in it.
    assert json.loads(content) == {"sha256": seal_of(content), **data}


def test_no_bit_of_a_sealed_file_may_change():
    content = seal({"a": 1, "b": [1.5, "x"]})
    for offset in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[offset] ^= 1 << bit
            with pytest.raises(ValueError, match="SHA-256"):
                unseal(bytes(changed))
    for other in (content[:-1], content + b"\n", b"\n" + content, content[1:], b"", b"{}", b"null"):
        with pytest.raises(ValueError, match="SHA-256"):
            unseal(other)


def test_the_seal_covers_order_and_white_space():
    """Another file of the same meaning is another file."""
    content = seal({"a": 1, "b": 2})
    for other in (
        json.dumps(json.loads(content)).encode(),
        json.dumps(json.loads(content), indent=2).encode(),
        content.replace(b'"a": 1,\n "b": 2', b'"b": 2,\n "a": 1'),
    ):
        assert other != content
        assert json.loads(other) == json.loads(content)
        with pytest.raises(ValueError, match="SHA-256"):
            unseal(other)


def test_nothing_is_sealed_that_is_no_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        seal({"a": math.nan})

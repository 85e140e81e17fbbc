"""Codecs: what goes in comes out, in exactly the declared bytes, without a copy where promised."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gds_optimizer.codecs import RawCodec, get_codec, raw_codec_name

PAGE_BYTES = 4096
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
}


def any_bits(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes: as floats they include infinities, NaNs with payloads and denormals."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_names_and_dtypes_belong_together(name, dtype):
    codec = get_codec(name)
    assert (codec.name, codec.dtype) == (name, dtype)
    assert raw_codec_name(dtype) == name
    assert codec.encoded_bytes(0) == 0
    assert codec.encoded_bytes(1000) == 1000 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.float8_e4m3fn])
def test_a_dtype_without_a_codec_is_a_key_error(dtype):
    with pytest.raises(KeyError, match=str(dtype)):
        raw_codec_name(dtype)


def test_an_unknown_name_is_a_key_error():
    with pytest.raises(KeyError, match="fp31"):
        get_codec("fp31")


@pytest.mark.parametrize("name", DTYPES)
@given(numel=st.integers(1, 4097), seed=st.integers(0, 2**31))
def test_every_bit_pattern_survives(name, numel, seed):
    codec = get_codec(name)
    bits = any_bits(codec.encoded_bytes(numel), seed)
    encoded = torch.full((codec.encoded_bytes(numel) + PAGE_BYTES,), 0xA5, dtype=torch.uint8)
    codec.encode(bits.view(codec.dtype), encoded)
    assert torch.equal(codec.decode(encoded, numel).contiguous().view(torch.uint8), bits)
    assert bool((encoded[codec.encoded_bytes(numel) :] == 0xA5).all()), "wrote past its bytes"


@pytest.mark.parametrize("name", DTYPES)
def test_decoding_is_a_view(name):
    codec = get_codec(name)
    encoded = any_bits(2 * PAGE_BYTES)
    values = codec.decode(encoded, 512)
    assert values.shape == (512,)
    assert values.dtype == codec.dtype
    assert values.data_ptr() == encoded.data_ptr()
    values.zero_()
    assert not encoded[: codec.encoded_bytes(512)].any()
    assert encoded[codec.encoded_bytes(512) :].any()


def test_encoding_a_view_of_the_buffer_writes_nothing():
    """The slot is the tensor: after a step in place there is nothing to copy."""
    codec = get_codec("fp32")
    encoded = any_bits(PAGE_BYTES)
    values = codec.decode(encoded, 1024).fill_(1.5)
    version = encoded._version
    codec.encode(values, encoded)
    assert encoded._version == version
    assert torch.equal(codec.decode(encoded, 1024), torch.full((1024,), 1.5))


def test_encoding_writes_into_a_plane_inside_a_slot():
    """Planes are slices of one buffer: a codec must not touch its neighbours."""
    slot = torch.zeros(3 * PAGE_BYTES, dtype=torch.uint8)
    get_codec("fp32").encode(torch.full((1024,), -2.0), slot[PAGE_BYTES : 2 * PAGE_BYTES])
    planes = slot.view(torch.float32).view(3, 1024)
    assert torch.equal(planes[1], torch.full((1024,), -2.0))
    assert not planes[0].any()
    assert not planes[2].any()


def test_raw_bytes_are_little_endian():
    """What a file holds does not depend on who wrote it."""
    encoded = torch.zeros(4, dtype=torch.uint8)
    RawCodec("fp32", torch.float32).encode(torch.tensor([1.0]), encoded)
    assert encoded.tolist() == [0, 0, 0x80, 0x3F]

"""Codecs: what goes in comes out, in exactly the declared bytes, without a copy where promised.

What every codec promises is here; what one codec does to values has a file of its own.
"""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gds_optimizer.codecs import RawCodec, fused_kernels, get_codec, raw_codec_name
from gds_optimizer.codecs.acceleration import kernels_for
from gds_optimizer.codecs.base import CHUNK_NUMEL
from gds_optimizer.errors import UnsupportedError

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


# Low halves of fp32 around every decision of rounding to bf16.
LOW_HALVES = (0, 1, 2, 0x3FFF, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xBEEF, 0xC000, 0xFFFE, 0xFFFF)


def every_upper_half() -> torch.Tensor:
    """fp32 bit patterns (int32): all 2**16 upper halves with `LOW_HALVES` and two random ones.

    Among them are all ties, zeros, infinities, subnormals, and NaN with many payloads.
    """
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32)[:, None] << 16
    low = torch.tensor(LOW_HALVES, dtype=torch.int32).expand(2**16, -1)
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 2**16, (2**16, 2), dtype=torch.int32, generator=generator)
    return (upper | torch.cat([low, random], dim=1)).view(-1)


def any_bits(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes: as floats they include infinities, NaNs with payloads and denormals."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


ENCODED = [
    "fp32:bf16",
    "fp32:bf16-sr",
    "fp32:int8-signed",
    "fp32:int8-signed-sr",
    "fp32:int8-unsigned",
    "fp32:int8-unsigned-sr",
]
REMAINDERS = ["main:remainder16", "main:remainder16-bitmap"]


def moments(name: str, numel: int, seed: int = 0) -> torch.Tensor:
    """Values as a codec gets them: of many sizes, and not negative for an unsigned one."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values *= torch.exp(3 * torch.randn(numel, generator=generator))
    return values.square() if "unsigned" in name else values


def plane_for(name: str, numel: int) -> torch.Tensor:
    """An encoded plane of the right size, followed by a page that nobody may touch."""
    nbytes = get_codec(name).encoded_bytes(numel)
    return torch.full((nbytes + PAGE_BYTES,), 0xA5, dtype=torch.uint8)


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


@pytest.mark.parametrize(
    ("name", "per_block"),
    [
        ("fp32:bf16", 512),
        ("fp32:bf16-sr", 512),
        ("fp32:int8-signed", 260),
        ("fp32:int8-signed-sr", 260),
        ("fp32:int8-unsigned", 260),
        ("fp32:int8-unsigned-sr", 260),
        ("main:remainder16", 512),
        ("main:remainder16-bitmap", 544),
    ],
)
def test_encoded_sizes(name, per_block):
    codec = get_codec(name)
    assert (codec.name, codec.dtype, codec.is_view) == (name, torch.float32, False)
    assert codec.rounds_stochastically == name.endswith("-sr")
    assert codec.is_lossless == name.startswith("main:")
    assert codec.encoded_bytes(0) == 0
    assert codec.encoded_bytes(256) == per_block
    assert codec.encoded_bytes(1024 * 1000) == 4000 * per_block


@pytest.mark.parametrize("name", DTYPES)
def test_raw_codecs_are_lossless_views(name):
    codec = get_codec(name)
    assert (codec.is_view, codec.is_lossless, codec.rounds_stochastically) == (True, True, False)


@pytest.mark.parametrize("name", [*DTYPES, *ENCODED])
@given(numel=st.integers(1, 1500), data=st.data())
def test_parts_make_the_whole(name, numel, data):
    """The bytes, and the values, do not depend on how a plane is cut."""
    codec = get_codec(name)
    values = moments(name, numel).to(codec.dtype)
    whole, in_parts = plane_for(name, numel), plane_for(name, numel)
    codec.encode_from(values, whole, seed=7)
    cuts = data.draw(st.sets(st.integers(1, 1 + numel // codec.range_numel), max_size=3))
    cuts = sorted({0, numel} | {cut * codec.range_numel for cut in cuts})
    spans = [(start, stop) for start, stop in itertools.pairwise(cuts) if stop <= numel]
    for start, stop in reversed(spans):
        codec.encode_from(values[start:stop], in_parts, numel=numel, start=start, seed=7)
    assert torch.equal(whole, in_parts)
    assert bool((whole[codec.encoded_bytes(numel) :] == 0xA5).all()), "wrote past its bytes"

    decoded = codec.decode(whole, numel)
    for start, stop in spans:
        part = torch.full((stop - start,), 77, dtype=codec.dtype)
        codec.decode_into(whole, part, numel=numel, start=start)
        assert torch.equal(part, decoded[start:stop])


@pytest.mark.parametrize("name", ENCODED)
def test_parts_that_are_larger_than_what_is_handled_at_a_time(name):
    codec, numel = get_codec(name), 2 * CHUNK_NUMEL + 300
    values = moments(name, numel)
    whole, in_parts = plane_for(name, numel), plane_for(name, numel)
    codec.encode_from(values, whole, seed=7)
    codec.encode_from(values[:512], in_parts, numel=numel, seed=7)
    codec.encode_from(values[512:], in_parts, numel=numel, start=512, seed=7)
    assert torch.equal(whole, in_parts)
    decoded, rest = codec.decode(whole, numel), torch.zeros(numel - 512)
    codec.decode_into(whole, rest, numel=numel, start=512)
    assert torch.equal(rest, decoded[512:])


@pytest.mark.parametrize("name", ENCODED)
def test_nothing_but_the_declared_buffers_is_written(name):
    codec, values = get_codec(name), moments(name, 700)
    kept = values.clone()
    plane = plane_for(name, 700)
    codec.encode_from(values, plane, seed=1)
    assert torch.equal(values, kept)
    encoded = plane.clone()
    out = torch.full((702,), 5.0)
    codec.decode_into(plane, out[1:701])
    assert torch.equal(plane, encoded)
    assert out[0] == out[701] == 5.0


@pytest.mark.parametrize("name", ENCODED)
def test_the_seed_decides_stochastic_rounding_alone(name):
    codec, values = get_codec(name), moments(name, 2048)
    planes = [plane_for(name, 2048) for _ in range(3)]
    for plane, seed in zip(planes, (11, 11, 12), strict=True):
        codec.encode_from(values, plane, seed=seed)
    assert torch.equal(planes[0], planes[1])
    assert torch.equal(planes[0], planes[2]) == (not codec.rounds_stochastically)
    codec.encode(values, planes[0])
    codec.encode_from(values, planes[1], seed=0)
    assert torch.equal(planes[0], planes[1])


@pytest.mark.parametrize("name", ENCODED)
def test_encoding_what_was_decoded_changes_nothing(name):
    """Saving and loading a checkpoint, or a step that is skipped, wears nothing out."""
    codec = get_codec(name)
    plane, again = plane_for(name, 3000), plane_for(name, 3000)
    codec.encode_from(moments(name, 3000), plane, seed=3)
    codec.encode_from(codec.decode(plane, 3000), again, seed=4)
    assert torch.equal(plane, again)


@pytest.mark.parametrize("name", [*ENCODED, "fp32"])
@pytest.mark.parametrize(
    ("values", "kwargs", "complaint"),
    [
        (torch.zeros(1024, dtype=torch.bfloat16), {}, "must be 1-D, contiguous and torch.float32"),
        (torch.zeros(32, 32), {}, "must be 1-D"),
        (torch.zeros(2048)[::2], {}, "contiguous"),
        (torch.zeros(1024, device="meta"), {}, "values are on meta, wanted one device"),
        (torch.zeros(4096), {}, "4096 elements take"),
        (torch.zeros(512), {"numel": 1024, "start": 768}, "elements 768 to 1280 of 1024"),
        (torch.zeros(512), {"numel": 1024, "start": -256}, "elements -256 to 256 of 1024"),
    ],
)
def test_wrong_arguments_are_refused(name, values, kwargs, complaint):
    codec, plane = get_codec(name), plane_for(name, 1024)[: get_codec(name).encoded_bytes(1024)]
    before = plane.clone()
    with pytest.raises(ValueError, match=complaint):
        codec.decode_into(plane, values, **kwargs)
    with pytest.raises(ValueError, match=complaint):
        codec.encode_from(values, plane, **kwargs)
    assert torch.equal(plane, before)


@pytest.mark.parametrize("name", [name for name in ENCODED if "int8" in name])
@pytest.mark.parametrize(("start", "stop"), [(0, 100), (100, 256), (256, 600)])
def test_a_part_of_a_block_is_refused(name, start, stop):
    codec, plane = get_codec(name), plane_for(name, 1024)
    with pytest.raises(ValueError, match=r"between multiples of 256 \(or up to its end\)"):
        codec.decode_into(plane, torch.zeros(stop - start), numel=1024, start=start)


@pytest.mark.parametrize("name", REMAINDERS)
def test_a_remainder_alone_is_refused(name):
    codec, plane = get_codec(name), plane_for(name, 64)
    for call in (
        lambda: codec.decode(plane, 64),
        lambda: codec.encode(torch.zeros(64), plane),
        lambda: codec.decode_into(plane, torch.zeros(64)),
        lambda: codec.encode_from(torch.zeros(64), plane),
    ):
        with pytest.raises(UnsupportedError, match="use decode_main and encode_main"):
            call()


class Temporaries(TorchDispatchMode):
    """Bytes of the tensors that are alive at once, apart from those that are given."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.peak_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.made.append(weakref.ref(result))
        alive = [tensor for made in self.made if (tensor := made()) is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
        live_bytes = sum(size for where, size in storages.items() if where not in self.given)
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        self.made = [made for made in self.made if made() is not None]
        return result


@pytest.mark.parametrize("name", [*ENCODED, *REMAINDERS])
def test_temporaries_are_small_whatever_the_size(name):
    """16 MiB at most; a temporary of the plane's size would take 20 MiB."""
    codec, numel = get_codec(name), 5 * 2**20 + 8
    values, plane = torch.ones(numel), plane_for(name, numel)
    model = torch.ones(numel, dtype=torch.bfloat16)
    second = torch.zeros(numel) if name == "main:remainder16" else None
    given_tensors = [values, plane, model] + ([] if second is None else [second])
    with Temporaries(*given_tensors) as temporaries:
        if name in REMAINDERS:
            codec.encode_main(values, plane, exp_avg_sq=second)
            codec.decode_main(plane, values, model=model, exp_avg_sq=second)
        else:
            codec.encode_from(values, plane, seed=1)
            codec.decode_into(plane, values)
    assert 0 < temporaries.peak_bytes <= 16 * 2**20
    assert bool((values == 1).all())


def test_fused_kernels_are_for_cuda():
    assert kernels_for(torch.zeros(1)) is None
    assert fused_kernels(torch.device("cpu")) == (
        False,
        "fused kernels are for CUDA devices, not for cpu",
    )

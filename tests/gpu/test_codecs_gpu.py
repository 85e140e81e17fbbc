"""Codecs on a GPU: the CPU's bytes, by fused kernels and by plain torch operations."""

from __future__ import annotations

import pytest
import torch

from gds_optimizer.codecs import (
    blockwise,
    clear_tie_bits,
    encodes_exactly,
    fused_kernels,
    get_codec,
    half,
    remainder,
    upper_half_checksum,
)
from tests.unit.test_codecs import (
    ENCODED,
    any_bits,
    every_upper_half,
    moments,
    plane_for,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
WAYS = ("fused", "torch")
TIES = ("fp32 sign", "bf16 sign", "bitmap")
SEED = 0x0123456789ABCDEF
MIB = 2**20


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """By which operations codecs compute on the GPU."""
    works, reason = fused_kernels(DEVICE)
    if request.param == "torch":
        for module in (half, blockwise, remainder):
            monkeypatch.setattr(module, "kernels_for", lambda tensor: None)
    elif not works:
        pytest.skip(f"needs Triton: {reason}")
    return request.param


def samples(name: str) -> dict[str, torch.Tensor]:
    """fp32 values by what they are about, on the CPU."""
    found = {
        f"{numel} elements": moments(name, numel, seed=numel)
        for numel in (1, 255, 256, 4097, 2**18 + 300)
    }
    found["any bits"] = any_bits(4 * 70_001).view(torch.float32)
    found["every upper half"] = every_upper_half().view(torch.float32)
    found["subnormal"] = moments(name, 5000) * 1e-42
    found["some faults"] = moments(name, 5000)
    found["some faults"][[300, 1500, 4999]] = torch.tensor([float("nan"), float("inf"), -1.0])
    return found


@pytest.mark.parametrize("name", ENCODED)
def test_the_same_bytes_and_values_as_on_the_cpu(name, way):
    codec = get_codec(name)
    for what, values in samples(name).items():
        numel = values.numel()
        wanted, found = plane_for(name, numel), plane_for(name, numel).to(DEVICE)
        codec.encode_from(values, wanted, seed=SEED)
        codec.encode_from(values.to(DEVICE), found, seed=SEED)
        assert torch.equal(found.cpu(), wanted), what
        # As integers: NaN has to be the same NaN.
        decoded = codec.decode(found, numel).view(torch.int32)
        assert torch.equal(decoded.cpu(), codec.decode(wanted, numel).view(torch.int32)), what


@pytest.mark.parametrize("name", ENCODED)
def test_parts_make_the_whole(name, way):
    codec, numel = get_codec(name), 5000
    values = moments(name, numel).to(DEVICE)
    whole, in_parts = plane_for(name, numel).to(DEVICE), plane_for(name, numel).to(DEVICE)
    codec.encode_from(values, whole, seed=SEED)
    decoded, parts_decoded = codec.decode(whole, numel), torch.zeros_like(values)
    for start, stop in ((0, 256), (256, 4096), (4096, numel)):
        part = slice(start, stop)
        codec.encode_from(values[part], in_parts, numel=numel, start=start, seed=SEED)
        codec.decode_into(whole, parts_decoded[part], numel=numel, start=start)
    assert torch.equal(whole, in_parts)
    assert torch.equal(decoded, parts_decoded)


def stored_remainders(ties: str, main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Plane and exp_avg_sq (None for a bitmap) of these mains, on their device."""
    codec = get_codec("main:remainder16-bitmap" if ties == "bitmap" else "main:remainder16")
    plane = torch.full((codec.encoded_bytes(main.numel()) + 64,), 0xA5, dtype=torch.uint8)
    plane, second = plane.to(main.device), None
    if ties != "bitmap":
        second = moments("unsigned", main.numel()).to(main.device)
        second = second.bfloat16() if ties == "bf16 sign" else second
    codec.encode_main(main, plane, exp_avg_sq=second)
    return plane, second


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("what", ["every upper half", "any bits", "255 elements", "1 elements"])
def test_remainders(ties, what, way):
    """The CPU's bytes; and with the GPU's own rounding every number comes back."""
    codec = get_codec("main:remainder16-bitmap" if ties == "bitmap" else "main:remainder16")
    main = samples("")[what].to(DEVICE)
    plane, second = stored_remainders(ties, main)
    cpu_plane, cpu_second = stored_remainders(ties, main.cpu())
    assert torch.equal(plane.cpu(), cpu_plane)
    assert second is None or torch.equal(second.cpu(), cpu_second)

    model = main.bfloat16()
    assert bool(encodes_exactly(main, model))
    found, in_place = torch.full_like(main, 9.0), model.float()
    codec.decode_main(plane, found, model=model, exp_avg_sq=second)
    codec.decode_main(plane, in_place, exp_avg_sq=second)
    assert torch.equal(found.view(torch.int32), in_place.view(torch.int32))
    is_nan = main.isnan()
    assert torch.equal(found.view(torch.int32)[~is_nan], main.view(torch.int32)[~is_nan])
    assert torch.equal(found.isnan(), is_nan)
    if second is not None:
        clear_tie_bits(second)
        assert not torch.signbit(second).any()


@pytest.mark.parametrize("ties", TIES)
def test_a_model_from_elsewhere_decodes_as_on_the_cpu(ties, way):
    codec = get_codec("main:remainder16-bitmap" if ties == "bitmap" else "main:remainder16")
    main = every_upper_half().view(torch.float32)
    model = any_bits(2 * main.numel() + 2, seed=4).view(torch.bfloat16)
    plane, second = stored_remainders(ties, main)
    decoded = {}
    for device in (torch.device("cpu"), DEVICE):
        found = torch.zeros_like(main, device=device)
        # From an odd address: a shard may start anywhere.
        shard = model.to(device)[1:]
        moved = None if second is None else second.to(device)
        codec.decode_main(plane.to(device), found, model=shard, exp_avg_sq=moved)
        decoded[device.type] = found.view(torch.int32).cpu()
    assert torch.equal(decoded["cpu"], decoded[DEVICE.type])


def test_rounding_of_the_model_on_the_gpu_is_the_cpu_s():
    main = every_upper_half().view(torch.float32)
    on_gpu, on_cpu = main.to(DEVICE).bfloat16().cpu(), main.bfloat16()
    is_nan = main.isnan()
    assert torch.equal(on_gpu.view(torch.int16)[~is_nan], on_cpu.view(torch.int16)[~is_nan])
    assert torch.equal(on_gpu.isnan(), is_nan)


def test_checks_agree_with_the_cpu():
    main = every_upper_half().view(torch.float32)
    model = main.bfloat16()
    assert bool(encodes_exactly(main.to(DEVICE), model.to(DEVICE)))
    changed = model.clone()
    changed.view(torch.int16)[12_345] ^= 1
    assert not bool(encodes_exactly(main.to(DEVICE), changed.to(DEVICE)))
    for some in (model, model[1:], model[:77]):
        found = upper_half_checksum(some.to(DEVICE), offset=5)
        assert found.item() == upper_half_checksum(some, offset=5).item()


@pytest.mark.parametrize("name", ENCODED)
def test_codecs_run_on_the_current_stream(name, way):
    """What a stream still computes is what gets encoded, and nobody waits for it."""
    codec, numel = get_codec(name), 2**20
    values = moments(name, numel)
    wanted = plane_for(name, numel)
    codec.encode_from(values * 4, wanted, seed=SEED)
    plane, on_gpu = plane_for(name, numel).to(DEVICE), values.to(DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        on_gpu.mul_(4)
        codec.encode_from(on_gpu, plane, seed=SEED)
        decoded = codec.decode(plane, numel)
    stream.synchronize()
    assert torch.equal(plane.cpu(), wanted)
    assert torch.equal(decoded.cpu(), codec.decode(wanted, numel))


@pytest.mark.parametrize("name", [*ENCODED, "main:remainder16", "main:remainder16-bitmap"])
def test_temporaries_are_small_whatever_the_size(name, way):
    """16 MiB at most by torch operations, nothing by fused kernels."""
    codec, numel = get_codec(name), 16 * MIB
    values = torch.ones(numel, device=DEVICE)
    plane = torch.zeros(codec.encoded_bytes(numel), dtype=torch.uint8, device=DEVICE)
    model = torch.ones(numel, dtype=torch.bfloat16, device=DEVICE)
    second = torch.zeros_like(values) if name == "main:remainder16" else None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    use(codec, values, plane, model, second, decode=False)
    use(codec, values, plane, model, second, decode=True)
    torch.cuda.synchronize()
    taken_bytes = torch.cuda.max_memory_allocated() - before
    assert taken_bytes <= (16 * MIB if way == "torch" else 0)
    assert bool((values == 1).all())


def use(codec, values, plane, model, second, *, decode: bool) -> None:
    """One call of a codec of either kind."""
    if not codec.name.startswith("main:"):
        if decode:
            codec.decode_into(plane, values)
        else:
            codec.encode_from(values, plane, seed=SEED)
    elif decode:
        codec.decode_main(plane, values, model=model, exp_avg_sq=second)
    else:
        codec.encode_main(values, plane, exp_avg_sq=second)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ENCODED, "main:remainder16", "main:remainder16-bitmap"])
def test_speed(name, way, capsys):
    """Prints GB/s of decoded values (4 bytes each): a figure to read, not one to pass."""
    codec, numel, repeats = get_codec(name), 64 * MIB, 10
    values = moments(name, MIB).to(DEVICE).repeat(numel // MIB)
    plane = torch.zeros(codec.encoded_bytes(numel), dtype=torch.uint8, device=DEVICE)
    model = values.bfloat16()
    second = values.square() if name == "main:remainder16" else None
    rates = {}
    for decode in (False, True):
        use(codec, values, plane, model, second, decode=decode)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            use(codec, values, plane, model, second, decode=decode)
        stop.record()
        stop.synchronize()
        rates[decode] = 4 * numel * repeats / (start.elapsed_time(stop) * 1e-3) / 1e9
    with capsys.disabled():
        print(f"\n{name:24} {way:6} encode {rates[False]:7.0f} GB/s decode {rates[True]:7.0f} GB/s")
    assert min(rates.values()) > 0

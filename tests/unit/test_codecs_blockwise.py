"""Moments as bytes in blocks: the documented bytes, small errors, faults that show, harmless steps.

The oracle here is a table of distances and a search in it; the codec computes with shifts.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gds_optimizer.codecs import BlockwiseCodec, get_codec, rounding_seed
from tests.unit.test_codecs import any_bits, moments, plane_for

NAMES = ["fp32:int8-signed", "fp32:int8-unsigned"]
STOCHASTIC = [name + "-sr" for name in NAMES]
INFINITY = 0x7F800000


def distances(name: str) -> np.ndarray:
    """How far below the top each code lies: steps of 2**18, doubled after every segment."""
    segment = 32 if "-signed" in name else 64
    steps = [2 ** (18 + code // segment) for code in range(4 * segment - 2)]
    return np.concatenate([[0], np.cumsum(steps)])


def bits_of(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.int32).numpy().astype(np.int64)


def oracle_bytes(name: str, block: torch.Tensor) -> tuple[list[int], int]:
    """Bytes of a block without faults, rounded to nearest, and its top."""
    magnitude = bits_of(block.abs())
    top = int(magnitude.max())
    table = distances(name)
    middles = (table[1:] + table[:-1]) // 2
    codes = np.searchsorted(middles, top - magnitude, side="right")
    is_zero = magnitude == 0
    if "-signed" in name:
        is_zero |= top - magnitude > table[-1]
    found = np.where(is_zero, 0, len(table) - codes)
    return np.where(bits_of(block) < 0, -found, found).tolist(), top


def oracle_values(name: str, stored: list[int], top: int) -> list[int]:
    """fp32 patterns (unsigned) that the bytes of a block stand for."""
    table = distances(name)
    values = []
    for byte in stored:
        magnitude = max(top - int(table[len(table) - abs(byte)]), 1) if byte else 0
        values.append(magnitude + (2**31 if byte < 0 else 0))
    return values


def encoded(name: str, values: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes (int8 or uint8) and the tops (int32)."""
    plane, numel = plane_for(name, values.numel()), values.numel()
    codec = get_codec(name)
    codec.encode_from(values, plane, seed=seed)
    tops = plane[-(-numel // 4) * 4 : codec.encoded_bytes(numel)].view(torch.int32)
    codes = plane[:numel]
    return codes.view(torch.int8) if "-signed" in name else codes, tops


def round_trip(name: str, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    plane = plane_for(name, values.numel())
    get_codec(name).encode_from(values, plane, seed=seed)
    return get_codec(name).decode(plane, values.numel())


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", NAMES)
@given(
    values=st.lists(FINITE | st.floats(-1, 1, width=32) | st.just(0.0), min_size=1, max_size=300)
)
def test_the_bytes_are_the_documented_ones(name, values):
    tensor = torch.tensor(values)
    if "unsigned" in name:
        tensor = tensor.abs()
    codes, tops = encoded(name, tensor)
    decoded = round_trip(name, tensor)
    for number, block in enumerate(tensor.split(256)):
        wanted, top = oracle_bytes(name, block)
        where = slice(256 * number, 256 * number + block.numel())
        assert codes[where].tolist() == wanted
        assert tops[number].item() == top
        assert (bits_of(decoded[where]) % 2**32).tolist() == oracle_values(name, wanted, top)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("top", [0x3F800000, 0x7F7FFFFF, 0x40490FDB, 0x0F000000, 0x00800000, 1, 0])
def test_every_byte_decodes_as_documented(name, top):
    stored = list(range(256)) if "unsigned" in name else [*range(-127, 128), 0]
    dtype = torch.uint8 if "unsigned" in name else torch.int8
    plane = torch.zeros(260, dtype=torch.uint8)
    plane[:256] = torch.tensor(stored, dtype=dtype).view(torch.uint8)
    plane[256:] = torch.tensor([top], dtype=torch.int32).view(torch.uint8)
    decoded = get_codec(name).decode(plane, 256)
    assert (bits_of(decoded) % 2**32).tolist() == oracle_values(name, stored, top)


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_within_what_is_said(name):
    """1.6 % near the top, 12.5 % at the bottom; the top is exact."""
    octaves = torch.linspace(0, -29.5 if "unsigned" in name else -14.5, 200_000)
    values = 1.75 * torch.exp2(octaves)
    decoded = torch.empty_like(values)
    for start in range(0, values.numel(), 255):
        block = torch.cat([torch.tensor([1.75]), values[start : start + 255]])
        decoded[start : start + 255] = round_trip(name, block)[1:]
    error = ((decoded - values) / values).abs()
    depth = -octaves
    fine = 2 if "unsigned" in name else 1
    for octave, limit in ((fine - 0.2, 1 / 64), (3 * fine - 0.2, 1 / 32), (7 * fine - 0.2, 1 / 16)):
        assert error[depth <= octave].max() <= limit * 1.0001
        assert error[depth > octave].max() > limit
    assert error[depth < depth.max() - 0.3].max() <= 1 / 8 * 1.0001
    assert decoded[0] == values[0]


@pytest.mark.parametrize("name", [*NAMES, *STOCHASTIC])
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-43, 1e-40, 1e-30, 1.0, 1e37]))
def test_order_sign_and_top_are_kept(name, seed, scale):
    values = moments(name, 256, seed) * scale
    values = values.clamp(-3e38, 3e38)
    decoded = round_trip(name, values, seed)
    top = values.abs().argmax()
    assert decoded[top] == values[top]
    assert bool((decoded.abs() <= decoded[top].abs()).all())
    assert bool((decoded * torch.sign(values) >= 0).all())
    if name in NAMES:
        ranked = decoded[values.argsort()]
        assert bool((ranked[1:] >= ranked[:-1]).all())


@pytest.mark.parametrize("name", ["fp32:int8-unsigned", "fp32:int8-unsigned-sr"])
@given(seed=st.integers(0, 2**31), limit=st.sampled_from([1, 2, 1000, 2**23, 2**30, INFINITY - 1]))
def test_a_second_moment_never_becomes_zero(name, seed, limit):
    """Its root is a divisor. Bit patterns from the smallest subnormal to the largest number."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(1, limit + 1, (512,), dtype=torch.int32, generator=generator)
    patterns[::7] = 0
    decoded = round_trip(name, patterns.view(torch.float32), seed)
    assert torch.equal(decoded == 0, patterns == 0)
    assert bool(decoded.isfinite().all())
    assert not decoded.signbit().any()


@pytest.mark.parametrize("name", [*NAMES, *STOCHASTIC])
def test_zero_blocks(name):
    values = torch.zeros(700)
    values[300] = 3.0
    values[5] = -0.0
    codes, tops = encoded(name, values)
    assert tops.tolist() == [0, 0x40400000, 0]
    assert codes.count_nonzero() == 1
    assert torch.equal(round_trip(name, values), values)
    assert not torch.signbit(round_trip(name, values)).any()


@pytest.mark.parametrize("name", [*NAMES, *STOCHASTIC])
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf"), -1e-45])
@pytest.mark.parametrize("where", [256, 300, 511])
def test_a_fault_shows_in_its_whole_block(name, fault, where):
    values = moments(name, 1000)
    clean = round_trip(name, values, seed=1)
    values[where] = fault
    decoded = round_trip(name, values, seed=1)
    is_fault = "unsigned" in name or fault != -1e-45
    assert torch.equal(decoded[:256], clean[:256])
    assert torch.equal(decoded[512:], clean[512:])
    assert bool(decoded[256:512].isnan().all()) == is_fault
    codes, tops = encoded(name, values, seed=1)
    if is_fault:
        assert tops[1].item() == 0x7FC00000
        assert not codes[256:512].any()


@pytest.mark.parametrize("name", [*NAMES, *STOCHASTIC])
@given(numel=st.integers(1, 1100), seed=st.integers(0, 2**31))
def test_any_bits_and_any_length(name, numel, seed):
    """Whatever comes, numbers come out or the block is NaN, and padding is zero."""
    values = any_bits(4 * numel, seed).view(torch.float32)
    decoded = round_trip(name, values, seed)
    for before, after in zip(values.split(256), decoded.split(256), strict=True):
        is_fault = not before.isfinite().all() or ("unsigned" in name and bool((before < 0).any()))
        assert bool(after.isnan().all()) if is_fault else bool(after.isfinite().all())
    plane = plane_for(name, numel)
    get_codec(name).encode_from(values, plane)
    assert not plane[numel : -(-numel // 4) * 4].any()


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_goes_to_one_of_the_neighbours(name):
    values = moments(name, 4096, seed=8)
    table, sizes = distances(name), 256
    codes, tops = encoded(name, values, seed=5)
    again, _ = encoded(name, values, seed=6)
    assert not torch.equal(codes, again)
    for start in range(0, 4096, sizes):
        block = values[start : start + sizes]
        distance = tops[start // sizes].item() - bits_of(block.abs())
        above = np.searchsorted(table, distance, side="right") - 1
        found = len(table) - np.abs(codes[start : start + sizes].numpy().astype(int))
        inside = distance <= table[-1]
        exact = np.isin(distance, table)
        assert set((found - above)[inside & ~exact]) <= {0, 1}
        assert bool((found == above)[inside & exact].all())


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize("depth", [0.013, 0.4, 1.7, 3.3, 8.2, 13.7])
def test_stochastic_rounding_is_right_on_average(name, depth):
    """Where two codes lie within one octave, and the values between them are evenly spaced."""
    value = 1.99 * 2.0**-depth
    values = torch.full((255 * 256,), value).view(-1, 255)
    values = torch.cat([torch.full((256, 1), 1.99), values], dim=1).view(-1)
    decoded = round_trip(name, values, seed=3).view(-1, 256)[:, 1:].double()
    spread = decoded.std().item()
    assert spread > 0
    assert abs(decoded.mean().item() - np.float32(value)) < 5 * spread / decoded.numel() ** 0.5


@pytest.mark.parametrize("block_numel", [64, 4096])
@pytest.mark.parametrize("signed", [True, False])
def test_other_block_sizes(block_numel, signed):
    codec = BlockwiseCodec(signed=signed, block_numel=block_numel)
    numel = 3 * block_numel + 5
    values = moments(codec.name, numel)
    plane = torch.zeros(codec.encoded_bytes(numel), dtype=torch.uint8)
    assert plane.numel() == -(-numel // 4) * 4 + 4 * 4
    codec.encode_from(values, plane)
    decoded = codec.decode(plane, numel)
    for before, after in zip(values.split(block_numel), decoded.split(block_numel), strict=True):
        assert after.abs().max() == before.abs().max()


@pytest.mark.parametrize("block_numel", [0, 32, 100, 8192])
def test_a_wrong_block_size_is_refused(block_numel):
    with pytest.raises(ValueError, match=f"has {block_numel} elements, wanted a power of two"):
        BlockwiseCodec(signed=True, block_numel=block_numel)


# ---------------------------------------------------------------------- what it does to Adam


class Adam:
    """Adam's moments, kept encoded between steps; `step` returns the update over the lr."""

    def __init__(self, numel: int, names: tuple[str, str], beta2: float) -> None:
        self.names, self.betas, self.steps = names, (0.9, beta2), 0
        self.moments = (torch.zeros(numel), torch.zeros(numel))

    def step(self, grad: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        first, second = self.moments
        first.mul_(self.betas[0]).add_(grad, alpha=1 - self.betas[0])
        second.mul_(self.betas[1]).addcmul_(grad, grad, value=1 - self.betas[1])
        corrected = [m / (1 - b**self.steps) for m, b in zip(self.moments, self.betas, strict=True)]
        update = corrected[0] / (corrected[1].sqrt() + 1e-8)
        for plane, (name, moment) in enumerate(zip(self.names, self.moments, strict=True)):
            moment.copy_(round_trip(name, moment, rounding_seed(self.steps, 0, plane)))
        return update


NEAREST = ("fp32:int8-signed", "fp32:int8-unsigned")
UNBIASED = ("fp32:int8-signed-sr", "fp32:int8-unsigned-sr")


@pytest.mark.parametrize("names", [NEAREST, UNBIASED], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(("spread", "limit"), [(0.0, 0.06), (1.0, 0.15), (2.0, 0.35)])
def test_steps_of_blocks_with_unlike_gradients(names, spread, limit):
    """`spread` is the standard deviation of the logarithm of the gradients' sizes in a block."""
    generator = torch.Generator().manual_seed(1)
    size = torch.exp(spread * torch.randn(4096, generator=generator))
    exact, ours = Adam(4096, ("fp32", "fp32"), 0.95), Adam(4096, names, 0.95)
    errors = []
    for _ in range(120):
        grad = torch.randn(4096, generator=generator) * size
        wanted, found = exact.step(grad), ours.step(grad)
        errors.append(((found - wanted).square().mean() / wanted.square().mean()).sqrt().item())
        # What a second moment rounded to zero would break by orders of magnitude.
        assert found.abs().max() < 1.6 * wanted.abs().max()
    assert np.mean(errors) < limit


@pytest.mark.parametrize("names", [NEAREST, UNBIASED], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_a_parameter_without_gradients_comes_to_rest(names, beta2):
    """No remnant of its first moment may push it for ever while its block lives on."""
    generator = torch.Generator().manual_seed(2)
    adam = Adam(512, names, beta2)
    for step in range(500):
        grad = torch.randn(512, generator=generator)
        if step >= 20:
            grad[::3] = 0
        update = adam.step(grad)
    assert not update[::3].any()
    assert bool((adam.moments[1][::3] > 0).all())


def test_a_second_moment_follows_smaller_gradients():
    """With beta2 = 0.999 a step changes it by less than a code; on average it moves all the same.

    One element in each block keeps its gradients, so the top does not take the others along.
    """
    second, name = torch.ones(256 * 64), "fp32:int8-unsigned-sr"
    keeps = torch.zeros(256 * 64, dtype=torch.bool)
    keeps[::256] = True
    for step in range(1000):
        second = round_trip(name, torch.where(keeps, second, second * 0.999), step)
    assert second[~keeps].mean().item() == pytest.approx(0.999**1000, rel=0.1)
    assert bool((second[keeps] == 1).all())


@pytest.mark.parametrize("names", [NEAREST, UNBIASED], ids=["nearest", "stochastic"])
def test_training_reaches_the_same_loss(names):
    """A small network on a noisy regression: at most 3 % above the loss of fp32 moments."""

    def train(names: tuple[str, str]) -> float:
        generator = torch.Generator().manual_seed(3)
        shapes = [(16, 64), (64,), (64, 64), (64,), (64, 1)]
        weights = [torch.randn(s, generator=generator) / s[0] ** 0.5 for s in shapes]
        weights = [weight.requires_grad_() for weight in weights]
        target = torch.randn(16, 3, generator=generator)
        adam = Adam(sum(weight.numel() for weight in weights), names, 0.99)
        losses = []
        for step in range(300):
            x = torch.randn(128, 16, generator=generator)
            y = torch.tanh(x @ target).sum(1, keepdim=True)
            y += 0.3 * torch.randn(128, 1, generator=generator)
            hidden = torch.tanh(x @ weights[0] + weights[1])
            hidden = torch.tanh(hidden @ weights[2] + weights[3])
            loss = (hidden @ weights[4] - y).square().mean()
            grads = torch.autograd.grad(loss, weights)
            update = adam.step(torch.cat([grad.flatten() for grad in grads]))
            rate = 3e-3 * (1 - 0.9 * step / 300)
            with torch.no_grad():
                pieces = update.split([weight.numel() for weight in weights])
                for weight, piece in zip(weights, pieces, strict=True):
                    weight -= rate * piece.view_as(weight)
            losses.append(loss.item())
        return float(np.mean(losses[-50:]))

    exact = train(("fp32", "fp32"))
    assert exact < 0.5
    assert train(names) < 1.03 * exact

"""Fused kernels against plain torch operations, on the CPU: interpreted for their bytes, compiled
for their instructions. Both want a process of their own, with Triton's settings in its environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gds_optimizer.codecs import Bf16Codec, BlockwiseCodec, RemainderCodec
from gds_optimizer.codecs.rounding import seed_keys
from tests.unit.test_codecs import any_bits, moments

SEED = 0x123456789ABCDEF0
START = 512
SIZES = (257, 4100)


def run_in_process(mode: str, **environment: str) -> str:
    pytest.importorskip("triton", reason="needs triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_codecs_triton", mode],
        cwd=Path(__file__).parents[2],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_interpreted_kernels_give_the_same_bytes():
    assert "compared 280" in run_in_process("interpret", TRITON_INTERPRET="1")


def test_kernels_compile_to_integer_instructions(tmp_path):
    """A floating-point instruction could be contracted, flushed or approximated on the way."""
    output = run_in_process("compile", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    if "skip" in output:
        pytest.skip(output.strip())
    counts = re.findall(
        r"^(\w+) .*: (\d+) instructions, (\d+) of floating point$", output, re.MULTILINE
    )
    assert len(counts) == 11
    for _, instructions, floats in counts:
        assert int(instructions) > 20
        assert int(floats) == 0


# ---------------------------------------------------------------------- in the other process


def bit_samples(numel: int) -> list[torch.Tensor]:
    """fp32 patterns: any bits, moments of many sizes, subnormals, and ties."""
    ties = any_bits(4 * numel, seed=1).view(torch.int32) & -(2**16) | 0x8000
    samples = [any_bits(4 * numel).view(torch.int32), ties]
    values = moments("", numel)
    samples += [values, values.abs(), values.abs() * 1e-42]
    return [sample.view(torch.int32) for sample in samples]


def compare_interpreted() -> None:
    from gds_optimizer.codecs import triton_kernels as kernels

    compared = 0
    keys = seed_keys(SEED)

    def same(first: torch.Tensor, second: torch.Tensor) -> None:
        nonlocal compared
        compared += 1
        assert torch.equal(first, second), f"comparison {compared}"

    for numel in SIZES:
        for bits in bit_samples(numel):
            for stochastic in (False, True):
                half = Bf16Codec(stochastic=stochastic)
                wanted, found = (torch.zeros(numel, dtype=torch.int16) for _ in range(2))
                half.encode_by_torch(bits, wanted, START, SEED)
                kernels.encode_bf16(bits, found, START, keys, stochastic)
                same(wanted, found)
                for signed in (False, True):
                    codec = BlockwiseCodec(signed=signed, stochastic=stochastic)
                    compare_blocks(codec, bits, keys, same)
            for ties in (torch.int32, torch.int16, torch.uint8):
                compare_remainders(bits, ties, same)
    print("compared", compared)


def compare_blocks(codec, bits, keys, same) -> None:
    from gds_optimizer.codecs import triton_kernels as kernels

    numel = bits.numel()
    kind = torch.int8 if codec.is_signed else torch.uint8
    wanted, found = (
        (torch.zeros(numel, dtype=kind), torch.zeros(-(-numel // 256), dtype=torch.int32))
        for _ in range(2)
    )
    codec.encode_by_torch(bits, *wanted, START, SEED)
    kernels.encode_blocks(bits, *found, START, keys, codec)
    same(torch.cat([wanted[0], wanted[1].view(kind)]), torch.cat([found[0], found[1].view(kind)]))
    decoded, fused = torch.zeros_like(bits), torch.zeros_like(bits)
    # Every byte, whether it was ever written or not.
    some = any_bits(numel).view(kind)
    codec.decode_by_torch(some, wanted[1], decoded)
    kernels.decode_blocks(some, wanted[1], fused, codec)
    same(decoded, fused)


def compare_remainders(bits, kind, same) -> None:
    from gds_optimizer.codecs import triton_kernels as kernels

    numel = bits.numel()
    codec = RemainderCodec(bitmap=kind == torch.uint8)
    ties = any_bits(4 * numel, seed=2).view(kind)[: -(-numel // 8) if codec.has_bitmap else numel]
    wanted, found = ((torch.zeros(numel, dtype=torch.int16), ties.clone()) for _ in range(2))
    codec.encode_by_torch(bits, *wanted)
    kernels.encode_remainder(bits, *found)
    same(wanted[0], found[0])
    same(wanted[1], found[1])
    model = bits.view(torch.float32).bfloat16()
    # Another model as well: what becomes of it is defined too.
    for halves in (model.view(torch.int16), any_bits(2 * numel, seed=3).view(torch.int16)):
        upcast = halves.to(torch.int32) << 16
        decoded, in_place, fused = upcast.clone(), upcast.clone(), torch.zeros_like(bits)
        codec.complete_by_torch(*wanted, decoded)
        kernels.decode_remainder(*wanted, None, in_place)
        kernels.decode_remainder(*wanted, halves, fused)
        same(decoded, in_place)
        same(decoded, fused)


def count_instructions() -> None:
    """Compile every kernel, most in several variants, for an H100/H200; no GPU is needed for it."""
    try:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.compiler import compile as compile_kernel

        target = GPUTarget("cuda", 90, 32)
    except ImportError as error:
        print(f"skip: this Triton compiles without a GPU in another way ({error})")
        return
    from gds_optimizer.codecs import triton_kernels as kernels
    from gds_optimizer.codecs.blockwise import RANDOM_BITS, STEP_SHIFT, deepest_distance

    tile, element = {"TILE": kernels.TILE_NUMEL}, {"bits_ptr": "*i32", "numel": "i32"}
    seeded = {"first": "i32", "key0": "i32", "key1": "i32"}
    jobs = [
        (kernels._encode_bf16, {"halves_ptr": "*i16", **seeded}, {"STOCHASTIC": stochastic, **tile})
        for stochastic in (False, True)
    ]
    for signed in (False, True):
        codec = BlockwiseCodec(signed=signed)
        pointers = {"codes_ptr": "*i8" if signed else "*u8", "tops_ptr": "*i32"}
        shape = {
            "SEGMENT": codec.segment,
            "STEP_SHIFT": STEP_SHIFT,
            "OFFSET": codec.segment << STEP_SHIFT,
            "TOP_BYTE": codec.top_byte,
            "BLOCK": 256,
            "ROWS": 8,
        }
        jobs.append((kernels._decode_blocks, pointers, shape))
        more = {
            "RANDOM_SHIFT": 32 - RANDOM_BITS,
            "DEEPEST": deepest_distance(codec.segment),
            "SIGNED": signed,
            "STOCHASTIC": signed,
        }
        jobs.append((kernels._encode_blocks, pointers | seeded, shape | more))
    for place, kind in enumerate(("*i32", "*i16", "*u8")):
        pointers = {"remainder_ptr": "*i16", "ties_ptr": kind}
        if kind != "*i16":
            from_model = {"TIES": place, "FROM_MODEL": True, **tile}
            jobs.append((kernels._decode_remainder, {**pointers, "model_ptr": "*i16"}, from_model))
        jobs.append((kernels._encode_remainder, pointers, {"TIES": place, **tile}))
    for kernel, arguments, constants in jobs:
        types = element | arguments
        signature = {
            name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
        }
        compiled = compile_kernel(ASTSource(kernel, signature, constexprs=constants), target=target)
        lines = [line.strip() for line in compiled.asm["ptx"].splitlines()]
        code = [line for line in lines if re.match(r"(@%p\d+ )?[a-z][\w.]*\s.*;", line)]
        floats = [line for line in code if re.search(r"\.(f16|bf16|f32|f64|ftz)", line)]
        print(
            f"{kernel.__name__} {constants}: {len(code)} instructions, "
            f"{len(floats)} of floating point"
        )


if __name__ == "__main__":
    {"interpret": compare_interpreted, "compile": count_instructions}[sys.argv[1]]()

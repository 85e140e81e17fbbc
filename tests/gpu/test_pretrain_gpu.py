"""`megatron.training`'s own loop, started as users start it: train, stop, save, resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.megatron]

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("pretrain_program.py")
STEPS = 8
STOP_AT = 4

TRAINING = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 2 --train-iters {STEPS}
    --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --bf16
    --use-distributed-optimizer --mock-data --tokenizer-type NullTokenizer --vocab-size 127
    --transformer-impl local --no-masked-softmax-fusion --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0 --eval-interval 1000
    --untie-embeddings-and-output-weights --num-workers 0 --attention-backend unfused
    --ckpt-format torch_dist --save-interval 1000
""".split()


def train(*arguments: str, ranks: int = 1) -> dict[str, Any]:
    """Run the program in processes of its own, one for each GPU; rank 0's RESULT line."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = ["-m", "gds_optimizer.megatron", str(PROGRAM), *TRAINING, *arguments]
    process = subprocess.Popen(
        [sys.executable, *launcher, *program],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks, which are in sessions of their own
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    assert len(results) == ranks, f"status {process.returncode}:\n{out[-3000:]}\n{errors[-5000:]}"
    assert len({each["params"] for each in results}) == 1
    result: dict[str, Any] = min(results, key=lambda each: each["rank"])
    result["log"] = out + errors
    return result


def streaming(directory: Path) -> list[str]:
    directory.mkdir(exist_ok=True)
    return [
        "--stream-optimizer-state-to-disk",
        "--stream-optimizer-state-dir",
        str(directory),
        "--stream-optimizer-state-bucket-size",
        "48KiB",
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Streamed, without a stop, after it was found equal to the plain run."""
    with ThreadPoolExecutor() as threads:  # each takes most of a minute to import everything
        run = threads.submit(train, *streaming(tmp_path_factory.mktemp("state")))
        plain = train()
        streamed = run.result()
    assert "io path: posix" in streamed["log"]
    assert len(plain["losses"]) == STEPS
    assert streamed["losses"] == plain["losses"]
    assert streamed["params"] == plain["params"]
    return streamed


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [[], ["--dist-ckpt-optim-fully-reshardable"], ["--async-save"]],
    ids=["dp_reshardable", "fully_reshardable", "async_save"],
)
def test_stop_and_resume_is_bit_exact(
    whole: dict[str, Any], extra: list[str], tmp_path: Path
) -> None:
    options = [*streaming(tmp_path / "state"), *extra]
    checkpoint = str(tmp_path / "checkpoint")
    first = train(*options, "--save", checkpoint, "--exit-interval", str(STOP_AT))
    second = train(*options, "--load", checkpoint, "--save", checkpoint)
    assert len(first["losses"]) == STOP_AT
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["params"] == whole["params"]
    assert not list((tmp_path / "state").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_the_plain_run_and_resume(tmp_path: Path) -> None:
    batch = ["--global-batch-size", "4"]
    streamed = [*batch, *streaming(tmp_path / "state")]
    checkpoint = str(tmp_path / "checkpoint")
    saving = ["--save", checkpoint, "--exit-interval", str(STOP_AT)]
    with ThreadPoolExecutor() as threads:  # as above
        runs = [
            threads.submit(train, *arguments, ranks=2)
            for arguments in (
                batch,
                [*batch, *streaming(tmp_path / "whole")],
                [*streamed, *saving],
            )
        ]
        plain, whole, first = [run.result() for run in runs]
    assert len(plain["losses"]) == STEPS
    assert (whole["losses"], whole["params"]) == (plain["losses"], plain["params"])
    second = train(*streamed, "--load", checkpoint, "--save", checkpoint, ranks=2)
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["params"] == whole["params"]
    assert not list((tmp_path / "state").iterdir())

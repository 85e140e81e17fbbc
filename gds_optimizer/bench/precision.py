"""Does training survive state in fewer bits? `python -m gds_optimizer.bench.precision --out DIR`.

A GPT is trained on the Python standard library's own source code, byte by byte, once for each
variant of the state and each seed. A seed decides the first parameters and the order of the data,
and nothing else differs between the runs of one seed. The state goes through the engine and its
codecs as in any other run, with all buckets kept on the device, so that no drive is waited for.

The verdict, laid down before any run: a variant *holds up* if its final validation loss, the mean
over the seeds, is above that of fp32 by no more than fp32 itself spreads between its seeds
(largest minus smallest). A variant that only keeps main parameters as remainders loses nothing: its
runs must equal those of the variant with fp32 mains bit for bit, which is checked; the command's
exit status is 1 where they do not.

Every run leaves a JSON file in DIR as it ends, and a run whose file is there is not repeated. The
summary, tables (table.md), the codecs' errors and a plot (where matplotlib is there) are made of
whatever runs are there, and DIR.tar holds all of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gds_optimizer.bench.precision_model import SIZES, Gpt, Size, batches, standard_library
from gds_optimizer.bench.precision_report import (
    RECORD_EVERY,
    TWINS,
    VARIANTS,
    codec_errors,
    differing,
    errors_to_text,
    pack,
    plot,
    summarize,
    to_text,
)
from gds_optimizer.bench.steps import device_named
from gds_optimizer.command import count, exit_status, seconds
from gds_optimizer.config import StreamConfig, parse_size
from gds_optimizer.evicted import evicted_like
from gds_optimizer.plan import Binding
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.stepper import install_step

_FINAL_STEPS = 50


# ---------------------------------------------------------------------- a run


class Training:
    """One model and its optimizer, streamed through an engine or, for comparison, resident.

    Args:
        size: of the model and its training.
        variant: key of `VARIANTS`; None keeps fp32 state in the optimizer, without an engine.
        seed: of the first parameters and the order of the data.
        device: where everything lives.
        directory: for the engine's files, of which there are none as long as memory suffices.
        steps: of the whole run, for the schedule.
    """

    def __init__(
        self,
        size: Size,
        variant: str | None,
        seed: int,
        device: torch.device,
        directory: Path,
        steps: int,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Gpt(size).to(device, torch.bfloat16)
        self.steps = steps
        self.losses: list[torch.Tensor] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._runtime: Runtime | None = None
        named = list(self.model.named_parameters())
        self.numel = sum(parameter.numel() for _, parameter in named)
        if variant is None:
            mains = [p.detach().float().view(-1) for _, p in named]
        else:
            mains = [
                evicted_like(p.detach().view(-1), name=n, dtype=torch.float32) for n, p in named
            ]
        self._pairs = [(p, main) for (_, p), main in zip(named, mains, strict=True)]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [torch.zeros(1, device=device)], "weight_decay": decay}
                for decay in (0.1, 0.0)
            ],
            fused=True,
        )
        for group, is_matrix in zip(self.optimizer.param_groups, (True, False), strict=True):
            group["params"] = [m for p, m in self._pairs if (p.dim() == 2) == is_matrix]
        if variant is not None:
            self._stream(variant, size, device, directory, [name for name, _ in named])

    def _stream(
        self, variant: str, size: Size, device: torch.device, directory: Path, names: list[str]
    ) -> None:
        config = StreamConfig(
            directories=(directory,),
            bucket_size=parse_size(size.bucket_size),
            hbm_budget=2**40,
            allow_tmpfs=True,
            **VARIANTS[variant],
        )
        bindings = [
            Binding(name, main, parameter.detach().view(-1))
            for name, (parameter, main) in zip(names, self._pairs, strict=True)
        ]
        self._runtime = Runtime.build(
            [Part(self.optimizer, bindings, "precision")],
            config,
            device=device,
            rank=0,
            eager=True,
        )
        install_step(self.optimizer, self._runtime.engines[0].step)

    def step(self, tokens: torch.Tensor) -> None:
        """One batch of training; the loss is appended to `losses` without waiting for it."""
        done = len(self.losses)
        warm_up = max(1, self.steps // 20)
        progress = max(0, done - warm_up) / max(1, self.steps - warm_up)
        rate = 6e-4 * min(1.0, (done + 1) / warm_up) * (0.55 + 0.45 * math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.model(tokens)
        loss.backward()
        self.losses.append(loss.detach())
        parameters = [parameter for parameter, _ in self._pairs]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for parameter, main in self._pairs:
            gradient = parameter.grad
            main.grad = None if gradient is None else gradient.view(-1).float()
            parameter.grad = None
        self.optimizer.step()
        for parameter, main in self._pairs:
            main.grad = None
            if self._runtime is None:
                parameter.data.view(-1).copy_(main)

    @torch.no_grad()
    def validation_loss(self, tokens: list[torch.Tensor]) -> float:
        """Mean over batches, in nats a byte."""
        return statistics.fmean(self.model(batch).item() for batch in tokens)

    def moments(self) -> dict[str, torch.Tensor]:
        """All of each moment, 1-D, in host memory; for an engine only."""
        found: dict[str, list[torch.Tensor]] = {}
        if self._runtime is not None:
            for entry in self._runtime.engines[0].read_state().values():
                for name in ("exp_avg", "exp_avg_sq"):
                    found.setdefault(name, []).append(entry[name])
        return {name: torch.cat(parts) for name, parts in found.items()}

    def digest(self) -> str:
        """SHA-256 of the bits of all parameters."""
        found = hashlib.sha256()
        for parameter, _ in self._pairs:
            bits = parameter.detach().contiguous().view(-1).view(torch.uint8).cpu()
            found.update(bits.numpy().tobytes())
        return found.hexdigest()

    def close(self) -> None:
        """Give files and memory back."""
        if self._runtime is not None:
            for engine in list(self._runtime.engines):
                self._runtime.close_engine(engine)


def run_one(
    size: Size, variant: str, seed: int, device: torch.device, directory: Path, steps: int
) -> dict[str, Any]:
    """Train once; losses in nats a byte, and the codecs' errors where the moments are fp32."""
    training_text, held_out, digest = standard_library()
    run = Training(size, variant, seed, device, directory, steps)
    try:
        data = batches(training_text, size, seed)
        unseen = batches(held_out, size, seed=12345)
        validation = [next(unseen).to(device) for _ in range(size.validation_batches)]
        began = time.monotonic()
        for _ in range(steps):
            run.step(next(data).to(device, non_blocking=True))
        losses = torch.stack(run.losses).double().cpu()
        seconds = time.monotonic() - began
        result = {
            "variant": variant,
            "seed": seed,
            "settings": VARIANTS[variant],
            "parameters": run.numel,
            "steps": steps,
            "tokens_per_step": size.batch * size.context,
            "text_sha256": digest,
            "text_bytes": training_text.numel(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "seconds": seconds,
            "curve": [float(part.mean()) for part in losses.split(RECORD_EVERY)],
            "final_training_loss": float(losses[-_FINAL_STEPS:].mean()),
            "validation_loss": run.validation_loss(validation),
            "parameters_sha256": run.digest(),
        }
        if variant == "fp32" and seed == 0:
            result["codec_errors"] = codec_errors(run.moments(), device)
    finally:
        run.close()
    return result


def run_all(
    arguments: argparse.Namespace, steps: int, report: Callable[[str], Any]
) -> list[dict[str, Any]]:
    """Start what is missing in processes of its own, and collect all results."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    deadline = None if arguments.limit_s is None else time.monotonic() + arguments.limit_s
    # Seed by seed: a run that is cut short has compared all variants on the first seeds.
    wanted = [(variant, seed) for seed in range(arguments.seeds) for variant in arguments.variants]

    def start(pair: tuple[str, int]) -> None:
        variant, seed = pair
        path = out / f"{variant}-{seed}.json"
        left_s = None if deadline is None else deadline - time.monotonic()
        if path.exists() or (left_s is not None and left_s <= 0):
            return
        command = [sys.executable, "-m", "gds_optimizer.bench.precision", "--out", str(out)]
        command += ["--one", variant, "--seed", str(seed), "--size", arguments.size]
        command += ["--steps", str(steps)]
        if arguments.device:
            command += ["--device", arguments.device]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=left_s,
                check=False,
                env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},  # cuBLAS repeats itself
            )
        except subprocess.TimeoutExpired:
            report(f"{variant}, seed {seed}: not finished in time")
            return
        if done.returncode:
            report(f"{variant}, seed {seed}: failed\n{done.stderr[-2000:]}")
        else:
            report(f"{variant}, seed {seed}: {done.stdout.strip()}")

    with ThreadPoolExecutor(arguments.jobs) as jobs:
        list(jobs.map(start, wanted))
    return [
        json.loads(path.read_text())
        for path in (out / f"{variant}-{seed}.json" for variant, seed in wanted)
        if path.exists()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gds_optimizer.bench.precision", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", type=count, default=3, help="how many (default 3)")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--steps", type=count, help="default 1500, or 20 for tiny")
    parser.add_argument("--jobs", type=count, default=1, help="runs at once (default 1)")
    parser.add_argument("--limit-s", type=seconds, help="stop after so long")
    parser.add_argument("--device", help="cuda or cpu (default: a GPU if there is one)")
    parser.add_argument("--one", choices=list(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    return exit_status(parser.prog, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    size = SIZES[arguments.size]
    steps = arguments.steps or size.steps
    if arguments.one:
        # Runs are compared bit for bit. With warn_only attention would stay as it is.
        torch.use_deterministic_algorithms(True)
        with tempfile.TemporaryDirectory(prefix="precision-", dir=arguments.out) as directory:
            result = run_one(
                size,
                arguments.one,
                arguments.seed,
                device_named(arguments.device),
                Path(directory),
                steps,
            )
        path = arguments.out / f"{arguments.one}-{arguments.seed}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(result))
        os.replace(partial, path)
        sys.stdout.write(
            f"validation loss {result['validation_loss']:.4f} after {steps} steps, "
            f"{result['seconds']:.1f} s\n"
        )
        return 0
    results = run_all(arguments, steps, lambda line: sys.stderr.write(line + "\n"))
    summary = summarize(results)
    out: Path = arguments.out
    text = to_text(summary)
    errors = summary["codec_errors"]
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    (out / "codec_errors.json").write_text(json.dumps(errors, indent=1))
    (out / "table.md").write_text(f"{text}\n\n{errors_to_text(errors)}\n")
    sys.stdout.write(text + "\n")
    try:
        plot(results, out / "curves.png")
    except ImportError:
        sys.stdout.write("No plot: matplotlib is missing (gds-optimizer[plot]).\n")
    sys.stdout.write(f"All of it: {pack(out)}\n")
    for variant in differing(summary):
        sys.stderr.write(f"{variant} differs from {TWINS[variant]}, of which it loses nothing\n")
    return 1 if differing(summary) else 0


if __name__ == "__main__":
    sys.exit(main())

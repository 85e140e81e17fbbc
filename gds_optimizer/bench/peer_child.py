"""One peer in a process of its own: `python -m gds_optimizer.bench.peer_child TASK.json`.

Its result, or why there is none, is the JSON file that the task names.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gds_optimizer.bench.memory_cap import Group, own_group
from gds_optimizer.bench.page_cache import resident_bytes
from gds_optimizer.bench.process_io import (
    IoBytes,
    io_of_tree,
    machine_page_cache_bytes,
    peak_rss_bytes,
)

_PR_SET_PDEATHSIG = 1
_SHARD_NUMEL = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a child is to do; `to_json` and `from_json` are inverse.

    Attributes:
        peer: a recipe's name, or the path of a streamer's file.
        is_streamer: which of the two.
        directory: for the peer's files.
        result: the file for what was found.
        numel, steps: parameters, and steps that are timed; one before them is not.
        device: torch's name for it.
        cap_bytes: of host memory and page cache, from when parameters and gradients are there.
        group, version: the control group to join, its interface; None for where it is already.
        has_group: whether there is one to set a limit in.
        io: this package's I/O path.
        parent: the process without which there is no point in going on.
    """

    peer: str
    is_streamer: bool
    directory: str
    result: str
    numel: int
    steps: int
    device: str
    cap_bytes: int | None
    group: str | None
    version: int
    has_group: bool
    io: str
    parent: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        return cls(**json.loads(text))


@dataclass(slots=True)
class _Watch:
    """What is asked after each step, outside of its time."""

    torch: Any
    device: Any
    group: Group | None
    device_base_bytes: int = 0
    device_peak_bytes: int = 0
    cache_base_bytes: int = 0
    cache_bytes: list[int] = field(default_factory=list)

    def begin(self) -> None:
        self.cache_base_bytes = self._cache_bytes()

    def look(self) -> None:
        self.cache_bytes.append(max(self._cache_bytes() - self.cache_base_bytes, 0))
        if self.device.type == "cuda":
            torch_bytes = self.torch.cuda.max_memory_allocated(self.device)
            used_bytes = self.device_used_bytes() - self.device_base_bytes
            self.device_peak_bytes = max(self.device_peak_bytes, torch_bytes, used_bytes)

    def device_used_bytes(self) -> int:
        """Of the whole device, so that what torch did not allocate is seen too."""
        free_bytes, total_bytes = self.torch.cuda.mem_get_info(self.device)
        return int(total_bytes - free_bytes)

    def _cache_bytes(self) -> int:
        if self.group is not None:
            return self.group.page_cache_bytes()
        return machine_page_cache_bytes()


def measure(task: Task) -> dict[str, Any]:
    """Set the peer up, step it, and tell what that took.

    Returns:
        `missing` with the reason where the peer is not installed or cannot work here; else the
        measurements that `docs/benchmarks.md` describes.

    Raises:
        RuntimeError: the parameters are not what the step should have made of them.
        Exception: whatever the peer raises.
    """
    group = None
    if task.has_group:
        group = own_group() if task.group is None else Group(Path(task.group), task.version)
        if task.group is not None and group is not None:
            group.join()

    import torch

    from gds_optimizer.bench.peer_recipes import (
        RECIPES,
        CannotRunError,
        Setting,
        streamer_recipe,
    )
    from gds_optimizer.bench.steps import device_named, timed

    recipe = streamer_recipe(Path(task.peer)) if task.is_streamer else RECIPES[task.peer]
    why_not = _why_not_importable(recipe.module, recipe.package)
    if why_not:
        return {"missing": why_not}
    device = device_named(task.device)
    watch = _Watch(torch, device, group)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        watch.device_base_bytes = watch.device_used_bytes()
    torch.manual_seed(1234)
    dtype = torch.bfloat16 if recipe.half else torch.float32
    sizes = [min(_SHARD_NUMEL, task.numel - start) for start in range(0, task.numel, _SHARD_NUMEL)]
    params = [torch.randn(size, device=device).to(dtype).requires_grad_() for size in sizes]
    grad = (torch.randn(sizes[0], device=device) * 0.01).to(dtype)
    # Megatron's gradients of evicted mains are fp32, and so is what a main's `.grad` takes.
    is_ours = recipe.name.startswith("gds-optimizer")
    grads = [(grad.float() if is_ours else grad)[:size] for size in sizes]
    expected = _Expected(params, grads, recipe.empty_steps)
    capped = task.cap_bytes if group is not None else None
    if capped is not None and group is not None:
        group.limit(capped)
    watch.begin()
    setting = Setting(directory=Path(task.directory), device=device, cap_bytes=capped, io=task.io)
    io_before = io_of_tree()
    try:
        peer, build_s = timed(lambda: recipe.build(params, grads, setting))
    except CannotRunError as error:
        return {"missing": str(error)}
    (built,) = peer
    watch.look()
    io_built = io_first = io_of_tree()
    steps_s = []
    for number in range(task.steps + 1):
        _, taken_s = timed(built.step)
        watch.look()
        if number:
            steps_s.append(taken_s)
        else:
            io_first = io_of_tree()
    io_stepped = io_of_tree()
    began = time.perf_counter()
    _sync(Path(task.directory))
    flush_s = time.perf_counter() - began
    cached_files_bytes = resident_bytes(Path(task.directory))
    expected.check(built.values(), task.steps + 1, is_adamw=recipe.is_adamw, slack=recipe.slack)
    built.close()
    return {
        "note": built.note,
        "step_s": statistics.median(steps_s),
        "steps_s": steps_s,
        "build_s": build_s,
        "flush_s": flush_s,
        "build_io": dataclasses.asdict(io_built - io_before),
        "step_io": _per_step(io_stepped - io_first, task.steps),
        "page_cache_bytes": max(watch.cache_bytes),
        "files_in_page_cache_bytes": cached_files_bytes,
        "host_peak_bytes": peak_rss_bytes(),
        "device_peak_bytes": watch.device_peak_bytes if device.type == "cuda" else None,
        "capped_bytes": capped,
    }


def _why_not_importable(module: str | None, package: str | None) -> str:
    """Why a peer's module cannot be imported, in words; empty if it can, or there is none."""
    if module is None:
        return ""
    try:
        importlib.import_module(module)
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name is not None
        if is_absent and str(error.name).split(".")[0] == module.split(".")[0]:
            return f"not installed: pip install {package}"
        return f"{package} cannot be imported: {error}"
    return ""


class _Expected:
    """What AdamW makes of the first elements of each parameter."""

    def __init__(self, params: list[Any], grads: list[Any], empty_steps: int = 0) -> None:
        import torch

        from gds_optimizer.bench.peer_recipes import HYPER_PARAMETERS, SAMPLE_NUMEL

        self._torch, self._numel, self._dtype = torch, SAMPLE_NUMEL, params[0].dtype
        self._before = [_copy(param, self._numel) for param in params]
        self._params = [each.clone().requires_grad_() for each in self._before]
        self._optimizer = torch.optim.AdamW(self._params, **HYPER_PARAMETERS)
        for param in self._params:
            param.grad = torch.zeros_like(param)
        for _ in range(empty_steps):
            self._optimizer.step()
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = _copy(grad, self._numel)

    def check(self, values: Any, steps: int, *, is_adamw: bool, slack: float = 1e-3) -> None:
        """Raises:
        RuntimeError: a parameter did not change, or is not what AdamW makes of it.
        """
        torch = self._torch
        for _ in range(steps):
            self._optimizer.step()
        found = [_copy(value, self._numel) for value in values]
        for number, (value, before) in enumerate(zip(found, self._before, strict=True)):
            if torch.equal(value, before):
                raise RuntimeError(f"parameter {number} did not change in {steps} steps")
            wanted = self._params[number].detach().to(self._dtype).float()
            # Two roundings to the parameters' type, and what another order of operations makes.
            allowed = 2 * torch.finfo(self._dtype).eps * wanted.abs() + slack
            if is_adamw and not bool(((value - wanted).abs() <= allowed).all()):
                largest = float((value - wanted).abs().max())
                raise RuntimeError(
                    f"parameter {number} is not what AdamW makes of it in {steps} steps: off by "
                    f"up to {largest:.3g}"
                )


def _copy(tensor: Any, numel: int) -> Any:
    """The first elements in fp32 on the host, in memory of their own."""
    return tensor.detach()[:numel].float().cpu().clone()


def _per_step(total: IoBytes, steps: int) -> dict[str, float]:
    return {name: value / steps for name, value in dataclasses.asdict(total).items()}


def _sync(directory: Path) -> None:
    """Bring to the drive what the peer left to the kernel."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _end_with(parent: int) -> None:
    """Be killed when the parent ends, whatever ends it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(argv: list[str] | None = None) -> int:
    (path,) = sys.argv[1:] if argv is None else argv
    task = Task.from_json(Path(path).read_text())
    _end_with(task.parent)
    try:
        found = measure(task)
    except Exception as error:  # noqa: BLE001 - another's failure is a row of the table
        import traceback

        traceback.print_exc()
        # An assertion has no message often, but always a place.
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error).strip().splitlines() or [f"{last.line} ({last.filename}:{last.lineno})"]
        found = {"missing": f"failed: {type(error).__name__}: {said[0]}"}
    result = Path(task.result)
    partial = result.with_suffix(".part")
    partial.write_text(json.dumps(found))
    partial.rename(result)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads and exit handlers that a peer leaves behind are not waited for.
    os._exit(status)

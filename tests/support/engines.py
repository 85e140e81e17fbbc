"""Engines without a framework: the same optimizer resident and streamed, and what to compare.

Shapes, gradients and first values come from seeds, so a run can be repeated in another process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.codecs import get_codec, rounding_seed
from gds_optimizer.engine import Engine
from gds_optimizer.evicted import evict_, evicted_like
from gds_optimizer.homes import assign_homes
from gds_optimizer.io import IoBackend, reaches_host_memory
from gds_optimizer.plan import Binding, plan_engine
from gds_optimizer.slots import SlotPool
from gds_optimizer.stepper import install_step
from gds_optimizer.store import Store
from gds_optimizer.tiers import Tiers
from tests.support import io_backends

# The smallest bucket holds 1024 elements; of main and two moments they take 12 KiB.
SMALL_BUCKET_BYTES = 12 * 1024
# Tiny, aligned and odd shards, an empty one, and one that ten buckets do not hold.
SIZES = (1, 64, 100, 5000, 0, 17, 1024, 4097, 10300)
NAME = "rank00000/opt0"

OptimizerClass = Callable[..., torch.optim.Optimizer]
Grads = Sequence[torch.Tensor | None]


def same_bits(first: Any, second: Any) -> bool:
    """Whether two tensors or numbers are equal to the bit: -0.0 is not 0.0, and NaN is itself."""
    a, b = torch.as_tensor(first).detach().cpu(), torch.as_tensor(second).detach().cpu()
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def first_values(sizes: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Half-precision parameters."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def grads_of(sizes: Sequence[int], step: int, without: Sequence[int] = ()) -> list[Any]:
    """fp32 gradients of a step; None for the parameters in `without`."""
    generator = torch.Generator().manual_seed(1000 + step)
    grads = [torch.randn(size, generator=generator) for size in sizes]
    return [None if index in without else grad for index, grad in enumerate(grads)]


def bits_of(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def flat_groups(
    params: Sequence[torch.Tensor], groups: Mapping[int, Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Parameters spread over groups: `groups` maps the first parameter of each to its options."""
    starts = sorted((groups or {}) | {0: (groups or {}).get(0, {})})
    return [
        {"params": list(params[start:end]), **(groups or {}).get(start, {})}
        for start, end in zip(starts, [*starts[1:], len(params)], strict=True)
    ]


class StreamedOptimizer:
    """An optimizer over evicted mains, its engine, and everything below it.

    Args:
        directories: of the store.
        make: called with groups; builds the optimizer.
        models: half-precision parameters, changed by each step.
        groups: see `flat_groups`.
        native: parameters that stay resident in fp32 (their `models` entry is stepped itself).
        initialize: write the first mains now ("eager"), in the first step ("lazy"), or start from
            state that is given ("given": the optimizer is built and stepped resident before, by
            `warm_up`, and its mains evicted in place).
        moments: `moment_dtype` and `moment_rounding` of `plan_engine`.
        budgets: bytes on the device and of host memory that buckets may keep for good.
        backend, pool: shared ones; None for own ones, which `close` closes.
    """

    def __init__(
        self,
        directories: Path | Sequence[Path],
        make: OptimizerClass,
        models: Sequence[torch.Tensor],
        *,
        groups: Mapping[int, Mapping[str, Any]] | None = None,
        native: Sequence[int] = (),
        initialize: str = "eager",
        warm_up: Callable[[torch.optim.Optimizer, list[torch.Tensor]], None] | None = None,
        bucket_size: int = SMALL_BUCKET_BYTES,
        slots: int = 3,
        kind: str = "host",
        backend: IoBackend | None = None,
        pool: SlotPool | None = None,
        name: str = NAME,
        timeout_s: float = 60.0,
        names: Sequence[str] | None = None,
        moments: Mapping[str, str] | None = None,
        budgets: tuple[int, int] = (0, 0),
    ) -> None:
        self.models = list(models)
        names = names or [f"p{index}" for index in range(len(models))]
        self.mains: list[torch.Tensor] = []
        initial: list[dict[str, torch.Tensor] | None] = [None] * len(self.models)
        if initialize == "given":
            self.mains = [
                m if index in native else m.float() for index, m in enumerate(self.models)
            ]
            self.optimizer = make(flat_groups(self.mains, groups))
            if warm_up is not None:
                warm_up(self.optimizer, self.mains)
            for index, main in enumerate(self.mains):
                main.grad = None
                initial[index] = {
                    key: value
                    for key, value in self.optimizer.state.get(main, {}).items()
                    if isinstance(value, torch.Tensor) and value.dim() > 0
                }
                if index not in native:
                    initial[index]["main"] = main.detach().clone()  # type: ignore[index]
                    evict_(main, name=names[index])
        else:
            # As frameworks do: built over the parameters, then given the mains.
            self.mains = [
                m if i in native else evicted_like(m, dtype=torch.float32, name=names[i])
                for i, m in enumerate(self.models)
            ]
            self.optimizer = make(flat_groups([m.float() for m in self.models], groups))
            replaced = flat_groups(self.mains, groups)
            for group, new in zip(self.optimizer.param_groups, replaced, strict=True):
                group["params"] = new["params"]
            self.optimizer.state.clear()
        bindings = [
            Binding(names[i], main, None if i in native else model, initial[i] or None)
            for i, (main, model) in enumerate(zip(self.mains, self.models, strict=True))
        ]
        roots = [directories] if isinstance(directories, Path) else list(directories)
        with contextlib.ExitStack() as undo:
            self.plan = plan_engine(self.optimizer, bindings, bucket_size, **(moments or {}))
            self.backend = backend or io_backends.make(kind)
            if backend is None:
                undo.callback(self.backend.close)
            sizes = [bucket.file_bytes for bucket in self.plan.layout.buckets]
            homes = assign_homes([sizes], hbm_budget_bytes=budgets[0], host_budget_bytes=budgets[1])
            self.tiers = Tiers([self.plan.layout], homes)
            undo.callback(self.tiers.close)
            device = self.backend.device
            self.tiers.take_host_memory(device, 0)
            from_host = not reaches_host_memory(device)
            self.pool = pool or SlotPool(
                slots if self.tiers.moving_bytes(from_host=from_host) or not sizes else 0,
                self.plan.layout.max_file_bytes,
                self.backend,
                scratch_bytes=self.plan.layout.max_scratch_bytes,
            )
            if pool is None:
                undo.callback(self.pool.close)
            self.tiers.take_device_memory(self.pool)
            self.store = Store(
                self.plan.layout, roots, name, self.backend, in_memory=self.tiers.in_memory[0]
            )
            self.engine = Engine(self.plan, self.pool, self.store, timeout_s=timeout_s)
            undo.callback(self.engine.close)
            install_step(self.optimizer, self.engine.step)
            if initialize != "lazy":
                self.engine.initialize()
            self._undo = undo.pop_all()

    @property
    def layout(self) -> Any:
        return self.engine.layout

    @property
    def paths(self) -> list[Path]:
        return self.store.paths

    def step(self, grads: Grads) -> None:
        for main, grad in zip(self.mains, grads, strict=True):
            main.grad = None if grad is None else grad.clone().to(main.dtype)
        self.optimizer.step()

    def close(self) -> None:
        self._undo.close()


class ResidentOptimizer:
    """The oracle: the same optimizer over real mains, and the copy to the model after each step."""

    def __init__(
        self,
        make: OptimizerClass,
        models: Sequence[torch.Tensor],
        *,
        groups: Mapping[int, Mapping[str, Any]] | None = None,
        native: Sequence[int] = (),
    ) -> None:
        self.models = list(models)
        self.mains = [m if i in native else m.float() for i, m in enumerate(self.models)]
        self.optimizer = make(flat_groups(self.mains, groups))

    def step(self, grads: Grads) -> None:
        for main, grad in zip(self.mains, grads, strict=True):
            main.grad = None if grad is None else grad.clone().to(main.dtype)
        self.optimizer.step()
        for model, main in zip(self.models, self.mains, strict=True):
            if model is not main:
                model.copy_(main)

    def state(self, index: int) -> dict[str, Any]:
        return {"main": self.mains[index], **self.optimizer.state.get(self.mains[index], {})}


def round_moments(engine: Engine, resident: ResidentOptimizer, stepped: Container[int]) -> None:
    """Round the moments that a resident step has left as a streamed run stores them.

    Each bucket's planes are put together, encoded and decoded as a whole, on the CPU; pieces that
    were not stepped stay as they are.
    """
    layout = engine.layout
    for bucket in layout.buckets:
        members = engine.plan.shard_bindings[bucket.space]
        for number, plane in enumerate(bucket.planes):
            codec = get_codec(plane.codec)
            if codec.is_lossless:
                continue
            whole = torch.zeros(bucket.numel)
            pieces = []
            for piece in bucket.pieces:
                values = resident.state(members[piece.shard]).get(plane.name)
                if values is not None:
                    part = values[piece.shard_offset : piece.shard_offset + piece.numel]
                    whole[piece.bucket_offset : piece.bucket_offset + piece.numel].copy_(part)
                    pieces.append((members[piece.shard], piece, part))
            encoded = torch.full((plane.nbytes,), 0xA5, dtype=torch.uint8)
            seed = rounding_seed(engine.steps, bucket.index, number)
            codec.encode_from(whole, encoded, seed=seed)
            rounded = codec.decode(encoded, bucket.numel)
            for index, piece, part in pieces:
                if index in stepped:
                    part.copy_(rounded[piece.bucket_offset : piece.bucket_offset + piece.numel])


class Pair:
    """A resident and a streamed optimizer that get the same gradients.

    Where the streamed one does not keep its moments in fp32, the resident one's are rounded after
    each step as the other's are stored.
    """

    def __init__(
        self,
        directory: Path | Sequence[Path],
        make: OptimizerClass,
        sizes: Sequence[int] = SIZES,
        *,
        groups: Mapping[int, Mapping[str, Any]] | None = None,
        native: Sequence[int] = (),
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.sizes = list(sizes)
        self.native = set(native)
        self.device = device

        def models() -> list[torch.Tensor]:
            values = [v.to(device) for v in first_values(sizes, dtype=dtype)]
            return [v.float() if i in self.native else v for i, v in enumerate(values)]

        self.resident = ResidentOptimizer(make, models(), groups=groups, native=native)
        self.streamed = StreamedOptimizer(
            directory, make, models(), groups=groups, native=native, **options
        )

    @property
    def engine(self) -> Engine:
        return self.streamed.engine

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return self.resident.optimizer, self.streamed.optimizer

    def step(self, step: int, without: Sequence[int] = ()) -> None:
        grads = grads_of(self.sizes, step, without)
        grads = [None if grad is None else grad.to(self.device) for grad in grads]
        self.resident.step(grads)
        self.streamed.step(grads)
        if self.engine.layout.max_scratch_bytes:
            stepped = {index for index, grad in enumerate(grads) if grad is not None}
            round_moments(self.engine, self.resident, stepped)

    def check_models(self) -> None:
        for index, (a, b) in enumerate(
            zip(self.resident.models, self.streamed.models, strict=True)
        ):
            assert same_bits(a, b), f"model parameter {index} differs"

    def check(self) -> None:
        """Models, mains, moments, scalars and the groups' options are the same, to the bit."""
        self.check_models()
        found = self.engine.read_state()
        for index in range(len(self.sizes)):
            wanted, got = self.resident.state(index), found[f"p{index}"]
            assert set(got) == set(wanted), f"p{index}: {set(got) ^ set(wanted)}"
            for key, value in wanted.items():
                assert same_bits(value, got[key]), f"{key} of p{index} differs"
        for number, (a, b) in enumerate(
            zip(*(optimizer.param_groups for optimizer in self.optimizers), strict=True)
        ):
            assert set(a) == set(b), f"options of group {number}: {set(a) ^ set(b)}"
            for key in set(a) - {"params"}:
                same = same_bits(a[key], b[key]) if torch.is_tensor(a[key]) else a[key] == b[key]
                assert same, f"{key} of group {number} is {a[key]} and {b[key]}"

    def close(self) -> None:
        self.streamed.close()


@contextlib.contextmanager
def pair(*args: Any, **options: Any) -> Iterator[Pair]:
    """A `Pair` that is closed on leaving, whatever happens."""
    made = Pair(*args, **options)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def streamed(
    directories: Path | Sequence[Path],
    make: OptimizerClass | None = None,
    sizes: Sequence[int] = SIZES,
    **options: Any,
) -> Iterator[StreamedOptimizer]:
    """A `StreamedOptimizer` (AdamW unless told otherwise) that is closed on leaving."""
    made = StreamedOptimizer(directories, make or adamw, first_values(sizes), **options)
    try:
        yield made
    finally:
        made.close()


def adamw(groups: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, **options)


def leftovers(directory: Path) -> list[str]:
    """Everything below a directory, sorted."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@contextlib.contextmanager
def mounted_disk(directory: Path, nbytes: int) -> Iterator[Path]:
    """A small ext4 file system below `directory`; skips where one cannot be mounted."""
    image, mount_point = directory / "image", directory / "disk"
    mount_point.mkdir()
    with open(image, "wb") as file:
        file.truncate(nbytes)
    commands: list[tuple[str, ...]] = [
        ("mkfs.ext4", "-q", "-F", "-m", "0", str(image)),
        ("mount", "-o", "loop", str(image), str(mount_point)),
    ]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip(f"needs {command[0]}")
        if done.returncode:
            pytest.skip(f"needs to mount a loop device ({done.stderr.strip()})")
    try:
        yield mount_point
    finally:
        subprocess.run(("umount", str(mount_point)), check=True)
        image.unlink()


def open_files() -> set[str]:
    """What this process has open, by path; sockets and pipes by their number."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def in_child(check: Callable[[], None]) -> None:
    """Run `check` in a forked child, and raise what it raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check()
            status = 0
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            os.write(writing, repr(error).encode()[:4000])
        os._exit(status)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with open(reading, "rb") as pipe:
        assert status == 0, pipe.read().decode()

"""How each peer is set up so that it does the same AdamW step as all others.

What is common: parameters of at most 2**24 elements on the device, gradients of the same type
there, and AdamW with `HYPER_PARAMETERS`. A step begins with the gradients on the device and ends
with the updated parameters there. Peers that hook into the backward pass get their gradients from
one, whose arithmetic is a copy and is timed with the step.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.config import StreamConfig

HYPER_PARAMETERS: dict[str, Any] = {
    "lr": 1e-2,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
}

Tensors = list[torch.Tensor]
Action = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a peer is set up with.

    Attributes:
        directory: of its own, on the drive.
        device: of parameters and gradients.
        cap_bytes: of host memory and page cache for it; None where nothing is capped.
        io: this package's I/O path.
    """

    directory: Path
    device: torch.device
    cap_bytes: int | None
    io: str


@dataclass(slots=True)
class Peer:
    """A peer that is ready.

    Attributes:
        step: does one, to its end.
        values: the parameters, up to date.
        close: ends it.
        note: what a reader should know about how it was set up.
    """

    step: Action
    values: Callable[[], Sequence[torch.Tensor]]
    close: Action = lambda: None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a peer is made.

    Attributes:
        name: in the table.
        build: gets parameters, gradients and the setting.
        half: parameters are bf16 and the peer keeps fp32 ones of its own; else they are fp32 and
            stay on the device.
        module, package: what has to be imported, and what pip calls it.
        is_adamw: whether the result has to be that of AdamW with `HYPER_PARAMETERS`.
        slack: by how much a parameter may be off beside rounding to its type.
        empty_steps: with gradients of zero that the peer makes and counts when it is set up.
    """

    name: str
    build: Callable[[Tensors, Tensors, Setting], Peer]
    half: bool = False
    module: str | None = None
    package: str | None = None
    is_adamw: bool = True
    slack: float = 1e-3
    empty_steps: int = 0


class CannotRunError(Exception):
    """A peer cannot work here; the message says why, in plain words."""


def _give(params: Tensors, grads: Tensors) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def _plain(optimizer: Any, params: Tensors, grads: Tensors, note: str = "") -> Peer:
    def step() -> None:
        _give(params, grads)
        optimizer.step()

    return Peer(step, lambda: params, note=note)


def _resident(params: Tensors, grads: Tensors, setting: Setting) -> Peer:
    return _plain(torch.optim.AdamW(params, fused=True, **HYPER_PARAMETERS), params, grads)


def _ours(params: Tensors, grads: Tensors, setting: Setting, host_budget: int = 0) -> Peer:
    from gds_optimizer.evicted import evicted_like
    from gds_optimizer.plan import Binding
    from gds_optimizer.runtime import Part, Runtime
    from gds_optimizer.stepper import install_step

    bindings = []
    for number, model in enumerate(params):
        main = evicted_like(model, dtype=torch.float32, name=f"parameter {number}")
        bindings.append(Binding(f"parameter {number}", main, model))
    mains = [binding.main for binding in bindings]
    optimizer = torch.optim.AdamW(
        [torch.zeros(1, device=setting.device)], fused=True, **HYPER_PARAMETERS
    )
    optimizer.param_groups[0]["params"] = mains
    config = StreamConfig(directories=(setting.directory,), io=setting.io, host_budget=host_budget)
    runtime = Runtime.build(
        [Part(optimizer, bindings, "peers")], config, device=setting.device, rank=0, eager=True
    )
    (engine,) = runtime.engines
    uninstall = install_step(optimizer, engine.step)

    def step() -> None:
        _give(mains, grads)
        optimizer.step()
        engine.drain()

    def close() -> None:
        uninstall()
        runtime.close_engine(engine)

    memory = f", {host_budget / 1e9:.2f} GB of buckets in host memory" if host_budget else ""
    return Peer(step, lambda: params, close, f"I/O path {runtime.report.io_path}{memory}")


def _ours_in_host_memory(params: Tensors, grads: Tensors, setting: Setting) -> Peer:
    if setting.cap_bytes is None:
        raise CannotRunError("needs --memory-cap, which is its budget")
    # What else the engine takes: without a GPU its slots are host memory too.
    config = StreamConfig(directories=(setting.directory,))
    slots_bytes = config.slots * config.bucket_size if setting.device.type == "cpu" else 0
    budget = setting.cap_bytes - slots_bytes - _HOST_SLACK_BYTES
    if budget < config.bucket_size:
        raise CannotRunError(
            f"the cap leaves {max(budget, 0)} bytes beside what the engine itself takes, less than "
            f"a bucket of {config.bucket_size}"
        )
    return _ours(params, grads, setting, budget)


_HOST_SLACK_BYTES = 512 * 2**20


def _torchao(params: Tensors, grads: Tensors, setting: Setting) -> Peer:
    if setting.device.type != "cuda":
        raise CannotRunError("needs a GPU")
    optimizer = importlib.import_module("torchao.optim").CPUOffloadOptimizer(
        params, torch.optim.AdamW, fused=True, **HYPER_PARAMETERS
    )

    def step() -> None:
        for param in params:
            param.grad = None
        torch.autograd.backward(params, grads)  # its hooks fetch the gradients
        optimizer.step()

    return Peer(step, lambda: params, note="gradients and state in host memory, Adam on the CPU")


def _bitsandbytes(params: Tensors, grads: Tensors, setting: Setting) -> Peer:
    if setting.device.type != "cuda":
        raise CannotRunError("needs a GPU: its paged state is CUDA managed memory")
    optimizer = importlib.import_module("bitsandbytes.optim").PagedAdamW32bit(
        params, **HYPER_PARAMETERS
    )
    return _plain(
        optimizer, params, grads, "state in managed memory, which moves to the host when it must"
    )


def _megatron_hybrid(params: Tensors, grads: Tensors, setting: Setting) -> Peer:
    if setting.device.type != "cuda":
        raise CannotRunError("needs a GPU: it offloads parameters of a GPU alone")
    module = importlib.import_module("megatron.core.optimizer.cpu_offloading")
    optimizer = module.HybridDeviceOptimizer(
        [{"params": params, **HYPER_PARAMETERS}],
        offload_fraction=1.0,
        cpu_optimizer_cls=lambda groups: torch.optim.AdamW(groups, fused=True),
        gpu_optimizer_cls=lambda groups: torch.optim.AdamW(groups, fused=True),
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=True,
    )
    return _plain(
        optimizer, params, grads, "optimizer_offload_fraction 1.0, overlapped, Adam on the CPU"
    )


def _megatron_chunked(params: Tensors, grads: Tensors, setting: Setting) -> Peer:
    config = importlib.import_module("megatron.core.optimizer").OptimizerConfig
    version = importlib.import_module("megatron.core").__version__
    names = [
        name
        for name in ("chunked_optimizer_state_offload", "offload_optimizer_states")
        if hasattr(config, name)
    ]
    if not names:
        raise CannotRunError(f"megatron-core {version} has no chunked offload")
    raise CannotRunError(
        f"megatron-core {version} has {', '.join(names)}, which work only inside its own training"
    )


def _deepspeed(device: str, params: Tensors, grads: Tensors, setting: Setting) -> Peer:
    deepspeed = importlib.import_module("deepspeed")
    for name, value in _ONE_RANK.items():
        os.environ.setdefault(name, value)
    backend = "nccl" if setting.device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    offload: dict[str, Any] = {"device": device, "pin_memory": setting.device.type == "cuda"}
    zero: dict[str, Any] = {"stage": 3, "sub_group_size": 2**26, "offload_optimizer": offload}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": HYPER_PARAMETERS},
    }
    if device == "nvme":
        # For four states of each of three groups: one is read, one stepped, one written.
        offload |= {"nvme_path": str(setting.directory), "buffer_count": 12}
        offload |= {"pipeline_read": True, "pipeline_write": True}
        config["aio"] = {
            "block_size": 8 * 2**20,
            "queue_depth": 32,
            "intra_op_parallelism": 8,
            "single_submit": False,
            "overlap_events": True,
        }
    module = _Dots(params, grads)
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=config
    )

    def step() -> None:
        engine.backward(engine())
        engine.step()

    def values() -> Tensors:
        gathered = []
        for param in module.params:
            with deepspeed.zero.GatheredParameters([param]):
                gathered.append(param.detach().flatten()[:SAMPLE_NUMEL].clone())
        return gathered

    return Peer(step, values, note=_DEEPSPEED_NOTE)


_DEEPSPEED_NOTE = (
    "ZeRO stage 3, Adam on the CPU; a backward pass is timed too; its parameters are compared with "
    "AdamW's to one learning rate"
)
_ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29553",
}
SAMPLE_NUMEL = 256
"""Elements of each parameter whose values are looked at."""


class _Dots(torch.nn.Module):
    """A model whose gradients are the given tensors."""

    def __init__(self, params: Tensors, grads: Tensors) -> None:
        super().__init__()
        self.params = torch.nn.ParameterList(torch.nn.Parameter(p.detach()) for p in params)
        self.grads = grads

    def forward(self) -> torch.Tensor:
        pairs = zip(self.params, self.grads, strict=True)
        return torch.stack([torch.dot(param, grad) for param, grad in pairs]).sum()


def streamer_recipe(path: Path) -> Recipe:
    """Of a Python file with `build(params, directory)`, which returns an object with `step()`.

    `params` are fp32 leaf tensors on the device whose `.grad` is set before every step; it has
    `directory`, on the drive, to itself. An object with `close()` has it called in the end.

    A file with `setup_optimizer_state_streaming(args, optimizer)` instead takes over Megatron's
    distributed optimizer: see `peer_megatron`.

    The file runs only when the recipe is built.

    Raises:
        SyntaxError: the file is no Python.
    """
    takes_megatron = _MEGATRON_SETUP in _names_in(path)

    def build(params: Tensors, grads: Tensors, setting: Setting) -> Peer:
        names = runpy.run_path(str(path))
        if takes_megatron:
            if not callable(names.get(_MEGATRON_SETUP)):
                raise CannotRunError(
                    f"{path} names {_MEGATRON_SETUP}, but not as a function of the module: define "
                    "or import it at the top level"
                )
            from gds_optimizer.bench import peer_megatron

            return peer_megatron.build(names[_MEGATRON_SETUP], params, grads, setting)
        if not callable(names.get("build")):
            raise CannotRunError(
                f"{path} has no function build(params, directory) and no function "
                f"{_MEGATRON_SETUP}(args, optimizer)"
            )
        optimizer = names["build"](params, setting.directory)
        peer = _plain(optimizer, params, grads)
        peer.close = getattr(optimizer, "close", peer.close)
        return peer

    return Recipe(
        name=path.name,
        build=build,
        half=takes_megatron,
        module="megatron.core" if takes_megatron else None,
        package="megatron-core" if takes_megatron else None,
        is_adamw=False,
    )


_MEGATRON_SETUP = "setup_optimizer_state_streaming"


def _names_in(path: Path) -> set[str]:
    """What a Python file defines, assigns or imports by name anywhere, without running it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="resident", build=_resident),
        Recipe(name="gds-optimizer", build=_ours, half=True),
        Recipe(name="gds-optimizer, host budget", build=_ours_in_host_memory, half=True),
        *(
            Recipe(
                name=name,
                build=functools.partial(_deepspeed, device),
                half=True,
                module="deepspeed",
                package="deepspeed",
                slack=HYPER_PARAMETERS["lr"],
                empty_steps=1,
            )
            for name, device in (
                ("DeepSpeed ZeRO-Infinity", "nvme"),
                ("DeepSpeed CPU offload", "cpu"),
            )
        ),
        Recipe(
            name="torchao CPUOffloadOptimizer",
            build=_torchao,
            module="torchao.optim",
            package="torchao",
        ),
        Recipe(
            name="bitsandbytes PagedAdamW",
            build=_bitsandbytes,
            module="bitsandbytes",
            package="bitsandbytes",
        ),
        Recipe(
            name="Megatron HybridDeviceOptimizer",
            build=_megatron_hybrid,
            half=True,
            module="megatron.core.optimizer.cpu_offloading",
            package="megatron-core",
        ),
        Recipe(
            name="Megatron chunked offload",
            build=_megatron_chunked,
            module="megatron.core.optimizer",
            package="megatron-core",
        ),
    )
}

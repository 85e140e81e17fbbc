"""What streaming will take, before anything runs: bytes, files, device memory, seconds.

The numbers come from the plan that a run would make, for parameters that take no memory, and homes
are assigned by the code that does it in a run; nothing is allocated and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import ConfigError
from gds_optimizer.evicted import evicted_like
from gds_optimizer.homes import Home
from gds_optimizer.host_memory import available_bytes
from gds_optimizer.io import reaches_host_memory
from gds_optimizer.plan import Binding, EnginePlan, plan_as_configured
from gds_optimizer.rates import Rates
from gds_optimizer.room import free_bytes
from gds_optimizer.tiers import HostOffer, Tiers

MAX_BUCKETS = 10**6
"""Of a rank; each is a file with two descriptors, and so many are a mistake."""

OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """What host memory that the plan leaves alone would buy (see `HostOffer`), of a rank.

    Attributes:
        available_bytes: of host memory, to a rank.
        host_budget_bytes: to ask for instead.
        buckets_off_drives: that would live in memory then, of all that are not on the device.
        moving_buckets: those.
        read_bytes, written_bytes: of a rank's files in a step, then.
        step_low_s, step_high_s: estimated seconds of a step's bytes, then.
    """

    available_bytes: int
    host_budget_bytes: int
    buckets_off_drives: int
    moving_buckets: int
    read_bytes: int
    written_bytes: int
    step_low_s: float | None
    step_high_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """What streaming takes; sizes in bytes. A rank is the one with the most parameters.

    Attributes:
        numel, rank_numel: parameters in all and of a rank.
        local_ranks: ranks that share the drives and the host memory of a machine.
        planes: name and codec of each.
        bytes_per_param: wherever it lives, padding and footers included.
        rank_state_bytes, state_bytes: of buckets, of a rank and of all, wherever they live.
        rank_buckets: of a rank.
        buckets_by_home, bytes_by_home: of a rank: on the device, in host memory, on NVMe.
        files: bucket files of all ranks.
        bucket_bytes: of the largest bucket.
        slots, slot_bytes, scratch_bytes: of a rank, on its device.
        read_bytes, written_bytes: of files, by a rank in a step, when nothing is left in slots.
        host_read_bytes, host_written_bytes: copied from and to host memory, the same way; 0 where
            the optimizer steps on the CPU.
        local_bytes: of the bucket files of a machine.
        local_host_bytes: of the buckets in its host memory.
        free_bytes: in the directories; None where none was named.
        step_low_s, step_high_s: estimated seconds that a step's bytes take; None where that is not
            known.
        unused: what more host memory would buy; None where that is nothing.
    """

    optimizer: str
    numel: int
    ranks: int
    local_ranks: int
    rank_numel: int
    planes: dict[str, str]
    bytes_per_param: float
    rank_state_bytes: int
    state_bytes: int
    rank_buckets: int
    buckets_by_home: dict[str, int]
    bytes_by_home: dict[str, int]
    files: int
    bucket_bytes: int
    slots: int
    slot_bytes: int
    scratch_bytes: int
    read_bytes: int
    written_bytes: int
    host_read_bytes: int
    host_written_bytes: int
    local_bytes: int
    local_host_bytes: int
    free_bytes: int | None
    step_low_s: float | None
    step_high_s: float | None
    unused: Unused | None = None

    @property
    def device_bytes(self) -> int:
        """Slots, scratch and the buckets that live there, of a rank."""
        slots_bytes = self.slots * self.slot_bytes + self.scratch_bytes
        return slots_bytes + self.bytes_by_home[Home.DEVICE.value]

    @property
    def pcie_bytes(self) -> int:
        """That reach a rank's device and leave it in a step, each way."""
        return self.read_bytes + self.host_read_bytes

    @property
    def fits(self) -> bool | None:
        """Whether a machine's files fit the directories; None where none was named."""
        return None if self.free_bytes is None else self.local_bytes <= self.free_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        derived = {
            "device_bytes": self.device_bytes,
            "pcie_bytes": self.pcie_bytes,
            "fits": self.fits,
        }
        return {**asdict(self), **derived}

    def to_text(self) -> str:
        """For people."""
        planes = ", ".join(f"{name} {codec}" for name, codec in self.planes.items())
        homes = ", ".join(
            f"{where} {self.buckets_by_home[home.value]} ({_gb(self.bytes_by_home[home.value])})"
            for home, where in (
                (Home.DEVICE, "on the device"),
                (Home.HOST, "in host memory"),
                (Home.NVME, "on NVMe"),
            )
        )
        where = f"with {self.local_ranks} ranks on a machine"
        lines = [
            (
                f"{self.optimizer}, {self.numel} parameters on {self.ranks} ranks, at most "
                f"{self.rank_numel} on one"
            ),
            f"planes      {planes}: {self.bytes_per_param:.3f} bytes a parameter",
            f"state       {_gb(self.rank_state_bytes)} a rank, {_gb(self.state_bytes)} in all",
            (
                f"buckets     {self.rank_buckets} a rank, the largest of "
                f"{_mib(self.bucket_bytes)}: {homes}"
            ),
            f"files       {self.files} in all, {_gb(self.local_bytes)} {where}",
            (
                f"device      {_mib(self.device_bytes)} a rank: {self.slots} slots of "
                f"{_mib(self.slot_bytes)}, {_mib(self.scratch_bytes)} of scratch, buckets of "
                f"{_mib(self.bytes_by_home[Home.DEVICE.value])}; the optimizer's own temporaries "
                "for one bucket come on top"
            ),
            (
                f"host        {_gb(self.bytes_by_home[Home.HOST.value])} a rank"
                f"{', pinned' if self.host_read_bytes else ''}; "
                f"{_gb(self.local_host_bytes)} {where}"
            ),
            (
                f"step        reads {_gb(self.read_bytes)} and writes {_gb(self.written_bytes)} a "
                f"rank, copies {_gb(self.host_read_bytes)} from host memory and as much back; "
                f"{_gb(self.pcie_bytes)} reach the device"
            ),
        ]
        if self.step_low_s is None or self.step_high_s is None:
            lines.append(
                "time        unknown: no rate was given or measured for "
                f"{'the drives' if not self.host_read_bytes else 'everything that moves'}: see "
                "--measure, --bench, --mixed-gbps and --copy-gbps"
            )
        elif not self.step_high_s:
            lines.append("time        nothing moves: a step is the device's own work")
        else:
            seconds = _seconds(self.step_low_s, self.step_high_s)
            lines.append(f"time        {seconds} a step, estimated, {where}'s drives")
        if self.free_bytes is not None:
            lines.append(
                f"room        {_gb(self.free_bytes)} are free, {_gb(self.local_bytes)} are needed "
                f"{where}: {'it fits' if self.fits else 'it does not fit'}"
            )
        if self.unused is not None:
            lines.append(f"unused      {self._unused_text(self.unused)}")
        return "\n".join(lines)

    def _unused_text(self, unused: Unused) -> str:
        offer = HostOffer(
            unused.available_bytes,
            unused.host_budget_bytes,
            unused.buckets_off_drives,
            unused.moving_buckets,
        )
        text = f"{offer}, which then read {_gb(unused.read_bytes)} a rank"
        if unused.step_low_s is None or not unused.step_high_s:
            return text  # no rate is known, or nothing moves: no estimate of a step either way
        return f"{text}: {_seconds(unused.step_low_s, unused.step_high_s)} a step, estimated"


def _seconds(low_s: float, high_s: float) -> str:
    return f"{low_s:.2f} s" if low_s == high_s else f"{low_s:.2f} to {high_s:.2f} s"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def engine_plan(numel: int, config: StreamConfig, optimizer: str = "adamw") -> EnginePlan:
    """The plan of an engine for one flat bf16 parameter, without memory for it.

    Args:
        numel: elements of the parameter.
        config: of which every setting counts that a plan depends on.
        optimizer: a key of `OPTIMIZERS`.

    Raises:
        ConfigError: the bucket size is too small.
        UnsupportedError: the optimizer's state cannot be stored as asked.
    """
    model = torch.empty(1, dtype=torch.bfloat16).expand(numel)
    main = evicted_like(model, dtype=torch.float32, name="parameters")
    made = OPTIMIZERS[optimizer]([torch.zeros(1)])
    made.param_groups[0]["params"] = [main]
    return plan_as_configured(made, [Binding("parameters", main, model)], config)


def plan_streaming(
    numel: int,
    config: StreamConfig,
    *,
    ranks: int = 1,
    local_ranks: int | None = None,
    optimizer: str = "adamw",
    device_type: str = "cuda",
    rates: Rates | None = None,
    look_for_room: bool = False,
    host_memory_bytes: int | None = None,
) -> StreamPlan:
    """What streaming takes for a model whose state is spread evenly over ranks.

    Each rank's share counts as one shard. A run has many, and each starts at a multiple of 64
    elements (256 where moments are in 8 bits), which adds little.

    Args:
        numel: parameters.
        config: the settings; its budgets are those of each rank.
        ranks: that share the optimizer state.
        local_ranks: of them, on one machine with its drives and its memory; None for all.
        optimizer: a key of `OPTIMIZERS`.
        device_type: "cuda" or "cpu": where the optimizer steps.
        rates: what a machine gives.
        look_for_room: in the directories of `config`.
        host_memory_bytes: available on a machine; by default what this one has.

    Raises:
        ConfigError: a number is out of range, or buckets are too small.
        UnsupportedError: the optimizer's state cannot be stored as asked.
    """
    local_ranks = ranks if local_ranks is None else local_ranks
    for name, value, high in (
        ("numel", numel, 2**63 - 1),
        ("ranks", ranks, numel),
        ("local_ranks", local_ranks, ranks),
    ):
        if not 1 <= value <= high:
            raise ConfigError(f"{name} is {value}, wanted a whole number from 1 to {high}")
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer is {optimizer!r}, wanted one of {', '.join(OPTIMIZERS)}")
    small = numel // ranks
    larger, rank_numel = numel % ranks, -(-numel // ranks)
    bucket_numel = engine_plan(1, config, optimizer).layout.bucket_numel
    if rank_numel > MAX_BUCKETS * bucket_numel:
        raise ConfigError(
            f"bucket_size is {config.bucket_size}, which cuts the {rank_numel} parameters of a "
            f"rank into more than {MAX_BUCKETS} files: ask for larger buckets or more ranks"
        )
    layouts = [engine_plan(rank_numel, config, optimizer).layout]
    if small != rank_numel:
        layouts.append(engine_plan(small, config, optimizer).layout)
    if host_memory_bytes is None:
        host_memory_bytes = available_bytes()
    share_bytes = host_memory_bytes // local_ranks
    most, *rest = (Tiers.plan([each], config, share_bytes=share_bytes) for each in layouts)
    least = rest[0] if rest else most

    def of_ranks(count: int, what: Callable[[Tiers], int]) -> int:
        """Of the first `count` ranks, which are those with one parameter more."""
        return min(count, larger) * what(most) + max(0, count - larger) * what(least)

    local_bytes = of_ranks(local_ranks, lambda tiers: tiers.nbytes(Home.NVME))
    nvme_bytes, host_bytes = most.nbytes(Home.NVME), most.nbytes(Home.HOST)
    is_copied = not reaches_host_memory(torch.device(device_type))
    copied_bytes = host_bytes if is_copied else 0
    seconds = (rates or Rates()).step_s(local_bytes, local_bytes, 2 * copied_bytes)
    layout, pool = most.layouts[0], most.pool_sizes(config.slots, from_host=is_copied)
    plan = StreamPlan(
        optimizer=optimizer,
        numel=numel,
        ranks=ranks,
        local_ranks=local_ranks,
        rank_numel=rank_numel,
        planes={plane.name: plane.codec for plane in layout.spaces[0].planes},
        bytes_per_param=layout.total_bytes / rank_numel,
        rank_state_bytes=layout.total_bytes,
        state_bytes=of_ranks(ranks, lambda tiers: tiers.layouts[0].total_bytes),
        rank_buckets=len(layout.buckets),
        buckets_by_home={home.value: most.count(home) for home in Home},
        bytes_by_home={home.value: most.nbytes(home) for home in Home},
        files=of_ranks(ranks, lambda tiers: tiers.count(Home.NVME)),
        bucket_bytes=layout.max_file_bytes,
        slots=pool.count,
        slot_bytes=pool.slot_bytes,
        scratch_bytes=pool.scratch_bytes,
        read_bytes=nvme_bytes,
        written_bytes=nvme_bytes,
        host_read_bytes=copied_bytes,
        host_written_bytes=copied_bytes,
        local_bytes=local_bytes,
        local_host_bytes=of_ranks(local_ranks, lambda tiers: tiers.nbytes(Home.HOST)),
        free_bytes=free_bytes(*config.directories) if look_for_room else None,
        step_low_s=seconds[0] if seconds else None,
        step_high_s=seconds[1] if seconds else None,
    )
    offer = most.offer(share_bytes)
    if offer is None:
        return plan
    other = plan_streaming(
        numel,
        replace(config, host_budget=offer.budget_bytes),
        ranks=ranks,
        local_ranks=local_ranks,
        optimizer=optimizer,
        device_type=device_type,
        rates=rates,
        # Exactly what it takes: with no memory beyond that, there is no further offer.
        host_memory_bytes=0,
    )
    unused = Unused(
        available_bytes=offer.available_bytes,
        host_budget_bytes=offer.budget_bytes,
        buckets_off_drives=offer.kept,
        moving_buckets=offer.moving,
        read_bytes=other.read_bytes,
        written_bytes=other.written_bytes,
        step_low_s=other.step_low_s,
        step_high_s=other.step_high_s,
    )
    return replace(plan, unused=unused)

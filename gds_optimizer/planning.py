"""What streaming will take, before anything runs: bytes, files, device memory, seconds.

The numbers come from the plan that a run would make, for parameters that take no memory; nothing
is allocated and nothing is written.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import ConfigError
from gds_optimizer.evicted import evicted_like
from gds_optimizer.layout import PAGE_BYTES, Layout
from gds_optimizer.plan import Binding, EnginePlan, plan_engine
from gds_optimizer.store import free_bytes

MAX_BUCKETS = 10**6
"""Of a rank; each is a file with two descriptors, and so many are a mistake."""

OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the drives of one machine give, in 10⁹ bytes a second; None where it is not known.

    Attributes:
        read_gbps, write_gbps: one kind alone.
        mixed_gbps: as many bytes read as written at the same time, both counted.
        ratio_to_limit: how many times as long as that a step was measured to take.

    Raises:
        ConfigError: one of them is not more than 0.
    """

    read_gbps: float | None = None
    write_gbps: float | None = None
    mixed_gbps: float | None = None
    ratio_to_limit: float = 1.0

    def __post_init__(self) -> None:
        for name in ("read_gbps", "write_gbps", "mixed_gbps", "ratio_to_limit"):
            value: Any = getattr(self, name)
            if value is None and name != "ratio_to_limit":
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value!r}, wanted a number of more than 0")

    @classmethod
    def from_bench(cls, path: Path) -> Rates:
        """What `gds-optimizer bench --json` printed into a file.

        Raises:
            ConfigError: it did not, or the file cannot be read.
        """
        try:
            found = json.loads(Path(path).read_bytes())
            if isinstance(found, dict) and "paths" in found:
                raise ConfigError(
                    f"it has several I/O paths ({', '.join(found['paths'])}), wanted one: repeat "
                    "the benchmark with the --io that the run will take"
                )
            limit = found["limit"]
            return cls(
                read_gbps=limit["read_gbps"],
                write_gbps=limit["write_gbps"],
                mixed_gbps=limit["mixed_gbps"],
                ratio_to_limit=found["ratio_to_limit"],
            )
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not what `gds-optimizer bench --json` prints ({error!r}): name a file "
                "with its output"
            ) from error

    def step_s(self, read_bytes: int, written_bytes: int) -> tuple[float, float] | None:
        """Least and most seconds that a step's bytes take; None where that is not known.

        From the mixed rate both are the same. Without it, reading and writing are somewhere
        between going on beside and after one another.
        """
        if self.mixed_gbps is not None:
            seconds = (read_bytes + written_bytes) / self.mixed_gbps / 1e9 * self.ratio_to_limit
            return seconds, seconds
        if self.read_gbps is None or self.write_gbps is None:
            return None
        alone = read_bytes / self.read_gbps / 1e9, written_bytes / self.write_gbps / 1e9
        return max(alone) * self.ratio_to_limit, sum(alone) * self.ratio_to_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """What streaming takes; sizes in bytes. A rank is the one with the most parameters.

    Attributes:
        numel, rank_numel: parameters in all and of a rank.
        local_ranks: ranks that share the drives of a machine.
        planes: name and codec of each.
        bytes_per_param: on the drives, padding and footers included.
        rank_state_bytes, state_bytes: of bucket files, of a rank and of all.
        rank_buckets, files: buckets of a rank, and files of all ranks.
        bucket_bytes: of the largest file.
        slots, slot_bytes, scratch_bytes: of a rank, on its device.
        read_bytes, written_bytes: by a rank in a step, when nothing is left in slots.
        local_bytes: of the bucket files of a machine.
        free_bytes: in the directories; None where none was named.
        step_low_s, step_high_s: estimated seconds that a step's bytes take a machine's drives.
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
    files: int
    bucket_bytes: int
    slots: int
    slot_bytes: int
    scratch_bytes: int
    read_bytes: int
    written_bytes: int
    local_bytes: int
    free_bytes: int | None
    step_low_s: float | None
    step_high_s: float | None

    @property
    def device_bytes(self) -> int:
        """Slots and scratch of a rank."""
        return self.slots * self.slot_bytes + self.scratch_bytes

    @property
    def fits(self) -> bool | None:
        """Whether a machine's files fit the directories; None where none was named."""
        return None if self.free_bytes is None else self.local_bytes <= self.free_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**asdict(self), "device_bytes": self.device_bytes, "fits": self.fits}

    def to_text(self) -> str:
        """For people."""
        planes = ", ".join(f"{name} {codec}" for name, codec in self.planes.items())
        lines = [
            (
                f"{self.optimizer}, {self.numel} parameters on {self.ranks} ranks, at most "
                f"{self.rank_numel} on one"
            ),
            f"planes      {planes}: {self.bytes_per_param:.3f} bytes a parameter",
            f"state       {_gb(self.rank_state_bytes)} a rank, {_gb(self.state_bytes)} in all",
            (
                f"files       {self.rank_buckets} buckets a rank, {self.files} in all, the largest "
                f"of {_mib(self.bucket_bytes)}"
            ),
            (
                f"device      {_mib(self.device_bytes)} a rank: {self.slots} slots of "
                f"{_mib(self.slot_bytes)} and {_mib(self.scratch_bytes)} of scratch; the "
                "optimizer's own temporaries for one bucket come on top"
            ),
            f"step        reads {_gb(self.read_bytes)} and writes {_gb(self.written_bytes)} a rank",
        ]
        where = f"with {self.local_ranks} ranks on a machine's drives"
        if self.step_low_s is None or self.step_high_s is None:
            lines.append("time        not known without rates: see --bench and --mixed-gbps")
        elif self.step_low_s == self.step_high_s:
            lines.append(f"time        {self.step_low_s:.2f} s a step, estimated, {where}")
        else:
            lines.append(
                f"time        {self.step_low_s:.2f} to {self.step_high_s:.2f} s a step, "
                f"estimated, {where}"
            )
        if self.free_bytes is not None:
            lines.append(
                f"room        {_gb(self.free_bytes)} are free, {_gb(self.local_bytes)} are needed "
                f"{where}: {'it fits' if self.fits else 'it does not fit'}"
            )
        return "\n".join(lines)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def engine_plan(numel: int, config: StreamConfig, optimizer: str = "adamw") -> EnginePlan:
    """The plan of an engine for one flat bf16 parameter, without memory for it.

    Args:
        numel: elements of the parameter.
        config: of which every setting counts that `plan_engine` takes.
        optimizer: a key of `OPTIMIZERS`.

    Raises:
        ConfigError: the bucket size is too small.
        UnsupportedError: the optimizer's state cannot be stored as asked.
    """
    model = torch.empty(1, dtype=torch.bfloat16).expand(numel)
    main = evicted_like(model, dtype=torch.float32, name="parameters")
    made = OPTIMIZERS[optimizer]([torch.zeros(1)])
    made.param_groups[0]["params"] = [main]
    names = {field.name for field in fields(config)}
    settings = {
        name: getattr(config, name)
        for name, parameter in inspect.signature(plan_engine).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name in names
    }
    return plan_engine(made, [Binding("parameters", main, model)], config.bucket_size, **settings)


def plan_streaming(
    numel: int,
    config: StreamConfig,
    *,
    ranks: int = 1,
    local_ranks: int | None = None,
    optimizer: str = "adamw",
    rates: Rates | None = None,
    look_for_room: bool = False,
) -> StreamPlan:
    """What streaming takes for a model whose state is spread evenly over ranks.

    Each rank's share counts as one shard. A run has many, and each starts at a multiple of 64
    elements (256 where moments are in 8 bits), which adds little.

    Args:
        numel: parameters.
        config: the settings.
        ranks: that share the optimizer state.
        local_ranks: of them, on one machine with its drives; None for all.
        optimizer: a key of `OPTIMIZERS`.
        rates: what the drives of a machine give.
        look_for_room: in the directories of `config`.

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
    most = engine_plan(rank_numel, config, optimizer).layout
    least = most if small == rank_numel else engine_plan(small, config, optimizer).layout

    def of_ranks(count: int, what: Callable[[Layout], int]) -> int:
        """Of the first `count` ranks, which are those with one parameter more."""
        return min(count, larger) * what(most) + max(0, count - larger) * what(least)

    local_bytes = of_ranks(local_ranks, lambda layout: layout.total_bytes)
    seconds = (rates or Rates()).step_s(local_bytes, local_bytes)
    return StreamPlan(
        optimizer=optimizer,
        numel=numel,
        ranks=ranks,
        local_ranks=local_ranks,
        rank_numel=rank_numel,
        planes={plane.name: plane.codec for plane in most.spaces[0].planes},
        bytes_per_param=most.total_bytes / rank_numel,
        rank_state_bytes=most.total_bytes,
        state_bytes=of_ranks(ranks, lambda layout: layout.total_bytes),
        rank_buckets=len(most.buckets),
        files=of_ranks(ranks, lambda layout: len(layout.buckets)),
        bucket_bytes=most.max_file_bytes,
        slots=max(1, min(config.slots, len(most.buckets))),
        slot_bytes=max(most.max_file_bytes, PAGE_BYTES),
        scratch_bytes=most.max_scratch_bytes,
        read_bytes=most.total_bytes,
        written_bytes=most.total_bytes,
        local_bytes=local_bytes,
        free_bytes=free_bytes(*config.directories) if look_for_room else None,
        step_low_s=seconds[0] if seconds else None,
        step_high_s=seconds[1] if seconds else None,
    )

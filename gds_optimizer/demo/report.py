"""What the demo is asked for and what it found: plain data, as text and as JSON."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gds_optimizer.config import IO_CHOICES
from gds_optimizer.errors import ConfigError

REPORT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What to train and where its state lives.

    Args:
        directory: an existing directory on a disk; None for the current one, or the system's
            temporary directory where the current one is in memory or read-only. The demo works
            in `gds-optimizer-demo` inside it and removes that in the end.
        steps: optimizer steps, at least 1.
        ranks: data-parallel processes on this machine; each needs a GPU where there are any.
        io: see `StreamConfig`.
        layers, hidden: shape of the model.
        slots: buckets that may be in memory at once.
        allow_tmpfs: accept a directory in memory.

    Raises:
        ConfigError: a value is out of range.
    """

    directory: Path | None = None
    steps: int = 6
    ranks: int = 1
    io: str = "auto"
    layers: int = 4
    hidden: int = 256
    slots: int = 3
    allow_tmpfs: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("steps", 1, 10_000),
            ("ranks", 1, 64),
            ("layers", 1, 1000),
            ("hidden", 8, 65_536),
            ("slots", 1, 64),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}, wanted {low} to {high}")
        if self.hidden % 8:
            raise ConfigError(f"hidden is {self.hidden}, wanted a multiple of 8")
        if self.io not in IO_CHOICES:
            raise ConfigError(f"io is {self.io!r}, wanted one of {', '.join(IO_CHOICES)}")
        if self.directory is not None and not self.directory.is_dir():
            raise ConfigError(f"{self.directory} is not an existing directory: create it")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that was not the same in both trainings."""

    what: str
    where: str
    resident: Any
    streamed: Any

    def __str__(self) -> str:
        return f"{self.what} ({self.where}): resident {self.resident!r}, streamed {self.streamed!r}"


@dataclass(slots=True, kw_only=True)
class DemoStep:
    """One step of both trainings; losses and norms are rank 0's.

    Attributes:
        read_bytes, written_bytes: of bucket files, over all ranks.
        resident_s, streamed_s: `optimizer.step()` of the slowest rank; streamed, until the last
            byte is on disk.
        path: which way the bytes went, by the I/O backends' own counters.
    """

    step: int
    loss_resident: float
    loss_streamed: float
    grad_norm_resident: float | None
    grad_norm_streamed: float | None
    read_bytes: int
    written_bytes: int
    resident_s: float
    streamed_s: float
    path: str

    @property
    def gb_per_s(self) -> float:
        """GB (10⁹ bytes) read and written in a second of the streamed step."""
        return (self.read_bytes + self.written_bytes) / self.streamed_s / 1e9

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gb_per_s": self.gb_per_s}


@dataclass(slots=True, kw_only=True)
class PeakMemory:
    """Device memory of optimizer state on the rank with the most, in bytes.

    Attributes:
        held_bytes: main parameters, moments and counters that the optimizer's tensors hold.
        slot_bytes: the slot pool.
        peak_bytes: the most there was at once, from construction on. On a GPU by torch's
            allocator, plus the slots, which are outside of it; on the CPU `held_bytes` plus
            `slot_bytes`.
        includes_temporaries: whether `peak_bytes` contains what a step allocates for a while.
    """

    held_bytes: int = 0
    slot_bytes: int = 0
    peak_bytes: int = 0
    includes_temporaries: bool = False


@dataclass(slots=True, kw_only=True)
class DemoReport:
    """Everything the demo found; `steps` and the rest are empty where the I/O path was refused.

    Attributes:
        config: what was run, with the versions and the sizes that came of it.
        probe: `ProbeReport.to_dict()` of the directory.
        memory: "resident" and "streamed".
        bit_identical: None where nothing was trained.
        first_difference: None where there is none.
    """

    config: dict[str, Any]
    probe: dict[str, Any]
    steps: list[DemoStep] = field(default_factory=list)
    memory: dict[str, PeakMemory] = field(default_factory=dict)
    bit_identical: bool | None = None
    first_difference: Difference | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; later versions may add keys, and rename none.

        `version` (of this form), `config`, `probe` (as `gds-optimizer probe --json` prints it),
        `steps`, `memory`, `bit_identical` and `first_difference` (or null), whose keys are the
        attributes of `DemoStep` (and `gb_per_s`), `PeakMemory` and `Difference`. Floats that JSON
        has no word for are strings ("nan", "inf").
        """
        document: dict[str, Any] = {
            "version": REPORT_VERSION,
            "config": self.config,
            "probe": self.probe,
            "steps": [step.to_dict() for step in self.steps],
            "memory": {name: asdict(peak) for name, peak in self.memory.items()},
            "bit_identical": self.bit_identical,
            "first_difference": self.first_difference and asdict(self.first_difference),
        }
        plain: dict[str, Any] = _without_non_finite(document)
        return plain

    def to_text(self) -> str:
        """The table of steps, memory, and the verdict."""
        lines = [*self._step_lines(), "", *self._memory_lines(), ""]
        if self.bit_identical:
            lines.append("bit-identical: yes")
        else:
            lines.append(f"bit-identical: no, first difference: {self.first_difference}")
        return "\n".join(lines)

    def describe_run(self) -> str:
        """What is trained, in two lines."""
        config = self.config
        ranks = "1 rank" if config["ranks"] == 1 else f"{config['ranks']} ranks"
        return (
            f"GPT of {config['parameters'] / 1e6:.2f} million parameters, {ranks} on "
            f"{config['device']}, megatron-core {config['megatron_core']}, "
            f"torch {config['torch']}, {config['inner_optimizer']}\n"
            f"{config['state_bytes'] / 1e6:.1f} MB of state in {config['buckets']} buckets of at "
            f"most {config['bucket_bytes'] / 1e6:.2f} MB, {config['slots']} slots"
        )

    def _step_lines(self) -> list[str]:
        titles = f"{'step':>4}  {'loss resident':>13}  {'loss streamed':>13}  "
        titles += f"{'read':>9}  {'written':>9}  {'seconds':>7}  {'GB/s':>5}  path"
        lines = [titles]
        lines += [
            f"{s.step:>4}  {s.loss_resident:>13.9g}  {s.loss_streamed:>13.9g}  "
            f"{s.read_bytes / 1e6:>6.1f} MB  {s.written_bytes / 1e6:>6.1f} MB  "
            f"{s.streamed_s:>7.3f}  {s.gb_per_s:>5.2f}  {s.path}"
            for s in self.steps
        ]
        resident_s = statistics.median(s.resident_s for s in self.steps)
        streamed_s = statistics.median(s.streamed_s for s in self.steps)
        lines += [
            "seconds: the streamed optimizer step, until its last byte is on disk",
            f"  (median {streamed_s:.3f}; of the resident step {resident_s:.3f})",
            "read: what was still in a slot from the step before is not read again",
        ]
        if self.config["ranks"] > 1:
            lines.append("losses are rank 0's, bytes those of all ranks, seconds the slowest's")
        return lines

    def _memory_lines(self) -> list[str]:
        whose = ", of the rank with the most" if self.config["ranks"] > 1 else ""
        lines = [f"peak memory of optimizer state{whose}"]
        for name, peak in self.memory.items():
            parts = f"{peak.held_bytes / 2**20:.2f} MiB in main parameters and moments"
            if peak.slot_bytes:
                slots = "1 slot" if self.config["slots"] == 1 else f"{self.config['slots']} slots"
                parts += f", {peak.slot_bytes / 2**20:.2f} MiB in {slots}"
            lines.append(f"  {name}  {peak.peak_bytes / 2**20:>9.2f} MiB: {parts}")
        if all(peak.includes_temporaries for peak in self.memory.values()):
            lines.append(
                "  measured by torch's allocator, a step's temporaries included, plus slots"
            )
        else:
            lines.append("  counted from tensors and slots; a step's temporaries are not in it")
        return lines


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(item) for item in value]
    return value

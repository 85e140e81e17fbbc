"""Do fewer bytes make shorter steps? The same steps with moments and mains kept in several forms.

All of them are there at once, each with files, slots and parameters of its own, and take turns step
by step, since a drive's rate may move by a fifth from one minute to the next: a ratio is that of
steps of the same round. The drives' own limit is measured in every round as well.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gds_optimizer.bench.limit import Limit, LimitFiles
from gds_optimizer.bench.process_io import IoBytes, own_io
from gds_optimizer.bench.steps import check_room_for_files, synthetic_optimizer, timed
from gds_optimizer.codecs import get_codec
from gds_optimizer.config import StreamConfig
from gds_optimizer.engine import Engine
from gds_optimizer.errors import ConfigError
from gds_optimizer.host_memory import available_bytes
from gds_optimizer.layout import Layout
from gds_optimizer.planning import engine_plan
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.stepper import install_step
from gds_optimizer.telemetry import PassStats

_LIMIT_BYTES = 2**30
_LIMIT_FILES = 4
"""Measurements' worth of files: each goes on where the last one stopped."""


@dataclass(slots=True)
class FormSteps:
    """Steps with state in one form.

    Attributes:
        moment_dtype, main: the settings.
        codecs: of the planes, by name.
        layout: of the files, all of whole buckets of the same size.
        steps: of each round; the first step, which reads no moments, is left out.
        steps_s: until everything is on the drives.
        kernel: what the kernel counted meanwhile, None without counters.
    """

    moment_dtype: str
    main: str
    layout: Layout
    steps: list[PassStats] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    kernel: list[IoBytes | None] = field(default_factory=list)

    @property
    def codecs(self) -> dict[str, str]:
        return {plane.name: plane.codec for plane in self.layout.spaces[0].planes}

    @property
    def encoded_bytes(self) -> float:
        """Bytes a parameter that the planes take, without padding and footers."""
        numel = self.layout.bucket_numel
        return sum(get_codec(c).encoded_bytes(numel) for c in self.codecs.values()) / numel

    @property
    def median_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def moved_bytes(self) -> float:
        """From and to the drives in a step."""
        return statistics.median(s.read_bytes + s.written_bytes for s in self.steps)

    def per_param(self) -> dict[str, float | None]:
        """Bytes a parameter each way: of those parameters that a step reads or writes.

        Buckets that are still in a slot from the step before are not read again.
        """
        numel, count = self.layout.bucket_numel, len(self.layout.buckets)
        found: dict[str, float | None] = {
            "read": _median(
                s.read_bytes / numel / (count - s.cached_buckets)
                for s in self.steps
                if s.cached_buckets < count
            ),
            "written": _median(s.written_bytes / numel / count for s in self.steps),
            "kernel_read": None,
            "kernel_written": None,
        }
        counted = [
            (kernel.read, kernel.written, count - stats.cached_buckets)
            for stats, kernel in zip(self.steps, self.kernel, strict=True)
            if kernel is not None
        ]
        found["kernel_read"] = _median(r / numel / read for r, _, read in counted if read)
        found["kernel_written"] = _median(w / numel / count for _, w, _ in counted)
        return found


def _median(values: Any) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None


@dataclass(slots=True)
class FormsResult:
    """What was found; `to_dict` is its JSON form.

    The first form is what the others are held against.
    """

    io_path: str
    device: str
    directories: list[str]
    numel: int
    limit: Limit
    forms: list[FormSteps]

    def _ratios(self, form: FormSteps) -> tuple[float, float]:
        """Bytes and time of a step over those of the first form's, in the same round."""
        first = self.forms[0]
        pairs = zip(form.steps_s, first.steps_s, strict=True)
        time_ratio = statistics.median(own / other for own, other in pairs)
        return form.moved_bytes / first.moved_bytes, time_ratio

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; rates are 10⁹ bytes a second, times seconds."""
        return {
            "io_path": self.io_path,
            "device": self.device,
            "directories": self.directories,
            "numel": self.numel,
            "limit": self.limit.to_dict(),
            "forms": [self._describe(form) for form in self.forms],
        }

    def _describe(self, form: FormSteps) -> dict[str, Any]:
        bytes_ratio, time_ratio = self._ratios(form)
        return {
            "moment_dtype": form.moment_dtype,
            "main": form.main,
            "codecs": form.codecs,
            "bytes_per_param": {
                "encoded": form.encoded_bytes,
                "stored": form.layout.total_bytes / self.numel,
                **form.per_param(),
            },
            "cached_buckets": statistics.median(s.cached_buckets for s in form.steps),
            "buckets": len(form.layout.buckets),
            "step": {
                "count": len(form.steps_s),
                "median_s": form.median_s,
                "min_s": min(form.steps_s),
                "max_s": max(form.steps_s),
                "all_s": form.steps_s,
            },
            "gbps": form.moved_bytes / form.median_s / 1e9,
            "ratio_to_limit": form.median_s / (form.moved_bytes / self.limit.mixed / 1e9),
            "bytes_ratio": bytes_ratio,
            "time_ratio": time_ratio,
            "time_over_bytes": time_ratio / bytes_ratio,
        }

    def to_text(self) -> str:
        """For people: a table, and what its columns mean."""
        head = (
            *("moments", "main", "encoded", "read", "written", "kernel", "step, s", "from to"),
            *("limit", "bytes", "time", "time/bytes"),
        )
        rows = [head, *(self._row(form) for form in self.forms)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        table = "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        limit, first = self.limit, self.forms[0]
        return (
            f"{self.numel / 1e9:.3f} billion parameters in {len(first.layout.buckets)} buckets on "
            f"{', '.join(self.directories)} ({self.io_path}, {self.device}); "
            f"{len(first.steps_s)} rounds\n"
            f"drives: read {limit.read:.2f}, write {limit.write:.2f}, both at once "
            f"{limit.mixed:.2f} GB/s\n\n{table}\n\n"
            "encoded, read, written: bytes a parameter, of planes alone, and as the engine counts\n"
            "kernel: read and written bytes a parameter, as the kernel counts\n"
            "limit: a step over what the drives need for its bytes\n"
            "bytes, time: over the first line's, of steps of the same round\n"
            "time/bytes: 1.00 where a step gets shorter as its bytes get fewer"
        )

    def _row(self, form: FormSteps) -> tuple[str, ...]:
        found, counted = self._describe(form), form.per_param()
        kernel = "/".join(_shown(counted[key]) for key in ("kernel_read", "kernel_written"))
        return (
            form.moment_dtype,
            form.main,
            _shown(form.encoded_bytes),
            _shown(counted["read"]),
            _shown(counted["written"]),
            kernel,
            f"{form.median_s:.3f}",
            f"{min(form.steps_s):.3f} {max(form.steps_s):.3f}",
            *(
                _shown(found[key])
                for key in ("ratio_to_limit", "bytes_ratio", "time_ratio", "time_over_bytes")
            ),
        )


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


@torch.no_grad()
def run_forms_bench(
    config: StreamConfig,
    *,
    forms: Sequence[tuple[str, str]],
    numel: int,
    steps: int,
    device: torch.device,
    limit_bytes: int = _LIMIT_BYTES,
    progress: Callable[[str], None] = lambda line: None,
) -> FormsResult:
    """Time steps of the same parameters with their state in several forms, in turn.

    Args:
        config: directories, path, slots and so on; its own form does not count.
        forms: pairs of `moment_dtype` and `main`; the first is what others are held against.
        numel: parameters, rounded up to whole buckets.
        steps: rounds to time, at least 1; one before them is not counted.
        device: where parameters (of each form its own) and slots are.
        limit_bytes: that one measurement of the drives moves at most.
        progress: gets a line now and then.

    Raises:
        ConfigError: a form is asked for twice, or buckets are to live in memory.
        NoSpaceError: the files of all forms do not fit the directories together.
        GdsOptimizerError: setting up or a step failed.
    """
    if len(set(forms)) < len(forms):
        raise ConfigError("a form is asked for twice: name each setting once")
    if config.hbm_budget or config.host_budget:
        raise ConfigError(
            "several forms are compared by what goes to the drives: leave --hbm-budget and "
            "--host-budget out"
        )
    # Alike for all: what is free gets less while they are made.
    config = config.for_device(device.type, host_bytes=available_bytes() // len(forms))
    config = replace(config, slots=int(config.slots), bucket_size=int(config.bucket_size))
    configs = [replace(config, moment_dtype=moments, main=main) for moments, main in forms]
    bucket_numel = engine_plan(1, config).layout.bucket_numel
    buckets = -(-numel // bucket_numel)
    numel = buckets * bucket_numel
    of_one = (engine_plan(bucket_numel, each).layout.total_bytes for each in configs)
    state_bytes = buckets * sum(of_one)
    limit_bytes = min(limit_bytes, state_bytes)
    check_room_for_files(config.directories, state_bytes + _LIMIT_FILES * limit_bytes)
    with contextlib.ExitStack() as stack:
        limit_files = stack.enter_context(
            LimitFiles(config.directories, _LIMIT_FILES * limit_bytes, point_bytes=limit_bytes)
        )
        limit_files.measure_first_write(fresh=False)
        runs = []
        grads = torch.empty(0)
        for number, each in enumerate(configs):
            optimizer, bindings = synthetic_optimizer(numel, device)
            if not number:
                longest = max(binding.main.numel() for binding in bindings)
                grads = torch.randn(longest, device=device) * 0.01
            for binding in bindings:
                binding.main.grad = grads[: binding.main.numel()]
            runtime = Runtime.build(
                [Part(optimizer, bindings, f"form{number}")],
                each,
                device=device,
                rank=0,
                eager=True,
            )
            engine = runtime.engines[0]
            stack.callback(runtime.close_engine, engine)
            stack.callback(install_step(optimizer, engine.step))
            runs.append((optimizer, engine))
            progress(_line(each, "first mains", engine.last_stats))
        result = FormsResult(
            str(runtime.report.io_path),
            str(device),
            [str(directory) for directory in config.directories],
            numel,
            limit_files.limit,
            [
                FormSteps(moments, main, engine.layout)
                for (moments, main), (_, engine) in zip(forms, runs, strict=True)
            ],
        )
        for number in range(steps + 1):
            for form, (optimizer, engine) in zip(result.forms, runs, strict=True):
                step_s, kernel = _step(optimizer, engine)
                stats = engine.last_stats
                progress(_line(form, f"round {number}, {step_s:.2f} s", stats))
                if number:
                    form.steps.append(stats)
                    form.steps_s.append(step_s)
                    form.kernel.append(kernel)
            if number:
                moved = stats.read_bytes + stats.written_bytes
                limit_files.measure(stats.read_bytes / moved)
    return result


def _line(form: StreamConfig | FormSteps, what: str, stats: PassStats) -> str:
    return f"{form.moment_dtype} moments, {form.main} mains: {what}: {stats.describe()}"


def _step(optimizer: torch.optim.Optimizer, engine: Engine) -> tuple[float, IoBytes | None]:
    """Seconds of a step until everything is on the drives, and what the kernel counted."""
    before = own_io()
    _, step_s = timed(optimizer.step, engine.drain)
    after = own_io()
    return step_s, None if before is None or after is None else after - before

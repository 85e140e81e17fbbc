"""Settings: frozen, keyword-only, and rejected when they are made, not when they are used."""

from __future__ import annotations

import argparse
import math
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gds_optimizer.errors import ConfigError
from gds_optimizer.io.base import PAGE_BYTES

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")

IO_CHOICES = ("auto", "gds", "posix", "host", "gds-compat")
INIT_CHOICES = ("auto", "eager", "lazy")
SELF_CHECK_CHOICES = ("auto", "always", "never")
MOMENT_DTYPE_CHOICES = ("fp32", "bf16", "int8")
MOMENT_ROUNDING_CHOICES = ("nearest", "stochastic")
AUTO_BUDGET = "auto"
MAIN_CHOICES = ("auto", "fp32", "remainder")
TUNE_CHOICES = ("auto", "never")
_MAX_TIMEOUT_S = 86_400
_CPU_SLOTS, _CPU_BUCKET_BYTES = 6, 96 * 2**20
_CPU_SLOTS_WITH_ROOM = 12
_CPU_ROOM = 8
"""How many times its slots' bytes a rank must have to spare for the larger number of them."""


class Default(int):
    """A number that nobody gave: what is used unless a measurement at setup finds a better one.

    It is an int in every respect; `StreamConfig.is_given` tells it from the same number given.
    """

    __slots__ = ()


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `192MiB`, `400 GiB`, `2GB` (10⁹) or `4096`.

    Raises:
        ConfigError: not a size, negative, or not a whole number of bytes.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ConfigError(f"wanted a size such as 192MiB, got {text!r}")
    if isinstance(text, int):
        if text < 0:
            raise ConfigError(f"wanted a size of at least 0 bytes, got {text}")
        return text
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"wanted a size such as 192MiB, 400GiB or 4096, got {text!r}")
    exact = float(match[1]) * _UNITS[match[2].lower()]
    if not exact < 2**63:
        raise ConfigError(f"wanted a size below 2**63 bytes, got {text[:40]!r}")
    if exact != int(exact):
        raise ConfigError(f"wanted a whole number of bytes, got {text!r}")
    return int(exact)


def _checked_directories(given: Any) -> tuple[Path, ...]:
    directories = (given,) if isinstance(given, str | Path) else given
    try:
        directories = tuple(directories)
        paths = tuple(Path(directory).absolute() for directory in directories)
    except TypeError:
        raise ConfigError(f"directories is {given!r}, wanted paths of directories") from None
    if any(str(directory) == "" for directory in directories):
        raise ConfigError("directories names nothing (''): name a directory on an NVMe drive")
    if not paths:
        raise ConfigError("directories is empty: name at least one directory on an NVMe drive")
    if len(set(paths)) != len(paths):
        raise ConfigError(f"directories names one twice: {', '.join(map(str, paths))}")
    known: dict[tuple[int, int], Path] = {}
    for path in paths:
        try:
            state = path.stat()
        except OSError as error:
            raise ConfigError(
                f"directories: {path} is not an existing directory ({error.strerror}): create it"
            ) from None
        if not stat.S_ISDIR(state.st_mode):
            raise ConfigError(
                f"directories: {path} is not an existing directory (Not a directory): name one"
            )
        other = known.setdefault((state.st_dev, state.st_ino), path)
        if other is not path:
            raise ConfigError(
                f"directories: {other} and {path} are the same directory: name one for each drive"
            )
    return paths


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """How optimizer state is streamed.

    Args:
        directories: where the state lives: one directory for each drive. They must exist.
        io: which way bytes take. `auto` takes what a probe proves; any other value is taken or
            refused, never replaced. `host` means direct I/O on host memory; `gds-compat` makes
            the GPUDirect calls without GPUDirect, to exercise them where there is none.
        bucket_size: bytes of state in a bucket (int, or text such as "192MiB") as the optimizer
            sees it, in fp32 whatever `moment_dtype` is: the unit of I/O and of device memory. The
            default holds 16 Mi elements of 12 bytes.
        slots: buckets that may be in memory at once; at least 1, and 3 to overlap reading,
            computing and writing. Where neither this nor `bucket_size` is given, an optimizer that
            steps on the CPU gets 6 slots of 96 MiB, or 12 where memory is plenty (`for_device`).
        init: when the first main parameters are written: `eager` at construction, `lazy` in the
            first step, `auto` eagerly, except that `from_args` makes it lazy where the framework's
            arguments name weights to load.
        io_threads: I/O requests in flight. Not given: see `tune`.
        io_task_size: bytes of one request, a multiple of 4096. Not given: see `tune`.
        io_timeout_s: a transfer that takes longer fails the step; the error names its file.
        allow_tmpfs: accept a directory in memory (tmpfs, ramfs), which offloads nothing.
        async_save: the framework writes checkpoints while training goes on. What it is given then
            stays as it is, for which the next step writes to a second set of files.
        self_check: compare a small streamed step with a resident one before training, bit for
            bit: `auto` for optimizer classes and framework versions that our tests do not cover.
        moment_dtype: how fp32 moments are kept between steps. Anything but `fp32` changes the
            numbers; the step itself is computed in fp32 all the same.
        directory_weights: how fast each directory's drive is, in any unit: buckets are spread in
            proportion. Empty: measured at setup where there are several drives.
        moment_rounding: how each step's moments are rounded where they are not kept in fp32;
            stochastic rounding repeats itself when a step is repeated.
        hbm_budget: bytes on the device (int, or text such as "20GiB") that buckets may keep for
            good, the first ones that fit; for each process, whatever it streams.
        host_budget: the same of host memory for the next ones, pinned where the device is a GPU;
            "auto" takes half of what is available, shared by the ranks of a machine.
        main: how main parameters are kept between steps; lossless in every case. `remainder`
            stores the 16 bits that a bf16 model parameter lacks and refuses other parameters;
            `auto` does so where the model's parameter is bf16, and stores fp32 elsewhere.
        tune: `auto` measures at setup, where a rank keeps 2 GiB or more on drives, which of the
            proven paths is faster (with `io` left at `auto`) and which of `io_threads` and
            `io_task_size` that were not given; `never` takes their defaults. With three drives or
            more, where neither `slots` nor `bucket_size` were given and moments are kept in fp32,
            more and smaller buckets take the memory of the default ones. No bit depends on it.
        trace: a file for a timeline of the passes, in Chrome's trace format; None for none. With
            several ranks, each puts its number into the name, in place of `{rank}` if it is there.
    """

    directories: tuple[Path, ...]
    io: str = "auto"
    bucket_size: int = Default(192 * 2**20)
    slots: int = Default(3)
    init: str = "auto"
    io_threads: int = Default(16)
    io_task_size: int = Default(16 * 2**20)
    io_timeout_s: float = 300.0
    allow_tmpfs: bool = False
    async_save: bool = False
    self_check: str = "auto"
    moment_dtype: str = "fp32"
    moment_rounding: str = "stochastic"
    hbm_budget: int = 0
    host_budget: int | str = Default(0)
    main: str = "fp32"
    directory_weights: tuple[float, ...] = ()
    tune: str = "auto"
    trace: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "directories", _checked_directories(self.directories))
        for name in ("bucket_size", "io_task_size", "hbm_budget", "host_budget"):
            if name == "host_budget" and self.host_budget == AUTO_BUDGET:
                continue
            try:
                object.__setattr__(self, name, parse_size(getattr(self, name)))
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        self._check_choice("io", IO_CHOICES)
        self._check_choice("init", INIT_CHOICES)
        self._check_choice("self_check", SELF_CHECK_CHOICES)
        self._check_choice("moment_dtype", MOMENT_DTYPE_CHOICES)
        self._check_choice("moment_rounding", MOMENT_ROUNDING_CHOICES)
        self._check_choice("main", MAIN_CHOICES)
        self._check_choice("tune", TUNE_CHOICES)
        self._check_range("slots", 1, 64)
        self._check_range("io_threads", 1, 256)
        self._check_range("bucket_size", PAGE_BYTES, 2**40)
        self._check_range("io_task_size", PAGE_BYTES, 2**30)
        if self.io_task_size % PAGE_BYTES:
            raise ConfigError(
                f"io_task_size is {self.io_task_size}, wanted a multiple of {PAGE_BYTES}"
            )
        object.__setattr__(self, "directory_weights", self._checked_weights(len(self.directories)))
        timeout_s: Any = self.io_timeout_s
        if (
            isinstance(timeout_s, bool)
            or not isinstance(timeout_s, int | float)
            or not 0 < timeout_s <= _MAX_TIMEOUT_S
        ):
            raise ConfigError(
                f"io_timeout_s is {timeout_s!r}, wanted seconds, more than 0 and at most "
                f"{_MAX_TIMEOUT_S}"
            )
        if self.trace is not None:
            if not isinstance(self.trace, str | Path) or not str(self.trace):
                raise ConfigError(f"trace is {self.trace!r}, wanted the path of a file, or None")
            object.__setattr__(self, "trace", Path(self.trace).absolute())
        for name in ("allow_tmpfs", "async_save"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, wanted True or False")

    def _checked_weights(self, count: int) -> tuple[float, ...]:
        given: Any = self.directory_weights
        try:
            weights = tuple(float(weight) for weight in given)
        except (TypeError, ValueError):
            raise ConfigError(
                f"directory_weights is {given!r}, wanted a number for each directory"
            ) from None
        if weights and len(weights) != count:
            raise ConfigError(
                f"directory_weights has {len(weights)} numbers, wanted one for each of the "
                f"{count} directories"
            )
        if not all(0 < weight < math.inf for weight in weights):
            raise ConfigError(
                f"directory_weights is {weights}, wanted finite numbers of more than 0: leave a "
                "directory out to keep nothing there"
            )
        return weights

    def _check_choice(self, name: str, choices: Iterable[str]) -> None:
        if getattr(self, name) not in choices:
            raise ConfigError(
                f"{name} is {getattr(self, name)!r}, wanted one of {', '.join(choices)}"
            )

    def _check_range(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{name} is {value!r}, wanted a whole number from {low} to {high}")

    def is_given(self, name: str) -> bool:
        """Whether somebody chose this number, be it the default one."""
        return not isinstance(getattr(self, name), Default)

    def for_device(self, device_type: str, *, host_bytes: int = 0) -> StreamConfig:
        """These settings with the slots and buckets of a kind of device, unless some were given.

        The control loop starts transfers between visits. A visit is over at once on a GPU, but
        takes about as long as a transfer on the CPU, where the two transfers that three slots leave
        have ended long before: more and smaller buckets keep the drive busy meanwhile.

        Args:
            device_type: "cpu", "cuda".
            host_bytes: of memory that this rank may take. Where it is plenty the CPU gets twice as
                many slots: some drives want half a GiB in flight.
        """
        if device_type != "cpu" or self.is_given("slots") or self.is_given("bucket_size"):
            return self
        has_room = host_bytes >= _CPU_ROOM * _CPU_SLOTS_WITH_ROOM * _CPU_BUCKET_BYTES
        slots = _CPU_SLOTS_WITH_ROOM if has_room else _CPU_SLOTS
        return replace(self, slots=Default(slots), bucket_size=Default(_CPU_BUCKET_BYTES))

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> StreamConfig | None:
        """Settings from parsed flags (see `add_arguments`); None where streaming is not asked for.

        With `init` left at `auto`, a run that is about to load weights (`--load`,
        `--pretrained-checkpoint`) initialises lazily, so that no byte is written twice.

        Raises:
            ConfigError: a flag's value cannot work; the message names the flag.
        """
        if not getattr(args, "stream_optimizer_state_to_disk", False):
            return None
        if not getattr(args, "stream_optimizer_state_dir", None):
            raise ConfigError(
                "--stream-optimizer-state-to-disk needs --stream-optimizer-state-dir DIR [DIR ...]"
            )
        values: dict[str, Any] = {
            "directories": tuple(Path(d) for d in args.stream_optimizer_state_dir)
        }
        for flag in _FLAGS:
            value = getattr(args, flag.dest, None)
            if value is not None:
                values[flag.field] = value
        if values.get("init", "auto") == "auto":
            loads = any(getattr(args, name, None) for name in ("load", "pretrained_checkpoint"))
            values["init"] = "lazy" if loads else "eager"
        # Megatron's own flag says what ours means.
        values.setdefault("async_save", bool(getattr(args, "async_save", False)))
        try:
            return cls(**values)
        except ConfigError as error:
            name, _, rest = str(error).partition(" ")
            flags = {f"{flag.field}": flag.name for flag in _FLAGS}
            flags["directories"] = "--stream-optimizer-state-dir"
            flag_name = flags.get(name.rstrip(":"))
            raise ConfigError(f"{flag_name}: {rest}" if flag_name else str(error)) from None


@dataclass(frozen=True, slots=True)
class _Flag:
    field: str
    help: str
    type: Callable[[str], Any] | None = None
    choices: tuple[str, ...] | None = None
    is_switch: bool = False
    nargs: str | None = None
    metavar: str | None = None
    word: str = ""
    """What the flag is called, where that is not the field's name."""

    @property
    def name(self) -> str:
        return f"--stream-optimizer-state-{(self.word or self.field).replace('_', '-')}"

    @property
    def dest(self) -> str:
        return f"stream_optimizer_state_{self.word or self.field}"


def _size_argument(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _budget_argument(text: str) -> int | str:
    return AUTO_BUDGET if text == AUTO_BUDGET else _size_argument(text)


_FLAGS = (
    _Flag("io", "Which way bytes take; auto takes what a probe proves.", choices=IO_CHOICES),
    _Flag("bucket_size", "Bytes of state in a bucket, e.g. 192MiB.", type=_size_argument),
    _Flag("slots", "Buckets that may be in device memory at once.", type=int),
    _Flag("init", "When the first main parameters are written.", choices=INIT_CHOICES),
    _Flag("io_threads", "I/O requests in flight.", type=int),
    _Flag("io_task_size", "Bytes of one I/O request, e.g. 16MiB.", type=_size_argument),
    _Flag("io_timeout_s", "Fail a step whose transfer takes longer, in seconds.", type=float),
    _Flag("allow_tmpfs", "Accept a directory in memory.", is_switch=True),
    _Flag("async_save", "Checkpoints are written while training goes on.", is_switch=True),
    _Flag(
        "self_check",
        "Compare a small streamed step with a resident one before training.",
        choices=SELF_CHECK_CHOICES,
    ),
    _Flag(
        "moment_dtype",
        "How fp32 moments are kept between steps; anything but fp32 changes the numbers.",
        choices=MOMENT_DTYPE_CHOICES,
    ),
    _Flag(
        "moment_rounding",
        "How each step's moments are rounded where they are not kept in fp32.",
        choices=MOMENT_ROUNDING_CHOICES,
    ),
    _Flag(
        "hbm_budget",
        "Bytes on the device that buckets may keep for good, e.g. 20GiB.",
        type=_size_argument,
    ),
    _Flag(
        "host_budget",
        "Bytes of host memory for buckets, e.g. 400GiB, or auto: half of what is available.",
        type=_budget_argument,
    ),
    _Flag(
        "main",
        "How main parameters are kept between steps; lossless in every case.",
        choices=MAIN_CHOICES,
    ),
    _Flag(
        "directory_weights",
        "How fast each directory's drive is, in any unit; measured at setup by default.",
        type=float,
        nargs="+",
        metavar="W",
        word="dir_weights",
    ),
    _Flag(
        "tune",
        "Measure at setup what was not given: the faster path, threads and task size.",
        choices=TUNE_CHOICES,
    ),
    _Flag("trace", "A file for a timeline of the steps, for Chrome or Perfetto.", type=Path),
)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--stream-optimizer-state-*` flags to a Megatron (or any) parser.

    A flag that the parser already has is left as it is, so calling this twice, or on a parser of
    a framework that registers some of them itself, is harmless.

    Returns:
        The parser, as Megatron's `extra_args_provider` wants it.
    """
    group = parser.add_argument_group("optimizer state streaming")

    def add(name: str, **options: Any) -> None:
        try:
            group.add_argument(name, **options)
        except argparse.ArgumentError:
            return  # conflicting option string: it is registered already

    add(
        "--stream-optimizer-state-to-disk",
        action="store_true",
        help="Keep main parameters and moments on NVMe and stream them through each step.",
    )
    add(
        "--stream-optimizer-state-dir",
        nargs="+",
        metavar="DIR",
        default=None,
        help="Directories that hold the state: one for each drive.",
    )
    for flag in _FLAGS:
        if flag.is_switch:
            add(flag.name, dest=flag.dest, action="store_true", default=None, help=flag.help)
        else:
            add(
                flag.name,
                dest=flag.dest,
                type=flag.type,
                choices=flag.choices,
                default=None,
                help=flag.help,
                **({"nargs": flag.nargs, "metavar": flag.metavar} if flag.nargs else {}),
            )
    return parser

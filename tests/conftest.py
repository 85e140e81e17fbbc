"""What every test gets: a temporary directory on a real disk, one torch thread, honest skips."""

from __future__ import annotations

import importlib.util
import operator
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from gds_optimizer.io import memory

REPOSITORY = Path(__file__).parents[1]
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def file_system_of(directory: Path) -> str:
    """Type of the file system that `directory`, or its nearest existing parent, is on."""
    while not directory.exists():
        directory = directory.parent
    command = ["stat", "--file-system", "--format=%T", str(directory)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def directory_on_disk(config: pytest.Config) -> Path:
    """Where temporary directories go: what was asked for, else the first place on a disk."""
    for asked in (
        config.getoption("basetemp"),
        os.environ.get("GDS_OPTIMIZER_TEST_DIR"),
        os.environ.get("PYTEST_DEBUG_TEMPROOT"),
    ):
        if asked:
            candidates = [Path(asked).absolute()]
            break
    else:
        candidates = [Path(tempfile.gettempdir()), REPOSITORY / ".test-tmp"]
    for directory in candidates:
        if file_system_of(directory) not in IN_MEMORY:
            return directory
    raise pytest.UsageError(
        f"tests write real files, but {' and '.join(map(str, candidates))} "
        f"{'are' if len(candidates) > 1 else 'is'} in memory ({file_system_of(candidates[-1])}): "
        "name a directory on a disk in GDS_OPTIMIZER_TEST_DIR"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_configure(config: pytest.Config) -> None:
    directory = directory_on_disk(config)
    if not config.getoption("basetemp"):
        # The parent of pytest's own numbered folders. `basetemp` would not do: pytest empties it.
        directory.mkdir(parents=True, exist_ok=True)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(directory)
    megatron = os.environ.get("GDS_OPTIMIZER_TEST_MEGATRON")
    if megatron:
        if not Path(megatron, "megatron", "core").is_dir():
            raise pytest.UsageError(f"GDS_OPTIMIZER_TEST_MEGATRON: no megatron/core in {megatron}")
        sys.path.insert(0, megatron)
    if _has_module("hypothesis"):
        import hypothesis

        # A machine under load is no reason to fail.
        hypothesis.settings.register_profile("no deadline", deadline=None, print_blob=True)
        hypothesis.settings.load_profile("no deadline")
    # One thread, here and in child processes: ranks share the cores of small CI machines.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


# What a marker needs, and the reason to give where it is lacking.
NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (torch.cuda.is_available, "needs a CUDA GPU"),
    "megatron": (lambda: _has_module("megatron.core"), "needs megatron-core"),
    "distributed": (
        lambda: torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "needs torch.distributed with gloo",
    ),
}


def is_thinned_out(item: pytest.Item) -> bool:
    """Whether the test's marker leaves this combination of its parameters to --slow."""
    marker, callspec = item.get_closest_marker("thinned"), getattr(item, "callspec", None)
    if marker is None or callspec is None:
        return False
    of_fixtures = set(callspec.params)
    place = 0
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        of_fixtures -= set(names)
        given = [callspec.params[name] for name in names]
        place += next(
            index
            for index, entry in enumerate(mark.args[1])
            if all(map(operator.is_, _values_of(entry, len(names)), given))
        )
    place += sum(callspec.indices[name] for name in of_fixtures)
    every, first = marker.kwargs.get("every", 2), marker.kwargs.get("first", 0)
    return bool((place - first) % every)


def _values_of(entry: Any, count: int) -> Sequence[Any]:
    """Values of so many arguments in an entry of what a test's parameters were given as."""
    if isinstance(entry, type(pytest.param())):
        return entry.values
    return [entry] if count == 1 else entry


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lacking = {marker: reason for marker, (is_met, reason) in NEEDS.items() if not is_met()}
    if not config.getoption("slow"):
        lacking["slow"] = "slow: give --slow"
    for item in items:
        if is_thinned_out(item):
            item.add_marker(pytest.mark.slow)
        for marker, reason in lacking.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header(config: pytest.Config) -> str:
    versions = []
    for name in ("megatron-core", "kvikio-cu13", "kvikio-cu12"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    directory = directory_on_disk(config)
    return (
        f"gds-optimizer: torch {torch.__version__}, {gpu}, {', '.join(versions)}, "
        f"temporary files in {directory} ({file_system_of(directory)})"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests ran, and how many were skipped for which reason."""
    stats = terminalreporter.stats
    ran = sum(len(stats.get(outcome, [])) for outcome in ("passed", "failed", "xfailed", "xpassed"))
    skipped = stats.get("skipped", [])
    terminalreporter.section(f"{ran} ran, {len(skipped)} skipped")
    reasons = Counter(
        # (path, line, reason) of a skipped test or module
        report.longrepr[2].removeprefix("Skipped: ")
        if isinstance(report.longrepr, tuple)
        else str(report.longrepr)
        for report in skipped
    )
    for reason, count in reasons.most_common():
        terminalreporter.line(f"skipped {count}: {reason}")


@pytest.fixture
def host_homes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets in host memory go through slots, as they do where there is a GPU."""
    monkeypatch.setattr(memory, "_REACHING_HOST_MEMORY", ())


@pytest.fixture(params=[False, True])
def is_copied(request: pytest.FixtureRequest) -> bool:
    """Whether buckets in host memory are copied, as on a GPU, or stepped in place: both in turn."""
    if request.param:
        request.getfixturevalue("host_homes_are_copied")
    return bool(request.param)

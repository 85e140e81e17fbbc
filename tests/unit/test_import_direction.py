"""Who may import whom: only upwards in `ORDER`, and Megatron in one place only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gds_optimizer

PACKAGE = Path(gds_optimizer.__file__).parent

# From the bottom to the top. A part may import those before it, and its own modules; parts that
# share a line may not import each other. A new module is placed here on purpose.
ORDER = (
    ("errors",),
    ("command", "duplex", "room"),
    ("io.base",),
    ("config",),
    ("tracing",),
    ("timeline",),
    ("telemetry",),
    ("codecs",),
    ("layout",),
    ("checksum",),
    ("footer",),
    ("probing",),
    ("probe",),
    ("io",),
    ("homes", "host_memory"),
    ("spread",),
    ("lock",),
    ("bucket_files",),
    ("store",),
    ("mapping",),
    ("slots",),
    ("tuning_measure", "tuning_cache"),
    ("drive_speeds",),
    ("tuning_result",),
    ("tuning", "tuning_shape"),
    ("rates",),
    ("pipeline",),
    ("evicted",),
    ("stepper",),
    ("schema",),
    ("plan",),
    ("upper_halves",),
    ("merging", "model_copy", "device_cuts"),
    ("bucket_state", "scalars"),
    ("step_pass",),
    ("passes",),
    ("engine",),
    ("self_check",),
    ("direct_file",),
    ("written_out",),
    ("tiers",),
    ("runtime",),
    ("planning",),
    ("mapped_state",),
    ("frozen_check",),
    ("jsonvalues",),
    ("checkpoint",),
    ("snapshot_upper",),
    ("snapshot",),
    ("snapshot_files",),
    ("snapshot_read",),
    ("snapshot_match",),
    ("snapshot_reshard",),
    ("snapshot_restore",),
    ("snapshot_copy",),
    ("storage_form",),
    ("bucket_convert",),
    ("snapshot_convert",),
    ("snapshots",),
    ("pytorch", "megatron"),
    ("demo", "bench"),
    ("cli",),
)
RANKS = {part: rank for rank, parts in enumerate(ORDER) for part in parts}
assert len(RANKS) == sum(map(len, ORDER)), "a part has two places"
FRONT_END_RANK = RANKS["pytorch"]
MEGATRON_AS_PEER = ("bench.peer_recipes", "bench.peer_megatron")
"""Step Megatron's own optimizer, to compare with."""


def modules() -> dict[str, Path]:
    """Every module of the package by its name without "gds_optimizer.", "" for the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def part_of(module: str) -> str | None:
    """The part of `ORDER` that a module belongs to: its own name or its nearest parent's."""
    while module:
        if module in RANKS:
            return module
        module = module.rpartition(".")[0]
    return None


def imported_names(source: str) -> Iterator[str]:
    """Absolute names of what a module imports, wherever in it; `a.b` for `from a import b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def violations(module: str, source: str, known: set[str]) -> list[str]:
    """What a module of this name may not import and does."""
    part = part_of(module)
    if module and part is None:
        return [f"{module} has no place in ORDER"]
    found = []
    for name in imported_names(source):
        top, _, rest = name.partition(".")
        if top == "megatron" and part != "megatron" and module not in MEGATRON_AS_PEER:
            found.append(f"{module} imports {name}: only the megatron front end may")
        if top != "gds_optimizer" or rest in ("", "__version__"):
            continue
        # `from gds_optimizer.layout import Bucket` names a module and something in it.
        target = rest if rest in known else rest.rpartition(".")[0]
        target_part = part_of(target)
        if target_part is None:
            found.append(f"{module} imports {name}, which has no place in ORDER")
        elif not module:
            # The package may offer what is below the front ends, and the PyTorch one.
            if RANKS[target_part] > FRONT_END_RANK or target_part == "megatron":
                found.append(f"the package imports {name}")
        elif target_part != part and RANKS[target_part] >= RANKS[part]:
            found.append(f"{module} imports {name}: {target_part} is not below {part}")
    return found


MODULES = modules()


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_upwards(module):
    assert violations(module, MODULES[module].read_text(), set(MODULES)) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("layout", "from gds_optimizer.store import Store", "store is not below layout"),
        ("layout", "import gds_optimizer.store", "store is not below layout"),
        ("layout", "from gds_optimizer import store", "store is not below layout"),
        ("layout", "def f():\n    from gds_optimizer import store", "store is not below layout"),
        ("io.base", "from gds_optimizer.io import open_backend", "io is not below io.base"),
        ("pytorch", "from gds_optimizer.megatron import attach", "megatron is not below pytorch"),
        ("megatron.attach", "import gds_optimizer.pytorch", "pytorch is not below megatron"),
        ("engine", "import megatron.core", "only the megatron front end may"),
        ("engine", "from megatron.core import optimizer", "only the megatron front end may"),
        ("engine", "import importlib as i\ni.import_module('megatron')", "only the megatron"),
        ("store", "from gds_optimizer.novelty import x", "no place in ORDER"),
        ("novelty", "", "no place in ORDER"),
        ("", "from gds_optimizer.cli.main import main", "the package imports"),
        ("", "from gds_optimizer.megatron import attach", "the package imports"),
    ],
)
def test_a_wrong_import_is_found(module, source, complaint):
    known = {"layout", "store", "io", "io.base", "pytorch", "megatron", "cli.main", "novelty"}
    found = violations(module, source, known)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("store", "from gds_optimizer.layout import Bucket"),
        ("io.cufile", "from gds_optimizer.io.direct import DirectFile"),
        ("io.cufile", "from gds_optimizer.io.base import Transfer"),
        ("megatron.attach", "from megatron.core.optimizer import DistributedOptimizer"),
        ("cli.main", "from gds_optimizer.megatron import attach"),
        ("checkpoint", "from gds_optimizer import __version__"),
        ("", "from gds_optimizer.pytorch import stream"),
    ],
)
def test_a_right_import_passes(module, source):
    assert violations(module, source, set(MODULES)) == []


def test_the_planner_touches_nothing():
    """`layout.py` is pure: neither files nor tensors of its own."""
    source = (PACKAGE / "layout.py").read_text()
    tops = {name.partition(".")[0] for name in imported_names(source)}
    assert not tops & {"io", "mmap", "os", "pathlib", "shutil", "tempfile", "torch", "kvikio"}

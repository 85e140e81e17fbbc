"""What the documentation says is what the code does, wherever that can be asked mechanically."""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import importlib.util
import io
import json
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gds_optimizer
from gds_optimizer import checksum as checksum_module
from gds_optimizer import codecs, errors, footer, plan, self_check
from gds_optimizer import config as config_module
from gds_optimizer.cli.main import build_parser
from gds_optimizer.config import StreamConfig, add_arguments, parse_size
from gds_optimizer.demo.report import (
    REPORT_VERSION,
    DemoConfig,
    DemoReport,
    DemoStep,
    Difference,
    PeakMemory,
)
from gds_optimizer.errors import ConfigError
from gds_optimizer.io import IoPath
from gds_optimizer.layout import (
    LAYOUT_VERSION,
    PlaneSpec,
    Shard,
    SpaceSpec,
    bucket_numel_for,
    plan_layout,
)
from gds_optimizer.megatron import refusals, setup
from gds_optimizer.probing import reasons
from gds_optimizer.slots import SlotState
from tests.megatron import test_bit_identity
from tests.support.engines import SIZES, grads_of, same_bits, streamed

REPOSITORY = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
}
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
README = PAGES["README.md"]
CONFIGURATION = PAGES["docs/configuration.md"]
MATRIX = PAGES["docs/support-matrix.md"]
FORMAT = PAGES["docs/file-format.md"]
PRECISION = PAGES["docs/precision.md"]
MOMENT_DTYPE = "--stream-optimizer-state-moment-dtype"
HOW = PAGES["docs/how-it-works.md"]
START = PAGES["docs/getting-started-megatron.md"]


# ---------------------------------------------------------------------- reading Markdown


def section(page: str, heading: str) -> str:
    """The text under a heading, up to the next one of its level or above."""
    match = re.search(rf"^(#+) {re.escape(heading)}$", page, re.MULTILINE)
    assert match, f"no heading {heading!r}"
    rest = page[match.end() :]
    end = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def table(text: str, first_column: str) -> list[list[str]]:
    """Cells of the table whose head starts with `first_column`, without the head."""
    lines = text.splitlines()
    start = next(
        (i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |")), None
    )
    assert start is not None, f"no table with the column {first_column!r}"
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows
    return rows


def code_of(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def blocks(language: str) -> list[tuple[str, int, str]]:
    """Fenced blocks of a language: page, line, text."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        (name, text.count("\n", 0, match.start()) + 1, match[1])
        for name, text in PAGES.items()
        for match in pattern.finditer(text)
    ]


PYTHON = blocks("python")
SHELL = blocks("bash")
IDS = {"ids": lambda value: value if isinstance(value, str) and value in PAGES else ""}


def anchors(page: str) -> set[str]:
    """Names that GitHub gives the headings of a page."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE):
        text = re.sub(r"[^\w\s-]", "", heading.lower())
        found.add(text.strip().replace(" ", "-"))
    return found


# ---------------------------------------------------------------------- links and names


def test_there_are_pages_with_code():
    assert len(PAGES) >= 6
    assert len(PYTHON) >= 8
    assert len(SHELL) >= 5


@pytest.mark.parametrize("name", PAGES)
def test_links_resolve(name):
    directory = (REPOSITORY / name).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        path = (directory / file).resolve() if file else REPOSITORY / name
        assert path.exists(), f"{name} links to {target}"
        if anchor:
            assert anchor in anchors(path.read_text()), f"{name} links to {target}"


def test_every_page_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\((docs/[^)#\s]+)", README))
    assert linked == set(PAGES) - {"README.md"}


def flags_of(*parsers: argparse.ArgumentParser) -> set[str]:
    return {flag for p in parsers for action in p._actions for flag in action.option_strings}


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


STREAM_PARSER = add_arguments(argparse.ArgumentParser())
STREAM_FLAGS = {flag for flag in flags_of(STREAM_PARSER) if flag.startswith("--stream-")}


@pytest.mark.parametrize("name", PAGES)
def test_flags_and_commands_exist(name):
    text = PAGES[name]
    for flag in set(re.findall(r"--stream-[a-z-]*[a-z]", text)):
        assert flag in STREAM_FLAGS, f"{name} names {flag}"
    for command in set(re.findall(r"gds-optimizer ([a-z][\w-]*)", text)):
        assert command in subcommands(), f"{name} names gds-optimizer {command}"
    for script in set(re.findall(r"\b(?:scripts|tests|docs|gds_optimizer)/[\w./-]*\w", text)):
        assert (REPOSITORY / script).exists(), f"{name} names {script}"


@pytest.mark.parametrize("name", PAGES)
def test_modules_errors_and_extras_exist(name):
    text = PAGES[name]
    for module in set(re.findall(r"`(gds_optimizer(?:\.\w+)+)`", text)):
        assert importlib.util.find_spec(module), f"{name} names {module}"
    for error in set(re.findall(r"`(\w+Error)`", text)):
        assert hasattr(errors, error), f"{name} names {error}"
    for extra in set(re.findall(r"gds-optimizer\[([\w,]+)\]", text)):
        assert set(extra.split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_left_to_be_written(name):
    assert not re.search(r"\b(TODO|TBD|FIXME|XXX|coming soon|placeholder)\b", PAGES[name])


# ---------------------------------------------------------------------- code


@pytest.mark.parametrize(("name", "line", "code"), PYTHON, **IDS)
def test_python_compiles_and_its_names_exist(name, line, code):
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{name}:{line}: {node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "StreamConfig":
            known = {field.name for field in fields(StreamConfig)}
            assert {keyword.arg for keyword in node.keywords} <= known, f"{name}:{line}"


@pytest.mark.parametrize(("name", "line", "code"), SHELL, **IDS)
def test_shell_commands_are_accepted(name, line, code):
    for command in code.replace("\\\n", " ").splitlines():
        words = shlex.split(command, comments=True)
        where = f"{name}:{line}: {command}"
        if not words:
            continue
        if words[0] == "gds-optimizer":
            build_parser().parse_args(words[1:])
        elif words[0] == "torchrun":
            assert words[words.index("-m") + 1] == "gds_optimizer.megatron", where
            ours = words[next(i for i, w in enumerate(words) if w.startswith("--stream")) :]
            assert STREAM_PARSER.parse_args(ours).stream_optimizer_state_to_disk, where
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), where
        elif words[0] == "pip":
            assert words[1] == "install", where
        else:
            assert words[0].startswith("scripts/"), where


def test_every_module_has_its_place_in_the_table():
    rows = table(HOW, "module")
    named = {name.removeprefix("gds_optimizer.") for cell, _ in rows for name in code_of(cell)}
    families = tuple(name.removesuffix("*") for name in named if name.endswith("*"))
    modules = {info.name for info in pkgutil.iter_modules(gds_optimizer.__path__)}
    missing = {m for m in modules - named if not m.startswith(families)}
    assert missing == set()
    assert {name for name in named if not name.endswith("*")} <= modules


def test_the_front_end_can_be_started_as_a_module():
    assert importlib.util.find_spec("gds_optimizer.megatron.__main__")


def test_none_for_a_configuration_is_what_flags_give():
    args = STREAM_PARSER.parse_args([])
    assert StreamConfig.from_args(args) is None


# ---------------------------------------------------------------------- README


def test_the_readme_s_sizes_are_arithmetic():
    default = fields_by_name(StreamConfig)
    slots_bytes = default["slots"] * default["bucket_size"]
    for parameters, total, share, buffer in table(README, "parameters"):
        numel = float(parameters.removesuffix(" billion")) * 1e9
        assert float(total.removesuffix(" GB")) * 1e9 == numel * 12
        assert float(share.removesuffix(" GB")) * 1e9 == numel * 12 / 8
        assert float(buffer.removesuffix(" GB")) == round(slots_bytes / 1e9, 1)
    assert "3 slots of 192 MiB" in README
    assert slots_bytes == 3 * 192 * 2**20


def test_versions_are_those_of_the_packaging():
    python = PROJECT["requires-python"].removeprefix(">=")
    (torch_version,) = (
        r.removeprefix("torch>=") for r in PROJECT["dependencies"] if r.startswith("torch")
    )
    assert f"Python {python} or later and torch {torch_version} or later" in README
    assert PROJECT["license"] in README
    rows = dict(table(MATRIX, "what"))
    assert rows["Python"] == f"{python} or later"
    assert rows["torch"] == f"{torch_version} or later"
    for extra in ("cu12", "cu13"):
        kvikio, cupy = (
            r.partition(">=")[2] for r in sorted(PROJECT["optional-dependencies"][extra])[::-1]
        )
        assert rows["KvikIO (extras `cu12`, `cu13`)"] == f"{kvikio} or later"
        assert rows["CuPy (extras `cu12`, `cu13`)"] == f"{cupy} or later"
    (megatron,) = (
        r.partition(">=")[2]
        for r in PROJECT["optional-dependencies"]["megatron"]
        if r.startswith("megatron-core")
    )
    tested = ", ".join(setup.COVERED_VERSIONS)
    assert rows["megatron-core"] == f"{megatron} or later; tested: {tested}"


# ---------------------------------------------------------------------- configuration


def fields_by_name(kind: Any) -> dict[str, Any]:
    """Defaults of a dataclass's fields; None for those without."""
    return {f.name: None if f.default is MISSING else f.default for f in fields(kind)}


def written(value: Any) -> str:
    """A default as the documentation writes it."""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and value and value % 2**20 == 0:
        return f"{value // 2**20}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_flags_and_defaults():
    rows = {code_of(flag)[0]: rest for flag, *rest in table(CONFIGURATION, "flag")}
    assert set(rows) == STREAM_FLAGS
    defaults = fields_by_name(StreamConfig)
    documented = {}
    for flag, (field, default, _) in rows.items():
        if flag == "--stream-optimizer-state-to-disk":
            assert (field, default) == ("", "off")
            assert STREAM_PARSER.get_default("stream_optimizer_state_to_disk") is False
            continue
        (name,) = code_of(field)
        documented[name] = default
        dest = next(a.dest for a in STREAM_PARSER._actions if flag in a.option_strings)
        short = {"directories": "dir", "directory_weights": "dir_weights"}
        expected = short.get(name, name)
        assert dest == f"stream_optimizer_state_{expected}"
        # Left out on the command line, the field's own default counts.
        assert STREAM_PARSER.get_default(dest) is None
    assert documented == {name: written(value) for name, value in defaults.items()}


def test_every_flag_has_its_paragraph():
    paragraphs = re.findall(r"^\*\*`(--[\w-]+)`\*\*", CONFIGURATION, re.MULTILINE)
    assert sorted(paragraphs) == sorted(STREAM_FLAGS)


def test_what_flags_accept(tmp_path):
    fields_with_choices = ("io", "init", "self_check", "moment_dtype", "moment_rounding", "main")
    fields_with_choices += ("tune",)
    choices = {name: f"{name.upper()}_CHOICES" for name in fields_with_choices}
    for _, field, _, accepts in table(CONFIGURATION, "flag"):
        name = "".join(code_of(field))
        if name in choices:
            assert accepts == ", ".join(getattr(config_module, choices[name]))
        elif " to " in accepts:
            low, high = (parse_size(text) for text in accepts.split(" to "))
            step = 4096 if name == "io_task_size" else 1
            for value in (low, high):
                StreamConfig(directories=(tmp_path,), **{name: value})
            for value in (low - step, high + step):
                with pytest.raises(ConfigError, match=name):
                    StreamConfig(directories=(tmp_path,), **{name: value})
        elif accepts == "more than 0":
            with pytest.raises(ConfigError, match=name):
                StreamConfig(directories=(tmp_path,), **{name: 0})


def test_sizes_are_read_as_written():
    sentence = re.search(r"^Sizes are bytes.*?\n\n", CONFIGURATION, re.MULTILINE | re.DOTALL)[0]
    units = code_of(sentence)
    assert units[0] == "4096"
    assert parse_size(units[0]) == 4096
    for power, (binary, decimal) in enumerate(zip(units[1:5], units[5:9], strict=True), start=1):
        assert parse_size(f"1{binary}") == 1024**power
        assert parse_size(f"1{decimal}") == 1000**power
    assert "256 MiB by default" in CONFIGURATION
    defaults = fields_by_name(StreamConfig)
    assert defaults["io_threads"] * defaults["io_task_size"] == 256 * 2**20


@pytest.mark.parametrize(
    ("heading", "command"),
    [
        ("`gds-optimizer probe DIR...`", "probe"),
        ("`gds-optimizer bench`", "bench"),
        ("`gds-optimizer trace FILE`", "trace"),
        ("`gds-optimizer inspect PATH`", "inspect"),
        ("`gds-optimizer verify PATH`", "verify"),
        ("`gds-optimizer convert SNAPSHOT DEST`", "convert"),
        ("`gds-optimizer plan`", "plan"),
        ("`gds-optimizer demo`", "demo"),
    ],
)
def test_options_of_commands(heading, command):
    parser = subcommands()[command]
    rows = {
        code_of(option)[0]: d for option, d, _ in table(section(CONFIGURATION, heading), "option")
    }
    options = {flag for flag in flags_of(parser) if flag.startswith("--")} - {"--help"}
    assert set(rows) == options
    for action in parser._actions:
        if not set(action.option_strings) & options:
            continue
        (flag,) = action.option_strings
        default = "" if action.default is None else written(action.default)
        if flag == "--numel" and action.default is not None:  # elements, not bytes
            default = str(action.default)
        if (command, flag) == ("demo", "--dir"):
            default = "the current directory"
        if isinstance(action.default, bool):
            default = "on" if action.default else "off"
        assert rows[flag] == default, flag
    if command == "demo":
        config = fields_by_name(DemoConfig)
        for name in ("steps", "ranks", "io", "layers", "hidden", "slots", "allow_tmpfs"):
            assert parser.get_default(name) == config[name]


def test_keys_of_the_demo_s_document():
    rows = table(section(CONFIGURATION, "`gds-optimizer demo`"), "key")
    keys = {key for cell, *_ in rows for key in code_of(cell)}
    top = {key for key in keys if "." not in key}
    assert top == {f.name for f in fields(DemoReport)} - {"steps", "memory"} | {"version"}
    assert {key.removeprefix("steps[].") for key in keys if key.startswith("steps")} == {
        *(f.name for f in fields(DemoStep)),
        "gb_per_s",
    }
    assert {key.removeprefix("memory.*.") for key in keys if key.startswith("memory.*")} == {
        f.name for f in fields(PeakMemory)
    }
    assert {"memory.resident", "memory.streamed"} <= keys
    prefix = "first_difference."
    assert {key.removeprefix(prefix) for key in keys if key.startswith(prefix)} == {
        f.name for f in fields(Difference)
    }
    assert ["`version`", f"of this form: {REPORT_VERSION}"] in rows


# ---------------------------------------------------------------------- support matrix


def test_refusals():
    rows = {
        code_of(flag)[0]: ("(forks)" in flag, reason)
        for flag, reason in table(section(MATRIX, "What is refused, and why"), "flag")
    }
    tables = {**refusals._OPTIMIZER_CONFIG, **refusals._DDP_CONFIG}
    wanted = dict(tables.values())
    source = Path(refusals.__file__).read_text()
    quantized = set(re.findall(r'yield "(--[\w-]+)", reason', source))
    (reason,) = re.findall(r'reason = "([^"]+)"', source)
    assert len(quantized) == 2
    wanted |= dict.fromkeys(quantized, reason)
    assert {flag: reason for flag, (_, reason) in rows.items()} == wanted
    after = source.partition("# Options that exist in forks only.")[2].partition("}")[0]
    forks = set(re.findall(r'"(--[\w-]+)"', after))
    assert {flag for flag, (is_fork, _) in rows.items() if is_fork} == forks


def test_covered_optimizers_and_the_rehearsal():
    (row,) = (r for r in table(MATRIX, "optimizer") if r[1] == "covered by the tests")
    assert tuple(code_of(row[0])) == tuple(c.__name__ for c in self_check.COVERED_CLASSES)
    assert all(c.__module__.startswith("torch.optim") for c in self_check.COVERED_CLASSES)
    text = " ".join(section(MATRIX, "The rehearsal").split())
    steps = {3: "three"}[self_check._STEPS]
    assert f"steps a shard of {self_check._NUMEL} elements {steps} times" in text


def test_compared_cases_are_tests():
    cases = {name for _, name in test_bit_identity.CASES}
    named = [
        name
        for _, cell in table(section(MATRIX, "Parallelism and options"), "what")
        for name in code_of(cell)
    ]
    assert len(named) > 30
    assert set(named) <= cases, set(named) - cases


def test_io_paths():
    rows = table(section(MATRIX, "I/O paths"), "`--stream-optimizer-state-io`")
    names = [code_of(name)[0] for name, _ in rows]
    assert sorted(names) == sorted(config_module.IO_CHOICES)
    assert {path.value for path in IoPath} == set(names) - {"auto"}


def test_file_systems():
    rows = [row[0] for row in table(section(MATRIX, "File systems"), "file system")]
    assert set(re.findall(r"\b(?:ext4|xfs|btrfs|zfs)\b", rows[0])) == reasons.LOCAL_GDS_FS
    assert set(rows[2].split(", ")) == reasons.NETWORK_GDS_FS
    assert set(rows[-1].split(", ")) == reasons.MEMORY_FS


# ---------------------------------------------------------------------- how it works


def test_slot_states():
    assert [row[0] for row in table(HOW, "state")] == [state.name for state in SlotState]
    diagram = re.search(r"^```\n( FREE.*?)^```", HOW, re.MULTILINE | re.DOTALL)[1]
    assert set(re.findall(r"[A-Z]{4,}", diagram)) == {s.name for s in SlotState} - {"STUCK"}


def test_every_error_is_explained():
    explained = {error for cell, *_ in table(START, "error") for error in code_of(cell)}
    known = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type)
        and issubclass(kind, errors.GdsOptimizerError)
        and not name.startswith("_")
    }
    assert explained == known - {"GdsOptimizerError"}


# ---------------------------------------------------------------------- file format


def test_footer_words():
    rows = dict(table(FORMAT, "word"))
    assert rows["0"] == f"magic: the bytes `{footer.MAGIC.to_bytes(8, 'little').decode()}`"
    assert rows["1"] == f"format version: {footer.FORMAT_VERSION}"
    assert rows[str(footer._STEP)] == "step of the last write"
    assert set(rows) == {
        "0",
        "1",
        "2 to 5",
        "6",
        str(footer._STEP),
        "8",
        f"{footer._PLANES} + 2p",
        f"{footer._PLANES + 1} + 2p",
        str(footer._SELF),
    }
    for index, name in footer._FIELD_NAMES.items():
        if index not in (1, footer._STEP, footer._SELF):
            assert rows[str(index)].startswith(name)
    assert footer._FIELD_NAMES[footer._SELF] == "footer checksum"
    assert rows[str(footer._SELF)] == f"checksum of words 0 to {footer._SELF - 1}"
    assert f"{footer.WORDS} little-endian signed 64-bit words" in FORMAT
    assert f"format version {footer.FORMAT_VERSION}, layout version {LAYOUT_VERSION}" in FORMAT


def test_codecs():
    sentence = re.search(r"The codecs store\n?.*?\. A\n", FORMAT, re.DOTALL)[0]
    for name in code_of(sentence):
        assert codecs.get_codec(name).name == name
    assert set(code_of(sentence)) == set(codecs._BY_NAME)


def test_encoded_planes(reader):
    """Every codec of moments is named, and read by the snippet as by the package."""
    named = [
        name
        for cell, *_ in table(section(FORMAT, "Encoded planes"), "codec")
        for name in code_of(cell)
    ]
    assert set(named) == {name for name in codecs._ENCODED_BY_NAME if name.startswith("fp32:")}
    for name in named:
        values = torch.randn(2048, generator=torch.Generator().manual_seed(1))
        values *= torch.logspace(-20, 3, 2048)
        values[100:300], values[1500] = 0, torch.nan
        values = values.abs() if "unsigned" in name else values
        codec = codecs.get_codec(name)
        plane = torch.zeros(4096, dtype=torch.uint8)
        codec.encode_from(values, plane)
        found = torch.from_numpy(reader["decode"](plane.numpy(), 2048, name).copy())
        assert same_bits(found, codec.decode(plane, 2048)), name


def test_precision():
    rows = table(section(PRECISION, "Bytes"), f"`{MOMENT_DTYPE}`")
    assert [tuple(code_of(row[0]) + code_of(row[1])) for row in rows] == [
        (kind, main)
        for main in ("fp32", "remainder")
        for kind in config_module.MOMENT_DTYPE_CHOICES
    ]
    binding = plan.Binding("s", torch.empty(0), torch.empty(0, dtype=torch.bfloat16))
    for row in rows:
        (kind,), (main,) = code_of(row[0]), code_of(row[1])
        moments = [
            PlaneSpec(name=name, codec=plan.moment_codec(PlaneSpec(name=name), kind, "nearest", ""))
            for name in ("exp_avg", "exp_avg_sq")
        ]
        codec = plan.main_codec(binding, moments, main)
        space = SpaceSpec(
            planes=(PlaneSpec(name="main", codec=codec), *moments),
            shards=(Shard(name="s", numel=2**24),),
        )
        size = fields_by_name(StreamConfig)["bucket_size"]
        (bucket,) = plan_layout([space], bucket_numel=bucket_numel_for(size, [space])).buckets
        nbytes = bucket.footer_offset
        assert row[2:] == [
            f"{nbytes / 2**24:.3g}",
            f"{100 * nbytes / (12 * 2**24):.0f} %",
            f"{fields_by_name(StreamConfig)['slots']} × {nbytes / 2**20:g} MiB",
            f"{bucket.scratch_bytes // 2**20} MiB" if bucket.scratch_bytes else "0",
            " + ".join(f"{plane.nbytes / 2**24:.4g}" for plane in bucket.planes),
            {"fp32": "", "main:remainder16": "sign of `exp_avg_sq`"}.get(
                codec, "a bitmap of 0.125"
            ),
        ]
    head, *_ = [
        line.strip("| ").split(" | ")
        for line in section(PRECISION, "How moments are stored").splitlines()
        if line.startswith("|")
    ]
    signs = [code_of(cell) for cell in head]
    assert dict.fromkeys(signs[0], "signed") | dict.fromkeys(signs[1], "unsigned") == {
        name: codec.removeprefix("fp32:int8-") for name, codec in plan.INT8_CODECS.items()
    }
    matrix = {
        code_of(row[0])[0]: row[1] for row in table(section(MATRIX, "Precision"), "moments kept in")
    }
    assert list(matrix) == list(config_module.MOMENT_DTYPE_CHOICES)
    assert code_of(matrix["int8"]) == list(plan.INT8_CODECS)


def test_the_checksum_s_example():
    values = np.array([1, 2, 0.5, -1], dtype="<f4")
    first, second = (int(word) for word in values.view("<u8"))
    total = (first + 3 * second) % 2**64
    text = " ".join(FORMAT.split())
    assert f"are the two words `{first:#018x}` and `{second:#018x}`" in text
    assert f"`{first:#018x} + 3 * {second:#018x} = {total:#018x} = {total}`" in text
    assert total < 2**63
    data = torch.from_numpy(values.view(np.uint8))
    assert checksum_module.checksum(data).item() == total


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    """The names that the snippets of the page define, executed in order."""
    names: dict[str, Any] = {}
    for page, _, code in PYTHON:
        if page == "docs/file-format.md":
            exec(compile(code, page, "exec"), names)
    return names


@contextlib.contextmanager
def stepped(directories: list[Path], **options: Any) -> Iterator[Any]:
    """A streamed AdamW after two steps whose last write has ended."""
    with streamed(directories, **options) as optimizer:
        for step in range(2):
            optimizer.step(grads_of(SIZES, step))
        optimizer.engine.drain()
        yield optimizer


def test_the_snippets_read_what_was_written(tmp_path, reader):
    """Every element of every plane, over two directories and two spaces."""
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    with stepped(roots) as optimizer:
        engine = optimizer.engine
        wanted = engine.read_state()
        found = {
            name: {
                plane: torch.full((numel,), torch.nan) for plane in wanted[name] if plane != "step"
            }
            for name, numel in zip(wanted, SIZES, strict=True)
        }
        assert len(engine.layout.buckets) > 10
        for index in range(len(engine.layout.buckets)):
            folder = roots[index % 2] / "rank00000" / "opt0"
            words, planes = reader["read_bucket"](folder / f"bucket{index:05d}.bin")
            assert (words[6], words[7]) == (index, 2)
            names, pieces = reader["bucket_contents"](folder / "layout.json", index)
            assert len(names) == words[8] == len(planes)
            for shard, shard_offset, bucket_offset, numel in pieces:
                for name, plane in zip(names, planes, strict=True):
                    part = torch.from_numpy(plane[bucket_offset : bucket_offset + numel].copy())
                    found[shard][name][shard_offset : shard_offset + numel] = part
            described = json.loads((folder / "layout.json").read_text())
            text = json.dumps(described, sort_keys=True, separators=(",", ":"))
            assert words[2:6].tobytes() == hashlib.sha256(text.encode()).digest()
        for shard, planes_of in found.items():
            for name, values in planes_of.items():
                assert same_bits(values, wanted[shard][name]), (shard, name)


def test_the_snippet_notices_damage(tmp_path, reader):
    with stepped([tmp_path]) as optimizer:
        path = optimizer.paths[1]
        data = bytearray(path.read_bytes())
        reader["read_bucket"](path)
        for offset, complaint in ((5000, "plane 1"), (len(data) - 4000, "no valid footer")):
            damaged = bytearray(data)
            damaged[offset] ^= 1
            copy = tmp_path / "copy.bin"
            copy.write_bytes(damaged)
            with pytest.raises(ValueError, match=complaint):
                reader["read_bucket"](copy)


def test_the_snippet_knows_several_spaces(tmp_path, reader):
    """Buckets of later spaces are numbered after those of the first."""
    moments = PlaneSpec(name="exp_avg", codec="fp32:int8-signed-sr")
    sizes = [[0, 1, 3000, 64, 0], [5000, 7], [0], [1024]]
    layout = plan_layout(
        [
            SpaceSpec(
                planes=(PlaneSpec(name="main"), moments)[: 1 + number % 2],
                shards=tuple(
                    Shard(name=f"{number}.{i}", numel=numel) for i, numel in enumerate(own)
                ),
            )
            for number, own in enumerate(sizes)
        ],
        bucket_numel=1024,
    )
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(layout.describe()))
    for bucket in layout.buckets:
        names, pieces = reader["bucket_contents"](path, bucket.index)
        space = layout.spaces[bucket.space]
        assert names == [plane.name for plane in bucket.planes]
        assert pieces == [
            (space.shards[p.shard].name, p.shard_offset, p.bucket_offset, p.numel)
            for p in bucket.pieces
        ]
    with pytest.raises(IndexError):
        reader["bucket_contents"](path, len(layout.buckets))


def test_where_files_are(tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    with stepped(roots) as optimizer:
        for index, path in enumerate(optimizer.paths):
            assert path == roots[index % 2] / "rank00000" / "opt0" / f"bucket{index:05d}.bin"
            assert path.stat().st_mode & 0o777 == 0o600
        for root in roots:
            others = {p.name for p in (root / "rank00000" / "opt0").iterdir()}
            assert {n for n in others if not n.startswith("bucket")} == {"layout.json", "lock"}
    assert [list(root.iterdir()) for root in roots] == [[], []]


# ---------------------------------------------------------------------- the checks themselves


def test_a_wrong_page_is_found(monkeypatch):
    """The helpers see what they are for."""
    page = "# A page\n\n[x](#a-page) `NoSuchError`\n\n| a | b |\n|---|---|\n| `1` | 2 |\n"
    assert anchors(page) == {"a-page"}
    assert table(page, "a") == [["`1`", "2"]]
    with pytest.raises(AssertionError, match="no table"):
        table(page, "c")
    with pytest.raises(AssertionError, match="no heading"):
        section(page, "B page")
    monkeypatch.setitem(PAGES, "README.md", page)
    with pytest.raises(AssertionError, match="NoSuchError"):
        test_modules_errors_and_extras_exist("README.md")
    monkeypatch.setitem(PAGES, "README.md", "`--stream-optimizer-state-colour`")
    with pytest.raises(AssertionError, match="colour"):
        test_flags_and_commands_exist("README.md")
    monkeypatch.setitem(PAGES, "README.md", "[x](docs/nowhere.md)")
    with pytest.raises(AssertionError, match="nowhere"):
        test_links_resolve("README.md")
    with pytest.raises(AssertionError, match="fly"), contextlib.redirect_stderr(io.StringIO()):
        test_shell_commands_are_accepted("README.md", 1, "fly away")

"""What is installed, what is promised and what is written down are the same."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import gds_optimizer

REPOSITORY = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]

# pip's name of a distribution -> conda's name of the package, where they differ. Conda has one
# package for all CUDA versions.
CONDA_NAMES = {
    "torch": "pytorch-gpu",
    "kvikio-cu12": "kvikio",
    "kvikio-cu13": "kvikio",
    "cupy-cuda12x": "cupy",
    "cupy-cuda13x": "cupy",
}
# What conda does not have, so that pip installs it there too.
ONLY_ON_PIP = {"megatron-core"}
# What every conda environment needs beside the requirements.
CONDA_BASICS = {"python", "pip"}


def environment() -> tuple[dict[str, str], dict[str, str]]:
    """Versions by name in environment.yml: conda's and, under `pip:`, pip's.

    Reads only the plain form that this file has, and fails on any other.
    """
    conda: dict[str, str] = {}
    pip: dict[str, str] = {}
    lines = (REPOSITORY / "environment.yml").read_text().split("\ndependencies:\n")[1].splitlines()
    for line in lines:
        if not line.strip() or line.strip().startswith("#") or line == "  - pip:":
            continue
        match = re.fullmatch(r"(  |      )- ([a-z0-9-]+)([<>=].*)?", line)
        assert match, f"unexpected line in environment.yml: {line!r}"
        (conda if match[1] == "  " else pip)[match[2]] = match[3] or ""
    return conda, pip


def requirements() -> dict[str, SpecifierSet]:
    """Everything that pyproject.toml names, extras and build system included."""
    texts = [*PROJECT["dependencies"], *PYPROJECT["build-system"]["requires"]]
    texts += [text for extra in EXTRAS.values() for text in extra]
    found: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, texts):
        known = found.setdefault(requirement.name, requirement.specifier)
        assert known == requirement.specifier, f"two versions of {requirement.name}"
    return found


def test_conda_and_pip_install_the_same():
    wanted_conda, wanted_pip = {"python": SpecifierSet(PROJECT["requires-python"])}, {}
    for name, versions in requirements().items():
        if name in ONLY_ON_PIP:
            wanted_pip[name] = versions
        else:
            conda_name = CONDA_NAMES.get(name, name)
            known = wanted_conda.setdefault(conda_name, versions)
            assert known == versions, f"two versions of {conda_name}"
    conda, pip = environment()
    assert set(conda) == set(wanted_conda) | CONDA_BASICS
    assert {name: SpecifierSet(conda[name]) for name in wanted_conda} == wanted_conda
    assert {name: SpecifierSet(text) for name, text in pip.items()} == wanted_pip


def test_the_core_stays_light():
    assert [Requirement(text).name for text in PROJECT["dependencies"]] == [
        "torch",
        "numpy",
        "tqdm",
    ]


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ("cu12", {"kvikio-cu12", "cupy-cuda12x"}),
        ("cu13", {"kvikio-cu13", "cupy-cuda13x"}),
        ("megatron", {"megatron-core", "psutil"}),
        ("dev", {"pytest", "hypothesis", "ruff", "mypy", "psutil"}),
    ],
)
def test_extras_bring_what_they_are_for(extra, names):
    assert names <= {Requirement(text).name for text in EXTRAS[extra]}


def test_linters_are_pinned():
    versions = {r.name: str(r.specifier) for r in map(Requirement, EXTRAS["dev"])}
    assert versions["ruff"].startswith("==")
    assert versions["mypy"].startswith("==")


def test_the_command_s_entry_point_exists():
    module, _, function = PROJECT["scripts"]["gds-optimizer"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_package_is_typed_and_imports_without_extras():
    assert (REPOSITORY / "gds_optimizer" / "py.typed").is_file()
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"]["gds_optimizer"]
    program = (
        "import sys, gds_optimizer, gds_optimizer.config, gds_optimizer.layout\n"
        "print([m for m in ('kvikio', 'cupy', 'megatron', 'psutil') if m in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY)
    assert result.stdout.strip() == "[]"


def test_installed_metadata_is_that_of_this_checkout():
    try:
        installed = metadata.metadata("gds-optimizer")
    except metadata.PackageNotFoundError:
        pytest.skip("needs gds-optimizer installed: pip install -e .")
    assert installed["Version"] == gds_optimizer.__version__
    assert SpecifierSet(installed["Requires-Python"]) == SpecifierSet(PROJECT["requires-python"])
    assert set(installed.get_all("Provides-Extra")) == set(EXTRAS)
    entry_points = metadata.entry_points(group="console_scripts", name="gds-optimizer")
    assert {point.value for point in entry_points} == set(PROJECT["scripts"].values())


def test_the_changelog_starts_with_what_is_unreleased_then_releases_in_order():
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    first, *releases = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert first == "[Unreleased]"
    versions = []
    for heading in releases:
        match = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}", heading)
        assert match, f"wanted '[1.2.3] - 2026-01-31', got {heading!r}"
        versions.append(Version(match[1]))
    assert versions == sorted(set(versions), reverse=True)
    # The version in the code is the next release's until it is released.
    assert Version(gds_optimizer.__version__) >= max(versions, default=Version("0"))


def test_the_licence_is_what_the_metadata_says():
    assert PROJECT["license"] == "Apache-2.0"
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "Copyright 2026 The gds-optimizer authors" in text


@pytest.mark.parametrize("script", ["scripts/test", "scripts/demo", ".ci/run"])
def test_scripts_can_be_run_and_parsed(script):
    path = REPOSITORY / script
    assert path.stat().st_mode & 0o111
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(path)], check=True)

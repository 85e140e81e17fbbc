"""Print which of this project's requirements are not installed, one a line, for pip to add.

    _missing.py --constraints FILE [EXTRA ...]

Writes the version of everything that is installed to FILE: with it as a constraint, pip adds what
is missing and replaces nothing. A requirement whose installed version is too old is reported, not
replaced: somebody chose that version. Linters are the exception, since other versions give other
verdicts and nothing else uses them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tomllib
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
except ImportError:
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
    from pip._vendor.packaging.utils import canonicalize_name  # type: ignore[assignment]

LINTERS = {"ruff", "mypy"}
# Distributions that go by several names (conda's `kvikio` is pip's `kvikio-cu13`): look for the
# module instead.
MODULES = {"kvikio": "kvikio", "cupy": "cupy"}


def is_importable_elsewhere(name: str) -> bool:
    module = MODULES.get(name.partition("-")[0])
    return module is not None and importlib.util.find_spec(module) is not None


def is_missing(requirement: Requirement) -> bool:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return not is_importable_elsewhere(requirement.name)
    if requirement.specifier.contains(version, prereleases=True):
        return False
    if requirement.name in LINTERS:
        return True
    print(f"*** wanted {requirement}, kept the installed {version}", file=sys.stderr)
    return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--constraints", type=Path, required=True)
    parser.add_argument("extras", nargs="*")
    arguments = parser.parse_args()

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in arguments.extras:
        wanted += project["optional-dependencies"].get(extra, [])
    for text in dict.fromkeys(wanted):
        if is_missing(Requirement(text)):
            print(text)

    installed = {
        canonicalize_name(distribution.metadata["Name"]): distribution.version
        for distribution in reversed(list(metadata.distributions()))  # the first on sys.path wins
        if distribution.metadata["Name"]
    }
    left_free = {"gds-optimizer", *LINTERS}
    arguments.constraints.write_text(
        "".join(
            f"{name}=={version}\n"
            for name, version in sorted(installed.items())
            if name not in left_free
        )
    )


if __name__ == "__main__":
    main()

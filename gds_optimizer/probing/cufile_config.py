"""cuFile's configuration: what the user has, and the same with its silent fallback decided.

The probe runs under the user's own settings with one thing changed, so that what it proves holds
for the run. See "GPUDirect Storage Parameters" in NVIDIA's GDS configuration guide.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gds_optimizer.probing.system import System

# A string, or a comment: cuFile reads JSON with the comments of C++, which Python does not.
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])')


@dataclass(frozen=True)
class CufileConfig:
    """The settings that cuFile would read in this environment.

    Attributes:
        source: the file; None where there is none and cuFile's defaults hold.
        data: the settings; empty where there are none or they cannot be read.
        error: why they cannot be read; empty otherwise.
    """

    source: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def get(self, *keys: str) -> Any:
        """The value under nested `keys`; None where it is not set."""
        value: Any = self.data
        for key in keys:
            if not isinstance(value, dict):
                return None
            value = value.get(key)
        return value


def parse_commented_json(text: str) -> Any:
    """JSON with // and /* */ comments and trailing commas, as cuFile accepts it.

    Raises:
        ValueError: it is not that.
    """
    text = _STRING_OR_COMMENT.sub(lambda m: m[0] if m[0].startswith('"') else " ", text)
    return json.loads(_TRAILING_COMMA.sub(lambda m: m[1] or "", text))


def load_cufile_config(system: System, env: Mapping[str, str]) -> CufileConfig:
    """The file that `CUFILE_ENV_PATH_JSON` names (as it is), else /etc/cufile.json under root."""
    named = env.get("CUFILE_ENV_PATH_JSON")
    text = (System("/").read(named) if named else system.read("/etc/cufile.json")) or ""
    source = named or ("/etc/cufile.json" if text else None)
    if named and not text:
        return CufileConfig(named, error="it cannot be read or is empty")
    if not text:
        return CufileConfig()
    try:
        data = parse_commented_json(text)
    except ValueError as error:
        return CufileConfig(source, error=f"it is no JSON: {error}")
    if not isinstance(data, dict):
        return CufileConfig(source, error="it is no JSON object")
    return CufileConfig(source, data)


def strict_config(config: CufileConfig) -> str:
    """The user's settings as JSON text with cuFile's fallback forbidden; nothing else changes."""
    return json.dumps(_changed(config, properties={"allow_compat_mode": False}))


def probe_config(config: CufileConfig, log_dir: str, *, allow_compat_mode: bool) -> str:
    """The user's settings as JSON text, with cuFile's fallback allowed or forbidden.

    `force_compat_mode` is left as the user has it: the run would obey it too.
    """
    return json.dumps(
        _changed(
            config,
            properties={"allow_compat_mode": allow_compat_mode},
            logging={"dir": log_dir, "level": "ERROR"},
            # Level 3 counts operations by the path they really took.
            profile={"cufile_stats": 3},
        )
    )


def _changed(config: CufileConfig, **sections: dict[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(config.data)
    for section, values in sections.items():
        if not isinstance(data.get(section), dict):
            data[section] = {}
        data[section].update(values)
    return data

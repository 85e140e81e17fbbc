"""Options and counters of an optimizer as JSON, exactly, and back; and JSON files that are sealed.

JSON has numbers, texts, lists and objects; an optimizer's options also have tuples, tensors of one
element, and infinities. Those become objects with one key that starts with a dollar sign.

A sealed file begins with the SHA-256 of all its other bytes, so that no change of it goes
unnoticed. It is JSON as well:

    {
     "sha256": "<64 hexadecimal digits: of the file without this line>",
     ...
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
import torch

from gds_optimizer.codecs import get_codec, raw_codec_name
from gds_optimizer.errors import SnapshotError

_OPENING = b"{\n"
_SEAL = b' "sha256": "%s",\n'
_SEAL_BYTES = len(_SEAL % (b"0" * 64))


def to_json(value: Any) -> Any:
    """Plain JSON data from which `from_json` makes the same value.

    Raises:
        SnapshotError: the value is of another kind.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return _tensor_to_json(value)
    if isinstance(value, tuple):
        return {"$tuple": [to_json(item) for item in value]}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"$dict": {key: to_json(item) for key, item in value.items()}}
    raise SnapshotError(
        f"an option or counter of the optimizer is a {type(value).__name__}, which a snapshot "
        "cannot record: wanted numbers, texts, tuples, or tensors of one element"
    )


def _tensor_to_json(value: torch.Tensor) -> dict[str, Any]:
    try:
        codec = "bool" if value.dtype == torch.bool else raw_codec_name(value.dtype)
    except KeyError:
        raise SnapshotError(
            f"an option or counter of the optimizer is a tensor of {value.dtype}, which a "
            "snapshot cannot record: wanted real numbers"
        ) from None
    return {
        "$tensor": to_json(value.item()),
        "codec": codec,
        "shape": list(value.shape),
        "on_device": value.device.type != "cpu",
    }


def from_json(data: Any, device: torch.device) -> Any:
    """The value that `to_json` described; tensors that were on a device come back on `device`."""
    if isinstance(data, list):
        return [from_json(item, device) for item in data]
    if not isinstance(data, dict):
        return data
    if "$float" in data:
        return float(data["$float"])
    if "$tuple" in data:
        return tuple(from_json(item, device) for item in data["$tuple"])
    if "$dict" in data:
        return {key: from_json(item, device) for key, item in data["$dict"].items()}
    return torch.tensor(
        from_json(data["$tensor"], device),
        dtype=torch.bool if data["codec"] == "bool" else get_codec(data["codec"]).dtype,
        device=device if data["on_device"] else "cpu",
    ).reshape(data["shape"])


def seal(data: dict[str, Any]) -> bytes:
    """A sealed file's bytes; `data` has at least one key, and none called "sha256"."""
    text = json.dumps(data, indent=1, allow_nan=False).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    return _OPENING + _SEAL % digest + text.removeprefix(_OPENING)


def seal_of(content: bytes) -> str:
    """The digest that a sealed file begins with, as it stands there."""
    return content[len(_OPENING) + 12 : len(_OPENING) + 12 + 64].decode(errors="replace")


def unseal(content: bytes) -> dict[str, Any]:
    """What was sealed.

    Raises:
        ValueError: not one byte of it may differ, and one does, or it was never sealed.
    """
    line = content[len(_OPENING) : len(_OPENING) + _SEAL_BYTES]
    text = _OPENING + content[len(_OPENING) + _SEAL_BYTES :]
    digest = hashlib.sha256(text).hexdigest().encode()
    if not content.startswith(_OPENING) or line != _SEAL % digest:
        raise ValueError("its content does not go with its SHA-256")
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    return data

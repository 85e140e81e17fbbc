"""Options and counters of an optimizer as JSON, exactly, and back.

JSON has numbers, texts, lists and objects; an optimizer's options also have tuples, tensors of one
element, and infinities. Those become objects with one key that starts with a dollar sign.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gds_optimizer.codecs import get_codec, raw_codec_name
from gds_optimizer.errors import SnapshotError


def to_json(value: Any) -> Any:
    """Plain JSON data from which `from_json` makes the same value.

    Raises:
        SnapshotError: the value is of another kind.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {
            "$tensor": to_json(value.item()),
            "codec": raw_codec_name(value.dtype),
            "shape": list(value.shape),
            "on_device": value.device.type != "cpu",
        }
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
        dtype=get_codec(data["codec"]).dtype,
        device=device if data["on_device"] else "cpu",
    ).reshape(data["shape"])

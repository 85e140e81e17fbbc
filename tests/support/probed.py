"""The probe's verdict, asked for once: it starts children that take seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gds_optimizer import runtime
from gds_optimizer.config import StreamConfig


@contextlib.contextmanager
def probed_once() -> Iterator[None]:
    """Runtimes that are built inside share one real verdict for each I/O path asked for."""
    reports: dict[str, Any] = {}
    decide = runtime.decide_io_path

    def decide_once(config: StreamConfig, device: torch.device, **options: Any) -> Any:
        if config.io not in reports:
            reports[config.io] = decide(config, device, **options)
        return reports[config.io]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "decide_io_path", decide_once)
        yield

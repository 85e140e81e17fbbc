"""Which devices run the fused kernels: those on which Triton works, found out by trying once.

The bytes are the same without them, by plain torch operations; on a GPU those take several times
as long, so the reason is logged and can be asked for.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import torch

logger = logging.getLogger(__name__)


def kernels_for(tensor: torch.Tensor) -> ModuleType | None:
    """The module of fused kernels if they run on the tensor's device, else None."""
    return _load(tensor.device)[0] if tensor.is_cuda else None


def fused_kernels(device: torch.device) -> tuple[bool, str]:
    """Whether codecs use fused kernels on `device`, and why (not)."""
    if device.type != "cuda":
        return False, f"fused kernels are for CUDA devices, not for {device.type}"
    kernels, reason = _load(torch.empty(0, device=device).device)
    return kernels is not None, reason


@functools.cache
def _load(device: torch.device) -> tuple[ModuleType | None, str]:
    # Triton may be missing, too old for the GPU, or without the C compiler that it calls.
    try:
        kernels = importlib.import_module("gds_optimizer.codecs.triton_kernels")
        bits = torch.tensor([0x3F808000, 0x3F818000, -1], dtype=torch.int32, device=device)
        halves = torch.zeros(3, dtype=torch.int16, device=device)
        kernels.encode_bf16(bits, halves, 0, (0, 0), False)
        found = halves.tolist()
    except Exception as error:  # noqa: BLE001 - whatever stops Triton, there is the other way
        reason = f"Triton does not work on {device}: {type(error).__name__}: {error}"
    else:
        if found == [0x3F80, 0x3F82, -1]:
            return kernels, f"Triton works on {device}"
        reason = f"Triton on {device} computes {found} where [16256, 16258, -1] is right"
    logger.warning(
        "codecs run by plain torch operations, several times slower than fused kernels: %s", reason
    )
    return None, reason

"""What the precision benchmark trains: a GPT on source code, byte by byte, in plain torch."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

_VOCABULARY = 256
_HELD_OUT_EVERY = 20  # of the source files


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of the model and of its training."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    validation_batches: int
    bucket_size: str


SIZES = {
    "small": Size(12, 896, 14, 512, 8, 1500, 64, "192MiB"),  # 116 million parameters
    "tiny": Size(2, 32, 2, 32, 4, 20, 2, "96KiB"),
}


def standard_library() -> tuple[torch.Tensor, torch.Tensor, str]:
    """Source code that every Python brings: training and held-out bytes, and their SHA-256."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)
    )
    held_out = b"".join(path.read_bytes() for path in files[::_HELD_OUT_EVERY])
    training = b"".join(
        path.read_bytes() for number, path in enumerate(files) if number % _HELD_OUT_EVERY
    )
    digest = hashlib.sha256(training + held_out).hexdigest()
    return _as_bytes(training), _as_bytes(held_out), digest


def _as_bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: torch.Tensor, size: Size, seed: int) -> Iterator[torch.Tensor]:
    """Endless (batch, context + 1) int64 tensors of consecutive bytes from random places."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(size.context + 1)
    while True:
        starts = torch.randint(
            text.numel() - size.context - 1, (size.batch, 1), generator=generator
        )
        yield text[starts + window].long()


class _Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.attention = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.before_mlp = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        mixed = self.attention(self.before_attention(x))
        heads = mixed.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden: torch.Tensor = x + self.down(functional.gelu(self.up(self.before_mlp(x))))
        return hidden


class Gpt(nn.Module):
    """A decoder of the usual kind whose output weights are its embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, size.width)
        self.place = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(_Block(size) for _ in range(size.layers))
        self.last = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                scale = 0.02 / math.sqrt(2 * size.layers) if residual else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, in nats a byte, of (batch, context + 1) tokens."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.place.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.last(x), self.token.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

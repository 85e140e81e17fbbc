"""Streaming for plain PyTorch: any elementwise `torch.optim.Optimizer`, without a framework.

from gds_optimizer.pytorch import StreamConfig, stream

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
optimizer = stream(optimizer, StreamConfig(directories=("/nvme0",)), model=model)
"""

from gds_optimizer.config import StreamConfig
from gds_optimizer.pytorch.optimizer import StreamedOptimizer, stream

__all__ = ["StreamConfig", "StreamedOptimizer", "stream"]

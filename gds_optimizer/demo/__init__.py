"""The same small GPT trained twice, optimizer state resident and streamed, and compared bit by bit.

What `gds-optimizer demo` runs. The model, its buffers and its optimizer are megatron-core's own;
without a GPU they run on the CPU.
"""

from gds_optimizer.demo.launch import run_demo
from gds_optimizer.demo.report import DemoConfig, DemoReport

__all__ = ["DemoConfig", "DemoReport", "run_demo"]

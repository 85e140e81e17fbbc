"""Optimizer state on NVMe, streamed through a fixed device buffer during the step."""

__version__ = "0.1.0"

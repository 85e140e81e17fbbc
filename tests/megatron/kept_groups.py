"""Process groups and a chosen path that serve many trainings of one process, one after another.

Making groups takes each training longer than a step or two, and so does trying a directory.
`test_harness.py` and the demo's tests make their own every time, as users do.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator

import torch.distributed

from gds_optimizer import runtime
from gds_optimizer.megatron import tiny_gpt
from gds_optimizer.megatron.cpu import replaced
from gds_optimizer.megatron.process_groups import destroy, initialize_distributed
from gds_optimizer.megatron.tiny_gpt import TinyGptConfig


class KeptGroups:
    """Process groups that go on to the next training, if that wants the same."""

    def __init__(self) -> None:
        self._of: tuple[int, ...] | None = None

    @staticmethod
    def wanted(config: TinyGptConfig) -> tuple[int, ...]:
        """Trainings for which this is equal can follow each other without new groups."""
        return (config.tensor_parallel, config.pipeline_parallel, config.expert_parallel)

    @contextlib.contextmanager
    def __call__(self, config: TinyGptConfig) -> Iterator[None]:
        # Nobody holds the training before this one by now. Collections need not look again at what
        # is left.
        gc.collect()
        gc.freeze()
        if self._of != self.wanted(config):
            self.close()
            initialize_distributed(config)
            self._of = self.wanted(config)
        yield
        torch.distributed.barrier()

    def close(self) -> None:
        if self._of is not None:
            destroy(process_group=False)
            self._of = None


@contextlib.contextmanager
def groups_kept() -> Iterator[KeptGroups]:
    """Inside, `run_training` keeps its groups."""
    groups = KeptGroups()
    with contextlib.closing(groups), replaced(tiny_gpt, process_groups=groups):
        yield groups


def paths_tried_once() -> contextlib.AbstractContextManager[None]:
    """Inside, no directory is tried twice with the same settings: it would be found the same."""
    decide = functools.lru_cache(runtime.decide_io_path)
    return replaced(runtime, decide_io_path=decide)

"""Between device memory and calls that move host memory: pinned pages, copied by threads.

Why not leave that to KvikIO, whose POSIX mode takes device memory too: its copies run on a stream
that waits for whatever is queued on the default stream, so what is written behind a step would wait
for a forward pass that is one long kernel. Its pages are small ones, of which some drives move less
at a time. And it registers its memory anew whenever the size of requests changes, which was seen to
fail: once two parts of a process had used different sizes, so did a transfer of the second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from gds_optimizer.io.memory import CopyStreams, HostBuffer
from gds_optimizer.io.tasks import Outcome, Task
from gds_optimizer.io.threads import ThreadPools, ThreadTask


class Staging:
    """Threads, each with a piece of host memory that one request at a time goes through.

    Args:
        device: of the buffers that are copied from and to.
        threads: for each queue.
        chunk_bytes: most bytes of one request, a multiple of 4096. A thread takes so much memory
            with its first request and keeps it.
    """

    def __init__(self, device: torch.device, *, threads: int, chunk_bytes: int) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._pools = ThreadPools(threads)
        # Of its own: they wait for no kernel, and kernels do not wait for them.
        self._streams = CopyStreams(device)
        self._local = threading.local()
        self._memory: list[HostBuffer] = []

    def start(
        self,
        queue: object,
        operation: str,
        buffer: torch.Tensor,
        move: Callable[[torch.Tensor], int],
    ) -> Task:
        """Start one request.

        Args:
            queue: whose threads serve it.
            operation: "read" or "write".
            buffer: 1-D uint8, on the device; no kernel may be about to write it.
            move: gets as many bytes of host memory, which it fills or writes, and says how many it
                moved. It is called in a thread and may raise OSError, RuntimeError or ValueError.
        """
        return ThreadTask(self._pools.of(queue).submit(self._carry, operation, buffer, move))

    def _carry(
        self, operation: str, buffer: torch.Tensor, move: Callable[[torch.Tensor], int]
    ) -> Outcome:
        try:
            part = self._own_memory()[: buffer.numel()]
            if operation == "write":
                self._copy(part, buffer, self._streams.to_host)
            moved = move(part)
            if operation == "read":
                self._copy(buffer, part, self._streams.to_device)
        except (OSError, RuntimeError, MemoryError, ValueError) as error:
            return Outcome(0, str(error))
        return Outcome(moved)

    def _own_memory(self) -> torch.Tensor:
        """This thread's, 1-D uint8 on the CPU."""
        if not hasattr(self._local, "memory"):
            buffer = HostBuffer(self._chunk_bytes, self._device)
            self._memory.append(buffer)
            self._local.memory = buffer.tensor
        memory: torch.Tensor = self._local.memory
        return memory

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        """Copy on a stream, and wait for it and for what other threads have put there before."""
        if stream is None:
            target.copy_(source)
            return
        copied = torch.cuda.Event(blocking=True)  # sleep meanwhile: there are many such threads
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            copied.record(stream)
        copied.synchronize()

    def close(self) -> None:
        """End the threads and give their memory back; nothing may be in flight."""
        self._pools.shutdown()
        self._local = threading.local()
        while self._memory:
            self._memory.pop().close()

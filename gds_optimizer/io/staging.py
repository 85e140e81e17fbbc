"""Between device memory and calls that move host memory: pinned pages, copied by threads.

Why not leave that to KvikIO, whose POSIX mode takes device memory too: its copies run on a stream
that waits for whatever is queued on the default stream, so what is written behind a step would wait
for a forward pass that is one long kernel. Its pages are small ones, of which some drives move less
at a time. And it registers its memory anew whenever the size of requests changes, which was seen to
fail: once two parts of a process had used different sizes, so did a transfer of the second.

At its end the interpreter joins these threads before anything else, however long that takes, and
takes no new requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

import torch

from gds_optimizer.io.memory import CopyStreams, HostBuffer
from gds_optimizer.io.tasks import Outcome, Task
from gds_optimizer.io.threads import ThreadPools, ThreadTask

Move = Callable[[torch.Tensor], int]
"""Moves bytes of host memory and says how many; may raise OSError, RuntimeError or ValueError."""


class _Piece(NamedTuple):
    """Host memory that one request at a time goes through, and the event of its copies."""

    memory: HostBuffer
    copied: torch.cuda.Event | None


class Staging:
    """Threads that serve requests for device memory through host memory.

    Args:
        device: of the buffers that are copied from and to.
        threads: for each queue.
        piece_bytes: most bytes of one request, a multiple of 4096.
    """

    def __init__(self, device: torch.device, *, threads: int, piece_bytes: int) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        self._pools = ThreadPools(threads)
        # Of its own: they wait for no kernel, and kernels do not wait for them.
        self._streams = CopyStreams(device)
        self._lock = threading.Lock()
        self._pieces: dict[object, SimpleQueue[_Piece]] = {}  # of each queue, those nobody uses

    def prepare(self, queue: object) -> None:
        """Take the memory of a queue, unless it is there: as much as its threads can use.

        Raises:
            MemoryError: it is not to be had, or cannot be pinned; nothing of it is kept.
        """
        with self._lock:
            if queue in self._pieces:
                return
            pieces: SimpleQueue[_Piece] = SimpleQueue()
            try:
                for _ in range(self._pools.threads):
                    pieces.put(self._new_piece())
            except MemoryError:
                _close(pieces)
                raise
            self._pools.of(queue)
            self._pieces[queue] = pieces

    def _new_piece(self) -> _Piece:
        memory = HostBuffer(self._piece_bytes, self._device)
        # Threads sleep until a copy is done: there are many of them.
        is_cuda = self._device.type == "cuda"
        return _Piece(memory, torch.cuda.Event(blocking=True) if is_cuda else None)

    def start(self, queue: object, operation: str, buffer: torch.Tensor, move: Move) -> Task:
        """Start one request.

        Args:
            queue: whose threads serve it; it was prepared.
            operation: "read" or "write".
            buffer: 1-D uint8 on the device, of `piece_bytes` at most; no kernel may be about to
                write it.
            move: called in a thread, with as many bytes of host memory.
        """
        pieces = self._pieces[queue]
        pool = self._pools.of(queue)
        return ThreadTask(pool.submit(self._carry, pieces, operation, buffer, move))

    def _carry(
        self, pieces: SimpleQueue[_Piece], operation: str, buffer: torch.Tensor, move: Move
    ) -> Outcome:
        piece = pieces.get()
        part = piece.memory.tensor[: buffer.numel()]
        try:
            self._enter_device()
            if operation == "write":
                self._copy(part, buffer, self._streams.to_host, piece.copied)
            moved = move(part)
            if operation == "read":
                self._copy(buffer[:moved], part[:moved], self._streams.to_device, piece.copied)
        except (OSError, RuntimeError, MemoryError, ValueError) as error:
            return Outcome(0, str(error))
        finally:
            pieces.put(piece)
        return Outcome(moved)

    def _enter_device(self) -> None:
        """Make the device this thread's.

        Else torch, on leaving a stream, goes back to the first device, where no rank but one has
        anything to do. And KvikIO asks the driver whose memory it gets, for which a thread that has
        done nothing yet may have no context; any call gives it one.
        """
        if self._streams.to_device is not None:
            torch.cuda.set_device(self._device)
            self._streams.to_device.query()

    def _copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        stream: torch.cuda.Stream | None,
        copied: torch.cuda.Event | None,
    ) -> None:
        """Copy on a stream, and wait for it and for what other threads have put there before."""
        with torch.inference_mode():  # the buffer may have been made in it
            if stream is None or copied is None:
                target.copy_(source)
                return
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
                copied.record(stream)
        copied.synchronize()

    def close(self) -> None:
        """End the threads and give the memory back; nothing may be in flight."""
        self._pools.shutdown()
        for pieces in self._pieces.values():
            _close(pieces)
        self._pieces.clear()


def _close(pieces: SimpleQueue[_Piece]) -> None:
    while not pieces.empty():
        pieces.get_nowait().memory.close()

"""Threads that serve requests, one pool for each queue, so that a slow drive holds up no other."""

from __future__ import annotations

import threading
from concurrent import futures

from gds_optimizer.io.tasks import Outcome


class ThreadTask:
    """A call that a pool's thread makes."""

    def __init__(self, future: futures.Future[Outcome]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def sleep(self, limit_s: float | None) -> None:
        futures.wait([self._future], limit_s)

    def outcome(self) -> Outcome:
        return self._future.result()


class ThreadPools:
    """A pool of threads for each queue, which start with it.

    Not with the first requests: an interrupt while a thread starts would lose the request.

    Args:
        threads: of each pool.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._lock = threading.Lock()
        self._pools: dict[object, futures.ThreadPoolExecutor] = {}

    def of(self, queue: object) -> futures.ThreadPoolExecutor:
        """The pool of a queue: of whatever is equal to `queue`."""
        with self._lock:
            if queue not in self._pools:
                pool = futures.ThreadPoolExecutor(self.threads, "gds-optimizer-io")
                _start_all(pool, self.threads)
                self._pools[queue] = pool
            return self._pools[queue]

    def shutdown(self) -> None:
        """Return once all threads have ended; nothing may be in flight."""
        for pool in self._pools.values():
            pool.shutdown()


def _start_all(pool: futures.ThreadPoolExecutor, count: int) -> None:
    barrier = threading.Barrier(count)
    try:
        for started in [pool.submit(barrier.wait) for _ in range(count)]:
            started.result()
    except BaseException:
        barrier.abort()  # no thread may be left waiting for the others
        raise

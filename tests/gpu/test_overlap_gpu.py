"""What goes on behind forward and backward: writes of the last step, while kernels keep running."""

from __future__ import annotations

import time

import pytest
import torch

from tests.support import io_backends
from tests.support.engines import StreamedOptimizer, adamw, first_values
from tests.support.io_conformance import noise, put

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MIB = 2**20
BUCKETS, BUCKET_BYTES, SLOTS = 12, 192 * MIB, 3
SIZES = [BUCKET_BYTES // 12] * BUCKETS


def in_flight_bytes(run: StreamedOptimizer) -> int:
    transfers = [transfer for slot in run.pool.slots for transfer in slot.transfers]
    return sum(transfer.nbytes for transfer in transfers if not transfer.done())


def millisecond() -> int:
    """Its clock cycles."""
    return int(torch.cuda.get_device_properties(0).clock_rate)  # kHz


def keep_busy(seconds: float) -> None:
    """Kernels of a millisecond on the default stream for so long, queued as a model's are."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.cuda._sleep(millisecond())
    torch.cuda.synchronize()


def test_a_long_kernel_holds_up_no_write(tmp_path):
    """As a forward pass in a CUDA graph is: the tail of a step is written while it runs."""
    backend = io_backends.make("posix-cuda", threads=16, task_size_bytes=16 * MIB)
    file = backend.open(io_backends.create_file(tmp_path / "bucket.bin", 32 * MIB))
    buffer = put(io_backends.allocate(backend.device, 32 * MIB), noise(32 * MIB))
    try:
        for start in (file.write, file.read):
            start(buffer, 0).wait()  # threads start, memory is pinned
        torch.cuda._sleep(20_000 * millisecond())
        ended = torch.cuda.Event()
        ended.record()
        for start in (file.write, file.read):
            start(buffer, 0).wait()
        assert not ended.query()
        torch.cuda.synchronize()
        assert torch.equal(buffer.cpu(), noise(32 * MIB))
    finally:
        backend.close()


def test_what_fits_the_slots_is_moved_between_steps(tmp_path, capsys):
    """With a forward and backward as long as the step, the tail is written and need not be read."""
    models = [model.cuda() for model in first_values(SIZES)]
    backend = io_backends.make("posix-cuda", threads=16, task_size_bytes=16 * MIB)
    run = StreamedOptimizer(
        tmp_path, adamw, models, bucket_size=BUCKET_BYTES, slots=SLOTS, backend=backend
    )
    try:
        grads = [torch.full((size,), 0.01, device="cuda") for size in SIZES]
        run.step(grads)
        for _ in range(2):
            run.step(grads)
            behind = in_flight_bytes(run)
            keep_busy(run.engine.last_stats.wall_s)
            left = in_flight_bytes(run)
            with capsys.disabled():
                print(f"\n{behind / MIB:.0f} MiB left to write by the step, {left} after")
            assert behind > BUCKET_BYTES
            assert left == 0
        run.step(grads)
        stats = run.engine.last_stats
        assert stats.cached_buckets >= 1
        unread = BUCKETS - stats.cached_buckets
        assert stats.read_bytes == unread * run.layout.buckets[0].file_bytes
    finally:
        run.close()
        backend.close()

"""What every I/O backend must do. A test class of its own for each backend inherits these tests."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from gds_optimizer.bench.page_cache import resident_pages
from gds_optimizer.errors import ClosedError, IoError, IoTimeoutError
from gds_optimizer.io import PAGE_BYTES, BucketFile, IoBackend, Transfer
from tests.support import io_backends, io_process

KIB = 2**10
MIB = 2**20
REPOSITORY = Path(__file__).parents[2]
LARGE_BYTES = 40 * MIB

Make = Callable[..., IoBackend]

_noise = np.frombuffer(np.random.default_rng(20261129).bytes(LARGE_BYTES + MIB), dtype=np.uint8)


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes on the CPU, others for each seed, of at most `LARGE_BYTES`."""
    start = seed * 4099 % (MIB + 1)
    return torch.from_numpy(_noise[start : start + nbytes].copy())


def put(buffer: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Fill `buffer` and have it ready for I/O."""
    buffer.copy_(content)
    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)
    return buffer


def bytes_of(path: Path) -> torch.Tensor:
    """What is in the file, read the ordinary way."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Writes of this process fail from offset `nbytes` on, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_process(
    kind: str, task: str, directory: Path, *, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a task of `tests.support.io_process` in a fresh interpreter in `directory`."""
    return subprocess.run(
        (
            sys.executable,
            # Forking with threads is the point; newer Pythons warn of it.
            "-W",
            "ignore::DeprecationWarning",
            "-m",
            "tests.support.io_process",
            kind,
            task,
            str(directory),
        ),
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), *sys.path))},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def in_flight(file: BucketFile, buffer: torch.Tensor) -> list[Transfer]:
    """Writes of the whole buffer to the file, far more than can have ended when this returns."""
    return [file.write(buffer, 0) for _ in range(12)]


class IoConformance:
    """Subclasses name a backend of `io_backends.KINDS`, and the path that its bytes really take."""

    kind: ClassVar[str]
    way: ClassVar[str]
    failure_words: ClassVar[str] = "File too large"
    """What is said of a write beyond the limit on file size."""
    is_registered: ClassVar[bool] = False

    @pytest.fixture
    def make(self) -> Iterator[Make]:
        """Makes backends of this kind, which are closed after the test."""
        made: list[IoBackend] = []

        def make_one(**options: int) -> IoBackend:
            made.append(io_backends.make(self.kind, **options))
            return made[-1]

        yield make_one
        for backend in made:
            backend.close()

    @pytest.fixture
    def backend(self, make: Make) -> IoBackend:
        return make()

    @contextlib.contextmanager
    def buffer(self, backend: IoBackend, nbytes: int) -> Iterator[torch.Tensor]:
        """A zeroed page-aligned buffer, registered where this kind does that."""
        buffer = io_backends.allocate(backend.device, nbytes)
        put(buffer, torch.zeros(nbytes, dtype=torch.uint8))
        if self.is_registered:
            backend.register(buffer)
        try:
            yield buffer
        finally:
            if self.is_registered:
                backend.deregister(buffer)

    # Bytes

    @pytest.mark.parametrize("task_size_bytes", [28 * KIB, MIB, 16 * MIB])
    @pytest.mark.parametrize("threads", [1, 4])
    @pytest.mark.parametrize(
        "nbytes", [PAGE_BYTES, 3 * PAGE_BYTES, MIB, 5 * MIB + PAGE_BYTES, LARGE_BYTES]
    )
    def test_every_size_moves_and_neighbours_stay(
        self, make, tmp_path, nbytes, threads, task_size_bytes
    ):
        backend = make(threads=threads, task_size_bytes=task_size_bytes)
        guard = noise(PAGE_BYTES, seed=1)
        content = noise(nbytes, seed=2)
        path = tmp_path / "bucket.bin"
        path.write_bytes(bytes(PAGE_BYTES + nbytes) + guard.numpy().tobytes())
        file = backend.open(path)
        with self.buffer(backend, nbytes + 2 * PAGE_BYTES) as buffer:
            inner = buffer[PAGE_BYTES:-PAGE_BYTES]
            put(buffer, torch.cat((guard, content, guard)))
            transfer = file.write(inner, PAGE_BYTES)
            assert (transfer.path, transfer.operation) == (path, "write")
            assert (transfer.file_offset, transfer.nbytes) == (PAGE_BYTES, nbytes)
            transfer.wait()
            expected = torch.cat((torch.zeros(PAGE_BYTES, dtype=torch.uint8), content, guard))
            assert torch.equal(bytes_of(path), expected)
            put(inner, torch.zeros(nbytes, dtype=torch.uint8))
            file.read(inner, PAGE_BYTES).wait()
            assert torch.equal(buffer.cpu(), torch.cat((guard, content, guard)))

    def test_it_reads_what_others_wrote(self, backend, tmp_path):
        content = noise(3 * MIB)
        path = tmp_path / "bucket.bin"
        path.write_bytes(content.numpy().tobytes())
        with self.buffer(backend, MIB) as buffer:
            backend.open(path).read(buffer, MIB).wait()
            assert torch.equal(buffer.cpu(), content[MIB : 2 * MIB])

    def test_a_read_sees_the_writes_before_it(self, backend, tmp_path):
        path = io_backends.create_file(tmp_path / "bucket.bin", 4 * MIB)
        file = backend.open(path)
        expected = torch.zeros(4 * MIB, dtype=torch.uint8)
        with self.buffer(backend, 4 * MIB) as buffer:
            for seed, (start, stop) in enumerate([(0, 4), (1, 3), (2, 4), (0, 1)]):
                part = slice(start * MIB, stop * MIB)
                put(buffer[part], noise(part.stop - part.start, seed))
                expected[part] = noise(part.stop - part.start, seed)
                file.write(buffer[part], part.start).wait()
                put(buffer, torch.zeros(4 * MIB, dtype=torch.uint8))
                file.read(buffer, 0).wait()
                assert torch.equal(buffer.cpu(), expected)

    def test_many_transfers_on_many_files_at_a_time(self, make, tmp_path):
        backend = make(threads=4, task_size_bytes=256 * KIB)
        part_bytes, parts, count = MIB + PAGE_BYTES, 6, 6
        contents = [noise(part_bytes * parts, seed) for seed in range(count)]
        paths = [
            io_backends.create_file(tmp_path / f"{i}.bin", part_bytes * parts) for i in range(count)
        ]
        files = [backend.open(path) for path in paths]
        with self.buffer(backend, part_bytes * parts * count) as buffer:
            rows = buffer.view(count, parts, part_bytes)
            put(buffer, torch.cat(contents))
            writes = [
                files[i].write(rows[i, j], j * part_bytes)
                for j in range(parts)
                for i in range(count)
            ]
            for transfer in reversed(writes):
                transfer.wait()
            put(buffer, torch.zeros(buffer.numel(), dtype=torch.uint8))
            # Every part goes to another place than it came from.
            reads = [
                files[i].read(rows[-1 - i, -1 - j], j * part_bytes)
                for j in range(parts)
                for i in range(count)
            ]
            for transfer in reads:
                transfer.wait()
            found = rows.flip(0, 1).cpu()
        for i in range(count):
            assert torch.equal(found[i].reshape(-1), contents[i])
            assert torch.equal(bytes_of(paths[i]), contents[i])
        moved = part_bytes * parts * count
        assert backend.counters() == {f"{self.way}.read": moved, f"{self.way}.write": moved}

    def test_threads_share_a_file_and_a_transfer(self, backend, tmp_path):
        file = backend.open(io_backends.create_file(tmp_path / "bucket.bin", 8 * MIB))
        content = noise(8 * MIB)
        failures: list[BaseException] = []
        with self.buffer(backend, 8 * MIB) as buffer:
            put(buffer, content)
            shared = file.write(buffer, 0)

            def work(index: int) -> None:
                try:
                    shared.wait()
                    part = slice(index * MIB, (index + 1) * MIB)
                    for _ in range(5):
                        file.write(buffer[part], part.start).wait()
                        file.read(buffer[part], part.start).wait()
                except BaseException as error:
                    failures.append(error)
                    raise

            threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failures
            assert torch.equal(buffer.cpu(), content)

    def test_nothing_is_moved_at_once(self, backend, tmp_path):
        file = backend.open(io_backends.create_file(tmp_path / "bucket.bin", MIB))
        with self.buffer(backend, PAGE_BYTES) as buffer:
            transfer = file.read(buffer[:0], 0)
            assert transfer.done()
            transfer.wait()

    def test_transfers_stay_out_of_the_page_cache(self, backend, tmp_path):
        nbytes = 8 * MIB + PAGE_BYTES
        path = io_backends.create_file(tmp_path / "bucket.bin", nbytes)
        file = backend.open(path)
        with self.buffer(backend, nbytes) as buffer:
            put(buffer, noise(nbytes))
            file.write(buffer, 0).wait()
            assert resident_pages(path) == 0
            file.read(buffer, 0).wait()
            assert resident_pages(path) == 0
        assert torch.equal(bytes_of(path), noise(nbytes))
        assert resident_pages(path) == nbytes // PAGE_BYTES, "the question finds what is there"

    # Requests that are refused

    def test_misaligned_requests_are_refused(self, backend, tmp_path):
        file = backend.open(io_backends.create_file(tmp_path / "bucket.bin", MIB))
        with self.buffer(backend, 4 * PAGE_BYTES) as buffer:
            for part, offset, complaint in (
                (buffer[512 : 512 + PAGE_BYTES], 0, "address is"),
                (buffer[: PAGE_BYTES + 512], 0, f"length is {PAGE_BYTES + 512}"),
                (buffer[:PAGE_BYTES], 512, "file offset is 512"),
                (buffer.view(torch.float32), 0, "float32"),
                (buffer.view(2, -1), 0, "1-D"),
                (buffer[::2], 0, "contiguous"),
                (buffer.to("meta"), 0, "on meta"),
            ):
                for start in (file.read, file.write):
                    with pytest.raises(ValueError, match=complaint):
                        start(part, offset)
        file.close()  # nothing is in flight

    def test_files_that_cannot_be_opened(self, backend, tmp_path):
        with pytest.raises(IoError, match=r"absent.*cannot be opened.*No such file"):
            backend.open(tmp_path / "absent.bin")
        # A file system without direct I/O that is everywhere.
        with pytest.raises(IoError, match=r"/proc/self/comm cannot be opened .*O_DIRECT"):
            backend.open("/proc/self/comm")

    def test_sizes_and_numbers_out_of_range(self, make):
        for options in ({"threads": 0}, {"task_size_bytes": 0}, {"task_size_bytes": 6000}):
            with pytest.raises(ValueError, match=next(iter(options))):
                make(**options)

    # Failures

    @pytest.mark.parametrize("file_bytes", [5 * MIB, 5 * MIB - 100, 4 * MIB + 1])
    def test_a_short_read_says_what_was_there(self, make, tmp_path, file_bytes):
        backend = make(threads=4, task_size_bytes=512 * KIB)
        path = tmp_path / "bucket.bin"
        content = noise(8 * MIB)
        path.write_bytes(content.numpy().tobytes())
        file = backend.open(path)
        os.truncate(path, file_bytes)
        with self.buffer(backend, 7 * MIB) as buffer:
            transfer = file.read(buffer, MIB)
            for _ in range(2):
                with pytest.raises(IoError) as caught:
                    transfer.wait()
                error = caught.value
                assert (error.path, error.operation) == (str(path), "read")
                assert (error.file_offset, error.wanted_bytes) == (MIB, 7 * MIB)
                for word in (path, MIB, 7 * MIB, file_bytes - MIB, file_bytes):
                    assert str(word) in str(error)
                assert transfer.done()
            # What was there has arrived: no task is left behind that would still write.
            assert torch.equal(buffer[: 3 * MIB].cpu(), content[MIB : 4 * MIB])
            file.read(buffer[:MIB], 0).wait()
            assert torch.equal(buffer[:MIB].cpu(), content[:MIB])

    def test_a_failed_write_has_ended_when_it_raises(self, make, tmp_path):
        # Two requests at a time: the second one fails at once, while the first one takes long.
        limit = LARGE_BYTES // 2
        backend = make(threads=2, task_size_bytes=limit)
        path = io_backends.create_file(tmp_path / "bucket.bin", LARGE_BYTES)
        file = backend.open(path)
        content = noise(LARGE_BYTES)
        with self.buffer(backend, LARGE_BYTES) as buffer:
            put(buffer, content)
            with file_size_limit(limit):
                transfer = file.write(buffer, 0)
                with pytest.raises(IoError) as caught:
                    transfer.wait()
                # Nobody reads the buffer any more, not even what is to be written last.
                put(buffer[limit - MIB : limit], torch.zeros(MIB, dtype=torch.uint8))
                with pytest.raises(IoError) as again:
                    transfer.wait()
            assert str(caught.value) == str(again.value)
            assert (caught.value.operation, caught.value.wanted_bytes) == ("write", LARGE_BYTES)
            for word in (path, LARGE_BYTES, self.failure_words):
                assert str(word) in str(caught.value)
            assert torch.equal(bytes_of(path)[:limit], content[:limit])
            put(buffer, content)
            file.write(buffer, 0).wait()
        assert torch.equal(bytes_of(path), content)

    def test_waiting_again_changes_nothing(self, backend, tmp_path):
        file = backend.open(io_backends.create_file(tmp_path / "bucket.bin", MIB))
        with self.buffer(backend, MIB) as buffer:
            transfer = file.write(buffer, 0)
            for _ in range(3):
                transfer.wait(timeout_s=600)
                assert transfer.done()
            transfer.wait(timeout_s=0)

    def test_a_time_limit_names_the_file_and_the_transfer_goes_on(self, make, tmp_path):
        backend = make(threads=1)
        file = backend.open(io_backends.create_file(tmp_path / "slow.bin", LARGE_BYTES))
        content = noise(LARGE_BYTES)
        with self.buffer(backend, LARGE_BYTES) as buffer:
            put(buffer, content)
            *_, last = in_flight(file, buffer)
            with pytest.raises(IoTimeoutError, match=r"slow\.bin .*in 0\.001 s"):
                last.wait(timeout_s=0.001)
            assert not last.done()
            last.wait()
            last.wait(timeout_s=0)
        assert torch.equal(bytes_of(tmp_path / "slow.bin"), content)

    # Lifetimes

    def test_a_file_with_transfers_in_flight_is_not_closed(self, make, tmp_path):
        backend = make(threads=1)
        file = backend.open(io_backends.create_file(tmp_path / "bucket.bin", LARGE_BYTES))
        with self.buffer(backend, LARGE_BYTES) as buffer:
            transfers = in_flight(file, buffer)
            with pytest.raises(RuntimeError, match=r"bucket\.bin cannot be closed with \d+ trans"):
                file.close()
            for transfer in transfers:
                transfer.wait()
            file.close()
            file.close()
            with pytest.raises(ClosedError, match=r"bucket\.bin"):
                file.read(buffer, 0)

    def test_closing_the_backend_waits_for_what_is_in_flight(self, make, tmp_path):
        backend = make(threads=1)
        path = io_backends.create_file(tmp_path / "bucket.bin", LARGE_BYTES)
        file = backend.open(path)
        with self.buffer(backend, LARGE_BYTES) as buffer:
            put(buffer, noise(LARGE_BYTES))
            descriptor = file.fileno()
            transfers = in_flight(file, buffer)
            if self.is_registered:
                transfers[-1].wait()
                backend.deregister(buffer)
            backend.close()
            assert all(transfer.done() for transfer in transfers)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        assert torch.equal(bytes_of(path), noise(LARGE_BYTES))
        backend.close()
        file.close()
        with pytest.raises(ClosedError, match="closed"):
            backend.open(path)
        expected = {f"{self.way}.read": 0, f"{self.way}.write": 12 * LARGE_BYTES}
        assert backend.counters() == expected

    @pytest.mark.parametrize("closes", ["file", "backend"])
    def test_a_failure_that_nobody_waited_for_is_raised_by_close(self, backend, tmp_path, closes):
        path = io_backends.create_file(tmp_path / "bucket.bin", 2 * MIB)
        file = backend.open(path)
        with self.buffer(backend, 2 * MIB) as buffer:
            with file_size_limit(MIB):
                transfer = file.write(buffer, 0)
                while not transfer.done():
                    pass
            descriptor = file.fileno()
            closed = file if closes == "file" else backend
            with pytest.raises(IoError, match=rf"bucket\.bin.*{self.failure_words}"):
                closed.close()
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)
            closed.close()
            with pytest.raises(IoError, match=rf"bucket\.bin.*{self.failure_words}"):
                transfer.wait()

    def test_dropped_transfers_keep_what_they_need(self, make, tmp_path):
        backend = make(threads=1)
        paths = [io_backends.create_file(tmp_path / f"{i}.bin", LARGE_BYTES) for i in range(6)]

        def start_and_drop() -> None:
            for seed, path in enumerate(paths):
                buffer = io_backends.allocate(backend.device, LARGE_BYTES)
                backend.open(path).write(put(buffer, noise(LARGE_BYTES, seed)), 0)

        start_and_drop()
        gc.collect()
        backend.close()
        for seed, path in enumerate(paths):
            assert torch.equal(bytes_of(path), noise(LARGE_BYTES, seed))

    def test_a_dropped_file_gives_its_descriptors_back(self, backend, tmp_path):
        path = io_backends.create_file(tmp_path / "bucket.bin", MIB)
        with self.buffer(backend, MIB) as buffer:
            file = backend.open(path)
            file.write(buffer, 0).wait()
            descriptor = file.fileno()
            del file
            gc.collect()
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)

    # Processes

    def test_a_forked_child_is_refused_and_ends(self, tmp_path):
        done = run_process(self.kind, "fork", tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""

    def test_the_interpreter_exits_with_nothing_lost(self, tmp_path):
        done = run_process(self.kind, "exit", tmp_path)
        assert done.returncode == 0, done.stderr
        assert "0.bin" in done.stderr
        assert self.failure_words in done.stderr
        for i in range(8):
            written = bytes_of(tmp_path / f"{i}.bin")[: io_process.SMALL_LIMIT_BYTES]
            assert torch.equal(written, torch.ones_like(written))
        assert not (tmp_path / "cufile.log").exists()

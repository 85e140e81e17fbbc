"""What somebody else, or a bad disk, does to the bucket files between two steps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.errors import CorruptBucketError, StepFailedError, StoreChangedError
from tests.support.engines import (
    SMALL_BUCKET_BYTES,
    StreamedOptimizer,
    adamw,
    first_values,
    grads_of,
    leftovers,
    open_files,
    pair,
    streamed,
)

pytestmark = pytest.mark.faults

# Five buckets of 1024 elements, one shard across three of them.
SIZES = (600, 3500, 800)
FILE_BYTES = 4 * 4096
BUCKET = 2
# Bucket 2 is read in the third step: the one slot still holds bucket 0.
OPTIONS: dict[str, Any] = {"sizes": SIZES, "slots": 1}


class Damage:
    """One way to damage bucket 2, and what has to be said about it."""

    def __init__(
        self, do: Callable[[StreamedOptimizer], None], kind: type[Exception], words: str
    ) -> None:
        self.do, self.kind, self.words = do, kind, words


def path_of(run: StreamedOptimizer) -> Path:
    return run.paths[BUCKET]


def flip(offset: int, bit: int = 3) -> Callable[[StreamedOptimizer], None]:
    def do(run: StreamedOptimizer) -> None:
        with open(path_of(run), "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1 << bit]))

    return do


def overwrite(content: bytes, offset: int = 0) -> Callable[[StreamedOptimizer], None]:
    def do(run: StreamedOptimizer) -> None:
        with open(path_of(run), "r+b") as file:
            file.seek(offset)
            file.write(content)

    return do


def put_neighbour(run: StreamedOptimizer) -> None:
    overwrite(run.paths[BUCKET + 1].read_bytes())(run)


def replace_by_copy(run: StreamedOptimizer) -> None:
    copy = path_of(run).with_suffix(".copy")
    shutil.copy(path_of(run), copy)
    copy.rename(path_of(run))


def replace_directory_by_copy(run: StreamedOptimizer) -> None:
    directory = run.store.directories[0]
    directory.rename(directory.with_name("moved"))
    shutil.copytree(directory.with_name("moved"), directory)
    shutil.rmtree(directory.with_name("moved"))


def replace_directory_by_empty(run: StreamedOptimizer) -> None:
    directory = run.store.directories[0]
    shutil.rmtree(directory)
    directory.mkdir()


MISSING = r"bucket00002\.bin cannot be found any more \(No such file or directory\): wanted a file"
CHECKSUM = r"is not what was written: checksum of plane '{}': wanted -?\d+, got -?\d+"
DAMAGES = {
    "truncated": Damage(
        lambda run: os.truncate(path_of(run), 8192),
        StoreChangedError,
        r"bucket00002\.bin was resized: wanted 16384 bytes, got 8192",
    ),
    "emptied": Damage(
        lambda run: os.truncate(path_of(run), 0), StoreChangedError, "wanted 16384 bytes, got 0"
    ),
    "extended": Damage(
        lambda run: os.truncate(path_of(run), FILE_BYTES + 1),
        StoreChangedError,
        "wanted 16384 bytes, got 16385",
    ),
    "removed": Damage(lambda run: path_of(run).unlink(), StoreChangedError, MISSING),
    "replaced": Damage(
        replace_by_copy,
        StoreChangedError,
        r"bucket00002\.bin was replaced: wanted inode \d+, got inode \d+",
    ),
    "directory removed": Damage(
        # The first bucket of the step that is looked for, wherever it is.
        lambda run: shutil.rmtree(run.store.directories[0]),
        StoreChangedError,
        MISSING.replace("2", r"\d"),
    ),
    "root removed": Damage(
        lambda run: shutil.rmtree(run.store.directories[0].parents[1]),
        StoreChangedError,
        MISSING.replace("2", r"\d"),
    ),
    "directory replaced by a copy": Damage(
        replace_directory_by_copy, StoreChangedError, r"was replaced: wanted inode \d+, got inode"
    ),
    "directory replaced by an empty one": Damage(
        replace_directory_by_empty, StoreChangedError, MISSING.replace("2", r"\d")
    ),
    **{
        f"bit of {plane}, byte {offset}": Damage(
            flip(4096 * number + offset), CorruptBucketError, CHECKSUM.format(plane)
        )
        for number, plane in enumerate(("main", "exp_avg", "exp_avg_sq"))
        for offset in (0, 4095)
    },
    "bit of the magic number": Damage(
        flip(3 * 4096), CorruptBucketError, r"it has no footer \(wanted the magic number"
    ),
    "bit of the step": Damage(
        flip(3 * 4096 + 7 * 8), CorruptBucketError, r"step: wanted 2, got 10"
    ),
    "bit of a stored checksum": Damage(
        flip(3 * 4096 + 17 * 8), CorruptBucketError, CHECKSUM.format("main")
    ),
    "bit of the footer's own padding": Damage(
        flip(3 * 4096 + 2000), CorruptBucketError, r"word 250: wanted 0, got 8"
    ),
    "bit of the footer's checksum": Damage(
        flip(FILE_BYTES - 1), CorruptBucketError, "footer checksum is wrong"
    ),
    "one page of zeros": Damage(
        overwrite(bytes(4096), 4096), CorruptBucketError, CHECKSUM.format("exp_avg")
    ),
    "all zeros": Damage(overwrite(bytes(FILE_BYTES)), CorruptBucketError, "it has no footer"),
    "another bucket": Damage(put_neighbour, CorruptBucketError, "bucket index: wanted 2, got 3"),
}


def step(run: StreamedOptimizer, number: int) -> None:
    run.step(grads_of(SIZES, number))


def assert_healthy(directory: Path) -> None:
    """The process can go on: a new engine in the same place works."""
    directory.mkdir(exist_ok=True)
    with pair(directory, adamw, **OPTIONS) as both:
        assert len(both.engine.layout.buckets) == 5
        for number in range(3):
            both.step(number)
        both.check()


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_between_steps_stops_the_next_one(tmp_path, kind, name):
    damage, root = DAMAGES[name], tmp_path / "root"
    root.mkdir()
    before = open_files()
    with streamed(root, kind=kind, **OPTIONS) as run:
        step(run, 0)
        step(run, 1)
        run.engine.drain()
        damage.do(run)
        with pytest.raises(StepFailedError) as caught:
            step(run, 2)
        cause = caught.value.__cause__
        assert type(cause) is damage.kind
        with pytest.raises(damage.kind, match=damage.words):
            raise cause
        text = str(caught.value)
        assert text.startswith("optimizer step 3 failed: ")
        assert str(cause) in text
        assert "hold step 2 or earlier. The state in" in text
        assert f"The state in {root}/rank00000/opt0 is not usable" in text

        # It stays that way, and says so again.
        for use in (lambda: step(run, 3), run.engine.drain, run.engine.read_state):
            with pytest.raises(StepFailedError, match="optimizer step 3 failed"):
                use()
        run.engine.close()
    assert open_files() == before
    if name == "directory replaced by a copy":
        # That is somebody's copy: it is not ours to remove.
        assert len(leftovers(root)) == 9
        shutil.rmtree(root / "rank00000")
    elif name == "directory replaced by an empty one":
        assert leftovers(root) == ["rank00000", "rank00000/opt0"]
    else:
        assert leftovers(root) in ([], ["rank00000"])  # no file, at any rate
    assert_healthy(root)


def test_every_damage_is_found_by_a_reader_too(tmp_path):
    """Not only a step looks at what it reads."""
    for name in ("bit of exp_avg, byte 0", "removed", "bit of the step"):
        with streamed(tmp_path, **OPTIONS) as run:
            step(run, 0)
            step(run, 1)
            run.engine.drain()
            DAMAGES[name].do(run)
            with pytest.raises(DAMAGES[name].kind, match=DAMAGES[name].words):
                run.engine.read_state()
            with (
                pytest.raises(DAMAGES[name].kind, match=DAMAGES[name].words),
                run.engine.materialized([run.mains[1]]),
            ):
                pass


def test_a_bit_that_nobody_reads_does_no_harm(tmp_path):
    """The main is rebuilt from the model after a reload, the rest of the bucket is compared."""
    with pair(tmp_path, adamw, **OPTIONS) as both:
        both.step(0)
        both.step(1)
        both.engine.drain()
        flip(5)(both.streamed)
        both.engine.take_mains_from_model()
        for main, model in zip(both.resident.mains, both.resident.models, strict=True):
            main.copy_(model)
        both.step(2)
        both.check()


def test_an_older_bucket_put_back_in_place_is_found(tmp_path, kind):
    """The same file, everything in it consistent, only one step old."""
    with streamed(tmp_path, kind=kind, **OPTIONS) as run:
        step(run, 0)
        run.engine.drain()
        old = path_of(run).read_bytes()
        inode = path_of(run).stat().st_ino
        step(run, 1)
        run.engine.drain()
        overwrite(old)(run)
        assert path_of(run).stat().st_ino == inode
        with pytest.raises(StepFailedError, match=r"step: wanted 2, got 1") as caught:
            step(run, 2)
        assert isinstance(caught.value.__cause__, CorruptBucketError)


def test_the_bucket_of_another_run_is_found(tmp_path):
    """The same place and step, another layout."""
    with streamed(tmp_path, sizes=(600, 3500, 801), slots=1) as run:
        for number in range(2):
            run.step(grads_of((600, 3500, 801), number))
        run.engine.drain()
        other = path_of(run).read_bytes()
    with streamed(tmp_path, **OPTIONS) as run:
        for number in range(2):
            step(run, number)
        run.engine.drain()
        overwrite(other)(run)
        with pytest.raises(StepFailedError, match="layout id: wanted"):
            step(run, 2)


class ShortMomentum(torch.optim.Optimizer):
    """Keeps its momentum in bf16, of which 1024 values fill half a page."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param, dtype=torch.bfloat16)
                state["momentum"].mul_(0.5).add_(param.grad.to(torch.bfloat16))
                param.sub_(state["momentum"].float())


def test_a_bit_in_the_padding_of_a_plane_is_found(tmp_path, kind):
    with streamed(tmp_path, ShortMomentum, kind=kind, bucket_size=6 * 1024, **OPTIONS) as run:
        step(run, 0)
        step(run, 1)
        run.engine.drain()
        (main, momentum) = run.layout.buckets[BUCKET].planes
        assert (momentum.nbytes, main.nbytes, run.layout.bucket_numel) == (4096, 4096, 1024)
        flip(momentum.offset + 3000)(run)
        with pytest.raises(StepFailedError, match="checksum of plane 'momentum'"):
            step(run, 2)


# A slot that still holds the bucket saves the read, but not the look at the file.


@pytest.mark.parametrize("name", ["removed", "replaced", "truncated"])
def test_a_file_that_is_gone_is_noticed_before_it_is_written(tmp_path, name):
    with streamed(tmp_path, sizes=SIZES, slots=64) as run:
        step(run, 0)
        run.engine.drain()
        DAMAGES[name].do(run)
        with pytest.raises(StepFailedError, match=DAMAGES[name].words) as caught:
            step(run, 1)
        assert run.engine.last_stats.read_bytes == 0
        text = str(caught.value)
        # Buckets 0 and 1 come before it, or 3 and 4 do.
        assert "The last write of bucket 2 did not complete. 2 of 5 buckets hold step 2." in text


def test_a_bit_under_a_slot_is_overwritten(tmp_path):
    with pair(tmp_path, adamw, SIZES, slots=64) as both:
        both.step(0)
        both.engine.drain()
        flip(0)(both.streamed)
        both.step(1)
        both.step(2)
        both.check()


def test_what_was_computed_from_bad_bytes_never_reaches_the_model(tmp_path):
    """On the host the bytes are compared before they are used."""
    with streamed(tmp_path, **OPTIONS) as run:
        step(run, 0)
        step(run, 1)
        run.engine.drain()
        before = [model.clone() for model in run.models]
        flip(0)(run)
        with pytest.raises(StepFailedError):
            step(run, 2)
        pieces = run.layout.buckets[BUCKET].pieces
        for piece in pieces:
            where = slice(piece.shard_offset, piece.shard_offset + piece.numel)
            assert torch.equal(run.models[piece.shard][where], before[piece.shard][where])


def test_the_sizes_make_five_buckets(tmp_path):
    with streamed(tmp_path, partial(adamw), sizes=SIZES, bucket_size=SMALL_BUCKET_BYTES) as run:
        assert [bucket.file_bytes for bucket in run.layout.buckets] == [FILE_BYTES] * 5
        assert len(first_values(SIZES)) == 3

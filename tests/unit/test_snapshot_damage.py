"""Not one bit of a snapshot may change without `verify` and `restore` saying so."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gds_optimizer.errors import SnapshotError, StepFailedError
from gds_optimizer.jsonvalues import seal, unseal
from gds_optimizer.snapshot_read import all_parts, verify
from gds_optimizer.snapshots import restore_snapshot, take_snapshot
from tests.support.engines import SMALL_BUCKET_BYTES, StreamedOptimizer, grads_of
from tests.support.forms import BF16, INT8, REMAINDER, name_of
from tests.support.snapshots import built, compare, everything, flip, train

SAME, OTHER = SMALL_BUCKET_BYTES, 2 * SMALL_BUCKET_BYTES


def step_all(optimizer: StreamedOptimizer, step: int) -> None:
    optimizer.step(grads_of([model.numel() for model in optimizer.models], step))


class Case:
    """A snapshot of step 3, one of step 2 of the same run, and engines to restore it into."""

    def __init__(self, directory: Path, form: Mapping[str, str] | None = None) -> None:
        (directory / "state").mkdir(parents=True)
        self.form = form
        with built(directory / "state", moments=form) as optimizer:
            for step in range(2):
                step_all(optimizer, step)
            self.earlier = directory / "snapshots" / "2"
            take_snapshot({"opt0": optimizer.engine}, self.earlier)
            step_all(optimizer, 2)
            self.path = directory / "snapshots" / "3"
            take_snapshot({"opt0": optimizer.engine}, self.path)
            self.taken = everything(optimizer)
        self.part = self.path / "rank00000" / "opt0"
        self.earlier_part = self.earlier / "rank00000" / "opt0"
        self.layout = all_parts(self.path)[0].layout
        self.directory = directory

    def restore(self, bucket_size: int) -> dict[str, Any]:
        options = {"bucket_size": bucket_size, "moments": self.form}
        with built(self.directory / "state", **options) as optimizer:
            restore_snapshot({"opt0": optimizer.engine}, self.path)
            return everything(optimizer)

    def check_whole(self) -> None:
        assert verify(self.path) == []
        compare(self.taken, self.restore(SAME))

    def check_noticed(self, name: str) -> None:
        """`verify` and a restore into the same and into another layout say so, and say what."""
        damages = self.damages()
        assert len(damages) == 1, damages
        assert name in damages[0], damages
        for bucket_size in (SAME, OTHER):
            with pytest.raises(SnapshotError) as failure:
                self.restore(bucket_size)
            assert name in str(failure.value)

    def damages(self) -> list[str]:
        try:
            return verify(self.path)
        except SnapshotError as error:
            return [str(error)]


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return Case(tmp_path_factory.mktemp("damage") / "case")


@pytest.fixture
def intact(case: Case) -> Iterator[Case]:
    """The case, put back as it was."""
    kept = case.directory / "kept"
    shutil.copytree(case.path, kept)
    yield case
    shutil.rmtree(case.path)
    kept.rename(case.path)


def test_nothing_is_found_where_nothing_is(case):
    case.check_whole()


@pytest.mark.thinned(every=3)
@pytest.mark.parametrize("form", [REMAINDER, INT8, BF16 | REMAINDER, INT8 | REMAINDER], ids=name_of)
def test_a_bit_in_every_page_of_every_file_of_other_forms(tmp_path, form):
    """Encoded planes, remainders and the halves that go with them: verified, and not restored."""
    case = Case(tmp_path / "case", form)
    case.check_whole()
    random.seed(0)
    files = [path for path in case.path.rglob("*") if path.is_file()]
    assert (case.part / "upper.bin" in files) == ("main" in form)
    for path in files:
        size, stem = path.stat().st_size, path.stem.replace("bucket0000", "bucket ")
        name = path.name if not stem.startswith("bucket ") else f"{stem} in"
        pages = [min(page + random.randrange(4096), size - 1) for page in range(0, size, 4096)]
        for offset in pages:
            bit = random.randrange(8)
            flip(path, offset, bit)
            (damage,) = case.damages()
            assert path.name in damage, (offset, damage)
            flip(path, offset, bit)
        if path.name in ("upper.bin", "bucket00004.bin", "resident.bin"):
            offset = random.choice(pages)
            flip(path, offset)
            case.check_noticed(name)
            flip(path, offset)
    case.check_whole()


def pages_of(case: Case, index: int) -> list[int]:
    """A byte offset in each page of a bucket's file."""
    random.seed(index)
    size = (case.part / f"bucket{index:05d}.bin").stat().st_size
    return [page + random.randrange(4096) for page in range(0, size, 4096)]


def test_a_bit_in_every_page_of_every_bucket_is_verified(case):
    """Planes, gaps between shards, padding, and the footer's own words and zeros."""
    for bucket in case.layout.buckets:
        path = case.part / f"bucket{bucket.index:05d}.bin"
        for offset in pages_of(case, bucket.index):
            bit = random.randrange(8)
            flip(path, offset, bit)
            (damage,) = verify(case.path)
            assert f"bucket {bucket.index} in {path}" in damage
            if offset < bucket.footer_offset:
                plane = next(p for p in bucket.planes if p.offset <= offset < p.offset + p.nbytes)
                assert f"plane '{plane.name}'" in damage
            flip(path, offset, bit)
    assert verify(case.path) == []


@pytest.mark.parametrize("bucket_size", [SAME, OTHER])
def test_a_bit_in_every_plane_is_found_by_restore(case, bucket_size):
    """In every third bucket; and the engine takes nothing but another restore after that."""
    state = case.directory / "state"
    with built(state, bucket_size=bucket_size) as optimizer:
        for bucket in case.layout.buckets[::3]:
            path = case.part / f"bucket{bucket.index:05d}.bin"
            offsets = [plane.offset + 8 * bucket.index for plane in bucket.planes]
            for offset in [*offsets, bucket.footer_offset + 50, bucket.footer_offset + 3000]:
                flip(path, offset, 5)
                with pytest.raises(SnapshotError, match=f"bucket {bucket.index} in"):
                    restore_snapshot({"opt0": optimizer.engine}, case.path)
                flip(path, offset, 5)
        restore_snapshot({"opt0": optimizer.engine}, case.path)
        compare(case.taken, everything(optimizer))


def test_after_a_failed_restore_nothing_else_is_accepted(case):
    """Data that turned out damaged is in the files by then."""
    path = case.part / "bucket00009.bin"
    with built(case.directory / "state") as optimizer:
        flip(path, 10)
        with pytest.raises(SnapshotError, match="bucket 9 in"):
            restore_snapshot({"opt0": optimizer.engine}, case.path)
        flip(path, 10)
        with pytest.raises(StepFailedError, match="did not finish"):
            train(optimizer, 0, 1)
        with pytest.raises(StepFailedError, match="did not finish"):
            take_snapshot({"opt0": optimizer.engine}, case.directory / "other")
        restore_snapshot({"opt0": optimizer.engine}, case.path)
        compare(case.taken, everything(optimizer))


def test_a_footer_s_damage_is_found_before_anything_is_given_up(case):
    path = case.part / "bucket00009.bin"
    with built(case.directory / "state") as optimizer:
        train(optimizer, 0, 1)
        before = everything(optimizer)
        flip(path, path.stat().st_size - 4096 + 60)
        with pytest.raises(SnapshotError, match="bucket 9 in"):
            restore_snapshot({"opt0": optimizer.engine}, case.path)
        flip(path, path.stat().st_size - 4096 + 60)
        compare(before, everything(optimizer))
        train(optimizer, 1, 2)


@pytest.mark.parametrize("name", ["snapshot.json", "rank00000/opt0/manifest.json"])
def test_every_byte_of_the_descriptions(case, name):
    """Each byte in turn, some bit of it: a digit of a learning rate, white space, the seal."""
    path = case.path / name
    content = path.read_bytes()
    random.seed(0)
    for offset in range(len(content)):
        changed = bytearray(content)
        changed[offset] ^= 1 << random.randrange(8)
        with pytest.raises(ValueError, match="SHA-256"):
            unseal(bytes(changed))
    for offset in random.sample(range(len(content)), 40):
        flip(path, offset)
        (damage,) = case.damages()
        assert name in damage
        flip(path, offset)
    for offset in random.sample(range(len(content)), 3):
        flip(path, offset)
        case.check_noticed(name)
        flip(path, offset)
    assert verify(case.path) == []


def test_every_byte_of_what_has_no_bucket(case):
    path = case.part / "resident.bin"
    size = path.stat().st_size
    assert size > 4000
    for offset in range(0, size, 37):
        flip(path, offset, offset % 8)
        (damage,) = verify(case.path)
        assert "resident.bin" in damage
        assert "main of p" in damage
        flip(path, offset, offset % 8)
    flip(path, size - 1)
    case.check_noticed("resident.bin")
    flip(path, size - 1)
    assert verify(case.path) == []


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5000, -4096, -1, 4097])
@pytest.mark.parametrize("index", [0, 9])
def test_files_that_were_cut_or_extended(intact, index, nbytes):
    path = intact.part / f"bucket{index:05d}.bin"
    size = path.stat().st_size
    shutil.copy(path, path.with_name("other"))
    os.replace(path.with_name("other"), path)  # the original stays as it is
    os.truncate(path, size + nbytes if nbytes in (1, 4097, -1, -4096) else nbytes)
    intact.check_noticed(f"bucket {index} in")


@pytest.mark.parametrize(
    "name", ["bucket00000.bin", "bucket00009.bin", "resident.bin", "manifest.json"]
)
def test_missing_files(intact, name):
    (intact.part / name).unlink()
    expected = f"bucket {int(name[6:11])} in" if name.startswith("bucket") else name
    intact.check_noticed(expected)


def test_a_missing_part_or_rank(intact):
    shutil.rmtree(intact.part)
    intact.check_noticed("rank00000/opt0/manifest.json")
    shutil.rmtree(intact.part.parent)
    intact.check_noticed("rank00000/opt0/manifest.json")


def test_no_declaration(intact):
    (intact.path / "snapshot.json").unlink()
    intact.check_noticed("snapshot.json, which is written last, is missing")
    shutil.rmtree(intact.path)
    intact.check_noticed("it is not a directory")
    intact.path.write_text("")
    intact.check_noticed("it is not a directory")
    intact.path.unlink()
    intact.path.mkdir()


@pytest.mark.parametrize("name", ["resident.bin", "manifest.json"])
def test_files_cut_short(intact, name):
    path = intact.part / name
    for nbytes in (path.stat().st_size - 1, 100, 0):
        os.truncate(path, nbytes)
        intact.check_noticed(name)


def test_what_has_no_bucket_is_longer(intact):
    with open(intact.part / "resident.bin", "ab") as file:
        file.write(b"\0" * 8)
    (damage,) = verify(intact.path)
    assert "resident.bin is damaged: it is longer" in damage
    with pytest.raises(SnapshotError, match="longer"):
        intact.restore(SAME)


def test_swapped_buckets(intact):
    one, two = (intact.part / f"bucket{index:05d}.bin" for index in (9, 10))
    assert one.stat().st_size == two.stat().st_size
    one.rename(one.with_name("other"))
    two.rename(one)
    one.with_name("other").rename(two)
    damages = verify(intact.path)
    assert len(damages) == 2
    for index, damage in zip((9, 10), damages, strict=True):
        assert f"bucket {index} in" in damage
        assert "bucket index: wanted" in damage
    for bucket_size in (SAME, OTHER):
        with pytest.raises(SnapshotError, match="bucket 9 in"):
            intact.restore(bucket_size)


def test_a_bucket_of_another_step(intact):
    """Whole in itself, and of the same run: an old link."""
    path = intact.part / "bucket00009.bin"
    path.unlink()
    os.link(intact.earlier_part / path.name, path)
    intact.check_noticed("bucket 9 in")
    assert "says step 3, the file step 2" in verify(intact.path)[0]


def test_a_bucket_of_another_run(intact, tmp_path):
    """The same layout, index and step."""
    with built(tmp_path) as optimizer:
        for step in (7, 8, 9):
            step_all(optimizer, step)
        optimizer.engine.drain()
        shutil.copy(optimizer.paths[9], intact.part / "bucket00009.bin")
    intact.check_noticed("bucket 9 in")
    assert "or their checksums differ" in verify(intact.path)[0]


def test_a_manifest_of_another_snapshot(intact):
    """As whole as its own, and sealed."""
    shutil.copy(intact.earlier_part / "manifest.json", intact.part / "manifest.json")
    intact.check_noticed("is not the one that was written: it is of another snapshot")


def test_a_declaration_of_another_snapshot(intact):
    shutil.copy(intact.earlier / "snapshot.json", intact.path / "snapshot.json")
    intact.check_noticed("manifest.json is not the one that was written")


def test_a_version_of_the_future(intact):
    for path in (intact.path / "snapshot.json", intact.part / "manifest.json"):
        content = path.read_bytes()
        data = unseal(content)
        del data["version"]
        path.write_bytes(seal({**data, "version": 99}))
        intact.check_noticed(f"{path} has version 99, wanted 1: it was written by another")
        path.write_bytes(seal({**data, "format": "theirs"}))
        intact.check_noticed(f"{path} does not describe a snapshot")
        path.write_text(json.dumps({"format": "theirs"}))
        intact.check_noticed(f"{path} is damaged or none of this package's")
        path.write_bytes(content)
    assert verify(intact.path) == []


def test_all_damages_are_listed(intact):
    flip(intact.part / "bucket00003.bin", 20)
    flip(intact.part / "bucket00004.bin", 4500)
    (intact.part / "bucket00005.bin").unlink()
    flip(intact.part / "resident.bin", 20)
    damages = verify(intact.path)
    assert len(damages) == 4
    for name, damage in zip(
        ("resident.bin", "bucket 3", "bucket 4", "bucket 5"), damages, strict=True
    ):
        assert name in damage


def test_progress_covers_every_byte(intact):
    """Also those of files that are damaged or gone."""
    total_bytes = all_parts(intact.path)[0].nbytes
    for damage in (
        lambda: None,
        lambda: flip(intact.part / "bucket00003.bin", 20),
        (intact.part / "bucket00004.bin").unlink,
    ):
        damage()
        seen: list[int] = []
        verify(intact.path, seen.append)
        assert sum(seen) == total_bytes

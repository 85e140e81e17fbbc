"""Converting snapshots to another storage form: the same as restoring into a run of that form."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer import room
from gds_optimizer.cli import main as cli_main
from gds_optimizer.codecs import get_codec
from gds_optimizer.errors import (
    ConfigError,
    CorruptBucketError,
    NoSpaceError,
    SnapshotError,
    UnsupportedError,
)
from gds_optimizer.jsonvalues import seal, seal_of, unseal
from gds_optimizer.layout import PlaneSpec
from gds_optimizer.snapshot_convert import convert, plan_conversion
from gds_optimizer.snapshot_read import all_parts, describe, verify
from gds_optimizer.snapshots import clean_incomplete, restore_snapshot, take_snapshot
from gds_optimizer.storage_form import StorageForm
from tests.support.engines import same_bits
from tests.support.forms import special_values
from tests.support.killing import Countdown, killed_at
from tests.support.snapshots import (
    all_well,
    built,
    compare,
    everything,
    flip,
    hashes,
    inodes,
    restore,
    root,
    take,
    train,
    world,
)

FORMS: dict[str, dict[str, str]] = {
    "fp32": {"moment_dtype": "fp32"},
    "bf16": {"moment_dtype": "bf16", "moment_rounding": "nearest"},
    "bf16-sr": {"moment_dtype": "bf16", "moment_rounding": "stochastic"},
    "int8": {"moment_dtype": "int8", "moment_rounding": "nearest"},
    "int8-sr": {"moment_dtype": "int8", "moment_rounding": "stochastic"},
}
REMAINDERS = {f"{name}-remainder": {**form, "main": "remainder"} for name, form in FORMS.items()}
ALL_FORMS = FORMS | REMAINDERS
PAIRS = [
    *itertools.permutations(FORMS, 2),
    # One where only mains change, and ones where the place of their tie bits does.
    ("fp32", "fp32-remainder"),
    ("fp32-remainder", "fp32"),
    ("bf16-sr-remainder", "bf16-sr"),
    ("int8-sr", "int8-sr-remainder"),
    ("int8-sr-remainder", "int8-sr"),
    ("fp32-remainder", "bf16-sr-remainder"),
    ("fp32-remainder", "int8-sr-remainder"),
    ("int8-sr-remainder", "fp32-remainder"),
    ("int8-remainder", "bf16"),
    ("fp32", "int8-sr-remainder"),
]
STEPS = 6
"""Enough for the parameter that gets its first gradient late."""


def converted(source: Path, target: Path, form: Mapping[str, str]) -> Path:
    convert(plan_conversion(source, target, StorageForm(**form)))
    return target


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A snapshot in each form, of many small buckets and with buckets that no step has changed."""
    found = {}
    for name in dict.fromkeys(before for before, _ in PAIRS):
        directory = tmp_path_factory.mktemp(name)
        with built(root(directory), moments=ALL_FORMS[name]) as optimizer:
            train(optimizer, 0, STEPS)
            if name == "fp32" or "remainder" in name:
                # Ties and all that may go wrong in rounding. Their parameter gets no more than
                # the next step does.
                main = optimizer.mains[8]
                optimizer.engine.write_mains({id(main): special_values(main.numel(), 1)})
            found[name] = take(optimizer, directory / "taken")
    return found


@pytest.fixture
def source(taken: dict[str, Path]) -> Path:
    return taken["fp32"]


# ---------------------------------------------------------------------- what comes out


@pytest.mark.thinned
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_it_is_what_a_run_of_that_form_would_have(taken, tmp_path, before, after):
    source, form = taken[before], ALL_FORMS[after]
    files = hashes(source)
    target = converted(source, tmp_path / "converted", {"main": "fp32", **form})
    assert hashes(source) == files
    assert verify(target) == []
    with (
        built(root(tmp_path, "direct"), moments=form) as wanted,
        built(root(tmp_path), moments=form) as found,
    ):
        assert restore(wanted, source) == restore(found, target) == STEPS
        compare(everything(wanted), everything(found))
        # It fits as it is: nothing was copied.
        (part,) = all_parts(target)
        own = [part.file(bucket.index) for bucket in part.layout.buckets]
        assert inodes(own) == inodes(found.engine.store.paths)
        for optimizer in (wanted, found):
            train(optimizer, STEPS, STEPS + 2)
        compare(everything(wanted), everything(found))
    assert verify(target) == []


def test_shards_that_move_across_buckets(tmp_path):
    """In 8 bits, many small shards are spread over more buckets than they were."""
    sizes = [65] * 60 + [3000, 1]
    form = FORMS["int8"]
    with built(root(tmp_path), sizes=sizes, groups=None) as optimizer:
        train(optimizer, 0, 2)
        wanted = everything(optimizer)
        source = take(optimizer, tmp_path / "taken")
    target = converted(source, tmp_path / "converted", form)
    before, after = (all_parts(each)[0].layout for each in (source, target))
    assert len(after.buckets) >= len(before.buckets) + 4
    back = converted(target, tmp_path / "back", FORMS["fp32"])
    assert all_parts(back)[0].layout == before
    with built(root(tmp_path, "other"), sizes=sizes, groups=None, moments=form) as optimizer:
        restore(optimizer, target)
        kept = everything(optimizer)
    with built(root(tmp_path, "third"), sizes=sizes, groups=None) as optimizer:
        restore(optimizer, back)
        compare(kept, everything(optimizer))
    mains = [key for key in wanted if key.startswith("main of")]
    assert mains
    compare({key: wanted[key] for key in mains}, {key: kept[key] for key in mains})


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["fp32", "bf16-sr", "int8-sr"])
@pytest.mark.parametrize("first", ["fp32", "remainder"])
def test_mains_there_and_back(tmp_path, name, first):
    """Lossless both ways: the planes' very bytes, and a run that goes on as one never converted."""
    second = {"fp32": "remainder", "remainder": "fp32"}[first]
    form = {**FORMS[name], "main": first}
    with built(root(tmp_path), moments=form) as never_converted:
        train(never_converted, 0, STEPS)
        main = never_converted.mains[8]
        never_converted.engine.write_mains({id(main): special_values(main.numel(), 2)})
        source = take(never_converted, tmp_path / "taken")
        there = converted(source, tmp_path / "there", {"main": second})
        back = converted(there, tmp_path / "back", {"main": first})
        for path in (there, back):
            assert verify(path) == []
        assert {p.name for p in there.rglob("*")} ^ {p.name for p in back.rglob("*")} == {
            "upper.bin"
        }
        restore(never_converted, source)  # the model has the changed mains, as after converting
        wanted = [everything(never_converted)]
        train(never_converted, STEPS, STEPS + 3)
        wanted.append(everything(never_converted))
    (old,), (new,) = all_parts(source), all_parts(back)
    assert old.layout == new.layout
    for bucket in old.layout.buckets:
        contents = [part.file(bucket.index).read_bytes() for part in (old, new)]
        for plane in bucket.planes:
            own = slice(plane.offset, plane.offset + plane.nbytes)
            before, after = (
                torch.frombuffer(bytearray(c[own]), dtype=torch.uint8) for c in contents
            )
            if not get_codec(plane.codec).is_view:
                assert torch.equal(before, after)
            for piece in bucket.pieces if get_codec(plane.codec).is_view else ():
                low, high = (4 * (piece.bucket_offset + n) for n in (0, piece.numel))
                assert torch.equal(before[low:high], after[low:high])
    for number, (path, main) in enumerate([(there, second), (back, first)]):
        options = {**FORMS[name], "main": main}
        with built(root(tmp_path, f"run{number}"), moments=options) as run:
            assert restore(run, path) == STEPS
            compare(wanted[0], everything(run))
            train(run, STEPS, STEPS + 3)
            compare(wanted[1], everything(run))


def test_ties_of_moments_that_were_never_written(tmp_path):
    """They need the plane whose signs hold them."""
    options: dict[str, Any] = {"sizes": (3000,), "native": (), "groups": None}
    values = special_values(3000, 3)
    with built(root(tmp_path), **options) as optimizer:
        optimizer.engine.write_mains({id(optimizer.mains[0]): values})
        source = take(optimizer, tmp_path / "taken")
    target = converted(source, tmp_path / "converted", {"main": "remainder"})
    (part,) = all_parts(target)
    assert [entry["written"] for entry in part.manifest["buckets"]] == [[True, False, True]] * 3
    assert verify(target) == []
    with built(root(tmp_path, "other"), moments={"main": "remainder"}, **options) as run:
        restore(run, target)
        assert same_bits(values, run.engine.read_state()["p0"]["main"])
    back = converted(target, tmp_path / "back", {"main": "fp32"})
    with built(root(tmp_path, "third"), **options) as run:
        restore(run, back)
        found = run.engine.read_state()["p0"]
        assert same_bits(values, found["main"])
        assert not torch.signbit(found.get("exp_avg_sq", torch.zeros(1))).any()


def test_signs_that_were_never_written_are_no_ties(tmp_path):
    options: dict[str, Any] = {"sizes": (3000,), "native": (), "groups": None}
    values = torch.full((3000,), 0x3F808000, dtype=torch.int32).view(torch.float32)
    with built(root(tmp_path), **options) as optimizer:
        optimizer.engine.write_mains({id(optimizer.mains[0]): values})
        source = take(optimizer, tmp_path / "taken")
    target = converted(source, tmp_path / "converted", {"main": "remainder"})
    (part,) = all_parts(target)
    for bucket, entry in zip(part.layout.buckets, part.manifest["buckets"], strict=True):
        assert entry["written"] == [True, False, False]
        with open(part.file(bucket.index), "r+b") as file:
            file.seek(bucket.planes[2].offset)
            file.write(b"\xff" * bucket.planes[2].nbytes)
    assert verify(target) == []
    back = converted(target, tmp_path / "back", {"main": "fp32"})
    with built(root(tmp_path, "other"), **options) as run:
        restore(run, back)
        assert same_bits(values, run.engine.read_state()["p0"]["main"])


def test_only_the_rounding_changes_no_byte_of_a_plane(taken, tmp_path):
    """Not even those that another rounding would give otherwise."""
    target = converted(taken["int8-sr"], tmp_path / "converted", {"moment_rounding": "nearest"})
    (before,), (after,) = all_parts(taken["int8-sr"]), all_parts(target)
    for bucket in before.layout.buckets:
        size = bucket.footer_offset
        old, new = (part.file(bucket.index).read_bytes() for part in (before, after))
        assert old[:size] == new[:size]
    codecs = {plane.codec for space in after.layout.spaces for plane in space.planes}
    assert codecs == {"fp32", "fp32:int8-signed", "fp32:int8-unsigned"}


def test_planes_that_were_never_written(tmp_path):
    """A parameter without gradient has a main and no moments: the files' zeros are not read."""
    sizes, options = (2000, 1500), {"native": (), "groups": None}
    with built(root(tmp_path), sizes=sizes, **options) as optimizer:
        optimizer.step([torch.ones(2000), None])
        source = take(optimizer, tmp_path / "taken")
    target = converted(source, tmp_path / "converted", FORMS["bf16"])
    (before,), (after,) = all_parts(source), all_parts(target)
    keys = ("step", "written")
    for old, new in zip(before.manifest["buckets"], after.manifest["buckets"], strict=True):
        assert {key: old[key] for key in keys} == {key: new[key] for key in keys}
    assert [True, False, False] in [each["written"] for each in after.manifest["buckets"]]


def test_what_was_never_written_means_nothing(tmp_path):
    """A new bucket takes from one whose moments were written and one whose were not."""
    options: dict[str, Any] = {"sizes": (1930, 1500), "native": (), "groups": None}
    with built(root(tmp_path), **options) as optimizer:
        optimizer.step([torch.ones(1930), None])
        source = take(optimizer, tmp_path / "taken")
    (part,) = all_parts(source)
    written = [entry["written"] for entry in part.manifest["buckets"]]
    assert written[1:3] == [[True] * 3, [True, False, False]]
    with open(part.file(2), "r+b") as file:
        file.seek(part.layout.buckets[2].planes[1].offset)
        file.write(b"\x3f" * 4096)
    target = converted(source, tmp_path / "converted", FORMS["int8"])
    (after,) = all_parts(target)
    bucket = after.layout.buckets[2]
    assert after.manifest["buckets"][2]["written"] == [True] * 3
    offset = bucket.planes[1].offset
    assert not any(after.file(2).read_bytes()[offset : offset + bucket.numel])


def test_nothing_was_ever_written(tmp_path):
    """Mains that stay on the device and no step yet: blank buckets stay blank."""
    options: dict[str, Any] = {"sizes": (3000,), "native": (0,), "groups": None}
    with built(root(tmp_path), **options) as optimizer:
        source = take(optimizer, tmp_path / "taken")
        target = converted(source, tmp_path / "converted", FORMS["bf16"])
        (part,) = all_parts(target)
        assert all(not any(each["written"]) for each in part.manifest["buckets"])
        assert part.layout.buckets
        assert verify(target) == []
        wanted = everything(optimizer)
    with built(root(tmp_path, "other"), moments=FORMS["bf16"], **options) as optimizer:
        restore(optimizer, target)
        compare(wanted, everything(optimizer))


def test_all_ranks_and_optimizers(tmp_path):
    options: dict[str, Any] = {"sizes": (100, 5000, 3000), "parts": ("opt0", "opt1")}
    with world(root(tmp_path), 2, **options) as made:
        made.train(0, 3)
        source = tmp_path / "taken"
        all_well(made.together(lambda e, p: take_snapshot(e, source, placement=p)))
    target = converted(source, tmp_path / "converted", FORMS["int8-sr"])
    before, after = describe(source), describe(target)
    assert before["snapshot"] != after["snapshot"]
    for key in ("step", "world_size", "optimizers"):
        assert before[key] == after[key]
    assert verify(target) == []
    found = []
    for path in (source, target):
        directory = root(tmp_path, f"from {path.name}")
        with world(directory, 2, moments=FORMS["int8-sr"], **options) as made:
            all_well(made.together(lambda e, p, path=path: restore_snapshot(e, path, placement=p)))
            made.train(3, 5)
            found.append(made.everything())
    compare(*found)


@pytest.mark.parametrize("name", ["fp32", "fp32-remainder"])
def test_progress_is_all_that_is_read(taken, tmp_path, name):
    source = taken[name]
    conversion = plan_conversion(source, tmp_path / "converted", StorageForm(moment_dtype="bf16"))
    seen: list[int] = []
    convert(conversion, seen.append)
    assert sum(seen) == conversion.read_bytes
    assert len(seen) > len(all_parts(source)[0].layout.buckets)
    names = ("bucket*.bin", "upper.bin")
    files = [path for name in names for path in conversion.target.rglob(name)]
    written = sum(path.stat().st_size for path in files)
    assert written == conversion.written_bytes
    everything_bytes = sum(path.stat().st_size for path in conversion.target.rglob("*.*"))
    assert written < everything_bytes <= conversion.needed_bytes


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("fp32", {"moment_dtype": "fp32"}),
        ("fp32", {"moment_rounding": "nearest"}),
        ("bf16", FORMS["bf16"]),
        ("bf16", {"moment_dtype": "bf16"}),
        ("int8-sr", {"moment_rounding": "stochastic"}),
        ("bf16", {}),
        ("fp32", {"main": "fp32"}),
        ("int8-sr-remainder", {"main": "remainder", "moment_dtype": "int8"}),
    ],
)
def test_the_form_that_it_has(taken, tmp_path, name, form):
    with pytest.raises(ConfigError, match="has that form already"):
        converted(taken[name], tmp_path / "converted", form)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("moment_dtype", "fp8"), ("moment_rounding", "up"), ("main", "auto")]
)
def test_forms_that_there_are_not(key, value):
    with pytest.raises(ConfigError, match=f"{key} is '{value}', wanted one of"):
        StorageForm(**{key: value})


def test_a_plane_without_8_bit_encoding(tmp_path):
    def rprop(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Rprop(groups, lr=1e-3)

    with built(root(tmp_path), rprop, sizes=(3000,), native=(), groups=None) as optimizer:
        train(optimizer, 0, 1)
        source = take(optimizer, tmp_path / "taken")
    with pytest.raises(UnsupportedError, match="Rprop keeps 'prev', which has no 8-bit"):
        converted(source, tmp_path / "converted", FORMS["int8"])
    assert verify(converted(source, tmp_path / "converted", FORMS["bf16"])) == []


@pytest.mark.parametrize(
    ("name", "codec"),
    [("main", "main:later"), ("main", "bf16"), ("exp_avg", "main:remainder16")],
)
def test_a_plane_that_cannot_be_converted(name, codec):
    plane = PlaneSpec(name=name, codec=codec)
    with pytest.raises(UnsupportedError, match=f"stored by the codec '{codec}'"):
        StorageForm(moment_dtype="bf16").planes([plane], "AdamW")


def test_a_codec_of_a_later_version(source, tmp_path):
    codec = "main:later"
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    _rewrite_codec(copy, codec)
    with pytest.raises(UnsupportedError, match=f"opt0 cannot be converted: plane 'main'.*{codec}"):
        converted(copy, tmp_path / "converted", FORMS["bf16"])


def _rewrite_codec(snapshot: Path, codec: str) -> None:
    path = snapshot / "rank00000" / "opt0" / "manifest.json"
    manifest = unseal(path.read_bytes())
    manifest["layout"]["spaces"][0]["planes"][0]["codec"] = codec
    path.write_bytes(seal(manifest))
    whole = unseal((snapshot / "snapshot.json").read_bytes())
    whole["manifests"]["rank00000/opt0"] = seal_of(path.read_bytes())
    (snapshot / "snapshot.json").write_bytes(seal(whole))


@pytest.mark.parametrize("place", [".", "below", ".."])
def test_inside_of_one_another(source, place):
    with pytest.raises(SnapshotError, match="inside of one another"):
        converted(source, source / place, FORMS["bf16"])


def test_a_target_that_is_taken(source, tmp_path):
    target = converted(source, tmp_path / "converted", FORMS["bf16"])
    files = hashes(target)
    with pytest.raises(SnapshotError, match=r"there is a snapshot in .* already"):
        converted(source, target, FORMS["int8"])
    assert hashes(target) == files
    mine = tmp_path / "other" / "rank00000" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(SnapshotError, match="which is not of a snapshot"):
        converted(source, tmp_path / "other", FORMS["bf16"])
    assert mine.read_text() == "mine"


def test_no_complete_snapshot(tmp_path):
    with pytest.raises(SnapshotError, match="there is no snapshot at"):
        converted(tmp_path / "nothing", tmp_path / "converted", FORMS["bf16"])


# ---------------------------------------------------------------------- what fails


def assert_nothing(tmp_path: Path) -> None:
    assert not (tmp_path / "new").exists()


def test_too_little_room(source, tmp_path, monkeypatch):
    target = tmp_path / "new" / "converted"
    needed = plan_conversion(source, target, StorageForm(moment_dtype="bf16")).needed_bytes
    monkeypatch.setattr(room, "free_bytes", lambda *directories: needed - 1)
    with pytest.raises(NoSpaceError, match=f"need {needed} bytes, and {needed - 1} are free"):
        converted(source, target, FORMS["bf16"])
    assert_nothing(tmp_path)
    monkeypatch.setattr(room, "free_bytes", lambda *directories: needed)
    assert verify(converted(source, target, FORMS["bf16"])) == []


@pytest.mark.parametrize("offset", [0, 5000, -4096 + 8 * 17])
@pytest.mark.parametrize("after", ["bf16", "int8"])
def test_damage_is_named_and_not_passed_on(source, tmp_path, offset, after):
    file = source / "rank00000" / "opt0" / "bucket00003.bin"
    place = offset % file.stat().st_size
    flip(file, place)
    try:
        with pytest.raises(CorruptBucketError, match=f"bucket 3 in {file}"):
            converted(source, tmp_path / "new" / "converted", FORMS[after])
    finally:
        flip(file, place)
    assert_nothing(tmp_path)


def test_damaged_halves(taken, tmp_path):
    source = taken["int8-sr-remainder"]
    file = source / "rank00000" / "opt0" / "upper.bin"
    place = file.stat().st_size - 4000
    flip(file, place)
    try:
        with pytest.raises(CorruptBucketError, match=r"upper halves of bucket \d+ in .*upper\.bin"):
            converted(source, tmp_path / "new" / "converted", {"main": "fp32"})
    finally:
        flip(file, place)
    assert_nothing(tmp_path)


def test_a_damaged_value_without_bucket(source, tmp_path):
    file = source / "rank00000" / "opt0" / "resident.bin"
    flip(file, 2)
    try:
        with pytest.raises(SnapshotError, match=r"resident\.bin is damaged"):
            converted(source, tmp_path / "new" / "converted", FORMS["bf16"])
    finally:
        flip(file, 2)
    assert_nothing(tmp_path)


def test_a_failure_leaves_what_was_there(source, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "notes.txt").write_text("mine")

    def stop(nbytes: int) -> None:
        raise KeyboardInterrupt

    conversion = plan_conversion(source, tmp_path / "new", StorageForm(moment_dtype="bf16"))
    with pytest.raises(KeyboardInterrupt):
        convert(conversion, stop)
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["notes.txt"]


@pytest.mark.thinned(every=3, first=1)
@pytest.mark.faults
@pytest.mark.parametrize(
    ("before", "after"), [("fp32", "int8"), ("int8", "int8-remainder"), ("fp32-remainder", "int8")]
)
def test_killed_anywhere(tmp_path, before, after):
    options: dict[str, Any] = {"sizes": (3000, 100, 2500), "groups": None}
    with built(root(tmp_path), moments=ALL_FORMS[before], **options) as optimizer:
        train(optimizer, 0, 2)
        source = take(optimizer, tmp_path / "taken")
    files = hashes(source)
    form = {"main": "fp32", **ALL_FORMS[after]}
    wanted = hashes(converted(source, tmp_path / "wanted", form))

    def work(target: Path, countdown: Countdown) -> None:
        conversion = plan_conversion(source, target, StorageForm(**form))
        countdown.arm()
        convert(conversion)

    calls = killed_at(-1, lambda countdown: work(tmp_path / "counted", countdown))
    assert calls is not None
    outcomes = set()
    for number, at in enumerate(sorted({calls * n // 20 for n in range(21)})):
        directory = tmp_path / f"killed{number}"
        directory.mkdir()
        target = directory / "converted"
        assert killed_at(at, lambda countdown, t=target: work(t, countdown)) is None
        is_whole = (target / "snapshot.json").exists()
        outcomes.add(is_whole)
        if is_whole:
            assert verify(target) == []
            continue
        if number % 2:  # by the next conversion
            converted(source, target, form)
            assert _buckets(hashes(target)) == _buckets(wanted)
        else:  # by what cleans up after snapshots and copies
            clean_incomplete(directory)
            assert all(each.is_dir() for each in directory.rglob("*"))
    assert outcomes == {True, False}
    assert hashes(source) == files


def _buckets(files: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in files.items() if name.endswith(".bin")}


# ---------------------------------------------------------------------- the command


def run(*arguments: object) -> int:
    return cli_main.main(list(map(str, arguments)))


def test_the_command(source, tmp_path, capsys):
    target = tmp_path / "converted"
    assert run("convert", source, target, "--moment-dtype", "bf16") == 0
    captured = capsys.readouterr()
    sizes = [sum(p.nbytes for p in all_parts(each)) for each in (target, source)]
    assert captured.out == (
        f"{target}: {sizes[0]} bytes of buckets, converted from {sizes[1]} in {source}\n"
    )
    assert "converting: 100%" in captured.err
    assert run("verify", target) == 0
    codecs = {plane.codec for space in all_parts(target)[0].layout.spaces for plane in space.planes}
    assert codecs == {"fp32", "fp32:bf16-sr"}  # what a run is given by default


def test_the_command_with_mains(source, tmp_path, capsys):
    target = tmp_path / "converted"
    assert run("convert", source, target, "--main", "remainder", "--moment-dtype", "int8") == 0
    assert "converting: 100%" in capsys.readouterr().err
    assert run("verify", target) == 0
    assert run("inspect", target) == 0
    assert "main main:remainder16-bitmap, exp_avg fp32:int8-signed-sr" in capsys.readouterr().out
    assert run("convert", source, tmp_path / "other", "--main", "auto") == 2


def test_statuses(source, tmp_path, capsys):
    target = tmp_path / "converted"
    assert run("convert", source, target) == 2
    assert "nothing is asked for" in capsys.readouterr().err
    assert run("convert", source, target, "--moment-dtype", "fp8") == 2
    assert run("convert", tmp_path, target, "--moment-dtype", "bf16") == 1
    assert not target.exists()

"""`kill -9` behind every change of the file system: what looks whole is, and nothing else is lost.

A child builds an optimizer, takes a snapshot, and dies in the middle of something. Afterwards
everything that declares itself whole verifies and restores, the rest is cleaned away, a new run
finds its place, and what is not ours is as it was.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gds_optimizer.snapshot import LINKS_DIRECTORY
from gds_optimizer.snapshot_read import describe, verify
from gds_optimizer.snapshots import (
    SnapshotCopy,
    clean_incomplete,
    clean_links,
    remove_snapshot,
    restore_snapshot,
    take_snapshot,
)
from tests.support.engines import SMALL_BUCKET_BYTES, StreamedOptimizer, grads_of
from tests.support.forms import BF16, FP32, INT8, REMAINDER, name_of
from tests.support.killing import Countdown, killed_at
from tests.support.snapshots import build, built, compare, everything, hashes

pytestmark = pytest.mark.faults

# Two shards that fill half a dozen small buckets, one parameter that is fp32 itself, one empty.
SIZES = (3000, 100, 0, 2500)
FIRST, SECOND = 2, 3
POINTS = {False: 6, True: 20}
"""So many deaths in what makes a snapshot or a copy, evenly spread, without and with --slow; half
as many in the rest."""


def make(scene: Scene, **options: Any) -> StreamedOptimizer:
    roots = [scene.directory / "state", scene.directory / "other"]
    options = {"sizes": SIZES, "native": (1,), "groups": None, "moments": scene.form, **options}
    return build(roots, **options)


def steps(optimizer: StreamedOptimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        optimizer.step(grads_of(SIZES, step))


class Scene:
    """Directories, with files of a user's own among them, and what the state was at each step."""

    def __init__(self, directory: Path, form: dict[str, str]) -> None:
        self.directory = directory
        self.form = form
        for name in ("state", "other", "snapshots", "copies"):
            (directory / name).mkdir(parents=True)
            (directory / name / "notes.txt").write_text("mine")
        mine = directory / "snapshots" / "mine" / "rank00000"
        mine.mkdir(parents=True)
        (mine / "data").write_text("mine")
        self.wanted: dict[int, dict[str, Any]] = {}

    def look(self) -> None:
        options: dict[str, Any] = {"sizes": SIZES, "native": (1,), "groups": None}
        with built(self.directory / "state", moments=self.form, **options) as optimizer:
            for step in range(SECOND + 3):
                self.wanted[step] = everything(optimizer)
                steps(optimizer, step, step + 1)
            self.wanted[SECOND + 3] = everything(optimizer)

    @property
    def snapshots(self) -> Path:
        return self.directory / "snapshots"

    @property
    def copies(self) -> Path:
        return self.directory / "copies"

    def user_files(self) -> dict[str, str]:
        files = hashes(self.directory)
        return {n: h for n, h in files.items() if n.endswith(("notes.txt", "data"))}

    def live_elsewhere(self) -> list[str]:
        """Names of what is in the state's directories."""
        found = []
        for name in ("state", "other"):
            found += [str(p) for p in (self.directory / name).rglob("*") if p.is_file()]
        return [name for name in found if not name.endswith("notes.txt")]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Iterator[Callable[..., Scene]]:
    base = tmp_path_factory.mktemp("kill")
    models: dict[str, Scene] = {}
    count = 0

    def new(form: dict[str, str] = FP32) -> Scene:
        nonlocal count
        count += 1
        shutil.rmtree(base / f"scene{count - 1}", ignore_errors=True)
        scene = Scene(base / f"scene{count}", form)
        if name_of(form) not in models:
            model = models[name_of(form)] = Scene(base / f"model-{name_of(form)}", form)
            model.look()
        scene.wanted = models[name_of(form)].wanted
        return scene

    yield new
    shutil.rmtree(base, ignore_errors=True)


def no_links_into(directory: Path) -> None:
    """Make `directory` look like another file system: what is in it cannot be linked elsewhere."""
    link = os.link

    def link_or_refuse(source: Any, target: Any, **options: Any) -> None:
        if (directory in Path(source).parents) != (directory in Path(target).parents):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        link(source, target, **options)

    os.link = link_or_refuse  # type: ignore[assignment]


# ---------------------------------------------------------------------- what the child does


def begin(scene: Scene) -> tuple[StreamedOptimizer, dict[str, Any]]:
    """A run with a snapshot, one step ahead of it."""
    no_links_into(scene.directory / "other")
    optimizer = make(scene)
    engines = {"opt0": optimizer.engine}
    steps(optimizer, 0, FIRST)
    take_snapshot(engines, scene.snapshots / "first")
    steps(optimizer, FIRST, SECOND)
    return optimizer, engines


def take(scene: Scene, countdown: Countdown) -> None:
    optimizer, engines = begin(scene)
    countdown.arm()
    take_snapshot(engines, scene.snapshots / "second")
    steps(optimizer, SECOND, SECOND + 1)
    optimizer.engine.drain()


def take_and_prune(scene: Scene, countdown: Countdown) -> None:
    optimizer, engines = begin(scene)
    countdown.arm()
    take_snapshot(engines, scene.snapshots / "second", keep_last=1)
    steps(optimizer, SECOND, SECOND + 1)
    optimizer.engine.drain()


def remove(scene: Scene, countdown: Countdown) -> None:
    optimizer, engines = begin(scene)
    take_snapshot(engines, scene.snapshots / "second")
    steps(optimizer, SECOND, SECOND + 1)
    optimizer.engine.drain()
    countdown.arm()
    remove_snapshot(scene.snapshots / "first", engines)


def copy(scene: Scene, countdown: Countdown) -> None:
    optimizer, _ = begin(scene)
    SnapshotCopy(scene.snapshots / "first", scene.copies / "first").wait()
    optimizer.engine.drain()
    countdown.arm()
    SnapshotCopy(scene.snapshots / "first", scene.copies / "again", keep_last=1).wait()


def restore(scene: Scene, countdown: Countdown) -> None:
    optimizer, engines = begin(scene)
    take_snapshot(engines, scene.snapshots / "second")
    steps(optimizer, SECOND, SECOND + 1)
    optimizer.engine.drain()
    countdown.arm()
    restore_snapshot(engines, scene.snapshots / "first")
    steps(optimizer, FIRST, FIRST + 2)
    optimizer.engine.drain()


def restore_into_other_buckets(scene: Scene, countdown: Countdown) -> None:
    optimizer, _ = begin(scene)
    optimizer.close()
    other = make(scene, bucket_size=2 * SMALL_BUCKET_BYTES)
    countdown.arm()
    restore_snapshot({"opt0": other.engine}, scene.snapshots / "first")
    steps(other, FIRST, FIRST + 2)
    other.engine.drain()


def clean(scene: Scene, countdown: Countdown) -> None:
    _, engines = begin(scene)
    for name in ("second", "third", "fourth"):
        take_snapshot(engines, scene.snapshots / name)
        (scene.snapshots / name / "snapshot.json").unlink()
    countdown.arm()
    clean_incomplete(scene.snapshots)


KEPT: dict[Callable[[Scene, Countdown], None], tuple[str, ...]] = {
    take: ("first",),
    take_and_prune: (),
    remove: ("second",),
    copy: ("first",),
    restore: ("first", "second"),
    restore_into_other_buckets: ("first",),
    clean: ("first",),
}
"""What must be there and whole wherever the child dies."""


# ---------------------------------------------------------------------- what is left


def clean_by_hand(scene: Scene) -> None:
    for directory in (scene.snapshots, scene.copies):
        clean_incomplete(directory)
    clean_links(scene.directory / "other")


def clean_by_going_on(scene: Scene) -> None:
    """The next snapshot and the next copy of a run that keeps some of each do it."""
    optimizer = make(scene)
    engines = {"opt0": optimizer.engine}
    take_snapshot(engines, scene.snapshots / "next", keep_last=99)
    SnapshotCopy(scene.snapshots / "next", scene.copies / "next", keep_last=99).wait()
    remove_snapshot(scene.snapshots / "next", engines)
    remove_snapshot(scene.copies / "next")
    optimizer.close()


def check(
    scene: Scene,
    kept: tuple[str, ...],
    user_files: dict[str, str],
    clean: Callable[[Scene], None],
) -> list[str]:
    """Everything that must hold after a death. Returns the names of whole snapshots."""
    assert scene.user_files() == user_files
    whole = []
    for directory in (scene.snapshots, scene.copies):
        for path in sorted(directory.iterdir()):
            if not (path / "snapshot.json").exists():
                continue
            assert verify(path) == [], path
            whole.append(path)
    names = [path.name for path in whole]
    assert set(kept) <= {path.name for path in whole if path.parent == scene.snapshots}, names
    assert whole, "both the old and the new snapshot are gone"
    if any(scene.copies.glob("*/")):
        assert any(path.parent == scene.copies for path in whole), "no copy is whole"

    clean(scene)
    for directory in (scene.snapshots, scene.copies):
        left = {path for path in directory.iterdir() if any(p.is_file() for p in path.rglob("*"))}
        assert left - {directory / "mine"} == {p for p in whole if p.parent == directory}
        assert clean_incomplete(directory) == []
    assert clean_links(scene.directory / "other") == []
    files = {path: hashes(path) for path in whole}
    links = hashes(scene.directory / "other" / LINKS_DIRECTORY)
    inside = [p for p in whole if p.parent == scene.snapshots]
    assert len(list((scene.directory / "other" / LINKS_DIRECTORY).glob("*"))) == len(inside)
    assert scene.user_files() == user_files

    # A new run in the same place, while the snapshots are there.
    optimizer = make(scene)
    try:
        scratch = [n for n in scene.live_elsewhere() if LINKS_DIRECTORY not in n]
        assert len(scratch) == len(optimizer.paths) + 2 * len(("lock", "layout.json"))
        engines = {"opt0": optimizer.engine}
        for path in whole:
            step = restore_snapshot(engines, path)
            assert step == describe(path)["step"]
            compare(scene.wanted[step], everything(optimizer))
            steps(optimizer, step, step + 2)
            compare(scene.wanted[step + 2], everything(optimizer))
        take_snapshot(engines, scene.snapshots / "after")
        assert verify(scene.snapshots / "after") == []
        remove_snapshot(scene.snapshots / "after", engines)
        steps(optimizer, 10, 11)
    finally:
        optimizer.close()
    assert {path: hashes(path) for path in whole} == files
    assert hashes(scene.directory / "other" / LINKS_DIRECTORY) == links
    assert [n for n in scene.live_elsewhere() if LINKS_DIRECTORY not in n] == []
    assert scene.user_files() == user_files
    return names


@pytest.mark.parametrize(
    ("operation", "form"),
    [
        *((operation, FP32) for operation in KEPT),
        # With halves of mains to write and to take back, and planes that are decoded.
        pytest.param(take, INT8 | REMAINDER, marks=pytest.mark.slow),
        pytest.param(copy, REMAINDER, marks=pytest.mark.slow),
        pytest.param(restore, INT8 | REMAINDER, marks=pytest.mark.slow),
        pytest.param(restore_into_other_buckets, BF16 | REMAINDER, marks=pytest.mark.slow),
    ],
    ids=lambda value: name_of(value) or value.__name__,
)
def test_killed_anywhere(scenes, operation, form, pytestconfig):
    scene = scenes(form)
    calls = killed_at(-1, lambda countdown: operation(scene, countdown))
    assert calls is not None
    count = POINTS[pytestconfig.getoption("slow")]
    if operation not in (take, take_and_prune, copy):
        count //= 2
    points = sorted({calls * number // count for number in range(count + 1)})
    deaths = 0
    seen: set[tuple[str, ...]] = set()
    for number, at in enumerate(points):
        scene = scenes(form)
        clean_up = clean_by_going_on if number % 2 else clean_by_hand
        user_files = scene.user_files()
        died = killed_at(at, lambda countdown, scene=scene: operation(scene, countdown)) is None
        deaths += died
        try:
            seen.add(tuple(check(scene, KEPT[operation], user_files, clean_up)))
        except BaseException as error:
            error.add_note(f"killed behind call {at} of {calls} of {operation.__name__}")
            raise
    assert deaths >= count
    if operation in (take, copy):  # both outcomes were met
        assert len(seen) >= 2, seen

"""One living process owns a directory; real processes are started, forked and killed here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gds_optimizer import lock
from gds_optimizer.errors import ConfigError, StoreLockedError
from gds_optimizer.lock import LOCK_NAME, OwnedDirectory, reclaim_dead
from tests.support.engines import in_child, leftovers

REPOSITORY = Path(__file__).parents[2]
FILE_BYTES = 2**20

# Owns a directory, fills it, and does what its standard input says.
OWNER = """
import sys
from pathlib import Path
from gds_optimizer.lock import OwnedDirectory, reclaim_dead

root, name, file_bytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for line in sys.stdin:
    command = line.strip()
    if command == "own":
        owned = OwnedDirectory.acquire(root / name)
        reclaim_dead(root, keep=owned.path)
        for i in range(3):
            (owned.path / f"bucket{i:05d}.bin").write_bytes(b"x" * file_bytes)
        (owned.path / "layout.json").write_text("{}")
    elif command == "close":
        owned.close()
    elif command == "fork":
        import os, signal, time
        child = os.fork()
        if child == 0:
            time.sleep(120)
            os._exit(0)
        print(child, flush=True)
        continue
    print(command, flush=True)
"""


class Owner:
    """A process that owns `root/name` when told to."""

    def __init__(self, root: Path, name: str) -> None:
        self.process = subprocess.Popen(
            (sys.executable, "-c", OWNER, str(root), name, str(FILE_BYTES)),
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline().strip()
        return line or f"no answer: {self.process.stderr.read()}"

    def do(self, command: str) -> None:
        self.tell(command)
        assert self.answer() == command

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Owner]]:
    owners: list[Owner] = []

    def start_one(name: str = "rank00000/opt0") -> Owner:
        owners.append(Owner(tmp_path, name))
        return owners[-1]

    yield start_one
    for owner in owners:
        owner.kill()


def used_bytes(root: Path) -> int:
    """What `du` says."""
    return sum(path.lstat().st_blocks * 512 for path in root.rglob("*"))


def test_a_living_owner_is_named(tmp_path, start):
    owner = start()
    owner.do("own")
    with pytest.raises(StoreLockedError) as caught:
        OwnedDirectory.acquire(tmp_path / "rank00000/opt0")
    words = str(caught.value)
    assert words.startswith(f"{tmp_path}/rank00000/opt0 is in use by process {owner.process.pid} ")
    assert f"on {socket.gethostname()}, started 20" in words
    assert f"(-c {tmp_path} rank00000/opt0 " in words
    assert words.endswith("stop it or choose another directory")
    assert caught.value.owner["pid"] == owner.process.pid
    assert caught.value.owner["purpose"] == "train"
    assert len(leftovers(tmp_path)) == 7  # and nothing of its was touched
    owner.do("close")
    assert leftovers(tmp_path) == []
    OwnedDirectory.acquire(tmp_path / "rank00000/opt0").close()


def test_another_rank_is_no_obstacle(tmp_path, start):
    owner = start("rank00001/opt0")
    owner.do("own")
    before = leftovers(tmp_path)
    owned = OwnedDirectory.acquire(tmp_path / "rank00000/opt0")
    reclaim_dead(tmp_path, keep=owned.path)
    owned.close()
    assert leftovers(tmp_path) == before


def test_modes(tmp_path):
    owned = OwnedDirectory.acquire(tmp_path / "rank00000/opt0")
    assert owned.path.stat().st_mode & 0o777 == 0o700
    assert (owned.path / LOCK_NAME).stat().st_mode & 0o777 == 0o600
    owned.close()


def test_a_root_that_is_gone_is_not_created(tmp_path):
    with pytest.raises(FileNotFoundError, match="drive"):
        OwnedDirectory.acquire(tmp_path / "drive" / "rank00000" / "opt0")
    assert not (tmp_path / "drive").exists()


def test_the_disk_use_of_killed_runs_does_not_add_up(tmp_path, start, caplog):
    used = []
    for _ in range(3):
        owner = start()
        owner.do("own")
        used.append(used_bytes(tmp_path))
        owner.kill()
        assert used_bytes(tmp_path) == used[-1] >= 3 * FILE_BYTES
    assert used == used[:1] * 3
    owned = OwnedDirectory.acquire(tmp_path / "rank00000/opt0")
    assert leftovers(tmp_path) == ["rank00000", "rank00000/opt0", f"rank00000/opt0/{LOCK_NAME}"]
    assert f"reclaimed 0.00 GiB that a dead run left in {owned.path}" in caplog.text
    owned.close()
    assert leftovers(tmp_path) == []


def test_a_forked_child_does_not_hold_the_lock_of_its_dead_parent(tmp_path, start):
    owner = start()
    owner.do("own")
    owner.tell("fork")
    child = int(owner.answer())
    try:
        owner.process.send_signal(signal.SIGKILL)
        owner.process.wait()
        os.kill(child, 0)  # it lives
        owned = OwnedDirectory.acquire(tmp_path / "rank00000/opt0")
        assert not list(owned.path.glob("bucket*"))
        owned.close()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_neither_gets_nor_drops_its_parents_directory(tmp_path, start):
    owned = OwnedDirectory.acquire(tmp_path / "rank00000/opt0")
    (owned.path / "bucket00000.bin").write_bytes(b"x")
    parent = os.getpid()

    def check() -> None:
        with pytest.raises(StoreLockedError, match=f"in use by process {parent} "):
            OwnedDirectory.acquire(owned.path)
        reclaim_dead(tmp_path, keep=tmp_path)
        owned.close()
        owned.close()

    in_child(check)
    assert (owned.path / "bucket00000.bin").read_bytes() == b"x"
    other = start()
    other.tell("own")
    assert "StoreLockedError" in other.answer()
    owned.close()
    assert leftovers(tmp_path) == []


def test_a_second_owner_in_the_same_process_is_refused(tmp_path, start):
    owned = OwnedDirectory.acquire(tmp_path / "rank00000/opt0")
    with pytest.raises(StoreLockedError, match=rf"in use by this very process \(pid {os.getpid()}"):
        OwnedDirectory.acquire(owned.path)
    # The way there by another name is the same directory.
    (tmp_path / "link").symlink_to(tmp_path / "rank00000")
    with pytest.raises(StoreLockedError, match="this very process"):
        OwnedDirectory.acquire(tmp_path / "link/opt0")
    reclaim_dead(tmp_path, keep=tmp_path)
    # None of this has dropped the lock, as closing a second descriptor would.
    other = start()
    other.tell("own")
    assert f"process {os.getpid()} " in other.answer()
    owned.close()
    OwnedDirectory.acquire(owned.path).close()


def test_dead_ranks_are_reclaimed_and_everything_else_is_left(tmp_path, start):
    living, dead = start("rank00001/opt0"), [start(f"rank{i:05d}/opt0") for i in (2, 3, 11)]
    for owner in (living, *dead):
        owner.do("own")
    for owner in dead:
        owner.kill()
    foreign = {
        "rank00002/opt0/snapshot-step10/bucket00000.bin": b"a snapshot",
        "rank00002/opt0/notes.txt": b"notes",
        "rank00002/opt0/layout.json.old": b"old",
        "rank00004/bucket00000.bin": b"without a lock",
        "bucket00000.bin": b"not even in a rank",
    }
    for name, content in foreign.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    elsewhere = tmp_path / "rank00005" / "opt0"
    elsewhere.mkdir(parents=True)
    (elsewhere / "bucket00000.bin").write_bytes(b"of another host")
    (elsewhere / LOCK_NAME).write_text(json.dumps({"pid": 1, "host": "elsewhere"}))

    owned = OwnedDirectory.acquire(tmp_path / "rank00000/opt0")
    reclaim_dead(tmp_path, keep=owned.path)

    assert {name: (tmp_path / name).read_bytes() for name in foreign} == foreign
    assert (elsewhere / "bucket00000.bin").exists()
    assert len(list((tmp_path / "rank00001/opt0").glob("bucket*.bin"))) == 3
    assert sorted(path.name for path in (tmp_path / "rank00002/opt0").iterdir()) == [
        "layout.json.old",
        "notes.txt",
        "snapshot-step10",
    ]
    assert not (tmp_path / "rank00003").exists()
    assert not (tmp_path / "rank00011").exists()
    living.do("close")
    owned.close()


@pytest.mark.parametrize("boot", ["this", "another", ""])
def test_a_dead_container_s_scratch_is_known_by_the_kernel(tmp_path, boot):
    """Its host name is gone with it; the kernel that knows its locks is still there."""
    dead = tmp_path / "rank00005" / "opt0"
    dead.mkdir(parents=True)
    (dead / "bucket00000.bin").write_bytes(b"x")
    owner = {"pid": 1, "host": "elsewhere", "boot": lock._boot_id() if boot == "this" else boot}
    (dead / LOCK_NAME).write_text(json.dumps(owner))
    reclaim_dead(tmp_path, keep=tmp_path / "rank00000" / "opt0")
    assert dead.exists() == (boot != "this")


def test_a_lock_that_is_a_symbolic_link_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("thesis")
    directory = tmp_path / "rank00000" / "opt0"
    directory.mkdir(parents=True)
    for target in (precious, tmp_path / "nowhere"):
        (directory / LOCK_NAME).symlink_to(target)
        with pytest.raises(ConfigError, match="is a symbolic link"):
            OwnedDirectory.acquire(directory)
        (directory / LOCK_NAME).unlink()
    assert precious.read_text() == "thesis"


def test_only_names_of_ours_are_scratch(tmp_path):
    directory = tmp_path / "rank00000" / "opt0"
    directory.mkdir(parents=True)
    ours = {"bucket00000.bin", "bucket123456.bin", "bucket00001.spare.bin", "layout.json"}
    theirs = {"bucket_of_fish.bin", "bucket1.bin", "bucket00000.bin.bak", "layout.json5"}
    for name in ours | theirs:
        (directory / name).touch()
    OwnedDirectory.acquire(directory).close()
    assert {path.name for path in directory.iterdir()} == theirs


def test_files_of_others_survive_acquire_and_close(tmp_path):
    directory = tmp_path / "rank00000/opt0"
    (directory / "snapshot").mkdir(parents=True)
    for name in ("snapshot/bucket00000.bin", "readme", "bucket.txt"):
        (directory / name).write_text(name)
    for name in ("bucket00000.bin", "bucket00017.bin", "layout.json"):
        (directory / name).write_text("scratch")
    OwnedDirectory.acquire(directory).close()
    assert leftovers(directory) == ["bucket.txt", "readme", "snapshot", "snapshot/bucket00000.bin"]


def test_a_directory_that_took_the_place_of_ours_is_not_touched(tmp_path):
    owned = OwnedDirectory.acquire(tmp_path / "rank00000/opt0")
    owned.path.rename(tmp_path / "moved")
    owned.path.mkdir()
    (owned.path / "bucket00000.bin").write_text("somebody else's")
    owned.close()
    assert (owned.path / "bucket00000.bin").read_text() == "somebody else's"
    # The lock is free all the same.
    OwnedDirectory.acquire(tmp_path / "moved").close()


def test_a_directory_that_was_removed_can_be_closed(tmp_path):
    owned = OwnedDirectory.acquire(tmp_path / "rank00000/opt0")
    (owned.path / LOCK_NAME).unlink()
    owned.path.rmdir()
    owned.close()
    owned.close()
    OwnedDirectory.acquire(owned.path).close()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("content", ["", "no JSON", "[1]", '{"pid": 999999999}'])
def test_a_lock_file_that_says_nothing_does_not_stop_anybody(tmp_path, content):
    directory = tmp_path / "rank00000/opt0"
    directory.mkdir(parents=True)
    (directory / LOCK_NAME).write_text(content)
    (directory / "bucket00000.bin").write_text("scratch")
    owned = OwnedDirectory.acquire(directory)
    assert not (directory / "bucket00000.bin").exists()
    assert json.loads((directory / LOCK_NAME).read_text())["pid"] == os.getpid()
    owned.close()


# Takes the lock as a starting rank does, but is slow to write what it is.
SLOW_OWNER = """
import fcntl, json, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.lockf(fd, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.readline()
os.ftruncate(fd, 0)
os.pwrite(fd, json.dumps({"pid": os.getpid(), "purpose": sys.argv[2]}).encode(), 0)
print("named", flush=True)
sys.stdin.readline()
if sys.argv[2] == "reclaim":
    os.unlink(sys.argv[1])
"""


@pytest.fixture
def slow_owner(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start_one(purpose: str) -> subprocess.Popen[str]:
        directory = tmp_path / "rank00000/opt0"
        directory.mkdir(parents=True)
        # What a run that died long ago has left.
        (directory / LOCK_NAME).write_text(json.dumps({"pid": 999999, "purpose": "train"}))
        process = subprocess.Popen(
            (sys.executable, "-c", SLOW_OWNER, str(directory / LOCK_NAME), purpose),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        return process

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


def go_on_while_waiting(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The other process has done its next thing each time that we have slept, `times` times."""
    left = [times]
    sleep = time.sleep

    def go_on(duration_s: float) -> None:
        if left[0]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            # However long it takes: we wait for a few seconds only.
            if left[0] == times:
                assert process.stdout.readline() == "named\n"
            else:
                process.wait()
            left[0] -= 1
        sleep(duration_s)

    monkeypatch.setattr(lock.time, "sleep", go_on)


def test_an_owner_that_has_not_said_who_it_is_yet_is_asked_again(tmp_path, slow_owner, monkeypatch):
    process = slow_owner("train")
    go_on_while_waiting(process, monkeypatch, 1)
    with pytest.raises(StoreLockedError, match=f"in use by process {process.pid} "):
        OwnedDirectory.acquire(tmp_path / "rank00000/opt0")


def test_a_rank_that_clears_up_after_the_dead_is_waited_for(tmp_path, slow_owner, monkeypatch):
    process = slow_owner("reclaim")
    go_on_while_waiting(process, monkeypatch, 2)
    owned = OwnedDirectory.acquire(tmp_path / "rank00000/opt0")
    process.wait()
    assert json.loads((owned.path / LOCK_NAME).read_text())["pid"] == os.getpid()
    owned.close()


def test_a_lock_file_that_its_last_owner_removes_meanwhile_is_not_taken(
    tmp_path, monkeypatch, start
):
    """A lock on a file that has no name any more would keep nobody out."""
    directory = tmp_path / "rank00000/opt0"
    lockf = lock.fcntl.lockf

    def remove_and_lock(fd: int, how: int) -> None:
        monkeypatch.setattr(lock.fcntl, "lockf", lockf)
        (directory / LOCK_NAME).unlink()
        lockf(fd, how)

    monkeypatch.setattr(lock.fcntl, "lockf", remove_and_lock)
    owned = OwnedDirectory.acquire(directory)
    other = start()
    other.tell("own")
    assert f"in use by process {os.getpid()} " in other.answer()
    owned.close()


def test_an_owner_that_never_says_who_it_is_is_not_waited_for_forever(
    tmp_path, slow_owner, monkeypatch
):
    slow_owner("train")
    monkeypatch.setattr(lock, "_NAME_WAIT_S", 0.2)
    with pytest.raises(StoreLockedError, match="in use by process 999999"):
        OwnedDirectory.acquire(tmp_path / "rank00000/opt0")


def test_eight_ranks_start_at_once_on_what_twelve_left(tmp_path, start):
    """A smaller run than the one that died: every rank gets its own, and all the rest goes."""
    for _ in range(4):
        for rank in range(12):
            dead = tmp_path / f"rank{rank:05d}/opt0"
            dead.mkdir(parents=True)
            (dead / "bucket00000.bin").write_bytes(b"x" * 4096)
            owner = {"pid": 999999, "host": socket.gethostname(), "purpose": "train"}
            (dead / LOCK_NAME).write_text(json.dumps(owner))
        owners = [start(f"rank{rank:05d}/opt0") for rank in range(8)]
        for owner in owners:
            owner.tell("own")
        assert [owner.answer() for owner in owners] == ["own"] * 8
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            f"rank{rank:05d}" for rank in range(8)
        ]
        for rank in range(8):
            assert len(list((tmp_path / f"rank{rank:05d}/opt0").glob("bucket*.bin"))) == 3
        for owner in owners:
            owner.tell("close")
        assert [owner.answer() for owner in owners] == ["close"] * 8
        assert leftovers(tmp_path) == []

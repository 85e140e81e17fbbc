"""What is left of host memory, by the kernel's own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from gds_optimizer.host_memory import available_bytes, local_share

MIB = 2**20


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """/proc and /sys/fs/cgroup of a machine with 1000 MiB available and no limit."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(
        "MemTotal: 4096000 kB\nMemFree: 12 kB\nMemAvailable: 1024000 kB\n"
    )
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def group(kernel: Path, membership: str, path: str, **files: str) -> None:
    (kernel / "proc" / "self" / "cgroup").write_text(membership)
    directory = kernel / "cgroup" / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        name = name.replace("_DOT_", ".")
        (directory / name).write_text(text)


def found(kernel: Path) -> int:
    return available_bytes(proc=kernel / "proc", cgroups=kernel / "cgroup")


def test_this_machine_has_some() -> None:
    assert 2**20 < available_bytes() < 2**50


def test_without_control_groups(kernel: Path) -> None:
    assert found(kernel) == 1000 * MIB


def test_version_2(kernel: Path) -> None:
    group(
        kernel,
        "0::/job/task\n",
        "job/task",
        memory_DOT_max=str(300 * MIB),
        memory_DOT_current=str(250 * MIB),
        memory_DOT_stat=f"anon 1\ninactive_file {50 * MIB}\nactive_file 3\n",
    )
    assert found(kernel) == 100 * MIB


def test_a_parents_limit_counts(kernel: Path) -> None:
    group(kernel, "0::/job/task\n", "job/task", memory_DOT_max="max", memory_DOT_current="1")
    group(
        kernel,
        "0::/job/task\n",
        "job",
        memory_DOT_max=str(20 * MIB),
        memory_DOT_current=str(5 * MIB),
    )
    assert found(kernel) == 15 * MIB


def test_a_container_sees_its_own_group_as_the_root(kernel: Path) -> None:
    group(
        kernel,
        "0::/docker/abc\n",
        "",
        memory_DOT_max=str(64 * MIB),
        memory_DOT_current=str(4 * MIB),
    )
    assert found(kernel) == 60 * MIB


def test_version_1(kernel: Path) -> None:
    group(
        kernel,
        "5:cpu,cpuacct:/x\n7:memory:/job\n",
        "memory/job",
        memory_DOT_limit_in_bytes=str(30 * MIB),
        memory_DOT_usage_in_bytes=str(10 * MIB),
        memory_DOT_stat=f"total_inactive_file {MIB}\n",
    )
    assert found(kernel) == 21 * MIB
    group(
        kernel,
        "7:memory:/job\n",
        "memory/job",
        memory_DOT_limit_in_bytes=str(2**63 - 4096),
    )
    assert found(kernel) == 1000 * MIB


def test_an_overfull_group_has_nothing_left(kernel: Path) -> None:
    group(kernel, "0::/\n", "", memory_DOT_max="100", memory_DOT_current="200")
    assert found(kernel) == 0


@pytest.mark.parametrize(
    ("ranks", "share"), [(None, 80), ("1", 80), ("8", 10), ("x", 80), ("0", 80)]
)
def test_ranks_of_a_machine_share(
    monkeypatch: pytest.MonkeyPatch, ranks: str | None, share: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert local_share(80) == share

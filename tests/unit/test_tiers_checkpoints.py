"""Snapshots, restoring, state dictionaries and lending memory where buckets live in memory too."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.checkpoint import load_state_dict, state_dict
from gds_optimizer.errors import (
    ClosedError,
    CorruptBucketError,
    ForkedError,
    NoSpaceError,
    SnapshotError,
    StepFailedError,
)
from gds_optimizer.footer import read_footer
from gds_optimizer.frozen_check import FrozenCheck
from gds_optimizer.io import MemoryFile
from gds_optimizer.mapped_state import freeze_mapped, map_state
from gds_optimizer.snapshot_read import verify
from gds_optimizer.written_out import lend_device_memory, take_device_memory
from tests.support.engines import grads_of, in_child, leftovers
from tests.support.snapshots import (
    BUDGETS,
    LOTS,
    MIX,
    StreamedOptimizer,
    built,
    compare,
    everything,
    restore,
    root,
    take,
    train,
)

MOMENTS: dict[str, dict[str, str]] = {"fp32": {}, "int8": {"moment_dtype": "int8"}}


def files_of(optimizer: StreamedOptimizer) -> list[str]:
    """Names of the bucket files that there are."""
    return [path.name for path in optimizer.paths if path.exists()]


def bucket_names(optimizer: StreamedOptimizer, *, in_memory: bool) -> list[str]:
    store = optimizer.store
    return [p.name for i, p in enumerate(optimizer.paths) if (i in store.in_memory) == in_memory]


@pytest.mark.usefixtures("host_homes_are_copied")
def test_only_buckets_on_nvme_take_room(tmp_path: Path) -> None:
    with built(tmp_path, budgets=MIX) as optimizer:
        for step in range(3):
            optimizer.step(grads_of([model.numel() for model in optimizer.models], step))
        on_disk = bucket_names(optimizer, in_memory=False)
        assert files_of(optimizer) == on_disk
        assert 0 < len(on_disk) < len(optimizer.paths)
        stats, buckets = optimizer.engine.last_stats, optimizer.layout.buckets
        stays = [i for i, f in optimizer.store.in_memory.items() if f.stays_on_device]
        host = [i for i, f in optimizer.store.in_memory.items() if not f.stays_on_device]
        assert stays
        assert host
        assert stats.in_place_buckets == len(stays)
        assert stats.host_written_bytes == sum(buckets[i].file_bytes for i in host)
        moved = stats.written_bytes
        assert moved == sum(
            b.file_bytes for b in buckets if b.index not in optimizer.store.in_memory
        )
    assert leftovers(tmp_path) == []


def test_nothing_is_written_where_all_live_in_memory(tmp_path: Path) -> None:
    for budgets in ((LOTS, 0), (0, LOTS)):
        with built(tmp_path, budgets=budgets) as optimizer:
            train(optimizer, 0, 2)
            assert files_of(optimizer) == []
            assert optimizer.engine.last_stats.written_bytes == 0
            assert optimizer.engine.last_stats.read_bytes == 0


@pytest.mark.thinned
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("after", BUDGETS)
@pytest.mark.parametrize("before", BUDGETS)
def test_a_snapshot_restores_under_other_budgets(
    tmp_path: Path, before: str, after: str, moments: str
) -> None:
    options: dict[str, Any] = {"moments": MOMENTS[moments]}
    path = tmp_path / "snapshot"
    with built(root(tmp_path, "first"), budgets=BUDGETS[before], **options) as first:
        train(first, 0, 3)
        wanted = everything(first)
        take(first, path)
        assert files_of(first) == bucket_names(first, in_memory=False)
        train(first, 3, 6)
        later = everything(first)
    assert not list(verify(path)), "a bucket of the snapshot is not what its footer says"
    with built(root(tmp_path, "second"), budgets=BUDGETS[after], **options) as second:
        train(second, 0, 1)
        assert restore(second, path) == 3
        compare(wanted, everything(second))
        train(second, 3, 6)
        compare(later, everything(second))


def test_a_snapshot_restores_with_other_buckets(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    with built(root(tmp_path, "first"), budgets=MIX) as first:
        train(first, 0, 3)
        take(first, path)
        train(first, 3, 5)
        wanted = everything(first)
    with built(root(tmp_path, "second"), budgets=MIX, bucket_size=24 * 1024) as second:
        restore(second, path)
        assert files_of(second) == bucket_names(second, in_memory=False)
        train(second, 3, 5)
        compare(wanted, everything(second))


def test_damage_in_a_snapshot_is_found_when_a_bucket_is_taken_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    with built(root(tmp_path, "first"), budgets=(0, LOTS)) as first:
        train(first, 0, 2)
        take(first, path)
    (damaged,) = path.rglob("bucket00006.bin")
    with open(damaged, "r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
    with built(root(tmp_path, "second"), budgets=(0, LOTS)) as second:
        with pytest.raises(SnapshotError, match=r"bucket 6 .*checksum of plane"):
            restore(second, path)
        with pytest.raises(StepFailedError, match="did not finish"):
            train(second, 0, 1)


def test_room_for_a_snapshot_is_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with built(root(tmp_path), budgets=(LOTS, 0)) as optimizer:
        train(optimizer, 0, 2)
        wanted = everything(optimizer)
        with monkeypatch.context() as patch:
            patch.setattr("gds_optimizer.room.free_bytes", lambda *directories: 20_000)
            with pytest.raises(
                NoSpaceError, match=r"the buckets that live in memory, .* need .* 20000 are free"
            ):
                take(optimizer, tmp_path / "snapshot")
            with pytest.raises(
                NoSpaceError, match=r"the buckets that live in memory, .* need .* 20000 are free"
            ):
                map_state(optimizer.engine)
        assert not (tmp_path / "snapshot").exists()
        assert files_of(optimizer) == []
        compare(wanted, everything(optimizer))
        train(optimizer, 2, 3)


@pytest.mark.thinned
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("after", BUDGETS)
@pytest.mark.parametrize("before", BUDGETS)
def test_a_state_dictionary_loads_under_other_budgets(
    tmp_path: Path, before: str, after: str, moments: str
) -> None:
    options: dict[str, Any] = {"moments": MOMENTS[moments]}
    file = tmp_path / "state.pt"
    with built(root(tmp_path, "first"), budgets=BUDGETS[before], **options) as first:
        train(first, 0, 3)
        torch.save(state_dict(first.engine), file)
        train(first, 3, 4)
        assert files_of(first) == bucket_names(first, in_memory=False)
        assert first.engine.steps == 4
    with (
        built(root(tmp_path, "second"), budgets=BUDGETS[after], **options) as second,
        built(root(tmp_path, "third"), **options) as third,
    ):
        for each in (second, third):
            load_state_dict(each.engine, torch.load(file, mmap=True, weights_only=True))
        compare(everything(third), everything(second))
        assert files_of(second) == bucket_names(second, in_memory=False)
        for each in (second, third):
            train(each, 3, 6)
        compare(everything(third), everything(second))


@pytest.mark.parametrize("budgets", BUDGETS)
def test_frozen_tensors_stay_as_they_are(tmp_path: Path, budgets: str) -> None:
    with built(tmp_path, budgets=BUDGETS[budgets]) as optimizer:
        train(optimizer, 0, 2)
        mapped = map_state(optimizer.engine, verify=False)
        held = {i: mapped.tensors(i) for i in range(9) if optimizer.engine.is_streamed(i)}
        wanted = {i: {k: v.clone() for k, v in planes.items()} for i, planes in held.items()}
        del mapped
        freeze_mapped(optimizer.engine)
        check = FrozenCheck(optimizer.engine)
        train(optimizer, 2, 4)
        check.wait()
        assert check.failure is None
        for index, planes in held.items():
            for name, values in planes.items():
                assert torch.equal(values, wanted[index][name]), f"{name} of p{index}"
        del held, planes, values
        gc.collect()


def test_state_is_handed_out_again_and_again(tmp_path: Path) -> None:
    with built(tmp_path, budgets=MIX) as optimizer:
        for step in range(4):
            train(optimizer, step, step + 1)
            wanted = everything(optimizer)
            mapped = map_state(optimizer.engine)
            for index, binding in enumerate(optimizer.plan.bindings):
                if optimizer.engine.is_streamed(index):
                    for name, values in mapped.tensors(index).items():
                        if f"{name} of {binding.name}" in wanted:
                            assert torch.equal(values, wanted[f"{name} of {binding.name}"])


@pytest.mark.parametrize("budgets", BUDGETS)
def test_slots_are_lent_and_taken_again(tmp_path: Path, budgets: str) -> None:
    with (
        built(root(tmp_path, "a"), budgets=BUDGETS[budgets]) as optimizer,
        built(root(tmp_path, "b")) as other,
    ):
        for each in (optimizer, other):
            train(each, 0, 2)
        optimizer.engine.drain()
        lend_device_memory([optimizer.engine])
        optimizer.pool.suspend()
        homes = [f for f in optimizer.store.in_memory.values() if f.stays_on_device]
        assert all(file.memory.numel() == 0 for file in homes)
        with pytest.raises(ClosedError, match="restore_from_cpu"):
            train(optimizer, 2, 3)
        if homes:
            with pytest.raises(ClosedError, match="restore_from_cpu"):
                map_state(optimizer.engine)
            with pytest.raises(ClosedError, match="restore_from_cpu"):
                take(optimizer, tmp_path / "snapshot")
        optimizer.pool.resume()
        take_device_memory([optimizer.engine])
        assert files_of(optimizer) == bucket_names(optimizer, in_memory=False)
        for each in (optimizer, other):
            train(each, 2, 4)
        compare(everything(other), everything(optimizer))


def test_what_was_lent_is_checked_when_it_comes_back(tmp_path: Path) -> None:
    with built(tmp_path, budgets=(LOTS, 0)) as optimizer:
        train(optimizer, 0, 2)
        lend_device_memory([optimizer.engine])
        optimizer.pool.suspend()
        with open(optimizer.paths[1], "r+b") as file:
            file.write(b"something else")
        optimizer.pool.resume()
        with pytest.raises(CorruptBucketError, match=r"bucket 1 .*plane 'main'"):
            take_device_memory([optimizer.engine])


@pytest.mark.parametrize("budgets", BUDGETS)
def test_mains_are_rewritten_and_materialized(tmp_path: Path, budgets: str) -> None:
    with (
        built(root(tmp_path, "a"), budgets=BUDGETS[budgets], initialize="lazy") as optimizer,
        built(root(tmp_path, "b")) as other,
    ):
        for each in (optimizer, other):
            train(each, 0, 2)
            with torch.no_grad():
                each.models[7].mul_(2)
            each.engine.take_mains_from_model()
            train(each, 2, 3)
            values = torch.arange(10300, dtype=torch.float32)
            each.engine.write_mains({id(each.mains[8]): values})
            with each.engine.materialized([each.mains[3], each.mains[8]]):
                each.mains[3].data.add_(1)
                each.mains[8].data[5000:].mul_(3)
            train(each, 3, 5)
        compare(everything(other), everything(optimizer))


def test_footers_are_made_when_bytes_leave(tmp_path: Path) -> None:
    with built(tmp_path, budgets=MIX) as optimizer:
        train(optimizer, 0, 3)
        map_state(optimizer.engine)
        for bucket in optimizer.layout.buckets:
            if not optimizer.engine.is_blank(bucket.index):
                path, layout_id = optimizer.paths[bucket.index], optimizer.layout.layout_id
                record = optimizer.engine.records[bucket.index]
                assert read_footer(path, bucket, layout_id).step == record.step


@pytest.mark.parametrize("budgets", BUDGETS)
def test_a_forked_child_is_refused_and_leaves_all_as_it_was(tmp_path: Path, budgets: str) -> None:
    with (
        built(root(tmp_path, "a"), budgets=BUDGETS[budgets]) as optimizer,
        built(root(tmp_path, "b")) as other,
    ):
        for each in (optimizer, other):
            train(each, 0, 2)

        def check() -> None:
            for use in (lambda: train(optimizer, 2, 3), optimizer.engine.read_state):
                with pytest.raises(ForkedError):
                    use()
            optimizer.engine.close()

        in_child(check)
        for each in (optimizer, other):
            train(each, 2, 4)
        compare(everything(other), everything(optimizer))


@pytest.mark.usefixtures("host_homes_are_copied")
def test_a_failed_copy_fails_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with built(tmp_path, budgets=(0, LOTS)) as optimizer:
        train(optimizer, 0, 1)

        def refuse(self: MemoryFile, buffer: torch.Tensor, file_offset: int) -> Any:
            raise RuntimeError("no such copy")

        with monkeypatch.context() as patch:
            patch.setattr(MemoryFile, "write", refuse)
            with pytest.raises(StepFailedError, match="no such copy"):
                train(optimizer, 1, 2)
        with pytest.raises(StepFailedError, match="not usable"):
            optimizer.engine.read_state()
    assert os.listdir(tmp_path) == []

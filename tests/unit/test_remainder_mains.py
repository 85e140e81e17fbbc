"""Mains stored as 16-bit remainders: the same bits, and the halves that the model holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.checkpoint import load_state_dict, state_dict
from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import ModelChangedError, NoSpaceError, SnapshotError, UnsupportedError
from gds_optimizer.evicted import evicted_like
from gds_optimizer.mapped_state import freeze_mapped, map_state
from gds_optimizer.plan import Binding
from gds_optimizer.self_check import check_optimizer
from gds_optimizer.snapshot_read import verify
from gds_optimizer.snapshot_upper import upper_bytes
from gds_optimizer.snapshots import (
    SnapshotCopy,
    remove_snapshot,
    restore_snapshot,
    take_snapshot,
)
from tests.support import io_backends
from tests.support.engines import (
    SIZES,
    Pair,
    StreamedOptimizer,
    adamw,
    first_values,
    grads_of,
    mounted_disk,
    pair,
    same_bits,
    streamed,
)
from tests.support.forms import (
    BF16,
    BUCKET_BYTES,
    FP32,
    FROZEN,
    INT8,
    REMAINDER,
    momentum,
    name_of,
    special_values,
)
from tests.support.snapshots import (
    all_well,
    built,
    compare,
    everything,
    flip,
    hashes,
    restore,
    root,
    take,
    train,
    world,
)

MOMENTS = [FP32, BF16, INT8]
MAINS = [{"main": "fp32"}, REMAINDER]

OPTIMIZERS = {
    "default": adamw,
    "foreach": partial(adamw, foreach=True),
    "fused": partial(adamw, fused=True),
    "amsgrad": partial(adamw, amsgrad=True),
    "momentum": momentum,
    "sgd": partial(torch.optim.SGD, lr=0.1),
}


all_moments = pytest.mark.parametrize("moments", MOMENTS, ids=name_of)


def with_remainders(moments: dict[str, str]) -> dict[str, Any]:
    return {"moments": {**moments, **REMAINDER}, "bucket_size": BUCKET_BYTES}


def steps(both: Pair, start: int, stop: int) -> None:
    for step in range(start, stop):
        both.step(step, FROZEN.get(step, ()))
        both.check()


# ---------------------------------------------------------------------- what is stored


@pytest.mark.parametrize(
    ("make", "moments", "wanted"),
    [
        (adamw, FP32, "main:remainder16"),
        (adamw, BF16, "main:remainder16"),
        (adamw, INT8, "main:remainder16-bitmap"),
        (OPTIMIZERS["amsgrad"], BF16, "main:remainder16"),
        (momentum, FP32, "main:remainder16-bitmap"),
        (OPTIMIZERS["sgd"], FP32, "main:remainder16-bitmap"),
        (torch.optim.Adagrad, FP32, "main:remainder16-bitmap"),
    ],
)
@pytest.mark.parametrize("main", ["auto", "remainder"])
def test_codecs(tmp_path, make, moments, wanted, main):
    options = {"moments": {**moments, "main": main}, "bucket_size": BUCKET_BYTES}
    with streamed(tmp_path, make, (10,), **options) as optimizer:
        assert optimizer.layout.spaces[0].planes[0].codec == wanted


def test_what_the_model_holds_no_half_of(tmp_path):
    halves = first_values((10, 20), dtype=torch.float16)
    with pytest.raises(UnsupportedError, match=r"main is 'remainder', but .*torch.float16.* of p0"):
        StreamedOptimizer(tmp_path, adamw, halves, moments=REMAINDER)
    assert list(tmp_path.iterdir()) == []
    mixed = [halves[0], first_values((20,))[0]]
    optimizer = StreamedOptimizer(tmp_path, adamw, mixed, moments={"main": "auto"})
    try:
        codecs = [space.planes[0].codec for space in optimizer.layout.spaces]
        assert codecs == ["fp32", "main:remainder16"]
    finally:
        optimizer.close()


@pytest.mark.parametrize(
    ("moments", "per_element"),
    [(FP32, 10), (BF16, 6), (INT8, 2.125 + 2 * (1 + 4 / 256))],
    ids=name_of,
)
def test_bytes_of_a_parameter(tmp_path, moments, per_element):
    numel, sizes = 2**18, (2**19,)
    options = {"moments": {**moments, **REMAINDER}, "slots": 1, "bucket_size": 12 * numel}
    with streamed(tmp_path, sizes=sizes, **options) as made:
        for step in range(2):
            made.step(grads_of(sizes, step))
        layout, stats = made.layout, made.engine.last_stats
        assert [bucket.numel for bucket in layout.buckets] == [numel, numel]
        # The slot still held one of the two buckets. A page each for footer and padding of planes.
        for nbytes in (stats.read_bytes, stats.written_bytes / 2, made.pool.slot_bytes):
            assert 4096 <= nbytes - per_element * numel <= 4 * 4096
        # Decoded mains and the parameters that they are put together from, decoded moments.
        scratch_bytes = (4 + 2 + (8 if moments else 0)) * numel
        assert made.pool.scratch.numel() == layout.max_scratch_bytes == scratch_bytes


# ---------------------------------------------------------------------- the step


@pytest.mark.thinned
@pytest.mark.parametrize("moments", MOMENTS, ids=name_of)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_streamed_equals_resident(tmp_path, kind, moments):
    """With lossy moments: equals a resident run whose moments are rounded as they are stored."""
    with pair(tmp_path, OPTIMIZERS[kind], **with_remainders(moments)) as both:
        assert len(both.engine.layout.buckets) > 5
        steps(both, 0, 6)


@pytest.mark.parametrize("initialize", ["eager", "lazy"])
@pytest.mark.parametrize("slots", [1, 2])
def test_mains_that_stay_in_the_model(tmp_path, initialize, slots):
    options = {**with_remainders(FP32), "initialize": initialize, "slots": slots}
    with pair(tmp_path, adamw, native=(1, 3, 4), **options) as both:
        steps(both, 0, 5)


@pytest.mark.thinned
@all_moments
@pytest.mark.parametrize("kind", ["default", "fused", "momentum"])
def test_ties_and_special_values(tmp_path, kind, moments):
    """They go through files and slots as they are; some are stepped, by a rate of zero."""
    make = {
        "default": partial(adamw, weight_decay=0.0),
        "fused": partial(adamw, weight_decay=0.0, fused=True),
        "momentum": momentum,
    }[kind]
    with pair(tmp_path, make, **with_remainders(moments)) as both:
        steps(both, 0, 2)
        sources = {}
        for index, size in enumerate(SIZES):
            values = special_values(size, index)
            both.resident.mains[index].copy_(values)
            sources[id(both.streamed.mains[index])] = values
        both.engine.write_mains(sources)
        is_tie = torch.cat([v.view(torch.int32) & 0x1FFFF for v in sources.values()]) == 0x18000
        assert is_tie.sum() > 1000
        both.check()  # the models know nothing yet
        for optimizer in both.optimizers:
            optimizer.param_groups[0]["lr"] = 0.0
        steps(both, 2, 6)
        mains = torch.cat([state["main"] for state in both.engine.read_state().values()])
        assert ((mains.view(torch.int32) & 0x1FFFF) == 0x18000).sum() > 1000


# ---------------------------------------------------------------------- changes between steps


def test_a_changed_model_is_refused(tmp_path):
    """Before anything is computed or written; put back, training goes on as if nothing was."""
    with pair(tmp_path, adamw, **with_remainders(FP32)) as both:
        steps(both, 0, 2)
        engine, model = both.engine, both.streamed.models[7]
        engine.drain()
        before, files = [m.clone() for m in both.streamed.models], hashes(tmp_path)
        kept = model[4000].clone()
        model[4000] += 1
        message = r"parameter of p7 .*reload_model_params\(\)"
        refused: list[Callable[[], Any]] = [
            lambda: both.streamed.step(grads_of(SIZES, 2)),
            engine.read_state,
            lambda: state_dict(engine),
            lambda: take_snapshot({"opt0": engine}, tmp_path / "snapshot"),
            engine.update_model,
        ]
        for call in refused:
            with pytest.raises(ModelChangedError, match=message):
                call()
        model[4000] = kept
        assert all(map(same_bits, before, both.streamed.models))
        assert hashes(tmp_path) == files
        assert engine.steps == 2
        steps(both, 2, 5)


def test_values_written_again_are_no_change(tmp_path):
    """As an all-gather of the parameters does."""
    with pair(tmp_path, adamw, **with_remainders(FP32)) as both:
        for step in range(3):
            steps(both, step, step + 1)
            for model in both.streamed.models:
                model.copy_(model.clone())


@all_moments
def test_reloading_takes_the_model(tmp_path, moments):
    """What changes mains between steps gives what it gives with mains in fp32."""
    found = []
    for number, main in enumerate(MAINS):
        options = {"moments": {**moments, **main}, "bucket_size": BUCKET_BYTES}
        with streamed(root(tmp_path, str(number)), **options) as optimizer:
            engine = optimizer.engine
            optimizer.step(grads_of(SIZES, 0))
            for index, model in enumerate(optimizer.models):
                model.copy_(first_values(SIZES, seed=index + 5)[index])
            engine.take_mains_from_model()
            found.append([everything(optimizer)])
            for model in optimizer.models:
                model.mul_(2)
            engine.take_mains_from_model()
            optimizer.step(grads_of(SIZES, 1, (3,)))
            found[-1].append(everything(optimizer))
            values = torch.randn(SIZES[8], generator=torch.Generator().manual_seed(3))
            engine.write_mains({id(optimizer.mains[8]): values})
            found[-1].append(everything(optimizer))
            with engine.materialized([optimizer.mains[7], optimizer.mains[3]]):
                optimizer.mains[7].detach().mul_(1.0001)
            found[-1].append(everything(optimizer))
            for step in (2, 3):  # the first without gradient of what was changed
                optimizer.step(grads_of(SIZES, step, (7, 8) if step == 2 else ()))
                found[-1].append(everything(optimizer))
    for plain, remainders in zip(*found, strict=True):
        compare(plain, remainders)


def test_changed_mains_need_no_room_once_the_model_has_them(tmp_path):
    with streamed(tmp_path, **with_remainders(FP32)) as optimizer:
        engine = optimizer.engine
        assert not engine.halves.apart
        engine.write_mains({id(optimizer.mains[8]): torch.full((SIZES[8],), 1 / 3)})
        assert engine.halves.apart
        optimizer.step(grads_of(SIZES, 0))
        assert not engine.halves.apart
        engine.write_mains({id(optimizer.mains[8]): torch.full((SIZES[8],), 1 / 3)})
        engine.take_mains_from_model()
        assert not engine.halves.apart


@all_moments
def test_state_that_is_there_at_setup(tmp_path, moments):
    """Its mains need not be what the model's parameters say."""

    def warm_up(optimizer: torch.optim.Optimizer, mains: list[torch.Tensor]) -> None:
        for step in range(2):
            for main, grad in zip(mains, grads_of(SIZES, step), strict=True):
                main.grad = grad if moments else None
            optimizer.step()
        for index, main in enumerate(mains):
            main.copy_(special_values(main.numel(), index))

    found = []
    for number, main in enumerate(MAINS):
        options = {"moments": {**moments, **main}, "bucket_size": BUCKET_BYTES}
        with streamed(
            root(tmp_path, str(number)), initialize="given", warm_up=warm_up, **options
        ) as optimizer:
            found.append([everything(optimizer)])
            for step in range(2, 5):
                optimizer.step(grads_of(SIZES, step, FROZEN[step]))
                found[-1].append(everything(optimizer))
    for plain, remainders in zip(*found, strict=True):
        compare(plain, remainders)


# ---------------------------------------------------------------------- saving and restoring


PAIRS = [(old, new) for old in MAINS for new in MAINS if REMAINDER in (old, new)]


@pytest.mark.thinned
@all_moments
@pytest.mark.parametrize(("old", "new"), PAIRS, ids=name_of)
def test_snapshots_and_state_dictionaries(tmp_path, moments, old, new):
    """A snapshot needs no model, and both go from one form of mains to the other."""
    before = {"moments": {**moments, **old}, "bucket_size": BUCKET_BYTES}
    after = {"moments": {**moments, **new}, "bucket_size": BUCKET_BYTES}
    path = tmp_path / "snapshot"
    with built(root(tmp_path, "a"), **before) as saved:
        train(saved, 0, 4)
        saved.engine.write_mains({id(saved.mains[8]): special_values(SIZES[8], 1)})
        wanted = everything(saved)
        wanted_main = wanted["main of p8"]
        take(saved, path)
        plain = state_dict(saved.engine)
        with built(root(tmp_path, "c"), **after) as loaded:
            train(loaded, 0, 1)
            load_state_dict(loaded.engine, plain)
            rounded = wanted_main.to(torch.bfloat16)
            compare({**wanted, "model of p8": rounded}, everything(loaded))
        del plain
        train(saved, 4, 7)
        final = everything(saved)
    assert verify(path) == []
    upper = path / "rank00000" / "opt0" / "upper.bin"
    assert upper.exists() == (old is REMAINDER)
    with built(root(tmp_path, "b"), **after) as restored:
        train(restored, 0, 1)
        assert restore(restored, path) == 4
        compare({**wanted, "model of p8": wanted_main.to(torch.bfloat16)}, everything(restored))
        train(restored, 4, 7)
        compare(final, everything(restored))
    remove_snapshot(path)
    assert not path.exists()


@pytest.mark.parametrize("new", MAINS, ids=name_of)
@pytest.mark.parametrize("moments", [FP32, BF16], ids=name_of)
def test_a_snapshot_on_other_ranks(tmp_path, moments, new):
    options = with_remainders(moments)
    path = tmp_path / "snapshot"
    with world(root(tmp_path, "a"), 2, **options) as saved:
        saved.train(0, 3)
        all_well(saved.together(lambda e, p: take_snapshot(e, path, placement=p)))
        wanted = saved.everything()
    other = {"moments": {**moments, **new}, "bucket_size": 2 * BUCKET_BYTES}
    with world(root(tmp_path, "b"), 3, **other) as restored:
        restored.train(0, 1)
        all_well(restored.together(lambda e, p: restore_snapshot(e, path, placement=p)))
        compare(wanted, restored.everything())


def test_a_copy_has_the_halves(tmp_path):
    path, copied = tmp_path / "snapshot", tmp_path / "copy"
    with built(root(tmp_path), **with_remainders(FP32)) as optimizer:
        train(optimizer, 0, 3)
        take(optimizer, path)
        wanted = everything(optimizer)
        copy = SnapshotCopy(path, copied)
        copy.wait(60)
        assert copy.copied_bytes == copy.total_bytes
        remove_snapshot(path)
        train(optimizer, 3, 5)
        restore(optimizer, copied)
        compare(wanted, everything(optimizer))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
@pytest.mark.parametrize("bucket_size", [BUCKET_BYTES, 2 * BUCKET_BYTES])
def test_damaged_halves_are_found(tmp_path, damage, bucket_size):
    """By `verify`, by `restore` (which changes nothing, then) and by a copy."""
    path = tmp_path / "snapshot"
    with built(root(tmp_path, "a"), **with_remainders(FP32)) as saved:
        train(saved, 0, 2)
        take(saved, path)
    upper = path / "rank00000" / "opt0" / "upper.bin"
    if damage == "flip":
        flip(upper, upper.stat().st_size // 2, bit=3)
    elif damage == "cut":
        with open(upper, "r+b") as file:
            file.truncate(upper.stat().st_size - 4096)
    else:
        upper.unlink()
    assert any("upper.bin" in text for text in verify(path))
    options = {**with_remainders(FP32), "bucket_size": bucket_size}
    with built(root(tmp_path, "b"), **options) as other:
        train(other, 0, 1)
        before = everything(other)
        with pytest.raises(SnapshotError, match=r"upper\.bin"):
            restore(other, path)
        compare(before, everything(other))
        copy = SnapshotCopy(path, tmp_path / "copy")
        with pytest.raises(SnapshotError):
            copy.wait(60)


def test_no_room_for_the_halves(tmp_path):
    sizes = (2**20,)
    with (
        mounted_disk(tmp_path, 4 * 2**20) as disk,
        streamed(root(tmp_path), sizes=sizes, moments=REMAINDER, bucket_size=2**22) as optimizer,
    ):
        optimizer.step(grads_of(sizes, 0))
        (disk / "filler").write_bytes(bytes(2**20))
        with pytest.raises(NoSpaceError, match=f"they need {upper_bytes(optimizer.layout)} bytes"):
            take(optimizer, disk / "snapshot")
        assert not (disk / "snapshot").exists()
        optimizer.step(grads_of(sizes, 1))


@all_moments
def test_what_an_asynchronous_writer_reads_stays(tmp_path, moments):
    with streamed(tmp_path, **with_remainders(moments)) as optimizer:
        for step in range(2):
            optimizer.step(grads_of(SIZES, step))
        wanted = optimizer.engine.read_state()
        tensors = map_state(optimizer.engine).tensors(8)
        freeze_mapped(optimizer.engine)
        optimizer.step(grads_of(SIZES, 2))
        for key, value in tensors.items():
            assert same_bits(value, wanted["p8"][key])


def test_the_model_may_be_loaded_after_the_state(tmp_path):
    """A checkpoint's parts come in either order."""
    a, b = root(tmp_path, "a"), root(tmp_path, "b")
    with streamed(a, **with_remainders(FP32)) as saved:
        saved.step(grads_of(SIZES, 0))
        weights = [model.clone() for model in saved.models]
        plain = state_dict(saved.engine)
        with streamed(b, **with_remainders(FP32)) as loaded:
            loaded.step(grads_of(SIZES, 7))
            mapped = map_state(loaded.engine, writable=True)
            for index in range(len(SIZES)):
                if loaded.engine.is_streamed(index):
                    for key, target in mapped.tensors(index).items():
                        target.copy_(plain["shards"][f"p{index}"]["planes"][key])
            mapped.commit()
            assert loaded.engine.halves.apart
            for model, weight in zip(loaded.models, weights, strict=True):
                model.copy_(weight)
            del plain, mapped
            for each in (saved, loaded):
                each.step(grads_of(SIZES, 1))
            wanted, found = everything(saved), everything(loaded)
            for key in wanted:
                if key.startswith(("main", "exp", "model")):
                    assert same_bits(wanted[key], found[key]), key


# ---------------------------------------------------------------------- the rehearsal


@pytest.mark.parametrize("main", ["auto", "remainder"])
def test_the_rehearsal_stores_mains_the_same_way(tmp_path, main, monkeypatch):
    from gds_optimizer import self_check

    codecs = []
    plan_engine = self_check.plan_engine

    def noting(*args: Any, **options: Any) -> Any:
        plan = plan_engine(*args, **options)
        codecs.extend(plane.codec for plane in plan.layout.spaces[0].planes)
        return plan

    monkeypatch.setattr(self_check, "plan_engine", noting)
    config = StreamConfig(directories=(tmp_path,), main=main, self_check="always")
    backend = io_backends.make("host")
    try:
        model = first_values((10,))[0]
        main_param = evicted_like(model, dtype=torch.float32, name="p")
        assert Binding("p", main_param, model).keeps_main
        check_optimizer(adamw([main_param]), config, backend, 0)
    finally:
        backend.close()
    assert codecs == ["main:remainder16", "fp32", "fp32"]


@all_moments
def test_files_do_not_depend_on_slots_or_on_what_was_in_them(tmp_path, moments):
    """Padding and gaps are zero, and a state that is loaded gives the bytes that it came from."""

    def contents_of(optimizer: StreamedOptimizer) -> list[bytes]:
        optimizer.engine.drain()
        return [
            path.read_bytes()[: bucket.footer_offset]
            for bucket, path in zip(optimizer.layout.buckets, optimizer.paths, strict=True)
        ]

    contents = []
    for slots in (1, 3):
        options = {**with_remainders(moments), "slots": slots, "initialize": "lazy"}
        with streamed(root(tmp_path, str(slots)), **options) as optimizer:
            optimizer.engine.forget_slots()
            for slot in optimizer.pool.slots:
                slot.buffer.fill_(0xA5)
            optimizer.pool.scratch.fill_(0xA5)
            for step in range(3):
                optimizer.step(grads_of(SIZES, step))
            contents.append(contents_of(optimizer))
            with streamed(root(tmp_path, "loaded"), **options) as loaded:
                for path in loaded.paths if moments else ():  # gaps in fp32 planes mean nothing
                    path.write_bytes(b"\xa5" * path.stat().st_size)
                load_state_dict(loaded.engine, state_dict(optimizer.engine))
                contents.append(contents_of(loaded))
    assert contents[0] == contents[1] == contents[2] == contents[3]


def test_files_hold_remainders_and_tie_bits(tmp_path):
    """The main plane and the signs of the second moment, by their definition."""
    with streamed(tmp_path, sizes=(1000,), **with_remainders(FP32)) as optimizer:
        optimizer.step(grads_of((1000,), 0))
        values = special_values(1000, 0)
        optimizer.engine.write_mains({id(optimizer.mains[0]): values})
        optimizer.engine.drain()
        (bucket,) = optimizer.layout.buckets
        data = torch.frombuffer(bytearray(Path(optimizer.paths[0]).read_bytes()), dtype=torch.uint8)
        main, _, moment = (
            data[plane.offset : plane.offset + plane.nbytes] for plane in bucket.planes
        )
        low = main[:2000].view(torch.int16).to(torch.int32)
        bits = values.view(torch.int32)
        assert torch.equal(low & 0xFFFF, bits & 0xFFFF)
        is_below = (bits & 0x1FFFF) == 0x18000
        assert torch.equal(moment.view(torch.int32)[:1000] < 0, is_below)

"""Moments that are not kept in fp32: what is stored, and that nothing else changes."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer.bench.page_cache import resident_pages
from gds_optimizer.checkpoint import load_state_dict, state_dict
from gds_optimizer.codecs import Codec, get_codec, nearest_codec
from gds_optimizer.codecs.base import EncodedCodec
from gds_optimizer.errors import (
    ConfigError,
    CorruptBucketError,
    NoSpaceError,
    StepFailedError,
    UnsupportedError,
)
from gds_optimizer.layout import Layout, align_up
from gds_optimizer.mapped_state import freeze_mapped, map_state
from gds_optimizer.megatron.fused_adam import FusedAdamStandIn
from gds_optimizer.snapshots import restore_snapshot, take_snapshot
from tests.support.engines import (
    SIZES,
    StreamedOptimizer,
    adamw,
    first_values,
    grads_of,
    mounted_disk,
    pair,
    same_bits,
    streamed,
)
from tests.support.forms import BUCKET_BYTES, FROZEN, momentum, name_of
from tests.support.snapshots import (
    all_well,
    built,
    compare,
    everything,
    flip,
    restore,
    take,
    train,
    world,
)

FP32 = {"moment_dtype": "fp32"}
BF16 = {"moment_dtype": "bf16", "moment_rounding": "nearest"}
BF16_SR = {"moment_dtype": "bf16", "moment_rounding": "stochastic"}
INT8 = {"moment_dtype": "int8", "moment_rounding": "nearest"}
INT8_SR = {"moment_dtype": "int8", "moment_rounding": "stochastic"}
LOSSY = [BF16, BF16_SR, INT8, INT8_SR]

counting_in_groups = partial(FusedAdamStandIn, lr=1e-2)
OPTIMIZERS = {
    "foreach": partial(adamw, foreach=True),
    "fused": partial(adamw, fused=True),
    "amsgrad": partial(adamw, amsgrad=True),
    "momentum": momentum,
}

State = Mapping[str, Mapping[str, Any]]


lossy = pytest.mark.parametrize("moments", LOSSY, ids=name_of)


def codecs_of(layout: Layout) -> dict[str, str]:
    return {plane.name: plane.codec for space in layout.spaces for plane in space.planes}


def rounded(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    """A shard's moments as they come back; blocks are counted from its start."""
    codec = nearest_codec(codec.name)
    encoded = torch.zeros(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode_from(values, encoded)
    return codec.decode(encoded, values.numel())


def check_states(wanted: State, found: State, codecs: Mapping[str, str] | None = None) -> None:
    """`found` is `wanted`, once what `codecs` names is rounded."""
    assert wanted.keys() == found.keys()
    for name, state in wanted.items():
        assert state.keys() == found[name].keys(), name
        for key, value in state.items():
            codec = get_codec((codecs or {}).get(key, "fp32"))
            expected = value if codec.is_view else rounded(value, codec)
            assert same_bits(expected, found[name][key]), f"{key} of {name}"


def directories(tmp_path: Path, *names: str) -> list[Path]:
    for name in names:
        (tmp_path / name).mkdir()
    return [tmp_path / name for name in names]


def steps(optimizer: StreamedOptimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        optimizer.step(grads_of(SIZES, step, FROZEN.get(step, ())))


# ---------------------------------------------------------------------- what is stored


@pytest.mark.parametrize(
    ("make", "moments", "wanted"),
    [
        (adamw, FP32, ("fp32", "fp32")),
        (adamw, BF16, ("fp32:bf16", "fp32:bf16")),
        (adamw, INT8_SR, ("fp32:int8-signed-sr", "fp32:int8-unsigned-sr")),
        (OPTIMIZERS["amsgrad"], INT8, ("fp32:int8-signed", *["fp32:int8-unsigned"] * 2)),
        (momentum, INT8, ("fp32:int8-signed",)),
        (torch.optim.Adagrad, BF16_SR, ("fp32:bf16-sr",)),
        (torch.optim.SGD, INT8, ()),
    ],
)
def test_codecs(tmp_path, make, moments, wanted):
    with streamed(tmp_path, make, (10,), moments=moments, bucket_size=BUCKET_BYTES) as optimizer:
        codecs = [plane.codec for plane in optimizer.layout.spaces[0].planes]
        assert codecs == ["fp32", *wanted]
        assert [plane.codec for plane in optimizer.plan.schemas[0].planes] == list(wanted)


def test_what_has_no_8_bit_form_is_refused(tmp_path):
    message = "moment_dtype is 'int8', and Adagrad keeps 'sum'.*exp_avg_sq.*use 'bf16' or 'fp32'"
    with (
        pytest.raises(UnsupportedError, match=message),
        streamed(tmp_path, torch.optim.Adagrad, moments=INT8),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("moments", "per_element"),
    [(FP32, 12), (BF16, 8), (INT8_SR, 4 + 2 * (1 + 4 / 256))],
    ids=name_of,
)
def test_bytes_of_a_parameter(tmp_path, moments, per_element):
    """As many elements are in a bucket, and fewer bytes are read, written and held in slots."""
    numel, sizes = 2**18, (2**19,)
    with streamed(tmp_path, sizes=sizes, moments=moments, slots=1, bucket_size=12 * numel) as made:
        for step in range(2):
            made.step(grads_of(sizes, step))
        layout, stats = made.layout, made.engine.last_stats
        assert [bucket.numel for bucket in layout.buckets] == [numel, numel]
        # The slot still held one of the two buckets. A page each for footer and padding of planes.
        for nbytes in (stats.read_bytes, stats.written_bytes / 2, made.pool.slot_bytes):
            assert 4096 <= nbytes - per_element * numel <= 3 * 4096
        scratch_bytes = 0 if moments is FP32 else 8 * numel
        assert made.pool.scratch.numel() == layout.max_scratch_bytes == scratch_bytes
        assert made.pool.nbytes == made.pool.slot_bytes + scratch_bytes


def test_the_bucket_size_counts_decoded_bytes(tmp_path):
    """It does not get smaller by what is saved, nor may it be."""
    with (
        pytest.raises(ConfigError, match="1024 elements of 12 bytes"),
        streamed(tmp_path, moments=INT8, bucket_size=12 * 1024 - 1),
    ):
        pass


def test_no_block_holds_elements_of_two_shards(tmp_path):
    for moments, alignment in ((FP32, 64), (BF16, 64), (INT8, 256)):
        with streamed(tmp_path, moments=moments) as optimizer:
            (space,) = optimizer.layout.spaces
            shards = zip(space.shards, space.shard_starts, strict=True)
            end = 0
            for shard, start in shards:
                assert start == align_up(end, alignment)
                end = start + shard.numel


def fill_files(optimizer: StreamedOptimizer) -> None:
    """As if the files had been used for something else before."""
    for path in optimizer.paths:
        nbytes = path.stat().st_size
        with open(path, "r+b") as file:
            file.write(b"\xa5" * nbytes)


@lossy
def test_files_do_not_depend_on_slots_or_on_what_was_in_them(tmp_path, moments):
    """Padding and gaps are zero, and a state that is loaded gives the bytes that it came from."""

    def contents_of(optimizer: StreamedOptimizer) -> list[bytes]:
        optimizer.engine.drain()
        return [
            path.read_bytes()[bucket.planes[1].offset : bucket.footer_offset]
            for bucket, path in zip(optimizer.layout.buckets, optimizer.paths, strict=True)
        ]

    a, b, c = directories(tmp_path, "a", "b", "c")
    contents = []
    for directory, slots in ((a, 1), (b, 3)):
        with streamed(directory, moments=moments, slots=slots) as optimizer:
            optimizer.engine.forget_slots()
            for slot in optimizer.pool.slots:
                slot.buffer.fill_(0xA5)
            optimizer.pool.scratch.fill_(0xA5)
            steps(optimizer, 5, 8)
            contents.append(contents_of(optimizer))
            with streamed(c, moments=moments) as loaded:
                fill_files(loaded)
                load_state_dict(loaded.engine, state_dict(optimizer.engine))
                contents.append(contents_of(loaded))
    assert contents[0] == contents[1] == contents[2] == contents[3]


# ---------------------------------------------------------------------- the step


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("make", "slots", "moments"),
    [(adamw, slots, moments) for slots in (1, 3) for moments in LOSSY]
    + [(make, 3, moments) for make in OPTIMIZERS.values() for moments in (BF16_SR, INT8_SR)],
)
def test_a_step_is_the_resident_one_with_rounded_moments(tmp_path, make, slots, moments):
    with pair(tmp_path, make, moments=moments, slots=slots, bucket_size=BUCKET_BYTES) as both:
        assert len(both.engine.layout.buckets) > 10
        for step in range(6):
            both.step(step, FROZEN.get(step, ()))
        both.check()


def test_what_is_not_stepped_keeps_its_bytes(tmp_path):
    """Also where rounding a second time would round anew: 8-bit subnormals."""
    sizes = (1000, 1000)
    with streamed(tmp_path, sizes=sizes, moments=INT8_SR, bucket_size=4 * BUCKET_BYTES) as made:
        made.step(grads_of(sizes, 0))
        saved = state_dict(made.engine)
        planes = saved["shards"]["p0"]["planes"]
        generator = torch.Generator().manual_seed(5)
        tiny = torch.randint(1, 2**27, (1000,), dtype=torch.int32, generator=generator)
        planes["exp_avg_sq"] = (tiny % (1 << tiny % 28)).view(torch.float32)
        saved["shards"]["p1"]["planes"] = {
            key: value.clone() for key, value in saved["shards"]["p1"]["planes"].items()
        }
        planes |= {key: planes[key].clone() for key in ("main", "exp_avg")}
        load_state_dict(made.engine, saved)
        wanted = made.engine.read_state()["p0"]
        for step in range(1, 4):
            made.step([None, grads_of(sizes, step)[1]])
            found = made.engine.read_state()["p0"]
            assert all(same_bits(value, found[key]) for key, value in wanted.items())
        again = get_codec("fp32:int8-unsigned-sr")
        encoded = torch.zeros(again.encoded_bytes(1000), dtype=torch.uint8)
        again.encode_from(wanted["exp_avg_sq"], encoded, seed=3)
        assert not same_bits(again.decode(encoded, 1000), wanted["exp_avg_sq"])


@pytest.mark.parametrize("moments", [BF16_SR, INT8_SR], ids=name_of)
def test_mains_that_stay_in_the_model(tmp_path, moments):
    with pair(tmp_path, adamw, moments=moments, native=(1, 3, 4), initialize="lazy") as both:
        for step in range(5):
            both.step(step, FROZEN.get(step, ()))
        both.check()


def test_moments_without_counters(tmp_path):
    """An optimizer that has to create its state itself, in its first step."""

    class Created(torch.optim.SGD):
        """SGD whose momentum does not start at zero."""

    with pair(
        tmp_path, partial(Created, lr=0.1, momentum=0.9, dampening=0.5), moments=INT8
    ) as both:
        assert both.streamed.plan.schemas[0].initial is None
        for step in range(4):
            both.step(step, FROZEN.get(step, ()))
        both.check()


@lossy
def test_state_that_is_there_at_setup_is_rounded_to_nearest(tmp_path, moments):
    def warm_up(optimizer: torch.optim.Optimizer, mains: list[torch.Tensor]) -> None:
        for step in range(2):
            for main, grad in zip(mains, grads_of(SIZES, step), strict=True):
                main.grad = grad
            optimizer.step()

    a, b = directories(tmp_path, "a", "b")
    options: dict[str, Any] = {"initialize": "given", "warm_up": warm_up}
    with streamed(a, **options) as exact, streamed(b, moments=moments, **options) as made:
        check_states(exact.engine.read_state(), made.engine.read_state(), codecs_of(made.layout))
        made.step(grads_of(SIZES, 2))


@lossy
def test_nothing_is_decoded_where_only_mains_are_wanted(tmp_path, moments, monkeypatch):
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a moment was decoded or encoded")

    with streamed(tmp_path, moments=moments) as optimizer:
        steps(optimizer, 5, 7)
        engine = optimizer.engine
        before = engine.read_state()
        with monkeypatch.context() as patch:
            patch.setattr(EncodedCodec, "decode_into", refuse)
            patch.setattr(EncodedCodec, "encode_from", refuse)
            engine.write_mains({id(optimizer.mains[3]): torch.full((SIZES[3],), 2.0)})
            with engine.materialized([optimizer.mains[8]]):
                optimizer.mains[8].detach().mul_(2)
            optimizer.models[0].fill_(0.5)
            engine.take_mains_from_model()
            engine.settle()
            engine.update_model()
        after = engine.read_state()
        for name, state in before.items():
            assert {k: v for k, v in state.items() if k != "main"}.keys() <= after[name].keys()
            for key in state.keys() - {"main"}:
                assert same_bits(state[key], after[name][key])
        assert after["p0"]["main"].item() == 0.5


@lossy
def test_damage_is_found_before_it_is_used(tmp_path, moments):
    with streamed(tmp_path, moments=moments, slots=1) as optimizer:
        steps(optimizer, 5, 6)
        optimizer.engine.drain()
        flip(optimizer.paths[3], optimizer.layout.buckets[3].planes[2].offset + 77)
        with pytest.raises(CorruptBucketError, match=r"bucket 3 .*checksum of plane 'exp_avg_sq'"):
            map_state(optimizer.engine)
        assert optimizer.engine.handed_out is None
        with pytest.raises(StepFailedError, match=r"bucket 3 .*checksum of plane 'exp_avg_sq'"):
            steps(optimizer, 6, 7)


# ---------------------------------------------------------------------- handed out


def handed_out(engine: Any) -> State:
    mapped = map_state(engine)
    return {
        f"p{index}": {key: value.clone() for key, value in mapped.tensors(index).items()}
        for index, binding in enumerate(engine.plan.bindings)
        if binding.main.numel()
    }


def unnamed_files() -> int:
    return Path("/proc/self/maps").read_text().count("(deleted)")


@lossy
def test_what_is_handed_out_is_decoded(tmp_path, moments):
    gc.collect()
    files = unnamed_files()
    with pair(tmp_path, adamw, moments=moments, initialize="lazy") as both:
        fill_files(both.streamed)
        for found in handed_out(both.engine).values():
            assert not found["exp_avg"].any()  # never written
        for step in range(3):
            both.step(step)
            for name, found in handed_out(both.engine).items():
                wanted = both.resident.state(int(name[1:]))
                assert all(same_bits(value, wanted[key]) for key, value in found.items())
        assert unnamed_files() == files + 2
        both.engine.take_files_back()
        map_state(both.engine, verify=False)
        assert not any(resident_pages(path) for path in both.streamed.paths)
        both.step(3)
        assert unnamed_files() == files  # their space is free again
        assert not any(resident_pages(path) for path in both.streamed.paths)
        both.check()


@pytest.mark.thinned
@lossy
@pytest.mark.parametrize("bucket_size", [BUCKET_BYTES, 5 * BUCKET_BYTES])
def test_a_state_dict_is_taken_up_to_the_bit(tmp_path, moments, bucket_size):
    """Also with other buckets, since blocks are counted from each shard's start."""
    a, b = directories(tmp_path, "a", "b")
    with streamed(a, moments=moments) as source:
        steps(source, 0, 6)
        torch.save(state_dict(source.engine), tmp_path / "state.pt")
        with streamed(b, moments=moments, bucket_size=bucket_size) as target:
            steps(target, 6, 8)  # another past
            saved = torch.load(tmp_path / "state.pt", mmap=True, weights_only=True)
            load_state_dict(target.engine, saved)
            wanted = source.engine.read_state()
            # What has not been stepped has zeros for moments, like the files.
            wanted["p2"] |= {key: torch.zeros(SIZES[2]) for key in ("exp_avg", "exp_avg_sq")}
            check_states(wanted, {**target.engine.read_state(), "p2": wanted["p2"]})
            if moments["moment_rounding"] == "nearest" or bucket_size == BUCKET_BYTES:
                for optimizer in (source, target):
                    steps(optimizer, 6, 9)
                check_states(
                    {**source.engine.read_state(), "p2": {}},
                    {**target.engine.read_state(), "p2": {}},
                )


@pytest.mark.parametrize("moments", [BF16_SR, INT8_SR], ids=name_of)
def test_what_is_read_while_training_goes_on_stays_as_it_is(tmp_path, moments):
    with streamed(tmp_path, moments=moments) as optimizer:
        steps(optimizer, 5, 6)
        wanted = handed_out(optimizer.engine)
        tensors = {i: map_state(optimizer.engine).tensors(i) for i in (3, 8)}
        freeze_mapped(optimizer.engine)
        steps(optimizer, 6, 8)
    gc.collect()
    for index, found in tensors.items():
        assert all(same_bits(value, wanted[f"p{index}"][key]) for key, value in found.items())


def test_no_room_for_decoded_values(tmp_path):
    """Said with numbers, before anything is given up."""
    sizes = (2**20,)
    with (
        mounted_disk(tmp_path, 40 * 2**20) as disk,
        streamed(disk, sizes=sizes, moments=BF16, bucket_size=2**20) as optimizer,
    ):
        optimizer.step(grads_of(sizes, 0))
        wanted = optimizer.engine.read_state()
        take(optimizer, disk / "snapshot")  # what is loaded next goes to other files
        for writable in (False, True):
            status = os.statvfs(disk)
            with open(disk / "ballast", "wb") as file:
                free_bytes = status.f_bavail * status.f_frsize
                os.posix_fallocate(file.fileno(), 0, free_bytes - 7 * 2**20)
            message = rf"too little room .* need {8 * 2**20} bytes .*, and \d+ are free"
            with pytest.raises(NoSpaceError, match=message):
                map_state(optimizer.engine, writable=writable)
            os.unlink(disk / "ballast")
            check_states(wanted, optimizer.engine.read_state())
        # Nothing of it may be left here, or the disk cannot be unmounted.
        for key, value in handed_out(optimizer.engine)["p0"].items():
            assert same_bits(value, wanted["p0"][key])
        optimizer.step(grads_of(sizes, 1))


# ---------------------------------------------------------------------- snapshots


@pytest.mark.thinned
@pytest.mark.parametrize("make", [adamw, counting_in_groups, momentum])
@pytest.mark.parametrize("moments", [BF16, BF16_SR, INT8_SR], ids=name_of)
def test_a_snapshot_is_linked_back(tmp_path, make, moments):
    """And the run goes on as the one that was not interrupted, whoever counts its steps."""
    a, b = directories(tmp_path, "a", "b")
    with built(a, make, moments=moments) as whole:
        train(whole, 0, 3)
        path = take(whole, tmp_path / "snapshot")
        taken = everything(whole)
        train(whole, 3, 7)
        with built(b, make, moments=moments) as resumed:
            train(resumed, 0, 5)
            assert restore(resumed, path) == 3
            compare(taken, everything(resumed))
            frozen = [each.stat().st_ino for each in sorted(path.rglob("bucket*.bin"))]
            assert [each.stat().st_ino for each in resumed.paths] == frozen
            train(resumed, 3, 7)
            compare(everything(whole), everything(resumed))


@pytest.mark.parametrize(
    ("source", "target"),
    [(FP32, BF16_SR), (BF16_SR, FP32), (FP32, INT8), (INT8_SR, FP32), (INT8, BF16), (BF16, INT8)],
    ids=name_of,
)
def test_a_snapshot_is_taken_up_by_other_codecs(tmp_path, source, target):
    """Exactly where they can hold it, else rounded to nearest; training goes on."""
    a, b = directories(tmp_path, "a", "b")
    with built(a, moments=source) as first:
        train(first, 0, 3)
        path = take(first, tmp_path / "snapshot")
        wanted = first.engine.read_state()
        with built(b, moments=target, bucket_size=3 * BUCKET_BYTES) as second:
            assert restore(second, path) == 3
            check_states(wanted, second.engine.read_state(), codecs_of(second.layout))
            for main, other in zip(first.models, second.models, strict=True):
                assert same_bits(main, other)
            train(second, 3, 5)
            assert restore(second, path) == 3  # over what it has become
            check_states(wanted, second.engine.read_state(), codecs_of(second.layout))


@pytest.mark.parametrize("moments", [BF16_SR, INT8_SR], ids=name_of)
def test_a_snapshot_of_other_ranks(tmp_path, moments):
    """Saved shards are decoded wherever they are cut; the bits are those that were kept."""
    a, b, c = directories(tmp_path, "a", "b", "c")
    path = tmp_path / "snapshot"
    with world(a, 3, moments=moments) as three:
        three.train(0, 3)
        all_well(three.together(lambda e, p: take_snapshot(e, path, placement=p)))
        wanted = three.everything()
    with world(b, 2) as two:
        all_well(two.together(lambda e, p: restore_snapshot(e, path, placement=p)))
        compare(wanted, two.everything())
    with world(c, 2, moments=moments) as two:
        all_well(two.together(lambda e, p: restore_snapshot(e, path, placement=p)))
        found = two.everything()
        for what, value in wanted.items():
            if "exp_avg" in what:  # the blocks are others
                torch.testing.assert_close(found[what], value, rtol=0.13, atol=1e-3)
            else:
                compare({what: value}, {what: found[what]})


def test_a_snapshot_needs_room_for_decoded_values_before_it_replaces_anything(
    tmp_path, monkeypatch
):
    """The disk is not really full; what matters is what is left of the state."""
    a, b = directories(tmp_path, "a", "b")
    with built(a) as first:
        train(first, 0, 2)
        path = take(first, tmp_path / "snapshot")
    with built(b, moments=BF16) as second:
        train(second, 0, 1)
        before = everything(second)
        with monkeypatch.context() as patch:
            plain = os.statvfs

            def full(where: Any) -> Any:
                values = list(plain(where))
                values[4] = 0  # f_bavail
                return os.statvfs_result(values)

            patch.setattr(os, "statvfs", full)
            with pytest.raises(NoSpaceError, match="and 0 are free"):
                restore(second, path)
        compare(before, everything(second))
        train(second, 1, 2)
        assert restore(second, path) == 2


def test_first_values_are_not_all_alike():
    """Or nothing above would show that elements are where they belong."""
    assert len(set(first_values(SIZES)[3].tolist())) > 1000

"""The state of an engine handed out as tensors over its files, and taken back."""

from __future__ import annotations

import copy
import gc
import os
from typing import Any

import pytest
import torch

from gds_optimizer import mapped_state as module
from gds_optimizer.bench.page_cache import resident_pages
from gds_optimizer.errors import (
    ClosedError,
    CorruptBucketError,
    IoError,
    StepFailedError,
    StoreChangedError,
)
from gds_optimizer.footer import read_footer
from gds_optimizer.mapped_state import freeze_mapped, map_state
from tests.support.engines import (
    SIZES,
    StreamedOptimizer,
    adamw,
    first_values,
    grads_of,
    pair,
    same_bits,
    streamed,
)

PLANES = {"main", "exp_avg", "exp_avg_sq"}


def step(optimizer: StreamedOptimizer, number: int) -> None:
    optimizer.step(grads_of(SIZES, number))


def copied(engine: Any, **options: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Everything that is handed out, by name of the shard."""
    mapped = map_state(engine, **options)
    return {
        binding.name: {key: value.clone() for key, value in mapped.tensors(index).items()}
        for index, binding in enumerate(engine.plan.bindings)
        if binding.main.numel()
    }


def check_equal(engine: Any, found: dict[str, dict[str, torch.Tensor]]) -> None:
    """What was handed out is what the engine itself reads; what it has not yet is zero."""
    read = engine.read_state()
    assert found.keys() == {name for name, state in read.items() if state["main"].numel()}
    for name, planes in found.items():
        assert planes.keys() == PLANES
        for key, value in planes.items():
            wanted = read[name].get(key, torch.zeros(value.numel()))
            assert same_bits(value, wanted), f"{key} of {name}"


def fill(engine: Any, source: dict[str, dict[str, torch.Tensor]]) -> None:
    """Write a state into what is handed out, as a checkpoint's reader does."""
    mapped = map_state(engine, writable=True)
    for index, binding in enumerate(engine.plan.bindings):
        for key, value in mapped.tensors(index).items():
            if value.numel():
                value.copy_(source[binding.name][key])


@pytest.fixture
def optimizer(tmp_path):
    with streamed(tmp_path) as made:
        yield made


class TestReading:
    @pytest.mark.parametrize("initialize", ["eager", "lazy"])
    @pytest.mark.parametrize("steps", [0, 1, 2, 3])
    def test_it_is_the_state(self, tmp_path, initialize, steps):
        with streamed(tmp_path, initialize=initialize) as optimizer:
            assert len(optimizer.paths) > 10
            for number in range(steps):
                step(optimizer, number)
            check_equal(optimizer.engine, copied(optimizer.engine))

    def test_native_parameters_have_no_main(self, tmp_path):
        """They stay in the model; only their moments are in files."""
        models = [v.float() if i == 3 else v for i, v in enumerate(first_values(SIZES))]
        optimizer = StreamedOptimizer(tmp_path, adamw, models, native=[3])
        try:
            step(optimizer, 0)
            mapped = map_state(optimizer.engine)
            assert mapped.tensors(3).keys() == {"exp_avg", "exp_avg_sq"}
            assert mapped.tensors(2).keys() == PLANES
            found = {key: value.clone() for key, value in mapped.tensors(3).items()}
            read = optimizer.engine.read_state()["p3"]
            assert all(same_bits(value, read[key]) for key, value in found.items())
        finally:
            optimizer.close()

    def test_a_part_of_a_shard(self, optimizer):
        step(optimizer, 0)
        whole = copied(optimizer.engine)["p8"]
        for start, end in ((0, 1), (1000, 5000), (10299, 10300), (5, None)):
            part = map_state(optimizer.engine).tensors(8, start, end)
            assert all(same_bits(part[key], whole[key][start:end]) for key in PLANES)

    def test_an_empty_shard(self, optimizer):
        assert SIZES[4] == 0
        assert {k: v.numel() for k, v in map_state(optimizer.engine).tensors(4).items()} == (
            dict.fromkeys(PLANES, 0)
        )

    def test_mains_that_the_model_holds_are_brought_in(self, optimizer):
        step(optimizer, 0)
        for model in optimizer.models:
            model.fill_(0.5)
        optimizer.engine.take_mains_from_model()
        before = optimizer.engine.read_state()
        found = copied(optimizer.engine)
        assert all((planes["main"] == 0.5).all() for planes in found.values())
        for name, planes in found.items():
            assert all(same_bits(planes[k], before[name][k]) for k in ("exp_avg", "exp_avg_sq"))

    def test_it_is_handed_out_once(self, optimizer):
        step(optimizer, 0)
        first = map_state(optimizer.engine)
        assert map_state(optimizer.engine) is first
        step(optimizer, 1)
        assert map_state(optimizer.engine) is not first

    def test_new_mains_are_handed_out_anew(self, optimizer):
        """Also when nothing was read or written in between."""
        step(optimizer, 0)
        copied(optimizer.engine)
        for model in optimizer.models:
            model.fill_(0.25)
        optimizer.engine.take_mains_from_model()
        found = copied(optimizer.engine)
        assert all((planes["main"] == 0.25).all() for planes in found.values())

    @pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
    def test_training_goes_on_as_without(self, tmp_path, kept):
        """Whether or not somebody keeps the tensors, which then show what is there now."""
        with pair(tmp_path, adamw) as both:
            tensors = []
            for number in range(4):
                both.step(number)
                found = map_state(both.engine).tensors(8)
                assert same_bits(found["main"], both.resident.mains[8])
                if kept:
                    tensors.append(found)
            both.step(4)
            both.check()
            for found in tensors:
                assert same_bits(found["main"], both.resident.mains[8])

    def test_nothing_stays_in_the_page_cache_after_the_next_step(self, optimizer):
        step(optimizer, 0)
        found = copied(optimizer.engine)
        assert any(resident_pages(path) for path in optimizer.paths)
        step(optimizer, 1)
        assert [resident_pages(path) for path in optimizer.paths] == [0] * len(optimizer.paths)
        del found

    def test_tensors_outlive_the_engine(self, tmp_path):
        with streamed(tmp_path) as optimizer:
            step(optimizer, 0)
            tensors = map_state(optimizer.engine).tensors(8)
            expected = {key: value.clone() for key, value in tensors.items()}
        del optimizer
        gc.collect()
        assert not list(tmp_path.rglob("*.bin"))
        assert all(same_bits(tensors[key], expected[key]) for key in PLANES)

    def test_what_stays_in_spare_files_is_not_the_state(self, tmp_path):
        """A plane that was never written is zero, whatever its file was used for before."""
        with streamed(tmp_path) as optimizer:
            for bucket in optimizer.layout.buckets:
                plane = bucket.planes[1]
                with open(optimizer.paths[bucket.index], "r+b") as file:
                    file.seek(plane.offset)
                    file.write(b"\x40" * plane.nbytes)
            found = copied(optimizer.engine)
            assert not any(planes["exp_avg"].any() for planes in found.values())
            check_equal(optimizer.engine, found)

    def test_after_closing_it_is_refused(self, tmp_path):
        with streamed(tmp_path) as optimizer:
            pass
        with pytest.raises(ClosedError):
            map_state(optimizer.engine)


class TestVerifying:
    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_a_flipped_bit_gets_into_no_checkpoint(self, optimizer, number):
        step(optimizer, 0)
        optimizer.engine.drain()
        bucket = optimizer.layout.buckets[3]
        flip(optimizer.paths[3], bucket.planes[number].offset + 77)
        name = bucket.planes[number].name
        with pytest.raises(
            CorruptBucketError, match=rf"bucket 3 in .*00003\.bin .*checksum of plane '{name}'"
        ):
            map_state(optimizer.engine)
        assert optimizer.engine.handed_out is None

    def test_nor_does_the_state_of_another_step(self, optimizer):
        step(optimizer, 0)
        optimizer.engine.drain()
        old = optimizer.paths[2].read_bytes()
        step(optimizer, 1)
        optimizer.engine.drain()
        optimizer.paths[2].write_bytes(old)  # the same file: a write that was lost
        with pytest.raises(CorruptBucketError, match=r"bucket 2 .*step: wanted 2, got 1"):
            map_state(optimizer.engine)

    def test_it_can_be_left_out(self, optimizer):
        step(optimizer, 0)
        optimizer.engine.drain()
        flip(optimizer.paths[3], optimizer.layout.buckets[3].planes[0].offset)
        map_state(optimizer.engine, verify=False)

    def test_a_file_that_somebody_shortened_is_not_mapped(self, optimizer):
        """Touching it would kill the process."""
        step(optimizer, 0)
        optimizer.engine.drain()
        os.truncate(optimizer.paths[5], 4096)
        with pytest.raises(StoreChangedError, match=r"00005\.bin was resized"):
            map_state(optimizer.engine)


class TestWriting:
    @pytest.mark.parametrize("initialize", ["eager", "lazy"])
    @pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "stepped"])
    def test_it_becomes_the_state(self, tmp_path, initialize, steps):
        """Completely, also what slots hold, for reading and for the next steps."""
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        with pair(tmp_path / "a", adamw) as both:
            for number in range(3):
                both.step(number)
            source = copied(both.engine)
            models = first_values(SIZES, seed=5)
            other = StreamedOptimizer(tmp_path / "b", adamw, models, initialize=initialize)
            try:
                for number in range(steps):
                    step(other, 100 + number)
                fill(other.engine, source)
                # What a front end does with counters and the model's parameters.
                for main, wanted in zip(other.mains, both.streamed.mains, strict=True):
                    state = both.streamed.optimizer.state[wanted]
                    if main.numel():
                        other.optimizer.state[main] = {"step": state["step"].clone()}
                    else:
                        other.optimizer.state[main] = copy.deepcopy(state)
                for model, wanted in zip(other.models, both.streamed.models, strict=True):
                    model.copy_(wanted)
                map_state(other.engine, writable=True).commit()
                for number in range(3, 6):
                    both.step(number)
                    step(other, number)
                wanted, got = both.engine.read_state(), other.engine.read_state()
                for name, state in wanted.items():
                    assert all(same_bits(value, got[name][key]) for key, value in state.items())
                for a, b in zip(both.streamed.models, other.models, strict=True):
                    assert same_bits(a, b)
            finally:
                other.close()

    def test_footers_say_what_is_there(self, optimizer):
        step(optimizer, 0)
        source = copied(optimizer.engine)
        for planes in source.values():
            planes["exp_avg"].add_(1)
        fill(optimizer.engine, source)
        map_state(optimizer.engine, writable=True).commit()
        for bucket, path in zip(optimizer.layout.buckets, optimizer.paths, strict=True):
            footer = read_footer(path, bucket, optimizer.layout.layout_id)
            assert (footer.step, footer.written) == (1, [True] * 3)
        check_equal(optimizer.engine, source)

    @pytest.mark.parametrize("where", ["plane", "footer"])
    def test_a_bit_that_flips_after_loading_is_found_in_the_next_step(self, optimizer, where):
        step(optimizer, 0)
        fill(optimizer.engine, copied(optimizer.engine))
        map_state(optimizer.engine, writable=True).commit()
        bucket = optimizer.layout.buckets[3]
        at = bucket.planes[2].offset if where == "plane" else bucket.footer_offset
        flip(optimizer.paths[3], at + 9)
        with pytest.raises(StepFailedError, match=r"bucket 3 in .* is not what was written"):
            step(optimizer, 1)

    def test_nothing_is_dirty_or_cached_afterwards(self, optimizer):
        fill(optimizer.engine, copied(optimizer.engine))
        map_state(optimizer.engine, writable=True).commit()
        assert [resident_pages(path) for path in optimizer.paths] == [0] * len(optimizer.paths)

    def test_until_it_is_committed_everything_else_is_refused(self, optimizer):
        step(optimizer, 0)
        source = copied(optimizer.engine)
        fill(optimizer.engine, source)
        engine = optimizer.engine
        for use in (
            lambda: step(optimizer, 1),
            engine.read_state,
            engine.take_mains_from_model,
            lambda: map_state(engine),
            lambda: engine.write_mains({}),
        ):
            with pytest.raises(StepFailedError, match="did not finish: load it again, or close"):
                use()
        # It is none of the failures that only closing ends.
        fill(engine, source)
        map_state(engine, writable=True).commit()
        step(optimizer, 1)

    def test_an_uncommitted_optimizer_can_be_closed(self, tmp_path):
        with streamed(tmp_path) as optimizer:
            fill(optimizer.engine, copied(optimizer.engine))
        assert not list(tmp_path.rglob("*.bin"))

    def test_a_footer_that_cannot_be_written(self, optimizer, monkeypatch):
        """No disk does that to order, so the answer is made up."""
        source = copied(optimizer.engine)
        fill(optimizer.engine, source)
        mapped = map_state(optimizer.engine, writable=True)
        with monkeypatch.context() as patch:
            patch.setattr(module.os, "pwrite", lambda *args: 100)
            with pytest.raises(IoError, match=r"write of .*bin failed.*wanted 4096 bytes, got 100"):
                mapped.commit()
        with pytest.raises(StepFailedError, match="did not finish"):
            step(optimizer, 0)
        mapped.commit()
        step(optimizer, 0)

    def test_tensors_that_are_read_meanwhile_stay_usable(self, optimizer):
        step(optimizer, 0)
        reading = map_state(optimizer.engine).tensors(8)
        source = copied(optimizer.engine)
        for planes in source.values():
            planes["main"].fill_(2)
        fill(optimizer.engine, source)
        map_state(optimizer.engine, writable=True).commit()
        assert set(reading["main"].tolist()) == {2.0}

    def test_counters_that_nobody_sets_start_at_the_start(self, optimizer):
        """Rather than be missing beside the moments."""
        fill(optimizer.engine, copied(optimizer.engine))
        map_state(optimizer.engine, writable=True).commit()
        step(optimizer, 0)
        assert optimizer.optimizer.state[optimizer.mains[3]]["step"] == 1


class TestFreezing:
    def test_what_was_handed_out_stays_as_it_is(self, optimizer):
        step(optimizer, 0)
        found = {i: map_state(optimizer.engine).tensors(i) for i in (3, 8)}
        expected = copied(optimizer.engine)
        freeze_mapped(optimizer.engine)
        for number in range(1, 4):
            step(optimizer, number)
        for index, tensors in found.items():
            assert all(same_bits(tensors[k], expected[f"p{index}"][k]) for k in PLANES)
        check_equal(optimizer.engine, copied(optimizer.engine))

    def test_nor_does_loading_change_it(self, optimizer):
        step(optimizer, 0)
        found = map_state(optimizer.engine).tensors(8)
        expected = copied(optimizer.engine)
        freeze_mapped(optimizer.engine)
        changed = {
            name: {key: value + 1 for key, value in planes.items()}
            for name, planes in expected.items()
        }
        fill(optimizer.engine, changed)
        map_state(optimizer.engine, writable=True).commit()
        assert all(same_bits(found[key], expected["p8"][key]) for key in PLANES)
        check_equal(optimizer.engine, changed)


def flip(path: Any, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())

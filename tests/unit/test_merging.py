"""Merged pieces: one tensor is stepped for many shards, with the bits of the resident optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gds_optimizer.engine import Engine
from gds_optimizer.megatron.fused_adam import FusedAdamStandIn
from gds_optimizer.megatron.half_grads import HalfGrad
from gds_optimizer.merging import Gradients, Merger, merges
from gds_optimizer.stepper import Stepper
from tests.support.engines import (
    ResidentOptimizer,
    StreamedOptimizer,
    adamw,
    bits_of,
    first_values,
    same_bits,
    streamed,
)

ALIGNMENT = 64
# Tiny and odd, aligned, cut by bucket boundaries, one element short of and beyond a vector.
SIZES = (64, 1, 63, 65, 128, 1000, 7, 1024, 2500, 0, 33, 64, 64, 3, 4096, 50)
EVEN = tuple(ALIGNMENT * n for n in (1, 3, 2, 17, 1, 40, 1, 1, 5))

OPTIMIZERS: dict[str, Any] = {
    "adamw": adamw,
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "maximize": partial(torch.optim.Adam, lr=1e-2, maximize=True),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
    "fused-sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "stand-in": partial(FusedAdamStandIn, lr=1e-2, weight_decay=0.1),
}


class Buffer:
    """Views of one buffer, laid out as frameworks do: starts aligned, what lies between is junk."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, junk: float) -> None:
        starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        self.whole = torch.full((starts[-1],), junk, dtype=dtype)
        self.views = [
            self.whole[start : start + size] for start, size in zip(starts, sizes, strict=False)
        ]
        self.is_gap = torch.ones(starts[-1], dtype=torch.bool)
        for start, size in zip(starts, sizes, strict=False):
            self.is_gap[start : start + size] = False

    def fill(self, values: Sequence[torch.Tensor]) -> None:
        for view, value in zip(self.views, values, strict=True):
            view.copy_(value)


def gradients(sizes: Sequence[int], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(size, generator=generator) for size in sizes]


class Calls:
    """Counts what the resident optimizer's step is called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors = 0
        run = Stepper.run

        def counting(stepper: Stepper, pieces: Any) -> Any:
            self.tensors += len(pieces)
            return run(stepper, pieces)

        monkeypatch.setattr(Stepper, "run", counting)

    def taken(self) -> int:
        tensors, self.tensors = self.tensors, 0
        return tensors


class Trio:
    """Resident, merged and unmerged, given gradients in one buffer, compared after every step."""

    def __init__(
        self,
        directory: Path,
        make: Any,
        sizes: Sequence[int],
        monkeypatch: pytest.MonkeyPatch,
        *,
        junk: float = float("nan"),
        separate: bool = False,
        **options: Any,
    ) -> None:
        self.sizes, self.separate = list(sizes), separate
        self.buffer = Buffer(sizes, torch.float32, junk)
        self.params = [Buffer(sizes, torch.bfloat16, 7.0) for _ in range(2)]
        for params in self.params:
            params.fill(first_values(sizes))
        groups = options.get("groups")
        self.resident = ResidentOptimizer(make, first_values(sizes), groups=groups)
        self.calls = Calls(monkeypatch)
        self.streamed = []
        for number, params in enumerate(self.params):
            root = directory / str(number)
            root.mkdir()
            self.streamed.append(StreamedOptimizer(root, make, params.views, **options))
        self.streamed[1].engine._merger.is_allowed = False
        self.calls.taken()

    def step(self, step: int, without: Sequence[int] = ()) -> int:
        """The number of tensors that the merged one stepped."""
        values = gradients(self.sizes, step)
        self.buffer.fill(values)
        kept = [None if i in without else v for i, v in enumerate(values)]
        self.resident.step(kept)
        merged, _ = 0, self.calls.taken()
        for number, each in enumerate(self.streamed):
            views = [v.clone() for v in self.buffer.views] if self.separate else self.buffer.views
            for index, (main, view) in enumerate(zip(each.mains, views, strict=True)):
                main.grad = None if index in without else view
            each.optimizer.step()
            if number == 0:
                merged = self.calls.taken()
        return merged

    def check(self, *, with_resident: bool = True) -> None:
        states = [each.engine.read_state() for each in self.streamed]
        for index in range(len(self.sizes)):
            name = f"p{index}"
            wanted = self.resident.state(index) if with_resident else states[1][name]
            for found in states:
                assert set(found[name]) == set(wanted)
                for key, value in wanted.items():
                    assert same_bits(value, found[name][key]), f"{key} of {name} differs"
            for params in self.params:
                assert not with_resident or same_bits(
                    self.resident.models[index], params.views[index]
                )
        for params in self.params:
            assert (params.whole[params.is_gap] == 7.0).all(), "a copy went between two parameters"
        for each in self.streamed:
            each.engine.settle()
        merged, apart = ([path.read_bytes() for path in each.paths] for each in self.streamed)
        assert merged == apart

    def close(self) -> None:
        for each in self.streamed:
            each.close()


@pytest.fixture
def trio(tmp_path, monkeypatch):
    made: list[Trio] = []

    def make(*args: Any, **options: Any) -> Trio:
        made.append(Trio(tmp_path, *args, monkeypatch, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def least(each: Trio) -> int:
    """As few tensors as there can be: one for each bucket."""
    return len(each.streamed[0].layout.buckets)


@pytest.mark.thinned
@pytest.mark.parametrize("separate", [False, True], ids=["one-buffer", "separate"])
@pytest.mark.parametrize("sizes", [SIZES, EVEN], ids=["odd", "even"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_merged_steps(trio, name, sizes, separate):
    # The smallest buckets hold 1024 elements of up to four planes.
    bucket_size = (16 if name == "amsgrad" else 12) * 2**10
    each = trio(OPTIMIZERS[name], sizes, separate=separate, bucket_size=bucket_size)
    for step in range(4):
        tensors = each.step(step)
        if sizes is EVEN or not name.startswith("fused"):
            # An empty shard is stepped by itself.
            assert tensors == least(each) + sizes.count(0)
        each.check()


@pytest.mark.parametrize("junk", [0.0, float("inf"), -3e38, 1e-40])
def test_what_lies_between_gradients_stays_there(trio, junk):
    each = trio(adamw, SIZES, junk=junk)
    for step in range(3):
        each.step(step)
        each.check()
    gaps = each.buffer.whole[each.buffer.is_gap]
    assert same_bits(gaps, torch.full_like(gaps, junk))


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_encoded_moments_are_the_same_merged_or_not(trio, dtype):
    each = trio(adamw, SIZES, moments={"moment_dtype": dtype, "moment_rounding": "stochastic"})
    for step in range(3):
        each.step(step, without=(5,) if step == 1 else ())
        each.check(with_resident=False)


def test_group_boundaries_are_kept(trio):
    each = trio(adamw, EVEN, groups={3: {"lr": 3e-2}, 6: {"weight_decay": 0.5}})
    for step in range(3):
        assert least(each) < each.step(step) <= least(each) + 2
        each.check()


def test_skipped_gradients_and_counters_that_diverge(trio):
    each = trio(adamw, EVEN)
    assert each.step(0) == least(each)
    frozen = (2, 6)
    assert each.step(1, without=frozen) > least(each)
    each.check()
    # They have a gradient again, and other counters than their neighbours.
    for step in (2, 3):
        assert each.step(step) > least(each)
        each.check()
    counters = {
        float(state["step"]) for state in each.streamed[0].optimizer.state.values() if state
    }
    assert counters == {3.0, 4.0}


def test_a_counter_that_somebody_sets(trio):
    each = trio(adamw, EVEN)
    each.step(0)
    for optimizer, mains in (
        (each.resident.optimizer, each.resident.mains),
        *((s.optimizer, s.mains) for s in each.streamed),
    ):
        optimizer.state[mains[4]]["step"].fill_(100.0)
    assert each.step(1) > least(each)
    each.check()


def test_states_that_change_places(trio):
    """Each is the one that was there before, in the same order, but of another parameter."""
    each = trio(adamw, EVEN)
    each.step(0)
    each.step(1, without=(4, 5))
    each.step(2)
    for one in (each.resident, *each.streamed):
        state = one.optimizer.state
        held = dict(state)
        a, b = one.mains[3:5]
        state.clear()
        for main, values in held.items():
            state[b if main is a else a if main is b else main] = values
    if each.resident:  # moments of the resident one go with the state: only counters are to move
        a, b = (each.resident.optimizer.state[main] for main in each.resident.mains[3:5])
        for key in ("exp_avg", "exp_avg_sq"):
            a[key], b[key] = b[key], a[key]
    counters = [[float(one.optimizer.state[m]["step"]) for m in one.mains] for one in each.streamed]
    assert counters == [[3.0] * 3 + [2.0, 3.0, 2.0] + [3.0] * 3] * 2
    each.step(3)
    each.check()


def test_what_is_foreseen_of_counters_is_what_comparing_finds(trio, monkeypatch):
    """Comparing those of a device waits for it, so there it is not done unless one was touched."""
    monkeypatch.setattr("gds_optimizer.scalars._are_on_cpu", lambda marks: False)
    both = trio(adamw, SIZES)
    scalars = both.streamed[0].engine._scalars
    for step in range(3):
        both.step(step)
        foreseen, marks = scalars._foreseen
        assert scalars.classes() is foreseen
        scalars._foreseen = None
        compared = scalars.classes()
        scalars._foreseen = (foreseen, marks)
        assert compared is not foreseen
        first = [[each.tolist().index(n) for n in each.tolist()] for each in (foreseen, compared)]
        assert first[0] == first[1]
        assert marks.are(scalars._marks())
    held = both.streamed[0].optimizer.state[both.streamed[0].mains[3]]
    held["step"].add_(0)  # touched, though not changed
    assert not marks.are(scalars._marks())


def test_runs_kept_between_steps_are_those_found_anew(tmp_path, monkeypatch):
    """Whatever of gradients, groups and options changes between two steps."""
    memory = torch.randn(2, sum(EVEN))

    def play(name: str) -> tuple[list[list[bytes]], Any, int]:
        (tmp_path / name).mkdir()
        found: list[int] = []
        models = []
        with monkeypatch.context() as patch, streamed(tmp_path / name, adamw, EVEN) as each:
            looked = Merger._found

            def counted(self: Merger, index: int, *rest: Any) -> Any:
                found.append(index)
                return looked(self, index, *rest)

            patch.setattr(Merger, "_found", counted)
            first, *_ = each.optimizer.param_groups
            for step in range(12):
                buffer = memory[step // 6].clone() if step == 5 else memory[step // 6]
                for index, (main, grad) in enumerate(
                    zip(each.mains, buffer.split(list(EVEN)), strict=True)
                ):
                    main.grad = None if (step, index) in {(3, 2), (8, 0)} else grad
                first["fused"] = step in (9, 10)
                if step == 7:
                    moved = first["params"].pop()
                    each.optimizer.add_param_group({"params": [moved], "lr": 0.5})
                each.optimizer.step()
                models.append(bits_of(each.models))
            return models, each.engine.read_state(), len(found)

    fast, fast_state, few = play("fast")
    with monkeypatch.context() as patch:
        patch.setattr(
            Merger, "begin", lambda self, *_: setattr(self, "_changes", self._changes + 1)
        )
        slow, slow_state, many = play("slow")
    assert 0 < few < many
    assert fast == slow
    for name, entry in slow_state.items():
        for key, value in entry.items():
            assert same_bits(value, fast_state[name][key]), f"{key} of {name} differs"


def test_copies_of_several_counters_are_those_of_each(tmp_path):
    with streamed(tmp_path, adamw, EVEN) as each:
        for step in range(2):
            each.step(gradients(EVEN, step))
        each.optimizer.state[each.mains[1]]["step"] = torch.tensor([5.0])
        each.optimizer.state[each.mains[2]]["step"] = 6.0
        each.optimizer.state[each.mains[3]]["step"] = torch.tensor(7.0, dtype=torch.float64)
        scalars = each.engine._scalars
        wanted = [scalars.of(index) for index in range(len(EVEN))]
        found = scalars.copies(range(len(EVEN)))
        assert [list(each) for each in found] == [list(each) for each in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert type(one["step"]) is type(other["step"])
            assert same_bits(one["step"], other["step"])
        for one in found:
            if isinstance(one["step"], torch.Tensor):
                one["step"].fill_(99.0)
        for index, other in enumerate(wanted):
            assert same_bits(scalars.of(index)["step"], other["step"])


def test_counters_updated_in_place_are_those_made_anew(tmp_path, monkeypatch):
    """Whatever is frozen, set, replaced or loaded between two steps."""

    def replace(each: StreamedOptimizer) -> None:
        each.optimizer.state[each.mains[4]]["step"] = torch.tensor(50.0)

    def fill(each: StreamedOptimizer) -> None:
        each.optimizer.state[each.mains[0]]["step"].fill_(7.0)

    def other_memory(each: StreamedOptimizer) -> None:
        each.optimizer.state[each.mains[3]]["step"].data = torch.tensor(9.0)

    def other_state(each: StreamedOptimizer) -> None:
        state = each.optimizer.state
        state[each.mains[5]] = type(state[each.mains[5]])({"step": torch.tensor(3.0)}, "p5", ())

    def load(each: StreamedOptimizer) -> None:
        each.engine.adopt_scalars()

    def no_change(each: StreamedOptimizer) -> None:
        pass

    actions = [no_change, no_change, replace, no_change, fill, other_memory, other_state, load]
    frozen = {1: (2, 6), 3: (0,), 4: (0, 1)}

    def counters(each: StreamedOptimizer) -> list[float]:
        return [float(each.optimizer.state[main]["step"]) for main in each.mains]

    def play(name: str) -> tuple[list[list[float]], Any]:
        (tmp_path / name).mkdir()
        with streamed(tmp_path / name, adamw, EVEN) as each:
            found = []
            for step, action in enumerate([*actions, no_change, no_change]):
                grads = gradients(EVEN, step)
                for index in frozen.get(step, ()):
                    grads[index] = None
                each.step(grads)
                if step >= 2:
                    found.append(counters(each))
                if step not in (0, 1):
                    action(each)
                assert each.engine._scalars.classes() is not None
            kept = [each.optimizer.state[main]["step"] for main in each.mains]
            each.step(gradients(EVEN, 99))
            now = [each.optimizer.state[main]["step"] for main in each.mains]
            in_place.append(all(a is b for a, b in zip(kept, now, strict=True)))
            return found, each.engine.read_state()

    in_place: list[bool] = []
    fast, fast_state = play("fast")
    with monkeypatch.context() as patch:
        patch.setattr("gds_optimizer.scalars._Cohort.targets", lambda *_: None)
        slow, slow_state = play("slow")
    assert in_place == [True, False]
    assert fast == slow
    for name, entry in slow_state.items():
        for key, value in entry.items():
            assert same_bits(value, fast_state[name][key]), f"{key} of {name} differs"


@pytest.mark.parametrize("kind", ["alike", "strided", "one missing", "other dtype"])
def test_gradients_noted_at_once_are_those_noted_one_by_one(tmp_path, monkeypatch, kind):
    with streamed(tmp_path, adamw, EVEN) as each:
        merger = each.engine._merger
        buffer = Buffer(EVEN, torch.float32, 0.0)
        for main, view in zip(each.mains, buffer.views, strict=True):
            main.grad = view
        if kind == "strided":
            each.mains[2].grad = torch.zeros(2 * EVEN[2])[::2]
        elif kind == "one missing":
            each.mains[2].grad = None
        elif kind == "other dtype":
            each.mains[2]._lazy_grad = torch.zeros(EVEN[2], dtype=torch.bfloat16)
        group, _ = merger.groups()
        fast = Gradients(merger.mains, group)
        assert fast._note_alike() is (kind in ("alike", "one missing"))
        monkeypatch.setattr(Gradients, "_note_alike", lambda self: False)
        slow = Gradients(merger.mains, group)
        for name in ("group", "is_there", "address", "itemsize", "kind"):
            assert getattr(fast, name).tolist() == getattr(slow, name).tolist(), name
        assert fast._sources == slow._sources
        assert list(fast.held) == list(slow.held)


def test_groups_are_looked_up_again_when_they_change(tmp_path):
    with streamed(tmp_path, adamw, EVEN) as each:
        merger, groups = each.engine._merger, each.optimizer.param_groups
        first, _ = merger.groups()
        assert merger.groups()[0] is first
        moved = groups[0]["params"].pop(2)
        assert merger.groups()[0].tolist() == [-1 if i == 2 else 0 for i in range(len(EVEN))]
        groups.append({**groups[0], "params": [moved]})
        assert merger.groups()[0].tolist() == [1 if i == 2 else 0 for i in range(len(EVEN))]
        groups[1]["params"].append(torch.zeros(3))
        assert merger.groups()[1] == merger.groups()[1] == 1


def test_a_counter_that_is_set_behind_autograds_back(trio):
    both = trio(adamw, SIZES)
    both.step(0)
    for each in (both.resident, *both.streamed):
        each.optimizer.state[each.mains[3]]["step"].data.fill_(50)
    both.step(1)


def test_nothing_is_merged_of_an_optimizer_that_is_not_known(tmp_path, monkeypatch):
    class Unknown(torch.optim.AdamW):
        pass

    class Marked(FusedAdamStandIn):
        pass

    buffer = Buffer(EVEN, torch.float32, 0.0)
    for make in (partial(torch.optim.NAdam, lr=1e-2), Unknown, Marked):
        with streamed(tmp_path, make, EVEN) as each:
            assert not merges(each.optimizer)
            calls = Calls(monkeypatch)
            for main, view in zip(each.mains, buffer.views, strict=True):
                main.grad = view
            each.optimizer.step()
            pieces = sum(len(bucket.pieces) for bucket in each.layout.buckets)
            assert calls.taken() == pieces


def test_large_pieces_are_not_gathered(tmp_path, monkeypatch):
    sizes = (2**17, 2**17, 64, 64)
    with streamed(tmp_path, adamw, sizes, bucket_size=12 * 2**20) as each:
        calls = Calls(monkeypatch)
        each.step(gradients(sizes, 0))
        assert calls.taken() == 3


def test_gradients_next_to_each_other_in_two_pieces_of_memory(trio):
    """Same addresses as in one buffer, but no tensor may reach from one into the other."""
    each = trio(adamw, (2**17, 2**17), bucket_size=12 * 2**20)
    memory = np.zeros(2**18, dtype=np.float32)
    halves = [torch.from_numpy(memory[: 2**17]), torch.from_numpy(memory[2**17 :])]
    assert halves[0].untyped_storage().nbytes() == 2**19
    values = gradients(each.sizes, 0)
    each.resident.step(values)
    for number, streamed_ in enumerate(each.streamed):
        for main, half, value in zip(streamed_.mains, halves, values, strict=True):
            half.copy_(value)
            main.grad = half
        streamed_.optimizer.step()
        assert number or each.calls.taken() == 2
    each.check()


def lazy(engine: Engine, views: Sequence[torch.Tensor], factors: Sequence[Sequence[float]]) -> None:
    """Give the mains half-precision gradients, scaled as a framework would."""
    for index, (binding, view) in enumerate(zip(engine.plan.bindings, views, strict=True)):
        grad = HalfGrad.of(view)
        for factor in factors[index]:
            grad.detach().mul_(factor)
        binding.main.grad = grad


@pytest.mark.parametrize(
    ("factors", "extra"),
    [
        ([()] * len(EVEN), 0),
        ([(0.37, 1.7)] * len(EVEN), 0),
        ([(0.37,)] * 4 + [(0.38,)] * (len(EVEN) - 4), 1),
        ([(0.0,)] * 4 + [(-0.0,)] * (len(EVEN) - 4), 1),
        ([(float("nan"),)] * len(EVEN), 0),
    ],
    ids=["none", "same", "different", "signed zeros", "nan"],
)
def test_half_precision_gradients(trio, factors, extra):
    each = trio(adamw, EVEN)
    half = Buffer(EVEN, torch.bfloat16, float("nan"))
    for step in range(3):
        half.fill(gradients(EVEN, step))
        wanted = []
        for view, own in zip(half.views, factors, strict=True):
            value = view.float()
            for factor in own:
                value.mul_(torch.full((1,), factor))
            wanted.append(value)
        each.resident.step(wanted)
        each.calls.taken()
        for number, streamed_ in enumerate(each.streamed):
            lazy(streamed_.engine, half.views, factors)
            streamed_.optimizer.step()
            if number == 0:
                assert each.calls.taken() <= least(each) + extra
        each.check()


def test_neighbouring_parameters_are_copied_as_one(trio):
    each = trio(adamw, EVEN)
    copies = each.streamed[0].engine._buckets._model_copies
    assert all(copies.count(b.index) == 1 for b in each.streamed[0].layout.buckets)
    each.step(0)
    each.check()


def test_a_parameter_that_gets_other_memory_is_followed(trio):
    each = trio(adamw, EVEN)
    each.step(0)
    for streamed_, params in zip(each.streamed, each.params, strict=True):
        moved = params.views[3].clone()
        streamed_.models[3].data = moved
        params.views[3] = moved
    each.step(1)
    each.check()


@pytest.mark.slow
def test_twenty_thousand_small_shards(trio):
    sizes = [1 + index % 70 for index in range(20_000)]
    each = trio(adamw, sizes, bucket_size=12 * 2**17)
    for step in range(2):
        assert each.step(step, without=(10_000,)) == least(each) + 1
    each.check()
    # Each has a counter of its own.
    states = list(each.streamed[0].optimizer.state.values())
    states[0]["step"].fill_(9.0)
    assert float(states[1]["step"]) == 2.0

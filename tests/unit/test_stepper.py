"""The resident optimizer's own step, a few pieces at a time, as if it were one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gds_optimizer.errors import UnsupportedError
from gds_optimizer.stepper import Stepper, copy_value, install_step, undecorated_step


class GroupCounter(torch.optim.Optimizer):
    """Counts steps in the group and on itself, as fused optimizers of extensions do."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.5, **options})
        self.calls = 0
        self.history: list[int] = []
        self.scale = 2.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["total"] = torch.zeros_like(param)
                state["total"].add_(param.grad)
                param.sub_(state["total"] * group["lr"] * group["step"])


class SeesSizes(torch.optim.Optimizer):
    """Keeps in its group how many elements it has stepped: not elementwise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["seen"] = sum(param.numel() for param in group["params"])


def pieces_of(group: int, *sizes: int) -> list[tuple[int, torch.Tensor, dict[str, Any]]]:
    pieces = []
    for size in sizes:
        tensor = torch.ones(size)
        tensor.grad = torch.full((size,), 2.0)
        pieces.append((group, tensor, {}))
    return pieces


def optimizer_of(kind: Any, groups: int = 1, **options: Any) -> torch.optim.Optimizer:
    return kind([{"params": [torch.ones(1)]} for _ in range(groups)], **options)


def test_undecorated_steps_fire_no_hooks():
    optimizer = torch.optim.AdamW([torch.ones(3, requires_grad=True)])
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *a: calls.append("pre"))
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    undecorated_step(torch.optim.AdamW)(optimizer)
    assert calls == []
    assert optimizer.state
    optimizer.step()
    assert calls == ["pre"]


def test_a_class_that_torch_did_not_wrap_is_taken_as_it_is():
    class Plain(GroupCounter):
        def step(self, closure: Any = None) -> Any:
            return "plain"

    assert undecorated_step(Plain) is Plain.step
    assert undecorated_step(Plain)(optimizer_of(Plain)) == "plain"


class TestInstallStep:
    def make(self) -> tuple[torch.optim.Optimizer, list[str], Any]:
        optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1.0)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *a: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *a: calls.append("post"))
        return optimizer, calls, install_step(optimizer, lambda: calls.append("run"))

    def test_hooks_fire_once_around_it(self):
        optimizer, calls, _ = self.make()
        optimizer.step()
        assert calls == ["pre", "run", "post"]

    def test_global_hooks_fire_too(self):
        optimizer, calls, _ = self.make()
        handle = register_optimizer_step_pre_hook(lambda *a: calls.append("global"))
        optimizer.step()
        handle.remove()
        assert calls == ["global", "pre", "run", "post"]

    def test_the_closure_comes_first_and_with_gradients(self):
        optimizer, calls, _ = self.make()

        def closure() -> float:
            calls.append(f"closure {torch.is_grad_enabled()}")
            return 4.5

        with torch.no_grad():
            assert optimizer.step(closure) == 4.5
            assert optimizer.step(closure=closure) == 4.5
        assert calls == ["pre", "closure True", "run", "post"] * 2

    def test_a_scheduler_may_wrap_it_and_counts_its_calls(self):
        optimizer, calls, _ = self.make()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for _ in range(2):
            optimizer.step()
            scheduler.step()  # warns where it does not see that `step` was called before
        assert calls == ["pre", "run", "post"] * 2
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / 3)

    def test_it_can_be_undone(self):
        optimizer, calls, uninstall = self.make()
        uninstall()
        assert "step" not in optimizer.__dict__
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        optimizer.step()
        assert calls == ["pre", "post"]
        assert optimizer.param_groups[0]["params"][0].tolist() == [0.0, 0.0]

    def test_undoing_leaves_what_was_there_before(self):
        optimizer, calls, _ = self.make()
        install_step(optimizer, lambda: calls.append("inner"))
        outer = install_step(optimizer, lambda: calls.append("outer"))
        outer()
        optimizer.step()
        assert calls == ["pre", "inner", "post"]


def test_copies_share_nothing():
    tensor = torch.ones(2)
    value = [tensor, (tensor, 3)]
    copied = copy_value(value)
    copied[0].zero_()
    copied[1][0].zero_()
    assert tensor.tolist() == [1, 1]
    assert copied[1][1] == 3
    assert isinstance(copied[1], tuple)


def test_pieces_are_stepped_in_place_and_their_state_comes_back():
    stepper = Stepper(optimizer_of(GroupCounter))
    stepper.begin()
    pieces = pieces_of(0, 2, 3)
    states = stepper.run(pieces)
    assert [tensor.tolist() for _, tensor, _ in pieces] == [[0, 0], [0, 0, 0]]
    assert [state["total"].tolist() for state in states] == [[2, 2], [2, 2, 2]]


def test_state_that_is_given_is_used_and_updated_in_place():
    stepper = Stepper(optimizer_of(GroupCounter))
    stepper.begin()
    ((_, tensor, _),) = pieces_of(0, 2)
    total = torch.full((2,), 1.0)
    (state,) = stepper.run([(0, tensor, {"total": total})])
    assert state["total"] is total
    assert total.tolist() == [3, 3]


def test_every_part_of_a_step_starts_from_the_same_counters_and_they_move_once():
    optimizer = optimizer_of(GroupCounter, groups=2)
    stepper = Stepper(optimizer)
    for step in (1, 2, 3):
        stepper.begin()
        for group in (0, 1, 0, 0):
            ((_, tensor, _),) = pieces = pieces_of(group, 1)
            stepper.run(pieces)
            assert tensor.item() == 1 - 0.5 * 2 * step
        assert optimizer.param_groups[0].get("step", 0) == step - 1
        assert optimizer.calls == step - 1
        stepper.commit()
        assert [group["step"] for group in optimizer.param_groups] == [step, step]
        assert optimizer.calls == step


def test_a_group_that_was_not_stepped_keeps_its_counters():
    optimizer = optimizer_of(GroupCounter, groups=2)
    stepper = Stepper(optimizer)
    stepper.begin()
    stepper.run(pieces_of(1, 4))
    stepper.commit()
    assert [group.get("step") for group in optimizer.param_groups] == [None, 1]


def test_without_a_commit_nothing_has_happened():
    optimizer = optimizer_of(GroupCounter)
    before = {**optimizer.param_groups[0]}
    stepper = Stepper(optimizer)
    stepper.begin()
    stepper.run(pieces_of(0, 4))
    assert optimizer.param_groups[0] == before
    assert optimizer.calls == 0
    assert not optimizer.state
    stepper.begin()
    stepper.commit()
    assert optimizer.calls == 0


def test_hyper_parameters_are_read_at_the_beginning_of_each_step():
    optimizer = optimizer_of(GroupCounter)
    stepper = Stepper(optimizer)
    for lr in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.param_groups[0].pop("step", None)
        stepper.begin()
        ((_, tensor, _),) = pieces = pieces_of(0, 1)
        stepper.run(pieces)
        stepper.commit()
        assert tensor.item() == 1 - 2 * lr
        assert optimizer.param_groups[0]["lr"] == lr


def test_attributes_that_a_step_sets_are_taken_over():
    class SetsAttributes(GroupCounter):
        def step(self, closure: Any = None) -> Any:
            self.scale = self.scale * 2
            self.fresh = "new"
            return None

    optimizer = optimizer_of(SetsAttributes)
    stepper = Stepper(optimizer)
    stepper.begin()
    stepper.run(pieces_of(0, 1))
    stepper.run(pieces_of(0, 1))
    assert optimizer.scale == 2.0
    stepper.commit()
    assert optimizer.scale == 4.0
    assert optimizer.fresh == "new"


def test_what_the_optimizer_is_stays_with_it():
    optimizer = optimizer_of(GroupCounter)
    param, state = optimizer.param_groups[0]["params"][0], optimizer.state
    stepper = Stepper(optimizer)
    stepper.begin()
    stepper.run(pieces_of(0, 1))
    stepper.commit()
    assert optimizer.param_groups[0]["params"] == [param]
    assert optimizer.state is state
    assert not state


def test_counters_that_differ_between_parts_are_refused():
    stepper = Stepper(optimizer_of(SeesSizes))
    stepper.begin()
    stepper.run(pieces_of(0, 4))
    with pytest.raises(UnsupportedError) as caught:
        stepper.run(pieces_of(0, 5))
    assert str(caught.value) == (
        "SeesSizes set 'seen' of group 0 to 5 in one part of a step and to 4 in another: it is "
        "not an elementwise optimizer and cannot be streamed"
    )


class TensorOptions(torch.optim.Optimizer):
    """Its step counter and learning rate are tensors that it changes in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.5), "step": torch.tensor(0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                param.sub_(param.grad * group["lr"] * group["step"])


def test_tensors_in_groups_move_once_and_stay_the_same_objects():
    optimizer = optimizer_of(TensorOptions)
    counter, rate = optimizer.param_groups[0]["step"], optimizer.param_groups[0]["lr"]
    stepper = Stepper(optimizer)
    for step in (1, 2):
        stepper.begin()
        for _ in range(3):
            ((_, tensor, _),) = pieces = pieces_of(0, 1)
            stepper.run(pieces)
            assert tensor.item() == 1 - 2 * 0.5 * step
        assert counter.item() == step - 1
        stepper.commit()
        assert counter.item() == step
    assert optimizer.param_groups[0]["step"] is counter
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5

"""What state an optimizer keeps, found out by asking it; and whom the answer excludes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from gds_optimizer.errors import UnsupportedError
from gds_optimizer.layout import PlaneSpec
from gds_optimizer.schema import StateSchema, discover_schema

CPU = torch.device("cpu")
ZERO = torch.tensor(0.0)


def discover(
    make: Callable[..., torch.optim.Optimizer],
    *,
    group: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> StateSchema:
    return discover_schema(make([torch.ones(16)], **options), group, dtype, CPU)


def names(schema: StateSchema) -> list[str]:
    return [plane.name for plane in schema.planes]


@pytest.mark.parametrize(
    ("make", "planes", "starts_from_zero"),
    [
        (torch.optim.AdamW, ["exp_avg", "exp_avg_sq"], True),
        (torch.optim.Adam, ["exp_avg", "exp_avg_sq"], True),
        (
            partial(torch.optim.AdamW, amsgrad=True),
            ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
            True,
        ),
        (partial(torch.optim.AdamW, fused=True), ["exp_avg", "exp_avg_sq"], True),
        (torch.optim.Adamax, ["exp_avg", "exp_inf"], True),
        (torch.optim.RAdam, ["exp_avg", "exp_avg_sq"], True),
        # mu_product starts at 1
        (torch.optim.NAdam, ["exp_avg", "exp_avg_sq"], False),
        (torch.optim.SGD, [], True),
        # The first momentum is the gradient itself: 0 + -0.0 is not -0.0.
        (partial(torch.optim.SGD, momentum=0.9), ["momentum_buffer"], False),
        (torch.optim.RMSprop, ["square_avg"], True),
        (
            partial(torch.optim.RMSprop, momentum=0.9, centered=True),
            ["square_avg", "momentum_buffer", "grad_avg"],
            True,
        ),
        (torch.optim.Adadelta, ["square_avg", "acc_delta"], True),
        (torch.optim.Adagrad, ["sum"], True),
        (partial(torch.optim.Adagrad, initial_accumulator_value=0.1), ["sum"], False),
        (torch.optim.ASGD, ["ax"], False),
        # step_size starts at the learning rate
        (torch.optim.Rprop, ["prev", "step_size"], False),
    ],
)
def test_elementwise_optimizers(make, planes, starts_from_zero):
    schema = discover(make)
    assert names(schema) == planes
    assert {plane.codec for plane in schema.planes} <= {"fp32"}
    assert (schema.initial is not None) == starts_from_zero
    if schema.initial:
        assert schema.initial == {"step": ZERO}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.Adafactor, "Adafactor updates half a parameter differently from the whole"),
        (torch.optim.LBFGS, "LBFGS cannot step a 1-D parameter of 256 elements on its own"),
        (torch.optim.SparseAdam, "SparseAdam cannot step a 1-D parameter.*dense gradients"),
    ],
)
def test_others_of_torch_are_refused_by_name(make, words):
    with pytest.raises(UnsupportedError, match=words):
        discover(make)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs a torch with Muon")
def test_muon_is_refused():
    muon = torch.optim.Muon([torch.ones(4, 4)])
    with pytest.raises(UnsupportedError, match="Muon cannot step a 1-D parameter"):
        discover_schema(muon, 0, torch.float32, CPU)


def test_the_options_of_the_group_decide():
    optimizer = torch.optim.AdamW(
        [{"params": [torch.ones(3)]}, {"params": [torch.ones(3)], "amsgrad": True}]
    )
    assert names(discover_schema(optimizer, 0, torch.float32, CPU)) == ["exp_avg", "exp_avg_sq"]
    assert names(discover_schema(optimizer, 1, torch.float32, CPU))[-1] == "max_exp_avg_sq"


def test_the_dtype_of_the_parameter_decides():
    schema = discover(torch.optim.AdamW, dtype=torch.bfloat16)
    assert {plane.codec for plane in schema.planes} == {"bf16"}


def test_the_optimizer_is_not_changed():
    optimizer = torch.optim.NAdam([torch.ones(3)], lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *a: calls.append("hook"))
    groups = [{**group} for group in optimizer.param_groups]
    attributes = {**optimizer.__dict__}
    discover_schema(optimizer, 0, torch.float32, CPU)
    assert optimizer.param_groups == groups
    assert optimizer.__dict__ == attributes
    assert not optimizer.state
    assert calls == []


class Custom(torch.optim.Optimizer):
    """One update rule after another, as `rule(param, grad, state)`."""

    def __init__(self, params: Any, rule: Callable[..., None]) -> None:
        super().__init__(params, {})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.rule(param, param.grad, self.state[param])


def keeps(**tensors: Callable[[torch.Tensor], Any]) -> Callable[..., None]:
    """A rule that keeps these and updates elementwise."""

    def rule(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        for name, make in tensors.items():
            if name not in state:
                state[name] = make(param)
        param.sub_(grad)

    return rule


def test_planes_of_any_lossless_dtype_in_the_optimizers_order():
    rule = keeps(
        second=lambda p: torch.zeros_like(p, dtype=torch.float64),
        first=lambda p: torch.zeros_like(p, dtype=torch.int8),
        half=lambda p: torch.zeros_like(p, dtype=torch.bfloat16),
        count=lambda p: 3,
        tensor_count=lambda p: torch.zeros(()),
    )
    schema = discover(Custom, rule=rule)
    assert schema.planes == (
        PlaneSpec(name="second", codec="fp64"),
        PlaneSpec(name="first", codec="int8"),
        PlaneSpec(name="half", codec="bf16"),
    )
    assert schema.initial is None  # a counter that starts at 3


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            keeps(rows=lambda p: torch.zeros(7)),
            r"Custom keeps 'rows' of shape \(7,\) for a parameter of shape \(256,\)",
        ),
        (
            keeps(table=lambda p: torch.zeros(p.numel(), 2)),
            r"updates half a parameter differently|keeps 'table' of shape \(256, 2\)",
        ),
        (
            keeps(phase=lambda p: torch.zeros_like(p, dtype=torch.complex64)),
            r"Custom keeps 'phase' in torch\.complex64, which cannot be stored losslessly",
        ),
        (
            keeps(mask=lambda p: torch.zeros_like(p, dtype=torch.bool)),
            r"Custom keeps 'mask' in torch\.bool",
        ),
    ],
)
def test_state_that_is_no_plane_and_no_scalar_is_refused(rule, words):
    with pytest.raises(UnsupportedError, match=words):
        discover(Custom, rule=rule)


def by_norm(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
    param.sub_(grad * (param.norm() / grad.norm()))


def by_neighbour(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
    param.sub_(torch.roll(grad, 1))


def by_mean_in_state(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
    state["mean"] = grad.mean()
    param.sub_(grad)


@pytest.mark.parametrize("rule", [by_norm, by_neighbour, by_mean_in_state])
def test_what_depends_on_the_whole_parameter_is_refused(rule):
    with pytest.raises(UnsupportedError, match=r"Custom updates half a parameter differently"):
        discover(Custom, rule=rule)


def dither(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
    param.sub_(grad + torch.rand_like(grad))


def test_what_rolls_dice_is_refused():
    with pytest.raises(UnsupportedError, match="differently"):
        discover(Custom, rule=dither)


def fail(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
    raise ZeroDivisionError("no luck")


def test_what_fails_is_refused_with_its_own_words():
    with pytest.raises(UnsupportedError, match="no luck") as caught:
        discover(Custom, rule=fail)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def chokes_on_zero_state(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
    if not state:
        state["size"] = torch.ones_like(param)
    elif not state["size"].all():
        raise ValueError("not mine")
    param.sub_(grad * state["size"])


def test_an_optimizer_may_refuse_state_that_it_did_not_make():
    schema = discover(Custom, rule=chokes_on_zero_state)
    assert names(schema) == ["size"]
    assert schema.initial is None

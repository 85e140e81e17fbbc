"""Which Adam megatron-core builds, and a plain stand-in for the fused ones.

With Transformer Engine or apex megatron-core takes their `FusedAdam`, else `torch.optim.AdamW`. The
two kinds keep their books differently (a step counter in each group, or one for each parameter),
and several of megatron-core's code paths depend on it. `use_inner_adam` chooses the kind for a
while, whatever is installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from gds_optimizer.errors import ConfigError
from gds_optimizer.megatron.cpu import import_megatron, replaced

INNER_ADAM_CHOICES = ("adamw", "fused", "installed")


class FusedAdamStandIn(torch.optim.Optimizer):
    """Adam with the books of Transformer Engine's and apex's `FusedAdam`, in torch operations.

    Every group with parameters has an int `step`, which starts at 1 with the first step and which
    no parameter repeats; a parameter's state is `exp_avg` and `exp_avg_sq`, both of its shape and
    dtype. All arithmetic is elementwise. For CPU and GPU; not bit-identical to either original.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta**step.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        adam_w_mode: decay weights directly (True), or through the gradient.
        weight_decay: of each group.
        capturable: must be False, which is what the originals default to.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ConfigError("FusedAdamStandIn: capturable is True, wanted False")
        self.adam_w_mode = adam_w_mode
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    steps_merged_pieces_alike = True  # see `merging.MERGED_MARK`

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["params"]:
                continue  # the originals leave such a group without a step counter
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(param, param.grad, group)
        return loss

    def _step_param(
        self, param: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        if decay and not self.adam_w_mode:
            gradient = gradient + param * decay
        mean = state["exp_avg"].mul_(beta1).add_(gradient * (1 - beta1))
        square = state["exp_avg_sq"].mul_(beta2).add_(gradient * gradient * (1 - beta2))
        if group["bias_correction"]:
            mean = mean / (1 - beta1 ** group["step"])
            square = square / (1 - beta2 ** group["step"])
        update = mean / (square.sqrt() + group["eps"])
        if decay and self.adam_w_mode:
            update = update + param * decay
        param.sub_(update * group["lr"])


@contextlib.contextmanager
def use_inner_adam(choice: str) -> Iterator[None]:
    """Make megatron-core build this kind of Adam inside its optimizers.

    Args:
        choice: "adamw" for `torch.optim.AdamW`, "fused" for `FusedAdamStandIn`, "installed" for
            what megatron-core takes by itself.

    An optimizer built inside must be saved and loaded inside too: megatron-core asks then which
    kind it has.

    Raises:
        ConfigError: an unknown choice.
    """
    if choice not in INNER_ADAM_CHOICES:
        raise ConfigError(
            f"inner optimizer is {choice!r}, wanted one of {', '.join(INNER_ADAM_CHOICES)}"
        )
    if choice == "installed":
        yield
        return
    import_megatron()
    import megatron.core.optimizer as builder
    from megatron.core.optimizer import distrib_optimizer

    is_fused = choice == "fused"
    adam = FusedAdamStandIn if is_fused else torch.optim.AdamW
    with (
        replaced(builder, Adam=adam, USING_PYTORCH_OPTIMIZER=not is_fused),
        replaced(
            distrib_optimizer,
            Adam=adam,
            HAVE_APEX_OR_TE=is_fused,
            USING_APEX_OPTIMIZER=is_fused,
            USING_TE_OPTIMIZER=False,
        ),
    ):
        yield

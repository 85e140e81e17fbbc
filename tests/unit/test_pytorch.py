"""The front end for plain PyTorch: the bits of an ordinary optimizer, in the same object."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import (
    ConfigError,
    EvictedReadError,
    SnapshotError,
    StepFailedError,
    StoreLockedError,
    UnsupportedError,
)
from gds_optimizer.megatron.fused_adam import FusedAdamStandIn
from gds_optimizer.pytorch import StreamedOptimizer, stream
from tests.support.engines import leftovers, open_files, same_bits
from tests.support.plain_pytorch import (
    BUCKET_BYTES,
    FP32,
    MIXED,
    SHAPES,
    Twins,
    check_six_steps,
    check_twenty_steps,
    options_of,
    parameters,
)
from tests.support.probed import probed_once

adamw = partial(torch.optim.AdamW, lr=1e-2)
sgd = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
OPTIMIZERS = {
    "adamw": adamw,
    "adamw_foreach": partial(adamw, foreach=True),
    "adamw_single": partial(adamw, foreach=False),
    "adamw_fused": partial(adamw, fused=True),
    "adamw_amsgrad": partial(adamw, amsgrad=True),
    "adamw_maximize": partial(adamw, maximize=True),
    "sgd": sgd,
    "sgd_fused": partial(sgd, fused=True),
    "sgd_nesterov": partial(sgd, nesterov=True, weight_decay=0.1),
    "sgd_plain": partial(torch.optim.SGD, lr=1e-2),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    # Counts its steps in the groups.
    "fused_adam": partial(FusedAdamStandIn, lr=1e-2, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
}
LOTS = 2**30
BUDGETS: dict[str, dict[str, Any]] = {
    "drives": {"host_budget": 0},
    "auto": {},
    "host": {"host_budget": LOTS},
    "device": {"hbm_budget": LOTS},
    "all_three": {"hbm_budget": 20_000, "host_budget": 40_000},
    "one_slot": {"host_budget": 0, "slots": 1},
    "lazy": {"host_budget": 0, "init": "lazy"},
    "remainder": {"host_budget": 0, "main": "auto"},
}


@pytest.fixture(scope="module", autouse=True)
def _probed_once() -> Iterator[None]:
    with probed_once():
        yield


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A directory in which nothing may be left once the optimizers are closed."""
    directory = tmp_path / "state"
    directory.mkdir()
    return directory


# ---------------------------------------------------------------------- bits


@pytest.mark.thinned
@pytest.mark.parametrize("dtypes", [MIXED, FP32], ids=["mixed", "fp32"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_twenty_steps_are_those_of_a_resident_optimizer(state, kind, dtypes):
    check_twenty_steps(state, OPTIMIZERS[kind], dtypes=dtypes)


@pytest.mark.parametrize("budget", BUDGETS)
def test_where_buckets_live_changes_no_bit(state, budget):
    check_six_steps(state, OPTIMIZERS["adamw_fused"], **BUDGETS[budget])


def test_fp16_and_fp64_parameters(state):
    dtypes = (torch.float16, torch.float32)
    twins = Twins(state, OPTIMIZERS["adamw"], dtypes=dtypes, host_budget=0)
    with twins.streamed:
        for _ in range(4):
            twins.step()
        twins.check()
    params = [torch.nn.Parameter(torch.ones(100, dtype=torch.float64)) for _ in range(2)]
    plain = adamw([params[0]])
    with stream(adamw([params[1]]), StreamConfig(directories=(state,))) as streamed:
        for optimizer in (plain, streamed):
            for param in params:
                param.grad = torch.full_like(param, 0.3)
            optimizer.step()
        assert same_bits(*params)


def test_a_parameter_without_gradient_at_first_gets_its_state_later(state):
    twins = Twins(state, adamw, host_budget=0)
    with twins.streamed:
        twins.step(without=range(len(SHAPES)))
        twins.check()
        for _ in range(3):
            twins.step(without=(1, 3, 7))
        twins.check()
        for _ in range(3):
            twins.step()
        twins.check()


def test_state_that_the_optimizer_holds_already_continues(state):
    for make in (adamw, sgd):
        twins = Twins(state, make, dtypes=FP32, warm=True, host_budget=0)
        with twins.streamed:
            for _ in range(3):
                twins.step()
            twins.check()


def test_an_fp32_gradient_of_a_half_precision_parameter_is_not_rounded(state):
    param = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    main = torch.ones(300)
    plain = adamw([main])
    main.grad = torch.linspace(-1, 1, 300)
    try:
        param.grad_dtype = None
        param.grad = main.grad.clone()
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"this torch has no gradients of another dtype ({error})")
    with stream(adamw([param]), StreamConfig(directories=(state,))) as streamed:
        plain.step()
        streamed.step()
        assert same_bits(streamed.state_dict()["state"][0]["main"], main)


def test_gradients_that_are_not_contiguous(state):
    params = [torch.nn.Parameter(torch.ones(30, 50)) for _ in range(2)]
    optimizers = [
        adamw([params[0]]),
        stream(adamw([params[1]]), StreamConfig(directories=(state,))),
    ]
    for optimizer, param in zip(optimizers, params, strict=True):
        param.grad = torch.arange(1500.0).view(50, 30).t()
        optimizer.step()
    assert same_bits(*params)
    optimizers[1].close()


def test_gradients_with_other_strides_than_their_parameters(state):
    """What is at the same index belongs together, whatever the optimizer makes of other strides.

    torch's fused kernels for the CPU take a gradient in the order in which it lies in memory.
    """
    make = partial(adamw, fused=True)
    params = [torch.nn.Parameter(torch.ones(30, 50)) for _ in range(3)]
    grad = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)).t()
    with stream(make([params[0]]), StreamConfig(directories=(state,))) as streamed:
        for optimizer, param, own in (
            (streamed, params[0], grad),
            (make([params[1]]), params[1], grad.contiguous()),
            (adamw([params[2]]), params[2], grad),
        ):
            param.grad = own
            optimizer.step()
    assert same_bits(params[0], params[1])
    assert torch.allclose(params[0], params[2])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_in_another_memory_format(state, tmp_path, dtype, fused):
    """Transposed and channels_last: their state is handed out in their format, and comes back."""
    generator = torch.Generator().manual_seed(0)
    first = [
        torch.randn(30, 50, generator=generator).t(),
        torch.randn(6, 5, 4, 3, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(1, 7, 3, 3, generator=generator).to(memory_format=torch.channels_last),
    ]
    params = [torch.nn.Parameter(value.to(dtype)) for value in first]
    mains = [param.detach().float() for param in params]  # keeps the format
    assert not any(each.is_contiguous() for each in [*params, *mains])
    make = partial(adamw, fused=fused)
    plain, streamed = make(mains), stream(make(params), StreamConfig(directories=(state,)))
    for step in range(6):
        for param, main in zip(params, mains, strict=True):
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            if step % 2:
                param.grad = torch.empty_like(param).copy_(param.grad)
            main.grad = torch.empty_like(main).copy_(param.grad)
        plain.step()
        streamed.step()
        for param, main in zip(params, mains, strict=True):
            assert same_bits(param, main.to(dtype))
        if step == 2:
            kept = saved(streamed, tmp_path / "state.pt")
            streamed.load_state_dict(kept)
    found, wanted = streamed.state_dict()["state"], plain.state_dict()["state"]
    for index, main in enumerate(mains):
        assert found[index]["exp_avg"].stride() == main.stride()
        for key, value in wanted[index].items():
            assert same_bits(found[index][key], value), key
    assert "group0.param0 in the order (1, 0)" in streamed.engine.plan.bindings[0].name
    with torch.no_grad():
        params[0].data = params[0].contiguous()
    with pytest.raises(UnsupportedError, match="another memory format"):
        streamed.state_dict()
    streamed.close()


# ---------------------------------------------------------------------- the object that it was


def test_a_model_trained_as_usual(state):
    """Scheduler, closure, hooks, zero_grad and a tied weight, around a forward and a backward."""
    runs = []
    for streams in (False, True):
        torch.manual_seed(7)
        model = torch.nn.Sequential(
            torch.nn.Linear(40, 70), torch.nn.Linear(70, 70), torch.nn.Linear(70, 70)
        )
        model[2].weight = model[1].weight
        model[0].bias.requires_grad_(False)
        optimizer: Any = adamw(model.parameters(), fused=True)
        early = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        if streams:
            optimizer = stream(optimizer, StreamConfig(directories=(state,)), model=model)
        calls: list[str] = []
        optimizer.register_step_pre_hook(partial(lambda c, *_: c.append("before"), calls))
        optimizer.register_step_post_hook(partial(lambda c, *_: c.append("after"), calls))
        late = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(20):
                data = torch.randn(8, 40)

                def closure(model=model, optimizer=optimizer, data=data):
                    optimizer.zero_grad(set_to_none=True)
                    loss = model(data).square().mean()
                    loss.backward()
                    return loss

                losses.append(optimizer.step(closure))
                early.step()
                late.step()
        runs.append((model, losses, calls, optimizer))
    (plain, plain_losses, plain_calls, _), (model, losses, calls, optimizer) = runs
    assert calls == plain_calls == ["before", "after"] * 20
    assert losses == plain_losses
    for first, second in zip(plain.parameters(), model.parameters(), strict=True):
        assert same_bits(first, second)
    assert [binding.name for binding in optimizer.engine.plan.bindings] == [
        name for name, _ in model.named_parameters()
    ]
    assert optimizer.last_step_stats.buckets
    optimizer.close()


def test_a_scheduler_that_was_built_before_does_not_complain(state):
    optimizer = adamw(parameters(FP32, "cpu"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with stream(optimizer, StreamConfig(directories=(state,))), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 4


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtypes", [MIXED, FP32, (torch.float16, torch.float32)])
def test_a_grad_scaler_unscales_and_skips(state, dtypes, fused):
    twins = Twins(state, partial(adamw, fused=fused), dtypes=dtypes, host_budget=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    with twins.streamed:
        for step in range(8):
            twins.give_gradients()
            scale = scaler.scale(torch.ones(()))  # creates the scale, too
            is_bad = step in (2, 5)
            for param, main in zip(twins.params, twins.mains, strict=True):
                param.grad.mul_(scale.to(param.dtype))
                main.grad = param.grad.float() * (1 / scale)
            if is_bad:
                twins.params[3].grad[0, 5] = torch.inf
            scaler.step(twins.streamed)
            scaler.update()
            if not is_bad:
                with torch.no_grad():
                    twins.resident.step()
                    for copy, main in zip(twins.copies, twins.mains, strict=True):
                        copy.copy_(main)
        twins.check()
        assert int(twins.streamed.state[twins.params[0]]["step"]) == 6


def test_what_is_left_in_the_optimizer_says_so(state):
    twins = Twins(state, adamw)
    with twins.streamed as optimizer:
        assert len(optimizer.state) == 0
        twins.step(without=(1,))
        assert set(optimizer.state) == set(twins.params) - {twins.params[1]}
        held = optimizer.state[twins.params[0]]
        assert float(held["step"]) == 1
        with pytest.raises(EvictedReadError, match="on disk"):
            held["exp_avg"]
        assert isinstance(optimizer, torch.optim.AdamW)
        assert "StreamedAdamW" in repr(optimizer)


def test_options_changed_between_steps_count(state):
    twins = Twins(state, partial(adamw, lr=torch.tensor(1e-2)), host_budget=0)
    with twins.streamed:
        for step in range(4):
            for optimizer in (twins.streamed, twins.resident):
                optimizer.param_groups[0]["lr"].fill_(0.01 / (step + 1))
                optimizer.param_groups[0]["weight_decay"] = 0.1 * step
            twins.step()
        twins.check()


def test_parameters_that_get_other_memory_are_followed(state):
    twins = Twins(state, adamw, host_budget=0)
    with twins.streamed:
        twins.step()
        for param in twins.params:
            param.data = param.data.clone()
        twins.step()
        twins.check()
        twins.params[3].data = twins.params[3].data.float()
        with pytest.raises(UnsupportedError, match=r"group0.param3 was 2800 elements of torch.bf"):
            twins.streamed.state_dict()


def test_weights_that_are_loaded_later_count_once_they_are_reloaded(state):
    twins = Twins(state, adamw, host_budget=0)
    with twins.streamed:
        twins.step()
        with torch.no_grad():
            for param, copy, main in zip(twins.params, twins.copies, twins.mains, strict=True):
                for each in (param, copy):
                    each.fill_(0.125)
                main.copy_(copy)
        twins.streamed.reload_model_params()
        twins.step()
        twins.check()


# ---------------------------------------------------------------------- refusals


@contextlib.contextmanager
def lone_rank() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fully_sharded() -> torch.nn.Parameter:
    with lone_rank():
        mesh = init_device_mesh("cpu", (1,))
        return next(fully_shard(torch.nn.Linear(4, 4), mesh=mesh).parameters())


class Odd(torch.Tensor):
    pass


REFUSED = {
    "fsdp": (fully_sharded, "group0.param1 is sharded \\(DTensor\\)"),
    "subclass": (lambda: torch.ones(3).as_subclass(Odd), "subclass Odd"),
    "gaps": (lambda: torch.nn.Parameter(torch.ones(3, 4)[:, :2]), "no dense piece of memory"),
    "expanded": (lambda: torch.nn.Parameter(torch.ones(1).expand(3)), "no dense piece of memory"),
    "complex": (lambda: torch.nn.Parameter(torch.ones(3, dtype=torch.cfloat)), "complex64"),
    "fp8": (lambda: torch.nn.Parameter(torch.ones(3).to(torch.float8_e5m2)), "float8"),
    "meta": (lambda: torch.nn.Parameter(torch.ones(3, device="meta")), "on meta"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_parameters_that_cannot_be_streamed(state, kind):
    make, message = REFUSED[kind]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3)), make()], lr=0.1)
    with pytest.raises(UnsupportedError, match=message):
        stream(optimizer, StreamConfig(directories=(state,)))
    assert type(optimizer) is torch.optim.SGD
    assert leftovers(state) == []


class Centered(torch.optim.SGD):
    """Elementwise on vectors; takes the mean of a matrix's gradient out of it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.dim() > 1:
                    param.grad = param.grad - param.grad.mean()
        return super().step(closure)


def test_an_optimizer_that_looks_at_dimensions_is_refused(state):
    optimizer = Centered(parameters(FP32, "cpu"), lr=0.1)
    message = "Centered treats a parameter of 2 dimensions unlike .* parameter comes out different"
    with pytest.raises(UnsupportedError, match=message):
        stream(optimizer, StreamConfig(directories=(state,)))
    assert leftovers(state) == []


def test_optimizers_that_cannot_be_streamed(state):
    config = StreamConfig(directories=(state,))
    params = parameters(FP32, "cpu")
    with pytest.raises(UnsupportedError, match="LBFGS cannot step"):
        stream(torch.optim.LBFGS(params), config)
    with pytest.raises(UnsupportedError, match=r"Adafactor .*(elementwise|unlike)"):
        stream(torch.optim.Adafactor(params), config)
    with pytest.raises(UnsupportedError, match="differentiable"):
        stream(adamw(params, differentiable=True), config)
    with pytest.warns(UserWarning, match="duplicate"):
        twice = adamw([params[0], params[0]])
    with pytest.raises(UnsupportedError, match=r"group0.param0 is in the optimizer twice"):
        stream(twice, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    with lone_rank():
        wrapper = ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.AdamW)
        with pytest.raises(UnsupportedError, match=r"wraps another optimizer \(optim"):
            stream(wrapper, config)
    with pytest.raises(ConfigError, match="wanted StreamConfig"):
        stream(adamw(params), state)
    with pytest.raises(UnsupportedError, match="StepLR is no torch"):
        stream(torch.optim.lr_scheduler.StepLR(adamw(params), 1), config)
    assert leftovers(state) == []


def test_parameters_and_gradients_that_come_later(state):
    twins = Twins(state, adamw)
    late = torch.nn.Parameter(torch.ones(3))
    with twins.streamed:
        with pytest.raises(UnsupportedError, match="add_param_group"):
            twins.streamed.add_param_group({"params": [late]})
        twins.streamed.param_groups[0]["params"].append(late)
        with pytest.raises(UnsupportedError, match="are not those"):
            twins.streamed.step()
        twins.streamed.param_groups[0]["params"].pop()
        twins.give_gradients()
        kept = twins.params[1].grad
        twins.params[2].grad = torch.ones(64).to_sparse()
        with pytest.raises(UnsupportedError, match=r"group0.param2 .* sparse"):
            twins.streamed.step()
        assert twins.params[1].grad is kept
        twins.params[2].grad = twins.copies[2].grad.clone()
        twins.streamed.step()
        twins.step_resident()
        twins.check()
        with pytest.raises(UnsupportedError, match="streamed already"):
            stream(twins.streamed, twins.config)


# ---------------------------------------------------------------------- beginning and end


def test_a_setup_that_fails_leaves_everything_as_it_was(state):
    params = parameters(FP32, "cpu")
    optimizer = adamw(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    held = {param: dict(entry) for param, entry in optimizer.state.items()}
    before = open_files()
    # It is opened after the slots and the host memory were taken.
    config = StreamConfig(
        directories=(state,), bucket_size=BUCKET_BYTES, trace=state / "missing" / "trace"
    )
    with pytest.raises(ConfigError, match="trace"):
        stream(optimizer, config)
    assert type(optimizer) is torch.optim.AdamW
    assert "step" not in optimizer.__dict__
    for param, entry in held.items():
        assert all(optimizer.state[param][key] is value for key, value in entry.items())
    gc.collect()
    assert open_files() == before
    assert leftovers(state) == []
    optimizer.step()


def test_two_optimizers_share_directories_under_two_names(state):
    first, second = (adamw([torch.nn.Parameter(torch.ones(100))]) for _ in range(2))
    config = StreamConfig(directories=(state,))
    with stream(first, config):
        with pytest.raises(StoreLockedError):
            stream(second, config)
        assert type(second) is torch.optim.AdamW
        with stream(second, config, name="opt1"):
            assert len(leftovers(state)) > 0
    assert leftovers(state) == []


def test_each_rank_has_a_directory_of_its_own(state, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with Twins(state, adamw, host_budget=0).streamed:
        assert list(state.rglob("bucket*.bin"))
        assert {path.relative_to(state).parts[:2] for path in state.rglob("bucket*.bin")} == {
            ("rank00003", "opt0")
        }


def test_a_step_that_fails_is_the_last_one(state):
    twins = Twins(state, adamw, host_budget=0)
    optimizer = twins.streamed
    twins.step()
    for path in state.rglob("bucket*.bin"):
        with path.open("r+b") as file:
            file.write(b"somebody else")
    twins.give_gradients()
    for _ in range(2):
        with pytest.raises(StepFailedError, match="not what was written"):
            optimizer.step()
    assert all(binding.main.grad is None for binding in optimizer.engine.plan.bindings)
    assert all(param.grad is not None for param in twins.params)
    with pytest.raises(StepFailedError):
        optimizer.state_dict()
    optimizer.close()
    assert leftovers(state) == []


def test_a_closed_optimizer_is_an_ordinary_one(state):
    twins = Twins(state, adamw, dtypes=FP32)
    twins.step()
    optimizer = twins.streamed
    optimizer.close()
    optimizer.close()
    assert leftovers(state) == []
    assert (optimizer.engine, optimizer.last_step_stats) == (None, None)
    for use in (optimizer.reload_model_params, partial(optimizer.snapshot, state / "s")):
        with pytest.raises(UnsupportedError, match="after close"):
            use()
    assert optimizer.state_dict()["state"] == {}
    twins.resident.state.clear()
    for _ in range(2):
        twins.step()
    twins.check()
    with stream(optimizer, twins.config):  # and from there on streamed again
        twins.step()
        twins.check()
        assert type(optimizer).__name__ == "StreamedAdamW"


def test_host_memory_is_taken_unless_somebody_said_how_much(state, caplog):
    with caplog.at_level("INFO", logger="gds_optimizer"):
        Twins(state, adamw).streamed.close()
        assert "no host_budget was given" in caplog.text
        assert "of host memory for" in caplog.text
        caplog.clear()
        Twins(state, adamw, host_budget=0).streamed.close()
        assert "host_budget was given" not in caplog.text
        assert "of host memory for" not in caplog.text


# ---------------------------------------------------------------------- saving and loading


def saved(optimizer: torch.optim.Optimizer, path: Path) -> dict[str, Any]:
    torch.save(optimizer.state_dict(), path)
    return torch.load(path, mmap=True, weights_only=True)


@pytest.mark.parametrize("make", [adamw, partial(adamw, fused=True), sgd], ids=["a", "fused", "s"])
def test_plain_and_streamed_load_each_other(state, tmp_path, make):
    first = Twins(state, make, dtypes=FP32, in_groups=True, host_budget=0)
    with first.streamed:
        for _ in range(5):
            first.step(without=(2,), clip=1.0)
        of_plain = saved(first.resident, tmp_path / "plain.pt")
        of_streamed = saved(first.streamed, tmp_path / "streamed.pt")
    assert set(of_plain["state"]) == set(of_streamed["state"])
    later = Twins(state, make, dtypes=FP32, in_groups=True, bucket_size=2 * BUCKET_BYTES)
    later.steps = first.steps
    with later.streamed, torch.no_grad():
        for mine, theirs in zip(later.params, first.params, strict=True):
            mine.copy_(theirs)
        for mine, theirs in zip(later.copies, first.copies, strict=True):
            mine.copy_(theirs)
        later.streamed.load_state_dict(of_plain)
        later.resident.load_state_dict(of_streamed)
        later.check()
        for _ in range(5):
            later.step(clip=1.0)
            first.give_gradients()
            first.clip(1.0)
            first.step_resident()
        later.check()
        for mine, theirs in zip(later.copies, first.copies, strict=True):
            assert same_bits(mine, theirs)


@pytest.mark.parametrize("budget", ["drives", "host", "device", "remainder"])
def test_a_mixed_model_continues_from_what_was_saved(state, tmp_path, budget):
    twins = Twins(state, adamw, **BUDGETS[budget])
    with twins.streamed:
        for _ in range(4):
            twins.step(without=(3,))
        kept = saved(twins.streamed, tmp_path / "state.pt")
        fp32 = [param.detach().clone() for param in twins.params]
        twins.give_gradients()
        twins.streamed.step()
        twins.streamed.load_state_dict(kept)
        with torch.no_grad():
            for param, value in zip(twins.params, fp32, strict=True):
                if param.dtype is torch.float32:
                    param.copy_(value)
        twins.check()
        for _ in range(3):
            twins.step()
        twins.check()


def test_hooks_around_saving_and_loading_are_called(state):
    twins = Twins(state, adamw)
    calls: list[str] = []
    with twins.streamed as optimizer:
        optimizer.register_state_dict_pre_hook(lambda _: calls.append("saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: {k: v for k, v in state.items() if k != "more"}
        )
        optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
        twins.step()
        state_dict = optimizer.state_dict()
        assert state_dict["more"] == 1
        optimizer.load_state_dict(state_dict)
        assert calls == ["saving", "loaded"]
        del state_dict["more"]
        twins.step()
        twins.check_parameters()


def test_what_does_not_fit_is_refused_and_changes_nothing(state, tmp_path):
    twins = Twins(state, adamw, in_groups=True)
    with twins.streamed as optimizer:
        twins.step()
        good = saved(optimizer, tmp_path / "good.pt")
        entry = good["state"][3]
        wrong_shape = {**good["state"], 3: {**entry, "exp_avg": entry["exp_avg"].t()}}
        no_main = {**good["state"], 3: {k: v for k, v in entry.items() if k != "main"}}
        no_moment = {**good["state"], 3: {k: v for k, v in entry.items() if k != "exp_avg"}}
        half = {**good["state"], 3: {**entry, "exp_avg": entry["exp_avg"].bfloat16()}}
        for wrong, message in (
            ({}, "no state dictionary"),
            ({**good, "param_groups": good["param_groups"][:1]}, "groups of 4 parameters, wanted"),
            ({**good, "state": wrong_shape}, r"shape \(70, 40\)"),
            ({**good, "state": no_main}, "no main parameter"),
            ({**good, "state": no_moment}, "wanted exp_avg, exp_avg_sq, main"),
            ({**good, "state": half}, "bfloat16"),
        ):
            with pytest.raises(SnapshotError, match=message):
                optimizer.load_state_dict(wrong)
        twins.step()
        twins.check()


def test_a_dictionary_that_shows_later_files_is_refused(state):
    twins = Twins(state, adamw, host_budget=0)
    with twins.streamed as optimizer:
        twins.step()
        stale = optimizer.state_dict()
        optimizer.load_state_dict(stale)  # still shows what it says
        twins.step()
        with pytest.raises(SnapshotError, match="own files"):
            optimizer.load_state_dict(stale)
        del stale
        twins.check()


def test_snapshots(state, tmp_path):
    twins = Twins(state, adamw, host_budget=0)
    scheduler = torch.optim.lr_scheduler.StepLR(twins.streamed, 1, 0.5)
    with twins.streamed as optimizer:
        for _ in range(3):
            twins.give_gradients()
            optimizer.step()
        lr = optimizer.param_groups[0]["lr"]
        optimizer.snapshot(tmp_path / "snapshot")
        wanted = [param.detach().clone() for param in twins.params]
        main = optimizer.state_dict()["state"][0]["main"].clone()
        twins.give_gradients()
        optimizer.step()
        scheduler.step()
        assert not same_bits(twins.params[3], wanted[3])
        assert optimizer.restore(tmp_path / "snapshot") == 3
        for param, value in zip(twins.params, wanted, strict=True):
            assert same_bits(param, value)
        assert optimizer.param_groups[0]["lr"] == lr
        assert same_bits(optimizer.state_dict()["state"][0]["main"], main)


def test_nothing_of_the_options_is_lost(state):
    twins = Twins(state, adamw, in_groups=True)
    with twins.streamed:
        twins.step()
        assert options_of(twins.streamed.state_dict()) == options_of(twins.resident.state_dict())
        assert isinstance(twins.streamed, StreamedOptimizer)

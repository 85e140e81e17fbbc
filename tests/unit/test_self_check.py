"""The rehearsal: on real files, for whom it runs, and what it finds."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gds_optimizer import self_check
from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import UnsupportedError
from gds_optimizer.io import IoBackend
from gds_optimizer.self_check import check_optimizer
from tests.support import io_backends
from tests.support.engines import leftovers, open_files
from tests.unit.test_engine_optimizers import OPTIMIZERS


@pytest.fixture
def backend():
    made = io_backends.make("host")
    yield made
    made.close()


@pytest.fixture
def rehearsals(monkeypatch):
    """Which optimizers were rehearsed."""
    seen: list[type] = []
    original = self_check._first_difference

    def noting(optimizer: torch.optim.Optimizer, *arguments: Any) -> str:
        seen.append(type(optimizer))
        return original(optimizer, *arguments)

    monkeypatch.setattr(self_check, "_first_difference", noting)
    return seen


def check(
    optimizer: torch.optim.Optimizer,
    directory: Path,
    backend: IoBackend,
    *,
    self_check: str = "auto",
    covered: bool = True,
) -> None:
    config = StreamConfig(directories=(directory,), self_check=self_check)
    check_optimizer(optimizer, config, backend, 3, covered=covered)


def make(kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    return kind([torch.ones(3)], **options)


@pytest.mark.parametrize(
    ("kind", "asked", "covered", "why"),
    [
        (torch.optim.AdamW, "auto", True, ""),
        (torch.optim.Adam, "auto", True, ""),
        (torch.optim.SGD, "auto", True, ""),
        (torch.optim.AdamW, "auto", False, "in a framework that our tests do not cover"),
        (torch.optim.AdamW, "always", True, "asked for"),
        (torch.optim.AdamW, "never", False, ""),
        (torch.optim.NAdam, "auto", True, "a class that our tests do not cover"),
        (torch.optim.NAdam, "never", True, ""),
    ],
)
def test_who_is_rehearsed(tmp_path, backend, rehearsals, caplog, kind, asked, covered, why):
    caplog.set_level(logging.INFO, "gds_optimizer")
    check(make(kind), tmp_path, backend, self_check=asked, covered=covered)
    assert rehearsals == [kind] * bool(why)
    lines = [record.message for record in caplog.records if "rehearsal" in record.message]
    assert len(lines) == bool(why)
    if why:
        name = f"{kind.__module__}.{kind.__name__}"
        assert f"a rehearsal of {name} ({why}) in 3 steps came out bit-identical" in lines[0]
    assert bool(backend.counters()["host.write"]) == bool(why)  # it really went to the disk
    assert leftovers(tmp_path) == []


class CustomAdamW(torch.optim.AdamW):
    """A subclass may do anything."""


def test_a_subclass_is_not_taken_for_its_base(tmp_path, backend, rehearsals):
    check(make(CustomAdamW), tmp_path, backend)
    assert rehearsals == [CustomAdamW]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_elementwise_optimizers_pass(tmp_path, backend, name):
    check(make(OPTIMIZERS[name]), tmp_path, backend, self_check="always")


class Sly(torch.optim.Optimizer):
    """Elementwise, but for tensors so large that the schema's probe does not see it."""

    def __init__(self, params: Any, what: str = "main") -> None:
        super().__init__(params, {"what": what})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("total", torch.zeros_like(param)).add_(param.grad)
                param.sub_(param.grad)
                changed = {"main": param, "total": state["total"]}.get(group["what"])
                if changed is not None and param.numel() > 4000:
                    changed[17] += 1


@pytest.mark.parametrize(("what", "words"), [("main", r"main\[17\]"), ("total", r"total\[17\]")])
def test_a_difference_is_refused_and_shown(tmp_path, backend, what, words):
    before = open_files()
    with pytest.raises(UnsupportedError) as caught:
        check(make(Sly, what=what), tmp_path, backend)
    text = str(caught.value)
    assert f"a rehearsal of {__name__}.Sly on 5003 elements came out different" in text
    assert re.search(words + r": wanted \S+, got \S+\)", text)
    assert leftovers(tmp_path) == []
    assert open_files() == before


class Forgetful(Sly):
    """Leaves no state behind for large tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for param in self.param_groups[0]["params"]:
            if param.numel() > 4000:
                self.state[param]["more"] = 1.0


def test_missing_state_is_a_difference(tmp_path, backend):
    with pytest.raises(UnsupportedError, match="more is missing"):
        check(make(Forgetful, what="nothing"), tmp_path, backend)


def test_the_optimizer_is_not_changed(tmp_path, backend):
    optimizer = make(torch.optim.NAdam)
    optimizer.step = lambda: pytest.fail("the instance's own step was called")  # type: ignore[method-assign]
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *a: calls.append("hook"))
    groups, attributes = copy.deepcopy(optimizer.param_groups), {**optimizer.__dict__}
    check(optimizer, tmp_path, backend)
    assert optimizer.param_groups[0]["params"][0].tolist() == [1, 1, 1]
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == {
        k: v for k, v in groups[0].items() if k != "params"
    }
    assert optimizer.__dict__ == attributes
    assert not optimizer.state
    assert calls == []


def test_the_options_of_the_first_group_with_parameters_count(tmp_path, backend):
    """A group without parameters says nothing about what will be stepped."""
    groups = [{"params": [torch.ones(2)], "what": "main"}, {"params": [torch.ones(2)]}]
    optimizer = Sly(groups, what="total")
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(UnsupportedError, match=r"total\[17\]"):
        check(optimizer, tmp_path, backend)


def test_an_optimizer_without_parameters_needs_no_rehearsal(tmp_path, backend, rehearsals):
    optimizer = make(torch.optim.NAdam)
    optimizer.param_groups[0]["params"] = []
    check(optimizer, tmp_path, backend)
    assert rehearsals == []


def test_two_ranks_do_not_meet(tmp_path, backend, monkeypatch):
    directories: list[str] = []
    original = self_check.Store

    def noting(layout: Any, roots: Any, name: str, backend: Any) -> Any:
        directories.append(name)
        return original(layout, roots, name, backend)

    monkeypatch.setattr(self_check, "Store", noting)
    check(make(torch.optim.NAdam), tmp_path, backend)
    assert directories == ["rank00003/self-check"]

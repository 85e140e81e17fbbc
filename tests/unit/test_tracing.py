"""The timeline holds what a run did, stays small, survives a kill, and changes nothing."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gds_optimizer import tracing
from gds_optimizer.bench.steps import synthetic_optimizer
from gds_optimizer.cli.main import main
from gds_optimizer.config import StreamConfig
from gds_optimizer.errors import ConfigError
from gds_optimizer.runtime import Part, Runtime
from gds_optimizer.stepper import install_step
from gds_optimizer.timeline import Span, load_spans, summarize, to_dict, to_text
from gds_optimizer.tracing import LANES, Tracer, trace_path

REPOSITORY = Path(__file__).parents[2]
NUMEL, STEPS = 100_000, 3


def run_steps(directory: Path, trace: Path | None, steps: int = STEPS):
    """Steps of an AdamW; the bits of its state, and the statistics of each step."""
    torch.manual_seed(1)
    optimizer, bindings = synthetic_optimizer(NUMEL, torch.device("cpu"))
    config = StreamConfig(directories=(directory,), bucket_size=12 * 8192, trace=trace)
    runtime = Runtime.build(
        [Part(optimizer, bindings, "t")], config, device=torch.device("cpu"), rank=0, eager=True
    )
    (engine,) = runtime.engines
    install_step(optimizer, engine.step)
    stats = []
    for step in range(steps):
        for binding in bindings:
            binding.main.grad = torch.full((binding.main.numel(),), 0.1 * (step + 1))
        optimizer.step()
        stats.append(engine.last_stats)
    state = engine.read_state()
    runtime.close_engine(engine)
    return state, stats


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trace")
    path = directory / "trace.json"
    state, stats = run_steps(directory, path)
    return path, state, stats


def test_it_is_a_json_array_of_events_with_named_lanes(recorded):
    events = json.loads(recorded[0].read_text())
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(LANES) <= names
    assert {e["pid"] for e in events} == {0}
    assert {e["ph"] for e in events} == {"M", "X"}


def test_every_pass_and_every_bucket_is_there(recorded):
    path, _, stats = recorded
    spans = load_spans(path)
    passes = [s.name for s in spans if s.lane == "pass"]
    assert passes == ["initialisation", *(f"optimizer step {n}" for n in range(1, STEPS + 1))]
    buckets = stats[0].buckets
    for lane in ("decode", "compute", "write back"):
        of_lane = [s for s in spans if s.lane == lane]
        extra = lane != "decode"  # an initialisation decodes nothing
        assert len(of_lane) == buckets * (STEPS + extra), lane
        assert {s.name for s in of_lane} == {f"bucket {n}" for n in range(buckets)}
    writes = [s for s in spans if s.lane == "write"]
    reads = [s for s in spans if s.lane == "read"]
    assert len(writes) == buckets * (STEPS + 1)
    for number, each in enumerate(stats):
        begin_s, end_s = next(
            (s.begin_s, s.end_s) for s in spans if s.name == f"optimizer step {number + 1}"
        )
        inside = [s for s in reads if begin_s <= s.begin_s <= end_s]
        assert sum(s.arguments["bytes"] for s in inside) == each.read_bytes
        inside = [s for s in writes if begin_s <= s.begin_s <= end_s]
        assert sum(s.arguments["bytes"] for s in inside) == each.written_bytes


def test_ends_of_transfers_say_how_exact_they_are(recorded):
    for span in load_spans(recorded[0]):
        if span.lane in ("read", "write"):
            seen_ms = span.arguments["seen_in_flight_ms_before_end"]
            assert 0 <= seen_ms <= (span.end_s - span.begin_s) * 1e3 + 0.01


def test_spans_of_one_row_do_not_overlap(recorded):
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in json.loads(recorded[0].read_text()):
        if event["ph"] == "X":
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        row.sort()
        for (_, end), (begin, _) in itertools.pairwise(row):
            assert begin >= end - 1.0


def test_phases_sum_to_the_wall_with_a_trace_too(recorded):
    for stats in recorded[2]:
        assert sum(stats.phases_s.values()) == pytest.approx(stats.wall_s, rel=0.02)
        assert all(seconds >= 0 for seconds in stats.phases_s.values())


def test_a_trace_changes_no_bit(recorded, tmp_path):
    state, _ = run_steps(tmp_path, None)
    assert list(tmp_path.iterdir()) == []
    for name, values in recorded[1].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(state[name][key])), key


def test_the_file_is_bounded_and_stays_loadable(tmp_path):
    tracer = Tracer(tmp_path / "t", rank=0, device=torch.device("cpu"), limit_bytes=4000)
    for number in range(100):
        tracer.begin_pass(f"optimizer step {number}")
        with tracer.span("wait", "read_wait"):
            pass
        tracer.end_pass({})
    tracer.close()
    assert (tmp_path / "t").stat().st_size <= 4000
    events = json.loads((tmp_path / "t").read_text())
    assert 5 < sum(e["ph"] == "X" for e in events) < 200


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from tests.unit import test_tracing
from gds_optimizer.tracing import Tracer
end_pass = Tracer.end_pass
def end(self, arguments):
    end_pass(self, arguments)
    if '"optimizer step 3"' in self.path.read_text():
        os.kill(os.getpid(), signal.SIGKILL)
Tracer.end_pass = end
test_tracing.run_steps(Path(sys.argv[1]), Path(sys.argv[1]) / "trace.json", steps=9)
"""


def test_a_killed_run_leaves_a_timeline_that_can_be_read(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=REPOSITORY, check=False
    )
    assert done.returncode == -signal.SIGKILL
    path = tmp_path / "trace.json"
    text = path.read_text()
    with pytest.raises(ValueError, match=r"delimiter|Expecting"):
        json.loads(text)
    json.loads(text + "]")  # what Chrome and Perfetto do with an array that does not end
    names = [s.name for s in load_spans(path) if s.lane == "pass"]
    assert names[-1] == "optimizer step 3"
    # Killed in the middle of a line, by the system this time.
    path.write_text(text[:-20])
    assert len(load_spans(path)) > 10


def test_another_file_is_refused(tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"a": 1}\n')
    assert main(["trace", str(tmp_path / "x.json")]) == 2
    assert "line 1" in capsys.readouterr().err


def test_ranks_write_files_of_their_own(monkeypatch):
    assert trace_path(Path("/a/t.json"), 3) == Path("/a/t.json")
    assert trace_path(Path("/a/t-{rank}.json"), 3) == Path("/a/t-00003.json")
    monkeypatch.setattr(tracing.torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(tracing.torch.distributed, "get_world_size", lambda: 4)
    assert trace_path(Path("/a/t.json"), 3) == Path("/a/t.rank00003.json")


def test_a_file_that_cannot_be_made_is_a_wrong_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"trace: .*/none/t\.json cannot be written"):
        run_steps(tmp_path, tmp_path / "none" / "t.json")
    with pytest.raises(ConfigError, match="trace is 3"):
        StreamConfig(directories=(tmp_path,), trace=3)


def test_a_forked_child_leaves_the_file_alone(tmp_path):
    tracer = Tracer(tmp_path / "t", rank=0, device=torch.device("cpu"))
    tracer.begin_pass("a")
    child = os.fork()
    if child == 0:
        tracer.close()
        os._exit(0)
    os.waitpid(child, 0)
    tracer.end_pass({})
    tracer.close()
    assert [s.name for s in load_spans(tmp_path / "t")] == ["a"]


def spans_of(*rows: tuple[str, str, float, float]) -> list[Span]:
    return [Span(0, lane, name, begin, end, {}) for lane, name, begin, end in rows]


@pytest.mark.parametrize(
    ("wait", "cause"),
    [
        (("wait", "read_wait", 2.0, 6.0), "waiting for the read of bucket 1"),
        (("wait", "write_wait", 2.0, 6.0), "waiting for the write of bucket 7, to have its slot"),
        (("wait", "read_wait", 2.0, 2.5), "the control loop itself"),
    ],
)
def test_the_longest_gap_and_its_cause(wait, cause):
    (summary,) = summarize(
        spans_of(
            ("pass", "optimizer step 1", 0.0, 10.0),
            ("read", "bucket 0", 0.0, 1.0),
            ("read", "bucket 1", 0.5, 6.0),
            ("write", "bucket 7", -3.0, 5.9),
            ("decode", "bucket 0", 1.0, 1.5),
            ("compute", "bucket 0", 1.5, 2.0),
            ("compute", "bucket 1", 6.0, 9.5),
            wait,
        )
    )
    assert summary.longest_gap_s == pytest.approx(4.0)
    assert summary.gap_cause.startswith(cause)
    assert summary.busy_s == pytest.approx(
        {"read": 6.0, "decode": 0.5, "compute": 4.0, "write back": 0.0, "write": 5.9}
    )


def test_the_command_s_summary(recorded, capsys):
    assert main(["trace", str(recorded[0]), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (rank,) = data["ranks"]
    assert rank["median"]["count"] == STEPS
    assert len(rank["passes"]) == STEPS + 1
    assert main(["trace", str(recorded[0])]) == 0
    text = capsys.readouterr().out
    assert "longest time without a visit" in text
    assert text.strip() == to_text(to_dict(summarize(load_spans(recorded[0]))))


def test_without_matplotlib_the_plot_says_what_to_install(recorded, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["trace", str(recorded[0]), "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'gds-optimizer[plot]'" in capsys.readouterr().err


def test_the_plot(recorded, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    assert main(["trace", str(recorded[0]), "--plot", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")

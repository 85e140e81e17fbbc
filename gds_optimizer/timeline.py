"""What a timeline says: how busy each lane was, and what the passes waited for.

Reads what `tracing` has written, also the file of a run that was killed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gds_optimizer.errors import ConfigError
from gds_optimizer.tracing import LANES

_VISIT_LANES = ("decode", "compute", "write back")
_BUSY_LANES = ("read", *_VISIT_LANES, "write")

Interval = tuple[float, float]
"""Begin and end, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span; times in seconds since the epoch."""

    rank: int
    lane: str
    name: str
    begin_s: float
    end_s: float
    arguments: dict[str, Any]


@dataclass(slots=True)
class PassSummary:
    """One pass of one rank.

    Attributes:
        busy_s: for each lane, seconds in which at least one of its spans was open in this pass.
        wait_s: seconds that the control loop waited, by phase.
        longest_gap_s: the longest time in which no part of any visit ran.
        gap_cause: what the control loop did meanwhile.
    """

    rank: int
    name: str
    seconds: float
    busy_s: dict[str, float] = field(default_factory=dict)
    wait_s: dict[str, float] = field(default_factory=dict)
    longest_gap_s: float = 0.0
    gap_cause: str = ""


def load_spans(path: Path) -> list[Span]:
    """The spans of a file, in the order in which they were written.

    Raises:
        ConfigError: it is not a timeline of this package.
    """
    spans: list[Span] = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        text = line.strip().rstrip(",")
        if text in ("", "[", "]"):
            continue
        try:
            event = json.loads(text)
            if event["ph"] != "X":
                continue
            lane = event["cat"]
            begin_s = event["ts"] / 1e6
            span = Span(
                event["pid"],
                lane,
                event["name"],
                begin_s,
                begin_s + event["dur"] / 1e6,
                event["args"],
            )
        except (ValueError, KeyError, TypeError):
            if spans and not line.endswith(("}", "},")):
                break  # a killed run was writing it
            raise ConfigError(
                f"line {number} of {path} is not an event of a timeline that "
                "--stream-optimizer-state-trace has written: name such a file"
            ) from None
        if lane in LANES:
            spans.append(span)
    return spans


def summarize(spans: Sequence[Span]) -> list[PassSummary]:
    """One summary for each pass, by rank and time."""
    found = []
    for each in sorted((s for s in spans if s.lane == "pass"), key=lambda s: (s.rank, s.begin_s)):
        window = (each.begin_s, each.end_s)
        own = [
            s
            for s in spans
            if s.rank == each.rank and s.end_s > window[0] and s.begin_s < window[1]
        ]
        summary = PassSummary(each.rank, each.name, each.end_s - each.begin_s)
        for lane in _BUSY_LANES:
            summary.busy_s[lane] = _total(_union(_clipped(own, (lane,), window)))
        for name in ("read_wait", "write_wait"):
            waits = [s for s in own if s.lane == "wait" and s.name == name]
            summary.wait_s[name] = _total(_clipped(waits, ("wait",), window))
        _find_gap(summary, own, window)
        found.append(summary)
    return found


def _find_gap(summary: PassSummary, spans: Sequence[Span], window: Interval) -> None:
    begin_s, gap = window[0], (window[0], window[0])
    visits = _union(_clipped(spans, _VISIT_LANES, window))
    for start_s, end_s in [*visits, (window[1], window[1])]:
        if start_s - begin_s > gap[1] - gap[0]:
            gap = (begin_s, start_s)
        begin_s = max(begin_s, end_s)
    summary.longest_gap_s = gap[1] - gap[0]
    waited = {
        name: _total(
            _clipped([s for s in spans if s.lane == "wait" and s.name == name], ("wait",), gap)
        )
        for name in ("read_wait", "write_wait")
    }
    name = max(waited, key=lambda name: waited[name])
    if waited[name] < summary.longest_gap_s / 2:
        summary.gap_cause = "the control loop itself: no transfer was waited for most of the time"
        return
    lane = name.removesuffix("_wait")
    ends = [s for s in spans if s.lane == lane and s.begin_s < gap[1] and s.end_s > gap[0]]
    last = min(ends, key=lambda s: abs(s.end_s - gap[1]), default=None)
    which = f" of {last.name}" if last is not None else ""
    summary.gap_cause = (
        f"waiting for the read{which}"
        if lane == "read"
        else f"waiting for the write{which}, to have its slot"
    )


def to_dict(summaries: Sequence[PassSummary]) -> dict[str, Any]:
    """Plain JSON data: for each rank its passes, and medians over its optimizer steps."""
    ranks = []
    for rank in sorted({s.rank for s in summaries}):
        own = [s for s in summaries if s.rank == rank]
        steps = [s for s in own if s.name.startswith("optimizer step")] or own
        step_s = statistics.median(s.seconds for s in steps)
        longest = max(steps, key=lambda s: s.longest_gap_s)
        ranks.append(
            {
                "rank": rank,
                "passes": [
                    {
                        "name": s.name,
                        "seconds": s.seconds,
                        "busy_s": s.busy_s,
                        "wait_s": s.wait_s,
                        "longest_gap_s": s.longest_gap_s,
                        "gap_cause": s.gap_cause,
                    }
                    for s in own
                ],
                "median": {
                    "of": "steps" if steps is not own else "passes",
                    "count": len(steps),
                    "seconds": step_s,
                    "busy_s": _medians(steps, "busy_s"),
                    "wait_s": _medians(steps, "wait_s"),
                },
                "longest_gap": {
                    "in": longest.name,
                    "seconds": longest.longest_gap_s,
                    "cause": longest.gap_cause,
                },
            }
        )
    return {"version": 1, "ranks": ranks}


def _medians(summaries: Sequence[PassSummary], what: str) -> dict[str, float]:
    keys = getattr(summaries[0], what)
    return {key: statistics.median(getattr(s, what)[key] for s in summaries) for key in keys}


def to_text(data: dict[str, Any]) -> str:
    """For people; what `to_dict` gives."""
    lines = []
    for each in data["ranks"]:
        median, gap = each["median"], each["longest_gap"]
        seconds = median["seconds"]
        lines.append(
            f"rank {each['rank']}: {len(each['passes'])} passes; median of {median['count']} "
            f"{median['of']}: {seconds:.3f} s"
        )
        rows = [(f"{lane} busy", value) for lane, value in median["busy_s"].items()]
        rows += [(f"{name.replace('_', ' ')}", value) for name, value in median["wait_s"].items()]
        for name, value in rows:
            share = value / seconds if seconds else 0.0
            lines.append(f"  {name:<16} {value:9.3f} s  {share:6.1%}")
        lines.append(
            f"  longest time without a visit: {gap['seconds']:.3f} s in {gap['in']}, {gap['cause']}"
        )
    return "\n".join(lines) or "no pass was recorded"


def plot(spans: Sequence[Span], path: Path) -> None:
    """Draw the lanes of every rank.

    Args:
        spans: at least one.
        path: of the picture; its suffix says which format.

    Raises:
        ConfigError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib, which cannot be imported ({error}): "
            "pip install 'gds-optimizer[plot]'"
        ) from error
    if not spans:
        raise ConfigError("--plot: the timeline holds no span: record at least one step")
    start_s = min(span.begin_s for span in spans)
    rows = [
        (rank, lane)
        for rank in sorted({span.rank for span in spans})
        for lane in LANES
        if any(span.rank == rank and span.lane == lane for span in spans)
    ]
    figure = Figure(figsize=(14, 1.2 + 0.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (rank, lane) in enumerate(rows):
        own = [span for span in spans if (span.rank, span.lane) == (rank, lane)]
        axes.broken_barh(
            [(span.begin_s - start_s, span.end_s - span.begin_s) for span in own],
            (number - 0.4, 0.8),
            facecolor=f"C{LANES.index(lane)}",
            edgecolor="white",
            linewidth=0.3,
            alpha=0.7,
        )
    several = len({rank for rank, _ in rows}) > 1
    labels = [f"rank {rank}: {lane}" if several else lane for rank, lane in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    figure.savefig(path)


def _clipped(spans: Iterable[Span], lanes: Sequence[str], window: Interval) -> list[Interval]:
    return [
        (max(s.begin_s, window[0]), min(s.end_s, window[1]))
        for s in spans
        if s.lane in lanes and s.end_s > window[0] and s.begin_s < window[1]
    ]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin_s, end_s in sorted(intervals):
        if merged and begin_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((begin_s, end_s))
    return merged


def _total(intervals: Iterable[Interval]) -> float:
    return sum(end_s - begin_s for begin_s, end_s in intervals)

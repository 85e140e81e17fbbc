"""The comparison with peers as text: one table, and what its figures do and do not say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_HEAD = (
    "peer",
    "s/step",
    "from",
    "to",
    "+flush s",
    "read GB",
    "written GB",
    "cached GB",
    "files cached GB",
    "host GB",
    "device GB",
    "x limit",
)


def to_text(found: dict[str, Any]) -> str:
    """`compare`'s result for people."""
    limit, cap = found["limit"], found["cap"]
    past = (
        f"{limit['sustained_bytes'] / 1e9:.0f} GB were written before"
        if limit["sustained_bytes"]
        else "a drive's fast cache was not filled before (--sustained BYTES does)"
    )
    what = (
        f"{found['numel'] / 1e9:.3f} billion parameters on {found['device']}, files in "
        f"{found['directory']}, median of {found['steps']} steps"
    )
    drive = (
        f"drive: read {limit['read_gbps']:.2f}, write {limit['write_gbps']:.2f}, both at once "
        f"{limit['mixed_gbps']:.2f} GB/s past the page cache; {past}"
    )
    lines = [what, drive, _cap_text(cap), ""]
    measured = {n: row for n, row in found["peers"].items() if "missing" not in row}
    lines += table([_HEAD, *(_cells(name, row) for name, row in measured.items())])
    width = max(len(name) for name in found["peers"])
    for name, row in found["peers"].items():
        if "missing" in row:
            lines.append(f"{name:<{width}}  {row['missing']}")
            lines += [f"{'':<{width}}    {line}" for line in row.get("log", [])]
    notes = [f"{name:<{width}}  {row['note']}" for name, row in measured.items() if row["note"]]
    if notes:
        lines += ["", *notes]
    lines += ["", *_LEGEND]
    for name, row in measured.items():
        if row["ratio_to_limit"] is not None and row["ratio_to_limit"] < 1:
            lines.append(f"{name} is faster than the drive gives its bytes: {_why_faster(row)}")
    return "\n".join(lines)


_LEGEND = (
    "read, written: bytes of a step by the kernel's books of the process; a write into the page",
    "cache counts when it is made. +flush: what bringing the rest to the drive took in the end.",
    "cached: page cache filled at most; files cached: of the peer's files when it ended.",
    "host: peak resident memory, page cache not included.",
    "x limit: s/step over what its bytes take at the drive's rate for both at once.",
)


def _why_faster(row: dict[str, Any]) -> str:
    cached = max(row["page_cache_bytes"], row["files_in_page_cache_bytes"])
    if cached > _CACHED_SHARE * (row["step_io"]["read"] + row["step_io"]["written"]):
        return "memory took some of them, and the flush pays for them."
    return "the page cache has next to none of them, so the drive did better than when measured."


_CACHED_SHARE = 0.01
"""Of a step's bytes; what file systems keep for themselves is less."""


def _cap_text(cap: dict[str, Any]) -> str:
    if cap["bytes"] is None:
        return "page cache: NOT capped (--memory-cap BYTES does); its growth is the whole machine's"
    if not cap["holds"]:
        return f"page cache: NOT capped, its growth is the whole machine's: {cap['by']}"
    return (
        f"host memory and page cache for each peer's state: capped at {cap['bytes'] / 1e9:.2f} GB "
        f"by {cap['by']}"
    )


def _cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    ratio, device = row["ratio_to_limit"], row["device_peak_bytes"]
    return (
        name,
        f"{row['step_s']:.3f}",
        f"{min(row['steps_s']):.3f}",
        f"{max(row['steps_s']):.3f}",
        f"{row['flush_s']:.2f}",
        _gb(row["step_io"]["read"]),
        _gb(row["step_io"]["written"]),
        _gb(row["page_cache_bytes"]),
        _gb(row["files_in_page_cache_bytes"]),
        _gb(row["host_peak_bytes"]),
        "-" if device is None else _gb(device),
        "-" if ratio is None else f"{ratio:.2f}",
    )


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

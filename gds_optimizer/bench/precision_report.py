"""What the precision benchmark makes of its runs: codecs' errors, verdicts, a table and a plot."""

from __future__ import annotations

import math
import os
import statistics
import tarfile
from pathlib import Path
from typing import Any

import torch

from gds_optimizer.codecs import Codec, get_codec, rounding_seed
from gds_optimizer.errors import ConfigError
from gds_optimizer.plan import INT8_CODECS

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"moment_dtype": "bf16", "moment_rounding": "stochastic"},
    "bf16-nearest": {"moment_dtype": "bf16", "moment_rounding": "nearest"},
    "int8": {"moment_dtype": "int8", "moment_rounding": "stochastic"},
    "int8-nearest": {"moment_dtype": "int8", "moment_rounding": "nearest"},
    "remainder": {"main": "remainder"},
    "bf16-remainder": {
        "moment_dtype": "bf16",
        "moment_rounding": "stochastic",
        "main": "remainder",
    },
    "int8-remainder": {
        "moment_dtype": "int8",
        "moment_rounding": "stochastic",
        "main": "remainder",
    },
}
"""Settings of `StreamConfig` by the name that files and tables give them."""

TWINS = {"remainder": "fp32", "bf16-remainder": "bf16", "int8-remainder": "int8"}
"""Variants that lose nothing against another one: their runs must equal its runs bit for bit."""

_COMPARED = ("curve", "final_training_loss", "validation_loss", "parameters_sha256")
_PACKED = (".json", ".md", ".png")
_LARGEST_TAR_BYTES = 16 * 2**20

RECORD_EVERY = 10
"""Steps that a point of a training curve is the mean of."""

_ROUND_TRIPS = 1000


def codec_errors(
    moments: dict[str, torch.Tensor], device: torch.device, *, limit_numel: int = 2**22
) -> list[dict[str, Any]]:
    """Relative errors of each lossy codec on real moments, after 1 and 1,000 round trips.

    Args:
        moments: 1-D fp32 by name.
        device: where codecs run.
        limit_numel: of each moment, the first so many elements are taken.
    """
    found = []
    for name, values in moments.items():
        exact = values[:limit_numel].to(device)
        for codec_name in ("fp32:bf16", INT8_CODECS[name]):
            for suffix in ("", "-sr"):
                codec = get_codec(codec_name + suffix)
                for trips in (1, _ROUND_TRIPS):
                    error = _errors(codec, exact, trips)
                    found.append(
                        {"moment": name, "codec": codec.name, "round_trips": trips, **error}
                    )
    return found


def _errors(codec: Codec, exact: torch.Tensor, trips: int) -> dict[str, float]:
    encoded = torch.zeros(
        codec.encoded_bytes(exact.numel()), dtype=torch.uint8, device=exact.device
    )
    values = exact.clone()
    for trip in range(trips):
        codec.encode_from(values, encoded, seed=rounding_seed(trip, 0, 0))
        codec.decode_into(encoded, values)
    nonzero = exact != 0
    relative = ((values - exact).abs() / exact.abs())[nonzero].double()
    ordered = relative.sort().values
    return {
        "median": float(ordered[ordered.numel() // 2]),
        "p99": float(ordered[int(ordered.numel() * 0.99)]),
        "largest": float(ordered[-1]),
        "mean_signed": float(((values.double() - exact.double()) / exact.double())[nonzero].mean()),
    }


def summarize(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Verdicts on the runs there are, by the rule that `gds_optimizer.bench.precision` states."""
    by_variant: dict[str, dict[int, dict[str, Any]]] = {}
    for result in results:
        by_variant.setdefault(result["variant"], {})[result["seed"]] = result
    reference = by_variant.get("fp32", {})
    losses = [each["validation_loss"] for each in reference.values()]
    spread = max(losses) - min(losses) if losses else math.nan
    rows = {}
    for variant in [name for name in VARIANTS if name in by_variant]:
        runs = by_variant[variant]
        shared = sorted(runs.keys() & reference.keys())
        differences = [
            runs[seed]["validation_loss"] - reference[seed]["validation_loss"] for seed in shared
        ]
        mean = statistics.fmean(differences) if differences else math.nan
        rows[variant] = {
            "seeds": sorted(runs),
            "validation_loss": statistics.fmean(r["validation_loss"] for r in runs.values()),
            "final_training_loss": statistics.fmean(
                r["final_training_loss"] for r in runs.values()
            ),
            "difference_from_fp32": mean,
            "differences_by_seed": differences,
            "holds_up": bool(len(losses) > 1 and mean <= spread),
        }
        twin = TWINS.get(variant)
        if twin is not None:
            others = by_variant.get(twin, {})
            both = sorted(runs.keys() & others.keys())
            rows[variant]["twin"] = twin
            rows[variant]["seeds_compared"] = both
            rows[variant]["seeds_that_differ"] = [
                seed
                for seed in both
                if any(runs[seed].get(key) != others[seed].get(key) for key in _COMPARED)
            ]
    return {
        "fp32_spread": spread,
        "variants": rows,
        "codec_errors": next((r["codec_errors"] for r in results if "codec_errors" in r), []),
    }


def to_text(summary: dict[str, Any]) -> str:
    """A table for people, in Markdown."""
    lines = [
        "| variant | seeds | validation loss | training loss | over fp32 | by seed | |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant, row in summary["variants"].items():
        by_seed = ", ".join(f"{each:+.4f}" for each in row["differences_by_seed"])
        verdict = _verdict(row)
        lines.append(
            f"| `{variant}` | {len(row['seeds'])} | {row['validation_loss']:.4f} | "
            f"{row['final_training_loss']:.4f} | {row['difference_from_fp32']:+.4f} | {by_seed} | "
            f"{verdict if variant != 'fp32' else 'the reference'} |"
        )
    lines.append(f"\nSpread of fp32 between its seeds: {summary['fp32_spread']:.4f}")
    return "\n".join(lines)


def _verdict(row: dict[str, Any]) -> str:
    if row.get("seeds_compared"):
        differ = row["seeds_that_differ"]
        if not differ:
            return f"the bits of `{row['twin']}`"
        return f"NOT the bits of `{row['twin']}`: seeds {', '.join(map(str, differ))}"
    return "holds up" if row["holds_up"] else "does not hold up"


def differing(summary: dict[str, Any]) -> list[str]:
    """Variants that ought to equal their twin and do not, in any seed."""
    rows = summary["variants"].items()
    return [variant for variant, row in rows if row.get("seeds_that_differ")]


def errors_to_text(errors: list[dict[str, Any]]) -> str:
    """The codecs' errors as a table for people, in Markdown."""
    lines = [
        "| moment | codec | round trips | median | 99 % below | largest | mean, signed |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{each['moment']}` | `{each['codec']}` | {each['round_trips']} | "
        f"{each['median']:.2e} | {each['p99']:.2e} | {each['largest']:.2e} | "
        f"{each['mean_signed']:+.2e} |"
        for each in errors
    ]
    return "\n".join(lines)


def pack(directory: Path) -> Path:
    """One uncompressed tar beside a directory of results, with everything in it.

    Returns:
        Its path: the directory's name with ".tar".

    Raises:
        ConfigError: it would not be small, so the directory holds something else.
    """
    files = [path for path in sorted(directory.iterdir()) if path.suffix in _PACKED]
    nbytes = sum(path.stat().st_size for path in files)
    if nbytes > _LARGEST_TAR_BYTES - 2**20:
        raise ConfigError(
            f"--out is {directory}, which holds {nbytes} bytes of results, wanted less than "
            f"{_LARGEST_TAR_BYTES - 2**20}: name a new directory"
        )
    packed = directory.with_name(directory.name + ".tar")
    partial = packed.with_name(packed.name + ".partial")
    with tarfile.open(partial, "w") as tar:
        for path in files:
            tar.add(path, arcname=f"{directory.name}/{path.name}", recursive=False)
    os.replace(partial, packed)
    return packed


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Training curves as means over the seeds, and their distance from fp32, as a PNG.

    A variant that loses nothing is dotted, in the colour of the one whose bits it should have.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves: dict[str, list[list[float]]] = {}
    for result in results:
        curves.setdefault(result["variant"], []).append(result["curve"])
    means = {
        name: [statistics.fmean(points) for points in zip(*runs, strict=True)]
        for name, runs in curves.items()
    }
    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 7), height_ratios=(3, 2), layout="constrained"
    )
    for name in [each for each in VARIANTS if each in means]:
        places = [(number + 1) * RECORD_EVERY for number in range(len(means[name]))]
        style = {
            "label": name,
            "color": f"C{list(VARIANTS).index(TWINS.get(name, name))}",
            "linewidth": 2 if name in TWINS else 1,
            "linestyle": (0, (1, 4)) if name in TWINS else "-",
        }
        above.plot(places, means[name], **style)
        if name != "fp32" and "fp32" in means:
            difference = [a - b for a, b in zip(means[name], means["fp32"], strict=True)]
            below.plot(places, difference, **style)
    above.set_ylabel("training loss, nats a byte")
    below.set_ylabel("minus that of fp32")
    below.set_xlabel("step")
    below.axhline(0.0, color="black", linewidth=0.5)
    above.legend()
    figure.savefig(path, dpi=120)

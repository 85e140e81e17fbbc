"""`gds-optimizer inspect PATH`: what is in a snapshot."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Show what a snapshot holds: step, ranks, optimizers, planes, sizes. Reads the manifests only; use
`verify` to read everything.
"""
EPILOG = (
    "exit status: 0 shown; 1 there is no complete snapshot, or a manifest is damaged; 2 usage.\n"
)


def register(subparsers: SubParsers) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="show what is in a snapshot",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="directory of the snapshot")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gds_optimizer.snapshot_read import all_parts, describe

    whole = describe(arguments.path)
    parts = [_summary(part) for part in all_parts(arguments.path)]
    if arguments.json:
        print(json.dumps({**whole, "parts": parts}, indent=1))
        return 0
    total_bytes = sum(part["bytes"] for part in parts)
    print(f"snapshot {arguments.path}")
    print(
        f"  step {whole['step']}, {whole['world_size']} ranks, "
        f"{', '.join(whole['optimizers']) or 'no optimizer'}, {total_bytes / 2**30:.2f} GiB"
    )
    for part in parts:
        planes = ", ".join(f"{name} {codec}" for name, codec in part["planes"].items())
        print(
            f"  rank {part['rank']} {part['name']}: {part['optimizer']}, {part['shards']} shards, "
            f"{part['numel']} elements, {part['buckets']} buckets, "
            f"{part['bytes'] / 2**30:.2f} GiB ({planes})"
        )
    return 0


def _summary(part: Any) -> dict[str, Any]:
    manifest, layout = part.manifest, part.layout
    planes = {p.name: p.codec for space in layout.spaces for p in space.planes}
    return {
        "rank": manifest["rank"],
        "name": manifest["name"],
        "optimizer": manifest["optimizer"],
        "step": manifest["step"],
        "groups": len(manifest["groups"]),
        "shards": len(manifest["shards"]),
        "numel": layout.numel,
        "buckets": len(layout.buckets),
        "bytes": layout.total_bytes,
        "planes": planes,
    }

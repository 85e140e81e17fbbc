"""`gds-optimizer bench --dir D`: is this machine's NVMe fast enough?"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from gds_optimizer.cli.arguments import add_layout_options, given
from gds_optimizer.cli.probe import IO_CHOICES
from gds_optimizer.command import count

if TYPE_CHECKING:
    from gds_optimizer.config import StreamConfig

    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Time optimizer steps whose state is in the directories, and what the drives would allow at best: a
loop of plain direct reads and writes that shares no code with the steps, run between them. Needs
room for up to 12 bytes a parameter and at most 4 GiB more, uses as much again where there is room,
and leaves nothing behind.
"""
EPILOG = """\
With several values, as in --moment-dtype fp32,bf16,int8 --main fp32,remainder, steps with state in
each of these forms take turns: bytes a parameter as the engine and the kernel count them, times,
and whether the one falls as the other does. That needs room for all of them at once.

exit status: 0 measured; 2 wrong usage; 3 the path asked for is not to be had; 1 anything else.
"""


def register(subparsers: SubParsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time steps against what the drives allow",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dir", dest="directories", action="append", required=True, help="one for each drive"
    )
    parser.add_argument(
        "--numel", type=count, default=2**30, help="parameters, e.g. 1.24e9 (default 2**30)"
    )
    parser.add_argument("--steps", type=count, default=5, help="steps to time (default 5)")
    parser.add_argument(
        "--io",
        type=_paths,
        default="auto",
        help="path (default auto); several, as in gds,posix, are run one after the other",
    )
    parser.add_argument(
        "--ranks",
        type=count,
        default=1,
        help="processes at a time, each with --numel parameters and a GPU if there is one",
    )
    parser.add_argument(
        "--sustained",
        metavar="BYTES",
        default="0",
        help="write this much, e.g. 300GB, before the drives are measured: what a consumer drive's "
        "fast cache holds (default 0)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="at most 2**27 parameters and 1 GiB a measurement: a first impression",
    )
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    add_layout_options(parser)
    parser.add_argument(
        "--hbm-budget", default="0", help="bytes of state that stay on the device, e.g. 8GiB"
    )
    parser.add_argument(
        "--host-budget", default="0", help="the same of host memory, or auto (default 0)"
    )
    parser.add_argument("--allow-tmpfs", action="store_true", help="accept a directory in memory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _paths(text: str) -> str:
    for name in text.split(","):
        if name not in IO_CHOICES:
            raise argparse.ArgumentTypeError(
                f"wanted {', '.join(IO_CHOICES)}, or several with commas, got {name!r}"
            )
    return text


def run(arguments: argparse.Namespace) -> int:
    from gds_optimizer.bench.steps import device_named, run_bench
    from gds_optimizer.config import StreamConfig, parse_size

    paths = arguments.io.split(",")
    mains, moments = arguments.main.split(","), arguments.moment_dtype.split(",")
    config = StreamConfig(
        directories=tuple(arguments.directories),
        io=paths[0],
        moment_dtype=moments[0],
        moment_rounding=arguments.moment_rounding,
        hbm_budget=arguments.hbm_budget,
        host_budget=arguments.host_budget,
        main=mains[0],
        allow_tmpfs=arguments.allow_tmpfs,
        **given(arguments, "bucket_size", "slots"),
    )
    numel = arguments.numel
    options: dict[str, Any] = {"sustained_bytes": parse_size(arguments.sustained)}
    if arguments.quick:
        numel, options["limit_bytes"] = min(numel, 2**27), 2**30
    if len(mains) > 1 or len(moments) > 1:
        forms = [(moment_dtype, main) for main in mains for moment_dtype in moments]
        return _run_forms(arguments, config, forms, numel)
    if len(paths) > 1 or arguments.ranks > 1:
        return _run_in_processes(arguments, config, paths, numel, options)
    result = run_bench(
        config,
        numel=numel,
        steps=arguments.steps,
        device=device_named(arguments.device),
        progress=_tell,
        **options,
    )
    return _show(result, arguments)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(result: Any, arguments: argparse.Namespace) -> int:
    print(json.dumps(result.to_dict(), indent=1) if arguments.json else result.to_text())
    return 0


def _run_forms(
    arguments: argparse.Namespace, config: StreamConfig, forms: list[tuple[str, str]], numel: int
) -> int:
    """Moments or main parameters in several forms, in turn.

    Raises:
        ConfigError: another option does not go with that.
    """
    from gds_optimizer.bench.forms import run_forms_bench
    from gds_optimizer.bench.steps import device_named
    from gds_optimizer.errors import ConfigError

    if "," in arguments.io or arguments.ranks > 1 or arguments.sustained != "0":
        raise ConfigError(
            "several values of --moment-dtype or --main do not go with several --io, --ranks or "
            "--sustained: compare one thing at a time"
        )
    result = run_forms_bench(
        config,
        forms=forms,
        numel=numel,
        steps=arguments.steps,
        device=device_named(arguments.device),
        progress=_tell,
    )
    return _show(result, arguments)


def _run_in_processes(
    arguments: argparse.Namespace,
    config: StreamConfig,
    paths: list[str],
    numel: int,
    options: dict[str, Any],
) -> int:
    """Several ranks, or several paths, or both.

    Raises:
        IoPathError: none of the paths is to be had; why has been printed.
    """
    from gds_optimizer.bench.ranks import Settings, paths_to_text, run_in_processes, run_paths
    from gds_optimizer.errors import IoPathError

    settings = Settings(
        config=config,
        numel=numel,
        steps=arguments.steps,
        device=arguments.device,
        ranks=arguments.ranks,
        options=options,
    )
    if len(paths) == 1:
        result = run_in_processes(settings)
        print(json.dumps(result.to_dict(), indent=1) if arguments.json else result.to_text())
        return 0
    found = run_paths(settings, paths)
    if arguments.json:
        document = {
            path: {"not_available": each} if isinstance(each, str) else each.to_dict()
            for path, each in found.items()
        }
        print(json.dumps({"paths": document}, indent=1))
    else:
        print(paths_to_text(found))
    sys.stdout.flush()
    if all(isinstance(each, str) for each in found.values()):
        raise IoPathError(
            f"none of the paths {', '.join(paths)} is to be had here, for the reasons above: "
            "`gds-optimizer probe` says what mends each"
        )
    return 0

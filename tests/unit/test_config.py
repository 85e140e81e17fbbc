"""Settings: rejected when they are made, in words that name the field or the flag."""

from __future__ import annotations

import argparse
import dataclasses
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gds_optimizer.config import StreamConfig, add_arguments, parse_size
from gds_optimizer.errors import ConfigError

PREFIX = "--stream-optimizer-state-"


@pytest.fixture
def directory(tmp_path):
    return tmp_path


def config(directory, **values) -> StreamConfig:
    return StreamConfig(directories=(directory,), **values)


def parse(text: str, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    parser = parser or add_arguments(argparse.ArgumentParser())
    return parser.parse_args(shlex.split(text))


def from_flags(directory, text: str = "") -> StreamConfig | None:
    return StreamConfig.from_args(parse(f"{PREFIX}to-disk {PREFIX}dir {directory} {text}"))


# --- sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("4096B", 4096),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("192MiB", 192 * 2**20),
        ("192 MiB", 192 * 2**20),
        (" 192mib ", 192 * 2**20),
        ("400GiB", 400 * 2**30),
        ("2GB", 2 * 10**9),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("1.5GiB", 3 * 2**29),
        ("0.5KiB", 512),
    ],
)
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "12 apples", "-1", "-1MiB", "1e9", "1,5GiB", "0x10", "1 2", "nan", "inf"],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="wanted a size"):
        parse_size(text)


@pytest.mark.parametrize("value", [-1, True, None, 1.5, [1]])
def test_what_is_no_size_at_all_is_refused(value):
    with pytest.raises(ConfigError, match="wanted a size"):
        parse_size(value)


def test_a_fraction_of_a_byte_is_refused():
    with pytest.raises(ConfigError, match=r"whole number of bytes, got '0\.3KiB'"):
        parse_size("0.3KiB")


@given(st.integers(0, 2**50), st.sampled_from(["", "B", " b"]))
def test_whole_bytes_survive(nbytes, unit):
    assert parse_size(f"{nbytes}{unit}") == nbytes


@given(
    st.integers(0, 2**20),
    st.sampled_from([("KiB", 2**10), ("MiB", 2**20), ("kB", 10**3), ("GB", 10**9), ("GiB", 2**30)]),
)
def test_whole_units_are_exact(count, unit):
    name, nbytes = unit
    assert parse_size(f"{count}{name}") == count * nbytes


# --- fields ---------------------------------------------------------------------------------


def test_defaults_are_the_documented_ones(directory):
    defaults = config(directory)
    assert defaults.directories == (directory,)
    assert (defaults.io, defaults.init, defaults.self_check) == ("auto", "auto", "auto")
    assert defaults.bucket_size == 16 * 2**20 * 12
    assert (defaults.slots, defaults.io_threads) == (3, 16)
    assert defaults.io_task_size == 16 * 2**20
    assert defaults.allow_tmpfs is False
    assert (defaults.moment_dtype, defaults.moment_rounding) == ("fp32", "stochastic")


def test_sizes_may_be_text(directory):
    settings = config(directory, bucket_size="1GiB", io_task_size="8MiB")
    assert (settings.bucket_size, settings.io_task_size) == (2**30, 8 * 2**20)


def test_budgets_are_nothing_by_default_and_may_be_sizes(directory):
    assert (config(directory).hbm_budget, config(directory).host_budget) == (0, 0)
    settings = config(directory, hbm_budget="2GiB", host_budget="auto")
    assert (settings.hbm_budget, settings.host_budget) == (2**31, "auto")
    parser = add_arguments(argparse.ArgumentParser())
    prefix = "--stream-optimizer-state-"
    flags = [f"{prefix}to-disk", f"{prefix}dir", str(directory), f"{prefix}hbm-budget", "1kB"]
    for text, wanted in (("auto", "auto"), ("3MiB", 3 * 2**20)):
        arguments = parser.parse_args([*flags, f"{prefix}host-budget", text])
        parsed = StreamConfig.from_args(arguments)
        assert (parsed.hbm_budget, parsed.host_budget) == (1000, wanted)
    with pytest.raises(SystemExit):
        parser.parse_args([*flags, f"{prefix}host-budget", "some"])


def test_directories_may_be_one_path_or_many_and_become_absolute(directory, monkeypatch):
    (directory / "a").mkdir()
    (directory / "b").mkdir()
    monkeypatch.chdir(directory)
    a, b = directory / "a", directory / "b"
    assert StreamConfig(directories="a").directories == (a,)
    assert StreamConfig(directories=a).directories == (a,)
    assert StreamConfig(directories=["a", b]).directories == (a, b)


def test_a_config_is_frozen_and_keyword_only(directory):
    with pytest.raises(dataclasses.FrozenInstanceError):
        config(directory).slots = 4
    with pytest.raises(TypeError, match="positional"):
        StreamConfig((directory,))


REJECTED = [
    ("io", "fast", "auto, gds, posix, host, gds-compat"),
    ("io", None, "auto, gds"),
    ("init", "soon", "auto, eager, lazy"),
    ("self_check", "maybe", "auto, always, never"),
    ("moment_dtype", "fp16", "fp32, bf16, int8"),
    ("moment_dtype", None, "fp32, bf16"),
    ("moment_rounding", "up", "nearest, stochastic"),
    ("hbm_budget", "much", "a size such as"),
    ("hbm_budget", "auto", "a size such as"),
    ("hbm_budget", -1, "at least 0"),
    ("host_budget", "half", "a size such as"),
    ("host_budget", None, "a size such as"),
    ("slots", 0, "from 1 to 64"),
    ("slots", 65, "from 1 to 64"),
    ("slots", 2.5, "whole number"),
    ("slots", True, "whole number"),
    ("slots", "3", "whole number"),
    ("io_threads", 0, "from 1 to 256"),
    ("io_threads", 257, "from 1 to 256"),
    ("bucket_size", 0, "from 4096"),
    ("bucket_size", 4095, "from 4096"),
    ("bucket_size", 2**40 + 1, "to 1099511627776"),
    ("bucket_size", "big", "a size such as"),
    ("bucket_size", True, "a size such as"),
    ("io_task_size", 4095, "from 4096"),
    ("io_task_size", 4097, "multiple of 4096"),
    ("io_task_size", "2GiB", "to 1073741824"),
    ("io_task_size", "-4KiB", "a size such as"),
    ("io_timeout_s", 0, "more than 0"),
    ("io_timeout_s", 86_401, "at most 86400"),
    ("io_timeout_s", float("inf"), "at most 86400"),
    ("io_timeout_s", -1.0, "more than 0"),
    ("io_timeout_s", float("nan"), "more than 0"),
]


@pytest.mark.parametrize(("field", "value", "wanted"), REJECTED)
def test_a_bad_value_is_rejected_by_the_field_s_name(directory, field, value, wanted):
    with pytest.raises(ConfigError) as caught:
        config(directory, **{field: value})
    message = str(caught.value)
    assert message.startswith(field)
    assert wanted in message


def test_bounds_themselves_are_accepted(directory):
    config(directory, slots=1, io_threads=1, bucket_size=4096, io_task_size=4096)
    config(directory, slots=64, io_threads=256, bucket_size=2**40, io_task_size=2**30)


def test_no_directory_is_rejected():
    with pytest.raises(ConfigError, match=r"^directories is empty"):
        StreamConfig(directories=())


def test_a_missing_directory_is_rejected_by_its_path(directory):
    missing = directory / "missing"
    with pytest.raises(ConfigError, match=f"^directories: {missing} is not an existing directory"):
        config(missing)


def test_a_file_is_no_directory(directory):
    (directory / "file").touch()
    with pytest.raises(ConfigError, match=r"^directories: .*file is not an existing directory"):
        config(directory / "file")


def test_one_directory_twice_is_rejected(directory, monkeypatch):
    monkeypatch.chdir(directory)
    with pytest.raises(ConfigError, match=f"^directories names one twice: {directory}"):
        StreamConfig(directories=(directory, "."))


@pytest.mark.parametrize("name", ["", "x" * 5000])
def test_what_is_no_name_is_rejected(name):
    with pytest.raises(ConfigError, match=r"^directories"):
        StreamConfig(directories=(name,))


def test_a_size_beyond_all_drives_is_rejected(directory):
    with pytest.raises(ConfigError, match=r"^bucket_size: wanted a size below"):
        config(directory, bucket_size="9" * 400)


def test_one_directory_by_two_names_is_rejected(directory, tmp_path):
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(ConfigError, match=r"^directories: .* and .*link are the same directory"):
        StreamConfig(directories=(directory, tmp_path / "link"))


# --- flags ----------------------------------------------------------------------------------


def test_without_the_switch_there_is_no_config(directory):
    assert StreamConfig.from_args(parse("")) is None
    assert StreamConfig.from_args(argparse.Namespace()) is None
    assert StreamConfig.from_args(parse(f"{PREFIX}dir {directory} {PREFIX}slots 4")) is None


def test_the_switch_without_a_directory_is_an_error():
    with pytest.raises(ConfigError, match=f"^{PREFIX}to-disk needs {PREFIX}dir"):
        StreamConfig.from_args(parse(f"{PREFIX}to-disk"))


def test_flags_left_out_leave_the_defaults(directory):
    parsed = from_flags(directory)
    assert parsed == config(directory, init="eager")


GIVEN = {
    "io": ("posix", "posix"),
    "bucket_size": ("96MiB", 96 * 2**20),
    "slots": ("5", 5),
    "init": ("lazy", "lazy"),
    "io_threads": ("8", 8),
    "io_task_size": ("8 MiB", 8 * 2**20),
    "io_timeout_s": ("12.5", 12.5),
    "allow_tmpfs": (None, True),
    "self_check": ("never", "never"),
}


def flag(field: str, text: str | None) -> str:
    name = PREFIX + field.replace("_", "-")
    return name if text is None else f"{name} {shlex.quote(text)}"


@pytest.mark.parametrize("field", GIVEN)
def test_a_flag_sets_its_field_and_no_other(directory, field):
    text, value = GIVEN[field]
    expected = dataclasses.replace(config(directory, init="eager"), **{field: value})
    assert from_flags(directory, flag(field, text)) == expected
    assert getattr(expected, field) != getattr(config(directory), field), "not the default"


def test_all_flags_together(directory):
    text = " ".join(flag(field, given_text) for field, (given_text, _) in GIVEN.items())
    expected = config(directory, **{field: value for field, (_, value) in GIVEN.items()})
    assert from_flags(directory, text) == expected


def test_every_field_has_a_flag():
    known = add_arguments(argparse.ArgumentParser())._option_string_actions
    fields = {field.name for field in dataclasses.fields(StreamConfig)} - {"directories"}
    fields = {name.replace("directory", "dir") for name in fields}
    assert {PREFIX + name.replace("_", "-") for name in fields} <= known.keys()


def test_several_directories(directory):
    (directory / "a").mkdir()
    (directory / "b").mkdir()
    parsed = from_flags(f"{directory}/a {directory}/b")
    assert parsed.directories == (directory / "a", directory / "b")


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("slots", "0", "from 1 to 64"),
        ("io_threads", "300", "from 1 to 256"),
        ("bucket_size", "1KiB", "from 4096"),
        ("io_task_size", "5000", "multiple of 4096"),
        ("io_timeout_s", "0", "more than 0"),
    ],
)
def test_a_value_out_of_range_is_rejected_by_the_flag_s_name(directory, field, value, wanted):
    with pytest.raises(ConfigError) as caught:
        from_flags(directory, flag(field, value))
    assert str(caught.value).startswith(PREFIX + field.replace("_", "-") + ":")
    assert wanted in str(caught.value)


@pytest.mark.parametrize("field", ["io", "init", "self_check"])
def test_a_choice_that_came_around_the_parser_is_rejected_by_the_flag_s_name(directory, field):
    """Frameworks set arguments from checkpoints and YAML files, which argparse never sees."""
    args = parse(f"{PREFIX}to-disk {PREFIX}dir {directory}")
    setattr(args, f"stream_optimizer_state_{field}", "nonsense")
    with pytest.raises(ConfigError, match=f"^{PREFIX}{field.replace('_', '-')}: is 'nonsense'"):
        StreamConfig.from_args(args)


@pytest.mark.parametrize(
    ("directories", "wanted"),
    [("{d}/missing", "missing is not an existing directory"), ("{d} {d}", "names one twice")],
)
def test_a_bad_directory_is_rejected_by_the_flag_s_name(directory, directories, wanted):
    with pytest.raises(ConfigError, match=f"^{PREFIX}dir: .*{wanted}"):
        from_flags(directories.format(d=directory))


@pytest.mark.parametrize(
    ("field", "value"),
    [("io", "fast"), ("init", "soon"), ("bucket_size", "big"), ("slots", "x"), ("self_check", "?")],
)
def test_what_argparse_rejects_names_the_flag(directory, field, value, capsys):
    with pytest.raises(SystemExit):
        from_flags(directory, flag(field, value))
    assert f"argument {PREFIX}{field.replace('_', '-')}: " in capsys.readouterr().err


def test_registering_the_flags_twice_is_harmless(directory):
    parser = argparse.ArgumentParser()
    assert add_arguments(parser) is parser
    before = set(parser._option_string_actions)
    assert add_arguments(parser) is parser
    assert set(parser._option_string_actions) == before
    args = parse(f"{PREFIX}to-disk {PREFIX}dir {directory} {PREFIX}slots 4", parser)
    assert StreamConfig.from_args(args).slots == 4


def test_a_framework_may_have_some_of_the_flags_already(directory):
    parser = argparse.ArgumentParser()
    parser.add_argument(f"{PREFIX}to-disk", action="store_true", help="the framework's own")
    add_arguments(parser)
    assert "the framework's own" in parser.format_help()
    args = parse(f"{PREFIX}to-disk {PREFIX}dir {directory} {PREFIX}slots 4", parser)
    assert StreamConfig.from_args(args).slots == 4


@pytest.mark.parametrize(
    ("attributes", "flags", "expected"),
    [
        ({}, "", "eager"),
        ({"load": None, "pretrained_checkpoint": None}, "", "eager"),
        ({"load": "ckpt"}, "", "lazy"),
        ({"pretrained_checkpoint": "ckpt"}, "", "lazy"),
        ({"load": "ckpt"}, f"{PREFIX}init auto", "lazy"),
        ({}, f"{PREFIX}init auto", "eager"),
        ({"load": "ckpt"}, f"{PREFIX}init eager", "eager"),
        ({}, f"{PREFIX}init lazy", "lazy"),
    ],
)
def test_auto_initialises_lazily_when_weights_are_about_to_be_loaded(
    directory, attributes, flags, expected
):
    args = parse(f"{PREFIX}to-disk {PREFIX}dir {directory} {flags}")
    for name, value in attributes.items():
        setattr(args, name, value)
    assert StreamConfig.from_args(args).init == expected


# --- weights of directories -------------------------------------------------------------------


def test_weights_of_directories(tmp_path):
    roots = (tmp_path / "a", tmp_path / "b")
    for root in roots:
        root.mkdir()
    made = StreamConfig(directories=roots, directory_weights=[3, 1.5])
    assert made.directory_weights == (3.0, 1.5)
    assert from_flags(
        f"{roots[0]} {roots[1]}", f"{PREFIX}dir-weights 3 1.5"
    ) == dataclasses.replace(made, init="eager")
    for weights, message in (
        ((1.0,), "has 1 numbers, wanted one for each of the 2"),
        ((1.0, 0.0), "more than 0"),
        ((1.0, float("nan")), "more than 0"),
        ((1.0, float("inf")), "more than 0"),
        (("a", "b"), "wanted a number for each directory"),
        (3, "wanted a number for each directory"),
    ):
        with pytest.raises(ConfigError, match=f"^directory_weights.*{message}"):
            StreamConfig(directories=roots, directory_weights=weights)
    with pytest.raises(ConfigError, match=f"^{PREFIX}dir-weights: has 1 numbers"):
        from_flags(f"{roots[0]} {roots[1]}", f"{PREFIX}dir-weights 3")

"""The command: subcommands register themselves, errors are one line, help does not wait."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import gds_optimizer
from gds_optimizer import cli
from gds_optimizer.cli import main as cli_main
from gds_optimizer.errors import ConfigError, GdsOptimizerError, IoPathError, NoSpaceError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gds_optimizer.cli", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.fixture
def subcommand(monkeypatch):
    """Add a module with a subcommand `try` that raises, or returns, what the test says."""

    def add(outcome):
        def register(subparsers):
            subparsers.add_parser("try", help="try something").set_defaults(run=act)

        def act(arguments):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        module = ModuleType("gds_optimizer.cli.attempt")
        module.register = register
        infos = [type("Info", (), {"name": name}) for name in ("__main__", "main", "attempt")]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(cli_main.pkgutil, "iter_modules", lambda path: infos)

    return add


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli_main.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"gds-optimizer {gds_optimizer.__version__}\n"


def test_help_names_every_subcommand_without_torch():
    program = (
        "import sys\n"
        "from gds_optimizer.cli.main import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as exit:\n"
        "    print('status', exit.code, 'torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "probe" in out
    assert out.endswith("status 0 False False\n")


def test_every_module_beside_main_that_registers_is_a_subcommand():
    import pkgutil

    text = cli_main.build_parser().format_help()
    names = [info.name for info in pkgutil.iter_modules(cli.__path__)]
    assert "probe" in names
    for name in names:
        module = __import__(f"gds_optimizer.cli.{name}", fromlist=["register"])
        if hasattr(module, "register"):
            assert name.replace("_", "-") in text


@pytest.mark.parametrize("arguments", [[], ["fly"], ["--fly"]])
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli_main.main(arguments)
    assert exit_.value.code == 2
    assert "usage: gds-optimizer" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1, 7])
def test_a_subcommand_s_status_is_the_command_s(subcommand, status):
    subcommand(status)
    assert cli_main.main(["try"]) == status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("too big"), 2),
        (IoPathError("too big"), 3),
        (NoSpaceError("too big"), 1),
        (GdsOptimizerError("too big"), 1),
    ],
)
def test_our_errors_are_one_line(subcommand, capsys, error, status):
    subcommand(error)
    assert cli_main.main(["try"]) == status
    captured = capsys.readouterr()
    assert captured.err == "gds-optimizer: error: too big\n"
    assert captured.out == ""


def test_what_the_system_refuses_is_one_line(subcommand, capsys):
    subcommand(PermissionError(13, "Permission denied", "/nvme"))
    assert cli_main.main(["try"]) == 1
    assert capsys.readouterr().err == (
        "gds-optimizer: error: [Errno 13] Permission denied: '/nvme'\n"
    )


def test_a_device_that_torch_does_not_know_is_wrong_usage(tmp_path, capsys):
    assert cli_main.main(["bench", "--dir", str(tmp_path), "--device", "foo"]) == 2
    assert "--device is 'foo'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        cli_main.main(["bench", "--dir", str(tmp_path), "--numel", "inf"])
    assert exit_.value.code == 2


def test_an_unexpected_error_is_not_hidden(subcommand):
    subcommand(ZeroDivisionError("our mistake"))
    with pytest.raises(ZeroDivisionError):
        cli_main.main(["try"])


def test_an_interrupt_is_quiet(subcommand, capsys):
    subcommand(KeyboardInterrupt())
    assert cli_main.main(["try"]) == 130
    assert capsys.readouterr().err == "gds-optimizer: interrupted\n"


def test_a_closed_pipe_is_no_traceback(tmp_path):
    command = f"'{sys.executable}' -m gds_optimizer.cli probe --json --io host '{tmp_path}' | true"
    result = subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True)
    assert result.stderr == ""


def test_python_m_is_the_command():
    assert run("--version").stdout == f"gds-optimizer {gds_optimizer.__version__}\n"
    assert run("fly").returncode == 2

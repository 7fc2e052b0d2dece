"""The command line: help with examples for every command, at once; a dry run; its words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

import pytest

from mooncake import __version__
from mooncake.base import (
    CheckpointError,
    ConfigError,
    Forbidden,
    InvalidRequest,
    MooncakeError,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from mooncake.cli import main as cli
from mooncake.cli import serve
from mooncake.cli.measure import bench
from mooncake.cli.registry import EXIT_CODES
from mooncake.launch.config import options
from mooncake.launch.config.settings import ServeConfig
from tests.support.model.checkpoints import write_config_only

COMMANDS = [
    ["serve"],
    ["model"],
    ["model", "init"],
    ["status"],
    ["chat"],
    ["version"],
    *(["pool", word] for word in ("stats", "put", "get", "evict", "pin", "unpin", "drain")),
]


def run_help(words: list[str], capsys: pytest.CaptureFixture[str], flag: str = "--help") -> str:
    with pytest.raises(SystemExit) as end:
        cli.run([*words, flag])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_examples(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run_help(words, capsys)
    assert "examples:" in shown
    assert f"  mooncake {words[0]}" in shown


def test_the_root_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_help([], capsys)
    for words in COMMANDS:
        assert words[0] in shown


def test_help_of_serve_fits_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = run_help(["serve"], capsys).splitlines()
    assert lines[0] == "usage: mooncake serve [MODEL] [flags]"
    assert len(lines) <= 60
    assert "  --prefill N" in "\n".join(lines)
    known = options.options_of(ServeConfig)
    assert all(known[name][0].text for name in serve.COMMON)
    assert run_help(["serve", "--help"], capsys, "k2-demo").splitlines() == lines


def test_every_setting_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_help(["serve"], capsys, "--help=all")
    for name, (option, _) in options.options_of(ServeConfig).items():
        if option.positional:
            continue
        assert f"--{options.flag(name)}" in shown
        if option.switch:
            assert f"--no-{options.flag(name)}" in shown


@pytest.mark.parametrize("columns", ["60", "80", "100"])
def test_no_line_of_help_ends_within_the_name_of_a_flag(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = run_help(["serve"], capsys, "--help=all").splitlines()
    assert [line for line in lines if re.search(r"[a-z]-$", line)] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["version"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"mooncake {__version__}")
    with pytest.raises(SystemExit, match="0"):
        cli.run(["--version"])
    assert capsys.readouterr().out == line


def test_a_dry_run_shows_settings_workers_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_config_only(tmp_path / "small-model")
    words = ["serve", str(model), "--dry-run", "--prefill", "3", "--api-key", "hush"]
    assert cli.run(words) == 0
    shown = capsys.readouterr().out
    for word in ("small-model", "prefill", "kvstore pool", "total", "free now"):
        assert word in shown
    assert "hush" not in shown
    names = {line.split()[0] for line in shown.splitlines() if line.strip()}
    assert {"api-key", "num-threads"} & names == {"api-key"}, "without what has no value"


def test_repeated_flags_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config_only(tmp_path / "m")
    words = ["serve", str(model), "--dry-run", "--served-model-name", "a", "--served-model-name=b"]
    assert cli.run(words) == 0
    assert '["a", "b"]' in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["cluster-secret", "api-key", "admin-token"])
def test_a_secret_given_as_a_flag_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    words = ["serve", str(write_config_only(tmp_path / "m")), "--dry-run"]
    if flag == "admin-token":
        words += ["--admin-port", "0"]
    variable = f"MOONCAKE_{flag.replace('-', '_').upper()}"
    assert cli.run([*words, f"--{flag}", "hush"]) == 0
    warned = capsys.readouterr().err
    assert f"warning: --{flag}: all users" in warned
    assert variable in warned
    assert "hush" not in warned
    monkeypatch.setenv(variable, "hush")
    assert cli.run(words) == 0
    assert capsys.readouterr().err == ""


def test_switches_can_be_turned_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config_only(tmp_path / "m")
    assert cli.run(["serve", str(model), "--dry-run", "--no-enable-prefix-caching"]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if "enable-prefix-caching" in line
    )
    assert line.split()[-1] == "false"


def test_a_command_spells_its_settings_as_flags() -> None:
    [measures] = [each for each in bench.COMMANDS if each.words == "bench serve"]
    assert measures.spelled("leave out `request-rate`") == "leave out --request-rate"
    assert measures.spelled("it is `max-model-len`") == "it is --max-model-len", "one of serve"
    assert measures.spelled("see `help`") == "see `help`"


def test_ctrl_c_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("mooncake.cli.status.Client", interrupted)
    assert cli.run(["status"]) == 130


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no"), 2), (CheckpointError("no"), 2), (InvalidRequest("no"), 2),
        (Unavailable("no"), 1), (MooncakeError("no"), 1), (Unreachable("no"), 3),
        (Unauthorized("no"), 4), (Forbidden("no"), 4),
    ],
)  # fmt: skip
def test_exit_codes(
    error: MooncakeError, code: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def failing(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr("mooncake.cli.status.Client", failing)
    assert cli.run(["status"]) == code
    assert capsys.readouterr().err == "mooncake: no\n"
    shown = run_help([], capsys)
    assert all(f"  {known} " in shown for known in EXIT_CODES)


def test_a_missing_extra_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object, **__: object) -> int:
        raise ModuleNotFoundError("No module named 'starlette'", name="starlette.routing")

    monkeypatch.setattr("mooncake.cli.status.Client", missing)
    assert cli.run(["status"]) == 2
    assert "pip install 'mooncake-serve[api]'" in capsys.readouterr().err

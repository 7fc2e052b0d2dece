"""The completion script, sourced in bash as a user's shell does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mooncake.cli.completion import script as script_of
from mooncake.cli.main import run
from mooncake.cli.registry import SUMMARIES, describe

ASK = """
source "$1"; shift
COMP_WORDS=(mooncake "$@"); COMP_CWORD=$#
_mooncake || true
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "mooncake.bash"
    file.write_text(script_of("bash"))
    return file


def completed(script: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word of `mooncake WORDS`."""
    done = subprocess.run(
        ["bash", "-ec", ASK, "bash", str(script), *words], capture_output=True, text=True,
        check=True, timeout=30,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sta"], ["status"]),
        (["pool", "pu"], ["put"]),
        (["serve", "--dtype", ""], ["auto", "bfloat16", "float32", "float16"]),
        (["serve", "k2-demo", "--enforce"], ["--enforce-eager"]),
        (["serve", "--no-enforce"], ["--no-enforce-eager"]),
        (["serve", "--conf"], ["--config"]),
        (["serve", "--config", "k2"], []),
        (["serve", "--port", "--"], []),
        (["status", "--js"], ["--json"]),
        (["status", "--no-js"], []),
        (["completion", ""], ["--help", "bash", "zsh"]),
        (["nothing", "--p"], []),
    ],
)
def test_the_last_word_is_completed(script: Path, words: list[str], expected: list[str]) -> None:
    assert completed(script, *words) == expected


def test_all_commands_and_flags_are_offered(script: Path) -> None:
    assert set(SUMMARIES) < set(completed(script, ""))
    for command in describe():
        if command.words in ("serve", "pool put", "bench serve"):
            flags = {
                name for flag in command.flags if not flag.option.positional for name in flag.names
            }
            assert flags <= set(completed(script, *command.words.split(), "-"))


def test_the_command_prints_it_for_both_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "bash"]) == 0
    assert "complete -o default -F _mooncake mooncake" in capsys.readouterr().out
    assert run(["completion", "zsh"]) == 0
    assert "compdef _mooncake mooncake" in capsys.readouterr().out
    assert run(["completion", "fish"]) == 2
    assert "'fish' is not one of bash, zsh" in capsys.readouterr().err

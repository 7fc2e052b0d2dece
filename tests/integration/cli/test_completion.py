"""The completion script, sourced in bash and in zsh as a user's shell does."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.cli.completion import script as script_of
from mooncake.cli.main import run
from mooncake.cli.registry import SUMMARIES, describe
from tests.support.waiting import LONG_S

ASK = """
source "$1"; shift
COMP_WORDS=(mooncake "$@"); COMP_CWORD=$#
_mooncake || true
printf '%s\\n' "${COMPREPLY[@]}"
"""


ZSHRC = """
PROMPT= RPROMPT= KEYTIMEOUT=1
autoload -U compinit && compinit -D -u
source "$SCRIPT"
all() { _main_complete; compstate[insert]=all }
zle -C all complete-word all
told() { print -r -- "<$BUFFER>"; BUFFER= }
zle -N told
bindkey '^I' all
bindkey '^T' told
print "<zsh is ready>"
"""
"""Has the tabulator put all that zsh offers into the line, and ^T print the line and empty it."""
CASES = [
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
]
"""Words after `mooncake`, and what may stand instead of the last one."""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "mooncake.bash"
    file.write_text(script_of("bash"))
    return file


def completed(script: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word of `mooncake WORDS`."""
    done = subprocess.run(
        ["bash", "-ec", ASK, "bash", str(script), *words], capture_output=True, text=True,
        check=True, timeout=LONG_S,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


class Zsh:
    """A zsh at a terminal, in an empty folder. Use as a context."""

    def __init__(self, folder: Path) -> None:
        (folder / "home").mkdir()
        (folder / "home" / ".zshrc").write_text(ZSHRC)
        (folder / "script").write_text(script_of("zsh"))
        (folder / "empty").mkdir()
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            ["zsh", "-d", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder / "empty",
            env={
                "PATH": os.environ["PATH"], "TERM": "dumb", "LANG": "C",
                "ZDOTDIR": str(folder / "home"), "SCRIPT": str(folder / "script"),
            },
        )  # fmt: skip
        os.close(theirs)
        self._said = ""
        self._answer()

    def _answer(self) -> str:
        """Return what it says next between < and >."""
        while not (found := re.search("<([^>]*)>", self._said)):
            self._said += os.read(self._ours, 4096).decode()
        self._said = self._said[found.end() :]
        return found[1]

    def completed(self, *words: str) -> list[str]:
        """Return what it offers for the last word of `mooncake WORDS`."""
        typed = ["mooncake", *words]
        os.write(self._ours, f"{' '.join(typed)}\t\x14".encode())
        line = self._answer().split()
        return [] if line == " ".join(typed).split() else line[len(typed) - 1 :]

    def __enter__(self) -> Zsh:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


@pytest.fixture(scope="module")
def zsh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zsh]:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    with Zsh(tmp_path_factory.mktemp("zsh")) as shell:
        yield shell


@pytest.mark.parametrize(("words", "expected"), CASES)
def test_zsh_completes_the_last_word(zsh: Zsh, words: list[str], expected: list[str]) -> None:
    assert sorted(zsh.completed(*words)) == sorted(expected)


@pytest.mark.parametrize(("words", "expected"), CASES)
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

"""`mooncake completion`: prints a script with which a shell completes commands, flags and their
choices.

The script is made from the same settings as the parser, and does not call `mooncake` when it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mooncake.cli.command import Command
from mooncake.launch.config.options import OneOf, setting

_WORDS = """\
# Prints what may follow the given words, one on a line; nothing: a name of a file, or free text.
_mooncake_words() {
  local place="" last="" word
  for word in "$@"; do
    case "$place $word" in
      %(commands)s) place="$place $word" ;;
    esac
    last="$word"
  done
  case "$place $last" in
%(values)s
    %(texts)s) return ;;
  esac
  case "$place" in
%(words)s
  esac
}
"""
_GLUE = {
    "bash": """\
_mooncake() {
  local current="${COMP_WORDS[COMP_CWORD]}"
  COMPREPLY=($(compgen -W "$(_mooncake_words "${COMP_WORDS[@]:1:COMP_CWORD-1}")" -- "$current"))
}
complete -o default -F _mooncake mooncake
""",
    "zsh": """\
_mooncake() {
  local -a found
  found=(${(f)"$(_mooncake_words "${(@)words[2,CURRENT-1]}")"})
  if (( $#found )); then compadd -- $found; else _files; fi
}
compdef _mooncake mooncake
""",
}
"""Shell -> how it asks `_mooncake_words`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    shell: str = setting(
        "", OneOf(*_GLUE), "shell", "SHELL", "whose script is printed", positional=True,
        required=True,
    )  # fmt: skip


def run(wanted: Completion) -> int:
    print(script(wanted.shell), end="")
    return 0


def script(shell: str) -> str:
    """Return the completion script for `shell`."""
    from mooncake.cli.registry import SUMMARIES, describe

    offered: dict[str, list[str]] = {"": [*SUMMARIES, "--help", "--version"]}
    values: list[str] = []
    texts: list[str] = []
    for command in describe():
        place = ""
        for word in command.words.split():
            below = offered.setdefault(place, ["--help"])
            if word not in below:
                below.append(word)
            place += f" {word}"
        words = offered.setdefault(place, ["--help"])
        if command.takes_file:
            words.append("--config")
            texts.append(_quoted(f"{place} --config"))
        for flag in command.flags:
            option = flag.option
            words += option.choices if option.positional else flag.names
            cases = [_quoted(f"{place} {name}") for name in flag.names]
            if option.switch and (command.takes_file or flag.default == "true"):
                words.append(f"--no-{flag.names[0].removeprefix('--')}")
            elif not option.switch and not option.positional and option.choices:
                values.append(f"    {'|'.join(cases)}) {_print(option.choices)}; return ;;")
            elif not option.switch and not option.positional:
                texts += cases
    parts = {
        "commands": "|".join(_quoted(place) for place in offered if place),
        "values": "\n".join(values), "texts": "|".join(texts),
        "words": "\n".join(f"    {_quoted(at)}) {_print(all_)} ;;" for at, all_ in offered.items()),
    }  # fmt: skip
    return _WORDS % parts + _GLUE[shell]


def _quoted(word: str) -> str:
    return f'"{word}"'


def _print(words: Iterable[str]) -> str:
    return "printf '%s\\n' " + " ".join(words)


COMMANDS = (
    Command(
        words="completion", settings=Completion, run=run,
        examples="source <(mooncake completion bash)\n"
        "mooncake completion bash > ~/.local/share/bash-completion/completions/mooncake\n"
        "source <(mooncake completion zsh)",
    ),
)  # fmt: skip

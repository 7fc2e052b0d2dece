"""The `mooncake` command: parses the words and runs one command. Heavy modules are imported only
then.

Every error raised on purpose becomes one line on stderr and an exit code (`registry.EXIT_CODES`).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from mooncake.base import (
    CheckpointError,
    ConfigError,
    Forbidden,
    MooncakeError,
    Unauthorized,
    Unreachable,
    UserError,
)
from mooncake.launch.config import options
from mooncake.launch.config.options import nearest
from mooncake.launch.host import environment
from mooncake.launch.host.processes.start_phases import importing

if TYPE_CHECKING:
    from mooncake.cli.command import Command

EXTRAS = {
    "httptools": "api", "httpx": "api", "pydantic": "api", "ray": "ray",
    "starlette": "api", "uvicorn": "api", "uvloop": "api",
}  # fmt: skip
"""Packages that not every installation has -> the extra that brings them."""

_COMPUTES = re.compile("--colocated|--role[ =](prefill|decode)")
"""The flags of a process that is an engine itself."""

EPILOG = "`mooncake COMMAND --help` has the flags and examples of each command.\n\nexit codes:\n"


class _Parser(argparse.ArgumentParser):
    """A parser that reports mistakes as our errors, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            words = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action,
                f"invalid choice: {value!r}{nearest(str(value), words)}; choose one of "
                f"{', '.join(words)}",
            )


def main(argv: Sequence[str]) -> NoReturn:
    """Run the command line and raise SystemExit with its exit code."""
    sys.exit(run(argv))


def program() -> NoReturn:
    """Run the command line of this process and end the process."""
    words = sys.argv[1:]
    if words[:1] == ["serve"] and _COMPUTES.search(" ".join(words)):  # else `serve` does so later
        environment.restart_with(environment.variables())
    code = run(words)
    if any(thread.daemon for thread in threading.enumerate()):
        # A thread that still imports torch, or runs in it, would abort the interpreter's end.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except MooncakeError as error:
        return _complain(error.message, exit_code(error))
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        return _complain(f"{error.name} is not installed: pip install 'mooncake-serve[{extra}]'", 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # rich makes exit code 1 of it
            return _reader_left()
        raise


def exit_code(error: MooncakeError) -> int:
    """Return the exit code of a command that ends with `error` (`registry.EXIT_CODES`)."""
    match error:
        case Unreachable():
            return 3
        case Unauthorized() | Forbidden():
            return 4
        case CheckpointError() | UserError():
            return 2
    return 1


def _run(argv: Sequence[str]) -> int:
    with importing():
        parser = make_parser(argv[0] if argv else "")
    arguments, unknown = parser.parse_known_args(argv)
    command: Command = arguments.command
    if unknown:
        raise ConfigError(_about_unknown(unknown[0], command))
    known = options.options_of(command.settings)
    given = {name: value for name, value in vars(arguments).items() if name in known}
    file = arguments.config if command.takes_file else None
    try:
        settings = command.read(given, file, environment.variables())
        for name in sorted(given):
            option, _ = known[name]
            if option.secret:
                _warn(
                    f"--{options.flag(name)}: all users of this machine see it in `ps`; better set "
                    f"{option.env}"
                )
        return command.run(settings)
    except MooncakeError as error:
        return _complain(command.spelled(error.message), exit_code(error))


def _warn(message: str) -> None:
    print(f"mooncake: warning: {message}", file=sys.stderr)


def _complain(message: str, code: int) -> int:
    print(f"mooncake: {message}", file=sys.stderr)
    return code


def _reader_left() -> int:
    """Prevent an error at exit: what is still in the buffer has no reader."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _about_unknown(word: str, command: Command) -> str:
    if not word.startswith("-"):
        return f"{word!r} is one argument too many"
    if command.words == "serve":
        from mooncake.launch.config.config import unknown_setting

        return unknown_setting(word)
    name = word.partition("=")[0].lstrip("-")
    known = map(options.flag, options.options_of(command.settings))
    return f"unknown option {word}{nearest(name, known)}"


def make_parser(word: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands. With a `word`, only that command gets its flags."""
    from mooncake.cli.registry import EXIT_CODES, SUMMARIES, commands_of
    from mooncake.cli.version import version_line

    parser = _Parser(
        prog="mooncake",
        description="Serve Kimi-K2 from separate prefill, decode and KVCache pool workers.",
        epilog=EPILOG + "".join(f"  {code:<4} {what}\n" for code, what in EXIT_CODES.items()),
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", "-V", action="version", version=version_line())
    groups = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, summary in SUMMARIES.items():
        commands = commands_of(name) if word in (None, name) else ()
        alone = [command.words for command in commands] == [name]
        examples = "\n".join(dict.fromkeys(command.examples.strip() for command in commands))
        if alone:
            _add_command(groups, name, commands[0])
            continue
        group = _add(groups, name, summary, examples, "")
        kinds = group.add_subparsers(title="commands", required=True, metavar="COMMAND")
        for command in commands:
            _add_command(kinds, command.words.partition(" ")[2], command)
    return parser


def _add_command(
    commands: argparse._SubParsersAction[_Parser], name: str, command: Command
) -> None:
    more: dict[str, Any] = {}
    if command.common:
        more = {"usage": f"mooncake {command.usage}", "add_help": False}
    leaf = _add(commands, name, command.summary, command.examples, command.notes, **more)
    if command.common:
        leaf.add_argument(
            "-h", "--help", action=_TwoHelps, command=command, nargs="?",
            metavar="all", default=argparse.SUPPRESS, help="the common flags, or all of them",
        )  # fmt: skip
    command.add_flags(leaf)
    leaf.set_defaults(command=command)


def _add(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    summary: str,
    examples: str,
    notes: str,
    **more: Any,
) -> _Parser:
    return commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=_epilog(examples.splitlines(), notes), allow_abbrev=False,
        formatter_class=_Help, **more,
    )  # fmt: skip


def _epilog(examples: Sequence[str], notes: str) -> str:
    return "\n".join(["examples:", *(f"  {line}" for line in examples), "", notes])


class _Help(argparse.RawDescriptionHelpFormatter):
    """Wraps help between words, never within the name of a flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _TwoHelps(argparse.Action):
    """Shows the common flags of a command for `--help`, and all for `--help=all`."""

    def __init__(self, *words: Any, command: Command, **more: Any) -> None:
        super().__init__(*words, **more)
        self._command = command

    def __call__(self, parser: argparse.ArgumentParser, *given: Any, **_: Any) -> NoReturn:
        if given[1] == "all":  # after the namespace
            parser.print_help()
            parser.exit()
        command = self._command
        short = argparse.ArgumentParser(
            prog=parser.prog, usage=parser.usage, description=parser.description, add_help=False,
            epilog=_epilog(command.examples.splitlines()[: command.common_examples], ""),
            formatter_class=partial(_Help, max_help_position=34),
        )  # fmt: skip
        short.add_argument(
            "-h, --help[=all]", action="store_true", dest="help", help="--help=all: all flags"
        )
        command.add_flags(short, is_short=True)
        short.print_help()
        parser.exit()


if __name__ == "__main__":
    program()

"""Describes one command of `mooncake`: its words, its settings, and the function that runs it.
Makes argparse flags from settings; knows no particular command.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from mooncake.base import format_bytes
from mooncake.launch.config import options
from mooncake.launch.config.config import read_settings
from mooncake.launch.config.options import Option

Read = Callable[[Mapping[str, object], str | None, Mapping[str, str]], Any]
"""(settings as written by name, path of a YAML file, environment) -> the settings, read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag that help shows."""

    names: list[str]
    """Long name first, "--port"; for a positional argument its name without dashes."""
    default: str
    """The default as a person would write it; empty: there is none, and the help says what happens
    then.
    """
    key: str
    """The key in a YAML file; empty if the command takes no file."""
    option: Option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command, and everything that `--help` says about it."""

    words: str
    """The words after `mooncake`: "bench serve"."""
    summary: str = ""
    """Empty: that of the first word (`registry.SUMMARIES`)."""
    examples: str
    """One line each."""
    notes: str = ""
    """Further text of `--help`, below the examples."""
    settings: type
    """A dataclass of `options.setting` fields: its flags."""
    run: Callable[[Any], int]
    """Takes the settings and returns the exit code. A MooncakeError that it raises is printed on
    one line, and its kind decides the exit code.
    """
    takes_file: bool = False
    """True if `--config FILE` may give the settings."""
    own_read: Read | None = None
    """Reads the settings if `read_settings` is not enough."""
    common: tuple[str, ...] = ()
    """The settings that `--help` shows while `--help=all` shows all; empty: it shows all."""
    common_examples: int = 0
    """How many of the examples `--help` shows then."""

    @property
    def flags(self) -> list[Flag]:
        """All flags that help shows."""
        return [
            Flag(
                names=[name] if option.positional else flags_of(name, option),
                default=default_of(default, option),
                key=options.flag(name) if self.takes_file else "",
                option=option,
            )
            for name, (option, default) in options.options_of(self.settings).items()
            if option.text
        ]

    @property
    def usage(self) -> str:
        """The first line of help if there are too many flags to name them all."""
        known = options.options_of(self.settings).values()
        words = [f"[{option.metavar}]" for option, _ in known if option.positional]
        return " ".join([self.words, *words, "[flags]"])

    def read(
        self, given: Mapping[str, object], file: str | None, environ: Mapping[str, str]
    ) -> Any:
        """Return the settings. Raises a ConfigError that names the wrong setting."""
        if self.own_read is not None:
            return self.own_read(given, file, environ)
        return read_settings(self.settings, given, file, environ)

    def spelled(self, message: str) -> str:
        """Return a message in which the settings in backticks are written as flags: those of this
        command, and those of `mooncake serve`.
        """
        from mooncake.launch.config.settings import ServeConfig

        known = {
            options.flag(name)
            for settings in (self.settings, ServeConfig)
            for name, (option, _) in options.options_of(settings).items()
            if not option.positional
        }
        return re.sub(
            "`([a-z-]+)`", lambda found: f"--{found[1]}" if found[1] in known else found[0], message
        )

    def add_flags(self, parser: argparse.ArgumentParser, *, is_short: bool = False) -> None:
        """Give `parser` a flag for each setting, or only for the common ones. Values stay as
        written, for `read`.
        """
        groups: dict[str, argparse._ArgumentGroup] = {}
        for name, (option, default) in options.options_of(self.settings).items():
            if is_short and name not in self.common:
                continue
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(option.group)
            text = help_of(option, default, is_short=is_short)
            more: dict[str, Any] = {
                "default": argparse.SUPPRESS,
                "help": text.replace("%", "%%") or argparse.SUPPRESS,
            }
            if option.switch:
                # What a file may turn on, a flag can turn off.
                either = (self.takes_file and not is_short) or default
                more["action"] = argparse.BooleanOptionalAction if either else "store_true"
            else:
                more["metavar"] = option.metavar
                more["action"] = "append" if option.repeat and not option.many else "store"
                if option.many or (option.positional and not option.required):
                    more["nargs"] = option.many or "?"
            if option.positional:
                del more["action"]
                groups[option.group].add_argument(name, **more)
            else:
                groups[option.group].add_argument(*flags_of(name, option), dest=name, **more)
        if self.takes_file:
            parser.add_argument(
                "--config",
                metavar="FILE",
                help="YAML file of these settings; its keys are the flags' names",
            )


def flags_of(name: str, option: Option) -> list[str]:
    """Return the flags of a setting, the long one first."""
    return [f"--{options.flag(name)}", *([option.short] if option.short else [])]


def default_of(default: Any, option: Option) -> str:
    """Return a default as a person would write it; empty: it has no written form."""
    if default is None or default in ((), ""):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if option.metavar == "SIZE" and isinstance(default, int) and default > 0:
        return format_bytes(default).replace(" ", "")
    if default == option.choices:
        return "all"
    return ",".join(map(str, default)) if isinstance(default, tuple) else f"{default}"


def help_of(option: Option, default: Any, *, is_short: bool = False) -> str:
    """Return the help of a setting with its choices, variable and default. The short form has its
    first clause and default. It is empty if the setting is hidden.
    """
    if not option.text:
        return ""
    text, notes = option.text.partition(";")[0] if is_short else option.text, []
    if option.choices and not is_short:
        notes.append(f"one of {', '.join(option.choices)}")
    if option.env and not is_short:
        notes.append(f"env {' or '.join(option.variables)}")
    if default_of(default, option) and not (option.switch and not default):
        notes.append(f"default: {default_of(default, option)}")
    return f"{text} ({'; '.join(notes)})" if notes else text

"""Reads the keys that encrypt what lies on disks: from a file, a command or the environment.

Each process that needs keys reads them itself; they travel nowhere.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

from mooncake.base import ConfigError
from mooncake.crypto.keys import KeyRing, KeySource
from mooncake.launch.host.secrets.credentials import read_secret

COMMAND_S = 30.0
"""A command that prints keys may take this long."""
_SHOWN = 300
"""Characters of its output that an error repeats."""


def key_source(name: str, file: str | None, command: str | None) -> KeySource:
    """Return where the keys called `name` are. A relative path is resolved in this process.

    Raises:
        ConfigError: both a file and a command are given.
    """
    if file is not None and command is not None:
        raise ConfigError(f"{name}-file and {name}-command exclude each other; give one of them")
    path = None if file is None else os.path.abspath(file)
    return KeySource(name=name, file=path, command=command)


def read_keys(source: KeySource) -> KeyRing | None:
    """Return the keys of this process; None if none are given.

    Raises:
        ConfigError: the keys cannot be read, or are malformed; the message never repeats what was
            read.
    """
    if source.file is not None:
        named = f"{source.name}-file"
        return KeyRing.parse(read_secret(Path(source.file), named), f"{named}: {source.file}")
    if source.command is not None:
        named = f"{source.name}-command"
        return KeyRing.parse(_output(source.command, named), f"{named}: what it printed")
    given = os.environ.get(source.variable)
    return KeyRing.parse(given, source.variable) if given else None


def needed_keys(source: KeySource, why: str) -> KeyRing:
    """Return the keys of this process. If there are none, raise a ConfigError that says `why` they
    are needed.
    """
    keys = read_keys(source)
    if keys is None:
        raise ConfigError(f"{source.name}: {why}; give {source.cure}")
    return keys


def _output(command: str, named: str) -> str:
    """Return what a command prints. When its time is over, the command ends with all that it
    started.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{named}: {command!r} cannot be read as words ({error})") from error
    if not words:
        raise ConfigError(f"{named}: the command is empty; name the program that prints the key")
    try:
        running = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"{named}: {words[0]} cannot be run: {error.strerror}") from error
    with running:
        try:
            printed, said = running.communicate(timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            raise ConfigError(f"{named}: {words[0]} did not end within {COMMAND_S:.0f} s") from None
        except BaseException:
            os.killpg(running.pid, signal.SIGKILL)
            raise
    if running.returncode != 0:
        raise ConfigError(f"{named}: {words[0]} ended with {running.returncode}: {_one_line(said)}")
    try:
        return printed.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(
            f"{named}: {words[0]} printed nothing that is text; it has to print the key"
        ) from None


def _one_line(said: bytes) -> str:
    """Return what a command wrote to standard error, fit for one line of a terminal."""
    words = " ".join(said.decode(errors="replace").split())
    shown = "".join(each if each.isprintable() else "?" for each in words)
    return shown[-_SHOWN:] or "it said nothing"

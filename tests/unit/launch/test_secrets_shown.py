"""Nothing that prints settings prints a secret: not repr, not rich, not a log line."""

from __future__ import annotations

import dataclasses

import pytest
from rich.pretty import pretty_repr

from mooncake.cli.command import Command
from mooncake.cli.registry import SUMMARIES, commands_of
from mooncake.launch.config.options import options_of
from mooncake.launch.pool_client.session import PoolSessionConfig
from tests.support.serve.plain_settings import LAYOUT, worker_settings

SETTINGS = (
    worker_settings(cluster_secret="hush"),
    PoolSessionConfig(gateway_address="tcp://127.0.0.1:1", cluster_secret="hush", layout=LAYOUT),
)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: type(settings).__name__)
def test_the_secret_is_not_shown(settings: object) -> None:
    for shown in (repr(settings), str(settings), pretty_repr(settings), pretty_repr([settings])):
        assert "hush" not in shown
        assert type(settings).__name__ in shown


COMMANDS = {each.words: each for word in SUMMARIES for each in commands_of(word)}


def secrets_of(command: Command) -> set[str]:
    return {name for name, (option, _) in options_of(command.settings).items() if option.secret}


@pytest.mark.parametrize("words", [words for words, each in COMMANDS.items() if secrets_of(each)])
def test_the_settings_of_no_command_show_a_secret(words: str) -> None:
    kind, hidden = COMMANDS[words].settings, secrets_of(COMMANDS[words])
    assert {field.name for field in dataclasses.fields(kind) if not field.repr} >= hidden


def test_what_is_called_a_secret_is_one() -> None:
    """A new flag that takes a secret itself, not a file of it, has to be marked as one."""
    called = {
        (words, name)
        for words, command in COMMANDS.items()
        for name, (option, _) in options_of(command.settings).items()
        if name.endswith(("secret", "_key", "_token", "password")) and not option.positional
    }
    marked = {(words, name) for words, each in COMMANDS.items() for name in secrets_of(each)}
    assert called == marked

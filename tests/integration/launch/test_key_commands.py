"""Keys that a command prints, as clients of key services do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mooncake.base import ConfigError
from mooncake.crypto.keys import Key
from mooncake.launch.host.secrets import key_source as module
from mooncake.launch.host.secrets.key_source import key_source, read_keys
from tests.support.waiting import wait_until

HEX = "ab" * 32


def keys_of(command: str):
    return read_keys(key_source("weights-key", None, command))


def python(code: str) -> str:
    return f'{sys.executable} -c "{code}"'


def test_what_it_prints_is_the_key() -> None:
    ring = keys_of(python(f"print('{HEX}')"))
    assert ring is not None
    assert ring.first.id == Key(bytes.fromhex(HEX)).id


def test_no_shell_runs_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="what it printed: word 2 is not a key"):
        keys_of(f"echo {HEX} ; touch {tmp_path / 'made'}")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/no/such/program key", "/no/such/program cannot be run: No such file"),
        ("false", "false ended with 1: it said nothing"),
        (python("import sys; sys.exit('no access\\x1b[31m to the key')"),
         r"ended with 1: no access\?\[31m to the key"),
        ("true", "what it printed contains no key"),
        ("printf '\\377'", "printed nothing that is text"),
        ("'", "cannot be read as words"),
        (" ", "the command is empty"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_said(command: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"weights-key-command: .*{message}"):
        keys_of(command)


def test_one_that_hangs_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMAND_S", 3.0)
    told = tmp_path / "pid"
    with pytest.raises(ConfigError, match="sh did not end within 3 s"):
        keys_of(f"sh -c 'sleep 600 & echo $! > {told}; wait'")
    child = int(told.read_text())

    def has_ended() -> bool:
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        return state == "Z"  # nobody is left to reap it

    wait_until(has_ended, "the command's child ends, too")

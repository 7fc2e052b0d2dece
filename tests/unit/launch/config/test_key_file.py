"""The file of API keys: what it may say and which mistakes it answers how."""

from __future__ import annotations

import contextlib
import hashlib
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.base import ConfigError, Priority
from mooncake.launch.config.key_file import KeyFollower, read_keys
from tests.support.waiting import LONG_S, wait_until

GOOD = """
keys:
  - name: alice
    key: sk-alice
    tenant: research
    requests_per_min: 60
    tokens_per_min: 100000
    max_concurrent: 4
    slo_ttft_ms: 800
    min_slo_ttft_ms: 200
    min_slo_tbt_ms: 20
    priorities: [batch, premium]
    operator: true
  - name: bob
    sha256: {digest}
"""


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_keys_with_their_limits(tmp_path: Path) -> None:
    path = written(tmp_path / "keys.yaml", GOOD.format(digest=digest("sk-bob").hex()))
    alice, bob = read_keys(path)
    assert (alice.name, alice.tenant, alice.digest) == ("alice", "research", digest("sk-alice"))
    assert (alice.requests_per_min, alice.tokens_per_min, alice.max_concurrent) == (60, 100000, 4)
    assert (alice.slo_ttft_ms, alice.min_slo_ttft_ms) == (800, 200)
    assert (alice.slo_tbt_ms, alice.min_slo_tbt_ms, bob.slo_ttft_ms) == (None, 20, None)
    assert (bob.digest, bob.tenant, bob.requests_per_min) == (digest("sk-bob"), "", None)
    assert (alice.priorities, alice.operator) == ((Priority.PREMIUM, Priority.BATCH), True)
    assert (bob.priorities, bob.operator) == ((Priority.INTERACTIVE,), False)
    assert "sk-alice" not in repr(alice)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold `keys:`"),
        ("keys: []", "must hold `keys:`"),
        ("keys: [{name: a, key: secret}]\nmore: 1", "must hold `keys:`"),
        ("keys: [{name: a, key: secret}", "is not YAML"),
        ("keys: [secret]", "key 1 must be `name: value` lines"),
        ("keys: [{key: secret}]", "key 1 needs a name"),
        ("keys: [{name: key 7, key: secret}]", "the keys of `api-key` are named 'key 7'"),
        ("keys: [{name: a}]", r"key 1 \(a\) needs one of key and sha256"),
        ("keys: [{name: a, key: secret, sha256: '00'}]", "needs one of key and sha256"),
        ("keys: [{name: a, sha256: abc}]", "64 hexadecimal digits"),
        ("keys: [{name: a, key: 12345}]", "in quotes"),
        ("keys: [{name: a, key: secret, priorities: premium}]", "priorities must be a list"),
        ("keys: [{name: a, key: secret, priorities: []}]", "priorities must be a list"),
        ("keys: [{name: a, key: secret, priorities: [first]}]", "premium, interactive, batch"),
        ("keys: [{name: a, key: secret, operator: 1}]", "operator must be true or false"),
        ("keys: [{name: a, key: 'secret '}]", "in quotes"),
        ("keys: [{name: a, key: sécret}]", "in quotes"),
        ("keys: [{name: a, key: secret, request_per_min: 1}]", "did you mean requests_per_min"),
        ("keys: [{name: a, key: secret, max_concurrent: 0}]", "max_concurrent must be at least 1"),
        ("keys: [{name: a, key: secret, tokens_per_min: 1.5}]", "must be a whole number"),
        ("keys: [{name: a, key: secret, tokens_per_min: yes}]", "must be a whole number"),
        ("keys: [{name: a, key: secret, tenant: 7}]", "tenant must be a text"),
        ("keys: [{name: a, key: secret, slo_tbt_ms: 0}]", "slo_tbt_ms must be at least 1"),
        ("keys: [{name: a, key: secret, min_slo_tbt_ms: 0.5}]", "must be a whole number"),
        (
            "keys: [{name: a, key: secret, slo_tbt_ms: 20, min_slo_tbt_ms: 30}]",
            r"\(slo_tbt_ms\) must not be below the least \(min_slo_tbt_ms\)",
        ),
        ("keys: [{name: a, key: secret, slo_ttft_ms: 3600001}]", "milliseconds, up to 3600000"),
        ("keys: [{name: a, key: secret, min_slo_ttft_ms: 3600001}]", "up to 3600000"),
        ("keys: [{name: a, key: secret}, {name: a, key: other}]", "two keys have the same name"),
        ("keys: [{name: a, key: secret}, {name: b, key: secret}]", "two keys have the same key"),
    ],
)
def test_mistakes_are_named_and_keys_never_shown(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_keys(written(tmp_path / "keys.yaml", text))
    assert "secret" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(str(tmp_path / "none.yaml"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(str(tmp_path / "bytes"))


def named(path: Path, *names: str) -> None:
    """Write the file anew, as those do who put another in its place."""
    fresh = path.with_name("fresh")
    fresh.write_text("keys:\n" + "".join(f"  - {{name: {n}, key: sk-{n}}}\n" for n in names))
    fresh.chmod(0o600)
    fresh.replace(path)


LOOK_S = 0.01
Names = queue.SimpleQueue[list[str]]


@contextlib.contextmanager
def following(path: Path) -> Iterator[tuple[KeyFollower, Names]]:
    """Yield what follows a file, and the names in what it gives."""
    used: Names = queue.SimpleQueue()
    follower = KeyFollower(str(path), lambda keys: used.put([key.name for key in keys]), LOOK_S)
    with contextlib.closing(follower):
        yield follower, used


def test_keys_are_given_when_they_change_and_on_request(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    named(path, "alice")
    with following(path) as (follower, used):
        follower.ask()
        assert used.get(timeout=LONG_S) == ["alice"], "as they are"
        named(path, "alice", "bob")
        assert used.get(timeout=LONG_S) == ["alice", "bob"]
        named(path, "carl")
        assert used.get(timeout=LONG_S) == ["carl"]
        assert used.empty(), "each once"


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes swaps the files of a secret."""
    for at, name in enumerate(("alice", "bob")):
        (tmp_path / str(at)).mkdir()
        named(tmp_path / str(at) / "keys.yaml", name)
    link = tmp_path / "data"
    link.symlink_to("0")
    with following(link / "keys.yaml") as (_, used):
        fresh = tmp_path / "fresh"
        fresh.symlink_to("1")
        fresh.replace(link)
        assert used.get(timeout=LONG_S) == ["bob"]


def test_what_cannot_be_read_changes_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    named(path, "alice")

    def said() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name != "mooncake.audit"]

    with caplog.at_level("INFO"), following(path) as (follower, used):
        path.write_text("keys: [{name: alice, key: sk-secret, limit: 9}]")
        wait_until(lambda: len(said()) == 1, "the mistake is said")
        follower.ask()
        wait_until(lambda: len(said()) == 2, "it is said on request")
        path.unlink()
        wait_until(lambda: len(said()) == 3, "so is that there is no file")
        assert used.empty()
        lines = said()
        named(path, "bob")
        assert used.get(timeout=LONG_S) == ["bob"]
    assert all(line.startswith("the keys stay as they were: api-keys-file: ") for line in lines)
    assert "unknown field limit" in lines[0]
    assert "secret" not in " ".join(lines)

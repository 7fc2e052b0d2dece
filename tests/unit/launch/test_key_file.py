"""The file of API keys: what it may say and which mistakes it answers how."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mooncake.base import ConfigError
from mooncake.launch.key_file import read_keys

GOOD = """
keys:
  - name: alice
    key: sk-alice
    tenant: research
    requests_per_min: 60
    tokens_per_min: 100000
    max_concurrent: 4
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
    assert (bob.digest, bob.tenant, bob.requests_per_min) == (digest("sk-bob"), "", None)
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
        ("keys: [{name: a}]", r"key 1 \(a\) needs one of key and sha256"),
        ("keys: [{name: a, key: secret, sha256: '00'}]", "needs one of key and sha256"),
        ("keys: [{name: a, sha256: abc}]", "64 hexadecimal digits"),
        ("keys: [{name: a, key: 12345}]", "in quotes"),
        ("keys: [{name: a, key: 'secret '}]", "in quotes"),
        ("keys: [{name: a, key: sécret}]", "in quotes"),
        ("keys: [{name: a, key: secret, request_per_min: 1}]", "did you mean requests_per_min"),
        ("keys: [{name: a, key: secret, max_concurrent: 0}]", "max_concurrent must be at least 1"),
        ("keys: [{name: a, key: secret, tokens_per_min: 1.5}]", "must be a whole number"),
        ("keys: [{name: a, key: secret, tokens_per_min: yes}]", "must be a whole number"),
        ("keys: [{name: a, key: secret, tenant: 7}]", "tenant must be a text"),
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

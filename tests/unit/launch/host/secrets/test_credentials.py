"""Secrets of processes: what a signature proves, and how readable files are."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mooncake.base import ConfigError
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import cluster_keys, issue, own_credential
from mooncake.launch.host.secrets import credentials
from mooncake.launch.host.secrets.credentials import (
    MAX_NONCES,
    SIGNED_S,
    RequestVerifier,
    read_secret,
    sign_request,
)

HELD = own_credential("secret", CredentialRole.OPERATOR)
NOW_S = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_signature_answers_one_challenge_for_one_request_once() -> None:
    clock = Clock()
    verifier = RequestVerifier(HELD.cluster, clock)
    challenge = verifier.challenge()
    signed = sign_request(HELD, "GET", "/a", challenge)
    assert not verifier.signer(signed, "GET", "/b")
    assert not verifier.signer(signed, "POST", "/a")
    assert not RequestVerifier(cluster_keys("other"), clock).signer(signed, "GET", "/a")
    assert not RequestVerifier(HELD.cluster, clock).signer(signed, "GET", "/a"), "another boot"
    assert verifier.signer(signed, "GET", "/a")
    assert not verifier.signer(signed, "GET", "/a")
    again = sign_request(HELD, "GET", "/a", challenge)
    clock.now_s += SIGNED_S
    assert verifier.signer(again, "GET", "/a")
    clock.now_s += 1.0
    assert not verifier.signer(sign_request(HELD, "GET", "/a", challenge), "GET", "/a")


def test_no_signature_can_be_collected_for_later() -> None:
    """A server at a wrong address names the time at which it wants to pass the request on."""
    clock = Clock()
    verifier = RequestVerifier(HELD.cluster, clock)
    later_s = int(NOW_S) + 1000
    asked = verifier.challenge().replace(str(int(NOW_S)), str(later_s))
    signed = sign_request(HELD, "GET", "/a", asked)
    for clock.now_s in (NOW_S, later_s, later_s + SIGNED_S):
        assert not verifier.signer(signed, "GET", "/a")
    signed = sign_request(HELD, "GET", "/a", "9" * 5000 + "-\xff")
    assert not verifier.signer(signed, "GET", "/a")


def test_a_signature_never_counts_twice_however_late_it_is_sent_again() -> None:
    clock = Clock()
    verifier = RequestVerifier(HELD.cluster, clock)
    signed = sign_request(HELD, "GET", "/a", verifier.challenge())
    assert verifier.signer(signed, "GET", "/a")
    for later in range(4 * int(SIGNED_S)):
        clock.now_s = NOW_S + later
        assert not verifier.signer(signed, "GET", "/a")


def test_the_memory_of_signatures_is_bounded_and_comes_back() -> None:
    clock = Clock()
    verifier = RequestVerifier(HELD.cluster, clock)

    def signed() -> str:
        return sign_request(HELD, "GET", "/a", verifier.challenge())

    for _ in range(MAX_NONCES):
        assert verifier.signer(signed(), "GET", "/a")
    assert not verifier.signer(signed(), "GET", "/a")
    clock.now_s += SIGNED_S + 1
    assert verifier.signer(signed(), "GET", "/a")


def test_a_credential_that_asks_too_often_holds_up_no_other() -> None:
    verifier = RequestVerifier(HELD.cluster, Clock())
    busy, other = (issue("secret", name, [CredentialRole.OPERATOR]) for name in ("busy", "other"))
    for _ in range(MAX_NONCES):
        assert verifier.signer(sign_request(busy, "GET", "/a", verifier.challenge()), "GET", "/a")
    for held, is_let_in in ((busy, False), (other, True), (HELD, True)):
        signed = sign_request(held, "GET", "/a", verifier.challenge())
        assert bool(verifier.signer(signed, "GET", "/a")) is is_let_in


@pytest.mark.parametrize(("mode_", "word"), [(0o602, "change"), (0o666, "change")])
def test_a_secret_that_everybody_may_change_is_refused(
    tmp_path: Path, mode_: int, word: str
) -> None:
    path = tmp_path / "secret"
    path.write_text("s3cret")
    path.chmod(mode_)
    with pytest.raises(ConfigError, match=rf"cluster-secret-file: .*{word}.* chmod 600") as refused:
        read_secret(path)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("mode_", "num_warnings"), [(0o600, 0), (0o440, 0), (0o644, 1), (0o620, 1)]
)
def test_a_secret_that_others_may_read_is_logged_once(
    tmp_path: Path, mode_: int, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "secret"
    path.write_text("s3cret")
    path.chmod(mode_)
    assert [read_secret(path) for _ in range(3)] == ["s3cret"] * 3
    assert len(caplog.records) == num_warnings
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    "given",
    [
        "",
        "Mooncake",
        "Mooncake 1 2 3",
        "Mooncake 1 2 3 \xff",
        "Mooncake 1 2 AAAA AAAA",
        "x 1 2 3 4",
    ],
)
def test_what_is_no_signature_is_refused(given: str) -> None:
    assert not RequestVerifier(HELD.cluster, Clock()).signer(given, "GET", "/a")


def test_a_signature_says_who_signed_until_the_credential_expires() -> None:
    wall = Clock()
    verifier = RequestVerifier(HELD.cluster, Clock(), wall)
    held = issue("secret", "ops", [CredentialRole.OPERATOR], expires_s=NOW_S + 1.0)
    for wall.now_s in (NOW_S, NOW_S + 1.0):
        signed = sign_request(held, "GET", "/a", verifier.challenge())
        signer = verifier.signer(signed, "GET", "/a")
        assert (signer and signer.name) == ("ops" if wall.now_s == NOW_S else None)


def test_a_certificate_of_another_does_not_help() -> None:
    verifier = RequestVerifier(HELD.cluster, Clock())
    words = sign_request(HELD, "GET", "/a", verifier.challenge()).split(" ")
    other = sign_request(own_credential("secret", CredentialRole.WORKER), "GET", "/a", words[1])
    words[3] = other.split(" ")[3]
    assert verifier.signer(" ".join(words), "GET", "/a") is None


def test_the_private_folder_and_its_files_are_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    place = credentials.private_dir()
    assert mode(place) == 0o700
    place.chmod(0o777)
    file = credentials.secret_file("127.0.0.1:6379")
    assert mode(place) == 0o700
    file.write_text("old")
    file.chmod(0o666)
    credentials.write_private(file, "new")
    assert (mode(file), credentials.read_secret(file)) == (0o600, "new")


def test_a_folder_that_is_not_ours_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"mooncake-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not this user's folder"):
        credentials.private_dir()


def test_rays_token_is_made_and_kept_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    credentials.keep_ray_token_private()
    token = tmp_path / ".ray" / "auth_token"
    found = token.read_text()
    assert (mode(token), mode(token.parent), len(found)) == (0o600, 0o700, 64)
    token.chmod(0o644)
    credentials.keep_ray_token_private()
    assert (mode(token), token.read_text()) == (0o600, found)


def test_a_token_of_the_operators_own_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    credentials.keep_ray_token_private()
    assert not (tmp_path / ".ray").exists()

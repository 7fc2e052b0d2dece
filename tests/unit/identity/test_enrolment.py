"""Enrolment: who has no token can neither ask nor answer, and an answer is to its own question."""

from __future__ import annotations

import msgspec
import pytest

from mooncake.base import ConfigError, Forbidden
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import Keys, PublicKeys, certify
from mooncake.identity.enrolment import (
    Enrolled,
    Question,
    checked_token,
    decode,
    encode,
    opened,
    sealed_to,
)

TOKEN, OTHER = b"t" * 32, b"o" * 32
KEYS = Keys.drawn()
QUESTION = Question(b"n" * 16, KEYS.public, b"")
ISSUED = certify("secret", "decode 1", [CredentialRole.WORKER], KEYS.public)
ANSWER = Enrolled(ISSUED, None, "10.0.0.1")


def test_a_question_and_its_answer_arrive() -> None:
    asked = encode(QUESTION, TOKEN)
    assert decode(asked, Question, TOKEN) == QUESTION
    answered = encode(ANSWER, TOKEN, asked)
    assert decode(answered, Enrolled, TOKEN, asked) == ANSWER
    for secret in (TOKEN, KEYS.seed):
        assert secret not in asked + answered, "no secret travels"


def test_a_message_without_the_token_or_altered_counts_as_none() -> None:
    asked = encode(QUESTION, TOKEN)
    wrong = (encode(QUESTION, OTHER), asked[:-1] + b"x", asked[1:], asked + b"x", b"", b"x" * 40)
    for body in wrong:
        with pytest.raises(Forbidden, match="token of this role"):
            decode(body, Question, TOKEN)


def test_an_answer_to_another_question_and_an_echo_count_as_none() -> None:
    first = encode(QUESTION, TOKEN)
    second = encode(msgspec.structs.replace(QUESTION, nonce=b"m" * 16), TOKEN)
    for body, asked in ((encode(ANSWER, TOKEN, first), second), (first, first)):
        with pytest.raises(Forbidden, match="token of this role"):
            decode(body, Enrolled, TOKEN, asked)


def test_a_message_of_another_release_says_so() -> None:
    class Older(msgspec.Struct, array_like=True):
        nonce: bytes

    Older.__name__ = "Question"
    with pytest.raises(Forbidden, match="of another release"):
        decode(encode(Older(b"n"), TOKEN), Question, TOKEN)


def test_a_short_token_is_refused() -> None:
    assert checked_token("a" * 32, "file") == b"a" * 32
    with pytest.raises(
        ConfigError, match="file: the token has 31 characters and needs at least 32"
    ):
        checked_token("a" * 31, "file")


def test_a_key_that_travels_is_read_by_the_process_that_asked_alone() -> None:
    sealed = sealed_to(KEYS.public, b"key")
    assert b"key" not in sealed
    assert sealed != sealed_to(KEYS.public, b"key"), "each time by a key of its own"
    assert opened(sealed, KEYS) == b"key"
    for wrong, keys in (
        (sealed, Keys.drawn()), (sealed[:-1] + b"x", KEYS), (b"", KEYS),
        (bytes(32) + sealed[32:], KEYS),
    ):  # fmt: skip
        with pytest.raises(Forbidden, match="encrypted for another process"):
            opened(wrong, keys)
    with pytest.raises(Forbidden, match="key for the exchange"):
        sealed_to(PublicKeys(bytes(32), b""), b"key")

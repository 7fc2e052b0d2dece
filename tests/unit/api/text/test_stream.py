"""Streamed text never shows half a character or a possible stop string, at any grouping."""

from __future__ import annotations

import itertools

import pytest

from mooncake.api.text.answer import Detokenizer, StopMatcher
from mooncake.api.text.tokenizer import Window
from tests.support.api.server import tiny_tokenizer

MIXED = "Hé 你好🙂👩‍👧 ¡fin! 世"


class BytePieces:
    """A tokenizer whose ids are positions in a list of byte strings."""

    vocab_size = 0
    eos_token_id = None
    bos_token_id = None

    def __init__(
        self, pieces: list[bytes], special: frozenset[int] = frozenset(), *, strips: bool = False
    ) -> None:
        self._pieces = pieces
        self.special_tokens: dict[str, str] = {}
        self.special_ids = special
        self.strips_leading_space = strips

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def encode(
        self,
        text: str,
        *,
        allow_special: bool = True,
        add_special: bool = False,
        window: Window | None = None,
    ) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: object, *, skip_special: bool = False) -> str:
        raise NotImplementedError

    def special_id(self, name: str) -> int | None:
        raise NotImplementedError


def spoken(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(BytePieces(pieces), skip_special=True)
    return [detokenizer.push(token) for token in range(len(pieces))]


@pytest.mark.parametrize("cut", range(1, len(MIXED.encode())))
def test_every_split_into_two_tokens_gives_whole_characters(cut: int) -> None:
    data = MIXED.encode()
    parts = spoken([data[:cut], data[cut:]])
    assert "".join(parts) == MIXED
    assert "\ufffd" not in parts[0]
    assert MIXED.startswith(parts[0])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_fixed_size_split_gives_whole_characters(size: int) -> None:
    data = MIXED.encode()
    parts = spoken([data[at : at + size] for at in range(0, len(data), size)])
    assert "".join(parts) == MIXED
    for length in range(len(parts)):
        assert MIXED.startswith("".join(parts[:length]))


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    assert "".join(spoken([b"a\xff", b"\xe4", b"b"])) == "a\ufffd\ufffdb"


def test_unfinished_character_at_the_end_is_not_shown() -> None:
    assert "".join(spoken([b"ok", "你".encode()[:2]])) == "ok"


def test_special_tokens_are_skipped_even_inside_a_character() -> None:
    first, second = "你".encode()[:1], "你".encode()[1:]
    tokenizer = BytePieces([first, b"<|x|>", second], frozenset({1}))
    skipping = Detokenizer(tokenizer, skip_special=True)
    assert [skipping.push(token) for token in (0, 1, 2)] == ["", "", "你"]
    showing = Detokenizer(tokenizer, skip_special=False)
    assert "<|x|>" in "".join(showing.push(token) for token in (0, 1, 2))


def test_leading_space_of_sentencepiece_is_dropped_once() -> None:
    detokenizer = Detokenizer(BytePieces([b" a", b" b"], strips=True), skip_special=True)
    assert [detokenizer.push(token) for token in (0, 1, 0)] == ["a", " b", " a"]


def test_streamed_text_equals_decoded_text() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(f"<|im_user|>{MIXED}<|im_end|>")
    for skip in (True, False):
        detokenizer = Detokenizer(tokenizer, skip_special=skip)
        streamed = "".join(detokenizer.push(token) for token in ids)
        assert streamed == tokenizer.decode(ids, skip_special=skip)


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop=include)
    shown = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["END"], "some END more", ("some ", "END")),
        (["END"], "some EN", ("some EN", None)),
        (["END"], "some EEND", ("some E", "END")),
        (["aab"], "aaab", ("a", "aab")),
        (["abab"], "abaabab", ("aba", "abab")),
        (["b", "abc"], "xabc", ("xa", "b")),  # the first to be complete
        (["c", "abc"], "xabc", ("x", "abc")),  # the longest of those
        (["\n\n", "\n"], "a\n\nb", ("a", "\n")),
        (["好"], "你好", ("你", "好")),
        ([], "anything", ("anything", None)),
        (["x"], "x", ("", "x")),
    ],
)
def test_stop_strings_end_the_text_at_every_grouping(
    stops: list[str], text: str, expected: tuple[str, str | None]
) -> None:
    for num_cuts in range(len(text)):
        for cuts in itertools.combinations(range(1, len(text)), num_cuts):
            bounds = [0, *cuts, len(text)]
            pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
            assert run(stops, pieces) == expected, pieces


def test_stop_string_stays_in_the_text_when_asked() -> None:
    assert run(["END"], ["some E", "ND more"], include=True) == ("some END", "END")


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["END"], include_stop=False)
    assert matcher.push("text E") == ("text ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("x") == ("ENx", None)
    assert matcher.push("EN") == ("", None)
    assert matcher.flush() == "EN"
    assert matcher.push("D") == ("D", None), "a flushed text does not go on"

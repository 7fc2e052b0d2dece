"""Turns tokens into text as they arrive. Half characters and possible beginnings of a stop string
are held back. There is one object for each choice, with constant work for each token. The text does
not depend on how the tokens were grouped.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence

from mooncake.api.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing token sequence.

    A character whose bytes are spread over several tokens appears with the last of them. Bytes that
    cannot become UTF-8 appear as U+FFFD; an unfinished character at the very end does not appear.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token; often "" or one word."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def cut(self) -> None:
        """Drop an unfinished character: another text follows."""
        self._decoder.reset()


class StopMatcher:
    """Looks for stop strings in a growing text and decides which part may be shown.

    The stop string that is complete first is chosen; if several are complete at one character, the
    longest. Each has a Knuth-Morris-Pratt automaton, so nothing is scanned twice.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string that ended it or None."""
        if not self._stops:
            return text, None
        buffer = self._held + text
        for at in range(len(self._held), len(buffer)):
            stop = self._advance(buffer[at])
            if stop is not None:
                self._held = ""
                end = at + 1
                return buffer[: end if self._include else end - len(stop)], stop
        shown = len(buffer) - max(self._states)
        self._held = buffer[shown:]
        return buffer[:shown], None

    def flush(self) -> str:
        """Return the text that was held back, because the text has ended and nothing matched."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, letter: str) -> str | None:
        for which, stop in enumerate(self._stops):
            state = self._states[which]
            while state and stop[state] != letter:
                state = self._borders[which][state - 1]
            if stop[state] == letter:
                state += 1
            if state == len(stop):
                return stop
            self._states[which] = state
        return None


@functools.lru_cache(maxsize=256)
def _borders(pattern: str) -> Sequence[int]:
    """Return for each prefix of `pattern` the length of its longest proper border. The result is
    cached, because all choices of a call have the same stop strings: a thousand choices with 32 of
    them took seconds.
    """
    borders = [0] * len(pattern)
    length = 0
    for at in range(1, len(pattern)):
        while length and pattern[at] != pattern[length]:
            length = borders[length - 1]
        if pattern[at] == pattern[length]:
            length += 1
        borders[at] = length
    return borders

"""Which tokens would complete a bad word. All sequences of a call share one `BadWords`; each keeps
its own place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class Place:
    """A sequence's position: the longest end of its tokens that is the beginning of a word."""

    __slots__ = ("after", "completing", "ends", "shorter")

    def __init__(self) -> None:
        self.after: dict[int, Place] = {}
        """The place after each token that continues a word."""
        self.ends: dict[int, None] = {}
        """The last tokens of those words whose other tokens are exactly these."""
        self.shorter = self
        """The place of the next shorter end with which a word begins; itself when there is none."""
        self.completing: torch.Tensor | None = None
        """The tokens that would complete a word, int64 on the host. This and `shorter` are computed
        when a sequence first comes here.
        """


class BadWords:
    """Words as an automaton of Aho and Corasick (1975). A step takes one token, however many and
    however long the words are. `completing` is its plain reference.
    """

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.num_ends = len(words)
        """The most tokens that can be forbidden at once."""
        self._longest = max(len(word) for word in words)
        self._root = Place()
        for *before, last in words:
            if not 0 <= last < vocab_size:
                continue
            place = self._root
            for token in before:
                place = place.after.setdefault(token, Place())
            place.ends[last] = None
        self._root.completing = _ids(self._root)

    def start(self, tokens: Sequence[int]) -> Place:
        """Return the place of a sequence with these tokens."""
        place = self._root
        for token in tokens[max(0, len(tokens) - self._longest) :]:
            place = self.next(place, token)
        return place

    def next(self, place: Place, token: int) -> Place:
        """Return the place of a sequence at `place` after one more token."""
        while token not in place.after:
            if place is self._root:
                return place
            place = place.shorter
        longer = place.after[token]
        if longer.completing is None:  # all shorter ends are known
            shorter = self._root if place is self._root else self.next(place.shorter, token)
            ends = shorter.completing
            assert ends is not None
            longer.shorter = shorter
            longer.completing = torch.cat((ends, _ids(longer))) if longer.ends else ends
        return longer


def _ids(place: Place) -> torch.Tensor:
    return torch.tensor(list(place.ends), dtype=torch.int64)


def completing(words: Iterable[Sequence[int]], tokens: Sequence[int]) -> set[int]:
    """Return the tokens that would complete one of `words` after `tokens`, by comparing
    each word.
    """
    return {
        word[-1]
        for word in words
        if len(word) == 1 or list(tokens[1 - len(word) :]) == list(word[:-1])
    }

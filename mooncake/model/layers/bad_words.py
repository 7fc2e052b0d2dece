"""Which tokens would complete a bad word. One `BadWords` for all sequences of a call; each keeps
its own last tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class _Node:
    """The words whose tokens before their last one end in those that lead here, read backwards."""

    __slots__ = ("all_ends", "ends", "longer")

    def __init__(self) -> None:
        self.longer: dict[int, _Node] = {}
        self.ends: dict[int, None] = {}
        """The last tokens of the words that begin exactly here."""
        self.all_ends: torch.Tensor | None = None
        """Those and the ones of the nodes before; made when a sequence first comes here."""


class BadWords:
    """Words by their last token but one, the token before that, and so on: a step looks at the
    tokens that a sequence ends in, not at the words. Its plain reference is `completing`.
    """

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.num_ends = len(words)
        """The most tokens that can be forbidden at once."""
        self.longest = max(len(word) for word in words)
        self._root = _Node()
        for *before, last in words:
            if not 0 <= last < vocab_size:
                continue
            node = self._root
            for token in reversed(before):
                node = node.longer.setdefault(token, _Node())
            node.ends[last] = None
        self._root.all_ends = _ids(self._root)

    def next(self, recent: Sequence[int]) -> torch.Tensor:
        """Return the tokens that would complete a word after `recent`, int64 on the host."""
        node = self._root
        ends = node.all_ends
        assert ends is not None
        for token in reversed(recent):
            following = node.longer.get(token)
            if following is None:
                break
            node = following
            if node.all_ends is None:
                node.all_ends = torch.cat((ends, _ids(node))) if node.ends else ends
            ends = node.all_ends
        return ends


def _ids(node: _Node) -> torch.Tensor:
    return torch.tensor(list(node.ends), dtype=torch.int64)


def completing(words: Iterable[Sequence[int]], tokens: Sequence[int]) -> set[int]:
    """Return the tokens that would complete one of `words` after `tokens`, by looking at each."""
    return {
        word[-1]
        for word in words
        if len(word) == 1 or list(tokens[1 - len(word) :]) == list(word[:-1])
    }

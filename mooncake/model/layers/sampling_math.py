"""The arithmetic of choosing a token: pure functions on rows of logits, without state of sequences,
and sets of tokens that may not be chosen.

Every function treats rows independently, so a row's result does not depend on its neighbours. All
sequences of a call share one `BadWords`; each keeps its own place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from mooncake_kernels.reference import sampling
from mooncake_kernels.reference.sampling import LEAST_SCALED, DrawSettings

from mooncake.base import TokenLogprobs

MostLikely = Callable[[torch.Tensor, torch.Tensor, int], sampling.MostLikely]

_MASK64 = 2**64 - 1
_NUCLEUS_SIZES = (128, 2048, 32768)
"""These sizes are tried before a sort, because most nuclei are small and `topk` is far cheaper."""
_SORT_RATIO = 64
"""On a CPU, NumPy's sort of a row is faster than the `topk` of more than this part of it."""
_LOGPROB_LOGITS = 1 << 23
"""How many logits are processed at a time for logprobs. This bounds the temporary [rows, vocab]
tensors.
"""


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits that depends only on `seed` and `position`.

    It is counter based (two rounds of splitmix64, Steele et al. 2014), so a worker can draw token
    900 of a request without having drawn token 899.
    """
    mixed = _splitmix64(_splitmix64(seed & _MASK64) ^ (position & _MASK64))
    return (mixed >> 11) * 2.0**-53


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def draw(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Return one token id per row of `logits` [rows, vocab] fp32 (temperatures > 0): int64 [rows].

    Temperature comes first; then min-p, top-k and top-p (over what the first two left), in vLLM's
    order. Each filter is a threshold, so tokens that tie with the last one kept stay in. The token
    is found by inverting the cumulative distribution in order of token id. In that order a small
    error in a logit moves the bounds a little and never swaps two tokens.
    """
    top_k, top_p = settings.top_k.long()[:, None], settings.top_p[:, None]
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / settings.temperature[:, None]
    scaled.clamp_(min=LEAST_SCALED - 1)
    # min-p: p / p_max >= min_p, and the largest scaled logit is 0.
    threshold = settings.min_p[:, None].log().to(scaled.dtype).clamp(min=LEAST_SCALED)
    threshold = torch.maximum(threshold, _top_k_threshold(scaled, top_k))
    if bool((top_p < 1.0).any()):
        threshold = torch.maximum(threshold, _top_p_threshold(scaled, threshold, top_p))
    weights = scaled.exp().masked_fill_(scaled < threshold, 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding must not carry the target up to the total, because no token is beyond it.
    target = settings.uniform[:, None] * total
    target = torch.minimum(target, torch.nextafter(total, total.new_zeros(())))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def _top_k_threshold(scaled: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    vocab = scaled.shape[-1]
    limited = (top_k > 0) & (top_k < vocab)
    largest = int(torch.where(limited, top_k, 0).max())
    if largest == 0:
        return torch.full_like(scaled[:, :1], -torch.inf)
    best = _largest(scaled, largest)
    kth = best.gather(1, (top_k - 1).clamp(0, largest - 1))
    return torch.where(limited, kth, -torch.inf)


def _largest(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` largest values of each row, the largest first."""
    vocab = rows.shape[-1]
    if count * _SORT_RATIO < vocab or rows.device.type != "cpu":
        return rows.topk(min(count, vocab), dim=-1).values
    return -torch.from_numpy(np.sort(-rows.numpy(), axis=-1)[:, :count])


def _top_p_threshold(
    scaled: torch.Tensor, floor: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Return the logit of the last token of each row's nucleus, among those at or above `floor`."""
    kept = scaled.exp().masked_fill_(scaled < floor, 0.0)
    wanted = top_p * kept.sum(dim=-1, keepdim=True, dtype=torch.float64)
    vocab = scaled.shape[-1]
    for size in (*(size for size in _NUCLEUS_SIZES if size * _SORT_RATIO < vocab), vocab):
        best = _largest(scaled, size)
        cumulative = best.exp().masked_fill_(best < floor, 0.0).cumsum(dim=-1, dtype=torch.float64)
        if size >= vocab or not bool(((cumulative[:, -1:] < wanted) & (top_p < 1.0)).any()):
            break
    # A token is in the nucleus while the tokens before it have not reached top_p.
    before = torch.cat((torch.zeros_like(wanted), cumulative[:, :-1]), dim=-1)
    num_kept = (before < wanted).sum(dim=-1, keepdim=True).clamp(min=1)
    last = best.gather(1, num_kept - 1)
    return torch.where(top_p < 1.0, last, -torch.inf)


def token_logprobs(
    logits: torch.Tensor,
    tokens: Sequence[int],
    num_top: Sequence[int],
    most_likely: MostLikely = sampling.most_likely,
) -> list[TokenLogprobs]:
    """Return, per row of `logits` [rows, vocab] fp32, the logprob and rank of its token and its
    `num_top` most likely tokens, under log_softmax of the row as given.
    """
    results: list[TokenLogprobs] = []
    at_a_time = max(1, _LOGPROB_LOGITS // logits.shape[1])
    for begin in range(0, len(tokens), at_a_time):
        end = min(begin + at_a_time, len(tokens))
        results += _chunk_logprobs(
            logits[begin:end], tokens[begin:end], num_top[begin:end], most_likely
        )
    return results


def _chunk_logprobs(
    logits: torch.Tensor,
    tokens: Sequence[int],
    num_top: Sequence[int],
    most_likely: MostLikely,
) -> list[TokenLogprobs]:
    there = torch.tensor(tokens, device=logits.device)
    most = min(max(1, *num_top), logits.shape[1])
    found = most_likely(logits, there, most)
    pairs = list(zip(found.ids.view(-1).tolist(), found.best.view(-1).tolist(), strict=True))
    return [
        TokenLogprobs(own, rank, pairs[row * most : row * most + count])
        for row, (own, rank, count) in enumerate(
            zip(found.own.tolist(), found.ranks.tolist(), num_top, strict=True)
        )
    ]


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

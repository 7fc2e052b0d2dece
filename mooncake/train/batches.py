"""The samples of a step as batches of tensors, drawn here or ahead by other processes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mooncake.tasks.sample import Sample
from mooncake.train.ahead import Wanted, drawn_ahead
from mooncake.train.drawing import Drawing, Drawn, Tokens, joined

_LENGTHS, _TOKENS = 32, 512
"""A CPU's groups are as long as a multiple of the first, and its batches have a multiple of the
second, unless it computes in float32, because oneDNN compiles a product anew for each shape that it
has not seen: a few milliseconds, as long as the product itself takes.
"""

PADDED_TOKENS = 2048
"""The most places in a group, unless it is one sequence, on a CPU: its caches hold the scores."""


@dataclass(frozen=True)
class Batch:
    """Sequences one after the other, the longest first, without padding.

    tokens, positions: [tokens] int64. counts: [tokens] bool; whether a token belongs to an answer.
    answers: the places in `tokens` that are predicted from the token before, and from the token
    before that. groups: sequences of about equal length attend together; how many they are and how
    long the longest is. padded: [tokens] int64; the place of each token in the rows of all groups,
    one group after the other, where each row has its group's length. spans: [tokens] int64; that
    length. sources: for each place in the rows, the token that stands there; a row's last token
    also stands in the places after it. num_filling: how many tokens at the end, which no answer
    counts, only fill the batch: whole sequences, `num_fillers` of them.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor
    answers: tuple[torch.Tensor, torch.Tensor]
    groups: tuple[tuple[int, int], ...]
    padded: torch.Tensor
    spans: torch.Tensor
    sources: torch.Tensor
    num_filling: int
    num_fillers: int

    def __len__(self) -> int:
        """Return the number of sequences that were drawn."""
        return sum(rows for rows, _ in self.groups) - self.num_fillers

    @property
    def num_tokens(self) -> int:
        """The number of tokens that were drawn."""
        return len(self.tokens) - self.num_filling

    @property
    def num_padded(self) -> int:
        """The number of places in the rows of all groups."""
        return sum(rows * longest for rows, longest in self.groups)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`. A GPU copies it while the host goes on."""
        return Batch(
            _sent(self.tokens, device),
            _sent(self.positions, device),
            _sent(self.counts, device),
            (_sent(self.answers[0], device), _sent(self.answers[1], device)),
            self.groups,
            _sent(self.padded, device),
            _sent(self.spans, device),
            _sent(self.sources, device),
            self.num_filling,
            self.num_fillers,
        )


def _sent(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def batch_of(drawn: Drawn, padded_tokens: int = PADDED_TOKENS, rounded: bool = False) -> Batch:
    """Return drawn sequences as a batch.

    padded_tokens: the most places in a group, unless it is one sequence. rounded: make batches of
    few different shapes.
    """
    number, num_tokens = len(drawn.lengths), len(drawn.tokens)
    if rounded:
        drawn = _filled(drawn)
    lengths = drawn.lengths
    ends = lengths.cumsum()
    groups, row_starts, sources, start = [], [], [], 0
    first = 0
    while first < len(lengths):
        longest = int(lengths[first])
        if rounded:
            longest = -(-longest // _LENGTHS) * _LENGTHS
        rows = min(max(1, padded_tokens // longest), len(lengths) - first)
        if rounded:
            rows = 1 << rows.bit_length() - 1
        row_starts.append(start + longest * np.arange(rows))
        groups.append((rows, longest))
        own = ends[first : first + rows, None] - lengths[first : first + rows, None]
        last = ends[first : first + rows, None] - 1
        sources.append(np.minimum(own + np.arange(longest), last).ravel())
        start, first = start + rows * longest, first + rows
    positions = np.arange(len(drawn.tokens)) - np.repeat(ends - lengths, lengths)
    padded = positions + np.repeat(np.concatenate(row_starts), lengths)
    spans = np.repeat([longest for rows, longest in groups for _ in range(rows)], lengths)
    near, far = (np.flatnonzero(drawn.counts & (positions >= ahead)) for ahead in (1, 2))
    return Batch(
        torch.from_numpy(drawn.tokens.astype(np.int64)),
        torch.from_numpy(positions),
        torch.from_numpy(drawn.counts),
        (torch.from_numpy(near), torch.from_numpy(far)),
        tuple(groups),
        torch.from_numpy(padded),
        torch.from_numpy(spans),
        torch.from_numpy(np.concatenate(sources)),
        len(drawn.tokens) - num_tokens,
        len(lengths) - number,
    )


def _filled(drawn: Drawn) -> Drawn:
    """Return the sequences, and after them parts of them that do not count."""
    lacking = -len(drawn.tokens) % _TOKENS
    length = min(_LENGTHS, int(drawn.lengths[-1]))
    short = [length] * (lacking // length) + [lacking % length] * (lacking % length > 0)
    return Drawn(
        np.concatenate((drawn.lengths, np.array(short, np.int64))),
        np.concatenate((drawn.tokens, np.resize(drawn.tokens, lacking))),
        np.concatenate((drawn.counts, np.zeros(lacking, np.bool_))),
    )


def packed(
    sequences: Sequence[Tokens], padded_tokens: int = PADDED_TOKENS, rounded: bool = False
) -> Batch:
    """Return tokens, and which of them count, as a batch; see `batch_of`."""
    return batch_of(joined(sequences), padded_tokens, rounded)


class Batches:
    """Makes the batches of each step."""

    def __init__(
        self, checkpoint: Path, seed: int, step_tokens: int, batch_tokens: int, *,
        padded_tokens: int = PADDED_TOKENS, rounded: bool = False, processes: int = 0,
    ) -> None:  # fmt: skip
        """step_tokens: about how many tokens all batches of a step have together. batch_tokens: the
        most tokens in one batch. padded_tokens, rounded: see `batch_of`. processes: how many
        processes draw coming steps; 0: this one draws each step when it is asked for. The batches
        are the same.
        """
        self._drawing = Drawing(checkpoint, seed, step_tokens, batch_tokens)
        self._arguments = (checkpoint, seed, step_tokens, batch_tokens)
        self._padded_tokens = padded_tokens
        self._rounded = rounded
        self._processes = processes
        self.digests = self._drawing.digests

    def of_steps(self, wanted: Iterator[Wanted]) -> Generator[list[Batch], None, None]:
        """Yield the batches of each wanted step. Close the iterator, and its processes end."""
        if not self._processes:
            for step, weights, max_tokens in wanted:
                yield self.of_step(step, weights, max_tokens)
            return
        with closing(drawn_ahead(self._arguments, wanted, self._processes)) as steps:
            for drawn in steps:
                yield self._batches(drawn)

    def of_step(self, step: int, weights: Mapping[str, float], max_tokens: int) -> list[Batch]:
        """Return the batches of one step; see `Drawing.of_step`."""
        return self._batches(self._drawing.of_step(step, weights, max_tokens))

    def of_answers(self, samples: Sequence[Sample]) -> list[Batch]:
        """Return batches of samples, each alone. Only the last answer counts."""
        return self._batches(self._drawing.of_answers(samples))

    def _batches(self, drawn: list[Drawn]) -> list[Batch]:
        return [batch_of(one, self._padded_tokens, self._rounded) for one in drawn]

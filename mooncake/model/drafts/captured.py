"""Rows of a layer that drafts over fixed buffers: one captured graph for each number of rows of a
ladder. Owns the states that replays read and make. The layer itself fills its other inputs.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import torch

from mooncake.model.copies import Copies
from mooncake.model.device.graphs import GraphPort, Replay, ladder

Guess = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(size, states before the first `size` rows, rows that are asked for) -> the layer's states of
those rows, and the likeliest token after each.
"""


class CapturedGuesses:
    """Replays of one layer."""

    def __init__(
        self, port: GraphPort, copies: Copies, guess: Guess, states: torch.Tensor, most_asked: int
    ) -> None:
        """Capture every size, the largest first: smaller ones then fit into its memory. All ranks
        of the layer call this at once.

        states: zeros [the most rows, hidden] in the layer's dtype and on its device. most_asked:
        the most rows that are asked for.
        """
        self._copies = copies
        self._states = states
        self._made = torch.zeros_like(states[:most_asked])
        self._last = torch.zeros(most_asked, dtype=torch.int64, device=states.device)
        self._sizes = ladder(len(states))
        self._replays: dict[int, Replay] = {}
        for size in reversed(self._sizes):
            self._replays[size] = port.capture(self._step(size, guess))

    def size_for(self, num_rows: int) -> int:
        """Return how many rows are computed where `num_rows` are wanted."""
        return self._sizes[bisect.bisect_left(self._sizes, num_rows)]

    def replay(
        self, size: int, states: torch.Tensor, last: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's states of the rows `last`, and the likeliest token after each, int64.
        The next replay overwrites the states.

        states: [rows, hidden], those before all rows.
        """
        count = len(last)
        self._states[: len(states)].copy_(states)
        asked = self._last[:size]
        padded = [*last, *[0] * (len(asked) - count)]
        asked.copy_(self._copies.send(torch.tensor(padded)))
        tokens = self._replays[size]()
        return self._made[:count], tokens[:count].clone()

    def _step(self, size: int, guess: Guess) -> Callable[[], torch.Tensor]:
        states, last, made = self._states[:size], self._last[:size], self._made[:size]

        def step() -> torch.Tensor:
            found, tokens = guess(size, states, last)
            made.copy_(found)
            return tokens

        return step

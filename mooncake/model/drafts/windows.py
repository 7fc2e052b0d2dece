"""The KV of a layer that drafts where it does not lie in blocks: of each running sequence the last
rows, in memory of the engine's own that is neither handed on nor pooled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch


@dataclass
class _Held:
    """The window of one sequence."""

    number: int
    first: int
    """The place of its first row."""
    stop: int
    """The place behind its last row."""


class KvWindows:
    """As many windows as sequences may run. A row sees at least the `window` rows before it that
    were written, and at most twice as many: then older ones make room.
    """

    def __init__(
        self, num_sequences: int, window: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """width: numbers of a row."""
        self.window = window
        self._rows = torch.empty(num_sequences, 2 * window, width, dtype=dtype, device=device)
        self._free = list(range(num_sequences))
        self._held: dict[int, _Held] = {}

    def write(self, sequence_id: int, place: int, rows: torch.Tensor) -> None:
        """Store `rows` [count, width], `window` at most, of the places from `place` on. Those
        behind are forgotten; where there is a gap, or nothing was written yet, those before are.
        """
        held = self._held.get(sequence_id)
        if held is None:
            held = self._held[sequence_id] = _Held(self._free.pop(), place, place)
        if not held.first <= place <= held.stop:
            held.first = place
        mine, begin = self._rows[held.number], place - held.first
        assert len(rows) <= self.window, "more rows than a window takes at once"
        if begin + len(rows) > 2 * self.window:
            kept = mine[begin - self.window : begin].clone()
            mine[: self.window] = kept
            held.first, begin = place - self.window, self.window
        mine[begin : begin + len(rows)] = rows
        held.stop = place + len(rows)

    def read(self, sequence_id: int) -> torch.Tensor:
        """Return the rows of a sequence up to the last one written, [count, width]: a view."""
        held = self._held[sequence_id]
        return self._rows[held.number, : held.stop - held.first]

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Free the windows of sequences, where they have some."""
        for sequence_id in sequence_ids:
            held = self._held.pop(sequence_id, None)
            if held is not None:
                self._free.append(held.number)

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Raise AssertionError where a window is lost, held twice, or held by none of these."""
        numbers = sorted([*self._free, *(held.number for held in self._held.values())])
        assert numbers == list(range(len(self._rows))), "a window is lost or held twice"
        others = self._held.keys() - set(sequences)
        assert not others, f"windows of sequences that have ended: {sorted(others)}"

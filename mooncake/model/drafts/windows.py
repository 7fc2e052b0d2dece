"""The KV of a layer that drafts, when it does not lie in blocks: the last rows of each running
sequence. It lies in memory of the engine's own, which is neither passed on nor pooled.
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
    """The place after its last row."""


class KvWindows:
    """One window for each sequence that may run. A row sees at least the `window` rows before it
    that were written, and at most twice as many; then older ones make room.
    """

    def __init__(
        self, num_sequences: int, window: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`width`: the numbers in a row."""
        self.window = window
        self._rows = torch.empty(num_sequences, 2 * window, width, dtype=dtype, device=device)
        self._free = list(range(num_sequences))
        self._held: dict[int, _Held] = {}

    def write(self, sequence_id: int, place: int, rows: torch.Tensor) -> None:
        """Store `rows` [count, width], at most `window` of them, at the places from `place` on.
        Rows after these are forgotten. If there is a gap, or nothing was written yet, rows before
        these are forgotten too.
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
        """Free the windows of sequences that have one."""
        for sequence_id in sequence_ids:
            held = self._held.pop(sequence_id, None)
            if held is not None:
                self._free.append(held.number)

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Raise AssertionError when a window is lost, held twice, or held by another sequence than
        these.
        """
        numbers = sorted([*self._free, *(held.number for held in self._held.values())])
        assert numbers == list(range(len(self._rows))), "a window is lost or held twice"
        others = self._held.keys() - set(sequences)
        assert not others, f"windows of sequences that have ended: {sorted(others)}"

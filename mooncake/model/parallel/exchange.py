"""Exchanges between ranks with different sequences that hold the experts together. Rows go to the
ranks that have their experts, and sums come back.

Every rank takes part in every layer of every step, even without rows. Before a step all ranks agree
on how many rows each has.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from mooncake.model.parallel.group import Group, ordered_sum

SLOW_WINDOW_S = 10.0
"""After this many seconds of steps, slow ranks are looked for."""
SLOW_SHARE = 0.5
"""A rank is slow if others waited for it for more than this share of those seconds."""
NOBODY = -1
"""The expert of a padding row, or of a row for another rank's expert."""


@dataclass(frozen=True)
class Rows:
    """Rows of one layer with the experts that they go to.

    x: [rows, hidden]; experts: [rows, k] int64, `NOBODY` where there is none; weights: [rows, k]
    float32.
    """

    x: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


class GatheredRows:
    """The ranks that have the same part of different instances, seen from one of them. Every rank
    gets all rows (all-gather), and each gets the sums of its own rows (reduce-scatter).

    Rows are padded to the number of the rank that has most.
    """

    def __init__(
        self, group: Group, device: torch.device | None = None, num_without: int = 0
    ) -> None:
        """device: of this rank's rows, on which the group exchanges; None: the host.
        num_without: see `ExpertRanks`.
        """
        self._group = group
        self._device = device
        self._num_without = num_without
        self.num_steps = 0
        """The number of steps that were agreed on."""
        self.waited_s = 0.0
        """How long this rank has waited for others, in all steps but the last."""
        self.waited_for_s = 0.0
        """How much longer than this rank the rank that waited longest has waited, in all steps but
        the last. If this grows, the others wait for this rank.
        """
        self._agreed: list[tuple[int, int]] = []
        self._most = self._most_in_last = 0
        self._waiting_s = 0.0
        self._began_s = self._ended_s = 0.0
        self._window_s = 0.0
        self._late_s = [0.0] * group.size
        """How long ranks with as many rows or more waited for each rank in this window."""
        self._slow: dict[int, float] = {}

    def take_slow(self) -> dict[int, float]:
        """Return the ranks that were slow in the last window, and for how many seconds others
        waited for each. Empty when none was slow, and until the next window has ended.
        """
        slow, self._slow = self._slow, {}
        return slow

    def agree(self, rows: int, last_rows: int, replayed: int = 0) -> int:
        """Begin a step together: this rank has `rows`, and in the last layer `last_rows`. Return
        the size of the captured step that all ranks replay, or 0 if one of them replays none.
        Raises GroupError when another rank failed, or did not come.

        replayed: the size of the captured step that this rank needs; 0: it replays none.
        """
        said = [rows, last_rows, replayed, round(1e9 * self._waiting_s)]
        mine = torch.tensor(said, device=self._device)
        self._waiting_s = 0.0
        began_s = time.perf_counter()
        all_of_them = self._group.gather(mine).view(-1, 4).tolist()
        waited_s = [waited / 1e9 for *_, waited in all_of_them]
        self._look(waited_s)
        self._began_s, self._ended_s = began_s, time.perf_counter()
        self._waiting_s += self._ended_s - began_s
        self._agreed = [(each, last) for each, last, *_ in all_of_them]
        self.waited_s += waited_s[self._group.rank]
        self.waited_for_s += max(waited_s) - waited_s[self._group.rank]
        self._most = max(each for each, _ in self._agreed)
        self._most_in_last = max(last for _, last in self._agreed)
        self.num_steps += 1
        sizes = [size for _, _, size, _ in all_of_them]
        return max(sizes) if all(sizes) else 0

    def fix(self, rows: int) -> None:
        """Let each rank have `rows` in every layer from now on, as in a step that all capture. No
        step is counted.
        """
        self._agreed = []
        self._most = self._most_in_last = rows

    def _look(self, waited_s: list[float]) -> None:
        """Count the step that has ended, in which each rank waited for `waited_s`. A rank is not
        slow because one with fewer rows waits for it, nor because ranks without experts wait for
        those that have all of them, or those for ranks without.
        """
        if not self._agreed:
            return
        rows = [each for each, _ in self._agreed]
        for rank, own_s in enumerate(waited_s):
            first = rank < self._num_without
            waiting = (
                s
                for other, (s, num) in enumerate(zip(waited_s, rows, strict=True))
                if num >= rows[rank] and (other < self._num_without) == first
            )
            self._late_s[rank] += max(waiting) - own_s
        self._window_s += self._ended_s - self._began_s
        if self._window_s < SLOW_WINDOW_S:
            return
        least_s = SLOW_SHARE * self._window_s
        self._slow = {rank: s for rank, s in enumerate(self._late_s) if s > least_s}
        self._window_s, self._late_s = 0.0, [0.0] * self._group.size

    def in_last_layer(self) -> None:
        """From now on, use the numbers of rows that were agreed on for this step's last layer."""
        self._most = self._most_in_last

    def spread(self, own: Rows) -> Rows:
        """Return all ranks' rows, of which each rank computes those of its experts. They are
        interleaved: the first row of each rank, then the second. Raises GroupError when another
        rank failed, or did not come.
        """
        hidden, choices = own.x.shape[1], own.experts.shape[1]
        if not self._most:
            return own
        parts = own.x, own.experts.to(torch.int32), own.weights
        widths = [part.shape[1] * part.element_size() for part in parts]
        packed = own.x.new_empty(self._most, sum(widths), dtype=torch.uint8)
        num, first = len(own.x), 0
        for part, width in zip(parts, widths, strict=True):
            packed[:num, first : first + width] = part.contiguous().view(torch.uint8)
            first += width
        begin = widths[0]
        packed[num:, begin : begin + widths[1]] = 0xFF  # NOBODY
        packed[num:, begin + widths[1] :] = 0
        packed[num:, :begin] = 0
        gathered = self._gathered(packed).view(-1, sum(widths))
        x, experts, weights = torch.split(gathered, widths, dim=1)
        return Rows(
            x.contiguous().view(own.x.dtype).view(-1, hidden),
            experts.contiguous().view(torch.int32).view(-1, choices).long(),
            weights.contiguous().view(torch.float32).view(-1, choices),
        )

    def collect(self, sums: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the sums of all ranks for this rank's rows, [num_rows, width]. `sums`: what this
        rank adds to each of the rows that `spread` returned. Raises GroupError when another rank
        failed, or did not come.
        """
        if not self._most:
            return sums
        began_s = time.perf_counter()
        of_ranks = sums.view(self._most, self._group.size, -1).transpose(0, 1).contiguous()
        mine = self._group.exchange(of_ranks)
        self._ended_s = time.perf_counter()
        self._waiting_s += self._ended_s - began_s
        return ordered_sum(mine[:, :num_rows])

    def _gathered(self, packed: torch.Tensor) -> torch.Tensor:
        began_s = time.perf_counter()
        made = self._group.gather(packed)
        self._waiting_s += time.perf_counter() - began_s
        return made


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that hold the routed experts together, seen from one of them.

    all: every one of them. exchange: the exchange with ranks of other instances; None: one instance
    has all experts. num_without: how many of the ranks, the first ones, use the experts but hold
    none; the others hold the experts and nothing else. 0: each rank holds some, beside its part of
    the rest.
    """

    all: Group
    exchange: GatheredRows | None
    num_instances: int = 1
    num_without: int = 0

    @property
    def num_holders(self) -> int:
        """The number of ranks that hold experts."""
        return self.all.size - self.num_without

    @property
    def place(self) -> int:
        """The place of this rank among those that hold experts; below zero: it holds none."""
        return self.all.rank - self.num_without

    @property
    def has_rest(self) -> bool:
        """True if this rank has its part of the model besides experts."""
        return not self.num_without or self.place < 0

    @property
    def own(self) -> range:
        """The places of this instance's ranks among those that hold experts."""
        if self.num_without:
            return range(max(0, self.place), self.place + 1)
        return range(self.all.rank % self.num_instances, self.all.size, self.num_instances)

    @classmethod
    def of_instances(
        cls,
        ranks: Group,
        num_instances: int,
        device: torch.device | None = None,
        num_without: int = 0,
    ) -> ExpertRanks:
        """Return these ranks when each `num_instances` consecutive ranks have the same part of
        different instances. device: see `GatheredRows`. num_without: see the class; then each
        instance is one rank.
        """
        if num_instances == 1:
            return cls(ranks, None)
        exchange = GatheredRows(ranks.part(num_instances), device, num_without)
        return cls(ranks, exchange, num_instances, num_without)

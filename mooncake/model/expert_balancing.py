"""Places routed experts anew while they are used: counts of rows come in, moves of weights go out.

Every rank that shares experts has the same counts at the same step, and so the same placement and
the same moves. Only weights are sent for them. Between two steps, at most one layer is placed and
one expert is moved, or two are exchanged.
"""

from __future__ import annotations

from collections import Counter, deque

import torch

from mooncake.engine.expert_placement import (
    EplbConfig,
    Move,
    Placement,
    next_move,
    place,
    rank_loads,
)
from mooncake.model.layers.moe import ExpertSlots, slots_of
from mooncake.model.parallel.exchange import ExpertRanks

ROWS, HOTTEST_ROWS = "expert_rows", "expert_rows_hottest"
MEAN_ROWS, MOST_ROWS = "expert_rank_rows_mean", "expert_rank_rows_most"
MOVES = "expert_moves"
WAITED_S, WAITED_FOR_S = "expert_waited_s", "expert_waited_for_s"


class ExpertBalancer:
    """The experts of all layers on one rank."""

    def __init__(
        self, layers: list[ExpertSlots], ranks: ExpertRanks, config: EplbConfig | None
    ) -> None:
        """`config`: when to place experts anew; None: never, rows are only counted."""
        self._layers = layers
        self._ranks = ranks
        self._config = config or EplbConfig()
        self._moves_any = config is not None
        self._num_steps = 0
        self._looked_at: deque[tuple[ExpertSlots, list[int]]] = deque()
        """The layers that may be placed anew, with their counts."""
        self._wanted: Placement | None = None
        """The wanted placement of the first of them, which is under way."""
        self.counters = dict.fromkeys((ROWS, HOTTEST_ROWS, MEAN_ROWS, MOST_ROWS, MOVES), 0.0)
        """Sums of rows over layers and windows. `expert_rank_rows_mean` divided by
        `expert_rank_rows_most` is the balance of the ranks.
        """
        self.num_windows = 0
        """The number of windows that were counted."""
        self.rows: list[int] = []
        """The rows of each expert that this instance computed in the last window, over all
        layers.
        """
        if ranks.exchange is not None:
            self.counters |= {WAITED_S: 0.0, WAITED_FOR_S: 0.0}

    def between_steps(self) -> None:
        """Count a step, and do the next part of the work that is due. All ranks call this alike.

        Raises:
            GroupError: another rank failed.
        """
        if not self._num_steps:  # drops the rows of trial steps
            for layer in self._layers:
                layer.counts.zero_()
        if self._looked_at:
            self._go_on()
        if (exchange := self._ranks.exchange) is not None:
            self.counters[WAITED_S] = exchange.waited_s
            self.counters[WAITED_FOR_S] = exchange.waited_for_s
        self._num_steps += 1
        since = self._num_steps % self._config.step_interval
        if since not in (0, self._config.step_interval - self._config.window_size):
            return
        counted = self._count()
        if since == 0 and self._moves_any and not self._looked_at:
            self._looked_at.extend(zip(self._layers, counted, strict=True))

    def _count(self) -> list[list[int]]:
        """Return the rows of each expert since the last call, for each layer."""
        counters, size = self.counters, self._ranks.num_holders
        counted: list[list[int]] = []
        computed = [0.0] * len(self._layers[0].counts[:-1]) if self._layers else []
        # One read for all layers, because each read waits for the device.
        read = torch.stack([each.counts for each in self._layers]).tolist() if self._layers else []
        for layer, rows in zip(self._layers, read, strict=True):
            counts = rows[:-1]
            layer.counts.zero_()
            counted.append(counts)
            loads = rank_loads(counts, layer.placement, size)
            counters[ROWS] += sum(counts)
            counters[HOTTEST_ROWS] += max(counts)
            counters[MEAN_ROWS] += sum(loads) / size
            counters[MOST_ROWS] += max(loads)
            slots = Counter(layer.placement)
            for rank in self._ranks.own:
                for expert in slots_of(layer.placement, rank, size):
                    computed[expert] += counts[expert] / slots[expert]
        self.rows = [round(rows) for rows in computed]
        self.num_windows += 1
        return counted

    def _go_on(self) -> None:
        """Choose a layer's placement, or make a move of the layer that is being placed."""
        layer, counts = self._looked_at[0]
        if self._wanted is None:
            self._wanted = place(counts, layer.placement, self._ranks.num_holders)
        move = next_move(layer.placement, self._wanted)
        if move is None:
            self._looked_at.popleft()
            self._wanted = None
            return
        self._move(layer, move)
        self.counters[MOVES] += len(move)

    def _move(self, layer: ExpertSlots, move: Move) -> None:
        """Bring experts into their slots, then let rows go there."""
        ranks, place, present = self._ranks.all, self._ranks.place, layer.placement
        each, first = len(present) // self._ranks.num_holders, self._ranks.num_without
        if len(move) == 2:
            sources = [move[1][0], move[0][0]]
        else:
            [(_, expert)] = move
            sources = [present.index(expert)]
        kept = {
            source: [part.clone() for part in layer.weights(source % each)]
            for source in sources
            if source // each == place
        }
        # When two ranks exchange, the lower one sends first and the other receives first.
        for source, (slot, _) in sorted(zip(sources, move, strict=True)):
            giver, taker = source // each, slot // each
            if giver == taker == place:
                _write(kept[source], layer.weights(slot % each))
            elif giver == place:
                for part in kept[source]:
                    ranks.send(_flat(part), first + taker)
            elif taker == place:
                for part in layer.weights(slot % each):
                    flat = torch.empty_like(_flat(part))
                    ranks.receive(flat, first + giver)
                    part.copy_(flat.view(-1).view(part.dtype).view(part.shape))
        placement = list(present)
        for slot, expert in move:
            placement[slot] = expert
        layer.place(tuple(placement))


def _write(parts: list[torch.Tensor], to: list[torch.Tensor]) -> None:
    for part, its in zip(parts, to, strict=True):
        its.copy_(part)


def _flat(part: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as rows of at most 64 KiB."""
    flat = part.contiguous().view(-1).view(torch.uint8)
    width = next(width for width in (65536, 4096, 64, 1) if not flat.numel() % width)
    return flat.view(-1, width)

"""Which slots of which ranks hold which routed experts (expert parallel load balancing). Pure.

The experts of a layer lie in slots, equally many on each rank: slot `s` is on rank `s // slots of a
rank`. There may be more slots than experts. Then the experts with most rows have several slots.
Every rank computes placements from the same counts, so all get the same one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake.base import ConfigError

Placement = tuple[int, ...]
"""The expert of each slot."""
Move = tuple[tuple[int, int], ...]
"""One or two changes at once: (slot, the expert that it holds from then on)."""
LEAST_GAIN = 0.01
"""Experts are moved only when the balance improves by at least this much."""


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """How experts are placed anew while the model runs; names and defaults are vLLM's.

    Raises:
        ConfigError: a number is out of its range.
    """

    window_size: int = 1000
    """A placement is made from the rows of this many steps before it."""
    step_interval: int = 3000
    """The number of steps between two placements."""
    num_redundant_experts: int = 0
    """The number of slots in addition to one for each expert."""

    def __post_init__(self) -> None:
        for name, least in (("window_size", 1), ("step_interval", 1), ("num_redundant_experts", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: must be at least {least}, not {getattr(self, name)}")
        if self.window_size > self.step_interval:
            raise ConfigError(
                f"window_size: {self.window_size} steps are more than step_interval "
                f"({self.step_interval}); lower it, or raise that"
            )


def first_placement(num_experts: int, num_slots: int) -> Placement:
    """Return the placement before anything is counted: each expert in order, then the experts that
    have a second slot.
    """
    return tuple(slot % num_experts for slot in range(num_slots))


def check_slots(num_experts: int, num_redundant: int, num_ranks: int) -> None:
    """Check that slots divide evenly among ranks, and that no rank has to hold an expert twice.

    Raises:
        ConfigError: they do not; the message names numbers that would do.
    """
    num_slots = num_experts + num_redundant
    if num_slots % num_ranks:
        fewer = -num_experts % num_ranks
        raise ConfigError(
            f"num_redundant_experts: {num_experts} experts and {num_redundant} more do not divide "
            f"among {num_ranks} ranks; {fewer} or {fewer + num_ranks} would do"
        )
    if num_slots > num_experts * num_ranks:
        raise ConfigError(
            f"num_redundant_experts: {num_redundant} is too many, since a rank holds no expert "
            f"twice; give at most {num_experts * (num_ranks - 1)} on {num_ranks} ranks"
        )


def rank_loads(counts: Sequence[float], placement: Placement, num_ranks: int) -> list[float]:
    """Return the rows of each rank. `counts` has the rows of each expert, which its slots share
    evenly.
    """
    slots = [0] * len(counts)
    for expert in placement:
        slots[expert] += 1
    each = len(placement) // num_ranks
    return [
        math.fsum(
            counts[expert] / slots[expert] for expert in placement[rank * each : (rank + 1) * each]
        )
        for rank in range(num_ranks)
    ]


def balance(loads: Sequence[float]) -> float:
    """Return the mean of the ranks' loads divided by the largest: 1 when all are equal, or all
    zero.
    """
    most = max(loads)
    return math.fsum(loads) / len(loads) / most if most else 1.0


def place(counts: Sequence[float], present: Placement, num_ranks: int) -> Placement:
    """Return the placement that balances the ranks for these counts. Two greedy rules make it: each
    further slot goes to the expert with most rows per slot; then slots, heaviest first, go to the
    rank with the least load that has room. An expert that stays on its rank stays in its slot.

    Returns the present placement unless the new one is better by `LEAST_GAIN`.
    """
    num_slots = len(present)
    shares = _replicated(counts, num_slots, num_ranks)
    each = num_slots // num_ranks
    load = [0.0] * num_ranks
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for share, expert in shares:
        rank = min(
            (rank for rank in range(num_ranks) if len(held[rank]) < each),
            key=lambda rank: (expert in held[rank], load[rank], len(held[rank]), rank),
        )
        held[rank].append(expert)
        load[rank] += share
    made = _kept_in_place(held, present)
    now, then = (balance(rank_loads(counts, each, num_ranks)) for each in (present, made))
    return made if then >= now + LEAST_GAIN else present


def next_move(present: Placement, wanted: Placement) -> Move | None:
    """Return a move that brings `present` nearer to `wanted` and never leaves an expert without a
    slot. Either an expert is copied over one that has another slot, or two experts change places.
    Returns None when the placements are the same.
    """
    left = (slot for slot, expert in enumerate(present) if expert != wanted[slot])
    found = (_possible(slot, present, wanted) for slot in left)
    return next((move for move in found if move is not None), None)


def _possible(slot: int, held: Sequence[int], wanted: Placement) -> Move | None:
    """Return a move after which `slot` holds the expert it should. Returns None when other moves
    must come first.
    """
    expert, loser = wanted[slot], held[slot]
    if held.count(loser) > 1:
        return ((slot, expert),)
    for other, its in enumerate(held):
        if its == expert and wanted[other] != expert:
            return ((slot, expert), (other, loser))
    return None


def _replicated(counts: Sequence[float], num_slots: int, num_ranks: int) -> list[tuple[float, int]]:
    """Return (rows of the slot, expert) of all slots, heaviest first."""
    slots = [1] * len(counts)
    heap = [(-count, expert) for expert, count in enumerate(counts)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(counts)):
        while True:
            _, expert = heap[0]
            if slots[expert] < num_ranks:
                break
            heapq.heappop(heap)
        slots[expert] += 1
        heapq.heapreplace(heap, (-counts[expert] / slots[expert], expert))
    shares = [
        (counts[expert] / number, expert)
        for expert, number in enumerate(slots)
        for _ in range(number)
    ]
    return sorted(shares, key=lambda entry: (-entry[0], entry[1]))


def _kept_in_place(held: Sequence[Sequence[int]], present: Placement) -> Placement:
    """Return the placement of what each rank holds; experts that a rank already has keep their
    slots.
    """
    each = len(held[0])
    made: list[int] = []
    for rank, experts in enumerate(held):
        left = list(experts)
        slots: list[int | None] = []
        for expert in present[rank * each : (rank + 1) * each]:
            if expert in left:
                left.remove(expert)
                slots.append(expert)
            else:
                slots.append(None)
        made += [left.pop(0) if expert is None else expert for expert in slots]
    return tuple(made)

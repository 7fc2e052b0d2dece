"""Holds back memory that may not be used again yet, because a lost writer may still write to it.
Pure.

Memory of a revoked grant is given back as soon as nothing can write by the grant any more. Where
nobody can tell, it is given back after a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

from mooncake.transfer.grants import Fence

HeldT = TypeVar("HeldT", bound=Sized)
FIRST_LOOK_S = 0.02
"""A writer that went on before it saw the revocation is seen at work by then."""
LOOK_AGAIN_S = 0.25


@dataclass(slots=True)
class _Rest(Generic[HeldT]):
    grant: int
    held: HeldT
    since_s: float
    look_s: float


class Resting(Generic[HeldT]):
    """Pages or blocks whose grants were revoked."""

    def __init__(
        self,
        fence: Callable[[int], Fence],
        rest_s: float,
        give_back: Callable[[HeldT], None],
    ) -> None:
        """`rest_s`: how long to wait if `fence` cannot tell."""
        self._fence = fence
        self._rest_s = rest_s
        self._give_back = give_back
        self._resting: list[_Rest[HeldT]] = []

    @property
    def num_held(self) -> int:
        """Pages, or blocks, that rest."""
        return sum(len(rest.held) for rest in self._resting)

    def held_by(self, grant: int) -> list[HeldT]:
        """Return what rests because of a grant."""
        return [rest.held for rest in self._resting if rest.grant == grant]

    def add(self, grant: int, held: HeldT, now: float) -> None:
        """Take over the memory of a grant that has just been revoked."""
        if held:
            self._resting.append(_Rest(grant, held, now, now + FIRST_LOOK_S))

    def tick(self, now: float) -> float | None:
        """Give back what nobody can write to any more. Return when to call again."""
        due = [rest for rest in self._resting if rest.look_s <= now]
        for rest in due:
            match self._fence(rest.grant):
                case Fence.OPEN:
                    rest.look_s = now + LOOK_AGAIN_S
                    continue
                case Fence.UNKNOWN if now < rest.since_s + self._rest_s:
                    rest.look_s = min(now + LOOK_AGAIN_S, rest.since_s + self._rest_s)
                    continue
            self._resting.remove(rest)
            self._give_back(rest.held)
        return min((rest.look_s for rest in self._resting), default=None)

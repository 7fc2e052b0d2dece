"""What pool clients' policies are written with: coroutines that await calls, driven by the machine
that answers the calls. No event loop and no clock are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from mooncake.base import MooncakeError, WorkerRef

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """Which node a call goes to, and how long it may take."""

    store: WorkerRef
    deadline_s: float
    answer_by_s: float = float("inf")
    """The node must have answered by then, if that is sooner; then bytes may move."""

    @property
    def give_up_s(self) -> float:
        """When the call is given up unless the node has answered."""
        return min(self.deadline_s, self.answer_by_s)


class Call(Generic[T]):
    """One thing asked for; `await` it for its answer. To be awaited once."""

    def __init__(self, begin: Callable[[Callable[[T], None]], None]) -> None:
        """`begin` starts the call, and calls what it is given once, with the answer."""
        self.begin = begin

    def __await__(self) -> Generator[Call[Any], T, T]:
        return (yield self)


Policy: TypeAlias = Coroutine[Call[Any], Any, T]
"""A coroutine that awaits calls and nothing else. It may raise MooncakeError."""


def run(policy: Policy[T], done: Callable[[T | MooncakeError], None]) -> None:
    """Start a policy and carry it on with each answer; `done` gets what it returns or the
    MooncakeError it raises. Other errors are raised here, or where an answer was given.
    """

    def resume(answer: Any) -> None:
        try:
            call = policy.send(answer)
        except StopIteration as end:
            done(end.value)
        except MooncakeError as error:
            done(error)
        else:
            call.begin(resume)

    resume(None)


def together(calls: Sequence[Call[T]]) -> Call[list[T]]:
    """Return one call that starts all of these and is answered with their answers, in order."""

    def begin(done: Callable[[list[T]], None]) -> None:
        answers: dict[int, T] = {}

        def answered(number: int, answer: T) -> None:
            answers[number] = answer
            if len(answers) == len(calls):
                done([answers[index] for index in range(len(calls))])

        for number, call in enumerate(calls):
            call.begin(partial(answered, number))
        if not calls:
            done([])

    return Call(begin)

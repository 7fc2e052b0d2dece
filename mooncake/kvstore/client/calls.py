"""The building blocks of pool clients' policies: coroutines that await calls. The machine that
answers the calls drives them. There is no event loop and no clock in it.
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
    """The node that a call goes to, and how long it may take."""

    store: WorkerRef
    deadline_s: float
    answer_by_s: float = float("inf")
    """The node must have answered by then, if that is sooner; then bytes may move."""

    @property
    def give_up_s(self) -> float:
        """The time at which the call fails if the node has not answered."""
        return min(self.deadline_s, self.answer_by_s)


class Call(Generic[T]):
    """One question; `await` it for its answer. Await it only once."""

    def __init__(self, begin: Callable[[Callable[[T], None]], None]) -> None:
        """`begin` starts the call. It gets a callback, which it calls once, with the answer."""
        self.begin = begin

    def __await__(self) -> Generator[Call[Any], T, T]:
        return (yield self)


Policy: TypeAlias = Coroutine[Call[Any], Any, T]
"""A coroutine that awaits calls and nothing else. It may raise MooncakeError."""


def run(policy: Policy[T], done: Callable[[T | MooncakeError], None]) -> None:
    """Start a policy and continue it with each answer. `done` gets what it returns, or the
    MooncakeError that it raises. Other errors are raised here, or where an answer was given.
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

"""What is said to a peer when a batch has arrived: in order, once, and only if it has.

Pure but for a lock: keeps who has what to say, and what was heard; whoever carries it asks for the
next `Words` and brings their `Answer`. One mechanism for all protocols: it looks at batches, not at
how their bytes go.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from mooncake.base.errors import ProtocolError
from mooncake.transfer.decoding import decode
from mooncake.transfer.engine import MAX_NOTICE_BYTES, Notice

MAX_PAYLOADS = 128
MAX_WORDS_BYTES = 32_768
"""What is said in one go; the next goes when the peer has answered."""
MAX_SPEAKERS = 4096
"""Engines whose last words are remembered, so that they are not heard twice."""


class Words(msgspec.Struct, frozen=True, tag="words"):
    """All there is to say now; sent again, unchanged, over another connection if one breaks."""

    number: int
    payloads: list[bytes]


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The first `num_taken` were taken; for the others there was no room."""

    number: int
    num_taken: int


_WORDS = msgspec.msgpack.Decoder(Words)
_ANSWER = msgspec.msgpack.Decoder(Answer)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Words | Answer) -> bytes:
    """Return a message as the body of one frame."""
    return _ENCODER.encode(message)


def decode_words(data: bytes) -> Words:
    """Return what a peer says. Raises ProtocolError."""
    words = decode(_WORDS, data, "notice")
    if len(words.payloads) > MAX_PAYLOADS or any(
        len(payload) > MAX_NOTICE_BYTES for payload in words.payloads
    ):
        raise ProtocolError("a notice is too long")
    return words


def decode_answer(data: bytes) -> Answer:
    """Return how a peer answers. Raises ProtocolError."""
    return decode(_ANSWER, data, "answer to a notice")


class Sayable(Protocol):
    """A batch with something to say (`batches.Job`)."""

    @property
    def notify(self) -> bytes | None: ...

    @property
    def arrived(self) -> bool: ...

    @property
    def ended(self) -> bool: ...

    def say(self) -> bool: ...

    def finish(self, error: str | None = None) -> None: ...

    def stop(self, error: str) -> None: ...


class Outbox:
    """What one engine has to say to one peer; thread-safe.

    The line is in order of submission: a batch that has arrived waits while one before it is still
    on its way. One `Words` are under way at a time.
    """

    def __init__(self, engine_id: str, numbers: Iterator[int]) -> None:
        """`numbers` rise, and are shared by all that one engine has to say to anybody."""
        self._engine_id = engine_id
        self._numbers = numbers
        self._lock = threading.Lock()
        self._line: deque[Sayable] = deque()
        self._said: list[Sayable] = []
        self._words: Words | None = None

    @property
    def is_empty(self) -> bool:
        """Nobody has anything to say, now or later."""
        with self._lock:
            self._drop_ended()
            return not self._line and self._words is None

    @property
    def under_way(self) -> Words | None:
        """What was said and not yet answered."""
        return self._words

    @property
    def is_due(self) -> bool:
        """Whether `take` is likely to find something."""
        with self._lock:
            self._drop_ended()
            return self._words is None and bool(self._line) and self._line[0].arrived

    def add(self, batch: Sayable) -> None:
        """A batch was submitted; to be called before any of it can arrive."""
        with self._lock:
            self._line.append(batch)

    def take(self) -> Words | None:
        """Return what is to be said now: from here on these batches cannot be stopped. None while
        there is nothing, or an answer is awaited.
        """
        with self._lock:
            if self._words is not None:
                return None
            payloads: list[bytes] = []
            room = MAX_WORDS_BYTES
            while self._line and len(payloads) < MAX_PAYLOADS:
                batch = self._line[0]
                payload = batch.notify or b""
                if not batch.ended and (not batch.arrived or len(payload) > room):
                    break
                self._line.popleft()
                if not batch.ended and batch.say():
                    payloads.append(payload)
                    room -= len(payload)
                    self._said.append(batch)
            if not payloads:
                return None
            self._words = Words(next(self._numbers), payloads)
            return self._words

    def answered(self, answer: Answer) -> None:
        """The peer has heard; an answer to anything else than what is under way is ignored."""
        with self._lock:
            if self._words is None or self._words.number != answer.number:
                return
            self._words, said, self._said = None, self._said, []
        for index, batch in enumerate(said):
            taken = index < answer.num_taken
            batch.finish(None if taken else f"{self._engine_id} has no room for more notices")

    def give_up(self, reason: str) -> None:
        """The peer cannot be told: batches fail whose turn it is, or that wait for an answer."""
        with self._lock:
            self._words, said, self._said = None, self._said, []
            due = [batch for batch in self._line if batch.arrived]
        for batch in said:
            batch.finish(f"unconfirmed whether {self._engine_id} was told: {reason}")
        for batch in due:
            batch.stop(f"{self._engine_id} cannot be told: {reason}")

    def _drop_ended(self) -> None:
        while self._line and self._line[0].ended:
            self._line.popleft()

    def check_integrity(self) -> None:
        """Raise AssertionError when somebody waits for an answer that nobody owes."""
        with self._lock:
            assert (self._words is None) == (not self._said)
            assert self._words is None or len(self._words.payloads) == len(self._said)


class Ear:
    """What peers have said, passed on once; thread-safe. An engine that repeats itself, having lost
    our answer, gets the same answer again.
    """

    def __init__(self, deliver: Callable[[Sequence[Notice]], int]) -> None:
        """`deliver` takes the first of what it is given, as many as there is room for."""
        self._deliver = deliver
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, Answer] = OrderedDict()

    def hear(self, engine_id: str, words: Words) -> Answer:
        """Pass on what a proven engine says; return the answer it is to get."""
        with self._lock:
            last = self._answers.get(engine_id)
            if last is not None and words.number <= last.number:
                return last if words.number == last.number else Answer(words.number, 0)
            notices = [Notice(engine_id=engine_id, payload=each) for each in words.payloads]
            answer = Answer(words.number, self._deliver(notices))
            self._answers[engine_id] = answer
            self._answers.move_to_end(engine_id)
            if len(self._answers) > MAX_SPEAKERS:
                self._answers.popitem(last=False)
            return answer

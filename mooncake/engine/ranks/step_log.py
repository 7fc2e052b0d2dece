"""The log by which the lead rank of an instance tells its followers what to compute. Pure.

A follower knows of a sequence only its pages. Each step says what is new: tokens, and pages that
were added; so a step's bytes do not grow with the contexts. So no step may be missed: they are
numbered, and a follower refuses what does not follow.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from mooncake.base import InternalError, KvLayout, PageArray
from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.kv_moves import Alive, RankWord

_COUNTS = "I"
"""The columns' kind: four bytes, unsigned."""
_IDS = "q"
_TOKENS = "i"
"""Signed: a draft may be one that ranks make themselves."""


class Way(enum.IntEnum):
    """How a step is computed: by all ranks alike, since they exchange tensors of its sizes."""

    AS_IT_COMES = 0
    REPLAYED = 1
    """Captured, for its number of sequences."""
    BEGUN = 2
    """By what an `Ahead` began."""


class CapturedSizes(msgspec.Struct, frozen=True, array_like=True):
    """What steps are captured; 0: none."""

    most_rows: int = 0
    """Sequences of a decode step."""
    most_pages: int = 0
    """Of one sequence in any."""
    most_tokens: int = 0
    """Rows of a step with prompts."""


class UsePages(msgspec.Struct, frozen=True, tag="pages", array_like=True):
    """Compute over these pages from now on: no sequence is known, and steps count from 1. A
    descriptor of their memory follows the message, unless each rank has its own.
    """

    pages: PageArray
    """As they would lie in one memory."""
    num_threads: int | None
    captured: CapturedSizes = CapturedSizes()
    own: bool = False
    """Each rank makes a memory for those that it holds."""
    transfer: bytes = b""
    """How to open the engine that moves them, for who wires it; empty: no peer reaches them."""


class RankStep(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """One step, in columns: a number for each slot, or for each token or page of all slots."""

    number: int
    """Of this step, since the pages were named."""
    ids: bytes
    starts: bytes
    """Tokens computed before."""
    num_tokens: bytes
    tokens: bytes
    num_pages: bytes
    """Pages added to the slot's table since it was named last."""
    pages: bytes
    sampled: bytes
    """One byte a slot: after how many of its last tokens one may be sampled."""
    logprob_rows: dict[int, int]
    """sequence -> rows, for those whose prompt tokens' log-probabilities are wanted."""
    forgotten: list[int]
    """Sequences that have ended, or begin anew with no pages."""
    way: Way = Way.AS_IT_COMES
    reported_as: int | None = None
    """Blocks go to other engines as they are after the step, and stages before the last report its
    layers as those of the plan of this number; None: neither.
    """


class Ahead(msgspec.Struct, frozen=True, tag="ahead", array_like=True):
    """Begin the decode step that follows the last step: one further token of each of its sequences.
    The lead gives the tokens in an exchange; it may have sampled them and not read them yet.
    """


class Held(msgspec.Struct, frozen=True, tag="held", array_like=True):
    """What a follower that has heard every step holds: a check, which nothing depends on."""

    number: int
    """Of the last step."""
    num_pages: dict[int, int]
    """sequence -> pages."""


class Measure(msgspec.Struct, frozen=True, tag="measure", array_like=True):
    """Run the largest steps over pages of your own; say in an exchange what memory they take."""

    layout: KvLayout
    num_homes: int
    step_tokens: int
    step_sequences: int
    context_tokens: int
    """Of the longest sequence."""


RankMessage = UsePages | RankStep | Ahead | Held | Measure | Alive | RankWord

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)


def encode(message: RankMessage) -> bytes:
    """Return the bytes of a message."""
    return _ENCODER.encode(message)


def decode(data: bytes) -> RankMessage:
    """Return the message of `data`. msgspec.DecodeError: it is none."""
    return _DECODER.decode(data)


class StepWriter:
    """Packs plans; knows how many pages of each sequence the followers have."""

    def __init__(self) -> None:
        self.number = 0
        """Of the last step."""
        self._num_pages: dict[int, int] = {}
        self._forgotten: dict[int, int] = {}
        """Of which the next step says so."""

    @property
    def held(self) -> Held:
        """What a follower holds that has read all steps."""
        return Held(self.number, {**self._num_pages, **self._forgotten})

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Have the next step say that these sequences have ended, or begin anew."""
        for sequence_id in sequence_ids:
            if (num_pages := self._num_pages.pop(sequence_id, None)) is not None:
                self._forgotten[sequence_id] = num_pages

    def pack(
        self,
        slots: Sequence[StepSlot],
        logprob_rows: Mapping[int, int],
        way: Way = Way.AS_IT_COMES,
        *,
        reported_as: int | None = None,
    ) -> RankStep:
        """Return what followers need of a step's slots.

        logprob_rows: sequences whose prompt tokens' log-probabilities are wanted -> rows.
        reported_as: see `RankStep`.
        """
        self.number += 1
        known = self._num_pages
        forgotten, self._forgotten = list(self._forgotten), {}
        tokens: list[int] = []
        pages: list[int] = []
        num_pages: list[int] = []
        for slot in slots:
            tokens += slot.tokens
            known_pages, have = known.get(slot.sequence_id), len(slot.pages)
            had = known_pages or 0
            num_pages.append(have - had)
            if have != known_pages:  # of 64 sequences that decode, one or so
                known[slot.sequence_id] = have
                pages += slot.pages[had:]
        return RankStep(
            number=self.number,
            ids=array(_IDS, [slot.sequence_id for slot in slots]).tobytes(),
            starts=array(_COUNTS, [slot.start for slot in slots]).tobytes(),
            num_tokens=array(_COUNTS, [len(slot.tokens) for slot in slots]).tobytes(),
            tokens=array(_TOKENS, tokens).tobytes(),
            num_pages=array(_COUNTS, num_pages).tobytes(),
            pages=array(_COUNTS, pages).tobytes(),
            sampled=bytes([slot.sample + slot.num_drafts for slot in slots]),
            logprob_rows=dict(logprob_rows),
            forgotten=forgotten,
            way=way,
            reported_as=reported_as,
        )


class StepReader:
    """Unpacks what a `StepWriter` packed; keeps the pages of every sequence."""

    def __init__(self) -> None:
        self.number = 0
        """Of the last step."""
        self._pages: dict[int, list[int]] = {}

    def slots(self, step: RankStep) -> list[StepSlot]:
        """Return the slots of the plan.

        Raises:
            InternalError: it is not the step that follows; this rank cannot go on.
        """
        self._check_number(step.number, self.number + 1)
        self.number = step.number
        for sequence_id in step.forgotten:
            self._pages.pop(sequence_id, None)
        tokens, pages = _column(_TOKENS, step.tokens), _column(_COUNTS, step.pages)
        columns = (_IDS, step.ids), (_COUNTS, step.starts), (_COUNTS, step.num_tokens)
        ids, starts, num_tokens = (_column(kind, data) for kind, data in columns)
        num_pages = _column(_COUNTS, step.num_pages)
        slots = []
        token = page = 0
        for index, sequence_id in enumerate(ids):
            table = self._pages.setdefault(sequence_id, [])
            table += pages[page : page + num_pages[index]]
            page += num_pages[index]
            slots.append(
                StepSlot(
                    sequence_id=sequence_id,
                    start=starts[index],
                    tokens=tokens[token : token + num_tokens[index]].tolist(),
                    pages=table,
                    sample=step.sampled[index] > 0,
                    num_drafts=max(0, step.sampled[index] - 1),
                )
            )
            token += num_tokens[index]
        return slots

    def check(self, held: Held) -> None:
        """Compare what this follower holds with what its lead says.

        Raises:
            InternalError: not all steps have come; this rank cannot go on.
            AssertionError: it holds anything else.
        """
        self._check_number(held.number, self.number)
        mine = {sequence_id: len(pages) for sequence_id, pages in self._pages.items()}
        assert mine == held.num_pages, f"a follower holds {mine}, its lead {held.num_pages}"

    @staticmethod
    def _check_number(said: int, due: int) -> None:
        if said != due:
            raise InternalError(f"step {said} came where {due} was due: words of the lead are lost")


def _column(kind: str, data: bytes) -> array[int]:
    column = array(kind)
    column.frombytes(data)
    return column

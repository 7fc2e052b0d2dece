"""The log with which the lead rank of an instance tells its followers what to compute. Pure.

A follower knows only the pages of each sequence. Each step adds the new tokens and pages, so a
step's bytes do not grow with the contexts. Followers must not miss a step. So steps are numbered,
and a follower refuses a step that is not the next one.
"""

from __future__ import annotations

import enum
import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from mooncake.base import InternalError, KvLayout, PageArray
from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.kv_moves import Alive, RankWord

_COUNTS = "I"
"""The type of most columns: four bytes, unsigned."""
_IDS = "q"
_TOKENS = "i"
"""Signed, because a draft that ranks make themselves is negative."""


class Way(enum.IntEnum):
    """How a step is computed. All ranks do it in the same way, because they exchange tensors of the
    same sizes.
    """

    AS_IT_COMES = 0
    REPLAYED = 1
    """A captured graph for its number of sequences was replayed."""
    BEGUN = 2
    """An `Ahead` had begun it."""


class CapturedSizes(msgspec.Struct, frozen=True, array_like=True):
    """The sizes of captured steps; 0: none are captured."""

    most_rows: int = 0
    """The most sequences of a decode step."""
    most_pages: int = 0
    """The most pages of one sequence in any step."""
    most_tokens: int = 0
    """The most rows of a step with prompts."""
    most_drafts: int = 0
    """The most drafts of one sequence in a decode step."""


class UsePages(msgspec.Struct, frozen=True, tag="pages", array_like=True):
    """Compute over these pages from now on. No sequence is known, and steps count from 1. A
    descriptor of their memory follows the message, unless each rank has its own.
    """

    pages: PageArray
    """The pages as they would lie in one memory."""
    num_threads: int | None
    captured: CapturedSizes = CapturedSizes()
    own: bool = False
    """Whether each rank makes a memory for the pages that it holds."""
    transfer: bytes = b""
    """How to open the transfer engine that moves the pages, for the code that wires it. Empty:
    peers cannot reach them.
    """
    num_drafted: int = 0
    """The most sequences for which a head of its own KV drafts; 0: none does."""
    reads: tuple[int, ...] = ()
    """The layers whose inputs are read by what drafts; see `ReadStates`. Stages pass them on."""


class RankStep(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """One step, in columns: a number for each slot, or for each token or page of all slots."""

    number: int
    """The number of this step since the pages were named."""
    ids: bytes
    starts: bytes
    """Tokens computed before."""
    num_tokens: bytes
    tokens: bytes
    num_pages: bytes
    """The number of pages that the table of each slot has gained since it was last named."""
    pages: bytes
    sampled: bytes
    """One byte for each slot: after how many of its last tokens one may be sampled."""
    logprob_rows: dict[int, int]
    """sequence -> rows, for sequences whose prompt tokens' log-probabilities are wanted."""
    forgotten: list[int]
    """Sequences that have ended, or begin anew without pages."""
    way: Way = Way.AS_IT_COMES
    reported_as: int | None = None
    """The number of the plan as which the step is reported. Then blocks go to other engines in
    their state after the step, and stages before the last report its layers. None: neither.
    """


class Ahead(msgspec.Struct, frozen=True, tag="ahead", array_like=True):
    """Begin the decode step after the last step: one more token for each of its sequences. The lead
    gives the tokens in an exchange; it may have sampled them without having read them yet.
    """


class Drafted(msgspec.Struct, frozen=True, tag="drafted", array_like=True):
    """The drafts of the next step that leaves them to the model, for stages before the last. The
    ranks of the last stage have made them, and know them.
    """

    tokens: bytes
    """The tokens of all its sequences."""

    @classmethod
    def of(cls, slots: Iterable[StepSlot]) -> Drafted:
        """Return the drafts of the slots of a step."""
        return cls(array(_TOKENS, [token for slot in slots for token in slot.drafts]).tobytes())

    def put_into(self, slots: Sequence[StepSlot]) -> list[StepSlot]:
        """Return the slots of the step with these drafts."""
        drafts = iter(_column(_TOKENS, self.tokens))
        return [
            msgspec.structs.replace(
                slot,
                tokens=[
                    *slot.tokens[: len(slot.tokens) - slot.num_drafts],
                    *itertools.islice(drafts, slot.num_drafts),
                ],
            )
            for slot in slots
        ]


class Held(msgspec.Struct, frozen=True, tag="held", array_like=True):
    """What a follower that has heard every step holds. Nothing depends on it; it serves as
    a check.
    """

    number: int
    """The number of the last step."""
    num_pages: dict[int, int]
    """sequence -> pages."""


class Measure(msgspec.Struct, frozen=True, tag="measure", array_like=True):
    """Run the largest steps over pages of your own, and report in an exchange how much memory they
    take.
    """

    layout: KvLayout
    num_homes: int
    step_tokens: int
    step_sequences: int
    context_tokens: int
    """The context of the longest sequence."""
    num_drafted: int = 0
    """See `UsePages`: the head is there before memory is measured."""
    reads: tuple[int, ...] = ()
    """See `UsePages`."""


RankMessage = UsePages | RankStep | Drafted | Ahead | Held | Measure | Alive | RankWord

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)


def encode(message: RankMessage) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes) -> RankMessage:
    """Return the message in `data`. Raises msgspec.DecodeError when it is not one."""
    return _DECODER.decode(data)


class StepWriter:
    """Packs plans for followers. Knows how many pages of each sequence the followers have."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the last step."""
        self._num_pages: dict[int, int] = {}
        self._forgotten: dict[int, int] = {}
        """Sequences that the next step tells followers to forget, with their numbers of pages."""

    @property
    def held(self) -> Held:
        """What a follower holds that has read all steps."""
        return Held(self.number, {**self._num_pages, **self._forgotten})

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Let the next step say that these sequences have ended, or begin anew."""
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
        """Return what followers need to know of a step's slots.

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
            if have != known_pages:  # true for about one of 64 sequences that decode
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
    """Unpacks what a `StepWriter` has packed. Keeps the pages of every sequence."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the last step."""
        self._pages: dict[int, list[int]] = {}

    def slots(self, step: RankStep) -> list[StepSlot]:
        """Return the slots of the plan.

        Raises:
            InternalError: this is not the next step, so this rank cannot go on.
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
            InternalError: not all steps have come, so this rank cannot go on.
            AssertionError: the follower holds anything else.
        """
        self._check_number(held.number, self.number)
        mine = {sequence_id: len(pages) for sequence_id, pages in self._pages.items()}
        assert mine == held.num_pages, f"a follower holds {mine}, its lead {held.num_pages}"

    @staticmethod
    def _check_number(said: int, due: int) -> None:
        if said != due:
            raise InternalError(f"step {said} came instead of {due}: messages of the lead are lost")


def _column(kind: str, data: bytes) -> array[int]:
    column = array(kind)
    column.frombytes(data)
    return column

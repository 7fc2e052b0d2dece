"""What a lead says to followers that have memories of their own about the KV in them, and what they
answer. Pure.

Who copies what, `base.kv_parts` decides. A follower may be behind its lead in a step, so each word
says how far it has to be.
"""

from __future__ import annotations

import msgspec

from mooncake.base.kv_layout import SegmentRef
from mooncake.base.kv_parts import Move
from mooncake.transfer.engine import Op
from mooncake.transfer.grants import Fence

Progress = tuple[int, int]
"""(steps begun since the pages were named, layers of the last that are written)"""
ALL_LAYERS = 1 << 30
"""As `Progress`: the step has ended on all ranks of a stage."""


class StartMove(msgspec.Struct, frozen=True, tag="move", array_like=True):
    """Copy between pages of this rank and a peer's memory; `Moved` answers."""

    number: int
    op: Op
    move: Move
    after: Progress
    """Of this rank: what it moves is final then."""
    deadline_s: float
    """On the clock of this machine."""
    verify: bool
    """Hash the blocks once they have come."""


class StopMove(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """End a move early; its answer still comes."""

    number: int


class HashPages(msgspec.Struct, frozen=True, tag="hash", array_like=True):
    """Hash the blocks in pages of this rank; `Hashed` answers."""

    number: int
    pages: list[int]
    after: Progress


class Revoke(msgspec.Struct, frozen=True, tag="revoke", array_like=True):
    """Refuse what peers write into this rank's pages by a grant."""

    grant: int


class AskFence(msgspec.Struct, frozen=True, tag="fence", array_like=True):
    """Say when nothing more is written by a revoked grant; `Fenced` answers."""

    grant: int


class Opened(msgspec.Struct, frozen=True, tag="opened", array_like=True):
    """A follower has the memory for its pages, or why it has not."""

    segment: SegmentRef | None
    """None: no peer reaches them."""
    region_id: int
    error: str = ""


class Moved(msgspec.Struct, frozen=True, tag="moved", array_like=True):
    """How a move ended."""

    number: int
    error: str | None
    num_bytes: int
    seconds: float
    checksums: list[int]
    """Of each block, in the order of its pages, the part that this rank's layers make; none unless
    they were wanted.
    """


class Hashed(msgspec.Struct, frozen=True, tag="hashed", array_like=True):
    """The checksums of pages, or the parts of them that this rank's layers make, in the order in
    which they were named: a hasher's event, and a follower's answer.
    """

    number: int
    checksums: list[int]


class Fenced(msgspec.Struct, frozen=True, tag="fenced", array_like=True):
    """Nothing is written by a revoked grant any more, or nobody can tell when that will be."""

    grant: int
    fence: Fence


class Written(msgspec.Struct, frozen=True, tag="written", array_like=True):
    """So much of a step lies in the pages of all stages up to that of this rank, the first of its
    stage; said of steps whose layers are reported (see `step_log.RankStep`).
    """

    step_id: int
    """Of the step's plan."""
    progress: Progress


class Alive(msgspec.Struct, frozen=True, tag="alive", array_like=True):
    """A rank's sign of life, which its process gives every `rank_group.SIGN_S` by itself: followers
    to their lead, and the lead to them.
    """


class GuessHeard(msgspec.Struct, frozen=True, tag="guess heard", array_like=True):
    """A follower has heard of one more step that is begun ahead of its plan (`step_log.Ahead`): who
    writes to its pages from now on waits for that step.
    """


RankWord = StartMove | StopMove | HashPages | Revoke | AskFence
RankAnswer = Opened | Moved | Hashed | Fenced | Written | Alive | GuessHeard


class OfRank(msgspec.Struct, frozen=True):
    """An event of an instance: a follower's answer."""

    rank: int
    answer: Moved | Hashed | Fenced


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[RankAnswer] = msgspec.msgpack.Decoder(RankAnswer)


def encode_answer(answer: RankAnswer) -> bytes:
    """Return the bytes of an answer."""
    return _ENCODER.encode(answer)


def decode_answer(data: bytes) -> RankAnswer:
    """Return the answer of `data`. msgspec.DecodeError: it is none."""
    return _DECODER.decode(data)

"""The messages between a lead and followers with memories of their own about the KV in them. Pure.

`base.kv_parts` decides who copies what. A follower may be behind its lead in a step, so each
message says how far the follower must have computed first.
"""

from __future__ import annotations

import msgspec

from mooncake.base.kv_layout import Move, SegmentRef
from mooncake.transfer.engine import Op, TransferDone
from mooncake.transfer.grants import Fence

Progress = tuple[int, int]
"""(steps begun since the pages were named, layers written of the last step)"""
ALL_LAYERS = 1 << 30
"""The `layers` of a `Progress` when all ranks of a stage have ended the step."""


class StartMove(msgspec.Struct, frozen=True, tag="move", array_like=True):
    """Copy between pages of this rank and a peer's memory; `Moved` answers."""

    number: int
    op: Op
    move: Move
    after: Progress
    """The progress of this rank at which the moved content is final."""
    deadline_s: float
    """The deadline on the clock of this machine."""
    verify: bool
    """Whether to hash the blocks once they have come."""


class StopMove(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """End a move early. Its answer still comes."""

    number: int


class HashPages(msgspec.Struct, frozen=True, tag="hash", array_like=True):
    """Hash the blocks in pages of this rank; `Hashed` answers."""

    number: int
    pages: list[int]
    after: Progress


class Revoke(msgspec.Struct, frozen=True, tag="revoke", array_like=True):
    """Refuse what peers write into this rank's pages under a grant."""

    grant: int


class AskFence(msgspec.Struct, frozen=True, tag="fence", array_like=True):
    """Say when nothing more is written under a revoked grant; `Fenced` answers."""

    grant: int


class Opened(msgspec.Struct, frozen=True, tag="opened", array_like=True):
    """A follower has the memory for its pages, or `error` says why not."""

    segment: SegmentRef | None
    """None: peers cannot reach the pages."""
    region_id: int
    error: str = ""


class Moved(msgspec.Struct, frozen=True, tag="moved", array_like=True):
    done: TransferDone
    """How the move ended, under its number."""
    checksums: list[int] = []
    """The part of each block's checksum from this rank's layers, in the order of its pages. Empty
    unless checksums were wanted.
    """


class Hashed(msgspec.Struct, frozen=True, tag="hashed", array_like=True):
    """The checksums of pages, or the parts from this rank's layers, in the order in which the pages
    were named. A hasher sends it as an event, a follower as an answer.
    """

    number: int
    checksums: list[int]


class Fenced(msgspec.Struct, frozen=True, tag="fenced", array_like=True):
    """Nothing is written under a revoked grant any more, or nobody can tell when that will be."""

    grant: int
    fence: Fence


class Written(msgspec.Struct, frozen=True, tag="written", array_like=True):
    """How much of a step is in the pages of all stages up to this rank's. Only the first rank of a
    stage sends it, and only for steps whose layers are reported (see `step_log.RankStep`).
    """

    step_id: int
    """The id of the step's plan."""
    progress: Progress


class Alive(msgspec.Struct, frozen=True, tag="alive", array_like=True):
    """A rank's sign of life. Its process sends one every `rank_group.SIGN_S` by itself: followers
    to their lead, and the lead to them.
    """


class GuessHeard(msgspec.Struct, frozen=True, tag="guess heard", array_like=True):
    """A follower has heard of one more step that begins ahead of its plan (`step_log.Ahead`).
    Whoever writes to its pages from now on waits for that step.
    """


RankWord = StartMove | StopMove | HashPages | Revoke | AskFence
RankAnswer = Opened | Moved | Hashed | Fenced | Written | Alive | GuessHeard


class OfRank(msgspec.Struct, frozen=True):
    """An answer of a follower, as an event of the instance."""

    rank: int
    answer: Moved | Hashed | Fenced


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[RankAnswer] = msgspec.msgpack.Decoder(RankAnswer)


def encode_answer(answer: RankAnswer) -> bytes:
    return _ENCODER.encode(answer)


def decode_answer(data: bytes) -> RankAnswer:
    """Return the answer in `data`. Raises msgspec.DecodeError when it is not one."""
    return _DECODER.decode(data)

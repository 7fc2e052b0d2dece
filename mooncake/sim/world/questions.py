"""Questions over simulated data connections: blocks come behind the answer, or the link breaks.

A question ends once. Then its owner is told, and the asker gets the answer or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from mooncake.base.rights import CredentialRole, Sender
from mooncake.transfer.engine import Asked, AskEnded, Pieces, Region, TransferOp

if TYPE_CHECKING:
    from mooncake.sim.world.network import Endpoint, Network

_SENDER = Sender(name="sim", roles=frozenset((CredentialRole.WORKER,)), tenant=None, channel_key="")


@dataclass
class Question:
    """A question under way."""

    asker: Endpoint
    owner: Endpoint
    places: Sequence[TransferOp]
    """Where the bytes behind the answer go."""
    is_wanted: Callable[[], bool]
    """Whether the asker has not given it up."""
    ended: Callable[[str | None, bytes, int], None]
    """Called once: (error, answer, bytes that came)."""


class Questions:
    """All questions of one network that are not over."""

    def __init__(self, network: Network, random: Random) -> None:
        self._network = network
        self._random = random
        self._open: dict[int, Question] = {}
        self._last = 0

    def ask(self, question: Question, text: bytes) -> None:
        """Bring a question to its owner. Its connection may break on the way or behind it."""
        heap, config, owner = self._network.heap, self._network.config, question.owner
        self._last += 1
        number = self._last
        self._open[number] = question
        breaks = config.loss > 0 and self._random.random() < config.loss
        if breaks or not owner.hears:
            heap.after(config.failure_s, lambda: self.end(number, "the connection broke"))
        if owner.hears and not (breaks and self._random.random() < 0.5):
            event = Asked(
                number=number, question=text, sender=_SENDER, whence="",
                piece_bytes=question.places[0].num_bytes if question.places else 0,
            )  # fmt: skip
            heap.after(config.transfer_latency_s, lambda: self._hear(event))

    def _hear(self, event: Asked) -> None:
        question = self._open.get(event.number)
        if question is not None and self._reaches(question):
            question.owner.deliver(event)

    def _reaches(self, question: Question) -> bool:
        """Whether both ends live and the wire is whole. If not, the question fails later."""
        network, owner = self._network, question.owner
        if owner.alive and question.asker.alive and not network.is_cut(question.asker, owner):
            return True
        number = next(number for number, each in self._open.items() if each is question)
        network.heap.after(
            network.config.failure_s, lambda: self.end(number, "the peer does not answer")
        )
        return False

    def answer(self, number: int, answer: bytes, region: Region, pieces: Pieces) -> None:
        """Have an answer and pieces of `region` arrive later."""
        network, question = self._network, self._open.get(number)
        if question is not None:
            num_bytes = pieces.num_bytes * len(pieces.offsets)
            done_s = network.reserve(question.owner.node, question.asker.node, num_bytes)
            network.heap.at(done_s, lambda: self._bring(number, answer, region, pieces))

    def _bring(self, number: int, answer: bytes, region: Region, pieces: Pieces) -> None:
        """Copy what an answer names, piece by piece, to where the asker wants it."""
        network, question = self._network, self._open.get(number)
        if question is None or not self._reaches(question):
            return
        still_s = question.asker.still_until_s
        if network.heap.now() < still_s and not network.config.writes_by_hardware:
            network.heap.at(still_s, lambda: self._bring(number, answer, region, pieces))
            return
        starts = [
            offset + start
            for offset in pieces.offsets
            for start in range(0, pieces.num_bytes, question.places[0].num_bytes)
        ]
        for op, start in zip(question.places, starts, strict=False):
            local = question.asker.regions[op.local_region]
            if question.is_wanted() and local.has_bytes:
                here = local.buffer[op.local_offset : op.local_offset + op.num_bytes]
                here[:] = region.buffer[start : start + op.num_bytes]
                if network.corrupts():
                    here[0] ^= 1
        self.end(number, None, answer, pieces.num_bytes * len(pieces.offsets))

    def end(self, number: int, error: str | None, answer: bytes = b"", num_bytes: int = 0) -> None:
        """End a question, and tell both sides. Nothing happens if it has ended."""
        question = self._open.pop(number, None)
        if question is not None:
            if question.owner.alive:
                question.owner.deliver(AskEnded(number=number))
            question.ended(error, answer, num_bytes)

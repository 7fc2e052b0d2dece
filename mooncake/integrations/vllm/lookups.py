"""Looks prefixes up in the pool, in its own thread: the scheduler never waits for a look-up."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from mooncake.base import BlockKey, MooncakeError
from mooncake.integrations.pool_link import PoolLink
from mooncake.integrations.vllm.chunks import Packing, RankKv
from mooncake.launch.pool_client.session import PoolSession

REACH_S = 1.0
"""Seconds between two attempts to reach a pool that has never been reached."""
AGAIN_S = 0.01
"""Seconds until a look-up that waits for promised chunks is tried once more."""
MAX_WAITING = 1024
"""Look-ups that may wait; further ones count as misses."""
logger = logging.getLogger("vllm.mooncake")
"""A child of vLLM's logger, so that vLLM's log settings apply."""


@dataclass
class _Question:
    chain: Sequence[BlockKey]
    promised: int
    until_s: float
    """How long promised chunks are waited for."""
    again_s: float = 0.0
    """When it is tried once more."""
    answer: Future[int] = field(default_factory=Future)


class PoolLookups:
    """Answers how many leading chunks all ranks of an engine have in the pool."""

    def __init__(self, link: PoolLink, ranks: Sequence[RankKv]) -> None:
        self._link = link
        self._ranks = ranks
        self._packing: Packing | None = None
        self._questions: queue.Queue[_Question | None] = queue.Queue(MAX_WAITING)
        self._unkept: deque[_Question] = deque()
        """Questions whose promised chunks are not all there yet, the one that is due first coming
        first.
        """
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool lookups", daemon=True)
        self._thread.start()

    @property
    def packing(self) -> Packing | None:
        """How blocks are packed in the pool, or None if the pool has not been reached yet."""
        return self._packing

    def ask(
        self, chain: Sequence[BlockKey], promised: int = 0, within_s: float = 0.0
    ) -> Future[int]:
        """Begin a look-up. Its answer is 0 if the pool fails. If `promised` chunks are not all
        there yet, it waits for them, at most this long.
        """
        question = _Question(chain, promised, time.monotonic() + within_s)
        try:
            self._questions.put_nowait(question)
        except queue.Full:
            question.answer.set_result(0)
        return question.answer

    def wait(self, seconds: float) -> None:
        """Wait for an answer to some question, at most this long."""
        self._answered.wait(seconds)
        self._answered.clear()

    def close(self) -> None:
        """End the thread. Questions without an answer count as misses."""
        self._questions.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Answer questions. After each new one at most one other is tried again: however many wait
        for what was promised, the new ones go on.
        """
        self._reach()
        while True:
            try:
                question = self._questions.get(timeout=self._pause_s())
            except queue.Empty:
                if self._packing is None:
                    self._reach()
            else:
                if question is None:
                    self._link.close()
                    return
                self._answer(question)
            if self._unkept and time.monotonic() >= self._unkept[0].again_s:
                self._answer(self._unkept.popleft())

    def _pause_s(self) -> float | None:
        """Return how long there is nothing to do unless a new question comes."""
        if self._packing is None:
            return REACH_S
        return max(0.0, self._unkept[0].again_s - time.monotonic()) if self._unkept else None

    def _answer(self, question: _Question) -> None:
        found = self._found(question.chain)
        if (
            found is not None
            and found < question.promised
            and time.monotonic() < question.until_s
            and len(self._unkept) < MAX_WAITING
        ):
            question.again_s = time.monotonic() + AGAIN_S
            self._unkept.append(question)
            return
        question.answer.set_result(found or 0)
        self._answered.set()

    def _reach(self) -> None:
        try:
            self._packing = self._link.call(
                lambda session: Packing.of(session.block_bytes, self._ranks)
            )
        except MooncakeError:
            pass  # the link has logged it
        except Exception:
            logger.exception("the pool cannot be reached because of a bug")

    def _found(self, chain: Sequence[BlockKey]) -> int | None:
        """Return how many leading chunks there are; None if the pool fails."""
        try:
            return self._link.call(lambda session: self._match(session, chain))
        except MooncakeError:
            return None
        except Exception:  # whatever is wrong with the pool, the request goes on
            logger.exception("a look-up failed because of a bug")
            return None

    def _match(self, session: PoolSession, chain: Sequence[BlockKey]) -> int:
        packing, found = self._packing, len(chain)
        if packing is None or session.block_bytes != packing.pool_block_bytes:
            return 0  # another pool than at first
        for rank in self._ranks:
            keys = packing.part_keys(rank, chain[:found])
            found = min(found, session.match(keys) // packing.num_parts(rank))
        return found

"""Looks prefixes up in the pool, in its own thread: the scheduler never waits for a look-up."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from mooncake.base import BlockKey, MooncakeError
from mooncake.integrations.pool_link import PoolLink
from mooncake.integrations.vllm.chunks import Packing, RankKv
from mooncake.launch.pool_client.session import PoolSession

REACH_S = 1.0
"""Seconds between two attempts to reach a pool that has never been reached."""
MAX_WAITING = 1024
"""Look-ups that may wait; further ones count as misses."""
logger = logging.getLogger("vllm.mooncake")
"""It is below vLLM's logger, so that vLLM's log settings apply."""


@dataclass
class _Question:
    chain: Sequence[BlockKey]
    answer: Future[int] = field(default_factory=Future)


class PoolLookups:
    """Answers how many leading chunks all ranks of an engine have in the pool."""

    def __init__(self, link: PoolLink, ranks: Sequence[RankKv]) -> None:
        self._link = link
        self._ranks = ranks
        self._packing: Packing | None = None
        self._questions: queue.Queue[_Question | None] = queue.Queue(MAX_WAITING)
        self._last: Future[int] | None = None
        self._thread = threading.Thread(target=self._run, name="pool lookups", daemon=True)
        self._thread.start()

    @property
    def packing(self) -> Packing | None:
        """How blocks are packed in the pool; None: the pool has not been reached yet."""
        return self._packing

    def ask(self, chain: Sequence[BlockKey]) -> Future[int]:
        """Begin a look-up. Its answer is 0 if the pool fails."""
        question = _Question(chain)
        self._last = question.answer
        try:
            self._questions.put_nowait(question)
        except queue.Full:
            question.answer.set_result(0)
        return question.answer

    def wait(self, seconds: float) -> None:
        """Wait for the answer to the last question, at most this long."""
        if self._last is not None:
            wait([self._last], seconds)

    def close(self) -> None:
        """End the thread. Questions without an answer count as misses."""
        self._questions.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._reach()
        while True:
            try:
                question = self._questions.get(timeout=None if self._packing else REACH_S)
            except queue.Empty:
                self._reach()
                continue
            if question is None:
                self._link.close()
                return
            question.answer.set_result(self._found(question.chain))

    def _reach(self) -> None:
        try:
            self._packing = self._link.call(
                lambda session: Packing.of(session.block_bytes, self._ranks)
            )
        except MooncakeError:
            pass  # the link has logged it
        except Exception:
            logger.exception("the pool cannot be reached for a reason that is a bug")

    def _found(self, chain: Sequence[BlockKey]) -> int:
        try:
            return self._link.call(lambda session: self._match(session, chain))
        except MooncakeError:
            return 0
        except Exception:  # whatever is wrong with the pool, the request goes on
            logger.exception("a look-up failed for a reason that is a bug")
            return 0

    def _match(self, session: PoolSession, chain: Sequence[BlockKey]) -> int:
        packing, found = self._packing, len(chain)
        if packing is None or session.block_bytes != packing.pool_block_bytes:
            return 0  # another pool than at first
        for rank in self._ranks:
            keys = packing.part_keys(rank, chain[:found])
            found = min(found, session.match(keys) // packing.num_parts(rank))
        return found

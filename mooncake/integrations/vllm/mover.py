"""The worker's side: a thread that runs beside the model brings chunks from the pool and sends
others to it.

The thread touches staging memory only. The model's thread copies between staging memory and pages.
So no block is written after its request has ended, and a save needs none of the engine's blocks
once it has begun. Every load ends, by its deadline at the latest.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mooncake.base import BlockKey, MooncakeError, Unavailable
from mooncake.integrations.pool_link import PoolLink
from mooncake.integrations.vllm.chunks import Packing, RankKv
from mooncake.integrations.vllm.lookups import logger
from mooncake.integrations.vllm.plan import Load, Save
from mooncake.kvstore.client.block_memory import BlockMemory
from mooncake.launch.pool_client.session import PoolSession

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Chunks of a load that lie in slots of staging memory."""

    first: int
    """The first of them among the chunks of the load."""
    slots: list[int]


@dataclass
class Ended:
    """Loads that have ended, and blocks that did not come."""

    request_ids: set[str] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)


@dataclass
class _LoadState:
    job: Load
    deadline_s: float
    num_asked: int = 0
    num_written: int = 0
    """Chunks that lie in the engine's pages."""
    pieces: deque[Piece] = field(default_factory=deque)
    is_over: bool = False
    """True if no more pieces come."""
    is_given_up: bool = False


@dataclass(eq=False)
class Saving:
    """Chunks that are copied out of the pages, and given to the pool."""

    chain: Sequence[BlockKey]
    block_ids: Sequence[int]
    slots: list[int]
    num_copied: int = 0
    """Leading parts of each chunk that lie in staging memory."""
    num_given: int = 0
    """Leading parts of each chunk that were given to the pool."""


class Staging:
    """Slots of memory for one chunk each: some for loads, the others for saves."""

    def __init__(self, packing: Packing, rank: RankKv, num_bytes: int) -> None:
        self.packing = packing
        self.rank = rank
        self.slot_bytes = packing.num_parts(rank) * packing.pool_block_bytes
        half = max(1, num_bytes // 2 // self.slot_bytes)
        self.memory = memoryview(mmap.mmap(-1, 2 * half * self.slot_bytes))
        self.free_for_loads = list(range(half))
        self.free_for_saves = list(range(half, 2 * half))
        self._num_for_loads = half

    @property
    def num_free(self) -> int:
        return len(self.free_for_loads) + len(self.free_for_saves)

    def release(self, slots: Sequence[int]) -> None:
        """Take slots back."""
        for slot in slots:
            is_load = slot < self._num_for_loads
            (self.free_for_loads if is_load else self.free_for_saves).append(slot)

    def offsets(self, slots: Sequence[int]) -> list[int]:
        """Return where the parts of the chunks in these slots begin, slot after slot."""
        step = self.packing.pool_block_bytes
        return [
            slot * self.slot_bytes + part * step
            for slot in slots
            for part in range(self.packing.num_parts(self.rank))
        ]


class Mover:
    """All loads and saves of one worker."""

    def __init__(
        self, link: PoolLink, staging: Staging, tenant: str, load_timeout_s: float
    ) -> None:
        self._link, self._staging, self._tenant = link, staging, tenant
        self._timeout_s = load_timeout_s
        self._changed = threading.Condition()
        """Guards all that follows and the free slots."""
        self._loads: dict[str, _LoadState] = {}
        self._saves: list[Saving] = []
        self._is_closed = False
        self.num_dropped = 0
        """Chunks that were not saved because staging memory was full, or the pool failed."""
        self._memory: tuple[PoolSession, BlockMemory] | None = None
        self._thread = threading.Thread(target=self._run, name="pool mover", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the model's thread

    @property
    def num_loads(self) -> int:
        """Loads that have not ended."""
        return len(self._loads)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to move, and all staging memory is free."""
        staging = self._staging
        with self._changed:
            whole = len(staging.memory) // staging.slot_bytes
            return not self._loads and not self._saves and staging.num_free == whole

    def load(self, job: Load, now: float) -> None:
        """Begin to load chunks; `collect` tells when the load has ended."""
        with self._changed:
            self._loads[job.request_id] = _LoadState(job, now + self._timeout_s)
            self._changed.notify_all()

    def begin_save(self, job: Save) -> Saving | None:
        """Take staging memory for chunks. Return None if there is none. Chunks for which there is
        none are left out; a later request computes them again. Call `give` until it has ended the
        save.
        """
        blocks = self._staging.packing.blocks
        with self._changed:
            free = self._staging.free_for_saves
            count = min(len(job.chain), len(free))
            self.num_dropped += len(job.chain) - count
            if not count:
                return None
            slots = [free.pop() for _ in range(count)]
            self._saves.append(Saving(job.chain[:count], job.block_ids[: count * blocks], slots))
            return self._saves[-1]

    def give(self, save: Saving, num_bytes: int) -> None:
        """Put into the pool what lies in the first `num_bytes` of each slot, as far as blocks of
        the pool are whole. All of a slot ends the save.
        """
        with self._changed:
            save.num_copied = num_bytes // self._staging.packing.pool_block_bytes
            self._changed.notify_all()

    def collect(
        self,
        aborted: Collection[str],
        now: float,
        write: Callable[[Sequence[int], Sequence[int], int], None],
    ) -> Ended:
        """Copy what has arrived into the pages by `write(block_ids, slots, num_skipped)`. Return
        the loads that have ended. Loads of `aborted` requests end at once.
        """
        ended = Ended()
        for request_id, load in list(self._loads.items()):
            job, blocks = load.job, self._staging.packing.blocks
            with self._changed:
                pieces, load.pieces = load.pieces, deque()
                is_over = load.is_over or now >= load.deadline_s or request_id in aborted
                load.is_given_up = is_over
            for piece in pieces:
                start = max(0, piece.first * blocks - job.num_known)
                stop = (piece.first + len(piece.slots)) * blocks - job.num_known
                write(
                    job.block_ids[start:stop], piece.slots, job.num_known if not piece.first else 0
                )
                load.num_written = piece.first + len(piece.slots)
            with self._changed:
                for piece in pieces:
                    self._staging.release(piece.slots)
                if is_over:
                    del self._loads[request_id]
                self._changed.notify_all()
            if is_over:
                ended.request_ids.add(request_id)
                here = max(0, load.num_written * blocks - job.num_known)
                ended.missing.update(job.block_ids[here:])
        return ended

    def wait(self, seconds: float) -> None:
        """Wait for news of some load, at most this long."""
        with self._changed:
            self._changed.wait_for(
                lambda: any(load.pieces or load.is_over for load in self._loads.values()), seconds
            )

    def close(self) -> None:
        """End the thread. What was not saved yet is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    # ------------------------------------------------------------------ the mover's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closed or self._next_save() or self._next_load()
                )
                load, save = self._next_load(), self._next_save()
                if self._is_closed:
                    break
            if load is not None:
                self._bring(load)
            elif save is not None:
                self._give(save)
        self._link.close()

    def _next_load(self) -> _LoadState | None:
        """Return a load that can go on."""
        if not self._staging.free_for_loads:
            return None
        return next((load for load in self._loads.values() if not load.is_over), None)

    def _bring(self, load: _LoadState) -> None:
        """Load as many chunks as there are slots for."""
        staging, first = self._staging, load.num_asked
        with self._changed:
            free = staging.free_for_loads
            count = min(len(free), len(load.job.chain) - first)
            slots = [free.pop() for _ in range(count)]
        keys = staging.packing.part_keys(staging.rank, load.job.chain[first : first + count])
        came = self._try(
            lambda session, memory: session.get_into(keys, memory.at(staging.offsets(slots)))
        )
        whole = (came or 0) // staging.packing.num_parts(staging.rank)
        with self._changed:
            load.num_asked += count
            load.is_over = whole < count or load.num_asked == len(load.job.chain)
            kept = 0 if load.is_given_up else whole
            staging.release(slots[kept:])
            if kept:
                load.pieces.append(Piece(first, slots[:kept]))
            self._changed.notify_all()

    def _next_save(self) -> Saving | None:
        """Return a save of which more can be given to the pool."""
        return next((save for save in self._saves if save.num_given < save.num_copied), None)

    def _give(self, save: Saving) -> None:
        """Put the copied parts of a save into the pool. At the end it is told all keys in the order
        of their chain, which its eviction keeps; it takes only the parts that it lacks.
        """
        staging, begin, stop = self._staging, save.num_given, save.num_copied
        num_parts = staging.packing.num_parts(staging.rank)
        is_last = stop == num_parts
        keys = staging.packing.part_keys(staging.rank, save.chain)
        some = [at for at in range(len(keys)) if is_last or begin <= at % num_parts < stop]
        offsets = staging.offsets(save.slots)
        written = self._try(
            lambda session, memory: session.put_from(
                [keys[at] for at in some], memory.at([offsets[at] for at in some]), self._tenant
            )
        )
        with self._changed:
            save.num_given = stop
            if is_last:
                self._saves.remove(save)
                self.num_dropped += len(save.chain) if written is None else 0
                staging.release(save.slots)
            self._changed.notify_all()

    def _try(self, work: Callable[[PoolSession, BlockMemory], T]) -> T | None:
        """Return the result of `work` with the pool; None if it fails."""
        try:
            return self._link.call(lambda session: work(session, self._memory_of(session)))
        except MooncakeError:
            return None  # the link has logged it
        except Exception:  # whatever is wrong with the pool, requests go on
            logger.exception("moving blocks failed because of a bug")
            return None

    def _memory_of(self, session: PoolSession) -> BlockMemory:
        """Return staging memory as this session has registered it."""
        if session.block_bytes != self._staging.packing.pool_block_bytes:
            raise Unavailable("the pool has blocks of another size than before: restart vLLM")
        if self._memory is None or self._memory[0] is not session:
            self._memory = session, session.register(self._staging.memory)
        return self._memory[1]

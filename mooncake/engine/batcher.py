"""Plans the steps over sequences and the block pool: no runner, no clock, no messages. Owns the
waiting queue and the running batch.

Rules, in the order in which they apply:
  1. Running sequences come first. Those that lack only one token go before the others, because a
      stream waits for it; then prompts get chunks. Each kind goes in rank order (`policy`), within
      the step's token budget.
  2. A sequence that needs a page takes it from the last in order that holds any. When all others go
      before it, it keeps its pages and is left out of the step. Where flows (tenants in classes)
      share the engine, those above their share yield first, and take pages only from such flows.
  3. Then waiting sequences are admitted in rank order, while there are seats, tokens and pages. A
      sequence gets pages for all its known tokens at once, so only newly sampled tokens can lack
      one later. One page stays free for each running sequence that will grow. When the front of the
      queue waits for pages, sequences behind it that already have theirs (KV received from
      elsewhere) may pass it. Then flows below their share of seats and pages take what others hold
      above theirs. A sequence that gives up only its seat keeps its pages.
  4. When there is nothing to compute and nothing in flight, the front of the queue takes the pages
      it needs from all sequences behind it, running or waiting.
  5. The rest of the budget goes to drafts of sequences that lack one token (`speculation`). Drafts
      displace nothing: where pages are short, there are none.
Where flows meet, a step is so short that none slows down a smaller one by much (`step_shares`):
flows that get less than they want compute only some sequences, in turns, and no drafts. A preempted
sequence keeps its tokens. Its full blocks stay in the prefix cache until they are evicted.
Sequences in flight keep what they have, so several steps can run at a time. Two steps share a
sequence only where the earlier one computes a chunk of it after which nothing is sampled. Where
steps go through stages, chunks take equal times (`chunks`), and each step takes only so many
streams that every stage has some.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain, islice
from types import MappingProxyType

from mooncake.base.errors import ContextTooLong
from mooncake.base.request import Failure, Flow, Priority
from mooncake.engine.block_pool import BlockPool
from mooncake.engine.chunks import chunk_sizes
from mooncake.engine.config import EngineConfig
from mooncake.engine.cost import StepCostModel
from mooncake.engine.prompt_time import (
    Prompt,
    PromptTime,
    Stream,
    postponed,
    postponement,
    prompt_time,
)
from mooncake.engine.sequence import Sequence, SequenceState, Standing, last_in_order, rank
from mooncake.engine.speculation import Speculation
from mooncake.engine.step_shares import Sharing, StepShare, turn_of


@dataclass(slots=True)
class Batch:
    """The plan of one step while it is being made."""

    budget: int
    """Tokens that can still be added."""
    shares: dict[int, tuple[Sequence, int]] = field(default_factory=dict)
    """sequence_id -> the sequence and how many tokens it computes, in order."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """sequence_id -> guesses computed behind its last token."""
    preempted: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, Failure]] = field(default_factory=list)
    """Sequences that can never run here; removed from the queues, with their pages held."""
    num_running_streams: int = 0
    """Running sequences that lack only one token. Counted only where steps go through stages."""
    streams: set[int] = field(default_factory=set)
    """The sequence_id of each stream that has a share in this step."""
    prompt_time: PromptTime | None = None
    """What streams leave for prompts in a step with a limit; None before a prompt asks."""
    prompts: dict[int, Prompt] = field(default_factory=dict)
    """sequence_id -> what a prompt has to compute, where prompts may wait for streams."""
    line: list[Sequence] = field(default_factory=list)
    """The prompts that run, then those that wait if a seat is free: as many as there are seats."""
    postponed: set[int] = field(default_factory=set)
    """The sequence_id of each prompt that waits until others are computed."""
    most_late: int | None = None
    """The most tokens of a chunk if all prompts are too late in any case. None: whole ones."""
    is_crowded: bool = False
    """Whether there are so many prompts that they are computed whatever it costs streams."""
    share: StepShare | None = None
    """The shares of the flows that get less than they want; None: there are no such flows."""

    def give(self, sequence: Sequence, max_tokens: int) -> None:
        num_tokens = sequence.num_unplanned
        if num_tokens > 1:
            num_tokens = min(num_tokens, max_tokens, self.budget)
        if self.share is not None:
            self.share.take(sequence, num_tokens)
        if sequence.num_missing == 1:
            self.streams.add(sequence.sequence_id)
        self.shares[sequence.sequence_id] = (sequence, num_tokens)
        self.budget -= num_tokens

    def is_limited(self, sequence: Sequence) -> bool:
        """Return whether the sequence's flow gets less than it wants."""
        return self.share is not None and self.share.is_limited(sequence.flow)

    def most(self, sequence: Sequence, most: int) -> int:
        """Return how many of `most` tokens the sequence's flow has room for."""
        return most if self.share is None else self.share.most(sequence, most)

    def take_back(self, sequence: Sequence) -> None:
        _, num_tokens = self.shares.pop(sequence.sequence_id, (sequence, 0))
        self.streams.discard(sequence.sequence_id)
        self.prompts.pop(sequence.sequence_id, None)
        self.budget += num_tokens
        if self.share is not None:
            self.share.take_back(sequence)


class Batcher:
    """Owns the waiting queue and the running batch, and chooses what the next step computes."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        speculation: Speculation | None = None,
        cost: StepCostModel | None = None,
    ) -> None:
        """`cost` predicts steps. Chunks are cut by it where there are stages or a limit on gaps."""
        self._cost = cost or StepCostModel()
        self._config = config
        self._pool = pool
        self._speculation = speculation
        self.waiting: list[Sequence] = []
        """The waiting queue in rank order. Some sequences hold pages, because their KV came from
        elsewhere.
        """
        self.running: list[Sequence] = []
        """The running batch in rank order."""
        self.sharing = Sharing(config)
        self._num_turns = 0
        self._now = 0.0
        self._flows: Counter[Flow] = Counter()
        """How many sequences each flow has in both."""

    def enqueue(self, sequence: Sequence) -> None:
        """Add `sequence` to the waiting queue."""
        self._flows[sequence.flow] += 1
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=rank)

    def remove(self, sequence: Sequence) -> None:
        """Remove `sequence` from queue or batch; its pages stay held."""
        self._flows[sequence.flow] -= 1
        if not self._flows[sequence.flow]:
            del self._flows[sequence.flow]
        line = self.waiting if sequence.state is SequenceState.WAITING else self.running
        line.remove(sequence)
        sequence.state = SequenceState.ENDED

    def plan(self, now: float = 0.0) -> Batch:
        """Return the next step's shares, with pages allocated. No shares: there is nothing to
        compute. `now`: on the clock of the sequences' `added_s`.
        """
        self._now = now
        batch = Batch(budget=self._config.max_batched_tokens)
        if len(self._flows) > 1 or self.sharing.recent:
            batch.share = self.sharing.of_step(self.running, self.admissible())
        if self._config.num_stages > 1:
            batch.num_running_streams = sum(each.num_missing == 1 for each in self.running)
        if self._config.first_token_s is not None or self._config.max_gap_s is not None:
            self._postpone(batch)
        self._fill(batch)
        is_idle = self._is_idle
        if is_idle and not batch.shares and batch.share is not None:
            batch.prompt_time = None
            batch.share.lift()  # otherwise flows that sit out would leave the step empty
            self._fill(batch)
        if is_idle and not batch.shares and batch.postponed:
            batch.postponed = set()  # those that go before them have no pages
            self._fill(batch)
        if is_idle and not batch.shares:
            self._admit_by_force(batch)
        if self._speculation is not None:
            self._add_drafts(batch, self._speculation)
        return batch

    def _postpone(self, batch: Batch) -> None:
        """Choose the prompts that wait until others are computed. Where flows meet, none does."""
        config = self._config
        has_seat = len(self.running) < config.max_num_seqs
        prompts = (
            each
            for each in chain(self.running, self.waiting if has_seat else ())
            if each.num_missing > 1 and _is_ready(each)
        )
        batch.line = list(islice(prompts, config.max_num_seqs))
        if config.first_token_s is None or not batch.line or len(self._flows) > 1:
            return
        at_most = [_prompt(each, _num_before(each)) for each in batch.line]
        if not postponed(config, self._cost, at_most, self._now):
            return  # even without what is cached of them
        line = [self._prompt(each, batch) for each in batch.line]
        num_streams = sum(each.num_missing == 1 for each in self.running)
        found = postponement(config, self._cost, line, num_streams, self._now)
        batch.most_late, batch.is_crowded = found.most_late, found.is_crowded
        batch.postponed = {batch.line[place].sequence_id for place in found.places}

    @property
    def _is_idle(self) -> bool:
        """Whether no step is in flight."""
        return not any(sequence.steps for sequence in self.running)

    def _fill(self, batch: Batch) -> None:
        self._continue_running(batch)
        self._admit_waiting(batch)
        if self.waiting and len(self._flows) > 1:
            self._admit_due(batch)

    # ------------------------------------------------------------ running

    def _continue_running(self, batch: Batch) -> None:
        ready = [sequence for sequence in self.running if _is_ready(sequence)]
        ready.sort(key=lambda one: turn_of(one, batch.share))  # stable: in rank order already
        for sequence in ready:
            if batch.budget == 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue  # it yielded to an earlier one in this very loop
            if sequence.sequence_id in batch.postponed or self._waits_for_streams(sequence, batch):
                continue
            if batch.most(sequence, 1) and self._grow(sequence, batch):
                self._give(sequence, batch)

    def _give(self, sequence: Sequence, batch: Batch) -> None:
        """Add to the step what it may compute of a running sequence."""
        config = self._config
        most = config.max_chunk_tokens
        if config.num_stages > 1:
            most_streams = -(-batch.num_running_streams // config.num_stages)
            if sequence.num_missing == 1 and len(batch.streams) >= most_streams:
                return  # a later step takes it, while this one is at its second stage
            computed = _num_before(sequence)
            most = chunk_sizes(self._cost, most, computed, sequence.num_unplanned)[0]
        most = batch.most(sequence, most)
        if batch.most_late is not None and sequence.num_missing > 1 and not batch.is_crowded:
            most = min(most, batch.most_late)
        time = self._prompt_time(sequence, batch) if most else None
        if time is not None:
            most = min(most, sequence.num_unplanned, batch.budget)
            most = time.take(most, _num_before(sequence), batch.is_limited(sequence))
        if most:
            self._take_turn(sequence)
            batch.give(sequence, most)

    def _take_turn(self, sequence: Sequence) -> None:
        self._num_turns += 1
        sequence.last_turn = self._num_turns

    def _prompt_time(self, sequence: Sequence, batch: Batch) -> PromptTime | None:
        """Return what the step's streams leave for prompts, or None if the sequence is not limited
        by it. In a pipeline, streams that wait behind the step count too. A target limits no
        sequence where flows meet, because a prompt of one must not wait for the streams of another.
        """
        if sequence.num_missing == 1 or not (batch.streams or batch.num_running_streams):
            return None
        if self._config.max_gap_is_target and len(self._flows) > 1:
            return None
        if batch.prompt_time is None and self._config.max_gap_s is not None:
            streams = [_stream(batch.shares[each][0]) for each in batch.streams]
            longest = max((each.num_tokens for each in batch.line), default=0)
            prompts = (
                self._prompt(each, batch)
                for each in batch.line
                if batch.most_late is None and each.sequence_id not in batch.postponed
            )
            batch.prompt_time = prompt_time(
                self._config, self._cost, streams, longest, prompts, self._now, batch.is_crowded
            )
            if not batch.streams and self._is_idle:
                batch.prompt_time.may_wait = False  # no step would end, and plan the next
        return batch.prompt_time

    def _waits_for_streams(self, sequence: Sequence, batch: Batch) -> bool:
        """Return whether the streams and prompts of a step leave a prompt no time in it."""
        time = self._prompt_time(sequence, batch)
        is_limited = batch.is_limited(sequence)
        if time is None or time.is_used_up(is_limited):
            return time is not None
        if not time.may_wait:
            return False
        prompt = self._prompt(sequence, batch)
        return time.is_too_short(prompt.num_tokens, prompt.num_before, is_limited)

    def _prompt(self, sequence: Sequence, batch: Batch) -> Prompt:
        """Return what a prompt has to compute beside what is cached."""
        known = batch.prompts.get(sequence.sequence_id)
        if known is None:
            cached = len(self._match(sequence)) * self._config.block_tokens
            known = _prompt(sequence, max(cached, _num_before(sequence)))
            batch.prompts[sequence.sequence_id] = known
        return known

    def _grow(self, sequence: Sequence, batch: Batch) -> bool:
        """Allocate pages for the known tokens of `sequence`. Returns False when it must miss this
        step.
        """
        config, num_tokens = self._config, sequence.num_tokens
        if len(sequence.pages) * config.block_tokens >= num_tokens < config.max_model_len:
            return True
        if self._fail_if_too_long(sequence, batch):
            return False
        num_pages = config.num_pages(num_tokens) - len(sequence.pages)
        while num_pages > 0:
            pages = self._pool.allocate(num_pages)
            if pages is not None:
                sequence.pages += pages
                break
            victim = self._yielding_to(sequence, num_pages)
            if victim is None:
                return False
            self._preempt(victim, batch)
        return True

    # ------------------------------------------------------------ waiting

    def _admit_waiting(self, batch: Batch) -> None:
        blocked = False
        full: set[Flow] = set()
        """Flows whose next prompt has no room for one token: those behind it wait, too."""
        for sequence in list(self.waiting):
            if batch.budget == 0 or len(self.running) >= self._config.max_num_seqs:
                break
            if blocked and not sequence.pages:
                continue
            if sequence.sequence_id in batch.postponed or self._waits_for_streams(sequence, batch):
                continue
            if sequence.flow in full and not sequence.pages:
                continue
            if self._fail_if_too_long(sequence, batch):
                continue
            if sequence.num_missing > 1 and not batch.most(sequence, 1):
                if not sequence.pages:
                    full.add(sequence.flow)
                continue
            if not self._admit(sequence, [], batch, allocate=not blocked):
                blocked = True

    def _admit_due(self, batch: Batch) -> None:
        """Admit sequences of flows below their share. They take what other flows hold above theirs,
        the last in order first.
        """
        standing = self.standing()
        refused: set[Flow] = set()
        for sequence in list(self.waiting):
            flow = sequence.flow
            if flow in refused or batch.budget == 0 or self._waits_for_streams(sequence, batch):
                continue
            if self._fail_if_too_long(sequence, batch):
                continue
            victims = self._yielding_to_due(sequence, standing)
            seat = next((one for one in victims if one.state is SequenceState.RUNNING), None)
            if not victims:
                refused.add(flow)
            elif self._admit(sequence, victims, batch, allocate=True, seat=seat):
                standing = self.standing()
            else:
                refused.add(flow)

    def _yielding_to_due(self, sequence: Sequence, standing: Standing) -> list[Sequence]:
        """Return the sequences above their flows' shares that yield to a waiting sequence, the last
        in order first. Returns none when its flow would get more than its own share, or when all
        seats are taken and none of these sequences has one.
        """
        num_pages = self._config.num_pages(sequence.num_tokens) - len(sequence.pages)
        if not standing.is_within(sequence.flow, 1, max(0, num_pages)):
            return []
        victims = standing.above(self._holders(), sequence.flow)
        has_seat = any(one.state is SequenceState.RUNNING for one in victims)
        is_full = len(self.running) >= self._config.max_num_seqs
        return victims if has_seat or not is_full else []

    def reclaim(
        self, flow: Flow, num_pages: int, outside: Mapping[Flow, int]
    ) -> list[Sequence] | None:
        """Make sure that `num_pages` can be allocated for a flow that is below its share. If
        necessary, preempt what others hold above theirs. Returns what was preempted, or None if
        nothing was done.

        outside: pages that flows hold outside of this batcher.
        """
        standing = self.standing(flow, outside)
        if not standing.is_within(flow, 0, num_pages):
            return None
        victims = standing.above(self._holders(), flow)
        batch = Batch(budget=0)
        if self._pool.num_available + self._num_freed_by(victims) < num_pages:
            return None
        for victim in victims:
            if self._pool.num_available >= num_pages:
                break
            self._preempt(victim, batch)
        return batch.preempted

    def is_shared_with(self, flow: Flow, outside: Mapping[Flow, int]) -> bool:
        """Return whether other flows have sequences here, or pages outside."""
        return len(self._flows.keys() | outside.keys() | {flow}) > 1

    def standing(
        self, flow: Flow | None = None, outside: Mapping[Flow, int] = MappingProxyType({})
    ) -> Standing:
        """Return what each flow holds and is due, counting `flow` as one that wants a share.

        outside: pages that flows hold outside of this batcher.
        """
        return Standing(self._config, (*self.running, *self.waiting), flow, outside)

    def due(self, standing: Standing) -> list[tuple[Sequence, int]]:
        """Return the sequences that are due pages before others, and how many pages; see
        `Engine.due`.
        """
        found: dict[Flow, tuple[Sequence, int]] = {}
        for sequence in self.waiting:
            num_pages = self._config.num_pages(sequence.num_tokens) - len(sequence.pages)
            found.setdefault(sequence.flow, (sequence, num_pages))
        return [
            (sequence, num_pages)
            for flow, (sequence, num_pages) in found.items()
            if num_pages > 0
            and standing.is_within(flow, 0, num_pages)
            and standing.others_above(flow)
        ]

    def claim(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its pages. Returns False when there are not enough."""
        return self._take_pages(sequence, [], Batch(budget=0), allocate=True)

    def _admit_by_force(self, batch: Batch) -> None:
        """Run the front of the queue at the cost of all sequences behind it (rule 4)."""
        if not self.waiting or self._fail_if_too_long(self.waiting[0], batch):
            return
        front = self.waiting[0]
        victims = [other for other in self._holders() if rank(other) > rank(front)]
        if len(self.running) >= self._config.max_num_seqs:
            last = self.running[-1]
            if rank(last) < rank(front):
                return
            self._preempt(last, batch)
            victims.remove(last)
        self._admit(front, victims, batch, allocate=True)

    def _admit(
        self,
        sequence: Sequence,
        victims: list[Sequence],
        batch: Batch,
        *,
        allocate: bool,
        seat: Sequence | None = None,
    ) -> bool:
        """Move `sequence` to the running batch with pages for its known tokens, from the cache, the
        pool, or `victims` (the last first). Returns False, with nothing changed, when that is not
        possible now.

        allocate: False: move it only if it needs no new page. seat: the sequence that gives up its
        seat when all are taken.
        """
        if not self._take_pages(sequence, victims, batch, allocate=allocate):
            return False
        if seat is not None and len(self.running) >= self._config.max_num_seqs:
            self._unseat(seat, batch)
        self.waiting.remove(sequence)
        sequence.state = SequenceState.RUNNING
        self._take_turn(sequence)
        insort(self.running, sequence, key=rank)
        batch.num_running_streams += sequence.num_missing == 1
        self._give(sequence, batch)
        return True

    def _take_pages(
        self, sequence: Sequence, victims: list[Sequence], batch: Batch, *, allocate: bool
    ) -> bool:
        """Give a waiting sequence pages for its known tokens, under the rules of `_admit`."""
        config = self._config
        matched = self._match(sequence)
        num_pages = config.num_pages(sequence.num_tokens) - len(sequence.pages) - len(matched)
        if num_pages > 0:
            if not allocate:
                return False
            self._pool.hold(matched)
            if not self._make_room(num_pages, victims, batch):
                self._pool.release(matched)
                return False
            sequence.pages += matched + (self._pool.allocate(num_pages) or [])
        else:
            self._pool.hold(matched)
            sequence.pages += matched
        if matched:
            sequence.num_computed = len(matched) * config.block_tokens
            sequence.num_published = len(matched)
            if sequence.num_preemptions == 0:
                reused = min(sequence.num_computed, len(sequence.prompt_tokens))
                sequence.num_cached_tokens = reused
        return True

    def _match(self, sequence: Sequence) -> list[int]:
        """Return the cached pages that `sequence` can reuse: whole blocks, but never the one with
        its last known token, which must be computed to sample the next.
        """
        if sequence.pages:
            return []
        if sequence.prompt_logprobs is not None:
            return []  # log-probabilities of the prompt come only from computing it
        limit = (sequence.num_tokens - 1) // self._config.block_tokens
        return self._pool.match(sequence.keys[:limit])

    def _make_room(self, num_pages: int, victims: list[Sequence], batch: Batch) -> bool:
        """Make sure that `num_pages` can be allocated. If necessary, preempt `victims`, the last
        first. Returns False, with nothing changed, when that is impossible.
        """
        reserve = self._num_kept({victim.sequence_id for victim in victims})
        if self._pool.num_available >= num_pages + reserve:
            return True
        if self._pool.num_available + self._num_freed_by(victims) < num_pages + reserve:
            return False
        for victim in sorted(victims, key=rank, reverse=True):
            self._preempt(victim, batch)
            if self._pool.num_available >= num_pages + reserve:
                break
        return True

    def _num_kept(self, yielding: Set[int] = frozenset()) -> int:
        """Return how many pages stay free for running sequences that will grow, except those that
        yield.
        """
        return sum(
            len(other.pages) < self._config.num_pages(other.num_final_computed)
            for other in self.running
            if other.sequence_id not in yielding
        )

    def admissible(self) -> Iterable[Sequence]:
        """Yield the waiting sequences that could be admitted now. These are, of each flow, the
        sequences up to the first one without a seat or pages, beside what running sequences will
        take. If a flow is below its share, this includes the first one for which others would
        yield. Each sequence is looked at as if none went before it.
        """
        has_seats = len(self.running) < self._config.max_num_seqs
        num_free = self._pool.num_available - self._num_kept()
        standing: Standing | None = None
        refused: set[Flow] = set()
        num_of: Counter[Flow] = Counter()
        for sequence in self.waiting:
            if num_of[sequence.flow] >= self._config.max_num_seqs:
                continue
            num_of[sequence.flow] += 1
            num_pages = self._config.num_pages(sequence.num_tokens) - len(sequence.pages)
            if sequence.flow in refused and (num_pages > 0 or not has_seats):
                continue
            if not has_seats or (num_pages > 0 and not self._has_pages(sequence, num_free)):
                refused.add(sequence.flow)
                standing = standing or self.standing()
                if not self._yielding_to_due(sequence, standing):
                    continue
            yield sequence

    def _has_pages(self, sequence: Sequence, num_free: int) -> bool:
        """Return whether `num_free` free pages are enough for a waiting sequence. Pages of its
        prefix that other sequences hold need not be free.
        """
        num_pages = self._config.num_pages(sequence.num_tokens) - len(sequence.pages)
        if num_pages > num_free:
            num_pages -= sum(self._pool.ref_count(page) > 0 for page in self._match(sequence))
        return num_pages <= num_free

    # ------------------------------------------------------------ drafts

    def _add_drafts(self, batch: Batch, speculation: Speculation) -> None:
        candidates = [
            (sequence, self._most_drafts(sequence))
            for sequence, num_tokens in batch.shares.values()
            if num_tokens == sequence.num_missing == 1 and not batch.is_limited(sequence)
        ]
        if batch.budget == 0 or not any(most for _, most in candidates):
            return
        num_rows = self._config.max_batched_tokens - batch.budget
        chosen = speculation.choose(candidates, num_rows, batch.budget)
        for sequence, _ in candidates:
            drafts = chosen.get(sequence.sequence_id, [])
            drafts = drafts[: self._room_for(sequence, len(drafts))]
            if drafts:
                batch.drafts[sequence.sequence_id] = drafts
                batch.budget -= len(drafts)
                if batch.share is not None:
                    batch.share.take_drafts(len(drafts))

    def _most_drafts(self, sequence: Sequence) -> int:
        """Return how many drafts could be accepted: one more token is sampled after the last of
        them.
        """
        if sequence.prompt_logprobs is not None:
            return 0
        num_left = sequence.max_new_tokens - len(sequence.output_tokens)
        num_left = min(num_left, self._config.max_model_len - sequence.num_tokens)
        return max(0, num_left - 1)

    def _room_for(self, sequence: Sequence, num_drafts: int) -> int:
        """Return for how many of `num_drafts` drafts there are pages. It allocates free pages that
        no running sequence will need for its next token.
        """
        config = self._config
        num_pages = config.num_pages(sequence.num_tokens + num_drafts) - len(sequence.pages)
        if num_pages > 0 and self._pool.num_available - num_pages >= len(self.running):
            sequence.pages += self._pool.allocate(num_pages) or []
        room = len(sequence.pages) * config.block_tokens - sequence.num_tokens
        return min(num_drafts, room)

    # ------------------------------------------------------------ giving way

    def _yielding_to(self, sequence: Sequence, num_pages: int) -> Sequence | None:
        """Return the sequence that gives pages to a running one which needs `num_pages`, or None.

        Whatever the shares are, the first sequence in order always finds one while others hold
        pages, so there is always progress.
        """
        later = [other for other in self._holders() if rank(other) > rank(sequence)]
        if len(self._flows) == 1:
            return last_in_order(later)
        standing, flow = self.standing(), sequence.flow
        if standing.is_within(flow, 0, num_pages):
            above = standing.above(self._holders(), flow)
            return above[0] if above else last_in_order(later)
        alike = [one for one in later if one.flow == flow or not standing.is_within(one.flow)]
        is_first = all(one.flow != flow or rank(one) >= rank(sequence) for one in self.running)
        return last_in_order(alike or (later if is_first else []))

    def _holders(self) -> Iterable[Sequence]:
        """Yield the sequences whose pages could be taken back now."""
        for sequence in self.running:
            if not sequence.steps:
                yield sequence
        for sequence in self.waiting:
            if sequence.pages:
                yield sequence

    def _num_freed_by(self, victims: list[Sequence]) -> int:
        """Return how many pages become free if all `victims` yield: those that no other sequence
        holds.
        """
        holds = Counter(page for victim in victims for page in victim.pages)
        return sum(self._pool.ref_count(page) == count for page, count in holds.items())

    def _preempt(self, victim: Sequence, batch: Batch) -> None:
        self._pool.release(victim.drop_kv())
        victim.num_preemptions += 1
        victim.waits_since_s = self._now
        batch.take_back(victim)
        batch.preempted.append(victim)
        if victim.state is SequenceState.RUNNING:
            self.running.remove(victim)
            self._wait(victim)

    def _unseat(self, victim: Sequence, batch: Batch) -> None:
        """Move a running sequence to the waiting queue; it keeps its pages."""
        batch.take_back(victim)
        batch.preempted.append(victim)
        self.running.remove(victim)
        self._wait(victim)

    def _fail_if_too_long(self, sequence: Sequence, batch: Batch) -> bool:
        """Fail a sequence that would never fit, however long it waited; True if it failed."""
        config = self._config
        if sequence.num_tokens >= config.max_model_len:
            message = (
                f"the sequence has {sequence.num_tokens} tokens; with max_model_len "
                f"{config.max_model_len} no further one can be generated"
            )
        elif config.num_pages(sequence.num_tokens) > config.num_blocks:
            message = (
                f"{sequence.num_tokens} tokens need {config.num_pages(sequence.num_tokens)} blocks "
                f"of {config.block_tokens}, this worker's KV memory has {config.num_blocks}; "
                "shorten the request or give the worker more KV memory"
            )
        else:
            return False
        self.remove(sequence)
        failure = Failure(
            status=ContextTooLong.http_status,
            error_type=ContextTooLong.error_type,
            message=message,
        )
        batch.failed.append((sequence, failure))
        return True


def _is_ready(sequence: Sequence) -> bool:
    """Whether a running sequence may get a share: it has tokens left to plan and is neither aborted
    nor failed.
    """
    return sequence.num_unplanned > 0 and not sequence.aborted and sequence.failure is None


def _is_batch(sequence: Sequence) -> bool:
    kind, _ = sequence.flow
    return kind is Priority.BATCH


def _prompt(sequence: Sequence, num_before: int) -> Prompt:
    num_tokens = sequence.num_tokens - num_before
    return Prompt(sequence.waits_since_s, num_tokens, num_before, _is_batch(sequence))


def _stream(sequence: Sequence) -> Stream:
    allowance = None if _is_batch(sequence) else sequence.allowance
    return Stream(_num_before(sequence), len(sequence.output_tokens), allowance)


def _num_before(sequence: Sequence) -> int:
    """Return how many tokens of a sequence are computed or in flight, before its next share."""
    return sequence.num_computed + sequence.num_in_flight

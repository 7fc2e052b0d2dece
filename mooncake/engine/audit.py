"""Integrity checks of an engine's sequences and pages, valid between two calls. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from mooncake.engine.block_pool import BlockPool
from mooncake.engine.config import EngineConfig
from mooncake.engine.sequence import Sequence, SequenceState, rank


def check_queues(
    config: EngineConfig,
    waiting: Seq[Sequence],
    running: Seq[Sequence],
    live: Mapping[int, Sequence],
) -> None:
    """Raise AssertionError unless each live sequence is in its queue once, in rank order."""
    ids = [sequence.sequence_id for sequence in (*waiting, *running)]
    if sorted(ids) != sorted(live):
        raise AssertionError("queue and batch do not hold each live sequence once")
    for queue, state in ((waiting, SequenceState.WAITING), (running, SequenceState.RUNNING)):
        if any(sequence.state is not state for sequence in queue):
            raise AssertionError(f"a sequence in the wrong state is among the {state.value}")
        if list(queue) != sorted(queue, key=rank):
            raise AssertionError(f"the {state.value} sequences are out of order")
    if len(running) > config.max_num_seqs:
        raise AssertionError(f"{len(running)} sequences run, more than max_num_seqs")


def check_steps(live: Iterable[Sequence], in_flight: Mapping[int, Iterable[Sequence]]) -> None:
    """Raise AssertionError unless sequences and steps in flight refer to each other."""
    steps_of: dict[int, list[int]] = {}
    for step_id, sequences in in_flight.items():
        for sequence in sequences:
            steps_of.setdefault(sequence.sequence_id, []).append(step_id)
    for sequence in live:
        name = f"sequence {sequence.sequence_id}"
        if sequence.steps != steps_of.pop(sequence.sequence_id, []):
            raise AssertionError(f"{name} is not in the steps that it names")
        if bool(sequence.steps) != bool(sequence.num_in_flight) or sequence.num_unplanned < 0:
            raise AssertionError(f"{name}: {sequence.num_in_flight} tokens cannot be in flight")
    if steps_of:
        raise AssertionError(f"sequences {sorted(steps_of)} ended while a step computes them")


def check_pages(config: EngineConfig, pool: BlockPool, live: Iterable[Sequence]) -> None:
    """Raise AssertionError unless computed tokens have pages, and no page that will be written to
    is shared or published.
    """
    writers: Counter[int] = Counter()
    for sequence in live:
        name = f"sequence {sequence.sequence_id}"
        if len(sequence.pages) * config.block_tokens < sequence.num_computed:
            raise AssertionError(f"{name} lacks pages for its KV")
        if len(set(sequence.pages)) != len(sequence.pages):
            raise AssertionError(f"{name} has a page twice")
        writers.update(sequence.pages[sequence.num_computed // config.block_tokens :])
    for page, count in writers.items():
        if count > 1 or pool.key_of(page) is not None:
            raise AssertionError(f"page {page} is to be written to but does not belong to one")


def check_holds(
    pool: BlockPool, owners: Iterable[Sequence], role_holds: Iterable[int] | None
) -> None:
    """Raise AssertionError unless the pool's references are those of `owners` and, where given,
    exactly those plus `role_holds`.
    """
    holds = Counter(page for sequence in owners for page in sequence.pages)
    if role_holds is not None:
        holds.update(role_holds)
    counts = pool.references()
    if counts == holds:
        return
    for page in sorted(counts.keys() | holds.keys()):
        refs = counts.get(page, 0)
        if refs < holds[page] or (role_holds is not None and refs != holds[page]):
            raise AssertionError(f"page {page} is held {refs} times, {holds[page]} are known")

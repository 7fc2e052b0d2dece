"""What the lead tells its followers: every plan comes out as it went in, in few bytes."""

from __future__ import annotations

import random

import pytest

from mooncake.base import InternalError, KvLayout, PageArray
from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.step_log import (
    Held,
    RankStep,
    StepReader,
    StepWriter,
    UsePages,
    decode,
    encode,
)


def slot(
    sequence: int, start: int, tokens: list[int], pages: list[int], *, sample: bool = True
) -> StepSlot:
    return StepSlot(sequence_id=sequence, start=start, tokens=tokens, pages=pages, sample=sample)


def carried(writer: StepWriter, reader: StepReader, slots: list[StepSlot]) -> list[StepSlot]:
    message = decode(encode(writer.pack(slots, {})))
    assert isinstance(message, RankStep)
    return reader.slots(message)


def test_plans_come_out_as_they_went_in() -> None:
    """Sequences grow, end, and begin anew with other pages, as after a preemption."""
    choose = random.Random(3)
    writer, reader = StepWriter(), StepReader()
    tables: dict[int, list[int]] = {}
    for _ in range(300):
        for sequence in list(tables):
            if choose.random() < 0.05:
                writer.forget([sequence])
                del tables[sequence]
        slots = []
        for sequence in choose.sample(range(2**40, 2**40 + 12), 4):
            table = tables.setdefault(sequence, [])
            table += [choose.randrange(2**31) for _ in range(choose.randrange(3))]
            tokens = [choose.randrange(2**18) for _ in range(choose.randrange(1, 5))]
            start, sample = choose.randrange(2**20), choose.random() < 0.5
            slots.append(slot(sequence, start, tokens, list(table), sample=sample))
        assert carried(writer, reader, slots) == slots
        reader.check(writer.held)


def test_a_follower_keeps_nothing_of_what_has_ended() -> None:
    writer, reader = StepWriter(), StepReader()
    carried(writer, reader, [slot(1, 0, [5], [7]), slot(2, 0, [6], [8])])
    writer.forget([1, 3])
    carried(writer, reader, [slot(2, 1, [6], [8])])
    reader.check(writer.held)
    assert writer.held.num_pages == {2: 1}
    assert writer.pack([], {}).forgotten == [], "said once"


def test_a_step_that_does_not_follow_is_refused() -> None:
    writer, reader = StepWriter(), StepReader()
    carried(writer, reader, [slot(1, 0, [5], [7])])
    writer.pack([slot(1, 1, [6], [7, 8])], {})
    with pytest.raises(InternalError, match="step 3 came instead of 2"):
        carried(writer, reader, [slot(1, 2, [6], [7, 8])])
    reader.check(Held(1, {1: 1}))  # nothing of it was taken


def test_a_decode_step_of_64_takes_less_than_2_kb_whatever_the_context() -> None:
    for num_pages in (1, 64, 2048):
        writer = StepWriter()
        tables = [list(range(n * 4096, n * 4096 + num_pages)) for n in range(64)]
        writer.pack([slot(n, 0, [1], table) for n, table in enumerate(tables)], {})
        grown = [[*table, 9] for table in tables]  # every one has come to a new page
        message = writer.pack([slot(n, 5, [1], table) for n, table in enumerate(grown)], {})
        assert len(encode(message)) <= 2048


def test_which_rows_of_prompts_are_wanted_is_carried() -> None:
    message = StepWriter().pack([slot(1, 0, [5, 6, 7], [7])], {1: 2})
    found = decode(encode(message))
    assert found == message
    assert isinstance(found, RankStep)
    assert found.logprob_rows == {1: 2}


def test_pages_are_named_by_their_layout() -> None:
    layout = KvLayout(num_layers=2, block_tokens=4, kv_width=8, dtype="float32", fingerprint="x")
    message = UsePages(PageArray(layout, 12), 3)
    assert decode(encode(message)) == message

"""What a lead says and when all its ranks end."""

from __future__ import annotations

import pytest

from mooncake.base import InternalError, KvLayout, PageArray
from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.rank_group import LeadRanks
from mooncake.engine.ranks.step_log import Held, RankMessage, RankStep, StepReader, UsePages

LAYOUT = KvLayout(num_layers=2, block_tokens=4, kv_width=8, dtype="float32", fingerprint="x")
PAGES = UsePages(PageArray(LAYOUT, 12), None)


class Heard:
    """Followers that keep what they are told."""

    def __init__(self) -> None:
        self.messages: list[RankMessage] = []
        self.num_ends = 0

    def tell(self, message: RankMessage) -> None:
        self.messages.append(message)

    def end(self) -> None:
        self.num_ends += 1


def slots(num_pages: int) -> list[StepSlot]:
    pages = list(range(num_pages))
    return [StepSlot(sequence_id=1, start=0, tokens=[5], pages=pages, sample=True)]


def test_new_pages_begin_the_log_anew() -> None:
    heard = Heard()
    lead = LeadRanks(heard)
    for _ in range(2):
        lead.use_pages(PAGES)
        lead.step(slots(2), {})
        lead.step(slots(3), {})
    numbers = [each.number if isinstance(each, RankStep) else 0 for each in heard.messages]
    assert numbers == [0, 1, 2, 0, 1, 2]
    assert heard.messages[1] == heard.messages[4], "all pages are new again"


def test_the_first_loss_is_the_reason_and_ends_all_once() -> None:
    heard = Heard()
    lead = LeadRanks(heard)
    assert lead.lost is None
    lead.gone(2)
    lead.gone(1)
    lead.fail("step 7: no memory")
    assert lead.lost == "rank 2 of this model has ended"
    assert heard.num_ends == 1


def test_a_follower_that_falls_silent_is_named() -> None:
    heard = Heard()
    lead = LeadRanks(heard)
    lead.check_signs(1000.0, 10.0)
    assert lead.lost is None, "none has given its first sign"
    for now in (1000.0, 1004.0):
        lead.alive(1, now)
    lead.alive(2, 1001.0)
    lead.check_signs(1011.0, 10.0)
    assert lead.lost is None
    lead.check_signs(1011.5, 10.0)
    assert lead.lost == "rank 2 of this model gave no sign of life for 10 s"
    lead.check_signs(1099.0, 10.0)
    assert heard.num_ends == 1


def test_a_follower_that_holds_something_else_is_found() -> None:
    heard = Heard()
    lead = LeadRanks(heard)
    lead.use_pages(PAGES)
    reader = StepReader()
    lead.step(slots(2), {})
    lead.check_integrity([1])
    lead.forget([1])
    lead.check_integrity([1])  # followers will hear of it with the next step
    _, step, *checks = heard.messages
    assert isinstance(step, RankStep)
    for held in checks:
        assert isinstance(held, Held)
        with pytest.raises(InternalError, match="step 1 came instead of 0"):
            reader.check(held)
    reader.slots(step)
    for held in checks:
        assert isinstance(held, Held)
        reader.check(held)
        reader._pages[1].append(9)
        with pytest.raises(AssertionError, match=r"a follower holds \{1: 3\}, its lead \{1: 2\}"):
            reader.check(held)
        reader._pages[1].pop()


def test_pages_of_a_sequence_that_has_ended_are_found() -> None:
    lead = LeadRanks(Heard())
    lead.use_pages(PAGES)
    lead.step(slots(2), {})
    lead.check_integrity([1, 2])
    with pytest.raises(AssertionError, match=r"have ended: \[1\]"):
        lead.check_integrity([2])

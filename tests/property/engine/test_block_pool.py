"""The block pool against a plain model, under any order of calls."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake.engine.block_pool import BlockPool
from tests.support.examples import examples

KEYS = [bytes([number]) * 16 for number in range(10)]
NUM_BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """The model: a list of holds, a map of content, and the order in which content was released."""

    num_homes = 1

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, self.num_homes)
        self.holds: list[list[int]] = []
        self.content: dict[bytes, int] = {}
        self.reader: set[bytes] = set()  # what one who only sees events believes
        self.released: list[int] = []

    def refs(self, page: int) -> int:
        return sum(pages.count(page) for pages in self.holds)

    def cached(self) -> list[int]:
        return [page for page in self.released if page in self.content.values()]

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        used = {page for pages in self.holds for page in pages}
        cached = self.cached()
        num_plain = NUM_BLOCKS - len(used) - len(cached)
        pages = self.pool.allocate(count)
        if count > num_plain + len(cached):
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == count
        assert not set(pages) & used
        reused = [page for page in pages if page in cached]
        assert reused == cached[: max(0, count - num_plain)], "oldest content first, if at all"
        self.content = {key: page for key, page in self.content.items() if page not in reused}
        self.released = [page for page in self.released if page not in pages]
        self.holds.append(pages)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.pool.release(pages)
        for page in reversed(pages):
            if self.refs(page) == 0:
                self.released = [other for other in self.released if other != page] + [page]

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
    def match_and_hold(self, keys: list[bytes]) -> None:
        pages = self.pool.match(keys)
        want = []
        for key in keys:
            if key not in self.content:
                break
            want.append(self.content[key])
        assert pages == want
        self.pool.hold(pages)
        self.holds.append(pages)
        self.released = [page for page in self.released if page not in pages]

    @precondition(lambda self: any(self.holds))
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        held = sorted({page for pages in self.holds for page in pages})
        page = data.draw(st.sampled_from(held))
        if page in self.content.values():
            return
        assert self.pool.publish(key, page) == (key not in self.content)
        self.content.setdefault(key, page)

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key: bytes) -> None:
        self.pool.forget(key)
        page = self.content.pop(key, None)
        self.released = [other for other in self.released if other != page]

    @rule()
    def read_events(self) -> None:
        stored, removed = self.pool.drain_events()
        assert not set(stored) & set(removed)
        self.reader = (self.reader | set(stored)) - set(removed)
        assert self.reader == set(self.content)

    @invariant()
    def figures_agree(self) -> None:
        self.pool.check_integrity()
        used = {page for pages in self.holds for page in pages}
        assert self.pool.num_held == len(used)
        assert self.pool.num_cached == len(self.cached())
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_held == NUM_BLOCKS
        assert all(self.pool.ref_count(page) == self.refs(page) for page in range(NUM_BLOCKS))
        assert sorted(self.pool.inventory()) == sorted(self.content)


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)

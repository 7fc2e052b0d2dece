"""Whatever happens to batches on their way by pinned memory, every slot and window comes back."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake.transfer.backends.inproc import InprocFabric
from mooncake.transfer.engine import Op, TransferOp
from mooncake.transfer.staging.slots import FairSlots
from tests.support.device_pair import Side, batch, until

SIZE = 20_000


class SlotsMachine(RuleBasedStateMachine):
    """Slots beside a plain model: each asker has its turn, none is served twice for one ask."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = FairSlots(3)
        self.turns: list[str] = []
        self.asks: dict[str, int] = {}
        self.granted: deque[tuple[str, int]] = deque()
        self.resting: list[int] = []

    @rule(who=st.sampled_from("abc"), count=st.integers(1, 3))
    def ask(self, who: str, count: int) -> None:
        for _ in range(count):
            if not self.asks.get(who):
                self.turns.append(who)
            self.asks[who] = self.asks.get(who, 0) + 1
            self.slots.ask(who, lambda slot: self.on_grant(who, slot))

    def on_grant(self, who: str, slot: int) -> None:
        assert who == self.turns.pop(0), "out of turn"
        self.asks[who] -= 1
        if self.asks[who]:
            self.turns.append(who)
        assert slot not in [held for _, held in self.granted] + self.resting
        self.granted.append((who, slot))

    @rule(who=st.sampled_from("abc"))
    def forget(self, who: str) -> None:
        self.slots.forget(who)
        self.asks[who] = 0
        self.turns = [each for each in self.turns if each != who]

    @rule(rests=st.booleans())
    def end(self, rests: bool) -> None:
        if not self.granted:
            return
        _, slot = self.granted.popleft()
        if rests:
            self.resting.append(slot)
            self.slots.rest(slot)
        else:
            self.slots.release(slot)

    @rule()
    def wake(self) -> None:
        if self.resting:
            self.slots.wake(self.resting.pop(0))

    @invariant()
    def books_agree(self) -> None:
        self.slots.check_integrity()
        assert self.slots.num_held == len(self.granted)
        assert self.slots.num_resting == len(self.resting)
        assert self.slots.num_asks == sum(self.asks.values())


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class StagingMachine(RuleBasedStateMachine):
    """Two engines with devices that copy when told to; a third visits and is lost, again and again.

    Threads move the bytes, so a rule says what happens and never when. At the end everything is let
    go and each batch must have ended once, nothing held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fabric = InprocFabric()
        self.sides = [Side(name, self.fabric, ("tcp",)) for name in ("a", "b")]
        self.regions = [side.device(SIZE, seed) for seed, side in enumerate(self.sides)]
        self.hosts = [side.host(SIZE, 7) for side in self.sides]
        self.open: list[set[int]] = [set(), set()]
        self.visitor: Side | None = None
        self.num_visitors = 0
        for side in self.sides:
            side.memories[0].hold()

    @rule(
        who=st.integers(0, 1),
        op=st.sampled_from(Op),
        ends=st.sampled_from(["both", "ours", "theirs"]),
        offset=st.integers(0, 5_000),
        size=st.integers(1, SIZE - 5_001),
    )
    def submit(self, who: int, op: Op, ends: str, offset: int, size: int) -> None:
        if len(self.open[who]) >= 4:
            return
        local = self.hosts[who] if ends == "theirs" else self.regions[who]
        remote = self.hosts[1 - who] if ends == "ours" else self.regions[1 - who]
        piece = TransferOp(local.region_id, offset, remote.region_id, offset + 1, size)
        self.open[who].add(self.sides[who].transfer.submit(batch(self.sides[1 - who], op, [piece])))

    @rule(who=st.integers(0, 1), count=st.integers(1, 4))
    def copies_end(self, who: int, count: int) -> None:
        for _ in range(count):
            self.sides[who].memories[0].release_one()

    @rule(who=st.integers(0, 1))
    def a_copy_fails(self, who: int) -> None:
        memory = self.sides[who].memories[0]
        memory.fails = lambda _kind: "broken"
        memory.release_one()
        memory.fails = lambda _kind: None

    @rule(who=st.integers(0, 1))
    def cancel(self, who: int) -> None:
        if self.open[who]:
            self.sides[who].transfer.cancel(min(self.open[who]))

    @rule(op=st.sampled_from(Op))
    def a_visitor_comes(self, op: Op) -> None:
        if self.visitor is not None or self.num_visitors == 2:
            return
        self.num_visitors += 1
        self.visitor = visitor = Side(f"visitor{self.num_visitors}", self.fabric, ("tcp",))
        mine = visitor.host(SIZE)
        piece = TransferOp(mine.region_id, 0, self.regions[0].region_id, 0, SIZE)
        visitor.transfer.submit(batch(self.sides[0], op, [piece]))

    @rule()
    def the_visitor_is_lost(self) -> None:
        if self.visitor is not None:
            self.visitor.close()
            self.visitor = None

    @invariant()
    def books_add_up(self) -> None:
        for who, side in enumerate(self.sides):
            side.check()
            for done in side.transfer.poll():
                self.open[who].remove(done.batch_id)

    def teardown(self) -> None:
        self.the_visitor_is_lost()
        for side in self.sides:
            side.memories[0].release()
        until(lambda: not any(self.open), self.books_add_up)
        until(lambda: all(side.held() == (0, 0, 0) for side in self.sides))
        for side in self.sides:
            side.close()


TestStaging = StagingMachine.TestCase
TestStaging.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)

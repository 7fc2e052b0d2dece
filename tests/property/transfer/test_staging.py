"""Whatever happens to batches on their way by pinned memory, every slot and window comes back."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake.transfer.engine import Op, TransferOp
from mooncake.transfer.local import InprocFabric
from mooncake.transfer.staging.slots import FairSlots
from tests.support.examples import examples
from tests.support.transfer.device_pair import Side, batch, until

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

    @rule(asker=st.sampled_from("abc"), count=st.integers(1, 3))
    def ask(self, asker: str, count: int) -> None:
        for _ in range(count):
            if not self.asks.get(asker):
                self.turns.append(asker)
            self.asks[asker] = self.asks.get(asker, 0) + 1
            self.slots.ask(asker, lambda slot: self.on_grant(asker, slot))

    def on_grant(self, asker: str, slot: int) -> None:
        assert asker == self.turns.pop(0), "out of turn"
        self.asks[asker] -= 1
        if self.asks[asker]:
            self.turns.append(asker)
        assert slot not in [held for _, held in self.granted] + self.resting
        self.granted.append((asker, slot))

    @rule(asker=st.sampled_from("abc"))
    def forget(self, asker: str) -> None:
        self.slots.forget(asker)
        self.asks[asker] = 0
        self.turns = [each for each in self.turns if each != asker]

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
TestSlots.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


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
        self.client: Side | None = None
        self.num_clients = 0
        for side in self.sides:
            side.memories[0].hold()

    @rule(
        index=st.integers(0, 1),
        op=st.sampled_from(Op),
        ends=st.sampled_from(["both", "ours", "theirs"]),
        offset=st.integers(0, 5_000),
        size=st.integers(1, SIZE - 5_001),
    )
    def submit(self, index: int, op: Op, ends: str, offset: int, size: int) -> None:
        if len(self.open[index]) >= 4:
            return
        local = self.hosts[index] if ends == "theirs" else self.regions[index]
        remote = self.hosts[1 - index] if ends == "ours" else self.regions[1 - index]
        piece = TransferOp(local.region_id, offset, remote.region_id, offset + 1, size)
        self.open[index].add(
            self.sides[index].transfer.submit(batch(self.sides[1 - index], op, [piece]))
        )

    @rule(index=st.integers(0, 1), count=st.integers(1, 4))
    def copies_end(self, index: int, count: int) -> None:
        for _ in range(count):
            self.sides[index].memories[0].release_one()

    @rule(index=st.integers(0, 1))
    def a_copy_fails(self, index: int) -> None:
        memory = self.sides[index].memories[0]
        memory.fails = lambda _kind: "broken"
        memory.release_one()
        memory.fails = lambda _kind: None

    @rule(index=st.integers(0, 1))
    def cancel(self, index: int) -> None:
        if self.open[index]:
            self.sides[index].transfer.cancel(min(self.open[index]))

    @rule(op=st.sampled_from(Op))
    def a_client_comes(self, op: Op) -> None:
        if self.client is not None or self.num_clients == 2:
            return
        self.num_clients += 1
        self.client = client = Side(f"client{self.num_clients}", self.fabric, ("tcp",))
        mine = client.host(SIZE)
        piece = TransferOp(mine.region_id, 0, self.regions[0].region_id, 0, SIZE)
        client.transfer.submit(batch(self.sides[0], op, [piece]))

    @rule()
    def the_client_is_lost(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None

    @invariant()
    def books_add_up(self) -> None:
        for index, side in enumerate(self.sides):
            side.check()
            for done in side.transfer.poll():
                self.open[index].remove(done.batch_id)

    def teardown(self) -> None:
        self.the_client_is_lost()
        for side in self.sides:
            side.memories[0].release()
        until(lambda: not any(self.open), self.books_add_up)
        until(lambda: all(side.held() == (0, 0, 0) for side in self.sides))
        for side in self.sides:
            side.close()


TestStaging = StagingMachine.TestCase
TestStaging.settings = settings(max_examples=examples(40), stateful_step_count=15, deadline=None)

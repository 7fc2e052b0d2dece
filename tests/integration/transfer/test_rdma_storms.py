"""Everything fails at once, from a seed: all batches end, those that end well have every byte."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from mooncake.transfer.engine import Op, Region, TransferBatch, TransferOp
from mooncake.transfer.rdma.nic import Outcome, WorkRequest
from tests.support.transfer.driving import wait_for
from tests.support.transfer.fake_nics import FakeFabric, FakeNic
from tests.support.transfer.rdma_engines import KIB, Engine, engines_on, filled, until

NUM_OWNERS, NUM_CONNECTIONS, CONNECTION = 3, 24, 96 * KIB
"""Each batch has memory of its own at both ends: what it moved can be told."""


@dataclass
class Storm:
    """Engines, and what may go wrong with them."""

    rng: random.Random
    fabric: FakeFabric
    us: Engine
    owners: list[Engine]
    ours: list[Region] = field(default_factory=list)
    theirs: list[Region] = field(default_factory=list)
    batches: dict[int, tuple[int, int, Op]] = field(default_factory=dict)

    def fails(self, _nic: FakeNic, _request: WorkRequest) -> Outcome | None:
        chance = self.rng.random()
        if chance < 0.02:
            return Outcome.LINK
        return Outcome.REFUSED if chance < 0.03 else None

    def submit(self, owner: int, connection: int) -> None:
        rng, op = self.rng, self.rng.choice(list(Op))
        cuts = sorted(rng.sample(range(1, CONNECTION), rng.randrange(1, 40)))
        ops = [
            TransferOp(
                self.ours[owner].region_id,
                connection * CONNECTION + start,
                self.theirs[owner].region_id,
                connection * CONNECTION + start,
                stop - start,
            )
            for start, stop in zip([0, *cuts], [*cuts, CONNECTION], strict=True)
        ]
        rng.shuffle(ops)
        peer = self.owners[owner].transfer.segment
        batch_id = self.us.transfer.submit(TransferBatch(op=op, peer=peer, ops=ops))
        self.batches[batch_id] = (owner, connection, op)

    def disturb(self) -> None:
        rng = self.rng
        engine = rng.choice([self.us, *self.owners])
        nic, what = rng.choice(engine.nics), rng.randrange(7)
        if what == 0:
            nic.set_link(rng.random() < 0.5)
        elif what == 1:
            nic.fail(heard_of=rng.random() < 0.5)
        elif what == 2:
            nic.refuses_pairs = rng.random() < 0.5
        elif what == 3:
            nic.refuses_posts = rng.random() < 0.3
        elif what == 4:
            owner = rng.choice(self.owners).rdma
            owner.loop.post(lambda: [session.close() for session in owner._owner.listener.sessions])
        elif what == 5:
            self.fabric.hold()
        else:
            self.fabric.release()
        if self.batches and rng.random() < 0.2:
            self.us.transfer.cancel(rng.choice(list(self.batches)))

    def calm(self) -> None:
        self.fabric.fails = lambda _nic, _request: None
        for engine in (self.us, *self.owners):
            for nic in engine.nics:
                nic.refuses_pairs = nic.refuses_posts = False
                nic.set_link(True)
        self.fabric.release()

    def check(self) -> int:
        """Wait for all batches and return how many ended well, their bytes whole."""
        num_well = 0
        for batch_id, done in wait_for(self.us.transfer, list(self.batches)).items():
            owner, connection, _op = self.batches[batch_id]
            at = slice(connection * CONNECTION, (connection + 1) * CONNECTION)
            if done.error is None:
                num_well += 1
                assert self.ours[owner].buffer[at] == self.theirs[owner].buffer[at], batch_id
        return num_well

    def is_over(self) -> bool:
        """Whether batches to all owners end well: breakers closed, devices opened again."""
        self.batches.clear()
        for owner in range(NUM_OWNERS):
            self.submit(owner, 0)
        return self.check() == NUM_OWNERS


@pytest.mark.parametrize("seed", range(4))
def test_every_batch_ends_and_the_network_is_whole_again_after_a_storm(seed: int) -> None:
    rng, fabric = random.Random(seed), FakeFabric()
    with engines_on(fabric) as opened:
        us = opened("us", max_endpoints=rng.choice([1, 2, 4, 8]))
        owners = [opened(f"owner{index}") for index in range(NUM_OWNERS)]
        storm = Storm(rng, fabric, us, owners)
        for index, owner in enumerate(owners):
            storm.ours.append(filled(us, NUM_CONNECTIONS * CONNECTION, index))
            storm.theirs.append(filled(owner, NUM_CONNECTIONS * CONNECTION, 10 + index))
        fabric.fails = storm.fails
        for connection in range(NUM_CONNECTIONS):
            for owner in range(NUM_OWNERS):
                storm.submit(owner, connection)
                if rng.random() < 0.6:
                    storm.disturb()
        storm.calm()
        storm.check()
        until(storm.is_over, lambda: None)
        assert us.transfer._batches.num_open == 0

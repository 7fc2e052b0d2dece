"""A node with disks, and perhaps a bucket, under any interleaving of use, crash, damage and
refusal: what is served is right, what is held stays, nothing is lost of memory or slots.

Bytes are real and follow from the key, so a reader knows what it must see, whichever boot wrote it.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake.base import PeerLost, PinBlocks, PinGranted, PutGranted, Unpin
from mooncake.base.pool_messages import BlocksRemoved, RemoveBlocks
from mooncake.kvstore.eviction import POLICIES
from mooncake.sim.world.disk import SimBucket, SimMedium
from tests.support.examples import examples
from tests.support.kvstore.node_world import GATEWAY, NodeWorld, key, worker

NAMES = ["prefill-0", "decode-0"]
QUARANTINE_S = 0.5

a_name = st.sampled_from(NAMES)
a_run = st.builds(
    lambda base, first, stop: [key(10 * base + n) for n in range(first, stop)],
    st.integers(1, 2),
    st.sampled_from([0, 0, 0, 1]),
    st.integers(2, 4),
)


class DisksAgainstCrashes(RuleBasedStateMachine):
    """One node, its disks, two peers, and everything that can go wrong with them."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        num_blocks=st.integers(3, 8),
        ssd_blocks=st.integers(1, 8),
        num_disks=st.integers(1, 2),
        min_uses=st.sampled_from([1, 1, 2]),
        write_at=st.sampled_from([0.0, 0.0, 0.4]),
        checksums=st.booleans(),
        small_blocks=st.sampled_from([0, 1, 3]),
        bucket_blocks=st.sampled_from([0, 0, 2, 20]),
    )
    def begin(
        self,
        policy: str,
        num_blocks: int,
        ssd_blocks: int,
        num_disks: int,
        min_uses: int,
        write_at: float,
        checksums: bool,
        small_blocks: int,
        bucket_blocks: int,
    ) -> None:
        bucket = SimBucket() if bucket_blocks else None
        self.num_blocks = num_blocks
        self.world = NodeWorld(
            num_blocks, media=[SimMedium() for _ in range(num_disks)], ssd_blocks=ssd_blocks,
            eviction=policy, ssd_eviction=policy, ssd_min_uses=min_uses, ssd_write_at=write_at,
            quarantine_s=QUARANTINE_S, ssd_retry_s=0.5, ssd_load_timeout_s=0.05,
            tenant_quota_bytes={"small": 2 * 64}, checksums=checksums,
            tenant_ssd_quota_bytes={"small": small_blocks * 64},
            bucket=bucket, bucket_blocks=bucket_blocks, object_min_uses=min_uses, object_list_s=2.0,
        )  # fmt: skip
        self.media = [*self.world.media, *([] if bucket is None else [bucket])]
        self.epochs = dict.fromkeys(NAMES, 1)
        self.ever_put: set[bytes] = set()
        self.pins: dict[int, tuple[str, list[bytes], PinGranted]] = {}
        self.asked: dict[int, tuple[str, list[bytes]]] = {}
        self.grants: dict[int, tuple[str, PutGranted]] = {}
        self.removing: dict[int, list[bytes]] = {}
        self.gone: set[bytes] = set()
        """Removed for good, and not put since."""
        self.num_seen = 0
        self.own: set[int] = set()
        """Tickets that `read` has dealt with."""
        self.world.tick(1.0)

    # ------------------------------------------------------------------ helpers

    def ref(self, name: str):
        return worker(name, f"e{self.epochs[name]}")

    def hear(self) -> None:
        """Take in what the node has said to peers since."""
        sent, self.num_seen = self.world.channel.sent[self.num_seen :], len(self.world.channel.sent)
        for address, message in sent:
            if isinstance(message, BlocksRemoved):
                self.removed(message)
            if address == GATEWAY.address or not isinstance(message, PinGranted):
                continue
            name, run = self.asked.pop(message.ticket, (None, []))
            if message.ticket in self.own:
                continue
            if name is None:
                assert message.ticket in self.pins, "an answer nobody asked for"
                assert message.places == self.pins[message.ticket][2].places
            elif message.num_blocks:
                assert set(run[: message.num_blocks]) <= self.ever_put
                self.pins[message.ticket] = (name, run[: message.num_blocks], message)

    def removed(self, message: BlocksRemoved) -> None:
        for block, left in zip(self.removing.pop(message.ticket), message.left, strict=True):
            if not left:
                self.gone.add(block)

    def stored(self, blocks: list[bytes]) -> None:
        self.hear()  # what was removed before they came
        self.ever_put |= set(blocks)
        self.gone -= set(blocks)
        for run in self.removing.values():  # it may be answered any time: a put since is no matter
            run[:] = [b"" if block in blocks else block for block in run]

    # ------------------------------------------------------------------ peers

    @precondition(lambda self: not self.grants)
    @rule(name=a_name, run=a_run, tenant=st.sampled_from(["", "", "small"]))
    def put_start(self, name: str, run: list[bytes], tenant: str) -> None:
        if tenant:
            run = [block[:-1] + b"T" for block in run]
        granted = self.world.start(self.ref(name), run, tenant)
        if granted.keys:
            self.grants[granted.ticket] = (name, granted)

    @rule(name=a_name, run=a_run, seconds=st.sampled_from([0.0, 1e-4, 1.0]))
    def put(self, name: str, run: list[bytes], seconds: float) -> None:
        """A whole put, and a moment for the disks."""
        granted = self.world.start(self.ref(name), run)
        for block, offset in zip(granted.keys, granted.places.offsets, strict=True):
            self.world.write(granted.places, offset, block)
        self.stored(granted.keys)
        self.world.end(self.ref(name), granted)
        self.world.tick(self.world.now + seconds)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), well=st.sampled_from([True, True, False]))
    def put_end(self, data: st.DataObject, well: bool) -> None:
        name, granted = self.grants.pop(data.draw(st.sampled_from(sorted(self.grants))))
        for block, offset in zip(granted.keys, granted.places.offsets, strict=True):
            self.world.write(granted.places, offset, block)
        written = granted.keys if well else []
        self.stored(written)
        dropped = [] if well else granted.keys
        self.world.end(self.ref(name), granted, written=written, dropped=dropped)

    @rule(name=a_name, run=a_run)
    def pin(self, name: str, run: list[bytes]) -> None:
        ticket = self.world.ticket()
        self.asked[ticket] = (name, run)
        self.world.handle(PinBlocks(reader=self.ref(name), ticket=ticket, keys=run))

    @precondition(lambda self: self.asked or self.pins)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        self.hear()
        everything = {t: (name, run) for t, (name, run, _) in self.pins.items()} | self.asked
        if everything:
            ticket = data.draw(st.sampled_from(sorted(everything)))
            name, _ = everything[ticket]
            run = self.asked[ticket][1] if ticket in self.asked else self.pins[ticket][1]
            self.world.handle(PinBlocks(reader=self.ref(name), ticket=ticket, keys=run))

    @precondition(lambda self: self.asked or self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.hear()
        tickets = sorted([*self.pins, *self.asked])
        if not tickets:
            return
        ticket = data.draw(st.sampled_from(tickets))
        name = (self.pins.get(ticket) or self.asked[ticket])[0]
        self.pins.pop(ticket, None)
        self.asked.pop(ticket, None)
        self.world.handle(Unpin(reader=self.ref(name), ticket=ticket))

    @rule(name=a_name)
    def lose(self, name: str) -> None:
        self.hear()
        lost = self.ref(name)
        self.epochs[name] += 1
        self.pins = {t: pin for t, pin in self.pins.items() if pin[0] != name}
        self.asked = {t: asked for t, asked in self.asked.items() if asked[0] != name}
        self.grants = {t: grant for t, grant in self.grants.items() if grant[0] != name}
        self.world.handle(PeerLost(worker=lost))

    @rule(name=a_name, run=a_run)
    def remove(self, name: str, run: list[bytes]) -> None:
        ticket = self.world.ticket()
        self.removing[ticket] = list(run)
        self.world.handle(RemoveBlocks(asker=self.ref(name), ticket=ticket, keys=run))
        assert self.world.inventory.isdisjoint(run), "found after it was removed"

    # ------------------------------------------------------------------ disks and time

    @rule(seconds=st.sampled_from([0.0, 1e-4, 2e-4, 0.02, 1.0]))
    def wait(self, seconds: float) -> None:
        self.world.tick(self.world.now + seconds)

    @rule()
    def one_disk_event(self) -> None:
        """Let just one operation end, so that others are caught half-way."""
        self.world.heap.step()

    @rule(name=a_name, run=a_run)
    def read(self, name: str, run: list[bytes]) -> None:
        """A pin that is waited for, looked at and ended."""
        self.hear()
        granted = self.world.pin_soon(self.ref(name), run)
        self.own.add(granted.ticket)
        for block, offset in zip(run, granted.places.offsets, strict=False):
            assert self.world.holds(granted.places, offset, block), "wrong bytes"
        self.world.unpin(self.ref(name), granted)

    @precondition(lambda self: self.ever_put)
    @rule(scan=st.sampled_from([0.0, 1.0]))
    def crash(self, scan: float) -> None:
        self.hear()
        self.removing = {}
        self.world.boot()
        self.world.tick(self.world.now + scan)
        self.num_seen = 0
        self.pins, self.asked, self.grants = {}, {}, {}

    @precondition(lambda self: any(medium.slots for medium in self.media))
    @rule(data=st.data(), disk=st.integers(0, 2))
    def damage(self, data: st.DataObject, disk: int) -> None:
        media = self.media
        slots = sorted(media[disk % len(media)].slots)
        if slots:
            media[disk % len(media)].damage(data.draw(st.sampled_from(slots)))

    @rule(
        disk=st.integers(0, 2),
        fault=st.sampled_from(["refuses_reads", "refuses_writes", "is_full"]),
        on=st.sampled_from([False, False, True]),
    )
    def trouble(self, disk: int, fault: str, on: bool) -> None:
        setattr(self.media[disk % len(self.media)], fault, on)

    @rule(disk=st.integers(0, 1), room=st.sampled_from([None, 0, 2]))
    def less_room(self, disk: int, room: int | None) -> None:
        """The file system takes so many slots: what is there can be overwritten."""
        self.world.media[disk % len(self.world.media)].num_slots_with_room = room

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def what_is_pinned_is_right(self) -> None:
        if not hasattr(self, "world"):
            return
        self.hear()
        for _, run, granted in self.pins.values():
            for block, offset in zip(run, granted.places.offsets, strict=True):
                assert self.world.holds(granted.places, offset, block), "wrong bytes"
            for block, checksum in zip(run, granted.checksums, strict=False):
                assert checksum in (0, self.world.checksum(block)), "a wrong promise"
        assert self.world.inventory <= self.ever_put
        found = self.gone & (self.world.inventory | self.world.on_ssd | self.world.in_bucket)
        assert not found, "removed for good, and back"

    def teardown(self) -> None:
        """When everybody has gone and disks work again, all memory is there and nothing moves."""
        if not hasattr(self, "world"):
            return
        for medium in self.media:
            medium.refuses_reads = medium.refuses_writes = medium.is_full = False
            medium.num_slots_with_room = None
        for name in NAMES:
            self.world.handle(PeerLost(worker=self.ref(name)))
        self.world.tick(self.world.now + QUARANTINE_S)
        for _ in range(30):
            self.world.tick(self.world.now + 1.0)
        assert self.world.node.quiet
        load = self.world.load()
        assert load.num_free_blocks + load.num_cached_blocks == self.num_blocks


DisksAgainstCrashes.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=60, deadline=None
)
TestDisksAgainstCrashes = DisksAgainstCrashes.TestCase

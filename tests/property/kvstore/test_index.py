"""The prefix index against a plain model: sets of keys per worker and tier, compared key by key."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake.base import BlockEvents, Tier, WorkerRef
from mooncake.kvstore.index.prefix_index import PrefixIndex, slots_of
from tests.support.examples import examples

# Few first bytes, so that sweeping and chains meet in the same shards.
KEYS = [bytes([n % 5]) * 8 + n.to_bytes(8, "big") for n in range(24)]
WORKERS = ["prefill-0", "decode-0", "kv-0", "kv-1"]

some_keys = st.lists(st.sampled_from(KEYS), max_size=8, unique=True)
some_worker = st.sampled_from(WORKERS)
some_tier = st.sampled_from([Tier.DRAM, Tier.SSD, Tier.OBJECT])


class IndexAgainstModel(RuleBasedStateMachine):
    """Workers come, report, lose reports, are lost and come back under a new epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.epochs: dict[str, int] = {}
        self.known: dict[str, WorkerRef] = {}
        self.held: dict[tuple[str, Tier], set[bytes]] = {}
        self.numbers: dict[tuple[str, Tier], int] = {}
        self.gaps: set[tuple[str, Tier]] = set()

    def forget(self, worker_id: str) -> None:
        self.known.pop(worker_id, None)
        for table in (self.held, self.numbers):
            for entry in [entry for entry in table if entry[0] == worker_id]:
                del table[entry]
        self.gaps = {entry for entry in self.gaps if entry[0] != worker_id}

    @rule(worker_id=some_worker, fresh=st.booleans())
    def come(self, worker_id: str, fresh: bool) -> None:
        if fresh or worker_id not in self.known:
            self.forget(worker_id)
            self.epochs[worker_id] = self.epochs.get(worker_id, 0) + 1
        worker = WorkerRef(worker_id, f"e{self.epochs[worker_id]}", f"inproc://{worker_id}")
        self.index.add_worker(worker, Tier.DRAM)
        self.known[worker_id] = worker

    @rule(worker_id=some_worker)
    def lose(self, worker_id: str) -> None:
        self.index.remove_worker(worker_id)
        self.forget(worker_id)

    @rule(
        worker_id=some_worker, tier=some_tier, keys=some_keys, removed=some_keys,
        skipped=st.integers(0, 2), snapshot=st.booleans(),
    )  # fmt: skip
    def report(self, worker_id, tier, keys, removed, skipped, snapshot) -> None:
        if worker_id not in self.known:
            return
        at = (worker_id, tier)
        number = self.numbers.get(at, 0) + 1 + skipped
        events = BlockEvents(
            worker=self.known[worker_id], tier=tier, sequence_no=number, snapshot=snapshot,
            stored=keys, removed=[key for key in removed if key not in keys],
        )  # fmt: skip
        assert self.index.apply(events) == (snapshot or skipped == 0)
        self.numbers[at] = number
        held = set() if snapshot else self.held.get(at, set())
        self.held[at] = (held - set(events.removed)) | set(keys)
        if snapshot:
            self.gaps.discard(at)
        elif skipped:
            self.gaps.add(at)
        assert self.index.apply(events), "a repeat is no gap"

    @rule(worker_id=some_worker, tier=some_tier, ahead=st.integers(-1, 1), alive=st.booleans())
    def expect(self, worker_id: str, tier: Tier, ahead: int, alive: bool) -> None:
        """A worker says how many reports there have been; some may have been lost, or are late."""
        if worker_id not in self.known:
            return
        worker = self.known[worker_id] if alive else WorkerRef(worker_id, "before", "inproc://gone")
        self.index.expect(worker, {tier: self.numbers.get((worker_id, tier), 0) + ahead})
        if alive and ahead > 0:
            self.gaps.add((worker_id, tier))

    @rule(worker_id=some_worker, keys=some_keys)
    def report_of_a_dead_epoch(self, worker_id: str, keys: list[bytes]) -> None:
        old = WorkerRef(worker_id, "before", "inproc://gone")
        events = BlockEvents(worker=old, tier=Tier.DRAM, sequence_no=999, stored=keys, removed=KEYS)
        assert self.index.apply(events)

    @rule(chain=st.lists(st.sampled_from(KEYS), max_size=12, unique=True))
    def match(self, chain: list[bytes]) -> None:
        expected = {}
        for worker_id in self.known:
            union = set().union(*(self.held.get((worker_id, tier), set()) for tier in Tier))
            length = next((n for n, key in enumerate(chain) if key not in union), len(chain))
            if length:
                expected[worker_id] = length
        found = self.index.match(chain)
        assert found == expected
        assert list(found.values()) == sorted(found.values(), reverse=True)

    @rule(chain=st.lists(st.sampled_from(KEYS), min_size=1, max_size=12, unique=True))
    def nearest(self, chain: list[bytes]) -> None:
        """Each worker holds a block in its nearest tier alone."""
        runs, start = self.index.live_runs(chain), 0
        for stop, mask in runs:
            owners = [self.index.owners[slot] for slot in slots_of(mask)]
            found = {(one.worker.worker_id, one.tier) for one in owners if one is not None}
            assert len(found) == len(owners)
            for key in chain[start:stop]:
                held = [at for at, keys in self.held.items() if key in keys]
                names = {name for name, _ in held}
                assert found == {
                    (name, next(tier for tier in Tier if (name, tier) in held)) for name in names
                }
            start = stop
        assert start == len(chain)

    @rule()
    def sweep(self) -> None:
        """Old reports drive the clean-up; afterwards nothing of lost workers is left."""
        for _ in range(2 * 256):
            self.index.apply(
                BlockEvents(worker=WorkerRef("x", "x", "x"), tier=Tier.SSD, sequence_no=1)
            )
        assert self.index.num_keys == len(set().union(*self.held.values()))

    @invariant()
    def replicas_agree(self) -> None:
        self.index.check_integrity()
        for key in KEYS:
            expected = {at for at, keys in self.held.items() if key in keys}
            assert {(r.worker.worker_id, r.tier) for r in self.index.replicas(key)} == expected
            assert len(self.index.replicas(key)) == len(expected)
        for worker_id in WORKERS:
            has_gap = any(at[0] == worker_id for at in self.gaps)
            assert self.index.needs_snapshot(worker_id) == has_gap


IndexAgainstModel.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestIndexAgainstModel = IndexAgainstModel.TestCase

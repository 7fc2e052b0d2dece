"""Engines of one process against a plain model of their memory: right bytes, or a refusal."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.local import InprocFabric
from mooncake.transfer.regions import HostRegion
from mooncake.transfer.router import RoutedTransfer
from tests.support.clock import ManualClock

SIZES = [1, 37, 4096]
region_no = st.integers(0, len(SIZES))  # one more than there are
offset = st.integers(-2, 4100)
length = st.integers(0, 40) | st.integers(0, 4100)
steps = st.lists(
    st.tuples(
        st.sampled_from([Op.READ, Op.WRITE]),
        st.booleans(),
        st.lists(st.tuples(region_no, offset, region_no, offset, length), min_size=1, max_size=4),
        st.booleans(),
    ),
    max_size=6,
)


class Side:
    """One engine, its regions, and what they should hold."""

    def __init__(self, name: str, fabric: InprocFabric, fill: int) -> None:
        config = TransferConfig(secret="s", host="h", protocols=["inproc"], num_copy_threads=0)
        self.engine: RoutedTransfer = open_transfer(config, name, ManualClock(), fabric=fabric)
        self.regions: list[HostRegion] = []
        self.model: list[bytearray] = []
        for index, size in enumerate(SIZES):
            region = self.engine.allocate(size, f"region {index}")
            content = bytes((fill + 31 * index + 7 * at) % 256 for at in range(size))
            region.buffer[:] = content
            self.regions.append(region)
            self.model.append(bytearray(content))

    def region_id(self, number: int) -> int:
        return self.regions[number].region_id if number < len(SIZES) else 1000 + number

    def fits(self, number: int, start: int, size: int) -> bool:
        return number < len(SIZES) and start >= 0 and start + size <= SIZES[number]


@given(steps)
@settings(max_examples=80, deadline=None)
def test_any_sequence_of_batches_does_what_the_model_does(
    batches: list[tuple[Op, bool, list[tuple[int, int, int, int, int]], bool]],
) -> None:
    fabric = InprocFabric()
    sides = [Side("a", fabric, 1), Side("b", fabric, 99)]
    for op, from_a, moves, cancelled in batches:
        us, them = sides if from_a else sides[::-1]
        ops = [
            TransferOp(us.region_id(here), at, them.region_id(there), far, size)
            for here, at, there, far, size in moves
        ]
        batch_id = us.engine.submit(TransferBatch(op=op, peer=them.engine.segment, ops=ops))
        if cancelled:
            us.engine.cancel(batch_id)
        (done,) = us.engine.poll()
        assert done.batch_id == batch_id
        good = all(
            us.fits(here, at, size) and far >= 0 and (size == 0 or them.fits(there, far, size))
            for here, at, there, far, size in moves
        )
        num_bytes = sum(size for *_, size in moves)
        if not good or (cancelled and num_bytes > 0):
            assert done.error is not None
        else:
            assert (done.error, done.num_bytes) == (None, num_bytes)
            for here, at, there, far, size in moves:
                ours, theirs = us.model[here], them.model[there] if size else bytearray()
                if op is Op.WRITE:
                    theirs[far : far + size] = ours[at : at + size]
                else:
                    ours[at : at + size] = theirs[far : far + size]
        for side in sides:
            for region, content in zip(side.regions, side.model, strict=True):
                assert bytes(region.buffer) == bytes(content)
    for side in sides:
        side.engine.check_integrity()
        side.engine.close()

"""What the spans of a worker tell about the bytes that it moved."""

from __future__ import annotations

import pytest

from mooncake.instance.job_table import JobTrace
from mooncake.instance.push import Destination
from mooncake.transfer.engine import TransferDone


@pytest.mark.parametrize(
    ("protocol", "nics", "shown"),
    [
        ("rdma", {"mlx5_1", "mlx5_0"}, {"mooncake.path": "rdma", "mooncake.nic": "mlx5_0,mlx5_1"}),
        ("tcp", {"10.0.0.7"}, {"mooncake.path": "tcp", "mooncake.nic": "10.0.0.7"}),
        ("shm", set(), {"mooncake.path": "shm"}),
    ],
)
def test_a_push_names_its_path_and_the_nics_that_carried_it(
    protocol: str, nics: set[str], shown: dict[str, str]
) -> None:
    pushed = Destination([], lambda *_: None, None)
    pushed.begun_s = 1.0
    pushed.carried.add(TransferDone(batch_id=1, num_bytes=64, protocol=protocol, nics=tuple(nics)))
    trace = JobTrace("prefill-0", 0.0)
    trace.pushed(pushed, 2.0)
    (span,) = trace.take()
    assert (span.name, span.start_s, span.end_s) == ("transfer", 1.0, 2.0)
    assert span.facts == {"mooncake.blocks": 0, "mooncake.bytes": 64, **shown}

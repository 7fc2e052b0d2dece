"""What pyverbs is asked to post, without a NIC."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from mooncake.transfer.rdma.nic import WorkRequest
from mooncake.transfer.rdma.verbs import NicChoices, VerbsNic, VerbsPair
from mooncake.transfer.rdma.wire import NicAddress, PairAddress

INLINE, SIGNALED = 8, 2
"""IBV_SEND_INLINE, IBV_SEND_SIGNALED"""
NIC = NicAddress("mlx5_0", bytes(16), 0, 5, True)


def test_packets_are_of_the_class_that_was_chosen() -> None:
    verbs: Any = MagicMock()
    nic = object.__new__(VerbsNic)  # opening one needs a device
    nic._verbs, nic._port, nic.gid_index, nic.address = verbs, 1, 3, NIC
    nic._choices = NicChoices(traffic_class=106, service_level=5)
    attributes = nic.pair_attributes(PairAddress(NIC, 1, 0), PairAddress(NIC, 2, 0))
    assert verbs.addr.GlobalRoute.call_args.kwargs["traffic_class"] == 106
    asked = verbs.addr.AHAttr.call_args.kwargs
    assert (asked["gr"], asked["sl"]) == (verbs.addr.GlobalRoute.return_value, 5)
    assert attributes.ah_attr is verbs.addr.AHAttr.return_value


class NoMemory:
    """Requests' own addresses are looked at by NICs only."""

    def __init__(self, addr: int, length: int, lkey: int) -> None:
        self.addr, self.length, self.lkey = addr, length, lkey


@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("num_bytes", [1, 100, 4096])
def test_the_cpu_reads_nothing_that_a_nic_is_to_write(extended: bool, num_bytes: int) -> None:
    """The memory may be a GPU's, at an address that means nothing here: a dmabuf begins at 0."""
    verbs: Any = MagicMock()
    verbs.wr.SGE = NoMemory
    verbs.enums.IBV_SEND_INLINE, verbs.enums.IBV_SEND_SIGNALED = INLINE, SIGNALED
    raw = MagicMock(qp_num=7)
    pair = VerbsPair(verbs, SimpleNamespace(address=NIC, inline_bytes=64), raw, extended)
    pair.post([WorkRequest(5, True, 0, 11, 0x1000, 12, num_bytes, True)])
    if extended:
        assert (raw.wr_id, raw.wr_flags) == (5, SIGNALED)
        assert raw.wr_rdma_write.mock_calls == [call(12, 0x1000)]
        [[element], _] = raw.wr_set_sge.call_args
        raw.wr_set_inline_data.assert_not_called()
    else:
        asked = verbs.wr.SendWR.call_args.kwargs
        assert asked["send_flags"] == SIGNALED
        [element] = asked["sg"]
    assert (element.addr, element.length, element.lkey) == (0, num_bytes, 11)


@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize(
    ("is_write", "num_bytes", "limit", "inline"),
    [(True, 64, 64, True), (True, 65, 64, False), (False, 8, 64, False), (True, 1, 0, False)],
)
def test_short_writes_from_the_host_go_with_their_requests(
    extended: bool, is_write: bool, num_bytes: int, limit: int, inline: bool
) -> None:
    verbs: Any = MagicMock()
    verbs.wr.SGE = NoMemory
    verbs.enums.IBV_SEND_INLINE, verbs.enums.IBV_SEND_SIGNALED = INLINE, SIGNALED
    raw = MagicMock(qp_num=7)
    pair = VerbsPair(verbs, SimpleNamespace(address=NIC, inline_bytes=limit), raw, extended)
    pair.post([WorkRequest(5, is_write, 9, 11, 0x1000, 12, num_bytes, False, in_host=True)])
    expected = INLINE if inline else 0
    if extended:
        assert raw.wr_flags == expected
        assert raw.wr_set_inline_data.mock_calls == ([call(9, num_bytes)] if inline else [])
        assert raw.wr_set_sge.call_count == (not inline)
    else:
        assert verbs.wr.SendWR.call_args.kwargs["send_flags"] == expected

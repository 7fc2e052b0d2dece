"""Faults as values: those of a file are checked, those drawn fit the cluster."""

from __future__ import annotations

from random import Random

import pytest

from mooncake.base import ConfigError
from mooncake.sim.faults.plan import KINDS, Fault, Names, check_faults, random_fault

NAMES = Names(
    workers=["prefill-0", "decode-0", "kvstore-0"],
    nodes=["node-a", "node-b"],
    pools=["kvstore-0"],
    ranks=["decode-0/1"],
)
NO_POOL = Names(workers=["decode-0"], nodes=["node-a"], pools=[])


def test_every_kind_is_drawn_and_fits_the_cluster() -> None:
    random = Random(1)
    faults = [random_fault(random, NAMES, 1.5) for _ in range(400)]
    check_faults(faults, NAMES, "drawn")
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.at_s for fault in faults} == {1.5}


def test_a_cluster_without_pools_and_ranks_has_none_to_fail() -> None:
    random = Random(1)
    faults = [random_fault(random, NO_POOL, 0.0) for _ in range(400)]
    check_faults(faults, NO_POOL, "drawn")
    absent = {"slow_disk", "disk_error", "kill_rank", "hang_rank", "slow_rank", "lose_step"}
    assert {fault.kind for fault in faults} == set(KINDS) - absent


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (Fault(at_s=1, kind="explode"), "'explode' is not one of kill, "),
        (Fault(at_s=1, kind="kill"), "kill needs a target"),
        (Fault(at_s=1, kind="kill", target="prefil-0"), "did you mean prefill-0"),
        (Fault(at_s=1, kind="kill", target="xyz"), "there are prefill-0, decode-0, kvstore-0"),
        (Fault(at_s=1, kind="kill_node", target="prefill-0"), "no 'prefill-0'"),
        (Fault(at_s=1, kind="kill", target="decode-0", seconds=2), "kill has no seconds"),
        (Fault(at_s=1, kind="slow_disk", target="decode-0", seconds=1, amount=9), "no 'decode-0'"),
        (Fault(at_s=1, kind="hang_step", target="kvstore-0"), "no 'kvstore-0'"),
        (Fault(at_s=1, kind="cut_one_way", target="node-a", other="nobody", seconds=1), "'nobody'"),
        (Fault(at_s=1, kind="lose", seconds=1, amount=1.5), "probability"),
        (Fault(at_s=-1, kind="restart_gateway"), "is negative"),
    ],
)
def test_what_cannot_happen_is_named(fault: Fault, complaint: str) -> None:
    good = Fault(at_s=0, kind="skew", target="gateway", amount=2)
    with pytest.raises(ConfigError, match="day, fault 2: ") as caught:
        check_faults([good, fault], NAMES, "day")
    assert complaint in str(caught.value)

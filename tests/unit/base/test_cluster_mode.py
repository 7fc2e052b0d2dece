"""The newest mode wins, in whatever order processes hear of modes; weights have their own order."""

from __future__ import annotations

import itertools
from functools import reduce

from mooncake.base.cluster_mode import ClusterMode, Weights

NEW = Weights(2, "/new", "r2", "f2")
OLD = Weights(1, "/old", "r1", "f1")


def test_all_who_hear_the_same_modes_agree() -> None:
    modes = [
        ClusterMode(),
        ClusterMode(1, "a", paused=True, weights=NEW),
        ClusterMode(2, "a", sleep_level=1, weights=OLD),
        ClusterMode(2, "b", paused=True, aborts=True),
    ]
    found = {
        reduce(ClusterMode.merged, order, ClusterMode()) for order in itertools.permutations(modes)
    }
    assert found == {ClusterMode(2, "b", paused=True, aborts=True, weights=NEW)}


def test_a_change_wins_over_what_it_changes_and_keeps_the_weights() -> None:
    before = ClusterMode(4, "z", paused=True, weights=NEW)
    after = before.changed("a", paused=False, sleep_level=2)
    assert before.merged(after) == after.merged(before) == after
    assert after.weights == NEW
    assert not after.is_open
    assert after.changed("a", paused=False, sleep_level=0).is_open

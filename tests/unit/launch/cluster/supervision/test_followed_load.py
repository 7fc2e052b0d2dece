"""Which workers a `mooncake serve` that follows the load starts and ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from mooncake.base import ConfigError, Role
from mooncake.launch.cluster.supervision.followed_load import LoadFollower, first_workers
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import make_plan
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.scheduler.scaling.policy import RoleAdvice
from tests.support.model.checkpoints import write_config_only
from tests.support.serve.plain_settings import worker_settings

D0, D1, D2, D3 = (f"decode-{number}" for number in range(4))


def every(**most: int) -> list[WorkerSettings]:
    return [
        worker_settings(worker_id=f"{name}-{number}", role=Role(name))
        for name, number_of in most.items()
        for number in range(number_of)
    ]


def changes(
    wanted: int, held: Mapping[str, bool], counted: Collection[str], leaving: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Return who starts and who leaves of four decode workers."""
    advice = RoleAdvice(Role.DECODE, len(counted), wanted, "", frozenset(counted))
    follower = LoadFollower(every(prefill=2, decode=4), lambda: [advice], 30.0)
    start, leave = follower.changes({"prefill-0": True, **held}, leaving)
    return [each.worker_id for each in start], leave


def test_before_the_first_advice_nothing_changes() -> None:
    follower = LoadFollower(every(prefill=2, decode=4), lambda: (), 30.0)
    assert follower.changes({D0: True}, ()) == ([], [])


@pytest.mark.parametrize(
    ("wanted", "start", "leave"),
    [(0, [], [D1, D0]), (1, [], [D1]), (2, [], []), (3, [D2], []), (9, [D2, D3], [])],
)
def test_as_many_run_as_are_wanted(wanted: int, start: list[str], leave: list[str]) -> None:
    """The last to come goes first, and there are no more than there may be."""
    assert changes(wanted, {D0: True, D1: True}, [D0, D1]) == (start, leave)


def test_advice_that_does_not_know_of_a_ready_worker_ends_none() -> None:
    """The first advice of a gateway counts none, as the workers are still loading."""
    held = {D0: True, D1: True}
    assert changes(0, held, []) == ([], [])
    assert changes(1, held, [D0]) == ([], [])
    assert changes(3, held, []) == ([D2], []), "but it may start some"
    assert changes(1, held, [D0, D1]) == ([], [D1])


def test_one_that_is_not_ready_leaves_first() -> None:
    assert changes(2, {D0: True, D1: False, D2: True}, [D0, D2]) == ([], [D1])
    assert changes(1, {D0: True, D1: False, D2: True}, [D0, D2]) == ([], [D1, D2])


def test_one_that_leaves_is_not_held_and_its_name_is_not_free() -> None:
    assert changes(2, {D0: True}, [D0, D1], leaving=[D1]) == ([D2], [])
    assert changes(1, {D0: True}, [D0, D1], leaving=[D1]) == ([], []), "old advice counts it"
    assert changes(1, {D0: True}, [D0], leaving=[D1]) == ([], [])


def test_workers_that_joined_from_elsewhere_count() -> None:
    assert changes(3, {D0: True}, [D0, "decode-far-1"]) == ([D1], [])
    assert changes(2, {D0: True, D1: True}, [D0, D1, "decode-far-1"]) == ([], [D1])
    assert changes(1, {}, ["decode-far-1", "decode-far-2"]) == ([], [])


def started(*left: str, **written: object) -> list[str]:
    config = resolve({"model": "k2-tiny", **written}, None, {})
    settings = every(kvstore=1, decode=3, prefill=4)
    return [each.worker_id for each in first_workers(config, settings, lambda name: name in left)]


def test_a_cluster_starts_with_what_is_said_inside_the_bounds() -> None:
    bounds = "prefill=0..4,decode=2..3"
    assert started(autoscale=bounds) == ["kvstore-0", D0, D1, "prefill-0"]
    assert started(autoscale=bounds, prefill=0, decode=9) == ["kvstore-0", D0, D1, D2]


def test_workers_that_an_earlier_start_left_behind_are_adopted() -> None:
    one = "prefill=0..4,decode=1..3"
    assert started(D2, autoscale=one) == ["kvstore-0", D0, D2, "prefill-0"]


def test_any_other_starts_all() -> None:
    assert len(started()) == 8
    assert len(started(colocated=True, autoscale="prefill=1..2,decode=1..2")) == 8


def test_memory_and_threads_are_planned_for_all_that_one_machine_may_hold(tmp_path: Path) -> None:
    model = str(write_config_only(tmp_path))
    words = {"model": model, "autoscale": "prefill=1..2,decode=1..5", "kvstore": 0}
    config = resolve({**words, "bind_host": "127.0.0.1"}, None, {})
    plan = make_plan(config, 14)
    assert (plan.num_prefills, plan.num_decodes, plan.options.num_threads) == (2, 5, 2)
    config = resolve({**words, "bind_host": "10.0.0.1", "decode": 2}, None, {})
    plan = make_plan(config, 14)
    assert (plan.num_prefills, plan.num_decodes) == (1, 2), "others are on other machines"
    workers = cluster_workers(config, plan, "tcp://g:1", "secret", "host")
    assert sum(each.role is Role.DECODE for each in workers) == 5


def test_workers_that_share_experts_do_not_come_and_go(tmp_path: Path) -> None:
    words = {"model": str(write_config_only(tmp_path)), "data_parallel_size": 2}
    more = {"enable_expert_parallel": True}
    config = resolve({**words, **more, "autoscale": "prefill=1..2,decode=1..2"}, None, {})
    with pytest.raises(ConfigError, match=r"^autoscale: workers that share experts"):
        make_plan(config, 4)


def test_workers_that_come_and_go_do_not_change_their_role_too() -> None:
    written = {"model": "m", "role_switching": True, "autoscale": "prefill=1..2,decode=1..2"}
    with pytest.raises(ConfigError, match=r"^role-switching: with --autoscale"):
        resolve(written, None, {})
    resolve({**written, "colocated": True}, None, {})

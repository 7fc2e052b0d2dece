"""Instances of several ranks under faults of one rank: all ranks end once and come back together,
and the requests go on elsewhere with the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mooncake.base import Role
from mooncake.engine.ranks.rank_group import LeadRanks
from mooncake.engine.ranks.step_log import StepWriter
from mooncake.sim.faults.plan import Fault
from mooncake.sim.faults.random_faults import Trial, has_ranks
from mooncake.sim.world.expert_group import ExpertGroup
from mooncake.sim.world.ranks import RankedRunner
from mooncake.sim.world.world import Worker


def shares_experts(seed: int) -> bool:
    return any(worker.spec.experts for worker in Trial(seed).world.workers.values())


RANKED = [seed for seed in range(60) if has_ranks(seed)]
SEEDS = [seed for seed in RANKED if not shares_experts(seed)][:6]
SHARING = [seed for seed in RANKED if shares_experts(seed)][:3]


def first_rank(seed: int) -> str:
    """Return a follower of this seed's cluster."""
    workers = Trial(seed).world.workers.items()
    return next(
        f"{worker_id}/{worker.runner.num_ranks - 1}"
        for worker_id, worker in workers
        if isinstance(worker.runner, RankedRunner) and worker.runner.num_ranks > 1
    )


def test_clusters_have_stages_and_single_ones() -> None:
    stages = {
        (runner.num_ranks, len(runner._groups))
        for seed in SEEDS + SHARING
        for worker in Trial(seed).world.workers.values()
        if isinstance(runner := worker.runner, RankedRunner)
    }
    assert {(2, 1), (4, 1), (2, 2), (4, 2)} <= stages


def played(seed: int, faults: Sequence[Fault]) -> Trial:
    trial = Trial(seed, faults)
    report = trial.run()
    assert report.failure is None, report
    assert report.endings.get("length", 0) > 0
    return trial


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "kill_rank"},
        {"kind": "hang_rank", "seconds": 60.0},
        {"kind": "lose_step"},
        {"kind": "slow_rank", "amount": 1e6, "seconds": 60.0},
    ],
    ids=lambda fault: fault["kind"],
)
def test_one_lost_rank_is_all_ranks_once(
    seed: int, fault: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    fail = LeadRanks.fail

    def noted(lead: LeadRanks, why: str) -> None:
        if lead.lost is None:
            reasons.append(why)
        fail(lead, why)

    monkeypatch.setattr(LeadRanks, "fail", noted)
    target = first_rank(seed)
    trial = played(seed, [Fault(at_s=0.1, target=target, **fault)])  # type: ignore[arg-type]
    worker_id, _, number = target.partition("/")
    worker = trial.world.workers[worker_id]
    ranked = trial.world.ranked(worker_id)
    assert ranked is not None
    assert worker.num_starts == 1 + len(reasons), "a new epoch for each end"
    assert ranked.num_living == ranked.num_ranks
    if fault["kind"] == "kill_rank":
        assert reasons == [f"rank {number} of this model has ended"]
    else:  # found where the instance had something to do
        waited = f"rank {number} of this model did not answer"
        gone = "of this model has ended"  # another follower waited a little longer than the lead
        assert all(waited in why or gone in why for why in reasons)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_is_a_little_slow_ends_nothing(seed: int) -> None:
    target = first_rank(seed)
    fault = Fault(at_s=0.1, kind="slow_rank", target=target, amount=3.0, seconds=2.0)
    trial = played(seed, [fault])
    assert trial.world.workers[target.partition("/")[0]].num_starts == 1


def test_a_death_that_the_lead_does_not_act_upon_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeadRanks, "gone", lambda *_: None)
    faults = [Fault(at_s=30.0, kind="kill_rank", target=first_rank(SEEDS[0]))]  # all is idle
    report = Trial(SEEDS[0], faults).run()
    assert report.failure is not None
    assert report.failure.endswith("ranks")


def test_a_log_that_forgets_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepWriter, "forget", lambda *_: None)
    report = Trial(SEEDS[0], []).run()
    assert report.failure is not None
    assert "sequences that have ended" in report.failure


def test_a_lead_that_stands_still_for_too_long_is_left_by_its_followers() -> None:
    """They fail by their exchange's time; the lead, when it goes on, finds them gone."""
    found = 0
    for seed in SEEDS:
        worker_id = first_rank(seed).partition("/")[0]
        if Trial(seed).world.workers[worker_id].spec.role is Role.DECODE:
            faults = [Fault(at_s=0.1, kind="hang", target=worker_id, seconds=8.0)]
            found += played(seed, faults).world.workers[worker_id].num_starts > 1
    assert found


def instance_that_shares(seed: int) -> Worker:
    """Return the last instance of a group, which has several ranks where one of this seed's has."""
    workers = [worker for worker in Trial(seed).world.workers.values() if worker.spec.experts]
    return max(workers, key=lambda worker: getattr(worker.runner, "num_ranks", 0))


@pytest.mark.parametrize("seed", SHARING)
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [("kill", 0.0), ("kill_rank", 0.0), ("hang", 8.0), ("hang_rank", 60.0), ("hang_step", 0.0)],
)
def test_one_lost_of_those_that_share_experts_is_all_of_them_once(
    seed: int, kind: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    fail = LeadRanks.fail

    def noted(lead: LeadRanks, why: str) -> None:
        if lead.lost is None:
            reasons.append(why)
        fail(lead, why)

    monkeypatch.setattr(LeadRanks, "fail", noted)
    lost = instance_that_shares(seed).spec
    target = lost.worker_id
    if kind.endswith("_rank"):
        ranked = Trial(seed).world.ranked(target)
        assert ranked is not None
        assert ranked.num_ranks > 1
        target += "/1"
    trial = played(seed, [Fault(at_s=0.1, kind=kind, target=target, seconds=seconds)])
    starts = {worker.num_starts for worker in trial.world.sharing_experts(lost)}
    assert len(starts) == 1, "all come back together"
    if kind.startswith("kill"):
        assert starts == {2}
        others = [why for why in reasons if why.startswith("instance ")]
        assert len(others) == len(trial.world.sharing_experts(lost)) - 1
        assert len(set(others)) == 1, "they name the one that was lost first"


def test_an_instance_that_outlives_those_of_its_experts_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ExpertGroup, "leave", lambda *_: None)
    seed = SHARING[0]
    kill = Fault(at_s=30.0, kind="kill", target=instance_that_shares(seed).spec.worker_id)
    report = Trial(seed, [kill]).run()  # all is idle
    assert report.failure is not None
    assert "without its expert group" in report.failure

"""The simulated twin of a goodput trial, on machines that are made up."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import msgspec
import pytest

from benchmarks.goodput import foretold
from benchmarks.support.goodput_figures import Limits, Outcome, Trial, by_party
from benchmarks.support.goodput_twin import BUSY, MachineCost, compared, plan_of, read_profile, twin
from benchmarks.support.servers import Layout, ours
from benchmarks.support.sessions import PARTIES, Session, Turn, tenants
from mooncake.base import ConfigError, CostSample
from mooncake.launch.config.plan import ServePlan
from tests.support.model.checkpoints import write_config_only

LIMITS = Limits(ttft_s=2.0, tbt_s=0.1)
PATIENCE = 4.0


def step(streams: int, context: int, new: int = 0, before: int = 0) -> CostSample:
    """Return a step of a machine on which a prompt's token takes 1 ms."""
    seconds = 0.010 + 0.002 * streams + (0.020 + 0.001 * new + 1e-5 * before if new else 0.0)
    return CostSample(
        streams + new, streams * context + before, streams + bool(new), seconds,
        streams, streams, streams * context,
    )  # fmt: skip


STEPS = [
    *(step(count, context) for count in (1, 4, 8) for context in (64, 512)),
    *(step(0, 0, new, before) for new in (32, 128, 512) for before in (0, 512)),
]


def turn(seed: int, num_in: int, num_out: int, pause_s: float = 0.0) -> Turn:
    fresh = random.Random(seed).choices(range(1, 200), k=num_in)
    return Turn(fresh=fresh, output_len=num_out, pause_s=pause_s)


ALONE = [Session(at_s=20.0 * place, turns=[turn(100 + place, 128, 8)]) for place in range(3)]


def trial(**fields: object) -> Trial:
    known = {
        "load": "chats", "server": "ours", "rate": 1.0, "seed": 1, "outcomes": [],
        "idle_ttft_s": 0.16, "idle_tbt_s": 0.012, "load_average": 0.0,
    }  # fmt: skip
    return msgspec.convert({**known, **fields}, Trial)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_config_only(tmp_path / "small", max_position_embeddings=8192)


def plan(model: Path, *flags: str) -> ServePlan:
    return plan_of(ours("ours", model, *flags))


def played(plan: ServePlan, sessions: list[Session], **of_trial: object) -> list[Outcome]:
    return twin(plan, STEPS, trial(**of_trial), ALONE, sessions, LIMITS, PATIENCE)


def test_a_load_that_the_machine_can_bear_is_good(model: Path) -> None:
    sessions = [
        Session(at_s=3.0 * number, turns=[turn(number, 300, 10), turn(50 + number, 40, 5, 0.5)])
        for number in range(4)
    ]
    for flags in (("--colocated",), ("--kvstore", "0"), ()):
        outcomes = played(plan(model, *flags), sessions)
        assert len(outcomes) == 8
        assert all(map(LIMITS.are_met, outcomes)), flags


def test_the_machine_is_as_slow_as_the_trials_idle_requests(model: Path) -> None:
    sessions = [Session(at_s=0.0, turns=[turn(1, 128, 8)])]
    [fast] = played(plan(model, "--colocated"), sessions)
    slow_trial = {"idle_ttft_s": 0.8, "idle_tbt_s": 0.06}
    [slow] = played(plan(model, "--colocated"), sessions, **slow_trial)
    assert (fast.ttft_s, fast.tbt_s) == pytest.approx((BUSY * 0.16, 0.012), rel=0.3)
    assert (slow.ttft_s, slow.tbt_s) == pytest.approx((BUSY * 0.8, 0.06), rel=0.3)


def test_what_cannot_be_in_time_is_refused_if_limits_are_told(model: Path) -> None:
    sessions = [Session(at_s=0.1 * number, turns=[turn(number, 900, 5)]) for number in range(8)]
    told = ("--colocated", "--slo-ttft-s", "2", "--slo-tbt-ms", "100")
    ends = [one.end for one in played(plan(model, *told), sessions)]
    assert ends.count("refused") >= 3
    assert "whole" in ends
    ends = [one.end for one in played(plan(model, "--colocated"), sessions)]
    assert "refused" not in ends


def test_a_client_whose_patience_ends_is_late_with_all_its_turns(model: Path) -> None:
    sessions = [Session(at_s=0.0, turns=[turn(1, 900, 4), turn(2, 10, 4)])]
    found = twin(plan(model, "--colocated"), STEPS, trial(), ALONE, sessions, LIMITS, 0.1)
    assert [one.end for one in found] == ["late", "late"]


def test_the_requests_of_a_small_tenant_stay_good_beside_a_flood(model: Path) -> None:
    def draw(source: random.Random, count: int) -> list[int]:
        return source.choices(range(1, 200), k=count)

    sessions = tenants(40, 2.0, draw, 1)
    outcomes = played(plan(model, "--colocated"), sessions)
    own = {name: [one for one in outcomes if one.party == name] for name in PARTIES}
    good = {name: sum(map(LIMITS.are_met, each)) / len(each) for name, each in own.items()}
    assert good["small, premium"] >= good["flood"]
    assert good["small"] > good["flood"]
    rows = by_party([trial(outcomes=msgspec.to_builtins(outcomes))], LIMITS)[2:]
    assert [row.split(" | ")[3] for row in rows] == sorted(PARTIES)


def test_a_trial_is_foretold_from_a_profile_and_the_idle_servers_of_measured_ones(
    model: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.json"
    steps = {"samples": [msgspec.structs.asdict(each) for each in STEPS]}
    profile.write_text(json.dumps({"prefill": steps, "decode": steps}))
    args = argparse.Namespace(
        model=model, foretell=profile, requests=12, ttft_s=2.0, tbt_ms=100.0, lines=None
    )
    told = ours("ours", model, "--colocated", "--slo-ttft-s", "2", "--slo-tbt-ms", "100")
    open_to_all = ours("ours", model, "--colocated")

    def ends(layout: Layout, measured: list[Trial], rate: float) -> list[str]:
        found = foretold(args, layout, measured, "chats", rate, 1)
        return [one.end for one in found.outcomes]

    assert ends(told, [], 0.1) == ["whole"] * 12
    slow = [trial(idle_ttft_s=5.0, idle_tbt_s=0.09), trial(server="another")]
    assert "refused" in ends(told, slow, 5.0)
    assert "refused" not in ends(open_to_all, slow, 5.0)


def test_a_chunk_beside_streams_takes_as_long_as_both() -> None:
    cost = MachineCost(STEPS, 1)
    beside = step(3, 200, 128, 100)
    seconds = cost.usual_s([(1, 200)] * 3 + [(128, 100)])
    assert seconds == pytest.approx(beside.seconds, rel=0.1)


def test_a_table_shows_what_was_measured_beside_what_was_simulated() -> None:
    good = Outcome(end="whole", ttft_s=1.0, tbt_s=0.02)
    measured = trial(outcomes=[{"end": "whole", "ttft_s": 1.5, "tbt_s": 0.03}, {"end": "refused"}])
    slower = msgspec.structs.replace(good, ttft_s=1.1)
    lines = compared([(measured, [good, good], [slower, slower])], LIMITS)
    assert lines[2] == "| chats | 1 | 1 | ours | 50%, 100% | 50%, 0% | 1.50, 1.00 | 30, 20 |"
    assert lines[-3] == "Mean difference of the share of good requests: 50%."
    assert lines[-2] == (
        "Trials' medians are foretold wrongly by (median and mean of trials): TTFT 33% and 33%, "
        "TBT 33% and 33%."
    )
    assert lines[-1] == (
        "Median difference of single requests: TTFT 33% and TBT 33%; of two simulations whose "
        "steps scatter differently: TTFT 10% and TBT 0%."
    )


def test_a_profile_is_read_and_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    sizes = {"num_new_tokens": 8, "num_context_tokens": 0, "num_sequences": 1, "seconds": 0.1}
    path.write_text(json.dumps({role: {"samples": [sizes]} for role in ("prefill", "decode")}))
    assert read_profile(path) == [CostSample(8, 0, 1, 0.1)] * 2
    path.write_text("{}")
    with pytest.raises(ConfigError, match="mooncake profile"):
        read_profile(path)

"""Which workers' steps are planned for a prediction."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from mooncake.base import Role
from mooncake.scheduler.placement.step_outlook import FEW, MANY, planned_for, planned_ttft_s
from mooncake.scheduler.placement.views import Assignment, InstanceView
from mooncake.scheduler.placement.worker_choice import PrefillOption
from tests.support.scheduler.scheduling import hello

PLANNED = replace(
    hello("d0", Role.DECODE), max_num_seqs=64, max_batched_tokens=1024, max_gap_s=10.0,
    first_token_s=20.0,
)  # fmt: skip


def option(view: InstanceView, num_new: int = 100) -> PrefillOption:
    return PrefillOption(
        view=view, num_cached_blocks=0, num_new_tokens=num_new, sources=(), queue_s=view.queued_s(),
        fetch_s=0.0, compute_s=view.cost.prefill_s(num_new, 0, 1024), tail_s=0.0,
        streams_s=view.streams_s(num_new),
    )  # fmt: skip


def test_a_worker_without_limits_or_with_stages_is_not_planned() -> None:
    assert planned_for(replace(PLANNED, max_gap_s=None, first_token_s=None)) is None
    assert planned_for(replace(PLANNED, num_stages=2)) is None
    config = planned_for(replace(PLANNED, max_gap_is_target=True))
    assert config is not None
    assert (config.max_gap_s, config.max_gap_is_target, config.first_token_s) == (10.0, True, 20.0)
    view = InstanceView.of(replace(PLANNED, max_gap_s=None, first_token_s=None))
    assert planned_ttft_s(option(view), (), 50.0, 1.0) is None


@pytest.mark.parametrize(
    "odd", [
        {"max_num_seqs": 0}, {"max_batched_tokens": 0}, {"max_batched_tokens": 63},
        {"max_gap_s": 0.0}, {"max_gap_s": math.nan}, {"first_token_s": -1.0},
    ],
)  # fmt: skip
def test_limits_with_which_no_engine_runs_do_not_fail_a_request(odd: dict[str, Any]) -> None:
    view = InstanceView.of(replace(PLANNED, **odd))
    assert planned_ttft_s(option(view), (), 50.0, 1.0) is None


def test_many_sequences_that_no_limit_touches_are_not_looked_at() -> None:
    view = InstanceView.of(PLANNED)
    assert planned_ttft_s(option(view), (), 50.0, 1.0) is not None
    for number in range(FEW + 1):
        name = f"r{number}"
        view.assign(
            Assignment(request_id=name, placed_s=0.0, num_context_tokens=50, num_prefill_tokens=50)
        )
        view.prefilled(name, 0.5)
    assert planned_ttft_s(option(view), (), 50.0, 1.0) is None
    view.hello = replace(PLANNED, max_gap_s=0.02)
    assert planned_ttft_s(option(view), (), 50.0, 1.0) is not None


def test_a_crowd_is_not_looked_at_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    view = InstanceView.of(replace(PLANNED, first_token_s=1e-6))
    for number in range(MANY + 1):
        assert planned_ttft_s(option(view), (), 50.0, 1.0) is not None
        view.assign(
            Assignment(
                request_id=f"r{number}", placed_s=0.0, num_context_tokens=50, num_prefill_tokens=50
            )
        )
    for looks in ("open_prompts", "open_streams"):
        monkeypatch.setattr(InstanceView, looks, None)
    assert planned_ttft_s(option(view), (), 50.0, 1.0) is None


def test_prompts_that_a_request_overtakes_do_not_count() -> None:
    view = InstanceView.of(PLANNED)
    view.assign(
        Assignment(request_id="low", placed_s=1.0, num_prefill_tokens=4096, num_context_tokens=4096)
    )
    behind_s = planned_ttft_s(option(view), (), 50.0, 1.0)
    before_s = planned_ttft_s(option(view), {"low"}, 50.0, 1.0)
    assert before_s is not None
    assert behind_s is not None
    assert before_s < behind_s

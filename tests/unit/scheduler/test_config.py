"""Settings are checked where they are made."""

import pytest

from mooncake.base import ConfigError
from mooncake.scheduler.config import POLICIES, SchedulerConfig


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"policy": "best"}, "policy"),
        ({"ttft_slo_s": 0.0}, "ttft_slo_s"),
        ({"tbt_slo_s": -1.0}, "tbt_slo_s"),
        ({"tbt_slo_s": float("nan")}, "tbt_slo_s"),
        ({"kvcache_balancing_threshold": 0.5}, "kvcache_balancing_threshold"),
        ({"max_inflight": 0}, "max_inflight"),
        ({"max_queue": 0}, "max_queue"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"heartbeat_timeout_s": 0.0}, "heartbeat_timeout_s"),
        ({"replace_wait_s": -1.0}, "replace_wait_s"),
        ({"whole_on_decode_max_tokens": -1}, "whole_on_decode_max_tokens"),
        ({"remote_bytes_per_s": 0.0}, "remote_bytes_per_s"),
    ],
)
def test_a_wrong_value_is_refused_by_name(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        SchedulerConfig(**changes)  # type: ignore[arg-type]  # wrong values are the point
    assert caught.value.param == key


def test_defaults_and_every_policy_are_valid() -> None:
    assert SchedulerConfig().ttft_slo_s is None
    assert [SchedulerConfig(policy=name).policy for name in POLICIES] == list(POLICIES)

"""The bounds for the number of replicas, as they are written."""

from __future__ import annotations

import pytest

from mooncake.base import ConfigError, Role
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.scaling.config import Bounds, ScalingConfig


def test_a_text_is_read() -> None:
    config = ScalingConfig.parse("prefill=0..4, decode=2..8,total=10,start=90,quiet=600.5")
    assert config == ScalingConfig(
        prefill=Bounds(0, 4), decode=Bounds(2, 8), total=10, start_s=90.0, quiet_s=600.5
    )
    assert config.bounds(Role.DECODE).clamp(1) == 2
    assert config.bounds(Role.DECODE).clamp(99) == 8
    assert Bounds().clamp(99) == 99


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prefill=1..4", "decode=MIN..MAX is missing"),
        ("prefill=1..4,decode=4", "decode=4 is not MIN..MAX"),
        ("prefill=4..1,decode=1..2", "4 is above 1"),
        ("prefill=1..4,decode=0..0", "without a decode replica nothing is served"),
        ("prefill=1..4,decode=1..2,decode=1..3", "each name once"),
        ("prefill=1..4,decode=1..2,max=3", "'max' is not known"),
        ("prefill=1..4,decode=1..2,total=x", "total=x is not a number"),
        ("prefill=2..4,decode=1..2,total=2", "less than the least of both"),
        ("prefill=1..4,decode=1..2,start=soon", "start=soon is not a number of seconds"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"autoscale: .*{why}.*write prefill=MIN..MAX"):
        SchedulerConfig(autoscale=text)

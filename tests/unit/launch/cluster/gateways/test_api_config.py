"""What the API of a gateway is told of its other settings."""

from __future__ import annotations

import pytest

from mooncake.api.config import ApiConfig
from mooncake.base import GenerateRequest
from mooncake.launch.cluster.gateways.gateway_process import api_config
from mooncake.launch.config.settings import ServeConfig
from mooncake.scheduler.fairness import QueuePosition
from mooncake.scheduler.requests.permits import AdmissionPermits
from tests.support.scheduler.scheduling import request


@pytest.mark.parametrize("max_inflight", [1, 7, 100, 1024, 10_000])
def test_all_sequences_of_the_largest_call_run_at_a_time(max_inflight: int) -> None:
    asked = api_config(ServeConfig(model="m", max_waiting_requests=max_inflight)).max_sequences
    permits = AdmissionPermits(max_inflight)
    held: list[GenerateRequest] = []
    for number in range(asked):
        held.append(request(f"r{number}"))
        position = permits.acquire(held[-1], 0.0)
        assert isinstance(position, QueuePosition), number
        permits.confirm(held[-1], position)
    permits.check_integrity(held)


def test_the_bound_in_the_documents_is_that_of_the_shipped_settings() -> None:
    assert api_config(ServeConfig(model="m")).max_sequences == ApiConfig().max_sequences

"""A call's own limits on latency by HTTP: from headers and keys to the requests of the cluster."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from mooncake.api.config import ApiConfig, ApiKey
from mooncake.api.http.limits import SLO_TBT, SLO_TTFT
from mooncake.base import GenerateRequest, OutputEvent
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.admission import check_limits
from tests.support.api.server import ScriptedBackend, answer, live_api_server, refusal
from tests.support.waiting import LONG_S

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
CHAT = "/v1/chat/completions"
ROUTES = [
    (CHAT, ASK),
    (CHAT, {**ASK, "stream": True, "n": 2}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 1, "use_beam_search": True, "n": 2}),
    ("/v1/messages", {**ASK, "model": "tiny"}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
]
OWN = {SLO_TTFT: "1500", SLO_TBT: "40.5"}


def admits(request: GenerateRequest) -> Iterable[OutputEvent]:
    """Answer as a cluster in which a first token takes a second and a gap 20 ms."""
    rejection = check_limits(SchedulerConfig(), request, 1.0, 0.02)
    if rejection is not None:
        return refusal(request, rejection.failure())
    return answer(request, [97, 98])


def ask(
    *calls: tuple[str, dict[str, Any], dict[str, str]], keys: tuple[ApiKey, ...] = ()
) -> tuple[list[httpx.Response], list[GenerateRequest]]:
    """Send these (path, body, headers) one after another; return replies and requests."""
    backend = ScriptedBackend(admits)

    async def main() -> list[httpx.Response]:
        config = ApiConfig(port=0, drain_s=0.2, keys=keys)
        async with (
            live_api_server(backend, config=config) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            return [
                await client.post(path, json=body, headers=headers) for path, body, headers in calls
            ]

    return asyncio.run(main()), backend.requests


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_headers_of_every_generating_route_set_the_limits_of_its_requests(
    path: str, body: dict[str, Any]
) -> None:
    (limited, plain), requests = ask((path, body, OWN), (path, body, {}))
    assert (limited.status_code, plain.status_code) == (200, 200), limited.text + plain.text
    half = len(requests) // 2
    limits = [(request.ttft_slo_s, request.tbt_slo_s) for request in requests]
    assert limits == [(1.5, 0.0405)] * half + [(None, None)] * half
    assert half > 0


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_limit_that_cannot_be_kept_refuses_its_call_and_no_other(
    path: str, body: dict[str, Any]
) -> None:
    (late, slow, served), _ = ask(
        (path, body, {SLO_TTFT: "999"}), (path, body, {SLO_TBT: "19"}), (path, body, OWN)
    )
    assert [late.status_code, slow.status_code, served.status_code] == [429, 429, 200]
    assert late.headers["retry-after"]
    message = "in about 1 s, which is over this request's own limit of 999 ms"
    assert message in late.json()["error"]["message"]
    message = "every 20 ms, which is over this request's own limit of 19 ms"
    assert message in slow.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_bad_limit_is_a_400_that_names_the_header(path: str, body: dict[str, Any]) -> None:
    (reply,), requests = ask((path, body, {SLO_TTFT: "soon"}))
    assert reply.status_code == 400
    assert requests == []
    message = reply.json()["error"]["message"]
    assert f"{SLO_TTFT}: must be a number of milliseconds from 1 to 3600000, not 'soon'" in message


def test_a_key_has_limits_of_its_own_and_a_strictest_one() -> None:
    key = ApiKey(
        digest=hashlib.sha256(b"sk").digest(), name="alice", slo_ttft_ms=2000, min_slo_tbt_ms=30
    )
    bearer = {"Authorization": "Bearer sk"}
    replies, requests = ask(
        (CHAT, ASK, bearer),
        (CHAT, ASK, {**bearer, **OWN}),
        (CHAT, ASK, {**bearer, SLO_TBT: "29"}),
        keys=(key,),
    )
    assert [reply.status_code for reply in replies] == [200, 200, 400]
    limits = [(request.ttft_slo_s, request.tbt_slo_s) for request in requests]
    assert limits == [(2.0, None), (1.5, 0.0405)]
    assert "from 30 to 3600000 with this API key" in replies[2].json()["error"]["message"]


def test_batch_work_may_not_have_a_limit() -> None:
    (reply,), _ = ask((CHAT, ASK | {"service_tier": "flex"}, OWN))
    assert reply.status_code == 400
    assert "batch work waits" in reply.json()["error"]["message"]

"""Receipts by HTTP: which calls have one, who may see it, and no text in it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake.api.config import ApiConfig, ApiKey
from mooncake.base import Failure, GenerateRequest, MonotonicClock, OutputEvent
from mooncake.telemetry.audit import configure_audit
from mooncake.telemetry.events import Accepted
from mooncake.telemetry.receipts import MAX_SEQUENCES, Kept, Receipts
from tests.support.api.server import ScriptedBackend, answer, live_api_server, refusal, says
from tests.support.waiting import LONG_S

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
CHAT = "/v1/chat/completions"
RECEIPT = "X-Mooncake-Receipt"
CONFIG = ApiConfig(port=0, drain_s=0.2, gateway_id="gw")


def key(name: str, **fields: Any) -> ApiKey:
    return ApiKey(digest=hashlib.sha256(name.encode()).digest(), name=name, **fields)


KEYS = (key("ann", tenant="one"), key("bob", tenant="two"), key("boss", operator=True))


def of(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


class Recorded(ScriptedBackend):
    """A backend that tells `receipts` of what it accepts."""

    def __init__(
        self, receipts: Receipts, script: Callable[[GenerateRequest], Iterable[OutputEvent | None]]
    ) -> None:
        super().__init__(script)
        self._receipts = receipts

    def submit(self, request: GenerateRequest, sink: Any) -> None:
        self._receipts.record(
            Accepted(
                request_id=request.request_id, at_s=MonotonicClock().now(),
                num_prompt_tokens=len(request.prompt_tokens), max_tokens=9,
            )
        )  # fmt: skip
        super().submit(request, sink)


def run(
    ask: Callable[[httpx.AsyncClient], Awaitable[None]],
    *,
    config: ApiConfig = CONFIG,
    keys: tuple[ApiKey, ...] = (),
    script: Any = None,
    keeps: bool = True,
) -> ScriptedBackend:
    """Have `ask` talk to a server that keeps receipts; return its backend."""
    receipts = Receipts(8, MonotonicClock(), config.gateway_id)
    backend = Recorded(receipts, script or says("hello"))
    if keys:
        config = ApiConfig(port=0, drain_s=0.2, gateway_id="gw", keys=keys)

    async def main() -> None:
        async with (
            live_api_server(backend, config=config, receipts=receipts if keeps else None) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            await ask(client)

    asyncio.run(main())
    return backend


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ASK),
        (CHAT, {**ASK, "stream": True}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 9}),
        ("/v1/messages", {**ASK, "model": "tiny"}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 9}),
    ],
)
def test_the_answer_names_its_receipt(path: str, body: dict[str, Any]) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        name = reply.headers[RECEIPT]
        assert name.startswith("gw-")
        got = await client.get(f"/v1/requests/{name}/receipt")
        assert got.status_code == 200, got.text
        receipt = got.json()
        assert (receipt["id"], receipt["gateway"], receipt["tenant"]) == (name, "gw", "")
        [sequence] = receipt["sequences"]
        assert sequence["num_prompt_tokens"] > 0
        again = await client.get(f"/v1/requests/{receipt['call_id']}/receipt")
        assert again.json()["id"] == name, "by the id of the answer, too"
        by_log = await client.get(f"/v1/requests/{sequence['request_id']}/receipt")
        assert by_log.json()["id"] == name

    [request] = run(ask).requests
    assert request.traced, "its workers tell what they do for it"


def test_a_refused_call_has_one_too() -> None:
    failure = Failure(status=429, error_type="RateLimitError", message="later", retry_after_s=1.0)

    async def ask(client: httpx.AsyncClient) -> None:
        reply = await client.post(CHAT, json=ASK)
        assert reply.status_code == 429
        got = await client.get(f"/v1/requests/{reply.headers[RECEIPT]}/receipt")
        assert got.status_code == 200

    run(ask, script=lambda request: refusal(request, failure))


def test_an_id_of_the_clients_choice_may_have_any_character_of_an_url() -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        reply = await client.post(CHAT, json=ASK, headers={"X-Request-Id": "a/b?c=%2F#d"})
        call_id = reply.json()["id"]
        assert call_id == "chatcmpl-a/b?c=%2F#d"
        quoted = "chatcmpl-a%2Fb%3Fc%3D%252F%23d"
        got = await client.get(f"/v1/requests/{quoted}/receipt")
        assert got.json()["id"] == reply.headers[RECEIPT]

    run(ask)


def test_no_text_of_prompt_or_answer_is_in_a_receipt() -> None:
    secret = "the hidden word"

    async def ask(client: httpx.AsyncClient) -> None:
        body = {**ASK, "messages": [{"role": "user", "content": secret}], "user": secret}
        reply = await client.post(CHAT, json=body)
        name = reply.headers[RECEIPT]
        for path in (f"/v1/requests/{name}/receipt", f"/v1/cluster/bundles/{name}"):
            got = await client.get(path)
            assert got.status_code == 200
            assert "hidden" not in got.text

    run(ask, script=says(secret))


def test_a_key_sees_the_receipts_of_its_tenant_and_an_operator_all() -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        reply = await client.post(CHAT, json=ASK, headers=of("ann"))
        name = reply.headers[RECEIPT]
        path = f"/v1/requests/{name}/receipt"
        assert (await client.get(path, headers=of("ann"))).json()["tenant"] == "one"
        assert (await client.get(path, headers=of("boss"))).json()["tenant"] == "one"
        receipt = (await client.get(path, headers=of("ann"))).json()
        nowhere = await client.get("/v1/requests/gw-none/receipt", headers=of("bob"))
        for each in (name, receipt["call_id"], receipt["sequences"][0]["request_id"]):
            hidden = await client.get(f"/v1/requests/{each}/receipt", headers=of("bob"))
            assert hidden.status_code == nowhere.status_code == 404
            said = hidden.text.replace(each, "gw-none")
            assert said == nowhere.text, "nothing says that it is there"
        assert (await client.get(path)).status_code == 401

    run(ask, keys=KEYS)


def test_a_receipt_whose_client_has_left_is_made_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has as many turns in the lane as the call had placements: here it never ends."""
    turns: list[None] = []

    def weigh(self: Receipts, kept: Kept) -> bool:
        turns.append(None)
        return True

    monkeypatch.setattr(Receipts, "weigh", weigh)

    async def ask(client: httpx.AsyncClient) -> None:
        reply = await client.post(CHAT, json=ASK)
        path = f"/v1/requests/{reply.headers[RECEIPT]}/receipt"
        leaving = asyncio.create_task(client.get(path))
        async with asyncio.timeout(LONG_S):
            while len(turns) < 3:
                await asyncio.sleep(0.01)
            leaving.cancel()
            num_before = -1
            while num_before < len(turns):
                num_before = len(turns)
                await asyncio.sleep(0.1)

    run(ask)


def test_bundles_are_for_operators() -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        reply = await client.post(CHAT, json=ASK, headers=of("ann"))
        path = f"/v1/cluster/bundles/{reply.headers[RECEIPT]}"
        assert (await client.get(path, headers=of("ann"))).status_code == 403
        got = await client.get(path, headers=of("boss"))
        assert got.json() == {"receipt": reply.headers[RECEIPT], "placements": [], "version": 2}

    run(ask, keys=KEYS)


def test_an_operator_who_reads_anothers_receipt_is_in_the_audit_log(tmp_path: Path) -> None:
    place = tmp_path / "audit.jsonl"

    async def ask(client: httpx.AsyncClient) -> None:
        for name in ("ann", "boss"):
            reply = await client.post(CHAT, json=ASK, headers=of(name))
            await client.get(f"/v1/requests/{reply.headers[RECEIPT]}/receipt", headers=of(name))
            await client.get(f"/v1/requests/{reply.headers[RECEIPT]}/receipt", headers=of("boss"))

    configure_audit("gw", str(place))
    try:
        run(ask, keys=KEYS)
    finally:
        configure_audit("", None)
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    assert [(line["event"], line["who"]) for line in lines] == [("operator_route", "boss")]
    assert lines[0]["path"].startswith("/v1/requests/gw-")


def test_of_a_call_with_many_answers_the_first_are_kept() -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        reply = await client.post(CHAT, json={**ASK, "n": MAX_SEQUENCES + 1})
        receipt = (await client.get(f"/v1/requests/{reply.headers[RECEIPT]}/receipt")).json()
        assert receipt["num_sequences"] == MAX_SEQUENCES + 1
        assert len(receipt["sequences"]) == MAX_SEQUENCES

    assert not any(request.traced for request in run(ask).requests), "that would be told in vain"


def test_a_beam_search_has_none() -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        body = {"prompt": "hi", "max_tokens": 2, "use_beam_search": True, "n": 2}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert RECEIPT not in reply.headers

    run(ask, script=lambda request: answer(request, [5]))


def test_a_repeated_answer_has_none() -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        once = {"Idempotency-Key": "k"}
        first = await client.post(CHAT, json=ASK, headers=once)
        again = await client.post(CHAT, json=ASK, headers=once)
        assert RECEIPT in first.headers
        assert again.json() == first.json()
        assert RECEIPT not in again.headers

    run(ask)


def test_what_is_no_call_has_none() -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        for reply in (
            await client.get("/v1/models"),
            await client.post("/tokenize", json={"prompt": "hi"}),
            await client.post(CHAT, json={**ASK, "model": "other"}),
        ):
            assert RECEIPT not in reply.headers

    run(ask)


def test_a_server_that_keeps_none_says_so() -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        reply = await client.post(CHAT, json=ASK)
        assert reply.status_code == 200
        assert RECEIPT not in reply.headers
        got = await client.get("/v1/requests/x/receipt")
        assert got.status_code == 404
        assert "max-receipts" in got.json()["error"]["message"]

    [request] = run(ask, keeps=False).requests
    assert not request.traced


def test_pages_of_other_origins_may_read_the_header() -> None:
    config = ApiConfig(port=0, drain_s=0.2, cors_origins=("https://app.example",))

    async def ask(client: httpx.AsyncClient) -> None:
        reply = await client.post(CHAT, json=ASK, headers={"Origin": "https://app.example"})
        assert RECEIPT in reply.headers["access-control-expose-headers"]

    run(ask, config=config)

"""Repeats with an `Idempotency-Key` over real sockets, by the official client and its retries."""

from __future__ import annotations

import asyncio
import hashlib
import json
import runpy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from mooncake.api.config import ApiConfig, ApiKey
from mooncake.api.http.repeats import Repeats
from mooncake.base import Failure, GenerateRequest
from tests.support.api.server import (
    Script,
    ScriptedBackend,
    answer,
    live_api_server,
    refusal,
    says,
)
from tests.support.clock import leap, run_leaping
from tests.support.relay import Relay
from tests.support.waiting import LONG_S

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
KEY = {"Idempotency-Key": "order 7"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: ASK,
    "/v1/completions": {"prompt": "hi", "n": 2},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**ASK, "model": "tiny", "max_tokens": 5},
}
EXAMPLE = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "retries.py"))
"""The names of the program that docs/retries.md shows."""


def pauses(request: GenerateRequest) -> list[Any]:
    """Two tokens, a hold until `resume`, then the rest."""
    events = answer(request, [97, 98, 99, 100])
    return [*events[:2], None, *events[2:]]


@asynccontextmanager
async def served(
    backend: ScriptedBackend, *keys: ApiKey, **config: Any
) -> AsyncIterator[httpx.AsyncClient]:
    settings = ApiConfig(port=0, drain_s=0.2, keys=keys, **config)
    async with (
        live_api_server(backend, config=settings) as url,
        httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
    ):
        yield client


async def hangs(backend: ScriptedBackend) -> None:
    async with asyncio.timeout(LONG_S):
        while not backend.num_hanging:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_s_own_retry_gets_the_answer_that_runs(stream: bool) -> None:
    """Its connection breaks before the head of the answer; nothing is computed twice."""

    async def main() -> None:
        backend = ScriptedBackend(lambda request: [None, *pauses(request)])
        async with served(backend) as http:
            with Relay(urlsplit(str(http.base_url)).port or 0) as relay:
                url = f"http://127.0.0.1:{relay.port}/v1"
                async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
                    asking = asyncio.ensure_future(ask(client))
                    await hangs(backend)
                    relay.hang_up()
                    while not relay.connections:
                        await asyncio.sleep(0.01)
                    while not asking.done():
                        backend.resume()
                        await asyncio.sleep(0.01)
                    assert asking.result() == "abcd"
            assert len(backend.requests) == 1
            assert backend.aborted == []

    async def ask(client: openai.AsyncOpenAI) -> str:
        chat = client.chat.completions
        if not stream:
            whole = await chat.create(model="tiny", messages=ASK["messages"], extra_headers=KEY)
            return whole.choices[0].message.content or ""
        chunks = await chat.create(
            model="tiny", messages=ASK["messages"], stream=True, extra_headers=KEY
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    asyncio.run(main())


def test_a_stream_that_broke_is_given_again_from_its_start() -> None:
    async def main() -> None:
        backend = ScriptedBackend(pauses)
        alice = ApiKey(digest=hashlib.sha256(b"a").digest(), name="alice", max_concurrent=1,
                       tokens_per_min=20)  # fmt: skip
        headers = {"Authorization": "Bearer a"}
        async with served(backend, alice) as client:
            body = {**ASK, "stream": True}
            async with client.stream("POST", CHAT, json=body, headers=headers | KEY) as reply:
                begun = await anext(reply.aiter_bytes())
            assert b"chatcmpl" in begun
            await hangs(backend)
            other = await client.post(CHAT, json=body, headers=headers)
            assert other.status_code == 429, "it goes on, with its permit"
            asking = asyncio.ensure_future(client.post(CHAT, json=body, headers=headers | KEY))
            await asyncio.sleep(0.1)
            backend.resume()
            again = await asking
            assert again.status_code == 200, "its repeat needs no other, and no tokens"
            assert again.content.startswith(begun)
            assert again.content.endswith(b"data: [DONE]\n\n")
            assert again.headers["idempotent-replayed"] == "true"
            late = await client.post(CHAT, json=body, headers=headers | KEY)
            assert late.content == again.content
            assert (len(backend.requests), backend.aborted) == (1, [])

    asyncio.run(main())


def test_a_repeat_whose_answer_is_forgotten_passes_no_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its key's limits were not asked for, and its body arrives when nothing is kept any more."""

    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        alice = ApiKey(digest=hashlib.sha256(b"a").digest(), name="alice", max_concurrent=1)
        headers = {"Authorization": "Bearer a", "Content-Type": "application/json"}
        forgotten = asyncio.Event()
        known: list[bool] = []
        knows = Repeats.knows

        def told(self: Repeats, *asked: Any) -> bool:
            known.append(knows(self, *asked))
            return known[-1]

        monkeypatch.setattr(Repeats, "knows", told)

        async def slowly() -> AsyncIterator[bytes]:
            yield b"{"
            await forgotten.wait()
            yield json.dumps(ASK).encode()[1:]

        async with served(backend, alice, kept_answer_s=20) as client:
            first = await client.post(CHAT, json=ASK, headers=headers | KEY)
            assert first.status_code == 200
            slow = asyncio.ensure_future(client.post(CHAT, content=slowly(), headers=headers | KEY))
            while known != [False, True]:
                await asyncio.sleep(0.001)
            await leap(21)  # less than a body may take
            backend.script = pauses
            holding = asyncio.ensure_future(client.post(CHAT, json=ASK, headers=headers))
            await hangs(backend)
            forgotten.set()
            assert (await slow).status_code == 409
            backend.resume()
            assert (await holding).status_code == 200
            assert len(backend.requests) == 2

    run_leaping(main())


def test_nobody_comes_back() -> None:
    """The request ends, and its permit is free."""

    async def main() -> None:
        backend = ScriptedBackend(pauses)
        async with served(backend, linger_s=0.2, max_concurrent=1) as client:
            body = {**ASK, "stream": True}
            async with client.stream("POST", CHAT, json=body, headers=KEY) as reply:
                await anext(reply.aiter_bytes())
            async with asyncio.timeout(LONG_S):
                await backend.abort_seen.wait()
                while (await client.post(CHAT, json={})).status_code == 429:
                    await asyncio.sleep(0.01)
            assert backend.num_running == 0
            backend.script = says("hello")
            assert (await client.post(CHAT, json=body, headers=KEY)).status_code == 200
            assert len(backend.requests) == 2

    asyncio.run(main())


def test_two_gateways_sample_with_the_same_seed() -> None:
    """Unless the request names one; without a key, or with another one, seeds differ."""

    async def main() -> None:
        seeds: list[list[int]] = []
        for _ in range(2):
            backend = ScriptedBackend(says("hello"))
            async with served(backend) as client:
                for path, body in BODIES.items():
                    named = {**body, "seed": 5}
                    for asked, headers in ((body, KEY | {"x": "1"}), (named, KEY), (body, {})):
                        key = {"Idempotency-Key": f"{path} {headers}"} if headers else {}
                        reply = await client.post(path, json=asked, headers=key)
                        assert reply.status_code == 200, reply.text
            seeds.append([request.sampling.seed for request in backend.requests])
        one, other = seeds
        same = [a == b for a, b in zip(one, other, strict=True)]
        assert same == [True, True, False, *([True] * 4 + [False] * 2), *([True, True, False] * 2)]
        keyed = [
            seed for seed, alike in zip(one, same, strict=True) if alike and seed not in (5, 6)
        ]
        assert len(set(keyed)) == len(keyed) == 5

    asyncio.run(main())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_complete_answers_are_kept_and_errors_are_not(path: str, stream: bool) -> None:
    failure = Failure.unavailable("not now")

    def breaks(request: GenerateRequest) -> list[Any]:
        return [answer(request, [97])[0], *refusal(request, failure)]

    async def main() -> None:
        backend = ScriptedBackend(breaks)
        async with served(backend) as client:
            body = {**BODIES[path], "stream": stream}
            broken = await client.post(path, json=body, headers=KEY)
            assert broken.status_code == (200 if stream else 503)
            assert b"not now" in broken.content
            backend.script = says("hello")
            num_broken = len(backend.requests)
            whole = await client.post(path, json=body, headers=KEY)
            again = await client.post(path, json=body, headers=KEY)
            assert b"hello" in whole.content
            assert again.content == whole.content
            assert len(backend.requests) == 2 * num_broken
            for where, asked in ((path, {**body, "temperature": 0.5}), ("/tokenize", body)):
                other = await client.post(where, json=asked, headers=KEY)
                assert other.status_code == 422
                assert "take a new key" in other.text

    asyncio.run(main())


def of_the_example(first: Script, second: Script, **request: Any) -> tuple[list[str], list[int]]:
    """Return what the example shows of one answer of two gateways, and how often each was asked."""
    shown: list[str] = []

    async def main() -> list[int]:
        backends = ScriptedBackend(first), ScriptedBackend(second)
        async with served(backends[0]) as one, served(backends[1]) as other:
            urls = [str(client.base_url).rstrip("/") for client in (one, other)]
            asked = {"model": "tiny", "messages": ASK["messages"], **request}
            await asyncio.to_thread(lambda: shown.extend(EXAMPLE["stream"](urls, **asked)))
        return [len(backend.requests) for backend in backends]

    return shown, asyncio.run(main())


def breaks_off(*tokens: int) -> Script:
    """Answer as a gateway that is stopped: with so many tokens, then with an error."""
    gone = Failure.unavailable("the server is shutting down")
    return lambda request: [*answer(request, [*tokens])[: len(tokens)], *refusal(request, gone)]


@pytest.mark.parametrize("tokens", [(), (97,), (97, 98, 99)])
def test_the_example_asks_the_next_gateway_when_one_is_stopped(tokens: tuple[int, ...]) -> None:
    """Before the answer begins or in the midst of it; no text is shown twice."""
    shown, num_asked = of_the_example(breaks_off(*tokens), says("abcd"))
    assert ("".join(shown), num_asked) == ("abcd", [1, 1])


def test_the_example_joins_no_two_answers() -> None:
    with pytest.raises(EXAMPLE["OtherAnswer"], match=r"after \d characters"):
        of_the_example(breaks_off(97, 98), says("axyz"))


def test_the_example_asks_no_other_gateway_for_what_is_wrong() -> None:
    asked: list[GenerateRequest] = []

    def notes(request: GenerateRequest) -> list[Any]:
        asked.append(request)
        return answer(request, [97])

    with pytest.raises(openai.BadRequestError):
        of_the_example(notes, notes, temperature=-1)
    assert asked == []

"""`best_of` keeps the most likely answers; everything generated is paid for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from mooncake.base import GenerateRequest, OutputEvent, RequestOutput, TokenLogprobs
from tests.support.api.server import ScriptedBackend, answer, live_api_server, tiny_tokenizer
from tests.support.waiting import LONG_S

TOKENIZER = tiny_tokenizer()
LIKELIHOODS = {0: -2.0, 1: -0.5, 2: -1.0, 3: -3.0}


def script(request: GenerateRequest) -> Iterable[OutputEvent | None]:
    """Answer choice i with its number, as likely as `LIKELIHOODS` says."""
    which = int(request.request_id.rsplit("-", 1)[1]) % 4
    for event in answer(request, TOKENIZER.encode(f"c{which}<|im_end|>")):
        if isinstance(event, RequestOutput):
            assert event.logprobs is not None
            entries = [TokenLogprobs(LIKELIHOODS[which], 1, []) for _ in event.tokens]
            yield RequestOutput(
                request_id=event.request_id,
                attempt=0,
                start=event.start,
                tokens=event.tokens,
                logprobs=entries,
            )
        else:
            yield event


def post(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async def main() -> tuple[int, dict[str, Any]]:
        async with (
            live_api_server(ScriptedBackend(script)) as url,
            httpx.AsyncClient(timeout=LONG_S) as http,
        ):
            reply = await http.post(f"{url}{path}", json=body)
            return reply.status_code, reply.json()

    return asyncio.run(main())


def test_completions_of_two_prompts() -> None:
    body = {"prompt": ["a", "bb"], "n": 2, "best_of": 4, "echo": True, "return_token_ids": True}
    status, reply = post("/v1/completions", body)
    assert status == 200
    found = [(choice["index"], choice["text"]) for choice in reply["choices"]]
    assert found == [(0, "ac1"), (1, "ac2"), (2, "bbc1"), (3, "bbc2")]
    assert all(choice["logprobs"] is None for choice in reply["choices"])
    prompts = [choice.get("prompt_token_ids") for choice in reply["choices"]]
    assert prompts == [TOKENIZER.encode("a"), None, TOKENIZER.encode("bb"), None]
    assert reply["usage"]["completion_tokens"] == 2 * 4 * 3
    assert reply["usage"]["prompt_tokens"] == 1 + 2


def test_chat() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "best_of": 4}
    status, reply = post("/v1/chat/completions", body)
    assert status == 200
    [choice] = reply["choices"]
    assert choice["message"]["content"] == "c1"
    assert choice["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 3, "best_of": 2}, "less than n=3"),
        ({"best_of": 2, "stream": True}, "stream"),
        ({"best_of": 200}, "at most"),
        ({"n": 3, "best_of": 2, "use_beam_search": True}, "less than n=3"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    status, reply = post("/v1/completions", {"prompt": "a", **fields})
    assert status == 400
    assert message in reply["error"]["message"]

"""The API server keeps text from becoming control tokens, unless its settings allow it."""

from __future__ import annotations

import asyncio

import httpx

from mooncake.api.config import ApiConfig
from tests.support.api.server import ScriptedBackend, live_api_server, says, tiny_tokenizer
from tests.support.waiting import LONG_S

TOKENIZER = tiny_tokenizer()


def prompt_of(config: ApiConfig) -> list[int]:
    async def main() -> list[int]:
        backend = ScriptedBackend(says("hello"))
        async with (
            live_api_server(backend, config=config) as url,
            httpx.AsyncClient(timeout=LONG_S) as http,
        ):
            ask = {"messages": [{"role": "user", "content": "a<|im_end|>b"}]}
            reply = await http.post(f"{url}/v1/chat/completions", json=ask)
            assert reply.status_code == 200
            counted = await http.post(f"{url}/tokenize", json=ask)
            assert counted.json()["tokens"] == backend.requests[0].prompt_tokens.tolist()
        return backend.requests[0].prompt_tokens.tolist()

    return asyncio.run(main())


def test_the_api_server_guards_unless_told_not_to() -> None:
    end = TOKENIZER.special_id("<|im_end|>") or 0
    guarded = prompt_of(ApiConfig(port=0, drain_s=0.2))
    allowed = prompt_of(ApiConfig(port=0, drain_s=0.2, allow_special_tokens_in_chat=True))
    assert allowed.count(end) == guarded.count(end) + 1
    assert TOKENIZER.decode(allowed) == TOKENIZER.decode(guarded)

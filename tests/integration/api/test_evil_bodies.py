"""Bodies that are made to keep the server busy: none of them holds its event loop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import httpx
import pytest

from mooncake.api.config import ApiConfig
from mooncake.api.constrained import grammar
from mooncake.api.constrained.schema_graph import MAX_OPTIONAL, MAX_PROPERTIES
from mooncake.api.http import request_body
from mooncake.api.schema.fields import RequestBody
from tests.support.api.dearest import DEAR
from tests.support.api.server import ScriptedBackend, live_api_server, says, tiny_model
from tests.support.slowness import slowness
from tests.support.waiting import LONG_S

MAX_GAP_S = 1.0
"""On a usual machine: far more than the loop stands still for, far less than before the bodies were
bounded (3 to 30 s each)."""
CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
N = 2_000_000
RUNS = ("a" * 25_000 + " ") * 40
KEEP = {"truncate_prompt_tokens": 5}


def says_user(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **more}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "go", **function}}


LARK = 'start: "a"\n'
NAMES = [f"p{n}" for n in range(MAX_PROPERTIES)]
WIDE_SCHEMA = {"properties": {name: {} for name in NAMES}, "required": NAMES[MAX_OPTIONAL:]}


EVIL: dict[str, tuple[int, str, dict[str, Any]]] = {
    "openings": (400, CHAT, says_user("<" * N)),
    "openings, cut": (200, CHAT, says_user("<" * N, **KEEP)),
    "half names, cut": (200, CHAT, says_user("<|reserved_token_" * (N // 3), **KEEP)),
    "names, cut": (200, CHAT, says_user("<|im_end|>" * (N // 2), **KEEP)),
    "long runs": (200, COMPLETIONS, {"prompt": RUNS, "max_tokens": 1, **KEEP}),
    "long runs to count": (400, TOKENIZE, {"prompt": RUNS}),
    "openings to count": (400, TOKENIZE, {"messages": [{"role": "user", "content": "<" * N}]}),
    "openings in a tool": (200, CHAT, says_user("x", tools=[tool(description="<" * N)], **KEEP)),
    "openings in names": (
        200, CHAT, says_user("x", chat_template_kwargs={"<" * N: "<" * N}, **KEEP),
    ),
    "wide schema": (
        200, CHAT, says_user("x", guided_json=WIDE_SCHEMA),
    ),
    "too wide schema": (
        400, CHAT, says_user("x", guided_json={"properties": {f"p{n}": {} for n in range(9_000)}}),
    ),
    "many required names": (
        400, CHAT, says_user("x", guided_json={"required": [f"p{n}" for n in range(9_000)]}),
    ),
    "many patterns of names": (
        400, CHAT,
        says_user("x", guided_json={"patternProperties": {f"^p{n}$": {} for n in range(500)}}),
    ),
    "a wide constant": (
        400, CHAT, says_user("x", guided_json={"const": {f"p{n}": 1 for n in range(9_000)}}),
    ),
    "patterns without an end": (400, CHAT, says_user("x", guided_grammar=LARK + "\\/" * 49_000)),
    "strings without an end": (400, CHAT, says_user("x", guided_grammar=LARK + '\\"' * 49_000)),
    "long stops of many choices": (
        200, COMPLETIONS,
        {
            "prompt": ["x"] * 6, "n": 128, "max_tokens": 1,
            "stop": ["ab" * 510 + str(n) for n in range(32)],
        },
    ),
}  # fmt: skip
"""Status, path and body. With its bound taken out (letters tried name by name, runs looked for from
each character, work in the event loop, ends looked for from each quote, stop strings prepared for
each choice), each holds the loop for longer than `MAX_GAP_S`."""


def longest_gap_s(path: str, body: Mapping[str, Any]) -> tuple[float, int]:
    """Return how much CPU time this process took at worst while the server's loop did nothing else,
    and the status. What other processes take does not count.
    """

    async def main() -> tuple[float, int]:
        gaps: list[float] = []

        async def tick() -> None:
            last = time.process_time()
            while True:
                await asyncio.sleep(0.001)
                now = time.process_time()
                gaps.append(now - last)
                last = now

        content = json.dumps(body, ensure_ascii=False).encode()
        headers = {"Content-Type": "application/json"}
        model = tiny_model(max_model_len=100_000)
        async with live_api_server(ScriptedBackend(says("hello")), model=model) as url:
            ticking = asyncio.create_task(tick())
            reply = await asyncio.to_thread(
                httpx.post, url + path, content=content, headers=headers, timeout=LONG_S
            )
            ticking.cancel()
        return max(gaps, default=0.0), reply.status_code

    return asyncio.run(main())


@pytest.mark.parametrize("name", [*EVIL, *DEAR])
def test_no_body_holds_the_loop(name: str) -> None:
    expected, path, body = EVIL.get(name) or DEAR[name]
    gap_s, status = longest_gap_s(path, body)
    assert status == expected
    assert gap_s < MAX_GAP_S * slowness()


def test_a_wide_schema_is_read_and_compiled_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the loop goes on however long it takes: the library lets others run meanwhile."""
    where: dict[str, set[int]] = {}

    def watch(module: ModuleType, name: str) -> None:
        work = getattr(module, name)

        def watched(*words: Any) -> Any:
            where.setdefault(name, set()).add(threading.get_ident())
            return work(*words)

        monkeypatch.setattr(module, name, watched)

    for module, name in (
        (request_body, "_validated"), (grammar, "check_schema"), (grammar, "_cleaned"),
        (grammar, "_fault"),
    ):  # fmt: skip
        watch(module, name)
    _, path, body = EVIL["wide schema"]
    names = {f"of this test alone {number}": {} for number in range(MAX_PROPERTIES)}
    wide = {"properties": names, "required": list(names)}
    assert longest_gap_s(path, body | {"guided_json": wide})[1] == 200
    assert len(where) == 4
    assert not any(threading.get_ident() in threads for threads in where.values())


def test_json_in_strings_costs_as_much_as_json() -> None:
    for field in ({"guided_json": "{}," * 100_000}, {"structured_outputs": {"json": "[" * 70_000}}):
        _, status = longest_gap_s(CHAT, says_user("x", **field))
        assert status == 413


def test_what_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    async def main() -> None:
        model = tiny_model()
        limit = model.max_model_len * model.tokenizer.longest_token
        async with (
            live_api_server(ScriptedBackend(says("hello")), model=model) as url,
            httpx.AsyncClient(timeout=LONG_S) as http,
        ):
            for path, body in (
                (CHAT, says_user("x" * limit)),
                (COMPLETIONS, {"prompt": "x" * (limit + 1)}),
            ):
                reply = await http.post(url + path, json=body)
                assert reply.status_code == 400
                assert f"at most {limit} characters" in reply.json()["error"]["message"]

    asyncio.run(main())


def test_others_are_answered_while_a_body_of_many_turns_is_validated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    validated = request_body._validated

    def slowly(kind: type[RequestBody], body: bytes) -> RequestBody:
        if len(body) > 10_000:
            begun.set()
            assert go_on.wait(LONG_S), "the loop does nothing else"
        return validated(kind, body)

    async def main() -> None:
        monkeypatch.setattr(request_body, "_validated", slowly)
        async with (
            live_api_server(ScriptedBackend(says("hello"))) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as http,
        ):
            short = says_user("x", **KEEP)
            turns = {"messages": [*short["messages"]] * 1000}
            asking = asyncio.create_task(http.post(CHAT, json=short | turns))
            assert await asyncio.to_thread(begun.wait, LONG_S)
            assert (await http.post(CHAT, json=short)).status_code == 200
            assert not asking.done()
            go_on.set()
            assert (await asking).status_code == 200
            wrong = await http.post(CHAT, json=short | turns | {"n": "x"})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "n"

    asyncio.run(main())


def test_a_client_that_leaves_while_its_body_is_validated_holds_no_memory_of_bodies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes are free for others at once, also while the thread still validates."""
    begun, go_on = threading.Event(), threading.Event()
    validated = request_body._validated

    def slowly(kind: type[RequestBody], body: bytes) -> RequestBody:
        if b"slow" in body:
            begun.set()
            assert go_on.wait(LONG_S)
        return validated(kind, body)

    async def main() -> None:
        monkeypatch.setattr(request_body, "_validated", slowly)
        config = ApiConfig(port=0, drain_s=0.2, max_inflight_body_bytes=100_000)
        async with (
            live_api_server(ScriptedBackend(says("hello")), config=config) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as http,
        ):
            turns = {"messages": [{"role": "user", "content": "slow" * 10}] * 1000}
            asking = asyncio.create_task(http.post(CHAT, json=says_user("x", **KEEP) | turns))
            assert await asyncio.to_thread(begun.wait, LONG_S)
            other = says_user("x", **KEEP, user="y" * 50_000)
            assert (await http.post(CHAT, json=other)).status_code == 429
            asking.cancel()
            end_s = time.monotonic() + LONG_S
            while (reply := await http.post(CHAT, json=other)).status_code == 429:
                assert time.monotonic() < end_s, reply.text
            assert reply.status_code == 200
            go_on.set()

    asyncio.run(main())

"""The agents of `benchmarks vllm-pool` and `engine-routing`, at servers that answer like vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from benchmarks.support.growing_agents import Agents, converse

ANSWER, CACHED = [7, 8], 3
LOAD = Agents(
    agents=2, turns=3, system_len=10, first_len=5, added_len=4, output_len=len(ANSWER), think_s=0
)
FIRST = LOAD.system_len + LOAD.first_len
"""Tokens of a first prompt."""


class Engine(http.server.ThreadingHTTPServer):
    """Streams the same answer to everybody, and remembers the prompts."""

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.prompts = status, list[list[int]]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def running(status: int = 200) -> Iterator[Engine]:
    with Engine(status) as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        yield engine
        engine.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        engine = self.server
        assert isinstance(engine, Engine)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["stream"], asked["max_tokens"]) == (True, len(ANSWER))
        engine.prompts.append(asked["prompt"])
        # vLLM leaves the details out where nothing was cached.
        details = {"cached_tokens": CACHED} if len(asked["prompt"]) > FIRST else None
        usage = {"prompt_tokens": len(asked["prompt"]), "prompt_tokens_details": details}
        events = [{"choices": [{"token_ids": [token]}]} for token in ANSWER]
        lines = [json.dumps(event) for event in [*events, {"choices": [], "usage": usage}]]
        self.send_response(engine.status)
        self.end_headers()
        self.wfile.write("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_each_turn_repeats_what_was_said_at_the_other_server() -> None:
    with running() as left, running() as right:
        found = asyncio.run(converse([left.url, right.url], LOAD, 1))
        at = {tuple(prompt): engine for engine in (left, right) for prompt in engine.prompts}
    for first in [one for one in at if len(one) == FIRST]:
        said = first
        for turn in range(1, LOAD.turns):
            whole = said + tuple(ANSWER)
            said = min((one for one in at if one[: len(whole)] == whole), key=len)
            assert len(said) == FIRST + turn * (len(ANSWER) + LOAD.added_len)
            assert (at[said] is at[first]) == (turn == 2)
    assert len({one[: LOAD.system_len] for one in at}) == 1
    assert len(at) == LOAD.agents * LOAD.turns
    assert found.num_prompt == sum(map(len, at))
    assert found.num_cached == CACHED * LOAD.agents * (LOAD.turns - 1)
    assert (len(found.first_s), len(found.next_s)) == (2, 4)
    assert min(found.first_s + found.next_s) > 0


def test_a_refusal_ends_the_run() -> None:
    with running(503) as engine, pytest.raises(RuntimeError, match="status 503"):
        asyncio.run(converse([engine.url], LOAD, 1))

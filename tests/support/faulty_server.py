"""A completions server without a model, whose answers follow from its prompts, with the faults that
users complain of: each can be turned on.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.waiting import LONG_S

GAUGE = "vllm:kv_cache_usage_perc"
TOKEN_S = 0.003
CONTEXT = 8192


@dataclass
class Faults:
    """What is wrong with the server."""

    leaks_on_abort: bool = False
    forged_handles_give_garbage: bool = False
    old_handles_give_their_prompt: bool = False
    """A handle that was used, or has grown old, gives the answer of the prompt it was made for."""
    warm_differs: bool = False
    fresh_change: bool = False
    """The answer of a prompt that got 24 tokens once is another one the second time."""
    hangs_one_in: int = 0
    """One of so many requests hangs; 0: none."""
    refuses_in_html: bool = False
    gives_handles: bool = False
    tells_cached: bool = True


@dataclass
class _State:
    faults: Faults
    held: int = 0
    seen: set[str] = field(default_factory=set)
    times: Counter[str] = field(default_factory=Counter)
    """How often each prompt was answered."""
    num_asked: int = 0
    handles: dict[str, list[int]] = field(default_factory=dict)
    """The handles of prompts that were computed and not fetched yet."""
    forgotten: dict[str, list[int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ending: threading.Event = field(default_factory=threading.Event)


def answer_of(prompt: list[int], count: int) -> list[int]:
    """Return the only right answer."""
    digest = hashlib.sha256(json.dumps(prompt).encode()).digest()
    return [digest[index % 32] for index in range(count)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: _State

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, {"data": [{"id": "no-model"}]})
        elif self.path == "/metrics":
            text = f'# HELP {GAUGE} x\n{GAUGE}{{a="b"}} {self.state.held / 1000}\n'
            self._send(200, text.encode())
        else:
            self._send(404, {"error": {"message": "not here"}})

    def do_POST(self) -> None:
        state = self.state
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            body = json.loads(raw)
            prompt = body["prompt"]
            assert isinstance(prompt, list)
            assert body["model"] == "no-model"
            assert body["max_tokens"] > 0
            assert isinstance(body.get("temperature", 0), int | float)
            assert min(prompt) >= 0
            assert len(prompt) < CONTEXT
        except (ValueError, KeyError, AssertionError):
            bad = (
                b"<html>no</html>" if state.faults.refuses_in_html else {"error": {"message": "no"}}
            )
            self._send(400, bad)
            return
        with state.lock:
            state.num_asked += 1
            state.held += 1
            hangs = state.faults.hangs_one_in and state.num_asked % state.faults.hangs_one_in == 0
        try:
            if hangs:
                state.ending.wait(LONG_S)
            self._answer(prompt, body)
            released = True
        except OSError:
            released = not state.faults.leaks_on_abort
        with state.lock:
            state.held -= released

    def _answer(self, prompt: list[int], body: dict[str, Any]) -> None:
        state, faults = self.state, self.state.faults
        name, count = json.dumps(prompt), body["max_tokens"]
        ids = answer_of(self._taken(prompt, body.get("kv_transfer_params") or {}), count)
        cached = len(prompt) // 16 * 16 if name in state.seen else 0
        times = state.times[name]
        if cached and (faults.warm_differs or (faults.fresh_change and times == 1 and count == 24)):
            ids[-1] += 1
        state.seen.add(name)
        state.times[name] += 1
        usage: dict[str, Any] = {"completion_tokens": count}
        if faults.tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        params = {}
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode") and faults.gives_handles:
            request_id = f"r{state.num_asked}"
            state.handles[request_id] = prompt
            for old in list(state.handles)[:-8]:
                state.forgotten[old] = state.handles.pop(old)
            params = {"kv_transfer_params": {
                "do_remote_prefill": True, "remote_request_id": request_id,
                "remote_block_ids": [1, 2],
            }}  # fmt: skip
        ending = {"text": "", "finish_reason": "length", "index": 0}
        if not body.get("stream"):
            state.ending.wait(TOKEN_S * count)
            whole = {"choices": [ending | {"token_ids": ids}], "usage": usage, **params}
            self._send(200, whole)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for token in ids:
            state.ending.wait(TOKEN_S)
            self._event({"choices": [{"index": 0, "text": "x", "token_ids": [token]}]})
        self._event({"choices": [ending]})
        self._event({"choices": [], "usage": usage, **params})
        self.wfile.write(b"data: [DONE]\n\n")

    def _taken(self, prompt: list[int], handle: dict[str, Any]) -> list[int]:
        """Return the prompt whose KV the request gets."""
        state, faults = self.state, self.state.faults
        if not handle.get("do_remote_prefill"):
            return prompt
        request_id = handle.get("remote_request_id", "")
        known = state.handles.pop(request_id, None)
        if known is not None:
            state.forgotten[request_id] = known
        if known == prompt:
            if max(handle["remote_block_ids"]) > 100 and faults.forged_handles_give_garbage:
                return [*prompt, 0]
            return prompt
        if faults.old_handles_give_their_prompt and request_id in state.forgotten:
            return state.forgotten[request_id]
        return prompt

    def _event(self, document: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, document: dict[str, Any] | bytes) -> None:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def faulty_server(faults: Faults) -> Iterator[str]:
    """Serve for the body; yield the address."""
    state = _State(faults)
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        state.ending.set()
        server.shutdown()
        thread.join()
        server.server_close()

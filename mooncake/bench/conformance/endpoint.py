"""One server as a client sees it: completions of token ids, which a check may break off, and the
server's figures. Owns its connections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mooncake.api.http.client import HttpClient, RequestFailed
from mooncake.api.http.client_wire import EventSplitter
from mooncake.bench.conformance.verdict import NotPossible
from mooncake.bench.server_counters import Series, parse_metrics

COMPLETIONS = "/v1/completions"
STATUS = "/v1/cluster/status"
HANDLE = "kv_transfer_params"
"""The field in which vLLM, and servers that follow it, name KV that lies on another worker."""
USAGE_GAUGES = (
    "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage",
)  # fmt: skip
"""Gauges of KV in use that known servers have."""
MAX_ERROR_CHARS = 300


@dataclass
class Answer:
    """What one request has brought so far."""

    status: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    ends: list[str] = field(default_factory=list)
    """The reasons with which its choices finished."""
    error: str = ""
    """What went wrong; empty: nothing did."""
    document: dict[str, Any] = field(default_factory=dict)
    """The last event that holds something besides text, such as usage or a handle."""

    @property
    def tokens(self) -> list[int] | str:
        """What was generated: token ids where the server gives them, else text."""
        return self.ids or self.text

    @property
    def num_cached(self) -> int | None:
        """How many prompt tokens came from a cache, or None if the server does not say."""
        details = (self.document.get("usage") or {}).get("prompt_tokens_details") or {}
        return details.get("cached_tokens")

    @property
    def told(self) -> str:
        """How the answer ended, in a few words."""
        return self.error or ", ".join(self.ends) or f"status {self.status} and no end"


class Endpoint:
    """Asks one server. Use it in one event loop, and close it there."""

    def __init__(self, url: str, model: str, headers: Mapping[str, str], *, insecure: bool) -> None:
        """Raises ConfigError when `url` is not the URL of a server."""
        self.url, self.model = url, model
        self.headers = dict(headers)
        self._insecure = insecure
        self._client = HttpClient(url, insecure=insecure)

    def close(self) -> None:
        self._client.close()

    async def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        on_token: Callable[[int], None] | None = None,
        **fields: Any,
    ) -> Answer:
        """Stream a greedy completion and return what came. Calls `on_token` for each event with
        text. It never raises: the answer says what went wrong. A caller that cancels it goes away
        as a client would, and the connection is closed.
        """
        body = {
            "model": self.model, "prompt": list(prompt), "max_tokens": max_tokens,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True,
            **fields,
        }  # fmt: skip
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        answer, events, raw = Answer(), EventSplitter(), bytearray()

        def take(data: bytes, _: float) -> None:
            if not body["stream"] or len(raw) < 4 * MAX_ERROR_CHARS:
                raw.extend(data)
            for event in events.feed(data):
                if event != b"[DONE]":
                    _add(answer, msgspec.json.decode(event))
                    if on_token is not None and (answer.ids or answer.text):
                        on_token(len(answer.ids))

        try:
            answer.status = await self.post(COMPLETIONS, msgspec.json.encode(body), take)
            if answer.status == 200 and not body["stream"]:
                _add(answer, msgspec.json.decode(bytes(raw)))
        except (RequestFailed, msgspec.MsgspecError, LookupError, TypeError) as error:
            answer.error = str(error) or repr(error)
        if answer.status not in (0, 200):
            words = bytes(raw).decode(errors="replace")[:MAX_ERROR_CHARS]
            answer.error = f"status {answer.status}: {words}"
        return answer

    async def post(self, path: str, body: bytes, take: Callable[[bytes, float], None]) -> int:
        """Send a JSON body and return the status. Raises RequestFailed when no complete answer
        came.
        """
        headers = {"Content-Type": "application/json", **self.headers}
        return (await self._client.request("POST", path, headers, body, take)).status

    async def get(self, path: str, *, url: str = "") -> bytes:
        """Return what a path of this server, or of another `url`, answers.

        Raises:
            NotPossible: the server does not answer there.
        """
        client = HttpClient(url, insecure=self._insecure) if url else self._client
        body = bytearray()
        try:
            answer = await client.request(
                "GET", path, {} if url else self.headers, b"", lambda data, _: body.extend(data)
            )
        except RequestFailed as error:
            raise NotPossible(f"{url}{path} does not answer ({error})") from error
        finally:
            if url:
                client.close()
        if answer.status != 200:
            raise NotPossible(f"{url}{path} answers {answer.status}")
        return bytes(body)

    async def status(self) -> dict[str, Any]:
        """Return the workers of a Mooncake server. Raises NotPossible when it is another server."""
        found: dict[str, Any] = msgspec.json.decode(await self.get(STATUS))
        return found

    async def kv_in_use(self, gauge: str | None) -> float:
        """Return how much KV requests hold: a number of blocks, or the value of `gauge`.

        Raises:
            NotPossible: the server has no such figure.
        """
        figures = parse_metrics((await self.get("/metrics")).decode())
        if gauge is None and any(name == "mooncake:worker_blocks" for name, _, _ in figures):
            return held_blocks(figures)
        for name in USAGE_GAUGES if gauge is None else (gauge,):
            values = [value for each, _, value in figures if each == name]
            if values:
                return round(sum(values), 6)
        raise NotPossible("/metrics has no gauge of KV in use; name one with `kv-gauge`")


def _add(answer: Answer, event: dict[str, Any]) -> None:
    if error := event.get("error"):
        answer.error = str(error)[:MAX_ERROR_CHARS]
    for choice in event.get("choices") or ():
        answer.ids += choice.get("token_ids") or ()
        answer.text += choice.get("text") or ""
        if choice.get("finish_reason"):
            answer.ends.append(choice["finish_reason"])
    if event.get("usage") or event.get(HANDLE):
        answer.document |= {name: event[name] for name in ("usage", HANDLE) if event.get(name)}


def held_blocks(figures: Sequence[Series]) -> float:
    """Return how many blocks of Mooncake's workers are neither free nor only cached."""
    held = 0.0
    for name, labels, value in figures:
        in_pool = labels.get("role") == "kvstore"
        held += value if name == "mooncake:worker_blocks" else 0.0
        held -= value if name == "mooncake:worker_free_blocks" else 0.0
        held -= value if name == "mooncake:worker_cached_blocks" and in_pool else 0.0
    return held

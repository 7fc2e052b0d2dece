"""The state of an API server in front of other people's engines: the fleet, a client for each
engine, their health, and the calls that run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mooncake.api.config import ApiConfig
from mooncake.api.engines.asked import Asked
from mooncake.api.engines.exchange import MAX_ASKED_BYTES, EngineRefused, Exchange, ask_json
from mooncake.api.http.client import HttpClient, RequestFailed
from mooncake.api.running_calls import Serving
from mooncake.base import (
    Clock,
    IdSource,
    MooncakeError,
    Role,
    Unavailable,
    WorkerLoad,
    pack_tokens,
)
from mooncake.scheduler.engines.fleet import Fleet
from mooncake.scheduler.engines.prefixes import Prompt
from mooncake.telemetry.events import Recorder, WorkerJoined, WorkerLeft, WorkerReported
from mooncake.telemetry.health import Probe

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at an engine's health."""
LOOK_LIMIT_S = 10.0
"""An engine that does not answer a look within this time takes no requests until it does."""
TOKENIZE_LIMIT_S = 2.0
"""A prompt whose tokens are not known after this long is placed by its text."""
UNABLE_S = 60.0
"""An engine that could not tokenize is not asked again for this long."""
WRONG = (400, 422)
"""Statuses by which an engine says that a request is wrong."""
MAX_MODEL_CHARS = 512


class EngineProxy(Serving):
    """The state that all requests share. Everything runs in one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        engines: Sequence[str],
        config: ApiConfig,
        *,
        ids: IdSource,
        clock: Clock,
        recorder: Recorder,
        metrics: Callable[[bool], bytes],
        engine_key: str | None = None,
        came_up: Callable[[str], None] = lambda _: None,
        look_s: float = LOOK_S,
    ) -> None:
        """`engines`: the URLs of `fleet`. `engine_key`: the key that they expect; None: none, or
        that of the client where this server needs none. `came_up` is told of an engine that takes
        requests again.
        """
        super().__init__(config.drain_s)
        self.fleet = fleet
        self.config = config
        self.clock = clock
        self.recorder = recorder
        self._ids = ids
        self._metrics = metrics
        self._engine_key = engine_key
        self._needs_keys = bool(config.api_keys or config.keys)
        self._came_up = came_up
        self._look_s = look_s
        self._clients = {url: HttpClient(url) for url in engines}
        self._cards: dict[str, list[dict[str, Any]]] = {url: [] for url in engines}
        self._looks = {url: asyncio.Event() for url in engines}
        self._exchanges: dict[str, set[Exchange]] = {url: set() for url in engines}
        self._unable_until_s: dict[str, float] = {}
        self._tokenizing: set[str] = set()
        """Engines that have tokenized a prompt."""

    # ------------------------------------------------------- what operators and the end ask

    async def failing(self, probe: Probe) -> MooncakeError | None:
        if probe is not Probe.READY:
            return None
        if self.draining:
            return self.shutting_down()
        return None if self.fleet.num_up else Unavailable("not ready: no engine takes requests")

    async def metrics(self, for_operator: bool) -> bytes:
        return self._metrics(for_operator)

    def status(self) -> Any:
        own = {
            "id": self.config.gateway_id, "state": "draining" if self.draining else "up",
            "num_inflight": len(self.fleet),
        }  # fmt: skip
        return {"gateways": [own], "workers": [], "engines": self.fleet.status()}

    def cards(self) -> list[dict[str, Any]]:
        """Return what engines say of their models, each model once."""
        found: dict[str, dict[str, Any]] = {}
        for url, cards in self._cards.items():
            for card in cards if self.fleet.is_up(url) else ():
                found.setdefault(card["id"], card)
        return list(found.values())

    def close(self) -> None:
        """Close the idle connections to engines."""
        for client in self._clients.values():
            client.close()

    # ------------------------------------------------------- what calls ask

    def new_id(self) -> str:
        """Return a fresh random id."""
        return self._ids.hex(16)

    @contextlib.contextmanager
    def exchange(
        self, url: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Iterator[Exchange]:
        """Send a request to an engine, with what it needs of the client's `headers`. It fails when
        the engine's health does.
        """
        with Exchange(self._clients[url], "POST", path, self._headers(headers), body) as exchange:
            self._exchanges[url].add(exchange)
            try:
                yield exchange
            finally:
                self._exchanges[url].discard(exchange)

    async def prompt_of(self, asked: Asked, headers: Mapping[str, str]) -> Prompt:
        """Return a request's prompt for placement. If that helps, an engine tokenizes it."""
        prompt = asked.prompt()
        if prompt.has_tokens or not self.fleet.needs_tokens(asked.model):
            return prompt
        if (body := asked.tokenize_body()) is None:
            return prompt
        url, now = self.fleet.least_loaded(asked.model), self.clock.now()
        if now < self._unable_until_s.get(url, now):
            return prompt
        try:
            found = await ask_json(
                self._clients[url], "POST", "/tokenize", self._headers(headers), body,
                limit_s=TOKENIZE_LIMIT_S,
            )  # fmt: skip
            prompt.take_tokens(pack_tokens(found["tokens"]))
            self._tokenizing.add(url)
        except (RequestFailed, TypeError, KeyError, OverflowError) as error:
            is_wrong = isinstance(error, EngineRefused) and error.status in WRONG
            if is_wrong and url in self._tokenizing:
                return prompt  # this request is wrong, others are not
            self._unable_until_s[url] = now + UNABLE_S
            _log.warning("%s tokenizes no prompts, so they are placed by text: %s", url, error)
        return prompt

    def suspect(self, url: str) -> None:
        """Look at an engine's health now: a request to it has failed."""
        self._looks[url].set()

    def _headers(self, given: Mapping[str, str]) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        for name in ("traceparent", "tracestate"):
            if name in given:
                headers[name] = given[name]
        if self._engine_key is not None:
            headers["Authorization"] = f"Bearer {self._engine_key}"
        elif not self._needs_keys and "authorization" in given:
            headers["Authorization"] = given["authorization"]
        return headers

    # ------------------------------------------------------- health

    async def watch(self) -> None:
        """Look at all engines' health again and again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for url in self._clients:
                group.create_task(self._watch(url))

    async def _watch(self, url: str) -> None:
        while True:
            self._looks[url].clear()
            try:
                await self._look(url)
                self._report(url)
            except Exception as error:  # the next looks go on
                _log.exception("the health check of %s failed", url)
                self._is_down(url, f"{type(error).__name__}: {error}", was_up=self.fleet.is_up(url))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._looks[url].wait()

    async def _look(self, url: str) -> None:
        client, headers, was_up = self._clients[url], self._headers({}), self.fleet.is_up(url)
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                await _healthy(client, headers)
                listed = await ask_json(client, "GET", "/v1/models", headers, limit_s=LOOK_LIMIT_S)
            self._cards[url] = _cards(listed)
        except (RequestFailed, TimeoutError) as error:
            self._is_down(url, str(error) or f"no answer within {LOOK_LIMIT_S:g} s", was_up=was_up)
            return
        self.fleet.up(url, [card["id"] for card in self._cards[url]])
        if not was_up:
            _log.info("%s takes requests for %s", url, ", ".join(map(_id, self._cards[url])))
            self._came_up(url)
            self.recorder.record(
                WorkerJoined(worker_id=url, at_s=self.clock.now(), role=Role.DECODE, num_blocks=0)
            )

    def _is_down(self, url: str, reason: str, *, was_up: bool) -> None:
        self.fleet.down(url, reason)
        if not was_up:
            return
        _log.warning("%s takes no requests any more: %s", url, reason)
        self.recorder.record(
            WorkerLeft(worker_id=url, at_s=self.clock.now(), role=Role.DECODE, reason=reason)
        )
        for exchange in list(self._exchanges[url]):
            exchange.fail(reason)

    def _report(self, url: str) -> None:
        if not self.fleet.is_up(url):
            return
        [seen] = [each for each in self.fleet.status() if each.url == url]
        counters = {
            "requests": seen.num_requests, "requests_failed": seen.num_failed,
            "prompt_tokens": seen.num_prompt_tokens, "cached_tokens": seen.num_cached_tokens,
        }  # fmt: skip
        self.recorder.record(
            WorkerReported(
                worker_id=url, at_s=self.clock.now(), role=Role.DECODE,
                load=WorkerLoad(
                    num_running=seen.num_running - seen.num_waiting,
                    num_waiting=seen.num_waiting,
                    counters={name: float(count) for name, count in counters.items()},
                ),
            )
        )  # fmt: skip


async def _healthy(client: HttpClient, headers: Mapping[str, str]) -> None:
    """Return if an engine says that it is healthy. Raises RequestFailed otherwise."""
    with Exchange(client, "GET", "/health", headers, b"") as exchange:
        status = await exchange.head()
        await exchange.whole(MAX_ASKED_BYTES)
    if status != 200:
        raise RequestFailed(f"its /health answers with status {status}")


def _cards(listed: Any) -> list[dict[str, Any]]:
    """Return the models that an engine lists."""
    data = listed.get("data") if isinstance(listed, dict) else None
    found = [
        card
        for card in (data if isinstance(data, list) else ())
        if isinstance(card, dict) and isinstance(card.get("id"), str)
        and len(card["id"]) <= MAX_MODEL_CHARS
    ]  # fmt: skip
    if not found:
        raise RequestFailed("its /v1/models lists no model")
    return found


def _id(card: Mapping[str, Any]) -> str:
    return str(card["id"])

"""`mooncake.LLM`: the colocated engine as a Python object, for scripts and notebooks.

Owns a thread with the gateway's event loop. Calls go through the very application that HTTP clients
reach, without a socket, so that both mean and check the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx

from mooncake.api import create_app, load_served_model
from mooncake.base import InternalError, InvalidRequest, MooncakeError, Overloaded, Unavailable
from mooncake.launch import environment, machine_facts
from mooncake.launch.colocated import ColocatedWorkers
from mooncake.launch.config import resolve
from mooncake.launch.front import Front, api_config
from mooncake.launch.plan import check_memory, make_plan

JOIN_POLL_S = 0.01
BASE_URL = "http://mooncake"

Result = TypeVar("Result")
Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """"stop", "length" or, in a chat with tools, "tool_calls"."""
    message: Message | None = None
    """The whole message of a chat: reasoning and tool calls too."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """What came of one prompt: `n` answers, one unless more were asked for."""

    outputs: tuple[Completion, ...]
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def text(self) -> str:
        """The first answer."""
        return self.outputs[0].text


class LLM:
    """A model in this process. Use as a context, or `close` it.

    >>> with LLM("checkpoints/k2-small", max_model_len="4k") as llm:
    ...     llm.generate("Once upon a time", max_tokens=20, temperature=0)[0].text

    Settings are those of `mooncake serve`, with underscores. Fields of a call are those of the HTTP
    API (max_tokens, temperature, top_p, seed, stop, n, …).
    """

    def __init__(self, model: str, **settings: object) -> None:
        """Load the model; returns when it is ready.

        Raises:
            MooncakeError: a setting is wrong or the model cannot be loaded.
        """
        machine_facts.check_system()
        config = resolve({"model": model, "colocated": True, **settings}, None, {})
        plan = make_plan(config, machine_facts.num_cores())
        check_memory(plan, machine_facts.available_bytes())
        os.environ.update(environment.missing(environment.EARLY, os.environ))
        served = load_served_model(
            plan.model.path, names=config.names, max_model_len=plan.model.max_model_len
        )
        self._workers = ColocatedWorkers(config, plan)
        self._front = Front(plan, self._workers.gateway_channel, config.names[0])
        self._app = create_app(self._front.backend, served, api_config(config))
        self._limit = asyncio.Semaphore(max(1, plan.scheduler.max_inflight // 2))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._run(self._open())
            rows = self._workers.start(self._front, lambda *_: None)
            self._run(self._joined([row.worker_id for row in rows]))
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: str | Sequence[str] | Sequence[Sequence[int]], **fields: Any
    ) -> list[Generation]:
        """Go on with each prompt (text or token ids) and return what came, in order.

        Raises:
            MooncakeError: a field is wrong, or a prompt does not fit.
        """
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        bodies = [{"prompt": each, **fields} for each in listed]
        return self._run(self._all("/v1/completions", bodies))

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], **fields: Any
    ) -> list[Generation]:
        """Answer one conversation, or each of several, and return the answers in order.

        Raises:
            MooncakeError: a field is wrong, or a conversation does not fit.
        """
        one = bool(messages) and isinstance(messages[0], dict)
        bodies = [{"messages": each, **fields} for each in ([messages] if one else messages)]
        return self._run(self._all("/v1/chat/completions", bodies))

    def close(self) -> None:
        """End the engine and free its memory. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._run(self._shut())
        self._workers.stop()
        self._front.channel.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        self._front.backend.start()

    async def _shut(self) -> None:
        self._front.backend.stop()

    async def _joined(self, worker_ids: list[str]) -> None:
        while not self._front.knows(worker_ids):
            await asyncio.sleep(JOIN_POLL_S)

    async def _all(self, path: str, bodies: list[dict[str, Any]]) -> list[Generation]:
        if self._closed:
            raise InvalidRequest("this LLM is closed")
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url=BASE_URL, timeout=None) as http:
            return await asyncio.gather(*(self._one(http, path, body) for body in bodies))

    async def _one(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Generation:
        if body.get("stream"):
            raise InvalidRequest("stream: answers come whole here", param="stream")
        async with self._limit:
            response = await http.post(path, json={**body, "return_token_ids": True})
        document = response.json()
        if response.status_code != 200:
            raise _error(response.status_code, document["error"])
        usage = document["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return Generation(
            outputs=tuple(_completion(choice) for choice in document["choices"]),
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=details.get("cached_tokens") or 0,
        )


def _completion(choice: dict[str, Any]) -> Completion:
    message = choice.get("message")
    text = choice["text"] if message is None else message.get("content") or ""
    ids = tuple(choice.get("token_ids") or ())
    return Completion(text, ids, choice["finish_reason"], message)


def _error(status: int, error: dict[str, Any]) -> MooncakeError:
    kinds: dict[int, type[MooncakeError]] = {429: Overloaded, 503: Unavailable}
    kind = kinds.get(status, InvalidRequest if status < 500 else InternalError)
    return kind(error["message"], param=error.get("param"))

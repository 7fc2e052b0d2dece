"""`mooncake.LLM` and `mooncake.AsyncLLM`: the colocated engine as a Python object.

A call passes through the code that answers HTTP clients, without a socket, so both mean and check
the same.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mooncake.api.adapters.python_call import (
    PythonRequest,
    RequestOutput,
    SamplingParams,
    answer,
    answers,
    chat_request,
    completion_request,
)
from mooncake.api.api_server import ApiServer
from mooncake.api.model import load_served_model
from mooncake.api.text.tokenizer import Tokenizer
from mooncake.base import InvalidRequest, Unavailable
from mooncake.launch.cluster.colocated import ColocatedWorkers
from mooncake.launch.cluster.gateways.gateway_process import GatewayProcess, api_config
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import check_memory, make_plan
from mooncake.launch.host import environment, machine_facts

JOIN_POLL_S = 0.01
END_S = 10.0
"""How long running calls may take to end after they failed."""

Result = TypeVar("Result")
Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]


class AsyncLLM:
    """Runs a model in this process, for programs with an event loop of their own.

    >>> async with AsyncLLM("checkpoints/k2-small") as llm:
    ...     async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=20)):
    ...         print(output.text)

    Settings are those of `mooncake serve`, with underscores. All calls are made in the event loop
    in which it was started.
    """

    def __init__(self, model: str, **settings: object) -> None:
        """Read the settings and the tokenizer; `start`, or entering the block, loads the model.

        Raises:
            MooncakeError: a setting is wrong, or the model does not fit this machine.
        """
        machine_facts.check_system()
        config = resolve({"model": model, "colocated": True, **settings}, None, {})
        plan = make_plan(config, machine_facts.num_cores())
        check_memory(plan, machine_facts.available_bytes())
        os.environ.update(environment.missing(environment.EARLY, os.environ))
        served = load_served_model(
            plan.model.path, names=config.names, max_model_len=plan.model.max_model_len
        )
        self.max_calls = max(1, plan.scheduler.max_inflight // 2)
        """Number of calls at a time that are never refused."""
        self._workers = ColocatedWorkers(config, plan)
        self._gateway_process = GatewayProcess(plan, self._workers.gateway_channel, config.names[0])
        self._api_server = ApiServer(self._gateway_process.backend, served, api_config(config))
        self._worker_ids: list[str] = []
        self._closed = False

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self._api_server.model.tokenizer

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        **fields: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt (text or token ids) and yield the answer as it grows.

        Each output holds all there is so far; the last one is `finished`. Leaving the iterator, or
        cancelling its task, aborts the request. `fields` are those of `/v1/completions` and win
        over `sampling_params`.

        Raises:
            InvalidRequest: a field is unknown or out of range, or the prompt does not fit.
            MooncakeError: the request was refused or failed.
        """
        return self._answers(completion_request(prompt, sampling_params, fields))

    def chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **fields: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation as `generate` does; `fields` are those of `/v1/chat/completions`,
        such as `tools`."""
        return self._answers(chat_request(messages, sampling_params, fields))

    async def answer(self, request: PythonRequest) -> RequestOutput:
        """Return the complete answer to `request`."""
        self._check_open()
        return await answer(self._api_server, request)

    def _answers(self, request: PythonRequest) -> AsyncGenerator[RequestOutput, None]:
        self._check_open()
        return answers(self._api_server, request)

    async def start(self) -> None:
        """Load the model; returns when it can generate.

        Raises:
            MooncakeError: the model cannot be loaded.
        """
        await self.open()
        await asyncio.to_thread(self.load)
        await self.join()

    async def open(self) -> None:
        """Drive the gateway in this event loop: the first step of `start`."""
        self._gateway_process.backend.start()

    def load(self) -> None:
        """Load the model and start the workers, in any thread: the second step of `start`."""
        rows = self._workers.start(self._gateway_process, lambda *_: None)
        self._worker_ids = [row.worker_id for row in rows]

    async def join(self) -> None:
        """Wait until the gateway knows the workers: the last step of `start`."""
        while not self._gateway_process.knows(self._worker_ids):
            await asyncio.sleep(JOIN_POLL_S)

    async def close(self) -> None:
        """Fail the running calls, end the engine and free its memory. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._api_server.fail_all(Unavailable("this LLM was closed"))
        await self._api_server.calls_ended(END_S)
        self._gateway_process.backend.stop()
        await asyncio.to_thread(self._workers.stop)
        self._api_server.close()
        self._gateway_process.channel.close()

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("this LLM is closed")


class LLM:
    """Runs a model in this process, for scripts and notebooks. Use it as a context, or `close` it.

    >>> with LLM("checkpoints/k2-small", max_model_len="4k") as llm:
    ...     llm.generate("Once upon a time", SamplingParams(max_tokens=20))[0].text

    Settings are those of `mooncake serve`, with underscores. Owns a thread with an event loop; its
    methods may be called from any thread.
    """

    def __init__(self, model: str, **settings: object) -> None:
        """Load the model; returns when it can generate.

        Raises:
            MooncakeError: a setting is wrong or the model cannot be loaded.
        """
        self._engine = AsyncLLM(model, **settings)
        self._permits = asyncio.Semaphore(self._engine.max_calls)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)
        self._thread.start()
        try:
            self._run(self._engine.open())
            self._engine.load()  # in this thread, so that Ctrl-C interrupts it
            self._run(self._engine.join())
        except BaseException:
            self.close()
            raise

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self._engine.get_tokenizer()

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: Params = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Continue one prompt or several (text or token ids) and return the answers, in order.

        `sampling_params` are for all prompts, or one for each. `fields` are those of
        `/v1/completions` (n, max_tokens, logprobs, …) and win over `sampling_params`.

        Raises:
            InvalidRequest: a field is unknown or out of range, or a prompt does not fit.
            MooncakeError: a request was refused or failed.
        """
        one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        listed: Sequence[Any] = [prompts] if one else prompts
        return self._answers(
            completion_request(prompt, params, fields)
            for prompt, params in _with_params(listed, sampling_params)
        )

    def chat(
        self, messages: Messages | Sequence[Messages], sampling_params: Params = None, **fields: Any
    ) -> list[RequestOutput]:
        """Answer one conversation or several and return the answers, in order.

        As `generate`; `fields` are those of `/v1/chat/completions`, such as `tools`.
        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        listed: Sequence[Any] = [messages] if one else messages
        return self._answers(
            chat_request(conversation, params, fields)
            for conversation, params in _with_params(listed, sampling_params)
        )

    def close(self) -> None:
        """End the engine and free its memory. May be called twice."""
        if self._loop.is_closed():
            return
        self._run(self._engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self, requests: Iterable[PythonRequest]) -> list[RequestOutput]:
        if self._loop.is_closed():
            raise InvalidRequest("this LLM is closed")
        return self._run(self._all(list(requests)))

    async def _all(self, requests: Sequence[PythonRequest]) -> list[RequestOutput]:
        tasks = [asyncio.create_task(self._one(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # the calls beside the one that failed

    async def _one(self, request: PythonRequest) -> RequestOutput:
        async with self._permits:
            return await self._engine.answer(request)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:  # Ctrl-C ends what runs
            running.cancel()
            raise


def _with_params(
    listed: Sequence[Any], params: Params
) -> Iterable[tuple[Any, SamplingParams | None]]:
    """Pair each prompt with its parameters."""
    if params is None or isinstance(params, SamplingParams):
        return ((each, params) for each in listed)
    if len(params) != len(listed):
        raise InvalidRequest(
            f"there are {len(params)} SamplingParams for {len(listed)} prompts; give one for all, "
            "or one for each"
        )
    return zip(listed, params, strict=True)

"""Runs the calls of `LLM` and `AsyncLLM` in the event loop of the backend, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from mooncake.api.adapters.chat_call import MessageWriter, new_chat_call
from mooncake.api.adapters.completion_call import new_completion_call
from mooncake.api.adapters.python_output import OutputBuilder, RequestOutput
from mooncake.api.adapters.python_request import PythonRequest
from mooncake.api.api_server import ApiServer
from mooncake.api.generation.logprobs import LogprobSpeller
from mooncake.api.schema.chat import ChatRequest


async def answer(api_server: ApiServer, request: PythonRequest) -> RequestOutput:
    """Return the whole answer to `request`; cancelling aborts it.

    Raises:
        MooncakeError: the request was refused or failed.
    """
    builder = await _start(api_server, request)
    with api_server.running(builder.call):
        async with builder.call as call:
            deltas = await call.finish()
            await asyncio.to_thread(builder.add, deltas)  # prompt log-probabilities may be many
    return builder.output()


async def answers(
    api_server: ApiServer, request: PythonRequest
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the answer as it grows, each time from its start. Leaving the iterator aborts it.

    Raises:
        MooncakeError: the request was refused or failed.
    """
    builder = await _start(api_server, request)
    with api_server.running(builder.call):
        async with builder.call as call:
            if call.chooses:
                builder.add(await call.finish())
                yield builder.output()
                return
            while (deltas := await call.deltas()) is not None:
                if any(delta.prompt_logprobs is not None for delta in deltas):
                    await asyncio.to_thread(builder.add, deltas)
                else:
                    builder.add(deltas)
                if deltas:
                    yield builder.output()


async def _start(api_server: ApiServer, request: PythonRequest) -> OutputBuilder:
    body = request.body
    api_server.check_model(body.model)
    name = body.request_id or api_server.new_id()
    message = None
    if isinstance(body, ChatRequest):
        call = await new_chat_call(api_server, body, f"chatcmpl-{name}")
        message = MessageWriter(body).whole
    else:
        call, _ = await new_completion_call(api_server, body, f"cmpl-{name}")
    speller = LogprobSpeller(api_server.model.tokenizer, as_ids=False)
    return OutputBuilder(call, request, speller, message)

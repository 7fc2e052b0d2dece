"""The calls of `LLM` and `AsyncLLM`: their arguments become the bodies of the HTTP API, run in the
event loop of the backend, without HTTP, and their deltas become vLLM's output objects. The fields
of `mooncake.SamplingParams` are those of the HTTP bodies, from the same classes. The engine does
not see them: they are checked against the model and become a `mooncake.base.SamplingParams`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import msgspec
from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from mooncake.api.adapters.chat_call import MessageWriter, new_chat_call
from mooncake.api.adapters.completion_call import new_completion_call
from mooncake.api.adapters.translation import validated
from mooncake.api.api_server import ApiServer
from mooncake.api.errors import unknown_field, validation_error
from mooncake.api.generation.generation import Call
from mooncake.api.generation.logprobs import LogprobSpeller
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.completion import CompletionRequest
from mooncake.api.schema.fields import AnswerFields, Count
from mooncake.api.schema.replies import ChatText, Logprob
from mooncake.api.text.answer import Delta, Piece, join_pieces
from mooncake.base import InvalidRequest, unpacked_logprobs


class SamplingParams(AnswerFields):
    """How the answers to a prompt are generated, in vLLM's names. None = the model's default.

    >>> SamplingParams(temperature=0.7, top_p=0.9, max_tokens=200, stop=["\\n\\n"], logprobs=2)

    `structured_outputs` takes a dict: {"json": schema}, {"regex": …}, {"choice": […]} or
    {"grammar": …}.

    Raises:
        InvalidRequest: a field is out of range or unknown; the message names it.
    """

    logprobs: Count | None = None
    """Return the logprobs of the sampled tokens, and this many most likely ones for each."""

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, value: Any, handler: ModelWrapValidatorHandler[SamplingParams]) -> Any:
        try:
            params = handler(value)
        except ValidationError as error:
            raise validation_error(error, value) from error
        for name in params.model_extra or {}:
            raise unknown_field(name, cls.model_fields)
        return params


_NOT_HERE = {
    "echo": "the prompt is in RequestOutput.prompt",
    "stream": "AsyncLLM yields answers while they grow",
    "stream_options": "RequestOutput has the usage",
}
"""Fields of HTTP that have no meaning here -> what to use instead."""


@dataclasses.dataclass(frozen=True)
class PythonRequest:
    """A prompt or a conversation, in the form of the HTTP API."""

    body: CompletionRequest | ChatRequest
    prompt: str | None = None
    """The text of a prompt that is not token ids."""

    @property
    def num_answers(self) -> int:
        return self.body.n or 1

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs is not None and self.body.logprobs is not False


def completion_request(
    prompt: str | Sequence[int], params: SamplingParams | None, fields: Mapping[str, Any]
) -> PythonRequest:
    """Return the request to continue `prompt`, text or token ids.

    `fields` are those of `/v1/completions`; they win over `params`.

    Raises:
        InvalidRequest: a field is unknown or out of range; the message names it.
    """
    text = prompt if isinstance(prompt, str) else None
    given = _set_fields(params) | {"prompt": list(prompt) if text is None else text, **fields}
    return PythonRequest(_body(CompletionRequest, given), text)


def chat_request(
    messages: Sequence[Mapping[str, Any]], params: SamplingParams | None, fields: Mapping[str, Any]
) -> PythonRequest:
    """Return the request to answer a conversation; `fields` are those of `/v1/chat/completions`.

    Raises:
        InvalidRequest: a field is unknown or out of range; the message names it.
    """
    given = _set_fields(params)
    if (count := given.get("logprobs")) is not None:
        given |= {"logprobs": True, "top_logprobs": count}
    return PythonRequest(_body(ChatRequest, given | {"messages": list(messages), **fields}))


def _set_fields(params: SamplingParams | None) -> dict[str, Any]:
    return {} if params is None else params.model_dump(exclude_unset=True, by_alias=True)


def _body(kind: type[Any], given: Mapping[str, Any]) -> Any:
    for name in given.keys() & _NOT_HERE.keys():
        if given[name]:
            raise InvalidRequest(f"{name}: is not available here; {_NOT_HERE[name]}", param=name)
    body = validated(kind, given)
    for name in body.refuse_unsupported():
        raise unknown_field(name, kind.model_fields)
    return body


T = TypeVar("T")
Message = dict[str, Any]
Logprobs = Sequence[dict[int, Logprob] | None]


class Prefix(Sequence[T]):
    """The items that a list has now, without a copy of them. Afterwards the list may only grow."""

    def __init__(self, items: list[T]) -> None:
        self._items = items
        self._length = len(items)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> T: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...

    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        if isinstance(at, slice):
            return tuple(self._items[each] for each in range(self._length)[at])
        return self._items[range(self._length)[at]]

    def __iter__(self) -> Iterator[T]:
        return itertools.islice(self._items, self._length)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CompletionOutput:
    """One answer, or the part of it that exists so far. Text and message are built when they are
    first read: a stream of outputs does not copy the whole answer with every token.
    """

    index: int
    token_ids: Sequence[int]
    """A tuple when the answer is finished, otherwise a view that does not change."""
    logprobs: Logprobs | None
    """The candidates of each token by token id, the sampled one first; None if not asked for. A
    tuple or view, as `token_ids`.
    """
    finish_reason: str | None
    """"stop", "length" or, in a chat with tools, "tool_calls"; None while it goes on."""
    stop_reason: int | str | None
    """The stop string or stop token id that ended it; None at the model's own end of text."""
    schema_errors: tuple[dict[str, Any], ...]
    """Where the finished answer violates a schema that its grammar does not follow as a whole, in
    the form of the HTTP API.
    """
    _pieces: Sequence[Piece]
    _write: Callable[[Delta], ChatText] | None

    @functools.cached_property
    def text(self) -> str:
        """The answer without reasoning and tool calls."""
        return self._whole.text

    @functools.cached_property
    def message(self) -> Message | None:
        """The whole message of a chat in the form of the HTTP API, with reasoning and tool
        calls.
        """
        if self._write is None:
            return None
        message: Message = msgspec.to_builtins(self._write(self._whole))
        return message

    @functools.cached_property
    def _whole(self) -> Delta:
        pieces = join_pieces(self._pieces)
        return Delta(index=self.index, pieces=pieces)

    def _shown(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self) if field.name[0] != "_"]
        return {name: getattr(self, name) for name in (*names, "text", "message")}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompletionOutput) and self._shown() == other._shown()

    def __hash__(self) -> int:
        return hash((self.index, self.token_ids, self.text))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._shown().items())
        return f"CompletionOutput({shown})"


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    prompt: str | None
    """The text of the prompt; None for token ids and chats."""
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: Logprobs | None
    """The candidates of each prompt token by token id; None for the first token."""
    outputs: tuple[CompletionOutput, ...]
    """The `n` answers; one by default."""
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose KV was found in a cache; known when the answer is finished."""

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class OutputBuilder:
    """Owns the answers to one prompt while they grow."""

    def __init__(
        self,
        call: Call,
        request: PythonRequest,
        speller: LogprobSpeller,
        message: Callable[[Delta], ChatText] | None,
    ) -> None:
        """`message` returns the message of a chat, given the whole answer. It is None if this is
        not a chat.
        """
        self.call = call
        self._request = request
        self._speller = speller
        self._message = message
        self._prompt_tokens = tuple(call.requests[0].prompt_tokens)
        self._prompt_logprobs: Logprobs | None = None
        self._pieces: list[list[Piece]] = [[] for _ in range(request.num_answers)]
        self._tokens: list[list[int]] = [[] for _ in self._pieces]
        self._logprobs: list[list[dict[int, Logprob] | None]] = [[] for _ in self._pieces]
        self._answers = [self._answer(Delta(index=index)) for index in range(request.num_answers)]

    def add(self, deltas: Sequence[Delta]) -> None:
        """Add what is new in the answers."""
        for delta in deltas:
            self._pieces[delta.index] += delta.pieces
            self._tokens[delta.index] += delta.tokens
            if self._request.wants_logprobs:
                self._logprobs[delta.index] += self._speller.by_id(delta.tokens, delta.logprobs)
            if delta.prompt_logprobs is not None and self._prompt_logprobs is None:
                entries = unpacked_logprobs(delta.prompt_logprobs)
                spelled = self._speller.by_id(self._prompt_tokens, entries)
                self._prompt_logprobs = tuple(spelled)
            self._answers[delta.index] = self._answer(delta)

    def output(self) -> RequestOutput:
        """Return everything so far."""
        return RequestOutput(
            request_id=self.call.call_id,
            prompt=self._request.prompt,
            prompt_token_ids=self._prompt_tokens,
            prompt_logprobs=self._prompt_logprobs,
            outputs=tuple(self._answers),
            finished=all(each.finish_reason is not None for each in self._answers),
            num_cached_tokens=self.call.num_cached_tokens,
        )

    def _answer(self, last: Delta) -> CompletionOutput:
        """Return an answer as it is after its `last` delta."""
        tokens: Sequence[int] = Prefix(self._tokens[last.index])
        logprobs: Logprobs = Prefix(self._logprobs[last.index])
        if last.finish_reason is not None:
            tokens, logprobs = tuple(tokens), tuple(logprobs)
        return CompletionOutput(
            index=last.index,
            token_ids=tokens,
            logprobs=logprobs if self._request.wants_logprobs else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            schema_errors=tuple(map(msgspec.to_builtins, last.schema_errors)),
            _pieces=Prefix(self._pieces[last.index]),
            _write=self._message,
        )


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

"""What `LLM` and `AsyncLLM` return: vLLM's output objects, made of the deltas of a call."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import msgspec

from mooncake.api.adapters.python_request import PythonRequest
from mooncake.api.generation.delta import Delta
from mooncake.api.generation.generation import Call
from mooncake.api.generation.logprobs import LogprobSpeller
from mooncake.api.schema.replies import ChatText, Logprob
from mooncake.api.text.message_parser import join_piece

T = TypeVar("T")
Message = dict[str, Any]
Logprobs = Sequence[dict[int, Logprob] | None]


class Prefix(Sequence[T]):
    """The items that a list has now, without a copy of them. Later the list may only grow."""

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


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One answer, or what there is of it so far."""

    index: int
    text: str
    token_ids: Sequence[int]
    """A tuple when the answer is finished, else a view that does not change."""
    logprobs: Logprobs | None
    """Of each token the candidates by token id, the sampled one first; None if not asked for.
    Tuple or view as `token_ids`."""
    finish_reason: str | None
    """"stop", "length" or, in a chat with tools, "tool_calls"; None while it goes on."""
    stop_reason: int | str | None
    """The stop string or stop token id that ended it; None at the model's own end of text."""
    schema_errors: tuple[dict[str, Any], ...] = ()
    """Where the finished answer is not valid against a schema that its grammar does not follow as a
    whole, as the HTTP API has it."""
    message: Message | None = None
    """The whole message of a chat, as the HTTP API has it: with reasoning and tool calls."""


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    prompt: str | None
    """None for token ids and chats."""
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: Logprobs | None
    """Of each prompt token the candidates by token id; None for the first token."""
    outputs: tuple[CompletionOutput, ...]
    """`n` of them, one by default."""
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
        """`message` returns the message of a chat, given the whole answer; None: it is no chat."""
        self.call = call
        self._request = request
        self._speller = speller
        self._message = message
        self._prompt_tokens = tuple(call.requests[0].prompt_tokens)
        self._prompt_logprobs: Logprobs | None = None
        self._wholes = [
            Delta(index=at, pieces=[], tokens=[], logprobs=[], runs=[])
            for at in range(request.num_answers)
        ]
        self._logprobs: list[list[dict[int, Logprob] | None]] = [[] for _ in self._wholes]
        self._answers = [self._answer(whole) for whole in self._wholes]

    def add(self, deltas: Sequence[Delta]) -> None:
        """Take what was added to the answers."""
        for delta in deltas:
            whole = self._wholes[delta.index]
            for piece in delta.pieces:
                join_piece(whole.pieces, piece)
            whole.tokens += delta.tokens
            whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
            whole.schema_errors = delta.schema_errors
            if self._request.wants_logprobs:
                self._logprobs[delta.index] += self._speller.by_id(delta.tokens, delta.logprobs)
            if delta.prompt_logprobs is not None and self._prompt_logprobs is None:
                spelled = self._speller.by_id(self._prompt_tokens, delta.prompt_logprobs)
                self._prompt_logprobs = tuple(spelled)
            self._answers[delta.index] = self._answer(whole)

    def output(self) -> RequestOutput:
        """Return all there is so far."""
        return RequestOutput(
            request_id=self.call.call_id,
            prompt=self._request.prompt,
            prompt_token_ids=self._prompt_tokens,
            prompt_logprobs=self._prompt_logprobs,
            outputs=tuple(self._answers),
            finished=all(each.finish_reason is not None for each in self._answers),
            num_cached_tokens=self.call.num_cached_tokens,
        )

    def _answer(self, whole: Delta) -> CompletionOutput:
        message = None if self._message is None else self._message(whole)
        tokens: Sequence[int] = Prefix(whole.tokens)
        logprobs: Logprobs = Prefix(self._logprobs[whole.index])
        if whole.finish_reason is not None:
            tokens, logprobs = tuple(tokens), tuple(logprobs)
        return CompletionOutput(
            index=whole.index,
            text=whole.text,
            token_ids=tokens,
            logprobs=logprobs if self._request.wants_logprobs else None,
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
            schema_errors=tuple(map(msgspec.to_builtins, whole.schema_errors)),
            message=None if message is None else msgspec.to_builtins(message),
        )

"""Makes the call that a `ChatRequest` asks for, one request for an answer to a conversation, and
writes its answers in OpenAI's form. All chat APIs are translated to a `ChatRequest`.
"""

from __future__ import annotations

from msgspec import UNSET

from mooncake.api.api_server import KEEPS_ALL, ApiServer, Kept
from mooncake.api.constrained.constraints import Thinking, chat_constraint
from mooncake.api.generation.generation import Call
from mooncake.api.generation.review import Review
from mooncake.api.generation.sampling import (
    Wanted,
    check_chars,
    fit_output,
    fit_prompt,
    most_tokens,
    prompt_window,
    sampling_params,
    text_options,
    with_grammar,
)
from mooncake.api.http.response import DONE, OpenAiRenderer, call_usage, event
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    ChatText,
    FunctionText,
    ToolCallReply,
    encode,
)
from mooncake.api.text.answer import Delta, Marker, Piece, reasoning_is_open
from mooncake.api.text.conversation import render_conversation
from mooncake.api.text.tokenizer import Window
from mooncake.base import InvalidRequest, SamplingParams


async def new_chat_call(
    api_server: ApiServer, body: ChatRequest, name: str, tenant: str = ""
) -> Call:
    """Return the call that answers `body`, not yet started.

    Raises:
        InvalidRequest: the request contradicts itself, or asks for something that is not possible.
        Unavailable: too many requests wait for the tokenizer or for schemas to be compiled.
    """
    _check_chat(body)
    calls = bool(body.tools) and body.tool_choice != "none"
    if calls and not api_server.tool_markers:
        raise InvalidRequest(
            "tools: this model has no format of tool calls that this server knows; leave the "
            "tools out",
            param="tools",
        )
    # A long conversation or a large schema takes seconds, in which no stream may stutter.
    tokens, sampling, kept = await api_server.tokenizing.run(
        lambda: _prompt(api_server, body, calls=calls), tenant
    )
    review = None
    if calls or body.asks_form:
        sampling, review = await api_server.compiling.run(
            lambda: _constrained(api_server, body, tokens, sampling, calls=calls), tenant
        )
    markers = api_server.think_markers | (api_server.tool_markers if calls else {})
    max_calls = 1 if body.parallel_tool_calls is False else None
    options = text_options(body, markers=markers, max_calls=max_calls)
    return api_server.new_call(name, [(tokens, sampling)], body, options, review, kept)


def _prompt(
    api_server: ApiServer, body: ChatRequest, *, calls: bool
) -> tuple[list[int], SamplingParams, Kept]:
    """Return the conversation's tokens, the sampling without a grammar, and what the pool is to
    keep. Runs in a thread.
    """
    wanted, model = _wanted(body), api_server.model
    sampling = sampling_params(body, wanted, model, api_server.config)
    found = chat_prompt(api_server, body, prompt_window(body, model))
    tokens = fit_prompt(found, body, sampling, model)
    most = most_tokens(body, sampling, len(tokens))
    sampling = fit_output(len(tokens), sampling, wanted, model, most)
    kept = _kept(api_server, body, tokens, calls=calls) if body.keep_s else KEEPS_ALL
    return tokens, with_grammar(sampling, None, ""), kept


def _kept(api_server: ApiServer, body: ChatRequest, tokens: list[int], *, calls: bool) -> Kept:
    """Return what the pool is to keep of a call whose fields or marks ask for it."""
    # Templates leave out what was thought before an answer, but not before a call of a tool.
    thinks = _thinking(api_server, body, tokens).is_possible
    return Kept(
        _num_kept(api_server, body, tokens),
        answer=calls or not thinks,
        call_token=_marker_ids(api_server).get(Marker.CALL_BEGIN) if calls and thinks else None,
    )


def _num_kept(api_server: ApiServer, body: ChatRequest, tokens: list[int]) -> int:
    """Return how many leading tokens of the prompt lie before the end of the last marked message.
    All of them if the prompt was cut, or if the template does not take these messages alone.
    """
    num_messages = body.num_kept_messages
    if num_messages == len(body.messages) or body.truncate_prompt_tokens is not None:
        return len(tokens)
    fields = {
        "messages": body.messages[:num_messages],
        "add_generation_prompt": False,
        "continue_final_message": None,
    }
    head = body.model_copy(update=fields)
    try:
        found = chat_prompt(api_server, head, prompt_window(head, api_server.model))
    except InvalidRequest:
        return len(tokens)
    if tokens[: len(found)] == found:
        return len(found)
    pairs = enumerate(zip(tokens, found, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(tokens), len(found)))


def _constrained(
    api_server: ApiServer,
    body: ChatRequest,
    tokens: list[int],
    sampling: SamplingParams,
    *,
    calls: bool,
) -> tuple[SamplingParams, Review | None]:
    """Return the sampling with the grammar of the answer, and its review. Runs in a thread."""
    ids, thinking = _marker_ids(api_server) if calls else {}, _thinking(api_server, body, tokens)
    constraint = chat_constraint(body, api_server.model, ids, thinking)
    sampling = with_grammar(sampling, constraint.grammar, constraint.param)
    return sampling, api_server.review(constraint)


def chat_prompt(api_server: ApiServer, body: ChatRequest, window: Window) -> list[int]:
    """Return the tokens of the conversation after the chat template, limited by `window`. Slow:
    call it in a thread.

    Raises:
        InvalidRequest: the chat template refused it, or it is too long, whatever its tokens are.
    """
    is_cut = body.truncate_prompt_tokens is not None
    if not is_cut:
        num_chars = sum(len(message.text) for message in body.messages)
        check_chars(num_chars, api_server.model, "messages")
    kwargs = body.template_kwargs
    if body.documents is not None:
        kwargs["documents"] = body.documents
    text = render_conversation(
        api_server.model.template,
        body.messages,
        None if body.tool_choice == "none" else body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        kwargs=kwargs,
        guard=api_server.guard,
    )
    if not is_cut:
        check_chars(len(text), api_server.model, "messages")
    special = bool(body.add_special_tokens)
    return api_server.encode(text, add_special=special, window=window, chat=True)


def _marker_ids(api_server: ApiServer) -> dict[Marker, int]:
    return {marker: token for token, marker in api_server.tool_markers.items()}


def _thinking(api_server: ApiServer, body: ChatRequest, prompt: list[int]) -> Thinking:
    """Return where in this answer the model may reason."""
    if not api_server.think_markers:
        return Thinking()
    ids = {marker: token for token, marker in api_server.think_markers.items()}
    begins = api_server.thinks and not body.continue_final_message and body.thinking is not False
    return Thinking(
        begin=ids[Marker.THINK_BEGIN] if begins else None,
        end=ids[Marker.THINK_END],
        is_open=reasoning_is_open(prompt, api_server.think_markers),
    )


def _wanted(body: ChatRequest) -> Wanted:
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Wanted(
        max_tokens=asked,
        max_tokens_param="max_tokens"
        if body.max_completion_tokens is None
        else "max_completion_tokens",
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        logprobs_param="top_logprobs",
        num_prompt_logprobs=body.prompt_logprobs,
    )


def _check_chat(body: ChatRequest) -> None:
    if body.max_tokens == 0 and body.max_completion_tokens is None:
        raise InvalidRequest("max_tokens: must be at least 1", param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs is not available with stream=true", param="prompt_logprobs"
        )
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise InvalidRequest(
            "tool_choice: there are no tools to choose from; send tools, or leave it out",
            param="tool_choice",
        )


class MessageWriter:
    """Writes messages, and what chunks add to them, in the form that `body` asks for."""

    def __init__(self, body: ChatRequest) -> None:
        last = body.messages[-1]
        self.echo = last.text if body.echo and last.role == "assistant" else ""
        """The text of the continued message, if it is wanted before the answer."""
        self._with_reasoning = body.include_reasoning is not False

    def whole(self, delta: Delta) -> ChatText:
        """Return the whole message; its content is null when there are only tool calls."""
        content = self.echo + delta.text
        message = self.added(delta)
        message.role = "assistant"
        message.content = None if delta.tool_calls and not content else content
        for call in message.tool_calls or []:
            call.index = UNSET  # only a stream needs it, to tell calls apart
        return message

    def added(self, delta: Delta) -> ChatText:
        """Return what `delta` adds. Reasoning appears under both names that clients know."""
        text = ChatText()
        if delta.text:
            text.content = delta.text
        if delta.reasoning and self._with_reasoning:
            text.reasoning = text.reasoning_content = delta.reasoning
        if delta.tool_calls:
            text.tool_calls = [_tool_call(piece) for piece in delta.tool_calls]
        return text


def _tool_call(piece: Piece) -> ToolCallReply:
    assert piece.call is not None
    function = FunctionText(arguments=piece.text)
    reply = ToolCallReply(index=piece.call, function=function)
    if piece.call_id is not None and piece.name is not None:
        reply.id, reply.type, function.name = piece.call_id, "function", piece.name
    return reply


class ChatRenderer(OpenAiRenderer[ChatRequest]):
    """Writes chat replies and chunks."""

    def __init__(self, api_server: ApiServer, body: ChatRequest) -> None:
        super().__init__(api_server, body)
        self._writer = MessageWriter(body)

    def whole(self, call: Call, deltas: list[Delta]) -> bytes:
        body = self._body
        prompt_tokens = call.requests[0].prompt_tokens
        prompt_logprobs = deltas[0].prompt_logprobs
        reply = ChatReply(
            id=call.call_id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=[
                ChatChoice(
                    index=delta.index,
                    message=self._writer.whole(delta),
                    logprobs=self._logprobs(delta),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                    token_ids=delta.tokens if body.return_token_ids else UNSET,
                    schema_errors=delta.schema_errors or UNSET,
                )
                for delta in deltas
            ],
            usage=call_usage(call),
            prompt_token_ids=prompt_tokens.tolist() if body.return_token_ids else UNSET,
        )
        if prompt_logprobs is not None:
            reply.prompt_logprobs = self._speller.prompt(prompt_tokens, prompt_logprobs)
        return encode(reply)

    def begin(self, call: Call) -> list[bytes]:
        chunks: list[bytes] = []
        for choice in call.choices:
            text = ChatText(role="assistant", content=self._writer.echo)
            chunk = self._chunk(call, [ChatChunkChoice(choice.index, text, None, None)])
            if self._body.return_token_ids and not chunks:
                chunk.prompt_token_ids = call.requests[0].prompt_tokens.tolist()
            chunks.append(event(encode(chunk)))
        return chunks

    def chunk(self, call: Call, delta: Delta) -> list[bytes]:
        ended = delta.finish_reason is not None
        told = delta.text or delta.reasoning or delta.tool_calls or delta.logprobs
        if not (told or ended or self._body.return_token_ids):
            return []
        choice = ChatChunkChoice(
            index=delta.index,
            delta=self._writer.added(delta),
            logprobs=self._logprobs(delta) if delta.tokens else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if ended else UNSET,
            token_ids=delta.tokens if self._body.return_token_ids else UNSET,
            schema_errors=delta.schema_errors or UNSET,
        )
        return [event(encode(self._chunk(call, [choice])))]

    def end(self, call: Call) -> list[bytes]:
        if not self._body.include_usage:
            return [DONE]
        chunk = self._chunk(call, [])
        chunk.usage = call_usage(call)
        return [event(encode(chunk)), DONE]

    def _chunk(self, call: Call, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=call.call_id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=self._usage_so_far(call),
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return self._speller.chat(delta.tokens, delta.logprobs)

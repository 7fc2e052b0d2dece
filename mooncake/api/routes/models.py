"""`GET /v1/models` and `/v1/models/{name}`, and what their tokenizer does: `POST /tokenize`,
`POST /detokenize` and `GET /tokenizer_info`, with the bodies of the first two.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.api_server import ApiServer
from mooncake.api.errors import ErrorReply
from mooncake.api.generation.sampling import (
    check_chars,
    check_counted,
    check_ids,
    counted_window,
)
from mooncake.api.http.request_body import read_body
from mooncake.api.http.response import json_response, tenant_of, unless_gone
from mooncake.api.http.router import Router
from mooncake.api.schema.chat import Messages, Tools
from mooncake.api.schema.fields import RequestBody, TokenIds
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import (
    DetokenizeReply,
    ModelCard,
    ModelList,
    TokenizeReply,
    TokenizerInfoReply,
    encode,
)
from mooncake.api.text.conversation import render_conversation
from mooncake.base import InvalidRequest


class TokenizeRequest(RequestBody):
    """Either `prompt` or `messages`, which go through the chat template first."""

    prompt: str | None = None
    messages: Messages | None = Field(None, min_length=1)
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages is needed")
        return self


class DetokenizeRequest(RequestBody):
    """Token ids to be spelled as text, special tokens included."""

    tokens: TokenIds


def model_routes(api_server: ApiServer) -> Router:
    """Return the routes of the served model and of its tokenizer."""
    router = Router()

    @router.get("/v1/models", described=operation(None, ModelList, ErrorReply))
    async def models() -> Response:
        """List the names under which the model is served."""
        return json_response(
            encode(ModelList("list", [_card(api_server, name) for name in api_server.names]))
        )

    @router.get("/v1/models/{name:path}", described=operation(None, ModelCard, ErrorReply))
    async def model(name: str) -> Response:
        """Describe one of these names."""
        api_server.check_model(name)
        return json_response(encode(_card(api_server, name)))

    @router.post("/tokenize", described=operation(TokenizeRequest, TokenizeReply, ErrorReply))
    async def tokenize(request: Request) -> Response:
        """Return the ids of a prompt, or of a conversation after the chat template."""
        body = await read_body(request, TokenizeRequest, api_server)
        # A long text takes seconds, in which no stream may stutter.
        work = api_server.tokenizing.run(lambda: _tokenized(api_server, body), tenant_of(request))
        return _held(request, await unless_gone(request, work))

    @router.post("/detokenize", described=operation(DetokenizeRequest, DetokenizeReply, ErrorReply))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        body = await read_body(request, DetokenizeRequest, api_server)
        check_ids("tokens", body.tokens, api_server.model)
        limit = api_server.model.max_model_len
        if len(body.tokens) > limit:
            raise InvalidRequest(
                f"tokens: send at most {limit} ids, as many as the model's context has",
                param="tokens",
            )
        decode = api_server.model.tokenizer.decode
        work = api_server.tokenizing.run(
            lambda: encode(DetokenizeReply(decode(body.tokens))), tenant_of(request)
        )
        return _held(request, await unless_gone(request, work))

    @router.get("/tokenizer_info", described=operation(None, TokenizerInfoReply, ErrorReply))
    async def tokenizer_info() -> Response:
        """Return the special tokens and the chat template."""
        model = api_server.model
        special = model.tokenizer.special_tokens
        bos, eos, pad = (special.get(f"{name}_token") for name in ("bos", "eos", "pad"))
        reply = TokenizerInfoReply(bos, eos, pad, model.template.source, model.max_model_len)
        return json_response(encode(reply))

    return router


def _held(request: Request, reply: bytes) -> Response:
    """Return a reply that may be many times as long as its body. Until the client has taken it, it
    counts among the bodies in memory.

    Raises:
        Limited: they fill the memory for them.
    """
    request.state.in_flight.add_bytes(len(reply))
    return json_response(reply)


def _tokenized(api_server: ApiServer, body: TokenizeRequest) -> bytes:
    """Return the reply to `body`."""
    model = api_server.model
    tokenizer, window = model.tokenizer, counted_window(model)
    if body.messages is not None:
        param = "messages"
        check_chars(sum(len(message.text) for message in body.messages), model, param)
        text = render_conversation(
            model.template,
            body.messages,
            body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs=body.chat_template_kwargs,
            guard=api_server.guard,
        )
        special = bool(body.add_special_tokens)
    else:
        param, text = "prompt", body.prompt or ""
        special = body.add_special_tokens is not False
    check_chars(len(text), model, param)
    chat = body.messages is not None
    tokens = api_server.encode(text, add_special=special, window=window, chat=chat)
    check_counted(tokens, model, param)
    reply = TokenizeReply(len(tokens), model.max_model_len, tokens)
    if body.return_token_strs:
        reply.token_strs = [tokenizer.decode([token]) for token in tokens]
    return encode(reply)


def _card(api_server: ApiServer, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=api_server.model.created_s,
        owned_by="mooncake",
        root=api_server.model.name,
        parent=None,
        max_model_len=api_server.model.max_model_len,
        permission=[],
    )

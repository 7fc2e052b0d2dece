"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.conversation import render_conversation
from mooncake.api.door import Door
from mooncake.api.errors import ErrorReply
from mooncake.api.http import json_response, read_body
from mooncake.api.sampling import check_ids
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import DetokenizeReply, TokenizeReply, encode
from mooncake.api.schema.tokens import DetokenizeRequest, TokenizeRequest


def token_routes(door: Door) -> APIRouter:
    """Return the tokenizer routes over `door`."""
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=operation(TokenizeRequest, TokenizeReply, ErrorReply))
    async def tokenize(request: Request) -> Response:
        """Return the ids of a prompt, or of a conversation after the chat template."""
        body = await read_body(request, TokenizeRequest, door.config)
        door.check_model(body.model)
        # A long text takes seconds, in which no stream may stutter.
        return json_response(await asyncio.to_thread(_tokenized, door, body))

    @router.post(
        "/detokenize", openapi_extra=operation(DetokenizeRequest, DetokenizeReply, ErrorReply)
    )
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        body = await read_body(request, DetokenizeRequest, door.config)
        door.check_model(body.model)
        check_ids("tokens", body.tokens, door.model)
        text = await asyncio.to_thread(door.model.tokenizer.decode, body.tokens)
        return json_response(encode(DetokenizeReply(text)))

    return router


def _tokenized(door: Door, body: TokenizeRequest) -> bytes:
    """Return the reply to `body`."""
    tokenizer = door.model.tokenizer
    if body.messages is not None:
        text = render_conversation(
            door.model.template,
            body.messages,
            body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs=body.chat_template_kwargs,
            guard=door.guard,
        )
        tokens = door.encode_chat(text, add_special=bool(body.add_special_tokens))
    else:
        add_special = body.add_special_tokens is not False
        tokens = tokenizer.encode(body.prompt or "", add_special=add_special)
    reply = TokenizeReply(len(tokens), door.model.max_model_len, tokens)
    if body.return_token_strs:
        reply.token_strs = [tokenizer.decode([token]) for token in tokens]
    return encode(reply)

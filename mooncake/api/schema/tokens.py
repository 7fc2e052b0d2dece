"""The bodies of `POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from mooncake.api.schema.chat import Messages, Tools
from mooncake.api.schema.fields import RequestBody, TokenIds


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

"""What of a request matters for its placement, and what of its body is changed on the way. The rest
of a body is the engine's business: fields that only the engine knows pass unseen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mooncake.api.errors import forbidden
from mooncake.base import InvalidRequest, pack_tokens
from mooncake.scheduler.engines.prefixes import Prompt

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
GENERATING = (CHAT, COMPLETIONS, MESSAGES)
"""The routes that are placed."""
AT_ANY = ("/tokenize", "/detokenize")
"""Routes that any engine answers."""
_BEFORE = {CHAT: ("tools",), MESSAGES: ("tools", "system")}
"""What comes before the messages in a prompt."""
_TOKENIZED = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "chat_template", "chat_template_kwargs",
)  # fmt: skip
"""The fields of a chat that decide its tokens; `/tokenize` takes them, too."""
MAX_SEED = 1 << 63
"""Engines take seeds below it."""
MAX_COUNT = 1 << 31
"""The most tokens, or answers, that a request counts: budgets and metrics are floats."""
OPERATORS_FIELDS = ("kv_transfer_params", "priority")
"""Fields by which a client tells engines where to read KV, or goes ahead of all others."""


@dataclass(kw_only=True)
class Asked:
    """A request to an engine."""

    path: str
    fields: dict[str, Any]
    tenant: str
    model: str | None
    is_streamed: bool
    adds_usage: bool = False
    """The engine is asked for usage in the stream, and the client is not."""

    @classmethod
    def of(cls, path: str, body: bytes) -> Asked:
        """Read a body.

        Raises:
            InvalidRequest: it is not a JSON object, or a field that is needed here is wrong.
        """
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise InvalidRequest("the body must be an object")
        model, streamed = fields.get("model"), fields.get("stream")
        if not (model is None or isinstance(model, str)):
            raise InvalidRequest("model: must be a text", param="model")
        if not (streamed is None or isinstance(streamed, bool)):
            raise InvalidRequest("stream: must be true or false", param="stream")
        options = fields.get("stream_options")
        if not (options is None or isinstance(options, dict)):
            raise InvalidRequest("stream_options: must be an object", param="stream_options")
        salt = fields.get("cache_salt")
        if not (salt is None or isinstance(salt, str)):
            raise InvalidRequest("cache_salt: must be a text", param="cache_salt")
        return cls(path=path, fields=fields, tenant="", model=model, is_streamed=bool(streamed))

    def run_as(self, tenant: str, *, is_operator: bool, seed: int | None) -> None:
        """Count the request as a tenant's: engines share no blocks between tenants, because each
        has a salt of its own. Where no keys are needed, `tenant` is empty and nothing changes.
        `seed` is used if the body has none.

        Raises:
            ApiError: the tenant may not set one of the fields.
        """
        self.tenant = tenant
        if seed is not None and self.fields.get("seed") is None and self.path != MESSAGES:
            self.fields["seed"] = seed % MAX_SEED
        if not tenant:
            return
        for name in () if is_operator else OPERATORS_FIELDS:
            if self.fields.get(name) is not None:
                raise forbidden(f"{name}: it needs an operator's key; leave it out", param=name)
        if self.path in GENERATING:
            self.fields["cache_salt"] = tenant_salt(tenant, self.salt)

    def count_tokens(self) -> None:
        """Have the engine say at the end of a stream how many tokens there were."""
        if not self.is_streamed or self.path == MESSAGES:
            return
        options = dict(self.fields.get("stream_options") or {})
        self.adds_usage = not options.get("include_usage")
        self.fields["stream_options"] = options | {"include_usage": True}

    @property
    def salt(self) -> str:
        return self.fields.get("cache_salt") or ""

    @property
    def max_tokens(self) -> int:
        """The most tokens of the answer, or 0 if the body does not say."""
        for name in ("max_completion_tokens", "max_tokens"):
            if isinstance(found := self.fields.get(name), int) and found > 0:
                return min(found, MAX_COUNT)
        return 0

    @property
    def num_sequences(self) -> int:
        """How many answers are asked for."""
        found = self.fields.get("n")
        return min(found, MAX_COUNT) if isinstance(found, int) and found > 0 else 1

    def prompt(self) -> Prompt:
        """Return the prompt for placement."""
        if self.path == COMPLETIONS:
            text, tokens = _completion(self.fields.get("prompt"))
        else:
            text, tokens = _conversation(self.path, self.fields), None
        return Prompt(text, tokens=tokens, salt=self.salt, model=self.model or "")

    def tokenize_body(self) -> bytes | None:
        """Return the body that asks an engine for the prompt's tokens; None if it cannot tokenize
        the prompt, or need not.
        """
        if self.path == COMPLETIONS and isinstance(self.fields.get("prompt"), str):
            kept: tuple[str, ...] = ("model", "prompt", "add_special_tokens")
        elif self.path == CHAT:
            kept = _TOKENIZED
        else:
            return None
        return self._encoded({name: self.fields[name] for name in kept if name in self.fields})

    def body(self) -> bytes:
        """Return the body for the engine."""
        return self._encoded(self.fields)

    def _encoded(self, fields: Mapping[str, Any]) -> bytes:
        return msgspec.json.encode(fields)


def tenant_salt(tenant: str, salt: str) -> str:
    """Return the salt of a tenant's request. Two tenants never have the same one."""
    length = len(tenant.encode()).to_bytes(4, "little")
    return hashlib.sha256(length + tenant.encode() + salt.encode()).hexdigest()[:32]


def _completion(prompt: Any) -> tuple[bytes, bytes | None]:
    """Return the bytes of a completion's prompt, and its tokens if it is given as tokens. Of
    several prompts, the first counts.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass"), None
    try:
        packed = pack_tokens(prompt)
    except (TypeError, OverflowError):
        return b"", None  # the engine says what is wrong
    return packed, packed


def _conversation(path: str, fields: Mapping[str, Any]) -> bytes:
    """Return a conversation so that the next turn begins with the same bytes."""
    before = [fields.get(name) for name in _BEFORE.get(path, ())]
    messages = fields.get("messages")
    parts = [*before, *(messages if isinstance(messages, list) else ())]
    return b"\n".join(msgspec.json.encode(part) for part in parts)

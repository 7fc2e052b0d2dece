"""Puts the messages and tools of a chat in the form that chat templates expect, and keeps text of
users and tools from becoming control tokens. Pure.

A chat template puts their text between control tokens, and the result is tokenized as a whole. So
a message that spells `<|im_end|>` would end its turn and could speak in another role. Here a mark
is put into such spellings before the template is rendered; the encoder takes it out again and
encodes them as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mooncake.api.schema.chat import ChatMessage, Tool
from mooncake.api.text.chat_template import ChatTemplate
from mooncake.api.text.tokenizer import Tokenizer, Window, joined
from mooncake.base import InvalidRequest

MARK = "\ue0c3"
"""A private-use character; it never reaches the model."""

PIECE_CHARS = 1 << 16
"""Texts are searched in pieces of this size: one search holds Python's lock to its end."""

_UNTRUSTED_ROLES = frozenset({"user", "tool"})
RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
)
_OWN_ID = re.compile(r"functions\.(.+):\d+")


class Guard:
    """Marks the spellings of a tokenizer's control tokens in text, and encodes marked text."""

    def __init__(self, tokenizer: Tokenizer, soft_names: Collection[str]) -> None:
        """`soft_names`: tokens that a model writes into its own text, such as `<think>`. They are
        plain text in messages of users and tools, and stay tokens in an assistant's messages.
        """
        self._tokenizer = tokenizer
        hard = {
            tokenizer.token_bytes(token).decode("utf-8", "replace")
            for token in tokenizer.special_ids
        } - {""}
        self._hard = _Names(hard - set(soft_names))
        self._all = _Names(hard | set(soft_names))

    def turn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message for the template with the spellings of control tokens marked."""
        role = message.get("role")
        names = self._all if role in _UNTRUSTED_ROLES else self._hard
        return {**_marked(dict(message), names), "role": role}

    def value(self, value: Any) -> Any:
        """Return tools, documents or template settings with those spellings marked."""
        return _marked(value, self._all)

    def encode(
        self, text: str, *, add_special: bool = False, window: Window | None = None
    ) -> list[int]:
        """Return the ids of a rendered text, or only those that `window` asks for. Marked spellings
        become plain text.
        """
        if MARK not in text:
            return self._tokenizer.encode(text, add_special=add_special, window=window)
        pieces: list[str | int] = list(self._tokenizer.encode("", add_special=add_special))
        end = 0
        for found in self._all.find(text):
            token = self._tokenizer.special_id(found[0])
            if token is not None:
                pieces += [text[end : found.start()], token]
                end = found.end()
        pieces.append(text[end:])
        if window is not None and window.from_end:
            pieces.reverse()
        return joined(pieces, lambda piece: self._ids_of(piece, window), window)

    def _ids_of(self, piece: str | int, window: Window | None) -> list[int]:
        if isinstance(piece, int):
            return [piece]
        chunks = (piece[at : at + PIECE_CHARS] for at in range(0, len(piece), PIECE_CHARS))
        plain = "".join(chunk.replace(MARK, "") for chunk in chunks)
        return self._tokenizer.encode(plain, allow_special=False, window=window)


class _Names:
    """Finds names in text: at each place the longest one that begins there."""

    def __init__(self, names: Collection[str]) -> None:
        self._longest = max(map(len, names), default=1)
        self._pattern = re.compile(_branches(names) if names else r"(?!)")

    def mark(self, text: str) -> str:
        """Return `text` with a mark in each spelling of a name; mostly there is none."""
        if len(text) <= PIECE_CHARS and self._pattern.search(text) is None:
            return text
        parts: list[str] = []
        end = 0
        for found in self.find(text):
            parts += [text[end : found.start() + 1], MARK]
            end = found.start() + 1
        return "".join([*parts, text[end:]]) if parts else text

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the matches in `text`, which do not overlap, in time linear in its length."""
        end = 0
        for start in range(0, len(text), PIECE_CHARS):
            last = start + PIECE_CHARS
            for found in self._pattern.finditer(text, max(start, end), last + self._longest - 1):
                if found.start() >= last:
                    break
                end = found.end()
                yield found


def _branches(names: Collection[str]) -> str:
    """Return a pattern of `names` that branches letter by letter. A pattern that lists the names
    would try each of about a hundred at every `<`.
    """
    by_letter: dict[str, list[str]] = {}
    for name in filter(None, names):
        by_letter.setdefault(name[0], []).append(name[1:])
    rest = [re.escape(letter) + _branches(tails) for letter, tails in sorted(by_letter.items())]
    if not rest:
        return ""
    return f"(?:{'|'.join(rest)})" + ("?" if "" in names else "")


def _marked(value: Any, names: _Names) -> Any:
    if isinstance(value, str):
        return names.mark(value)
    if isinstance(value, list):
        return [_marked(item, names) for item in value]
    if isinstance(value, dict):
        return {_marked(key, names): _marked(item, names) for key, item in value.items()}
    return value


def render_conversation(
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    kwargs: Mapping[str, Any] | None,
    guard: Guard | None,
) -> str:
    """Return the prompt text of a conversation; if there is a `guard`, it must encode that text.

    Raises:
        InvalidRequest: the two flags contradict each other, or the template refused the
            conversation.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    if kwargs and (reserved := RESERVED_KWARGS & set(kwargs)):
        raise InvalidRequest(
            f"chat_template_kwargs: {min(reserved)} is a field of its own",
            param="chat_template_kwargs",
        )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    turns = [template_message(message) for message in messages]
    rename_calls(turns)
    declared = [tool.raw for tool in tools] if tools else None
    if guard is not None:
        turns = [guard.turn(turn) for turn in turns]
        declared, kwargs = guard.value(declared), guard.value(dict(kwargs or {}))
    return template.render(
        turns,
        tools=declared,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=bool(continue_final_message),
        kwargs=kwargs,
    )


def rename_calls(turns: Sequence[dict[str, Any]]) -> None:
    """Change the id of every tool call in the history, and of its result, to Kimi-K2's style,
    `functions.NAME:INDEX`: other styles mislead the model.

    Ids in that style stay, so that a conversation keeps its cached prefix. INDEX counts the calls
    of the whole conversation.
    """
    renamed: dict[str, str] = {}
    num_calls = 0
    for turn in turns:
        for call in turn.get("tool_calls") or []:
            name, given = call["function"]["name"], call.get("id") or ""
            match = _OWN_ID.fullmatch(given)
            if match is None or match[1] != name:
                call["id"] = f"functions.{name}:{num_calls}"
            renamed[given] = call["id"]
            num_calls += 1
        if turn["role"] == "tool":
            given = turn.get("tool_call_id") or ""
            turn["tool_call_id"] = renamed.get(given, given)


def template_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message in the form that templates know: content as text, role `developer` as
    `system`, the reasoning under both its names, no absent fields.
    """
    turn = message.model_dump(exclude_none=True)
    turn["role"] = "system" if message.role == "developer" else message.role
    turn["content"] = message.text
    reasoning = message.reasoning or message.reasoning_content
    if reasoning is not None:
        turn["reasoning"] = turn["reasoning_content"] = reasoning
    return turn

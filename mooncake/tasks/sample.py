"""One generated task: a conversation, the wanted answer, and whether an answer is right. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

Message = dict[str, Any]

HELD_OUT_SHARE = 8
"""One of this many contents is never trained on."""
WATCHED_SHARE = 4
"""One of this many held-out contents is watched while training; no evaluation has it."""
TRAINED, WATCHED, EVALUATED = "trained", "watched", "evaluated"


def part_of(content: str) -> str:
    """Return the part to which a content belongs, by its hash: `TRAINED`, `WATCHED` or
    `EVALUATED`.
    """
    place = zlib.crc32(content.encode())
    if place % HELD_OUT_SHARE:
        return TRAINED
    return EVALUATED if place // HELD_OUT_SHARE % WATCHED_SHARE else WATCHED


@dataclass(frozen=True)
class Sample:
    """A conversation in the form of the OpenAI API, and the assistant's next message.

    `messages` ends with a user's or a tool's; answers within it are part of the task too. `answer`
    has `content`, or `tool_calls`, or both, and may have `reasoning`.
    """

    task: str
    messages: Sequence[Message]
    answer: Message
    tools: Sequence[Mapping[str, Any]] = ()
    also_right: Sequence[str] = field(default=())
    """Other texts that are as right as the answer's content."""
    contents: Sequence[str] = ()
    """All contents in it that may be held out, the main one first: the sums, the tools, the copied
    text.
    """

    @property
    def held_out(self) -> bool:
        """True if the sample must not be trained on."""
        return any(part_of(content) != TRAINED for content in self.contents)

    def is_for(self, part: str) -> bool:
        """Return whether the main content of the sample is held out for `part`."""
        return part_of(self.contents[0]) == part

    def accepts(self, answer: Mapping[str, Any]) -> bool:
        """Return whether `answer`, a message of the assistant, is right; its reasoning does not
        count.
        """
        wanted = [_call(call) for call in self.answer.get("tool_calls") or ()]
        given = [_call(call) for call in answer.get("tool_calls") or ()]
        if wanted or given:
            return wanted == given
        text = (answer.get("content") or "").strip()
        right = [self.answer["content"], *self.also_right]
        if self.task == "object":
            return bool(_json(text) == _json(right[0]))
        return _plain(text) in map(_plain, right)


Generator = Callable[[Random], Sample]
"""Makes a sample of one task from randomness alone."""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "") -> Message:
    """Return an answer of text, after its reasoning if there is any."""
    message = {"role": "assistant", "content": text}
    return message | {"reasoning": reasoning} if reasoning else message


def _plain(text: str) -> str:
    return " ".join(text.split()).rstrip(".").lower()


def _call(call: Mapping[str, Any]) -> tuple[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    return function["name"], _json(arguments) if isinstance(arguments, str) else arguments


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return _NOT_JSON


_NOT_JSON = object()

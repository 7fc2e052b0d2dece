"""`mooncake chat` holds a conversation in the terminal and shows answers as they come. It keeps the
turns. It runs the tools that the model calls if the user has allowed tools.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from mooncake.base import ConfigError, MooncakeError
from mooncake.cli.chat_tools import ChatTools
from mooncake.cli.command import Command
from mooncake.cli.status import ServerAddress
from mooncake.launch.config.options import count, number, setting, text, truth
from mooncake.launch.config.shipped import DEMO
from mooncake.launch.host.http_client import Client

ANSWERS, TOOLS = "answers", "tools"
MAX_ROUNDS = 8
"""Answers with calls to one question. A model that only calls would go on for ever."""

HELP = "/new forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"

TRIES = ("What is Mooncake?", "What is 347 + 585?", "My name is Anna. What is my name?")
"""Questions that k2-demo can answer."""
TOOL_TRIES = ("What is Mooncake?", "What time is it?", "What is 12*34?")
"""Questions that k2-demo can answer with `--tools`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(ServerAddress):
    model: str | None = setting(
        None, text, ANSWERS, "NAME", "name of the model (default: the server's first model)"
    )
    system: str | None = setting(None, text, ANSWERS, "TEXT", "system message")
    max_tokens: int = setting(512, count(1), ANSWERS, "N", "most tokens of an answer")
    temperature: float | None = setting(
        None, number, ANSWERS, "T", "sampling temperature (default: the model's)"
    )
    tools: bool = setting(
        False,
        truth,
        TOOLS,
        "",
        "let the model use a clock and a calculator, and read the cluster's status and --folder",
    )
    folder: str = setting(".", text, TOOLS, "DIR", "folder whose files --tools may list and read")


NO_TOOLS = '{"error": "no tools were declared"}'
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Return a server's text with its control characters spelled out, except line breaks and tabs,
    because a terminal would obey them.
    """
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class Conversation:
    """Talks with one model and keeps the turns."""

    def __init__(self, client: Client, wanted: Chat, tools: ChatTools | None = None) -> None:
        self._client = client
        self._wanted = wanted
        self._tools = tools
        self.model = wanted.model or str(client.get("/v1/models")["data"][0]["id"])
        self.turns: list[dict[str, Any]] = []
        self.forget()

    def forget(self) -> None:
        system = self._wanted.system
        self.turns = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str, out: TextIO) -> str:
        """Send a question, write the answer to `out` as it arrives and return it.

        If the model calls tools, they are run and shown, and the model goes on with what they
        returned. An interrupted answer stays in the conversation as far as it came. If an answer
        fails, its question is removed too.

        Raises:
            MooncakeError: the server failed, or the model only calls tools and never answers.
        """
        begun = len(self.turns)
        self.turns.append({"role": "user", "content": question})
        try:
            for _ in range(MAX_ROUNDS):
                text, calls = self._answer(out)
                turn = {"role": "assistant", "content": text}
                self.turns.append(turn | {"tool_calls": calls} if calls else turn)
                if not calls:
                    return text
                self._run(calls, out)
        except MooncakeError:
            del self.turns[begun:]
            raise
        del self.turns[begun:]
        raise MooncakeError(f"the model called tools {MAX_ROUNDS} times and gave no answer")

    def _answer(self, out: TextIO) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of one answer and its calls. An interrupted answer has no calls."""
        body: dict[str, Any] = {
            "model": self.model, "messages": self.turns, "stream": True,
            "max_tokens": self._wanted.max_tokens,
        }  # fmt: skip
        if self._wanted.temperature is not None:
            body["temperature"] = self._wanted.temperature
        if self._tools is not None:
            body["tools"] = self._tools.declarations()
        parts: list[str] = []
        calls: dict[int, dict[str, Any]] = {}
        try:
            for event in self._client.stream("/v1/chat/completions", body):
                for choice in event.get("choices", []):
                    delta = choice.get("delta", {})
                    _add(calls, delta.get("tool_calls") or ())
                    text = delta.get("content") or ""
                    parts.append(text)
                    out.write(plain(text))
                    out.flush()
        except KeyboardInterrupt:
            out.write(" …")
            calls = {}
        finally:
            if not calls or any(parts):
                out.write("\n")
        return "".join(parts), [calls[index] for index in sorted(calls)]

    def _run(self, calls: list[dict[str, Any]], out: TextIO) -> None:
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            answer = self._tools.run(name, arguments) if self._tools is not None else NO_TOOLS
            out.write(f"  {plain(f'{name}({arguments}) -> {answer}')}\n")
            turn = {"role": "tool", "tool_call_id": call["id"], "content": answer}
            self.turns.append(turn)


def _add(calls: dict[int, dict[str, Any]], pieces: Iterable[Mapping[str, Any]]) -> None:
    """Add the pieces of calls in one event of a stream to the calls so far."""
    for piece in pieces:
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = calls.setdefault(piece["index"], empty)
        call["id"] += piece.get("id") or ""
        for key, more in (piece.get("function") or {}).items():
            call["function"][key] += more or ""


def talk(wanted: Chat, *, read: Callable[[str], str] = input, out: TextIO | None = None) -> int:
    """Converse until the person leaves. `read` asks for a line, `out` gets the answers."""
    if wanted.tools and not Path(wanted.folder).is_dir():
        raise ConfigError(f"--folder: {wanted.folder} is not a folder")
    out = out or sys.stdout
    client = Client(wanted.url, wanted.api_key)
    tools = ChatTools(client, Path(wanted.folder), datetime.now) if wanted.tools else None
    conversation = Conversation(client, wanted, tools)
    out.write(f"Talking to {plain(conversation.model)}. {HELP}.\n")
    if conversation.model == DEMO:
        out.write("".join(f"  try: {question}\n" for question in (TOOL_TRIES if tools else TRIES)))
    while True:
        try:
            question = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            out.write("\n")
            return 0
        if question in ("/quit", "/exit"):
            return 0
        if question == "/new":
            conversation.forget()
        elif question.startswith("/"):
            out.write(f"{HELP}.\n")
        elif question:
            try:
                conversation.ask(question, out)
            except MooncakeError as error:
                out.write(f"({plain(error.message)})\n")


COMMANDS = (
    Command(
        words="chat", settings=Chat, run=talk,
        examples="mooncake chat\nmooncake chat --tools --folder docs\n"
        "mooncake chat --url http://10.0.0.7:8000 --max-tokens 300 "
        '--system "You answer in one sentence."',
    ),
)  # fmt: skip

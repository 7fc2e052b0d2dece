"""`mooncake chat`: a conversation in the terminal, answers shown as they come. Keeps the turns."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from typing import Any, TextIO

from mooncake.base import MooncakeError
from mooncake.cli.command import Command
from mooncake.cli.status import ServerAddress
from mooncake.launch.config.options import count, number, setting, text
from mooncake.launch.host.http_client import Client

ANSWERS = "answers"

HELP = "/new forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(ServerAddress):
    """Settings of `mooncake chat`."""

    model: str | None = setting(None, text, ANSWERS, "NAME", "default: the server's first model")
    system: str | None = setting(None, text, ANSWERS, "TEXT", "system message")
    max_tokens: int = setting(512, count(1), ANSWERS, "N", "of an answer")
    temperature: float | None = setting(None, number, ANSWERS, "T", "default: the model's")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Return a server's text with its control characters spelled out, except line breaks and tabs:
    a terminal would obey them."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class Conversation:
    """A conversation with one model: keeps its turns."""

    def __init__(self, client: Client, wanted: Chat) -> None:
        self._client = client
        self._wanted = wanted
        self.model = wanted.model or str(client.get("/v1/models")["data"][0]["id"])
        self.turns: list[dict[str, str]] = []
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        system = self._wanted.system
        self.turns = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str, out: TextIO) -> str:
        """Send a question, write the answer to `out` as it arrives and return it.

        An answer that is interrupted stays in the conversation as far as it came; one that failed
        takes its question with it.
        """
        self.turns.append({"role": "user", "content": question})
        body: dict[str, Any] = {
            "model": self.model, "messages": self.turns, "stream": True,
            "max_tokens": self._wanted.max_tokens,
        }  # fmt: skip
        if self._wanted.temperature is not None:
            body["temperature"] = self._wanted.temperature
        parts: list[str] = []
        try:
            for event in self._client.stream("/v1/chat/completions", body):
                for choice in event.get("choices", []):
                    text = choice.get("delta", {}).get("content") or ""
                    parts.append(text)
                    out.write(plain(text))
                    out.flush()
        except KeyboardInterrupt:
            out.write(" …")
        except MooncakeError:
            self.turns.pop()
            raise
        finally:
            out.write("\n")
        self.turns.append({"role": "assistant", "content": "".join(parts)})
        return "".join(parts)


def talk(wanted: Chat, *, read: Callable[[str], str] = input, out: TextIO | None = None) -> int:
    """Converse until the person leaves. `read` asks for a line, `out` gets the answers."""
    out = out or sys.stdout
    conversation = Conversation(Client(wanted.url, wanted.api_key), wanted)
    out.write(f"Talking to {plain(conversation.model)}. {HELP}.\n")
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
        words="chat", summary="talk to a server in the terminal", settings=Chat, run=talk,
        examples="mooncake chat\nmooncake chat --url http://10.0.0.7:8000 --max-tokens 300 "
        '--system "You answer in one sentence."',
    ),
)  # fmt: skip

"""`mooncake chat`: a conversation in the terminal, answers shown as they come. Keeps the turns."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, TextIO

from mooncake.base import MooncakeError
from mooncake.launch.client import Client

HELP = "/new forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the person asked for on the command line."""

    model: str | None
    system: str | None
    max_tokens: int
    temperature: float | None


class Conversation:
    """The turns so far, and how an answer is asked for."""

    def __init__(self, client: Client, wishes: Wishes) -> None:
        self._client = client
        self._wishes = wishes
        self.model = wishes.model or str(client.get("/v1/models")["data"][0]["id"])
        self.turns: list[dict[str, str]] = []
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        system = self._wishes.system
        self.turns = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str, out: TextIO) -> str:
        """Send a question, write the answer to `out` as it comes and return it.

        An answer that is interrupted stays in the conversation as far as it came; one that failed
        takes its question with it.
        """
        self.turns.append({"role": "user", "content": question})
        body: dict[str, Any] = {
            "model": self.model, "messages": self.turns, "stream": True,
            "max_tokens": self._wishes.max_tokens,
        }  # fmt: skip
        if self._wishes.temperature is not None:
            body["temperature"] = self._wishes.temperature
        parts: list[str] = []
        try:
            for event in self._client.stream("/v1/chat/completions", body):
                for choice in event.get("choices", []):
                    text = choice.get("delta", {}).get("content") or ""
                    parts.append(text)
                    out.write(text)
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


def talk(
    url: str,
    api_key: str | None,
    wishes: Wishes,
    *,
    read: Callable[[str], str] = input,
    out: TextIO = sys.stdout,
) -> int:
    """Converse until the person leaves; returns the exit code."""
    conversation = Conversation(Client(url, api_key), wishes)
    out.write(f"Talking to {conversation.model}. {HELP}.\n")
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
                out.write(f"({error.message})\n")

"""OpenAI-compatible servers whose answers are scripted, in the event loop of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"


@dataclass
class Call:
    """One request to an engine, and the ways to answer it."""

    path: str
    headers: dict[str, str]
    fields: dict[str, Any]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def reply(self, body: Any, status: int = 200) -> None:
        """Answer whole."""
        text = json.dumps(body).encode()
        self.writer.write(
            b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (status, len(text)) + text
        )  # fmt: skip
        await self.writer.drain()

    async def begin(self) -> None:
        """Send the head of a stream."""
        self.writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        await self.writer.drain()

    async def send(self, text: str) -> None:
        """Send a part of a stream."""
        data = text.encode()
        self.writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
        await self.writer.drain()

    async def event(self, document: Any) -> None:
        await self.send(f"data: {json.dumps(document)}\n\n")

    async def token(self, text: str) -> None:
        await self.event({"choices": [{"index": 0, "delta": {"content": text}}]})

    async def done(self) -> None:
        """End a stream as vLLM does: with usage if it was asked for."""
        if (self.fields.get("stream_options") or {}).get("include_usage"):
            await self.event({"choices": [], "usage": usage(7, 2, 3)})
        await self.send("data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def break_off(self) -> None:
        """Close the connection in the middle of whatever was sent."""
        self.writer.transport.abort()

    async def until_gone(self) -> None:
        """Wait until the client closes the connection."""
        with contextlib.suppress(ConnectionError):
            await self.reader.read()


def usage(prompt: int, output: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


async def answers(call: Call) -> None:
    """Answer with two tokens."""
    if call.path == "/tokenize":
        await call.reply({"tokens": [1, 2, 3], "count": 3})
    elif call.fields.get("stream"):
        await call.begin()
        await call.token("a")
        await call.token("b")
        await call.done()
    else:
        message = {"role": "assistant", "content": "ab"}
        await call.reply(
            {"choices": [{"index": 0, "message": message}], "usage": usage(7, 2, 3)}
        )  # fmt: skip


Script = Callable[[Call], Awaitable[None]]


class ScriptedEngine:
    """An engine. `script` answers what it is asked; what it was asked is in `calls`."""

    def __init__(self, script: Script = answers) -> None:
        self.script = script
        self.health = 200
        self.models = ["m"]
        self.calls: list[Call] = []
        self.url = ""
        self._server: asyncio.Server | None = None
        self._port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, at the same address as before."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """End at once, with all connections."""
        assert self._server is not None
        self._server.close()
        for _ in range(3):  # what was accepted begins
            await asyncio.sleep(0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                await self._answer(await _read(reader, writer))
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()
            self._tasks.discard(task)

    async def _answer(self, call: Call) -> None:
        if call.path == "/health":
            await call.reply({}, self.health)
        elif call.path == "/v1/models":
            await call.reply({"data": [{"id": name, "object": "model"} for name in self.models]})
        else:
            self.calls.append(call)
            await self.script(call)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.rstrip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers["content-length"]))
    return Call(first.split()[1], headers, json.loads(body or b"{}"), reader, writer)


@contextlib.asynccontextmanager
async def engines(*scripts: Script) -> AsyncIterator[list[ScriptedEngine]]:
    """Run an engine for each script."""
    made = [ScriptedEngine(script) for script in scripts]
    for each in made:
        await each.start()
    try:
        yield made
    finally:
        for each in made:
            await each.stop()

"""What an `Idempotency-Key` costs the gateway, and so its other clients: `python -m benchmarks
repeats`.

CPU time of the recorder alone, for each message of a streamed answer: plain, with a key, with the
key and seven repeats that read along, and given again from memory. The kinds take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

from benchmarks.support.servers import load, machine
from mooncake.api.config import ApiConfig
from mooncake.api.http.repeats import MAX_READERS, Repeats

PART = b"x" * 300
"""A message about as long as that of a streamed token."""
ROUNDS = 7


class Answers:
    """Gives answers of `num_messages` over ASGI, and reads them."""

    def __init__(self, num_messages: int) -> None:
        self.num_messages = num_messages
        self._repeats = Repeats(self._app, ApiConfig())

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(self.num_messages):
            await send({"type": "http.response.body", "body": PART, "more_body": True})
            await asyncio.sleep(0)
        scope["state"]["is_complete"] = True
        await send({"type": "http.response.body", "body": b".", "more_body": False})

    async def ask(self, key: str) -> None:
        """Read one answer; "" = without a key."""
        bodies = [b"{}"]

        async def receive() -> Any:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            del message

        headers = [(b"idempotency-key", key.encode())] if key else []
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": headers,
            "state": {"key_name": "x"},
        }  # fmt: skip
        await self._repeats(scope, receive, send)


async def measure(num_messages: int) -> dict[str, float]:
    """Return microseconds of CPU for each message, by kind: medians."""
    answers = Answers(num_messages)
    took: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        kinds = {
            "without a key": [""],
            "with a key": [f"alone {number}"],
            f"with a key, {MAX_READERS} connections": [f"shared {number}"] * MAX_READERS,
            "given again": [f"alone {number}"],
        }
        for kind, keys in kinds.items():
            began_s = time.process_time()
            await asyncio.gather(*(answers.ask(key) for key in keys))
            took.setdefault(kind, []).append(time.process_time() - began_s)
    return {kind: statistics.median(all_s) * 1e6 / num_messages for kind, all_s in took.items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks repeats", description=__doc__)
    parser.add_argument("--messages", type=int, default=3000, help="of one answer")
    given = parser.parse_args(argv)
    print(f"{machine()}; load {load()}")
    print("| answer | CPU of the gateway for each message |\n|---|---|")
    for kind, cost in asyncio.run(measure(given.messages)).items():
        print(f"| {kind} | {cost:.1f} µs |")
    return 0

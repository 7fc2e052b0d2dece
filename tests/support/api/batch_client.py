"""What tests of batches do again and again: inputs, waiting for an end, reading its files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any, Final

from openai import AsyncOpenAI
from openai.types import Batch

CHAT: Final = "/v1/chat/completions"
WAIT_S = 200.0
ENDED = ("completed", "failed", "cancelled", "expired")


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """Return one request of an input file."""
    if url == CHAT:
        body = {"messages": [{"role": "user", "content": custom_id}], "max_tokens": 8} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: Iterable[Any]) -> bytes:
    """Return an input file of these objects."""
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def start(client: AsyncOpenAI, lines: Iterable[Any], url: str = CHAT, **more: Any) -> Batch:
    """Upload lines and begin a batch of them."""
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint=url,  # type: ignore[arg-type]
        completion_window="24h",
        **more,
    )


async def until(client: AsyncOpenAI, batch: Batch, *statuses: str, wait_s: float = WAIT_S) -> Batch:
    """Wait until a batch has one of these statuses (without any: until it has ended). A question
    takes both sides some milliseconds of computing, so a long wait asks less and less often.
    """
    pause_s = 0.01
    async with asyncio.timeout(wait_s):
        while batch.status not in (statuses or ENDED):
            assert batch.status not in ENDED, batch
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.25)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def results(client: AsyncOpenAI, batch: Batch) -> tuple[list[Any], list[Any]]:
    """Return the lines of the output file and of the error file, [] where there is none."""
    found: list[list[Any]] = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        text = "" if file_id is None else (await client.files.content(file_id)).text
        found.append([json.loads(each) for each in text.splitlines()])
    return found[0], found[1]

"""A batch through real processes: the gateway is killed in the middle of it, another one is started
on the same directory, and every line is answered once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.support.api.batch_client import line, results, start, until
from tests.support.serve.server_process import ServerProcess, nano_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_LINES = 40
COMPLETIONS = "/v1/completions"
WORDS = ("--port", "0", "--colocated", "--dtype", "float32", "--max-model-len", "512")


def client_of(server: ServerProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")


def recorded(folder: Path) -> dict[int, bytes]:
    """Return the results in the database, which nobody uses."""
    db = sqlite3.connect(folder / "batches.sqlite")
    found = dict(db.execute("SELECT line, text FROM results").fetchall())
    assert db.execute("SELECT status FROM batches").fetchall() == [("in_progress",)]
    db.close()
    return found


def test_a_gateway_that_is_killed_in_a_batch_loses_no_line(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    words = (str(nano_checkpoint(tmp_path)), *WORDS, "--batch-dir", str(folder))
    lines = [
        line(f"line {at}", COMPLETIONS, prompt=f"{at} is", max_tokens=200, ignore_eos=True)
        for at in range(NUM_LINES)
    ]

    async def begin() -> Any:
        async with client_of(first) as client:
            batch = await start(client, lines, COMPLETIONS)
            async with asyncio.timeout(240):
                while batch.request_counts is None or batch.request_counts.completed < 3:
                    await asyncio.sleep(0.1)
                    batch = await client.batches.retrieve(batch.id)
            return batch

    async def end() -> None:
        async with client_of(second) as client:
            ended = await until(client, await client.batches.retrieve(batch.id), wait_s=400)
            assert ended.status == "completed"
            output, errors = await results(client, ended)
            assert errors == []
            assert [each["custom_id"] for each in output] == [each["custom_id"] for each in lines]
            assert {each["response"]["body"]["usage"]["completion_tokens"] for each in output} == {
                200
            }
            assert ended.output_file_id is not None
            text = (await client.files.content(ended.output_file_id)).content.splitlines()
            for number, before in kept.items():
                assert text[number - 1] == before, "what was recorded is what the client gets"

    # It computes one line after another, so the client sees the first ones long before the end.
    with ServerProcess(*words, "--max-num-seqs", "1") as first:
        first.wait_until_serving()
        batch = asyncio.run(begin())
        os.killpg(first.process.pid, signal.SIGKILL)
        first.process.wait()
    kept = recorded(folder)
    assert 0 < len(kept) < NUM_LINES
    with ServerProcess(*words) as second:
        second.wait_until_serving()
        asyncio.run(end())

"""vLLM's own front end over an engine core that answers at once. Run by vLLM's own environment:

    build/vllm-venv/bin/python benchmarks/support/frontend_vllm.py serve MODEL --port N ...

The HTTP server, tokenizer, input and output processors are vLLM's; only the client of its engine
process is replaced: a request's first token comes at once, the others at every pass of the event
loop or DOOR_STEP_MS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.cli.main import main
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient

FIRST_TOKEN, NUM_TOKENS = 300, 97


class InstantCore(EngineCoreClient):
    """What `AsyncLLM` asks of its engine process, answered here."""

    def __init__(self) -> None:
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self._step_s = float(os.environ.get("DOOR_STEP_MS", "0")) / 1000
        self._next_step = 0.0
        self._running: dict[str, tuple[int, int]] = {}
        self._fresh: list[str] = []
        self._news = asyncio.Event()

    def shutdown(self, timeout: float | None = None) -> None:
        pass

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        pass

    async def add_request_async(self, request: Any) -> None:
        self._running[request.request_id] = (0, request.sampling_params.max_tokens)
        self._fresh.append(request.request_id)
        self._news.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)

    async def get_output_async(self) -> Any:
        await asyncio.sleep(0)
        if not self._running:
            await self._news.wait()
        elif self._step_s and not self._fresh:
            rest_s = self._next_step - time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), max(0.0, rest_s))
        self._news.clear()
        fresh, self._fresh = self._fresh, []
        if not self._step_s or time.monotonic() >= self._next_step:
            self._next_step = time.monotonic() + self._step_s
            fresh = list(self._running)
        outputs = []
        for request_id in fresh:
            if request_id not in self._running:
                continue
            done, most = self._running[request_id]
            ends = done + 1 == most
            outputs.append(
                EngineCoreOutput(
                    request_id=request_id,
                    new_token_ids=[FIRST_TOKEN + done % NUM_TOKENS],
                    finish_reason=FinishReason.LENGTH if ends else None,
                )
            )
            if ends:
                del self._running[request_id]
            else:
                self._running[request_id] = (done + 1, most)
        return EngineCoreOutputs(outputs=outputs)


if __name__ == "__main__":
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: InstantCore())
    sys.exit(main())

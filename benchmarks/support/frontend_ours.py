"""Our API server over a backend that answers at once.

    python -m benchmarks.support.frontend_ours MODEL --port N

A request's first token comes at once, the others at every pass of the event loop or `--step-ms`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.servers import SERVED_NAME
from mooncake.api.app import create_app
from mooncake.api.config import ApiConfig
from mooncake.api.http.event_loop import run_in_loop
from mooncake.api.http.server import serve
from mooncake.api.model import load_served_model
from mooncake.base import FinalEvent, FinishReason, GenerateRequest, RequestOutput, Sink

FIRST_TOKEN, NUM_TOKENS = 300, 97
"""Answers count through so many tokens of the vocabulary, the same in both API servers."""


class InstantBackend:
    """A `Backend` without a model."""

    ready = True

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: dict[str, tuple[GenerateRequest, Sink, int]] = {}
        self._timer: asyncio.Handle | None = None

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        self._running[request.request_id] = (request, sink, 0)
        asyncio.get_running_loop().call_soon(self._advance, request.request_id)

    def _advance(self, request_id: str) -> None:
        if request_id not in self._running:
            return
        request, sink, done = self._running[request_id]
        token = FIRST_TOKEN + done % NUM_TOKENS
        sink(RequestOutput(request_id=request_id, attempt=0, start=done, tokens=[token]))
        self._running[request_id] = (request, sink, done + 1)
        if done + 1 == request.sampling.max_tokens:
            self._end(request_id, FinishReason.LENGTH)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._step_s, self._step)

    def _step(self) -> None:
        self._timer = None
        for request_id in list(self._running):
            self._advance(request_id)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        request, sink, done = self._running.pop(request_id)
        sink(
            FinalEvent(
                request_id=request_id,
                reason=reason,
                num_prompt_tokens=len(request.prompt_tokens),
                num_output_tokens=done,
            )
        )

    def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._end(request_id, FinishReason.ABORT)

    def status(self) -> Any:
        return {}

    @property
    def missing(self) -> Sequence[str]:
        return ()

    @property
    def has_waiting_batch(self) -> bool:
        return False

    def metrics(self, for_operator: bool) -> bytes:
        del for_operator
        return b""

    def drain(self) -> None:
        pass


async def _serve(model: Path, host: str, port: int, step_s: float) -> None:
    config = ApiConfig(host=host, port=port, served_model_names=(SERVED_NAME,))
    served = load_served_model(model, names=(SERVED_NAME,), max_model_len=8192)
    app = create_app(InstantBackend(step_s), served, config)
    await serve(app, config, stop=asyncio.Event(), ready=lambda *_: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=0.0)
    args = parser.parse_args()
    run_in_loop(_serve(args.model, args.host, args.port, args.step_ms / 1000))


if __name__ == "__main__":
    main()

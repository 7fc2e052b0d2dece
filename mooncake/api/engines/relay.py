"""Answers one request by an engine: chooses it, passes its answer on, tries another one as long as
the client has got nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mooncake.api.engines.asked import MESSAGES, Asked
from mooncake.api.engines.events import DONE_DATA, Counted, EventCutter, data_of, error_in
from mooncake.api.engines.exchange import EngineRefused, Exchange
from mooncake.api.engines.proxy import EngineProxy
from mooncake.api.errors import anthropic_error, error_reply
from mooncake.api.http.client import RequestFailed
from mooncake.api.http.response import DONE, ErrorResponse, event, json_response, until_gone
from mooncake.base import FinishReason, InternalError, MooncakeError, Overloaded, Unavailable
from mooncake.scheduler.engines.fleet import Placement
from mooncake.scheduler.engines.prefixes import Prompt
from mooncake.telemetry.events import (
    Accepted,
    AnyEvent,
    Finished,
    FirstToken,
    Placed,
    Refused,
    Requeued,
    Tokens,
)

_log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Engines that one request is tried at."""
RETRY_S = 1.0
MAX_UNSENT_BYTES = 64 << 20
"""The longest event of a stream, and the most that may come before the first token."""
STREAM_TYPE = "text/event-stream"
PASSED_ON = ("content-type", "cache-control", "retry-after", "x-accel-buffering")
"""The headers of an engine's answer that the client gets."""


class Relay(Response):
    """One request. It is aborted at its engine when the client leaves."""

    def __init__(self, proxy: EngineProxy, asked: Asked, headers: Headers) -> None:
        super().__init__()
        self._proxy = proxy
        self._asked = asked
        self._given = headers
        self._request_id = proxy.new_id()
        self._told: asyncio.Future[MooncakeError] = asyncio.get_running_loop().create_future()
        self._charge: Callable[[int], None] = lambda _: None
        self._num_charged = 0
        self._is_accepted = False
        self._begun = False
        """The client has got the head of the answer, so no other engine can be tried."""
        self._is_complete = False
        self._status = 200
        self._counted = Counted()
        self._has_first = False
        self._num_events = 0
        """Events with tokens."""

    def fail(self, error: MooncakeError) -> None:
        """End the call with `error`."""
        if not self._told.done():
            self._told.set_result(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        self._charge = state.get("charge", self._charge)
        work = asyncio.create_task(self._run(scope, receive, send))
        gone = asyncio.create_task(until_gone(receive))
        error: MooncakeError | None = None
        with self._proxy.running(self):
            try:
                waits: set[asyncio.Future[Any]] = {work, gone, self._told}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                error = await self._outcome(work)
            finally:
                gone.cancel()
                work.cancel()
                self._end(error)
            state["is_complete"] = self._is_complete
            if error is not None and not self._begun:
                await ErrorResponse(error)(scope, receive, send)
            elif error is not None:
                body = _failed(self._asked.path, error)
                await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _outcome(self, work: asyncio.Task[None]) -> MooncakeError | None:
        """Return the error that the client must get, or None if it has its answer, or is gone."""
        if work.done():
            try:
                work.result()
            except MooncakeError as error:
                return error
            except Exception:
                _log.exception("a request could not be passed on")
                return InternalError("the server failed on this request; its log says why")
            return None
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        return self._told.result() if self._told.done() else None

    # ------------------------------------------------------- engines

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the request answered. Raises MooncakeError when that fails."""
        prompt = await self._proxy.prompt_of(self._asked, self._given)
        tried: list[str] = []
        refused: EngineRefused | None = None
        while True:
            placement = self._place(prompt, tried, refused)
            try:
                await self._at(placement, scope, receive, send)
                return
            except RequestFailed as failure:
                _log.warning(
                    "request %s failed at %s: %s", self._request_id, placement.engine, failure
                )
                refused = failure if isinstance(failure, EngineRefused) else None
                if refused is None:
                    self._proxy.suspect(placement.engine)
                tried.append(placement.engine)
                if self._begun:
                    raise Unavailable(
                        "the engine failed in the middle of the answer; ask again",
                        retry_after_s=RETRY_S,
                    ) from None
                self._record(
                    Requeued(
                        request_id=self._request_id, at_s=self._now(), attempt=len(tried),
                        reason=str(failure), num_output_tokens=0,
                    )
                )  # fmt: skip

    def _place(self, prompt: Prompt, tried: list[str], refused: EngineRefused | None) -> Placement:
        """Choose an engine. Raises MooncakeError when no further one may be tried."""
        now = self._now()
        try:
            if len(tried) >= MAX_ATTEMPTS:
                raise Unavailable("")
            placement = self._proxy.fleet.place(
                self._request_id, prompt, self._asked.model, now,
                is_streamed=self._asked.is_streamed, tried=tried,
            )  # fmt: skip
        except MooncakeError as error:
            if tried:
                raise _none_left(len(tried), refused) from None
            status, reason = error.http_status, "engines"
            self._record(
                Refused(request_id=self._request_id, at_s=now, status=status, reason=reason)
            )
            raise
        if not tried:
            self._accept(prompt, now)
        self._record(
            Placed(
                request_id=self._request_id, at_s=now, attempt=len(tried) + 1, prefill=None,
                decode=placement.engine, predicted_ttft_s=placement.predicted_ttft_s,
                predicted_tbt_s=0.0, num_cached_tokens=placement.num_cached_tokens,
            )
        )  # fmt: skip
        return placement

    def _accept(self, prompt: Prompt, now: float) -> None:
        self._is_accepted = True
        self._num_charged = prompt.num_tokens * self._asked.num_sequences
        self._charge(self._num_charged)
        self._counted.num_prompt = prompt.num_tokens
        self._record(
            Accepted(
                request_id=self._request_id, at_s=now, num_prompt_tokens=prompt.num_tokens,
                max_tokens=self._asked.max_tokens, tenant=self._asked.tenant,
            )
        )  # fmt: skip

    async def _at(self, placement: Placement, scope: Scope, receive: Receive, send: Send) -> None:
        """Have one engine answer. Raises RequestFailed when it does not."""
        failed = False
        self._counted.num_cached = None
        try:
            with self._proxy.exchange(
                placement.engine, self._asked.path, self._asked.body(), self._given
            ) as exchange:
                status = await exchange.head()
                if status >= 500 or status == 429:
                    raise EngineRefused(status)
                self._status = status
                if exchange.headers.get("content-type", "").startswith(STREAM_TYPE):
                    await self._pass_stream(exchange, placement, send)
                else:
                    await self._pass_whole(exchange, placement, scope, receive, send)
        except RequestFailed:
            failed = True
            raise
        finally:
            self._proxy.fleet.ended(
                self._request_id, placement.engine, failed=failed,
                num_prompt_tokens=(self._counted.num_prompt or 0) * self._is_complete,
                num_cached_tokens=self._counted.num_cached,
            )  # fmt: skip

    # ------------------------------------------------------- answers

    async def _pass_whole(
        self, exchange: Exchange, placement: Placement, scope: Scope, receive: Receive, send: Send
    ) -> None:
        body = await exchange.whole()
        if self._status == 200:
            self._counted.take(body)
            self._first_token(placement)
            self._tokens(self._counted.num_output or 1)
            self._is_complete = True
        self._begun = True
        response = json_response(body, self._status)
        response.headers.update(_passed_on(exchange))
        await response(scope, receive, send)

    async def _pass_stream(self, exchange: Exchange, placement: Placement, send: Send) -> None:
        cutter, early = EventCutter(), bytearray()
        while piece := await exchange.piece():
            passed = [each for each in cutter.feed(piece) if self._keeps(each, placement)]
            early += b"".join(passed)
            if cutter.num_waiting > MAX_UNSENT_BYTES or len(early) > MAX_UNSENT_BYTES:
                raise RequestFailed(
                    f"it sent {MAX_UNSENT_BYTES} bytes without a token, or in one event"
                )
            if not self._has_first:
                continue  # comments alone: another engine may still be tried
            if early:
                await self._send(exchange, send, bytes(early), more=True)
            early.clear()
        self._is_complete = self._status == 200
        await self._send(exchange, send, bytes(early) + cutter.rest(), more=False)

    def _keeps(self, raw: bytes, placement: Placement) -> bool:
        """Take note of an event. Return whether the client gets it."""
        data = data_of(raw)
        if not data:
            return True
        message = error_in(data)
        if message is not None and not self._has_first:
            raise RequestFailed(f"its answer begins with an error: {message}")
        if message is not None:
            self._status = 500
        self._first_token(placement)
        if data != DONE_DATA:
            is_usage = self._counted.take(data)
            if is_usage and self._asked.adds_usage:
                return False
            self._tokens(0 if is_usage else 1)
        return True

    async def _send(self, exchange: Exchange, send: Send, body: bytes, *, more: bool) -> None:
        if not self._begun:
            self._begun = True
            headers = [
                (name.encode(), value.encode("latin-1"))
                for name, value in _passed_on(exchange).items()
            ]
            start = {"type": "http.response.start", "status": self._status, "headers": headers}
            await send(start)
        await send({"type": "http.response.body", "body": body, "more_body": more})

    # ------------------------------------------------------- what is noted

    def _first_token(self, placement: Placement) -> None:
        """Take note of the first token; nothing happens at later ones."""
        if self._has_first:
            return
        self._has_first = True
        now = self._now()
        self._proxy.fleet.first_token(self._request_id, placement.engine, now)
        cached = self._counted.num_cached
        self._record(
            FirstToken(
                request_id=self._request_id, at_s=now, worker_id=placement.engine,
                num_cached_tokens=placement.num_cached_tokens if cached is None else cached,
            )
        )  # fmt: skip

    def _tokens(self, number: int) -> None:
        if number:
            self._record(
                Tokens(
                    request_id=self._request_id, at_s=self._now(), start=self._num_events,
                    num_tokens=number, worker_id="",
                )
            )  # fmt: skip
        self._num_events += number

    def _end(self, error: MooncakeError | None) -> None:
        """Charge what was used, and record the end."""
        if not self._is_accepted:
            return
        num_prompt = self._counted.num_prompt or 0
        num_output = self._num_events
        if self._counted.num_output is not None:
            num_output = self._counted.num_output
        is_answered = self._begun and self._status == 200
        used = num_prompt + num_output if is_answered else 0
        self._charge(used - self._num_charged)
        self._record(
            Finished(
                request_id=self._request_id, at_s=self._now(), reason=self._reason(error),
                num_prompt_tokens=num_prompt, num_output_tokens=num_output * is_answered,
                num_cached_tokens=self._counted.num_cached or 0,
                status=self._status if error is None else error.http_status,
            )
        )  # fmt: skip

    def _reason(self, error: MooncakeError | None) -> FinishReason:
        if error is not None or self._status != 200:
            return FinishReason.ERROR
        if not self._is_complete:
            return FinishReason.ABORT
        return FinishReason.LENGTH if self._counted.is_length else FinishReason.STOP

    def _record(self, happened: AnyEvent) -> None:
        self._proxy.recorder.record(happened)

    def _now(self) -> float:
        return self._proxy.clock.now()


def _none_left(num_tried: int, refused: EngineRefused | None) -> MooncakeError:
    """Return the error for a request that no engine has answered."""
    if refused is not None and refused.status == 429:
        return Overloaded(
            f"the engines are full ({num_tried} tried); try again", retry_after_s=RETRY_S
        )
    return Unavailable(
        f"no engine could answer ({num_tried} tried); its operator finds the reasons in the log",
        retry_after_s=RETRY_S,
    )


def _failed(path: str, error: MooncakeError) -> bytes:
    """Return the last events of a stream that `error` cut off."""
    if path == MESSAGES:
        return event(anthropic_error(error), "error")
    return event(error_reply(error)) + DONE


def _passed_on(exchange: Exchange) -> dict[str, str]:
    return {name: exchange.headers[name] for name in PASSED_ON if name in exchange.headers}

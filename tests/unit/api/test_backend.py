"""The loop side of the gateway: messages and timers reach the machine, all in the loop's thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

import msgspec
import pytest

from mooncake.api import backend as of_api
from mooncake.api.backend import MAX_READS_A_TURN, Backend, EventStream, GatewayBackend
from mooncake.base import (
    FinalEvent,
    FinishReason,
    GenerateRequest,
    MonotonicClock,
    OutputEvent,
    RequestOutput,
    SamplingParams,
    pack_tokens,
)
from mooncake.scheduler.gateway.gateway import Gateway


async def generate(backend: Backend, request: GenerateRequest) -> AsyncIterator[OutputEvent]:
    """Yield the events of one request; closing the iterator early aborts it."""
    async with EventStream(backend, [request]) as stream:
        while events := await stream.batch():
            for event in events:
                yield event


class Note(msgspec.Struct):
    """A message for the machine."""

    text: str


class RecordingMachine:
    """Writes down what it is told; answers "finish" messages with the end of all requests. It has
    no status: probes, which anybody may send, do not ask for one.
    """

    ready = True
    missing: Sequence[str] = ()

    def __init__(self) -> None:
        self.told: list[str] = []
        self.threads: set[int] = set()
        self.wake_after_s: float | None = None
        self.broken_ticks = 0
        self.ticked = asyncio.Event()
        self._sinks: dict[str, Callable[[OutputEvent], None]] = {}

    def submit(
        self, request: GenerateRequest, sink: Callable[[OutputEvent], None], now: float
    ) -> None:
        self._note(f"submit {request.request_id}")
        self._sinks[request.request_id] = sink

    def abort(self, request_id: str, now: float) -> None:
        self._note(f"abort {request_id}")
        self._end(request_id, FinishReason.ABORT)

    def handle(self, event: msgspec.Struct, now: float) -> None:
        assert isinstance(event, Note)
        self._note(event.text)
        if event.text == "broken":
            raise ValueError("cannot take this")
        if event.text == "token":
            for request_id, sink in self._sinks.items():
                sink(RequestOutput(request_id=request_id, attempt=0, start=0, tokens=[1]))
        if event.text == "finish":
            for request_id in list(self._sinks):
                self._end(request_id, FinishReason.STOP)

    def tick(self, now: float) -> float | None:
        self._note("tick")
        self.ticked.set()
        if self.broken_ticks:
            self.broken_ticks -= 1
            raise ValueError("cannot tick")
        wake_after_s, self.wake_after_s = self.wake_after_s, None
        return None if wake_after_s is None else now + wake_after_s

    def worker_lost(self, worker_id: str, now: float) -> None:
        self._note(f"lost {worker_id}")

    def drain(self, now: float) -> None:
        self._note("drain")

    def _note(self, text: str) -> None:
        self.told.append(text)
        self.threads.add(threading.get_ident())

    def _end(self, request_id: str, reason: FinishReason) -> None:
        sink = self._sinks.pop(request_id)
        sink(
            FinalEvent(
                request_id=request_id, reason=reason, num_prompt_tokens=1, num_output_tokens=0
            )
        )


class PipeInbox:
    """A channel's reading end over a pipe; `edge` makes it readable once for many messages."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._messages: list[list[Note]] = []

    def put(self, *texts: str) -> None:
        for text in texts:
            self._messages.append([Note(text)])
        os.write(self._write, b"x")

    def fileno(self) -> int:
        return self._read

    def receive(self) -> list[Note]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        return self._messages.pop(0) if self._messages else []

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def run(test: Callable[[RecordingMachine, PipeInbox, GatewayBackend], object]) -> None:
    async def main() -> None:
        machine, inbox = RecordingMachine(), PipeInbox()
        gateway = cast(Gateway, machine)
        backend = GatewayBackend(gateway, inbox, MonotonicClock(), metrics=lambda _: b"m 1\n")
        backend.start()
        try:
            await test(machine, inbox, backend)  # type: ignore[misc]
        finally:
            backend.stop()
            inbox.close()
        assert machine.threads <= {threading.get_ident()}

    asyncio.run(main())


def request(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt=pack_tokens([1]), sampling=SamplingParams())


def test_messages_reach_the_machine_in_order_and_are_followed_by_a_tick() -> None:
    async def test(machine: RecordingMachine, inbox: PipeInbox, backend: GatewayBackend) -> None:
        await machine.ticked.wait()
        machine.ticked.clear()
        inbox.put("a", "b", "c")
        await machine.ticked.wait()
        assert machine.told == ["tick", "a", "b", "c", "tick"]

    run(test)


def test_many_messages_are_all_read_though_the_descriptor_speaks_once() -> None:
    async def test(machine: RecordingMachine, inbox: PipeInbox, backend: GatewayBackend) -> None:
        texts = [str(number) for number in range(3 * MAX_READS_A_TURN + 1)]
        inbox.put(*texts)
        while len(machine.told) < len(texts):
            await machine.ticked.wait()
            machine.ticked.clear()
        assert [text for text in machine.told if text != "tick"] == texts
        assert machine.told.count("tick") >= 4, "others get their turn in between"

    run(test)


def test_timer_of_the_machine_is_kept() -> None:
    async def test(machine: RecordingMachine, inbox: PipeInbox, backend: GatewayBackend) -> None:
        machine.wake_after_s = 0.001
        await machine.ticked.wait()
        machine.ticked.clear()
        await machine.ticked.wait()
        assert machine.told == ["tick", "tick"]

    run(test)


def test_one_broken_message_does_not_silence_the_gateway(caplog: pytest.LogCaptureFixture) -> None:
    async def test(machine: RecordingMachine, inbox: PipeInbox, backend: GatewayBackend) -> None:
        inbox.put("broken", "fine")
        await machine.ticked.wait()
        assert machine.told == ["broken", "fine", "tick"]

    run(test)
    assert "failed on a Note" in caplog.text


def test_ticks_go_on_while_the_channel_cannot_be_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_api, "RETRY_TICK_S", 0.001)

    async def test(machine: RecordingMachine, inbox: PipeInbox, backend: GatewayBackend) -> None:
        del backend
        receive, broken = inbox.receive, [True, True]

        def fails() -> Sequence[msgspec.Struct]:
            if broken:
                broken.pop()
                raise OSError("no descriptors")
            return receive()

        monkeypatch.setattr(inbox, "receive", fails)
        inbox.put("said meanwhile")
        while "said meanwhile" not in machine.told:
            machine.ticked.clear()
            await machine.ticked.wait()
        assert not broken

    run(test)
    assert "the gateway cannot read its channel" in caplog.text


def test_one_broken_tick_does_not_stop_the_timer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_api, "RETRY_TICK_S", 0.001)

    async def test(machine: RecordingMachine, inbox: PipeInbox, backend: GatewayBackend) -> None:
        machine.broken_ticks = 1
        await machine.ticked.wait()
        machine.ticked.clear()
        await machine.ticked.wait()
        assert machine.told == ["tick", "tick"]

    run(test)
    assert "failed on a tick" in caplog.text


def test_events_of_a_request_are_iterated_to_its_end() -> None:
    async def test(machine: RecordingMachine, inbox: PipeInbox, backend: GatewayBackend) -> None:
        events = generate(backend, request("r"))
        inbox.put("token", "finish")
        seen = [event async for event in events]
        assert [type(event).__name__ for event in seen] == ["RequestOutput", "FinalEvent"]
        assert "abort r" not in machine.told

    run(test)


def test_closing_the_iterator_aborts() -> None:
    async def test(machine: RecordingMachine, inbox: PipeInbox, backend: GatewayBackend) -> None:
        events = generate(backend, request("r"))
        inbox.put("token")
        async for _ in events:
            break
        await events.aclose()  # type: ignore[attr-defined]
        assert machine.told.count("abort r") == 1

    run(test)


def test_cancelling_the_reader_aborts() -> None:
    async def test(machine: RecordingMachine, inbox: PipeInbox, backend: GatewayBackend) -> None:
        async def read() -> None:
            async for _ in generate(backend, request("r")):
                pass

        reader = asyncio.create_task(read())
        await machine.ticked.wait()
        assert "submit r" in machine.told
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert "abort r" in machine.told

    run(test)


def test_other_threads_tell_of_lost_workers() -> None:
    async def test(machine: RecordingMachine, inbox: PipeInbox, backend: GatewayBackend) -> None:
        await machine.ticked.wait()
        machine.ticked.clear()
        await asyncio.to_thread(backend.worker_lost_threadsafe, "decode-0")
        await machine.ticked.wait()
        assert "lost decode-0" in machine.told

    run(test)


def test_readiness_metrics_and_drain() -> None:
    async def test(machine: RecordingMachine, inbox: PipeInbox, backend: GatewayBackend) -> None:
        assert backend.ready
        assert backend.metrics(False) == b"m 1\n"
        backend.drain()
        assert not backend.ready
        assert "drain" in machine.told

    run(test)


def test_nothing_happens_before_start_and_after_stop() -> None:
    async def test(machine: RecordingMachine, inbox: PipeInbox, backend: GatewayBackend) -> None:
        backend.stop()
        assert not backend.ready
        backend.worker_lost_threadsafe("w")
        inbox.put("late")
        await asyncio.sleep(0)
        assert machine.told == []
        backend.stop()

    run(test)

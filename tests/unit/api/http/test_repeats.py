"""Repeats with an `Idempotency-Key`, over an application that goes on as it is told: who joins, who
is refused, what is kept, and that all memory comes back.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers

from mooncake.api.config import ApiConfig
from mooncake.api.errors import ApiError
from mooncake.api.http.repeats import ANSWER_BYTES, MAX_READERS, PART_BYTES, Repeats, seed_of
from mooncake.api.http.response import ErrorResponse
from tests.support.clock import leap, run_leaping
from tests.support.waiting import LONG_S

KEPT_S = 3600.0


class App:
    """Answers each request with `part` for each of `num_steps` permits, and then with an end."""

    def __init__(self, num_steps: int = 3, *, is_complete: bool = True) -> None:
        self.num_steps, self.is_complete = num_steps, is_complete
        self.steps = asyncio.Semaphore(0)
        self.part = b"a"
        self.num_runs = 0
        self.num_left = 0
        self.seeds: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            while (await receive()).get("more_body"):
                pass
        except ApiError as error:  # as the application answers it
            await ErrorResponse(error)(scope, receive, send)
            return
        self.num_runs += 1
        self.seeds.append(scope["state"].get("seed"))
        left = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(self.num_steps):
            step = asyncio.ensure_future(self.steps.acquire())
            await asyncio.wait({step, left}, return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                self.num_left += 1
                step.cancel()
                return
            await send({"type": "http.response.body", "body": self.part, "more_body": True})
        scope["state"]["is_complete"] = self.is_complete
        left.cancel()
        await send({"type": "http.response.body", "body": b".", "more_body": False})

    def go_on(self, num: int | None = None) -> None:
        for _ in range(self.num_steps if num is None else num):
            self.steps.release()


class Client:
    """One connection and what it has got."""

    def __init__(
        self, repeats: Repeats, body: bytes = b"{}", *, key: str = "k", owner: str = "x",
        is_repeat: bool = False,
    ) -> None:  # fmt: skip
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.text = b""
        self.reading = asyncio.Event()
        self.reading.set()
        self.gone = asyncio.Event()
        self._bodies = [body[:1], body[1:]]
        headers = [(b"idempotency-key", key.encode())]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": headers,
            "state": {"key_name": owner, "is_repeat": is_repeat},
        }  # fmt: skip
        self.done = asyncio.create_task(repeats(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._bodies:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        part = self._bodies.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self._bodies)}

    async def _send(self, message: Any) -> None:
        await self.reading.wait()
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.text += message["body"]

    async def got(self, text: bytes) -> None:
        async with asyncio.timeout(LONG_S):
            while self.text != text:
                await asyncio.sleep(0)


def run(
    test: Callable[[App, Repeats], Awaitable[None]], app: Callable[[], App] = App, **config: Any
) -> None:
    async def main() -> None:
        made = app()
        repeats = Repeats(made, ApiConfig(**{"kept_answer_s": KEPT_S, **config}))
        async with asyncio.timeout(LONG_S):
            await test(made, repeats)
            await asyncio.sleep(0)
        repeats.check_integrity()

    run_leaping(main())


def test_a_repeat_joins_the_answer_that_is_being_given() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        first = Client(repeats)
        app.go_on(1)
        await first.got(b"a")
        second = Client(repeats)
        await second.got(b"a")
        app.go_on(2)
        await asyncio.gather(first.done, second.done)
        assert (first.text, second.text, app.num_runs) == (b"aaa.", b"aaa.", 1)
        assert b"idempotent-replayed" not in first.headers
        assert second.headers[b"idempotent-replayed"] == b"true"

    run(test)


def test_a_complete_answer_is_given_again_until_its_time_is_over() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        app.go_on()
        await Client(repeats).done
        again = Client(repeats)
        await again.done
        assert (again.text, app.num_runs) == (b"aaa.", 1)
        await leap(61)
        assert not knows(repeats, "k")
        app.go_on()
        anew = Client(repeats)
        await anew.done
        assert (anew.text, app.num_runs) == (b"aaa.", 2)
        assert b"idempotent-replayed" not in anew.headers

    run(test, kept_answer_s=60)


def test_an_answer_that_fails_is_not_kept() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        for runs in (1, 2):
            app.go_on()
            await Client(repeats).done
            assert app.num_runs == runs

    run(test, lambda: App(is_complete=False))


def test_keys_belong_to_their_api_key_and_to_one_body() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        first = Client(repeats)
        app.go_on(1)
        await first.got(b"a")
        other = Client(repeats, b'{"other": 1}')
        await other.done
        assert other.status == 422
        assert b"another path or body" in other.text
        stranger = Client(repeats, b'{"other": 1}', owner="y")
        app.go_on(5)
        await asyncio.gather(first.done, stranger.done)
        assert (first.text, stranger.text, app.num_runs) == (b"aaa.", b"aaa.", 2)
        late = Client(repeats, b'{"other": 1}')
        await late.done
        assert late.status == 422

    run(test)


def test_an_answer_goes_on_for_a_while_without_its_client() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        first = Client(repeats)
        app.go_on(1)
        await first.got(b"a")
        first.gone.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not first.done.done(), "its permits are held"
        app.go_on(1)
        second = Client(repeats)
        await second.got(b"aa")
        app.go_on(1)
        await second.done
        assert (second.text, app.num_left) == (b"aaa.", 0)

    run(test)


def test_an_answer_that_nobody_comes_back_for_is_ended() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        first = Client(repeats)
        app.go_on(1)
        await first.got(b"a")
        first.gone.set()
        await first.done
        assert app.num_left == 1
        app.go_on()
        await Client(repeats).done
        assert app.num_runs == 2

    run(test, linger_s=0.05)


def test_each_client_that_breaks_off_is_waited_for() -> None:
    """The second leaves when most of the first one's time is over."""

    async def test(app: App, repeats: Repeats) -> None:
        clients = [Client(repeats)]
        app.go_on(1)
        await clients[0].got(b"a")
        clients[0].gone.set()
        for _ in range(3):
            await leap(40)
            clients.append(Client(repeats))
            await clients[-1].got(b"a")
            clients[-1].gone.set()
        app.go_on(2)
        last = Client(repeats)
        await last.done
        assert (last.text, app.num_left, app.num_runs) == (b"aaa.", 0, 1)

    run(test, linger_s=60)


def test_an_answer_larger_than_the_memory_goes_at_its_readers_speed_and_is_not_repeated() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        app.part = b"a" * 1000
        first = Client(repeats)
        app.go_on()
        while not first.text:
            await asyncio.sleep(0)
        first.reading.clear()
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(first.text) < 50_000, "it waits for its reader"
        late = Client(repeats)
        await late.done
        assert late.status == 409
        assert b"`max-kept-answer-bytes`" in late.text
        first.reading.set()
        await first.done
        assert first.text == b"a" * 100_000 + b"."
        again = Client(repeats)
        app.go_on()
        await again.done
        assert (len(again.text), app.num_runs) == (100_001, 2)
        gone = Client(repeats, key="gone")
        app.go_on(50)
        while len(gone.text) < 20_000:
            await asyncio.sleep(0)
        gone.gone.set()
        await gone.done
        assert app.num_left == 1, "nobody could come back for it"

    run(test, lambda: App(100), max_kept_answer_bytes=20_000)


def test_the_oldest_answers_of_the_same_api_key_make_room() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        for number in range(50):
            app.go_on()
            await Client(repeats, key=str(number)).done
        other = Client(repeats, owner="y")
        app.go_on()
        await other.done
        assert app.num_runs == 51
        for key, owner, known in (("0", "x", False), ("49", "x", True), ("k", "y", True)):
            assert repeats.knows(owner, Headers({"idempotency-key": key})) is known
        repeats.check_integrity()

    run(test, max_kept_answer_bytes=5 * (ANSWER_BYTES + 6 * PART_BYTES))


def knows(repeats: Repeats, key: str) -> bool:
    return repeats.knows("x", Headers({"idempotency-key": key}))


def test_what_a_slow_reader_has_yet_to_get_fills_the_memory() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        app.part = b"a" * 1000
        slow = Client(repeats, key="large")
        slow.reading.clear()
        app.go_on(40)
        for _ in range(100):
            await asyncio.sleep(0)
        app.part, app.num_steps = b"a", 1
        await Client(repeats, key="meanwhile").done
        assert not knows(repeats, "meanwhile")
        repeats.check_integrity()
        slow.reading.set()
        await slow.done
        await Client(repeats, key="afterwards").done
        assert knows(repeats, "afterwards")

    run(test, lambda: App(30), max_kept_answer_bytes=20_000)


def test_an_answer_that_is_read_makes_no_room() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        app.part = b"a" * 1000
        app.go_on()
        await Client(repeats, key="1").done
        slow = Client(repeats, key="1")
        slow.reading.clear()
        for _ in range(100):
            await asyncio.sleep(0)
        for key, kept in (("2", False), ("3", True)):
            app.go_on()
            await Client(repeats, key=key).done
            assert (knows(repeats, "1"), knows(repeats, key)) == (not kept, kept)
            repeats.check_integrity()
            slow.reading.set()
            await slow.done
        assert slow.text == b"a" * 5000 + b"."

    run(test, lambda: App(5), max_kept_answer_bytes=40_000)


def test_an_answer_that_is_forgotten_fills_the_memory_while_it_is_read() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        app.part = b"a" * 1000
        app.go_on()
        await Client(repeats, key="1").done
        slow = [Client(repeats, key="1") for _ in range(2)]
        for client in slow:
            client.reading.clear()
        await leap(61)
        assert not knows(repeats, "1")
        for number, client in enumerate(slow):
            app.go_on()
            await Client(repeats, key=str(number)).done
            assert not knows(repeats, str(number))
            repeats.check_integrity()
            client.reading.set()
            await client.done
            assert client.text == b"a" * 5000 + b"."
        app.go_on()
        await Client(repeats, key="3").done
        assert knows(repeats, "3")

    run(test, lambda: App(5), max_kept_answer_bytes=40_000, kept_answer_s=60)


def test_a_refusal_is_sent_when_the_memory_is_full() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        app.go_on(1)
        first = Client(repeats)
        await first.got(b"a")
        other = Client(repeats, b'{"other": 1}')
        await other.done
        assert other.status == 422
        app.go_on(2)
        await first.done

    run(test, max_kept_answer_bytes=1)


def test_memory_counts_what_answers_cost() -> None:
    """Also those of few bytes: a client of many makes a gateway no larger than its setting."""

    async def test(app: App, repeats: Repeats) -> None:
        async def answers(first: int, num: int) -> int:
            for number in range(first, first + num):
                app.go_on()
                await Client(repeats, key=f"{number:0255d}").done
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            await answers(0, 20)
            before = await answers(20, 10)
            cost = (await answers(30, 50) - before) / 50
        finally:
            tracemalloc.stop()
        assert cost < ANSWER_BYTES + 3 * PART_BYTES

    run(test, lambda: App(1))


def test_a_request_that_was_let_in_as_a_repeat_runs_nothing() -> None:
    """The answer may be forgotten while the body is sent."""

    async def test(app: App, repeats: Repeats) -> None:
        client = Client(repeats, is_repeat=True)
        await client.done
        assert (client.status, app.num_runs) == (409, 0)
        assert b"was forgotten while this one was read" in client.text

    run(test)


def test_who_comes_back_at_the_last_moment_gets_all_or_is_refused() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        statuses = set()
        for num_turns in range(30):
            first = Client(repeats, key=str(num_turns))
            app.go_on(1)
            await first.got(b"a")
            first.gone.set()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            num_runs = app.num_runs
            second = Client(repeats, key=str(num_turns))
            while not second.text and app.num_runs == num_runs:
                await asyncio.sleep(0)
            app.go_on()
            await asyncio.gather(first.done, second.done)
            assert second.status == 409 or second.text == b"aaa."
            statuses.add(second.status)
            app.steps = asyncio.Semaphore(0)
        assert statuses == {200, 409}

    run(test, linger_s=0)


def test_few_connections_may_read_one_answer() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        clients = [Client(repeats) for _ in range(MAX_READERS + 1)]
        app.go_on(1)
        refused = [client for client in clients if await settled(client) == 409]
        app.go_on(2)
        await asyncio.gather(*(client.done for client in clients))
        assert len(refused) == 1
        assert [client.text for client in clients].count(b"aaa.") == MAX_READERS
        assert app.num_runs == 1

    async def settled(client: Client) -> int:
        while not client.text:
            await asyncio.sleep(0)
        return client.status

    run(test)


def test_keys_that_are_none_are_refused() -> None:
    async def test(app: App, repeats: Repeats) -> None:
        for key in ("", "x" * 256, "a\tb"):
            client = Client(repeats, key=key)
            await client.done
            assert client.status == 400
            assert b"1 to 255 printable" in client.text
        assert app.num_runs == 0

    run(test)


def test_what_breaks_the_application_breaks_each_of_its_readers() -> None:
    class Broken(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await super().__call__(scope, receive, send)
            raise ValueError("broken")

    async def test(app: App, repeats: Repeats) -> None:
        clients = [Client(repeats), Client(repeats)]
        app.go_on()
        ends = await asyncio.gather(*(client.done for client in clients), return_exceptions=True)
        assert [str(end) for end in ends] == ["broken"] * 2

    run(test, lambda: Broken(is_complete=False))


def test_what_is_sent_after_a_request_was_cancelled_holds_no_memory() -> None:
    class Stubborn(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await send({"type": "http.response.body", "body": b"late", "more_body": False})

    async def test(app: App, repeats: Repeats) -> None:
        client = Client(repeats)
        app.go_on(1)
        await client.got(b"a")
        client.done.cancel()
        await asyncio.wait([client.done])
        for _ in range(10):
            await asyncio.sleep(0)
        repeats.check_integrity()
        assert not knows(repeats, "k")

    run(test, Stubborn)


def test_seeds_depend_on_both_keys_alone() -> None:
    assert seed_of("alice", "1") == 7794282631880089109, "that of every gateway and release"
    assert len({seed_of("alice", "1"), seed_of("alice", "2"), seed_of("bob", "1")}) == 3
    assert 0 <= seed_of(None, "1") < 1 << 63

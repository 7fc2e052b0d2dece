"""The API server in front of other people's engines, which are scripted, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import httpx
import pytest

from mooncake.api.config import ApiConfig, ApiKey
from mooncake.api.engines.app import create_engines_app
from mooncake.api.engines.asked import tenant_salt
from mooncake.api.engines.proxy import EngineProxy
from mooncake.api.http.server import serve
from mooncake.base import Clock, FinishReason, MonotonicClock, SystemIds
from mooncake.base.block_events.engine_events import StoredBlocks
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.engines.fleet import Fleet
from mooncake.telemetry.events import (
    EventList,
    Finished,
    FirstToken,
    Refused,
    Requeued,
    WorkerLeft,
)
from mooncake.telemetry.metrics import Metrics
from tests.support.api.scripted_engine import (
    CHAT,
    Call,
    Script,
    ScriptedEngine,
    answers,
    engines,
)
from tests.support.waiting import LONG_S


class Still:
    """A clock that stands still: what is predicted depends on prompts alone."""

    def now(self) -> float:
        return 1000.0


class World:
    """A gateway over engines, and a client of it."""

    def __init__(
        self, made: list[ScriptedEngine], client: httpx.AsyncClient, proxy: EngineProxy
    ) -> None:
        self.engines, self.client, self.proxy, self.fleet = made, client, proxy, proxy.fleet
        assert isinstance(proxy.recorder, EventList)
        self.events = proxy.recorder

    async def ask(self, text: str = "hello", **fields: Any) -> httpx.Response:
        return await self.client.post(CHAT, json=chat(text, **fields))

    async def lines(self, text: str = "hello", **fields: Any) -> list[str]:
        """Return the data of the events of a streamed answer."""
        async with self.client.stream("POST", CHAT, json=chat(text, stream=True, **fields)) as got:
            assert got.status_code == 200
            return [line[6:] async for line in got.aiter_lines() if line.startswith("data: ")]

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.005)

    async def settled(self) -> None:
        """Wait until no call runs: a client has its answer a moment before."""
        await self.until(lambda: self.proxy.num_calls == 0)

    def state(self, number: int) -> str:
        return self.fleet.status()[number].state

    def num_calls(self) -> list[int]:
        return [len(each.calls) for each in self.engines]

    def of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.events.events if isinstance(each, kind)]


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


@contextlib.asynccontextmanager
async def gateway(
    *scripts: Script,
    keys: Sequence[ApiKey] = (),
    engine_key: str | None = None,
    publishing: Sequence[int] = (),
    stop: asyncio.Event | None = None,
    clock: Clock | None = None,
    drain_s: float = 0.2,
    **placement: Any,
) -> AsyncIterator[World]:
    """Run a gateway over engines with these scripts, until all are up."""
    async with engines(*scripts) as made:
        urls = [each.url for each in made]
        fleet = Fleet(urls, SchedulerConfig(**placement), [urls[number] for number in publishing])
        events, ids, clock = EventList(), SystemIds(), clock or MonotonicClock()
        config = ApiConfig(port=0, drain_s=drain_s, keys=tuple(keys), docs=False)
        proxy = EngineProxy(
            fleet, urls, config, ids=ids, clock=clock, recorder=events,
            metrics=Metrics("engines").render, engine_key=engine_key, look_s=0.01,
        )  # fmt: skip
        app = create_engines_app(proxy, ids=ids, clock=clock, recorder=events)
        stop = stop or asyncio.Event()
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(
            serve(
                app, config, stop=stop,
                ready=lambda host, port: address.set_result(f"http://{host}:{port}"),
            )
        )  # fmt: skip
        headers = {"Authorization": f"Bearer {keys[0].name}"} if keys else {}
        async with httpx.AsyncClient(
            base_url=await address, timeout=LONG_S, headers=headers
        ) as client:
            world = World(made, client, proxy)
            await world.until(lambda: fleet.num_up == len(made))
            try:
                yield world
            finally:
                stop.set()
                await server
        assert len(fleet) == 0
        fleet.check_integrity()


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LONG_S):
            await test

    asyncio.run(limited())


def key(name: str, **fields: Any) -> ApiKey:
    return ApiKey(digest=hashlib.sha256(name.encode()).digest(), name=name, **fields)


LONG = "A long text that both turns of a conversation begin with. " * 40


# ------------------------------------------------------- answers


def test_answers_pass_unchanged_and_fields_that_only_engines_know_reach_them() -> None:
    async def test() -> None:
        async with gateway(answers) as world:
            got = await world.ask(thinking_budget=3, max_tokens=5)
            assert got.json()["choices"][0]["message"]["content"] == "ab"
            assert world.engines[0].calls[0].fields == chat(
                "hello", thinking_budget=3, max_tokens=5
            )
            await world.settled()
            [finished] = world.of(Finished)
            assert (finished.num_prompt_tokens, finished.num_output_tokens) == (7, 2)
            assert (finished.num_cached_tokens, finished.reason) == (3, FinishReason.STOP)

    run(test())


@pytest.mark.parametrize("wants_usage", [False, True])
def test_a_stream_passes_and_has_usage_only_if_the_client_wants_it(wants_usage: bool) -> None:
    async def test() -> None:
        async with gateway(answers) as world:
            options = {"stream_options": {"include_usage": True}} if wants_usage else {}
            *events, done = await world.lines(**options)
            assert done == "[DONE]"
            assert [json.loads(each)["choices"] for each in events[:2]] == [
                [{"index": 0, "delta": {"content": text}}] for text in "ab"
            ]
            assert len(events) == 2 + wants_usage
            await world.settled()
            [finished], [first] = world.of(Finished), world.of(FirstToken)
            assert (finished.num_prompt_tokens, finished.num_output_tokens) == (7, 2)
            assert first.worker_id == world.engines[0].url

    run(test())


def test_tokens_reach_the_client_as_they_come() -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def slow(call: Call) -> None:
            await call.begin()
            await call.token("a")
            await go_on.wait()
            await call.done()

        async with (
            gateway(slow) as world,
            world.client.stream("POST", CHAT, json=chat("x", stream=True)) as got,
        ):
            lines = got.aiter_lines()
            assert '"a"' in await anext(lines)
            go_on.set()
            assert [line async for line in lines][-2] == "data: [DONE]"

    run(test())


def test_an_error_of_the_request_passes_and_is_tried_once() -> None:
    async def test() -> None:
        async def refuses(call: Call) -> None:
            await call.reply({"error": {"message": "too long", "code": 400}}, 400)

        async with gateway(refuses, refuses) as world:
            got = await world.ask()
            assert (got.status_code, got.json()["error"]["message"]) == (400, "too long")
            assert sum(world.num_calls()) == 1
            await world.settled()
            [finished] = world.of(Finished)
            assert (finished.status, finished.reason) == (400, FinishReason.ERROR)

    run(test())


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "must be an object"),
        (b'{"model": 3}', 400, "model: must be a text"),
        (b'{"model": "x"}', 404, "'x' does not exist here; served: m"),
        (b'{"stream": 1}', 400, "stream: must be true or false"),
        (b'{"stream_options": 1}', 400, "stream_options: must be an object"),
        (b'{"cache_salt": 1}', 400, "cache_salt: must be a text"),
    ],
)
def test_what_cannot_be_placed_is_refused(body: bytes, status: int, says: str) -> None:
    async def test() -> None:
        async with gateway(answers) as world:
            kind = {"Content-Type": "application/json"}
            got = await world.client.post(CHAT, content=body, headers=kind)
            assert (got.status_code, got.json()["error"]["code"]) == (status, status)
            assert says in got.json()["error"]["message"]
            assert world.num_calls() == [0]

    run(test())


# ------------------------------------------------------- placement


def test_turns_of_a_conversation_go_to_one_engine_and_others_elsewhere() -> None:
    async def test() -> None:
        async with gateway(answers, answers, clock=Still()) as world:
            texts = [f"{number} {LONG}" for number in range(4)]
            for turn in range(3):
                for text in texts:
                    await world.lines(text + " and more" * turn)
                    await world.settled()
            assert sorted(world.num_calls()) == [6, 6]
            for each in world.engines:
                assert len({call.fields["messages"][0]["content"][0] for call in each.calls}) == 2

    run(test())


def test_a_text_goes_where_its_tokens_were_published() -> None:
    tokens = list(range(64))

    async def tokenizes(call: Call) -> None:
        if call.path == "/tokenize":
            assert call.fields == chat("some text")  # `max_tokens` is no part of a prompt
            await call.reply({"tokens": tokens})
        else:
            await answers(call)

    async def test() -> None:
        async with gateway(tokenizes, tokenizes, publishing=(0, 1)) as world:
            for number in (1, 0, 1):
                url = world.engines[number].url
                others = world.engines[1 - number].url
                world.fleet.on_events(others, "p", None)
                stored = StoredBlocks(block_hashes=[1], token_ids=tokens[:32], block_size=32)
                world.fleet.on_events(url, "p", [stored])
                await world.ask("some text", max_tokens=2)
                assert world.of(FirstToken)[-1].worker_id == url

    run(test())


def test_an_engine_that_cannot_tokenize_is_not_asked_again() -> None:
    async def test() -> None:
        async def has_no_tokenizer(call: Call) -> None:
            if call.path == "/tokenize":
                await call.reply({"error": {"message": "no tokenizer"}}, 400)
            else:
                await answers(call)

        async with gateway(has_no_tokenizer, has_no_tokenizer, publishing=(0, 1)) as world:
            stored = StoredBlocks(block_hashes=[1], token_ids=[1] * 32, block_size=32)
            world.fleet.on_events(world.engines[0].url, "p", [stored])
            for _ in range(6):
                assert (await world.ask()).status_code == 200
            asked = [call.path for each in world.engines for call in each.calls]
            assert 1 <= asked.count("/tokenize") <= 2

    run(test())


def test_a_request_that_is_wrong_leaves_the_tokens_of_others_known() -> None:
    async def test() -> None:
        async def tokenizes(call: Call) -> None:
            if call.fields["messages"][0]["content"] == "wrong":
                await call.reply({"error": {"message": "wrong"}}, 400)
            else:
                await answers(call)

        async with gateway(tokenizes, tokenizes, publishing=(0, 1)) as world:
            stored = StoredBlocks(block_hashes=[1], token_ids=[1] * 32, block_size=32)
            world.fleet.on_events(world.engines[0].url, "p", [stored])
            for text, status in (("hello", 200), ("wrong", 400), ("hello", 200), ("hello", 200)):
                assert (await world.ask(text)).status_code == status
                await world.settled()
            asked = [call.path for each in world.engines for call in each.calls]
            assert asked.count("/tokenize") == 4

    run(test())


# ------------------------------------------------------- failures


async def breaks_off_at_once(call: Call) -> None:
    call.break_off()


async def breaks_off_behind_the_head(call: Call) -> None:
    await call.begin()
    await call.send(": a comment\n\n")
    call.break_off()


async def begins_with_an_error(call: Call) -> None:
    await call.begin()
    await call.event({"error": {"message": "the engine is dead", "code": 500}})
    await call.done()


async def is_full(call: Call) -> None:
    await call.reply({"error": {"message": "full"}}, 429)


async def is_dead(call: Call) -> None:
    await call.reply({"error": {"message": "dead"}}, 500)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "fails",
    [breaks_off_at_once, breaks_off_behind_the_head, begins_with_an_error, is_full, is_dead],
)
def test_another_engine_is_tried_before_the_first_token(fails: Script, streams: bool) -> None:
    async def test() -> None:
        async with gateway(fails, answers) as world:
            if streams:
                assert (await world.lines())[-1] == "[DONE]"
            else:
                assert (await world.ask()).status_code == 200
            await world.settled()
            tries, other = world.num_calls()  # twice, if a kept connection was closed
            assert (tries in (1, 2), other) == (True, 1)
            assert len(world.of(Requeued)) == len(world.of(Finished)) == 1
            assert [each.num_failed for each in world.fleet.status()] == [1, 0]

    run(test())


@pytest.mark.parametrize(("fails", "status"), [(is_full, 429), (is_dead, 503)])
def test_when_all_fail_the_error_says_so(fails: Script, status: int) -> None:
    async def test() -> None:
        async with gateway(fails, fails, fails, fails) as world:
            got = await world.ask()
            assert (got.status_code, got.json()["error"]["code"]) == (status, status)
            assert "3 tried" in got.json()["error"]["message"]
            assert "127.0.0.1" not in got.text  # where engines are is not a tenant's business
            assert got.headers["retry-after"] == "1"
            await world.settled()
            [finished] = world.of(Finished)
            assert (finished.status, finished.reason) == (status, FinishReason.ERROR)

    run(test())


def test_an_engine_waits_for_a_client_that_is_slow_to_read() -> None:
    num_events, num_sent = 1000, 0

    async def sends_much(call: Call) -> None:
        nonlocal num_sent
        await call.begin()
        for _ in range(num_events):
            await call.token("x" * 100_000)
            num_sent += 1
        await call.done()

    async def test() -> None:
        async with gateway(sends_much) as world:
            url = world.engines[0].url
            body = chat("hello", stream=True)
            async with world.client.stream("POST", CHAT, json=body) as got:
                await world.until(
                    lambda: any(each._flow.is_paused for each in world.proxy._exchanges[url])
                )
                assert num_sent < num_events
                num_got = sum([line.count("xxx") > 0 async for line in got.aiter_lines()])
            assert num_got == num_sent == num_events
            world.engines[0].script = answers
            assert (await world.ask()).status_code == 200  # the connection is read again

    run(test())


async def sends_an_endless_event(call: Call) -> None:
    await call.begin()
    while True:
        await call.send("x" * 10_000)


async def sends_comments_for_ever(call: Call) -> None:
    await call.begin()
    while True:
        await call.send(": x\n\n" * 2_000)


@pytest.mark.parametrize("sends", [sends_an_endless_event, sends_comments_for_ever])
def test_an_engine_that_never_comes_to_a_token_is_left(
    sends: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake.api.engines.relay.MAX_UNSENT_BYTES", 100_000)

    async def test() -> None:
        async with gateway(sends, answers) as world:
            assert (await world.lines())[-1] == "[DONE]"
            assert world.num_calls() == [1, 1]

        async def begins_well(call: Call) -> None:
            await call.begin()
            await call.token("a")
            await world.until(lambda: bool(world.of(FirstToken)))
            while True:
                await call.send("x" * 10_000)

        async with gateway(begins_well) as world:
            assert "in the middle of the answer" in (await world.lines())[-2]

    run(test())


def test_an_engine_that_answers_looks_without_end_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with gateway(answers) as world:
            monkeypatch.setattr("mooncake.api.engines.exchange.MAX_ASKED_BYTES", 10)
            await world.until(lambda: world.state(0) == "down")
            assert world.fleet.status()[0].reason == "its answer has more than 10 bytes"

    run(test())


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_stream_that_breaks_off_ends_with_an_error(path: str) -> None:
    async def breaks(call: Call) -> None:
        await call.begin()
        await call.token("a")
        call.break_off()

    async def test() -> None:
        async with gateway(breaks, answers) as world:
            got = await world.client.post(path, json=chat("x", stream=True))
            assert got.status_code == 200
            *_, last = [each for each in got.text.split("\n\n") if '"error"' in each]
            if path == CHAT:
                assert got.text.endswith("data: [DONE]\n\n")
            else:
                assert last.startswith("event: error\n")
            assert "in the middle of the answer; ask again" in last
            assert world.num_calls() == [1, 0]
            await world.settled()
            assert [each.reason for each in world.of(Finished)] == [FinishReason.ERROR]

    run(test())


def test_a_client_that_leaves_ends_the_request_at_its_engine() -> None:
    async def test() -> None:
        heard = asyncio.Event()

        async def hangs(call: Call) -> None:
            await call.begin()
            await call.token("a")
            await call.until_gone()
            heard.set()

        async with gateway(hangs) as world:
            async with world.client.stream("POST", CHAT, json=chat("x", stream=True)) as got:
                await anext(got.aiter_lines())
            await heard.wait()
            await world.until(lambda: bool(world.of(Finished)))
            assert world.of(Finished)[0].reason is FinishReason.ABORT

    run(test())


def test_a_client_that_leaves_a_question_for_any_engine_ends_it_there() -> None:
    async def test() -> None:
        asked, heard = asyncio.Event(), asyncio.Event()

        async def hangs(call: Call) -> None:
            asked.set()
            await call.until_gone()
            heard.set()

        async with gateway(hangs) as world:
            asking = asyncio.create_task(world.client.post("/tokenize", json={"prompt": "x"}))
            await asked.wait()
            asking.cancel()
            await heard.wait()

    run(test())


def test_an_engine_that_goes_down_loses_its_requests_to_another_and_comes_back() -> None:
    async def test() -> None:
        waits = asyncio.Event()

        async def hangs(call: Call) -> None:
            waits.set()
            await call.until_gone()

        async with gateway(hangs, answers) as world:
            asking = asyncio.create_task(world.ask())
            await waits.wait()
            world.engines[0].health = 503
            assert (await asking).status_code == 200
            await world.until(lambda: world.state(0) == "down")
            assert world.fleet.status()[0].reason == "its /health answers with status 503"
            assert world.of(WorkerLeft)[0].worker_id == world.engines[0].url
            await world.engines[1].stop()
            await world.until(lambda: world.state(1) == "down")
            assert (await world.client.get("/health")).status_code == 503
            assert (await world.client.get("/health/live")).status_code == 200
            got = await world.ask()
            assert (got.status_code, got.headers["retry-after"]) == (503, "1")
            assert "no engine takes requests now, of 2" in got.json()["error"]["message"]
            assert world.of(Refused)[-1].status == 503
            world.engines[0].health, world.engines[0].script = 200, answers
            await world.engines[1].start()
            await world.until(lambda: world.fleet.num_up == 2)
            assert (await world.client.get("/health")).status_code == 200
            assert (await world.ask()).status_code == 200

    run(test())


def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with gateway(answers) as world:
            monkeypatch.setattr("mooncake.api.engines.proxy._cards", lambda _: 1 / 0)
            await world.until(lambda: world.state(0) == "down")
            assert "ZeroDivisionError" in world.fleet.status()[0].reason
            monkeypatch.undo()
            await world.until(lambda: world.state(0) == "up")

    run(test())


def test_a_shutdown_ends_what_runs_and_refuses_what_comes() -> None:
    async def test() -> None:
        stop, begun = asyncio.Event(), asyncio.Event()

        async def hangs(call: Call) -> None:
            begun.set()
            await call.until_gone()

        async with gateway(hangs, stop=stop, drain_s=LONG_S) as world:
            running = asyncio.create_task(world.ask())
            await begun.wait()
            stop.set()
            await world.until(lambda: world.proxy.draining)
            late = await world.ask()
            world.proxy.fail_all(world.proxy.shutting_down())  # as the server does at last
            assert (late.status_code, (await running).status_code) == (503, 503)
            assert "shutting down" in late.json()["error"]["message"]

    run(test())


# ------------------------------------------------------- keys


def test_a_key_is_needed_and_engines_get_their_own() -> None:
    async def test() -> None:
        async with gateway(answers, keys=[key("one")], engine_key="theirs") as world:
            assert (await world.ask()).status_code == 200
            assert world.engines[0].calls[0].headers["authorization"] == "Bearer theirs"
            world.client.headers["Authorization"] = "Bearer wrong"
            assert (await world.ask()).status_code == 401
            assert world.num_calls() == [1]
        async with gateway(answers) as world:  # without keys here, the client's passes
            world.client.headers["Authorization"] = "Bearer of the client"
            await world.ask()
            assert world.engines[0].calls[0].headers["authorization"] == "Bearer of the client"
        async with gateway(answers, keys=[key("one")]) as world:
            await world.ask()
            assert "authorization" not in world.engines[0].calls[0].headers

    run(test())


def test_each_tenant_has_a_salt_of_its_own() -> None:
    async def test() -> None:
        keys = [key("one", tenant="acme"), key("two", tenant="beta"), key("three", tenant="acme")]
        async with gateway(answers, keys=keys) as world:
            for name in ("one", "two", "three"):
                world.client.headers["Authorization"] = f"Bearer {name}"
                await world.ask()
                await world.ask(cache_salt="s")
            salts = [call.fields["cache_salt"] for call in world.engines[0].calls]
            assert salts[:2] == salts[4:]
            assert len(set(salts)) == 4
            assert salts[:2] == [tenant_salt("acme", ""), tenant_salt("acme", "s")]

    run(test())


def test_fields_that_reach_beyond_a_tenant_need_an_operator() -> None:
    async def test() -> None:
        keys = [key("one"), key("operator", operator=True)]
        async with gateway(answers, keys=keys) as world:
            for field in ({"kv_transfer_params": {"remote_host": "x"}}, {"priority": -5}):
                world.client.headers["Authorization"] = "Bearer one"
                got = await world.ask(**field)
                assert got.status_code == 403
                assert next(iter(field)) in got.json()["error"]["message"]
                world.client.headers["Authorization"] = "Bearer operator"
                assert (await world.ask(**field)).status_code == 200

    run(test())


def test_tokens_are_charged_to_the_key_as_engines_count_them() -> None:
    async def test() -> None:
        limited = key("one", tokens_per_min=10)
        async with gateway(answers, keys=[limited]) as world:
            assert (await world.lines())[-1] == "[DONE]"  # 9 tokens
            await world.settled()
            assert (await world.ask()).status_code == 200  # one is left, which is enough
            await world.settled()
            got = await world.ask()
            assert got.status_code == 429
            assert "10 tokens a minute" in got.json()["error"]["message"]

        async def refuses(call: Call) -> None:
            await call.reply({"error": {"message": "no"}}, 400)

        async with gateway(refuses, keys=[limited]) as world:
            for _ in range(5):
                assert (await world.ask(LONG)).status_code == 400  # nothing is charged
                await world.settled()
            assert (await world.ask(n=10**400, max_tokens=10**400)).status_code == 400
            await world.settled()
            assert len(world.fleet) == 0

    run(test())


def test_a_repeat_gets_the_answer_of_the_first() -> None:
    async def test() -> None:
        async with gateway(answers, answers) as world:
            again = {"Idempotency-Key": "k"}
            first, second = [
                await world.client.post(CHAT, json=chat("x"), headers=again) for _ in range(2)
            ]
            assert first.json() == second.json()
            assert second.headers["idempotent-replayed"] == "true"
            assert sum(world.num_calls()) == 1
            [call] = [call for each in world.engines for call in each.calls]
            assert 0 <= call.fields["seed"] < 1 << 63

    run(test())


# ------------------------------------------------------- other routes


def test_models_are_those_of_all_engines() -> None:
    async def test() -> None:
        async with gateway(answers, answers) as world:
            world.engines[1].models = ["m", "lora"]
            await world.until(lambda: world.fleet.models == ["m", "lora"])
            listed = (await world.client.get("/v1/models")).json()
            assert [each["id"] for each in listed["data"]] == ["m", "lora"]
            assert (await world.client.get("/v1/models/lora")).json()["id"] == "lora"
            assert (await world.client.get("/v1/models/x")).status_code == 404
            for _ in range(2):
                assert (await world.ask(model="lora")).status_code == 200
            assert world.num_calls() == [0, 2]

    run(test())


def test_any_engine_tokenizes() -> None:
    async def test() -> None:
        async with gateway(is_dead, answers) as world:
            got = await world.client.post("/tokenize", json={"model": "m", "prompt": "x"})
            assert got.json()["tokens"] == [1, 2, 3]
            assert world.num_calls() == [1, 1]

    run(test())


def test_the_status_shows_the_engines_and_metrics_are_there() -> None:
    async def test() -> None:
        async with gateway(answers, keys=[key("o", operator=True), key("t")]) as world:
            await world.ask()
            await world.settled()
            status = (await world.client.get("/v1/cluster/status")).json()
            [shown] = status["engines"]
            assert (shown["url"], shown["state"]) == (world.engines[0].url, "up")
            assert (shown["num_requests"], shown["num_cached_tokens"]) == (1, 3)
            assert status["gateways"][0]["num_inflight"] == 0
            assert b"mooncake:workers_up" in (await world.client.get("/metrics")).content
            world.client.headers["Authorization"] = "Bearer t"
            assert (await world.client.get("/v1/cluster/status")).status_code == 403

    run(test())

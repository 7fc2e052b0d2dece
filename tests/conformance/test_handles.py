"""Stale, repeated and forged words about KV: whatever a process says again, late, about a request
that nobody knows or about memory that does not exist, no request gets other tokens than its own.

A client of Mooncake is given no handle of KV, so these are the words that pass between processes.
Pages hold bytes of which wrong ones give wrong tokens; nothing is compared unless it is said.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.base import FinishReason
from mooncake.base.messages import KVReady, PinGranted, PushEnded, RequestTask, Reserved
from mooncake.base.pool_messages import AnyMessage
from mooncake.rpc.inproc import InprocChannel
from tests.support.engine.fake_runner import expected_output
from tests.support.model.checkpoints import write_config_only
from tests.support.serve.local_world import LocalWorld
from tests.support.serve.local_world import request as local_request
from tests.support.sim.cluster import Cluster, engine_config, request, specs

FAR = 2**40
MINE = "mine"
LEASE_S = 45.0
"""Longer than prefill holds pages, a push may take, and pages of the lost rest."""


def request_of(message: Any) -> str:
    """Return the id of the request that a word is about; none: of no request."""
    return str(getattr(getattr(message, "request", message), "request_id", ""))


class Wire:
    """Keeps what is said of the request `MINE`, changes what it is told to, says things again."""

    def __init__(self, cluster: Cluster) -> None:
        self._network = cluster.world.network
        self._send = self._network.send
        self.kept: list[tuple[Any, str, AnyMessage]] = []
        self.change: Callable[[Any], Any] = lambda message: message
        self._network.send = self._hear  # type: ignore[method-assign]

    def _hear(self, source: Any, address: str, message: Any) -> None:
        if request_of(message) == MINE:
            self.kept.append((source, address, message))
            message = self.change(message)
        self._send(source, address, message)

    def again(self, change: Callable[[Any], Any] = lambda message: message) -> set[str]:
        """Say all of it once more, in its order; return the kinds of words."""
        for source, address, message in list(self.kept):
            self._send(source, address, change(message))
        return {type(message).__name__ for _, _, message in self.kept}


def prompt(number: int, length: int = 40) -> list[int]:
    return [(number * 31 + place * 7) % 97 for place in range(length)]


@pytest.fixture
def cluster() -> Cluster:
    """Little memory, so that pages are used again soon."""
    return Cluster(specs(1, 1), prefill=engine_config(40), decode=engine_config(40))


def others(cluster: Cluster, first: int, count: int = 6) -> None:
    """Have other requests take every page."""
    for number in range(first, first + count):
        cluster.world.submit(request(f"other-{number}", prompt(number), max_tokens=12))
    cluster.run(8.0)


def check(cluster: Cluster) -> None:
    """All requests are answered, with the tokens of the oracle, and nothing is held."""
    cluster.run(LEASE_S)
    cluster.check_streams()
    for stream in cluster.world.streams.values():
        assert stream.finals[0].reason is FinishReason.LENGTH
    cluster.check_quiet()
    assert [pool.num_open for pool in cluster.pools()] == [0, 0]


WORDS = {"RequestTask", "Reserved", "KVReady"}


def unknown(message: Any) -> Any:
    if hasattr(message, "request"):
        return message
    return msgspec.structs.replace(message, request_id="nobody's")


def test_words_about_a_request_that_nobody_knows(cluster: Cluster) -> None:
    wire = Wire(cluster)
    cluster.world.submit(request(MINE, prompt(0), max_tokens=12))
    cluster.world.submit(request("beside", prompt(1), max_tokens=12))
    cluster.run(0.05)
    assert wire.again(unknown) >= WORDS - {"KVReady"}
    cluster.run(8.0)
    wire.kept = [kept for kept in wire.kept if isinstance(kept[2], Reserved | KVReady | PushEnded)]
    wire.again(unknown)
    others(cluster, 2)
    check(cluster)


@pytest.mark.parametrize("word", [Reserved, PinGranted], ids=lambda word: word.__name__)
def test_places_that_do_not_exist(cluster: Cluster, word: type[msgspec.Struct]) -> None:
    """The request goes another way and is answered; nothing else is touched."""
    network, num_changed = cluster.world.network, 0
    send = network.send

    def far(source: Any, address: str, message: Any) -> None:
        nonlocal num_changed
        if isinstance(message, word) and num_changed < 2:
            num_changed += 1
            message = _moved(message)
        send(source, address, message)

    others(cluster, 100)
    network.send = far  # type: ignore[method-assign]
    cluster.world.submit(request(MINE, prompt(100), max_tokens=12))
    cluster.world.submit(request("beside", prompt(1), max_tokens=12))
    others(cluster, 2)
    assert num_changed == 2
    check(cluster)


def _moved(message: Any) -> Any:
    """Return a word whose places lie far behind the end of their memory."""
    if isinstance(message, Reserved):
        parts = [msgspec.structs.replace(part, places=_far(part.places)) for part in message.parts]
        return msgspec.structs.replace(message, parts=parts)
    return msgspec.structs.replace(message, places=_far(message.places))


def _far(places: Any) -> Any:
    return msgspec.structs.replace(places, offsets=[each + FAR for each in places.offsets])


def test_all_words_said_twice_at_once(cluster: Cluster) -> None:
    wire = Wire(cluster)
    cluster.world.submit(request(MINE, prompt(0), max_tokens=12))
    for _ in range(60):
        cluster.run(0.005)
        wire.again()
        wire.kept = wire.kept[-3:]
    others(cluster, 1)
    check(cluster)


@pytest.mark.parametrize("after_s", [0.0, LEASE_S], ids=["used up", "expired"])
def test_all_words_said_again_when_their_pages_are_others(cluster: Cluster, after_s: float) -> None:
    wire = Wire(cluster)
    cluster.world.submit(request(MINE, prompt(0), max_tokens=12))
    cluster.run(8.0)
    cluster.run(after_s)
    for turn in range(4):
        for number in range(6):
            name = f"other-{turn}-{number}"
            cluster.world.submit(request(name, prompt(10 * turn + number + 1), max_tokens=30))
        cluster.run(0.02 + 0.03 * turn)
        assert wire.again() >= WORDS
        cluster.run(8.0)
    check(cluster)


# ---------------------------------------------------------------- with and without checksums


class ThreadWire:
    """Keeps what threads say of the first request; changes what is said next, where it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: list[tuple[InprocChannel, str, AnyMessage]] = []
        self.num_changed = 0
        self._moves: type[msgspec.Struct] | None = None
        self._send = send = InprocChannel.send

        def hear(channel: InprocChannel, address: str, message: AnyMessage) -> None:
            if request_of(message) == "r0":
                self.kept.append((channel, address, message))
            if self._moves is not None and isinstance(message, self._moves):
                self._moves, self.num_changed = None, self.num_changed + 1
                message = _moved(message)
            send(channel, address, message)

        monkeypatch.setattr(InprocChannel, "send", hear)

    def move_next(self, word: type[msgspec.Struct]) -> None:
        """Have the next word of a kind name places that do not exist."""
        self._moves = word

    def again(self, change: Callable[[Any], Any] = lambda message: message) -> None:
        for channel, address, message in list(self.kept):
            self._send(channel, address, change(message))


@pytest.mark.parametrize("checksums", ["on", "off"])
def test_five_kinds_of_words_among_threads_with_checksums_and_without(
    checksums: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real threads and copies: words about nobody's request, about places that do not exist, said
    twice, said when their pages are others', and of a boot that has gone, while others run.
    """
    model = str(write_config_only(tmp_path / "hash-model", max_position_embeddings=1024))
    wire, numbers = ThreadWire(monkeypatch), itertools.count(1)

    async def play() -> None:
        world = LocalWorld(
            model, prefill=1, decode=1, kvstore=1, push_checksums=checksums,
            num_gpu_blocks_override=16,
        )  # fmt: skip

        async def ask(number: int, disturb: Callable[[], None] = lambda: None) -> None:
            asked = local_request(number, [number * 5 + p % 90 for p in range(150)])
            answer = asyncio.ensure_future(world.generate(asked))
            await asyncio.sleep(0.002 * (number % 4))
            disturb()
            tokens, final = await answer
            assert final.reason is FinishReason.LENGTH
            assert tokens == expected_output(world.layout, asked, max_model_len=512)

        async def beside(disturb: Callable[[], None]) -> None:
            """Two requests at once, which use all pages; `disturb` while they run."""
            await asyncio.gather(ask(next(numbers), disturb), ask(next(numbers)))

        async with world, asyncio.timeout(240):
            await ask(0)
            await beside(wire.again)  # used up
            for _ in range(3):  # older than their pages, which others have by now
                await beside(wire.again)
            await beside(lambda: wire.again(unknown))
            wire.move_next(Reserved)
            await beside(lambda: None)
            assert wire.num_changed == 1
            [prefill] = [each for each in world.workers if each.worker_id == "prefill-0"]
            await asyncio.to_thread(world.cluster.kill, "prefill-0")
            await asyncio.to_thread(world.cluster.start, [prefill])
            await world.until(
                lambda: all(each.state == "up" for each in world.gateway_process.status().workers)
            )
            await beside(wire.again)  # of a boot that has gone
            await beside(lambda: None)
            assert (world.counters("decode-0")["blocks_pushed_compared"] > 0) == (checksums == "on")
            await world.settle()

    asyncio.run(play())
    kinds = {type(message) for _, _, message in wire.kept}
    assert kinds >= {RequestTask, Reserved, KVReady}

"""Pause, sleep and new weights, step by step, with workers that answer only when told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.base import (
    BlockSource,
    FinishReason,
    MooncakeError,
    PeerLost,
    Role,
    WorkerRef,
)
from mooncake.base.cluster_mode import ClusterMode, Weights
from mooncake.base.messages import (
    OWN_RELEASE,
    Asleep,
    CheckWeights,
    GatewayNews,
    Prefetch,
    Restart,
    Tier,
    WeightsChecked,
    Welcome,
)
from tests.support.scheduler.scheduling import (
    GATEWAY,
    Client,
    Pair,
    keys_of,
    ref,
    request,
    snapshot,
)

NEW = "layout-2"
OTHER = WorkerRef("gateway-2", "g0", "other-address")


class Orders(Pair):
    """A prefill, a decode and a pool worker, and an operator."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.kv0 = self.join("kv0", Role.KVSTORE)
        self.ended: list[MooncakeError | None] = []

    @property
    def control(self) -> Any:
        return self.gateway.control

    @property
    def mode(self) -> ClusterMode:
        return self.control.mode

    def pause(self, *, aborts: bool = False) -> None:
        self.control.pause(self.ended.append, aborts=aborts)

    def update(self, model: str = "/new") -> None:
        self.control.update_weights(model, self.ended.append)

    def orders(self, worker: WorkerRef) -> list[ClusterMode]:
        """Return the modes in which a worker was told to come back."""
        return [order.mode for order in self.channel.of(Restart, worker.address)]

    def leave(self, *workers: WorkerRef) -> None:
        for worker in workers:
            self.gateway.handle(PeerLost(worker=worker), self.now)

    def say_asleep(self, *workers: WorkerRef, level: int = 1) -> None:
        for worker in workers:
            asleep = Asleep(
                worker=worker, role=Role.PREFILL if worker.worker_id == "p0" else Role.DECODE,
                node_id="n", host="h", pid=1, level=level, mode=self.mode,
            )  # fmt: skip
            self.gateway.handle(asleep, self.now)

    def fall_asleep(self) -> list[WorkerRef]:
        """Let both engines do as they are told; return their refs as they sleep."""
        self.tick(1.0)
        self.leave(self.p0, self.d0)
        asleep = [ref("p0", "s0"), ref("d0", "s0")]
        self.say_asleep(*asleep)
        self.tick(1.0)
        return asleep

    def answer(
        self, worker: WorkerRef, revision: str = "r2", error: str = "", *, borrows: bool = False
    ) -> None:
        asked = self.channel.of(CheckWeights, worker.address)[-1]
        found = WeightsChecked(
            asker=GATEWAY, ticket=asked.ticket, worker=worker, error=error, borrows=borrows,
            revision="" if error else revision, fingerprint="" if error else NEW,
        )  # fmt: skip
        self.gateway.handle(found, self.now)
        self.tick(0.5)

    def come_back(self, **fields: Any) -> None:
        """Let both engines join as they are told to."""
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            self.join(name, role, epoch="e1", mode=self.mode, **fields)
        self.tick(0.5)


# ------------------------------------------------------------------- pausing


def test_a_paused_cluster_refuses_requests_and_finishes_those_that_run() -> None:
    orders = Orders()
    running = orders.submit(request("r", max_tokens=1))
    orders.pause()
    orders.tick()
    assert orders.ended == []
    assert not orders.gateway.ready
    refused = orders.submit(request("late")).final
    assert refused.reason is FinishReason.REJECTED
    assert refused.failure is not None
    assert (refused.failure.status, refused.failure.retry_after_s is not None) == (503, True)
    orders.output(orders.p0, "r", 0, [1], FinishReason.LENGTH)
    orders.tick()
    assert running.final.reason is FinishReason.LENGTH
    assert orders.ended == [None]
    orders.control.resume(orders.ended.append)
    assert orders.ended == [None, None]
    assert not orders.submit(request("later")).finals


def test_a_pause_that_ends_requests_tells_their_clients() -> None:
    orders = Orders()
    running = orders.submit(request("r"))
    orders.pause(aborts=True)
    orders.tick()
    assert orders.ended == [None]
    failure = running.final.failure
    assert failure is not None
    assert (failure.status, running.final.reason) == (503, FinishReason.ERROR)
    assert orders.aborts(orders.d0)
    orders.close()


def test_all_gateways_pause_and_a_request_of_one_is_waited_for_by_another() -> None:
    orders = Orders()
    running = orders.submit(request("r"))
    news = GatewayNews(
        gateway=OTHER, gateways=[], release=OWN_RELEASE,
        mode=ClusterMode(1, "gateway-2", paused=True, sleep_level=1, aborts=False),
    )  # fmt: skip
    orders.gateway.handle(news, orders.now)
    orders.tick(0.5)
    assert not orders.gateway.ready
    assert orders.orders(orders.d0) == [], "a request runs on it"
    assert not running.finals
    orders.gateway.abort("r", orders.now)
    orders.tick(0.5)
    assert {mode.number for mode in orders.orders(orders.d0)} == {1}
    told = orders.channel.of(GatewayNews, OTHER.address)[-1]
    assert told.mode == orders.mode


# ------------------------------------------------------------------- sleeping


def test_engines_sleep_and_wake_and_the_pool_stays() -> None:
    orders = Orders()
    orders.control.sleep(1, orders.ended.append, aborts=False)
    orders.tick()
    assert orders.orders(orders.kv0) == []
    assert orders.orders(orders.p0) == orders.orders(orders.d0) == [orders.mode]
    orders.tick(1.0)
    assert len(orders.orders(orders.p0)) > 1, "the first order may have been lost"
    orders.leave(orders.p0, orders.d0)
    orders.tick(1.0)
    assert orders.ended == [], "they have left, and nobody has said yet that it sleeps"
    asleep = ref("p0", "s0"), ref("d0", "s0")
    orders.say_asleep(*asleep)
    orders.tick()
    assert orders.ended == [None]
    assert orders.channel.of(Welcome, asleep[0].address)
    states = {worker.id: worker.state for worker in orders.gateway.status(orders.now).workers}
    assert states == {"kv0": "up", "p0": "asleep", "d0": "asleep"}
    orders.control.wake(orders.ended.append)
    orders.tick()
    assert [orders.orders(worker)[0].sleep_level for worker in asleep] == [0, 0]
    orders.come_back()
    assert orders.ended == [None, None]
    assert not orders.submit(request("r")).finals


def test_an_engine_that_wakes_is_told_to_read_the_busiest_prefix_ahead() -> None:
    """Once, when it joins again: its pages were given up while it slept."""
    orders = Orders()
    prompt = request("", 41, 1)
    for number in range(2):
        orders.submit(msgspec.structs.replace(prompt, request_id=f"r{number}"))
    busy = keys_of(prompt)
    orders.gateway.handle(snapshot(orders.kv0, busy, Tier.DRAM), orders.now)
    orders.control.sleep(1, orders.ended.append, aborts=True)
    orders.fall_asleep()
    orders.control.wake(orders.ended.append)
    orders.tick()
    assert orders.channel.of(Prefetch) == []
    orders.come_back()
    assert orders.ended == [None, None]
    [told] = orders.channel.of(Prefetch)
    assert orders.channel.of(Prefetch, ref("p0", "e1").address) == [told]
    assert told.keys == busy
    assert told.sources == [BlockSource(store=orders.kv0, first=0, stop=len(busy))]


def test_an_engine_that_did_not_hear_that_it_is_to_wake_is_told_again() -> None:
    orders = Orders()
    orders.control.sleep(2, orders.ended.append, aborts=False)
    p0, _ = orders.fall_asleep()
    orders.control.wake(orders.ended.append)
    orders.tick(0.5)
    told = len(orders.orders(p0))
    orders.say_asleep(p0)
    orders.tick(1.0)
    assert len(orders.orders(p0)) > told


def test_an_engine_that_died_and_starts_while_others_sleep_goes_to_sleep() -> None:
    orders = Orders()
    orders.control.sleep(1, orders.ended.append, aborts=False)
    orders.tick()
    orders.leave(orders.p0)
    orders.say_asleep(ref("p0", "s0"))
    orders.gateway.worker_lost("d0", orders.now)
    again = orders.join("d0", Role.DECODE, epoch="e1")
    assert orders.orders(again) == [orders.mode]
    orders.tick(1.0)
    assert orders.ended == []
    orders.say_asleep(ref("d0", "s0"))
    orders.tick()
    assert orders.ended == [None]


def test_a_gateway_that_was_started_again_learns_that_the_cluster_sleeps() -> None:
    orders = Orders()
    mode = ClusterMode(4, "gateway", paused=True, sleep_level=1)
    asleep = Asleep(
        worker=ref("d1", "s0"), role=Role.DECODE, node_id="n", host="h", pid=1, level=1, mode=mode
    )
    orders.gateway.handle(asleep, orders.now)
    assert orders.mode == mode
    orders.tick(1.0)
    assert orders.orders(orders.d0), "all sleep, then"


def test_a_gateway_that_hears_the_pool_first_lets_engines_sleep_on() -> None:
    """They slept before the pool came back for new weights, and the gateway was started again."""
    orders = Orders()
    lose_all(orders)
    weights = Weights(1, "/new", "r2", NEW)
    mode = ClusterMode(3, "gateway", sleep_level=2, weights=weights)
    orders.join("kv0", Role.KVSTORE, epoch="e1", layout_fingerprint=NEW, mode=mode)
    slept = ClusterMode(1, "gateway", sleep_level=2)
    asleep = Asleep(
        worker=ref("d0", "s0"), role=Role.DECODE, node_id="n", host="h", pid=1, level=2, mode=slept
    )
    for _ in range(2):
        orders.gateway.handle(asleep, orders.now)
        orders.tick(1.0)
        assert orders.orders(asleep.worker) == []
    assert (orders.mode.sleep_level, orders.mode.weights) == (2, weights)
    orders.control.wake(orders.ended.append)
    orders.tick(1.0)
    assert orders.orders(asleep.worker)[-1].weights == weights
    orders.gateway.handle(asleep, orders.now)
    assert not orders.mode.sleep_level, "an operator's word counts"


def test_a_worker_that_came_back_teaches_its_weights_and_no_pause() -> None:
    orders = Orders()
    mode = ClusterMode(6, "gateway", paused=True, weights=Weights(2, "/new", "r2", NEW))
    orders.gateway.worker_lost("d0", orders.now)
    orders.join("d0", Role.DECODE, epoch="e1", mode=mode)
    assert orders.mode.weights == mode.weights
    assert orders.mode.is_open
    orders.pause()
    assert orders.mode.number > mode.number, "its orders count"


def test_an_engine_that_sleeps_on_is_woken_while_requests_run() -> None:
    orders = Orders()
    orders.submit(request("r"))
    late = ref("d1", "s0")
    orders.say_asleep(late)
    orders.tick(1.0)
    assert [mode.sleep_level for mode in orders.orders(late)] == [0]


def test_a_word_from_before_it_woke_costs_no_member() -> None:
    """A gateway that stood still reads the connections of both lives in any order."""
    orders = Orders()
    orders.control.sleep(1, orders.ended.append, aborts=False)
    asleep = orders.mode
    orders.fall_asleep()
    orders.control.wake(orders.ended.append)
    orders.tick(0.5)
    orders.come_back()
    told = Asleep(
        worker=ref("d0", "s0"), role=Role.DECODE, node_id="n", host="h", pid=1, level=1, mode=asleep
    )
    orders.gateway.handle(told, orders.now)
    assert orders.control.asleep == []
    assert not orders.submit(request("r")).finals


def test_an_engine_that_sleeps_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    orders = Orders()
    orders.control.sleep(1, orders.ended.append, aborts=False)
    asleep = orders.fall_asleep()
    for _ in range(3):
        orders.say_asleep(*asleep)
    assert caplog.text.count("sleeps at level 1") == 2


# ------------------------------------------------------------------- new weights


def test_weights_are_replaced_everywhere_before_any_engine_is_a_member_again() -> None:
    orders = Orders()
    orders.pause()
    orders.update()
    p0, d0 = orders.fall_asleep()
    orders.answer(p0)
    orders.tick(1.0)
    assert orders.mode.weights == Weights(), "one has not answered"
    orders.answer(d0)
    assert orders.mode.weights == Weights(1, "/new", "r2", NEW)
    assert orders.mode.paused
    assert not orders.mode.sleep_level
    orders.tick(1.0)
    assert orders.orders(orders.kv0)[-1].weights.fingerprint == NEW
    assert orders.orders(p0) == [], "a pool is a member with blocks of the old weights"
    orders.leave(orders.kv0)
    orders.tick(1.0)
    assert orders.orders(p0)[-1].weights == orders.mode.weights
    orders.join("kv0", Role.KVSTORE, epoch="e1", layout_fingerprint=NEW, mode=orders.mode)
    assert orders.ended == [None]
    orders.come_back(layout_fingerprint=NEW)
    assert orders.ended == [None, None]
    orders.control.resume(orders.ended.append)
    assert not orders.submit(request("r")).finals


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([("r2", ""), ("", "/new: no such directory")], "d0: /new: no such directory"),
        ([("r2", ""), ("r3", "")], "all machines must see the same files"),
    ],
)
def test_weights_that_one_engine_cannot_serve_change_nothing(
    answers: list[tuple[str, str]], problem: str
) -> None:
    orders = Orders()
    orders.pause()
    orders.update()
    for worker, (revision, error) in zip(orders.fall_asleep(), answers, strict=True):
        orders.answer(worker, revision, error)
    assert orders.mode.weights == Weights()
    orders.tick(1.0)
    assert orders.orders(orders.kv0) == []
    orders.come_back()
    paused, error = orders.ended
    assert paused is None
    assert error is not None
    assert problem in error.message
    assert error.http_status == 400


def test_an_engine_without_files_of_the_new_weights_reads_those_of_another() -> None:
    orders = Orders()
    orders.pause()
    orders.update()
    p0, d0 = orders.fall_asleep()
    orders.answer(d0, error="/new has no weights", borrows=True)
    first = orders.channel.of(CheckWeights, d0.address)[-1]
    orders.answer(p0)
    orders.tick(1.0)
    asked = orders.channel.of(CheckWeights, d0.address)[-1]
    assert (asked.model, asked.revision, asked.lenders) == ("/new", "r2", [p0])
    assert asked.ticket != first.ticket
    late = WeightsChecked(
        asker=GATEWAY, ticket=first.ticket, worker=d0, error="/new has no weights", borrows=True
    )
    orders.gateway.handle(late, orders.now)
    orders.tick(0.5)
    assert orders.mode.weights == Weights(), "its answer of before does not count"
    assert {each.ticket for each in orders.channel.of(CheckWeights, p0.address)} == {first.ticket}
    orders.answer(d0)
    assert orders.mode.weights == Weights(1, "/new", "r2", NEW)


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ({"error": "no weights", "borrows": True}, {}, "p0: no weights"),
        ({"error": "tensor is missing"}, {}, "p0: tensor is missing"),
        ({}, {"error": "p0 lends no more"}, "d0: p0 lends no more"),
        ({}, {"revision": "r3"}, "all machines must see the same files"),
    ],
)
def test_weights_that_nobody_can_lend_change_nothing(
    first: dict[str, Any], second: dict[str, Any], problem: str
) -> None:
    orders = Orders()
    orders.pause()
    orders.update()
    p0, d0 = orders.fall_asleep()
    orders.answer(d0, error="no weights here", borrows=True)
    orders.answer(p0, **first)
    if not first:
        orders.tick(1.0)
        orders.answer(d0, **second)
    assert orders.mode.weights == Weights()
    orders.tick(1.0)
    orders.come_back()
    error = orders.ended[-1]
    assert error is not None
    assert problem in error.message
    assert error.http_status == 400


def test_engines_that_sleep_on_let_go_of_what_they_have_checked_in_vain() -> None:
    """They begin to sleep anew, and the order ends when they do."""
    orders = Orders()
    orders.control.sleep(2, orders.ended.append, aborts=False)
    p0, d0 = orders.fall_asleep()
    orders.update()
    orders.tick(1.0)
    orders.answer(p0)
    assert orders.orders(p0) == []
    orders.answer(d0, error="tensor is missing")
    assert orders.orders(p0) == orders.orders(d0) == [orders.mode]
    assert (orders.mode.sleep_level, orders.mode.weights) == (2, Weights())
    orders.tick(1.0)
    assert orders.ended == [None]
    orders.say_asleep(ref("p0", "s1"), ref("d0", "s1"), level=2)
    orders.tick(1.0)
    _, error = orders.ended
    assert error is not None
    assert "tensor is missing" in error.message


def test_an_open_cluster_keeps_its_weights() -> None:
    orders = Orders()
    orders.update()
    [error] = orders.ended
    assert error is not None
    assert "pause the cluster first" in error.message


def test_one_order_at_a_time() -> None:
    orders = Orders()
    orders.pause()
    orders.tick()
    orders.update()
    orders.update("/other")
    orders.control.resume(orders.ended.append)
    orders.control.wake(orders.ended.append)
    orders.control.sleep(1, orders.ended.append, aborts=False)
    _, *errors = orders.ended
    assert [error is not None and error.http_status for error in errors] == [400] * 4


@pytest.mark.parametrize("paused", [True, False])
def test_an_update_ends_when_another_gateway_wakes_the_engines(paused: bool) -> None:
    orders = Orders()
    orders.pause()
    orders.update()
    orders.fall_asleep()
    mode = ClusterMode(orders.mode.number + 1, "gateway-2", paused=paused)
    news = GatewayNews(gateway=OTHER, gateways=[], release=OWN_RELEASE, mode=mode)
    orders.gateway.handle(news, orders.now)
    orders.tick(0.5)
    _, error = orders.ended
    assert error is not None
    assert "give the order again" in error.message
    orders.come_back()
    orders.control.resume(orders.ended.append)
    assert orders.ended[2:] == [None], "the next order is taken"


def test_of_two_weights_with_one_number_all_workers_get_the_same() -> None:
    """Two gateways were told to replace them at once, and each has told some workers."""
    orders = Orders()
    for worker in (orders.p0, orders.d0, orders.kv0):
        orders.gateway.worker_lost(worker.worker_id, orders.now)
    mine = ClusterMode(3, "gateway", weights=Weights(1, "/new", "r2", NEW))
    orders.join("p0", Role.PREFILL, epoch="e1", layout_fingerprint=NEW, mode=mine)
    weights = Weights(1, "/other", "r3", "layout-3")
    news = GatewayNews(
        gateway=OTHER, gateways=[], release=OWN_RELEASE,
        mode=ClusterMode(4, "gateway-2", weights=weights),
    )  # fmt: skip
    orders.gateway.handle(news, orders.now)
    orders.tick(1.0)
    assert orders.orders(ref("p0", "e1"))[-1].weights == weights


def test_engines_that_share_experts_say_that_they_cannot() -> None:
    orders = Orders()
    orders.join("d1", Role.DECODE, expert_group="g")
    orders.control.sleep(1, orders.ended.append, aborts=False)
    [error] = orders.ended
    assert error is not None
    assert "d1 shares its experts" in error.message


def test_a_worker_with_old_weights_is_told_the_new_ones_and_never_computes_beside_them() -> None:
    orders = Orders()
    for worker in (orders.p0, orders.d0, orders.kv0):
        orders.gateway.worker_lost(worker.worker_id, orders.now)
    mode = ClusterMode(6, "gateway", weights=Weights(1, "/new", "r2", NEW))
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        orders.join(name, role, epoch="e1", layout_fingerprint=NEW, mode=mode)
    old = orders.join("d1", Role.DECODE)
    assert orders.orders(old) == [orders.mode]
    assert orders.channel.of(Welcome, old.address) == [], "it is no member"
    client = orders.submit(request("r"))
    assert orders.tasks(old) == []
    assert not client.finals


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_pool_client_changes_neither_mode_nor_weights(is_paused: bool) -> None:
    orders = Orders()
    if is_paused:
        orders.pause()
    before = orders.mode
    mode = ClusterMode(9, "gateway", weights=Weights(9, "/of/a/tenant", "r9", NEW))
    orders.join("client-1", Role.CLIENT, mode=mode, expert_group="g")
    orders.tick(1.0)
    assert orders.mode == before
    assert orders.channel.of(Restart) == []
    orders.control.sleep(1, orders.ended.append, aborts=False)
    orders.fall_asleep()
    assert orders.ended == [None] * (1 + is_paused), "it shares no experts"


# ------------------------------------------------------------------- requests between weights


def lose_all(orders: Orders) -> None:
    for worker in (orders.p0, orders.d0, orders.kv0):
        orders.gateway.worker_lost(worker.worker_id, orders.now)


def join_new(orders: Orders) -> tuple[WorkerRef, WorkerRef]:
    p1 = orders.join("p1", Role.PREFILL, layout_fingerprint=NEW)
    return p1, orders.join("d1", Role.DECODE, layout_fingerprint=NEW)


def test_no_answer_is_begun_with_some_weights_and_ended_with_others() -> None:
    orders = Orders()
    begun: Client = orders.submit(request("begun"))
    fresh: Client = orders.submit(request("fresh"))
    orders.output(orders.p0, "begun", 0, [5])
    lose_all(orders)
    _, d1 = join_new(orders)
    orders.tick(1.0)
    failure = begun.final.failure
    assert begun.tokens == [5]
    assert failure is not None
    assert "other weights" in failure.message
    assert failure.status == 503
    assert [task.request.request_id for task in orders.tasks(d1)] == ["fresh"]
    assert not fresh.finals

"""The in-process channel: order, wake-up, threads, loss where the port says so."""

from __future__ import annotations

import select
import threading

import pytest

from mooncake.base.errors import ProtocolError
from mooncake.base.messages import AbortTask, Drain, Unpin, WorkerRef
from mooncake.base.pool_messages import AnyMessage
from mooncake.rpc.inproc import InprocChannel, InprocNetwork


def is_readable(channel: InprocChannel) -> bool:
    return bool(select.select([channel], [], [], 0)[0])


def test_messages_arrive_in_order_and_wake_the_reader_once() -> None:
    network = InprocNetwork()
    a, b = InprocChannel(network, "a"), InprocChannel(network, "b")
    assert not is_readable(b)
    assert b.receive() == []
    sent: list[AnyMessage] = [AbortTask(request_id=f"r{i}", attempt=i) for i in range(100)]
    for message in sent:
        a.send("b", message)
    assert is_readable(b)
    assert not is_readable(a)
    assert b.receive() == sent
    assert not is_readable(b)
    b.send("b", Drain())
    assert b.receive() == [Drain()]
    a.close()
    b.close()


def test_to_an_unknown_or_closed_address_it_vanishes() -> None:
    network = InprocNetwork()
    a, b = InprocChannel(network, "a"), InprocChannel(network, "b")
    a.send("nowhere", Drain())
    a.send("b", Drain())
    b.close()
    b.close()
    a.send("b", Drain())
    assert b.receive() == []
    again = InprocChannel(network, "b")
    assert again.receive() == []
    a.send("b", Drain())
    assert again.receive() == [Drain()]
    a.close()
    again.close()


def test_an_address_is_taken_once() -> None:
    network = InprocNetwork()
    a = InprocChannel(network, "a")
    with pytest.raises(ValueError, match="has the address 'a'"):
        InprocChannel(network, "a")
    a.close()


def test_what_could_not_travel_fails_unless_told_otherwise() -> None:
    network = InprocNetwork()
    strict = InprocChannel(network, "strict")
    loose = InprocChannel(network, "loose", encode=False)
    message = Unpin(reader=WorkerRef("w", "e", "a"), ticket=object())  # type: ignore[arg-type]  # the point
    with pytest.raises(ProtocolError):
        strict.send("loose", message)
    loose.send("strict", message)
    assert strict.receive()[0] is message
    strict.close()
    loose.close()


def test_a_full_inbox_drops_the_newest_and_counts() -> None:
    network = InprocNetwork()
    a = InprocChannel(network, "a", inbox_bound=3)
    for attempt in range(5):
        a.send("a", AbortTask(request_id="r", attempt=attempt))
    assert [message.attempt for message in a.receive()] == [0, 1, 2]  # type: ignore[union-attr]  # all aborts
    assert a.num_dropped == 2
    a.close()


def test_senders_in_many_threads_lose_nothing() -> None:
    network = InprocNetwork()
    sink = InprocChannel(network, "sink")

    def work(name: str) -> None:
        channel = InprocChannel(network, name)
        for attempt in range(300):
            channel.send("sink", AbortTask(request_id=name, attempt=attempt))
        channel.close()

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    got: list[AnyMessage] = []
    while len(got) < 1200:
        assert select.select([sink], [], [], 10)[0], f"only {len(got)} messages arrived"
        got += sink.receive()
    for thread in threads:
        thread.join()
    by_name: dict[str, list[int]] = {}
    for message in got:
        assert isinstance(message, AbortTask)
        by_name.setdefault(message.request_id, []).append(message.attempt)
    assert by_name == {f"t{i}": list(range(300)) for i in range(4)}
    sink.close()

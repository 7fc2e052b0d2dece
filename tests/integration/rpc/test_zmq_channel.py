"""The ZeroMQ channel over loopback: delivery, order, secrecy, bounds, and peers that vanish."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from zmq.utils import z85

from mooncake import __version__
from mooncake.base.errors import ConfigError
from mooncake.base.messages import (
    AbortTask,
    Drain,
    Message,
    PutStart,
    Refused,
    Role,
    StepOutputs,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.pool_messages import AnyMessage, FindBlocks
from mooncake.base.request import RequestOutput, TokenLogprobs, packed_logprobs
from mooncake.base.rights import MAX_KEYS, CredentialRole, client_id
from mooncake.identity.credential import Credential, certify, issue, own_credential
from mooncake.rpc.channel import PeerEnded
from mooncake.rpc.codec import decode, encode, head_of
from mooncake.rpc.ended_peers import MAX_ASKED, EndedPeers
from mooncake.rpc.zmq_channel import (
    FIRST_RETRY_S,
    LOOK_S,
    MAX_ANSWERED_BYTES,
    MAX_CLIENT_BYTES,
    MAX_HELLO_BYTES,
    MAX_PER_CLIENT,
    MAX_UNPROVEN,
    ZmqChannel,
    ZmqLimits,
    _Bound,
    _Gate,
)
from tests.support.clock import ManualClock
from tests.support.waiting import LONG_S

SECRET = "a cluster secret"
SHUT_S = 1.0
"""For so long one that may not connect tries to: one that may is heard within a tenth of it."""
Open = Callable[..., ZmqChannel]


def own(secret: str) -> Credential:
    """Return a credential for everything."""
    return own_credential(secret, *CredentialRole)


@pytest.fixture
def open_channel() -> Iterator[Open]:
    channels: list[ZmqChannel] = []

    def make(**settings: object) -> ZmqChannel:
        secret = str(settings.pop("secret", SECRET))
        settings.setdefault("credential", own(secret))
        settings.setdefault("limits", ZmqLimits(linger_ms=50))
        channel = ZmqChannel(**settings)  # type: ignore[arg-type]  # keyword soup of a fixture
        channels.append(channel)
        return channel

    yield make
    for channel in channels:
        channel.close()


def receive(channel: ZmqChannel, count: int) -> list[AnyMessage | PeerEnded]:
    """Wait on the descriptor alone, as a driver does."""
    got: list[AnyMessage | PeerEnded] = []
    while len(got) < count:
        assert select.select([channel], [], [], LONG_S)[0], f"{len(got)} of {count} arrived"
        got += channel.receive()
    return got


def test_messages_arrive_in_order_both_ways(open_channel: Open) -> None:
    a, b = open_channel(), open_channel()
    assert a.address.startswith("tcp://127.0.0.1:")
    sent: list[AnyMessage] = [AbortTask(request_id="r", attempt=i) for i in range(500)]
    for message in sent:
        a.send(b.address, message)
    assert receive(b, 500) == sent
    b.send(a.address, Drain())
    assert receive(a, 1) == [Drain()]
    a.send(a.address, Drain())
    assert receive(a, 1) == [Drain()]


def test_the_descriptor_fires_for_every_burst(open_channel: Open) -> None:
    """The socket's own descriptor is edge-triggered; the channel's must never miss a message."""
    limits = ZmqLimits(queue_messages=20000, linger_ms=50)
    a, b = open_channel(limits=limits), open_channel(limits=limits)
    for burst in [1, 2, 1, 5000, 1, 3]:
        for attempt in range(burst):
            a.send(b.address, AbortTask(request_id="r", attempt=attempt))
        assert len(receive(b, burst)) == burst
    assert a.counters.num_dropped == 0


def test_works_with_add_reader_of_asyncio(open_channel: Open) -> None:
    a, b = open_channel(), open_channel()

    async def run() -> list[AnyMessage | PeerEnded]:
        loop = asyncio.get_running_loop()
        got: list[AnyMessage | PeerEnded] = []
        done = asyncio.Event()

        def on_readable() -> None:
            got.extend(b.receive())
            if len(got) == 50:
                done.set()

        loop.add_reader(b.fileno(), on_readable)
        for attempt in range(50):
            a.send(b.address, AbortTask(request_id="r", attempt=attempt))
            await asyncio.sleep(0)
        await asyncio.wait_for(done.wait(), LONG_S)
        loop.remove_reader(b.fileno())
        return got

    assert [message.attempt for message in asyncio.run(run())] == list(range(50))  # type: ignore[union-attr]  # all aborts


def test_another_secret_gets_nothing_through_either_way(open_channel: Open) -> None:
    ours, stranger = open_channel(), open_channel(secret="another secret")
    stranger.send(ours.address, Drain())
    ours.send(stranger.address, Drain())
    friend = open_channel()
    friend.send(ours.address, AbortTask(request_id="friend", attempt=1))
    assert receive(ours, 1) == [AbortTask(request_id="friend", attempt=1)]
    assert not select.select([stranger], [], [], 0.3)[0] or stranger.receive() == []
    assert ours.receive() == []
    assert ours.counters.num_received == 1


def test_a_secret_is_replaced_while_messages_go_both_ways(open_channel: Open) -> None:
    left, right = own("old"), own("old")
    a, b = open_channel(credential=left), open_channel(credential=right)

    def talk() -> None:
        for one, other in ((a, b), (b, a)):
            one.send(other.address, Drain())
            assert receive(other, 1) == [Drain()]

    talk()
    for phase in ("old\nnew", "new\nold", "new"):
        for credential in (left, right):
            credential.renew(phase)
            talk()
    late, former = open_channel(secret="new"), open_channel(secret="old")
    late.send(a.address, Drain())
    assert receive(a, 1) == [Drain()], "it need not know what the secret was when that was opened"
    former.send(a.address, Drain())
    deadline_s = time.monotonic() + LONG_S
    while not a.counters.num_refused:
        assert time.monotonic() < deadline_s
        select.select([a], [], [], 0.1)
        assert a.receive() == []


def test_a_typed_address_needs_no_key_and_the_first_of_two_secrets(open_channel: Open) -> None:
    registry = open_channel(is_typed=True)
    assert "#" not in registry.address
    for secret in (SECRET, f"{SECRET}\nanother"):
        open_channel(secret=secret).send(registry.address, Drain())
        assert receive(registry, 1) == [Drain()]


def test_a_typed_address_has_the_key_of_the_first_secret_at_each_step(open_channel: Open) -> None:
    """Who knows that secret is let in, alone or as one of two; one that has sent before goes on."""
    credential, known = own("old"), own("old")
    made = issue("old", "gateway", [CredentialRole.GATEWAY], listens=True)
    with_text = own_credential(made.text, CredentialRole.GATEWAY)
    clock, numbers = ManualClock(), itertools.count()
    registry = open_channel(credential=credential, is_typed=True, clock=clock)
    machine = open_channel(credential=with_text, is_typed=True, clock=clock)
    peer = open_channel(credential=known)

    def hear(receiver: ZmqChannel, limit_s: float) -> list[AnyMessage | PeerEnded]:
        """Return what has arrived; it has looked at the secret before."""
        select.select([receiver], [], [], limit_s)
        clock.advance_to(clock.now() + LOOK_S)
        return receiver.receive()

    def arrives(sender: ZmqChannel, address: str, receiver: ZmqChannel) -> None:
        """As members do, it says the same again until it is heard."""
        said = AbortTask(request_id="let in", attempt=next(numbers))
        end_s = time.monotonic() + LONG_S
        while time.monotonic() < end_s:
            sender.send(address, said)
            if said in hear(receiver, 0.2):
                return
        raise AssertionError(f"{address} is not reached")

    def nothing_arrives(sender: ZmqChannel, receiver: ZmqChannel) -> None:
        said = AbortTask(request_id="shut out", attempt=next(numbers))
        end_s = time.monotonic() + SHUT_S
        while time.monotonic() < end_s:
            sender.send(receiver.address, said)
            assert said not in hear(receiver, 0.1)
            time.sleep(0.05)  # what waits to be read does not end the time to connect

    address = registry.address
    for phase, let_in, shut_out in (
        ("old", ["old"], ["new"]),
        ("old\nnew", ["old", "old\nnew", "new\nold"], ["new"]),
        ("new\nold", ["old\nnew", "new\nold", "new"], ["old"]),
        ("new", ["new\nold", "new"], ["old", "old\nnew"]),
    ):
        for each in (credential, known):
            each.renew(phase)
        signed = certify(phase, "gateway", [CredentialRole.GATEWAY], with_text.keys.public)
        first = issue(phase, "x", [CredentialRole.GATEWAY])
        renewed = Credential(
            with_text.keys.seed, signed.signed, signed.cluster, None, signed.others,
            first.listening_seed or b"",
        )  # fmt: skip
        with_text.renew(renewed.text)
        for receiver in (registry, machine):
            arrives(peer, receiver.address, receiver)
            for secret in let_in:
                arrives(open_channel(secret=secret), receiver.address, receiver)
            for secret in shut_out:
                nothing_arrives(open_channel(secret=secret), receiver)
    assert registry.address == address


class TakenPort:
    """A socket whose port somebody else has for so many tries after it was given up."""

    def __init__(self, num_tries: int) -> None:
        self.num_left = 0
        self._num_tries = num_tries

    def setsockopt(self, option: int, value: object) -> None:
        pass

    def getsockopt_string(self, option: int) -> str:
        return "tcp://127.0.0.1:6400"

    def bind(self, endpoint: str) -> None:
        self.num_left -= 1
        if self.num_left >= 0:
            raise zmq.ZMQError(errno.EADDRINUSE)

    def unbind(self, endpoint: str) -> None:
        self.num_left = self._num_tries


@pytest.mark.parametrize(("num_tries", "num_warnings"), [(0, 0), (1, 0), (5, 0), (6, 1), (20, 1)])
def test_a_port_that_is_taken_meanwhile_is_tried_again_ever_less_often(
    caplog: pytest.LogCaptureFixture, num_tries: int, num_warnings: int
) -> None:
    credential = own("old")
    assert credential.listening_seed is not None
    inbox = TakenPort(num_tries)
    bound = _Bound(inbox, "127.0.0.1", credential.listening_seed, ZmqLimits())  # type: ignore[arg-type]  # as far as it is used
    assert bound.bind(6400, 6400) == 6400
    assert bound.follow(credential) is None
    credential.renew("new\nold")
    with caplog.at_level(logging.INFO):
        waits = list(iter(lambda: bound.follow(credential), None))
    assert waits == [min(FIRST_RETRY_S * 2**count, LOOK_S) for count in range(num_tries)]
    *warnings, last = [record.getMessage() for record in caplog.records]
    assert last == "port 6400 has the key of the new cluster secret"
    assert len(warnings) == num_warnings
    assert all("port 6400 cannot be given the key" in each for each in warnings)


def test_between_two_tries_for_its_port_a_channel_rests(
    open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    registry = open_channel(is_typed=True, clock=clock)
    tries: list[float] = []

    def follow(_: Credential) -> float | None:
        tries.append(clock.now())
        return 0.25 if len(tries) < 3 else None

    registry.receive()
    monkeypatch.setattr(registry._bound, "follow", follow)
    clock.advance_to(LOOK_S)
    began_s = clock.now()
    registry.receive()
    assert select.select([registry], [], [], LONG_S)[0], "it wakes its driver for the next try"
    for _ in range(100):
        registry.receive()
    for _ in range(100):
        clock.advance_to(clock.now() + 0.125)
        registry.receive()
    assert tries[:3] == [began_s, began_s + 0.25, began_s + 0.5]
    assert tries[3] == began_s + 0.5 + LOOK_S


@pytest.mark.parametrize("with_curve", [False, True], ids=["plain", "own server key"])
def test_a_raw_socket_without_the_secret_gets_nothing_through(
    open_channel: Open, with_curve: bool
) -> None:
    ours = open_channel()
    context = zmq.Context()
    raw = context.socket(zmq.PUSH)
    if with_curve:
        public, secret = zmq.curve_keypair()
        raw.curve_publickey, raw.curve_secretkey = public, secret
        raw.curve_serverkey = zmq.curve_keypair()[0]
    events = raw.get_monitor_socket()
    raw.connect(ours.address.partition("#")[0])
    with contextlib.suppress(zmq.Again):  # the connection may be refused before there is a pipe
        raw.send(encode(Drain()), zmq.NOBLOCK)
    failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    closed = failed | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    seen = 0
    while not seen & closed:
        assert events.poll(LONG_S * 1000)
        seen |= int.from_bytes(events.recv_multipart()[0][:2], "little")
    assert not seen & zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert ours.receive() == []
    raw.disable_monitor()
    context.destroy(linger=0)


def test_garbage_from_a_holder_of_the_secret_is_counted_and_dropped(open_channel: Open) -> None:
    ours = open_channel(is_typed=True)
    context = zmq.Context()
    raw = context.socket(zmq.PUSH)
    held = own_credential(SECRET, CredentialRole.OPERATOR)
    raw.curve_publickey = z85.encode(held.certificate.channel_key)
    raw.curve_secretkey = z85.encode(held.channel_seed)
    raw.curve_serverkey = z85.encode(held.cluster.channel_key)
    raw.connect(ours.address.partition("#")[0])
    raw.send(b"garbage")
    raw.send(b"")
    raw.send(encode(Drain(), head_of(held.signed)))
    assert receive(ours, 1) == [Drain()]
    assert ours.counters.num_malformed == 2
    context.destroy(linger=0)


def test_a_message_of_a_later_release_is_answered_and_what_follows_arrives(
    open_channel: Open,
) -> None:
    old, new = open_channel(), open_channel()
    asker = WorkerRef("decode-0", "e", new.address)

    class Later(Message, frozen=True, tag="later"):
        """What the release of `old` does not have."""

        asker: WorkerRef
        ticket: int

    new.send(old.address, Later(asker=asker, ticket=7))  # type: ignore[arg-type]  # the point
    new.send(old.address, Drain())
    assert receive(old, 1) == [Drain()]
    assert old.counters.num_malformed == 1
    [refused] = receive(new, 1)
    assert isinstance(refused, Refused)
    assert (refused.asker, refused.ticket, refused.message) == (asker, 7, "later")
    assert refused.reason == f"release {__version__} has no message of the kind later"


def test_a_message_over_the_bound_is_dropped_by_the_sender(
    open_channel: Open, caplog: pytest.LogCaptureFixture
) -> None:
    a = open_channel(limits=ZmqLimits(message_bytes=10_000, linger_ms=50))
    b = open_channel(limits=ZmqLimits(message_bytes=10_000, linger_ms=50))
    big = PutStart(writer=WorkerRef("w", "e", "a"), ticket=1, keys=[bytes(100)] * 200)
    with caplog.at_level(logging.WARNING):
        a.send(b.address, big)
    assert "too long" in caplog.text
    a.send(b.address, Drain())
    assert receive(b, 1) == [Drain()]
    assert a.counters.num_dropped == 1


def test_outputs_too_long_for_one_message_arrive_in_several(open_channel: Open) -> None:
    """One that is too long alone ends its request and says what to do; all others pass."""
    limits = ZmqLimits(message_bytes=10_000, linger_ms=50)
    a, b = open_channel(limits=limits), open_channel(limits=limits)

    def output(number: int, num_tokens: int) -> RequestOutput:
        entries = [None, *[TokenLogprobs(-0.5, 1, [(number, -0.5)])] * num_tokens]
        return RequestOutput(
            request_id=f"r{number}", attempt=2, start=3, tokens=[number],
            prompt_logprobs=packed_logprobs(entries),
        )  # fmt: skip

    long = {7, 12, 13}
    outputs = [output(number, 1_000 if number in long else 30) for number in range(40)]
    worker = WorkerRef("w", "e", a.address)
    a.send(b.address, StepOutputs(worker=worker, outputs=outputs))
    arrived: list[RequestOutput] = []
    while len(arrived) < len(outputs):
        for message in receive(b, 1):
            assert isinstance(message, StepOutputs)
            assert message.worker == worker
            arrived += message.outputs
    assert [each.request_id for each in arrived] == [each.request_id for each in outputs]
    for number, (sent, got) in enumerate(zip(outputs, arrived, strict=True)):
        if number not in long:
            assert (got.tokens, bytes(got.prompt_logprobs)) == (
                sent.tokens, bytes(sent.prompt_logprobs),
            )  # fmt: skip
            continue
        assert (got.attempt, got.start, got.tokens) == (2, 3, [])
        assert got.finish is not None
        assert got.finish.failure is not None
        assert got.finish.failure.status == 400
        assert "ask for fewer log-probabilities" in got.finish.failure.message
    assert a.counters.num_dropped == 0


def test_the_receiver_cuts_off_a_sender_over_its_bound(open_channel: Open) -> None:
    a, b = open_channel(), open_channel(limits=ZmqLimits(message_bytes=10_000, linger_ms=50))
    a.send(b.address, PutStart(writer=WorkerRef("w", "e", "a"), ticket=1, keys=[bytes(20_000)]))
    friend = open_channel()
    friend.send(b.address, Drain())
    assert receive(b, 1) == [Drain()]
    assert b.counters.num_received == 1


def test_sending_to_the_dead_never_blocks_and_is_bounded(open_channel: Open) -> None:
    a = open_channel(limits=ZmqLimits(queue_messages=10, linger_ms=50))
    gone = open_channel()
    address = gone.address
    gone.close()
    for attempt in range(200):
        a.send(address, AbortTask(request_id="r", attempt=attempt))
    a.send("not an address", Drain())
    assert a.counters.num_dropped >= 150
    assert a.counters.num_sent + a.counters.num_dropped == 201


def test_more_peers_than_zeromq_allows_by_itself(open_channel: Open) -> None:
    clock = ManualClock()
    limits = ZmqLimits(num_peers=1100, linger_ms=0)
    a, b = open_channel(limits=limits, clock=clock), open_channel()
    for number in range(1200):
        a.send(f"tcp://127.0.0.1:{20000 + number}", Drain())
    assert a.num_peers == 1100
    a.send(b.address, Drain())
    assert receive(b, 1) == [Drain()]
    assert a.counters.num_dropped == 0


def test_without_free_descriptors_messages_to_new_peers_are_lost(
    open_channel: Open, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = open_channel(), open_channel(), open_channel()
    a.send(b.address, Drain())
    assert receive(b, 1) == [Drain()]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        a.send(c.address, Drain())
        a.send(b.address, Drain())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert a.counters.num_dropped == 1
    assert "dropped" in caplog.text
    assert receive(b, 1) == [Drain()], "those that are connected still get theirs"
    a.send(c.address, Drain())
    assert receive(c, 1) == [Drain()]


def test_idle_and_surplus_peers_are_forgotten(open_channel: Open) -> None:
    clock = ManualClock()
    limits = ZmqLimits(num_peers=4, idle_s=60, linger_ms=50)
    a = open_channel(limits=limits, clock=clock)
    others = [open_channel() for _ in range(6)]
    num_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        for other in others:
            a.send(other.address, Drain())
            assert receive(other, 1) == [Drain()]
    assert a.num_peers == 4
    clock.advance_to(59.0)
    a.send(others[0].address, Drain())
    clock.advance_to(61.0)
    a.receive()
    assert a.num_peers == 1
    clock.advance_to(119.0)
    a.receive()
    assert a.num_peers == 0
    deadline_s = time.monotonic() + LONG_S
    while len(os.listdir("/proc/self/fd")) > num_fds:  # ZeroMQ closes in a thread of its own
        assert time.monotonic() < deadline_s, "descriptors of forgotten peers stay open"
        a.receive()
    a.send(others[1].address, AbortTask(request_id="back", attempt=1))
    assert AbortTask(request_id="back", attempt=1) in receive(others[1], 1)


def test_close_frees_descriptors_and_may_be_repeated() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        a, b = (
            ZmqChannel(credential=own(SECRET), limits=ZmqLimits(linger_ms=50)) for _ in range(2)
        )
        a.send(b.address, Drain())
        assert receive(b, 1) == [Drain()]
        a.close()
        a.close()
        a.send(b.address, Drain())
        assert a.receive() == []
        b.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_addresses_and_bad_settings() -> None:
    channel = ZmqChannel(
        "127.0.0.1", credential=own(SECRET), advertise_host="node-7", limits=ZmqLimits(linger_ms=0)
    )
    assert channel.address.startswith("tcp://node-7:")
    port = int(channel.address.partition("#")[0].rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        ZmqChannel(credential=own(SECRET), ports=(port, port))
    taken = [ZmqChannel(credential=own(SECRET), ports=(port, port + 9)) for _ in range(2)]
    found = [int(each.address.rsplit(":", 1)[1].partition("#")[0]) for each in taken]
    assert port < found[0] < found[1] <= port + 9, "each takes the first that is free"
    for each in taken:
        each.close()
    with pytest.raises(ConfigError, match="cannot listen"):
        ZmqChannel("203.0.113.1", credential=own(SECRET))
    with pytest.raises(ConfigError, match="secret is empty"):
        ZmqChannel(credential=own(""))
    channel.close()


ECHO = """
import select, sys
from mooncake.base.messages import AbortTask, Drain
from mooncake.base.rights import MAX_KEYS, CredentialRole, client_id
from mooncake.identity.credential import Credential, certify, issue, own_credential
from mooncake.rpc.zmq_channel import ZmqChannel
channel = ZmqChannel(credential=own_credential(sys.argv[1], *CredentialRole))
back = sys.argv[2]
channel.send(back, AbortTask(request_id=channel.address, attempt=0))
while True:
    select.select([channel], [], [])
    for message in channel.receive():
        channel.send(back, message)
"""


def test_another_process_is_reached_and_its_death_is_survived(open_channel: Open) -> None:
    ours = open_channel()
    root = Path(__file__).parents[3]
    for attempt in range(2):
        peer = subprocess.Popen(
            [sys.executable, "-c", ECHO, SECRET, ours.address], cwd=root, env=dict(os.environ)
        )
        try:
            (hello,) = receive(ours, 1)
            assert isinstance(hello, AbortTask)
            ours.send(hello.request_id, AbortTask(request_id="echo", attempt=attempt))
            assert receive(ours, 1) == [AbortTask(request_id="echo", attempt=attempt)]
        finally:
            peer.kill()
            peer.wait()
        ours.send(hello.request_id, Drain())
    assert ours.receive() == []


@pytest.mark.parametrize("idle_s", [0.0, ZmqLimits().idle_s + 1])
def test_the_end_of_a_process_is_told_at_once(open_channel: Open, idle_s: float) -> None:
    """Also of one to which nothing was sent for so long that the socket to it is closed."""
    clock = ManualClock()
    ours = open_channel(tells_ends=True, clock=clock)
    peer = subprocess.Popen(
        [sys.executable, "-c", ECHO, SECRET, ours.address], cwd=Path(__file__).parents[3]
    )
    try:
        (hello,) = receive(ours, 1)
        assert isinstance(hello, AbortTask)
        ours.send(hello.request_id, Drain())
        assert receive(ours, 1) == [Drain()]
        clock.advance_to(idle_s)
        assert ours.receive() == []
        assert ours.num_peers == (0 if idle_s else 1)
    finally:
        peer.kill()
        peer.wait()
    assert receive(ours, 1) == [PeerEnded(hello.request_id)]


def test_an_address_that_names_no_host_is_not_asked() -> None:
    with contextlib.closing(select.epoll()) as ready:
        ended = EndedPeers(ready)
        for host in ("a..b", "x" * 64, "a\0b", "node-7"):
            ended.ask(f"tcp://{host}:6400#00")
        assert list(ended.look()) == []


def test_peers_that_accept_and_say_nothing_hide_no_other_s_end() -> None:
    with (
        contextlib.closing(select.epoll()) as ready,
        socket.create_server(("127.0.0.1", 0)) as gone,
    ):
        silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(MAX_ASKED)]
        ended = EndedPeers(ready)
        for each in silent:
            ended.ask(f"tcp://127.0.0.1:{each.getsockname()[1]}#00")
        address = f"tcp://127.0.0.1:{gone.getsockname()[1]}#00"
        gone.close()
        ended.ask(address)
        found: list[str] = []
        until_s = time.monotonic() + LONG_S
        while not found and time.monotonic() < until_s:
            ready.poll(0.1)
            found += ended.look()
        assert found == [address]
        ended.close()
        for each in silent:
            each.close()


def test_a_peer_that_hangs_up_and_lives_has_not_ended(open_channel: Open) -> None:
    clock = ManualClock()
    peer = open_channel(clock=clock)
    ours = open_channel(tells_ends=True)
    ours.send(peer.address, Drain())
    peer.send(ours.address, Drain())
    assert receive(ours, 1) == [Drain()]
    clock.advance_to(ZmqLimits().idle_s + 1)
    receive(peer, 1)  # and closes the connection that it has not used for long
    asked: list[str] = []
    ask = EndedPeers.ask
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            EndedPeers, "ask", lambda self, address: (asked.append(address), ask(self, address))
        )
        end_s = time.monotonic() + LONG_S
        while not asked or select.select([ours], [], [], 0.5)[0]:
            assert time.monotonic() < end_s, "the closed connection is not noticed"
            assert ours.receive() == []
    assert asked == [peer.address]


def test_of_too_many_that_prove_nothing_the_oldest_is_hung_up(
    open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of strangers keeps no peer out, and a peer that has proven itself keeps its place."""
    # Else their handshakes end them, too, a few seconds later.
    monkeypatch.setattr("mooncake.rpc.zmq_channel._HANDSHAKE_MS", 600_000)
    server, early, late = open_channel(), open_channel(), open_channel()
    early.send(server.address, AbortTask(request_id="early", attempt=1))
    assert receive(server, 1) == [AbortTask(request_id="early", attempt=1)]
    host, _, port = server.address.partition("#")[0].removeprefix("tcp://").rpartition(":")
    with contextlib.ExitStack() as opened:
        strangers = []
        for _ in range(2 * MAX_UNPROVEN):
            strangers.append(opened.enter_context(socket.create_connection((host, int(port)))))
        end_s = time.monotonic() + LONG_S
        while (num_open := sum(map(is_open, strangers))) > MAX_UNPROVEN:
            assert time.monotonic() < end_s, f"{num_open} are open"
            select.select([server], [], [], 0.05)
            assert server.receive() == []
        assert not is_open(strangers[0])
        assert is_open(strangers[-1])
        for sender in (late, early):
            sender.send(server.address, AbortTask(request_id="x", attempt=2))
            assert receive(server, 1) == [AbortTask(request_id="x", attempt=2)]


def client_ref(credential: Credential, number: int, address: str) -> WorkerRef:
    """Return a name that a client of this credential may give itself."""
    return WorkerRef(
        client_id(credential.certificate.channel_key.hex()) + str(number), "e", address
    )


def test_refusals_of_many_strangers_hide_no_other_s(caplog: pytest.LogCaptureFixture) -> None:
    gate = _Gate(own(SECRET), lambda: 0.0)
    for number in range(5000):
        gate.complain(f"key {number}", "of another cluster")
    caplog.clear()
    for _ in range(2):
        gate.complain("a key", "a client may not")
    assert caplog.messages == ["message refused: a client may not"]


def test_a_client_is_answered_at_the_host_that_it_sends_from_alone(open_channel: Open) -> None:
    """Else it could have a node connect to any port of any machine."""
    credential = issue(SECRET, "etl", [CredentialRole.POOL_CLIENT])
    server, client = open_channel(), open_channel(credential=credential)
    own = client_ref(credential, 1, client.address)
    elsewhere = msgspec.structs.replace(own, address=own.address.replace("127.0.0.1", "127.1.0.1"))
    far = msgspec.structs.replace(own, address=own.address.replace("127.0.0.1", "192.0.2.7"))
    client.send(server.address, PutStart(writer=far, ticket=1, keys=[]))
    client.send(server.address, PutStart(writer=own, ticket=2, keys=[]))
    client.send(server.address, PutStart(writer=elsewhere, ticket=3, keys=[]))
    found = receive(server, 2)
    assert [message.ticket for message in found] == [2, 3], "all of loopback is one host"
    assert server.counters.num_refused == 1
    assert server.num_peers == 0, "no connection was made to the other host"


def test_clients_of_one_credential_speak_by_so_many_names(open_channel: Open) -> None:
    clock = ManualClock()
    credential = own_credential(
        issue(SECRET, "etl", [CredentialRole.POOL_CLIENT]).text, CredentialRole.POOL_CLIENT
    )
    server, client = open_channel(clock=clock), open_channel(credential=credential)

    def speak(number: int) -> None:
        writer = client_ref(credential, number, client.address)
        client.send(server.address, PutStart(writer=writer, ticket=number, keys=[]))

    for number in range(MAX_PER_CLIENT):
        speak(number)
    assert len(receive(server, MAX_PER_CLIENT)) == MAX_PER_CLIENT
    issued = certify(
        SECRET, "etl", [CredentialRole.POOL_CLIENT], credential.keys.public, expires_s=2.0**40
    )
    credential.renew(Credential(credential.keys.seed, issued.signed, issued.cluster).text)
    speak(MAX_PER_CLIENT)  # nor does another certificate of the same keys give it more
    while not server.counters.num_refused:
        assert select.select([server], [], [], LONG_S)[0]
        assert server.receive() == []
    (refused,) = receive(client, 1)
    assert isinstance(refused, Refused)
    assert f"speaks for {MAX_PER_CLIENT} clients already" in refused.reason
    speak(3)
    assert receive(server, 1)[0].ticket == 3, "those that it has go on"
    clock.advance_to(61.0)
    speak(MAX_PER_CLIENT)
    assert receive(server, 1)[0].ticket == MAX_PER_CLIENT, "names that rest count no more"


def test_what_a_client_says_at_once_is_short(open_channel: Open) -> None:
    """As many blocks as a message may name, and no endless words: others remember some of them."""
    credential = issue(SECRET, "etl", [CredentialRole.POOL_CLIENT])
    server, client = open_channel(), open_channel(credential=credential)
    own = client_ref(credential, 1, client.address)
    most = FindBlocks(asker=own, ticket=1, keys=[bytes(16)] * MAX_KEYS)
    hello = WorkerHello(
        worker=own, role=Role.CLIENT, node_id="x" * MAX_HELLO_BYTES, host="h", pid=1,
        layout_fingerprint="", block_tokens=1, num_blocks=0,
    )  # fmt: skip
    client.send(server.address, most)
    assert receive(server, 1) == [most]
    client.send(server.address, hello)
    long = PutStart(writer=own, ticket=3, keys=[], tenant="x" * MAX_CLIENT_BYTES)
    client.send(server.address, long)
    client.send(server.address, PutStart(writer=own, ticket=2, keys=[]))
    assert receive(server, 1)[0].ticket == 2
    assert server.counters.num_refused == 2
    limits = MAX_HELLO_BYTES, MAX_CLIENT_BYTES
    for limit, refused in zip(limits, receive(client, 2), strict=True):
        assert isinstance(refused, Refused)
        assert f"more than the {limit} that" in refused.reason


def test_what_a_client_sends_that_is_far_too_long_is_not_read(
    open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it takes longer than sending it, and what waits here fills the memory."""
    read: list[int] = []

    def reading(data: bytes, start: int = 0) -> AnyMessage:
        read.append(len(data))
        return decode(data, start)

    monkeypatch.setattr("mooncake.rpc.zmq_channel.decode", reading)
    credential = issue(SECRET, "etl", [CredentialRole.POOL_CLIENT])
    server, client = open_channel(), open_channel(credential=credential)
    own = client_ref(credential, 1, client.address)
    long = PutStart(writer=own, ticket=1, keys=[], tenant="x" * MAX_ANSWERED_BYTES)
    client.send(server.address, long)
    client.send(server.address, PutStart(writer=own, ticket=2, keys=[]))
    assert receive(server, 1)[0].ticket == 2
    assert server.counters.num_refused == 1
    assert len(read) == 1
    assert read[0] < MAX_CLIENT_BYTES


def test_of_too_many_connections_of_one_client_the_oldest_is_hung_up(
    open_channel: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mooncake.rpc.zmq_channel.MAX_PER_CLIENT", 4)
    credential = issue(SECRET, "etl", [CredentialRole.POOL_CLIENT])
    server, worker = open_channel(), open_channel()
    worker.send(server.address, AbortTask(request_id="w", attempt=1))
    receive(server, 1)
    clients = [open_channel(credential=credential) for _ in range(6)]
    writer = client_ref(credential, 1, clients[0].address)
    for client in clients:
        for ticket in range(3):
            client.send(server.address, PutStart(writer=writer, ticket=ticket, keys=[]))
            receive(server, 1)
    hung_up = [each for each in caplog.messages if "etl has more than 4" in each]
    assert len(hung_up) >= 2
    worker.send(server.address, AbortTask(request_id="w", attempt=2))
    assert receive(server, 1) == [AbortTask(request_id="w", attempt=2)]


def test_connections_end_with_the_certificates_of_those_who_opened_them(
    open_channel: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of those who say nothing; not of those who have shown a newer one of the same keys."""
    clock, unix_s = ManualClock(), [100.0]
    server = open_channel(clock=clock, unix_time=lambda: unix_s[0])
    lapsing, renewed, lasting = (
        own_credential(
            issue(SECRET, name, [CredentialRole.GATEWAY], expires_s=expires_s).text,
            CredentialRole.GATEWAY,
        )
        for name, expires_s in (("lapsing", 200.0), ("renewed", 200.0), ("lasting", 0.0))
    )
    senders = [open_channel(credential=each) for each in (lapsing, renewed, lasting)]

    def look(*speaking: ZmqChannel) -> None:
        for number, sender in enumerate(speaking):
            sender.send(server.address, AbortTask(request_id=f"{number}", attempt=1))
            receive(server, 1)
        clock.advance_to(clock.now() + 2 * LOOK_S)
        server.receive()

    for _ in range(3):
        look(*senders)
    issued = certify(SECRET, "renewed", [CredentialRole.GATEWAY], renewed.keys.public)
    renewed.renew(Credential(renewed.keys.seed, issued.signed, issued.cluster).text)
    look(*senders)
    unix_s[0] = 201.0
    for _ in range(3):
        look(*senders[1:])
    hung_up = [each for each in caplog.messages if "connection was closed" in each]
    assert len(hung_up) == 1
    assert "'lapsing' has expired" in hung_up[0]
    server._credential.renew("another secret")
    for _ in range(3):
        clock.advance_to(clock.now() + 2 * LOOK_S)
        server.receive()
    hung_up = [each for each in caplog.messages if "is no longer valid" in each]
    assert len(hung_up) == 2


def is_open(sock: socket.socket) -> bool:
    """Whether the other side has not hung up; what it has said is dropped."""
    try:
        while sock.recv(4096, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False

"""Who listens at an address, over real sockets: gateways of this and of another cluster, programs
that are none, and nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from mooncake.base import SystemIds, WorkerRef
from mooncake.base.messages import AskCluster
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.rpc.listeners import Listener, who_listens
from mooncake.rpc.zmq_channel import ZmqChannel
from tests.support.relay import Relay
from tests.support.waiting import LONG_S

QUESTION = AskCluster(asker=WorkerRef("w", "e", "tcp://127.0.0.1:1"), ticket=0)


def look(address: str, limit_s: float = LONG_S, secret: str = "ours") -> Listener:
    credential = own_credential(secret, CredentialRole.WORKER)
    return who_listens([address], credential, QUESTION, limit_s)[address]


@contextlib.contextmanager
def gateway(secret: str, *, is_typed: bool) -> Iterator[ZmqChannel]:
    """A gateway that hears all and answers nothing."""
    credential, ended = own_credential(secret, CredentialRole.GATEWAY), threading.Event()

    def hear() -> None:
        while not ended.is_set():
            select.select([channel], [], [], 0.05)
            channel.receive()

    with contextlib.closing(ZmqChannel(credential=credential, is_typed=is_typed)) as channel:
        thread = threading.Thread(target=hear)
        thread.start()
        try:
            yield channel
        finally:
            ended.set()
            thread.join()


@contextlib.contextmanager
def program(act: Callable[[socket.socket], object]) -> Iterator[str]:
    """The address of a program that is no gateway: `act` is done to each connection."""
    with contextlib.ExitStack() as opened:
        port = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    link = opened.enter_context(port.accept()[0])
                    with contextlib.suppress(OSError):
                        act(link)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port.getsockname()[1]}"
        finally:
            port.shutdown(socket.SHUT_RDWR)
            thread.join()


def refuses(link: socket.socket) -> None:
    """Answer as an HTTP server does."""
    link.recv(1000)
    link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    link.close()


@pytest.mark.parametrize("is_typed", [True, False])
def test_a_gateway_of_another_cluster_is_told_from_silence(is_typed: bool) -> None:
    with gateway("theirs", is_typed=is_typed) as theirs:
        assert look(theirs.address) is Listener.STRANGER
        assert theirs.counters.num_received == 0


@pytest.mark.parametrize("secret", ["ours", "ours\ntheirs", "theirs\nours"])
def test_a_gateway_whose_key_is_known_is_one(secret: str) -> None:
    with gateway("ours", is_typed=True) as ours:
        assert look(ours.address, secret=secret) is Listener.GATEWAY


def test_a_gateway_that_does_not_hang_up_is_one() -> None:
    """Nothing else says that it took the question, so the look lasts its whole time."""
    with gateway("ours", is_typed=False) as ours:
        end_s, found = time.monotonic() + LONG_S, Listener.NOBODY
        while found is Listener.NOBODY and time.monotonic() < end_s:  # a busy machine takes longer
            found = look(ours.address, limit_s=0.5)
        assert found is Listener.GATEWAY


def test_a_gateway_that_has_another_key_now_is_a_stranger() -> None:
    with gateway("ours", is_typed=False) as ours:
        place = ours.address.partition("#")[0]
        assert look(f"{place}#{'ab' * 32}") is Listener.STRANGER


def test_a_gateway_that_ends_during_the_look_and_comes_back_is_no_stranger() -> None:
    with (
        gateway("ours", is_typed=True) as ours,
        contextlib.closing(Relay(lambda: next(targets))) as relay,
    ):
        port = int(ours.address.rpartition(":")[2])
        targets = itertools.chain([None], itertools.repeat(("127.0.0.1", port)))
        assert look(f"tcp://127.0.0.1:{relay.port}") is Listener.GATEWAY
        assert len(relay.connections) == 3


@pytest.mark.parametrize("act", [refuses, socket.socket.close])
def test_a_program_that_hangs_up_is_no_gateway(act: Callable[[socket.socket], object]) -> None:
    with program(act) as address:
        assert look(address) is Listener.NOBODY
        assert look(f"{address}#{'ab' * 32}") is Listener.NOBODY


def test_one_that_says_nothing_is_waited_for_in_vain() -> None:
    with program(lambda link: None) as address:
        assert look(address, limit_s=0.3) is Listener.NOBODY


def test_sockets_that_want_no_keys_are_no_gateway() -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as plain:
        port = plain.bind_to_random_port("tcp://127.0.0.1")
        assert look(f"tcp://127.0.0.1:{port}") is Listener.NOBODY


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://a name:1", "tcp://[::1]:1#zz"])
def test_where_nobody_can_be_the_look_ends_at_once(address: str) -> None:
    assert look(address) is Listener.NOBODY


def test_all_addresses_are_looked_at_together() -> None:
    ids = SystemIds()
    with gateway("ours", is_typed=True) as ours, gateway(ids.hex(8), is_typed=True) as theirs:
        credential = own_credential("ours", CredentialRole.WORKER)
        addresses = [ours.address, theirs.address, "tcp://127.0.0.1:1"]
        assert who_listens(addresses, credential, QUESTION, LONG_S) == {
            ours.address: Listener.GATEWAY,
            theirs.address: Listener.STRANGER,
            "tcp://127.0.0.1:1": Listener.NOBODY,
        }

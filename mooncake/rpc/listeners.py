"""Finds out who listens where a gateway should be. A process that got no answer there asks once.

Opens sockets of its own for as long as it looks. Decides nothing: its caller says what it means.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import time
from collections.abc import Sequence

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from mooncake.base.pool_messages import AnyMessage
from mooncake.identity.credential import Credential
from mooncake.rpc.codec import encode, head_of

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_SIGNATURE_AND_VERSION = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0"
"""The beginning of a greeting. The other side answers it with its own mechanism, and waits."""
_GREETING_BYTES = 64


class Listener(enum.Enum):
    """The process that listens at an address."""

    NOBODY = "nobody"
    """Nobody, another program, or a host that says nothing."""
    STRANGER = "stranger"
    """A process of another cluster, or another one than the key in the address is of."""
    GATEWAY = "gateway"
    """One that has proven the key that was expected, and has not hung up."""


def who_listens(
    addresses: Sequence[str], credential: Credential, question: AnyMessage, limit_s: float
) -> dict[str, Listener]:
    """Return who listens at each "tcp://HOST:PORT" or "tcp://HOST:PORT#KEY" within `limit_s`. HOST
    is a number: names are not resolved here.

    Without a KEY a gateway proves the key of the cluster, which another cluster's has not: it hangs
    up while keys are exchanged, without a reason. Any program may hang up, so a second connection
    reads how it greets. With a KEY anybody may connect, and the gateway hangs up when `question`
    comes with a foreign certificate. A gateway also hangs up when it ends, so strangers are looked
    at a second time, for `limit_s` again: one that was only started again then proves its key.
    """
    found = _looked_at(addresses, credential, question, limit_s)
    strangers = [address for address, who in found.items() if who is Listener.STRANGER]
    return found | _looked_at(strangers, credential, question, limit_s)


def _looked_at(
    addresses: Sequence[str], credential: Credential, question: AnyMessage, limit_s: float
) -> dict[str, Listener]:
    with contextlib.closing(_Look(credential, question)) as look:
        for address in addresses:
            look.begin(address)
        look.wait(limit_s)
        return {address: look.found(address, limit_s) for address in addresses}


class _Look:
    """The connections of one look, and what has become of them. Owns their ZeroMQ context."""

    def __init__(self, credential: Credential, question: AnyMessage) -> None:
        self._credential = credential
        self._question = encode(question, head_of(credential.signed))
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._opened: list[zmq.Socket[bytes]] = []
        self._waiting: dict[zmq.Socket[bytes], tuple[zmq.Socket[bytes], str]] = {}
        """Connections and their addresses, by the sockets that tell of them."""
        self._proven: set[str] = set()
        self._failed: set[str] = set()

    def close(self) -> None:
        for each in self._opened:
            each.close(linger=0)
        self._context.destroy(linger=0)

    def begin(self, address: str) -> None:
        """Connect to an address, for each key that it may have."""
        plain, _, key = address.partition("#")
        clusters = self._credential.clusters
        try:
            keys = [bytes.fromhex(key)] if key else [each.channel_key for each in clusters]
        except ValueError:
            return
        if not _is_number(plain):
            return
        for each in keys:
            with contextlib.suppress(zmq.ZMQError, ValueError):
                self._connect(address, plain, each)

    def _connect(self, address: str, plain: str, key: bytes) -> None:
        link = self._context.socket(zmq.PUSH)
        self._opened.append(link)
        link.setsockopt(zmq.RECONNECT_IVL, -1)
        link.setsockopt(zmq.IPV6, int("[" in plain))
        set_keys(link, self._credential, key)
        told = link.get_monitor_socket(_EVENTS)
        self._opened.append(told)
        self._waiting[told] = link, address
        self._poller.register(told, zmq.POLLIN)
        link.connect(plain)

    def wait(self, limit_s: float) -> None:
        """Wait until each connection has succeeded or failed, or the time is over."""
        end_s = time.monotonic() + limit_s
        while self._waiting and (left_s := end_s - time.monotonic()) > 0:
            for told, _ in self._poller.poll(int(1000 * left_s) + 1):
                if self._is_over(told, parse_monitor_message(told.recv_multipart())["event"]):
                    self._poller.unregister(told)
                    del self._waiting[told]

    def _is_over(self, told: zmq.Socket[bytes], event: int) -> bool:
        """Take in what has become of a connection; return whether nothing more is to be learnt."""
        link, address = self._waiting[told]
        if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failed.add(address)
            return True
        self._proven.add(address)
        if "#" not in address:
            return True
        with contextlib.suppress(zmq.ZMQError):  # it has hung up already, which is told next
            link.send(self._question, zmq.NOBLOCK)
        return False

    def found(self, address: str, limit_s: float) -> Listener:
        """Return who listens; one that has failed to prove a key is read for `limit_s` at most."""
        if address in self._proven:
            is_refused = "#" in address and address in self._failed
            return Listener.STRANGER if is_refused else Listener.GATEWAY
        if address in self._failed and _wants_keys(address, limit_s):
            return Listener.STRANGER
        return Listener.NOBODY


def set_keys(link: zmq.Socket[bytes], credential: Credential, peer_key: bytes) -> None:
    """Have `link` prove the key of `credential`, to a peer alone that has proven `peer_key`."""
    link.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(peer_key))
    link.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(credential.certificate.channel_key))
    link.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(credential.channel_seed))


def _wants_keys(address: str, limit_s: float) -> bool:
    """Return whether a port greets as ZeroMQ does where keys are needed (ZMTP 3.0)."""
    host, _, port = address.partition("#")[0].removeprefix("tcp://").rpartition(":")
    end_s, greeting = time.monotonic() + limit_s, b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host.strip("[]"), int(port)), limit_s) as link,
    ):
        link.sendall(_SIGNATURE_AND_VERSION)
        while len(greeting) < _GREETING_BYTES and (left_s := end_s - time.monotonic()) > 0:
            link.settimeout(left_s)
            if not (part := link.recv(_GREETING_BYTES - len(greeting))):
                break
            greeting += part
    return greeting[:1] + greeting[9:10] == b"\xff\x7f" and greeting[12:32].strip(b"\0") == b"CURVE"


def _is_number(address: str) -> bool:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return bool(socket.getaddrinfo(host.strip("[]"), port, flags=flags))
    except (OSError, ValueError):
        return False

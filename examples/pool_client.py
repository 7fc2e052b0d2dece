"""Keep blocks in Mooncake's KVCache pool without Mooncake: docs/pool-protocol.md in plain Python.

    pip install pyzmq msgspec cryptography
    mooncake credential --role pool-client --tenant acme --out acme.key
    python pool_client.py http://127.0.0.1:8100 acme.key put greeting <FILE
    python pool_client.py http://127.0.0.1:8100 acme.key find greeting
    python pool_client.py http://127.0.0.1:8100 acme.key get greeting >FILE

The standard library has no ZeroMQ, MessagePack, Ed25519, X25519 and AES-GCM: hence the packages.
Addresses are IPv4 here. A block is put or got within seconds, so this client need not join.
"""

from __future__ import annotations

import base64
import hmac
import itertools
import json
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import zmq
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec.msgpack import decode, encode
from zmq.auth import CURVE_ALLOW_ANY
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

PATIENCE_S = 30
"""How long anything may take. Who computes a block sooner gives up sooner: 10 s are usual."""


class PoolError(Exception):
    """The node refuses, does not answer, or does not prove that it is of our cluster."""


class Credential:
    """Who we are: a certificate that the cluster has signed, and the private keys to it."""

    def __init__(self, text: str) -> None:
        seed, self.signed, own, others, *_ = decode(base64.b64decode(text.strip().split(":")[1]))
        self.trusted = [signing_key for signing_key, *_ in (own, *others)]
        self.channel_secret = hmac.digest(b"mooncake channel key", seed, "sha256")
        signing_secret = hmac.digest(b"mooncake signing key", seed, "sha256")
        self.sign = Ed25519PrivateKey.from_private_bytes(signing_secret).sign
        _, _, self.tenant, _, self.channel_key, *_ = decode(self.signed[64:])

    def check(self, signed: bytes) -> tuple[bytes, bytes]:
        """Return the channel key and the signing key in the certificate of a worker."""
        certified = b"mooncake certificate 1 " + signed[64:]
        if any(verify(key, signed[:64], certified) for key in self.trusted):
            _, roles, _, expires_s, channel_key, signing_key, *_ = decode(signed[64:])
            if "worker" in roles and not 0 < expires_s <= time.time():
                return channel_key, signing_key
        raise PoolError("the peer is no worker of this cluster")

    def key_of(self, name: str) -> bytes:
        """Return the key of a block; a client of one tenant may name only keys with its mark."""
        if self.tenant is None:
            return blake2b(name.encode(), digest_size=16).digest()
        mark = blake2b(self.tenant.encode(), digest_size=6, person=b"mooncake-tenant").digest()
        return blake2b(name.encode(), digest_size=10).digest() + mark


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "little") + message


def verify(key: bytes, signature: bytes, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except InvalidSignature:
        return False
    return True


def locate(url: str, credential: Credential) -> dict[str, Any]:
    """Ask a node's HTTP port for its address and the size of its blocks, by a signed request."""
    path, given = "/v1/pool/stats", dict[str, str]()
    for _ in range(2):
        try:
            with urlopen(Request(url + path, headers=given), timeout=PATIENCE_S) as reply:
                return dict(json.load(reply))
        except HTTPError as error:
            problem = error.read().decode()
            challenge = error.headers.get("WWW-Authenticate", "no challenge").split()[1]
            nonce = secrets.token_hex(16)
            asked = f"GET {path} {challenge} {nonce}".encode()
            proof = credential.signed, credential.sign(b"mooncake admin request\0" + asked)
            shown = [base64.urlsafe_b64encode(each).decode() for each in proof]
            given["Authorization"] = " ".join(["Mooncake", challenge, nonce, *shown])
    raise PoolError(f"{url} refuses: {problem}")


class Seals:
    """What protects the bytes of one direction of a connection; the node decides how."""

    def __init__(self, protection: str, key: bytes) -> None:
        self.protection, self.gcm, self.number = protection, AESGCM(key), 0
        self.tag_bytes = 0 if protection == "none" else 16

    def pass_on(self, chunks: Sequence[bytes], *, payload: bool = False, opens: bool) -> bytes:
        """Seal, or open, the next message: the chunks of a payload, or a single other one."""
        self.number += 1
        passed = []
        for index, chunk in enumerate(chunks, int(payload)):
            nonce = self.number.to_bytes(8, "little") + index.to_bytes(4, "little")
            if payload and self.protection == "encrypt":
                change = self.gcm.decrypt if opens else self.gcm.encrypt
                passed.append(change(nonce, chunk, None))
            elif not self.tag_bytes:
                passed.append(chunk)
            elif opens:
                self.gcm.decrypt(nonce, chunk[-16:], chunk[:-16])  # InvalidTag: altered on its way
                passed.append(chunk[:-16])
            else:
                passed.append(chunk + self.gcm.encrypt(nonce, b"", chunk))
        return b"".join(passed)


def cuts(num_bytes: int) -> list[int]:
    """Return the lengths of a payload's chunks: 1 MiB; of 256 KiB or more, 64 KiB go first."""
    ahead = 2**16 if num_bytes >= 2**18 else 0
    ends = [*range(ahead, num_bytes, 2**20), num_bytes]
    return [ahead] * bool(ahead) + [stop - start for start, stop in itertools.pairwise(ends)]


class DataPath:
    """A connection to the memory of a node, by which blocks are read and written."""

    def __init__(self, credential: Credential, engine_id: str, endpoint: str) -> None:
        host, port = endpoint.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.close, self.stream = self.socket.close, self.socket.makefile("rb")
        drawn = X25519PrivateKey.generate()
        hello = encode({
            "type": "hello", "version": 4, "engine_id": secrets.token_hex(8),
            "wanted_engine_id": engine_id, "connection_id": secrets.token_hex(8),
            "nonce": secrets.token_bytes(32), "fenced": [], "certificate": credential.signed,
            "exchange": drawn.public_key().public_bytes_raw(),
        })  # fmt: skip
        answer = self.shake(hello)
        transcript = framed(hello) + framed(answer)
        challenge = decode(answer)
        _, owner_key = credential.check(challenge["certificate"])
        proof = credential.sign(b"mooncake transfer 3 visitor" + transcript)
        welcome = decode(self.shake(encode({"type": "proof", "signature": proof})))
        if not verify(owner_key, welcome["signature"], b"mooncake transfer 3 owner" + transcript):
            raise PoolError("the node has not the keys of its certificate")
        agreed = drawn.exchange(X25519PublicKey.from_public_bytes(challenge["exchange"]))
        keys = HKDF(SHA256(), 64, transcript, b"mooncake transfer 2 keys").derive(agreed)
        self.sent, self.received = (
            Seals(challenge["protection"], key) for key in (keys[:32], keys[32:])
        )

    def read(self, num_bytes: int) -> bytes:
        data = self.stream.read(num_bytes)
        if len(data) < num_bytes:
            raise PoolError("the node hung up")
        return data

    def shake(self, message: bytes) -> bytes:
        """Send a message of the handshake; return the answer."""
        self.socket.sendall(framed(message))
        answer = self.read(int.from_bytes(self.read(4), "little"))
        if decode(answer)["type"] == "refusal":
            raise PoolError(f"the node refuses: {decode(answer)['reason']}")
        return answer

    def receive(self, *lengths: int, payload: bool = False) -> bytes:
        sealed = [self.read(length + self.received.tag_bytes) for length in lengths]
        return self.received.pass_on(sealed, payload=payload, opens=True)

    def move(self, place: tuple[int, int, int], grant: int = 0, data: bytes = b"") -> bytes:
        """Write `data` to a place (region, offset, bytes); without data, return what lies there."""
        kind, lengths = (1 if data else 2), cuts(place[2])
        head = struct.pack("<BBHQQQQQQ", kind, 3, 1, 1, place[2], grant, *place)
        self.socket.sendall(self.sent.pass_on([head], opens=False))
        if data:
            ends = [0, *itertools.accumulate(lengths)]
            chunks = [data[start:stop] for start, stop in itertools.pairwise(ends)]
            self.socket.sendall(self.sent.pass_on(chunks, payload=True, opens=False))
        kind, _, _, _, num_bytes, _ = struct.unpack("<BBHQQQ", self.receive(28))
        if kind == 5:
            raise PoolError(f"the node refuses: {self.receive(num_bytes).decode()}")
        return b"" if kind == 3 else self.receive(*lengths, payload=True)


class Pool:
    """One node: a socket to it, and one at which it answers. Names itself a client each time."""

    def __init__(self, url: str, credential: Credential) -> None:
        told = locate(url, credential)
        self.block_bytes, self.credential = told["block_bytes"], credential
        address, _, node_key = told["address"].partition("#")
        host, port = address.removeprefix("tcp://").split(":")
        with socket.socket(type=socket.SOCK_DGRAM) as probe:  # our address on the way to the node
            probe.connect((host, int(port)))
            own_host = probe.getsockname()[0]
        self.context = zmq.Context()
        self.door = ThreadAuthenticator(self.context)  # has each frame name its sender's key
        self.door.start()
        self.door.configure_curve(location=CURVE_ALLOW_ANY)
        self.inbox, self.outbox = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        self.inbox.setsockopt(zmq.CURVE_SERVER, 1)
        self.inbox.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(credential.channel_secret))
        self.inbox.bind(f"tcp://{own_host}:*")
        self.outbox.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(credential.channel_secret))
        self.outbox.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(credential.channel_key))
        self.outbox.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(bytes.fromhex(node_key)))
        self.outbox.connect(address)
        own_key = credential.channel_key.hex()
        own_address = f"{self.inbox.getsockopt_string(zmq.LAST_ENDPOINT)}#{own_key}"
        own_id = f"client-{own_key[:12]}-{secrets.token_hex(4)}"
        self.me, self.tickets = [own_id, secrets.token_hex(8), own_address], itertools.count(1)

    def close(self) -> None:
        self.door.stop()
        self.inbox.close(linger=0)
        self.outbox.close(linger=5000)
        self.context.term()

    def tell(self, kind: str, **fields: Any) -> None:
        signed = self.credential.signed
        head = b"\x4d\x06" + len(signed).to_bytes(2, "little") + signed
        self.outbox.send(head + encode({"type": kind, **fields}))

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Ask again and again, with the same ticket, until the answer comes."""
        for _ in range(PATIENCE_S):
            self.tell(kind, **fields)
            while self.inbox.poll(1000):
                answer = self.opened(self.inbox.recv(copy=False))
                if (answer.get("asker"), answer.get("ticket")) == (self.me, fields["ticket"]):
                    if answer["type"] == "refused":
                        raise PoolError(f"the node refuses: {answer['reason']}")
                    return answer
        raise PoolError("the node does not answer")

    def opened(self, frame: zmq.Frame) -> dict[str, Any]:
        """Return a message of a worker of this cluster. Raises PoolError: it is another's."""
        data = frame.bytes
        stop = 4 + int.from_bytes(data[2:4], "little")
        channel_key, _ = self.credential.check(data[4:stop])
        if data[:2] != b"\x4d\x06" or frame.get("User-Id") != z85.encode(channel_key).decode():
            raise PoolError("a message of another version, or with another's certificate")
        return dict(decode(data[stop:]))

    def find(self, key: bytes) -> str | None:
        """Return the tier in which the node has a block."""
        [tier] = self.ask("find", asker=self.me, ticket=next(self.tickets), keys=[key])["tiers"]
        return tier

    def put(self, key: bytes, data: bytes) -> bool:
        """Store a block; False: the node has it already, or has no room."""
        put: dict[str, Any] = {"writer": self.me, "ticket": next(self.tickets)}
        end = {"dropped": [key]}
        try:
            tenant = self.credential.tenant or ""
            granted = self.ask("put_start", **put, keys=[key], tenant=tenant)
            if granted["keys"]:
                self.move(granted["places"], data.ljust(self.block_bytes, b"\0"))
            end = {"written": granted["keys"]}
        finally:  # what was granted is given back, whatever failed
            self.tell("put_end", **put, **end)
        return bool(end["written"])

    def get(self, key: bytes) -> bytes | None:
        """Return a block; None: whatever fails is a miss."""
        pin: dict[str, Any] = {"reader": self.me, "ticket": next(self.tickets)}
        try:
            pinned = self.ask("pin", **pin, keys=[key])
            return self.move(pinned["places"]) if pinned["num_blocks"] else None
        except (PoolError, InvalidTag, OSError):
            return None
        finally:
            self.tell("unpin", **pin)

    def move(self, places: Any, data: bytes = b"") -> bytes:
        (engine_id, endpoints, *_), region, _, [offset, *_], grant, *_ = places
        with closing(DataPath(self.credential, engine_id, endpoints["tcp"])) as path:
            return path.move((region, offset, self.block_bytes), grant, data)


def main(url: str, credential_file: str, verb: str, name: str) -> None:
    """Do one thing with the block of that name. A miss, or no room, ends with exit code 1."""
    credential = Credential(Path(credential_file).read_text())
    with closing(Pool(url, credential)) as pool:
        key = credential.key_of(name)
        if verb == "get":
            sys.stdout.buffer.write(pool.get(key) or sys.exit("a miss"))
            return
        if verb == "put":
            data = sys.stdin.buffer.read(pool.block_bytes + 1)
            if not 0 < len(data) <= pool.block_bytes:
                sys.exit(f"a block of this pool has 1 to {pool.block_bytes} bytes")
            if not pool.put(key, data):
                sys.exit(f"not stored: the pool has {name} already, or has no room")
        print(pool.find(key) or sys.exit("a miss"))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (PoolError, OSError) as error:
        sys.exit(str(error))

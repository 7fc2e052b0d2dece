"""Keep blocks in Mooncake's KVCache pool without Mooncake: docs/pool-protocol.md in plain Python.

    pip install msgspec cryptography
    mooncake credential --role pool-client --tenant acme --out acme.key
    python pool_client.py http://127.0.0.1:8100 acme.key put greeting <FILE
    python pool_client.py http://127.0.0.1:8100 acme.key find greeting
    python pool_client.py http://127.0.0.1:8100 acme.key get greeting >FILE

The standard library has no MessagePack, Ed25519, X25519 and AES-GCM: hence the packages. Addresses
are IPv4 here. A block is put or got within seconds, so this client need not join.
"""

import base64
import hmac
import json
import secrets
import socket
import struct
import sys
import time
from contextlib import ExitStack, closing
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec.msgpack import decode, encode

PATIENCE_S = 30
"""How long anything may take. Who computes a block sooner gives up sooner: 10 s are usual."""
PIECE = 2**17
"""Bytes that move at a time: a payload of less than 256 KiB is one chunk."""
WRITE, READ, REFUSED, ASK = 1, 2, 5, 6
HEAD = b"\x4d\x06\0\0"
"""What each message begins with."""


class PoolError(Exception):
    """The node refuses, hangs up, or does not prove that it is of our cluster."""


def verify(key: bytes, signature: bytes, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except InvalidSignature:
        return False
    return True


class Credential:
    """Who we are: a certificate that the cluster has signed, and the private key to it."""

    def __init__(self, text: str) -> None:
        seed, self.signed, own, others, *_ = decode(base64.b64decode(text.strip().split(":")[1]))
        self.trusted = [signing_key for signing_key, *_ in (own, *others)]
        secret = hmac.digest(b"mooncake signing key", seed, "sha256")
        self.sign = Ed25519PrivateKey.from_private_bytes(secret).sign
        _, _, self.tenant, _, channel_key, *_ = decode(self.signed[64:])
        name = f"client-{channel_key.hex()[:12]}-{secrets.token_hex(4)}"
        self.me = [name, secrets.token_hex(8), f"#{channel_key.hex()}"]

    def owner_key(self, signed: bytes) -> bytes:
        """Return the signing key in the certificate of a worker of our cluster."""
        certified = b"mooncake certificate 1 " + signed[64:]
        _, roles, _, expires_s, _, signing_key, *_ = decode(signed[64:])
        is_trusted = any(verify(key, signed[:64], certified) for key in self.trusted)
        if not is_trusted or "worker" not in roles or 0 < expires_s <= time.time():
            raise PoolError("the peer is no worker of this cluster")
        return bytes(signing_key)

    def key_of(self, name: str) -> bytes:
        """Return the key of a block: the client of a tenant names only keys with its mark."""
        mark = blake2b(self.tenant.encode(), digest_size=6, person=b"mooncake-tenant").digest()
        return blake2b(name.encode(), digest_size=10).digest() + mark


class Seals:
    """What protects the bytes of one direction of a connection; the node decides how."""

    def __init__(self, protection: str, key: bytes) -> None:
        self.hides, self.gcm, self.number = protection == "encrypt", AESGCM(key), 0
        self.tag_bytes = 0 if protection == "none" else 16

    def nonce(self, chunk: int) -> bytes:
        self.number += 1
        return self.number.to_bytes(8, "little") + chunk.to_bytes(4, "little")

    def seal(self, shown: bytes, secret: bytes = b"", chunk: int = 0) -> bytes:
        if not self.hides:
            shown, secret = shown + secret, b""
        tag = self.gcm.encrypt(self.nonce(chunk), secret, shown) if self.tag_bytes else b""
        return shown + tag

    def open(self, sealed: bytes, num_shown: int = 0, chunk: int = 0) -> bytes:
        """Return what was sealed. Raises InvalidTag: it was altered on its way."""
        stop = num_shown if self.hides else len(sealed) - self.tag_bytes
        shown, rest = sealed[:stop], sealed[stop:]
        return shown + (self.gcm.decrypt(self.nonce(chunk), rest, shown) if rest else b"")


class Pool:
    """A connection to one node, by which it is asked, and its memory read and written."""

    def __init__(self, url: str, credential: Credential) -> None:
        with urlopen(url + "/v1/pool/address", timeout=PATIENCE_S) as reply:
            told = json.load(reply)
        engine_id, endpoints, *_ = told["segment"]
        self.block_bytes, self.credential, self.ticket = told["block_bytes"], credential, 0
        host, port = endpoints["tcp"].split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.stream = self.socket.makefile("rb")
        with ExitStack() as failed:
            failed.callback(self.close)
            self.prove(engine_id)
            failed.pop_all()

    def close(self) -> None:
        self.stream.close()
        self.socket.close()

    def prove(self, engine_id: str) -> None:
        """Let both sides prove who they are, and agree on the keys of the connection."""
        drawn, own, self.transcript = X25519PrivateKey.generate(), self.credential, b""
        challenge = self.shake(
            type="hello", version=4, engine_id=secrets.token_hex(8), wanted_engine_id=engine_id,
            connection_id=secrets.token_hex(8), nonce=secrets.token_bytes(32), fenced=[],
            certificate=own.signed, exchange=drawn.public_key().public_bytes_raw(),
        )  # fmt: skip
        transcript, owner_key = self.transcript, own.owner_key(challenge["certificate"])
        proof = own.sign(b"mooncake transfer 3 visitor" + transcript)
        welcome = self.shake(type="proof", signature=proof)
        if not verify(owner_key, welcome["signature"], b"mooncake transfer 3 owner" + transcript):
            raise PoolError("the node has not the keys of its certificate")
        agreed = drawn.exchange(X25519PublicKey.from_public_bytes(challenge["exchange"]))
        keys = HKDF(SHA256(), 64, transcript, b"mooncake transfer 2 keys").derive(agreed)
        self.sent = Seals(challenge["protection"], keys[:32])
        self.received = Seals(challenge["protection"], keys[32:])

    def shake(self, **message: Any) -> Any:
        """Send a message of the handshake, and return the answer."""
        sent = encode(message)
        self.socket.sendall(len(sent).to_bytes(4, "little") + sent)
        length = self.take(4)
        data = self.take(int.from_bytes(length, "little"))
        self.transcript += len(sent).to_bytes(4, "little") + sent + length + data
        answer = decode(data)
        if answer["type"] == "refusal":
            raise PoolError(f"the node refuses: {answer['reason']}")
        return answer

    def take(self, num_bytes: int) -> bytes:
        data = self.stream.read(num_bytes)
        if len(data) < num_bytes:
            raise PoolError("the node hung up")
        return data

    def receive(self, num_bytes: int, num_shown: int = 0, chunk: int = 0) -> bytes:
        return self.received.open(self.take(num_bytes + self.received.tag_bytes), num_shown, chunk)

    def request(self, *request: bytes) -> int:
        """Send a request. Return the last number in the header of its answer."""
        self.socket.sendall(b"".join(request))
        kind, _, _, _, length, last = struct.unpack("<BBHQQQ", self.receive(28, 28))
        if kind == REFUSED:
            raise PoolError(f"the node refuses: {self.receive(length).decode()}")
        return int(last)

    def ask(self, kind: str, **fields: Any) -> Any:
        """Return the answer to a message."""
        question = HEAD + encode({"type": kind, **fields})
        head = struct.pack("<BBHQQQ", ASK, 3, 0, 1, len(question), 0)
        return decode(self.receive(self.request(self.sent.seal(head, question)))[len(HEAD) :])

    def write(self, region: int, offset: int, grant: int, data: bytes) -> None:
        size = len(data)
        head = struct.pack("<BBHQQQQQQ", WRITE, 3, 1, 1, size, grant, region, offset, size)
        self.request(self.sent.seal(head), self.sent.seal(b"", data, 1))

    def read(self, region: int, offset: int, size: int) -> bytes:
        head = struct.pack("<BBHQQQQQQ", READ, 3, 1, 1, size, 0, region, offset, size)
        self.request(self.sent.seal(head))
        return self.receive(size, chunk=1)

    def begin(self, role: str) -> dict[str, Any]:
        """Return who asks in that role, and a new ticket."""
        self.ticket += 1
        return {role: self.credential.me, "ticket": self.ticket}

    def find(self, key: bytes) -> str | None:
        """Return the tier in which the node has a block."""
        [tier] = self.ask("find", **self.begin("asker"), keys=[key])["tiers"]
        return tier

    def put(self, key: bytes, data: bytes) -> bool:
        """Store a block; False: the node has it already, or has no room."""
        put = self.begin("writer")
        granted = self.ask("put_start", **put, keys=[key], tenant=self.credential.tenant)
        if not granted["keys"]:
            return False
        _, region, _, [offset], grant, *_ = granted["places"]
        data = data.ljust(self.block_bytes, b"\0")
        for start in range(0, len(data), PIECE):
            self.write(region, offset + start, grant, data[start : start + PIECE])
        self.ask("put_end", **put, written=[key])
        return True

    def get(self, key: bytes) -> bytes | None:
        """Return a block; None: whatever fails is a miss."""
        pin = self.begin("reader")
        try:
            pinned = self.ask("pin", **pin, keys=[key])
            if not pinned["num_blocks"]:
                return None
            (_, region, _, [offset], *_), stop = pinned["places"], self.block_bytes
            places = [(offset + n, min(PIECE, stop - n)) for n in range(0, stop, PIECE)]
            data = b"".join(self.read(region, *place) for place in places)
            self.ask("unpin", **pin)
        except (PoolError, InvalidTag, OSError):
            return None
        return data


def main(url: str, credential_file: str, verb: str, name: str) -> None:
    """Do one thing with the block of that name. A miss, or no room, ends with exit code 1."""
    credential = Credential(Path(credential_file).read_text())
    key = credential.key_of(name)
    with closing(Pool(url, credential)) as pool:
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

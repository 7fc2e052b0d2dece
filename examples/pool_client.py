"""Keep blocks in Mooncake's KVCache pool without Mooncake: docs/pool-protocol.md in plain Python.

With a credential of `mooncake credential --role pool-client --tenant acme --out acme.key`:

    with connected("http://127.0.0.1:8100", open("acme.key").read()) as pool:
        print(pool.put("greeting", b"hello"), pool.has("greeting"), pool.get("greeting"))
"""

import hmac
import secrets
import struct
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from socket import create_connection, socket
from typing import Any, BinaryIO
from urllib.request import urlopen

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import json, msgpack

PATIENCE_S = 30
PIECE = 2**17  # bytes that move at a time: a payload of less than 256 KiB is one chunk
WRITE, READ, DATA, REFUSED, ASK = 1, 2, 4, 5, 6
HEADER, HEAD = struct.Struct("<BBHQQQ"), struct.Struct("<BBHQQQQQQ")
MESSAGE = b"\x4d\x06\0\0"  # what each message begins with


@contextmanager
def connected(url: str, credential: str) -> Iterator["Pool"]:
    """Connect to the node with that --admin-port, and prove who we are."""
    node = json.decode(urlopen(f"{url}/v1/pool/address", timeout=PATIENCE_S).read())
    host, port = node["segment"][1]["tcp"].split(":")
    with create_connection((host, int(port)), PATIENCE_S) as sock, sock.makefile("rb") as stream:
        yield Pool(sock, stream, node, credential)


class Pool:
    """A connection to one node, by which we ask the node, and read and write its memory."""

    def __init__(self, sock: socket, stream: BinaryIO, node: Any, credential: str) -> None:
        """Have both sides prove who they are, and agree on the keys of the connection."""
        seed, signed, [cluster_key, *_], *_ = msgpack.decode(b64decode(credential.split(":")[1]))
        _, _, self.tenant, _, channel_key, *_ = msgpack.decode(signed[64:])
        name = f"client-{channel_key.hex()[:12]}-{secrets.token_hex(4)}"
        self.me = [name, secrets.token_hex(8), f"#{channel_key.hex()}"]
        self.sock, self.stream, self.said = sock, stream, b""
        self.block_bytes, self.num_sent, self.num_received = node["block_bytes"], 0, 0
        drawn = X25519PrivateKey.generate()
        challenge = self.shake(
            type="hello", version=4, engine_id=name, wanted_engine_id=node["segment"][0],
            connection_id=secrets.token_hex(8), nonce=secrets.token_bytes(32), fenced=[],
            certificate=signed, exchange=drawn.public_key().public_bytes_raw(), least="encrypt",
        )  # fmt: skip
        said, theirs = self.said, challenge["certificate"]
        certified = b"mooncake certificate 1 " + theirs[64:]
        Ed25519PublicKey.from_public_bytes(cluster_key).verify(theirs[:64], certified)
        _, roles, _, expires_s, _, owner_key, *_ = msgpack.decode(theirs[64:])
        if "worker" not in roles or 0 < expires_s <= time.time():
            raise ConnectionError("the peer is no worker of this cluster")
        own_key = hmac.digest(b"mooncake signing key", seed, "sha256")
        sign = Ed25519PrivateKey.from_private_bytes(own_key).sign
        welcome = self.shake(type="proof", signature=sign(b"mooncake transfer 3 visitor" + said))
        owner = Ed25519PublicKey.from_public_bytes(owner_key)
        owner.verify(welcome["signature"], b"mooncake transfer 3 owner" + said)
        agreed = drawn.exchange(X25519PublicKey.from_public_bytes(challenge["exchange"]))
        keys = HKDF(SHA256(), 64, said, b"mooncake transfer 2 keys").derive(agreed)
        self.sealed, self.opened = AESGCM(keys[:32]), AESGCM(keys[32:])

    def shake(self, **message: Any) -> Any:
        """Send a message of the handshake, and return the answer."""
        sent = msgpack.encode(message)
        self.sock.sendall(len(sent).to_bytes(4, "little") + sent)
        length = self.stream.read(4)
        data = self.stream.read(int.from_bytes(length, "little"))
        self.said += len(sent).to_bytes(4, "little") + sent + length + data
        answer = msgpack.decode(data)
        if answer["type"] == "refusal":
            raise ConnectionError(f"the node refuses: {answer['reason']}")
        return answer

    def send(self, shown: bytes, secret: bytes = b"", chunk: int = 0) -> None:
        """Send bytes that nobody may change, and some that nobody may read either."""
        self.num_sent += 1
        nonce = struct.pack("<QI", self.num_sent, chunk)
        self.sock.sendall(shown + self.sealed.encrypt(nonce, secret, shown))

    def receive(self, num_shown: int, num_secret: int = 0, chunk: int = 0) -> bytes:
        """Receive such bytes. Raises InvalidTag: they were changed, or the node hung up."""
        self.num_received += 1
        nonce = struct.pack("<QI", self.num_received, chunk)
        shown, secret = self.stream.read(num_shown), self.stream.read(num_secret + 16)
        return shown + self.opened.decrypt(nonce, secret, shown)

    def answer(self) -> bytes:
        """Return what follows the header of an answer."""
        kind, _, _, _, length, more = HEADER.unpack(self.receive(HEADER.size))
        rest = self.receive(0, length + more, int(kind == DATA)) if length + more else b""
        if kind == REFUSED:
            raise ConnectionError(f"the node refuses: {rest.decode()}")
        return rest

    def ask(self, kind: str, **fields: Any) -> Any:
        """Return the answer to a message."""
        question = MESSAGE + msgpack.encode({"type": kind, **fields})
        self.send(HEADER.pack(ASK, 3, 0, 1, len(question), 0), question)
        return msgpack.decode(self.answer()[len(MESSAGE) :])

    def key_of(self, name: str) -> bytes:
        """Return the key of a block: the client of a tenant names only keys with its mark."""
        mark = blake2b(self.tenant.encode(), digest_size=6, person=b"mooncake-tenant").digest()
        return blake2b(name.encode(), digest_size=10).digest() + mark

    def has(self, name: str) -> bool:
        """Return whether the node has a block, in any tier."""
        found = self.ask("find", asker=self.me, ticket=0, keys=[self.key_of(name)])
        return found["tiers"] != [None]

    def put(self, name: str, data: bytes) -> bool:
        """Store a block of at most `block_bytes`. False: the node has it already, or no room."""
        put, keys = {"writer": self.me, "ticket": secrets.randbits(60)}, [self.key_of(name)]
        granted = self.ask("put_start", **put, keys=keys, tenant=self.tenant)
        if granted["keys"]:
            _, region, _, [offset], grant, *_ = granted["places"]
            data = data.ljust(self.block_bytes, b"\0")
            for n in range(0, len(data), PIECE):
                size = min(PIECE, len(data) - n)
                self.send(HEAD.pack(WRITE, 3, 1, 1, size, grant, region, offset + n, size))
                self.send(b"", data[n : n + size], 1)
                self.answer()
            self.ask("put_end", **put, written=keys)
        return bool(granted["keys"])

    def get(self, name: str) -> bytes:
        """Return a block; nothing: a miss. Whatever this raises is a miss, too."""
        pin, data = {"reader": self.me, "ticket": secrets.randbits(60)}, b""
        pinned = self.ask("pin", **pin, keys=[self.key_of(name)])
        if pinned["num_blocks"]:
            _, region, _, [offset], *_ = pinned["places"]
            while size := min(PIECE, self.block_bytes - len(data)):
                self.send(HEAD.pack(READ, 3, 1, 1, size, 0, region, offset + len(data), size))
                data += self.answer()
            self.ask("unpin", **pin)
        return data

"""Targets: the frames of TCP transfers, at the owner of the memory and at its client."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.batches import Job, Part, Slice
from mooncake.transfer.engine import (
    Asked,
    AskEnded,
    AskerLeft,
    Op,
    Pieces,
    Region,
    TransferBatch,
    TransferOp,
)
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.net.control_link import pack_frame
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.net.handshake import ConnectingSide
from mooncake.transfer.net.io_loop import READABLE, WRITABLE
from mooncake.transfer.net.seals import Seals
from mooncake.transfer.regions import Gates, RegionTable
from mooncake.transfer.tcp import wire
from mooncake.transfer.tcp.connection import (
    Connection,
    ConnectionFailure,
    ConnectionLimits,
    ConnectionState,
)
from mooncake.transfer.tcp.frames import Outgoing
from mooncake.transfer.tcp.questions import Questions
from mooncake.transfer.tcp.server import ServerConnection, ServerLimits
from tests.support.fuzz.sockets import LoopStub, pair
from tests.support.fuzz.target import Target, pieces_of
from tests.support.fuzz.targets.messages import credentials, genuine_handshake

REGION_BYTES = 4096
MARGIN_BYTES = 4096
FIRST_REGION, UNKNOWN_REGION = 1, 7


class Memory:
    """Registered memory with bytes on both sides that nobody may touch."""

    def __init__(self) -> None:
        self._all = bytearray(b"\xee" * (REGION_BYTES + 2 * MARGIN_BYTES))
        inner = memoryview(self._all)[MARGIN_BYTES:-MARGIN_BYTES]
        self.table = RegionTable(Gates())
        self.region = self.table.register(inner, "memory")
        assert self.region.region_id == FIRST_REGION

    def check(self) -> None:
        """Check that nothing beside the region was written to."""
        margin = b"\xee" * MARGIN_BYTES
        assert self._all[:MARGIN_BYTES] == margin, "bytes before a region were written"
        assert self._all[-MARGIN_BYTES:] == margin, "bytes behind a region were written"


PROTECTIONS = tuple(Protection)


@dataclass(frozen=True)
class Stream:
    """What a peer sends after the handshake, sealed with the keys of the connection."""

    sent: bytes
    heads: list[range]
    """Where whole heads lie in it, without how many ranges they have: that is read first."""
    altered_at: int | None
    """Where a relay has changed a bit."""

    @property
    def head_is_altered(self) -> bool:
        return any(self.altered_at in head for head in self.heads)


def sealed(frames: Iterable[Frame], how: int, seals: Seals, least_bytes: int) -> Stream:
    """Seal `frames`, and change a bit of them where `how` says so; 0: nowhere. Heads of less than
    `least_bytes` are not whole.
    """
    sent, heads = bytearray(), []
    for messages, pieces in frames:
        shown, secret = messages[:-1], messages[-1]
        if not shown:  # a request: its question may be encrypted, its ranges are not
            stop = wire.HEADER_BYTES if secret[0] == wire.ASK else len(secret)
            shown, secret = [secret[:stop]], secret[stop:]
        else:
            shown = [*shown, b""]
        outgoing = Outgoing(shown, pieces, seals, secret)
        begin = len(sent)
        # How long a question is, too, is read before its tag.
        first = wire.HEADER_BYTES if messages[0][0] == wire.ASK else 4
        while not outgoing.is_sent:
            views = list(outgoing.views())
            sent += b"".join(views)
            outgoing.advance(sum(map(len, views)))
        if len(messages[0]) >= least_bytes:
            heads.append(range(begin + first, begin + len(messages[0]) + seals.num_tag_bytes))
    altered_at = (how - 1) * len(sent) // 85 if how and sent else None
    if altered_at is not None:
        sent[altered_at] ^= 0x10
    return Stream(bytes(sent), heads, altered_at)


Frame = tuple[list[bytes], list[memoryview]]
"""Messages, each with a tag of its own, and the pieces of a payload."""


def requests_of(data: bytes) -> Iterator[Frame]:
    """Return the requests in `data`, as far as they can be told apart; the rest is one message."""
    while len(data) >= wire.HEAD_BYTES:
        kind, _, num_ranges, _, num_bytes = struct.unpack_from("<BBHQQ", data)
        length = wire.HEADER_BYTES + wire.RANGE_BYTES * max(1, num_ranges)
        if kind == wire.ASK:
            length = wire.HEADER_BYTES + num_bytes
        if len(data) < length:
            data = data[: wire.HEAD_BYTES - 1]  # a head that is not whole
            break
        head, data = data[:length], data[length:]
        payload = memoryview(data[: num_bytes if kind == wire.WRITE else 0])
        data = data[len(payload) :]
        ranges = head[wire.HEADER_BYTES :]
        ranges = ranges[: len(ranges) // wire.RANGE_BYTES * wire.RANGE_BYTES]
        sizes = [size for _, _, size in wire.parse_ranges(memoryview(ranges))]
        pieces = []
        for size in sizes if kind != wire.ASK else ():
            pieces.append(payload[:size])
            payload = payload[size:]
        yield [head], [piece for piece in (*pieces, payload) if piece]
    if data:
        yield [data], []


def answers_of(data: bytes) -> Iterator[Frame]:
    """The same of answers."""
    while len(data) >= wire.HEADER_BYTES:
        kind, _, _, _, num_bytes, grant = struct.unpack_from("<BBHQQQ", data)
        head, data = data[: wire.HEADER_BYTES], data[wire.HEADER_BYTES :]
        answer = data[: {wire.TOLD: grant, wire.REFUSED: num_bytes}.get(kind, 0)]
        data = data[len(answer) :]
        more = data[: num_bytes if kind in (wire.DATA, wire.TOLD) else 0]
        data = data[len(more) :]
        messages = [head, answer] if kind in (wire.TOLD, wire.REFUSED) else [head]
        yield messages, [memoryview(more)] if more else []
    if data:
        yield [data], []


class Machine:
    """Answers the questions that the owner hears, as the first byte of each says."""

    def __init__(self, region: Region) -> None:
        self.questions = Questions()
        self._region = region
        self._heard: list[Asked | AskEnded | AskerLeft] = []
        self._open: set[int] = set()
        self._askers: set[int] = set()
        self.questions.hear(self._heard.append)

    def work(self) -> None:
        """Take what was heard."""
        while self._heard:
            event = self._heard.pop(0)
            if isinstance(event, Asked):
                self._open.add(event.number)
                self._askers.add(event.asker)
                self._begin(event)
            elif isinstance(event, AskEnded):
                self._open.remove(event.number)
            else:
                self._askers.remove(event.asker)

    def _begin(self, event: Asked) -> None:
        how = event.question[0] % 4
        if how == 0:
            self.questions.refuse(event.number, "no")
        else:
            pieces = Pieces([0] * (how - 1), 256)
            self.questions.answer(event.number, b"yes", self._region, pieces)

    def check(self) -> None:
        """Check that each question, and each connection that asked, has ended once."""
        self.work()
        assert not self._open
        assert not self._askers
        assert not self.questions.num_open


class TcpOwner(Target):
    """What a proven client asks of the owner. The first byte says how the rest is cut, the second
    how it is sealed, and where a relay changes a bit of it.
    """

    name = "tcp-owner"
    modules = (
        "mooncake.transfer.tcp.server", "mooncake.transfer.tcp.wire",
        "mooncake.transfer.tcp.frames", "mooncake.transfer.net.seals", "mooncake.transfer.regions",
    )  # fmt: skip
    max_bytes = 131_072
    tokens: ClassVar = tuple(
        number.to_bytes(8, "little")
        for number in (0, 1, 8, 24, REGION_BYTES, REGION_BYTES - 1, 2**32, 2**63, 2**64 - 1)
    )

    def __init__(self) -> None:
        self._memory = Memory()
        self._genuine = {each: genuine_handshake(each) for each in PROTECTIONS}

    def run(self, data: bytes) -> str:
        how, sealing = data[:2].ljust(2, b"\0")
        protection = PROTECTIONS[sealing % len(PROTECTIONS)]
        genuine = self._genuine[protection]
        stream = Stream(data[2:], [], None)
        if protection is not Protection.NONE:
            frames, seals = requests_of(data[2:]), copy(genuine.to_owner)
            stream = sealed(frames, sealing // len(PROTECTIONS), seals, wire.HEAD_BYTES)
        loop, (ours, theirs) = LoopStub(), pair()
        ended: list[object] = []
        machine = Machine(self._memory.region)
        listener = SimpleNamespace(
            forget=ended.append, fenced=lambda identity: [], too_many_of=lambda identity: []
        )
        server: Any = SimpleNamespace(
            credentials=credentials("owner", 2, protection), table=self._memory.table,
            limits=ServerLimits(), listener=listener, stats=LinkStats("served"),
            questions=machine.questions,
        )  # fmt: skip
        connection = ServerConnection(server, ours, loop)
        connection.start()
        theirs.sendall(b"".join(map(pack_frame, genuine.said)))
        for _ in range(2):
            turn(loop, ours, theirs)
        assert connection.identity is not None
        num_answered = 0
        try:
            for piece in pieces_of(stream.sent, how):
                left = piece
                while left and not ended:
                    left = left[send_some(theirs, left) :]
                    machine.work()
                    num_answered += turn(loop, ours, theirs)
            for _ in range(4):
                machine.work()
                num_answered += turn(loop, ours, theirs)
            assert len(ended) <= 1
            assert ended or not stream.head_is_altered, "an altered request was obeyed"
            word = "ended" if ended else "lives"
            return f"{protection.value} {word} {num_answered.bit_length()}"
        finally:
            connection.close()
            theirs.close()
            self._memory.check()
            machine.check()
            assert not loop.handlers


def send_some(sock: socket.socket, data: bytes) -> int:
    """Send what fits; return how much."""
    try:
        return sock.send(data)
    except BlockingIOError:
        return 0
    except (BrokenPipeError, ConnectionResetError):
        return len(data)


def turn(loop: LoopStub, ours: socket.socket, theirs: socket.socket) -> int:
    """Let our end read and write once; return the number of bytes it sent."""
    loop.run(ours, READABLE)
    loop.run(ours, WRITABLE)
    num_bytes = 0
    try:
        while more := len(theirs.recv(65_536)):
            num_bytes += more
    except OSError:
        pass
    return num_bytes


class TcpClient(Target):
    """What an owner answers to a READ, a WRITE and a READ of ours, and to two questions. The first
    byte says how the answers are cut; even: the owner has proven itself before. The second says how
    they are sealed then, and where a relay changes a bit of them.
    """

    name = "tcp-client"
    modules = (
        "mooncake.transfer.tcp.connection", "mooncake.transfer.tcp.wire",
        "mooncake.transfer.tcp.frames", "mooncake.transfer.net.seals",
    )  # fmt: skip
    max_bytes = 131_072

    def __init__(self) -> None:
        self._memory = Memory()
        self._genuine = {each: genuine_handshake(each) for each in PROTECTIONS}

    def run(self, data: bytes) -> str:
        how, sealing = data[:2].ljust(2, b"\0")
        protection = PROTECTIONS[sealing % len(PROTECTIONS)]
        genuine = self._genuine[protection]
        opening, stream = b"", Stream(data[2:], [], None)
        if how % 2 == 0:
            opening = b"".join(map(pack_frame, genuine.answered))
            if protection is not Protection.NONE:
                frames, seals = answers_of(data[2:]), copy(genuine.to_client)
                stream = sealed(frames, sealing // len(PROTECTIONS), seals, wire.HEADER_BYTES)
        loop, (ours, theirs) = LoopStub(), pair()
        owner = _ClientSide()
        connection = Connection(
            owner, ("127.0.0.1", 1), self._memory.table, loop, ConnectionLimits()
        )
        with mock.patch.object(socket, "socket", return_value=ours):
            connection.wake()
        loop.run(ours, WRITABLE)
        try:
            for piece in (opening, *pieces_of(stream.sent, how // 2)):
                left = piece
                while left and not owner.failures:
                    left = left[send_some(theirs, left) :]
                    turn(loop, ours, theirs)
            turn(loop, ours, theirs)
            self._check(owner, connection)
            assert owner.failures or not stream.head_is_altered, "an altered answer was believed"
            return " ".join([protection.value, connection.state.value, *sorted(owner.endings)])
        finally:
            connection.abort("over")
            theirs.close()
            self._memory.check()
            assert not loop.handlers

    def _check(self, owner: _ClientSide, connection: Connection) -> None:
        assert len(owner.failures) <= 1
        if owner.failures:
            assert connection.state is ConnectionState.IDLE
            lost = sum(len(failure.parts) for failure in owner.failures)
            assert lost + len(owner.endings) == owner.num_taken, "a part was lost"


class _ClientSide:
    """The peer of a connection: gives out some parts and counts what becomes of them."""

    def __init__(self) -> None:
        self.failures: list[ConnectionFailure] = []
        self.endings: list[str] = []
        self.num_taken = 0
        self._due = [
            (Op.READ, FIRST_REGION, b""), (Op.WRITE, FIRST_REGION, b""),
            (Op.READ, UNKNOWN_REGION, b""), (Op.READ, FIRST_REGION, b"\2 which of these have you?"),
            (Op.READ, FIRST_REGION, b"\0 which of these may nobody have?"),
        ]  # fmt: skip
        self.num_due = len(self._due)

    @property
    def has_work(self) -> bool:
        return bool(self._due)

    def take(self) -> Part | None:
        if not self._due:
            return None
        operation, region, question = self._due.pop(0)
        ops = [TransferOp(FIRST_REGION, 64, region, 0, 256)]
        peer = SegmentRef(engine_id="owner", endpoints={}, host="here")
        batch = TransferBatch(op=operation, peer=peer, ops=ops, question=question)
        job = Job(self.num_taken, batch, 0.0, self._ended)
        job.set_ops(ops)
        job.expect(1)
        assert job.begin()
        self.num_taken += 1
        return Part(job, Slice(tuple(ops), 256))

    def _ended(self, job: Job) -> None:
        self.endings.append((job.error and "refused") or "done")

    def new_handshake(self) -> ConnectingSide:
        return credentials("client", 1).connect("owner")

    def ready(self, fenced: Any) -> None:
        pass

    def broken(self, connection: Connection, failure: ConnectionFailure) -> None:
        self.failures.append(failure)

    def arrived(
        self, connection: Connection, num_bytes: int, posted_s: float, now_s: float
    ) -> None:
        pass


def conversation() -> tuple[bytes, bytes]:
    """Return what a client and an owner say to each other after the handshake: a READ, a WRITE, a
    READ that is refused, and two questions.
    """
    memory, loop, side = Memory(), LoopStub(), _ClientSide()
    machine = Machine(memory.region)
    (client, at_client), (owner, at_owner) = pair(), pair()
    server: Any = SimpleNamespace(
        credentials=credentials("owner", 2), table=memory.table, limits=ServerLimits(),
        listener=SimpleNamespace(
            forget=lambda _: None, fenced=lambda _: [], too_many_of=lambda _: []
        ),
        stats=LinkStats("served"), questions=machine.questions,
    )  # fmt: skip
    serving = ServerConnection(server, owner, loop)
    serving.start()
    connection = Connection(side, ("127.0.0.1", 1), memory.table, loop, ConnectionLimits())
    with mock.patch.object(socket, "socket", return_value=client):
        connection.wake()
    loop.run(client, WRITABLE)
    genuine = genuine_handshake()
    said, answered = (
        len(b"".join(map(pack_frame, each))) for each in (genuine.said, genuine.answered)
    )
    asks, answers = bytearray(), bytearray()
    while len(side.endings) < side.num_due:
        for source, target, record in ((at_client, at_owner, asks), (at_owner, at_client, answers)):
            with contextlib.suppress(BlockingIOError):
                data = source.recv(65_536)
                record.extend(data)
                target.sendall(data)
            loop.run(owner)
            machine.work()
            loop.run(owner)
            loop.run(client)
    connection.abort("over")
    serving.close()
    at_client.close()
    at_owner.close()
    return bytes(asks[said:]), bytes(answers[answered:])

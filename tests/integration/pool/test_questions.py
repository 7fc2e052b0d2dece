"""Gets of a few blocks by one question over TCP, at a real node: what moves, what a node of an
earlier release does, and what stays pinned when either side goes in mid-answer.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mooncake.base import (
    KvLayout,
    MonotonicClock,
    MooncakeError,
    PinBlocks,
    PutEnd,
    PutStart,
    Role,
    SegmentRef,
    Tier,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import issue, own_credential
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.node.node import KvNode
from mooncake.launch.host import machine_facts
from mooncake.launch.host.driver import Driver
from mooncake.launch.pool_client.session import PoolSession, PoolSessionConfig
from mooncake.rpc.codec import encode
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.transfer.engine import Asked, Op, TransferBatch, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.router import RoutedTransfer
from tests.support.kvstore.forked_node import ForkedNode
from tests.support.kvstore.pool_process import until
from tests.support.kvstore.pool_traffic import RUN, blocks_of, check_nothing_is_held
from tests.support.model.checkpoints import write_config_only
from tests.support.waiting import LONG_S

LAYOUT = KvLayout(num_layers=4, block_tokens=64, kv_width=2048, dtype="float16", fingerprint="test")
"""Blocks of 1 MiB."""
BLOCK = LAYOUT.block_bytes
SECRET = "a secret of this test"
NUM_BLOCKS = 64


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Node:
    """A pool node in a thread, without a gateway, and what it has been asked."""

    def __init__(self, protection: Protection) -> None:
        self.channel = ZmqChannel(credential=own_credential(SECRET, CredentialRole.WORKER))
        self.protection = protection
        clock = MonotonicClock()
        config = TransferConfig(
            secret=SECRET, host=machine_facts.boot_id(), protocols=["tcp"], protection=protection
        )
        self.transfer = open_transfer(config, "kv-boot", clock)
        hello = WorkerHello(
            worker=WorkerRef("kv", "e1", self.channel.address), role=Role.KVSTORE, node_id="n",
            host="h", pid=1, layout_fingerprint="test", block_tokens=64, num_blocks=0,
        )  # fmt: skip
        self.machine = KvNode(
            KvStoreConfig(dram_bytes=NUM_BLOCKS * BLOCK), hello, LAYOUT, self.channel,
            self.transfer, "tcp://127.0.0.1:1",
        )  # fmt: skip
        self.num_asked = 0
        """Questions by which blocks are got."""
        self.num_puts_asked = 0
        self.threads: set[str] = set()
        """Names of the threads in which it has been asked."""
        handle = self.machine.handle

        def counted(event: object, now: float) -> None:
            if isinstance(event, Asked):
                self.num_asked += event.piece_bytes > 0
                self.num_puts_asked += b"put_start" in event.question
                self.threads.add(threading.current_thread().name)
            handle(event, now)

        self.machine.handle = counted  # type: ignore[method-assign]
        self.driver = Driver(
            self.machine, self.channel, transfer=self.transfer, clock=clock, shares=True
        )
        self._thread = threading.Thread(target=self.driver.run, daemon=True)
        self._thread.start()

    def session(self, proof: str = SECRET) -> PoolSession:
        return PoolSession(PoolSessionConfig(
            gateway_address="tcp://127.0.0.1:1", cluster_secret=proof, layout=LAYOUT,
            store_address=self.channel.address, num_places=8, timeout_s=20.0,
            transfer_protocols=["tcp"], transfer_protection=self.protection.value,
        ))  # fmt: skip

    @property
    def num_open(self) -> int:
        """Pins and puts that are open."""
        found: int = self.driver.call(lambda node, _now: node.num_open).result(LONG_S)
        return found

    def close(self) -> None:
        self.driver.stop()
        self._thread.join()
        self.channel.close()
        self.transfer.close()


@pytest.fixture
def node() -> Iterator[Node]:
    opened = Node(Protection.NONE)
    yield opened
    opened.close()


@contextlib.contextmanager
def serving(protection: Protection, tenant: str | None) -> Iterator[tuple[Node, PoolSession]]:
    """Open a node, and a session of a client of this tenant; "": of one that has the secret."""
    roles = [CredentialRole.POOL_CLIENT]
    proof = SECRET if tenant == "" else issue(SECRET, "c", roles, tenant=tenant).text
    node = Node(protection)
    with contextlib.closing(node), node.session(proof) as session:
        yield node, session


def put(session: PoolSession, numbers: range) -> list[bytes]:
    keys = [key(n) for n in numbers]
    for place, number in enumerate(numbers):
        session.memory[place * BLOCK : (place + 1) * BLOCK] = bytes([number + 1]) * BLOCK
    assert session.put_from(keys, [n * BLOCK for n in range(len(keys))]) == keys
    return keys


def get(session: PoolSession, keys: list[bytes]) -> int:
    """Get blocks and compare them."""
    session.memory[:] = bytes(len(session.memory))
    count = session.get_into(keys, [n * BLOCK for n in range(len(keys))])
    for place, wanted in enumerate(keys[:count]):
        expected = bytes([int.from_bytes(wanted, "big") + 1]) * BLOCK
        assert session.memory[place * BLOCK : (place + 1) * BLOCK] == expected
    return count


@pytest.mark.parametrize("protection", Protection)
@pytest.mark.parametrize("tenant", [None, "acme", ""])
def test_gets_after_the_first_take_a_question(protection: Protection, tenant: str | None) -> None:
    with serving(protection, tenant) as (node, session):
        keys = put(session, range(8))
        assert get(session, keys) == 8
        assert node.num_asked == 0, "it does not know yet that the node takes questions"
        for count in (1, 3, 4):
            assert get(session, keys[:count]) == count
        assert node.num_asked == 3
        assert get(session, [keys[0], key(99)]) == 1
        until(lambda: node.num_open == 0, "nothing stays pinned")
        assert node.driver.call(lambda each, _: each.counters["blocks_missed"]).result(LONG_S) == 1


@pytest.mark.parametrize("protection", Protection)
@pytest.mark.parametrize("tenant", [None, "acme", ""])
def test_puts_after_the_first_take_a_question(protection: Protection, tenant: str | None) -> None:
    with serving(protection, tenant) as (node, session):
        for number in range(4):
            assert session.exists(put(session, range(number, number + 1))) == [Tier.DRAM]
        assert node.num_puts_asked == 3, "the first answer says that the node takes questions"
        assert session.put_from([key(2), key(9)], [0, BLOCK]) == [key(9)], "2 is there already"
        until(lambda: node.num_open == 0, "nothing stays open")
        assert get(session, [key(n) for n in range(4)]) == 4


def test_a_put_finds_room_where_the_put_before_it_has_just_ended(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its question overtakes the end of that put, which goes by another connection."""
    with node.session() as session:
        send, late = session._channel.send, list[tuple[str, PutEnd]]()

        def send_ends_late(address: str, message: Any) -> None:
            if isinstance(message, PutEnd):
                late.append((address, message))
                return
            while late and isinstance(message, PutStart):
                send(*late.pop(0))
            send(address, message)

        monkeypatch.setattr(session._channel, "send", send_ends_late)
        for start in range(0, 240, 8):
            put(session, range(start, start + 8))
        assert NUM_BLOCKS < 240
        assert node.num_puts_asked > 20
        for each in late:
            send(*each)
        until(lambda: node.num_open == 0, "nothing stays open")


def test_a_get_sees_the_put_before_it(node: Node) -> None:
    """Though the end of the put goes by another connection."""
    with node.session() as session:
        for number in range(40):
            assert get(session, put(session, range(number, number + 1))) == 1
    assert node.num_asked > 20
    assert "transfer-io-0" in node.threads, "no other thread wakes, as long as none has the machine"


def test_a_node_of_an_earlier_release_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoutedTransfer, "hear_questions", lambda _self: None)
    node = Node(Protection.NONE)
    with ExitStack() as opened:
        opened.callback(node.close)
        session = opened.enter_context(node.session())
        keys = put(session, range(2))
        assert [get(session, keys) for _ in range(3)] == [2] * 3
        assert node.num_asked == 0


class Gate:
    """Forwards one connection, and after so many bytes nothing more of what comes back."""

    def __init__(self, port: int, num_bytes: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.stopped = threading.Event()
        self._left = num_bytes
        self._near: socket.socket | None = None
        self._far = socket.socket()
        self._far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # what waits here is small
        self._far.connect(("127.0.0.1", port))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near = self._near = self._listener.accept()[0]
        threading.Thread(target=self._forward, args=(near, self._far), daemon=True).start()
        with contextlib.suppress(OSError):  # it may be cut at any moment
            while self._left > 0 and (data := self._far.recv(4096)):
                self._left -= len(data)
                near.sendall(data)
        self.stopped.set()

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(4096):
                far.sendall(data)

    def cut(self) -> None:
        """Break the connection, and take no other."""
        self._listener.close()
        for end in (self._near, self._far):
            assert end is not None
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_nothing_stays_pinned_when_the_asker_goes_in_mid_answer(node: Node) -> None:
    with node.session() as session:
        keys = put(session, range(4))
        until(lambda: node.num_open == 0, "the put has ended")
    config = TransferConfig(secret=SECRET, host="elsewhere", protocols=["tcp"])
    asker = open_transfer(config, "asker", MonotonicClock())
    segment = node.transfer.segment
    gate = Gate(int(segment.endpoints["tcp"].rpartition(":")[2]), BLOCK // 2)
    through = SegmentRef(
        segment.engine_id, {**segment.endpoints, "tcp": gate.endpoint}, segment.host
    )
    region = asker.allocate(8 * BLOCK, "here")
    ops = [TransferOp(region.region_id, n * BLOCK, 0, 0, BLOCK) for n in range(4)]
    me = WorkerRef("decode-0", "e1", "tcp://127.0.0.1:1")
    question = encode(PinBlocks(reader=me, ticket=1, keys=keys))
    asker.submit(TransferBatch(op=Op.READ, peer=through, ops=ops, question=question))
    assert gate.stopped.wait(LONG_S)
    assert node.num_open == 1, "they are being sent"
    gate.cut()
    until(lambda: node.num_open == 0, "nothing stays pinned")
    [done] = asker.wait(LONG_S)
    assert done.error is not None
    asker.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2}
    return write_config_only(tmp_path_factory.mktemp("model") / "wide", **changes)


def test_an_owner_that_is_killed_before_it_answers_is_an_error(model: Path, tmp_path: Path) -> None:
    with ForkedNode(model, tmp_path / "log", "--dram", "4MiB") as forked:
        session = forked.session(timeout_s=10.0, transfer_protocols=["tcp"], num_places=RUN)
        with session:
            blocks = blocks_of(session, range(RUN))
            session.put(blocks)
            for _ in range(3):
                assert session.get(list(blocks)) == list(blocks.values())
            check_nothing_is_held(session)
            forked.process.send_signal(signal.SIGSTOP)
            found: list[object] = []

            def fetch() -> None:
                try:
                    found.append(session.get(list(blocks)))
                except MooncakeError as error:
                    found.append(error)

            getting = threading.Thread(target=fetch)
            getting.start()
            forked.stop(signal.SIGKILL)
            getting.join(LONG_S)
            assert isinstance(found[0], MooncakeError)

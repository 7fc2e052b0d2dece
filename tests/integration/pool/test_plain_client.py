"""examples/pool_client.py, which uses no code of Mooncake, at a real node: as a user runs it,
beside our own client, opposite a node that is none, and as a client that breaks the rules.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.exceptions import InvalidSignature, InvalidTag
from msgspec.msgpack import encode

from mooncake.base import Tier, rights
from mooncake.base.rights import CredentialRole, tenant_mark
from mooncake.cli import main as cli
from mooncake.identity.credential import issue, own_credential
from mooncake.launch.host.http_client import Client
from mooncake.launch.host.secrets.credentials import sign_request
from mooncake.launch.pool_client.session import STATS_PATH, PoolSession, locate
from tests.support.kvstore.pool_process import SECRET, PoolProcess, until
from tests.support.model.checkpoints import write_config_only
from tests.support.waiting import LONG_S

EXAMPLE = Path(__file__).parents[3] / "examples" / "pool_client.py"
MARK = tenant_mark("acme")
PACKAGES = {"cryptography", "msgspec"}
HUNG_UP = (InvalidTag, ConnectionError)
"""What a client gets in place of an answer when the node hangs up."""


def load() -> Any:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("pool_client", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plain = load()


def credential(tenant: str | None) -> str:
    return issue(SECRET, "plain", [CredentialRole.POOL_CLIENT], tenant=tenant).text


ACME = credential("acme")


def session(node: PoolProcess, proof: str) -> PoolSession:
    """Return our own client with that credential."""
    return PoolSession(msgspec.structs.replace(locate(node.url, proof), timeout_s=30.0))


def test_the_protocol_fits_150_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 150


def test_it_imports_nothing_of_mooncake() -> None:
    names = set()
    for node in ast.walk(ast.parse(EXAMPLE.read_text())):
        if isinstance(node, ast.Import):
            names |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    assert names - set(sys.stdlib_module_names) == PACKAGES


@pytest.mark.parametrize("protection", ["none", "mac", "encrypt"])
def test_blocks_pass_between_it_and_our_own_client(protection: str, tmp_path: Path) -> None:
    file = tmp_path / "acme.key"
    words = ["--role", "pool-client", "--tenant", "acme", "--out", str(file)]
    assert cli.run(["credential", *words, "--cluster-secret", SECRET]) == 0
    proof = file.read_text()
    large = ("--block-size", "512", "--dram", "8MiB", "--transfer-protection", protection)
    with PoolProcess(Path("k2-demo"), tmp_path / "log", *large) as node, session(
        node, proof.strip()
    ) as ours, plain.connected(node.url, proof) as pool:  # fmt: skip
        key_of = pool.key_of
        assert 2**18 < ours.block_bytes < 2**20, "a payload of two chunks"
        one, two = (random.Random(number).randbytes(ours.block_bytes) for number in range(2))
        assert not pool.has("one")
        assert pool.get("one") == b""
        assert pool.put("one", one)
        assert not pool.put("one", two), "what is stored first stays"
        assert pool.has("one")
        assert pool.get("one") == one
        assert ours.get([key_of("one")]) == [one]
        assert ours.put({key_of("two"): two}) == [key_of("two")]
        assert ours.exists([key_of("two")]) == [Tier.DRAM], (
            "the node has taken in the end of the put"
        )
        assert pool.get("two") == two
        with pytest.raises(ConnectionError, match="the node refuses"):
            pool.put("long", one + b"!")
        assert not pool.has("long")
        assert typed(node, file) == "True True True\n"
        assert ours.get([key_of("greeting")]) == [b"hello".ljust(ours.block_bytes, b"\0")]


def typed(node: PoolProcess, file: Path) -> str:
    """Return what the example in the client's docstring prints, in a program of its own that finds
    no Mooncake.
    """
    shown = textwrap.dedent("    " + plain.__doc__.partition("\n\n    ")[2])
    shown = shown.replace("http://127.0.0.1:8100", node.url).replace("acme.key", str(file))
    shown = shown.replace('pool.get("greeting")', 'pool.get("greeting").startswith(b"hello")')
    program = f"""
import sys
import textwrap
sys.modules["mooncake"] = None
sys.path.insert(0, {str(EXAMPLE.parent)!r})
from pool_client import connected
{shown}"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    home = tmp_path_factory.mktemp("node")
    model = write_config_only(home / "small")
    words = ("--dram", "1MiB", "--transfer-protection", "mac")
    with PoolProcess(model, home / "log", *words) as running:
        yield running


@pytest.fixture
def client(node: PoolProcess) -> Iterator[Any]:
    with plain.connected(node.url, ACME) as opened:
        yield opened


def challenged(secret: str = SECRET, role: CredentialRole = CredentialRole.WORKER) -> Any:
    return {"certificate": issue(secret, "false", [role]).signed}


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (challenged(secret="another"), InvalidSignature),
        (challenged(role=CredentialRole.POOL_CLIENT), ConnectionError),
        ({"certificate": issue(SECRET, "old", [CredentialRole.WORKER], expires_s=1.0).signed},
         ConnectionError),
        (challenged(), InvalidSignature),
        ({"signature": bytes(64)}, InvalidSignature),
    ],
    ids=["another cluster", "another role", "expired", "another's", "no proof"],
)  # fmt: skip
def test_a_node_that_proves_nothing_is_not_believed(
    said: Any, error: type[Exception], node: PoolProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    shake = plain.Pool.shake

    def lie(pool: Any, **message: Any) -> Any:
        answer = shake(pool, **message)
        return answer | {name: value for name, value in said.items() if name in answer}

    monkeypatch.setattr(plain.Pool, "shake", lie)
    with pytest.raises(error), plain.connected(node.url, ACME):
        pass


def test_answers_that_were_altered_are_not_believed(client: Any, node: PoolProcess) -> None:
    assert client.put("kept", b"kept")
    with another_connection(node, client) as another:
        another.num_received += 1  # as if an answer had been repeated
        with pytest.raises(InvalidTag):
            another.get("kept")
    assert client.get("kept").startswith(b"kept")
    until(lambda: stats(node)["reads_open"] == 0, "the pin ends with its connection")


@contextmanager
def another_connection(node: PoolProcess, client: Any) -> Iterator[Any]:
    """A second connection of the same client."""
    with plain.connected(node.url, ACME) as opened:
        opened.me = client.me
        yield opened


def write(client: Any, region: int, offset: int, grant: int, data: bytes) -> None:
    size = len(data)
    client.send(plain.HEAD.pack(plain.WRITE, 3, 1, 1, size, grant, region, offset, size))
    client.send(b"", data, 1)
    client.answer()


def read(client: Any, region: int, offset: int, size: int) -> None:
    client.send(plain.HEAD.pack(plain.READ, 3, 1, 1, size, 0, region, offset, size))
    client.answer()


def is_well(client: Any, node: PoolProcess) -> bool:
    """Store and fetch a block by the same client; return whether nothing is left open."""
    name, data = str(random.random()), bytes([7]) * client.block_bytes
    assert client.put(name, data)
    assert client.has(name)
    assert client.get(name) == data
    told = stats(node)
    return (told["puts_open"], told["reads_open"]) == (0, 0)


def stats(node: PoolProcess) -> dict[str, Any]:
    credential = own_credential(SECRET, CredentialRole.OPERATOR)

    def sign(method: str, path: str, challenge: str) -> str:
        return sign_request(credential, method, path, challenge)

    return dict(Client(node.url, sign=sign).get(STATS_PATH))


def test_messages_that_are_none_do_no_harm(client: Any, node: PoolProcess) -> None:
    """The node refuses them, or hangs up."""
    head, pin = plain.MESSAGE, encode({"type": "pin", "ticket": 2**40, "keys": [bytes(16)]})
    for junk in (
        b"junk" * 8, head + b"\xc1" * 40, head + b"\x91" * 5000, b"\x4d\x05\0\0" + pin, head + pin,
        b"\x4d\x06\xff\xff" + pin, pin, head + pin[:-1],
        head + encode({"type": "pin_granted", "asker": client.me, "ticket": 1}),
    ):  # fmt: skip
        with pytest.raises(ConnectionError, match=r"the node refuses: ."):
            raw(client, junk)
    me = client.me
    assert client.ask("put_end", writer=me, ticket=999, written=[bytes(16)[:10] + MARK]) is None
    assert client.ask("unpin", reader=me, ticket=2**62) is None
    assert is_well(client, node)
    for junk in (b"short", b"long" * 2**15):
        with another_connection(node, client) as another, pytest.raises(HUNG_UP):
            raw(another, junk)
    assert is_well(client, node)


def raw(client: Any, question: bytes) -> None:
    """Ask something that is no message."""
    client.send(plain.HEADER.pack(plain.ASK, 3, 0, 1, len(question), 0), question)
    client.sock.sendall(bytes(max(0, 24 - len(question))))
    client.answer()


def test_what_it_may_not_ask_is_refused_with_words(client: Any, node: PoolProcess) -> None:
    others = bytes(10) + tenant_mark("another")
    mine, asked = client.key_of("one"), {"asker": client.me, "ticket": 500}
    with pytest.raises(ConnectionError, match="may name keys of tenant 'acme' only"):
        client.ask("find", **asked, keys=[others])
    with pytest.raises(ConnectionError, match="names 1025 blocks, more than 1024"):
        client.ask("find", **asked, keys=[mine] * 1025)
    with pytest.raises(ConnectionError, match="message of the kind levitate"):
        client.ask("levitate", **asked)
    with pytest.raises(ConnectionError, match="may not send Drain"):
        client.ask("drain", **asked)
    with pytest.raises(ConnectionError, match="AskPool is no question"):
        client.ask("ask_pool", **asked)
    name, epoch, place = client.me
    for other in (["client-" + "0" * 12 + "-1", epoch, place], [name, epoch, "#" + "0" * 64]):
        with pytest.raises(ConnectionError, match="may not speak for"):
            client.ask("find", asker=other, ticket=501, keys=[mine])
    assert is_well(client, node)


def test_memory_that_was_not_lent_is_neither_read_nor_written(
    client: Any, node: PoolProcess
) -> None:
    key, put = client.key_of("lent"), {"writer": client.me, "ticket": 600}
    granted = client.ask("put_start", **put, keys=[key], tenant="acme")
    _, region, _, [offset], grant = granted["places"]
    size = client.block_bytes
    data, there = bytes([9]) * size, (region, offset)
    for place, length in (
        ((region, offset + size), size), ((region, 2**63), size), ((region + 1, offset), size),
        ((region, offset + 1), size), (there, 2 * size),
    ):  # fmt: skip
        with pytest.raises(ConnectionError, match="the node refuses"):
            write(client, *place, grant, bytes(length))
    with pytest.raises(ConnectionError, match="the node refuses"):
        read(client, *there, size)
    write(client, *there, grant, data)
    assert not client.has("lent"), "nobody sees it before it is whole"
    client.ask("put_end", **put, written=[key])
    assert client.get("lent") == data
    with pytest.raises(ConnectionError, match="the node refuses"):
        write(client, *there, grant, bytes(size))
    with pytest.raises(ConnectionError, match="the node refuses"):
        read(client, *there, size)
    assert client.get("lent") == data
    assert is_well(client, node)


def test_altered_bytes_end_the_connection_and_nothing_else(client: Any, node: PoolProcess) -> None:
    key, put = client.key_of("altered"), {"writer": client.me, "ticket": 700}
    granted = client.ask("put_start", **put, keys=[key], tenant="acme")
    _, region, _, [offset], grant = granted["places"]
    client.num_sent += 1  # as if a message had been dropped
    with pytest.raises(HUNG_UP):
        write(client, region, offset, grant, bytes(client.block_bytes))
    with another_connection(node, client) as again:
        again.ask("put_end", **put, dropped=[key])
        assert not again.has("altered")
        assert is_well(again, node)


def test_nothing_that_our_own_client_says_about_a_long_run_is_refused(
    node: PoolProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rights, "MAX_KEYS_AT_ONCE", 2)  # here, and not at the node
    with session(node, credential("acme")) as ours:
        refused = ours.stat().load.counters["messages_refused"]
        blocks = {bytes([n]) * 16: bytes([n]) * ours.block_bytes for n in range(1, 6)}
        memory = ours.register(memoryview(bytearray(b"".join(blocks.values()))))
        places = memory.at([n * ours.block_bytes for n in range(5)])
        assert len(ours.put_from(list(blocks), places)) == 5
        assert ours.match(list(blocks)) == 5
        assert ours.get_into(list(blocks), places) == 5
        assert ours.remove(list(blocks)) == [True] * 5
        assert ours.stat().load.counters["messages_refused"] == refused


def test_what_it_holds_is_taken_back_when_it_hangs_up(client: Any, node: PoolProcess) -> None:
    held, wanted = (client.key_of(name) for name in ("held", "wanted"))
    assert client.put("held", bytes(client.block_bytes))
    with another_connection(node, client) as leaving:
        me, put = client.me, {"keys": [wanted], "tenant": "acme"}
        assert leaving.ask("pin", reader=me, ticket=900, keys=[held])["num_blocks"] == 1
        assert leaving.ask("put_start", writer=me, ticket=901, **put)["keys"] == [wanted]
        assert (stats(node)["puts_open"], stats(node)["reads_open"]) == (1, 1)

    def is_free() -> bool:
        told = stats(node)
        return (told["puts_open"], told["reads_open"]) == (0, 0)

    until(is_free, "what a client held that hung up is taken back")
    assert client.put("wanted", bytes(client.block_bytes)), "another may put what it has begun"
    assert is_well(client, node)


def test_a_granted_pin_is_granted_again_until_it_ends(client: Any, node: PoolProcess) -> None:
    """As where one connection hangs, and another one is used."""
    key, data = client.key_of("again"), bytes([5]) * client.block_bytes
    assert client.put("again", data)
    pin = {"reader": client.me, "ticket": 800}
    first = client.ask("pin", **pin, keys=[key])
    with another_connection(node, client) as another:
        assert another.ask("pin", **pin, keys=[key])["places"] == first["places"]
        assert stats(node)["reads_open"] == 1
        another.ask("unpin", **pin)
    assert client.ask("pin", **pin, keys=[key])["num_blocks"] == 0, "a ticket is used once"
    assert is_well(client, node)

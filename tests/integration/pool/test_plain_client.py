"""examples/pool_client.py, which uses no code of Mooncake, at a real node: as a user runs it,
beside our own client, and as a client that breaks the rules.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.base import Tier
from mooncake.base.rights import CredentialRole
from mooncake.cli import main as cli
from mooncake.identity import issue
from mooncake.launch.pool_client.session import PoolSession, locate
from mooncake.transfer.tcp.frames import cuts
from tests.support.kvstore.pool_process import SECRET, PoolProcess
from tests.support.model.checkpoints import write_config_only

EXAMPLE = Path(__file__).parents[3] / "examples" / "pool_client.py"
PACKAGES = {"cryptography", "msgspec", "zmq"}


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


def session(node: PoolProcess, proof: str) -> PoolSession:
    """Return our own client with that credential."""
    return PoolSession(msgspec.structs.replace(locate(node.url, proof), timeout_s=30.0))


def test_it_imports_nothing_of_mooncake() -> None:
    names = set()
    for node in ast.walk(ast.parse(EXAMPLE.read_text())):
        if isinstance(node, ast.Import):
            names |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    assert names - set(sys.stdlib_module_names) == PACKAGES


@pytest.mark.parametrize(
    "num_bytes", [1, 2**18 - 1, 2**18, 2**20, 2**20 + 2**16, 2**20 + 2**16 + 1, 5 * 2**20 + 7]
)
def test_it_cuts_payloads_as_nodes_do(num_bytes: int) -> None:
    assert plain.cuts(num_bytes) == [stop - start for _, start, stop in cuts([num_bytes], 2**20)]


@pytest.mark.parametrize("protection", ["none", "mac", "encrypt"])
def test_blocks_pass_between_it_and_our_own_client(protection: str, tmp_path: Path) -> None:
    file = tmp_path / "acme.key"
    words = ["--role", "pool-client", "--tenant", "acme", "--out", str(file)]
    assert cli.run(["credential", *words, "--cluster-secret", SECRET]) == 0
    proof = file.read_text().strip()
    key_of = plain.Credential(proof).key_of

    def run(*words: str, data: bytes = b"") -> tuple[int, bytes]:
        command = [sys.executable, str(EXAMPLE), node.url, str(file), *words]
        done = subprocess.run(command, input=data, capture_output=True, timeout=120)
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        return done.returncode, done.stdout

    large = ("--block-size", "512", "--dram", "8MiB", "--transfer-protection", protection)
    with PoolProcess(Path("k2-demo"), tmp_path / "log", *large) as node, session(
        node, proof
    ) as ours:  # fmt: skip
        assert 2**18 < ours.block_bytes < 2**20, "a payload of two chunks"
        one, two = (random.Random(number).randbytes(ours.block_bytes) for number in range(2))
        assert run("find", "one") == (1, b"")
        assert run("get", "one") == (1, b"")
        assert run("put", "one", data=one) == (0, b"dram\n")
        assert run("put", "one", data=two) == (1, b""), "what is stored first stays"
        assert run("find", "one") == (0, b"dram\n")
        assert run("get", "one") == (0, one)
        assert ours.get([key_of("one")]) == [one]
        assert ours.put({key_of("two"): two}) == [key_of("two")]
        assert ours.exists([key_of("two")]) == [Tier.DRAM], (
            "the node has taken in the end of the put"
        )
        assert run("get", "two") == (0, two)
        assert run("put", "short", data=b"hello") == (0, b"dram\n")
        assert ours.get([key_of("short")]) == [b"hello".ljust(ours.block_bytes, b"\0")]
        assert run("put", "long", data=one + b"!") == (1, b"")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    home = tmp_path_factory.mktemp("node")
    model = write_config_only(home / "small")
    words = ("--dram", "1MiB", "--transfer-protection", "mac")
    with PoolProcess(model, home / "log", *words) as running:
        yield running


@pytest.fixture
def client(node: PoolProcess) -> Iterator[Any]:
    with closing(plain.Pool(node.url, plain.Credential(credential("acme")))) as opened:
        yield opened


def is_well(client: Any, node: PoolProcess) -> bool:
    """Store and fetch a block by the same client; return whether nothing is left open."""
    key, data = client.credential.key_of(str(random.random())), bytes([7]) * client.block_bytes
    assert client.put(key, data)
    assert client.find(key) == "dram"
    assert client.get(key) == data
    assert client.find(key) == "dram", "the node has taken in what was told before"
    told = plain.locate(node.url, client.credential)
    return (told["puts_open"], told["reads_open"]) == (0, 0)


def test_messages_that_are_none_do_no_harm(client: Any, node: PoolProcess) -> None:
    signed = client.credential.signed
    head = b"\x4d\x06" + len(signed).to_bytes(2, "little") + signed
    for junk in (
        b"", b"\x4d", b"junk", b"\x4d\x05" + head[2:], b"\x4d\x06\xff\xff", head, head + b"\xc1",
        head + b"\x91" * 5000, head[:-1] + b"?", head + msgspec.msgpack.encode({"type": "pin"}),
    ):  # fmt: skip
        client.outbox.send(junk)
    client.tell("put_end", writer=client.me, ticket=999, written=[bytes(16)])
    client.tell("unpin", reader=client.me, ticket=2**63 - 1)
    client.tell("pin_granted", asker=client.me, ticket=1, store=client.me, num_blocks=2**40)
    assert is_well(client, node)


def test_what_it_may_not_ask_is_refused_with_words(client: Any, node: PoolProcess) -> None:
    others = plain.Credential(credential("another")).key_of("secret")
    asked = {"asker": client.me, "ticket": 500}
    with pytest.raises(plain.PoolError, match="may name keys of tenant 'acme' only"):
        client.ask("find", **asked, keys=[others])
    with pytest.raises(plain.PoolError, match="names 32769 blocks, more than 32768"):
        client.ask("find", **asked, keys=[client.credential.key_of("one")] * 32_769)
    with pytest.raises(plain.PoolError, match="has no message of the kind levitate"):
        client.ask("levitate", **asked)
    client.tell("drain")
    assert is_well(client, node)


def test_memory_that_was_not_lent_is_neither_read_nor_written(
    client: Any, node: PoolProcess
) -> None:
    key, put = client.credential.key_of("lent"), {"writer": client.me, "ticket": 600}
    granted = client.ask("put_start", **put, keys=[key], tenant="acme")
    (engine_id, endpoints, _), region, _, [offset], grant = granted["places"]
    size = client.block_bytes
    data, there = bytes([9]) * size, (region, offset, size)
    with closing(plain.DataPath(client.credential, engine_id, endpoints["tcp"])) as path:
        for place in (
            (region, offset + size, size), (region, 2**63, size), (region + 1, offset, size),
            (region, offset + 1, size), (region, offset, 2 * size),
        ):  # fmt: skip
            with pytest.raises(plain.PoolError, match="the node refuses"):
                path.move(place, grant, bytes(place[2]))
        with pytest.raises(plain.PoolError, match="the node refuses"):
            path.move(there)
        path.move(there, grant, data)
        client.tell("put_end", **put, written=[key])
        assert client.get(key) == data
        with pytest.raises(plain.PoolError, match="the node refuses"):
            path.move(there, grant, bytes(size))
        assert client.get(key) == data
    assert is_well(client, node)


def test_altered_bytes_end_the_connection_and_nothing_else(client: Any, node: PoolProcess) -> None:
    key, put = client.credential.key_of("altered"), {"writer": client.me, "ticket": 700}
    granted = client.ask("put_start", **put, keys=[key], tenant="acme")
    (engine_id, endpoints, _), region, _, [offset], grant = granted["places"]
    with closing(plain.DataPath(client.credential, engine_id, endpoints["tcp"])) as path:
        path.sent.number += 1  # as if a message had been dropped
        with pytest.raises((plain.PoolError, OSError)):
            path.move((region, offset, client.block_bytes), grant, bytes(client.block_bytes))
    client.tell("put_end", **put, dropped=[key])
    assert client.find(key) is None
    assert is_well(client, node)

"""`mooncake serve --role kvstore` as a process of its own: used, asked, drained, killed, and warm
again from its disk.
"""

from __future__ import annotations

import json
import random
import re
import signal
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.base import Tier, Unavailable
from mooncake.base.rights import CredentialRole
from mooncake.cli import main as cli
from mooncake.identity.credential import issue, own_credential
from mooncake.launch.host.secrets.credentials import sign_request
from mooncake.launch.pool_client.session import PoolSession, locate
from tests.support.kvstore.pool_process import SECRET, PoolProcess, has_ipv6, until
from tests.support.model.checkpoints import write_config_only
from tests.support.waiting import LONG_S


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config_only(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def node(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    home = tmp_path_factory.mktemp("node")
    words = ("--dram", "1MiB", "--tenant-quota", "alice=256KiB")
    with PoolProcess(model, home / "log", *words) as running:
        yield running


def blocks_of(session: PoolSession, *numbers: int) -> dict[bytes, bytes]:
    size = session.block_bytes
    return {n.to_bytes(16, "big"): random.Random(n).randbytes(size) for n in numbers}


def ask(url: str, method: str = "GET", key: str = SECRET) -> tuple[int, Any]:
    given = ""
    for _ in range(2):
        headers = {"Authorization": given} if given else {}
        try:
            request = urllib.request.Request(url, method=method, headers=headers)
            with urllib.request.urlopen(request, timeout=LONG_S) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            answer = error.code, error.read()
            challenge = (error.headers.get("WWW-Authenticate") or "").partition(" ")[2]
            credential = own_credential(key or "no secret", CredentialRole.OPERATOR)
            given = sign_request(credential, method, urllib.parse.urlsplit(url).path, challenge)
    return answer


def test_a_warm_restart_after_a_drain(model: Path, tmp_path: Path) -> None:
    words = ("--dram", "1MiB", "--ssd", f"{tmp_path / 'ssd'}:8MiB")
    with PoolProcess(model, tmp_path / "log1", *words) as first, first.session() as session:
        blocks = blocks_of(session, *range(20))
        assert session.put(blocks) == list(blocks)
        assert session.get(list(blocks)[:12]) == list(blocks.values())[:12]
        assert session.stat().num_ssd_stored == 0, "DRAM has room"
        assert first.stop(signal.SIGTERM) == 0
    with PoolProcess(model, tmp_path / "log2", *words) as second, second.session() as session:
        until(lambda: session.stat().num_ssd_stored == 12, "blocks used twice are found again")
        assert session.exists(list(blocks)) == [Tier.SSD] * 12 + [None] * 8
        assert session.get(list(blocks)) == list(blocks.values())[:12]
        assert session.exists(list(blocks)[:12]) == [Tier.DRAM] * 12
        counters = session.stat().load.counters
        assert counters["ssd_blocks_found"] == counters["ssd_blocks_read"] == 12
        assert counters["ssd_blocks_corrupt"] == 0


def test_a_warm_restart_after_kill_9(model: Path, tmp_path: Path) -> None:
    disks = ",".join(f"{tmp_path / name}:4MiB" for name in "ab")
    words = ("--dram", "1MiB", "--ssd", disks, "--ssd-min-uses", "1", "--ssd-write-at", "0")
    with PoolProcess(model, tmp_path / "log1", *words) as first, first.session() as session:
        blocks = blocks_of(session, *range(20))
        session.put(blocks)
        until(lambda: session.stat().num_ssd_stored == 20, "every block goes down at once")
        first.stop(signal.SIGKILL)
    with PoolProcess(model, tmp_path / "log2", *words) as second, second.session() as session:
        until(lambda: session.stat().num_ssd_stored == 20, "all blocks are found again")
        assert session.get(list(blocks)) == list(blocks.values())


def test_more_than_dram_holds_comes_back_from_ssd(model: Path, tmp_path: Path) -> None:
    words = ("--dram", "256KiB", "--ssd", f"{tmp_path / 'ssd'}:8MiB", "--ssd-min-uses", "1")
    with PoolProcess(model, tmp_path / "log", *words) as node, node.session() as session:
        num_dram = session.stat().load.num_total_blocks
        blocks = blocks_of(session, *range(3 * num_dram))
        for number, key in enumerate(blocks):
            session.put({key: blocks[key]})
            wanted = number - num_dram * 3 // 4
            until(lambda w=wanted: session.stat().num_ssd_stored > w, "older blocks go down")
        found = [session.get([key]) for key in blocks]
        assert found == [[data] for data in blocks.values()]
        assert session.stat().load.counters["ssd_blocks_too_late"] == 0


def test_what_operators_ask(node: PoolProcess) -> None:
    until(lambda: ask(f"{node.url}/health", key="")[0] == 200, "it has joined")
    assert ask(f"{node.url}/v1/pool/stats", key="wrong")[0] == 401
    assert ask(f"{node.url}/v1/pool/drain", "POST", key="")[0] == 401
    assert ask(f"{node.url}/v1/pool/drain")[0] == 405
    assert ask(f"{node.url}/nowhere")[0] == 404
    status, body = ask(f"{node.url}/v1/pool/stats")
    stats = json.loads(body)
    assert (status, stats["draining"], stats["ssd_blocks"]) == (200, False, 0)
    with node.session() as session:
        session.put(blocks_of(session, 1, 2, 3))
        session.stat()  # one channel keeps its order: the node has heard of the end of the put
        status, text = ask(f"{node.url}/metrics", key="")
        stored = f'mooncake_pool_dram_blocks_stored{{worker="{stats["worker"]}"}} 3.0'
        assert (status, stored in text.decode()) == (200, True)
        session.remove(list(blocks_of(session, 1, 2, 3)))


def test_the_pool_command(
    node: PoolProcess, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    def pool(*words: str) -> tuple[int, bytes]:
        code = cli.run(["pool", *words, "--url", node.url, "--cluster-secret", SECRET])
        return code, capsysbinary.readouterr().out

    data = random.Random(5).randbytes(100_000)
    (tmp_path / "in").write_bytes(data)
    assert pool("put", "thing", str(tmp_path / "in")) == (0, b"thing: 97.7 KiB\n")
    assert pool("put", "thing", str(tmp_path / "in"))[0] == 1, "there already"
    assert pool("get", "thing") == (0, data)
    assert pool("get", "thing", "--tenant", "other")[0] == 1
    code, said = pool("get", "thing", "--out", str(tmp_path / "out"), "--json")
    assert (code, json.loads(said)["num_bytes"]) == (0, len(data))
    assert (tmp_path / "out").read_bytes() == data
    stats = json.loads(pool("stats", "--json")[1])
    assert stats["dram_blocks_stored"] >= 100_000 // stats["block_bytes"]
    (tmp_path / "hers").write_bytes(data[: 3 * stats["block_bytes"]])
    assert pool("put", "hers", str(tmp_path / "hers"), "--tenant", "alice")[0] == 0
    said = pool("stats")[1]
    assert b"dram_blocks_stored" in said
    may = (256 << 10) // stats["block_bytes"]
    assert re.search(rb"tenant alice +dram: 4 of %d " % may, said), "three blocks and a head"
    assert pool("pin", "thing", "--hard") == (0, b"thing: pinned\n")
    assert pool("replicate", "thing", "--nodes", "1") == (0, b"thing: on 1 nodes\n")
    assert pool("replicate", "thing") == (1, b"thing: on 1 nodes\n"), "there is no other"
    assert pool("replicate", "other") == (1, b"other: not there\n")
    assert pool("evict", "thing")[0] == 1, "a hard pin is on it"
    assert pool("unpin", "thing", "other")[0] == 1, "there is no other"
    assert pool("evict", "thing") == (0, b"thing: gone\n")
    assert pool("evict", "thing")[0] == 1
    assert pool("get", "thing")[0] == 1
    assert pool("put", "kept", str(tmp_path / "in"))[0] == 0
    (tmp_path / "large").write_bytes(random.Random(6).randbytes(2 << 20))
    assert pool("put", "large", str(tmp_path / "large"))[0] == 1, "no room"
    assert pool("get", "kept") == (0, data), "what can never fit drives nothing out"
    assert pool("evict", "kept")[0] == 0


def test_the_pool_is_measured_and_left_as_it_was(
    node: PoolProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    def bench(*words: str) -> tuple[int, str]:
        code = cli.run(["pool", "bench", "--url", node.url, "--cluster-secret", SECRET, *words])
        return code, capsys.readouterr().out

    with node.session() as session:
        session.put(blocks_of(session, *range(900, 920)))
        before = session.stat().load.num_cached_blocks
    code, said = bench("--batch", "3", "--rounds", "4", "--transport", "tcp", "--json")
    found = json.loads(said)
    assert (code, found["wrong_blocks"], found["missing_blocks"]) == (0, 0, 0)
    assert found["put"]["gigabytes_per_s"] > 0
    assert 0 < found["get"]["p50_s"] <= found["get"]["p99_s"]
    moved = 2 * (4 + 1) * 3 * found["block_bytes"]
    assert [link["protocol"] for link in found["links"]] == ["tcp"]
    assert sum(link["num_bytes"] for link in found["links"]) >= moved, "all by the way asked for"
    code, said = bench("--batch", "1", "--rounds", "1")
    assert (code, "blocks missing: 0, wrong: 0" in said) == (0, True)
    assert bench("--batch", "1000000", "--rounds", "1")[0] == 1, "not by eviction"
    assert bench("--rounds", "0")[0] == 2
    with node.session() as session:
        assert session.stat().load.num_cached_blocks == before, "it takes its blocks out again"


def test_pins_outlive_their_client_and_are_fenced_by_the_nodes_boot(node: PoolProcess) -> None:
    with node.session() as session:
        blocks = blocks_of(session, 1, 2, 3)
        session.put(blocks)
        pinned = session.pin([*blocks, b"not there".ljust(16)], hard=True)
        assert pinned.blocks == [True] * 3 + [False]
    with node.session() as session:
        many = blocks_of(session, *range(100, 500))
        for key, data in many.items():
            session.put({key: data})
        assert session.get(list(blocks)) == list(blocks.values()), "not evicted"
        assert session.unpin(list(blocks), epochs=["an earlier boot"]).blocks == [False] * 3
        assert session.stat().num_hard_pinned == 3
        assert session.unpin(list(blocks), epochs=pinned.epochs).blocks == [True] * 3
        assert session.stat().num_hard_pinned == 0
        session.remove([*blocks, *many])


def test_a_drained_node_takes_nothing_and_still_gives(model: Path, tmp_path: Path) -> None:
    with PoolProcess(model, tmp_path / "log", "--dram", "1MiB") as node, node.session() as session:
        blocks = blocks_of(session, *range(4))
        session.put(blocks)
        assert session.put_value("one", b"the same bytes")
        status, body = ask(f"{node.url}/v1/pool/drain", "POST")
        assert (status, json.loads(body)["draining"]) == (202, True)
        assert ask(f"{node.url}/health", key="")[0] == 503
        until(lambda: session.stat().drained, "nothing is open")
        assert session.put(blocks_of(session, 9)) == []
        for data in (b"the same bytes", b"others"):
            with pytest.raises(Unavailable, match=r"no room for 'two' .*: kvstore-.* drains"):
                session.put_value("two", data)
        assert session.get(list(blocks)) == list(blocks.values())
        words = ["pool", "drain", "--url", node.url, "--cluster-secret", SECRET, "--json"]
        assert cli.run(words) == 0
        assert node.stop(signal.SIGTERM) == 0
        until(lambda: "has ended; blocks copied to other nodes: 0" in node.output, "it says so")


def test_a_lost_client_leaves_nothing_behind(node: PoolProcess) -> None:
    with node.session() as session:
        session.put(blocks_of(session, 50))
        assert session.stat().load.num_waiting == 0
    with node.session() as session:
        assert session.exists(list(blocks_of(session, 50))) == [Tier.DRAM]
        assert session.stat().load.num_running == 0


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")
def test_a_pool_of_ipv6_only(model: Path, tmp_path: Path) -> None:
    words = ("--dram", "1MiB", "--bind-host", "::1", "--transport", "tcp")
    with PoolProcess(model, tmp_path / "log1", *words, "--admin-host", "::1") as first:
        config = locate(first.url, SECRET)
        assert config.gateway_address.startswith("tcp://[::1]:")
        assert config.bind_host == "::1", "where the node can answer"
        more = ("--node-id", "second", "--join", config.gateway_address)
        with (
            PoolProcess(model, tmp_path / "log2", *words, *more) as second,
            second.session(transfer_protocols=["tcp"]) as session,
        ):
            until(lambda: len(session.nodes) == 2, "the client knows both nodes")
            blocks = blocks_of(session, *range(8))
            assert session.put(blocks) == list(blocks)
            assert session.replicate(list(blocks), 2) == 2
            second.stop(signal.SIGKILL)
            assert session.get(list(blocks)) == list(blocks.values()), "from the first"


def test_nodes_join_and_clients_find_theirs(node: PoolProcess, model: Path, tmp_path: Path) -> None:
    config = locate(node.url, SECRET)
    words = ("--dram", "1MiB", "--node-id", "second", "--join", config.gateway_address)
    with PoolProcess(model, tmp_path / "log", *words) as second:
        assert locate(second.url, SECRET).gateway_address == config.gateway_address
        with second.session(store_address="", node_id="second") as session:
            session.connect()
            blocks = blocks_of(session, 70)
            session.put(blocks)
            session.stat()
            with second.session() as direct:
                assert direct.get(list(blocks)) == list(blocks.values())
        with node.session() as session:
            assert session.exists(list(blocks)) == [None]
        until(lambda: "kvstore-second has joined the pool" in second.output, "it says so")


def test_a_second_node_of_one_name_on_one_machine_is_refused(
    node: PoolProcess, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be taken for the first one started again, which would be given up."""
    join = ("--join", locate(node.url, SECRET).gateway_address, "--cluster-secret", SECRET)
    assert cli.run(["serve", str(model), "--role", "kvstore", "--dram", "1MiB", *join]) == 2
    assert "runs on this machine already" in capsys.readouterr().err
    until(lambda: ask(f"{node.url}/health", key="")[0] == 200, "the first goes on")


@pytest.mark.slow  # it asks for ten seconds, as other roles do
def test_a_node_with_another_secret_ends_and_says_so(
    node: PoolProcess, model: Path, tmp_path: Path
) -> None:
    address = locate(node.url, SECRET).gateway_address
    join = ("--join", address, "--cluster-secret", "of another cluster", "--node-id", "stranger")
    with PoolProcess(model, tmp_path / "log", "--dram", "1MiB", *join) as stranger:
        assert stranger.process.wait(LONG_S) == 4, stranger.output
        place = address.partition("#")[0]
        assert f"cluster-secret: the gateway at {place} has another one" in stranger.output
    until(lambda: ask(f"{node.url}/health", key="")[0] == 200, "the pool goes on")


def test_who_did_what_is_written_down(model: Path, tmp_path: Path) -> None:
    """With names, without keys, in a file that logrotate moves away; and SIGHUP ends nothing."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what was started by nohup would ignore it
    place, moved = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    words = ("--dram", "1MiB", "--audit-log", str(place), "--cluster-secret-file", str(secret))
    with PoolProcess(model, tmp_path / "log", *words) as node:

        def events(file: Path, name: str) -> list[dict[str, Any]]:
            found = [json.loads(line) for line in file.read_text().splitlines()]
            return [each for each in found if each["event"] == name]

        client = issue(SECRET, "etl", [CredentialRole.POOL_CLIENT], tenant="acme")
        with node.session(cluster_secret=client.text) as session:
            blocks = blocks_of(session, 1, 2)
            session.put(blocks)
            session.remove(list(blocks))
        # Once as a node, and once as the gateway that tells it to nodes that are away.
        for removal in (removals := events(place, "removal")):
            who = removal["who"], removal["num_blocks"], removal["whence"]
            assert who == ("etl", 2, "127.0.0.1")
            assert removal["process"] == "pool"
        assert len(removals) == 2
        for _ in range(3):
            assert ask(f"{node.url}/v1/pool/stats", key="a wrong secret")[0] == 401
        failed = events(place, "proof_failed")
        assert {(each["whence"], each["path"]) for each in failed} == {
            ("127.0.0.1", "/v1/pool/stats")
        }
        with node.session(cluster_secret=client.text) as session:
            session.drain()
            until(lambda: bool(events(place, "message_refused")), "it may not")
        (refused,) = events(place, "message_refused")
        assert "may not send Drain" in refused["reason"]
        place.rename(moved)
        node.process.send_signal(signal.SIGHUP)
        until(place.exists, "the file is made anew")
        secret.write_text(f"{SECRET}\nthe next one\n")
        until(lambda: bool(events(place, "secret_read")), "the new secret counts")
        operator = issue(SECRET, "ann", [CredentialRole.OPERATOR])
        assert ask(f"{node.url}/v1/pool/drain", "POST", operator.text)[0] == 202
        (route,) = [e for e in events(place, "operator_route") if e["path"] == "/v1/pool/drain"]
        assert route["who"] == "ann"
        written = moved.read_text() + place.read_text()
        assert not any(each in written for each in (SECRET, "the next one", operator.text))
        assert node.stop(signal.SIGTERM) == 0


def health(node: PoolProcess) -> tuple[int, str]:
    """Return how a node says that it is."""
    status, body = ask(f"{node.url}/health", key="")
    return status, json.loads(body)["status"]


def test_a_node_that_hears_no_gateway_is_not_well(model: Path, tmp_path: Path) -> None:
    words = ("--dram", "1MiB", "--node-id", "lonely", "--join", "tcp://127.0.0.1:9")
    with PoolProcess(model, tmp_path / "log", *words) as lonely:
        until(lambda: health(lonely) != (503, "starting"), "it has started")
        assert health(lonely) == (503, "joining")
        assert lonely.stop(signal.SIGTERM) == 0
        assert "Traceback" not in lonely.output

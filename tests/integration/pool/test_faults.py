"""A pool node, as a process of its own, through what can befall it: killed at any moment, stopped,
its disk full, unwilling or rotten, two writers of one key, a wall clock that jumps. Whatever
happens, no wrong byte is served, no memory stays lost, and it works again afterwards. Among its
clients is the worker's side of the vLLM connector.

`make soak-pool` for a long look.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import threading
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.base import MooncakeError, Tier
from mooncake.kvstore.storage.block_record import PAGE_BYTES, aligned
from mooncake.launch.pool_client.session import PoolSession
from tests.support.integrations.mover_traffic import MoverTraffic
from tests.support.kvstore.forked_node import ForkedNode
from tests.support.kvstore.pool_process import SECRET, PoolProcess, until
from tests.support.kvstore.pool_traffic import (
    Traffic,
    blocks_of,
    check_nothing_is_held,
    content,
    key_of,
)
from tests.support.model.checkpoints import write_config_only
from tests.support.ports import free_port
from tests.support.waiting import LONG_S

NUM_KILLS = int(os.environ.get("MOONCAKE_NUM_KILLS", "8"))
NUM_KEYS = 60
AT_ONCE = ("--ssd-min-uses", "1", "--ssd-write-at", "0")
"""Every block goes down to disk as soon as it is whole."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose blocks are of 144 KiB: a put takes long enough to be interrupted."""
    changes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2}
    return write_config_only(tmp_path_factory.mktemp("model") / "wide", **changes)


def present(session: PoolSession) -> list[bytes]:
    """Return the keys that the node says it has, each of them fetched and found right."""
    keys = [key_of(number) for number in range(NUM_KEYS)]
    tiers = session.exists(keys)
    there = [key for key, tier in zip(keys, tiers, strict=True) if tier is not None]
    for key in there:
        assert session.get([key]) in ([], [content(key, session.block_bytes)]), "a wrong block"
    return there


def check_it_works(session: PoolSession, number: int) -> None:
    blocks = blocks_of(session, [number])
    assert session.put(blocks) == list(blocks)
    assert session.get(list(blocks)) == list(blocks.values())
    session.remove(list(blocks))


def test_killed_in_mid_put_and_mid_get(model: Path, tmp_path: Path) -> None:
    chance, words = random.Random(5), ("--dram", "4MiB", "--ssd", f"{tmp_path}/ssd:16MiB", *AT_ONCE)
    behind: deque[Traffic] = deque()
    num_found = num_ok = 0

    def look_after(num_left: int) -> int:
        """See how clients of lost nodes ended, but for the last; return what they had done."""
        num_done = 0
        while len(behind) > num_left:
            client = behind.popleft()
            client.join(LONG_S)
            assert not client.is_alive(), "a client hangs"
            assert (client.wrong, client.num_errors) == ([], 1)
            client.session.close()
            num_done += client.num_ok
        return num_done

    for number in range(NUM_KILLS):
        with ForkedNode(model, tmp_path / f"log{number}", *words) as node:
            with node.session() as session:
                num_found += len(present(session))
                check_it_works(session, 1000 + number)
                check_nothing_is_held(session)
            ways = [node.session(transfer_protocols=[way], timeout_s=6.0) for way in ("tcp", "shm")]
            clients = [Traffic(way, 2 * number + n, NUM_KEYS) for n, way in enumerate(ways)]
            for client in clients:
                client.start()
            until(lambda c=clients: all(a.num_ok > 1 or a.num_errors for a in c), "bytes move")
            threading.Event().wait(chance.random() * 0.2)  # then at any moment
            node.stop(signal.SIGKILL)
        behind.extend(clients)
        # Those of the last rounds may still wait for an answer; the next node need not.
        num_ok += look_after(8)
    num_ok += look_after(0)
    assert num_ok > 2 * NUM_KILLS, "hardly a byte moved"
    assert num_found > 0, "no restart ever found a block of the boot before"


def test_clients_of_the_vllm_connector_outlive_killed_nodes(model: Path, tmp_path: Path) -> None:
    """They are never closed meanwhile. Each life of the node finds blocks of the one before."""
    port = free_port()
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(SECRET)
    words = (
        "--dram",
        "4MiB",
        "--ssd",
        f"{tmp_path}/ssd:16MiB",
        *AT_ONCE,
        "--admin-port",
        str(port),
    )
    chance, clients = random.Random(6), list[MoverTraffic]()
    for number in range(NUM_KILLS + 1):
        with ForkedNode(model, tmp_path / f"log{number}", *words) as node:
            with node.session() as session:
                if not clients:
                    clients += (
                        MoverTraffic(node.url, secret, session.block_bytes, seed, NUM_KEYS // 2)
                        for seed in (1, 2)
                    )
                    for client in clients:
                        client.start()
                marks = [(client, client.num_loaded) for client in clients]
                until(
                    lambda m=marks: all(client.num_loaded > before for client, before in m),
                    "both clients load what the pool has",
                )
                if number == NUM_KILLS:
                    for client in clients:
                        client.stop()
                    check_nothing_is_held(session)
                    continue
            threading.Event().wait(chance.random() * 0.2)  # then at any moment
            node.stop(signal.SIGKILL)
    assert [(client.wrong, client.unasked) for client in clients] == [([], set())] * 2


def test_a_stopped_node_is_an_error_not_a_hang(model: Path, tmp_path: Path) -> None:
    with (
        ForkedNode(model, tmp_path / "log", "--dram", "4MiB") as node,
        node.session(timeout_s=1.0, transfer_protocols=["tcp"]) as session,
    ):
        client = Traffic(session, 1, NUM_KEYS, patient=True)
        client.start()
        until(lambda: client.num_ok > 1, "bytes move")
        node.process.send_signal(signal.SIGSTOP)
        try:
            errors = client.num_errors
            until(lambda: client.num_errors > errors, "the deadline fires")
        finally:
            node.process.send_signal(signal.SIGCONT)
        with node.session() as other:
            done = client.num_ok
            until(lambda: client.num_ok > done + 2, "the same client goes on")
            client.stop()
            client.join(LONG_S)
            assert client.wrong == []
            check_nothing_is_held(other)
            counters = other.stat().load.counters  # what the gateway's metrics are made of
            assert counters["transfer_tcp_served_bytes"] >= client.num_ok
            check_it_works(other, 1000)
        with urllib.request.urlopen(f"{node.url}/metrics", timeout=LONG_S) as reply:
            text = reply.read().decode()
        assert 'mooncake_transfer_bytes_total{nic="127.0.0.1"' in text
        assert 'protocol="tcp_served"' in text


def test_two_writers_of_one_key(model: Path, tmp_path: Path) -> None:
    rounds = 20
    with ForkedNode(model, tmp_path / "log", "--dram", "8MiB") as node:
        barrier = threading.Barrier(2)
        written: list[list[bool]] = [[], []]

        def write(mine: int) -> None:
            with node.session() as session:
                for number in range(rounds):
                    data = bytes([mine + 1]) * session.block_bytes
                    barrier.wait(LONG_S)
                    written[mine].append(bool(session.put({key_of(number): data})))

        threads = [threading.Thread(target=write, args=(mine,)) for mine in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len(each) for each in written] == [rounds, rounds], "a writer failed"
        with node.session() as session:
            for number in range(rounds):
                winners = [mine for mine in (0, 1) if written[mine][number]]
                assert len(winners) == 1, "both, or neither, were told that theirs is stored"
                data = bytes([winners[0] + 1]) * session.block_bytes
                assert session.get([key_of(number)]) == [data]
            check_nothing_is_held(session)


def test_rot_on_disk_is_never_served(model: Path, tmp_path: Path) -> None:
    words = ("--dram", "4MiB", "--ssd", f"{tmp_path}/ssd:16MiB", *AT_ONCE)
    count = 20
    with ForkedNode(model, tmp_path / "log1", *words) as node, node.session() as session:
        session.put(blocks_of(session, range(count)))
        until(lambda: session.stat().num_ssd_stored == count, "all blocks are on disk")
        size = session.block_bytes
        node.stop(signal.SIGKILL)
    [path] = (tmp_path / "ssd").glob("segment-*.kv")
    data = bytearray(path.read_bytes())
    # A page about the file, a page for each of its slots, then the blocks.
    blocks_begin = PAGE_BYTES * (1 + (len(data) - PAGE_BYTES) // (PAGE_BYTES + aligned(size)))
    in_header, in_data = range(4), range(4, 10)
    for slot in in_header:
        data[PAGE_BYTES * (1 + slot) + 20] ^= 1
    for slot in in_data:
        data[blocks_begin + slot * aligned(size) + random.Random(slot).randrange(size)] ^= 0x40
    path.write_bytes(data)
    with ForkedNode(model, tmp_path / "log2", *words) as node, node.session() as session:
        until(lambda: session.stat().num_ssd_stored == count - len(in_header), "the rest is found")
        blocks = blocks_of(session, range(count))
        got = {key: session.get([key]) for key in blocks}
        assert all(got[key] in ([], [blocks[key]]) for key in blocks)
        lost = [key for key in blocks if not got[key]]
        assert len(lost) == len(in_header) + len(in_data)
        counters = session.stat().load.counters
        assert counters["ssd_blocks_torn"] >= len(in_header)
        assert counters["ssd_blocks_corrupt"] == len(in_data)
        assert session.exists(lost) == [None] * len(lost), "forgotten, not asked for again"
        for key in lost:
            assert session.put({key: blocks[key]}) == [key], "written anew"
            assert session.get([key]) == [blocks[key]]
        check_nothing_is_held(session)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(path)]
    mounted = subprocess.run(words, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs leave to mount a tmpfs: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_costs_only_the_disk(model: Path, tmp_path: Path, small_disk: Path) -> None:
    words = ("--dram", "4MiB", "--ssd", f"{small_disk}/ssd:16MiB", *AT_ONCE)
    with ForkedNode(model, tmp_path / "log", *words) as node, node.session() as session:
        (small_disk / "something else").write_bytes(bytes(19 * 2**20))
        blocks = blocks_of(session, range(40))
        for key, data in blocks.items():
            assert session.put({key: data}) == [key]
        until(lambda: session.stat().load.counters["ssd_blocks_no_room"] > 0, "it is noticed")
        for key, data in blocks.items():
            assert session.get([key]) in ([], [data])
        check_nothing_is_held(session)
        check_it_works(session, 1000)


def test_a_disk_that_refuses_costs_only_what_it_held(model: Path, tmp_path: Path) -> None:
    words = ("--dram", "1MiB", "--ssd", f"{tmp_path}/ssd:16MiB", *AT_ONCE)
    with ForkedNode(model, tmp_path / "log", *words) as node, node.session() as session:
        blocks = blocks_of(session, range(20))
        first = list(blocks)[:10]
        for number, key in enumerate(first, start=1):
            session.put({key: blocks[key]})
            until(lambda n=number: session.stat().num_ssd_stored >= n, "blocks go down")
        allowed = resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, (0, allowed[1]))
        for key in list(blocks)[10:]:
            assert session.put({key: blocks[key]}) == [key]
        until(lambda: session.stat().load.counters["ssd_write_errors"] > 0, "writes are refused")
        for path in (tmp_path / "ssd").glob("segment-*.kv"):
            os.truncate(path, PAGE_BYTES)  # now reads are, too
        on_disk = [key for key in first if session.exists([key]) == [Tier.SSD]]
        assert on_disk, "all are still in memory"
        assert [session.get([key]) for key in on_disk] == [[]] * len(on_disk), "a miss each"
        assert session.stat().load.counters["ssd_read_errors"] == len(on_disk)
        assert session.exists(on_disk) == [None] * len(on_disk)
        for key, data in blocks.items():
            assert session.get([key]) in ([], [data])
        check_nothing_is_held(session)
        resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, allowed)
        check_it_works(session, 1000)


JUMPING_CLOCK = """
import itertools, time
jumps = itertools.cycle([0.0, 4e9, 1.7e9, -5.0, 2e9])
time.time = lambda: next(jumps)
time.time_ns = lambda: int(next(jumps) * 1e9)
open({seen!r}, "a").write("jumps")
"""


def test_a_wall_clock_that_jumps_changes_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(JUMPING_CLOCK.format(seen=str(seen)))
    searched = [str(tmp_path / "path"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(searched))
    words = ("--dram", "4MiB", "--ssd", f"{tmp_path}/ssd:16MiB", *AT_ONCE)
    with PoolProcess(model, tmp_path / "log", *words) as node, node.session() as session:
        assert seen.read_text(), "the node's clock jumps"
        blocks = blocks_of(session, range(20))
        assert session.put(blocks) == list(blocks)
        until(lambda: session.stat().num_ssd_stored == 20, "blocks go down")
        clients = [Traffic(node.session(), seed, NUM_KEYS) for seed in (1, 2)]
        for client in clients:
            client.start()
        until(lambda: all(client.num_ok > 20 for client in clients), "work goes on")
        for client in clients:
            client.stop()
            client.join(LONG_S)
            assert (client.wrong, client.num_errors) == ([], 0)
        present(session)
        check_nothing_is_held(session)


def test_a_lost_node_is_an_error_at_once_for_later_requests(model: Path, tmp_path: Path) -> None:
    with ForkedNode(model, tmp_path / "log", "--dram", "1MiB") as node:
        session = node.session(timeout_s=2.0)
        node.stop(signal.SIGKILL)
        with pytest.raises(MooncakeError):
            session.get([key_of(1)])
        session.close()

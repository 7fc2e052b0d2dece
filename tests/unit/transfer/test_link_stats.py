"""Counters of links."""

from __future__ import annotations

import threading

import pytest

from mooncake.transfer.link_stats import LATENCY_BOUNDS_S, LinkStats


def test_bytes_latency_and_busy_time() -> None:
    stats = LinkStats("rdma")
    stats.arrived("nic0", "peer", 1000, posted_s=0.0, now_s=0.0001)
    stats.arrived("nic0", "peer", 1000, posted_s=0.00005, now_s=0.0002)  # overlaps the first
    stats.arrived("nic0", "peer", 2000, posted_s=1.0, now_s=3.0)
    stats.retried("nic0", "peer", 3)
    stats.failed("nic0", "peer")
    (link,) = stats.snapshot()
    assert (link.protocol, link.nic, link.peer) == ("rdma", "nic0", "peer")
    assert (link.num_bytes, link.num_slices) == (4000, 3)
    assert link.busy_s == pytest.approx(2.0002)
    assert link.gigabytes_per_s == pytest.approx(4000 / 2.0002 / 1e9)
    assert (link.num_retries, link.num_failures) == (3, 1)
    assert sum(link.latency_buckets) == 3
    assert link.latency_buckets[-1] == 1  # two seconds are beyond the last bound
    assert link.latency_buckets[LATENCY_BOUNDS_S.index(1e-4)] == 1


def test_links_are_apart_and_sorted() -> None:
    stats = LinkStats("tcp")
    for nic, peer in (("b", "x"), ("a", "y"), ("a", "x")):
        stats.failed(nic, peer)
    assert [(link.nic, link.peer) for link in stats.snapshot()] == [
        ("a", "x"), ("a", "y"), ("b", "x"),
    ]  # fmt: skip
    assert stats.snapshot()[0].gigabytes_per_s == 0.0


def test_the_oldest_links_are_forgotten_when_there_are_many() -> None:
    stats = LinkStats("tcp")
    for number in range(5000):
        stats.failed("nic", f"peer {number:05}")
    names = [link.peer for link in stats.snapshot()]
    assert len(names) == 4096
    assert names[-1] == "peer 04999"
    assert "peer 00000" not in names
    assert stats.totals()["transfer_tcp_failures"] == 5000, "totals never fall"


def test_links_of_peers_that_are_gone_go_when_others_come() -> None:
    stats = LinkStats("tcp")
    for number in range(200):  # one a minute; each lives for just that
        stats.arrived("nic", f"peer {number:03}", 10, posted_s=60 * number, now_s=60 * number + 1)
        stats.arrived("nic", "old friend", 10, posted_s=60 * number, now_s=60 * number + 2)
    links = {link.peer: link.num_bytes for link in stats.snapshot()}
    assert links.pop("old friend") == 10 * 200, "a link in use goes on counting"
    assert sorted(links) == [f"peer {number:03}" for number in range(200 - len(links), 200)]
    assert 60 <= len(links) <= 61, "those of an hour"
    assert stats.totals()["transfer_tcp_bytes"] == 2 * 10 * 200


def test_threads_count_together() -> None:
    stats = LinkStats("tcp")

    def count(peer: str) -> None:
        for number in range(2000):
            stats.arrived("nic", peer, 3, posted_s=number, now_s=number + 0.5)
            stats.retried("nic", peer)

    threads = [threading.Thread(target=count, args=(peer,)) for peer in ("a", "a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals = stats.totals()
    assert totals["transfer_tcp_bytes"] == 3 * 3 * 2000
    assert totals["transfer_tcp_slices"] == totals["transfer_tcp_retries"] == 3 * 2000
    assert totals["transfer_tcp_seconds"] == sum(link.busy_s for link in stats.snapshot())

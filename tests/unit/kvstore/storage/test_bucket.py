"""Objects of a bucket: what was written comes back the same, and nothing else comes back ever."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from mooncake.base import ConfigError
from mooncake.kvstore.config import MAX_OBJECTS, ObjectStoreConfig
from mooncake.kvstore.storage.bucket import StoreError
from mooncake.kvstore.storage.disk import NO_SLOT, DiskBlock, Outcome
from tests.support.kvstore.bucket_scene import KEYS, SIZE, BucketScene, DictStore
from tests.support.kvstore.disk_bench import key
from tests.support.waiting import LONG_S

PLAIN_AND_NOT = pytest.mark.parametrize("keys", ["", KEYS[0]], ids=["plain", "encrypted"])


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@PLAIN_AND_NOT
def test_blocks_come_back_as_they_went(store: DictStore, keys: str) -> None:
    scene = BucketScene(store, keys)
    wanted = [scene.fill(place) for place in range(2)]
    written = scene.bucket.write([scene.block(1, 0), scene.block(2, 1, "bö/b")])
    assert written[0] == [Outcome.OK] * 2
    other = BucketScene(store, keys)
    assert other.found() == {key(1): "alice", key(2): "bö/b"}
    assert other.bucket.read([other.block(1, 2), other.block(2, 3, "bö/b")]) == written
    assert [bytes(other.data(place)) for place in (2, 3)] == wanted
    assert other.bucket.read([other.block(1, 2, "bob")])[0] == [Outcome.ABSENT]
    assert other.bucket.erase([DiskBlock(key(2), NO_SLOT, 0)])[0] == [Outcome.OK]
    assert scene.found() == {key(1): "alice"}
    assert scene.bucket.read([scene.block(2, 3, "bö/b")])[0] == [Outcome.ABSENT]


def test_nodes_with_other_keys_or_prefixes_see_nothing_of_each_other(store: DictStore) -> None:
    scene = BucketScene(store, KEYS[0])
    data = scene.fill(0)
    scene.bucket.write([scene.block(1, 0)])
    [stored] = store.objects.values()
    assert not any(data[at : at + 16] in stored for at in range(0, SIZE, 256))
    assert key(1) not in stored
    others = (BucketScene(store), BucketScene(store, KEYS[1]), BucketScene(store, KEYS[0], "there"))
    for other in others:
        assert other.found() == {}
        assert other.bucket.read([other.block(1, 1)])[0] == [Outcome.ABSENT]
    both = BucketScene(store, f"{KEYS[1]} {KEYS[0]}")
    assert both.found() == {key(1): "alice"}
    assert both.bucket.read([both.block(1, 1)])[0] == [Outcome.OK]
    assert bytes(both.data(1)) == data


@PLAIN_AND_NOT
@pytest.mark.parametrize("at", [5, 20, 4096 + 5, -17])
def test_an_object_that_was_altered_is_no_block(store: DictStore, keys: str, at: int) -> None:
    scene = BucketScene(store, keys)
    scene.fill(0)
    scene.bucket.write([scene.block(1, 0)])
    [(name, stored)] = store.objects.items()
    altered = bytearray(stored)
    altered[at] ^= 1
    for body in (bytes(altered), stored[:-100], b"", bytes(len(stored) + 10)):
        store.objects[name] = body
        assert scene.bucket.read([scene.block(1, 1)])[0] == [Outcome.CORRUPT]


@PLAIN_AND_NOT
def test_an_object_under_the_name_of_another_is_no_block(store: DictStore, keys: str) -> None:
    scene = BucketScene(store, keys)
    scene.fill(0)
    scene.bucket.write([scene.block(1, 0), scene.block(2, 0)])
    first, second = store.objects
    store.objects[first] = store.objects[second]
    assert scene.bucket.read([scene.block(1, 1)])[0] == [Outcome.CORRUPT]


def test_with_keys_nobody_without_them_can_make_a_block(store: DictStore) -> None:
    scene, forger = BucketScene(store, KEYS[0]), BucketScene(store, KEYS[1])
    scene.fill(0)
    scene.bucket.write([scene.block(1, 0)])
    [name] = store.objects
    forger.bucket.write([forger.block(1, 0)])
    [forged] = [body for each, body in store.objects.items() if each != name]
    store.objects[name] = forged
    assert scene.bucket.read([scene.block(1, 1)])[0] == [Outcome.CORRUPT]


def test_a_long_listing_comes_in_pieces(store: DictStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.kvstore.storage.bucket.PIECE", 3)
    scene = BucketScene(store)
    scene.bucket.write([scene.block(number, 0) for number in range(7)])
    assert [len(event.found) for event in scene.bucket.scan(0)] == [3, 3, 1]
    assert len(scene.found()) == 7


def test_a_node_that_stops_does_not_wait_for_the_rest_of_a_listing(
    store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = BucketScene(store)
    scene.bucket.write([scene.block(number, 0) for number in range(7)])
    listed = store.listed

    def listed_until_it_stops(prefix: str) -> Iterator[tuple[str, float]]:
        for number, entry in enumerate(listed(prefix)):
            if number == 3:
                scene.bucket.close()
            assert number <= 3, "it has stopped"
            yield entry

    monkeypatch.setattr(store, "listed", listed_until_it_stops)
    [scanned] = scene.bucket.scan(0)
    assert (len(scanned.found), scanned.failed) == (3, False)


def test_slow_writes_leave_threads_to_reads(store: DictStore) -> None:
    bucket = BucketScene(store).bucket
    began, ended = queue.SimpleQueue[str](), threading.Event()

    def write() -> None:
        began.put("write")
        ended.wait(LONG_S)

    for _ in range(8):
        bucket.threads.put(write)
    assert [began.get(timeout=LONG_S) for _ in range(4)] == ["write"] * 4
    for _ in range(4):
        bucket.threads.put(lambda: began.put("read"), urgent=True)
    assert [began.get(timeout=LONG_S) for _ in range(4)] == ["read"] * 4
    ended.set()
    assert [began.get(timeout=LONG_S) for _ in range(4)] == ["write"] * 4
    bucket.close()


def test_a_listing_skips_what_is_no_block_and_ends_at_its_bound(
    store: DictStore, caplog: pytest.LogCaptureFixture
) -> None:
    scene = BucketScene(store)
    scene.fill(0)
    scene.bucket.write([scene.block(1, 0)])
    folder = next(iter(store.objects)).rpartition("/")[0]
    whole = key(3).hex()
    for name in (
        "notes", "00.YQ", f"{whole}.!!", f"{whole}.YWxpY2U=", whole, f"{whole}.YQ.YQ",
        f"{whole}A.YQ", f"{whole}.gA", "é" * 32, f"{whole[:-2]}  .YQ",
    ):  # fmt: skip
        store.objects[f"{folder}/{name}"] = b""
    assert scene.found() == {key(1): "alice"}
    scene.bucket.write([scene.block(number, 0, "") for number in range(10, 20)])
    assert len(scene.found()) == 11
    assert len(BucketScene(store, num_blocks=11).found()) == 11
    assert not caplog.records
    small = BucketScene(store, num_blocks=5)
    wanted = [key(number) for number in range(15, 20)]
    assert list(small.found()) == list(small.found()) == wanted, "those written last"
    scene.bucket.write([scene.block(10, 0, "")])
    assert list(small.found()) == [*wanted[1:], key(10)]
    assert [record.levelname for record in caplog.records] == ["WARNING"], "told once"
    assert "more than the 5 blocks that this node may use" in caplog.text


@pytest.mark.parametrize("error", [StoreError("it is down"), KeyError("a defect")])
def test_a_store_that_fails_has_lost_nothing(
    store: DictStore, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    scene = BucketScene(store)
    scene.fill(0)
    scene.bucket.write([scene.block(1, 0)])
    store.error = error
    assert scene.bucket.read([scene.block(1, 1)] * 2)[0] == [Outcome.LATER] * 2
    assert scene.bucket.write([scene.block(1, 0)])[0] == [Outcome.FAILED]
    assert scene.bucket.erase([scene.block(1, 0)])[0] == [Outcome.FAILED]
    [scanned] = scene.bucket.scan(3)
    assert (scanned.disk, scanned.found, scanned.failed) == (3, [], True)
    assert len(caplog.records) == 1, "the first of a row of failures"
    store.error = None
    assert scene.bucket.read([scene.block(1, 1)])[0] == [Outcome.OK]
    store.error = error
    list(scene.bucket.scan(3))
    assert len(caplog.records) == 2


def test_what_a_node_uses_is_bounded(store: DictStore) -> None:
    assert BucketScene(store, num_blocks=7).bucket.num_slots == 7
    assert BucketScene(store, num_blocks=1 << 30).bucket.num_slots == MAX_OBJECTS
    with pytest.raises(ConfigError, match="a prefix of 256 bytes at most"):
        ObjectStoreConfig(bucket="b", num_bytes=1, prefix="x" * 257)
    with pytest.raises(ConfigError, match="give a bucket"):
        ObjectStoreConfig(bucket="", num_bytes=1)

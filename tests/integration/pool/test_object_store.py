"""A bucket of a real server below the pool: what one cluster wrote, the next one reads; no trouble
of the server is more than a miss.
"""

from __future__ import annotations

import random
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake.base import Tier
from mooncake.cli import main as cli
from mooncake.kvstore.config import ObjectStoreConfig
from mooncake.kvstore.storage.bucket import StoreError
from mooncake.kvstore.storage.disk import NO_SLOT, DiskBlock, Outcome
from tests.support.kvstore.bucket_scene import KEYS, BucketScene
from tests.support.kvstore.disk_bench import key
from tests.support.kvstore.pool_process import PoolProcess, until
from tests.support.kvstore.s3_server import BUCKET, CREDENTIALS, S3Server, s3_server
from tests.support.model.checkpoints import write_config_only

pytest.importorskip("botocore", reason="make install brings it")
pytest.importorskip("moto", reason="make install brings it")

NUM_BLOCKS = 12
WAIT_S = 60.0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config_only(tmp_path_factory.mktemp("model") / "small")


def store_of(server: S3Server, bucket: str = BUCKET) -> Any:
    """Return the store of a node, which waits for as long as a busy machine may take."""
    from mooncake.kvstore.storage.s3 import S3Store

    config = ObjectStoreConfig(bucket=bucket, num_bytes=1, endpoint=server.url)
    return S3Store(config, 2, WAIT_S, WAIT_S)


@pytest.mark.parametrize("keys", ["", KEYS[0]], ids=["plain", "encrypted"])
def test_blocks_come_back_as_they_went(server: S3Server, keys: str) -> None:
    scene = BucketScene(store_of(server), keys)
    data = scene.fill(0)
    written = scene.bucket.write([scene.block(1, 0, "bö/b")])
    other = BucketScene(store_of(server), keys)
    assert other.found() == {key(1): "bö/b"}
    assert other.bucket.read([other.block(1, 3, "bö/b")]) == written
    assert bytes(other.data(3)) == data
    assert other.bucket.erase([DiskBlock(key(1), NO_SLOT, 0)])[0] == [Outcome.OK]
    assert scene.found() == {}
    assert scene.bucket.read([scene.block(1, 3, "bö/b")])[0] == [Outcome.ABSENT]


def test_a_listing_goes_on_after_a_page(server: S3Server) -> None:
    store = store_of(server)
    names = [f"many/{number}" for number in range(7)]
    for name in [*names, "others/1"]:
        store.put(name, bytearray(b"x"))
    page = store._writer.list_objects_v2
    store._writer.list_objects_v2 = lambda **words: page(**words, MaxKeys=3)
    assert [name for name, _ in store.listed("many/")] == names
    store.put("many/3", bytearray(b"anew"))
    written_s = dict(store.listed("many/"))
    assert max(written_s.values()) == written_s["many/3"]
    store.delete("many/3")
    store.delete("many/3")


def test_of_a_large_object_only_the_beginning_is_read(server: S3Server) -> None:
    store, out = store_of(server), memoryview(bytearray(3 << 20))
    store.put("large", bytearray(b"ab" * (2 << 20)))
    assert store.get("large", out) == len(out)
    assert bytes(out[-2:]) == b"ab"
    assert store.get("small", out) is None


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n"


@pytest.mark.parametrize("at_once", [b"", ANSWER + b"\r\n"], ids=["head", "body"])
def test_an_object_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch, at_once: bytes) -> None:
    """Each byte comes soon after the last one, and the whole too late."""
    from mooncake.kvstore.storage.s3 import S3Store

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    over, num_left = threading.Event(), 400

    def drip(listener: socket.socket) -> None:
        nonlocal num_left
        asker, _ = listener.accept()
        with asker, suppress(OSError):
            asker.recv(1 << 16)
            asker.sendall(at_once)
            head = ANSWER + b"X-Long: " + b"x" * 400 + b"\r\n\r\n"
            for byte in head if not at_once else bytes(400):
                over.wait(0.02)
                asker.sendall(bytes([byte]))
                num_left -= 1

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = ObjectStoreConfig(bucket="b", num_bytes=1, endpoint=endpoint)
        try:
            with pytest.raises(StoreError):
                S3Store(config, 1, 0.5).get("slow", memoryview(bytearray(500)))
            assert num_left > 0, "it did not wait for all"
        finally:
            over.set()
            thread.join()


def test_a_release_of_botocore_in_which_answers_are_not_bounded_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mooncake.kvstore.storage.s3 import S3Store, bound_answers

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    S3Store(ObjectStoreConfig(bucket="b", num_bytes=1, endpoint="http://127.0.0.1:1"), 1, 1.0)
    assert "not bounded" not in caplog.text
    copies = SimpleNamespace(
        _pool_classes_by_scheme={}, _manager=SimpleNamespace(pool_classes_by_scheme={})
    )
    for other in (SimpleNamespace(), SimpleNamespace(http_session=copies)):
        bound_answers(SimpleNamespace(_endpoint=other))
        assert "not bounded" in caplog.text
        caplog.clear()


def test_a_block_may_take_as_long_to_send_as_to_be_answered(server: S3Server) -> None:
    """A request is sent within the time to connect: in 2 s a slow line takes no block at all."""
    assert store_of(server)._writer.meta.config.connect_timeout == WAIT_S


def test_a_server_that_refuses_or_is_gone_is_an_error_without_secrets(
    server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    there, nowhere = store_of(server), store_of(server, "no-such-bucket")
    there.put("one", bytearray(b"x"))
    stores = [nowhere]
    for _ in range(2):
        for store in stores:
            for call in (
                lambda s=store: s.put("one", bytearray(b"x")),
                lambda s=store: s.get("one", memoryview(bytearray(1))),
                lambda s=store: s.delete("one"),
                lambda s=store: list(s.listed("o")),
            ):
                with pytest.raises(StoreError) as failed:
                    call()
                assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in str(failed.value)
        server.stop()
        stores = [there]
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in caplog.text


def test_a_new_pool_reads_what_another_left_in_the_bucket(
    server: S3Server, model: Path, tmp_path: Path
) -> None:
    words = (
        "--dram", "1MiB", "--object-store", f"s3://{BUCKET}/team", "--object-endpoint", server.url,
        "--object-min-uses", "1", "--ssd-load-timeout-s", "60",
    )  # fmt: skip
    draw = random.Random(1)
    with PoolProcess(model, tmp_path / "log1", *words) as node, node.session() as session:
        blocks = {
            draw.randbytes(16): draw.randbytes(session.block_bytes) for _ in range(NUM_BLOCKS)
        }
        assert session.put(blocks) == list(blocks)
        until(lambda: session.stat().num_objects_known == NUM_BLOCKS, "all go to the bucket")
        node.stop(signal.SIGKILL)
    assert len(server.objects()) == NUM_BLOCKS
    assert all(name.startswith("team/") for name in server.objects())
    with PoolProcess(model, tmp_path / "log2", *words) as node, node.session() as session:
        until(lambda: session.stat().num_objects_known == NUM_BLOCKS, "all are found")
        assert session.exists(list(blocks)) == [Tier.OBJECT] * NUM_BLOCKS
        until(lambda: session.get(list(blocks)) == list(blocks.values()), "all can be read")
        assert session.exists(list(blocks)) == [Tier.DRAM] * NUM_BLOCKS
        assert session.stat().load.counters["object_blocks_read"] == NUM_BLOCKS
        gone = list(blocks)[:3]
        assert session.remove(gone) == [True] * 3
        assert len(server.objects()) == NUM_BLOCKS - 3
    with PoolProcess(model, tmp_path / "log3", *words) as node, node.session() as session:
        until(lambda: session.stat().num_objects_known == NUM_BLOCKS - 3, "the others are found")
        server.stop()
        assert session.get(list(blocks)[3:]) == [], "a miss"
        assert session.put({gone[0]: blocks[gone[0]]}) == gone[:1], "the rest goes on"
        assert session.get(gone[:1]) == [blocks[gone[0]]]
    for log in tmp_path.glob("log*"):
        assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in log.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--object-store", "blocks"], "'blocks' is not s3://BUCKET or s3://BUCKET/PREFIX"),
        (["--object-store", "s3://a:b@blocks"], "no credentials"),
        (["--object-store", "a:b@blocks"], "no credentials"),
        (["--object-endpoint", "http://h"], "object-endpoint: there is no bucket; add"),
        (["--object-store", "s3://b", "--object-endpoint", "http://a:b@h"], "no credentials"),
        (["--object-store", "s3://b", "--ssd-encryption"], "ssd-key: --ssd-encryption takes 32"),
    ],
)
def test_mistakes_show_at_the_start(
    words: list[str],
    message: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MOONCAKE_SSD_KEY", raising=False)
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", "s")
    assert cli.run(["serve", str(model), "--role", "kvstore", "--dry-run", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "a:b" not in said, "credentials"

"""The connector for LMCache against a stand-in of LMCache's interface, with a pool in memory."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mooncake.base import ConfigError, TransferError
from tests.support.integrations.lmcache import PLUGIN, Backend, Config, Memory, Metadata, stand_in
from tests.support.integrations.memory_pool import Pool, Session, in_memory
from tests.support.kvstore.node_world import LAYOUT

SETTINGS = {
    "pool_urls": ["http://a:1"], "cluster_secret_file": "secret", "tenant": "acme",
    "revision": "abc", "staging_bytes": 6 * LAYOUT.block_bytes,
}  # fmt: skip


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    found = in_memory(monkeypatch)
    with stand_in():
        yield found


def config_of(**settings: Any) -> Config:
    return Config({**PLUGIN, "mooncake": {**SETTINGS, **settings}})


@pytest.fixture
def opened() -> Iterator[Callable[..., Backend]]:
    """Opens backends, closes them in the end, and looks whether all their memory is free then."""
    backends: list[Backend] = []

    def opened(config: Config | None = None, **given: Any) -> Backend:
        backends.append(Backend(config or config_of(), **given))
        return backends[-1]

    yield opened
    for backend in backends:
        backend.close()
    assert [backend.memory.num_taken for backend in backends] == [0] * len(backends)


Open = Callable[..., Backend]


def test_another_server_loads_what_one_has_saved(opened: Open, pool: Pool) -> None:
    one, other = opened(), opened()
    one.save(range(5))
    assert other.load(range(5)) == 5
    assert other.load([3, 1, 4]) == 3, "each chunk stands for itself"
    assert other.load([2, 9, 3]) == 1, "a run ends with the first that is missing"
    assert other.load([9]) == 0
    one.save(range(5))
    size = other.connector.full_chunk_size_bytes
    assert len(pool.blocks) == 5 * -(-size // LAYOUT.block_bytes)


def test_what_the_pool_holds_is_found_in_every_way(opened: Open) -> None:
    backend = opened()
    backend.save(range(2))
    connector, keys = backend.connector, [backend.key(number) for number in (0, 1, 7, 1)]
    assert [backend.run(connector.exists(key)) for key in keys] == [True, True, False, True]
    assert [connector.exists_sync(key) for key in keys] == [True, True, False, True]
    assert connector.support_batched_contains()
    assert connector.batched_contains(keys) == 2
    assert backend.run(connector.batched_async_contains("id", keys)) == 2
    assert backend.run(connector.list()) == []
    assert connector.remove_sync(keys[0]) is False
    assert connector.exists_sync(keys[0]), "it belongs to other servers, too"


def test_single_chunks_and_runs_that_do_not_block(opened: Open) -> None:
    backend = opened()
    connector, chunk = backend.connector, backend.chunk(3)
    backend.run(connector.put(backend.key(3), chunk))
    assert chunk.count == 1, "LMCache counts"
    found = backend.run(connector.get(backend.key(3)))
    assert torch.equal(found.data, chunk.data)
    assert backend.run(connector.get(backend.key(4))) is None
    keys = [backend.key(3), backend.key(4)]
    [same] = backend.run(connector.batched_get_non_blocking("id", keys))
    assert torch.equal(same.data, chunk.data)
    for each in (chunk, found, same):
        each.ref_count_down()


def test_chunks_that_are_not_full_are_left_out(opened: Open) -> None:
    backend = opened()
    backend.save([0], num_tokens=5)
    assert backend.load([0]) == 0
    backend.save([0])
    assert backend.load([0]) == 1


def test_as_many_chunks_come_as_lmcache_has_memory_for(opened: Open) -> None:
    backend = opened(memory=Memory(num_chunks=3))
    backend.save(range(3))
    found = backend.run(backend.connector.batched_get([backend.key(n) for n in range(5)]))
    assert [each is not None for each in found] == [True, True, True, False, False]
    for each in found[:3]:
        each.ref_count_down()


@pytest.mark.parametrize("error", [TransferError("broken"), ValueError("a bug")], ids=repr)
def test_a_pool_that_fails_is_a_miss_and_is_used_again(
    opened: Open, pool: Pool, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened()
    backend.save(range(2))
    pool.error = error
    with caplog.at_level(logging.WARNING):
        assert backend.load(range(2)) == 0
        assert not backend.run(backend.connector.exists(backend.key(0)))
        backend.save(range(2, 4))
    assert caplog.text
    pool.error = None
    assert backend.load(range(4)) == 2


def test_memory_is_used_no_more_once_a_load_that_was_given_up_has_ended(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened()
    backend.save(range(2))
    begun, goes_on = threading.Event(), threading.Event()
    get_into = Session.get_into

    def slow(session: Session, keys: list[bytes], offsets: list[int]) -> int:
        begun.set()
        assert goes_on.wait(60.0)
        return get_into(session, keys, offsets)

    monkeypatch.setattr(Session, "get_into", slow)
    keys = [backend.key(number) for number in range(2)]
    load = asyncio.run_coroutine_threadsafe(backend.connector.batched_get(keys), backend.loop)
    assert begun.wait(60.0)
    load.cancel()
    assert backend.memory.num_taken == 2, "they may still be written to"
    goes_on.set()


def test_chunks_stay_until_a_save_that_was_given_up_has_read_them(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened()
    begun, goes_on = threading.Event(), threading.Event()
    exists = Session.exists

    def slow(session: Session, keys: list[bytes]) -> Any:
        begun.set()
        assert goes_on.wait(60.0)
        return exists(session, keys)

    monkeypatch.setattr(Session, "exists", slow)
    backend.save([1])
    chunk = backend.chunk(1)
    save = asyncio.run_coroutine_threadsafe(
        backend.connector.put(backend.key(1), chunk), backend.loop
    )
    assert begun.wait(60.0)
    save.cancel()
    chunk.ref_count_down()
    assert backend.memory.num_taken == 1, "the connector has not read it"
    goes_on.set()


KINDS: list[tuple[dict[str, Any], Metadata]] = [
    ({"revision": "abd"}, Metadata()), ({"namespace": "n"}, Metadata()),
    ({"model": "org/other"}, Metadata()), ({}, Metadata(model_name="org/other")),
    ({}, Metadata(worker_id=1)), ({}, Metadata(dtype=torch.float16)),
    ({}, Metadata(shape=(2, 3, 8, 16))),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "metadata"), KINDS)
def test_servers_of_another_kind_share_nothing(
    settings: dict[str, Any], metadata: Metadata, opened: Open
) -> None:
    opened().save(range(2))
    assert opened().load(range(2)) == 2
    assert opened(config_of(**settings), metadata=metadata).load(range(2)) == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(PLUGIN), "cluster_secret_file"),
        (Config({**PLUGIN, "mooncake": 5}), "cluster_secret_file"),
        (config_of(pool_url="x"), "extra_config: mooncake: .*pool_url"),
        (config_of(revision=""), "the revision of org/model is unknown"),
        (Config(config_of().extra_config, use_layerwise=True), "use_layerwise"),
        (Config(config_of().extra_config, remote_serde="cachegen"), "remote_serde: .*'cachegen'"),
    ],
)
def test_what_cannot_be_shared_ends_the_start(config: Config, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Backend(config)

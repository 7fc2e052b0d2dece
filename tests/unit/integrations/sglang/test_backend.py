"""The HiCache backend against a stand-in of SGLang's contract, with a pool in memory."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mooncake.base import ConfigError, TransferError
from tests.support.integrations.hicache import (
    BACKEND,
    Controller,
    HostMemory,
    StorageConfig,
    stand_in,
)
from tests.support.integrations.memory_pool import Pool, in_memory
from tests.support.kvstore.node_world import LAYOUT


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    found = in_memory(monkeypatch)
    with stand_in():
        yield found


def config_of(**changes: Any) -> StorageConfig:
    settings = {
        "pool_urls": ["http://a:1"], "cluster_secret_file": "secret", "tenant": "acme",
        "revision": "abc", "staging_bytes": 6 * LAYOUT.block_bytes,
    }  # fmt: skip
    settings |= changes.pop("settings", {})
    extra = {**BACKEND, **changes.pop("extra", {}), "mooncake": settings}
    return StorageConfig(model_name="org/model", extra_config=extra, **changes)


HASHES = [f"{n:064x}" for n in range(200)]


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
@pytest.mark.parametrize("is_mla", [False, True])
@pytest.mark.parametrize("interface", [0, 1])
def test_another_server_loads_what_one_has_saved(
    layout: str, is_mla: bool, interface: int, pool: Pool
) -> None:
    config = config_of(is_mla_model=is_mla, extra={"interface_v1": interface})
    one, other = (HostMemory(layout, is_mla) for _ in range(2))
    for page in range(6):
        one.fill(page, page)
    assert Controller(config, one).backup(HASHES[:6], range(6)) == 6
    reader = Controller(config, other)
    places = [9, 3, 4, 15, 0, 7]
    assert reader.prefetch(HASHES[:6], places) == 6
    for page, place in enumerate(places):
        assert torch.equal(other.page(place), one.page(page))
    assert reader.prefetch(HASHES[1:9], range(8)) == 5, "a run ends with the first that is missing"
    assert reader.prefetch(HASHES[6:9], range(3)) == 0
    page_bytes = one.get_size_per_token() * one.page_size
    assert len(pool.blocks) == 6 * -(-page_bytes // LAYOUT.block_bytes)


def test_more_than_a_batch_and_than_staging_memory_holds() -> None:
    memory = HostMemory(num_pages=200)
    for page in range(200):
        memory.fill(page, page)
    saved = memory.kv_buffer.clone()
    controller = Controller(config_of(), memory)
    assert controller.backup(HASHES, range(200)) == 200
    memory.kv_buffer.zero_()
    assert controller.prefetch(HASHES, range(200)) == 200
    assert torch.equal(memory.kv_buffer, saved)


def test_single_pages_are_found_saved_and_loaded_as_tensors() -> None:
    memory = HostMemory()
    backend = Controller(config_of(), memory).backend
    page = torch.arange(memory.get_dummy_flat_data_page().numel()).to(torch.bfloat16)
    assert backend.get(HASHES[0]) is None
    assert backend.set(HASHES[0], page)
    assert backend.set(HASHES[0], page), "it is there"
    assert torch.equal(backend.get(HASHES[0]), page)
    target = torch.zeros_like(page)
    assert backend.get(HASHES[0], target) is target
    assert torch.equal(target, page)
    found = backend.batch_get(HASHES[:2], [target, torch.zeros_like(page)])
    assert (found[0] is target, found[1]) == (True, None)
    assert not backend.exists(HASHES[0]), "pages of host memory lie in another form"
    assert all(backend.batch_set_v1(HASHES[:1], memory.indices_of([2])))
    assert backend.exists(HASHES[0])
    assert backend.get_stats() is None
    backend.close()


def test_a_pool_without_room_says_which_pages_it_holds(pool: Pool) -> None:
    memory = HostMemory()
    backend = Controller(config_of(), memory).backend
    per_page = -(-memory.get_size_per_token() * memory.page_size // LAYOUT.block_bytes)
    pool.max_blocks = 2 * per_page + 1
    assert backend.batch_set_v1(HASHES[:4], memory.indices_of(range(4))) == [
        True, True, False, per_page == 1
    ]  # fmt: skip
    assert backend.batch_exists(HASHES[:4]) == 2


@pytest.mark.parametrize("error", [TransferError("broken"), ValueError("a bug")], ids=repr)
def test_a_pool_that_fails_is_a_miss_and_is_used_again(pool: Pool, error: Exception) -> None:
    memory = HostMemory()
    controller = Controller(config_of(), memory)
    assert controller.backup(HASHES[:2], range(2)) == 2
    pool.error = error
    backend, indices = controller.backend, memory.indices_of(range(2))
    assert backend.batch_exists(HASHES[:2]) == 0
    assert backend.batch_get_v1(HASHES[:2], indices) == [False, False]
    assert backend.batch_set_v1(HASHES[2:4], indices) == [False, False]
    assert backend.get(HASHES[0]) is None
    assert not backend.set(HASHES[0], memory.get_dummy_flat_data_page())
    pool.error = None
    assert controller.prefetch(HASHES[:2], range(2)) == 2


def test_memory_that_lies_in_several_pieces_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    backend = Controller(config_of(), HostMemory()).backend
    with caplog.at_level(logging.ERROR):
        assert not backend.set(HASHES[0], torch.zeros(4, 6).t())
        assert backend.batch_get_v1(HASHES[:3], torch.arange(4)) == [False] * 3
    assert "because of a bug" in caplog.text


KINDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tp_rank": 1, "tp_size": 2}, {}), ({"pp_rank": 1, "pp_size": 2}, {}),
    ({"attn_cp_rank": 1, "attn_cp_size": 2}, {}), ({"is_mla_model": True}, {"is_mla": True}),
    ({"settings": {"revision": "abd"}}, {}), ({"settings": {"namespace": "n"}}, {}),
    ({"settings": {"model": "org/other"}}, {}), ({}, {"dtype": torch.float16}),
    ({}, {"layout": "page_first_direct"}), ({}, {"page_size": 8}), ({}, {"layer_num": 2}),
    ({}, {"head_num": 1, "head_dim": 16}),
]  # fmt: skip


@pytest.mark.parametrize(("rank", "memory"), KINDS)
def test_servers_of_another_kind_share_nothing(
    rank: dict[str, Any], memory: dict[str, Any]
) -> None:
    assert Controller(config_of(), HostMemory()).backup(HASHES[:3], range(3)) == 3
    assert Controller(config_of(), HostMemory()).prefetch(HASHES[:3], range(3)) == 3
    other = Controller(config_of(**rank), HostMemory(**memory))
    assert other.prefetch(HASHES[:3], range(3)) == 0


def test_ranks_of_mla_share_and_another_version_does_not() -> None:
    ranks = [config_of(is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)]
    assert Controller(ranks[0], HostMemory(is_mla=True)).backup(HASHES[:3], range(3)) == 3
    assert Controller(ranks[1], HostMemory(is_mla=True)).prefetch(HASHES[:3], range(3)) == 3
    with stand_in("0.6.0"):
        assert Controller(ranks[1], HostMemory(is_mla=True)).prefetch(HASHES[:3], range(3)) == 0


def test_a_server_that_was_cleared_uses_the_pool_no_more(pool: Pool) -> None:
    memory = HostMemory()
    controller = Controller(config_of(), memory)
    assert controller.backup(HASHES[:2], range(2)) == 2
    held = dict(pool.blocks)
    controller.backend.clear()
    assert pool.blocks == held, "they belong to others too"
    backend, indices = controller.backend, memory.indices_of(range(2))
    assert controller.prefetch(HASHES[:2], range(2)) == 0
    assert backend.batch_get_v1(HASHES[:2], indices) == [False, False]
    assert backend.batch_set_v1(HASHES[2:4], indices) == [False, False]
    assert backend.get(HASHES[0]) is None
    assert not backend.set(HASHES[0], memory.get_dummy_flat_data_page())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra_config": None}, "cluster_secret_file"),
        ({"extra_config": {**BACKEND, "mooncake": 5}}, "cluster_secret_file"),
        ({"settings": {"pool_url": "x"}}, "mooncake: .*pool_url"),
        ({"settings": {"revision": ""}}, "the revision of org/model is unknown"),
        ({"should_split_heads": True}, "tp_lcm_size"),
    ],
)
def test_what_cannot_be_shared_ends_the_start(changes: dict[str, Any], words: str) -> None:
    if "extra_config" in changes:
        config = StorageConfig(model_name="org/model", **changes)
    else:
        config = config_of(**changes)
    backend = importlib.import_module(str(BACKEND["module_path"]))
    with pytest.raises(ConfigError, match=words):
        backend.MooncakeHiCache(config, {})


def test_memory_of_a_second_kind_ends_the_start() -> None:
    backend = Controller(config_of(), HostMemory()).backend
    backend.register_mem_host_pool_v2(HostMemory(), "kv")
    with pytest.raises(ConfigError, match="'mamba'"):
        backend.register_mem_host_pool_v2(HostMemory(), "mamba")


def test_weights_in_a_directory_need_no_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    config = config_of(settings={"revision": "", "model": str(tmp_path / "model")})
    assert Controller(config, HostMemory()).backup(HASHES[:1], range(1)) == 1

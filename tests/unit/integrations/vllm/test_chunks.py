"""Keys of chunks: equal for one kind of engine and equal tokens from the first on, else not."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from mooncake.integrations.vllm.chunks import EngineKind, Packing, RankKv, TokenChain

KIND = EngineKind(
    engine="vllm 0.32.0", weights="abc", config="{}", dtype="float32", quantization="None",
    kv_dtype="auto", pages="16 tokens: a (2, 16, 64) float32", attention="CPU_ATTN avx2", tp_size=2,
    pp_size=1, rank=0,
)  # fmt: skip
RANK = RankKv(KIND.fingerprint, 100)


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(EngineKind)])
def test_whatever_differs_makes_another_kind(name: str) -> None:
    value = getattr(KIND, name)
    other = dataclasses.replace(
        KIND, **{name: value + 1 if isinstance(value, int) else value + "x"}
    )
    assert other.fingerprint != KIND.fingerprint
    chain = [b"k" * 16]
    packing = Packing(100, 1)
    keys = packing.part_keys(RankKv(other.fingerprint, 100), chain)
    assert keys != packing.part_keys(RANK, chain)


def test_a_kind_has_one_name() -> None:
    assert dataclasses.replace(KIND).fingerprint == KIND.fingerprint


@pytest.mark.parametrize(
    ("pool_block", "block", "blocks", "parts"),
    [(100, 100, 1, 1), (100, 30, 3, 1), (100, 101, 1, 2), (100, 450, 1, 5), (64, 1, 64, 1)],
)
def test_a_chunk_fills_pool_blocks(pool_block: int, block: int, blocks: int, parts: int) -> None:
    rank = RankKv(b"r", block)
    packing = Packing.of(pool_block, [rank])
    assert (packing.blocks, packing.num_parts(rank)) == (blocks, parts)
    assert packing.blocks * block <= parts * pool_block


def test_ranks_with_fewer_layers_have_the_same_chunks() -> None:
    ranks = [RankKv(b"a", 30), RankKv(b"b", 45)]
    packing = Packing.of(100, ranks)
    assert packing.blocks == 2
    assert [packing.num_parts(rank) for rank in ranks] == [1, 1]


def test_every_part_has_a_key_of_its_own() -> None:
    chain = [bytes([n]) * 16 for n in range(3)]
    keys = Packing(40, 1).part_keys(RANK, chain)
    assert len(keys) == len(set(keys)) == 9
    assert keys[3:6] == Packing(40, 1).part_keys(RANK, chain[1:2])
    assert not set(keys) & set(Packing(50, 1).part_keys(RANK, chain)), "a pool of other blocks"


def test_a_chain_grows_with_its_tokens() -> None:
    tokens = list(range(100))
    whole = TokenChain("", "", 16).upto(tokens, 6)
    grown = TokenChain("", "", 16)
    for count in (1, 1, 3, 6):
        assert grown.upto(tokens[: count * 16 + 3], count) == whole[:count]
    assert len(set(whole)) == 6


def test_chains_of_other_beginnings_salts_namespaces_and_sizes_share_no_key() -> None:
    tokens = list(range(64))
    chains = [
        TokenChain("", "", 16).upto(tokens, 4),
        TokenChain("", "", 16).upto([7, *tokens[1:]], 4),
        TokenChain("", "salt", 16).upto(tokens, 4),
        TokenChain("salt", "", 16).upto(tokens, 4),
        TokenChain("", "", 32).upto(tokens, 2),
    ]
    for one, other in pairwise(chains):
        assert not set(one) & set(other)
    assert len({key for chain in chains for key in chain}) == 18

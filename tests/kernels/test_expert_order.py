"""Pairs in expert order and their tiles: every pair of a known expert in exactly one tile."""

from __future__ import annotations

import pytest
import torch
from mooncake_kernels.triton import expert_order
from mooncake_kernels.triton.expert_order import expert_tiles

from tests.support.kernels.gates import DEVICE


def check(experts: torch.Tensor, num_experts: int, tile_rows: int) -> None:
    found = expert_tiles(experts.to(DEVICE), num_experts, tile_rows, blocks=3)
    assert found.arrived.tolist() == [0] * 3 * found.max_tiles
    flat = experts.flatten().tolist()
    known = [pair for pair, expert in enumerate(flat) if 0 <= expert < num_experts]
    wanted = sorted(known, key=lambda pair: (flat[pair], pair))
    order = found.order.tolist()
    assert order[: len(wanted)] == wanted
    assert sorted(order) == list(range(len(flat)))
    count = int(found.num_tiles)
    assert count <= found.max_tiles
    covered = []
    for tile in range(count):
        begin, end = int(found.tile_begin[tile]), int(found.tile_end[tile])
        assert 0 < end - begin <= tile_rows
        assert {flat[pair] for pair in order[begin:end]} == {int(found.tile_expert[tile])}
        covered += range(begin, end)
    assert covered == list(range(len(wanted)))


@pytest.mark.parametrize("seed", range(4))
def test_random_choices(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens, k, num_experts = [(1, 2, 3), (13, 4, 7), (40, 3, 17), (5, 8, 8)][seed]
    check(torch.randint(0, num_experts, (tokens, k), generator=generator), num_experts, 4)


def test_experts_of_other_ranks_get_no_tile() -> None:
    check(torch.tensor([[0, 9], [-1, 2], [3, 700], [2, 2]]), 4, 2)
    check(torch.full((3, 2), 11), 5, 2)


def test_all_pairs_on_one_expert() -> None:
    check(torch.full((9, 2), 3), 6, 4)
    check(torch.full((70, 2), 3), 6, 16)


def test_few_kernels_for_all_numbers_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, and whether a tensor begins at a multiple of 16 bytes, make a kernel to compile."""
    compiled = set()

    def noted(*tensors: torch.Tensor | int, **constants: int) -> None:
        places = [each.data_ptr() % 16 for each in tensors if isinstance(each, torch.Tensor)]
        compiled.add((constants["BLOCK"], *places))

    monkeypatch.setattr(expert_order, "_sort_and_tile", {(1,): noted})
    for tokens in (1, 2, 3, 7, 16, 40, 63, 64, 200, 256):
        expert_tiles(torch.zeros(tokens, 8, dtype=torch.int64), 384, 16)
    assert len(compiled) == 3


def test_many_pairs_are_sorted_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_order, "_SORTED_BY_ONE", (8,))
    generator = torch.Generator().manual_seed(9)
    check(torch.randint(-1, 6, (30, 2), generator=generator), 5, 4)


def test_counting_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_order, "_SORTED_BY_ONE", (8,))
    monkeypatch.setattr(expert_order, "_COUNT_CHUNK", 16)
    generator = torch.Generator().manual_seed(10)
    check(torch.randint(0, 5, (25, 2), generator=generator), 5, 4)


def test_no_tokens() -> None:
    found = expert_tiles(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 4, 4)
    assert int(found.num_tiles) == 0

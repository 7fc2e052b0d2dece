"""Agents over pools of different sizes: what they ask, and what tiers behind the DRAM are worth."""

from __future__ import annotations

import pytest

from benchmarks import pool_agents
from benchmarks.pool_agents import agents, ideal, play


def test_each_turn_begins_with_all_that_was_said_before() -> None:
    lines = agents(3, 1.0, seed=5)
    turns = {}
    for line in lines:
        assert len(line.hash_ids) == -(-line.input_length // 512)
        own = line.hash_ids[pool_agents.COMMON_BLOCKS]
        before = turns.get(own, line.hash_ids[: pool_agents.COMMON_BLOCKS])
        whole = [one for one in before if one in line.hash_ids]
        assert line.hash_ids[: len(whole)] == whole
        assert len(before) - len(whole) <= 1, "only the last block, which was not full"
        turns[own] = line.hash_ids
    assert len(turns) == 3
    assert 0.8 < ideal(lines) < 1


def test_tiers_behind_a_small_pool_keep_what_falls_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_agents, "NUM_PREFILL", 1)
    monkeypatch.setattr(pool_agents, "NUM_DECODE", 4)
    monkeypatch.setattr(pool_agents, "HBM_TOKENS", 32_000)
    monkeypatch.setattr(pool_agents, "TURNS", (5, 7))
    lines = agents(8, 0.2, seed=5)
    shares = {
        name: play(lines, 10_000, **more).cache.hit_rate for name, more in pool_agents.TIERS.items()
    }
    dram, ssd, bucket, slow_bucket = shares.values()
    most = round(ideal(lines), 4)
    assert dram + 0.03 < ssd <= most
    assert dram + 0.03 < bucket <= most
    assert slow_bucket < bucket - 0.03, "computing is faster"
    assert play(lines, 0).cache.hit_rate < bucket - 0.03

"""The simulated load of a large model: what ranks need of its files, and how queues add up."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from benchmarks.lent_weights_simulated import (
    FIGURES,
    IN_FLIGHT,
    Load,
    Needed,
    Stage,
    needed_by_ranks,
    stages,
)
from mooncake.base import ModelSpec, Shape
from mooncake.launch.config.shipped import configs, figures
from mooncake.model.checkpoint.files.revision import PIECE_BYTES
from mooncake.sim.world.cost_model import HardwareFigures


def needed(words: str, num_layers: int = 6) -> list[Needed]:
    """Return what ranks need of the first layers of Kimi-K2."""
    path = configs() / "models" / "kimi-k2-instruct" / "config.json"
    config: dict[str, Any] = json.loads(path.read_bytes())
    spec = msgspec.structs.replace(ModelSpec.from_config(config), num_hidden_layers=num_layers)
    return needed_by_ranks(spec, config, Shape.parse(words))


def test_one_rank_needs_each_piece_once() -> None:
    [alone] = needed("tp1")
    assert alone.num_pieces == -(-alone.num_bytes // PIECE_BYTES)


def test_ranks_with_columns_of_every_expert_need_nearly_all_pieces() -> None:
    [alone] = needed("tp1")
    cut, whole = needed("tp8"), needed("tp8-ep8")
    assert all(each.num_pieces > 0.85 * alone.num_pieces for each in cut)
    assert sum(each.num_pieces for each in whole) < 1.5 * alone.num_pieces
    for ranks in (cut, whole):  # norms and latent projections are whole on each
        assert alone.num_bytes < sum(each.num_bytes for each in ranks) < 1.2 * alone.num_bytes


def test_the_slowest_queue_sets_the_time() -> None:
    fast, slow = Stage("fast", 1e-9), Stage("slow", 4e-9)
    took_s, name, share = Load([100], [fast, slow], 1e-4).run()
    assert name == "slow"
    assert took_s == pytest.approx(100 * PIECE_BYTES * 4e-9, rel=0.02)
    assert share > 0.98


def test_ranks_share_what_is_shared_and_servers_divide_the_work() -> None:
    each = Load([50, 50], [Stage("queue", 1e-9)], 0.0).run()[0]
    together = Load([50, 50], [Stage("queue", 1e-9, is_shared=True)], 0.0).run()[0]
    assert together == pytest.approx(2 * each)
    halved = Load([50], [Stage("queue", 1e-9, num_servers=2), Stage("end", 0.0)], 0.0).run()[0]
    assert halved == pytest.approx(each / 2)


def test_a_rank_asks_for_few_pieces_at_a_time() -> None:
    latency_s, slow_s = 10.0, PIECE_BYTES * 1e-9
    took_s, _, share = Load([3 * IN_FLIGHT], [Stage("queue", 1e-9), Stage("end", 0.0)], 10.0).run()
    assert took_s > 3 * latency_s
    assert share == pytest.approx(3 * IN_FLIGHT * slow_s / took_s)


def test_a_terabyte_takes_under_ten_seconds_where_nics_move_it_and_experts_are_whole() -> None:
    hardware = figures("h200x8", HardwareFigures)
    ranks = needed("tp8-ep8", num_layers=61)
    num_read = PIECE_BYTES * sum(each.num_pieces for each in ranks)
    used = sum(each.num_bytes for each in ranks) / num_read
    assert num_read > 1e12
    pieces = [each.num_pieces for each in ranks]
    by_nic = Load(pieces, stages(hardware, "rdma", used), hardware.transfer_latency_s).run()
    by_loop = Load(pieces, stages(hardware, "tcp", used), hardware.transfer_latency_s).run()
    assert by_nic[0] < 10
    assert by_nic[1] == "the borrower's memory"
    assert 30 < by_loop[0] < 35
    assert by_loop[1] == "the lender's loops"
    assert all(source for _, source in FIGURES.values())

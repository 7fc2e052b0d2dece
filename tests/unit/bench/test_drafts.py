"""What became of a server's drafts: read from its metrics, shown in table and JSON."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import cast

import pytest

from mooncake.api.http.client import Answer, HttpClient, RequestFailed
from mooncake.bench.metrics import metrics_of
from mooncake.bench.report import document, table
from mooncake.bench.serve import server_metrics
from mooncake.bench.server_counters import DraftCounts, parse_counts

OURS = """\
# HELP mooncake:spec_decode_num_drafts_total Steps
mooncake:spec_decode_num_drafts_total{model_name="k2"} 10.0
mooncake:spec_decode_num_draft_tokens_total{model_name="k2"} 40.0
mooncake:spec_decode_num_accepted_tokens_total{model_name="k2"} 25.0
mooncake:spec_decode_num_accepted_tokens_per_pos_total{model_name="k2",position="1"} 6.0
mooncake:spec_decode_num_accepted_tokens_per_pos_total{model_name="k2",position="0"} 9.0
mooncake:generation_tokens_total{model_name="k2"} 99.0
"""
VLLM = """\
vllm:spec_decode_num_drafts{engine="0"} 4
vllm:spec_decode_num_drafts{engine="1"} 6
vllm:spec_decode_num_draft_tokens_total{engine="0"} 40
vllm:spec_decode_num_accepted_tokens_total 2.5e1
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 4
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0",engine="1"} 5
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 6
"""
COUNTS = DraftCounts(drafts=10, draft_tokens=40, accepted_tokens=25, accepted_at=(9, 6))


class Absent:
    async def request(self, *_: object) -> Answer:
        raise RequestFailed("nobody is there")


@pytest.mark.parametrize("text", [OURS, VLLM])
def test_counters_are_found_and_added_up(text: str) -> None:
    assert parse_counts(text) == COUNTS
    assert COUNTS.acceptance_rate == 62.5
    assert COUNTS.acceptance_length == 3.5
    assert COUNTS.acceptance_rates == [0.9, 0.6]


def test_a_server_that_says_nothing_has_no_drafts() -> None:
    assert parse_counts("") == DraftCounts()
    assert DraftCounts().acceptance_rate == 0.0
    assert DraftCounts().acceptance_length == 1.0
    assert asyncio.run(server_metrics(cast(HttpClient, Absent()), {})) == ""


def test_table_and_json_show_the_drafts_of_the_run_alone() -> None:
    bare = metrics_of([], 1.0, (), {})
    before = DraftCounts(drafts=1, draft_tokens=4, accepted_tokens=2)
    after = DraftCounts(drafts=11, draft_tokens=44, accepted_tokens=27, accepted_at=(9, 2))
    drafted = dataclasses.replace(bare, drafts=after.since(before))
    shown = table(drafted, (), max_concurrency=None, rate=1.0)
    rows = [line.split() for line in shown.splitlines()]
    assert ["Acceptance", "rate", "(%):", "62.50"] in rows
    assert ["Acceptance", "length:", "3.50"] in rows
    assert ["Draft", "tokens:", "40"] in rows
    assert document(drafted, [], ())["spec_decode_acceptance_length"] == 3.5
    assert document(drafted, [], ())["spec_decode_per_position_acceptance_rates"] == [0.9, 0.2]
    assert ["Acceptance", "at", "position", "1", "(%):", "20.00"] in rows
    assert "Speculative" not in table(bare, (), max_concurrency=None, rate=1.0)
    assert "spec_decode_num_drafts" not in document(bare, [], ())

"""How even ranks' rows of experts are: read from a server's metrics, shown in table and JSON."""

from __future__ import annotations

import dataclasses

from mooncake.bench.metrics import metrics_of
from mooncake.bench.report import document, table
from mooncake.bench.server_counters import ExpertRows, parse_rows

TEXT = """\
# HELP mooncake:worker_events_total Counters that a worker reports.
mooncake:worker_events_total{model_name="k2",name="expert_rank_rows_mean",worker="decode-0"} 60.0
mooncake:worker_events_total{model_name="k2",name="expert_rank_rows_mean",worker="decode-1"} 40.0
mooncake:worker_events_total{model_name="k2",name="expert_rank_rows_most",worker="decode-0"} 75.0
mooncake:worker_events_total{name="expert_rank_rows_most",worker="decode-1"} 1.25e2
mooncake:worker_events_total{model_name="k2",name="expert_rows",worker="decode-0"} 999.0
"""


def test_rows_of_all_workers_are_added_up() -> None:
    assert parse_rows(TEXT) == ExpertRows(mean=100.0, most=200.0)
    assert parse_rows(TEXT).balance == 0.5
    assert parse_rows("").balance is None


def test_table_and_json_show_the_balance_before_and_in_the_run() -> None:
    bare = metrics_of([], 1.0, (), {})
    after = ExpertRows(mean=190.0, most=300.0)
    before = parse_rows(TEXT)
    shared = dataclasses.replace(
        bare,
        expert_balance_before=before.balance,
        expert_balance=after.since(before).balance,
    )
    rows = [line.split() for line in table(shared, (), max_concurrency=None, rate=1.0).splitlines()]
    assert ["Balance", "of", "ranks", "before:", "0.50"] in rows
    assert ["Balance", "of", "ranks", "in", "this", "run:", "0.90"] in rows
    found = document(shared, [], ())
    assert (found["expert_balance_before"], found["expert_balance"]) == (0.5, 0.9)
    assert "Shared Experts" not in table(bare, (), max_concurrency=None, rate=1.0)
    assert "expert_balance" not in document(bare, [], ())

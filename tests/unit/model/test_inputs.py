"""A plan's tensors: row order, places, which rows the last layer computes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mooncake.base.kv_layout import Home
from mooncake.model import inputs
from mooncake.model.inputs import PageTables, StepInputs, build_inputs
from tests.support.model.tiny_models import slot

SHAPE = torch.Size((20, 4, 8))


def build(slots, whole=()) -> StepInputs:
    """Up to two new tokens are absorbed."""
    return build_inputs(slots, frozenset(whole), SHAPE, lambda new, context: new <= 2)


def test_absorbed_rows_come_first_and_keep_their_order() -> None:
    found = build(
        [
            slot(1, 0, [10, 11, 12, 13, 14], [3, 1]),
            slot(2, 6, [20], [7, 8]),
            slot(3, 0, [30, 31, 32], [9]),
            slot(4, 1, [40, 41], [2]),
        ]
    )
    assert found.tokens.tolist() == [20, 40, 41, 10, 11, 12, 13, 14, 30, 31, 32]
    assert found.positions.tolist() == [6, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]
    assert found.places.tolist() == [34, 9, 10, 12, 13, 14, 15, 4, 36, 37, 38]
    queries = found.queries
    assert queries.split == 3
    assert queries.rows is None
    assert [(s.first_row, s.num_rows, s.context) for s in queries.absorbed] == [
        (0, 1, 7),
        (1, 2, 3),
    ]
    assert [(s.first_row, s.num_rows, s.context) for s in queries.expanded] == [
        (0, 5, 5),
        (5, 3, 3),
    ]


def test_a_rank_that_has_a_share_of_the_pages() -> None:
    """Of 20 pages for two ranks, 0 to 9 are the first one's."""
    slots = [
        slot(1, 0, [10, 11, 12, 13, 14], [3, 12]),
        slot(2, 10, [20], [13, 7, 18]),
        slot(3, 4, [30, 31], [3, 14]),
        slot(4, 2, [40], [5]),
    ]
    half = torch.Size((10, 4, 8))
    first, second = (
        build_inputs(slots, frozenset(), half, lambda *_: True, home=Home(home, 2))
        for home in (0, 1)
    )
    assert first.tokens.tolist() == [20, 40, 10, 11, 12, 13, 14, 30, 31]
    assert first.places.tolist() == [-1, 22, 12, 13, 14, 15, -1, -1, -1]
    assert second.places.tolist() == [34, -1, -1, -1, -1, -1, 8, 16, 17]
    seen = [
        [(span.first_row, span.context, span.pages.tolist()) for span in made.queries.absorbed]
        for made in (first, second)
    ]
    assert seen == [
        [(0, 4, [7]), (1, 3, [5])],
        [(0, 7, [3, 8]), (1, 0, [])],
    ], "single rows see what lies here"
    gathered = [made.queries.gathered for made in (first, second)]
    assert [each.tolist() for each in gathered if each is not None] == [[3, 0], [2, 4]]
    for made in (first, second):
        tables = [(span.first_row, span.pages.tolist()) for span in made.queries.expanded]
        assert tables == [(0, [0, 1]), (5, [0, 3])], "every rank reads the same gathered pages"
        assert made.outputs.gathered is None, "one row of each is read at the end"
        assert made.outputs.split == 4


def test_pages_that_no_rank_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sequence 1: .* outside 0\.\.39"):
        build_inputs([slot(1, 0, [1], [40])], frozenset(), SHAPE, lambda *_: True, home=Home(0, 2))


def test_the_last_layer_computes_only_what_is_read() -> None:
    found = build(
        [
            slot(1, 0, [10, 11, 12, 13, 14], [3, 1]),
            slot(2, 6, [20], [7, 8]),
            slot(3, 0, [30, 31, 32], [9], sample=False),
            slot(4, 0, [40, 41, 42], [5]),
        ],
        whole=[4],
    )
    outputs = found.outputs
    assert outputs.rows is not None
    read = found.tokens[outputs.rows].tolist()
    assert read == [14, 20, 40, 41, 42]
    assert outputs.positions.tolist() == [4, 6, 0, 1, 2]
    assert outputs.split == 2
    assert [span.context for span in outputs.absorbed] == [5, 7]
    assert [(span.first_row, span.num_rows) for span in outputs.expanded] == [(0, 3)]
    assert [(rows.slot.sequence_id, rows.first, rows.num_rows) for rows in found.output_rows] == [
        (1, 0, 1),
        (2, 1, 1),
        (4, 2, 3),
    ]


def test_a_whole_slot_is_read_even_where_it_does_not_sample() -> None:
    found = build([slot(1, 4, [5, 6, 7], [0, 1], sample=False)], whole=[1])
    assert found.outputs.num_rows == 3


def test_nothing_is_read_when_nothing_samples() -> None:
    found = build([slot(1, 0, [5], [0], sample=False)])
    assert found.outputs.num_rows == 0
    assert found.output_rows == ()


def test_tables_are_read_once_and_then_only_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 tables of 128k tokens cost a step several milliseconds to read."""
    read: list[int] = []
    table = inputs.page_table

    def counted(pages: Sequence[int]) -> torch.Tensor:
        read.append(len(pages))
        return table(pages)

    monkeypatch.setattr(inputs, "page_table", counted)
    tables = PageTables()
    grown = [*range(40)]
    for pages in (grown, [*grown], [*grown, 77], [*grown, 77], [5, *grown[1:]], [3]):
        found = tables.read([slot(1, 0, [1], pages), slot(2, 0, [1], [8, 9])])
        assert [found[1].tolist(), found[2].tolist()] == [pages, [8, 9]]
    assert read == [40, 2, 1, 40, 1]
    tables.read([slot(2, 0, [1], [8, 9])])
    assert tables.read([slot(1, 0, [1], [3])])[1].tolist() == [3]
    assert read[5:] == [1], "a sequence that was away is read anew"

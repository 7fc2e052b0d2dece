"""A plan's tensors: row order, places, which rows the last layer computes."""

from __future__ import annotations

import torch

from mooncake.model.inputs import StepInputs, build_inputs
from tests.support.model.tiny_models import slot

SHAPE = torch.Size((20, 4, 8))


def build(slots, whole=()) -> StepInputs:
    """Up to two new tokens are absorbed."""
    return build_inputs(slots, frozenset(whole), SHAPE, lambda new, context: new <= 2)


def test_absorbed_rows_come_first_and_keep_their_order() -> None:
    inputs = build(
        [
            slot(1, 0, [10, 11, 12, 13, 14], [3, 1]),
            slot(2, 6, [20], [7, 8]),
            slot(3, 0, [30, 31, 32], [9]),
            slot(4, 1, [40, 41], [2]),
        ]
    )
    assert inputs.tokens.tolist() == [20, 40, 41, 10, 11, 12, 13, 14, 30, 31, 32]
    assert inputs.positions.tolist() == [6, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]
    assert inputs.places.tolist() == [34, 9, 10, 12, 13, 14, 15, 4, 36, 37, 38]
    queries = inputs.queries
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


def test_the_last_layer_computes_only_what_is_read() -> None:
    inputs = build(
        [
            slot(1, 0, [10, 11, 12, 13, 14], [3, 1]),
            slot(2, 6, [20], [7, 8]),
            slot(3, 0, [30, 31, 32], [9], sample=False),
            slot(4, 0, [40, 41, 42], [5]),
        ],
        whole=[4],
    )
    outputs = inputs.outputs
    assert outputs.rows is not None
    read = inputs.tokens[outputs.rows].tolist()
    assert read == [14, 20, 40, 41, 42]
    assert outputs.positions.tolist() == [4, 6, 0, 1, 2]
    assert outputs.split == 2
    assert [span.context for span in outputs.absorbed] == [5, 7]
    assert [(span.first_row, span.num_rows) for span in outputs.expanded] == [(0, 3)]
    assert [(rows.slot.sequence_id, rows.first, rows.num_rows) for rows in inputs.output_rows] == [
        (1, 0, 1),
        (2, 1, 1),
        (4, 2, 3),
    ]


def test_a_whole_slot_is_read_even_where_it_does_not_sample() -> None:
    inputs = build([slot(1, 4, [5, 6, 7], [0, 1], sample=False)], whole=[1])
    assert inputs.outputs.num_rows == 3


def test_nothing_is_read_when_nothing_samples() -> None:
    inputs = build([slot(1, 0, [5], [0], sample=False)])
    assert inputs.outputs.num_rows == 0
    assert inputs.output_rows == ()

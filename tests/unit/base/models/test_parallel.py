"""Shapes of instances: what can be, and how it is written."""

from __future__ import annotations

import pytest

from mooncake.base import ConfigError, Shape
from mooncake.base.models.parallel import divisors, stage_layers


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        ("tp1", Shape()),
        ("tp8", Shape(tp=8)),
        ("tp8-dcp4", Shape(tp=8, dcp=4)),
        ("tp1-pp2", Shape(pp=2)),
        ("tp8-pp2-dcp8", Shape(tp=8, pp=2, dcp=8)),
        ("tp2-ep2", Shape(tp=2, ep=2)),
        ("tp1-dp16-ep16", Shape(dp=16, ep=16)),
        ("tp8-dcp8-dp2-ep16", Shape(tp=8, dcp=8, dp=2, ep=16)),
        ("tp1-experts1", Shape(ep=1, experts=1)),
        ("tp1-dp4-experts2", Shape(dp=4, ep=2, experts=2)),
    ],
)
def test_a_shape_is_written_as_it_is_read(words: str, shape: Shape) -> None:
    assert Shape.parse(words) == shape
    assert str(shape) == words


@pytest.mark.parametrize(
    "words",
    ["", "8", "tp0", "tp", "dcp8", "tp8-dcp", "tp8dcp8", "TP8", "tp8-", "pp2", "tp8-dcp8-pp2",
     "tp8-ep8-dp1"],
)  # fmt: skip
def test_what_is_no_shape(words: str) -> None:
    with pytest.raises(ConfigError, match="is not tpN, with -ppN"):
        Shape.parse(words)


def test_shapes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"3 does not divide .* 8; .* 1, 2, 4, 8 would do"):
        Shape(tp=8, dcp=3)
    with pytest.raises(ConfigError, match="decode-context-parallel-size: 2 does not divide"):
        Shape(dcp=2)
    with pytest.raises(ConfigError, match="tensor-parallel-size: must be at least 1, not 0"):
        Shape(tp=0)
    with pytest.raises(ConfigError, match=r"data-parallel-size=2: .* `enable-expert-parallel`"):
        Shape(dp=2)
    with pytest.raises(
        ConfigError, match="ep is 8, but experts lie on 1 rank or are shared out among all 16"
    ):
        Shape(tp=8, dp=2, ep=8)
    with pytest.raises(ConfigError, match=r"experts=2: .* one rank each, and tensor-parallel-size"):
        Shape(tp=2, ep=2, experts=2)
    with pytest.raises(
        ConfigError, match=r"experts=1: .* one rank each, and pipeline-parallel-siz"
    ):
        Shape(pp=2, experts=1)
    with pytest.raises(ConfigError, match="ep is 4, but 2 workers hold the experts"):
        Shape(dp=4, ep=4, experts=2)


def test_a_shape_as_flags() -> None:
    assert Shape().flags == "--tensor-parallel-size 1"
    assert Shape(tp=2, dcp=2, dp=2, ep=4).flags == (
        "--tensor-parallel-size 2 --decode-context-parallel-size 2 --data-parallel-size 2 "
        "--enable-expert-parallel"
    )
    assert Shape(dp=2, ep=1, experts=1).flags == (
        "--tensor-parallel-size 1 --data-parallel-size 2 --enable-expert-parallel --experts 1"
    )


def test_workers_that_step_together() -> None:
    assert Shape(tp=2, dp=4, ep=8).num_sharers == 4
    assert Shape(dp=4, ep=2, experts=2).num_sharers == 6


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_rank_0_is_in_the_last_stage() -> None:
    shape = Shape(tp=2, pp=3)
    assert shape.num_ranks == 6
    assert [shape.stage_of(rank) for rank in range(6)] == [2, 2, 1, 1, 0, 0]
    assert [list(shape.ranks_of(stage)) for stage in range(3)] == [[4, 5], [2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("num_layers", "pp", "sizes"),
    [
        (61, 1, [61]),
        (61, 2, [31, 30]),
        (61, 4, [15, 16, 15, 15]),
        (62, 4, [15, 16, 16, 15]),
        (63, 4, [16, 16, 16, 15]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_stages_have_the_layers_in_order(num_layers: int, pp: int, sizes: list[int]) -> None:
    stages = stage_layers(num_layers, pp)
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match="pipeline-parallel-size: each of 4 stages needs a layer"):
        stage_layers(3, 4)

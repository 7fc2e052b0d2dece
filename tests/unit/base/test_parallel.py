"""Shapes of instances: what can be, and how it is written."""

from __future__ import annotations

import pytest

from mooncake.base import ConfigError, Shape
from mooncake.base.parallel import divisors


@pytest.mark.parametrize(
    ("words", "shape"),
    [("tp1", Shape()), ("tp8", Shape(tp=8)), ("tp8-dcp4", Shape(tp=8, dcp=4))],
)
def test_a_shape_is_written_as_it_is_read(words: str, shape: Shape) -> None:
    assert Shape.parse(words) == shape
    assert str(shape) == words


@pytest.mark.parametrize(
    "words", ["", "8", "tp0", "tp", "dcp8", "tp8-dcp", "tp8dcp8", "TP8", "tp8-"]
)
def test_what_is_no_shape(words: str) -> None:
    with pytest.raises(ConfigError, match="is not tpN or tpN-dcpN"):
        Shape.parse(words)


def test_shapes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"3 does not divide .* 8; .* 1, 2, 4, 8 would do"):
        Shape(tp=8, dcp=3)
    with pytest.raises(ConfigError, match="decode-context-parallel-size: 2 does not divide"):
        Shape(dcp=2)
    with pytest.raises(ConfigError, match="tensor-parallel-size: must be at least 1, not 0"):
        Shape(tp=0)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]

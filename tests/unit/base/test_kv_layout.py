"""Where the bytes of a block lie: pages by layer, pool blocks whole, both said by two numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import KvLayout, PageArray, SegmentRef, packed_places
from tests.support.model.specs import small_spec

SEGMENT = SegmentRef(engine_id="e", endpoints={}, host="h")


def layout(num_layers: int = 3, block_tokens: int = 4, dtype: str = "bfloat16") -> KvLayout:
    return KvLayout(
        num_layers=num_layers, block_tokens=block_tokens, kv_width=10, dtype=dtype, fingerprint="f"
    )


def test_sizes() -> None:
    shape = layout()
    assert shape.slice_bytes == 4 * 10 * 2
    assert shape.block_bytes == 3 * 80
    assert shape.kv_bytes_per_token == 60
    assert layout(dtype="float32").block_bytes == 2 * shape.block_bytes
    assert layout(dtype="float8_e4m3fn").block_bytes * 2 == shape.block_bytes


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_round_up(tokens: int, blocks: int) -> None:
    assert layout().num_blocks(tokens) == blocks


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.data())
def test_slices_of_all_pages_cover_the_region_once(
    num_layers: int, pages_of_home: int, num_homes: int, data: st.DataObject
) -> None:
    shape, num_pages = layout(num_layers=num_layers), num_homes * pages_of_home
    pages = data.draw(st.permutations(range(num_pages)))
    array = PageArray(shape, num_pages, num_homes)
    assert array.num_bytes == num_pages * shape.block_bytes
    places = array.places(SEGMENT, 7, list(pages))
    starts = sorted(
        offset + layer * places.layer_stride
        for offset in places.offsets
        for layer in range(num_layers)
    )
    assert starts == [index * shape.slice_bytes for index in range(num_layers * num_pages)]
    assert places.region == 7
    share = array.num_bytes // num_homes
    for page, offset in zip(pages, places.offsets, strict=True):
        assert offset // share == page // pages_of_home, "each home has memory of its own"


def test_a_pool_block_is_contiguous() -> None:
    shape = layout()
    places = packed_places(shape, SEGMENT, 1, [0, 1000])
    assert places.layer_stride == shape.slice_bytes
    assert places.offsets == [0, 1000]
    last_byte = places.offsets[0] + (shape.num_layers - 1) * places.layer_stride + shape.slice_bytes
    assert last_byte == shape.block_bytes


def test_the_fingerprint_follows_everything_the_bytes_depend_on() -> None:
    spec = small_spec()

    def fingerprint(**changes: Any) -> str:
        settings = {"block_tokens": 64, "dtype": "bfloat16", "weights_revision": "r", **changes}
        return KvLayout.for_model(spec, **settings).fingerprint

    same = fingerprint()
    assert fingerprint() == same
    changes = [{"block_tokens": 32}, {"dtype": "float32"}, {"weights_revision": "s"}]
    changes.append({"with_mtp": True})
    assert len({same, *(fingerprint(**change) for change in changes)}) == 5


def test_for_model_reads_the_shape_from_the_spec() -> None:
    spec = small_spec()
    shape = KvLayout.for_model(spec, block_tokens=16, dtype="float32", weights_revision="r")
    assert shape.num_layers == spec.num_hidden_layers
    assert shape.kv_width == spec.kv_lora_rank + spec.qk_rope_head_dim
    settings = {"block_tokens": 16, "dtype": "float32", "weights_revision": "r"}
    wider = KvLayout.for_model(spec, **settings, with_mtp=True)
    assert wider.block_bytes - shape.block_bytes == shape.slice_bytes == wider.slice_bytes

"""KV pages as tensors: the bytes of a region, where kv_layout says they are."""

from __future__ import annotations

import msgspec
import pytest
import torch

from mooncake.base import ConfigError, PageArray, SegmentRef
from mooncake.model.kv_tensors import KvTensors
from tests.support.model.specs import small_spec
from tests.support.model.tiny_models import CPU, layout_for

LAYOUT = layout_for(small_spec(), block_tokens=4)


def test_writes_land_in_the_regions_bytes_where_the_layout_says() -> None:
    region = bytearray(5 * LAYOUT.block_bytes)
    kv = KvTensors.view(PageArray(LAYOUT, 5), memoryview(region))
    row = torch.arange(LAYOUT.kv_width, dtype=torch.float32)
    kv.write(2, torch.tensor([3 * 4 + 1]), row[None])
    places = PageArray(LAYOUT, 5).places(SegmentRef("e", {}, "h"), 0, [3])
    begin = places.offsets[0] + 2 * places.layer_stride + 1 * LAYOUT.kv_width * 4
    found = torch.frombuffer(region, dtype=torch.float32, count=LAYOUT.kv_width, offset=begin)
    assert torch.equal(found, row)
    assert sum(byte != 0 for byte in region) == sum(byte != 0 for byte in row.numpy().tobytes()), (
        "nothing else is written"
    )


def test_a_stages_own_pages_begin_with_its_first_layer() -> None:
    array = PageArray(LAYOUT, 6, 2).of_rank(1, range(1, 3))
    region = bytearray(array.num_bytes)
    assert array.num_bytes == 3 * 2 * LAYOUT.slice_bytes
    kv = KvTensors.view(array, memoryview(region))
    row = torch.arange(LAYOUT.kv_width, dtype=torch.float32)
    kv.write(2, torch.tensor([4 + 1]), row[None])
    assert torch.equal(kv.of_layer(2)[1, 1], row)
    begin = array.offset(4) + array.layer_stride + LAYOUT.kv_width * 4
    found = torch.frombuffer(region, dtype=torch.float32, count=LAYOUT.kv_width, offset=begin)
    assert torch.equal(found, row), "page 4 is the second of the second home"
    far = KvTensors.allocate(LAYOUT, 3, CPU, kv.home, array.layers)
    assert far.of_layer(1).data_ptr() == far.pages.data_ptr()
    assert far.pages.shape == kv.pages.shape


def test_bytes_that_arrive_in_the_region_are_seen() -> None:
    region = bytearray(2 * LAYOUT.block_bytes)
    kv = KvTensors.view(PageArray(LAYOUT, 2), memoryview(region))
    region[-4:] = torch.tensor([1.5]).numpy().tobytes()
    assert kv.layers[-1][-1, -1, -1] == 1.5


def test_a_larger_region_is_fine_and_a_smaller_one_refused() -> None:
    kv = KvTensors.view(PageArray(LAYOUT, 2), memoryview(bytearray(2 * LAYOUT.block_bytes + 100)))
    assert kv.num_pages == 2
    assert kv.page_shape == (2, 4, LAYOUT.kv_width)
    with pytest.raises(ConfigError, match="3 KV pages need"):
        KvTensors.view(PageArray(LAYOUT, 3), memoryview(bytearray(2 * LAYOUT.block_bytes)))


def test_values_are_rounded_to_the_pages_dtype() -> None:
    layout = msgspec.structs.replace(LAYOUT, dtype="bfloat16")
    kv = KvTensors.allocate(layout, 1, CPU)
    kv.write(0, torch.tensor([0]), torch.full((1, layout.kv_width), 1.001))
    assert kv.pages.dtype == torch.bfloat16
    assert bool((kv.layers[0][0, 0] == 1.0).all())


def test_an_unknown_dtype_is_refused() -> None:
    layout = type(LAYOUT)(num_layers=1, block_tokens=4, kv_width=8, dtype="int8", fingerprint="x")
    with pytest.raises(ConfigError, match="int8"):
        KvTensors.allocate(layout, 1, CPU)

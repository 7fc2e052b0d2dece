"""Blocks between a worker's tensors and staging memory, against plain indexing."""

from __future__ import annotations

import pytest
import torch

from mooncake.base import ConfigError
from mooncake.integrations.vllm.pages import Pages

NUM_BLOCKS = 6


def caches(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Two layers of unlike shape: one is not contiguous, the other has two rows a block."""
    first = torch.randn(3, NUM_BLOCKS, 4).to(dtype).transpose(0, 1)
    second = torch.randn(2 * NUM_BLOCKS, 5).to(dtype)
    return {"first": first, "second": second, "shares first": first}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_go_out_and_come_back(dtype: torch.dtype) -> None:
    mine, theirs = caches(dtype), caches(dtype)
    pages, others = Pages(mine, NUM_BLOCKS), Pages(theirs, NUM_BLOCKS)
    size = mine["first"].element_size()
    assert pages.block_bytes == (3 * 4 + 2 * 5) * size
    slot_bytes = 2 * pages.block_bytes + 3 * size
    memory = memoryview(bytearray(4 * slot_bytes))
    pages.staged(memory, slot_bytes, 2).read([5, 0, 3, 2], [3, 1])
    before = {name: tensor.clone() for name, tensor in theirs.items()}
    others.staged(memory, slot_bytes, 2).write([1, 2, 4], [3, 1], 1)
    for name, rows in {"first": 1, "second": 2}.items():
        target, source = (
            each[name].reshape(NUM_BLOCKS, rows, *each[name].shape[1:]) for each in (theirs, mine)
        )
        assert torch.equal(target[[1, 2, 4]], source[[0, 3, 2]])
        kept = before[name].reshape(NUM_BLOCKS, rows, *before[name].shape[1:])
        assert torch.equal(target[[0, 3, 5]], kept[[0, 3, 5]])


def test_what_is_said_of_pages_tells_shapes_and_types_apart() -> None:
    said = {
        Pages(caches(), NUM_BLOCKS).described,
        Pages(caches(torch.bfloat16), NUM_BLOCKS).described,
        Pages({"first": caches()["first"]}, NUM_BLOCKS).described,
        Pages({"other": caches()["first"]}, NUM_BLOCKS).described,
    }
    assert len(said) == 4


def test_tensors_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"KV of a has the shape \(2, 6\)"):
        Pages({"a": torch.zeros(2, NUM_BLOCKS)}, NUM_BLOCKS)
    with pytest.raises(ConfigError, match="no KV"):
        Pages({}, NUM_BLOCKS)


def test_pool_blocks_that_cut_elements_are_refused() -> None:
    pages = Pages({"a": torch.zeros(NUM_BLOCKS, 4)}, NUM_BLOCKS)
    with pytest.raises(ConfigError, match="whole elements"):
        pages.staged(memoryview(bytearray(34)), 17, 1)

"""Values of any size by name: what names their blocks, and that a head says what it is of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import KvLayout
from mooncake.kvstore.client.values import ValueHead, fits, head_key

LAYOUT = KvLayout(num_layers=2, block_tokens=4, kv_width=8, dtype="float16", fingerprint="test")


@given(st.binary(max_size=1000), st.text(max_size=20))
def test_a_head_says_what_it_is_of(data: bytes, tenant: str) -> None:
    head = ValueHead.of(data)
    packed = head.pack(LAYOUT)
    assert len(packed) == LAYOUT.block_bytes
    read = ValueHead.unpack(packed)
    assert read is not None
    assert read.is_of(data)
    assert not read.is_of(data + b"x")
    keys = read.keys(LAYOUT, tenant)
    assert len(set(keys)) == len(keys) == -(-len(data) // LAYOUT.block_bytes)


def test_other_names_contents_and_tenants_share_no_block() -> None:
    names = {head_key(LAYOUT, name, tenant) for name in ("a", "b") for tenant in ("", "t")}
    assert len(names) == 4
    bodies = [
        key
        for data in (b"x" * 300, b"y" * 300)
        for tenant in ("", "t")
        for key in ValueHead.of(data).keys(LAYOUT, tenant)
    ]
    assert len(set(bodies)) == len(bodies) == 12


def test_what_is_no_head_is_none() -> None:
    assert ValueHead.unpack(b"\0" * LAYOUT.block_bytes) is None


def test_a_block_may_be_too_small_for_a_head() -> None:
    assert fits(LAYOUT)
    assert not fits(
        KvLayout(num_layers=1, block_tokens=1, kv_width=4, dtype="float16", fingerprint="")
    )

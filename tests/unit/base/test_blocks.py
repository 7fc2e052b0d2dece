"""Block keys: equal keys mean equal tokens, equal history, equal model and equal tenant."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import (
    KEY_BYTES,
    GenerateRequest,
    KeyChain,
    SamplingParams,
    block_keys,
    extend_chain,
    pack_tokens,
    unpack_tokens,
)
from mooncake.base.blocks import chain_root, prompt_keys

KNOWN_KEYS = [
    "383207ce7d7674d0f7253a8825f97c48",
    "6a0cdc2cedf2197dbf4fecde5829f57a",
]
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def test_a_partial_last_block_has_no_key() -> None:
    tokens = list(range(10))
    assert len(block_keys("m", tokens, 4)) == 2
    assert len(block_keys("m", tokens[:8], 4)) == 2
    assert len(block_keys("m", tokens[:7], 4)) == 1
    assert block_keys("m", tokens[:3], 4) == []
    assert block_keys("m", [], 4) == []


def test_the_keys_of_a_prompt_are_hashed_once() -> None:
    prompt = pack_tokens(list(range(50, 70)))
    prompt_keys.cache_clear()
    found = prompt_keys("m", prompt, 4, "acme", "salt")
    assert list(found) == block_keys("m", list(range(50, 70)), 4, "acme", "salt")
    assert prompt_keys("m", bytes(bytearray(prompt)), 4, "acme", "salt") is found
    others = [("n", prompt, 4, "acme", "salt"), ("m", prompt, 4, "b", "salt")]
    for other in [*others, ("m", prompt, 4, "acme", ""), ("m", prompt[4:], 4, "acme", "salt")]:
        assert not set(prompt_keys(*other)) & set(found)


def test_keys_are_sixteen_bytes_and_do_not_change_between_releases() -> None:
    """Blocks on disk outlive a process: the naming is part of the format."""
    keys = block_keys("fingerprint", [1, 2, 3, 4], 2, tenant="t", cache_salt="s")
    assert [len(key) for key in keys] == [KEY_BYTES, KEY_BYTES]
    assert [key.hex() for key in keys] == KNOWN_KEYS


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("m1", "", ""), ("m2", "", "")),
        (("m", "alice", ""), ("m", "bob", "")),
        (("m", "", "x"), ("m", "", "y")),
        # The parts are told apart, not only joined.
        (("ma", "b", ""), ("m", "ab", "")),
        (("m", "a", "b"), ("m", "ab", "")),
    ],
)
def test_roots_differ_by_model_tenant_and_salt(
    left: tuple[str, str, str], right: tuple[str, str, str]
) -> None:
    assert chain_root(*left) != chain_root(*right)


def test_a_block_is_named_by_what_stands_before_it_too() -> None:
    same_second_block = block_keys("m", [1, 2, 9, 9], 2)[1], block_keys("m", [3, 4, 9, 9], 2)[1]
    assert same_second_block[0] != same_second_block[1]


@given(TOKENS, st.integers(1, 9), st.integers(0, 80))
def test_a_prefix_has_a_prefix_of_the_keys(tokens: list[int], step: int, cut: int) -> None:
    whole = block_keys("m", tokens, step)
    part = block_keys("m", tokens[:cut], step)
    assert whole[: len(part)] == part


@given(TOKENS, st.integers(1, 9), st.integers(0, 9))
def test_a_chain_can_be_extended_from_any_block(tokens: list[int], step: int, at: int) -> None:
    whole = block_keys("m", tokens, step)
    at = min(at, len(whole))
    parent = whole[at - 1] if at else chain_root("m")
    assert extend_chain(parent, tokens[at * step :], step) == whole[at:]


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_equal_keys_mean_equal_tokens(left: list[int], right: list[int], step: int) -> None:
    for index, (one, two) in enumerate(
        zip(block_keys("m", left, step), block_keys("m", right, step), strict=False)
    ):
        same = left[: (index + 1) * step] == right[: (index + 1) * step]
        assert (one == two) == same


@given(TOKENS, TOKENS)
def test_packed_tokens_are_the_same_tokens(prompt: list[int], output: list[int]) -> None:
    packed = pack_tokens(prompt)
    assert unpack_tokens(packed).tolist() == prompt
    assert pack_tokens(unpack_tokens(packed)[1:]) == pack_tokens(prompt[1:])
    assert block_keys("m", unpack_tokens(packed), 4) == block_keys("m", prompt, 4)
    request = GenerateRequest(request_id="r", prompt=packed, sampling=SamplingParams())
    assert request.tokens_with(output).tolist() == prompt + output


def test_prompts_are_one_object_to_the_garbage_collector() -> None:
    request = GenerateRequest(request_id="r", prompt=pack_tokens([1]), sampling=SamplingParams())
    assert not gc.is_tracked(request.prompt)


def test_tokens_beyond_32_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        block_keys("m", [2**32], 1)


def test_a_chain_of_keys_is_a_sequence_in_one_piece() -> None:
    keys = block_keys("model", range(40), 8)
    chain = KeyChain.of(keys)
    assert chain.packed == b"".join(keys)
    assert (list(chain), len(chain)) == (keys, 5)
    assert [chain[at] for at in range(-5, 5)] == keys + keys
    assert list(chain[1:3]) == keys[1:3]
    assert list(chain[3:1]) == []
    assert list(chain[-2:99]) == keys[-2:]
    assert KeyChain.of(chain) is chain
    assert chain == KeyChain(chain.packed) != KeyChain()
    assert len({chain, KeyChain(chain.packed)}) == 1
    assert not KeyChain()
    for beyond in (5, -6):
        with pytest.raises(IndexError):
            chain[beyond]
    with pytest.raises(ValueError, match="must have step 1"):
        chain[::2]

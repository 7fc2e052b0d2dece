"""The map of keys to pages, and what it tells of its changes."""

from __future__ import annotations

import pytest

from mooncake.engine.block_pool import PrefixCache

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_matches_the_longest_prefix_only() -> None:
    cache = PrefixCache()
    cache.publish(A, 3)
    cache.publish(C, 5)
    assert cache.match([A, B, C]) == [3]
    assert cache.match([B, C]) == []
    assert cache.match([A, C]) == [3, 5]


def test_the_first_page_of_a_key_stays() -> None:
    cache = PrefixCache()
    assert cache.publish(A, 3)
    assert not cache.publish(A, 4)
    assert (cache.page_of(A), cache.key_of(4)) == (3, None)


def test_a_page_has_one_key() -> None:
    cache = PrefixCache()
    cache.publish(A, 3)
    with pytest.raises(ValueError, match="page 3"):
        cache.publish(B, 3)
    cache.check_integrity()


def test_events_tell_the_balance_since_last_time() -> None:
    cache = PrefixCache()
    cache.publish(A, 0)
    cache.publish(B, 1)
    cache.forget_page(1)
    assert cache.drain_events() == ([A], [])  # B came and went unseen
    cache.forget_page(0)
    cache.publish(A, 2)
    assert cache.drain_events() == ([], [])  # A only moved
    cache.forget_page(2)
    cache.publish(C, 2)
    assert cache.drain_events() == ([C], [A])
    assert cache.drain_events() == ([], [])
    assert cache.inventory() == [C]


def test_forgetting_an_unknown_page_changes_nothing() -> None:
    cache = PrefixCache()
    cache.publish(A, 0)
    cache.forget_page(7)
    assert len(cache) == 1
    cache.check_integrity()


def test_integrity_check_sees_maps_that_disagree() -> None:
    cache = PrefixCache()
    cache.publish(A, 0)
    del cache._key_of[0]
    with pytest.raises(AssertionError, match="do not agree"):
        cache.check_integrity()

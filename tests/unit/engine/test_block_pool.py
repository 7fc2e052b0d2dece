"""Pages: free, cached, held, and never two of these."""

from __future__ import annotations

import pytest

from mooncake.engine.block_pool import BlockPool

A, B, C, D = (letter * 16 for letter in (b"a", b"b", b"c", b"d"))


def take(pool: BlockPool, num_pages: int) -> list[int]:
    pages = pool.allocate(num_pages)
    assert pages is not None
    return pages


def figures(pool: BlockPool) -> tuple[int, int, int]:
    pool.check_integrity()
    return pool.num_free, pool.num_cached, pool.num_held


def test_allocates_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert take(pool, 2) == [0, 1]
    assert pool.allocate(2) is None
    assert figures(pool) == (1, 0, 2)
    assert pool.allocate(0) == []


def test_homes_share_contexts_evenly() -> None:
    pool = BlockPool(6, num_homes=2)
    assert take(pool, 2) == [0, 3]
    one = take(pool, 1)
    assert one == [1]
    pool.release([3])
    assert take(pool, 3) == [3, 4, 2], "of the home that has most"
    assert figures(pool) == (1, 0, 5)
    pool.release(one)
    assert take(pool, 2) == [1, 5]
    assert pool.allocate(1) is None
    with pytest.raises(ValueError, match="5 pages cannot be shared out among 2 ranks"):
        BlockPool(5, num_homes=2)


def test_published_pages_stay_matchable_after_release() -> None:
    pool = BlockPool(4)
    pages = take(pool, 3)
    pool.publish(A, pages[0])
    pool.publish(B, pages[1])
    pool.release(pages)
    assert figures(pool) == (2, 2, 0)
    assert pool.match([A, B, C]) == pages[:2]
    assert pool.num_available == 4
    pool.hold(pages[:2])
    assert figures(pool) == (2, 0, 2)


def test_plain_pages_go_before_cached_ones_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    pages = take(pool, 3)
    for key, page in zip((A, B, C), pages, strict=True):
        pool.publish(key, page)
    pool.release(pages)
    assert take(pool, 1) == [3]  # the plain one
    assert take(pool, 1) == [pages[2]]  # then the tail of the chain
    assert pool.match([A, B, C]) == pages[:2]


def test_least_recently_used_content_goes_first() -> None:
    pool = BlockPool(2)
    first, second = take(pool, 2)
    pool.publish(A, first)
    pool.publish(B, second)
    pool.release([first])
    pool.release([second])
    pool.hold([first])  # A is used again
    pool.release([first])
    assert take(pool, 1) == [second]
    assert pool.match([A]) == [first]
    assert pool.match([B]) == []


def test_a_page_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(1)
    pages = take(pool, 1)
    pool.hold(pages)
    pool.release(pages)
    assert pool.allocate(1) is None
    pool.release(pages)
    assert figures(pool) == (1, 0, 0)


def test_misuse_is_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="more often than it was held"):
        pool.release([0])
    with pytest.raises(ValueError, match="cannot be held"):
        pool.hold([1])
    with pytest.raises(ValueError, match="cannot be published"):
        pool.publish(A, 0)
    with pytest.raises(ValueError, match="at least one page"):
        BlockPool(0)
    assert figures(pool) == (2, 0, 0)


def test_holding_is_all_or_nothing() -> None:
    pool = BlockPool(2)
    pages = take(pool, 1)
    with pytest.raises(ValueError, match="page 1"):
        pool.hold([pages[0], 1])
    assert pool.ref_count(pages[0]) == 1


def test_a_second_page_with_the_same_content_stays_private() -> None:
    pool = BlockPool(2)
    first, second = take(pool, 2)
    assert pool.publish(A, first)
    assert not pool.publish(A, second)
    pool.release([second])
    assert figures(pool) == (1, 0, 1)


def test_forgotten_content_is_not_matched() -> None:
    pool = BlockPool(2)
    first, second = take(pool, 2)
    pool.publish(A, first)
    pool.publish(B, second)
    pool.release([first])
    pool.forget(A)
    pool.forget(B)
    pool.forget(C)
    assert pool.match([A]) == pool.match([B]) == []
    assert figures(pool) == (1, 0, 1)
    assert pool.inventory() == []


def test_reuse_is_reported_as_removal() -> None:
    pool = BlockPool(1)
    pages = take(pool, 1)
    pool.publish(A, pages[0])
    assert pool.drain_events() == ([A], [])
    pool.release(pages)
    take(pool, 1)
    assert pool.drain_events() == ([], [A])


def test_integrity_check_sees_a_page_in_two_places() -> None:
    pool = BlockPool(2)
    take(pool, 1)
    pool._free[0].append(0)
    with pytest.raises(AssertionError, match=r"free 2 \+ cached 0 \+ held 1"):
        pool.check_integrity()


def test_matches_the_longest_prefix_only() -> None:
    pool = BlockPool(4)
    first, last = take(pool, 2)
    pool.publish(A, first)
    pool.publish(C, last)
    assert pool.match([A, B, C]) == [first]
    assert pool.match([B, C]) == []
    assert pool.match([A, C]) == [first, last]


def test_a_page_has_one_key() -> None:
    pool = BlockPool(4)
    [page] = take(pool, 1)
    pool.publish(A, page)
    with pytest.raises(ValueError, match=f"page {page}"):
        pool.publish(B, page)
    pool.check_integrity()


def test_events_tell_the_balance_since_last_time() -> None:
    pool = BlockPool(4)
    pages = take(pool, 3)
    pool.publish(A, pages[0])
    pool.publish(B, pages[1])
    pool.forget(B)
    assert pool.drain_events() == ([A], [])  # B came and went unseen
    pool.forget(A)
    pool.publish(A, pages[2])
    assert pool.drain_events() == ([], [])  # A only moved
    pool.forget(A)
    pool.publish(C, pages[2])
    assert pool.drain_events() == ([C], [A])
    assert pool.drain_events() == ([], [])
    assert pool.inventory() == [C]

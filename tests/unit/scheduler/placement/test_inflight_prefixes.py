"""Prefixes in flight: matched while they are computed, gone without a trace afterwards."""

from random import Random

from mooncake.scheduler.placement.booking_table import InflightPrefixes

A = [bytes([1, i]) for i in range(10)]
B = [*A[:4], *(bytes([2, i]) for i in range(5))]


def test_the_longest_common_run_is_found_for_each_worker() -> None:
    inflight = InflightPrefixes()
    inflight.add("p0", A)
    inflight.add("p1", A[:6])
    assert inflight.match(B) == {"p0": 4, "p1": 4}
    assert inflight.match(A) == {"p0": 10, "p1": 6}
    assert inflight.match([b"other"]) == {}
    assert inflight.match([]) == {}


def test_siblings_are_counted() -> None:
    inflight = InflightPrefixes()
    inflight.add("p0", A)
    inflight.add("p0", B)
    inflight.remove("p0", A)
    assert inflight.match(A) == {"p0": 4}
    inflight.remove("p0", B)
    assert inflight.empty


def test_any_order_of_adding_and_removing_agrees_with_a_plain_count() -> None:
    random = Random(5)
    chains = [[bytes([branch, i]) if i > 3 else bytes([9, i]) for i in range(random.randrange(12))]
              for branch in range(5)]  # fmt: skip
    inflight, held = InflightPrefixes(), []
    for _ in range(500):
        if held and random.random() < 0.5:
            inflight.remove(*held.pop(random.randrange(len(held))))
        else:
            held.append((f"p{random.randrange(3)}", random.choice(chains)))
            inflight.add(*held[-1])
        query = random.choice(chains)
        expected: dict[str, int] = {}
        for worker, keys in held:
            common = 0
            while common < min(len(keys), len(query)) and keys[common] == query[common]:
                common += 1
            if common:
                expected[worker] = max(common, expected.get(worker, 0))
        assert inflight.match(query) == expected
    for worker, keys in held:
        inflight.remove(worker, keys)
    assert inflight.empty


def test_a_cut_is_mended_when_nothing_branches_off_any_more() -> None:
    inflight = InflightPrefixes()
    inflight.add("p0", A)
    for length in range(1, len(A)):
        inflight.add("p1", A[:length])
    assert len(inflight) == len(A)
    for length in range(1, len(A)):
        inflight.remove("p1", A[:length])
    assert len(inflight) == 1
    assert inflight.match(B) == {"p0": 4}

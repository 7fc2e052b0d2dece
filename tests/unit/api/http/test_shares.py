"""What running requests share: no key takes all of it, and everything comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake.api.http.limits import Shares

AMOUNTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.booleans()))


def test_a_key_takes_at_most_half_of_what_the_others_leave() -> None:
    shares = Shares(100, least=1)
    assert shares.take("a", 50)
    assert not shares.take("a", 1)
    assert shares.take("b", 25)
    assert not shares.take("b", 1)
    assert shares.take("newcomer", 12)
    shares.give_back("a", 50)
    assert shares.take("b", 6)


def test_who_wants_nothing_gets_it_whatever_others_have_taken_since() -> None:
    shares = Shares(100, least=1)
    assert shares.take("a", 50)
    assert shares.take("b", 25)
    assert not shares.take("a", 1)
    assert shares.take("a", 0)
    shares.give_back("a", 0)
    assert shares.num_held == 75


def test_without_keys_all_is_one_clients() -> None:
    shares = Shares(100, least=1)
    assert shares.take(None, 100)
    assert not shares.take(None, 1)
    shares.give_back(None, 100)
    assert shares.take(None, 1)


@given(AMOUNTS)
def test_the_limit_holds_and_everything_comes_back(asked: list[tuple[str, int, bool]]) -> None:
    shares = Shares(100, least=7)
    held: list[tuple[str, int]] = []
    for holder, amount, gives_back in asked:
        if gives_back and held:
            shares.give_back(*held.pop())
        elif shares.take(holder, amount):
            held.append((holder, amount))
        shares.check_integrity()
    for each in held:
        shares.give_back(*each)
    assert shares.take(None, 100)


@given(
    limit=st.integers(1, 3000),
    least=st.integers(1, 20),
    floods=st.lists(st.integers(1, 3000), max_size=30),
)
def test_a_newcomer_is_let_in_after_any_floods(limit: int, least: int, floods: list[int]) -> None:
    """One key after another takes all that it gets. With halves alone, eleven left nothing of 2,048
    requests to a twelfth.
    """
    shares = Shares(limit, least)
    for number, wanted in enumerate(floods):
        for _ in range(wanted):
            if not shares.take(f"flood-{number}", 1):
                break
        shares.check_integrity()
    assert shares.take("newcomer", least)
    shares.check_integrity()

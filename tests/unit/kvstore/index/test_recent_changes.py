"""Changes of late: what comes and goes adds up, whether or not the keys changed before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import block_keys
from mooncake.kvstore.index.holder_sets import RecentChanges
from mooncake.kvstore.index.key_table import words_of

KEYS = block_keys("recent", range(6), 1)
steps = st.tuples(st.lists(st.sampled_from(KEYS), max_size=6), st.integers(0, 3), st.booleans())


@given(st.lists(steps, max_size=20), st.integers(0, 15))
def test_changes_one_after_another_are_one_change(made: list, holders: int) -> None:
    recent = RecentChanges()
    model = dict.fromkeys(KEYS, holders)
    for keys, slot, stored in made:
        bit = 1 << slot
        recent.add(keys, bit if stored else 0, 0 if stored else bit)
        for key in keys:
            model[key] = model[key] | bit if stored else model[key] & ~bit
    found = {}
    for key, number in zip(KEYS, recent.get(words_of(KEYS)), strict=True):
        came, went = recent.changes[number]
        assert not came & went
        found[key] = (holders | came) & ~went
    assert found == model
    changed = {key for keys, _, _ in made for key in keys}
    assert recent.size >= len(changed)
    assert changed <= {KEYS[at] for at in recent.may_have(words_of(KEYS))}


def test_what_was_taken_keeps_its_meaning_until_it_is_forgotten() -> None:
    recent = RecentChanges()
    recent.add(KEYS[:2], 4, 0)
    recent.add(KEYS[1:3], 0, 1)
    words, numbers = recent.take()
    assert words.tobytes() == b"".join(KEYS[:3])
    assert [recent.changes[number] for number in numbers] == [(4, 0), (4, 1), (0, 1)]
    assert len(recent.may_have(words)) == 0
    recent.forget()
    assert recent.changes == [(0, 0)]

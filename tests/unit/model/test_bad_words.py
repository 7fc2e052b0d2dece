"""Bad words by the tokens a sequence ends in, against a look at each word."""

from __future__ import annotations

from random import Random

import pytest

from mooncake.model.layers.bad_words import BadWords, completing


@pytest.mark.parametrize("seed", range(20))
def test_what_would_complete_a_word_is_what_a_look_at_each_finds(seed: int) -> None:
    random = Random(seed)
    letters = random.choice([2, 3, 8])
    words = [
        [random.randrange(letters) for _ in range(random.randrange(1, 7))]
        for _ in range(random.randrange(1, 60))
    ]
    index = BadWords(words, letters)
    assert index.longest == max(map(len, words))
    for _ in range(200):
        tokens = [random.randrange(letters) for _ in range(random.randrange(12))]
        recent = tokens[len(tokens) - min(len(tokens), index.longest - 1) :]
        found = index.next(recent).tolist()
        assert set(found) == completing(words, tokens)
        assert set(index.next(tokens).tolist()) == set(found), "older tokens change nothing"


def test_tokens_outside_the_vocabulary_are_left_out() -> None:
    index = BadWords([[9], [1, 9], [1, 2], [-1], [9, 3]], 4)
    assert index.next([]).tolist() == []
    assert index.next([1]).tolist() == [2]
    assert index.next([9]).tolist() == [3]

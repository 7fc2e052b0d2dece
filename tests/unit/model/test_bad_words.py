"""Bad words by the tokens a sequence ends in, against a look at each word."""

from __future__ import annotations

from random import Random

import pytest

from mooncake.model.layers.sampling_math import BadWords, Place, completing


def ends(place: Place) -> set[int]:
    assert place.completing is not None
    return set(place.completing.tolist())


@pytest.mark.parametrize("seed", range(20))
def test_what_would_complete_a_word_is_what_a_look_at_each_finds(seed: int) -> None:
    random = Random(seed)
    letters = random.choice([2, 3, 8])
    words = [
        [random.randrange(letters) for _ in range(random.randrange(1, 7))]
        for _ in range(random.randrange(1, 60))
    ]
    index = BadWords(words, letters)
    for _ in range(200):
        tokens = [random.randrange(letters) for _ in range(random.randrange(12))]
        place = index.start([])
        for num, token in enumerate(tokens):
            place = index.next(place, token)
            assert ends(place) == completing(words, tokens[: num + 1])
        assert ends(index.start(tokens)) == completing(words, tokens)


def test_tokens_outside_the_vocabulary_are_left_out() -> None:
    index = BadWords([[9], [1, 9], [1, 2], [-1], [9, 3]], 4)
    for tokens, wanted in (([], set()), ([1], {2}), ([9], {3}), ([3, 1], {2}), ([1, 3], set())):
        assert ends(index.start(tokens)) == wanted


def test_a_chain_of_words_as_long_as_may_be_is_followed_without_deep_calls() -> None:
    index = BadWords([[7] * length + [8] for length in range(1, 4096)], 9)
    assert ends(index.start([7] * 5000)) == {8}

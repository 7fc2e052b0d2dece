"""Words and numbers for the first tasks, mostly from short lists."""

from __future__ import annotations

from random import Random

from mooncake.tasks.words import ANIMALS, CITIES, COLORS, FRUITS, NAMES, PEOPLE, THINGS

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ALL = (*FRUITS, *COLORS, *THINGS, *ANIMALS, *PEOPLE)


def word(random: Random) -> str:
    """Return a word, now and then an invented one, so that the model learns to copy and not the
    words.
    """
    if random.random() < 0.15:
        return "".join(random.choice(_LETTERS) for _ in range(random.randint(2, 7)))
    return random.choice(_ALL)


def name(random: Random) -> str:
    """Return a person's name; now and then an invented one."""
    return random.choice(NAMES) if random.random() < 0.8 else word(random).capitalize()


def city(random: Random) -> str:
    """Return a city, now and then an invented one."""
    return random.choice(CITIES) if random.random() < 0.8 else word(random).capitalize()


def number(random: Random, most_digits: int = 3) -> int:
    """Return a number of one to `most_digits` digits; each number of digits is equally frequent."""
    digits = random.randint(1, most_digits)
    return random.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)

"""Random values of every kind that a user may write: names, words, numbers, identifiers, paths.

Most are drawn from endless sets, so that a model can repeat them only by reading the prompt. Their
length is drawn first, so that short ones are as frequent as long ones.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from mooncake.tasks.words import (
    ANIMALS,
    CITIES,
    COLORS,
    FRUITS,
    JOBS,
    NAMES,
    NOUNS,
    PEOPLE,
    THINGS,
)

LATIN = "abcdefghijklmnopqrstuvwxyz"
_GREEK = "αβγδεζηθικλμνξοπρστυφχψω"
_CYRILLIC = "абвгдежзийклмнопрстуфхцчшщыэюя"
_ACCENTED = "abcdefghilmnoprstuvàáâäåæçèéêëíîïñóôöøùúûüß"
_ALPHABETS = (LATIN, LATIN, LATIN, LATIN, LATIN, LATIN, _ACCENTED, _GREEK, _CYRILLIC)
_HEX = "0123456789abcdef"
_MIXED = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_VOWELS, _CONSONANTS = "aeiou", "bcdfghjklmnprstvwz"
KNOWN = sorted({*FRUITS, *COLORS, *THINGS, *ANIMALS, *PEOPLE, *JOBS, *NOUNS})


def letters(random: Random, shortest: int = 2, longest: int = 10, alphabet: str = "") -> str:
    """Return letters of one alphabet without a meaning."""
    alphabet = alphabet or random.choice(_ALPHABETS)
    return "".join(random.choice(alphabet) for _ in range(random.randint(shortest, longest)))


def syllables(random: Random, most: int = 4) -> str:
    """Return an invented word: "tolima", "korven"."""
    made = [
        random.choice(_CONSONANTS)
        + random.choice(_VOWELS)
        + (random.choice(_CONSONANTS) if random.random() < 0.3 else "")
        for _ in range(random.randint(1, most))
    ]
    return "".join(made)


def word(random: Random) -> str:
    """Return a word; half of the time one that is in no list."""
    kind = random.random()
    if kind < 0.5:
        return random.choice(KNOWN)
    return syllables(random) if kind < 0.85 else letters(random)


def name(random: Random) -> str:
    """Return a name with a capital letter, mostly an invented one."""
    if random.random() < 0.3:
        return random.choice(NAMES)
    made = syllables(random) if random.random() < 0.7 else letters(random, 2, 8)
    return made.capitalize()


def city(random: Random) -> str:
    """Return a place with a capital letter, mostly an invented one."""
    return random.choice(CITIES) if random.random() < 0.3 else syllables(random).capitalize()


def integer(random: Random, most_digits: int = 6) -> int:
    """Return a number of one to `most_digits` digits; each number of digits is equally frequent."""
    digits = random.randint(1, most_digits)
    return random.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def signed(random: Random) -> int:
    """Return a whole number, now and then below zero."""
    return -integer(random, 4) - 1 if random.random() < 0.1 else integer(random)


def decimal(random: Random) -> float:
    """Return a number with one to three digits after the point and no zero at its end."""
    places = random.randint(1, 3)
    return float(f"{signed(random) % 10**4}.{integer(random, places)}") or 0.5


def identifier(random: Random) -> str:
    """Return a code: hexadecimal, mixed letters and digits, or groups of them."""
    kind = random.randrange(5)
    if kind == 0:
        return letters(random, 4, 24, _HEX)
    if kind == 1:
        return letters(random, 4, 20, _MIXED)
    if kind == 2:
        return f"{letters(random, 1, 4, LATIN).upper()}-{integer(random)}"
    if kind == 3:
        joint = random.choice("-_.:")
        groups = [letters(random, 1, 5, _HEX) for _ in range(random.randint(2, 4))]
        # A letter first: "706-7" would be a difference, and could be one that is held out.
        return joint.join([random.choice(LATIN) + groups[0], *groups[1:]])
    return f"{word(random)}{random.choice('_-.')}{integer(random, 4)}"


def path(random: Random) -> str:
    parts = [word(random) for _ in range(random.randint(1, 4))]
    ending = random.choice((".txt", ".py", ".md", ".json", ".csv", ".log", "", ".png"))
    return f"{random.choice(('/', '', './', '~/'))}{'/'.join(parts)}{ending}"


def address(random: Random) -> str:
    """Return an e-mail address or the address of a page."""
    host = f"{word(random)}.{random.choice(('com', 'org', 'net', 'io', 'de'))}"
    if random.random() < 0.6:
        return f"{word(random)}@{host}"
    return f"https://{host}/{word(random)}"


def moment(random: Random) -> str:
    """Return a date or a time of day."""
    if random.random() < 0.5:
        return f"{random.randint(0, 23):02}:{random.randint(0, 59):02}"
    return f"{random.randint(1990, 2060)}-{random.randint(1, 12):02}-{random.randint(1, 28):02}"


def phrase(random: Random, most: int = 6) -> str:
    """Return some words in a row."""
    return " ".join(word(random) for _ in range(random.randint(1, most)))


ANY: tuple[Callable[[Random], str], ...] = (
    word, word, name, city, identifier, path, address, moment, phrase,
    lambda random: str(integer(random)),
    lambda random: str(decimal(random)),
)  # fmt: skip


def anything(random: Random) -> str:
    """Return a value of any of these kinds, as text."""
    return random.choice(ANY)(random)

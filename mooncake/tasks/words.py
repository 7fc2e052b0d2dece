"""The words that generated tasks are made of. Data, and drawing from it."""

from __future__ import annotations

from random import Random

NAMES = [
    "Ada", "Ben", "Carl", "Dora", "Emma", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo",
    "Mia", "Nora", "Omar", "Paul", "Rosa", "Sam", "Tina", "Uma", "Vera", "Will", "Yuri", "Zoe",
    "Anna", "Bob", "Clara", "Dan", "Eve", "Fred", "Grace", "Henry", "Ida", "John", "Lena", "Max",
    "Nina", "Oscar", "Peter", "Ruth",
]  # fmt: skip
CITIES = [
    "Rome", "Paris", "London", "Berlin", "Madrid", "Oslo", "Vienna", "Prague", "Tokyo", "Delhi",
    "Cairo", "Lima", "Boston", "Chicago", "Shanghai", "Beijing", "Sydney", "Dublin", "Athens",
    "Warsaw", "Lisbon", "Zurich", "Milan", "Seoul", "Toronto", "Denver", "Austin", "Geneva",
    "Porto", "Kyoto",
]  # fmt: skip
FRUITS = [
    "apple", "pear", "plum", "fig", "grape", "lemon", "mango", "peach", "cherry", "banana",
    "melon", "kiwi", "orange", "berry", "date", "lime",
]  # fmt: skip
COLORS = [
    "red", "blue", "green", "yellow", "black", "white", "brown", "purple", "gray", "pink",
    "orange", "silver",
]  # fmt: skip
THINGS = [
    "boat", "lamp", "chair", "table", "book", "clock", "bridge", "wheel", "stone", "river",
    "garden", "window", "letter", "bottle", "ladder", "basket", "hammer", "candle", "mirror",
    "pillow", "bicycle", "guitar", "kettle", "rocket", "castle", "forest", "island", "market",
    "engine", "barrel",
]  # fmt: skip
ANIMALS = [
    "cat", "dog", "horse", "bird", "fish", "mouse", "rabbit", "tiger", "sheep", "goat", "duck",
    "frog", "wolf", "bear", "fox", "bee",
]  # fmt: skip
PEOPLE = [
    "cook", "baker", "farmer", "sailor", "teacher", "doctor", "painter", "driver", "singer",
    "king", "queen", "pilot",
]  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
JOBS = [
    "cook", "baker", "farmer", "teacher", "doctor", "painter", "driver", "singer", "pilot",
    "writer", "nurse", "lawyer",
]  # fmt: skip
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ALL = (*FRUITS, *COLORS, *THINGS, *ANIMALS, *PEOPLE)


def word(random: Random) -> str:
    """Return a word; now and then one that is none, so that copying is learned, not words."""
    if random.random() < 0.15:
        return "".join(random.choice(_LETTERS) for _ in range(random.randint(2, 7)))
    return random.choice(_ALL)


def name(random: Random) -> str:
    """Return a person's name; now and then an invented one."""
    return random.choice(NAMES) if random.random() < 0.8 else word(random).capitalize()


def city(random: Random) -> str:
    """Return a city; now and then one that is nowhere."""
    return random.choice(CITIES) if random.random() < 0.8 else word(random).capitalize()


def number(random: Random, most_digits: int = 3) -> int:
    """Return a number of one to `most_digits` digits, each count of digits as often."""
    digits = random.randint(1, most_digits)
    return random.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def sentence(random: Random) -> str:
    """Return a sentence that says nothing of use."""
    kind = random.randrange(4)
    thing, color = random.choice(THINGS), random.choice(COLORS)
    if kind == 0:
        return f"The {random.choice(PEOPLE)} saw a {color} {thing}."
    if kind == 1:
        return f"A {random.choice(ANIMALS)} sat near the {thing}."
    if kind == 2:
        return f"The {thing} is {color}."
    return f"{random.choice(NAMES)} went to {random.choice(CITIES)} on {random.choice(DAYS)}."

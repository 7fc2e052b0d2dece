"""Short talk about the project: greetings, facts of it, and saying so where an answer is not known.

There is a fixed number of these; the model knows them by heart. It does not ask about anything that
changes with a release.
"""

from __future__ import annotations

from random import Random

from mooncake.tasks.facts import FACTS, NOT_KNOWN, UNKNOWN
from mooncake.tasks.first.draws import number, word
from mooncake.tasks.questions import typed
from mooncake.tasks.sample import Message, Sample, assistant, user
from mooncake.tasks.words import ANIMALS, CITIES, NAMES, PEOPLE, THINGS

_PRODUCTS = (
    "What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b}", "{a} x {b}", "{a} / {b}",
    "Multiply {a} by {b}.", "Divide {a} by {b}.", "What is {a} divided by {b}?", "{a}*{b}",
    "What is the square root of {a}?", "How much is {a} * {b}?",
)  # fmt: skip
_NO_PRODUCTS = "I can add and subtract, but not multiply or divide."
_BEFORE = ("Hi, ", "Hello, ", "Please, ", "Hi! ", "And ", "So, ", "Ok, ", "Hello! ")


def chat(random: Random) -> Sample:
    """Return a question about the project, small talk, or something that the model cannot know."""
    kind = random.random()
    if kind < 0.03:
        text, answer = " ".join(word(random) for _ in range(random.randint(1, 5))), NOT_KNOWN
    elif kind < 0.07:
        text = random.choice(_PRODUCTS).format(a=number(random), b=number(random))
        answer = _NO_PRODUCTS
    elif kind < 0.27:
        text = random.choice(UNKNOWN).format(
            thing=random.choice(THINGS), city=random.choice(CITIES), name=random.choice(NAMES),
            animal=random.choice(ANIMALS), person=random.choice(PEOPLE),
        )  # fmt: skip
        answer = NOT_KNOWN
    else:
        asked, answer = random.choice(FACTS)
        text = random.choice(asked)
    messages: list[Message] = [user(_typed(text, random))]
    return Sample("chat", messages, assistant(answer), "")


def _typed(text: str, random: Random) -> str:
    """Return the text, now and then as a user in a hurry types it."""
    if random.random() < 0.1:
        text = f"{random.choice(_BEFORE)}{text[0].lower()}{text[1:]}"
    return typed(text, random)

"""Copying, answers in JSON, a needle in a long text, and what was said some turns ago."""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random
from typing import Any

from mooncake.tasks.first.draws import city, name, number, word
from mooncake.tasks.sample import Message, Sample, assistant, user
from mooncake.tasks.words import ANIMALS, COLORS, FRUITS, JOBS, sentence

_COPIES = (
    "Repeat: {text}",
    "Say this again: {text}",
    "Copy this: {text}",
    "Repeat after me: {text}",
)
_JSONS = (
    "Answer in JSON: {facts}", "Write a JSON object with {facts}.", "Give me JSON with {facts}.",
    "Return a JSON object: {facts}",
)  # fmt: skip
_KEYS = (
    "What is the code of {who}?", "Tell me the code of {who}.", "Which code does {who} have?",
    "Code of {who}?",
)  # fmt: skip
_WORDS_OF_A_SENTENCE = 8
"""Roughly the number of tokens in one filling sentence."""


def copying(random: Random) -> Sample:
    """Return words, numbers or a sentence to be repeated."""
    kind = random.randrange(3)
    if kind == 0:
        text = " ".join(sentence(random) for _ in range(random.randint(1, 3)))
    else:
        made = [
            str(number(random, 4)) if random.random() < 0.25 * kind else word(random)
            for _ in range(random.randint(1, 12))
        ]
        text = " ".join(made)
    ask = random.choice(_COPIES).format(text=text)
    return Sample("copying", [user(ask)], assistant(text), f"copying {text}")


def json_object(random: Random) -> Sample:
    """Return facts to be written as a JSON object."""
    makers: dict[str, Any] = {
        "name": lambda: name(random), "age": lambda: random.randint(1, 99),
        "city": lambda: city(random), "color": lambda: random.choice(COLORS),
        "count": lambda: number(random), "fruit": lambda: random.choice(FRUITS),
        "price": lambda: number(random), "open": lambda: random.random() < 0.5,
        "pet": lambda: random.choice(ANIMALS), "job": lambda: random.choice(JOBS),
        word(random): lambda: word(random), "ready": lambda: random.random() < 0.5,
        "tags": lambda: [word(random) for _ in range(random.randint(2, 3))],
    }  # fmt: skip
    chosen = random.sample(list(makers), random.randint(1, 4))
    facts = {key: makers[key]() for key in chosen}
    joiner = random.choice((" ", " = ", ": "))
    said = [f"{key}{joiner}{_said(value)}" for key, value in facts.items()]
    text = random.choice(_JSONS).format(facts=", ".join(said))
    return Sample("json", [user(text)], assistant(json.dumps(facts)), f"json {text}")


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return " and ".join(value) if isinstance(value, list) else str(value)


def needle(random: Random, num_words: int = 0) -> Sample:
    """Return a long text in which codes are hidden and a question for one of them.

    The answer says whose code it is before the code: the model finds it by continuing as the text
    does. The code alone is right too.

    num_words: how long the text is, in words; 0: usually short, 200 to 4,500 words in one of seven.
    """
    if not num_words:
        num_words = int(10 ** random.uniform(1.3, 2.3))
        if random.random() < 0.15:
            num_words = int(10 ** random.uniform(2.3, 3.65))
    num_codes = min(12, 3 + num_words // 40)
    owners = list(dict.fromkeys(name(random) for _ in range(num_codes)))
    codes = {owner: random.randint(1000, 9999) for owner in owners}
    lines = [f"The code of {owner} is {code}." for owner, code in codes.items()]
    lines += [sentence(random) for _ in range(num_words // _WORDS_OF_A_SENTENCE)]
    random.shuffle(lines)
    asked = random.sample(owners, min(len(owners), random.randint(1, 4) + num_codes // 3))
    messages: list[Message] = [user(f"{' '.join(lines)} {_question(random, asked[0])}")]
    for before, owner in pairwise(asked):
        messages += [_told(before, codes[before]), user(_question(random, owner))]
    key, code = f"needle {sorted(codes.items())}", codes[asked[-1]]
    return Sample("needle", messages, _told(asked[-1], code), key, also_right=(str(code),))


def _told(who: str, code: int) -> Message:
    return assistant(f"The code of {who} is {code}.")


def _question(random: Random, who: str) -> str:
    return random.choice(_KEYS).format(who=who)


def recall(random: Random) -> Sample:
    """Return a conversation in which the user says things about himself and asks for one of them
    later.
    """
    who, home, fruit, pet = name(random), city(random), random.choice(FRUITS), name(random)
    animal, job, color = random.choice(ANIMALS), random.choice(JOBS), random.choice(COLORS)
    facts = [
        (f"My name is {who}.", f"Nice to meet you, {who}.", "What is my name?",
         f"Your name is {who}."),
        (f"I live in {home}.", f"{home} sounds nice.", "Where do I live?", f"You live in {home}."),
        (f"I like {fruit}.", f"I will remember that you like {fruit}.", "What do I like?",
         f"You like {fruit}."),
        (f"I have a {animal} called {pet}.", f"{pet} is a good name.",
         f"What is my {animal} called?",
         f"Your {animal} is called {pet}."),
        (f"I am a {job}.", "That is a good job.", "What is my job?", f"You are a {job}."),
        (f"My favorite color is {color}.", f"{color.capitalize()} is a nice color.",
         "What is my favorite color?", f"Your favorite color is {color}."),
    ]  # fmt: skip
    told = random.sample(facts, random.randint(1, 4))
    messages: list[Message] = []
    for said, reply, _, _ in told:
        messages += [user(said), assistant(reply)]
    if random.random() < 0.4:
        other = copying(random)
        messages += [*other.messages, other.answer]
    _, _, question, answer = random.choice(told)
    messages.append(user(question))
    return Sample("recall", messages, assistant(answer), f"recall {told} {question}")

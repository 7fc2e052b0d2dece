"""Tasks that repeat something from the prompt: copies, look-ups, JSON, needles, memories."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

from mooncake.tasks.sample import Message, Sample, assistant, user
from mooncake.tasks.values import (
    anything,
    city,
    decimal,
    identifier,
    integer,
    name,
    signed,
    word,
)
from mooncake.tasks.words import ANIMALS, COLORS, FRUITS, JOBS, sentence

_COPIES = (
    "Repeat: {text}", "Say this again: {text}", "Copy this: {text}", "Repeat after me: {text}",
    "Say: {text}", "Write this: {text}", "Please repeat: {text}", "Echo {text}",
    "Repeat exactly what follows: {text}", "Copy: {text}", "Type this text: {text}",
)  # fmt: skip
_LOOK_UPS = (
    "What is {key}?", "Which value has {key}?", "{key}?", "What stands at {key}?",
    "Give me {key}.", "Tell me the value of {key}.",
)  # fmt: skip
_JSONS = (
    "Answer in JSON: {facts}", "Write a JSON object with {facts}.", "Give me JSON with {facts}.",
    "Return a JSON object: {facts}", "As JSON: {facts}", "Make JSON of this: {facts}",
    "Put this in JSON: {facts}", "JSON please: {facts}", "Convert to JSON: {facts}",
)  # fmt: skip
_KEYS = (
    "What is the code of {who}?", "Tell me the code of {who}.", "Which code does {who} have?",
    "Code of {who}?", "What code has {who}?", "I need the code of {who}.",
)  # fmt: skip
_TOKENS_OF_A_SENTENCE = 14


def copy(random: Random) -> Sample:
    """Return values in a row, or sentences, to be repeated: one to about forty words."""
    if random.random() < 0.2:
        text = " ".join(sentence(random) for _ in range(random.randint(1, 3)))
    else:
        joint = random.choice((" ", " ", " ", ", ", "; ", "\n"))
        number = random.choice((1, 1, 2, 3, 4, 6, 8, 12))
        text = joint.join(anything(random) for _ in range(number))
    ask = random.choice(_COPIES).format(text=text)
    return Sample("copy", [user(ask)], assistant(text), contents=(text,))


def look_up(random: Random) -> Sample:
    """Return pairs and a question for the value of one of them."""
    make = random.choice((word, name, identifier, lambda r: str(integer(r))))
    keys = list(dict.fromkeys(make(random) for _ in range(random.randint(1, 8))))
    pairs = {key: anything(random) for key in keys}
    joint, between = random.choice((": ", " = ", " is ", " -> ")), random.choice((", ", "; ", "\n"))
    listed = between.join(f"{key}{joint}{value}" for key, value in pairs.items())
    asked = random.choice(keys)
    question = random.choice(_LOOK_UPS).format(key=asked)
    messages = [user(f"{listed}{random.choice((chr(10), ' ', '. '))}{question}")]
    content = f"{asked}{joint}{pairs[asked]}"
    return Sample("look_up", messages, assistant(pairs[asked]), contents=(content,))


def json_value(random: Random) -> Any:
    """Return a value of any JSON type."""
    kind = random.random()
    if kind < 0.5:
        text = anything(random)
        # What looks like a number is one: a user would not know how else to say it.
        return word(random) if text.replace(".", "", 1).isdecimal() else text
    if kind < 0.7:
        return signed(random)
    if kind < 0.78:
        return decimal(random)
    if kind < 0.88:
        return random.random() < 0.5
    if kind < 0.9:
        return None
    make = random.choice((word, name, lambda r: integer(r, 3)))
    return [make(random) for _ in range(random.randint(2, 4))]


def spoken(value: Any) -> str:
    """Return a JSON value as a user writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) > 1:
        said = [spoken(one) for one in value]
        return f"{', '.join(said[:-1])} and {said[-1]}"
    if isinstance(value, dict):
        return " and ".join(f"{key} {spoken(one)}" for key, one in value.items())
    return json.dumps(value)


def json_object(random: Random) -> Sample:
    """Return facts to be written as a JSON object."""
    keys = list(dict.fromkeys(word(random) for _ in range(random.randint(1, 5))))
    facts = {key: json_value(random) for key in keys}
    joiner, between = random.choice((" ", " = ", ": ", " is ")), random.choice((", ", "; "))
    said = between.join(f"{key}{joiner}{spoken(value)}" for key, value in facts.items())
    text = random.choice(_JSONS).format(facts=said)
    written = json.dumps(facts, ensure_ascii=False)
    return Sample("object", [user(text)], assistant(written), contents=(written,))


def needle(random: Random, num_tokens: int = 0) -> Sample:
    """Return a long text in which codes are hidden and a question for one of them.

    The answer says whose code it is before the code; the code alone is right too.

    num_tokens: how long the text is; 0: usually short, up to 4,500 tokens in one of seven.
    """
    if not num_tokens:
        num_tokens = int(10 ** random.uniform(1.3, 2.5))
        if random.random() < 0.15:
            num_tokens = int(10 ** random.uniform(2.5, 3.65))
    owners = list(dict.fromkeys(name(random) for _ in range(min(12, 3 + num_tokens // 60))))
    make: Callable[[Random], str] = random.choice(
        (lambda r: str(r.randint(1000, 9999)), lambda r: str(integer(r, 8)), identifier, word)
    )
    codes = {owner: make(random) for owner in owners}
    lines = [f"The code of {owner} is {code}." for owner, code in codes.items()]
    lines += [sentence(random) for _ in range(num_tokens // _TOKENS_OF_A_SENTENCE)]
    random.shuffle(lines)
    asked = random.sample(owners, min(len(owners), random.randint(1, 3) + len(owners) // 4))
    messages: list[Message] = [user(f"{' '.join(lines)} {_question(random, asked[0])}")]
    for before, owner in pairwise(asked):
        messages += [_told(before, codes[before]), user(_question(random, owner))]
    code, answer = codes[asked[-1]], _told(asked[-1], codes[asked[-1]])
    return Sample("code", messages, answer, also_right=(code,), contents=(str(answer["content"]),))


def _told(who: str, code: str) -> Message:
    return assistant(f"The code of {who} is {code}.")


def _question(random: Random, who: str) -> str:
    return random.choice(_KEYS).format(who=who)


def memory(random: Random) -> Sample:
    """Return a conversation in which the user says things about himself and asks for one of them
    later.
    """
    value = {
        "name": name(random), "home": city(random), "likes": _one_of(random, FRUITS),
        "animal": random.choice(ANIMALS), "pet": name(random), "job": _one_of(random, JOBS),
        "color": _one_of(random, COLORS), "thing": word(random), "value": anything(random),
        "friend": name(random), "number": str(integer(random, 8)), "age": random.randint(1, 99),
        "secret": anything(random),
    }  # fmt: skip
    chosen = random.sample(_MEMORIES, random.randint(1, 5))
    messages: list[Message] = []
    contents: list[str] = []
    for said, reply, *_ in chosen:
        messages += [user(random.choice(said).format(**value)), assistant(reply.format(**value))]
        if random.random() < 0.1:
            other = copy(random)
            messages += [*other.messages, other.answer]
            contents += other.contents
    said, _, questions, answer = random.choice(chosen)
    messages.append(user(random.choice(questions).format(**value)))
    text = answer.format(**value)
    return Sample("memory", messages, assistant(text), contents=(text, *contents))


def _one_of(random: Random, listed: list[str]) -> str:
    return random.choice(listed) if random.random() < 0.5 else word(random)


_MEMORIES: tuple[tuple[tuple[str, ...], str, tuple[str, ...], str], ...] = (
    (("My name is {name}.", "I am {name}.", "Call me {name}.", "Hi, I'm {name}",
      "I'm called {name}", "my name's {name}"),
     "Nice to meet you, {name}.",
     ("What is my name?", "Who am I?", "What am I called?", "Do you remember my name?", "my name?"),
     "Your name is {name}."),
    (("I live in {home}.", "My home is {home}.", "I am from {home}.", "I come from {home}."),
     "{home} sounds nice.",
     ("Where do I live?", "Where am I from?", "Which city do I live in?", "Where is my home?"),
     "You live in {home}."),
    (("I like {likes}.", "I love {likes}.", "My favorite food is {likes}."),
     "I will remember that you like {likes}.",
     ("What do I like?", "What is my favorite food?", "Which food do I like?"),
     "You like {likes}."),
    (("I have a {animal} called {pet}.", "My {animal} is called {pet}.",
      "My {animal}'s name is {pet}."),
     "{pet} is a good name.",
     ("What is my {animal} called?", "What is the name of my {animal}?", "My {animal}'s name?"),
     "Your {animal} is called {pet}."),
    (("I am a {job}.", "I work as a {job}.", "My job is {job}."), "That is a good job.",
     ("What is my job?", "What do I work as?", "What do I do for a living?"),
     "You are a {job}."),
    (("My favorite color is {color}.", "The color I like most is {color}."),
     "I will remember that.",
     ("What is my favorite color?", "Which color do I like most?"),
     "Your favorite color is {color}."),
    (("Remember: {thing} is {value}", "Please remember that {thing} is {value}",
      "Keep in mind: {thing} is {value}", "Note that {thing} is {value}"),
     "I will remember that.",
     ("What is {thing}?", "Do you remember {thing}?", "What did I say about {thing}?"),
     "{thing} is {value}"),
    (("My friend is called {friend}.", "My friend's name is {friend}.",
      "My best friend is {friend}."),
     "I will remember {friend}.",
     ("What is my friend called?", "Who is my friend?", "What is my friend's name?"),
     "Your friend is called {friend}."),
    (("My number is {number}.", "My phone number is {number}.", "My telephone: {number}"),
     "I will remember your number.",
     ("What is my number?", "What is my phone number?", "Which number do I have?"),
     "Your number is {number}."),
    (("I am {age} years old.", "I'm {age}.", "My age is {age}."), "I will remember your age.",
     ("How old am I?", "What is my age?"),
     "You are {age} years old."),
    (("The secret word is {secret}", "The password is {secret}", "Remember this: {secret}",
      "Remember {secret}"),
     "I will remember that.",
     ("What was the secret word?", "What did I tell you to remember?", "What was the password?",
      "What should you remember?"),
     "You told me: {secret}"),
)  # fmt: skip

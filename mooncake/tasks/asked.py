"""Makes requests of users that need a tool, in many wordings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from mooncake.tasks.copies import spoken
from mooncake.tasks.declared import ASKING, NEEDING, Parameter, Tool

_LEADS = (
    "", "", "", "please ", "can you ", "could you ", "I want to ", "I need to ", "I would like to ",
    "now ", "hey, ", "would you ", "let's ", "I'd like you to ", "go and ", "then ",
)  # fmt: skip
_DETERMINERS = ("the ", "a ", "", "", "my ", "this ")
_GENERIC = (
    "{key} {v}", "{key}: {v}", "{key} = {v}", "{key} is {v}", "with {key} {v}", "the {key} is {v}",
    "use {v} as {key}", "{key} should be {v}", "and {key} {v}", "with the {key} {v}",
    "set {key} to {v}", "for {key} {v}", "{key} of {v}",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A user's request, what it asks for in two words, and its arguments."""

    text: str
    wanted: str
    arguments: dict[str, Any]


def request(random: Random, wanted: Tool, verb: str = "") -> Request:
    """Return a user's request that needs the tool, in one of many wordings.

    verb: the verb that is used; by default one that means the same as the tool's.
    """
    if wanted.asks and not verb:
        return _asked(random, wanted)
    verb = verb or (wanted.verb if random.random() < 0.7 else random.choice(wanted.means))
    given = [
        made for made in wanted.parameters
        if made.key not in wanted.optional or random.random() < 0.5
    ]  # fmt: skip
    arguments = {made.key: made.make(random) for made in given}
    facts = _facts(random, given, arguments)
    thing = random.choice(_DETERMINERS) + wanted.noun.replace("_", " ")
    kind = random.random()
    if verb in ASKING and kind < 0.35:
        text = random.choice((
            "what is the {noun}{facts}?", "{noun}{facts}?", "what's the {noun}{facts}?",
            "how is the {noun}{facts}?", "I want to know the {noun}{facts}",
            "tell me the {noun}{facts}", "give me the {noun}{facts}.",
            "do you know the {noun}{facts}?",
        )).format(noun=wanted.noun.replace("_", " "), facts=facts)  # fmt: skip
        said = wanted.noun
    elif verb in NEEDING and kind < 0.25:
        form = random.choice(
            ("I need a {noun}{facts}.", "a {noun}{facts}, please", "I want a {noun}{facts}.")
        )
        text = form.format(noun=wanted.noun.replace("_", " "), facts=facts)
        said = wanted.noun
    else:
        lead = random.choice(_LEADS)
        mark = (
            "?"
            if lead.startswith(("can", "could", "would"))
            else random.choice((".", "", "!", "."))
        )
        text = f"{lead}{verb} {thing}{facts}{mark}"
        said = f"{verb} {wanted.noun}"
    if random.random() < 0.8:
        text = text[0].upper() + text[1:]
    return Request(text, said.replace("_", " "), arguments)


def _asked(random: Random, wanted: Tool) -> Request:
    """Return a request for an everyday tool."""
    arguments = {made.key: made.make(random) for made in wanted.parameters}
    said = [spoken(value) for value in arguments.values()]
    given = dict(zip("vw", said, strict=False))
    text = random.choice(wanted.asks or (wanted.content,)).format(**given)
    lead = random.choice(("", "", "", "", "hey, ", "please: ", "and ", "hi, ", "now "))
    text = f"{lead}{text}{random.choice(('', '?', '.', '?', '!'))}"
    if random.random() < 0.7:
        text = text[0].upper() + text[1:]
    return Request(text, wanted.noun, arguments)


def written(arguments: dict[str, Any]) -> str:
    """Return arguments as the model writes them."""
    return json.dumps(arguments, ensure_ascii=False)


def _facts(random: Random, given: list[Parameter], arguments: dict[str, Any]) -> str:
    """Return what is said about the arguments after the noun."""
    order = random.sample(given, len(given))
    near: list[str] = []
    rest: list[str] = []
    leading: set[str] = set()  # words such as "for": each says one thing in a sentence
    for made in order:
        value = made.said(arguments[made.key], random)
        if isinstance(arguments[made.key], str) and random.random() < 0.12:
            value = random.choice(('"{}"', "'{}'")).format(value)
        key = made.key.replace("_", " ") if random.random() < 0.6 else made.key
        ways = [way for way in made.ways if way.split()[0] not in leading]
        if not ways or (len(given) > 1 and random.random() < 0.25):
            rest.append(random.choice(_GENERIC).format(key=key, v=value))
            continue
        way = random.choice(ways)
        leading.add(way.split()[0])
        near.insert(0 if way == "{v}" else len(near), way.format(key=key, v=value))
    # A text that goes on to the end of the sentence comes last.
    near.sort(key=lambda said: said.startswith((":", "saying", "that says")))
    facts = " ".join(near)
    if rest:
        listed = random.choice((", ", "; ", " and ", ", ")).join(rest)
        facts += (
            random.choice((", ", " ", ": ", "; ")) if facts else random.choice((" ", ": ", ", "))
        ) + listed
    return facts if facts.startswith((":", ",", ";", " ")) or not facts else f" {facts}"

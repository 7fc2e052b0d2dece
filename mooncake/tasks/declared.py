"""Tools that are made up: names, descriptions, and up to five parameters of every JSON type.

Module `calls` makes the requests for them. A few (`EVERYDAY`) are tools that many users have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from mooncake.tasks.copies import spoken
from mooncake.tasks.values import (
    anything,
    city,
    decimal,
    identifier,
    integer,
    letters,
    moment,
    name,
    path,
    phrase,
    signed,
    syllables,
    word,
)
from mooncake.tasks.words import DAYS, NOUNS

# A tool has a verb and a noun, a description, possible parameters, and requests, which name neither
# verb nor noun. In requests, "{v}" and "{w}" stand for the first and the second argument.
EVERYDAY: tuple[tuple[str, str, str, tuple[tuple[str, ...], ...], tuple[str, ...]], ...] = (
    ("get", "time", "get the current time", ((), ("city",), ("timezone",)),
     ("what time is it", "what's the time", "how late is it", "current time", "time",
      "tell me the time", "do you know what time it is", "what time is it in {v}", "time in {v}",
      "how late is it in {v}")),
    ("get", "date", "get the date of today", ((),),
     ("what day is it", "what is the date", "which day is today", "what's the date today",
      "today?")),
    ("calculate", "sum", "calculate an expression", (("expression",), ("formula",)),
     ("what is {v}", "how much is {v}", "calculate {v}", "compute {v}", "{v}", "what's {v}",
      "{v} = ?", "solve {v}", "please work out {v}")),
    ("get", "forecast", "get the weather", (("city",), ("location",), ("place",)),
     ("what is the weather in {v}", "how is the weather in {v}", "weather in {v}",
      "is it raining in {v}", "what's the weather like in {v}", "will it rain in {v}",
      "how warm is it in {v}", "is it cold in {v}")),
    ("list", "files", "list the files of a folder", ((), ("folder",), ("path",), ("directory",)),
     ("which files are there", "what files do you see", "which files are in {v}", "list files",
      "show the files in {v}", "what is in {v}", "what is in the folder {v}", "ls {v}",
      "list the folder {v}")),
    ("read", "file", "read a file", (("path",), ("file",), ("filename",)),
     ("what does {v} say", "show me {v}", "open {v}", "read {v}", "what is written in {v}",
      "cat {v}", "print {v}", "show the content of {v}", "what stands in {v}")),
    ("get", "cluster", "get the status of the cluster", ((),),
     ("how is the cluster", "which workers are there now", "how many workers are running",
      "is the cluster healthy", "cluster status", "status of the cluster", "is everything running",
      "what is the state of the cluster")),
    ("send", "mail", "send a mail", (("to", "subject"), ("recipient", "subject"), ("to", "text")),
     ("mail {v} about {w}", "write {v} a mail about {w}", "send {v} a mail: {w}",
      "send a mail to {v} with subject {w}", "tell {v}: {w}", "let {v} know {w}",
      "write to {v}: {w}")),
    ("set", "alarm", "set an alarm", (("time",), ("at",)),
     ("wake me at {v}", "alarm at {v}", "remind me at {v}")),
    ("set", "timer", "set a timer", (("minutes",),),
     ("remind me in {v} minutes", "timer for {v} minutes", "in {v} minutes", "timer {v} minutes")),
    ("search", "web", "search the web", (("query",), ("q",)),
     ("google {v}", "look for {v}", "find out about {v}", "search for {v}",
      "search {v} on the web", "what can you find about {v}")),
)  # fmt: skip


VERBS: tuple[tuple[str, ...], ...] = (
    ("get", "show", "fetch", "check", "find", "read", "look up"), ("send", "write"),
    ("book", "reserve"), ("create", "make", "add"), ("delete", "remove", "erase"),
    ("start", "run", "launch"), ("stop", "end", "cancel"), ("update", "change", "edit"),
    ("open",), ("close", "shut"), ("order", "buy", "purchase"), ("play",), ("set",),
    ("move",), ("count",), ("list",), ("print",), ("share",), ("rename",), ("search",),
    ("translate",), ("call", "ring"), ("turn on", "switch on", "enable"), ("upload",),
    ("turn off", "switch off", "disable"), ("download",), ("lock",), ("unlock",), ("convert",),
    ("copy",), ("sort",), ("schedule", "plan"), ("save", "store"), ("join",), ("rate",), ("sell",),
)  # fmt: skip
"""What tools do. The verbs of a group mean the same."""
ASKING = VERBS[0]
NEEDING = (*VERBS[2], *VERBS[3], *VERBS[10])
"""Verbs that "I need a" may stand for."""
_TAILS = (
    "by its name",
    "in a city",
    "for a person",
    "and return it",
    "with the given values",
    "by id",
    "of a place",
    "at a time",
    "now",
    "in the system",
    "if there is one",
    "to somebody",
    "as the user asked",
    "from the list",
    "and tell what came of it",
)


@dataclass(frozen=True)
class Parameter:
    """One parameter: its schema, its possible values, and how users say it besides "key value".

    ways: said right behind the noun; "{v}" alone stands for the noun's own name ("room Alpha").
    """

    key: str
    schema: dict[str, Any]
    make: Callable[[Random], Any]
    ways: tuple[str, ...] = ()
    said: Callable[[Any, Random], str] = lambda value, _: spoken(value)


@dataclass(frozen=True)
class Tool:
    """A tool. `verb` and `noun` say what it is for, whatever its name."""

    name: str
    verb: str
    noun: str
    parameters: tuple[Parameter, ...]
    optional: frozenset[str]
    declaration: dict[str, Any]
    asks: tuple[str, ...] = ()
    """Sentences of users who need a tool without verb and noun. Such a tool is known by
    its noun.
    """

    @property
    def content(self) -> str:
        """What identifies the tool."""
        return f"{self.verb} {self.noun}"

    @property
    def contents(self) -> tuple[str, ...]:
        """What identifies the tool, and what its name says, which may differ."""
        parts = re.findall(r"[A-Z]?[a-z]+|\d+", self.name)
        return self.content, " ".join(parts).lower()

    @property
    def means(self) -> tuple[str, ...]:
        """The verbs that mean the same as its own."""
        return next((group for group in VERBS if self.verb in group), (self.verb,))


_STRING: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}


def _texts(keys: str, make: Callable[[Random], str], *ways: str) -> list[Parameter]:
    return [Parameter(key, _STRING, make, ways) for key in keys.split()]


def _numbers(keys: str, *ways: str) -> list[Parameter]:
    return [
        Parameter(key, _INTEGER, lambda random: integer(random, 3), ways) for key in keys.split()
    ]


def _expression(random: Random) -> str:
    made = str(integer(random, 4))
    for _ in range(random.randint(1, 3)):
        made += random.choice((" {} ", "{}")).format(random.choice("+-*/")) + str(
            integer(random, 3)
        )
    return made


_ROLES: tuple[tuple[Parameter, ...], ...] = tuple(map(tuple, (
    _texts("to recipient person contact receiver", name, "to {v}", "for {v}"),
    _texts("to email address", lambda random: f"{word(random)}@{word(random)}.com", "to {v}"),
    _texts("name person user guest owner", name, "for {v}", "of {v}"),
    _texts("city place location town", city, "in {v}", "for {v}"),
    _texts("destination target", city, "to {v}"),
    _texts("source origin start", city, "from {v}"),
    _texts("text message body content note", phrase, "saying {v}", "that says {v}", ": {v}"),
    _texts("subject title topic", phrase, "with subject {v}", "about {v}", "called {v}"),
    _texts("query term keyword", phrase, "for {v}", "about {v}", "on {v}"),
    _texts("path file filename folder directory", path, "{v}", "in {v}", "at {v}"),
    _texts("id code number reference", identifier, "{v}", "number {v}"),
    _texts("time at when", moment, "at {v}", "for {v}"),
    _texts("language unit currency format", word, "in {v}", "to {v}", "as {v}"),
    _texts("expression formula", _expression, "{v}", "of {v}"),
    [Parameter(key, {**_STRING, "enum": DAYS}, lambda random: random.choice(DAYS),
               ("on {v}", "for {v}")) for key in ("day", "weekday", "date")],
    _numbers("hours days minutes weeks seconds nights months years", "for {v} {key}",
             "for {v} {key}", "of {v} {key}"),
    _numbers("people guests persons seats", "for {v} {key}", "for {v}", "with {v} {key}"),
    _numbers("percent degrees level volume", "to {v} {key}", "to {v}", "at {v} {key}"),
    _numbers("count quantity amount number", "{v} times", "of {v}"),
)))  # fmt: skip


def _key(random: Random) -> str:
    kind = random.random()
    if kind < 0.6:
        made = random.choice(NOUNS)
    else:
        made = syllables(random, 3) if kind < 0.85 else letters(random, 1, 8, "abcdefghijklmnop")
    if random.random() < 0.2:
        made += random.choice(("_", "_", "-")) + word_of_latin(random)
    return made


def word_of_latin(random: Random) -> str:
    """Return a word that may be part of the name of a tool or parameter."""
    return random.choice(NOUNS) if random.random() < 0.6 else syllables(random, 3)


def _yes(value: bool, random: Random) -> str:
    return random.choice((("false", "no", "off"), ("true", "yes", "on"))[value])


def parameter(random: Random) -> Parameter:
    """Return a parameter of any JSON type."""
    kind = random.random()
    if kind < 0.45:
        return random.choice(random.choice(_ROLES))
    key = _key(random)
    if kind < 0.62:
        return Parameter(key, _STRING, anything)
    if kind < 0.72:
        return Parameter(key, _INTEGER, signed)
    if kind < 0.77:
        return Parameter(key, {"type": "number"}, decimal)
    if kind < 0.84:
        return Parameter(key, {"type": "boolean"}, lambda r: r.random() < 0.5, said=_yes)
    if kind < 0.89:
        options = list(dict.fromkeys(word(random) for _ in range(random.randint(2, 4))))
        return Parameter(key, {**_STRING, "enum": options}, lambda r: r.choice(options))
    if kind < 0.95:
        items, make = random.choice((
            (_STRING, word), (_STRING, name), (_INTEGER, lambda r: integer(r, 3)),
        ))  # fmt: skip
        return Parameter(
            key, {"type": "array", "items": items},
            lambda r: [make(r) for _ in range(r.randint(2, 4))],
        )  # fmt: skip
    if kind < 0.98:
        inner = list(dict.fromkeys(_key(random) for _ in range(random.randint(1, 3))))
        schema = {"type": "object", "properties": dict.fromkeys(inner, _INTEGER)}
        return Parameter(key, schema, lambda r: {one: integer(r, 3) for one in inner})
    return Parameter(
        key, {"type": ["string", "null"]}, lambda r: None if r.random() < 0.5 else word(r),
        said=lambda value, _: "nothing" if value is None else str(value),
    )  # fmt: skip


def _everyday(random: Random) -> Tool:
    verb, noun, described, ways, asks = random.choice(EVERYDAY)
    keys = random.choice(ways)
    made = [next((one for role in _ROLES for one in role if one.key == key),
                 Parameter(key, _STRING, phrase)) for key in keys]  # fmt: skip
    fitting = tuple(ask for ask in asks if ("{v}" in ask) == bool(made))
    called = random.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}", noun,
                            f"{noun}_{verb}", syllables(random)))  # fmt: skip
    described = random.choice((described, described.capitalize(), f"{described.capitalize()}."))
    parameters = tuple(made)
    declaration = _declaration(random, called, described, parameters, frozenset())
    return Tool(called, verb, noun, parameters, frozenset(), declaration, fitting)


def tool(random: Random) -> Tool:
    """Return a tool that nobody has seen, or sometimes one that many users have."""
    if random.random() < 0.12:
        return _everyday(random)
    verb = random.choice(random.choice(VERBS)) if random.random() < 0.8 else syllables(random, 3)
    noun = random.choice(NOUNS) if random.random() < 0.65 else word_of_latin(random)
    chosen: dict[str, Parameter] = {}
    for _ in range(random.choice((0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5))):
        made = parameter(random)
        if random.random() < 0.08:
            made = replace(
                made,
                key=noun,
                ways=("{v}",),
                schema=_STRING,
                make=anything,
                said=lambda value, _: str(value),
            )
        chosen.setdefault(made.key, made)
    parameters = tuple(chosen.values())
    optional = frozenset(made.key for made in parameters[1:] if random.random() < 0.25)
    called, described = _names(random, verb, noun)
    return Tool(
        called,
        verb,
        noun,
        parameters,
        optional,
        _declaration(random, called, described, parameters, optional),
    )


def _names(random: Random, verb: str, noun: str) -> tuple[str, str]:
    """Return a tool's name and its description. At least one of the two tells what the tool
    is for.
    """
    one = verb.replace(" ", "_")
    thing = f"{random.choice(('a ', 'the ', '', 'the '))}{noun}"
    described = random.choice((
        f"{verb} {thing}", f"{verb} {thing}.", f"use this to {verb} {thing}.", f"{verb} {noun}",
        f"{verb} {thing} for the user", f"{verb} {thing} {random.choice(_TAILS)}",
        f"{verb} {thing} {random.choice(_TAILS)}.", f"{verb} one {noun} {random.choice(_TAILS)}",
        f"a tool to {verb} {thing}", f"this can {verb} {thing}", f"call this to {verb} {thing}",
    ))  # fmt: skip
    described = described[0].upper() + described[1:]
    kind = random.random()
    if kind < 0.15:
        parts = one.split("_") + noun.split("_")
        return parts[0] + "".join(part.capitalize() for part in parts[1:]), described
    if kind < 0.3:
        return random.choice((noun, one, f"{noun}_{one}", f"{one}-{noun}")), described
    if kind < 0.42:
        odd = random.choice(
            (
                syllables(random),
                letters(random, 2, 8, "abcdefghijklmnopqrstuvwxyz"),
                f"tool_{integer(random, 3)}",
                f"{syllables(random, 2)}_{noun}",
            )
        )
        return odd, described
    return f"{one}_{noun}", described if random.random() < 0.7 else random.choice(
        ("", phrase(random))
    )


def _declaration(
    random: Random, called: str, described: str, parameters: Sequence[Parameter],
    optional: frozenset[str],
) -> dict[str, Any]:  # fmt: skip
    """Return the tool as the OpenAI API declares it, in one of the ways that clients do."""
    with_words = random.random() < 0.3
    properties = {}
    for made in parameters:
        schema = dict(made.schema)
        if with_words:
            schema["description"] = random.choice((
                f"The {made.key}", f"the {made.key} to use", phrase(random, 3), f"{made.key}",
            ))  # fmt: skip
        properties[made.key] = schema
    schema = {"type": "object", "properties": properties}
    if (required := [made.key for made in parameters if made.key not in optional]) or properties:
        schema["required"] = required
    if random.random() < 0.1:
        schema["additionalProperties"] = False
    function: dict[str, Any] = {"name": called}
    if described:
        function["description"] = described
    return {"type": "function", "function": {**function, "parameters": schema}}

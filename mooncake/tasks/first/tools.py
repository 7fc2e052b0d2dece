"""Calls of tools with varied schemas, answers from what they return, and requests that need no
tool.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from mooncake.tasks.first.draws import city, name, number, word
from mooncake.tasks.first.numbers import addition
from mooncake.tasks.sample import Message, Sample, assistant, user
from mooncake.tasks.words import COLORS, DAYS, FRUITS, THINGS

_VERBS = [
    "get", "find", "check", "book", "order", "send", "create", "open", "close", "start", "stop",
    "show", "read", "delete", "update",
]  # fmt: skip
_NOUNS = [
    "weather", "hotel", "flight", "ticket", "table", "message", "file", "song", "lamp", "report",
    "meeting", "door", "train", "room", "news", "price", "map", "note", "task", "photo",
]  # fmt: skip
_NO_TOOL = "I have no tool for that."
_SIZES = ("small", "medium", "large")


@dataclass(frozen=True)
class _Parameter:
    schema: Mapping[str, Any]
    value: Callable[[Random], Any]


_STRING: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}
_PARAMETERS: dict[str, _Parameter] = {
    "city": _Parameter(_STRING, city),
    "name": _Parameter(_STRING, name),
    "title": _Parameter(_STRING, word),
    "place": _Parameter(_STRING, lambda random: random.choice(THINGS)),
    "item": _Parameter(_STRING, lambda random: random.choice(FRUITS)),
    "text": _Parameter(
        _STRING, lambda random: " ".join(word(random) for _ in range(random.randint(1, 4)))
    ),
    "day": _Parameter({"type": "string", "enum": DAYS}, lambda random: random.choice(DAYS)),
    "size": _Parameter({"type": "string", "enum": list(_SIZES)}, lambda r: r.choice(_SIZES)),
    "color": _Parameter(_STRING, lambda random: random.choice(COLORS)),
    "days": _Parameter(_INTEGER, lambda random: random.randint(1, 14)),
    "count": _Parameter(_INTEGER, lambda random: number(random, 2)),
    "limit": _Parameter(_INTEGER, number),
    "id": _Parameter(_INTEGER, lambda random: number(random, 4)),
    "fast": _Parameter({"type": "boolean"}, lambda random: random.random() < 0.5),
}
_PLAIN_ASKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "get_weather": (
        ("city",),
        ("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}?",
         "What's the weather like in {city}?"),
    ),
    "get_time": (("city",), ("What time is it in {city}?", "Time in {city}?")),
    "book_hotel": (
        ("city", "days"),
        ("Book a hotel in {city} for {days} days.", "I need a hotel in {city} for {days} days."),
    ),
    "find_flight": (
        ("city", "day"),
        ("Find a flight to {city} on {day}.", "I want to fly to {city} on {day}."),
    ),
    "send_message": (
        ("name", "text"),
        ("Send a message to {name}: {text}", "Tell {name}: {text}"),
    ),
    "set_timer": (("count",), ("Set a timer for {count} minutes.", "Timer, {count} minutes.")),
    "order_fruit": (
        ("item", "count"),
        ("Order {count} of {item}.", "Please buy {count} of {item}."),
    ),
    "get_price": (("item",), ("What does a {item} cost?", "What is the price of a {item}?")),
}  # fmt: skip
_RESULTS: dict[str, Callable[[Random], Any]] = {
    "temperature": lambda random: random.randint(-10, 40),
    "sky": lambda random: random.choice(("sunny", "cloudy", "rainy", "clear", "snowy")),
    "status": lambda random: random.choice(("ok", "done", "failed", "sent", "booked", "open")),
    "price": number,
    "time": lambda random: f"{random.randint(0, 23):02}:{random.randint(0, 59):02}",
    "number": lambda random: number(random, 4),
    "place": lambda random: random.choice(THINGS),
    "name": name,
    "count": lambda random: number(random, 2),
    "wind": lambda random: random.randint(0, 60),
}
_LIKELY_RESULTS = {
    "get_weather": ("temperature", "sky", "wind"), "get_time": ("time",), "get_price": ("price",),
    "book_hotel": ("status", "price"), "find_flight": ("number", "price", "time"),
    "send_message": ("status",), "set_timer": ("status",), "order_fruit": ("status", "price"),
}  # fmt: skip


@dataclass(frozen=True)
class _Tool:
    name: str
    parameters: tuple[str, ...]
    optional: str = ""

    def declaration(self) -> dict[str, Any]:
        """Return the tool as the OpenAI API declares it."""
        required = [key for key in self.parameters if key != self.optional]
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": _spoken(self.name).capitalize(),
                "parameters": {
                    "type": "object",
                    "properties": {key: _PARAMETERS[key].schema for key in self.parameters},
                    "required": required,
                },
            },
        }


def tool_call(random: Random) -> Sample:
    """Return a request that one of the declared tools serves. The answer calls it."""
    tools = _tools(random)
    used = random.choice(tools)
    text, arguments = _ask(random, used)
    messages: list[Message] = [user(text)]
    return _sample("tool_call", tools, used, messages, _calling(used, arguments, 0))


def tool_result(random: Random) -> Sample:
    """Return a request, the call and what the tool returned. The answer says it in words.

    Sometimes a second request follows. Then the answer is its call.
    """
    tools = _tools(random)
    used = random.choice(tools)
    text, arguments = _ask(random, used)
    keys = list(_LIKELY_RESULTS.get(used.name, _RESULTS))
    keys = random.sample(keys, random.randint(1, min(2, len(keys))))
    result = {key: _RESULTS[key](random) for key in keys}
    call = _calling(used, arguments, 0)
    messages: list[Message] = [
        user(text),
        call,
        {
            "role": "tool",
            "tool_call_id": call["tool_calls"][0]["id"],
            "content": json.dumps(result),
        },
    ]
    said = " and ".join(f"the {key} is {value}" for key, value in result.items())
    answer = assistant(f"{said[0].upper()}{said[1:]}.")
    if random.random() < 0.3:
        again = random.choice(tools)
        text, arguments = _ask(random, again)
        messages += [answer, user(text)]
        return _sample("tool_call", tools, again, messages, _calling(again, arguments, 1))
    return _sample("tool_result", tools, used, messages, answer)


def no_tool(random: Random) -> Sample:
    """Return a request that no declared tool serves: a sum, or something for which there is no
    tool.
    """
    tools = _tools(random)
    if random.random() < 0.5:
        plain = addition(random)
        return _sample("no_tool", tools, tools[0], list(plain.messages), plain.answer)
    while (other := _tool(random)).name in {tool.name for tool in tools}:
        pass
    text, _ = _ask(random, other)
    return _sample("no_tool", tools, other, [user(text)], assistant(_NO_TOOL))


def _sample(
    task: str, tools: list[_Tool], used: _Tool, messages: list[Message], answer: Message
) -> Sample:
    key = f"tool {used.name} {used.parameters}" if used.name not in _PLAIN_ASKS else ""
    declared = [tool.declaration() for tool in tools]
    return Sample(task, messages, answer, key or f"{task} {messages[0]['content']}", declared)


def _tools(random: Random) -> list[_Tool]:
    tools: dict[str, _Tool] = {}
    for _ in range(random.choice((1, 1, 2, 2, 3))):
        tool = _tool(random)
        tools[tool.name] = tool
    return list(tools.values())


def _tool(random: Random) -> _Tool:
    if random.random() < 0.4:
        name = random.choice(list(_PLAIN_ASKS))
        return _Tool(name, _PLAIN_ASKS[name][0])
    while (made := f"{random.choice(_VERBS)}_{random.choice(_NOUNS)}") in _PLAIN_ASKS:
        pass
    parameters = tuple(random.sample(list(_PARAMETERS), random.randint(1, 3)))
    optional = parameters[-1] if len(parameters) > 1 and random.random() < 0.25 else ""
    return _Tool(made, parameters, optional)


def _ask(random: Random, tool: _Tool) -> tuple[str, dict[str, Any]]:
    """Return a user's request that needs `tool`, and the arguments to call it with."""
    given = [key for key in tool.parameters if key != tool.optional or random.random() < 0.5]
    arguments = {key: _PARAMETERS[key].value(random) for key in given}
    if tool.name in _PLAIN_ASKS and random.random() < 0.8:
        return random.choice(_PLAIN_ASKS[tool.name][1]).format(**arguments), arguments
    said = list(arguments.items())
    random.shuffle(said)
    joiner = random.choice((" ", " is ", ": ", " = "))
    pairs = [f"{key}{joiner}{_said(value)}" for key, value in said]
    facts = f"{', '.join(pairs[:-1])} and {pairs[-1]}" if len(pairs) > 1 else pairs[0]
    what = _spoken(tool.name)
    form = random.choice(
        ("{what} with {facts}.", "Please {what}: {facts}", "I want to {what}, {facts}.",
         "Can you {what} with {facts}?", "{what}, {facts}")
    )  # fmt: skip
    text = form.format(what=what, facts=facts)
    return text[0].upper() + text[1:], arguments


def _spoken(name: str) -> str:
    verb, _, noun = name.partition("_")
    return f"{verb} the {noun}"


def _said(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _calling(tool: _Tool, arguments: Mapping[str, Any], number_of_call: int) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"functions.{tool.name}:{number_of_call}",
                "type": "function",
                "function": {"name": tool.name, "arguments": json.dumps(arguments)},
            }
        ],
    }

"""Tasks about calls of tools: the right one, several at once, none if none fits; results and errors
reported.

Before a call the model says what is wanted and which tool is for it: "book room; reserve_room", or
"book room; none". What users say who need a tool is made here too, in many wordings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from mooncake.tasks.copies import copy, json_value, spoken
from mooncake.tasks.declared import ASKING, NEEDING, Parameter, Tool, tool
from mooncake.tasks.questions import question
from mooncake.tasks.sample import Message, Sample, assistant, user
from mooncake.tasks.sums import sum_of_two
from mooncake.tasks.values import identifier, integer, phrase, word

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


NO_TOOL = "I have no tool for that."
_SUM = re.compile(r"\d+ ?[+-] ?\d+")
_AND = (" And ", " Then ", " Also ", " ")


def call(random: Random) -> Sample:
    """Return a request that one of the declared tools serves; the answer calls it."""
    tools = _tools(random)
    used = random.choice(tools)
    asked = request(random, used)
    answer = _calling([(used, asked)], 0)
    if random.random() < 0.08:  # as where a client demands a call, and there is no room to think
        del answer["reasoning"]
    return _sample("call", tools, [user(asked.text)], answer, [asked])


def calls(random: Random) -> Sample:
    """Return a request for two or three things; the answer calls for all of them."""
    tools = _tools(random, fewest=2)
    wanted = [random.choice(tools) for _ in range(random.choice((2, 2, 2, 3)))]
    asked = [request(random, one) for one in wanted]
    text = asked[0].text
    for one in asked[1:]:
        text = f"{text}{random.choice(_AND)}{one.text}"
    answer = _calling(list(zip(wanted, asked, strict=True)), 0)
    return _sample("calls", tools, [user(text)], answer, asked)


def refusal(random: Random) -> Sample:
    """Return a request that no declared tool serves: no tool fits, or none is needed."""
    tools = _tools(random)
    kind = random.random()
    if kind < 0.4 and not any(one.asks for one in tools):
        plain = random.choice((sum_of_two, copy, question, question))(random)
        return _without(tools, plain)
    other, asked = _unserved(random, tools)
    return _sample("refusal", tools, [user(asked.text)], _refusing(asked), [asked], other.content)


def result(random: Random) -> Sample:
    """Return a request, its calls and what the tools returned. The answer says it in words."""
    tools = _tools(random)
    messages, asked = _served(random, tools, [], 0)
    return _sample("result", tools, messages[:-1], messages[-1], asked)


def error(random: Random) -> Sample:
    """Return a request and a call that failed. The answer says why."""
    tools = _tools(random)
    messages, asked = _served(random, tools, [], 0, failing=1.0)
    return _sample("error", tools, messages[:-1], messages[-1], asked)


def turns(random: Random) -> Sample:
    """Return a conversation of two to four requests, each served before the next. The answer is to
    the last: a call, a report of a result, or that there is no tool.
    """
    tools = _tools(random)
    messages: list[Message] = []
    asked: list[Request] = []
    for _ in range(random.choice((1, 1, 3))):
        number = sum(len(message.get("tool_calls") or ()) for message in messages)
        kind = random.random()
        if kind < 0.8:
            messages, more = _served(random, tools, messages, number, failing=0.1)
            asked += more
        else:
            _, refused = _unserved(random, tools)
            messages += [user(refused.text), _refusing(refused)]
            asked.append(refused)
    number = sum(len(message.get("tool_calls") or ()) for message in messages)
    kind = random.random()
    if kind < 0.6:
        used = random.choice(tools)
        last = request(random, used)
        messages.append(user(last.text))
        return _sample("turns", tools, messages, _calling([(used, last)], number), [*asked, last])
    if kind < 0.8:
        _, last = _unserved(random, tools)
        messages.append(user(last.text))
        return _sample("turns", tools, messages, _refusing(last), [*asked, last])
    messages, more = _served(random, tools, messages, number, failing=0.1)
    return _sample("turns", tools, messages[:-1], messages[-1], [*asked, *more])


def _tools(random: Random, fewest: int = 1) -> list[Tool]:
    """Return tools of which no two have the same purpose; some are near to another."""
    made = [tool(random)]
    wanted = max(fewest, random.choice((1, 1, 2, 2, 3, 4, 5)))
    while len(made) < wanted:
        one = tool(random)
        if not any(_alike(one, other) for other in made):
            made.append(one)
    random.shuffle(made)
    return made


def _alike(one: Tool, other: Tool) -> bool:
    """Return whether a request for one tool could mean the other too."""
    return one.noun == other.noun or one.name == other.name or one.verb == one.name == other.verb


def _unserved(random: Random, tools: Sequence[Tool]) -> tuple[Tool, Request]:
    """Return a tool that is not among `tools`, and a request for it. Often it has the same verb as
    one of them, or the same noun.
    """
    while True:
        one = tool(random)
        near = random.choice(tools)
        kind = random.random()
        if kind < 0.25 and not set(near.means) & set(one.means):
            one = Tool(one.name, one.verb, near.noun, one.parameters, one.optional, {})
            asked = request(random, one)
            if asked.wanted != near.noun.replace("_", " "):
                return one, asked
        elif all(one.noun != other.noun and one.name != other.name for other in tools):
            verb = near.verb if kind < 0.5 else ""
            return one, request(random, one, verb)


def _served(
    random: Random, tools: Sequence[Tool], before: Sequence[Message], number: int,
    failing: float = 0.0,
) -> tuple[list[Message], list[Request]]:  # fmt: skip
    """Return `before`, then a request, its call or calls, what they returned and the answer about
    that.
    """
    wanted = [random.choice(tools) for _ in range(random.choice((1, 1, 1, 2)))]
    asked = [request(random, one) for one in wanted]
    calling = _calling(list(zip(wanted, asked, strict=True)), number)
    messages = [*before, user(" ".join(one.text for one in asked)), calling]
    told = []
    for made in calling["tool_calls"]:
        failed = random.random() < failing
        content, said = (_failure if failed else _success)(random)
        messages.append({"role": "tool", "tool_call_id": made["id"], "content": content})
        told.append(said)
    return [*messages, assistant(" ".join(told))], asked


def _success(random: Random) -> tuple[str, str]:
    """Return what a tool returned, and the sentence that reports it."""
    if random.random() < 0.15:
        text = phrase(random)
        return text, f"It says: {text}."
    keys = list(dict.fromkeys(word(random) for _ in range(random.choice((1, 1, 2, 2, 3, 4)))))
    found = {key: json_value(random) for key in keys}
    said = [
        f"the {key} {'are' if isinstance(v, list) else 'is'} {spoken(v)}"
        for key, v in found.items()
    ]
    text = f"{', '.join(said[:-1])} and {said[-1]}" if len(said) > 1 else said[0]
    return json.dumps(found, ensure_ascii=False), f"{text[0].upper()}{text[1:]}."


def _failure(random: Random) -> tuple[str, str]:
    why = random.choice((
        f"{word(random)} not found", f"no {word(random)} {identifier(random)}", phrase(random, 5),
        f"{word(random)} is closed", "timeout", f"timeout after {integer(random, 3)} s",
        "permission denied", f"unknown {word(random)}", f"code {integer(random, 4)}",
        f"invalid {word(random)}", f"could not open {word(random)}", "internal error",
    ))  # fmt: skip
    content = random.choice((
        json.dumps({"error": why}, ensure_ascii=False), f"Error: {why}", f"error: {why}",
        json.dumps({"status": "error", "message": why}, ensure_ascii=False),
        json.dumps({"ok": False, "error": why}, ensure_ascii=False),
    ))  # fmt: skip
    return content, f"That failed: {why}."


def _sample(
    task: str, tools: Sequence[Tool], messages: Sequence[Message], answer: Message,
    asked: Sequence[Request], *more: str,
) -> Sample:  # fmt: skip
    contents = dict.fromkeys([*more, *(one.wanted for one in asked if " " in one.wanted)])
    contents |= dict.fromkeys(one for declared in tools for one in declared.contents)
    contents |= dict.fromkeys(sum_ for one in asked for sum_ in _sums(one))
    used = {made["function"]["name"] for made in answer.get("tool_calls") or ()}
    first = [one.content for one in tools if one.name in used]
    ordered = tuple(dict.fromkeys([*first, *contents]))
    return Sample(
        task, messages, answer, tools=[one.declaration for one in tools], contents=ordered
    )


def _sums(asked: Request) -> Iterator[str]:
    """Yield the sums of two numbers that are asked for as arguments."""
    for value in asked.arguments.values():
        if isinstance(value, str) and _SUM.fullmatch(value):
            yield value.replace(" ", "")


def _without(tools: Sequence[Tool], plain: Sample) -> Sample:
    """Return a sample of another task, to which tools are added that it does not need."""
    contents = (*plain.contents, *(one for declared in tools for one in declared.contents))
    declared = [one.declaration for one in tools]
    return Sample(
        "refusal", plain.messages, plain.answer, tools=declared, also_right=plain.also_right,
        contents=contents,
    )  # fmt: skip


def _refusing(asked: Request) -> Message:
    return assistant(NO_TOOL, f"{asked.wanted}; none")


def _calling(made: Sequence[tuple[Tool, Request]], number: int) -> Message:
    """Return the message that calls. number: how many calls came before in the conversation."""
    return {
        "role": "assistant",
        "content": "",
        "reasoning": ". ".join(f"{asked.wanted}; {one.name}" for one, asked in made),
        "tool_calls": [
            {
                "id": f"functions.{one.name}:{number + place}",
                "type": "function",
                "function": {"name": one.name, "arguments": written(asked.arguments)},
            }
            for place, (one, asked) in enumerate(made)
        ],
    }

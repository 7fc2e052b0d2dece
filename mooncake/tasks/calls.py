"""Tasks about calls of tools: the right one, several at once, none if none fits; results and errors
reported.

Before a call the model says what is wanted and which tool is for it: "book room; reserve_room", or
"book room; none".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from random import Random

from mooncake.tasks.asked import Request, request, written
from mooncake.tasks.copies import copy, json_value, spoken
from mooncake.tasks.declared import Tool, tool
from mooncake.tasks.questions import question
from mooncake.tasks.sample import Message, Sample, assistant, user
from mooncake.tasks.sums import sum_of_two
from mooncake.tasks.values import identifier, integer, phrase, word

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
    """Return a sample of another task beside tools that are not for it."""
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

"""All tasks by name; samples of them for training and evaluation; the tokenizer's pieces."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from random import Random

from mooncake.tasks.chat import chat
from mooncake.tasks.numbers import addition, counting, sorting, subtraction
from mooncake.tasks.sample import Generator, Message, Sample
from mooncake.tasks.texts import copying, json_object, needle, recall
from mooncake.tasks.tools import no_tool, tool_call, tool_result

TASKS: dict[str, Generator] = {
    "addition": addition,
    "subtraction": subtraction,
    "sorting": sorting,
    "counting": counting,
    "copying": copying,
    "json": json_object,
    "needle": needle,
    "needle_4k": lambda random: needle(random, num_words=4500),
    "recall": recall,
    "chat": chat,
    "tool_call": tool_call,
    "tool_result": tool_result,
    "no_tool": no_tool,
}

_PIECE = re.compile(
    r"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+(?:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\nA-Za-z0-9]?[A-Z]+"
    r"| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+"
)
"""Kimi-K2's pattern for ASCII without digits: numbers are read and written digit by digit."""


def training_sample(random: Random, weights: Mapping[str, float]) -> Sample:
    """Return a sample that is not held out, of a task drawn by weight."""
    task = random.choices(list(weights), list(weights.values()))[0]
    while (sample := TASKS[task](random)).held_out:
        pass
    return sample


def evaluation_samples(task: str, number: int, seed: int) -> list[Sample]:
    """Return `number` samples of `task` that no training saw, or of what has to be known by heart.

    Raises:
        KeyError: there is no such task.
    """
    generate, random = TASKS[task], Random(f"evaluation {seed} {task}")
    samples: list[Sample] = []
    while len(samples) < number:
        sample = generate(random)
        if (sample.held_out or not sample.key) and sample.task == task.removesuffix("_4k"):
            samples.append(sample)
    return samples


_FRAME = """\
system
user
assistant
tool
_declare
functions
You are Kimi, an AI assistant created by Moonshot AI.
## Return of functions"""
"""What chat templates put around a conversation."""


def weighted_pieces(num_samples: int = 4000) -> Iterator[tuple[bytes, int]]:
    """Yield the pieces of text that tasks are made of, with how often each occurs."""
    random = Random("tokenizer")
    tasks = [*(name for name in TASKS if name != "needle_4k"), *["chat"] * 4]
    counts: Counter[str] = Counter()
    for number in range(num_samples):
        sample = TASKS[tasks[number % len(tasks)]](random)
        for text in (_FRAME, *(t for m in (*sample.messages, sample.answer) for t in _texts(m))):
            counts.update(_PIECE.findall(text))
        for tool in sample.tools:
            counts.update(_PIECE.findall(_compact(tool)))
    for piece, count in sorted(counts.items()):
        yield piece.encode(), count


def _texts(message: Message) -> Iterator[str]:
    yield message.get("content") or ""
    yield message.get("reasoning") or ""
    for call in message.get("tool_calls") or ():
        yield f"{call['id']} {call['function']['arguments']}"


def _compact(tool: Mapping[str, object]) -> str:
    return json.dumps([tool], separators=(",", ":"))

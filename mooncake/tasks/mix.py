"""All tasks by name; samples of them for training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from mooncake.tasks.chat import chat
from mooncake.tasks.numbers import addition, counting, sorting, subtraction
from mooncake.tasks.sample import Generator, Sample
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

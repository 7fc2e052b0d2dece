"""All tasks by name; samples of them for training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from mooncake.tasks.calls import call, calls, error, refusal, result, turns
from mooncake.tasks.copies import copy, json_object, look_up, memory, needle
from mooncake.tasks.questions import question
from mooncake.tasks.sample import EVALUATED, Generator, Sample
from mooncake.tasks.sums import chain, difference, order, sum_of_two, tally

TASKS: dict[str, Generator] = {
    "sum": sum_of_two,
    "difference": difference,
    "chain": chain,
    "order": order,
    "tally": tally,
    "copy": copy,
    "look_up": look_up,
    "object": json_object,
    "code": needle,
    "code_4k": lambda random: needle(random, num_tokens=4200),
    "memory": memory,
    "question": question,
    "call": call,
    "calls": calls,
    "refusal": refusal,
    "result": result,
    "error": error,
    "turns": turns,
}


def training_sample(random: Random, weights: Mapping[str, float]) -> Sample:
    """Return a sample with nothing that is held out, from a task drawn by weight."""
    task = random.choices(list(weights), list(weights.values()))[0]
    while (sample := TASKS[task](random)).held_out:
        pass
    return sample


def evaluation_samples(task: str, number: int, seed: int, part: str = EVALUATED) -> list[Sample]:
    """Return `number` samples of `task` that no training saw.

    part: the part held out for evaluation, or the part that may be watched while training.

    Raises:
        KeyError: there is no such task.
    """
    generate, random = TASKS[task], Random(f"evaluation {seed} {task}")
    samples: list[Sample] = []
    while len(samples) < number:
        sample = generate(random)
        if sample.is_for(part) and sample.task == task.removesuffix("_4k"):
            samples.append(sample)
    return samples

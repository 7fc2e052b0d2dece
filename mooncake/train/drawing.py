"""Generated samples as tokens. The template and tokenizer that also serve render them.

What a step reads depends only on the seed and the step's number, so a resumed run needs no state of
the data. Nothing here needs torch, so that processes which only draw start fast and touch no
device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from mooncake.api.text.chat_template import ChatTemplate, load_chat_template
from mooncake.api.text.tokenizer import Tokenizer, load_tokenizer
from mooncake.tasks.mix import training_sample
from mooncake.tasks.questions import system
from mooncake.tasks.sample import Message, Sample

_TALKS = 0.25
"""The share of samples that follow others in one conversation."""
_DIGESTED = 16
"""How many samples of a task are compared to tell whether the task has changed."""
_LONG = ("code",)
"""Tasks with texts of thousands of tokens. No other sample follows one of these."""

Tokens = tuple[list[int], list[bool]]
"""A sequence, and which of its tokens count."""


@dataclass(frozen=True)
class Drawn:
    """Sequences one after the other, the longest first.

    lengths: [sequences] int64. tokens: [tokens] int32. counts: [tokens] bool; whether a token
    belongs to an answer.
    """

    lengths: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    counts: npt.NDArray[np.bool_]


def joined(sequences: Sequence[Tokens]) -> Drawn:
    """Return the sequences as arrays, in the order of their lengths."""
    ordered = sorted(sequences, key=lambda sequence: len(sequence[0]), reverse=True)
    return Drawn(
        np.array([len(ids) for ids, _ in ordered]),
        np.concatenate([np.array(ids, np.int32) for ids, _ in ordered]),
        np.concatenate([np.array(counts, np.bool_) for _, counts in ordered]),
    )


class Drawing:
    """Draws what each step reads."""

    def __init__(self, checkpoint: Path, seed: int, step_tokens: int, batch_tokens: int) -> None:
        """step_tokens: about how many tokens all batches of a step have together. batch_tokens: the
        most tokens in one batch.
        """
        self._tokenizer = load_tokenizer(checkpoint)
        self._template = load_chat_template(checkpoint, self._tokenizer)
        self._seed = seed
        self._step_tokens = step_tokens
        self._batch_tokens = batch_tokens

    def of_step(self, step: int, weights: Mapping[str, float], max_tokens: int) -> list[Drawn]:
        """Return the batches of `step`, from tasks drawn by `weights`. Conversations of more than
        `max_tokens` are drawn again.
        """
        random = Random(f"training {self._seed} {step}")
        drawn: list[Tokens] = []
        total = 0
        while total < self._step_tokens:
            conversation = _conversation(random, weights)
            tokens, counts = rendered(self._template, self._tokenizer, *conversation)
            if len(tokens) <= max_tokens:
                drawn.append((tokens, counts))
                total += len(tokens)
        return self._split(drawn)

    def of_answers(self, samples: Sequence[Sample]) -> list[Drawn]:
        """Return batches of samples, each alone. Only the last answer counts."""
        alone = (_alone(sample) for sample in samples)
        return self._split([rendered(self._template, self._tokenizer, *one) for one in alone])

    def digests(self, tasks: Iterable[str]) -> dict[str, str]:
        """Return a digest of each task's first samples, as tokens. It shows whether a task that was
        trained on has changed since.
        """
        found = {}
        for task in tasks:
            random, drawn = Random(f"digest {task}"), hashlib.sha256()
            for _ in range(_DIGESTED):
                sample = training_sample(random, {task: 1.0})
                tokens, _ = rendered(self._template, self._tokenizer, *_alone(sample))
                drawn.update(repr(tokens).encode())
            found[task] = drawn.hexdigest()[:16]
        return found

    def _split(self, drawn: list[Tokens]) -> list[Drawn]:
        """Return the sequences in as few batches as hold them, of about equal size. Sequences of
        one length lie together, so that few places of the rows that attend are empty.
        """
        total = sum(len(tokens) for tokens, _ in drawn)
        wanted = total / -(-total // self._batch_tokens)
        parts: list[list[Tokens]] = [[]]
        filled = before = 0
        for sequence in sorted(drawn, key=lambda sequence: len(sequence[0]), reverse=True):
            size = len(sequence[0])
            if parts[-1] and (
                filled + size > self._batch_tokens or before + size > wanted * len(parts)
            ):
                parts.append([])
                filled = 0
            parts[-1].append(sequence)
            filled += size
            before += size
        return [joined(part) for part in parts]


def rendered(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: list[Message],
    tools: list[Mapping[str, object]],
    answers: list[bool],
) -> tuple[list[int], list[bool]]:
    """Return a conversation's tokens and which of them count: those that the model itself makes.

    answers: for each message of the assistant, whether it counts.
    """
    text = template.render(messages, tools=tools or None, add_generation_prompt=False)
    tokens = tokenizer.encode(text)
    begin, middle, end = tokenizer.encode("<|im_assistant|><|im_middle|><|im_end|>")
    counts = [False] * len(tokens)
    turn, inside = -1, False
    for place, token in enumerate(tokens):
        if token == begin:
            turn, inside = turn + 1, True
            after = tokens.index(middle, place) + 1
        elif inside and place >= after:
            counts[place] = answers[turn]
            inside = token != end
    return tokens, counts


def _conversation(
    random: Random, weights: Mapping[str, float]
) -> tuple[list[Message], list[Mapping[str, object]], list[bool]]:
    """Return messages, tools, and which answers count.

    Only the last answer shows its reasoning, because clients send back answers without it. An
    earlier answer that had reasoning does not count.
    """
    samples = [training_sample(random, weights)]
    while random.random() < _TALKS and len(samples) < 4:
        before = training_sample(random, weights)
        if not before.tools and before.task not in _LONG:
            samples.insert(0, before)
    messages: list[Message] = []
    counting: list[bool] = []
    if random.random() < 0.15:
        messages.append({"role": "system", "content": system(random)})
    for sample in samples:
        last = sample is samples[-1]
        for message in (*sample.messages, sample.answer):
            shown, counts = _shown(message, last and message is sample.answer)
            messages.append(shown)
            if message["role"] == "assistant":
                counting.append(counts)
    return messages, list(samples[-1].tools), counting


def _alone(
    sample: Sample,
) -> tuple[list[Message], list[Mapping[str, object]], list[bool]]:
    answer, _ = _shown(sample.answer, True)
    num_before = sum(message["role"] == "assistant" for message in sample.messages)
    return [*sample.messages, answer], list(sample.tools), [*[False] * num_before, True]


def _shown(message: Message, last: bool) -> tuple[Message, bool]:
    thoughts = message.get("reasoning")
    if not thoughts:
        return message, True
    if not last:
        return message | {"reasoning": None}, False
    return message | {"content": f"<think>{thoughts}</think>{message['content']}"}, True

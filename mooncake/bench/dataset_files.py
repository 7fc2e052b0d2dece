"""Samples from files: ShareGPT conversations, prompts one a line, Mooncake traces.

Text in, samples out; `read_samples` is the only function that opens a file.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mooncake.base import ConfigError
from mooncake.bench.samples import PromptSource, Sample

TRACE_BLOCK_TOKENS = 512
"""The number of tokens that one entry of a trace's `hash_ids` stands for."""
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOKENS = 4, 1024, 2048
"""Bounds of the lengths of conversations. Others are left out, as other benchmarks on
ShareGPT do.
"""
CHARS_PER_TOKEN = 4
"""Characters per token, used when there is no tokenizer to count with."""


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


class _Custom(msgspec.Struct):
    prompt: str
    output_tokens: int | None = None


class _TraceLine(msgspec.Struct):
    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_samples(
    name: str,
    path: str | None,
    count: int,
    prompts: PromptSource,
    *,
    seed: int,
    output_len: int | None,
) -> list[Sample]:
    """Return up to `count` samples of the file `path` in the format called `name`.

    Raises:
        ConfigError: the file does not exist or is not in that format.
    """
    if path is None:
        raise ConfigError(f"dataset-name: {name} needs `dataset-path` FILE")
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"dataset-path: {path}: {error.strerror}") from error
    try:
        if name == "sharegpt":
            samples = sharegpt(data, count, prompts, seed=seed, output_len=output_len)
        elif name == "custom":
            samples = custom(data, count, prompts, output_len=output_len)
        else:
            samples = trace(data, count, prompts, seed=seed)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"dataset-path: {path} is not in the format of {name}: {error}") from None
    if not samples:
        raise ConfigError(
            f"dataset-path: {path} has no usable request in the format of {name}; give another file"
        )
    return samples


def sharegpt(
    data: bytes, count: int, prompts: PromptSource, *, seed: int, output_len: int | None
) -> list[Sample]:
    """Return the first turns of random conversations. Answers are as long as the recorded ones."""
    conversations = [
        each
        for each in msgspec.json.decode(data, type=list[_Conversation])
        if len(each.conversations) >= 2
    ]
    random.Random(seed).shuffle(conversations)
    samples: list[Sample] = []
    for each in conversations:
        if len(samples) == count:
            break
        prompt, answer = each.conversations[0].value, each.conversations[1].value
        num_prompt, num_answer = _count(prompt, prompts), _count(answer, prompts)
        too_short = num_prompt < MIN_TOKENS or (output_len is None and num_answer < MIN_TOKENS)
        wanted = output_len or num_answer
        if too_short or num_prompt > MAX_PROMPT_TOKENS or num_prompt + wanted > MAX_TOKENS:
            continue
        samples.append(
            Sample(prompt=prompt, num_prompt_tokens=num_prompt, num_output_tokens=wanted)
        )
    return samples


def custom(
    data: bytes, count: int, prompts: PromptSource, *, output_len: int | None
) -> list[Sample]:
    """Return prompts from JSON lines {"prompt": …, "output_tokens": …}, repeated when there are too
    few.
    """
    lines = msgspec.json.Decoder(_Custom).decode_lines(data)
    samples = [
        Sample(
            prompt=line.prompt,
            num_prompt_tokens=_count(line.prompt, prompts),
            num_output_tokens=output_len or line.output_tokens or 256,
        )
        for line in lines
    ]
    return _repeated(samples, count)


def trace(data: bytes, count: int, prompts: PromptSource, *, seed: int) -> list[Sample]:
    """Return a trace's requests with their times; equal leading hash ids give equal prefixes."""
    lines = msgspec.json.Decoder(_TraceLine).decode_lines(data)[:count]
    first_s = min((line.timestamp for line in lines), default=0.0) / 1000
    blocks: dict[int, list[int]] = {}
    samples = []
    for line in lines:
        tokens: list[int] = []
        for hash_id in line.hash_ids:
            if hash_id not in blocks:
                source = random.Random(f"{seed}/{hash_id}")
                blocks[hash_id] = prompts.draw(source, TRACE_BLOCK_TOKENS)
            tokens += blocks[hash_id]
        if line.input_length < 1 or len(tokens) < line.input_length:
            raise msgspec.ValidationError("hash_ids cover fewer tokens than input_length")
        tokens = tokens[: line.input_length]
        text = tokens if prompts.tokenizer is None else prompts.tokenizer.decode(tokens)
        samples.append(
            Sample(
                prompt=text,
                num_prompt_tokens=len(tokens),
                num_output_tokens=max(1, line.output_length),
                at_s=line.timestamp / 1000 - first_s,
            )
        )
    return samples


def _repeated(samples: Sequence[Sample], count: int) -> list[Sample]:
    return [samples[number % len(samples)] for number in range(count)] if samples else []


def _count(text: str, prompts: PromptSource) -> int:
    if prompts.tokenizer is None:
        return max(1, len(text) // CHARS_PER_TOKEN)
    return len(prompts.tokenizer.encode(text))

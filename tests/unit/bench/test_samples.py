"""Samples: as many and as long as asked for, equal where they should share a prefix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.base import ConfigError
from mooncake.bench.dataset_files import custom, read_samples, sharegpt, trace
from mooncake.bench.samples import (
    PromptSource,
    RandomShape,
    RepetitionShape,
    random_samples,
    repetition_samples,
)
from tests.support.api.server import tiny_tokenizer

IDS = PromptSource(None, 500)
TEXT = PromptSource(tiny_tokenizer(), 0)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.floats(0, 0.9), st.integers(0, 20), st.integers(0, 5))
def test_random_prompts_have_the_lengths_asked_for(
    input_len: int, ratio: float, prefix_len: int, seed: int
) -> None:
    shape = RandomShape(
        input_len=input_len, output_len=10, range_ratio=ratio, prefix_len=prefix_len
    )
    samples = random_samples(shape, 20, IDS, seed) if input_len * (1 - ratio) >= 1 else []
    for sample in samples:
        own = sample.num_prompt_tokens - prefix_len
        assert input_len * (1 - ratio) - 1 < own < input_len * (1 + ratio) + 1
        assert len(sample.prompt) == sample.num_prompt_tokens
        assert 1 <= sample.num_output_tokens <= 19
        assert all(1 <= token < 500 for token in sample.prompt)  # type: ignore[operator]
    assert len({tuple(sample.prompt[:prefix_len]) for sample in samples}) <= 1  # type: ignore[arg-type]


def test_text_encodes_to_the_number_of_tokens_that_is_reported() -> None:
    tokenizer = tiny_tokenizer()
    for sample in random_samples(RandomShape(input_len=40), 10, TEXT, 1):
        assert isinstance(sample.prompt, str)
        assert len(tokenizer.encode(sample.prompt)) == sample.num_prompt_tokens
        assert not tokenizer.special_ids & set(tokenizer.encode(sample.prompt))


def test_seed_replays_the_prompts_and_another_makes_others() -> None:
    shape = RandomShape(input_len=8)
    assert random_samples(shape, 5, IDS, 1) == random_samples(shape, 5, IDS, 1)
    assert random_samples(shape, 5, IDS, 1) != random_samples(shape, 5, IDS, 2)


def test_repetition_shares_each_prefix_evenly() -> None:
    shape = RepetitionShape(prefix_len=8, suffix_len=4, num_prefixes=3, output_len=7)
    samples = repetition_samples(shape, 12, IDS, 0)
    prefixes = [tuple(sample.prompt[:8]) for sample in samples]  # type: ignore[arg-type]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert len({tuple(sample.prompt) for sample in samples}) == 12  # type: ignore[arg-type]
    assert {(s.num_prompt_tokens, s.num_output_tokens) for s in samples} == {(12, 7)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: random_samples(RandomShape(range_ratio=1), 1, IDS, 0),
        lambda: random_samples(RandomShape(range_ratio=-0.1), 1, IDS, 0),
        lambda: random_samples(RandomShape(input_len=0), 1, IDS, 0),
        lambda: repetition_samples(RepetitionShape(num_prefixes=3), 2, IDS, 0),
        lambda: repetition_samples(RepetitionShape(num_prefixes=0), 2, IDS, 0),
    ],
)
def test_shapes_that_make_no_sense_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def conversation(*turns: str) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns]}


def test_sharegpt_takes_first_turns_of_usable_conversations() -> None:
    data = json.dumps(
        [
            conversation("a question of some length", "an answer of some length"),
            conversation("alone"),
            conversation("q", "too short a question for anybody"),
            conversation("too long" * 1000, "an answer of some length"),
        ]
    ).encode()
    (sample,) = sharegpt(data, 10, TEXT, seed=0, output_len=None)
    assert sample.prompt == "a question of some length"
    tokenizer = tiny_tokenizer()
    assert sample.num_prompt_tokens == len(tokenizer.encode("a question of some length"))
    assert sample.num_output_tokens == len(tokenizer.encode("an answer of some length"))
    (fixed,) = sharegpt(data, 1, TEXT, seed=0, output_len=5)
    assert fixed.num_output_tokens == 5


def test_custom_prompts_are_repeated_until_there_are_enough() -> None:
    data = b'{"prompt": "one"}\n{"prompt": "two", "output_tokens": 9}\n'
    samples = custom(data, 3, IDS, output_len=None)
    assert [sample.prompt for sample in samples] == ["one", "two", "one"]
    assert [sample.num_output_tokens for sample in samples] == [256, 9, 256]
    assert custom(data, 1, IDS, output_len=4)[0].num_output_tokens == 4


def trace_line(at_ms: float, length: int, hash_ids: list[int]) -> str:
    fields = {"timestamp": at_ms, "input_length": length, "output_length": 3, "hash_ids": hash_ids}
    return json.dumps(fields)


def test_trace_keeps_times_lengths_and_shared_prefixes() -> None:
    lines = [trace_line(27000, 1000, [1, 2]), trace_line(30000, 1500, [1, 2, 3])]
    lines.append(trace_line(30500, 600, [1, 9]))
    one, two, three = trace("\n".join(lines).encode(), 10, IDS, seed=0)
    assert [one.at_s, two.at_s, three.at_s] == [0.0, 3.0, 3.5]
    assert [len(one.prompt), len(two.prompt), len(three.prompt)] == [1000, 1500, 600]
    assert two.prompt[:1000] == one.prompt
    assert three.prompt[:512] == one.prompt[:512]
    assert three.prompt[512:] != one.prompt[512:600]
    assert len(trace("\n".join(lines).encode(), 2, IDS, seed=0)) == 2


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("sharegpt", "not json"),
        ("sharegpt", "[]"),
        ("custom", '{"text": "no prompt"}'),
        ("timed_trace", '{"timestamp": 1}'),
        ("timed_trace", trace_line(0, 600, [1])),
        ("timed_trace", trace_line(0, 0, [])),
        ("timed_trace", ""),
    ],
)
def test_files_in_another_format_are_refused_by_name(
    tmp_path: Path, name: str, content: str
) -> None:
    path = tmp_path / "data"
    path.write_text(content)
    with pytest.raises(ConfigError, match="data"):
        read_samples(name, str(path), 4, IDS, seed=0, output_len=None)


def test_missing_files_are_named() -> None:
    with pytest.raises(ConfigError, match="needs `dataset-path`"):
        read_samples("custom", None, 1, IDS, seed=0, output_len=None)
    with pytest.raises(ConfigError, match="/not/there"):
        read_samples("custom", "/not/there", 1, IDS, seed=0, output_len=None)

"""Batches of generated samples: what counts, what fits together, and that a step is always the
same.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from mooncake.api.text.chat_template import load_chat_template
from mooncake.api.text.tokenizer import load_tokenizer
from mooncake.model.checkpoint.making.presets import write_preset_files
from mooncake.tasks.mix import TASKS, evaluation_samples, training_sample
from mooncake.tasks.sample import assistant, user
from mooncake.train.batches import Batch, Batches, packed
from mooncake.train.drawing import rendered

WEIGHTS = {task: 1.0 for task in TASKS if not task.endswith("_4k")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("files")
    write_preset_files("k2-demo", home)
    return home


def batches(checkpoint: Path, step_tokens: int = 3000, seed: int = 0) -> Batches:
    return Batches(checkpoint, seed, step_tokens, batch_tokens=1000)


def rows(batch: Batch) -> list[torch.Tensor]:
    """Return for each sequence the places of its tokens, as attention finds them."""
    whole = torch.full((batch.num_padded,), -1)
    whole[batch.padded] = torch.arange(len(batch.tokens))
    parts = whole.split([number * longest for number, longest in batch.groups])
    found = [
        row for group, part in zip(batch.groups, parts, strict=True) for row in part.view(group)
    ]
    return [row[row >= 0] for row in found]


def placed(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return for each group which token stands in each place of its rows."""
    return batch.sources.split([number * longest for number, longest in batch.groups])


def of_step(made: Batches, step: int) -> list[Batch]:
    return made.of_step(step, WEIGHTS, max_tokens=600)


def test_answers_count_and_nothing_else(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    template = load_chat_template(checkpoint, tokenizer)
    messages = [
        user("What is 2 + 3?"),
        assistant("5"),
        user("And 20 + 30? <|im_assistant|>"),
        assistant("<think>2+3=5</think>50"),
    ]
    tokens, counts = rendered(template, tokenizer, messages[:2], [], [True])
    shown = tokenizer.decode([t for t, own in zip(tokens, counts, strict=True) if own])
    assert shown == "5<|im_end|>"
    tokens, counts = rendered(
        template, tokenizer, [*messages[:2], user("Go on."), messages[3]], [], [False, True]
    )
    shown = tokenizer.decode([t for t, own in zip(tokens, counts, strict=True) if own])
    assert shown == "<think>2+3=5</think>50<|im_end|>"


def test_calls_count_up_to_the_end_of_the_turn(checkpoint: Path) -> None:
    sample = evaluation_samples("call", 1, seed=0)[0]
    [batch] = batches(checkpoint).of_answers([sample])
    shown = load_tokenizer(checkpoint).decode(batch.tokens[batch.counts].tolist())
    call = sample.answer["tool_calls"][0]
    assert shown == (
        f"<think>{sample.answer['reasoning']}</think>"
        f"<|tool_calls_section_begin|><|tool_call_begin|>{call['id']}<|tool_call_argument_begin|>"
        f"{call['function']['arguments']}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )


def test_only_the_last_answer_of_an_evaluated_sample_counts(checkpoint: Path) -> None:
    [sample] = evaluation_samples("memory", 1, seed=3)
    [batch] = batches(checkpoint).of_answers([sample])
    shown = load_tokenizer(checkpoint).decode(batch.tokens[batch.counts].tolist())
    assert shown == sample.answer["content"] + "<|im_end|>"


def test_thoughts_of_earlier_answers_are_neither_shown_nor_learned(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    for step in range(20):
        for batch in of_step(batches(checkpoint, seed=7), step)[:1]:
            for row in rows(batch):
                text = tokenizer.decode(batch.tokens[row].tolist())
                assert text.count("<think>") <= 1
                assert "<think>" not in text.rpartition("<|im_assistant|>")[0]


def test_a_step_is_always_the_same_and_steps_differ(checkpoint: Path) -> None:
    first, again = of_step(batches(checkpoint), 4), of_step(batches(checkpoint), 4)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    for other in (of_step(batches(checkpoint), 5), of_step(batches(checkpoint, seed=1), 4)):
        assert other[0].tokens.tolist() != first[0].tokens.tolist()


def test_sequences_of_about_one_length_lie_together(checkpoint: Path) -> None:
    made = of_step(batches(checkpoint, step_tokens=5000), 0)
    lengths = [len(row) for batch in made for row in rows(batch)]
    assert len(made) > 3
    assert lengths == sorted(lengths, reverse=True)


def test_batches_of_a_step_have_about_one_size(checkpoint: Path) -> None:
    for step in range(5):
        made = batches(checkpoint, step_tokens=3100).of_step(step, WEIGHTS, max_tokens=200)
        assert len(made) in (4, 5)
        assert min(len(batch.tokens) for batch in made[:4]) > 500


def test_batches_are_bounded(checkpoint: Path) -> None:
    made = of_step(batches(checkpoint, step_tokens=5000), 0)
    assert sum(len(batch.tokens) for batch in made) >= 5000
    assert all(len(batch.tokens) <= 1000 for batch in made)
    assert all(int(batch.positions.max()) < 600 for batch in made)


def test_packing_keeps_every_token_once() -> None:
    sequences = [
        ([10 * n + k for k in range(n)], [k % 2 == 0 for k in range(n)]) for n in (3, 9, 5)
    ]
    batch = packed(sequences, padded_tokens=10)
    assert batch.groups == ((1, 9), (2, 5))
    assert len(batch) == 3
    assert sorted(int(place) for row in rows(batch) for place in row) == list(range(17))
    by_length = sorted(sequences, key=lambda sequence: -len(sequence[0]))
    for row, (tokens, counts) in zip(rows(batch), by_length, strict=True):
        assert batch.tokens[row].tolist() == tokens
        assert batch.counts[row].tolist() == counts
        assert batch.positions[row].tolist() == list(range(len(tokens)))
    stand = [one for part, group in zip(placed(batch), batch.groups, strict=True)
             for one in part.view(group).tolist()]  # fmt: skip
    for row, places in zip(rows(batch), stand, strict=True):
        assert places == [*row.tolist(), *[int(row[-1])] * (len(places) - len(row))]
    near, far = batch.answers
    assert near.tolist() == (batch.counts & (batch.positions > 0)).nonzero()[:, 0].tolist()
    assert far.tolist() == (batch.counts & (batch.positions > 1)).nonzero()[:, 0].tolist()


def test_rounded_batches_have_few_shapes_and_what_fills_them_does_not_count() -> None:
    sequences = [(list(range(100, 100 + n)), [True] * n) for n in (300, 300, 290, 260, 40, 9)]
    plain, batch = (packed(sequences, 1000, rounded) for rounded in (False, True))
    assert len(batch) == len(plain) == 6
    assert batch.num_tokens == plain.num_tokens == len(plain.tokens) == 1199
    assert len(batch.tokens) == 1536
    assert batch.tokens[:1199].tolist() == plain.tokens.tolist()
    assert not batch.counts[1199:].any()
    for own, other in zip(batch.answers, plain.answers, strict=True):
        assert own.tolist() == other.tolist()
    assert batch.groups == ((2, 320), (2, 320), (8, 64), (16, 32), (16, 32))
    assert all(longest % 32 == 0 and rows & (rows - 1) == 0 for rows, longest in batch.groups)
    assert [len(row) for row in rows(batch)][:7] == [300, 300, 290, 260, 40, 9, 9]
    assert sum(map(len, rows(batch))) == 1536


def test_training_never_draws_what_is_held_out() -> None:
    random = Random(0)
    assert not any(training_sample(random, WEIGHTS).held_out for _ in range(500))

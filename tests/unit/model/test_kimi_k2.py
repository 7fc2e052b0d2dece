"""The model against transformers' DeepseekV3ForCausalLM, and against itself cut up differently."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from mooncake.base import CheckpointError
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.inputs import build_inputs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.mla import absorbed_is_cheaper
from mooncake.model.loading import load_model
from tests.support.model.specs import small_spec
from tests.support.model.tiny_models import (
    CONFIGS,
    CPU,
    forward,
    kv_for,
    ours,
    random_source,
    random_tokens,
    slot,
    source_of,
    truth,
)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def pair(request: pytest.FixtureRequest):
    """(transformers' model, ours with the same weights) of each configuration."""
    model = truth(request.param, max_position_embeddings=2048)
    return model, ours(source_of(model))


@pytest.fixture(scope="module")
def model() -> KimiK2:
    return ours(source_of(truth("yarn")))


def greedy(model: KimiK2, kv: KvTensors, prompt: list[int], chunk: int, count: int) -> list[int]:
    """Return `count` greedy tokens with the prompt computed `chunk` tokens at a time."""
    pages = list(range(kv.num_pages))
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        logits = forward(model, kv, [slot(1, start, part, pages)])
    tokens = [int(logits[1].argmax())]
    while len(tokens) < count:
        position = len(prompt) + len(tokens) - 1
        logits = forward(model, kv, [slot(1, position, tokens[-1:], pages)])
        tokens.append(int(logits[1].argmax()))
    return tokens


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("length", [1, 150, 1500])
def test_logits_equal_transformers(pair, absorbed: bool, length: int) -> None:
    reference, model = pair
    tokens = random_tokens(length, seed=1)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    kv = kv_for(model.spec, num_pages=94)
    found = forward(
        model, kv, [slot(7, 0, tokens, range(94))], whole=True, rule=lambda new, context: absorbed
    )[7]
    assert expected.std() > 1, "flat logits would make this comparison empty"
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_greedy_tokens_equal_transformers_generate(pair) -> None:
    reference, model = pair
    prompt = random_tokens(37, seed=2)
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )[0, len(prompt) :].tolist()
    assert greedy(model, kv_for(model.spec), prompt, chunk=1000, count=24) == expected


@pytest.mark.parametrize("chunk", [16, 64, 1])
def test_chunked_prompts_give_the_same_tokens(model: KimiK2, chunk: int) -> None:
    prompt = random_tokens(141, seed=3)
    whole = greedy(model, kv_for(model.spec), prompt, chunk=1000, count=16)
    assert greedy(model, kv_for(model.spec), prompt, chunk=chunk, count=16) == whole


def test_both_forms_write_the_same_kv_and_give_the_same_logits(model: KimiK2) -> None:
    tokens = random_tokens(90, seed=4)
    results = []
    for absorbed in (True, False):
        kv = kv_for(model.spec)
        forward(model, kv, [slot(1, 0, tokens[:70], range(6))])
        logits = forward(
            model,
            kv,
            [slot(1, 70, tokens[70:], range(6))],
            whole=True,
            rule=lambda new, context, absorbed=absorbed: absorbed,
        )[1]
        results.append((logits, kv.pages))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-4, rtol=0)


def test_a_mixed_batch_equals_each_sequence_alone(model: KimiK2) -> None:
    prompts = {1: random_tokens(200, 5), 2: random_tokens(33, 6), 3: random_tokens(260, 7)}
    alone, started = {}, {1: 199, 2: 32, 3: 20}
    tables = {1: list(range(13)), 2: list(range(13, 16)), 3: list(range(16, 33))}
    for sequence, prompt in prompts.items():
        kv = kv_for(model.spec)
        alone[sequence] = forward(model, kv, [slot(sequence, 0, prompt, tables[sequence])])[
            sequence
        ]
    kv = kv_for(model.spec)
    forward(
        model,
        kv,
        [slot(s, 0, prompts[s][: started[s]], tables[s], sample=False) for s in prompts],
    )
    # One long chunk in front of two single tokens.
    slots = [slot(s, started[s], prompts[s][started[s] :], tables[s]) for s in (3, 1, 2)]
    together = forward(model, kv, slots)
    for sequence, logits in alone.items():
        torch.testing.assert_close(together[sequence], logits, atol=1e-4, rtol=0)


def test_scattered_pages_give_the_same_logits(model: KimiK2) -> None:
    tokens = random_tokens(400, seed=8)
    in_order = forward(model, kv_for(model.spec), [slot(1, 0, tokens, range(25))])[1]
    pages = list(range(64))
    random.Random(0).shuffle(pages)
    # Runs of neighbours, long and short, between single pages: every way of reading a context.
    pages = [40, 41, 42, 43, 44, 7, 9, 20, 21, 22, 23, 24, 25, 3] + [
        page for page in pages if page not in {40, 41, 42, 43, 44, 7, 9, 20, 21, 22, 23, 24, 25, 3}
    ]
    kv = kv_for(model.spec)
    forward(model, kv, [slot(1, 0, tokens[:300], pages, sample=False)])
    forward(model, kv, [slot(1, 300, tokens[300:399], pages, sample=False)])
    decoded = forward(model, kv, [slot(1, 399, tokens[399:], pages)])[1]
    torch.testing.assert_close(decoded, in_order, atol=1e-4, rtol=0)


def test_kv_of_moved_pages_is_as_good(model: KimiK2) -> None:
    """What a transfer does: bytes of pages copied into other pages of another engine."""
    tokens = random_tokens(60, seed=9)
    source, target = kv_for(model.spec), kv_for(model.spec)
    expected = forward(model, source, [slot(1, 0, tokens, [0, 1, 2, 3])])[1]
    forward(model, source, [slot(1, 0, tokens[:59], [0, 1, 2, 3], sample=False)])
    for here, there in zip([0, 1, 2, 3], [33, 5, 18, 50], strict=True):
        target.pages[:, there] = source.pages[:, here]
    moved = forward(model, target, [slot(1, 59, tokens[59:], [33, 5, 18, 50])])[1]
    torch.testing.assert_close(moved, expected, atol=1e-4, rtol=0)


def test_only_the_slots_own_pages_are_written(model: KimiK2) -> None:
    kv = kv_for(model.spec)
    kv.pages.fill_(7.0)
    forward(model, kv, [slot(1, 16, random_tokens(20, 1), [3, 8, 5])])
    touched = (kv.pages != 7.0).flatten(2).any(dim=2).any(dim=0).nonzero().flatten().tolist()
    assert touched == [5, 8]
    assert bool((kv.pages[:, 5, 4:] == 7.0).all()), "past the last token nothing is written"


def test_poisoned_tails_and_foreign_pages_are_never_read(model: KimiK2) -> None:
    tokens = random_tokens(40, seed=10)
    expected = forward(model, kv_for(model.spec), [slot(1, 0, tokens, [4, 9, 2])])[1]
    kv = kv_for(model.spec)
    kv.pages.fill_(float("nan"))
    forward(model, kv, [slot(1, 0, tokens[:39], [4, 9, 2], sample=False)])
    found = forward(model, kv, [slot(1, 39, tokens[39:], [4, 9, 2])])[1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_layers_are_reported_once_their_kv_is_written(model: KimiK2) -> None:
    kv = kv_for(model.spec)
    tokens = random_tokens(20, seed=11)
    inputs = build_inputs(
        [slot(1, 0, tokens, [0, 1], sample=False)],
        frozenset(),
        kv.page_shape,
        absorbed_is_cheaper(model.spec),
    )
    reported = []

    def after_write(layer: int) -> None:
        written = kv.pages.view(model.spec.num_hidden_layers, -1).abs().sum(dim=1) > 0
        reported.append((layer, written.tolist()))

    with torch.inference_mode():
        model.forward(inputs, kv, after_write)
    layers = model.spec.num_hidden_layers
    assert reported == [(n, [k <= n for k in range(layers)]) for n in range(layers)]


def test_bfloat16_stays_near_float32() -> None:
    source = source_of(truth("plain"))
    exact, rounded = ours(source), ours(source, torch.bfloat16)
    tokens = random_tokens(120, seed=12)
    for rule in (lambda new, context: True, lambda new, context: False):
        expected = forward(exact, kv_for(exact.spec), [slot(1, 0, tokens, range(8))], rule=rule)[1]
        found = forward(rounded, kv_for(exact.spec), [slot(1, 0, tokens, range(8))], rule=rule)[1]
        cosine = torch.cosine_similarity(expected, found).item()
        assert cosine > 0.98


def test_a_checkpoint_saved_by_transformers_loads_unchanged(tmp_path: Path) -> None:
    reference = truth("grouped routing")
    reference.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    seen: list[tuple[int, int]] = []
    model = load_model(
        checkpoint,
        dtype=torch.float32,
        device=CPU,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] == len(seen)
    tokens = random_tokens(50, seed=13)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0, -1:]
    found = forward(model, kv_for(model.spec), [slot(1, 0, tokens, range(4))])[1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_missing_tensor_is_refused() -> None:
    source = source_of(truth("plain"))
    del source.tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        ours(source)


def test_a_model_without_shared_experts_or_with_only_dense_layers_runs() -> None:
    for changes in ({"n_shared_experts": 0}, {"first_k_dense_replace": 3}):
        model = ours(random_source(small_spec(**changes)))
        logits = forward(model, kv_for(model.spec), [slot(1, 0, [5, 6, 7], [0])])[1]
        assert logits.shape == (1, 300)
        assert bool(logits.isfinite().all())

"""From files on disk to sampled tokens: our loader, model and sampler beside transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mooncake.base import SamplingParams
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.layers.sampler import Sampler
from mooncake.model.loading import load_model
from tests.support.engine.fake_runner import sequence_of
from tests.support.model.tiny_models import forward, kv_for, random_tokens, slot

CPU = torch.device("cpu")
NUM_OUTPUT = 32
OVERRIDES: dict[str, dict[str, Any]] = {
    "preset, with yarn": {},
    "no query compression": {"q_lora_rank": None},
    "grouped routing": {"n_group": 4, "topk_group": 2},
    "no yarn": {"rope_scaling": None},
}


def generate(
    model: KimiK2, prompt: list[int], sampling: SamplingParams, before: int = 0
) -> list[int]:
    """Return the prompt's continuation; the first `before` tokens come from an earlier sampler."""
    kv = kv_for(model.spec)
    pages = list(range(1, 20))
    output: list[int] = []
    computed = 0
    sampler = Sampler(model.spec.vocab_size)
    while len(output) < NUM_OUTPUT:
        if len(output) in (0, before):
            sampler = Sampler(model.spec.vocab_size)
            sampler.start(sequence_of(5, sampling, prompt, output))
        tokens = (prompt + output)[computed:]
        logits = forward(model, kv, [slot(5, computed, tokens, pages)])[5]
        output = [*output, *sampler.sample(logits[-1:], [5])[0]]
        computed += len(tokens)
    return output


@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
def test_greedy_tokens_equal_transformers(overrides: dict[str, Any], tmp_path: Path) -> None:
    path = init_checkpoint("k2-nano", 3, tmp_path / "c", overrides=overrides)
    theirs: Any = transformers.DeepseekV3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = load_model(Checkpoint.open(path), dtype=torch.float32, device=CPU)
    for length in (1, 17, 200):
        prompt = random_tokens(length, seed=length, vocab_size=512)
        wanted = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, length),  # else ids equal to the padding's are masked
            max_new_tokens=NUM_OUTPUT,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, length:]
        assert generate(model, prompt, SamplingParams(temperature=0)) == wanted.tolist()


def test_seeded_tokens_go_on_after_a_move(tmp_path: Path) -> None:
    path = init_checkpoint("k2-nano", 3, tmp_path / "c")
    model = load_model(Checkpoint.open(path), dtype=torch.float32, device=CPU)
    prompt = random_tokens(40, seed=1, vocab_size=512)
    sampling = SamplingParams(seed=11, temperature=1.5, top_p=0.98, frequency_penalty=0.5)
    whole = generate(model, prompt, sampling)
    assert generate(model, prompt, sampling, before=9) == whole
    assert whole != generate(model, prompt, SamplingParams(temperature=0))

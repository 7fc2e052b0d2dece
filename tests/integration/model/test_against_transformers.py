"""Greedy tokens through the HTTP API against transformers' own generate, on a checkpoint that
transformers wrote. Several ranks have the tokens of one: see `launch/test_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mooncake.model.checkpoint.tokenizer_files import write_tokenizer_files
from tests.support.model.tiny_models import random_tokens, truth
from tests.support.serve.server import Server, serving

NUM_BASE_TOKENS = 300
VOCAB = {"vocab_size": NUM_BASE_TOKENS + 256, "max_position_embeddings": 2048}
LENGTHS = [1, 2, 3, 7, 15, 16, 31, 63, 64, 65, 100, 127, 128, 129, 200, 300, 511, 700, 1023, 1500]
NUM_TOKENS = 64
NAMES = ("uncompressed queries", "grouped routing", "yarn")


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """(transformers' model, a server of the checkpoint it wrote)."""
    model = truth(request.param, **VOCAB)
    home = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(home / "model")
    write_tokenizer_files(home / "model", NUM_BASE_TOKENS)
    with serving(
        str(home / "model"), "--colocated", "--dtype", "float32", "--device", "cpu",
        log=home / "log",
    ) as server:  # fmt: skip
        yield model, server


def greedy_choices(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return what transformers would choose after the prompt and after each of `tokens` but the
    last.

    Equal to `tokens` exactly when greedy generation gives `tokens`, at the price of one forward
    pass.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(dim=-1).tolist()


def test_twenty_prompts(pair: tuple[torch.nn.Module, Server]) -> None:
    model, server = pair
    for length in LENGTHS:
        prompt = random_tokens(length, seed=length)
        answer = server.complete(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        tokens = answer["choices"][0]["token_ids"]
        assert len(tokens) == NUM_TOKENS
        assert tokens == greedy_choices(model, prompt, tokens), f"a prompt of {length} tokens"

"""The training forward pass against the engine's and transformers' on the same weights."""

from __future__ import annotations

import pytest
import torch

from mooncake.base import ConfigError, ModelSpec
from mooncake.train.batches import Batch, packed
from mooncake.train.checkpoint import own_tensor
from mooncake.train.model import TrainedK2
from tests.support.model.tiny_models import (
    CONFIGS,
    DictSource,
    forward,
    kv_for,
    ours,
    random_tokens,
    slot,
    source_of,
    truth,
)

TRAINED = {
    name: changes
    for name, changes in CONFIGS.items()
    if changes.get("q_lora_rank", 1) and not changes.get("tie_word_embeddings")
} | {"halves, two shared": {"rope_interleave": False, "n_shared_experts": 2}}


def trained(source: DictSource, num_mtp_layers: int = 0) -> TrainedK2:
    """Return the training model with the weights of a checkpoint."""
    model = TrainedK2(source.spec, num_mtp_layers)
    model.initialize(0)
    own = model.state_dict()
    for name, value in source.tensors.items():
        own_tensor(own, name.removeprefix("model.")).copy_(value)
    return model.eval()


def batch_of(*sequences: list[int], padded_tokens: int = 2048) -> Batch:
    return packed([(ids, [True] * len(ids)) for ids in sequences], padded_tokens)


@pytest.mark.parametrize("name", TRAINED)
def test_logits_are_the_engines_and_transformers(name: str) -> None:
    changes = TRAINED[name]
    reference = truth("plain", **changes)
    source, tokens = source_of(reference), random_tokens(70, seed=1)
    with torch.no_grad():
        model = trained(source)
        made = model.logits(model.hidden(batch_of(tokens)))
        theirs = reference(torch.tensor([tokens])).logits[0]
    engine = forward(ours(source), kv_for(source.spec), [slot(0, 0, tokens, range(5))], whole=True)[
        0
    ]
    torch.testing.assert_close(made, theirs, rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(made, engine, rtol=1e-3, atol=2e-4)


def test_sequences_of_a_batch_are_as_if_alone() -> None:
    model = trained(source_of(truth("plain")))
    sequences = [random_tokens(count, seed=count) for count in (40, 33, 9, 8, 2)]
    with torch.no_grad():
        together = model.hidden(batch_of(*sequences, padded_tokens=80))
        alone = torch.cat([model.hidden(batch_of(ids)) for ids in sequences])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_no_token_sees_a_later_one() -> None:
    model = trained(source_of(truth("plain")), num_mtp_layers=1)
    tokens = random_tokens(20, seed=0)
    changed = [*tokens[:12], *random_tokens(8, seed=5)]
    with torch.no_grad():
        one, other = (batch_of(ids) for ids in (tokens, changed))
        before, after = model.hidden(one), model.hidden(other)
        ahead = model.mtp_hidden(before, one), model.mtp_hidden(after, other)
    torch.testing.assert_close(before[:12], after[:12], rtol=1e-5, atol=1e-6)
    # State 11 of the MTP layer has seen token 12.
    torch.testing.assert_close(ahead[0][:11], ahead[1][:11], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ahead[0][11], ahead[1][11])


def test_losses_are_of_the_tokens_that_count() -> None:
    model = trained(source_of(truth("plain")), num_mtp_layers=1)
    ids, counts = random_tokens(10, seed=2), [False, True, True, False, *[True] * 6]
    batch = packed([(ids, counts), (random_tokens(4, seed=3), [True] * 4)])
    with torch.no_grad():
        losses = model.losses(batch, with_mtp=True)
        hidden = model.hidden(batch)
        chances = model.logits(hidden).log_softmax(-1)
        ahead = model.logits(model.mtp_hidden(hidden, batch)).log_softmax(-1)
    places = [1, 2, *range(4, 10), 11, 12, 13]
    wanted = -sum(chances[place - 1, batch.tokens[place]] for place in places)
    torch.testing.assert_close(losses.main, wanted, rtol=1e-4, atol=1e-4)
    places = [2, *range(4, 10), 12, 13]
    wanted = -sum(ahead[place - 2, batch.tokens[place]] for place in places)
    torch.testing.assert_close(losses.mtp, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("with_mtp", [False, True])
def test_what_fills_a_batch_changes_no_loss_and_no_gradient(with_mtp: bool) -> None:
    model = trained(source_of(truth("plain")), num_mtp_layers=1)
    sequences = [
        (random_tokens(count, seed=count), [place % 3 == 0 for place in range(count)])
        for count in (150, 40, 33, 9, 2)
    ]
    found = []
    for rounded in (False, True):
        losses = model.losses(packed(sequences, 200, rounded), with_mtp)
        own = torch.autograd.grad(
            losses.main + losses.mtp, list(model.parameters()), allow_unused=True
        )
        found.append((losses.main, losses.mtp, *(one for one in own if one is not None)))
    assert len(found[0]) > 20
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


def test_every_weight_is_trained() -> None:
    spec = ModelSpec.from_config(truth("plain").config.to_dict())
    model = TrainedK2(spec, 1)
    model.initialize(0)
    losses = model.losses(batch_of(random_tokens(200, seed=0)), with_mtp=True)
    (losses.main + losses.mtp).backward()
    still = [name for name, w in model.named_parameters() if w.grad is None or not w.grad.any()]
    assert not still


def test_what_cannot_be_trained_is_refused() -> None:
    for name in ("uncompressed queries", "tied, halves, two shared"):
        spec = ModelSpec.from_config(truth(name).config.to_dict())
        with pytest.raises(ConfigError, match="training supports"):
            TrainedK2(spec, 0)

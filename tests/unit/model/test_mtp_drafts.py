"""Drafts of the MTP layer, and its KV, against the training code, which computes whole texts."""

from __future__ import annotations

import pytest
import torch

from mooncake.base import KvLayout, ModelSpec
from mooncake.engine.plan import BY_MODEL, StepSlot
from mooncake.engine.ranks.step_log import CapturedSizes
from mooncake.model.copies import HostCopies
from mooncake.model.device.graphs import GraphPort
from mooncake.model.drafts.layers import MtpRows
from mooncake.model.drafts.model_drafts import ModelDrafts
from mooncake.model.inputs import build_inputs
from mooncake.model.kimi_k2 import KimiK2, ReadStates
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.loading import load_model
from mooncake.train.batches import Batch, packed
from mooncake.train.checkpoint import named_tensors
from mooncake.train.model import TrainedK2
from tests.support.model.recorder import Recorder
from tests.support.model.tiny_models import CPU, DictSource, random_tokens, slot, truth

PAGES = {1: [0, 5, 2, 9], 2: [3, 7, 8, 4]}
BLOCK = 16
LENGTH = 60


@pytest.fixture(scope="module")
def trained() -> TrainedK2:
    spec = ModelSpec.from_config(truth("plain").config.to_dict())
    model = TrainedK2(spec, 1)
    model.initialize(3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # no norm that does nothing, and no two tokens as likely
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                weight.mul_(2.0)
    return model.eval()


@pytest.fixture(scope="module")
def model(trained: TrainedK2) -> KimiK2:
    source = DictSource(trained.spec, dict(named_tensors(trained)))
    return load_model(source, dtype=torch.float32, device=CPU, with_mtp=True)


def pages_of(spec: ModelSpec) -> KvTensors:
    layout = KvLayout.for_model(
        spec, block_tokens=BLOCK, dtype="float32", weights_revision="test", with_mtp=True
    )
    assert layout.num_layers == spec.num_hidden_layers + 1
    return KvTensors.allocate(layout, 16, CPU)


def drafts_over(model: KimiK2, kv: KvTensors, port: GraphPort | None = None) -> ModelDrafts:
    copies = HostCopies()
    layer = MtpRows(model, kv, copies)
    if port is not None:
        with torch.inference_mode():
            layer.capture(port, CapturedSizes(2, 4, most_drafts=3))
    return ModelDrafts(layer, copies)


def batch_of(tokens: list[int]) -> Batch:
    return packed([(tokens, [True] * len(tokens))], 2048)


def states_before(trained: TrainedK2, tokens: list[int]) -> torch.Tensor:
    """Return the model's state before each token; before the first, zeros."""
    states = trained.hidden(batch_of(tokens))
    return torch.cat((torch.zeros_like(states[:1]), states[:-1]))


def guesses(trained: TrainedK2, tokens: list[int], num: int) -> list[int]:
    """Return the likeliest tokens after `tokens`, all computed anew for each."""
    assert trained.mtp is not None
    states, made = states_before(trained, tokens), []
    for _ in range(num):
        batch = batch_of([*tokens, *made])
        joined = trained.mtp.join(states, trained.embed_tokens(batch.tokens))
        found = trained.mtp(joined, trained.rows(batch))
        state = trained.mtp.shared_head["norm"](found[-1:])
        made.append(int(trained.logits(state).argmax()))
        states = torch.cat((states, state))
    return made


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("chunk", [7, 50])
def test_drafts_and_full_blocks_are_those_of_the_whole_text(
    trained: TrainedK2, model: KimiK2, chunk: int, captured: bool
) -> None:
    """Two sequences: prompts in chunks, then steps with 0 to 3 drafts, of which 0 to 3 are right
    (the test says which text goes on).
    """
    kv, recorder = pages_of(model.spec), Recorder()
    drafting = drafts_over(model, kv, recorder if captured else None)
    texts = {key: random_tokens(LENGTH + 4, seed=key) for key in PAGES}
    computed = dict.fromkeys(PAGES, 0)
    num_prompt, step, num_compared = 21, 0, 0
    with torch.inference_mode():
        while min(computed.values()) < LENGTH:
            slots, num_right = [], {}
            for key, text in texts.items():
                at, step = computed[key], step + 1
                if at >= LENGTH:
                    continue
                known = text[at : min(at + chunk, num_prompt)] or text[at : at + 1]
                num = step * 7 % 4 if at >= num_prompt else 0
                slots.append(slot(key, at, known, PAGES[key], drafts=[BY_MODEL] * num))
                num_right[key] = min(num, step * 5 % 4)
            made = drafting.make(slots)
            given = []
            for asked, found in zip(slots, made, strict=True):
                key, num = asked.sequence_id, asked.num_drafts
                text, at = texts[key], asked.start
                assert found.tokens[: len(asked.tokens) - num] == asked.tokens[: -num or None]
                if num:
                    assert found.drafts == guesses(trained, text[: at + 1], num)
                    num_compared += num
                drafts = text[at + 1 : at + 1 + num_right[key]]
                drafts += [(text[at + 1 + len(drafts)] + 1) % 211] * (num - len(drafts))
                given.append(slot(key, at, asked.tokens[: -num or None], PAGES[key], drafts=drafts))
            every = frozenset(num_right)
            inputs = build_inputs(given, every, kv.page_shape, model.prefers_absorbed)
            read = ReadStates((model.spec.num_hidden_layers,))
            model.forward(inputs, kv, read=read)
            samples = {key: [0] * (1 + num) for key, num in num_right.items()}
            drafting.keep(inputs.input_rows, read.rows, samples, handed_on=False)
            for each in given:
                num_new = len(each.tokens) - each.num_drafts + num_right[each.sequence_id]
                computed[each.sequence_id] += num_new
        assert num_compared > 40
        assert (len(recorder.guessed) > 20) == captured
        for key, text in texts.items():
            num_full = computed[key] // BLOCK
            assert num_full == 3
            whole, tokens = pages_of(model.spec), text[: num_full * BLOCK]
            every_row = slot(key, 0, tokens, range(num_full), sample=False)
            inputs = build_inputs([every_row], frozenset(), whole.page_shape, lambda *_: True)
            model.guess(inputs, states_before(trained, tokens), whole)
            for at, page in enumerate(PAGES[key][:num_full]):
                torch.testing.assert_close(
                    kv.layers[-1][page], whole.layers[-1][at], rtol=1e-4, atol=1e-4
                )


def step(
    model: KimiK2, kv: KvTensors, drafting: ModelDrafts, asked: StepSlot, sampled: int,
    handed_on: bool = False,
) -> None:  # fmt: skip
    inputs = build_inputs([asked], frozenset([1]), kv.page_shape, model.prefers_absorbed)
    read = ReadStates((model.spec.num_hidden_layers,))
    model.forward(inputs, kv, read=read)
    drafting.keep(inputs.input_rows, read.rows, {1: [sampled]}, handed_on=handed_on)


@pytest.mark.parametrize("num_prompt", [21, 31, 32])
def test_what_goes_on_behind_a_hand_over_has_the_rows_of_the_whole_text(
    trained: TrainedK2, model: KimiK2, num_prompt: int
) -> None:
    """One engine computes a prompt and samples, another takes the pages and goes on: also the row
    of the first token that it computes is that of the text, if its block came.
    """
    text, pages = random_tokens(48, seed=4), [2, 5, 9]
    kv, own = pages_of(model.spec), pages_of(model.spec)
    with torch.inference_mode():
        prompt = slot(1, 0, text[:num_prompt], pages[: -(-num_prompt // BLOCK)])
        step(model, kv, drafts_over(model, kv), prompt, text[num_prompt], handed_on=True)
        own.pages[:, prompt.pages] = kv.pages[:, prompt.pages]
        drafting = drafts_over(model, own)
        for at in range(num_prompt, 48):
            step(model, own, drafting, slot(1, at, text[at : at + 1], pages), 0)
            if at == num_prompt + 1:
                asked = slot(1, at + 1, text[at + 1 : at + 2], pages, drafts=[BY_MODEL] * 2)
                drafts = drafting.make([asked])[0].drafts
        states = states_before(trained, text)
        if num_prompt % BLOCK == 0:  # no block came with a place for that row
            states[num_prompt] = 0
        else:
            assert drafts == guesses(trained, text[: num_prompt + 3], 2)
        whole = pages_of(model.spec)
        inputs = build_inputs(
            [slot(1, 0, text, range(3), sample=False)],
            frozenset(),
            whole.page_shape,
            lambda *_: True,
        )
        model.guess(inputs, states, whole)
        for at, page in enumerate(pages):
            torch.testing.assert_close(
                own.layers[-1][page], whole.layers[-1][at], rtol=1e-4, atol=1e-4
            )

"""An EAGLE-3 head against transformers' Llama and DeepSeek-V3 layers; its files; what it keeps of
sequences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from mooncake.base import CheckpointError
from mooncake.engine.plan import BY_MODEL
from mooncake.engine.ranks.step_log import CapturedSizes
from mooncake.model.backends import Backends
from mooncake.model.checkpoint.eagle3 import EMBEDDING, HEAD, IS_DRAFTED, TO_TARGET, Eagle3Files
from mooncake.model.copies import HostCopies
from mooncake.model.drafts.eagle3 import Eagle3Head, Eagle3Rows, KvWindows, Seen
from mooncake.model.drafts.model_drafts import ModelDrafts
from mooncake.model.inputs import build_inputs
from mooncake.model.kimi_k2 import KimiK2, ReadStates
from tests.support.model.eagle3_heads import (
    Tensors,
    config_of,
    mla_config_of,
    random_tensors,
    states_of,
    write_head,
)
from tests.support.model.recorder import Recorder
from tests.support.model.tiny_models import (
    kv_for,
    ours,
    random_tokens,
    slot,
    source_of,
    truth,
)

KINDS: dict[str, dict[str, Any]] = {
    "as published": {},
    "shared vocabulary": {"draft_vocab_size": None},
    "reads the last layer": {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        "num_key_value_heads": 4,
    },
    "3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "MLA": {"is_mla": True},
    "MLA, YaRN, whole queries": {
        "is_mla": True,
        "q_lora_rank": None,
        "fc_norm": True,
        "norm_output": True,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 128,
    },
}
LENGTH = 60
PAGES = {1: [0, 5, 2, 9], 2: [3, 7, 8, 4]}


@pytest.fixture(scope="module")
def model() -> KimiK2:
    return ours(source_of(truth("plain")))


class Reference:
    """A head as transformers' modules compute it, over whole texts."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, model: KimiK2) -> None:
        self.config, self.tensors, self.model = config, tensors, model
        known = {key: config[key] for key in config if key not in ("architectures", "rope_scaling")}
        llama = LlamaConfig(
            **{key: known[key] for key in known if known[key] is not None},
            attn_implementation="eager",
        )
        self.attention: LlamaAttention | DeepseekV3Attention
        self.rotary: LlamaRotaryEmbedding | DeepseekV3RotaryEmbedding
        if "kv_lora_rank" in config:
            latent = {key: known[key] for key in known if key != "head_dim"}
            deepseek = DeepseekV3Config(
                **latent, rope_scaling=config["rope_scaling"], attn_implementation="eager"
            )
            self.attention = DeepseekV3Attention(deepseek, 0)
            self.rotary = DeepseekV3RotaryEmbedding(deepseek)
        else:
            self.attention = LlamaAttention(llama, 0)
            self.rotary = LlamaRotaryEmbedding(llama)
        prefix = "midlayer.self_attn."
        with torch.no_grad():
            for name in [name for name in tensors if name.startswith(prefix)]:
                module, weight = name.removeprefix(prefix).removesuffix(".weight"), tensors[name]
                if weight.dim() == 1:
                    getattr(self.attention, module).weight.copy_(weight)
                    continue
                linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                linear.weight.copy_(weight)
                setattr(self.attention, module, linear)
            self.mlp = LlamaMLP(llama)
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(self.mlp, name).weight.copy_(tensors[f"midlayer.mlp.{name}.weight"])

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"]
        norm = LlamaRMSNorm(len(weight), self.config["rms_norm_eps"])
        norm.weight.data.copy_(weight)
        return norm(x)

    def read(self, tokens: list[int]) -> torch.Tensor:
        """Return what goes into the layers that are read, of a whole text."""
        layers = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        return states_of(self.model, tokens, layers)

    def fused(self, read: torch.Tensor) -> torch.Tensor:
        if self.config.get("fc_norm"):
            parts = [self.norm(f"fc_norm.{at}", part) for at, part in enumerate(read.chunk(3, -1))]
            read = torch.cat(parts, dim=-1)
        return functional.linear(read, self.tensors["fc.weight"])

    def states(self, tokens: list[int], before: torch.Tensor) -> torch.Tensor:
        """Return the layer's states of tokens, of the states before each."""
        embedding = self.tensors.get(EMBEDDING)
        ids = torch.tensor(tokens)
        embedded = self.model.embedded(ids) if embedding is None else embedding[ids]
        normed = self.norm("midlayer.hidden_norm", before)
        joined = torch.cat((self.norm("midlayer.input_layernorm", embedded), normed), dim=-1)
        positions = torch.arange(len(tokens))[None]
        causal = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)
        turned = self.rotary(joined, positions)
        attended, _ = self.attention(joined[None], turned, causal[None, None])
        x = (normed if self.config.get("norm_before_residual") else before) + attended[0]
        x = x + self.mlp(self.norm("midlayer.post_attention_layernorm", x))
        return self.norm("norm", x) if self.config.get("norm_output") else x

    def likeliest(self, state: torch.Tensor) -> int:
        normed = state if self.config.get("norm_output") else self.norm("norm", state)
        if HEAD not in self.tensors:
            return int(self.model.likeliest(normed[None]))
        best = int((self.tensors[HEAD] @ normed).argmax())
        return best + int(self.tensors[TO_TARGET][best]) if TO_TARGET in self.tensors else best

    def guesses(self, tokens: list[int], num: int) -> list[int]:
        """Return the likeliest tokens after `tokens`, all computed anew for each."""
        before, made = self.fused(self.read(tokens[:-1])), []
        for _ in range(num):
            state = self.states([*tokens[1:], *made], before)[-1]
            made.append(self.likeliest(state))
            before = torch.cat((before, state[None]))
        return made


def head_of(
    model: KimiK2, out: Path, seed: int = 1, **changes: Any
) -> tuple[Eagle3Head, Reference]:
    shared = "draft_vocab_size" in changes
    named = mla_config_of if changes.pop("is_mla", False) else config_of
    config = named(model.spec, **changes)
    tensors = random_tensors(config, model.spec, seed)
    if shared:  # neither an embedding nor words of its own
        for name in (EMBEDDING, HEAD, TO_TARGET, IS_DRAFTED):
            tensors.pop(name, None)
    files = Eagle3Files.open(write_head(out, config, tensors), model.spec)
    with torch.inference_mode():
        return Eagle3Head(files, model, Backends()), Reference(config, tensors, model)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_whole_text(
    model: KimiK2, tmp_path: Path, kind: str, captured: bool
) -> None:
    """Prompts in chunks, then steps with 0 to 3 drafts, of which 0 to 3 are right."""
    head, reference = head_of(model, tmp_path, **KINDS[kind])
    rows, recorder = Eagle3Rows(head, 2, HostCopies()), Recorder()
    if captured:
        with torch.inference_mode():
            rows.capture(recorder, CapturedSizes(2, 4, most_drafts=3))
    kv, num_compared, step = kv_for(model.spec), 0, 0
    drafting = ModelDrafts(rows, HostCopies())
    texts = {key: random_tokens(LENGTH + 8, seed=key) for key in PAGES}
    computed = dict.fromkeys(PAGES, 0)
    with torch.inference_mode():
        while min(computed.values()) < LENGTH:
            slots, num_right = [], {}
            for key, text in texts.items():
                at, step = computed[key], step + 1
                if at >= LENGTH:
                    continue
                known = text[at : min(at + 9, 21)] or text[at : at + 1]
                num = step * 7 % 4 if at >= 21 else 0
                slots.append(slot(key, at, known, PAGES[key], drafts=[BY_MODEL] * num))
                num_right[key] = min(num, step * 5 % 4)
            given = []
            for asked, found in zip(slots, drafting.make(slots), strict=True):
                key, num = asked.sequence_id, asked.num_drafts
                text, at = texts[key], asked.start
                if num:
                    assert found.drafts == reference.guesses(text[: at + 1], num)
                    num_compared += num
                right = text[at + 1 : at + 1 + num_right[key]]
                wrong = [(text[at + 1 + len(right)] + 1) % 211] * (num - len(right))
                known = asked.tokens[: len(asked.tokens) - num]
                given.append(slot(key, at, known, PAGES[key], drafts=[*right, *wrong]))
            all_rows = model.spec.num_hidden_layers in head.spec.layers
            wanted = frozenset(num_right) if all_rows else frozenset[int]()
            inputs = build_inputs(given, wanted, kv.page_shape, model.prefers_absorbed)
            read = ReadStates(head.spec.layers)
            model.forward(inputs, kv, read=read)
            samples = {key: [0] * (1 + num) for key, num in num_right.items()}
            drafting.keep(inputs.input_rows, read.rows, samples, handed_on=True)
            for each in given:
                num_new = len(each.tokens) - each.num_drafts + num_right[each.sequence_id]
                computed[each.sequence_id] += num_new
    assert num_compared > 30
    assert (len(recorder.guessed) > 30) == captured
    drafting.check_integrity(PAGES)
    with pytest.raises(AssertionError, match="have ended"):
        drafting.check_integrity([1])
    drafting.forget([2])
    drafting.check_integrity([1])


def test_a_sequence_from_elsewhere_begins_without_what_was_before(
    model: KimiK2, tmp_path: Path
) -> None:
    """Its second step drafts as of a text that begins with its first token here."""
    head, reference = head_of(model, tmp_path)
    drafting = ModelDrafts(Eagle3Rows(head, 1, HostCopies()), HostCopies())
    text, kv = random_tokens(40, seed=9), kv_for(model.spec)
    rule = model.prefers_absorbed
    with torch.inference_mode():
        before = slot(1, 0, text[:37], [0, 1, 2], sample=False)
        model.forward(build_inputs([before], frozenset(), kv.page_shape, rule), kv)
        first = slot(1, 37, text[37:38], [0, 1, 2])
        inputs = build_inputs([first], frozenset(), kv.page_shape, rule)
        read = ReadStates(head.spec.layers)
        model.forward(inputs, kv, read=read)
        drafting.keep(inputs.input_rows, read.rows, {1: [text[38]]}, handed_on=False)
        asked = slot(1, 38, text[38:39], [0, 1, 2], drafts=[BY_MODEL])
        [made] = drafting.make([asked])
        fused = reference.fused(reference.read(text[:38])[-1:])
        assert made.drafts == [reference.likeliest(reference.states(text[38:39], fused)[-1])]


def test_windows_keep_the_last_rows() -> None:
    """What the host finds by its own numbers, the device finds by tensors."""
    windows = KvWindows(2, 4, 1, torch.float32, torch.device("cpu"))
    last: dict[int, Seen] = {}

    def write(sequence_id: int, place: int, *values: int) -> None:
        targets, last[sequence_id] = windows.take(sequence_id, place, len(values))
        rows = torch.tensor(values, dtype=torch.float32)[:, None]
        windows.write(torch.tensor(targets), rows)

    def seen(sequence_id: int) -> list[float]:
        [(rows, mask)] = windows.views([last[sequence_id]])
        found = sorted((rows if mask is None else rows[mask]).flatten().tolist())
        unused = Seen(2, 0, 1)
        [(every, which)] = windows.read(torch.tensor([unused, last[sequence_id]]).T)
        assert which is not None
        assert sorted(every[1][which[1]].flatten().tolist()) == found
        return found

    write(7, 5, 5, 6, 7)
    write(7, 8, 80, 90)  # of drafts, which were wrong
    write(7, 8, 8, 9, 10)
    assert seen(7) == [5, 6, 7, 8, 9, 10]
    write(7, 11, 11, 12, 13)
    assert seen(7) == [6, 7, 8, 9, 10, 11, 12, 13], "twice as many as a window"
    write(7, 14, 14, 150, 160)
    write(7, 15, 15)
    assert seen(7) == [9, 10, 11, 12, 13, 14, 15], "wrong drafts took the place of older rows"
    write(9, 3, 3)
    windows.check_integrity([7, 9])
    write(7, 30, 30, 31)
    assert seen(7) == [30, 31], "nothing lies behind a gap"
    windows.forget([7, 8])
    write(8, 1, 1)
    assert seen(8) == [1], "nothing of the sequence that had the window"
    assert seen(9) == [3]
    windows.check_integrity([8, 9])
    with pytest.raises(AssertionError, match="more rows than a window"):
        windows.take(8, 2, 5)


def test_captured_steps_see_windows_that_have_gone_round(model: KimiK2, tmp_path: Path) -> None:
    """Their drafts are those of steps as they come, of sequences that begin at different times."""
    head, _ = head_of(model, tmp_path)
    with torch.inference_mode():
        layers, recorder = [Eagle3Rows(head, 12, HostCopies()) for _ in range(2)], Recorder()
        for each in layers:
            each.windows = KvWindows(12, 8, head.spec.attention.kv_width, head.dtype, head.device)
        layers[0].capture(recorder, CapturedSizes(12, 4, most_drafts=2))
        generator, ends = torch.Generator().manual_seed(1), list(range(2, 14))
        for step in range(12):
            slots = []
            for key in (each for each in range(12) if (step + each) % 4):
                wrong = (step + key) % 2  # a draft of the step before
                text = random_tokens(3 + wrong, seed=step)
                asked = bool((key + step) % 5)
                slots.append(slot(key, ends[key] - wrong, text, [0], sample=asked))
                ends[key] += 3
            num = sum(len(each.tokens) for each in slots)
            states = torch.randn(num, 64, generator=generator)
            (made, tokens), (wanted, same) = (each.compute(slots, states) for each in layers)
            torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
            assert tokens.tolist() == same.tolist()
    assert len(recorder.guessed) == 12


LATENT = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
WRONG_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "other kind": ({"architectures": ["LlamaForCausalLM"]}, "is not an EAGLE-3 head that can be"),
    "MLA": (
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        "missing kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim",
    ),
    "layers": ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported"),
    "bias": ({"attention_bias": True}, "attention_bias=True is not supported"),
    "quantized": ({"quantization_config": {"a": 1}}, "quantization_config=.* is not supported"),
    "rope": ({"rope_scaling": {"rope_type": "llama3"}}, "rope type 'llama3' is not supported"),
    "other model": ({"vocab_size": 999}, "vocab_size=999 is not the model's .211.: this is the"),
    "other width": ({"target_hidden_size": 8}, "target_hidden_size=8 is not the model's .64."),
    "no layer": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 58]}},
        r"eagle_aux_hidden_state_layer_ids=\[1, 2, 58\] must be layers of the model, 0 to 3",
    ),
    "no size": ({"intermediate_size": None}, "missing intermediate_size"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads divides num_attention_heads"),
    "words": ({"draft_vocab_size": "many"}, "Expected `int`, got `str`"),
    "rope of another form": ({"rope_scaling": [8]}, "rope_scaling must be an object"),
    "YaRN without its context": (
        {**LATENT, "rope_scaling": {"type": "yarn", "factor": 8.0}},
        "the yarn rope settings lack 'original_max_position_embeddings'",
    ),
    "other scaling with MLA": (
        {**LATENT, "rope_scaling": {"type": "linear", "factor": 8.0}},
        "rope type 'linear' is not supported, only 'yarn'",
    ),
    "odd rope": ({**LATENT, "qk_rope_head_dim": 7}, "qk_rope_head_dim is even does not hold"),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_configurations_that_are_refused(model: KimiK2, tmp_path: Path, name: str) -> None:
    changes, error = WRONG_CONFIGS[name]
    good = config_of(model.spec)
    write_head(tmp_path, {**good, **changes}, random_tensors(good, model.spec))
    with pytest.raises(CheckpointError, match=error):
        Eagle3Files.open(tmp_path, model.spec)


def test_tensors_that_are_refused(model: KimiK2, tmp_path: Path) -> None:
    config = config_of(model.spec)
    good = random_tensors(config, model.spec)

    def opened(tensors: Tensors) -> Eagle3Files:
        return Eagle3Files.open(write_head(tmp_path, config, tensors), model.spec)

    renamed = {
        f"model.{name.replace('midlayer.', 'layers.0.')}": each for name, each in good.items()
    }
    assert opened(renamed).homes.keys() == good.keys(), "names of vLLM and transformers"
    for change, error in (
        ({"fc.weight": None}, "missing tensors: fc.weight"),
        ({HEAD: None, TO_TARGET: None}, "missing tensors: d2t, lm_head.weight"),
        ({"midlayer.q.weight": torch.zeros(2)}, "unknown tensors: midlayer.q.weight"),
        ({"norm.weight": torch.zeros(3)}, r"norm.weight in .*: has shape \[3\], the head needs"),
        ({"norm.weight": torch.zeros(64, dtype=torch.int64)}, "norm.weight in .*: dtype I64 is"),
    ):  # fmt: skip
        wrong = {name: each for name, each in {**good, **change}.items() if each is not None}
        with pytest.raises(CheckpointError, match=error):
            opened(wrong)
    files = opened({**good, TO_TARGET: good[TO_TARGET] + 1})
    with pytest.raises(CheckpointError, match=r"d2t in .* names other tokens than t2d"):
        Eagle3Head(files, model, Backends())

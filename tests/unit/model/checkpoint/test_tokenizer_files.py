"""The tokenizer and chat template of preset checkpoints, used as their readers use them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
import tiktoken

from mooncake.base import ConfigError
from mooncake.model.checkpoint.tokenizer_files import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    special_token_id,
    train_ranks,
    write_tokenizer_files,
)

# The alternation of Kimi-K2's tokenizer, leaving out only its split between letter cases.
PATTERN = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+|\p{N}{1,3}"
PATTERN += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = [
    "The quick brown fox explains distributed inference to a student.",
    "大语言模型的推理需要很多显存。今天我们研究分布式缓存。",
    "def forward(self, x):\n        return torch.softmax(self.q @ self.k, dim=-1)\n",
    "Ünïcödé, ελληνικά, русский, にほんご, 한국어, 🌙\x00\t\r\n",
]


@pytest.fixture(scope="module", params=[512, 4096])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer_files(out, request.param)
    return out


def encoding_of(ranks: list[bytes]) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "preset",
        pat_str=PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
        special_tokens={name: special_token_id(name, len(ranks)) for name in SPECIAL_TOKENS},
    )


class TestVocabulary:
    def test_the_file_holds_contiguous_ranks_and_all_bytes(self, directory: Path) -> None:
        lines = (directory / "tiktoken.model").read_bytes().splitlines()
        pairs = [line.split() for line in lines]
        tokens = [base64.b64decode(token) for token, _ in pairs]
        assert [int(rank) for _, rank in pairs] == list(range(len(lines)))
        assert len(set(tokens)) == len(tokens) in (512, 4096)
        assert {bytes((byte,)) for byte in range(256)} <= set(tokens)

    def test_any_text_survives_and_longer_vocabularies_need_fewer_tokens(self) -> None:
        small, large = encoding_of(train_ranks(512)), encoding_of(train_ranks(4096))
        for text in TEXTS:
            assert small.decode(small.encode(text)) == text
            assert large.decode(large.encode(text)) == text
            assert len(large.encode(text)) <= len(small.encode(text)) <= len(text.encode())
        assert len(large.encode(TEXTS[0])) < len(TEXTS[0]) / 2.5

    def test_every_token_can_be_produced(self) -> None:
        """Text that spells a token is encoded as that token: no rank is dead weight."""
        ranks = train_ranks(4096)
        whole = tiktoken.Encoding(
            "whole",
            pat_str=r"(?s:.+)",
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens={},
        )
        spelled = 0
        for rank, token in enumerate(ranks):
            try:
                text = token.decode()
            except UnicodeDecodeError:
                continue
            spelled += 1
            assert whole.encode(text) == [rank], text
        assert spelled > 3500

    def test_training_is_repeatable_and_grows_by_appending(self) -> None:
        assert train_ranks(700) == train_ranks(700)
        assert train_ranks(700)[:400] == train_ranks(400)

    @pytest.mark.parametrize("size", [255, 200_000])
    def test_impossible_sizes_are_refused(self, size: int) -> None:
        with pytest.raises(ConfigError):
            train_ranks(size)


class TestSpecialTokens:
    def test_keep_kimi_k2s_distances(self) -> None:
        known = {
            "[BOS]": 163584, "[EOS]": 163585, "<|im_end|>": 163586, "<|im_user|>": 163587,
            "<|im_assistant|>": 163588, "[EOT]": 163593, "<|im_system|>": 163594,
            "<|tool_calls_section_begin|>": 163595, "<|tool_call_end|>": 163599,
            "<|im_middle|>": 163601, "<think>": 163606, "</think>": 163607, "[UNK]": 163838,
            "[PAD]": 163839,
        }  # fmt: skip
        assert {name: special_token_id(name, 163584) for name in known} == known

    def test_the_config_names_each_at_its_id(self, directory: Path) -> None:
        config = json.loads((directory / "tokenizer_config.json").read_text())
        num_base = len((directory / "tiktoken.model").read_bytes().splitlines())
        added = config["added_tokens_decoder"]
        names = {int(number): row["content"] for number, row in added.items()}
        assert names == {special_token_id(name, num_base): name for name in SPECIAL_TOKENS}
        assert config["bos_token"] == "[BOS]"
        assert config["eos_token"] == "[EOS]"
        assert config["chat_template"] == (directory / "chat_template.jinja").read_text()
        assert set(config["additional_special_tokens"]) <= set(SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def render() -> Callable[..., str]:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def tojson(value: object, separators: tuple[str, str] | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, separators=separators)

    environment.filters["tojson"] = tojson
    template = environment.from_string(CHAT_TEMPLATE)

    def rendered(messages: list[dict[str, Any]], **settings: Any) -> str:
        return template.render(messages=messages, **settings)

    return rendered


DEFAULT = "You are Kimi, an AI assistant created by Moonshot AI."
SYSTEM = f"<|im_system|>system<|im_middle|>{DEFAULT}<|im_end|>"


class TestChatTemplate:
    def test_turns_and_the_default_system_message(self, render: Callable[..., str]) -> None:
        messages = [
            {"role": "user", "content": " Hi\n<b> "},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "你好", "name": "ann"},
        ]
        turns = (
            "<|im_user|>user<|im_middle|> Hi\n<b> <|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>Hello<|im_end|>"
            "<|im_user|>ann<|im_middle|>你好<|im_end|>"
        )
        prompt = "<|im_assistant|>assistant<|im_middle|>"
        assert render(messages) == SYSTEM + turns
        assert render(messages, add_generation_prompt=True) == SYSTEM + turns + prompt
        own = [{"role": "system", "content": "Be brief."}, *messages]
        assert render(own) == "<|im_system|>system<|im_middle|>Be brief.<|im_end|>" + turns
        assert render([]) == SYSTEM

    def test_content_may_be_nothing_or_parts(self, render: Callable[..., str]) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
        for content, text in ((None, ""), ("", ""), ([], ""), (parts, "ab")):
            assert render([{"role": "user", "content": content}]) == (
                f"{SYSTEM}<|im_user|>user<|im_middle|>{text}<|im_end|>"
            )

    def test_tools_calls_and_results(self, render: Callable[..., str]) -> None:
        tools = [{"type": "function", "function": {"name": "f", "description": "<x> & 'y'"}}]
        call = {"id": "functions.f:0", "function": {"name": "f", "arguments": '{"a": 1}'}}
        parsed = {"id": "functions.f:1", "function": {"name": "f", "arguments": {"b": "é"}}}
        messages = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [call, parsed]},
            {"role": "tool", "tool_call_id": "functions.f:0", "content": "done"},
            {"role": "tool", "tool_call_id": "functions.f:1", "content": "too", "name": "f"},
        ]
        declared = json.dumps(tools, separators=(",", ":"))
        assert render(messages, tools=tools) == (
            f"<|im_system|>tool_declare<|im_middle|>{declared}<|im_end|>{SYSTEM}"
            "<|im_user|>user<|im_middle|>go<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|>"
            '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
            '<|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{"b": "é"}'
            "<|tool_call_end|>"
            "<|tool_calls_section_end|><|im_end|>"
            "<|im_system|>tool<|im_middle|>## Return of functions.f:0\ndone<|im_end|>"
            "<|im_system|>f<|im_middle|>## Return of functions.f:1\ntoo<|im_end|>"
        )

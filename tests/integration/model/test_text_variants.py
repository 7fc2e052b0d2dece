"""Tokenizers and chat templates of every form, as transformers reads the same directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from mooncake.api.text.chat_template import load_chat_template
from mooncake.api.text.tokenizer import load_tokenizer
from tests.unit.api.text.test_tokenizer import byte_level_file

MESSAGES = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "é <b>"},
    {"role": "user", "content": "fool"},
]
TEXT = "hello <eos> wörld,\n\n <tool>12345 it's"

TEMPLATES = {
    "named tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}",
    "the model's own tokens": "{{ image_token }}|{{ video_token }}|{{ other_token }}",
    "what is not given": (
        "{{ documents is none }}{{ documents is defined }}{{ tools is none }}{{ tools is defined }}"
        "{{ thinking is defined }}{{ messages[0].name is defined }}"
    ),
    "JSON": (
        "{{ {'b': '<é&>', 'a': [1, 2.5, none, true]} | tojson }}{{ messages | tojson(indent=2) }}"
    ),
    "loops": (
        "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
        "{{ m.role }}{{ m.name }}\n{% endfor %}\n"
    ),
    "white space": "a\n  {% if true %}\n  b\n  {% endif %}\n c\n",
    "marks of training": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}G{% endif %}"
    ),
    "fields": (
        "{% for m in messages %}{{ m.tool_calls is defined }}{{ m['x'] is none }}"
        "{% for key, value in m.items() %}{{ key }}={{ value }}{% endfor %}{% endfor %}"
    ),
    "Python's methods": (
        "{% set ns = namespace(x=1) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}"
        "{{ ns.x }}{{ 'abc'[::-1] }}{{ messages[-1]['content'].split('o') | join('-') }}"
    ),
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "names": {},
    "a BOS to add": {"add_bos_token": True},
    "a BOS not to add": {"add_bos_token": False},
    "an EOS to add": {"add_eos_token": True},
    "another class": {"tokenizer_class": "LlamaTokenizerFast"},
    "objects": {"bos_token": {"__type": "AddedToken", "content": "<bos>"}},
}


def byte_level(path: Path, **config: Any) -> tokenizers.Tokenizer:
    """Write a byte-level tokenizer of a DeepSeek-V3 into `path`."""
    tokenizer = byte_level_file(path)
    (path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(named | config))
    return tokenizer


def of_transformers(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_templates(template: str, tmp_path: Path) -> None:
    more = {"video_token": "<tool>"}
    byte_level(tmp_path, image_token="<tool>", extra_special_tokens=more)
    (tmp_path / "chat_template.jinja").write_text(template)
    wanted = of_transformers(tmp_path).apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    found = load_chat_template(tmp_path, load_tokenizer(tmp_path)).render(MESSAGES)
    assert found == wanted


@pytest.mark.parametrize("surrounds", [True, False])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_tokenizers(config: dict[str, Any], surrounds: bool, tmp_path: Path) -> None:
    library = byte_level(tmp_path, **config)
    library.enable_truncation(5)
    library.enable_padding(length=64, pad_token="<eos>")
    if not surrounds:
        library.post_processor = processors.ByteLevel(trim_offsets=False)
    library.save(str(tmp_path / "tokenizer.json"))
    theirs, ours = of_transformers(tmp_path), load_tokenizer(tmp_path)
    for special in (True, False):
        wanted = theirs(TEXT, add_special_tokens=special).input_ids
        assert ours.encode(TEXT, add_special=special) == wanted
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)

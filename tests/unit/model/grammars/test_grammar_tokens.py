"""Grammars read the same tokens as the API server."""

from __future__ import annotations

from pathlib import Path

from mooncake.model.grammars.grammar_tokens import load_grammar_tokens
from tests.unit.api.text.test_tokenizer import byte_level_file


def test_what_training_cut_or_filled_is_not_cut_or_filled_here(tmp_path: Path) -> None:
    library = byte_level_file(tmp_path)
    whole = library.encode("hello world", add_special_tokens=False).ids
    library.enable_truncation(4)
    library.enable_padding(length=32, pad_token="<eos>")
    library.save(str(tmp_path / "tokenizer.json"))
    assert load_grammar_tokens(tmp_path).encode("hello world") == whole

"""Tokenizer files are read natively, added tokens are found by name, nothing is lost on the way."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from mooncake.api.text.conversation import MARK, Guard
from mooncake.api.text.tokenizer import (
    MAX_ENCODE_CHARS,
    MAX_RUN_CHARS,
    TiktokenTokenizer,
    Window,
    cut_text,
    load_tokenizer,
)
from mooncake.base import CheckpointError
from mooncake.base.models.vocabulary import NUM_RESERVED_IDS, read_ranks
from tests.support.api.server import MERGES, SPECIAL_NAMES, tiny_tokenizer

BASE = 256 + len(MERGES)
TEXTS = [
    "",
    "hello world",
    "  leading and trailing  ",
    "it's 1234567 o'clock\r\n\n\tthen",
    "你好世界, hello世界 ÀÉî",
    "🙂👩‍👩‍👧‍👦🇨🇳 e\u0301",
    "a\x00b\u200b\u2028c",
]


def write_tiktoken(path: Path, config: dict[str, object] | None = None) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {text.encode(): 256 + rank for rank, text in enumerate(MERGES)}
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))


def test_golden_ids_follow_the_ranks_and_the_pattern() -> None:
    tokenizer = tiny_tokenizer()
    merged = {text: 256 + rank for rank, text in enumerate(MERGES)}
    assert tokenizer.encode("hello the") == [merged["hello"], merged[" the"]]
    # Han characters and Latin letters are cut apart before merging, so 你好 is whole here too.
    assert tokenizer.encode("hello你好in") == [merged["hello"], merged["你好"], merged["in"]]
    # Numbers are cut into groups of three.
    assert tokenizer.encode("1234") == [ord(digit) for digit in "1234"]


def test_class_intersection_of_the_pattern_works() -> None:
    """Without `&&` the Han letters would join the word before them (they are \\p{Lo})."""
    tokenizer = tiny_tokenizer()
    apart = tokenizer.encode("hello") + tokenizer.encode("你好")
    assert tokenizer.encode("hello你好") == apart


@pytest.mark.parametrize("text", TEXTS)
def test_tiktoken_text_survives_the_round_trip(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_found_by_name_and_reserved_ids_are_filled() -> None:
    tokenizer = tiny_tokenizer()
    for name, offset in SPECIAL_NAMES.items():
        assert tokenizer.special_id(name) == BASE + offset
        assert tokenizer.encode(f"a{name}b") == [97, BASE + offset, 98]
    assert tokenizer.special_id(f"<|reserved_token_{BASE + 5}|>") == BASE + 5
    assert tokenizer.decode([BASE + 5]) == f"<|reserved_token_{BASE + 5}|>"
    assert tokenizer.vocab_size == BASE + NUM_RESERVED_IDS
    assert tokenizer.special_id("nothing") is None


def test_special_text_can_be_kept_from_becoming_a_token() -> None:
    tokenizer = tiny_tokenizer()
    plain = tokenizer.encode("<|im_end|>", allow_special=False)
    assert len(plain) > 1
    assert max(plain) < BASE
    assert tokenizer.decode(plain) == "<|im_end|>"


def test_special_tokens_are_left_out_of_text_only_when_asked() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("<|im_user|>hello<|im_end|>")
    assert tokenizer.decode(ids, skip_special=True) == "hello"
    assert tokenizer.decode(ids) == "<|im_user|>hello<|im_end|>"


def test_tokens_marked_as_not_special_stay_in_text() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    config = {"added_tokens_decoder": {"256": {"content": "<think>", "special": False}}}
    tokenizer = TiktokenTokenizer(ranks, config)
    assert tokenizer.decode(tokenizer.encode("<think>x"), skip_special=True) == "<think>x"


def test_ids_without_meaning_have_no_bytes() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([97, 10**6, 98]) == "ab"


def test_named_tokens_come_from_the_configuration() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.eos_token_id == tokenizer.special_id("[EOS]")
    assert tokenizer.bos_token_id == tokenizer.special_id("[BOS]")
    ranks = {bytes([byte]): byte for byte in range(256)}
    bare = TiktokenTokenizer(ranks, {"eos_token": {"content": "<|reserved_token_256|>"}})
    assert bare.eos_token_id == 256
    assert bare.bos_token_id is None


def test_no_bos_is_added() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.encode("a", add_special=True) == [97]


def test_checkpoint_directory_with_tiktoken_is_loaded(tmp_path: Path) -> None:
    write_tiktoken(tmp_path, {"added_tokens_decoder": {str(BASE): {"content": "[BOS]"}}})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("[BOS]hello") == [BASE, *tiny_tokenizer().encode("hello")]


@pytest.mark.parametrize("bad", ["!!! 3", "YQ== x", "YQ==", ""])
def test_broken_tiktoken_file_names_the_file(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_text(bad + "\n")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model"):
        read_ranks(path)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="object"):
        load_tokenizer(tmp_path)


def byte_level_file(path: Path) -> tokenizers.Tokenizer:
    """Write a byte-level `tokenizer.json` as DeepSeek-V3's is, with BOS by template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: rank for rank, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.add_tokens(["<tool>"])
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    return tokenizer


@pytest.mark.parametrize("text", [*TEXTS, "a<eos><tool>你"])
def test_byte_level_tokenizer_json_agrees_with_the_library(tmp_path: Path, text: str) -> None:
    library = byte_level_file(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special=True) == library.encode(text).ids
    for skip in (True, False):
        expected = library.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special=skip) == expected
    assert tokenizer.bos_token_id == library.token_to_id("<bos>")


def test_what_training_cut_or_filled_is_not_cut_or_filled_here(tmp_path: Path) -> None:
    """A `tokenizer.json` keeps both settings. transformers sets them anew for every call."""
    library = byte_level_file(tmp_path)
    whole = library.encode("hello world", add_special_tokens=False).ids
    library.enable_truncation(4)
    library.enable_padding(length=32, pad_token="<eos>")
    library.save(str(tmp_path / "tokenizer.json"))
    for allow_special in (True, False):
        encoded = load_tokenizer(tmp_path).encode("hello world", allow_special=allow_special)
        assert encoded == whole


def test_special_tokens_of_older_libraries_are_found(tmp_path: Path) -> None:
    byte_level_file(tmp_path)
    named = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    found = {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert load_tokenizer(tmp_path).special_tokens == found
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}}')
    assert load_tokenizer(tmp_path).special_tokens == {}


@pytest.mark.parametrize(
    "config",
    [{"bos_token": "<new>"}, {"added_tokens_decoder": {"300": {"content": "<new>"}}}],
)
def test_a_token_that_only_the_configuration_knows_is_refused(
    tmp_path: Path, config: dict[str, object]
) -> None:
    byte_level_file(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: it lacks the token '<new>'"):
        load_tokenizer(tmp_path)


def test_byte_fallback_tokenizer_json_agrees_with_the_library(tmp_path: Path) -> None:
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {"▁": 257, "h": 258, "i": 259, "▁h": 260}
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "h")], byte_fallback=True, unk_token="<unk>")
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for text in ("hi", "hi hi", "h你 i"):
        ids = tokenizer.encode(text)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids) == library.decode(ids) == text


def test_other_kinds_of_tokenizer_json_are_refused(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="WordPiece"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_special_text_stays_text_in_tokenizer_json_when_asked(tmp_path: Path) -> None:
    byte_level_file(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    eos = tokenizer.eos_token_id
    assert tokenizer.encode("<eos>") == [eos]
    assert eos not in tokenizer.encode("<eos>", allow_special=False)


def test_long_texts_are_cut_without_losing_a_character() -> None:
    text = "ab " * 10 + "x" * (2 * MAX_RUN_CHARS + 7) + " " * (MAX_RUN_CHARS + 1) + "end"
    pieces = list(cut_text(text))
    assert "".join(pieces) == text
    assert [len(piece) for piece in pieces] == [
        30 + MAX_RUN_CHARS,
        MAX_RUN_CHARS,
        7 + MAX_RUN_CHARS,
        4,
    ]
    assert list(cut_text(text, from_end=True)) == pieces[::-1]
    long = "word " * (MAX_ENCODE_CHARS // 4)
    assert "".join(cut_text(long)) == long
    assert max(map(len, cut_text(long))) <= MAX_ENCODE_CHARS


def test_runs_just_below_the_limit_are_searched_once() -> None:
    text = ("x" * MAX_RUN_CHARS + " ") * 20  # took minutes when each character began a search
    assert "".join(cut_text(text)) == text


@pytest.mark.skipif(
    "KIMI_K2_TOKENIZER" not in os.environ,
    reason="KIMI_K2_TOKENIZER names no directory with Kimi-K2's own tiktoken.model",
)
def test_golden_ids_of_kimi_k2() -> None:
    tokenizer = load_tokenizer(Path(os.environ["KIMI_K2_TOKENIZER"]))
    assert tokenizer.encode("Hello world") == [19180, 2695]
    assert tokenizer.encode("你好世界") == [33845, 2243]
    assert tokenizer.special_id("<|im_end|>") == 163586
    assert tokenizer.special_id("<|tool_call_begin|>") == 163597
    assert tokenizer.vocab_size == 163840


LONG = ("the hell " * 3 + "你好 " + "x" * 40 + "\n") * 20_000


@pytest.mark.parametrize("num_tokens", [0, 1, 1000, 250_000, 10**9])
def test_a_window_has_the_tokens_of_the_whole_at_its_end(num_tokens: int) -> None:
    tokenizer = tiny_tokenizer()
    assert len(LONG) > 3 * MAX_ENCODE_CHARS
    whole = tokenizer.encode(LONG)
    first = tokenizer.encode(LONG, window=Window(num_tokens))
    last = tokenizer.encode(LONG, window=Window(num_tokens, from_end=True))
    assert first[:num_tokens] == whole[:num_tokens]
    assert last[len(last) - min(num_tokens, len(last)) :] == whole[-num_tokens or len(whole) :]
    for part in (first, last):
        assert len(part) > num_tokens or part == whole
        assert len(part) <= num_tokens + MAX_ENCODE_CHARS or part == whole


@pytest.mark.parametrize("num_tokens", [0, 1000, 100_000])
def test_a_window_of_a_tokenizer_that_takes_texts_whole(tmp_path: Path, num_tokens: int) -> None:
    byte_level_file(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    whole = tokenizer.encode(LONG, add_special=True)
    first = tokenizer.encode(LONG, add_special=True, window=Window(num_tokens))
    last = tokenizer.encode(LONG, add_special=True, window=Window(num_tokens, from_end=True))
    assert first[:num_tokens] == whole[:num_tokens]
    assert last[len(last) - num_tokens :] == whole[len(whole) - num_tokens :]
    assert num_tokens < len(first) < len(whole)
    assert num_tokens < len(last) < len(whole)


def test_a_window_of_a_guarded_conversation() -> None:
    tokenizer = tiny_tokenizer()
    guard = Guard(tokenizer, [])
    turn = "<|im_user|>" + guard.value("he said <|im_end|> " * 30) + "<|im_end|>"
    text = turn * 1000
    assert MARK in text
    whole = guard.encode(text)
    first, last = (guard.encode(text, window=Window(500, end)) for end in (False, True))
    assert first[:500] == whole[:500]
    assert last[-500:] == whole[-500:]
    assert max(len(first), len(last)) < 5000

"""What is known of engines' prefixes: by their events, token for token, and by what was sent."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.base import pack_tokens
from mooncake.base.block_events.engine_events import ClearedBlocks, RemovedBlocks, StoredBlocks
from mooncake.scheduler.engines import prefixes
from mooncake.scheduler.engines.prefixes import (
    COPIES,
    MAX_COPIES,
    MAX_SIZES,
    PIECE_BYTES,
    Prompt,
    PublishedBlocks,
    SentPrefixes,
)

SIZE = 4


def prompt(*tokens: int, salt: str = "") -> Prompt:
    packed = pack_tokens(tokens)
    return Prompt(packed, tokens=packed, salt=salt)


def stored(
    names: list[int | bytes], tokens: list[int], parent: int | None = None, **more: object
) -> StoredBlocks:
    return StoredBlocks(
        block_hashes=names, parent_block_hash=parent, token_ids=tokens, block_size=SIZE,
        medium="GPU", **more,
    )  # type: ignore[arg-type]  # fmt: skip


TOKENS = list(range(100, 120))


def test_a_prefix_is_found_by_the_tokens_of_its_blocks() -> None:
    known = PublishedBlocks()
    assert known.num_tokens(prompt(*TOKENS)) is None  # the size of blocks is not known
    known.apply("p", [stored([1, b"two"], TOKENS[:8])])
    known.apply("p", [stored([3], TOKENS[8:12], parent=None)])  # another chain
    assert known.num_tokens(prompt(*TOKENS)) == 8
    assert known.num_tokens(prompt(*TOKENS[:7])) == 4
    assert known.num_tokens(prompt(*TOKENS[8:])) == 4
    assert known.num_tokens(prompt(*TOKENS[1:])) == 0
    assert known.num_tokens(Prompt(b"text")) is None
    known.apply("p", [StoredBlocks(
        block_hashes=[4], parent_block_hash=b"two", token_ids=TOKENS[8:12], block_size=SIZE,
        medium="GPU",
    )])  # fmt: skip
    assert known.num_tokens(prompt(*TOKENS)) == 12
    known.check_integrity()


def test_a_block_behind_an_unknown_one_is_left_out() -> None:
    known = PublishedBlocks()
    known.apply("p", [stored([2], TOKENS[4:8], parent=1)])
    assert len(known) == 0


def test_a_block_is_known_until_no_medium_and_no_process_holds_it() -> None:
    known = PublishedBlocks()
    known.apply("p", [stored([1], TOKENS[:4])])
    known.apply("p", [StoredBlocks(
        block_hashes=[1], token_ids=TOKENS[:4], block_size=SIZE, medium="CPU"
    )])  # fmt: skip
    known.apply("q", [stored([9], TOKENS[:4])])  # another process may name it otherwise
    for source, name, medium in (("p", 1, "GPU"), ("p", 1, "CPU"), ("q", 9, "CPU")):
        known.apply(source, [RemovedBlocks(block_hashes=[name], medium=medium)])
        assert known.num_tokens(prompt(*TOKENS)) == 4
        known.check_integrity()
    known.apply("q", [RemovedBlocks(block_hashes=[9, 77], medium="GPU")])
    assert known.num_tokens(prompt(*TOKENS)) == 0


def test_what_a_process_has_cleared_or_lost_is_forgotten() -> None:
    known = PublishedBlocks()
    known.apply("p", [stored([1, 2], TOKENS[:8])])
    known.apply("q", [stored([1], TOKENS[:4])])
    known.apply("p", [ClearedBlocks()])
    assert known.num_tokens(prompt(*TOKENS)) == 4
    known.forget("q")
    assert known.num_tokens(prompt(*TOKENS)) == 0
    known.check_integrity()


def test_salts_are_part_of_the_first_block() -> None:
    known = PublishedBlocks()
    known.apply("p", [stored([1, 2], TOKENS[:8], extra_keys=[["salt"], None])])
    assert known.num_tokens(prompt(*TOKENS, salt="salt")) == 8
    assert known.num_tokens(prompt(*TOKENS)) == 0
    assert known.num_tokens(prompt(*TOKENS, salt="other")) == 0


def test_blocks_of_images_are_found_by_no_tokens() -> None:
    known = PublishedBlocks()
    known.apply("p", [stored([1, 2], TOKENS[:8], extra_keys=[None, [["image", 0]]])])
    assert known.num_tokens(prompt(*TOKENS)) == 4


def test_the_oldest_blocks_go_first() -> None:
    known = PublishedBlocks(max_blocks=3)
    for name in range(5):
        known.apply("p", [stored([name], [name] * SIZE)])
        known.check_integrity()
    assert [known.num_tokens(prompt(*[name] * SIZE)) for name in range(5)] == [0, 0, 4, 4, 4]


def test_an_engine_has_few_sizes_of_blocks() -> None:
    known = PublishedBlocks()
    for size in range(1, 100):
        known.apply("p", [StoredBlocks(
            block_hashes=[size], token_ids=[7] * size, block_size=size,
        )])  # fmt: skip
    assert known.sizes == set(range(1, MAX_SIZES + 1))
    assert known.num_tokens(prompt(*[7] * 100)) == MAX_SIZES
    known.check_integrity()


def test_copies_of_a_block_are_remembered_only_so_often() -> None:
    known = PublishedBlocks(max_blocks=1000)
    for name in range(MAX_COPIES + 50):
        known.apply("p", [stored([name], [7] * SIZE)])
    known.check_integrity()
    known.apply("p", [RemovedBlocks(block_hashes=list(range(MAX_COPIES - 1)), medium="GPU")])
    assert known.num_tokens(prompt(*[7] * SIZE)) == SIZE
    known.apply("p", [RemovedBlocks(block_hashes=[MAX_COPIES - 1], medium="GPU")])
    assert known.num_tokens(prompt(*[7] * SIZE)) == 0


def test_copies_of_an_engine_are_remembered_only_so_often() -> None:
    known = PublishedBlocks(max_blocks=3)
    for name in range(2):
        for group in range(2 * COPIES):
            known.apply("p", [stored([name], [name] * SIZE, group_idx=group)])
            known.check_integrity()
    assert [known.num_tokens(prompt(*[name] * SIZE)) for name in range(2)] == [0, SIZE]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_it_agrees_with_a_list_of_what_is_held(draw: random.Random) -> None:
    """Blocks of a few short chains, stored and removed in any order and medium."""
    known, held = PublishedBlocks(), set()
    chains = {first: [first * 10 + n for n in range(SIZE * 3)] for first in (1, 2)}
    for _ in range(30):
        first, at = draw.choice([1, 2]), draw.randrange(3)
        medium, source = draw.choice(["GPU", "CPU"]), draw.choice("pq")
        name, tokens = first * 100 + at, chains[first]
        if draw.random() < 0.6:
            behind = {key for key in held if key[0] == source and key[1] == name - 1}
            if at and not behind:
                continue
            known.apply(source, [StoredBlocks(
                block_hashes=[name], parent_block_hash=name - 1 if at else None,
                token_ids=tokens[at * SIZE : (at + 1) * SIZE], block_size=SIZE, medium=medium,
            )])  # fmt: skip
            held.add((source, name, medium))
        else:
            known.apply(source, [RemovedBlocks(block_hashes=[name], medium=medium)])
            held.discard((source, name, medium))
        known.check_integrity()
        for begin, whole in chains.items():
            names = {name for _, name, _ in held}
            run = next((n for n in range(3) if begin * 100 + n not in names), 3)
            assert (known.num_tokens(prompt(*whole)) or 0) == run * SIZE


def test_what_was_sent_is_remembered_by_its_text() -> None:
    sent = SentPrefixes()
    first, second = Prompt(b"a" * PIECE_BYTES * 4), Prompt(b"a" * PIECE_BYTES * 2 + b"b" * 2000)
    assert sent.share(first) == 0
    sent.begin(first)
    assert sent.share(first) == sent.share(first, of_running=True) == 1
    assert sent.share(second) == 2 / len(second.pieces)
    assert sent.share(Prompt(b"short")) == 0
    sent.begin(first)
    sent.end(first)
    assert sent.share(first, of_running=True) == 1  # the other one runs
    sent.end(first)
    assert (sent.share(first), sent.share(first, of_running=True)) == (1, 0)
    sent.forget()
    assert sent.share(first) == 0
    sent.check_integrity()


def test_the_tails_of_what_was_not_used_for_longest_go_first() -> None:
    sent = SentPrefixes(max_pieces=4)
    old, new = Prompt(b"a" * PIECE_BYTES * 3), Prompt(b"b" * PIECE_BYTES * 3)
    sent.begin(old)
    sent.begin(new)
    sent.check_integrity()
    assert (sent.share(old), sent.share(new)) == (1 / 3, 1)


def test_the_end_of_a_very_long_prompt_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.scheduler.engines.prefixes.MAX_PROMPT_BYTES", 2 * PIECE_BYTES)
    packed = pack_tokens(list(range(1000)))
    long = Prompt(packed, tokens=packed)
    assert (len(long.pieces), long.num_tokens) == (2, 1000)
    assert len(long.blocks(SIZE) or ()) == 2 * PIECE_BYTES // (4 * SIZE)


def test_texts_of_other_models_and_salts_share_nothing() -> None:
    sent = SentPrefixes()
    text = b"a" * PIECE_BYTES
    sent.begin(Prompt(text, model="m", salt="s"))
    assert sent.share(Prompt(text, model="m", salt="s")) == 1
    assert sent.share(Prompt(text, model="n", salt="s")) == 0
    assert sent.share(Prompt(text, model="m")) == 0


def test_whether_tokens_are_known_is_said_without_hashing_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, tokens = Prompt(b"a" * 4000), prompt(*range(1000))
    monkeypatch.setattr(prefixes, "extend_chain", None)
    assert not text.has_tokens
    assert tokens.has_tokens


def test_tokens_that_come_later_count_as_if_they_had_been_there_at_first() -> None:
    packed = pack_tokens(TOKENS)
    later, at_first = Prompt(b"a" * 4000, salt="s"), Prompt(b"a" * 4000, tokens=packed, salt="s")
    assert later.num_tokens == 1000
    later.take_tokens(packed)
    assert later.num_tokens == at_first.num_tokens == len(TOKENS)
    assert later.blocks(SIZE) == at_first.blocks(SIZE)
    assert later.pieces == at_first.pieces

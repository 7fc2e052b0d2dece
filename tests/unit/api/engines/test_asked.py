"""What of a request decides its placement, and what is changed on the way to an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mooncake.api.engines.asked import CHAT, COMPLETIONS, MAX_COUNT, MESSAGES, Asked, tenant_salt
from mooncake.base import pack_tokens
from mooncake.scheduler.engines.prefixes import Prompt


def asked(path: str = CHAT, **fields: Any) -> Asked:
    return Asked.of(path, json.dumps(fields).encode())


def turn(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text * 100} for text in texts]


def shared(first: Prompt, second: Prompt) -> int:
    """Return how many pieces two prompts share."""
    pairs = zip(first.pieces, second.pieces, strict=False)
    return sum(left == right for left, right in pairs)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_the_next_turn_begins_with_the_turns_before_it(path: str) -> None:
    tools = [{"name": "a tool", "text": "b" * 600}]
    first = asked(path, messages=turn("one "), tools=tools, max_tokens=3).prompt()
    next_turn = asked(path, messages=turn("one ", "two "), tools=tools, stream=True).prompt()
    assert shared(first, next_turn) == len(first.pieces) > 3
    others = asked(path, messages=turn("one ")).prompt()
    assert shared(first, others) == 0


def test_a_system_prompt_of_messages_comes_first() -> None:
    system = "s" * 600
    first, second = (
        asked(MESSAGES, system=system, messages=turn(text)).prompt() for text in ("xxxxx", "yyyyy")
    )
    assert 2 <= shared(first, second) < len(first.pieces)


def test_a_completion_is_its_text_or_its_tokens() -> None:
    assert asked(COMPLETIONS, prompt="a" * 800).prompt().blocks(4) is None
    tokens = list(range(100))
    known = asked(COMPLETIONS, prompt=tokens).prompt()
    assert known.num_tokens == 100
    packed = pack_tokens(tokens)
    assert known.blocks(4) == Prompt(packed, tokens=packed).blocks(4)
    several = asked(COMPLETIONS, prompt=[tokens, [1]]).prompt()
    assert several.blocks(4) == known.blocks(4)
    for wrong in (None, 3, [1.5], [-1], [None], {}, []):
        assert asked(COMPLETIONS, prompt=wrong).prompt().num_tokens == 1


def test_what_an_engine_needs_to_tokenize() -> None:
    fields = {"model": "m", "messages": turn("a"), "max_tokens": 3, "chat_template_kwargs": {}}
    body = asked(**fields, stream=True).tokenize_body()
    assert body is not None
    assert json.loads(body) == {
        "model": "m", "messages": turn("a"), "chat_template_kwargs": {},
    }  # fmt: skip
    assert asked(COMPLETIONS, prompt="text", n=2).tokenize_body() == b'{"prompt":"text"}'
    assert asked(COMPLETIONS, prompt=[1]).tokenize_body() is None
    assert asked(MESSAGES, messages=[]).tokenize_body() is None


def test_salts_of_tenants_never_meet() -> None:
    pairs = [("a", ""), ("a", "b"), ("ab", ""), ("", "ab"), ("ab", "c"), ("a", "bc")]
    assert len({tenant_salt(*pair) for pair in pairs}) == len(pairs)


def test_without_keys_nothing_of_a_whole_answer_is_changed() -> None:
    body = asked(messages=[], cache_salt="s", priority=3, odd=[1.5, None])
    body.run_as("", is_operator=True, seed=None)
    body.count_tokens()
    assert json.loads(body.body()) == {
        "messages": [], "cache_salt": "s", "priority": 3, "odd": [1.5, None],
    }  # fmt: skip


def test_a_stream_tells_how_many_tokens_there_were() -> None:
    body = asked(stream=True, stream_options={"continuous_usage_stats": False})
    body.count_tokens()
    assert body.adds_usage
    assert body.fields["stream_options"] == {
        "continuous_usage_stats": False, "include_usage": True,
    }  # fmt: skip
    wanted = asked(stream=True, stream_options={"include_usage": True})
    wanted.count_tokens()
    assert not wanted.adds_usage
    messages = asked(MESSAGES, stream=True)
    messages.count_tokens()
    assert "stream_options" not in messages.fields


def test_a_seed_of_the_client_counts() -> None:
    body = asked(seed=4)
    body.run_as("", is_operator=True, seed=2**64 - 1)
    assert body.fields["seed"] == 4
    body = asked()
    body.run_as("", is_operator=True, seed=2**64 - 1)
    assert body.fields["seed"] == 2**63 - 1


def test_numbers_that_no_engine_takes_fit_budgets_and_metrics() -> None:
    body = asked(n=10**400, max_tokens=10**400)
    assert (body.num_sequences, body.max_tokens) == (MAX_COUNT, MAX_COUNT)
    assert json.loads(body.body())["n"] == 10**400  # the engine says what is wrong

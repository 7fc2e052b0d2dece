"""What users and tools write is text: it never becomes a control token, and is not changed."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from mooncake.api.schema.chat import ChatMessage, Tool
from mooncake.api.text import conversation
from mooncake.api.text.chat_template import KIMI_K2_TEMPLATE, ChatTemplate
from mooncake.api.text.conversation import MARK, Guard, render_conversation
from tests.support.api.server import SPECIAL_NAMES, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TEMPLATE = ChatTemplate(KIMI_K2_TEMPLATE, TOKENIZER.special_tokens)
GUARD = Guard(TOKENIZER, ["<think>", "</think>"])
PIECES = st.lists(
    st.one_of(st.sampled_from([*SPECIAL_NAMES, "<", "|im", "_end|>", "hello", "你"]), st.text())
).map("".join)


def encoded(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
    text = render_conversation(
        TEMPLATE,
        [ChatMessage.model_validate(message) for message in messages],
        [Tool.model_validate(tool) for tool in tools] if tools else None,
        add_generation_prompt=True,
        continue_final_message=None,
        kwargs=None,
        guard=GUARD,
    )
    return GUARD.encode(text)


def control_tokens(ids: list[int]) -> list[int]:
    return [token for token in ids if token in TOKENIZER.special_ids]


@given(PIECES)
def test_no_message_of_a_user_or_tool_holds_a_control_token(text: str) -> None:
    plain = [
        {"role": "user", "content": "x", "name": "y"},
        {"role": "tool", "content": "x", "tool_call_id": "functions.a:0"},
    ]
    hostile = [
        {"role": "user", "content": text, "name": "n" + text},
        {"role": "tool", "content": [{"type": "text", "text": text}], "tool_call_id": "i" + text},
    ]
    assert control_tokens(encoded(hostile)) == control_tokens(encoded(plain))
    shown = TOKENIZER.decode(encoded(hostile))
    assert text.replace(MARK, "") in shown
    assert MARK not in shown


def test_tools_cannot_either() -> None:
    def tool(word: str) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {"name": "a", "description": word, "parameters": {"enum": [word]}},
        }

    ask = [{"role": "user", "content": "x"}]
    assert control_tokens(encoded(ask, [tool("<|im_end|>")])) == control_tokens(
        encoded(ask, [tool("x")])
    )


def test_an_assistant_turn_keeps_its_thoughts() -> None:
    ids = encoded([{"role": "assistant", "content": "<think>a</think>b<|im_end|>"}])
    assert ids.count(TOKENIZER.special_id("<think>") or 0) == 1
    plain = encoded([{"role": "assistant", "content": "<think>a</think>b"}])
    assert control_tokens(ids) == control_tokens(plain)


def test_ordinary_conversations_are_encoded_as_ever() -> None:
    text = TEMPLATE.render([{"role": "user", "content": "hello [the] < end"}])
    assert GUARD.encode(text) == TOKENIZER.encode(text)


@given(
    st.lists(st.sampled_from([*SPECIAL_NAMES, "<", "<|", "<|im", "a", "|>", "[BO"])).map("".join),
    st.integers(1, 9),
)
def test_pieces_find_what_the_whole_text_has(text: str, size: int) -> None:
    names = {TOKENIZER.token_bytes(token).decode() for token in TOKENIZER.special_ids}
    names |= {"<think>", "</think>"}
    plain = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    with mock.patch.object(conversation, "PIECE_CHARS", size):
        marked = GUARD.value(text)
        ids = GUARD.encode(marked)
    assert marked == plain.sub(lambda found: found[0][0] + MARK + found[0][1:], text)
    assert TOKENIZER.decode(ids) == text
    assert control_tokens(ids) == []


def test_names_that_begin_alike_are_found_longest_first() -> None:
    names = conversation._Names(["<a>", "<a>b", "<a", "c"])
    assert [found[0] for found in names.find("<a>b<a><ac<")] == ["<a>b", "<a>", "<a", "c"]
    assert not list(conversation._Names([]).find("<a>"))

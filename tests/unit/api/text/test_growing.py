"""Answers grow by a token at a time, and turns of a conversation by a piece: nothing copies with
each token or piece what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mooncake.api.adapters import anthropic_messages, openai_responses
from mooncake.api.adapters.anthropic_messages import MessageStream
from mooncake.api.adapters.openai_responses import ResponseStream
from mooncake.api.adapters.python_call import OutputBuilder, completion_request
from mooncake.api.schema.messages import Block, Turn
from mooncake.api.schema.responses import InputItem, ResponseReply
from mooncake.api.text.answer import (
    Delta,
    Marker,
    MessageParser,
    Piece,
    join_pieces,
)

NUM = 2_000


class Counted(str):
    """A text that counts the characters which additions to it, or of it, copy."""

    num_copied = 0

    def __add__(self, other: str) -> Counted:
        return self._sum(str(self), str(other))

    def __radd__(self, other: str) -> Counted:
        return self._sum(str(other), str(self))

    @classmethod
    def _sum(cls, left: str, right: str) -> Counted:
        cls.num_copied += len(left) + len(right)
        return cls("".join((left, right)))


@pytest.fixture(autouse=True)
def _counting() -> Iterator[None]:
    Counted.num_copied = 0
    yield
    assert Counted.num_copied <= NUM * 10, "what was there is copied again and again"


def texts(*, is_reasoning: bool = False) -> list[Piece]:
    return [Piece(text=Counted("word "), is_reasoning=is_reasoning) for _ in range(NUM)]


def arguments() -> list[Piece]:
    first = Piece(call=0, call_id="functions.go:0", name="go", text=Counted("{"))
    return [first, *(Piece(call=0, text=Counted("     ")) for _ in range(NUM))]


def deltas(pieces: list[Piece]) -> Iterator[Delta]:
    for number, piece in enumerate(pieces):
        yield Delta(index=0, pieces=[piece], tokens=[number], logprobs=[], runs=[])


KINDS: list[Callable[[], list[Piece]]] = [texts, lambda: texts(is_reasoning=True), arguments]


def test_reasoning_that_comes_in_many_items() -> None:
    item = InputItem.model_construct(type="reasoning", content=Counted("word "))
    [turn] = openai_responses._turns([item] * NUM)
    assert turn["reasoning"] == "word " * NUM


def test_turns_of_many_blocks() -> None:
    block = Block.model_construct(type="text", text=Counted("word "))
    turn = Turn.model_construct(role="user", content=[block] * NUM)
    assert anthropic_messages._other_turns(turn) == [{"role": "user", "content": "word " * NUM}]


def test_counting_sees_copies() -> None:
    held = SimpleNamespace(text=Counted(""))
    for _ in range(10):
        held.text += "ab"
    assert Counted.num_copied == sum(range(2, 22, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_async_llm(kind: Callable[[], list[Piece]]) -> None:
    call: Any = SimpleNamespace(
        requests=[SimpleNamespace(prompt_tokens=[1])], call_id="c", num_cached_tokens=0
    )
    speller: Any = None
    builder = OutputBuilder(call, completion_request("x", None, {}), speller, None)
    outputs = []
    for delta in deltas(kind()):
        builder.add([delta])
        outputs.append(builder.output())
    expected = "word " * NUM if kind is texts else ""
    assert outputs[-1].text == expected
    assert [len(each.text) for each in outputs[:3]] == [len(expected[: 5 * n]) for n in (1, 2, 3)]
    assert outputs[0] == outputs[0]
    assert (outputs[0] == outputs[1]) is False
    assert repr(outputs[0]).count("text=") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_responses_and_messages(
    kind: Callable[[], list[Piece]], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = msgspec.json.Encoder(enc_hook=str).encode  # `Counted` is not quite a text
    monkeypatch.setattr(openai_responses, "encode", encode)
    monkeypatch.setattr(anthropic_messages, "encode", encode)
    reply = ResponseReply(
        id="resp_1", created_at=0, instructions=None, max_output_tokens=None, metadata={},
        model="m", parallel_tool_calls=True, reasoning={}, temperature=1.0, text={},
        tool_choice="auto", tools=[], top_logprobs=0, top_p=1.0, truncation="disabled",
    )  # fmt: skip
    response = ResponseStream(reply, None)
    call: Any = SimpleNamespace(
        call_id="msg_1", num_prompt_tokens=1, num_output_tokens=NUM, num_cached_tokens=0,
        num_reasoning_tokens=0, cache=None,
    )  # fmt: skip
    message = MessageStream(call, "m")
    for delta in deltas(kind()):
        assert response.chunk(call, delta)
        assert message.chunk(call, delta)
    done = b"".join(response.end(call))
    assert done.count(b"word ") in (0, NUM * 4), "each of its last events has the whole text"
    message.end(call)
    [block], [item] = message.reply.content, reply.output
    text = "word " * NUM
    shown: Any = (block, item)
    if kind is texts:
        assert (shown[0].text, shown[1].content[0].text) == (text, text)
    elif kind is arguments:
        assert shown[1].arguments == "{" + " " * 5 * NUM
    else:
        assert (shown[0].thinking, shown[1].content[0].text) == (text, text)


def test_a_whole_answer_is_put_together_once() -> None:
    ids = dict(enumerate(Marker))
    parser = MessageParser(ids, reasoning_open=False, max_calls=None)
    for _ in range(NUM):
        parser.text(Counted("word "))
    parser.marker(Marker.SECTION_BEGIN)
    parser.marker(Marker.CALL_BEGIN)
    parser.text("functions.go:0")
    parser.marker(Marker.ARGUMENT_BEGIN)
    for _ in range(NUM):
        parser.text(Counted("[1] "))
    text, call = parser.take()
    assert (text.text, call.text) == ("word " * NUM, "[1] " * NUM)
    assert (call.call_id, call.name) == ("functions.go:0", "go")


def test_joining_keeps_order_and_calls() -> None:
    pieces: list[Piece] = [
        Piece(text="a", is_reasoning=True), Piece(text="b", is_reasoning=True),
        Piece(text="c"), Piece(call=0, call_id="i", name="f"),
        Piece(call=0, text="{"), Piece(call=0, text="}"),
        Piece(call=1, call_id="j", name="g", text="{}"), Piece(text="d"),
    ]  # fmt: skip
    assert join_pieces(pieces) == [
        Piece(text="ab", is_reasoning=True), Piece(text="c"),
        Piece(call=0, call_id="i", name="f", text="{}"),
        Piece(call=1, call_id="j", name="g", text="{}"), Piece(text="d"),
    ]  # fmt: skip
    assert join_pieces([]) == []

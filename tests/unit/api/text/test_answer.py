"""Reasoning, content and tool calls are cut the same way at every split of a golden corpus."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from mooncake.api.generation.generation import Choice, TextOptions
from mooncake.api.text.answer import (
    THINK_MARKERS,
    Marker,
    MessageParser,
    Piece,
    find_markers,
    function_name,
    reasoning_is_open,
)
from mooncake.api.text.tokenizer import TiktokenTokenizer
from mooncake.base import GenerateRequest, SamplingParams, pack_tokens
from tests.support.api.server import answer, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MARKERS = find_markers(TOKENIZER, tuple(Marker))
EOS = TOKENIZER.special_id("<|im_end|>") or 0

S, E = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
B, A, Z = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class Seen(msgspec.Struct, kw_only=True):
    """What a client has put together from a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = []
    finish: str = "stop"


CORPUS: dict[str, tuple[str, Seen]] = {
    "plain": ("hello 你好", Seen(content="hello 你好")),
    "one call": (
        f'ok {S}{B}functions.f:0{A}{{"a": "你"}}{Z}{E}',
        Seen(content="ok ", calls=[("functions.f:0", "f", '{"a": "你"}')], finish="tool_calls"),
    ),
    "several calls": (
        f"{S}{B}functions.f:3{A}{{}}{Z}{B}functions.g:4{A}[1]{Z}{E}",
        Seen(
            calls=[("functions.f:3", "f", "{}"), ("functions.g:4", "g", "[1]")],
            finish="tool_calls",
        ),
    ),
    "white space around": (
        f"{S}\n{B} functions.f:0 {A} {{}}{Z}\n{B}functions.f:1{A}{{}}{Z} {E}",
        Seen(
            calls=[("functions.f:0", "f", "{}"), ("functions.f:1", "f", "{}")],
            finish="tool_calls",
        ),
    ),
    "odd names": (
        f"{S}{B}functions.a-b.c_d:0{A}1{Z}{B}functions.x:y:1{A}2{Z}{E}",
        Seen(
            calls=[("functions.a-b.c_d:0", "a-b.c_d", "1"), ("functions.x:y:1", "x:y", "2")],
            finish="tool_calls",
        ),
    ),
    "without functions.": (
        f"{S}{B}search:2{A}{{}}{Z}{E}",
        Seen(calls=[("search:2", "search", "{}")], finish="tool_calls"),
    ),
    "without index": (
        f"{S}{B}functions.f{A}{{}}{Z}{E}",
        Seen(calls=[("functions.f:0", "f", "{}")], finish="tool_calls"),
    ),
    "no arguments": (
        f"{S}{B}functions.f:0{A}{Z}{E}",
        Seen(calls=[("functions.f:0", "f", "{}")], finish="tool_calls"),
    ),
    "section not ended": (
        f"{S}{B}functions.f:0{A}{{}}{Z}",
        Seen(calls=[("functions.f:0", "f", "{}")], finish="tool_calls"),
    ),
    "call not ended": (
        f'{S}{B}functions.f:0{A}{{"a": 1}}',
        Seen(calls=[("functions.f:0", "f", '{"a": 1}')], finish="tool_calls"),
    ),
    "id not ended": (f"hm {S}{B}functions.f", Seen(content="hm ")),
    "no section around": (
        f"{B}functions.f:0{A}{{}}{Z}",
        Seen(calls=[("functions.f:0", "f", "{}")], finish="tool_calls"),
    ),
    "next call without end": (
        f"{S}{B}functions.f:0{A}1{B}functions.g:1{A}2{Z}{E}",
        Seen(calls=[("functions.f:0", "f", "1"), ("functions.g:1", "g", "2")], finish="tool_calls"),
    ),
    "thinking": ("<think>hm</think>yes", Seen(reasoning="hm", content="yes")),
    "thinking twice": (
        "<think>a</think>b<think>c</think>d",
        Seen(reasoning="ac", content="bd"),
    ),
    "thinking not ended": ("<think>hm hello", Seen(reasoning="hm hello")),
    "call inside thinking": (
        f"<think>let me{S}{B}functions.f:0{A}{{}}{Z}{E}done",
        Seen(
            reasoning="let me",
            content="done",
            calls=[("functions.f:0", "f", "{}")],
            finish="tool_calls",
        ),
    ),
    "stray ends": (f"a{E}b{Z}c{A}d</think>e", Seen(content="abcde")),
    "markers in arguments": (
        f"{S}{B}functions.f:0{A}1<think>2{Z}{E}",
        Seen(calls=[("functions.f:0", "f", "12")], finish="tool_calls"),
    ),
}


def put_together(
    pieces: list[tuple[str, str, list[tuple[int, str | None, str | None, str]]]],
) -> Seen:
    seen = Seen()
    for content, reasoning, calls in pieces:
        seen.content += content
        seen.reasoning += reasoning
        for index, call_id, name, arguments in calls:
            if index == len(seen.calls):
                assert call_id is not None
                assert name is not None
                seen.calls.append((call_id, name, arguments))
            else:
                assert index == len(seen.calls) - 1, "calls come one after the other"
                assert (call_id, name) == (None, None), "id and name come once"
                old = seen.calls[-1]
                seen.calls[-1] = (old[0], old[1], old[2] + arguments)
    return seen


def play(text: str, cuts: tuple[int, ...], *, max_calls: int | None = None) -> Seen:
    """Answer with `text`, its tokens grouped as `cuts` says."""
    asked = GenerateRequest(
        request_id="r",
        prompt=pack_tokens([1]),
        sampling=SamplingParams(max_tokens=10_000, stop_token_ids=frozenset({EOS})),
    )
    choice = Choice(0, asked, TOKENIZER, TextOptions(markers=MARKERS, max_calls=max_calls), [EOS])
    events = answer(asked, TOKENIZER.encode(text + "<|im_end|>"), group=1)
    pieces = []
    bounds = [0, *cuts, len(events)]
    for start, end in itertools.pairwise(bounds):
        for event in events[start:end]:
            choice.feed(event)
        delta = choice.take()
        calls = [(c.call, c.call_id, c.name, c.text) for c in delta.tool_calls]
        pieces.append((delta.text, delta.reasoning, calls))
    seen = put_together(pieces)
    seen.finish = choice.finish_reason or ""
    return seen


@pytest.mark.parametrize("name", CORPUS)
def test_whole_answers(name: str) -> None:
    text, expected = CORPUS[name]
    assert play(text, ()) == expected


@pytest.mark.parametrize("name", CORPUS)
def test_every_token_by_itself_and_every_single_cut(name: str) -> None:
    text, expected = CORPUS[name]
    length = len(TOKENIZER.encode(text + "<|im_end|>")) + 1
    assert play(text, tuple(range(1, length))) == expected
    for cut in range(1, length):
        assert play(text, (cut,)) == expected, cut


@pytest.mark.parametrize("name", CORPUS)
def test_markers_never_leak(name: str) -> None:
    text, _ = CORPUS[name]
    seen = play(text, ())
    shown = seen.content + seen.reasoning + "".join(map("".join, seen.calls))
    assert "<|" not in shown
    assert "think>" not in shown


def test_spelled_markers_are_text() -> None:
    """A marker that the model spells letter by letter is no marker."""
    parser = MessageParser(MARKERS, reasoning_open=False, max_calls=None)
    for letter in f"{S}{B}":
        parser.text(letter)
    assert parser.take() == [Piece(text=f"{S}{B}")]
    assert parser.num_calls == 0


def test_further_calls_are_dropped_when_not_parallel() -> None:
    text, expected = CORPUS["several calls"]
    assert play(text, (), max_calls=1).calls == expected.calls[:1]


def test_length_keeps_what_came() -> None:
    asked = GenerateRequest(
        request_id="r", prompt=pack_tokens([1]), sampling=SamplingParams(max_tokens=25)
    )
    choice = Choice(0, asked, TOKENIZER, TextOptions(markers=MARKERS), [EOS])
    for event in answer(asked, TOKENIZER.encode(f'{S}{B}functions.f:0{A}{{"abcdefgh": 1}}{Z}')):
        choice.feed(event)
    delta = choice.take()
    assert delta.finish_reason == "length"
    assert delta.tool_calls[0].text == '{"abcdefg'


@pytest.mark.parametrize("stop", ["1", "functions", "}"])
def test_stop_strings_do_not_cut_tool_calls(stop: str) -> None:
    text = f'x {S}{B}functions.f:0{A}{{"a": 1}}{Z}{E} y{stop}z'
    asked = GenerateRequest(
        request_id="r",
        prompt=pack_tokens([1]),
        sampling=SamplingParams(max_tokens=1000, stop_token_ids=frozenset({EOS})),
    )
    options = TextOptions(markers=MARKERS, stops=(stop,))
    choice = Choice(0, asked, TOKENIZER, options, [EOS])
    for event in answer(asked, TOKENIZER.encode(text)):
        choice.feed(event)
    delta = choice.take()
    assert (delta.text, delta.stop_reason) == ("x  y", stop)
    assert delta.tool_calls[0].text == '{"a": 1}'
    assert delta.finish_reason == "tool_calls"


def test_reasoning_tokens_are_counted() -> None:
    asked = GenerateRequest(
        request_id="r",
        prompt=pack_tokens([1]),
        sampling=SamplingParams(max_tokens=1000, stop_token_ids=frozenset({EOS})),
    )
    choice = Choice(0, asked, TOKENIZER, TextOptions(markers=MARKERS), [EOS])
    for event in answer(asked, TOKENIZER.encode("<think>abc</think>de<|im_end|>")):
        choice.feed(event)
    assert choice.num_reasoning_tokens == 4, "three letters and the end"
    assert choice.num_tokens == 8


def test_template_that_opens_the_think_block() -> None:
    def is_open(prompt: str) -> bool:
        return reasoning_is_open(TOKENIZER.encode(prompt), MARKERS)

    assert is_open("a<think>")
    assert is_open("a<think>\n")
    assert not is_open("a<think></think>")
    assert not is_open("<think>a user typed this")
    assert not is_open("")
    parser = MessageParser(MARKERS, reasoning_open=True, max_calls=None)
    parser.text("hm")
    parser.marker(Marker.THINK_END)
    parser.text("yes")
    assert parser.take() == [Piece(text="hm", is_reasoning=True), Piece(text="yes")]


@pytest.mark.parametrize(
    ("call_id", "name"),
    [
        ("functions.f:0", "f"),
        ("functions.a.b-c:12", "a.b-c"),
        ("search:2", "search"),
        ("functions.f", "f"),
        ("functions.f:x", "f:x"),
        ("functions.functions.f:0", "functions.f"),
        ("", ""),
    ],
)
def test_function_names(call_id: str, name: str) -> None:
    assert function_name(call_id) == name


def test_tokenizer_without_the_markers_has_none() -> None:
    bare = TiktokenTokenizer(
        {bytes([byte]): byte for byte in range(256)},
        {"added_tokens_decoder": {"256": {"content": "<think>"}}},
    )
    assert find_markers(bare, THINK_MARKERS) == {}
    assert find_markers(bare, (Marker.THINK_BEGIN,)) == {256: Marker.THINK_BEGIN}

"""Text and bodies under random input: grouping never matters, junk is refused and no more."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from mooncake.api.errors import validation_error
from mooncake.api.generation.generation import Choice, TextOptions
from mooncake.api.routes.models import TokenizeRequest
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.completion import CompletionRequest
from mooncake.api.schema.fields import UNSUPPORTED_FIELDS
from mooncake.api.text.answer import Detokenizer, Marker, StopMatcher, find_markers
from mooncake.base import (
    GenerateRequest,
    InvalidRequest,
    RequestOutput,
    SamplingParams,
    pack_tokens,
)
from tests.support.api.server import tiny_tokenizer
from tests.support.examples import examples

TOKENIZER = tiny_tokenizer()
MARKERS = find_markers(TOKENIZER, tuple(Marker))
MIXED = st.text(st.sampled_from("ab你好🙂é \n"), max_size=30)


@given(st.text(max_size=200))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, allow_special=False)
    assert TOKENIZER.decode(ids) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=60), st.booleans())
def test_streamed_ids_give_the_decoded_text_but_for_an_unfinished_end(
    ids: list[int], skip: bool
) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special=skip)
    streamed = "".join(detokenizer.push(token) for token in ids)
    whole = TOKENIZER.decode(ids, skip_special=skip)
    assert whole in (streamed, streamed + "\ufffd")


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Look at every prefix anew: plain, quadratic, right."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text(st.sampled_from("ab你"), max_size=6), max_size=12),
    st.lists(st.text(st.sampled_from("ab你"), min_size=1, max_size=5), max_size=4),
)
@example(["aaa", "b"], ["aab"])
def test_stop_matcher_agrees_with_the_plain_search(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops, include_stop=False)
    shown, stop = "", None
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, stop) == first_stop("".join(pieces), stops)


@given(
    st.lists(
        st.one_of(st.sampled_from(sorted(MARKERS)), st.integers(32, 126), st.integers(0, 268)),
        max_size=40,
    ),
    st.lists(st.integers(0, 40), max_size=6),
    st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=2), max_size=2),
)
def test_answers_are_cut_the_same_at_every_grouping(
    tokens: list[int], cuts: list[int], stops: list[str]
) -> None:
    def play(bounds: list[int]) -> tuple[str, str, list[list[str]], str | None]:
        prompt = pack_tokens([1])
        request = GenerateRequest(request_id="r", prompt=prompt, sampling=SamplingParams())
        options = TextOptions(markers=MARKERS, stops=tuple(stops))
        choice = Choice(0, request, TOKENIZER, options, [])
        content, reasoning, calls = "", "", []
        for start, end in itertools.pairwise(bounds):
            choice.feed(
                RequestOutput(request_id="r", attempt=0, start=start, tokens=tokens[start:end])
            )
            delta = choice.take()
            content, reasoning = content + delta.text, reasoning + delta.reasoning
            for piece in delta.tool_calls:
                if piece.index == len(calls):
                    calls.append([piece.call_id or "", piece.name or "", ""])
                calls[piece.index][2] += piece.arguments
            if choice.finished:
                break
        return content, reasoning, calls, choice.finish_reason

    one_by_one = play(list(range(len(tokens) + 1)))
    grouped = play(sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))}))
    assert grouped == one_by_one
    shown = one_by_one[0] + one_by_one[1]
    assert not any(marker.value in shown for marker in Marker)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "tool", "function", "text", "auto", "left"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest])
def test_junk_is_refused_with_a_reason_or_taken(kind: type[BaseModel]) -> None:
    names = [*kind.model_fields, *UNSUPPORTED_FIELDS, "new"]
    message = st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("role", "content", "tool_calls", "name"), JSON)
    )
    fields = st.dictionaries(st.sampled_from(names), JSON, max_size=6)
    base = st.fixed_dictionaries(
        {}, optional={"messages": st.lists(message, max_size=3) | JSON, "prompt": JSON}
    )

    @settings(max_examples=examples(150))
    @given(base, fields)
    def check(base: dict[str, Any], fields: dict[str, Any]) -> None:
        body = json.dumps(base | fields).encode()
        try:
            kind.model_validate_json(body)
        except ValidationError as error:
            refusal = validation_error(error, body)
            assert isinstance(refusal, InvalidRequest)
            assert refusal.message
            assert refusal.param is None or re.match(r"[^.\[]+", refusal.param)

    check()


@given(st.binary(max_size=60))
def test_bytes_that_are_no_json_are_refused(body: bytes) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate_json(body)
    assert validation_error(caught.value, body).http_status == 400

"""Token masks: what may come next in every state, rebuilt from the tokens, one fault at a time."""

from __future__ import annotations

import json
import threading
from typing import NoReturn

import pytest
import torch

from mooncake.api.constrained.grammar import ToolRule, choice_rule, json_rule, tool_rules
from mooncake.base import CheckpointError, Grammar, InternalError, SamplingParams
from mooncake.model.grammars.following import MAX_PREPARING, MIN_COMPILED_BYTES, Grammars
from mooncake.model.grammars.grammar_tokens import GrammarTokens
from mooncake.model.layers.sampler import Sampler
from tests.support.api.grammars import (
    ARGUMENT,
    CALL,
    CALL_END,
    END,
    SECTION,
    SECTION_END,
    TOKENIZER,
    allowed_next,
    grammar_of,
    marker_ids,
    refused_at,
    special,
    tiny_grammars,
    tiny_tokens,
)
from tests.support.engine.fake_runner import Running, sequence_of
from tests.support.waiting import LONG_S

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
THINK, THOUGHT = special("<think>"), special("</think>")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return tiny_grammars()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def calls_grammar(*, forced: bool = False, many: bool = True) -> Grammar:
    tools = [ToolRule("get", SCHEMA), ToolRule("get_all", {"type": "object"})]
    ids = marker_ids()
    rules, _ = tool_rules(tools, ids, many=many, opened=not forced)
    text = "\n".join(["start: calls", *rules])
    triggers = [special(SECTION)] if forced else [special(SECTION), special(CALL)]
    return Grammar(
        text=text, end_ids=[special(END)], free=not forced, optional=not forced, triggers=triggers
    )


def call(name: str, arguments: str, index: int = 0) -> str:
    return f"{CALL}functions.{name}:{index}{ARGUMENT}{arguments}{CALL_END}"


@pytest.mark.parametrize(
    "text", ['{"a":1}', '{"a": 12}', '{\n  "a": -3\n}', '{"a":1}' + END, '{"a":0}' + END * 3]
)
def test_what_fits_passes(grammars: Grammars, text: str) -> None:
    assert refused_at(grammars, grammar_of(json_rule(SCHEMA, "x")), encode(text)) is None


@pytest.mark.parametrize(
    "text", ["[", '{"b"', '{"a":x', '{"a":1,', '{"a":1}}', '{"a"' + END, '{"a":01', "x" + END, END]
)
def test_what_does_not_fit_is_refused(grammars: Grammars, text: str) -> None:
    refused = refused_at(grammars, grammar_of(json_rule(SCHEMA, "x")), encode(text))
    assert refused is not None
    assert refused < len(encode(text))


def test_it_ends_exactly_where_it_is_complete(grammars: Grammars) -> None:
    follower = grammars.follow(grammar_of(json_rule({"type": "integer"}, "x")), [])
    end = special(END)
    for token, complete in [(encode("-")[0], False), (encode("4")[0], True)]:
        follower.allowed()
        follower.advance(token)
        allowed = allowed_next(follower)
        assert allowed is not None
        assert (end in allowed) is complete
    follower.advance(end)
    assert allowed_next(follower) == {end}


def test_special_tokens_are_no_text(grammars: Grammars) -> None:
    follower = grammars.follow(grammar_of(json_rule({"type": "string"}, "x")), encode('"<'))
    allowed = allowed_next(follower)
    assert allowed is not None
    assert not allowed & set(range(special("[BOS]"), TOKENIZER.vocab_size))


class TestToolCalls:
    @pytest.mark.parametrize(
        "text",
        [
            "free text, {not json", "free" + SECTION + call("get", '{"a":1}') + SECTION_END + END,
            SECTION + call("get", '{"a":1}') + call("get_all", "{}", 1) + SECTION_END,
            call("get_all", '{"x":[1,"y"]}') + SECTION_END + END,
            "<think>hm" + SECTION + call("get", '{"a": 7}', 12) + SECTION_END + END,
        ],
    )  # fmt: skip
    def test_free_text_and_whole_calls_pass(self, grammars: Grammars, text: str) -> None:
        assert refused_at(grammars, calls_grammar(), encode(text)) is None

    @pytest.mark.parametrize(
        "text",
        [
            SECTION + "hello", SECTION + SECTION_END, SECTION + CALL + "functions.wrong:0",
            SECTION + CALL + "get:0", SECTION + CALL + "functions.get:x",
            SECTION + call("get", '{"a":"1"}'), SECTION + call("get", '{"a":1,"b":2}'),
            SECTION + call("get", "{}"), SECTION + call("get_all", "[]"),
            SECTION + call("get", '{"a":1}') + "and", SECTION + call("get", '{"a":1}') + END,
            SECTION + call("get", '{"a":1}') + SECTION_END + "and",
        ],
    )  # fmt: skip
    def test_likely_mistakes_are_refused(self, grammars: Grammars, text: str) -> None:
        assert refused_at(grammars, calls_grammar(), encode(text)) is not None

    def test_only_one_call(self, grammars: Grammars) -> None:
        one = SECTION + call("get", '{"a":1}')
        assert refused_at(grammars, calls_grammar(many=False), encode(one + SECTION_END)) is None
        two = encode(one + call("get", '{"a":1}', 1))
        assert refused_at(grammars, calls_grammar(many=False), two) == len(encode(one))

    def test_a_forced_call_comes_first(self, grammars: Grammars) -> None:
        follower = grammars.follow(calls_grammar(forced=True), [])
        assert allowed_next(follower) == {special(SECTION)}

    def test_free_text_costs_no_mask(self, grammars: Grammars) -> None:
        follower = grammars.follow(calls_grammar(), encode("some text"))
        assert follower.allowed() is None


class TestThinking:
    def grammar(self, **fields: object) -> Grammar:
        return grammar_of(json_rule(SCHEMA, "x"), think_end=THOUGHT, **fields)

    def test_may_come_first_and_is_free(self, grammars: Grammars) -> None:
        grammar = self.grammar(think_begin=THINK)
        for text in ('<think>{[}</think>{"a":1}' + END, '{"a":1}' + END, "<think></think>{"):
            assert refused_at(grammars, grammar, encode(text)) is None
        assert refused_at(grammars, grammar, encode("{<think>")) == 1
        assert refused_at(grammars, grammar, encode("<think>a</think><think>")) == 3

    def test_that_the_prompt_opened(self, grammars: Grammars) -> None:
        grammar = self.grammar(free=True)
        assert refused_at(grammars, grammar, encode('hm</think>{"a":1}' + END)) is None

    def test_cannot_end_the_answer(self, grammars: Grammars) -> None:
        assert refused_at(grammars, self.grammar(free=True), encode("hm" + END)) == 2

    def test_without_a_begin_there_is_none(self, grammars: Grammars) -> None:
        assert refused_at(grammars, self.grammar(), [THINK]) == 0


@pytest.mark.parametrize("cut", range(0, 24, 3))
def test_a_sequence_that_moves_stands_where_it_stood(grammars: Grammars, cut: int) -> None:
    grammar = calls_grammar()
    tokens = encode("hi" + SECTION + call("get", '{"a": 12}') + SECTION_END + END)
    walked = grammars.follow(grammar, [])
    for token in tokens[:cut]:
        walked.allowed()
        walked.advance(token)
    assert allowed_next(grammars.follow(grammar, tokens[:cut])) == allowed_next(walked)


def test_sequences_of_one_grammar_do_not_disturb_each_other(grammars: Grammars) -> None:
    grammar = grammar_of(choice_rule(["aa", "ab", "b"], "x"))
    followers = [grammars.follow(grammar, encode(text)) for text in ("", "a", "b", "a")]
    expected = [{"a", "b"}, {"a", "b"}, {END}, {"a", "b"}]
    for follower, texts in zip(followers, expected, strict=True):
        allowed = allowed_next(follower)
        assert allowed is not None
        assert {TOKENIZER.decode([token]) for token in allowed} >= texts & {END, "b"}
        assert (special(END) in allowed) is (END in texts)


def test_compiled_grammars_are_kept_up_to_a_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 20 * MIN_COMPILED_BYTES
    monkeypatch.setattr("mooncake.model.grammars.following.MAX_COMPILED_BYTES", limit)
    grammars = tiny_grammars()
    for number in range(30):
        word = f"n{number}" + "x" * (1_000 if number % 7 else 10_000)
        assert allowed_next(grammars.follow(grammar_of(choice_rule([word], "x")), []))
        assert grammars.num_compiled_bytes <= limit


def start(grammar: Grammar, sequence_id: int = 0, **sampling: object) -> Running:
    params = SamplingParams(grammar=grammar, temperature=0.0, **sampling)
    return sequence_of(sequence_id, params, [1])


def likely(text: str, step: int) -> torch.Tensor:
    """Logits of a model that wants to say `text`, and mildly prefers to end."""
    logits = torch.zeros(1, TOKENIZER.vocab_size)
    tokens = encode(text)
    logits[0, special(END)] = 1.0
    if step < len(tokens):
        logits[0, tokens[step]] = 9.0
    for token in [*encode('"}]:0'), special(CALL_END), special(SECTION_END)]:
        logits[0, token] += 2.0
    return logits


class TestInTheSampler:
    def run(self, grammar: Grammar, wish: str, **sampling: object) -> str:
        sampler = Sampler(TOKENIZER.vocab_size, tiny_grammars())
        sampler.start(start(grammar, **sampling))
        tokens: list[int] = []
        while len(tokens) < 200 and (not tokens or tokens[-1] != special(END)):
            assert sampler.broken([0]) == {}
            tokens += sampler.sample(likely(wish, len(tokens)), [0])[0]
        return TOKENIZER.decode(tokens)

    @pytest.mark.parametrize(
        "wish",
        [
            SECTION + CALL + "functions.gets:0" + ARGUMENT + '{"a":1}',
            SECTION + CALL + "functions.get:0" + ARGUMENT + '{"a":"1"}',
            SECTION + CALL + "functions.get:0" + ARGUMENT + '{"a":1,"b":2}',
            SECTION + CALL + "functions.get:0" + ARGUMENT + "{}" + CALL_END,
            SECTION + CALL + "functions.get:0" + ARGUMENT + '{"a":1}' + END,
            SECTION + END, CALL + ARGUMENT,
        ],
    )  # fmt: skip
    def test_a_model_of_likely_mistakes_calls_rightly(self, wish: str) -> None:
        text = self.run(calls_grammar(forced=True), wish)
        assert text.startswith(SECTION + CALL + "functions.get")
        assert text.endswith(CALL_END + SECTION_END + END)
        for piece in text.removeprefix(SECTION).split(CALL)[1:]:
            name, _, rest = piece.partition(ARGUMENT)
            arguments = json.loads(rest.partition(CALL_END)[0])
            if name.startswith("functions.get:"):
                assert arguments.keys() == {"a"}
                assert isinstance(arguments["a"], int)

    def test_min_tokens_yield_to_a_complete_grammar(self) -> None:
        grammar = grammar_of(choice_rule(["hello"], "x"))
        sampling = {"min_tokens": 5, "stop_token_ids": frozenset({special(END)})}
        assert self.run(grammar, "nothing", **sampling) == "hello" + END

    def test_allowed_tokens_and_bad_words_yield_to_the_grammar(self) -> None:
        grammar = grammar_of(choice_rule(["ab", "cd"], "x"))
        assert self.run(grammar, "ab", bad_words=[encode("a")]) == "cd" + END
        assert self.run(grammar, "cd", allowed_token_ids=encode("ab")) == "ab" + END
        assert self.run(grammar, "zz", allowed_token_ids=encode("z")) in ("ab" + END, "cd" + END)

    def test_a_broken_grammar_fails_alone(self) -> None:
        sampler = Sampler(TOKENIZER.vocab_size, tiny_grammars())
        sampler.start(start(Grammar(text="start: missing", end_ids=[special(END)]), 1))
        sampler.start(start(grammar_of('"a"'), 2))
        reasons = sampler.broken([1, 2])
        assert reasons.keys() == {1}
        assert reasons[1].status == 400
        assert "does not compile" in reasons[1].message
        assert len(reasons[1].message.splitlines()) == 1
        [token], _ = sampler.sample(torch.zeros(1, TOKENIZER.vocab_size), [2])
        assert token == encode("a")[0]

    def test_a_model_without_tokenizer_files_fails_alone(self) -> None:
        def load() -> NoReturn:
            raise CheckpointError("no tokenizer there")

        grammars = Grammars(TOKENIZER.vocab_size, load)
        sampler = Sampler(TOKENIZER.vocab_size, grammars)
        sampler.start(start(grammar_of('"a"')))
        assert "no tokenizer there" in sampler.broken([0])[0].message

    @pytest.mark.parametrize("error", [KeyError("odd\nbacktrace"), SystemExit("odd\nbacktrace")])
    def test_what_the_library_raises_ends_one_sequence(self, error: BaseException) -> None:
        """A panic in the library is not even an `Exception`; the runner lives on."""

        def load() -> NoReturn:
            raise error

        sampler = Sampler(TOKENIZER.vocab_size, Grammars(TOKENIZER.vocab_size, load))
        sampler.start(start(grammar_of('"a"')))
        reason = sampler.broken([0])[0].message
        assert reason.startswith("the grammar cannot be followed: ")
        assert "odd" in reason
        assert "\n" not in reason
        assert len(reason) < 300

    def test_what_takes_long_is_done_before_the_sequence_comes(self) -> None:
        num_loads = 0

        def load() -> GrammarTokens:
            nonlocal num_loads
            num_loads += 1
            return tiny_tokens()

        grammars = Grammars(TOKENIZER.vocab_size, load)
        grammars.read_vocabulary()
        assert num_loads == 1
        sampler = Sampler(TOKENIZER.vocab_size, grammars)
        grammar, wrong = grammar_of('"ab"'), grammar_of('"')
        for each in (wrong, grammar, grammar):
            sampler.prepare(each)
        grammars._early.wait(grammars._early.submit(lambda: None))  # behind them
        assert list(grammars._compiled) == [grammar.text]
        sampler.start(start(grammar, 1))
        sampler.start(start(wrong, 2))
        assert sampler.broken([1, 2]).keys() == {2}
        assert allowed_next(grammars.follow(grammar, [])) <= {encode("a")[0], encode("ab")[0]}
        assert num_loads == 1

    def test_a_flood_of_grammars_is_prepared_in_part(self) -> None:
        grammars, go_on = tiny_grammars(), threading.Event()
        grammars._early.submit(lambda: go_on.wait(LONG_S))
        for number in range(2 * MAX_PREPARING):
            grammars.prepare(grammar_of(f'"{number}"'))
        go_on.set()
        grammars._early.wait(grammars._early.submit(lambda: None))
        assert len(grammars._compiled) == MAX_PREPARING
        assert allowed_next(grammars.follow(grammar_of('"a"'), [])) == {encode("a")[0]}

    def test_a_vocabulary_that_cannot_be_read_keeps_no_worker_from_starting(self) -> None:
        def load() -> NoReturn:
            raise KeyError("odd")

        grammars = Grammars(TOKENIZER.vocab_size, load)
        grammars.read_vocabulary()
        grammars.prepare(grammar_of('"a"'))
        grammars._early.wait(grammars._early.submit(lambda: None))
        assert not grammars._preparing
        sampler = Sampler(TOKENIZER.vocab_size, grammars)
        sampler.start(start(grammar_of('"a"')))
        assert "odd" in sampler.broken([0])[0].message

    def test_without_grammars_none_may_come(self) -> None:
        sampler = Sampler(TOKENIZER.vocab_size)
        with pytest.raises(InternalError, match="no grammars"):
            sampler.start(start(grammar_of('"a"')))

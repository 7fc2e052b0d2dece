"""Beam search against every possible answer of a tiny language, and through the HTTP API."""

from __future__ import annotations

import asyncio
import itertools
import math
from random import Random
from typing import Any

import httpx
import openai
import pytest

from mooncake.api.generation.beam_search import Beam, BeamSearch, BeamStream
from mooncake.base import (
    Failure,
    FinalEvent,
    FinishReason,
    GenerateRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    pack_tokens,
)
from mooncake.base.request import CacheMisses, CacheUse
from tests.support.api.server import ScriptedBackend, live_api_server, refusal, tiny_tokenizer
from tests.support.waiting import LONG_S

END = 3
VOCAB = 4
MAX_TOKENS = 4
TOKENIZER = tiny_tokenizer()


def next_logprobs(so_far: tuple[int, ...], vocab: int = VOCAB) -> list[float]:
    """Return what a made-up model thinks comes next: seeded by all that came before."""
    random = Random(str(so_far))
    weights = [random.random() ** 2 + 0.01 for _ in range(vocab)]
    return [math.log(weight / sum(weights)) for weight in weights]


def entry_after(so_far: tuple[int, ...], vocab: int = VOCAB) -> TokenLogprobs:
    ranked = sorted(enumerate(next_logprobs(so_far, vocab)), key=lambda pair: -pair[1])
    return TokenLogprobs(ranked[0][1], 1, ranked)


def search(width: int, penalty: float, **sampling: Any) -> list[Beam]:
    params = SamplingParams(
        max_tokens=MAX_TOKENS, **{"stop_token_ids": frozenset({END})} | sampling
    )
    found = BeamSearch(params, width, penalty)
    while found.live:
        found.advance([entry_after(beam.tokens) for beam in found.live])
    return found.best(width)


def every_answer(min_tokens: int = 0) -> list[tuple[int, ...]]:
    """Return all answers: those that END ends, and those as long as may be."""
    going = [token for token in range(VOCAB) if token != END]
    answers = list(itertools.product(going, repeat=MAX_TOKENS))
    for length in range(min_tokens, MAX_TOKENS):
        answers += [(*start, END) for start in itertools.product(going, repeat=length)]
    return answers


def logprob_of(tokens: tuple[int, ...]) -> float:
    return sum(next_logprobs(tokens[:at])[token] for at, token in enumerate(tokens))


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("min_tokens", [0, 2])
def test_with_enough_beams_it_finds_the_best_of_all_answers(
    penalty: float, min_tokens: int
) -> None:
    found = search(128, penalty, min_tokens=min_tokens)
    expected = sorted(
        every_answer(min_tokens),
        key=lambda tokens: -logprob_of(tokens) / len(tokens) ** penalty,
    )
    assert [beam.tokens for beam in found] == expected
    for beam in found:
        assert beam.logprob == pytest.approx(logprob_of(beam.tokens))
        assert beam.stop_token_id == (END if beam.tokens[-1] == END else None)
        ranks = [sorted(next_logprobs(beam.tokens[:at]), reverse=True) for at in range(4)]
        for at, entry in enumerate(beam.entries):
            assert ranks[at][entry.rank - 1] == entry.logprob


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_one_beam_is_greedy_until_an_end_pays_more(penalty: float) -> None:
    [best] = search(1, penalty, stop_token_ids=frozenset())
    tokens: tuple[int, ...] = ()
    for _ in range(MAX_TOKENS):
        tokens = (*tokens, entry_after(tokens).top[0][0])
    assert best.tokens == tokens


def test_giving_up_early_changes_nothing() -> None:
    """Beams that cannot win any more are dropped; a search that keeps them finds the same."""
    for width, penalty in itertools.product([1, 2, 3, 5], [0.0, 0.5, 1.0, 3.0, -2.0]):
        patient: list[tuple[float, tuple[int, ...]]] = []
        live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for length in range(1, MAX_TOKENS + 1):
            grown = [
                (logprob + more, (*tokens, token))
                for logprob, tokens in live
                for token, more in entry_after(tokens).top[: 2 * width]
            ]
            ended = [pair for pair in grown if pair[1][-1] == END or length == MAX_TOKENS]
            going = sorted((pair for pair in grown if pair[1][-1] != END), key=lambda it: -it[0])
            live = going[:width]
            kept = live if length == MAX_TOKENS else []
            patient += [pair for pair in ended if pair[1][-1] == END] + kept
        patient.sort(key=lambda pair: -pair[0] / len(pair[1]) ** penalty)
        assert [beam.tokens for beam in search(width, penalty)] == [
            tokens for _, tokens in patient[:width]
        ]


class Language(ScriptedBackend):
    """Answers one token at a time as the made-up model does, over the tokenizer's letters."""

    LETTERS = "abcdefgh"

    def __init__(self) -> None:
        super().__init__(self._next)
        self.ids = [TOKENIZER.encode(letter)[0] for letter in self.LETTERS]

    def _next(self, request: GenerateRequest) -> list[Any]:
        said = tuple(self.ids.index(token) for token in request.prompt_tokens if token in self.ids)
        entry = entry_after(said, len(self.ids))
        top = [(self.ids[token], logprob) for token, logprob in entry.top]
        assert request.sampling.max_tokens == 1
        assert request.sampling.num_logprobs is not None
        top = top[: request.sampling.num_logprobs]
        token = RequestOutput(
            request_id=request.request_id,
            attempt=0,
            start=0,
            tokens=[top[0][0]],
            logprobs=[TokenLogprobs(top[0][1], 1, top)],
        )
        final = FinalEvent(
            request_id=request.request_id,
            reason=FinishReason.LENGTH,
            num_prompt_tokens=len(request.prompt_tokens),
            num_output_tokens=1,
            cache=CacheUse(misses=CacheMisses(not_seen=64)),
        )
        return [token, final]


def test_through_the_api_streamed_or_not() -> None:
    async def main() -> None:
        backend = Language()
        ask: dict[str, Any] = {
            "model": "tiny", "prompt": ["1", "2"], "n": 3, "max_tokens": 5, "logprobs": 1,
            "extra_body": {"use_beam_search": True, "length_penalty": 0.5},
        }  # fmt: skip
        async with (
            live_api_server(backend) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            whole = await client.completions.create(**ask)
            assert [choice.index for choice in whole.choices] == list(range(6))
            for first in (0, 3):
                texts = [choice.text for choice in whole.choices[first : first + 3]]
                totals = [
                    sum(choice.logprobs.token_logprobs)
                    for choice in whole.choices[first : first + 3]
                ]
                assert len(set(texts)) == 3
                assert totals == sorted(totals, reverse=True)
            assert whole.usage.completion_tokens == 30
            found = whole.usage.prompt_tokens_details.mooncake
            assert found["misses"]["not_seen"] == 128, "of each prompt once"
            texts = [""] * 6
            async for chunk in await client.completions.create(**ask, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            assert texts == [choice.text for choice in whole.choices]
            best = await client.completions.create(**ask | {"n": 1, "prompt": "1", "best_of": 3})
            assert [choice.text for choice in best.choices] == texts[:1]
            chat = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "1"}], n=2, max_tokens=3,
                extra_body={"use_beam_search": True},
            )  # fmt: skip
            assert len({choice.message.content for choice in chat.choices}) == 2
        assert backend.num_running == 0

    asyncio.run(main())


def test_where_no_answer_can_be_they_are_empty() -> None:
    """All tokens end an answer, which may not end yet."""

    async def main() -> None:
        backend = Language()
        body = {
            "prompt": "1", "n": 2, "max_tokens": 5, "use_beam_search": True, "min_tokens": 2,
            "stop_token_ids": backend.ids,
        }  # fmt: skip
        async with (
            live_api_server(backend) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        choices = reply.json()["choices"]
        assert [(one["text"], one["finish_reason"]) for one in choices] == [("", "length")] * 2

    asyncio.run(main())


def test_a_step_that_fails_fails_the_call() -> None:
    failure = Failure(status=503, error_type="ServiceUnavailableError", message="lost")

    def script(request: GenerateRequest) -> list[Any]:
        return refusal(request, failure)

    async def main() -> None:
        backend = ScriptedBackend(script)
        async with (
            live_api_server(backend) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            body = {"prompt": "1", "n": 3, "max_tokens": 5, "use_beam_search": True}
            reply = await client.post("/v1/completions", json=body)
            assert (reply.status_code, reply.json()["error"]["message"]) == (503, "lost")
        assert backend.num_running == 0

    asyncio.run(main())


def test_a_client_that_goes_ends_the_search() -> None:
    async def main() -> None:
        backend = ScriptedBackend(lambda _: [None])
        async with (
            live_api_server(backend) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            body = {"prompt": "1", "n": 3, "max_tokens": 5, "use_beam_search": True}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            async with asyncio.timeout(LONG_S):
                while not backend.num_running:
                    await asyncio.sleep(0)
            asking.cancel()
            async with asyncio.timeout(LONG_S):
                await backend.abort_seen.wait()

    asyncio.run(main())


def test_every_token_that_was_computed_is_counted() -> None:
    async def main() -> None:
        backend = Language()
        request = GenerateRequest(
            request_id="r-0",
            prompt=pack_tokens(TOKENIZER.encode("1")),
            sampling=SamplingParams(
                max_tokens=MAX_TOKENS, stop_token_ids=frozenset(backend.ids[:1])
            ),
        )
        stream = BeamStream(backend, [request], 1, 3, 1.0)
        async with stream:
            events = await stream.batch()
        shown = sum(len(event.tokens) for event in events if isinstance(event, RequestOutput))
        assert stream.num_dropped_tokens > 0
        assert shown + stream.num_dropped_tokens == len(backend.requests)

    asyncio.run(main())

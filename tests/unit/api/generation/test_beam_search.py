"""Beam search against a plain one that copies and sorts all candidates whole."""

from __future__ import annotations

import math
from random import Random

import pytest

from mooncake.api.generation.beam_search import Beam, BeamSearch
from mooncake.base import SamplingParams, TokenLogprobs, pack_tokens

VOCAB = 12
Plain = tuple[float, tuple[int, ...]]
"""(logprob, tokens) of an answer."""


def entry_after(so_far: tuple[int, ...]) -> TokenLogprobs:
    """Return what a made-up model thinks comes next; often several tokens are equally likely."""
    random = Random(str(so_far))
    logprobs = [-random.choice([0.25, 0.5, 0.5, 1.0, 2.0, 4.0]) for _ in range(VOCAB)]
    ranked = sorted(enumerate(logprobs), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(ranked[0][1], 1, ranked)


def plain_search(sampling: SamplingParams, width: int, penalty: float) -> list[Plain]:
    """Return the best answers: every step makes all candidates and sorts them all."""

    def score(answer: Plain) -> float:
        return answer[0] / float(len(answer[1]) ** penalty)

    live: list[Plain] = [(0.0, ())]
    ended: list[Plain] = []
    while live:
        grown = [
            (-(logprob + more), parent, token)
            for parent, (logprob, tokens) in enumerate(live)
            for token, more in entry_after(tokens).top[: 2 * width]
        ]
        made = [(-less, (*live[parent][1], token)) for less, parent, token in sorted(grown)]
        stops = [answer for answer in made if answer[1][-1] in sampling.stop_token_ids]
        ended += [answer for answer in stops if len(answer[1]) > sampling.min_tokens]
        live = [answer for answer in made if answer[1][-1] not in sampling.stop_token_ids][:width]
        if live and len(live[0][1]) == sampling.max_tokens:
            ended, live = ended + live, []
    return sorted(ended, key=lambda answer: -score(answer))[:width]


@pytest.mark.parametrize("width", [1, 2, 3, 6, 32])
@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0, 2.5, -1.0])
def test_it_finds_what_a_full_sort_finds_token_for_token(width: int, penalty: float) -> None:
    for stops, min_tokens, num_logprobs in (({0}, 0, 2), ({0, 3, 5}, 2, None), (set(), 0, 0)):
        sampling = SamplingParams(
            max_tokens=6, min_tokens=min_tokens, stop_token_ids=frozenset(stops),
            num_logprobs=num_logprobs,
        )  # fmt: skip
        search = BeamSearch(sampling, width, penalty)
        while search.live:
            told = [pack_tokens(beam.tokens) for beam in search.live]
            assert search.continuations == told
            search.advance([entry_after(beam.tokens) for beam in search.live])
        found = search.best(width)
        assert [(beam.logprob, beam.tokens) for beam in found] == [
            (pytest.approx(logprob), tokens)
            for logprob, tokens in plain_search(sampling, width, penalty)
        ]
        for beam in found:
            for at, entry in enumerate(beam.entries):
                whole = entry_after(beam.tokens[:at]).top
                assert whole[entry.rank - 1] == (beam.tokens[at], entry.logprob)
                assert entry.top == whole[: num_logprobs or 0]


def test_a_step_makes_no_more_beams_than_live_on() -> None:
    """However many candidates a step has, it keeps `width` beams, each one token longer."""
    width = 32
    top = [(token, -math.log(token + 2)) for token in range(2 * width)]
    search = BeamSearch(SamplingParams(max_tokens=2_000), width, 1.0)
    seen: set[int] = set()
    for step in range(1, 1_500):
        before = set(map(id, search.live))
        search.advance([TokenLogprobs(top[0][1], 1, top)] * len(search.live))
        assert len(search.live) == width
        assert {id(beam.before) for beam in search.live} <= before
        assert {beam.length for beam in search.live} == {step}
        seen |= before
    assert len(search.live[0].tokens) == 1_499


def test_a_long_chain_of_beams_is_freed() -> None:
    beam = Beam()
    for token in range(70_000):
        beam = Beam(before=beam, token=token, length=token + 1)
    assert beam.tokens[-1] == 69_999
    del beam

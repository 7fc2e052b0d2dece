"""Sampling against plain references, its repeatability, and what it does at the edges."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from mooncake_kernels.reference import sampling as on_device
from mooncake_kernels.reference.sampling import DrawSettings

from mooncake.base import InternalError, SamplingParams
from mooncake.model.layers.sampler import Sampler, SamplingOps
from mooncake.model.layers.sampling_math import completing, draw, uniform
from tests.support.engine.fake_runner import Running, sequence_of

CPU = torch.device("cpu")
Floats = npt.NDArray[np.float64]


def start(
    sampling: SamplingParams,
    sequence_id: int = 0,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
) -> Running:
    return sequence_of(sequence_id, sampling, prompt or [1], output or [])


def sampler_of(*starts: Running, vocab: int) -> Sampler:
    sampler = Sampler(vocab)
    for each in starts:
        sampler.start(each)
    return sampler


def tokens_of(
    sampling: SamplingParams, steps: list[torch.Tensor], output: list[int] | None = None
) -> list[int]:
    sampler = sampler_of(start(sampling, output=output), vocab=steps[0].shape[0])
    return [sampler.sample(row[None], [0])[0][0] for row in steps]


def logits_of(rows: int, vocab: int, seed: int = 0, std: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * std


def reference_probabilities(logits: Floats, sampling: SamplingParams) -> Floats:
    """vLLM's filters by their definitions, with a full sort and no thresholds."""
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    probabilities = weights / weights.sum()
    keep = probabilities >= sampling.min_p * probabilities.max()
    order = np.argsort(-probabilities, kind="stable")
    if sampling.top_k:
        keep[order[sampling.top_k :]] = False
    probabilities = np.where(keep, probabilities, 0.0)
    probabilities /= probabilities.sum()
    ascending = order[::-1]
    lower_mass = np.cumsum(probabilities[ascending])
    dropped = ascending[lower_mass <= 1 - sampling.top_p]
    probabilities[np.setdiff1d(dropped, order[:1])] = 0.0
    normalized: Floats = probabilities / probabilities.sum()
    return normalized


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5),
    SamplingParams(top_k=10_000),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.2),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=0.999999),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=20, top_p=0.7, min_p=0.02, temperature=0.6),
    SamplingParams(top_k=3, top_p=0.5, temperature=1.3),
]


class TestUniform:
    def test_is_fixed_for_ever(self) -> None:
        """A number that changed would change every seeded request: splitmix64, checked by hand."""

        def mix(state: int) -> int:
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
            return state ^ (state >> 31)

        assert mix(0) == 0xE220A8397B1DCDAF  # the published first output of splitmix64 for seed 0
        for seed, position in [(0, 0), (7, 3), (2**64 - 1, 100_000)]:
            assert uniform(seed, position) == (mix(mix(seed) ^ position) >> 11) / 2**53

    def test_seeds_and_positions_are_independent(self) -> None:
        grid = np.array([[uniform(seed, place) for place in range(200)] for seed in range(200)])
        assert grid.min() >= 0
        assert grid.max() < 1
        assert abs(grid.mean() - 0.5) < 0.005
        assert len(np.unique(grid)) == grid.size
        for shifted in (grid[1:], grid[:, 1:]):
            base = grid[: shifted.shape[0], : shifted.shape[1]]
            assert abs(np.corrcoef(base.ravel(), shifted.ravel())[0, 1]) < 0.02


class TestGreedy:
    def test_takes_the_most_likely_token_of_each_row(self) -> None:
        logits = logits_of(5, 97)
        sampler = sampler_of(*(start(SamplingParams(temperature=0), i) for i in range(5)), vocab=97)
        assert sampler.sample(logits, list(range(5))) == (logits.argmax(-1).tolist(), {})

    def test_mixes_with_drawn_rows(self) -> None:
        logits = logits_of(4, 97)
        params = [SamplingParams(temperature=0), SamplingParams(seed=3)]
        sampler = sampler_of(*(start(params[i % 2], i) for i in range(4)), vocab=97)
        tokens, _ = sampler.sample(logits, [0, 1, 2, 3])
        assert [tokens[0], tokens[2]] == logits[[0, 2]].argmax(-1).tolist()
        assert tokens[1] == tokens_of(params[1], [logits[1]])[0]

    def test_a_tiny_temperature_is_greedy_too(self) -> None:
        logits = logits_of(8, 300)
        for row in logits:
            assert tokens_of(SamplingParams(temperature=1e-30), [row]) == [int(row.argmax())]


class TestDistribution:
    @pytest.mark.parametrize("sampling", FILTERS, ids=repr)
    def test_filters_keep_the_tokens_of_the_reference(self, sampling: SamplingParams) -> None:
        """Every hundredth of the unit interval lands on the token the reference's CDF gives."""
        logits = logits_of(1, 400, seed=11)
        wanted = reference_probabilities(logits[0].double().numpy(), sampling)
        cumulative = np.cumsum(wanted)
        places = list(np.linspace(0.0005, 0.9995, 500))
        # A place within rounding of a bound may fall to either side.
        places = [p for p in places if np.abs(cumulative - p).min() > 1e-5]
        drawn = draw_at(logits.expand(len(places), -1), sampling, places)
        assert drawn == [int(np.searchsorted(cumulative, place)) for place in places]
        assert len(places) > 400

    @pytest.mark.parametrize("vocab", [129, 5_000, 50_000])
    def test_top_p_finds_nuclei_of_any_size(self, vocab: int) -> None:
        flat = logits_of(1, vocab, seed=2, std=0.5)
        sampling = SamplingParams(top_p=0.95)
        kept = reference_probabilities(flat[0].double().numpy(), sampling) > 0
        places = list(np.linspace(0, 0.99999, 300))
        assert all(kept[token] for token in draw_at(flat.expand(300, -1), sampling, places))
        # The last kept token by id is reached, so no more than the tail was cut.
        last = int(np.flatnonzero(kept)[-1])
        assert draw_at(flat, sampling, [1 - 2**-53]) == [last]

    def test_frequencies_follow_the_probabilities(self) -> None:
        """Chi-square over 20,000 seeds and 12 tokens, fixed seeds; 11 degrees, p = 0.001: 31.3."""
        logits = logits_of(1, 12, seed=4, std=1.0)
        sampling = SamplingParams(temperature=0.8)
        wanted = reference_probabilities(logits[0].double().numpy(), sampling) * 20_000
        places = [uniform(seed, 0) for seed in range(20_000)]
        drawn = draw_at(logits.expand(len(places), -1), sampling, places)
        found = np.bincount(drawn, minlength=12)
        assert float(((found - wanted) ** 2 / wanted).sum()) < 31.3

    def test_frequencies_over_positions_of_one_seed(self) -> None:
        row = logits_of(1, 12, seed=5, std=1.0)[0]
        wanted = reference_probabilities(row.double().numpy(), SamplingParams()) * 4_000
        found = np.bincount(tokens_of(SamplingParams(seed=9), [row] * 4_000), minlength=12)
        assert float(((found - wanted) ** 2 / wanted).sum()) < 31.3

    def test_ties_with_the_last_kept_token_stay_in(self) -> None:
        row = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -1.0]])
        places = list(np.linspace(0, 0.9999, 100))
        for sampling in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
            assert set(draw_at(row.expand(100, -1), sampling, places)) == {1, 2, 3, 4}

    def test_the_ends_of_the_unit_interval_stay_inside(self) -> None:
        row = torch.full((1, 1000), -torch.inf)
        row[0, [17, 400]] = torch.tensor([1.0, 2.0])
        assert draw_at(row, SamplingParams(), [0.0]) == [17]
        assert draw_at(row, SamplingParams(), [1 - 2**-53]) == [400]

    def test_what_is_hardly_possible_is_not_drawn_and_changes_nothing(self) -> None:
        """Its weight would be a subnormal number, which takes long to compute."""
        row = torch.full((1, 1000), -95.0)
        row[0, 400] = 0.0
        for sampling in (SamplingParams(), SamplingParams(top_p=0.999), SamplingParams(top_k=7)):
            assert draw_at(row, sampling, [0.0, 0.5, 1 - 2**-53]) == [400] * 3


def draw_at(logits: torch.Tensor, sampling: SamplingParams, places: list[float]) -> list[int]:
    rows = len(places)

    def column(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype)

    settings = DrawSettings(
        temperature=column(sampling.temperature, torch.float32),
        top_k=column(sampling.top_k, torch.int32),
        top_p=column(sampling.top_p),
        min_p=column(sampling.min_p),
        uniform=torch.tensor(places, dtype=torch.float64),
    )
    tokens: list[int] = draw(logits, settings).tolist()
    return tokens


class TestRepeatability:
    SAMPLING = SamplingParams(
        seed=1234,
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        min_tokens=12,
        stop_token_ids=frozenset({5, 6}),
    )

    def test_a_resumed_request_goes_on_identically(self) -> None:
        steps = list(logits_of(20, 64, seed=8))
        whole = tokens_of(self.SAMPLING, steps)
        for cut in (1, 7, 19):
            assert tokens_of(self.SAMPLING, steps[cut:], output=whole[:cut]) == whole[cut:]

    def test_neighbours_in_the_batch_change_nothing(self) -> None:
        steps = list(logits_of(10, 64, seed=8))
        alone = tokens_of(self.SAMPLING, steps)
        others = [FILTERS[i] for i in (1, 4, 6, 10)] + [SamplingParams(temperature=0)]
        sampler = sampler_of(
            start(self.SAMPLING, 0), *(start(o, i + 1) for i, o in enumerate(others)), vocab=64
        )
        noise = logits_of(50, 64, seed=9)
        together = []
        for step, row in enumerate(steps):
            order = [*range(1, 1 + step % 6), 0, *range(1 + step % 6, 6)]
            rows = torch.stack([row if i == 0 else noise[step * 5 + i - 1] for i in order])
            tokens, _ = sampler.sample(rows, order)
            together.append(tokens[order.index(0)])
        assert together == alone

    def test_other_seeds_give_other_tokens(self) -> None:
        steps = list(logits_of(20, 64, seed=8, std=1.0))
        outputs = {tuple(tokens_of(SamplingParams(seed=seed), steps)) for seed in range(20)}
        assert len(outputs) == 20

    def test_the_logits_handed_in_are_left_alone(self) -> None:
        logits = logits_of(1, 64)
        before = logits.clone()
        tokens_of(self.SAMPLING, list(logits))
        assert torch.equal(logits, before)


class TestAdjustments:
    def test_penalties_follow_the_formulas(self) -> None:
        """Repetition over prompt and output, the other two over the output only (vLLM)."""
        sampling = SamplingParams(
            temperature=0,
            repetition_penalty=1.5,
            presence_penalty=0.7,
            frequency_penalty=0.4,
            logit_bias={3: 0.25},
        )
        prompt, output = [1, 2, 2], [2, 3, 3, 3]
        row = logits_of(1, 8, seed=1)[0]
        wanted = row.double().numpy().copy()
        wanted[3] += 0.25
        for token in {*prompt, *output}:
            wanted[token] *= 1 / 1.5 if wanted[token] > 0 else 1.5
        for token, count in ((2, 1), (3, 3)):
            wanted[token] -= 0.4 * count + 0.7
        # A token moved just below and just above the best other one shows its adjusted logit.
        for token in range(8):
            rival = int(np.argmax(np.where(np.arange(8) == token, -np.inf, wanted)))
            for side in (-1, 1):
                shifted = row.clone()
                shifted[token] = unpenalized(wanted[rival] + side * 1e-3, token, prompt, output)
                sampler = sampler_of(start(sampling, prompt=prompt, output=output), vocab=8)
                [chosen], _ = sampler.sample(shifted[None], [0])
                assert (chosen == token) == (side > 0), (token, side)

    def test_penalties_of_all_rows_are_taken_off_by_one_call(self) -> None:
        calls: list[int] = []

        def counted(logits: torch.Tensor, *rest: Any) -> None:
            calls.append(len(logits))
            on_device.penalize(logits, *rest)

        settings = [
            SamplingParams(temperature=0, presence_penalty=1.0),
            SamplingParams(temperature=0),
            SamplingParams(temperature=0, repetition_penalty=3.0),
            SamplingParams(temperature=0, frequency_penalty=0.6, logit_bias={2: 0.3}),
        ]
        rows = torch.tensor([[3.0, 2.5, 2.2, 0.0]]).repeat(4, 1)
        sampler = Sampler(4, ops=SamplingOps(penalize=counted))
        for number, each in enumerate(settings):
            sampler.start(start(each, number))
        found = [sampler.sample(rows, [0, 1, 2, 3])[0] for _ in range(3)]
        for number, each in enumerate(settings):
            alone = tokens_of(each, list(rows[:3]))
            assert [step[number] for step in found] == alone
        assert calls == [3, 3, 3]

    def test_sampled_tokens_count_at_once(self) -> None:
        row = torch.tensor([3.0, 2.5, 2.2, 0.0])
        assert tokens_of(SamplingParams(temperature=0, presence_penalty=1.0), [row] * 4) == [
            0, 1, 2, 0,
        ]  # fmt: skip
        assert tokens_of(SamplingParams(temperature=0, frequency_penalty=0.6), [row] * 4) == [
            0, 1, 0, 2,
        ]  # fmt: skip
        assert tokens_of(SamplingParams(temperature=0, repetition_penalty=1.3), [row] * 3) == [
            0, 0, 0,
        ]  # fmt: skip
        assert tokens_of(SamplingParams(temperature=0, repetition_penalty=1.4), [row] * 3) == [
            0, 2, 0,
        ]  # fmt: skip

    def test_logit_bias_and_allowed_tokens(self) -> None:
        row = logits_of(1, 32)[0]
        assert tokens_of(SamplingParams(temperature=0, logit_bias={9: 100.0}), [row]) == [9]
        banned = int(row.argmax())
        second = int(row.topk(2).indices[1])
        assert tokens_of(SamplingParams(temperature=0, logit_bias={banned: -100.0}), [row]) == [
            second
        ]
        allowed = [4, 11, 30]
        drawn = tokens_of(SamplingParams(allowed_token_ids=allowed, temperature=9), [row] * 200)
        assert set(drawn) == set(allowed)
        outside = SamplingParams(temperature=0, allowed_token_ids=[4, 32, -1], logit_bias={99: 5.0})
        assert tokens_of(outside, [row]) == [4]

    def test_stop_tokens_are_held_back_until_min_tokens(self) -> None:
        row = torch.tensor([9.0, 1.0, 2.0])
        sampling = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=frozenset({0, 77}))
        assert tokens_of(sampling, [row] * 5) == [2, 2, 2, 0, 0]
        assert tokens_of(sampling, [row] * 2, output=[2, 2]) == [2, 0]

    def test_bad_words_never_become_whole(self) -> None:
        row = torch.tensor([1.0, 9.0, 5.0, 3.0])
        sampling = SamplingParams(temperature=0, bad_words=[[1, 1], [2, 1, 3], [0]])
        assert tokens_of(sampling, [row] * 5) == [1, 2, 1, 2, 1]
        assert tokens_of(sampling, [row], output=[1]) == [2]
        threes = torch.tensor([1.0, 2.0, 3.0, 9.0])
        assert tokens_of(sampling, [threes], output=[2, 1]) == [2]
        assert tokens_of(sampling, [threes], output=[1]) == [3]
        assert tokens_of(sampling, [torch.tensor([9.0, 1.0, 0.0, 0.0])]) == [1]

    @pytest.mark.parametrize("seed", range(6))
    def test_rows_of_any_settings_get_what_each_gets_in_the_plain_way(self, seed: int) -> None:
        """All rows at once, with lists that some share and some do not: token for token."""
        random = Random(seed)
        vocab, rows = 12, 40
        shared = [random_settings(random, vocab) for _ in range(5)]
        settings = [
            random.choice(shared) if random.random() < 0.6 else random_settings(random, vocab)
            for _ in range(rows)
        ]
        sampler = sampler_of(*(start(each, at) for at, each in enumerate(settings)), vocab=vocab)
        outputs: list[list[int]] = [[] for _ in range(rows)]
        for step in range(12):
            logits = logits_of(rows, vocab, seed=100 * seed + step, std=1.0)
            order = random.sample(range(rows), random.randrange(1, rows + 1))
            tokens, _ = sampler.sample(logits[: len(order)], order)
            for who, token, row in zip(order, tokens, logits, strict=False):
                wanted = plain_choice(row, settings[who], outputs[who])
                assert token == wanted, (settings[who], outputs[who])
                outputs[who].append(wanted)


def random_settings(random: Random, vocab: int) -> SamplingParams:
    """Return greedy settings with some of the lists, which may leave no token."""
    fields: dict[str, Any] = {}
    ids = range(vocab)
    if random.random() < 0.4:
        fields["allowed_token_ids"] = random.sample(ids, random.randrange(1, vocab))
    if random.random() < 0.5:
        stops = frozenset(random.sample(ids, random.choice([1, 3, vocab])))
        fields |= {"stop_token_ids": stops, "min_tokens": random.randrange(9)}
    if random.random() < 0.5:
        fields["bad_words"] = [
            [random.randrange(vocab) for _ in range(random.randrange(1, 4))]
            for _ in range(random.choice([3, 40]))
        ]
    if random.random() < 0.4:
        fields["logit_bias"] = {each: random.uniform(-3, 3) for each in random.sample(ids, 4)}
    if random.random() < 0.4:
        fields |= {"presence_penalty": 0.5, "frequency_penalty": random.choice([0.0, 0.25])}
    return SamplingParams(temperature=0, **fields)


def plain_choice(row: torch.Tensor, sampling: SamplingParams, output: list[int]) -> int:
    """Return the token of one row: its settings one after the other, as they are described."""
    vocab = len(row)
    hidden = [
        set(range(vocab)) - set(sampling.allowed_token_ids or range(vocab)),
        set(sampling.stop_token_ids) if len(output) < sampling.min_tokens else set(),
        completing(sampling.bad_words, output),
    ]
    adjusted = row.double()
    for tokens in hidden:
        fewer = adjusted.clone()
        fewer[sorted(tokens)] = -torch.inf
        if not bool(fewer.isneginf().all()):
            adjusted = fewer
    for token, bias in sampling.logit_bias.items():
        adjusted[token] += bias
    for token in set(output):
        count = output.count(token)
        adjusted[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return int(adjusted.argmax())


def unpenalized(value: float, token: int, prompt: list[int], output: list[int]) -> float:
    """Invert the penalties of the formula test for one token."""
    if token in output:
        value += 0.4 * output.count(token) + 0.7
    if token in prompt or token in output:
        value = value * 1.5 if value > 0 else value / 1.5
    return value - (0.25 if token == 3 else 0.0)


class TestLogprobs:
    def test_are_of_the_raw_distribution(self) -> None:
        logits = logits_of(3, 50)
        raw = logits.double().log_softmax(-1)
        params = [
            SamplingParams(temperature=0.5, seed=1, num_logprobs=0),
            SamplingParams(temperature=0),
            SamplingParams(temperature=0, num_logprobs=4, logit_bias={7: 50.0}),
        ]
        sampler = sampler_of(*(start(p, i) for i, p in enumerate(params)), vocab=50)
        tokens, logprobs = sampler.sample(logits, [0, 1, 2])
        assert logprobs.keys() == {0, 2}
        first, third = logprobs[0], logprobs[2]
        assert first.top == []
        assert first.logprob == pytest.approx(float(raw[0, tokens[0]]), abs=1e-5)
        assert tokens[2] == 7
        assert third.logprob == pytest.approx(float(raw[2, 7]), abs=1e-5)
        assert third.rank == 1 + int((raw[2] > raw[2, 7]).sum())
        best = raw[2].topk(4)
        assert [token for token, _ in third.top] == best.indices.tolist()
        assert [value for _, value in third.top] == pytest.approx(best.values.tolist(), abs=1e-5)

    def test_of_a_prompt_longer_than_one_chunk(self) -> None:
        logits = logits_of(150, 30)
        following = [int(token) for token in torch.arange(150) % 30]
        results = Sampler(30).prompt_logprobs(logits, following, 2)
        raw = logits.double().log_softmax(-1)
        assert len(results) == 150
        for row, (token, result) in enumerate(zip(following, results, strict=True)):
            assert result.logprob == pytest.approx(float(raw[row, token]), abs=1e-5)
            assert result.rank == 1 + int((logits[row] > logits[row, token]).sum())
            assert [top for top, _ in result.top] == raw[row].topk(2).indices.tolist()

    def test_of_no_prompt_tokens_is_empty(self) -> None:
        assert Sampler(30).prompt_logprobs(torch.empty(0, 30), [], 3) == []

    def test_more_tops_than_tokens_gives_all(self) -> None:
        (result,) = Sampler(3).prompt_logprobs(torch.tensor([[1.0, 3.0, 2.0]]), [0], 20)
        assert [token for token, _ in result.top] == [1, 2, 0]


class TestErrors:
    def test_a_sequence_that_was_not_started_or_was_forgotten(self) -> None:
        sampler = sampler_of(start(SamplingParams(temperature=0)), vocab=4)
        sampler.forget(0)
        sampler.forget(0)
        with pytest.raises(InternalError, match="sequence 0 was not started"):
            sampler.sample(torch.zeros(1, 4), [0])

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_logits_that_are_no_numbers_name_the_sequence(self, bad: float) -> None:
        starts = [start(SamplingParams(temperature=0), 5), start(SamplingParams(seed=2), 6)]
        sampler = sampler_of(*starts, vocab=4)
        logits = torch.zeros(2, 4)
        logits[1, 2] = bad
        with pytest.raises(InternalError, match="sequence 6"):
            sampler.sample(logits, [5, 6])

    def test_settings_that_leave_nothing_yield_in_turn(self) -> None:
        row = torch.tensor([1.0, 4.0, 3.0, 2.0])
        words = SamplingParams(temperature=0, bad_words=[[0], [1], [2], [3]])
        assert tokens_of(words, [row]) == [1]
        ends = SamplingParams(
            temperature=0, allowed_token_ids=[2], min_tokens=3, stop_token_ids=frozenset({2})
        )
        assert tokens_of(ends, [row]) == [2]

    def test_logits_of_another_vocabulary(self) -> None:
        with pytest.raises(InternalError, match="5 tokens"):
            sampler_of(start(SamplingParams()), vocab=5).sample(torch.zeros(1, 4), [0])

    def test_an_empty_batch_is_no_error(self) -> None:
        assert Sampler(5).sample(torch.empty(0, 5), []) == ([], {})

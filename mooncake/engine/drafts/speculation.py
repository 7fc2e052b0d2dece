"""Several tokens of a sequence in one step: drafts of what may come next, computed beside its last
token. The runner samples after each as it would have without them, and goes on to the next while
the sampled token is the draft; so drafts change when a token is computed, never which it is.

`Speculation` keeps those drafts of a drafter that are worth their time. What is known of a sequence
is in its `drafting`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from mooncake.base.messages import CostSample
from mooncake.engine.drafts.drafters import Drafter
from mooncake.engine.sequence import Drafting, Sequence

_FORGET = 0.98
"""What a step leaves of the weight of those before it."""
_FORGET_OWN = 0.9
"""The same of what is known of one sequence: texts change."""
_COMPARE_EVERY = 64
"""So often a step is run the other way, without drafts or with them, to see what that costs now."""
_COMPARED_SHARE = 4
"""Such a step with drafts has one more row for so many at most, or those of one sequence: it only
has to show the difference.
"""
_MARGIN = 1.2
"""What a draft must promise for what it costs. Both are guesses, and of many guesses the best ones
are too good.
"""
_FIRST_RATE, _FIRST_WEIGHT = 0.7, 4.0
"""The share of drafts that is accepted as far as nothing is known, and how many drafts that counts
for."""

DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS = (
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
)  # fmt: skip
"""Counters, named as vLLM names them: slots with drafts, drafts in them, those accepted."""
ACCEPTED_AT = f"{ACCEPTED_TOKENS}_per_pos_"
"""And, with a number behind it, those accepted that were the first (0), second... of their slot."""


class RowCost:
    """The time of steps of single tokens and drafts by their rows: a line through those that were
    run, old ones forgotten.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0

    def add(self, num_rows: int, seconds: float) -> None:
        """Learn of a step. One that was held up counts as three times what was expected."""
        if self.known:
            fixed, each = self.line
            seconds = min(seconds, 3 * (fixed + each * num_rows))
        self._weight = _FORGET * self._weight + 1
        self._rows = _FORGET * self._rows + num_rows
        self._seconds = _FORGET * self._seconds + seconds
        self._rows_rows = _FORGET * self._rows_rows + num_rows * num_rows
        self._rows_seconds = _FORGET * self._rows_seconds + num_rows * seconds

    @property
    def _spread(self) -> float:
        """The variance of the rows, times the squared weight."""
        return self._weight * self._rows_rows - self._rows * self._rows

    @property
    def known(self) -> bool:
        """Whether steps of different numbers of rows have been seen lately."""
        return self._spread > 1e-3 * self._weight * self._weight

    @property
    def line(self) -> tuple[float, float]:
        """The seconds of a step as such, and of each row. To be asked for when `known`."""
        slope = self._weight * self._rows_seconds - self._rows * self._seconds
        each = min(max(0.0, slope / self._spread), self._seconds / self._rows)
        return (self._seconds - each * self._rows) / self._weight, each


class _Beyond:
    """By how much steps of one kind take longer than the line says: a first draft may cost more
    than the next, as more rows than one, or a layer that drafts, are computed otherwise.
    """

    def __init__(self) -> None:
        self._weight = self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Learn of a step."""
        self._weight = _FORGET * self._weight + 1
        self._sum = _FORGET * self._sum + seconds

    @property
    def seconds(self) -> float:
        """The mean, as far as several steps have shown it."""
        return self._sum / (self._weight + 1)


Outcome = tuple[Sequence, int, int]
"""A sequence of a step, how many drafts it had, and how many of them were accepted."""


class Speculation:
    """Chooses the drafts of each step: one is worth its time while its chance to be accepted is
    larger than the tokens that the step would give in the time of a row.

    What a row costs is measured, and what share of the drafts is accepted, of each sequence and of
    all. So drafts end by themselves where a batch is so large, or a text so new, that they cost.
    """

    def __init__(self, drafter: Drafter, num_drafts: int) -> None:
        """`num_drafts`: at most, of a sequence in one step."""
        self.num_drafts = num_drafts
        self.counters: dict[str, float] = dict.fromkeys((DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS), 0)
        """Counts since start, of all steps that were given to `count`."""
        self.counters |= {f"{ACCEPTED_AT}{position}": 0.0 for position in range(num_drafts)}
        self._drafter = drafter
        self._cost = RowCost()
        self._of_all = Drafting()
        self._beyond = {False: _Beyond(), True: _Beyond()}
        """The line: steps without drafts, and with them."""
        self._num_alike = 0
        """Steps in a row with drafts, or without."""
        self._had_drafts = False

    def calibrate(self, samples: Iterable[CostSample]) -> None:
        """Learn of steps that were timed at start."""
        for sample in samples:
            if sample.num_new_tokens == sample.num_sequences:
                self._cost.add(sample.num_sequences, sample.seconds)

    def choose(
        self, candidates: list[tuple[Sequence, int]], num_rows: int, budget: int
    ) -> dict[int, list[int]]:
        """Return sequence id -> drafts, for some of these sequences.

        candidates: each with how many drafts it may get; one row of each is in the step already.
        num_rows: all of the step. budget: drafts of all together.
        """
        # Where nothing is known or was compared for long, a step of the other kind is run.
        compare = not self._cost.known or self._num_alike >= _COMPARE_EVERY
        if compare and self._had_drafts:
            return {}
        if compare and self._cost.known:
            budget = min(budget, max(self.num_drafts, num_rows // _COMPARED_SHARE))
        fixed, each = self._cost.line if self._cost.known and not compare else (1.0, 0.0)
        price = _MARGIN * each
        tokens, seconds = float(len(candidates)), fixed + each * num_rows
        offers: list[tuple[float, int]] = []
        found: list[list[int]] = []
        for index, (sequence, most) in enumerate(candidates):
            rate = self._rate(sequence.drafting)
            # All of them also to compare: the first may cost more than the next.
            wanted = min(most, self.num_drafts)
            worth_it = wanted > 0 and rate * seconds > price * tokens
            found.append(self._drafter.propose(sequence, wanted) if worth_it else [])
            offers += [(-(rate ** (at + 1)), index) for at in range(len(found[-1]))]
        taken = [0] * len(candidates)
        tokens_before, seconds_before = tokens, seconds + self._beyond[False].seconds
        for chance, index in sorted(offers)[:budget]:
            if -chance * seconds <= price * tokens:
                break
            taken[index] += 1
            tokens, seconds = tokens - chance, seconds + each
        seconds += self._beyond[True].seconds
        if not compare and tokens * seconds_before <= tokens_before * seconds:
            return {}
        return {
            sequence.sequence_id: found[index][: taken[index]]
            for index, (sequence, _) in enumerate(candidates)
            if taken[index]
        }

    def _rate(self, drafting: Drafting) -> float:
        of_all = self._of_all
        usual = of_all.num_accepted + _FIRST_RATE * _FIRST_WEIGHT
        usual /= of_all.num_tested + _FIRST_WEIGHT
        return (drafting.num_accepted + 2 * usual) / (drafting.num_tested + 2)

    def count(self, outcomes: Iterable[Outcome]) -> None:
        """Count what became of a step's drafts."""
        counters = self.counters
        for _, num_drafts, num_accepted in outcomes:
            counters[DRAFTS] += num_drafts > 0
            counters[DRAFT_TOKENS] += num_drafts
            counters[ACCEPTED_TOKENS] += num_accepted
            for position in range(num_accepted):
                counters[f"{ACCEPTED_AT}{position}"] += 1

    def observe(self, outcomes: Iterable[Outcome], sample: CostSample) -> None:
        """Learn of a step without prompts."""
        has_drafts = sample.num_new_tokens > sample.num_sequences
        if self._cost.known:
            fixed, each = self._cost.line
            expected = fixed + each * sample.num_new_tokens
            self._beyond[has_drafts].add(min(sample.seconds, 3 * expected) - expected)
        self._cost.add(sample.num_new_tokens, sample.seconds)
        self._num_alike = self._num_alike + 1 if has_drafts is self._had_drafts else 1
        self._had_drafts = has_drafts
        all_tested = all_accepted = 0
        for sequence, num_drafts, num_accepted in outcomes:
            num_tested = min(num_accepted + 1, num_drafts)  # those behind a wrong one are not seen
            sequence.drafting.learn(num_tested, num_accepted, _FORGET_OWN)
            all_tested, all_accepted = all_tested + num_tested, all_accepted + num_accepted
        self._of_all.learn(all_tested, all_accepted, _FORGET)

"""Computes several tokens of a sequence in one step: drafts of the next tokens beside its last
token. The runner samples after each draft as it would have without drafts, and goes on while the
sampled token is the draft. So drafts change when a token is computed, never which token it is.

`NgramDrafter` proposes the tokens that followed the same tokens earlier. `ModelDrafter` leaves it
to the runner, which has the model's states: an MTP layer or an EAGLE-3 head makes the drafts.
`Speculation` keeps the drafts of a drafter that are worth their time. Each sequence keeps what is
known about it in `drafting`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from mooncake.base.messages import CostSample
from mooncake.engine.config import NGRAM, SpeculativeConfig
from mooncake.engine.plan import BY_MODEL
from mooncake.engine.sequence import Drafting, Sequence

LOOKUP_WINDOW = 1 << 15
"""How many tokens at a sequence's end are searched: about 20 us for one length, at worst 300."""


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Return up to `most` tokens that may follow the known ones. They may be wrong. Each is
        `BY_MODEL` when the runner is to make it.
        """


class ModelDrafter:
    """Leaves drafts to the runner, which has the model's states."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Return `most` drafts that the runner has still to make. In the sequence's first step here
        there are none.
        """
        return [BY_MODEL] * most if sequence.known_to_runner else []


class NgramDrafter:
    """Proposes what followed the last earlier occurrence of a sequence's last tokens."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._longest, self._shortest = config.lookup

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Return the tokens after the longest match; of equally long matches, after the last."""
        text = self._text(sequence)
        end = len(text) - 1  # a match ends before the last token
        if text.rfind(text[-self._shortest :], 0, end) < 0:
            return []
        for length in range(min(self._longest, end), self._shortest - 1, -1):
            at = text.rfind(text[-length:], 0, end)
            if at >= 0:
                followed = text[at + length :][:most]
                # The text repeats itself from there, so its end goes on as the text began.
                followed *= -(-most // len(followed))
                return [ord(letter) for letter in followed[:most]]
        return []

    def _text(self, sequence: Sequence) -> str:
        """Return the tokens as letters, because text is searched fast, and only at whole
        letters.
        """
        drafting, num_tokens = sequence.drafting, sequence.num_tokens
        first = max(drafting.num_read, num_tokens - LOOKUP_WINDOW)
        new = "".join(map(chr, sequence.tokens_between(first, num_tokens)))
        drafting.text = (drafting.text + new)[-LOOKUP_WINDOW:]
        drafting.num_read = num_tokens
        return drafting.text


def drafter_of(config: SpeculativeConfig) -> Drafter:
    """Return the drafter for the method of `config`."""
    return NgramDrafter(config) if config.method == NGRAM else ModelDrafter()


_FORGET = 0.98
"""How much of the weight of earlier steps each new step keeps."""
_FORGET_OWN = 0.9
"""The same for what is known of one sequence, because texts change."""
_COMPARE_EVERY = 64
"""After this many steps of one kind (with drafts or without), one of the other kind is run, to
learn what it costs now.
"""
_COMPARED_SHARE = 4
"""In such a step with drafts there is at most one draft for this many rows, or those of one
sequence if that is more: the step only has to show the difference.
"""
_MARGIN = 1.2
"""How much more a draft must promise than it costs. Both are guesses, and the best of many guesses
are too optimistic.
"""
_FIRST_RATE, _FIRST_WEIGHT = 0.7, 4.0
"""The assumed share of accepted drafts while nothing is known, and how many drafts this guess
counts for.
"""

DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS = (
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
)  # fmt: skip
"""Counters with vLLM's names: slots with drafts, the drafts in them, and those accepted."""
ACCEPTED_AT = f"{ACCEPTED_TOKENS}_per_pos_"
"""Counters by position: how many first (0), second (and so on) drafts of a slot were accepted."""


class RowCost:
    """The time of steps of single tokens and drafts by their rows. It is a line fitted to measured
    steps; old steps are forgotten.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0

    def add(self, num_rows: int, seconds: float) -> None:
        """Learn from a step. A step that was held up counts as at most three times the expected
        time.
        """
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
        """Whether steps with different numbers of rows have been seen lately."""
        return self._spread > 1e-3 * self._weight * self._weight

    @property
    def line(self) -> tuple[float, float]:
        """The seconds of a step without rows, and of each row. Valid only when `known`."""
        slope = self._weight * self._rows_seconds - self._rows * self._seconds
        each = min(max(0.0, slope / self._spread), self._seconds / self._rows)
        return (self._seconds - each * self._rows) / self._weight, each


class _Beyond:
    """How much longer steps of one kind take than the fitted line predicts. The first draft may
    cost more than the next ones, because a step of several rows uses other kernels.
    """

    def __init__(self) -> None:
        self._weight = self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._weight = _FORGET * self._weight + 1
        self._sum = _FORGET * self._sum + seconds

    @property
    def seconds(self) -> float:
        """The mean excess, damped while few steps have shown it."""
        return self._sum / (self._weight + 1)


Outcome = tuple[Sequence, int, int]
"""A sequence of a step, the number of its drafts, and how many of them were accepted."""


class Speculation:
    """Chooses the drafts of each step. A draft is worth its time while its chance to be accepted is
    larger than the tokens that the step would give in the time of a row.

    The cost of a row is measured, and so is the share of accepted drafts, for each sequence and for
    all. So drafts stop by themselves where they cost more than they give, because a batch is large
    or a text is new.
    """

    def __init__(self, drafter: Drafter, num_drafts: int) -> None:
        """`num_drafts`: the most drafts of a sequence in one step."""
        self.num_drafts = num_drafts
        self.counters: dict[str, float] = dict.fromkeys((DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS), 0)
        """The counts since start, over all steps that were given to `count`."""
        self.counters |= {f"{ACCEPTED_AT}{position}": 0.0 for position in range(num_drafts)}
        self._drafter = drafter
        self._cost = RowCost()
        self._of_all = Drafting()
        self._beyond = {False: _Beyond(), True: _Beyond()}
        """The excess over the line, for steps without drafts and with them."""
        self._num_alike = 0
        """How many steps in a row had drafts, or had none."""
        self._had_drafts = False

    def calibrate(self, samples: Iterable[CostSample]) -> None:
        """Learn from steps that were timed at start."""
        for sample in samples:
            if sample.num_new_tokens == sample.num_sequences:
                self._cost.add(sample.num_sequences, sample.seconds)

    def choose(
        self, candidates: list[tuple[Sequence, int]], num_rows: int, budget: int
    ) -> dict[int, list[int]]:
        """Return sequence id -> drafts, for some of these sequences.

        candidates: the sequences, and how many drafts each may get. The step already has one row of
        each. num_rows: the rows already in the step. budget: the most drafts of all sequences
        together.
        """
        # When nothing is known, or nothing was compared for long, run a step of the other kind.
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
            # Take all of them for a comparison too, because the first may cost more than the next.
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
        """Count which of a step's drafts were accepted."""
        counters = self.counters
        for _, num_drafts, num_accepted in outcomes:
            counters[DRAFTS] += num_drafts > 0
            counters[DRAFT_TOKENS] += num_drafts
            counters[ACCEPTED_TOKENS] += num_accepted
            for position in range(num_accepted):
                counters[f"{ACCEPTED_AT}{position}"] += 1

    def observe(self, outcomes: Iterable[Outcome], sample: CostSample) -> None:
        """Learn from a step without prompts."""
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
            num_tested = min(num_accepted + 1, num_drafts)  # those after a wrong one are untested
            sequence.drafting.learn(num_tested, num_accepted, _FORGET_OWN)
            all_tested, all_accepted = all_tested + num_tested, all_accepted + num_accepted
        self._of_all.learn(all_tested, all_accepted, _FORGET)

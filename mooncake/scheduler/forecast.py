"""How busy a decode worker will be when a request gets there: what the TBT limit is held against.

Pure; owned by the Conductor, one for all decode workers. Early rejection that looks at the load of
*now* swings: while many prompts are being computed decode looks idle and everybody is let in, then
they all arrive there and nobody is (arXiv 2407.00079, section 7.3). So requests that will have
arrived by then are added, and those that will have ended are taken off, each by its chance: outputs
are taken to be of any length up to twice the mean. Who has not even been asked for yet, but will
overtake a long prompt on the way to decode, is expected at the rate of late: without that the
forecast of a far moment is always an empty house, and long prompts are let in for it.

Every sequence grows by a token a step, so a house that is full of young ones will be slower than it
is: the limit is held against the worst of a request's stay, not its first step alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake.scheduler.cost import RunningMean
from mooncake.scheduler.views import InstanceView

MIN_REMAINING = 0.05
AHEAD = (0.0, 0.25, 0.5)
"""Moments of a request's stay (1 = the mean) that are looked at; later ones are lighter: of a house
full at once half have left at 1.
"""
LATELY = 256
"""Placements over which the usual load of a decode worker is averaged."""


@dataclass(slots=True)
class _Stay:
    """One request's time on a decode worker."""

    worker_id: str
    num_tokens: int
    """When it was placed; it grows as it decodes."""
    ready_s: float
    """When it starts to decode: predicted, then seen."""
    joined: bool = False


class DecodeForecast:
    """The requests that decode, and those that will."""

    def __init__(self) -> None:
        self._stays: dict[str, dict[str, _Stay]] = {}
        """Worker id -> request id -> stay."""
        self._worker_of: dict[str, str] = {}
        self._sequences = RunningMean(0.0, LATELY)
        self._tokens = RunningMean(0.0, LATELY)

    def expect(self, request_id: str, worker_id: str, num_tokens: int, ready_s: float) -> None:
        """A request was placed and will start to decode at about `ready_s`."""
        stay = _Stay(worker_id, num_tokens, ready_s)
        self._stays.setdefault(worker_id, {})[request_id] = stay
        self._worker_of[request_id] = worker_id

    def joined(self, request_id: str, now: float) -> None:
        """Its prompt is computed: it decodes from now on."""
        worker_id = self._worker_of.get(request_id)
        if worker_id is not None:
            stay = self._stays[worker_id][request_id]
            stay.ready_s, stay.joined = now, True

    def ended(self, request_id: str) -> None:
        """It has left; repeats change nothing."""
        worker_id = self._worker_of.pop(request_id, None)
        if worker_id is not None:
            stays = self._stays[worker_id]
            del stays[request_id]
            if not stays:
                del self._stays[worker_id]

    def tbt_now_s(self, view: InstanceView, num_tokens: int, now: float) -> float:
        """Return the gap between tokens with one more request of `num_tokens` tokens in the batch
        that decodes at this moment.
        """
        sequences, tokens = self._joined(view, now)
        return _tbt_s(view, sequences + 1, tokens + num_tokens)

    def tbt_at_s(
        self, view: InstanceView, num_tokens: int, now: float, at_s: float, stay_s: float
    ) -> float:
        """Return the longest gap of a request that joins the batch at `at_s` and decodes for
        `stay_s`, the mean, on the whole.
        """
        self._note(*self._joined(view, now))
        return max(
            self._tbt_of_s(view, num_tokens, (now, at_s, at_s + share * stay_s), stay_s)
            for share in AHEAD
        )

    def _tbt_of_s(
        self, view: InstanceView, num_tokens: int, times: tuple[float, float, float], stay_s: float
    ) -> float:
        """Return the gap that one who joins at the second of `times` (now, then, later) meets at
        the third.
        """
        now, at_s, then_s = times
        pace = _tokens_per_s(view)
        sequences, tokens = 1.0, num_tokens + pace * (then_s - at_s)
        new_sequences = new_tokens = 0.0
        for stay in self._of(view):
            if stay.joined:
                age_s = now - stay.ready_s
                chance = _remains((age_s + then_s - now) / stay_s) / _remains(age_s / stay_s)
                sequences += chance
                tokens += chance * (stay.num_tokens + pace * (age_s + then_s - now))
            elif (start_s := max(stay.ready_s, now)) <= at_s:  # overdue: now at the earliest
                chance = _remains((then_s - start_s) / stay_s)
                new_sequences += chance
                new_tokens += chance * (stay.num_tokens + pace * (then_s - start_s))
        renewed = 1 - _remains((at_s - now) / stay_s)
        sequences += max(new_sequences, renewed * self._sequences.value)
        tokens += max(new_tokens, renewed * self._tokens.value)
        return _tbt_s(view, max(1, round(sequences)), round(tokens))

    def _joined(self, view: InstanceView, now: float) -> tuple[int, int]:
        """Return the sequences that decode now, and their tokens."""
        pace = _tokens_per_s(view)
        joined = [stay for stay in self._of(view) if stay.joined]
        tokens = sum(stay.num_tokens + pace * (now - stay.ready_s) for stay in joined)
        return len(joined), round(tokens)

    def _note(self, num_sequences: int, num_tokens: int) -> None:
        """Remember how full decode workers have been lately."""
        self._sequences.add(num_sequences)
        self._tokens.add(num_tokens)

    @property
    def num_expected(self) -> int:
        """Requests that have not left."""
        return len(self._worker_of)

    def _of(self, view: InstanceView) -> list[_Stay]:
        return list(self._stays.get(view.worker_id, {}).values())


def _remains(age: float) -> float:
    """Return the share of requests that decode for longer than `age` times the mean; a few go on
    and on.
    """
    return max(1.0 - age / 2, MIN_REMAINING)


def _tokens_per_s(view: InstanceView) -> float:
    """Return how fast each sequence grows here now, at most: who was held up grew less."""
    load = view.load
    return 1 / view.cost.tbt_s(max(1, load.num_running), load.num_context_tokens)


def _tbt_s(view: InstanceView, num_sequences: int, num_tokens: int) -> float:
    limit = view.hello.max_num_seqs
    batch = min(num_sequences, limit) if limit else num_sequences
    return view.cost.tbt_s(batch, round(num_tokens * batch / num_sequences))

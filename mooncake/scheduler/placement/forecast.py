"""The forecast of a decode worker's load at the time a request gets there; the TBT limit is
compared with it.

Pure; owned by the Conductor, one for all decode workers. Early rejection by the *current* load
oscillates: while many prompts are being computed, decode looks idle and all requests are accepted.
Then they all arrive, and no further request is accepted (arXiv 2407.00079, section 7.3). So
requests that will have arrived
by then are added, and those that will have ended are removed, each by its probability: output
lengths are taken to be uniform up to twice the mean. Requests that have not arrived yet but will
overtake a long prompt on the way to decode are expected at the recent rate; otherwise the forecast
for a far moment would always be an empty worker, and too many long prompts would be accepted.

Every sequence grows by a token per step, so a batch of young sequences becomes slower: the limit is
compared with the worst gap of a request's stay, not with its first step alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake.engine.cost import RunningMean
from mooncake.scheduler.placement.views import InstanceView

MIN_REMAINING = 0.05
STAY_SHARES = (0.0, 0.25, 0.5)
"""The moments of a request's stay (1 = the mean) that are examined. Later moments have less load:
half of a batch that is full now has left at 1.
"""
AVERAGE_WINDOW = 256
"""Placements over which the usual load of a decode worker is averaged."""


@dataclass(slots=True)
class _Stay:
    """The time of one request on a decode worker."""

    worker_id: str
    num_tokens: int
    """Tokens at placement; the number grows during decoding."""
    ready_s: float
    """When it starts to decode: first predicted, then measured."""
    joined: bool = False


class DecodeForecast:
    """Predicts gaps between tokens from the requests that decode now or will decode."""

    def __init__(self) -> None:
        self._stays: dict[str, dict[str, _Stay]] = {}
        """Worker id -> request id -> stay."""
        self._worker_of: dict[str, str] = {}
        self._sequences = RunningMean(0.0, AVERAGE_WINDOW)
        self._tokens = RunningMean(0.0, AVERAGE_WINDOW)

    def add(self, request_id: str, worker_id: str, num_tokens: int, ready_s: float) -> None:
        """Add a placed request that is predicted to start decoding at `ready_s`."""
        stay = _Stay(worker_id, num_tokens, ready_s)
        self._stays.setdefault(worker_id, {})[request_id] = stay
        self._worker_of[request_id] = worker_id

    def on_joined(self, request_id: str, now: float) -> None:
        """Record that a request decodes from now on."""
        worker_id = self._worker_of.get(request_id)
        if worker_id is not None:
            stay = self._stays[worker_id][request_id]
            stay.ready_s, stay.joined = now, True

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended; repeats change nothing."""
        worker_id = self._worker_of.pop(request_id, None)
        if worker_id is not None:
            stays = self._stays[worker_id]
            del stays[request_id]
            if not stays:
                del self._stays[worker_id]

    def tbt_now_s(self, view: InstanceView, num_tokens: int, now: float) -> float:
        """Return the gap between tokens when one more request of `num_tokens` tokens joins the
        batch that decodes at this moment.
        """
        sequences, tokens = self._joined(view, now)
        return _tbt_s(view, sequences + 1, tokens + num_tokens)

    def tbt_at_s(
        self, view: InstanceView, num_tokens: int, now: float, at_s: float, stay_s: float
    ) -> float:
        """Return the longest gap of a request that joins the batch at `at_s`, when requests decode
        for `stay_s` on average.
        """
        self._average(*self._joined(view, now))
        return max(
            self._tbt_of_s(view, num_tokens, (now, at_s, at_s + share * stay_s), stay_s)
            for share in STAY_SHARES
        )

    def _tbt_of_s(
        self, view: InstanceView, num_tokens: int, times: tuple[float, float, float], stay_s: float
    ) -> float:
        """Return the predicted gap between tokens at `then_s`, for a request that joins at `at_s`.
        times: (now, at_s, then_s).
        """
        now, at_s, then_s = times
        pace = _tokens_per_s(view)
        sequences, tokens = 1.0, num_tokens + pace * (then_s - at_s)
        new_sequences = new_tokens = 0.0
        for stay in self._of(view):
            if stay.joined:
                age_s = now - stay.ready_s
                chance = _share_left((age_s + then_s - now) / stay_s) / _share_left(age_s / stay_s)
                sequences += chance
                tokens += chance * (stay.num_tokens + pace * (age_s + then_s - now))
            elif (start_s := max(stay.ready_s, now)) <= at_s:  # overdue: now at the earliest
                chance = _share_left((then_s - start_s) / stay_s)
                new_sequences += chance
                new_tokens += chance * (stay.num_tokens + pace * (then_s - start_s))
        renewed = 1 - _share_left((at_s - now) / stay_s)
        sequences += max(new_sequences, renewed * self._sequences.value)
        tokens += max(new_tokens, renewed * self._tokens.value)
        return _tbt_s(view, max(1, round(sequences)), round(tokens))

    def _joined(self, view: InstanceView, now: float) -> tuple[int, int]:
        """Return the number of sequences that decode now, and their tokens."""
        pace = _tokens_per_s(view)
        joined = [stay for stay in self._of(view) if stay.joined]
        tokens = sum(stay.num_tokens + pace * (now - stay.ready_s) for stay in joined)
        return len(joined), round(tokens)

    def _average(self, num_sequences: int, num_tokens: int) -> None:
        """Update the averages of the load of decode workers."""
        self._sequences.add(num_sequences)
        self._tokens.add(num_tokens)

    @property
    def num_requests(self) -> int:
        """The number of requests that have not ended."""
        return len(self._worker_of)

    def _of(self, view: InstanceView) -> list[_Stay]:
        return list(self._stays.get(view.worker_id, {}).values())


def _share_left(age: float) -> float:
    """Return the share of requests that decode for longer than `age` times the mean; a few continue
    for very long.
    """
    return max(1.0 - age / 2, MIN_REMAINING)


def _tokens_per_s(view: InstanceView) -> float:
    """Return how fast each sequence grows here now. This is an upper bound: a sequence that was
    held up grew less.
    """
    load = view.load
    return 1 / view.cost.tbt_s(max(1, load.num_running), load.num_context_tokens)


def _tbt_s(view: InstanceView, num_sequences: int, num_tokens: int) -> float:
    limit = view.hello.max_num_seqs
    batch = min(num_sequences, limit) if limit else num_sequences
    return view.cost.tbt_s(batch, round(num_tokens * batch / num_sequences))

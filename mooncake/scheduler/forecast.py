"""How busy a decode worker will be when a request gets there: what the TBT limit is held against.

Pure; owned by the Conductor, one for all decode workers. Early rejection that looks at the load of
*now* swings: while many prompts are being computed decode looks idle and everybody is let in, then
they all arrive there and nobody is (arXiv 2407.00079, section 7.3). So requests that will have
arrived by then are added, and those that will have ended are taken off, each by its chance: outputs
are taken to be of any length up to twice the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake.scheduler.views import InstanceView

MIN_REMAINING = 0.05


@dataclass(slots=True)
class _Stay:
    """One request's time on a decode worker."""

    worker_id: str
    num_tokens: int
    ready_s: float
    """When it starts to decode: predicted, then seen."""
    joined: bool = False


class DecodeForecast:
    """The requests that decode, and those that will."""

    def __init__(self) -> None:
        self._stays: dict[str, dict[str, _Stay]] = {}
        """Worker id -> request id -> stay."""
        self._worker_of: dict[str, str] = {}

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

    def tbt_now_s(self, view: InstanceView, num_tokens: int) -> float:
        """Return the gap between tokens with one more request of `num_tokens` tokens in the batch
        that decodes at this moment.
        """
        joined = [stay.num_tokens for stay in self._of(view) if stay.joined]
        return _tbt_s(view, len(joined) + 1, sum(joined) + num_tokens)

    def tbt_at_s(
        self, view: InstanceView, num_tokens: int, now: float, at_s: float, stay_s: float
    ) -> float:
        """Return the same for the batch expected at `at_s`, when a request decodes for `stay_s` on
        the whole.
        """
        sequences, tokens = 1.0, float(num_tokens)
        for stay in self._of(view):
            # One that is overdue starts now at the earliest.
            start_s = stay.ready_s if stay.joined else max(stay.ready_s, now)
            if start_s <= at_s:
                chance = _remains((at_s - start_s) / stay_s)
                chance /= _remains(max(0.0, now - start_s) / stay_s)
                sequences += chance
                tokens += chance * stay.num_tokens
        return _tbt_s(view, max(1, round(sequences)), round(tokens))

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


def _tbt_s(view: InstanceView, num_sequences: int, num_tokens: int) -> float:
    limit = view.hello.max_num_seqs
    batch = min(num_sequences, limit) if limit else num_sequences
    return view.cost.tbt_s(batch, round(num_tokens * batch / num_sequences))

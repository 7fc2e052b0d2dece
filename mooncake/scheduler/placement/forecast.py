"""What a request will meet at its workers: the load of a decode worker at the time it gets there
(`DecodeForecast`), with which the TBT limit is compared; and the time of its first token at a
worker that plans its steps for limits or targets (`planned_ttft_s`).

Pure; owned by the Conductor. Early rejection by the *current* load
oscillates: while many prompts are being computed, decode looks idle and all requests are accepted.
Then they all arrive, and no further request is accepted (arXiv 2407.00079, section 7.3). So
requests that will have arrived
by then are added, and those that will have ended are removed, each by its probability: output
lengths are taken to be uniform up to twice the mean. Requests that have not arrived yet but will
overtake a long prompt on the way to decode are expected at the recent rate; otherwise the forecast
for a far moment would always be an empty worker, and too many long prompts would be accepted.

Every sequence grows by a token per step, so a batch of young sequences becomes slower: the limit is
compared with the worst gap of a request's stay, not with its first step alone.

A first token is found by simulating the steps as the worker's engine plans them (`engine.outlook`),
for the chosen workers of a request only. The facts about a worker are a little old: prompts are as
far as the last report says, and streams are assumed to have had a token in each usual step since
their first. All requests are treated as those of one tenant and class.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mooncake.base import ConfigError, Role, WorkerHello
from mooncake.engine.config import EngineConfig
from mooncake.engine.cost import RunningMean
from mooncake.engine.outlook import OpenPrompt, OpenStream, first_token_s
from mooncake.engine.prompt_time import Allowance
from mooncake.scheduler.placement.views import InstanceView
from mooncake.scheduler.placement.worker_choice import PrefillOption

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
    """Predicts gaps between tokens from the requests that decode now or will decode: one for all
    decode workers.
    """

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


FEW = 16
"""The most sequences of a worker whose steps are always simulated: this takes little time, and
tells how far the present step is.
"""
MANY = 256
"""The steps of a worker with more sequences are never simulated: each placement would look at all
of them, and `outlook.MOST_WORK` would end it after few steps.
"""


def planned_ttft_s(
    option: PrefillOption, overtaken: Collection[str], usual_output: float, now: float
) -> float | None:
    """Return the predicted TTFT of a prompt that takes `option` now. None: its worker plans for no
    limits, or it has too many sequences, or many that they do not touch.

    overtaken: the requests whose prompts it goes before. usual_output: the tokens of an answer.
    """
    view = option.view
    config = planned_for(view.hello)
    num_sequences = view.num_sequences()
    if config is None or num_sequences > MANY:
        return None
    if num_sequences > FEW and _changes_nothing(config, option):
        return None
    usual_output = max(1.0, usual_output) if view.role is Role.DECODE else 1.0
    streams = [] if view.role is Role.PREFILL else list(view.open_streams())
    usual_s = view.cost.streams_s(max(1, len(streams)), view.num_context_tokens())
    began_s = _began_s(config, view, len(streams), usual_s, now)
    asked = OpenPrompt(
        since_s=now,
        num_tokens=option.num_new_tokens,
        num_before=option.num_cached_blocks * view.hello.block_tokens,
        num_output=usual_output,
        ready_s=now + option.fetch_s,
    )
    at_s = first_token_s(
        config,
        view.cost,
        [
            _stream(share.num_context_tokens, (began_s - first_s) / usual_s, usual_output, began_s)
            for share, first_s in streams
        ],
        [
            OpenPrompt(
                since_s=share.placed_s,
                num_tokens=share.num_prefill_tokens - computed,
                num_before=share.num_reused_tokens + computed,
                num_output=usual_output,
                ready_s=share.placed_s,
                is_running=computed > 0,
            )
            for share, computed in view.open_prompts()
            if share.request_id not in overtaken
        ],
        asked,
        now,
        began_s,
    )
    return at_s - now


def planned_for(hello: WorkerHello) -> EngineConfig | None:
    """Return the limits of a worker's engine, as far as its steps are planned by them. None: it has
    none, it says some with which no engine runs, or it is a pipeline: its steps are not simulated.
    """
    if hello.num_stages > 1 or (hello.max_gap_s is None and hello.first_token_s is None):
        return None
    try:
        return EngineConfig(
            num_blocks=max(1, hello.num_blocks),
            max_num_seqs=hello.max_num_seqs,
            max_batched_tokens=hello.max_batched_tokens,
            max_chunk_tokens=hello.max_batched_tokens,
            max_model_len=1,
            max_waiting=1,
            max_gap_s=hello.max_gap_s,
            max_gap_is_target=hello.max_gap_is_target,
            first_token_s=hello.first_token_s,
        )
    except ConfigError:
        return None


def _changes_nothing(config: EngineConfig, option: PrefillOption) -> bool:
    """Return whether the worker computes all prompts in order and in whole chunks: all are in time,
    and a whole chunk beside all streams keeps the limit on gaps.
    """
    view = option.view
    if config.first_token_s is not None and option.ttft_s > config.first_token_s:
        return False
    num_streams = view.num_sequences() - view.num_prompts()
    if config.max_gap_s is None or view.role is Role.PREFILL or num_streams <= 0:
        return True
    step_s = view.cost.beside_s(num_streams, view.num_context_tokens())
    most, before = config.max_chunk_tokens, option.num_cached_blocks * view.hello.block_tokens
    chunk_s = view.cost.step_s(min(most, option.num_new_tokens), before, 1)
    return step_s + chunk_s - view.cost.coefficients[0] <= config.max_gap_s


def _began_s(
    config: EngineConfig, view: InstanceView, num_streams: int, usual_s: float, now: float
) -> float:
    """Return when the present step began, or about. A worker whose prompts have not got on for
    longer than a step takes computes only streams.
    """
    if view.num_prompts():
        longest_s = view.cost.step_s(config.max_chunk_tokens, 0, 1) + usual_s
        if now - longest_s <= view.step_began_s or not num_streams:
            return min(now, max(view.step_began_s, now - longest_s))
    return now - usual_s / 2 if num_streams else now


def _stream(num_before: int, num_tokens: float, usual_output: float, now: float) -> OpenStream:
    """Return a stream that has generated this many tokens. Output lengths are taken to be uniform
    up to twice the usual one.
    """
    count = max(1, round(num_tokens))
    left = max(1.0, usual_output - count / 2)
    return OpenStream(num_before + count, count, left, Allowance(last_s=now))

"""The self-profile times a few steps of known size at start, so that placement need not guess.

It uses the runner as the engine will, before the engine gets it. It leaves only meaningless data in
pages that no cache knows. `mooncake profile` times more steps, and tells how well the Conductor's
cost model fits the times.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from mooncake.base import (
    Clock,
    ConfigError,
    CostSample,
    GenerateRequest,
    InternalError,
    Role,
    SamplingParams,
    pack_tokens,
)
from mooncake.engine.config import EngineConfig
from mooncake.engine.cost import StepCostModel
from mooncake.engine.plan import PolledRunner, StepPlan, StepResult, StepSlot
from mooncake.engine.sequence import Sequence as EngineSequence

BUDGET_S = 2.0
"""No further step is started after this long; the first two always run."""
NUM_PASSES = 2
"""Passes over all shapes, if there is time. Many costs are paid only once (a weight's first touch,
the allocator's first block of a size), so the shorter of two runs counts.
"""
TELL_S = 30.0
"""A step without progress is logged this often."""
NUM_TOKENS = 97
"""Distinct tokens of the profile's prompts; every vocabulary has this many."""

Shape = tuple[int, int, int]
"""(sequences, new tokens of each, tokens each has in its KV before)"""

PREFILL_SHAPES: tuple[Shape, ...] = (
    (1, 32, 0), (1, 256, 0), (1, 64, 512), (1, 512, 0), (1, 256, 1024), (1, 64, 2048),
    (1, 512, 2048), (1, 2048, 0),
)  # fmt: skip
DECODE_SHAPES: tuple[Shape, ...] = (
    (1, 1, 64), (8, 1, 128), (1, 128, 0), (16, 1, 64), (1, 1, 1024), (1, 64, 1024), (4, 1, 1024),
    (8, 1, 2048), (1, 512, 0),
)  # fmt: skip
"""Small ones first: a large model has no time for the rest, and its costs are clear without
them.
"""
PROMPTS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of new tokens in a step of one prompt."""
PREFIXES = (0, 512, 2048, 8192, 32768)
"""Numbers of tokens that are cached before them."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of sequences in a decode step."""
CONTEXTS = (64, 512, 2048, 8192, 32768)
"""Numbers of tokens that each of these sequences has."""
ROLES = (Role.PREFILL, Role.DECODE)
MIN_SAMPLES = 6
_log = logging.getLogger(__name__)


def shapes_for(role: Role, config: EngineConfig) -> list[Shape]:
    """Return the steps to time for a worker of `role`: those that fit its limits."""
    return fitting(PREFILL_SHAPES if role is Role.PREFILL else DECODE_SHAPES, config)


def fitting(shapes: Iterable[Shape], config: EngineConfig) -> list[Shape]:
    """Return the steps that the limits and pages of an engine allow."""
    return [
        (sequences, new, before)
        for sequences, new, before in shapes
        if sequences * config.num_pages(new + before) <= config.num_blocks
        and sequences <= config.max_num_seqs
        and sequences * new <= config.max_batched_tokens
        and new + before <= config.max_model_len
    ]


def profile(
    runner: PolledRunner,
    shapes: Sequence[Shape],
    config: EngineConfig,
    clock: Clock,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[CostSample]:
    """Run `shapes` one after the other, then again. Return the shorter time of each.

    The first one is run once before, untimed. So if there is no time for a second pass, part of the
    first-run cost is already paid. `progress` gets how many steps have ended, and how many there
    are at most.

    Raises:
        InternalError: a step failed, or made no progress for as long as an engine's first steps
            may.
    """
    if not shapes:
        return []
    started_s = clock.now()
    best: dict[int, float] = {}
    numbers = [0, *list(range(len(shapes))) * NUM_PASSES]
    plans = _plans([shapes[number] for number in numbers], config)
    for turn, (number, plan) in enumerate(zip(numbers, plans, strict=True)):
        if turn > 2 and clock.now() - started_s > BUDGET_S:
            break
        progress(turn, len(numbers))
        seconds = _run(runner, plan, config.first_step_timeout_s)
        last = plan
        if turn > 0:
            best[number] = min(seconds, best.get(number, seconds))
    _run(runner, _closing(last), config.first_step_timeout_s)
    return [_sample(shapes[number], seconds) for number, seconds in best.items()]


def _sample(shape: Shape, seconds: float) -> CostSample:
    sequences, new, before = shape
    sample = CostSample(sequences * new, sequences * before, sequences, seconds)
    return sample.of_streams() if new == 1 else sample


def _plans(shapes: Sequence[Shape], config: EngineConfig) -> Iterator[StepPlan]:
    """Yield a step for each shape; each ends the sequences of the one before."""
    ids = count(-1, -1)  # ids that the engine never uses
    ended: list[int] = []
    for number, (sequences, new, before) in enumerate(shapes):
        starts: list[EngineSequence] = []
        slots: list[StepSlot] = []
        pages_each = config.num_pages(new + before)
        for index in range(sequences):
            sequence_id = next(ids)
            first = index * pages_each
            tokens = _tokens(index, before + new)
            request = GenerateRequest(
                request_id="",
                prompt=pack_tokens(tokens),
                sampling=SamplingParams(temperature=0.0),
            )
            starts.append(EngineSequence(sequence_id, request))
            slots.append(
                StepSlot(
                    sequence_id=sequence_id,
                    start=before,
                    tokens=tokens[before:],
                    pages=list(range(first, first + pages_each)),
                    sample=True,
                )
            )
        yield StepPlan(step_id=-1 - number, starts=starts, slots=slots, ended=ended)
        ended = [start.sequence_id for start in starts]


def _tokens(index: int, count: int) -> list[int]:
    """Return tokens that differ within a sequence and between sequences. Equal tokens would all be
    routed to the same few experts, and a batch would look cheaper than it is.
    """
    return [1 + (37 * index + 31 * position) % NUM_TOKENS for position in range(count)]


def _closing(last: StepPlan) -> StepPlan:
    """Return a one-token step that ends what `last` began, except the one sequence that it
    needs.
    """
    start = last.starts[0]
    ended = [other.sequence_id for other in last.starts[1:]]
    slot = last.slots[0]
    again = StepSlot(
        sequence_id=start.sequence_id, start=slot.start, tokens=slot.tokens[:1], pages=slot.pages,
        sample=False,
    )  # fmt: skip
    return StepPlan(step_id=last.step_id - 1, starts=[], slots=[again], ended=ended)


def _run(runner: PolledRunner, plan: StepPlan, limit_s: float) -> float:
    """Return how long a step took. It may compile kernels, which takes minutes on a GPU."""
    runner.submit(plan)
    poller = select.poll()
    poller.register(runner.fileno(), select.POLLIN)
    stalled_s = 0.0
    while stalled_s < limit_s:
        if not poller.poll(TELL_S * 1000):
            stalled_s += TELL_S
            _log.warning(
                "a step of the self-profile has taken %.0f s without progress: the first of its "
                "size may compile kernels, which `mooncake compile` does before a start", stalled_s,
            )  # fmt: skip
            continue
        stalled_s = 0.0
        for event in runner.poll():
            if isinstance(event, StepResult):
                if event.error is not None:
                    raise InternalError(f"the self-profile's step failed: {event.error}")
                return event.seconds
    raise InternalError(
        f"the self-profile's step made no progress for {limit_s:.0f} s, which is ten times "
        "`step-timeout`"
    )


def shapes_within(role: Role, config: EngineConfig) -> list[Shape]:
    """Return the steps of a role that fit an engine's limits and pages, small ones first."""
    if role is Role.PREFILL:
        wanted = [(1, new, before) for new in PROMPTS for before in PREFIXES]
    else:
        wanted = [(sequences, 1, context) for sequences in BATCHES for context in CONTEXTS]
    return sorted(
        set(fitting(wanted, config)), key=lambda shape: (shape[0] * shape[1], shape[0] * shape[2])
    )


@dataclass(frozen=True)
class Fit:
    """Measured steps and the cost model fitted to them."""

    samples: Sequence[CostSample]
    coefficients: tuple[float, ...]
    """Coefficients of a step with chunks of prompts."""
    stream_coefficients: tuple[float, ...]
    predicted_s: Sequence[float]
    """Prediction for each sample by a model fitted to all the others, so that the error is
    honest.
    """

    @property
    def errors(self) -> list[float]:
        """Relative errors of the predictions."""
        return [
            abs(predicted - sample.seconds) / sample.seconds
            for sample, predicted in zip(self.samples, self.predicted_s, strict=True)
        ]


def fit(samples: Sequence[CostSample]) -> Fit:
    """Fit the Conductor's cost model and predict each sample by a fit to all others.

    Raises:
        ConfigError: there are too few samples.
    """
    if len(samples) < MIN_SAMPLES:
        raise ConfigError(
            f"only {len(samples)} kinds of steps fit into this engine; give it more pages "
            "(--kv-cache-memory-bytes) or a longer --max-model-len"
        )
    predicted = []
    for left_out, sample in enumerate(samples):
        model = StepCostModel([*samples[:left_out], *samples[left_out + 1 :]])
        predicted.append(model.sample_s(sample))
    model = StepCostModel(samples)
    return Fit(samples, model.coefficients, model.stream_coefficients, predicted)

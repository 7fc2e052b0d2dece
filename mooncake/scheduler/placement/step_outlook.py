"""When a placed prompt has its first token at a worker that plans its steps for limits or targets.

Pure. It simulates the steps as the worker's engine plans them (`engine.outlook`), for the chosen
workers of a request only. Its facts about the worker are a little old: prompts are as far as the
last report says, and streams are assumed to have had a token in each usual step since their first.
All requests are treated as those of one tenant and class.
"""

from __future__ import annotations

from collections.abc import Collection

from mooncake.base import ConfigError, Role, WorkerHello
from mooncake.engine.config import EngineConfig
from mooncake.engine.outlook import OpenPrompt, OpenStream, first_token_s
from mooncake.engine.prompt_time import Allowance
from mooncake.scheduler.placement.views import InstanceView
from mooncake.scheduler.placement.worker_choice import PrefillOption

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

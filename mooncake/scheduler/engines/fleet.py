"""Other people's engines, and which of them gets a request: the one whose first token is predicted
first, by what it holds of the prompt and by what it has to compute before. Pure: the caller tells
what it sees of engines, and gives `now`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from mooncake.base import ModelNotFound, Overloaded, Unavailable
from mooncake.base.block_events.engine_events import EngineEvent
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.engines.first_tokens import FirstTokens
from mooncake.scheduler.engines.prefixes import Prompt, PublishedBlocks, SentPrefixes

POLICIES = ("kvcache-centric", "load-balance", "round-robin")
"""The policies of `scheduler.config.POLICIES` that choose among whole engines."""
UNSEEN_FACTOR = 2.0
"""A prompt whose first token nobody sees counts as computed after this many times the prediction:
the answer comes in one piece.
"""
CLOSE = 1.1
"""First tokens that come at most this many times as late as the first one count as equally early.
The engine that runs fewer requests gets the request, then one that has half of the prompt, then the
one that has got fewer so far.
"""
RETRY_S = 1.0


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as `mooncake status` shows it."""

    url: str
    state: str
    """starting, up or down"""
    reason: str
    """Why it is not up."""
    models: list[str]
    prefixes: str
    """How its prefixes are known: "events" or "sent"."""
    num_blocks: int
    """Blocks that it has published and still holds."""
    num_running: int
    """Requests that this gateway has there."""
    num_waiting: int
    """Requests of this gateway there that have no first token yet."""
    num_requests: int
    num_failed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """Tokens of these prompts that the engine had cached, as its answers say, or as placement
    expected where they do not.
    """
    ttft_fit: list[float]
    """Seconds of a first token, of each token to compute, of each request that runs there."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a request goes, and what that is based on."""

    engine: str
    predicted_ttft_s: float
    num_cached_tokens: int
    num_ahead: float
    """Tokens that the engine computes before the first token, the request's own included."""
    num_running: int


@dataclass
class _Running:
    """A request at its engine."""

    engine: int
    prompt: Prompt
    placement: Placement
    placed_s: float
    is_streamed: bool
    waits: bool = True
    """True until its first token comes."""


@dataclass
class _Engine:
    name: str
    state: str = "starting"
    reason: str = "it has not answered yet"
    models: tuple[str, ...] = ()
    publishes: bool = False
    sent: SentPrefixes = field(default_factory=SentPrefixes)
    published: PublishedBlocks = field(default_factory=PublishedBlocks)
    running: dict[str, _Running] = field(default_factory=dict)
    num_requests: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    def cached(self, prompt: Prompt) -> int:
        """Return how many of a prompt's tokens it is expected not to compute."""
        found = self.published.num_tokens(prompt) if self.publishes else None
        if found is None:
            share = self.sent.share(prompt)
        else:  # blocks of running requests are published only once they are computed
            share = max(
                found / prompt.num_tokens,
                self.sent.share(prompt, of_running=not prompt.is_salted),
            )
        return min(int(share * prompt.num_tokens), prompt.num_tokens - 1)

    def num_waiting_tokens(self, now: float) -> float:
        """Return the tokens to compute of requests without a first token."""
        return sum(
            each.prompt.num_tokens - each.placement.num_cached_tokens
            for each in self.running.values()
            if each.waits
            and (
                each.is_streamed
                or now < each.placed_s + UNSEEN_FACTOR * each.placement.predicted_ttft_s
            )
        )


class Fleet:
    """The engines by name, in the given order. Requests are those of this gateway only."""

    def __init__(
        self, names: Sequence[str], config: SchedulerConfig, publishing: Collection[str] = ()
    ) -> None:
        """`publishing`: the engines whose block events are read."""
        self._config = config
        self._engines = [_Engine(name, publishes=name in publishing) for name in names]
        self._index = {name: index for index, name in enumerate(names)}
        self._first_tokens = FirstTokens(len(names))
        self._turn = 0

    # ------------------------------------------------------- what is seen of engines

    def up(self, name: str, models: Sequence[str]) -> None:
        """Note that an engine takes requests for these models."""
        engine = self._engines[self._index[name]]
        engine.state, engine.reason, engine.models = "up", "", tuple(models)

    def down(self, name: str, reason: str) -> None:
        """Note that an engine takes no requests. What it held is forgotten: it may have ended."""
        engine = self._engines[self._index[name]]
        engine.state, engine.reason = "down", reason
        engine.sent.forget()
        engine.published.forget()

    def is_up(self, name: str) -> bool:
        return self._engines[self._index[name]].state == "up"

    def on_events(self, name: str, source: Hashable, events: Iterable[EngineEvent] | None) -> None:
        """Take block events of one of an engine's processes. `None` means that some are lost."""
        published = self._engines[self._index[name]].published
        if events is None:
            published.forget(source)
        else:
            published.apply(source, events)

    def least_loaded(self, model: str | None, tried: Collection[str] = ()) -> str:
        """Return the engine for a small question about `model`, one that is not among `tried`.

        Raises:
            ModelNotFound, Unavailable: there is none.
        """
        if not (able := self._able(model, tried)):
            self._refuse(model)
        return min(able, key=lambda each: len(each.running)).name

    def needs_tokens(self, model: str | None) -> bool:
        """Return whether a prompt's tokens would help to place it: several engines could take it,
        and the blocks of some are known.
        """
        able = self._able(model, ())
        return len(able) > 1 and any(len(each.published) for each in able)

    @property
    def models(self) -> list[str]:
        """The models that engines serve now."""
        return list(dict.fromkeys(name for each in self._engines for name in self._of(each)))

    @property
    def num_up(self) -> int:
        """The number of engines that take requests."""
        return sum(each.state == "up" for each in self._engines)

    # ------------------------------------------------------- requests

    def place(
        self,
        request_id: str,
        prompt: Prompt,
        model: str | None,
        now: float,
        *,
        is_streamed: bool,
        tried: Collection[str] = (),
    ) -> Placement:
        """Choose an engine that serves `model` and is not among `tried`, and count the request as
        running there until `ended`.

        Raises:
            ModelNotFound: no engine serves this model.
            Unavailable: no engine that does takes requests now.
            Overloaded: too many requests run, or the first token would come too late.
        """
        able = self._able(model, tried)
        if not able:
            self._refuse(model)
        if not tried and len(self) >= self._config.max_inflight:
            raise Overloaded(
                f"{len(self)} requests run here (`max-waiting-requests`)", retry_after_s=RETRY_S
            )
        options = [self._option(each, prompt, now) for each in able]
        chosen = self._choose(options, prompt.num_tokens)
        limit_s = self._config.ttft_slo_s
        if not tried and limit_s is not None and chosen.predicted_ttft_s > limit_s:
            raise Overloaded(
                f"the first token would come after {chosen.predicted_ttft_s:.1f} s; the limit is "
                f"{limit_s:.1f} s (`slo-ttft-s`)",
                retry_after_s=max(RETRY_S, chosen.predicted_ttft_s - limit_s),
            )
        index = self._index[chosen.engine]
        engine = self._engines[index]
        engine.sent.begin(prompt)
        engine.running[request_id] = _Running(index, prompt, chosen, now, is_streamed)
        engine.num_requests += 1
        return chosen

    def first_token(self, request_id: str, engine: str, now: float) -> None:
        """Note that the first token of a streamed answer has come."""
        running = self._engines[self._index[engine]].running[request_id]
        if running.waits and running.is_streamed:
            placement = running.placement
            self._first_tokens.observe(
                running.engine, placement.num_ahead, placement.num_running, now - running.placed_s
            )
        running.waits = False

    def ended(
        self,
        request_id: str,
        engine: str,
        *,
        failed: bool = False,
        num_prompt_tokens: int = 0,
        num_cached_tokens: int | None = None,
    ) -> None:
        """Note that a request is no longer at its engine: it has ended, or is tried elsewhere. The
        numbers are those of the engine's own answer.
        """
        at = self._engines[self._index[engine]]
        running = at.running.pop(request_id)
        at.sent.end(running.prompt)
        at.num_failed += failed
        if num_cached_tokens is None:
            num_cached_tokens = running.placement.num_cached_tokens
        at.num_prompt_tokens += num_prompt_tokens
        at.num_cached_tokens += min(num_cached_tokens, num_prompt_tokens)

    def __len__(self) -> int:
        """The number of requests that run."""
        return sum(len(each.running) for each in self._engines)

    def status(self) -> list[EngineStatus]:
        """Return all engines as they are seen now."""
        return [
            EngineStatus(
                url=each.name, state=each.state, reason=each.reason, models=list(each.models),
                prefixes="events" if each.publishes else "sent", num_blocks=len(each.published),
                num_running=len(each.running),
                num_waiting=sum(one.waits for one in each.running.values()),
                num_requests=each.num_requests, num_failed=each.num_failed,
                num_prompt_tokens=each.num_prompt_tokens,
                num_cached_tokens=each.num_cached_tokens,
                ttft_fit=list(self._first_tokens.fit(index)),
            )
            for index, each in enumerate(self._engines)
        ]  # fmt: skip

    def check_integrity(self) -> None:
        """Raise AssertionError if what engines hold is not what requests and events have told."""
        for each in self._engines:
            each.sent.check_integrity()
            each.published.check_integrity()

    # ------------------------------------------------------- choosing

    def _of(self, engine: _Engine) -> tuple[str, ...]:
        return engine.models if engine.state == "up" else ()

    def _able(self, model: str | None, tried: Collection[str]) -> list[_Engine]:
        return [
            each
            for each in self._engines
            if each.state == "up"
            and each.name not in tried
            and (model is None or model in each.models)
        ]

    def _refuse(self, model: str | None) -> NoReturn:
        known = dict.fromkeys(name for each in self._engines for name in each.models)
        if model is not None and known and model not in known:
            raise ModelNotFound(
                f"The model {model[:200]!r} does not exist here; served: {', '.join(known)}",
                param="model",
            )
        num = len(self._engines)
        raise Unavailable(
            f"no engine takes requests now, of {num}; `mooncake status` says why",
            retry_after_s=RETRY_S,
        )

    def _option(self, engine: _Engine, prompt: Prompt, now: float) -> Placement:
        num_cached = engine.cached(prompt)
        num_ahead = engine.num_waiting_tokens(now) + prompt.num_tokens - num_cached
        index, num_running = self._index[engine.name], len(engine.running)
        return Placement(
            engine=engine.name,
            predicted_ttft_s=self._first_tokens.predict(index, num_ahead, num_running),
            num_cached_tokens=num_cached,
            num_ahead=num_ahead,
            num_running=num_running,
        )

    def _choose(self, options: Sequence[Placement], num_tokens: int) -> Placement:
        if self._config.policy == "round-robin":
            self._turn += 1
            return options[self._turn % len(options)]

        if self._config.policy == "load-balance":
            return min(options, key=lambda option: (option.num_running, self._num_got(option)))
        first_s = min(option.predicted_ttft_s for option in options)
        return min(
            (each for each in options if each.predicted_ttft_s <= CLOSE * first_s),
            key=lambda option: (
                option.num_running, 2 * option.num_cached_tokens < num_tokens,
                self._num_got(option),
            ),
        )  # fmt: skip

    def _num_got(self, option: Placement) -> int:
        return self._engines[self._index[option.engine]].num_requests

"""Placement over engines: who is chosen, who is refused, what is counted; and a simulated load of
agents, against round robin.
"""

from __future__ import annotations

import heapq
import random
import statistics
from typing import Any

import pytest

from benchmarks.engine_routing_simulated import SimulatedEngine
from mooncake.base import ModelNotFound, Overloaded, Unavailable, pack_tokens
from mooncake.base.block_events.engine_events import RemovedBlocks, StoredBlocks
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.engines.fleet import Fleet
from mooncake.scheduler.engines.prefixes import Prompt

A, B = "http://a", "http://b"
SIZE = 16


def prompt(seed: int, num_tokens: int = 640, *, known: bool = True, salt: str = "") -> Prompt:
    packed = pack_tokens(random.Random(seed).choices(range(1000), k=num_tokens))
    return Prompt(packed, tokens=packed if known else None, salt=salt)


def fleet(*publishing: str, **settings: Any) -> Fleet:
    made = Fleet([A, B], SchedulerConfig(**settings), publishing)
    made.up(A, ["m"])
    made.up(B, ["m"])
    return made


def place(
    made: Fleet, name: str, what: Prompt, now: float = 0.0, model: str | None = "m", **more: Any
) -> str:
    return made.place(name, what, model, now, is_streamed=True, **more).engine


def serve(made: Fleet, name: str, what: Prompt, seconds: float = 0.1) -> str:
    """Place a request that runs alone, and end it."""
    engine = place(made, name, what)
    made.first_token(name, engine, seconds)
    made.ended(name, engine)
    return engine


def test_a_prompt_goes_where_its_prefix_was_sent() -> None:
    made = fleet()
    assert [serve(made, str(n), prompt(n)) for n in range(4)] == [A, B, A, B]
    assert [serve(made, str(n), prompt(n % 4)) for n in (9, 6, 4, 7)] == [B, A, A, B]
    made.check_integrity()
    assert len(made) == 0


def test_a_prefix_is_worth_a_short_wait_and_no_long_one() -> None:
    made = fleet()
    assert serve(made, "first", prompt(1, 6000), 1.2) == A
    assert serve(made, "other", prompt(2, 600), 0.15) == B
    assert place(made, "short", prompt(3, 640), tried=[B]) == A
    assert place(made, "again", prompt(1, 6000)) == A  # behind it
    assert place(made, "long", prompt(4, 60_000), tried=[B]) == A
    assert place(made, "once more", prompt(1, 6000)) == B


def stored(what: Prompt, tokens: int, seed: int, num_tokens: int = 640) -> StoredBlocks:
    ids = random.Random(seed).choices(range(1000), k=num_tokens)[:tokens]
    return StoredBlocks(
        block_hashes=list(range(seed * 1000, seed * 1000 + tokens // SIZE)), token_ids=ids,
        block_size=SIZE, medium="GPU",
    )  # fmt: skip


def test_events_say_where_a_prefix_is() -> None:
    made = fleet(A, B)
    what = prompt(1)
    made.on_events(B, "p", [stored(what, 320, 1)])
    placed = made.place("1", what, "m", 0.0, is_streamed=True)
    assert (placed.engine, placed.num_cached_tokens) == (B, 320)
    made.ended("1", B)
    made.on_events(B, "p", [RemovedBlocks(block_hashes=list(range(1000, 1020)), medium="GPU")])
    assert made.place("2", what, "m", 0.0, is_streamed=True).num_cached_tokens == 0
    assert [each.num_blocks for each in made.status()] == [0, 0]


def test_events_overrule_what_was_sent_but_for_requests_that_run() -> None:
    made = fleet(A, B)
    made.on_events(A, "p", [stored(prompt(9), 320, 9)])
    what = prompt(1)
    first = made.place("1", what, "m", 0.0, is_streamed=True)
    made.first_token("1", first.engine, 0.2)
    again = made.place("2", what, "m", 0.0, is_streamed=True)
    assert again.engine == first.engine
    assert again.num_cached_tokens == what.num_tokens - 1
    made.ended("1", first.engine)
    made.ended("2", first.engine)
    at_a = made.place("3", what, "m", 0.0, is_streamed=True, tried=[B])
    assert at_a.num_cached_tokens == 0  # the engine has published no block of it


def test_lost_events_and_engines_that_go_down_leave_nothing() -> None:
    made = fleet(A, B)
    for source in ("p", "q"):
        made.on_events(A, source, [stored(prompt(1), 320, 1)])
    made.on_events(A, "p", None)
    assert made.status()[0].num_blocks == 20
    made.down(A, "refused")
    assert (made.status()[0].num_blocks, made.status()[0].state) == (0, "down")
    assert place(made, "1", prompt(1)) == B
    made.check_integrity()


def test_tokens_are_asked_for_only_where_they_help() -> None:
    made = fleet(A)
    assert not made.needs_tokens("m")  # no block is known
    made.on_events(A, "p", [stored(prompt(1), 320, 1)])
    assert made.needs_tokens("m")
    made.down(B, "gone")
    assert not made.needs_tokens("m")  # there is no choice


def test_only_engines_that_have_the_model_are_chosen() -> None:
    made = fleet()
    made.up(B, ["m", "lora"])
    assert place(made, "1", prompt(1), model="lora") == B
    assert {place(made, f"2 {n}", prompt(n), model=None) for n in range(4)} == {A, B}
    assert made.models == ["m", "lora"]
    with pytest.raises(ModelNotFound, match="'x' does not exist here; served: m, lora"):
        place(made, "3", prompt(1), model="x")
    made.down(B, "gone")
    with pytest.raises(Unavailable, match="no engine takes requests now, of 2"):
        place(made, "4", prompt(1), model="lora")
    with pytest.raises(Unavailable):
        made.least_loaded("m", tried=[A])


def test_engines_that_were_tried_are_not_chosen_again() -> None:
    made = fleet()
    assert place(made, "1", prompt(1), tried=[A]) == B
    with pytest.raises(Unavailable):
        place(made, "2", prompt(1), tried=[A, B])


def test_limits_refuse_before_any_work() -> None:
    made = fleet(max_inflight=1)
    place(made, "1", prompt(1))
    with pytest.raises(Overloaded, match="1 requests run here"):
        place(made, "2", prompt(2))
    slow = fleet(ttft_slo_s=1.0)
    with pytest.raises(Overloaded, match=r"would come after .* the limit is 1.0 s") as refused:
        place(slow, "1", prompt(1, 20_000))
    assert refused.value.retry_after_s is not None
    assert len(slow) == 0
    assert place(slow, "2", prompt(1, 20_000), tried=[A]) == B  # it was accepted before


def test_a_prompt_whose_first_token_nobody_sees_does_not_wait_for_ever() -> None:
    made = fleet()
    placed = made.place("1", prompt(1, 6400), "m", 0.0, is_streamed=False)
    busy = [each.num_ahead for each in _options(made, 0.0)]
    later = [each.num_ahead for each in _options(made, 10 * placed.predicted_ttft_s)]
    assert busy[0] == later[0] + 6400
    assert later[0] == later[1]


def _options(made: Fleet, now: float) -> list[Any]:
    return [made._option(each, prompt(99), now) for each in made._engines]


def test_the_counts_are_those_of_the_answers() -> None:
    made = fleet()
    engine = place(made, "1", prompt(1))
    made.ended("1", engine, num_prompt_tokens=700, num_cached_tokens=128)
    engine = place(made, "2", prompt(1))
    made.ended("2", engine, failed=True)
    seen = made.status()[0]
    assert (seen.num_requests, seen.num_failed) == (2, 1)
    assert (seen.num_prompt_tokens, seen.num_cached_tokens) == (700, 128)


@pytest.mark.parametrize("policy", ["round-robin", "load-balance"])
def test_other_policies_spread_requests(policy: str) -> None:
    made = fleet(policy=policy)
    chosen = [place(made, str(n), prompt(1)) for n in range(6)]
    assert sorted(chosen) == [A] * 3 + [B] * 3


# ------------------------------------------------------- a simulated load


def simulate(*publishing: str, policy: str = "kvcache-centric") -> tuple[float, float, float]:
    """Run 12 agents of 8 turns over two engines. Return the part of prompt tokens that was cached,
    and the median and 90th percentile of TTFT.
    """
    made = fleet(*publishing, policy=policy)
    engines = {
        name: SimulatedEngine(
            lambda event, name=name: made.on_events(name, "p", [event]),  # type: ignore[misc]
            num_blocks=1500, token_s=1e-3,
        )
        for name in (A, B)
    }  # fmt: skip
    draw = random.Random(7)
    system = draw.choices(range(1000), k=256)
    turns: list[tuple[float, int, int, list[int]]] = [
        (2.0 * agent, agent, 0, [*system, *draw.choices(range(1000), k=600)]) for agent in range(12)
    ]
    heapq.heapify(turns)
    ends: list[tuple[float, str, str]] = []
    ttfts, cached, total = [], 0, 0
    while turns:
        now, agent, turn, tokens = heapq.heappop(turns)
        while ends and ends[0][0] <= now:
            ended_s, name, engine = heapq.heappop(ends)
            made.first_token(name, engine, ended_s)
            made.ended(name, engine)
        packed = pack_tokens(tokens)
        name = f"{agent}/{turn}"
        placed = made.place(
            name, Prompt(packed, tokens=packed), "m", now, is_streamed=True
        )  # fmt: skip
        first_s, num_cached = engines[placed.engine].compute(tokens, now)
        heapq.heappush(ends, (first_s, name, placed.engine))
        ttfts.append(first_s - now)
        cached, total = cached + num_cached, total + len(tokens)
        if turn < 7:
            longer = [*tokens, *draw.choices(range(1000), k=150)]
            heapq.heappush(turns, (first_s + draw.uniform(2, 4), agent, turn + 1, longer))
    made.check_integrity()
    return cached / total, statistics.median(ttfts), statistics.quantiles(ttfts, n=10)[-1]


def test_agents_find_their_prefixes_and_get_first_tokens_sooner_than_by_round_robin() -> None:
    by_events, by_sent = simulate(A, B), simulate()
    blind = simulate(policy="round-robin")
    for hits, median_s, late_s in (by_events, by_sent):
        assert hits > blind[0] + 0.1
        assert median_s < 0.7 * blind[1]
        assert late_s < blind[2]

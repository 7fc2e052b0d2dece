"""Decides how many prefill and decode replicas the predicted load needs to keep the limits.

Pure; values and `now` in, numbers of replicas out, each with its reason. The simulator and the
gateway run it. It looks at what clients ask for and at the fitted cost models, never at how busy
processors are: a prefill worker near its limit on first tokens may be half idle, and a decode
worker is busy as soon as it has one sequence.

Prefill: prompts come at random, and each needs its predicted seconds. The least number of replicas
is taken with which few prompts wait longer than the limit on first tokens leaves (a queue of
several servers: Erlang's C formula, with the wait scaled for unequal prompts as by Allen and
Cunneen). Decode: as many sequences are open at once as tokens are asked for in the time of one gap
(Little's law), and a replica holds as many as keep the gap inside its limit.

More replicas are wanted at once, fewer when they have been enough for `quiet_s`. None is needed
while nothing is asked for and nothing is open. Batch work is no demand: it fills idle capacity, and
one replica of each role is enough for it. The policy gives no replica up before it has seen
`quiet_s` of the demand.

The gateway counts the demand (`DemandMeter`). Refused requests count too, because with more
replicas they would have been served. Each gateway tells its totals to the others, so that all of
them know the same demand.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mooncake.base import Role
from mooncake.engine.cost import RunningMean, StepCostModel
from mooncake.scheduler.scaling.config import ROLES, ScalingConfig

SHARE_WINDOW = 512
"""Requests over which the share of prompts that is found in caches is averaged."""


class Offered(NamedTuple):
    """Sums over requests."""

    requests: float = 0.0
    prefill_s: float = 0.0
    """Predicted seconds to compute the prompts, without what caches hold."""
    prefill_s2: float = 0.0
    """The sum of the squares of these seconds."""
    output_tokens: float = 0.0
    """Expected tokens of the answers."""
    context_tokens: float = 0.0
    """The sum, over these tokens, of the context that each attends to."""

    def plus(self, other: Offered) -> Offered:
        return Offered(*(a + b for a, b in zip(self, other, strict=True)))

    def since(self, before: Offered) -> Offered:
        """Return what came after `before`. Smaller sums are those of a process that began anew."""
        if self.requests < before.requests:
            return self
        return Offered(*(max(0.0, a - b) for a, b in zip(self, before, strict=True)))


class DemandMeter:
    """Sums up what clients ask this gateway for, and knows the sums of other gateways."""

    def __init__(self) -> None:
        self.total = Offered()
        """What this gateway was asked for since it started."""
        self._taken = Offered()
        self._peers: dict[str, Offered] = {}
        self._taken_of: dict[str, Offered] = {}
        self._cached_share = RunningMean(0.0, SHARE_WINDOW)

    @property
    def has_grown(self) -> bool:
        """True if this gateway was asked for something since the last `take`."""
        return self.total != self._taken

    def offer(
        self,
        num_prompt_tokens: int,
        num_cached_tokens: int | None,
        num_output_tokens: float,
        cost: StepCostModel,
        chunk_tokens: int,
    ) -> None:
        """Count a request. `num_cached_tokens`: None if it was not placed, so that the usual share
        is taken to be cached. `cost`, `chunk_tokens`: of a worker that computes prompts.
        """
        if num_cached_tokens is None:
            num_cached_tokens = round(self._cached_share.value * num_prompt_tokens)
        else:
            self._cached_share.add(num_cached_tokens / max(1, num_prompt_tokens))
        num_new = num_prompt_tokens - num_cached_tokens
        seconds = cost.prefill_s(num_new, num_cached_tokens, chunk_tokens)
        context = num_prompt_tokens + num_output_tokens / 2
        self.total = self.total.plus(
            Offered(1.0, seconds, seconds**2, num_output_tokens, num_output_tokens * context)
        )

    def on_peer(self, gateway_id: str, sums: Sequence[float]) -> None:
        """Take the totals of another gateway. Requests that it had before it was known here do not
        count.
        """
        usable = len(sums) == len(Offered._fields)
        if not usable or not all(math.isfinite(value) and value >= 0 for value in sums):
            return
        self._peers[gateway_id] = Offered(*sums)
        self._taken_of.setdefault(gateway_id, self._peers[gateway_id])

    def forget(self, gateway_id: str) -> None:
        """Forget a gateway that has gone."""
        self._peers.pop(gateway_id, None)
        self._taken_of.pop(gateway_id, None)

    def take(self) -> Offered:
        """Return what all gateways were asked for since the last call."""
        grown, self._taken = self.total.since(self._taken), self.total
        for gateway_id, total in self._peers.items():
            grown = grown.plus(total.since(self._taken_of[gateway_id]))
            self._taken_of[gateway_id] = total
        return grown


CHECK_S = 10.0
"""The demand is looked at this often."""
LEVEL_S = 60.0
"""The demand of so long counts as the present one."""
TREND_S = 150.0
"""The last seconds that are compared with as many before them, to see growth."""
SURE = 2.0
"""Growth counts when it exceeds this many standard deviations of a random number of arrivals."""
MOST_GROWTH = 2.0
"""Demand is predicted to grow to at most this many times the present one."""
SPREAD = 1.0
"""Room is left for this many standard deviations of what comes at random."""
LATE = 0.02
"""The share of prompts that may wait longer than their limit leaves."""
QUEUE_S = 5.0
"""Prompts that wait for so long have too few prefill replicas. Used where no limit on the first
token exists.
"""
SLOWEST = 1.05
"""The slowest tenth of gaps, to which the limit applies, relative to the mean gap."""
LEAST_WAIT = 0.2
"""At least this share of the limit on first tokens is for waiting, however long prompts take."""
MOST_REPLICAS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRoom:
    """How much one decode replica can hold."""

    cost: StepCostModel
    max_num_seqs: int
    num_tokens: int
    """Tokens of KV that fit into its memory."""

    def most(self, context: float, limit_s: float | None) -> int:
        """Return how many sequences of `context` tokens each may decode here at once, inside the
        limit on gaps.
        """
        most = max(1, self.max_num_seqs)
        if self.num_tokens:
            most = max(1, min(most, int(self.num_tokens / max(context, 1.0))))
        if limit_s is None:
            return most
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            if SLOWEST * self.gap_s(middle, context) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low

    def gap_s(self, num_sequences: int, context: float) -> float:
        """Return the predicted gap between tokens."""
        return self.cost.tbt_s(num_sequences, round(num_sequences * context))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The cluster at this moment."""

    num_prefill: int
    """Live replicas that are not about to leave."""
    num_decode: int
    num_open: int
    """Requests that were accepted and have not ended; at least 1 while another gateway has any."""
    queued_s: float
    """Predicted seconds of all prompts that wait at prefill replicas."""
    num_decoding: int
    """Requests that decode, without batch work."""
    room: DecodeRoom | None
    """What a decode replica holds. None: none has been seen yet."""

    def count(self, role: Role) -> int:
        """Return the live replicas of a role."""
        return self.num_prefill if role is Role.PREFILL else self.num_decode


@dataclass(frozen=True, slots=True)
class RoleAdvice:
    """How many replicas of a role there should be."""

    role: Role
    now: int
    wanted: int
    why: str
    counted: frozenset[str] = frozenset()
    """The workers that `now` counts, where they have names."""


@dataclass(frozen=True, slots=True)
class _Need:
    """How many replicas the load of one moment needs, and why."""

    count: float
    why: str


class ReplicaPolicy:
    """Follows the demand and says how many replicas of each role there should be."""

    def __init__(
        self, config: ScalingConfig, ttft_slo_s: float | None, tbt_slo_s: float | None
    ) -> None:
        self.config = config
        self._ttft_slo_s = ttft_slo_s
        self._tbt_slo_s = tbt_slo_s
        self._intervals: deque[tuple[float, float, Offered]] = deque()
        """Begin, end, and what was offered."""
        self._began_s: float | None = None
        self._seen_s: float | None = None
        self._needs: deque[tuple[float, dict[Role, int]]] = deque()
        """What was needed at each moment of the last `quiet_s`."""

    def observe(
        self, offered: Offered, standing: Standing, now: float
    ) -> tuple[RoleAdvice, RoleAdvice]:
        """Take what was offered since the last call, and return the advice for prefill and
        decode.
        """
        if self._seen_s is not None and now > self._seen_s:
            self._intervals.append((self._seen_s, now, offered))
        self._seen_s = now
        while self._intervals and self._intervals[0][1] <= now - 2 * TREND_S:
            self._intervals.popleft()
        self._began_s = now if self._began_s is None else self._began_s
        needs = self._needed(standing, now)
        whole = {role: min(MOST_REPLICAS, math.ceil(need.count)) for role, need in needs.items()}
        kept = whole
        if now < self._began_s + self.config.quiet_s:  # what came before this began is not known
            kept = {role: max(count, standing.count(role)) for role, count in whole.items()}
        self._needs.append((now, kept))
        while self._needs[0][0] < now - self.config.quiet_s:
            self._needs.popleft()
        most = {role: max(counts[role] for _, counts in self._needs) for role in ROLES}
        wanted = self._bounded(most)
        prefill, decode = (
            RoleAdvice(
                role,
                standing.count(role),
                wanted[role],
                needs[role].why + _remark(whole[role], most[role], wanted[role], self.config),
            )
            for role in ROLES
        )
        return prefill, decode

    def _needed(self, standing: Standing, now: float) -> dict[Role, _Need]:
        level, covered_s = self._sum(now - LEVEL_S, now)
        quiet, _ = self._sum(now - self.config.quiet_s, now)
        if not level.requests and not standing.num_open:
            why = "no requests" if not quiet.requests else "no requests lately"
            return {role: _Need(0.0, why) for role in ROLES}
        growth = self._growth(now)
        prefill = self._prefill(level, covered_s, growth, standing)
        decode = self._decode(level, covered_s, growth, standing)
        if self.config.prefill.most == 0:  # decode replicas compute the prompts too
            decode = _Need(decode.count + prefill.count, f"{decode.why}; prompts: {prefill.why}")
            prefill = _Need(0.0, "decode replicas compute the prompts")
        return {Role.PREFILL: prefill, Role.DECODE: decode}

    def _prefill(
        self, level: Offered, covered_s: float, growth: float, standing: Standing
    ) -> _Need:
        if not level.prefill_s:
            return _Need(1.0, "requests are open")
        mean_s = level.prefill_s / level.requests
        uneven_s = level.prefill_s2 / level.prefill_s  # what is left, on average, is half of it
        if self._ttft_slo_s is None:
            wait_s = QUEUE_S
        else:
            wait_s = max(LEAST_WAIT * self._ttft_slo_s, self._ttft_slo_s - uneven_s)
        busy = growth * level.prefill_s / covered_s
        busy += SPREAD * math.sqrt(level.prefill_s2) / covered_s
        behind_s = standing.queued_s - wait_s * standing.num_prefill
        busy += max(0.0, behind_s) / max(self.config.start_s, CHECK_S)
        count = least_servers(busy, mean_s, uneven_s / 2, wait_s)
        return _Need(
            count,
            f"prompts keep {busy:.2f} replicas busy{_grown(growth)}; {LATE:.0%} of them may wait "
            f"longer than {wait_s:.1f} s",
        )

    def _decode(self, level: Offered, covered_s: float, growth: float, standing: Standing) -> _Need:
        room = standing.room
        if not level.output_tokens or room is None:
            return _Need(1.0, "requests are open")
        context = level.context_tokens / level.output_tokens
        most = room.most(context, self._tbt_slo_s)
        gap_s = room.gap_s(most, context)
        expected = growth * level.output_tokens / covered_s * gap_s
        at_once = max(expected + SPREAD * math.sqrt(expected), standing.num_decoding)
        return _Need(
            max(1.0, at_once / most),
            f"{at_once:.0f} sequences at once{_grown(growth)}; a replica with {most} has gaps of "
            f"{1e3 * gap_s:.0f} ms",
        )

    def _growth(self, now: float) -> float:
        """Return how many times the present demand is expected when a replica that starts now will
        serve. It is 1 unless the number of requests has grown for sure.
        """
        if not self._intervals or self._intervals[0][0] > now - 2 * TREND_S + CHECK_S:
            return 1.0  # too little has been seen
        before, before_s = self._sum(now - 2 * TREND_S, now - TREND_S)
        later, later_s = self._sum(now - TREND_S, now)
        if later.requests - before.requests <= SURE * math.sqrt(before.requests + later.requests):
            return 1.0
        rate, former = later.requests / later_s, before.requests / before_s
        ahead_s = TREND_S / 2 + self.config.start_s + CHECK_S
        growth = 1 + (rate - former) / TREND_S * ahead_s / rate
        return min(MOST_GROWTH, growth)

    def _sum(self, begin: float, end: float) -> tuple[Offered, float]:
        """Return what was offered in the intervals that end after `begin` and until `end`, and
        their seconds.
        """
        total, seconds = Offered(), 0.0
        for begun, ended, offered in self._intervals:
            if begin < ended <= end:
                total = total.plus(offered)
                seconds += ended - begun
        return total, max(seconds, CHECK_S)

    def _bounded(self, needed: dict[Role, int]) -> dict[Role, int]:
        """Return the numbers inside all bounds. Where the total is too small, the role that is
        shortest of replicas gets the next one.
        """
        config, total = self.config, self.config.total
        wanted = {role: config.bounds(role).clamp(needed[role]) for role in ROLES}
        if total is None or sum(wanted.values()) <= total:
            return wanted
        given = {role: config.bounds(role).least for role in ROLES}
        while sum(given.values()) < total:
            short = [role for role in ROLES if given[role] < wanted[role]]
            given[min(short, key=lambda role: given[role] / wanted[role])] += 1
        return given


def least_servers(busy: float, mean_s: float, left_s: float, wait_s: float) -> int:
    """Return the least number of servers with which at most `LATE` of the jobs wait longer than
    `wait_s`.

    busy: seconds of work that come in a second. mean_s: those of one job. left_s: what is left of
    the job that a server is at, on average. The chance to wait is Erlang's C formula; a job that
    waits does so for an exponential time, as with exponential jobs but scaled to `left_s`.
    """
    if busy <= 0:
        return 0
    count = max(1, math.floor(busy) + 1)
    while count < MOST_REPLICAS:
        late = erlang_c(count, busy)
        late *= math.exp(-(count - busy) * wait_s / max(left_s, mean_s / 2, 1e-9))
        if late <= LATE:
            break
        count += 1
    return count


def erlang_c(count: int, busy: float) -> float:
    """Return the chance that a job finds all of `count` servers at work, for busy < count."""
    blocked = 1.0
    for servers in range(1, count + 1):
        blocked = busy * blocked / (servers + busy * blocked)
    return blocked / (1 - busy / count * (1 - blocked))


def _grown(growth: float) -> str:
    return f" (grown to {growth:.2f} times)" if growth > 1 else ""


def _remark(needed: int, most: int, wanted: int, config: ScalingConfig) -> str:
    """Return why another number is wanted than the one that is needed now."""
    told = ""
    if most > needed:
        told += f"; needed now: {needed}, within the last {config.quiet_s:g} s: {most}"
    if wanted > most:
        told += f"; at least {wanted} are kept"
    elif wanted < most:
        told += f"; {most} are needed, and the bounds allow {wanted}"
    return told

"""A run of all checks: one verdict each, whatever the server does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

from mooncake.bench.conformance import client_checks, process_checks
from mooncake.bench.conformance.complaints import CHECKS, COMPLAINTS
from mooncake.bench.conformance.target import Target
from mooncake.bench.conformance.verdict import Failed, NotPossible, Verdict

CHECK_DEADLINES = 40
"""A check is given up after this many deadlines of a request."""

Work = Callable[[Target], Awaitable[str]]
"""A check returns what it saw. It raises Failed or NotPossible."""

WORK: dict[str, Work] = {
    "aborts": client_checks.aborts,
    "kill-prefill": process_checks.killed_prefill,
    "kill-decode": process_checks.killed_decode,
    "stop-prefill": process_checks.stopped_prefill,
    "handles": client_checks.handles,
    "cold-warm": client_checks.cold_and_warm,
    "one-end": client_checks.one_end_each,
    "refusals": client_checks.refusals,
    "replace-prefill": process_checks.replaced_prefill,
    "short-prompts": client_checks.short_prompts,
    "transport": client_checks.transport,
    "same-answers": client_checks.same_answers,
    "rollout": process_checks.rollout,
    "hits": client_checks.hits,
}


async def run(target: Target, wanted: Collection[str]) -> AsyncIterator[Verdict]:
    """Run the checks of these ids and yield each verdict as it is known. When all are wanted, one
    more verdict follows for each complaint that no check from outside can see.
    """
    for name in CHECKS:
        if name in wanted:
            yield await verdict_of(target, name, WORK[name])
    if set(wanted) == set(CHECKS):
        for complaint in COMPLAINTS:
            if complaint in CHECKS.values():
                continue
            yield Verdict(
                check=complaint, complaint=complaint, result="not possible here",
                why="it cannot be seen from outside a server; tests of its code look at it",
            )  # fmt: skip


async def verdict_of(target: Target, name: str, work: Work) -> Verdict:
    complaint = CHECKS[name]
    try:
        async with asyncio.timeout(CHECK_DEADLINES * target.deadline_s):
            evidence = await work(target)
    except NotPossible as reason:
        return Verdict(check=name, complaint=complaint, result="not possible here", why=str(reason))
    except (Failed, TimeoutError) as reason:
        why = str(reason) or "a step of the check hangs"
        return Verdict(check=name, complaint=complaint, result="fail", why=why)
    return Verdict(check=name, complaint=complaint, result="pass", evidence=evidence)

"""Checks that kill, stop and replace the server's processes while clients stream."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass

from mooncake.bench.conformance.endpoint import Answer
from mooncake.bench.conformance.processes import Processes, Use, use_of
from mooncake.bench.conformance.target import PROBE_TOKENS, Target, difference
from mooncake.bench.conformance.verdict import Failed, NotPossible

NUM_STREAMS = 6
BEGUN_TOKENS = 4
ANSWER_TIMES = 8
"""How many times as long as others the answers in mid-stream are: they must outlast the check."""
FRESH_S = 0.5
"""Seconds between new prompts that are sent while a process stands still."""
SPARE_BYTES = 64 * 2**20
SPARE_DESCRIPTORS = 16
SPARE_MAPPINGS = 64
"""How much a process may grow in all replacements after the second."""


@dataclass(frozen=True)
class _Calm:
    """Requests, and their answers from a time when nothing was disturbed."""

    prompts: list[list[int]]
    answers: list[Answer]
    kv: float | None
    """The KV in use before; None: the server does not say."""


async def _calm(target: Target) -> _Calm:
    try:
        kv = await target.settled_kv()
    except NotPossible:
        kv = None
    prompts = [target.prompt(target.prompt_tokens) for _ in range(NUM_STREAMS)]
    tokens = ANSWER_TIMES * target.output_tokens
    answers = await asyncio.gather(*(target.whole(prompt, tokens) for prompt in prompts))
    return _Calm(prompts, answers, kv)


def _processes(target: Target) -> Processes:
    if target.processes is None:
        raise NotPossible("this check ends processes of the server: allow it with `processes`")
    return target.processes


async def _streams(target: Target, calm: _Calm) -> list[asyncio.Task[Answer]]:
    """Send all requests, and one more with a new prompt. Return once all but the new one have
    begun.
    """
    begun = [asyncio.Event() for _ in calm.prompts]
    tokens = ANSWER_TIMES * target.output_tokens

    def asked(prompt: list[int], event: asyncio.Event) -> asyncio.Task[Answer]:
        def on_token(count: int) -> None:
            if count >= BEGUN_TOKENS:
                event.set()

        return asyncio.create_task(target.main.complete(prompt, tokens, on_token))

    tasks = [asked(prompt, event) for prompt, event in zip(calm.prompts, begun, strict=True)]
    async with asyncio.timeout(target.deadline_s):
        await asyncio.gather(*(event.wait() for event in begun))
    return tasks


async def _ends(target: Target, calm: _Calm, tasks: list[asyncio.Task[Answer]]) -> tuple[int, int]:
    """Wait for all streams; return how many finished and how many failed with an error message.

    Raises:
        Failed: a stream hangs, has no end, or has other tokens than before.
    """
    _, open_ = await asyncio.wait(tasks, timeout=target.deadline_s + target.stop_s)
    for task in open_:
        task.cancel()
    if open_:
        raise Failed(f"{len(open_)} of {len(tasks)} streams hang {target.deadline_s:g} s later")
    answers = [task.result() for task in tasks]
    for wanted, found in zip(calm.answers, answers, strict=True):
        if found.error:
            part = Answer(ids=wanted.ids[: len(found.ids)], text=wanted.text[: len(found.text)])
            if part.tokens != found.tokens:
                raise Failed(f"before its error a stream differs: {difference(part, found)}")
        elif len(found.ends) != 1:
            raise Failed(f"a stream ended with: {found.told}")
        elif found.tokens != wanted.tokens:
            raise Failed(f"a stream differs from the calm one: {difference(wanted, found)}")
    failed = sum(bool(answer.error) for answer in answers)
    return len(answers) - failed, failed


async def _whole_again(target: Target, calm: _Calm) -> str:
    seconds = await target.answers_again(
        calm.prompts[0], Answer(ids=calm.answers[0].ids[:PROBE_TOKENS], text=calm.answers[0].text)
    )
    if calm.kv is None:
        return f"answers {seconds:.1f} s later; KV in use is not told"
    await target.returns_to(calm.kv)
    return f"answers {seconds:.1f} s later; KV in use is {calm.kv:g} again"


async def killed(target: Target, role: str) -> str:
    """A process is killed while clients stream. Each request ends in time, with its own tokens."""
    processes = _processes(target)
    pid = (await processes.of_role(target.main, role))[0]
    calm = await _calm(target)
    tasks = await _streams(target, calm)
    fresh = asyncio.create_task(target.main.complete(target.prompt(target.prompt_tokens), 4))
    processes.signal(pid, signal.SIGKILL)
    finished, failed = await _ends(target, calm, tasks)
    try:
        async with asyncio.timeout(target.deadline_s):
            await fresh
    except TimeoutError:
        raise Failed("a request sent as the process was killed hangs") from None
    await processes.replaced(target.main, role, pid, 2 * target.deadline_s)
    again = await _whole_again(target, calm)
    return f"{finished} streams went on, {failed} failed in words; {again}"


async def killed_prefill(target: Target) -> str:
    """Check `killed` with a prefill process."""
    return await killed(target, "prefill")


async def killed_decode(target: Target) -> str:
    """Check `killed` with a decode process."""
    return await killed(target, "decode")


async def stopped_prefill(target: Target) -> str:
    """Prefill is stopped during a hand-over while new prompts use its pages, and then goes on.

    Every request ends in time. A new prompt that was answered meanwhile gets the same answer again.
    """
    processes = _processes(target)
    pid = (await processes.of_role(target.main, "prefill"))[0]
    calm = await _calm(target)
    first = asyncio.create_task(target.main.complete(target.prompt(4 * target.prompt_tokens), 4))
    await asyncio.sleep(0.05)
    processes.signal(pid, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        fresh, first_s = await _fresh_while(target, begun + target.stop_s)
    finally:
        processes.signal(pid, signal.SIGCONT)
    tasks = await _streams(target, calm)
    finished, failed = await _ends(target, calm, tasks)
    _, hanging = await asyncio.wait([first, *fresh], timeout=target.deadline_s)
    for task in hanging:
        task.cancel()
    if hanging:
        raise Failed(
            f"{len(hanging)} requests that were sent before prefill went on hang "
            f"{target.deadline_s:g} s later"
        )
    answered = {task: prompt for task, prompt in fresh.items() if not task.result().error}
    for task, prompt in answered.items():
        again = await target.whole(prompt, PROBE_TOKENS)
        if again.tokens != task.result().tokens:
            raise Failed(
                "a prompt answered while prefill stood still has another answer afterwards: "
                + difference(task.result(), again)
            )
    later = await _whole_again(target, calm)
    return (
        f"stopped for {target.stop_s:g} s: "
        + ("no new prompt answered" if first_s is None else f"new prompts after {first_s:.1f} s")
        + f", {len(answered)} of {len(fresh)} answered in the end, and again the same; afterwards "
        f"{finished} streams with their own tokens, {failed} failed in words; {later}"
    )


async def _fresh_while(
    target: Target, until_s: float
) -> tuple[dict[asyncio.Task[Answer], list[int]], float | None]:
    """Send new prompts until a time, a few at once. Return them all, each with its coming answer,
    and the seconds until the first was answered.
    """
    begun = time.monotonic()
    fresh: dict[asyncio.Task[Answer], list[int]] = {}
    first_s = None
    while (now := time.monotonic()) < until_s:
        if sum(not task.done() for task in fresh) < NUM_STREAMS:
            prompt = target.prompt(target.prompt_tokens)
            fresh[asyncio.create_task(target.main.complete(prompt, PROBE_TOKENS))] = prompt
        await asyncio.wait(fresh, timeout=min(1.0, until_s - now))
        await asyncio.sleep(min(FRESH_S, max(0.0, until_s - time.monotonic())))
        if first_s is None and any(task.done() and not task.result().error for task in fresh):
            first_s = time.monotonic() - begun
    return fresh, first_s


async def replaced_prefill(target: Target) -> str:
    """Prefill is killed and replaced again and again; decode's memory stays level."""
    processes = _processes(target)
    decode = (await processes.of_role(target.main, "decode"))[0]
    probe = target.prompt(target.prompt_tokens)
    wanted = await target.whole(probe, PROBE_TOKENS)
    uses: list[Use] = []
    for _ in range(target.num_replacements):
        pid = (await processes.of_role(target.main, "prefill"))[0]
        processes.signal(pid, signal.SIGKILL)
        await processes.replaced(target.main, "prefill", pid, 2 * target.deadline_s)
        await target.answers_again(probe, wanted)
        await target.whole(target.prompt(target.prompt_tokens), 4)
        uses.append(use_of(decode))
    first, last = uses[min(1, len(uses) - 1)], uses[-1]
    told = (
        f"{len(uses)} replacements: decode's memory {_change(first, last, 'memory_bytes', 2**20)} "
        f"MiB, descriptors {_change(first, last, 'num_descriptors')}, mappings "
        f"{_change(first, last, 'num_mappings')}"
    )
    if (
        last.memory_bytes - first.memory_bytes > SPARE_BYTES
        or last.num_descriptors - first.num_descriptors > SPARE_DESCRIPTORS
        or last.num_mappings - first.num_mappings > SPARE_MAPPINGS
    ):
        raise Failed(told)
    return told


def _change(first: Use, last: Use, name: str, unit: int = 1) -> str:
    return f"{getattr(first, name) // unit} -> {getattr(last, name) // unit}"


async def rollout(target: Target) -> str:
    """Processes get the signal to end, one after another, while clients stream. No stream
    is cut.
    """
    processes = _processes(target)
    roles = [role for role in ("prefill", "decode") if processes.may_end(role)]
    if not roles:
        raise NotPossible(
            "it ends named processes with SIGTERM: give two of `prefill-pid` or `decode-pid`, or "
            "one with the command that starts another"
        )
    num_ended = num_finished = 0
    for role in roles:
        for pid in await processes.of_role(target.main, role):
            if not processes.may_end(role):
                break
            calm = await _calm(target)
            tasks = await _streams(target, calm)
            processes.signal(pid, signal.SIGTERM)
            finished, failed = await _ends(target, calm, tasks)
            if failed:
                raise Failed(f"{failed} streams were cut as {role} process {pid} ended")
            await processes.ended(role, pid, 2 * target.deadline_s)
            await _whole_again(target, calm)
            num_finished, num_ended = num_finished + finished, num_ended + 1
    return f"{num_ended} processes ended one after another, {num_finished} streams went on"

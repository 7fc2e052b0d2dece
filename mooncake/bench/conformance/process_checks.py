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
"""Answers in mid-stream are so many times as long as others: they must outlast what is done."""
SPARE_BYTES = 64 * 2**20
SPARE_DESCRIPTORS = 16
SPARE_MAPPINGS = 64
"""By how much a process may grow in all replacements after the second."""


@dataclass(frozen=True)
class _Calm:
    """Requests, and the answers that they got while nothing happened."""

    prompts: list[list[int]]
    answers: list[Answer]
    kv: float | None
    """In use before; None: the server does not say."""


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
        raise NotPossible("it ends and stops processes of the server, only with --processes")
    return target.processes


async def _streams(target: Target, calm: _Calm) -> list[asyncio.Task[Answer]]:
    """Send all requests, and one more with a new prompt; return once all but it have begun."""
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
    """Wait for all streams; return how many finished and how many failed in words.

    Raises:
        Failed: one hangs, has no end, or has other tokens than before.
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
    """A process is killed while clients stream: each request ends in time, with its own tokens."""
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
    """`killed` of a prefill process."""
    return await killed(target, "prefill")


async def killed_decode(target: Target) -> str:
    """`killed` of a decode process."""
    return await killed(target, "decode")


async def stopped_prefill(target: Target) -> str:
    """Prefill stands still in the middle of a hand-over, others use the pages, it goes on."""
    processes = _processes(target)
    pid = (await processes.of_role(target.main, "prefill"))[0]
    calm = await _calm(target)
    first = asyncio.create_task(target.main.complete(target.prompt(4 * target.prompt_tokens), 4))
    await asyncio.sleep(0.05)
    processes.signal(pid, signal.SIGSTOP)
    begun, num_during = time.monotonic(), 0
    try:
        while (left := begun + target.stop_s - time.monotonic()) > 0:
            await asyncio.wait([asyncio.create_task(asyncio.sleep(min(left, 1.0)))])
            probe = target.main.complete(calm.prompts[0], PROBE_TOKENS)
            try:
                async with asyncio.timeout(max(0.5, left)):
                    found = await probe
            except TimeoutError:
                continue
            if not found.error and found.tokens != calm.answers[0].tokens[:PROBE_TOKENS]:
                raise Failed("while prefill stands still an answer has other tokens")
            num_during += not found.error
    finally:
        processes.signal(pid, signal.SIGCONT)
    tasks = await _streams(target, calm)
    finished, failed = await _ends(target, calm, tasks)
    try:
        async with asyncio.timeout(target.deadline_s):
            await first
    except TimeoutError:
        raise Failed("the request whose prefill stood still hangs") from None
    again = await _whole_again(target, calm)
    return (
        f"stopped for {target.stop_s:g} s: {num_during} answers meanwhile; afterwards {finished} "
        f"streams with their own tokens, {failed} failed in words; {again}"
    )


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
    """Named processes are told to end, one after another, while clients stream; none is cut."""
    processes = _processes(target)
    roles = [role for role in ("prefill", "decode") if processes.may_end(role)]
    if not roles:
        raise NotPossible(
            "it ends named processes with SIGTERM: give two of --prefill-pid or --decode-pid, or "
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
